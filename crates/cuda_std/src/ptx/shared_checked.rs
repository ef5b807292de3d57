//! Views of shared memory that check their bounds, for checked kernels. An access beyond them stops the kernel.

use super::{load_frozen, load128_frozen, trap};
use core::arch::asm;

/// An element of an array or tile in shared memory, and the array.
pub struct SharedView<T> {
    array: *mut T,
    /// Index of the element in the array. It may be beyond the end.
    first: usize,
    /// Elements of the array.
    len: usize,
}

impl<T> Clone for SharedView<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedView<T> {}

/// Returns the bytes of dynamic shared memory that the launch provides.
#[inline(always)]
fn dynamic_shared_bytes() -> usize {
    let bytes: u32;
    // SAFETY: this reads a special register.
    unsafe { asm!("mov.u32 {}, %dynamic_smem_size;", out(reg32) bytes, options(pure, nomem, nostack, preserves_flags)) }
    bytes as usize
}

/// Returns the address of an array or tile of elements `T` at `offset` in shared memory.
#[inline(always)]
pub fn reserve<V, T>(base: *mut u8, offset: usize, bytes: usize, _row: Option<(usize, usize)>) -> SharedView<T> {
    let all = dynamic_shared_bytes();
    if offset > all || bytes > all - offset {
        trap();
    }
    SharedView { array: base.wrapping_add(offset).cast(), first: 0, len: bytes / size_of::<T>().max(1) }
}

impl<T> SharedView<T> {
    /// Returns the address of element `i`, the first of `count`.
    #[inline(always)]
    pub fn element(self, i: usize, count: usize) -> *mut T {
        let at = self.first.saturating_add(i);
        if at >= self.len || count > self.len - at {
            trap();
        }
        self.array.wrapping_add(at)
    }

    /// Returns the address of element (`row`, `col`), the first of `rows` x `cols`, of a tile with this row stride.
    #[inline(always)]
    pub fn tile(self, [row, col]: [usize; 2], stride: usize, [rows, cols]: [usize; 2]) -> *mut T {
        let at = row.saturating_mul(stride).saturating_add(col);
        self.element(at, (rows - 1) * stride + cols)
    }

    /// Returns the view that starts `count` elements later.
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self { first: self.first.saturating_add(count), ..self }
    }

    /// Returns the view unchanged: names are for reports of the emulator.
    #[inline(always)]
    pub fn named(self, _name: &'static str) -> Self {
        self
    }
}

/// Reads a value that another thread may write at the same time: a data race must not remove a check of bounds.
#[inline(always)]
pub unsafe fn load_shared<T: Copy>(pointer: *const T) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { load_frozen(pointer) }
}

#[inline(always)]
pub unsafe fn load128_shared(pointer: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { load128_frozen(pointer) }
}
