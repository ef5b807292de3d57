//! Page-locked host memory.

use crate::Gpu;
use crate::error::{CustResultExt, Result};
use crate::in_context::InContext;
use cust::memory::LockedBuffer;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A page-locked slice of host memory, initially zero.
///
/// Copies between it and the device run at full speed and overlap with work of the host. The device may access it until
/// the copy has completed: wait for an event or the stream before accessing or dropping it.
pub struct PinnedBuffer<T: bytemuck::Pod> {
    /// Bytes, because `cust::memory::DeviceCopy` is not implemented for every `Pod` type. Page-aligned.
    buffer: InContext<LockedBuffer<u8>>,
    bytes: usize,
    element: PhantomData<T>,
}

impl<T: bytemuck::Pod> PinnedBuffer<T> {
    /// Allocates `len` zeros.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let bytes = len * size_of::<T>();
        let allocate = || {
            LockedBuffer::new(&0, bytes.max(1))
                .in_call(|| format!("cuMemAllocHost({bytes} bytes of page-locked host memory; see `ulimit -l`)"))
        };
        Ok(Self { buffer: InContext::create(gpu, allocate)?, bytes, element: PhantomData })
    }

    /// Returns the address, which is the same for the host and for the GPU.
    pub fn pointer(&self) -> *mut T {
        self.buffer.as_ptr().cast_mut().cast()
    }
}

impl<T: bytemuck::Pod> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.buffer[..self.bytes])
    }
}

impl<T: bytemuck::Pod> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.bytes;
        bytemuck::cast_slice_mut(&mut self.buffer[..bytes])
    }
}
