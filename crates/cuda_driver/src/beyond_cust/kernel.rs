//! Function attributes, and launches with exact error codes.

use super::sys;
use crate::error::{Result, check};
use crate::{LaunchConfig, Stream};
use cust::function::Function;
use std::ffi::{c_int, c_void};

/// Sets the most dynamic shared memory, in bytes, that a launch of `function` may use.
pub(crate) fn set_max_dynamic_shared(function: &Function<'_>, name: &str, bytes: u32) -> Result<()> {
    let attribute = sys::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the handle is live.
    let code = unsafe { sys::cuFuncSetAttribute(function.to_raw(), attribute, bytes as c_int) };
    check(code, || format!("cuFuncSetAttribute({name}, MaxDynamicSharedSizeBytes, {bytes})"))
}

/// Launches `function`. Returns the driver's code on failure.
///
/// # Safety
/// See [`crate::Function::launch`].
pub(crate) unsafe fn launch(
    function: &Function<'_>,
    stream: &Stream,
    config: &LaunchConfig,
    arguments: &mut [*mut c_void],
) -> Result<(), u32> {
    let raw = sys::CUlaunchConfig {
        grid: config.grid,
        block: config.block,
        shared_bytes: config.shared_bytes,
        stream: stream.as_raw(),
        attributes: std::ptr::null(),
        attribute_count: 0,
    };
    // SAFETY: the handles are live, and the attribute list is empty. The arguments are the caller's promise.
    let code = unsafe {
        sys::cuLaunchKernelEx(&raw const raw, function.to_raw(), arguments.as_mut_ptr(), std::ptr::null_mut())
    };
    if code == 0 { Ok(()) } else { Err(code) }
}
