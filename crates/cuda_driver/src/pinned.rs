//! Host memory that the device copies from and to without a detour.

use crate::error::{Result, check_with};
use crate::{Gpu, sys};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A zeroed, page-locked slice. Copies between it and the device run at full speed and beside the host's work; the
/// device may use it until the copy is done, so wait (for an event or the stream) before touching or dropping it.
pub struct PinnedBuffer<T: bytemuck::Pod> {
    data: NonNull<T>,
    len: usize,
    gpu: Gpu,
}

// SAFETY: it owns its memory, as a Vec does.
unsafe impl<T: bytemuck::Pod + Send> Send for PinnedBuffer<T> {}
// SAFETY: shared access is shared access to a slice.
unsafe impl<T: bytemuck::Pod + Sync> Sync for PinnedBuffer<T> {}

impl<T: bytemuck::Pod> PinnedBuffer<T> {
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        gpu.make_current()?;
        let bytes = (len * size_of::<T>()).max(1);
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut address, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        check_with(code, || format!("cuMemHostAlloc({bytes} bytes of page-locked host memory; see `ulimit -l`)"))?;
        // SAFETY: the allocation has that many bytes, and zeros are a `T`.
        unsafe { address.cast::<u8>().write_bytes(0, bytes) };
        let data = NonNull::new(address.cast()).expect("the driver returned success and an address");
        Ok(Self { data, len, gpu: gpu.clone() })
    }
}

impl<T: bytemuck::Pod> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the allocation holds `len` initialised values, page aligned.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: bytemuck::Pod> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: bytemuck::Pod> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the allocation is live and not used again.
            unsafe { sys::cuMemFreeHost(self.data.as_ptr().cast()) };
        }
    }
}
