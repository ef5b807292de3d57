//! Tensor cores through `mma.sync` (sm_80): D (16 x 8) += A (16 x 16) · B (16 x 8), f32 accumulators.
//!
//! Lane `l` of the warp, with g = l / 4 and t = l % 4, owns
//! * of D: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1), in this order;
//! * of A: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) (g, 2t+8) (g, 2t+9) (g+8, 2t+8) (g+8, 2t+9);
//! * of B: (2t, g) (2t+1, g) (2t+8, g) (2t+9, g).
//!
//! So two accumulators side by side in n are an A fragment once rounded: [`TensorCore::a_from_accumulators`].
//! bf16 is one `mma.m16n8k16`. f32 has the same ownership and is made of `mma.m16n8k8.tf32`: the k index is permuted in
//! A and B alike (slot t holds k = 2t, slot t+4 holds k = 2t+1), and each operand is split in two tf32 parts whose three
//! largest products are summed, which leaves a relative error near 2^-21.

use crate::backend;
use crate::element::{Element, bf16};
use crate::warp;

/// A storage type the tensor cores multiply.
pub trait TensorCore: Element {
    /// A lane's 8 elements of A.
    type A: Copy;
    /// A lane's 4 elements of B.
    type B: Copy;

    /// D += A · B.
    fn mma(d: &mut [f32; 4], a: Self::A, b: Self::B);

    /// The A fragment whose columns 0..8 are `left` and 8..16 are `right`, rounded.
    fn a_from_accumulators(left: [f32; 4], right: [f32; 4]) -> Self::A;

    #[doc(hidden)]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A;
    #[doc(hidden)]
    unsafe fn load_a_transposed(tile: *const Self, stride: usize) -> Self::A;
    #[doc(hidden)]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2];
    #[doc(hidden)]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2];
    /// Writes two neighbours, rounded, in one access.
    #[doc(hidden)]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32);
}

/// The row of an 8 x 8 matrix that lane `l` points `ldmatrix.x4` at: matrix l / 8, row l % 8; matrices 1 and 3 lie
/// 8 rows (`ROWS_FIRST`) or 8 columns further than 0 and 2.
#[inline(always)]
fn ldmatrix_row<const ROWS_FIRST: bool>(tile: *const bf16, stride: usize) -> *const bf16 {
    let lane = warp::lane() as usize;
    let (inner, outer) = ((lane / 8) % 2 * 8, lane / 16 * 8);
    let (row, col) = if ROWS_FIRST { (inner, outer) } else { (outer, inner) };
    tile.wrapping_add((row + lane % 8) * stride + col)
}

impl TensorCore for bf16 {
    type A = [u32; 4];
    type B = [u32; 2];

    #[inline(always)]
    #[track_caller]
    fn mma(d: &mut [f32; 4], a: Self::A, b: Self::B) {
        backend::mma_bf16(d, a, b);
    }

    #[inline(always)]
    fn a_from_accumulators(left: [f32; 4], right: [f32; 4]) -> Self::A {
        [
            backend::bf16x2(left[0], left[1]),
            backend::bf16x2(left[2], left[3]),
            backend::bf16x2(right[0], right[1]),
            backend::bf16x2(right[2], right[3]),
        ]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A {
        // SAFETY: the caller owns the 16 x 16 elements at `tile`, in shared memory.
        unsafe { backend::ldmatrix_x4(ldmatrix_row::<true>(tile, stride).cast()) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a_transposed(tile: *const Self, stride: usize) -> Self::A {
        // SAFETY: as in `load_a`.
        unsafe { backend::ldmatrix_x4_trans(ldmatrix_row::<false>(tile, stride).cast()) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: as in `load_a`.
        let [a, b, c, d] = unsafe { backend::ldmatrix_x4_trans(ldmatrix_row::<true>(tile, stride).cast()) };
        [[a, b], [c, d]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: as in `load_a`.
        let [a, b, c, d] = unsafe { backend::ldmatrix_x4(ldmatrix_row::<false>(tile, stride).cast()) };
        [[a, b], [c, d]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32) {
        // SAFETY: the caller owns both elements; the first has an even index, so the pair is 4-byte aligned.
        unsafe { backend::store(at.cast::<u32>(), backend::bf16x2(first, second)) }
    }
}

/// Offsets (m or n, k) of a lane's elements of A, in fragment order.
#[inline(always)]
fn owned_a(i: usize) -> (usize, usize) {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    (g + i / 2 % 2 * 8, 2 * t + i % 2 + i / 4 * 8)
}

/// Offsets (k, n) of a lane's elements of B, in fragment order.
#[inline(always)]
fn owned_b(i: usize) -> (usize, usize) {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    (2 * t + i % 2 + i / 2 * 8, g)
}

impl TensorCore for f32 {
    type A = [f32; 8];
    type B = [f32; 4];

    #[inline(always)]
    #[track_caller]
    fn mma(d: &mut [f32; 4], a: Self::A, b: Self::B) {
        backend::mma_f32(d, a, b);
    }

    #[inline(always)]
    fn a_from_accumulators(left: [f32; 4], right: [f32; 4]) -> Self::A {
        [left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A {
        let at = |i| {
            let (m, k) = owned_a(i);
            // SAFETY: the caller owns the 16 x 16 elements at `tile`.
            unsafe { backend::load(tile.wrapping_add(m * stride + k)) }
        };
        [at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a_transposed(tile: *const Self, stride: usize) -> Self::A {
        let at = |i| {
            let (m, k) = owned_a(i);
            // SAFETY: as in `load_a`.
            unsafe { backend::load(tile.wrapping_add(k * stride + m)) }
        };
        [at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2] {
        let at = |half: usize, i| {
            let (k, n) = owned_b(i);
            // SAFETY: as in `load_a`.
            unsafe { backend::load(tile.wrapping_add(k * stride + half * 8 + n)) }
        };
        [[at(0, 0), at(0, 1), at(0, 2), at(0, 3)], [at(1, 0), at(1, 1), at(1, 2), at(1, 3)]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2] {
        let at = |half: usize, i| {
            let (k, n) = owned_b(i);
            // SAFETY: as in `load_a`.
            unsafe { backend::load(tile.wrapping_add((half * 8 + n) * stride + k)) }
        };
        [[at(0, 0), at(0, 1), at(0, 2), at(0, 3)], [at(1, 0), at(1, 1), at(1, 2), at(1, 3)]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32) {
        // SAFETY: the caller owns both elements.
        unsafe {
            backend::store(at, first);
            backend::store(at.wrapping_add(1), second);
        }
    }
}
