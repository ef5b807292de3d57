//! Operands of collectives.

use crate::sys;
use cuda_driver::sys::CUdeviceptr;
use half::bf16;
use std::marker::PhantomData;

/// An element type of collectives.
pub trait Element: Copy + Send + 'static {
    /// The data type of NCCL.
    const DATA_TYPE: sys::DataType;
}

impl Element for f32 {
    /// The data type of NCCL.
    const DATA_TYPE: sys::DataType = sys::FLOAT32;
}

impl Element for bf16 {
    /// The data type of NCCL.
    const DATA_TYPE: sys::DataType = sys::BFLOAT16;
}

/// `len` elements at a device address. It neither owns nor borrows the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer<T> {
    /// The device address of the first element.
    pub address: CUdeviceptr,
    /// The number of elements.
    pub len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Returns a buffer of `len` elements at `address`.
    pub const fn new(address: CUdeviceptr, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }

    /// Returns shard `i` of `n` shards of equal size. The length must be a multiple of `n`.
    pub const fn shard(self, i: usize, n: usize) -> Self {
        let len = self.len / n;
        Self::new(self.address + (i * len * size_of::<T>()) as u64, len)
    }
}
