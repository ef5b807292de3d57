//! Dynamic shared memory of a block, partitioned into typed arrays and tiles.
//!
//! A kernel and its launch share one function that defines the layout:
//! ```ignore
//! fn shared<const HS: usize>(layout: &mut shared::Layout) -> (SharedTile<bf16, 64, HS>, SharedArray<f32>) {
//!     (layout.tile(), layout.array(64))
//! }
//! ```
//! The kernel calls it with `Layout::new()` and uses the returned views. The launch calls it and reads
//! [`Layout::bytes`].

use crate::backend;
use crate::element::{Element, Packet, bf16};
use crate::fp8::Fp8;
use crate::mma::{TensorCore, load_fp8};
use crate::slice::CopySource;
use crate::warp;

/// Bump allocator of the block's dynamic shared memory.
#[derive(Default)]
pub struct Layout {
    offset: usize,
}

impl Layout {
    /// Creates an empty layout.
    #[inline(always)]
    pub const fn new() -> Self {
        Self { offset: 0 }
    }

    /// Returns the number of bytes reserved so far, which the launch must provide as dynamic shared memory.
    #[inline(always)]
    pub const fn bytes(&self) -> usize {
        self.offset
    }

    /// Reserves memory for a view `V` of elements `T`. `row` is the number of elements in a row of a tile, and between the starts of
    /// two rows.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn take<V, T>(
        &mut self,
        bytes: usize,
        align: usize,
        row: Option<(usize, usize)>,
    ) -> backend::SharedView<T> {
        let start = self.offset.next_multiple_of(align);
        self.offset = start + bytes;
        backend::reserve::<V, T>(backend::shared_base(), start, bytes, row)
    }

    /// Reserves an array of `len` elements, aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub fn array<T: SharedElement>(&mut self, len: usize) -> SharedArray<T> {
        SharedArray(self.take::<SharedArray<T>, T>(len * size_of::<T>(), 16, None))
    }

    /// Reserves an `R` x `C` tile, aligned to 128 bytes.
    #[inline(always)]
    #[track_caller]
    pub fn tile<T: Element, const R: usize, const C: usize>(&mut self) -> SharedTile<T, R, C> {
        let stride = SharedTile::<T, R, C>::STRIDE;
        SharedTile(self.take::<SharedTile<T, R, C>, T>(R * stride * size_of::<T>(), 128, Some((C, stride))))
    }
}

/// An element of an array in shared memory. Shared memory is uninitialized, so in checked device code every bit pattern must be valid.
pub trait SharedElement {}

#[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
impl<T> SharedElement for T {}

#[cfg(all(target_arch = "nvptx64", feature = "checked"))]
mod checked {
    use super::{Element, SharedElement};

    impl<T: Element> SharedElement for T {}

    macro_rules! elements {
        ($($type:ty)*) => {$(impl SharedElement for $type {})*};
    }

    elements! { u8 u16 u32 u64 usize i8 i16 i32 i64 f64 }
}

/// A one-dimensional array in shared memory.
#[repr(transparent)]
pub struct SharedArray<T>(backend::SharedView<T>);

impl<T> Clone for SharedArray<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedArray<T> {}

impl<T: Copy> SharedArray<T> {
    /// Reads element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch provides the bytes that `Layout` reserved, and the kernel's indices stay within the array.
        unsafe { backend::load_shared(self.0.element(i, 1)) }
    }

    /// Writes element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: see `at`.
        unsafe { backend::store(self.0.element(i, 1), value) }
    }

    /// Returns a pointer to `count` elements from element `i` on.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn elements(self, i: usize, count: usize) -> *const T {
        self.0.element(i, count)
    }

    /// Returns the array that starts `count` elements after this one.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.skip(count))
    }

    /// Returns the array unchanged. Reports of the emulator call it `name`.
    #[must_use]
    #[inline(always)]
    pub fn named(self, name: &'static str) -> Self {
        Self(self.0.named(name))
    }
}

impl SharedArray<u32> {
    /// Writes elements `i` and `i` + 1 (`st.shared.v2.b32`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn set_two(self, i: usize, words: [u32; 2]) {
        // SAFETY: see `at`; arrays are 16-byte aligned and the index is even.
        unsafe { backend::store64(self.0.element(i, 2), words) }
    }

    /// Writes elements `i` to `i` + 3 (`st.shared.v4.b32`). `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn set_four(self, i: usize, words: [u32; 4]) {
        // SAFETY: see `at`; arrays are 16-byte aligned and the index is a multiple of 4.
        unsafe { backend::store128(self.0.element(i, 4), words) }
    }
}

