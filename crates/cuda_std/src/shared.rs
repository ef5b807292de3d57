//! The block's dynamic shared memory, handed out in typed pieces.
//!
//! A kernel and its launch agree on the layout by sharing one function:
//! ```ignore
//! fn shared<const HS: usize>(layout: &mut shared::Layout) -> (SharedTile<bf16, 64, HS>, SharedArray<f32>) {
//!     (layout.tile(), layout.array(64))
//! }
//! ```
//! The kernel calls it on `Layout::new()` and uses the pieces; the launch calls it and asks for [`Layout::bytes`].

use crate::backend;
use crate::element::{Element, Packet};
use crate::global::Global;
use crate::mma::TensorCore;
use crate::warp;

/// Hands out consecutive pieces of the block's dynamic shared memory.
#[derive(Default)]
pub struct Layout {
    offset: usize,
}

impl Layout {
    #[inline(always)]
    pub const fn new() -> Self {
        Self { offset: 0 }
    }

    /// Bytes handed out so far: the launch's dynamic shared memory.
    #[inline(always)]
    pub const fn bytes(&self) -> usize {
        self.offset
    }

    #[inline(always)]
    pub(crate) fn take(&mut self, bytes: usize, align: usize) -> *mut u8 {
        let start = self.offset.next_multiple_of(align);
        self.offset = start + bytes;
        backend::shared_base().wrapping_add(start)
    }

    /// `len` elements, 16-byte aligned.
    #[inline(always)]
    pub fn array<T>(&mut self, len: usize) -> SharedArray<T> {
        SharedArray(self.take(len * size_of::<T>(), 16).cast())
    }

    /// An `R` x `C` tile, 128-byte aligned.
    #[inline(always)]
    pub fn tile<T: Element, const R: usize, const C: usize>(&mut self) -> SharedTile<T, R, C> {
        SharedTile(self.take(R * SharedTile::<T, R, C>::STRIDE * size_of::<T>(), 128).cast())
    }
}

/// A one-dimensional piece of shared memory.
#[repr(transparent)]
pub struct SharedArray<T>(*mut T);

impl<T> Clone for SharedArray<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedArray<T> {}

impl<T: Copy> SharedArray<T> {
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch gave the block as many bytes as `Layout` handed out; a kernel's indices stay in its piece.
        unsafe { backend::load(self.0.wrapping_add(i)) }
    }

    #[inline(always)]
    #[track_caller]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: as in `at`.
        unsafe { backend::store(self.0.wrapping_add(i), value) }
    }

    /// The piece that starts `count` elements further on.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }
}

impl SharedArray<f32> {
    /// Elements `i` and `i + 1`, `i` even (`ld.shared.b64`).
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        // SAFETY: as in `at`; pieces are 16-byte aligned and the index is even.
        let bits = unsafe { backend::load(self.0.wrapping_add(i).cast::<u64>()) };
        [f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]
    }
}

impl<T: Element> SharedArray<T> {
    /// The 16 bytes that begin at element `i`, a multiple of `T::PACKET` (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: as in `at`; pieces are 16-byte aligned.
        Packet::from_words(unsafe { backend::load128(self.0.wrapping_add(i).cast()) })
    }

    /// Writes the 16 bytes that begin at element `i`, a multiple of `T::PACKET` (`st.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, i: usize, packet: Packet<T>) {
        // SAFETY: as in `packet`.
        unsafe { backend::store128(self.0.wrapping_add(i).cast(), packet.words) }
    }

    /// Starts a 16-byte copy of `from[j..]` to element `i`; zeros are written instead where `valid` is false, and
    /// nothing is read (`cp.async.cg.shared.global`). See [`crate::async_copy`].
    #[inline(always)]
    #[track_caller]
    pub fn copy_packet_async(self, i: usize, from: Global<T>, j: usize, valid: bool) {
        // SAFETY: as in `packet`, and the launch contract for `from`.
        unsafe { backend::async_copy_16(self.0.wrapping_add(i).cast(), from.0.wrapping_add(j).cast(), valid) }
    }
}

/// `R` rows of `C` elements, each row padded by 16 bytes so that the eight rows an `ldmatrix` reads lie in different
/// banks. `C` must be a multiple of 16.
#[repr(transparent)]
pub struct SharedTile<T, const R: usize, const C: usize>(*mut T);

