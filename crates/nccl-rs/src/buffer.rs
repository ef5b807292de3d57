//! Device memory as collectives take it.

use crate::sys;
use cuda_driver::sys::CUdeviceptr;
use half::bf16;
use std::marker::PhantomData;

/// What can be sent.
pub trait Element: Copy + Send + 'static {
    const DATA_TYPE: sys::DataType;
}

impl Element for f32 {
    const DATA_TYPE: sys::DataType = sys::FLOAT32;
}

impl Element for bf16 {
    const DATA_TYPE: sys::DataType = sys::BFLOAT16;
}

/// `len` elements at a device address. Plain data: it neither owns nor borrows the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer<T> {
    pub address: CUdeviceptr,
    pub len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub const fn new(address: CUdeviceptr, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }

    /// Part `i` of `n` equal parts; the length must be a multiple of `n`.
    pub const fn part(self, i: usize, n: usize) -> Self {
        let len = self.len / n;
        Self::new(self.address + (i * len * size_of::<T>()) as u64, len)
    }
}
