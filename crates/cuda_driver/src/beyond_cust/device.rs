//! Device properties that `cust` has no accessor for.

use super::sys;
use crate::error::{Result, check};
use cust::device::Device;

/// Calls `cuInit` for its exact error code. It may be called any number of times.
pub(crate) fn initialize() -> Result<()> {
    // SAFETY: the call takes no pointers.
    check(unsafe { sys::cuInit(0) }, || "cuInit")
}

/// Returns the most bytes of shared memory that a block can opt in to.
pub(crate) fn max_shared_per_block(device: Device) -> Result<u32> {
    let mut bytes = 0;
    let attribute = sys::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    // SAFETY: the call writes one integer.
    let code = unsafe { sys::cuDeviceGetAttribute(&raw mut bytes, attribute, device.as_raw()) };
    check(code, || "cuDeviceGetAttribute(MaxSharedMemoryPerBlockOptin)")?;
    Ok(bytes as u32)
}

/// Returns the globally unique identifier of a device.
pub(crate) fn uuid(device: Device) -> Result<[u8; 16]> {
    let mut uuid = [0; 16];
    // SAFETY: the call writes 16 bytes.
    check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device.as_raw()) }, || "cuDeviceGetUuid")?;
    Ok(uuid)
}
