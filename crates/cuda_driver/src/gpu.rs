//! Devices and their contexts.

use crate::error::{CustResultExt, Result, from_cust};
use crate::{Error, beyond_cust};
use cust::CudaApiVersion;
use cust::context::{Context, CurrentContext};
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaError;
use std::fmt;
use std::sync::Arc;

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The driver's device number, from 0.
    pub index: usize,
    /// The product name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The PCI address in the format of NVML and nvidia-smi: `00000000:1B:00.0`.
    pub pci_bus_id: String,
    /// The major and minor compute capability: (9, 0) is Hopper.
    pub compute_capability: (u32, u32),
    /// The number of streaming multiprocessors (SMs).
    pub sm_count: u32,
    /// The highest SM clock, in kHz.
    pub clock_khz: u32,
    /// The highest memory clock, in kHz.
    pub memory_clock_khz: u32,
    /// The width of the memory bus, in bits.
    pub memory_bus_bits: u32,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Bytes of L2 cache.
    pub l2_bytes: usize,
    /// The most bytes of shared memory that a block can opt in to.
    pub shared_per_block: u32,
    /// Bytes of shared memory per SM.
    pub shared_per_sm: u32,
    /// 32-bit registers per SM.
    pub registers_per_sm: u32,
    /// The most resident threads per SM.
    pub threads_per_sm: u32,
}

/// The memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process has allocated.
    pub free: usize,
    /// Bytes of the device.
    pub total: usize,
}

/// Returns the newest CUDA version that the driver supports: (12, 8) is CUDA 12.8.
pub fn driver_version() -> Result<(u32, u32)> {
    crate::load()?;
    let version = CudaApiVersion::get().in_call(|| "cuDriverGetVersion")?;
    Ok((version.major() as u32, version.minor() as u32))
}

/// Loads and initializes the driver, and returns the number of GPUs. Returns [`Error::NoDevice`] if there are none.
pub fn device_count() -> Result<usize> {
    crate::load()?;
    match cust::init(cust::CudaFlags::empty()) {
        Ok(()) => {}
        Err(CudaError::NoDevice) => return Err(Error::NoDevice),
        // cust does not know all codes, for example 803 (kernel module and libcuda have different versions).
        Err(CudaError::UnknownError) => beyond_cust::device::initialize()?,
        Err(error) => return Err(from_cust(error, "cuInit")),
    }
    match Device::num_devices().in_call(|| "cuDeviceGetCount")? {
        0 => Err(Error::NoDevice),
        count => Ok(count as usize),
    }
}

/// Returns device `index` after checking that it exists.
fn device(index: usize) -> Result<Device> {
    let count = device_count()?;
    if index >= count {
        return Err(Error::NoSuchDevice { index, count });
    }
    Device::get_device(index as u32).in_call(|| format!("cuDeviceGet({index})"))
}

/// Returns the properties of GPU `index`.
pub fn device_info(index: usize) -> Result<DeviceInfo> {
    let device = device(index)?;
    let attribute = |attribute: DeviceAttribute| {
        let value = device.get_attribute(attribute);
        value.map(|value| value as u32).in_call(|| format!("cuDeviceGetAttribute({attribute:?})"))
    };
    Ok(DeviceInfo {
        index,
        name: device.name().in_call(|| "cuDeviceGetName")?,
        pci_bus_id: format!(
            "{:08X}:{:02X}:{:02X}.0",
            attribute(DeviceAttribute::PciDomainId)?,
            attribute(DeviceAttribute::PciBusId)?,
            attribute(DeviceAttribute::PciDeviceId)?
        ),
        compute_capability: (
            attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        ),
        sm_count: attribute(DeviceAttribute::MultiprocessorCount)?,
        clock_khz: attribute(DeviceAttribute::ClockRate)?,
        memory_clock_khz: attribute(DeviceAttribute::MemoryClockRate)?,
        memory_bus_bits: attribute(DeviceAttribute::GlobalMemoryBusWidth)?,
        memory_bytes: device.total_memory().in_call(|| "cuDeviceTotalMem")?,
        l2_bytes: attribute(DeviceAttribute::L2CacheSize)? as usize,
        shared_per_block: beyond_cust::device::max_shared_per_block(device)?,
        shared_per_sm: attribute(DeviceAttribute::MaxSharedMemoryPerMultiprocessor)?,
        registers_per_sm: attribute(DeviceAttribute::MaxRegistersPerMultiprocessor)?,
        threads_per_sm: attribute(DeviceAttribute::MaxThreadsPerMultiprocessor)?,
    })
}

/// Returns the globally unique identifier of GPU `index`, in the format of nvidia-smi: `GPU-5b6c…`.
pub fn device_uuid(index: usize) -> Result<String> {
    let uuid = u128::from_be_bytes(beyond_cust::device::uuid(device(index)?)?);
    let [a, b, c, d] = [96, 80, 64, 48].map(|shift| uuid >> shift);
    let e = uuid & ((1 << 48) - 1);
    Ok(format!("GPU-{a:08x}-{:04x}-{:04x}-{:04x}-{e:012x}", b & 0xffff, c & 0xffff, d & 0xffff))
}

/// A GPU in use, with its primary context.
///
/// Clones share the context. It is released with the last clone and the last object created on the GPU.
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
        let context = Context::new(device(index)?).in_call(|| format!("opening GPU {index} ({})", info.name))?;
        let gpu = Self(Arc::new(Inner { context, info }));
        gpu.make_current()?;
        Ok(gpu)
    }

    /// Returns the GPU's properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Makes the context current in the calling thread.
    ///
    /// A thread must do so before its first driver call. The types of this crate do so when they allocate and free.
    pub fn make_current(&self) -> Result<()> {
        CurrentContext::set_current(&self.0.context).in_call(|| "cuCtxSetCurrent")
    }

    /// Blocks until all work queued on the device has completed.
    pub fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        CurrentContext::synchronize().in_call(|| "cuCtxSynchronize")
    }

    /// Returns the free and total memory of the device.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.make_current()?;
        let (free, total) = cust::memory::mem_get_info().in_call(|| "cuMemGetInfo")?;
        Ok(MemoryInfo { free, total })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.0.info.index, self.0.info.name)
    }
}
