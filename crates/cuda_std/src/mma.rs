//! Tensor cores through `mma.sync` (`sm_80`): D (16 x 8) += A (16 x 16) · B (16 x 8), f32 accumulators.
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

/// This lane's part of A, where A[m][k] lies at m `by_m` + k `by_k`.
#[inline(always)]
#[track_caller]
unsafe fn owned_a(tile: *const f32, by_m: usize, by_k: usize) -> [f32; 8] {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    let at = |m: usize, k: usize| tile.wrapping_add((g + m) * by_m + (2 * t + k) * by_k);
    // SAFETY: the caller owns the 16 x 16 elements at `tile`.
    unsafe {
        [
            backend::load(at(0, 0)),
            backend::load(at(0, 1)),
            backend::load(at(8, 0)),
            backend::load(at(8, 1)),
            backend::load(at(0, 8)),
            backend::load(at(0, 9)),
            backend::load(at(8, 8)),
            backend::load(at(8, 9)),
        ]
    }
}

/// This lane's part of B, where B[k][n] lies at k `by_k` + n `by_n`.
#[inline(always)]
#[track_caller]
unsafe fn owned_b(tile: *const f32, by_k: usize, by_n: usize) -> [f32; 4] {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    let at = |k: usize| tile.wrapping_add((2 * t + k) * by_k + g * by_n);
    // SAFETY: the caller owns the 16 x 8 elements at `tile`.
    unsafe { [backend::load(at(0)), backend::load(at(1)), backend::load(at(8)), backend::load(at(9))] }
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
        // SAFETY: the caller owns the 16 x 16 elements at `tile`.
        unsafe { owned_a(tile, stride, 1) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a_transposed(tile: *const Self, stride: usize) -> Self::A {
        // SAFETY: as in `load_a`.
        unsafe { owned_a(tile, 1, stride) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: as in `load_a`.
        unsafe { [owned_b(tile, stride, 1), owned_b(tile.wrapping_add(8), stride, 1)] }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: as in `load_a`.
        unsafe { [owned_b(tile, 1, stride), owned_b(tile.wrapping_add(8 * stride), 1, stride)] }
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
