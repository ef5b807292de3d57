//! Device memory.

use crate::error::{Result, from_cust};
use crate::in_context::InContext;
use crate::{Error, Gpu, sys};
use cust::error::CudaError;
use cust::memory::DeviceBuffer;

/// One allocation in device memory: uninitialized, aligned to 256 bytes or more, freed on drop.
pub struct DeviceMemory {
    buffer: InContext<DeviceBuffer<u8>>,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes. Returns [`Error::OutOfMemory`], with the free memory, if there is too little.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let allocate = || {
            // One byte at least: cust gives an empty buffer the null address.
            // SAFETY: the bytes are only accessed through their address, and only device code and copies do so.
            unsafe { DeviceBuffer::uninitialized(bytes.max(1)) }.map_err(|error| match error {
                CudaError::OutOfMemory => match gpu.memory() {
                    Ok(memory) => Error::OutOfMemory { asked: bytes, free: memory.free, total: memory.total },
                    Err(error) => error,
                },
                error => from_cust(error, format!("cuMemAlloc({bytes} bytes)")),
            })
        };
        Ok(Self { buffer: InContext::create(gpu, allocate)?, bytes })
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.buffer.as_device_ptr().as_raw()
    }

    /// Returns the size in bytes, as requested.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
