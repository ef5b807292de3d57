//! The JIT compiler's log.

use super::sys;
use crate::Error;
use crate::error::describe;
use cust::error::CudaError;
use std::ffi::{CStr, c_void};

const LOG_BYTES: usize = 16 << 10;

/// Returns the error of loading `image`, which failed with `error`.
///
/// Loads the image once more, because `cust` can request neither the compiler's log nor the exact error code.
pub(crate) fn load_error(error: CudaError, module: &str, image: &[u8]) -> Error {
    // The driver reads PTX up to a NUL.
    let mut image = image.to_vec();
    image.push(0);
    let mut log = vec![0_u8; LOG_BYTES];
    let mut keys = [sys::CU_JIT_ERROR_LOG_BUFFER, sys::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len())];
    let mut raw = std::ptr::null_mut();
    // SAFETY: the image ends with a NUL. The options are two pairs, the second of which is the size of the first's buffer.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &raw mut raw,
            image.as_ptr().cast(),
            keys.len() as u32,
            keys.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if code == 0 {
        // SAFETY: the module was just loaded and is not used again.
        unsafe { sys::cuModuleUnload(raw) };
    }
    let code = if code == 0 { error as u32 } else { code };
    let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
    let (name, text) = describe(code);
    Error::Module { module: module.into(), code, name, text, log: log.trim().into() }
}