impl<T, const R: usize, const C: usize> Clone for SharedTile<T, R, C> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const R: usize, const C: usize> Copy for SharedTile<T, R, C> {}

impl<T: Element, const R: usize, const C: usize> SharedTile<T, R, C> {
    /// Elements from one row to the next.
    pub const STRIDE: usize = C + T::PACKET;

    #[inline(always)]
    fn pointer(self, row: usize, col: usize) -> *mut T {
        self.0.wrapping_add(row * Self::STRIDE + col)
    }

    #[inline(always)]
    #[track_caller]
    pub fn at(self, row: usize, col: usize) -> T {
        // SAFETY: the launch gave the block as many bytes as `Layout` handed out; a kernel's indices stay in the tile.
        unsafe { backend::load(self.pointer(row, col)) }
    }

    #[inline(always)]
    #[track_caller]
    pub fn set(self, row: usize, col: usize, value: T) {
        // SAFETY: as in `at`.
        unsafe { backend::store(self.pointer(row, col), value) }
    }

    /// The 16 bytes that begin at (`row`, `col`), `col` a multiple of `T::PACKET`.
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, row: usize, col: usize) -> Packet<T> {
        // SAFETY: as in `at`; rows are multiples of 16 bytes.
        Packet::from_words(unsafe { backend::load128(self.pointer(row, col).cast()) })
    }

    /// Writes the 16 bytes that begin at (`row`, `col`), `col` a multiple of `T::PACKET`.
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, row: usize, col: usize, packet: Packet<T>) {
        // SAFETY: as in `packet`.
        unsafe { backend::store128(self.pointer(row, col).cast(), packet.words) }
    }

    /// Starts a 16-byte copy of `from[j..]` to (`row`, `col`); zeros where `valid` is false, and nothing is read
    /// (`cp.async.cg.shared.global`). See [`crate::async_copy`].
    #[inline(always)]
    #[track_caller]
    pub fn copy_packet_async(self, row: usize, col: usize, from: Global<T>, j: usize, valid: bool) {
        // SAFETY: as in `packet`, and the launch contract for `from`.
        unsafe { backend::async_copy_16(self.pointer(row, col).cast(), from.0.wrapping_add(j).cast(), valid) }
    }
}

/// Fragments for [`TensorCore::mma`]; every lane of the warp must take part.
impl<T: TensorCore, const R: usize, const C: usize> SharedTile<T, R, C> {
    /// `A[m][k] = tile[row + m][col + k]`, 16 x 16.
    #[inline(always)]
    #[track_caller]
    pub fn a(self, row: usize, col: usize) -> T::A {
        // SAFETY: as in `at`, for the 16 x 16 elements at (row, col).
        unsafe { T::load_a(self.pointer(row, col), Self::STRIDE) }
    }

    /// `A[m][k] = tile[row + k][col + m]`, 16 x 16.
    #[inline(always)]
    #[track_caller]
    pub fn a_transposed(self, row: usize, col: usize) -> T::A {
        // SAFETY: as in `a`.
        unsafe { T::load_a_transposed(self.pointer(row, col), Self::STRIDE) }
    }

    /// Two fragments side by side in n: `B[k][n] = tile[row + n][col + k]`, k 0..16, n 0..16.
    #[inline(always)]
    #[track_caller]
    pub fn b_transposed(self, row: usize, col: usize) -> [T::B; 2] {
        // SAFETY: as in `a`.
        unsafe { T::load_b_transposed(self.pointer(row, col), Self::STRIDE) }
    }

    /// Two fragments side by side in n: `B[k][n] = tile[row + k][col + n]`, k 0..16, n 0..16.
    #[inline(always)]
    #[track_caller]
    pub fn b(self, row: usize, col: usize) -> [T::B; 2] {
        // SAFETY: as in `a`.
        unsafe { T::load_b(self.pointer(row, col), Self::STRIDE) }
    }

    /// Writes 16 x 8 accumulators, rounded, at (`row`, `col`).
    #[inline(always)]
    #[track_caller]
    pub fn set_accumulators(self, row: usize, col: usize, c: [f32; 4]) {
        let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
        // SAFETY: as in `at`.
        unsafe {
            T::store_pair(self.pointer(row + g, col + 2 * t), c[0], c[1]);
            T::store_pair(self.pointer(row + g + 8, col + 2 * t), c[2], c[3]);
        }
    }
}
