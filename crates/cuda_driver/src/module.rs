//! Code on the device.

use crate::error::{Result, check_with, describe};
use crate::{Error, Function, Gpu, sys};
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

/// Loaded kernels. Clones share them; they are unloaded with the last clone and [`Function`].
#[derive(Clone)]
pub struct Module(Arc<Inner>);

struct Inner {
    raw: sys::CUmodule,
    name: String,
    gpu: Gpu,
}

// SAFETY: a module has no thread affinity and is only read after loading.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Module {
    /// Loads a cubin, a fatbinary, or PTX for the driver to compile. `name` is for messages.
    pub fn load(gpu: &Gpu, name: &str, image: &[u8]) -> Result<Self> {
        gpu.make_current()?;
        // The driver knows PTX from a binary by its first bytes, and reads PTX up to a NUL.
        let mut image = image.to_vec();
        image.push(0);
        let mut log = vec![0_u8; 16 << 10];
        let mut keys = [sys::CU_JIT_ERROR_LOG_BUFFER, sys::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len())];
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image ends with a NUL, the options are pairs of which the second is the size of the first.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                image.as_ptr().cast(),
                keys.len() as u32,
                keys.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code != 0 {
            let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            let (error, text) = describe(code);
            return Err(Error::Module { module: name.into(), code, name: error, text, log: log.trim().into() });
        }
        Ok(Self(Arc::new(Inner { raw, name: name.into(), gpu: gpu.clone() })))
    }

    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// The kernel with this entry name.
    pub fn function(&self, kernel: &str) -> Result<Function> {
        let absent = || Error::NoKernel { module: self.0.name.clone(), kernel: kernel.into() };
        let entry = CString::new(kernel).map_err(|_| absent())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is live, the name ends with a NUL; writes one handle.
        match unsafe { sys::cuModuleGetFunction(&raw mut raw, self.0.raw, entry.as_ptr()) } {
            500 => Err(absent()),
            code => {
                check_with(code, || format!("cuModuleGetFunction({kernel})"))?;
                Function::new(raw, kernel, self)
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}