impl SharedArray<f32> {
    /// Reads elements `i` and `i + 1` (`ld.shared.b64`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        // SAFETY: see `at`; arrays are 16-byte aligned and the index is even.
        let bits = unsafe { backend::load_shared(self.0.element(i, 2).cast::<u64>()) };
        [f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]
    }
}

impl<T: Element> SharedArray<T> {
    /// Reads the packet that starts at element `i`, a multiple of `T::PACKET` (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: see `at`; arrays are 16-byte aligned.
        Packet::from_words(unsafe { backend::load128_shared(self.0.element(i, T::PACKET).cast()) })
    }

    /// Writes the packet that starts at element `i`, a multiple of `T::PACKET` (`st.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, i: usize, packet: Packet<T>) {
        // SAFETY: see `packet`.
        unsafe { backend::store128(self.0.element(i, T::PACKET).cast(), packet.words) }
    }

    /// Starts an asynchronous 16-byte copy of `from[j..]` to element `i` (`cp.async.cg.shared.global`). If `valid` is
    /// false, it writes zeros and reads nothing. See [`crate::async_copy`].
    #[inline(always)]
    #[track_caller]
    pub fn copy_packet_async(self, i: usize, from: impl CopySource<T>, j: usize, valid: bool) {
        let from = from.checked(j, T::PACKET, valid);
        // SAFETY: see `packet`. The launch contract covers a `Global`, and `checked` has checked a slice.
        unsafe { backend::async_copy_16(self.0.element(i, T::PACKET).cast(), from.0.wrapping_add(j).cast(), valid) }
    }
}

/// A tile of `R` rows of `C` elements in shared memory. `C` must be a multiple of 16.
///
/// Each row is padded by 16 bytes, so that `ldmatrix` reads eight rows without bank conflicts.
#[repr(transparent)]
pub struct SharedTile<T, const R: usize, const C: usize>(backend::SharedView<T>);

impl<T, const R: usize, const C: usize> Clone for SharedTile<T, R, C> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const R: usize, const C: usize> Copy for SharedTile<T, R, C> {}

impl<T: Element, const R: usize, const C: usize> SharedTile<T, R, C> {
    /// Row stride in elements.
    pub const STRIDE: usize = C + T::PACKET;

    /// Returns the tile unchanged. Reports of the emulator call it `name`.
    #[must_use]
    #[inline(always)]
    pub fn named(self, name: &'static str) -> Self {
        Self(self.0.named(name))
    }

    /// Returns a pointer to the `rows` x `cols` elements from (`row`, `col`) on.
    #[inline(always)]
    #[track_caller]
    fn pointer(self, row: usize, col: usize, rows: usize, cols: usize) -> *mut T {
        self.0.tile([row, col], Self::STRIDE, [rows, cols])
    }

    /// Reads element (`row`, `col`).
    #[inline(always)]
    #[track_caller]
    pub fn at(self, row: usize, col: usize) -> T {
        // SAFETY: the launch provides the bytes that `Layout` reserved, and the kernel's indices stay within the tile.
        unsafe { backend::load_shared(self.pointer(row, col, 1, 1)) }
    }

    /// Writes element (`row`, `col`).
    #[inline(always)]
    #[track_caller]
    pub fn set(self, row: usize, col: usize, value: T) {
        // SAFETY: see `at`.
        unsafe { backend::store(self.pointer(row, col, 1, 1), value) }
    }

    /// Reads the packet that starts at (`row`, `col`). `col` must be a multiple of `T::PACKET`.
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, row: usize, col: usize) -> Packet<T> {
        // SAFETY: see `at`; the row stride is a multiple of 16 bytes.
        Packet::from_words(unsafe { backend::load128_shared(self.pointer(row, col, 1, T::PACKET).cast()) })
    }

    /// Writes the packet that starts at (`row`, `col`). `col` must be a multiple of `T::PACKET`.
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, row: usize, col: usize, packet: Packet<T>) {
        // SAFETY: see `packet`.
        unsafe { backend::store128(self.pointer(row, col, 1, T::PACKET).cast(), packet.words) }
    }

    /// Starts an asynchronous 16-byte copy of `from[j..]` to (`row`, `col`) (`cp.async.cg.shared.global`). If `valid`
    /// is false, it writes zeros and reads nothing. See [`crate::async_copy`].
    #[inline(always)]
    #[track_caller]
    pub fn copy_packet_async(self, row: usize, col: usize, from: impl CopySource<T>, j: usize, valid: bool) {
        let from = from.checked(j, T::PACKET, valid);
        // SAFETY: see `packet`. The launch contract covers a `Global`, and `checked` has checked a slice.
        unsafe {
            backend::async_copy_16(self.pointer(row, col, 1, T::PACKET).cast(), from.0.wrapping_add(j).cast(), valid);
        }
    }
}

