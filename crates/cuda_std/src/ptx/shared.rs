//! Views of shared memory without bounds checks: the launch contract covers their accesses.

/// The address of an element of an array or tile in shared memory.
#[repr(transparent)]
pub struct SharedView<T>(*mut T);

impl<T> Clone for SharedView<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedView<T> {}

/// Returns the address of an array or tile of elements `T` at `offset` in shared memory.
#[inline(always)]
pub fn reserve<V, T>(base: *mut u8, offset: usize, _bytes: usize, _row: Option<(usize, usize)>) -> SharedView<T> {
    SharedView(base.wrapping_add(offset).cast())
}

impl<T> SharedView<T> {
    /// Returns the address.
    #[inline(always)]
    pub fn pointer(self) -> *mut T {
        self.0
    }

    /// Returns the address of element `i`.
    #[inline(always)]
    pub fn element(self, i: usize, _count: usize) -> *mut T {
        self.0.wrapping_add(i)
    }

    /// Returns the address of element (`row`, `col`) of a tile with this row stride.
    #[inline(always)]
    pub fn tile(self, [row, col]: [usize; 2], stride: usize, _extent: [usize; 2]) -> *mut T {
        self.0.wrapping_add(row * stride + col)
    }

    /// Returns the view that starts `count` elements later.
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Returns the view unchanged: names are for reports of the emulator.
    #[inline(always)]
    pub fn named(self, _name: &'static str) -> Self {
        self
    }
}

#[inline(always)]
pub unsafe fn load_shared<T: Copy>(pointer: *const T) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { super::load(pointer) }
}

#[inline(always)]
pub unsafe fn load128_shared(pointer: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { super::load128(pointer) }
}
