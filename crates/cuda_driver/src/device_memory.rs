//! Device memory.

use crate::error::{Result, check_with};
use crate::{Error, Gpu, sys};

/// One allocation on a device, freed when dropped. Not initialised; at least 256-byte aligned.
pub struct DeviceMemory {
    address: sys::CUdeviceptr,
    bytes: usize,
    gpu: Gpu,
}

impl DeviceMemory {
    /// Too little free memory is [`Error::OutOfMemory`], which says how much there is.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        gpu.make_current()?;
        let mut address = 0;
        // The driver refuses an empty allocation.
        // SAFETY: writes one address.
        match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) } {
            sys::CUDA_ERROR_OUT_OF_MEMORY => {
                let memory = gpu.memory()?;
                Err(Error::OutOfMemory { asked: bytes, free: memory.free, total: memory.total })
            }
            code => {
                check_with(code, || format!("cuMemAlloc({bytes} bytes)"))?;
                Ok(Self { address, bytes, gpu: gpu.clone() })
            }
        }
    }

    pub fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the allocation is live and not used again; the driver waits for work that uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
