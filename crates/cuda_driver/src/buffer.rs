//! Device buffers that know their element type and length.

use crate::error::Result;
use crate::{DeviceMemory, Stream};
use bytemuck::Pod;
use cuda_std::{Global, GlobalMut, GlobalSlice, GlobalSliceMut};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

/// `len` elements of device memory that all work of one stream uses in order.
///
/// Copies, launches of checked kernels and the release of the memory are ordered by the stream, so none of them needs `unsafe`.
pub struct Buffer<T> {
    memory: ManuallyDrop<DeviceMemory>,
    len: usize,
    stream: Stream,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Allocates `len` elements of zeros.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self> {
        let buffer = Self::allocate(stream, len)?;
        let bytes = buffer.memory.bytes();
        if bytes > 0 {
            // SAFETY: the memory has these bytes, and nothing else uses it yet.
            stream.in_order(|| unsafe { stream.fill(buffer.memory.address(), 0, bytes) })?;
        }
        Ok(buffer)
    }

    /// Allocates a buffer and copies `values` into it.
    pub fn from_slice(stream: &Stream, values: &[T]) -> Result<Self> {
        let mut buffer = Self::allocate(stream, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    fn allocate(stream: &Stream, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = ManuallyDrop::new(DeviceMemory::new(stream.gpu(), bytes)?);
        Ok(Self { memory, len, stream: stream.clone(), element: PhantomData })
    }

    /// Copies `values` into the buffer, after all work queued so far, and waits for the copy.
    ///
    /// # Panics
    /// If the lengths differ, as for slices.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        assert_eq!(values.len(), self.len, "the length of the values and of the buffer");
        if values.is_empty() {
            return Ok(());
        }
        self.stream.in_order(|| {
            // SAFETY: the memory has the length of the slice, which outlives the copy: this waits for it.
            unsafe { self.stream.upload(self.memory.address(), values) }.and_then(|()| self.stream.synchronize())
        })
    }

    /// Returns a copy of the elements, after all work queued so far.
    pub fn read(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        if !values.is_empty() {
            self.stream.in_order(|| {
                // SAFETY: the memory has the length of the vector, which is not used before the copy has completed.
                unsafe { self.stream.download(&mut values, self.memory.address()) }
                    .and_then(|()| self.stream.synchronize())
            })?;
        }
        Ok(values)
    }

    /// Returns a view for the argument of a checked kernel that reads the buffer.
    pub fn slice(&self) -> GlobalSlice<'_, T> {
        // SAFETY: the buffer lives as long as the view, is initialized and aligned to 256 bytes. A checked launch compares the stream.
        unsafe {
            GlobalSlice::from_parts(Global::from_address(self.memory.address()), self.len, self.stream.identity())
        }
    }

    /// Returns a view for the argument of a checked kernel that writes the buffer.
    pub fn slice_mut(&mut self) -> GlobalSliceMut<'_, T> {
        let view = GlobalMut::from_address(self.memory.address());
        // SAFETY: see `slice`.
        unsafe { GlobalSliceMut::from_parts(view, self.len, self.stream.identity()) }
    }
}

impl<T> Buffer<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the stream that orders the work on the buffer.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // If the stream fails, kernels may still use the memory. It is then released with the context.
        if self.stream.gpu().make_current().and_then(|()| self.stream.synchronize()).is_ok() {
            // SAFETY: the memory is not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.len, std::any::type_name::<T>())
    }
}
