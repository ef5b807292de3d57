//! Devices and their contexts.

use crate::error::{Result, check, check_with, describe};
use crate::{Error, sys};
use cust::context::Context;
use cust::device::Device;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::Arc;

/// What is known of a GPU before anything runs on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The driver's number of the device, from 0.
    pub index: usize,
    pub name: String,
    /// Where it is, as NVML and nvidia-smi have it: `00000000:1B:00.0`.
    pub pci_bus_id: String,
    /// Major and minor compute capability: (9, 0) is Hopper.
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
    /// Highest clock of the multiprocessors, in kHz.
    pub clock_khz: u32,
    /// Highest clock of the memory, in kHz, and the width of its bus, in bits.
    pub memory_clock_khz: u32,
    pub memory_bus_bits: u32,
    /// Bytes of device memory and of L2 cache.
    pub memory_bytes: usize,
    pub l2_bytes: usize,
    /// Bytes of shared memory: what a block may ask for (by opting in), and what a multiprocessor has.
    pub shared_per_block: u32,
    pub shared_per_multiprocessor: u32,
    pub registers_per_multiprocessor: u32,
    pub threads_per_multiprocessor: u32,
}

/// Free and total bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free: usize,
    pub total: usize,
}

/// The newest CUDA version the driver supports: (12, 8) is CUDA 12.8.
pub fn driver_version() -> Result<(u32, u32)> {
    crate::load()?;
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "cuDriverGetVersion")?;
    Ok((version as u32 / 1000, version as u32 % 1000 / 10))
}

/// How many GPUs there are; loads and initialises the driver. No GPU is [`Error::NoDevice`].
pub fn device_count() -> Result<usize> {
    crate::load()?;
    // SAFETY: cuInit may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        100 => return Err(Error::NoDevice),
        code => check(code, "cuInit")?,
    }
    let mut count = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
    if count == 0 { Err(Error::NoDevice) } else { Ok(count as usize) }
}

/// What GPU `index` is.
pub fn device_info(index: usize) -> Result<DeviceInfo> {
    let count = device_count()?;
    if index >= count {
        return Err(Error::NoSuchDevice { index, count });
    }
    let mut device = 0;
    // SAFETY: writes one handle.
    check_with(unsafe { sys::cuDeviceGet(&raw mut device, index as c_int) }, || format!("cuDeviceGet({index})"))?;
    let mut name = [0; 256];
    // SAFETY: the call writes at most as many bytes as it is told, the NUL included.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) };
    check(code, "cuDeviceGetName")?;
    // SAFETY: the call ended the name with a NUL, and the array is zero after it.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: writes one size.
    check(unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) }, "cuDeviceTotalMem")?;
    let attribute = |id: c_int| {
        let mut value = 0;
        // SAFETY: writes one integer.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, id, device) };
        check_with(code, || format!("cuDeviceGetAttribute({id})")).map(|()| value as u32)
    };
    // The numbers are CUdevice_attribute's.
    Ok(DeviceInfo {
        index,
        name,
        pci_bus_id: format!("{:08X}:{:02X}:{:02X}.0", attribute(50)?, attribute(33)?, attribute(34)?),
        compute_capability: (attribute(75)?, attribute(76)?),
        multiprocessors: attribute(16)?,
        clock_khz: attribute(13)?,
        memory_clock_khz: attribute(36)?,
        memory_bus_bits: attribute(37)?,
        memory_bytes,
        l2_bytes: attribute(38)? as usize,
        shared_per_block: attribute(97)?,
        shared_per_multiprocessor: attribute(81)?,
        registers_per_multiprocessor: attribute(82)?,
        threads_per_multiprocessor: attribute(39)?,
    })
}

/// What tells GPU `index` from every other in the world, as nvidia-smi has it: `GPU-5b6c…`.
pub fn device_uuid(index: usize) -> Result<String> {
    let DeviceInfo { index, .. } = device_info(index)?;
    let (mut device, mut uuid) = (0, [0; 16]);
    // SAFETY: writes one handle.
    check_with(unsafe { sys::cuDeviceGet(&raw mut device, index as c_int) }, || format!("cuDeviceGet({index})"))?;
    // SAFETY: writes 16 bytes.
    check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }, "cuDeviceGetUuid")?;
    let [a, b, c, d] = [96, 80, 64, 48].map(|shift| u128::from_be_bytes(uuid) >> shift);
    let e = u128::from_be_bytes(uuid) & ((1 << 48) - 1);
    Ok(format!("GPU-{a:08x}-{:04x}-{:04x}-{:04x}-{e:012x}", b & 0xffff, c & 0xffff, d & 0xffff))
}

/// A GPU in use: its primary context. Clones share it; it is released when the last of them and of everything made
/// through it is gone.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    context: Context,
    info: DeviceInfo,
}

impl Gpu {
    /// Opens GPU `index` and makes its context current in this thread.
    pub fn open(index: usize) -> Result<Self> {
        let info = device_info(index)?;
        let context = Device::get_device(index as u32).and_then(Context::new).map_err(|error| {
            let code = error as u32;
            let (name, text) = describe(code);
            Error::Call { call: format!("opening GPU {index} ({})", info.name), code, name, text }
        })?;
        let gpu = Self(Arc::new(Inner { context, info }));
        gpu.make_current()?;
        Ok(gpu)
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// A context is current per thread: whatever makes driver calls on a thread calls this on it first. The types of
    /// this crate do so where they allocate and free.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is alive as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.0.context.as_raw().cast()) }, "cuCtxSetCurrent")
    }

    /// Waits until everything queued on the device is done.
    pub fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        // SAFETY: no arguments.
        check(unsafe { sys::cuCtxSynchronize() }, "cuCtxSynchronize")
    }

    pub fn memory(&self) -> Result<MemoryInfo> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        check(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, "cuMemGetInfo")?;
        Ok(MemoryInfo { free, total })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.0.info.index, self.0.info.name)
    }
}