/// Fragments for [`TensorCore::mma`]. Every lane of the warp must call these functions.
impl<T: TensorCore, const R: usize, const C: usize> SharedTile<T, R, C> {
    /// Loads the 16 x 16 fragment `A[m][k] = tile[row + m][col + k]`.
    #[inline(always)]
    #[track_caller]
    pub fn a(self, row: usize, col: usize) -> T::A {
        // SAFETY: see `at`, for the 16 x 16 elements at (row, col).
        unsafe { T::load_a(self.pointer(row, col, 16, 16), Self::STRIDE) }
    }

    /// Loads two fragments that are adjacent in n: `B[k][n] = tile[row + n][col + k]` for k in 0..16 and n in 0..16.
    #[inline(always)]
    #[track_caller]
    pub fn b_transposed(self, row: usize, col: usize) -> [T::B; 2] {
        // SAFETY: see `a`.
        unsafe { T::load_b_transposed(self.pointer(row, col, 16, 16), Self::STRIDE) }
    }

    /// Loads two fragments that are adjacent in n: `B[k][n] = tile[row + k][col + n]` for k in 0..16 and n in 0..16.
    #[inline(always)]
    #[track_caller]
    pub fn b(self, row: usize, col: usize) -> [T::B; 2] {
        // SAFETY: see `a`.
        unsafe { T::load_b(self.pointer(row, col, 16, 16), Self::STRIDE) }
    }

    /// Stores a 16 x 8 accumulator fragment, rounded to `T`, at (`row`, `col`).
    #[inline(always)]
    #[track_caller]
    pub fn set_accumulators(self, row: usize, col: usize, c: [f32; 4]) {
        let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
        // SAFETY: see `at`.
        unsafe {
            T::store_pair(self.pointer(row + g, col + 2 * t, 1, 2), c[0], c[1]);
            T::store_pair(self.pointer(row + g + 8, col + 2 * t, 1, 2), c[2], c[3]);
        }
    }
}

impl<const R: usize, const C: usize> SharedTile<bf16, R, C> {
    /// Stores the 16 x 16 fragment `A[m][k] = tile[row + m][col + k]`.
    #[inline(always)]
    #[track_caller]
    pub fn set_a(self, row: usize, col: usize, a: [u32; 4]) {
        let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
        for i in 0..4 {
            let at = self.pointer(row + g + i % 2 * 8, col + 2 * t + i / 2 * 8, 1, 2);
            // SAFETY: see `at`; the column is even, so the pair is 4-byte aligned.
            unsafe { backend::store(at.cast::<u32>(), a[i]) }
        }
    }
}

/// Fragments for [`mma_fp8`](crate::mma::mma_fp8). Every lane of the warp must call the loads. `col` is a multiple of 16.
impl<T: Fp8, const R: usize, const C: usize> SharedTile<T, R, C> {
    /// Loads the 16 x 32 fragment `A[m][k] = tile[row + m][col + k]`.
    #[inline(always)]
    #[track_caller]
    pub fn fp8_a(self, row: usize, col: usize) -> [u32; 4] {
        // SAFETY: see `at`, for the 16 x 32 numbers at (row, col).
        unsafe { load_fp8::<T, true>(self.pointer(row, col, 16, 32), Self::STRIDE) }
    }

    /// Loads two fragments that are adjacent in n: `B[k][n] = tile[row + n][col + k]` for k in 0..32 and n in 0..16.
    #[inline(always)]
    #[track_caller]
    pub fn fp8_b_transposed(self, row: usize, col: usize) -> [[u32; 2]; 2] {
        // SAFETY: see `fp8_a`.
        let [a, b, c, d] = unsafe { load_fp8::<T, false>(self.pointer(row, col, 16, 32), Self::STRIDE) };
        [[a, b], [c, d]]
    }

    /// Writes two adjacent numbers, the first in the lower byte. `col` is even.
    #[inline(always)]
    #[track_caller]
    pub fn set_fp8_pair(self, row: usize, col: usize, pair: u16) {
        // SAFETY: see `at`; the pair is 2-byte aligned.
        unsafe { backend::store(self.pointer(row, col, 1, 2).cast::<u16>(), pair) }
    }
}
