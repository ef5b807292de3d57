//! Tensor cores through `mma.sync` (`sm_80`): D (16 x 8) += A (16 x 16) · B (16 x 8), f32 accumulators.
//!
//! Lane `l` of the warp, with g = l / 4 and t = l % 4, owns these elements (row, column), in this order:
//! * of D: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1);
//! * of A: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) (g, 2t+8) (g, 2t+9) (g+8, 2t+8) (g+8, 2t+9);
//! * of B: (2t, g) (2t+1, g) (2t+8, g) (2t+9, g).
//!
//! Therefore two accumulator fragments that are adjacent in n form an A fragment after rounding; see
//! [`TensorCore::a_from_accumulators`].
//!
//! For bf16 the operation is one `mma.m16n8k16`. For f32 it has the same layout and consists of `mma.m16n8k8.tf32`. The
//! k index is permuted equally in A and B: slot t holds k = 2t, and slot t+4 holds k = 2t+1. Each operand is split into
//! two tf32 parts, and the three largest partial products are summed, which leaves a relative error of about 2^-21.
//!
//! With FP8 operands ([`mma_fp8`], `sm_89`), k has 32 values. A and B have the layout above, with pairs of adjacent numbers of a row of A, or
//! of a column of B, in place of bf16 numbers. Tensor cores of Ada and Blackwell may keep fewer bits of these sums than an f32, as those of
//! Hopper do ([`crate::hopper::wgmma`]). The emulator adds in f32, in ascending k.

use crate::backend;
use crate::element::{Element, Packet, bf16};
use crate::fp8::{Fp8, Fp8Format};
use crate::warp;

/// A storage type that tensor cores can multiply.
pub trait TensorCore: Element {
    /// A lane's fragment of A: 8 elements.
    type A: Copy;
    /// A lane's fragment of B: 4 elements.
    type B: Copy;

    /// Computes D += A · B.
    fn mma(d: &mut [f32; 4], a: Self::A, b: Self::B);

    /// Returns the A fragment with columns 0..8 from `left` and columns 8..16 from `right`, rounded to this type.
    fn a_from_accumulators(left: [f32; 4], right: [f32; 4]) -> Self::A;

    /// Computes D (16 x 8) += A (16 x k) · B (8 x k)ᵀ for rows of k = 4 · `PACKET` elements, as the sum of the elements of `d`.
    ///
    /// Lane l, with g = l / 4 and t = l % 4, provides packet t of rows g and g + 8 of A and of row g of B. D is distributed like the result
    /// of [`mma`](Self::mma). Each element of `d` is a chain of its own, so that instructions do not wait for each other.
    fn mma_packets(d: &mut [[f32; 4]; 2], a: [Packet<Self>; 2], b: Packet<Self>);

    /// Returns the B fragment with rows 0..8 from the first two elements of `upper` and rows 8..16 from those of `lower`, rounded to this type.
    /// D fragments with a row for each column of B have them in these lanes.
    fn b_from_accumulators(upper: [f32; 2], lower: [f32; 2]) -> Self::B;

    /// Returns an A fragment from packets that hold parts of columns 2t, 2t + 1, 2t + 8 and 2t + 9, in lane 4 g + t. Elements 2 `i` of the packets
    /// become row g, and elements 2 `i` + 1 row g + 8.
    fn a_from_packets(columns: [Packet<Self>; 4], i: usize) -> Self::A;

    #[doc(hidden)]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A;
    #[doc(hidden)]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2];
    #[doc(hidden)]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2];
    /// Stores two adjacent elements, rounded, in one access if possible.
    #[doc(hidden)]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32);
}

/// Computes D (16 x 8) += A (16 x 32) · B (32 x 8) with A in the format of `T` and B in E4M3.
#[inline(always)]
#[track_caller]
pub fn mma_fp8<T: Fp8>(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    match T::FORMAT {
        Fp8Format::E4m3 => backend::mma_e4m3(d, a, b),
        Fp8Format::E5m2 => backend::mma_e5m2(d, a, b),
    }
}

/// Loads the 16 x 32 bytes at `tile` as an A fragment of FP8, or if not `ROWS_FIRST`, as two B fragments that are adjacent in n.
///
/// # Safety
/// The bytes must be valid shared memory. `tile` and `stride`, in bytes, are multiples of 16.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn load_fp8<T: Fp8, const ROWS_FIRST: bool>(tile: *const T, stride: usize) -> [u32; 4] {
    // SAFETY: the caller's promise. Two FP8 numbers are loaded like a bf16 number.
    unsafe { backend::ldmatrix_x4(ldmatrix_row::<ROWS_FIRST>(tile.cast(), stride / 2).cast()) }
}

/// Returns the address that lane `l` passes to `ldmatrix.x4`: row l % 8 of matrix l / 8.
///
/// Matrices 1 and 3 are 8 rows (`ROWS_FIRST`) or 8 columns after matrices 0 and 2.
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
    fn mma_packets(d: &mut [[f32; 4]; 2], a: [Packet<Self>; 2], b: Packet<Self>) {
        // Slot 2t of k holds element 0 of the lane's packet, 2t + 1 element 1, 2t + 8 element 2, and 2t + 9 element 3: the same in A and B.
        // The second instruction multiplies elements 4 to 7.
        let [top, bottom] = a.map(Packet::words);
        let b = b.words();
        for i in 0..2 {
            let a = [top[2 * i], bottom[2 * i], top[2 * i + 1], bottom[2 * i + 1]];
            backend::mma_bf16(&mut d[i], a, [b[2 * i], b[2 * i + 1]]);
        }
    }

    #[inline(always)]
    fn b_from_accumulators(upper: [f32; 2], lower: [f32; 2]) -> Self::B {
        [backend::bf16x2(upper[0], upper[1]), backend::bf16x2(lower[0], lower[1])]
    }

    #[inline(always)]
    fn a_from_packets(columns: [Packet<Self>; 4], i: usize) -> Self::A {
        let [a, b, c, d] = columns.map(|column| column.words()[i]);
        let [even, odd] = [0x5410, 0x7632];
        [
            backend::permute_bytes(a, b, even),
            backend::permute_bytes(a, b, odd),
            backend::permute_bytes(c, d, even),
            backend::permute_bytes(c, d, odd),
        ]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A {
        // SAFETY: the caller guarantees that the 16 x 16 elements at `tile` are valid shared memory.
        unsafe { backend::ldmatrix_x4(ldmatrix_row::<true>(tile, stride).cast()) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: see `load_a`.
        let [a, b, c, d] = unsafe { backend::ldmatrix_x4_trans(ldmatrix_row::<true>(tile, stride).cast()) };
        [[a, b], [c, d]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: see `load_a`.
        let [a, b, c, d] = unsafe { backend::ldmatrix_x4(ldmatrix_row::<false>(tile, stride).cast()) };
        [[a, b], [c, d]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32) {
        // SAFETY: the caller guarantees that both elements are valid and that the first has an even index, which makes
        // the pair 4-byte aligned.
        unsafe { backend::store(at.cast::<u32>(), backend::bf16x2(first, second)) }
    }
}

/// Loads this lane's fragment of A, where A[m][k] is at offset m * `stride_m` + k * `stride_k`.
#[inline(always)]
#[track_caller]
unsafe fn fragment_a(tile: *const f32, stride_m: usize, stride_k: usize) -> [f32; 8] {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    let at = |m: usize, k: usize| tile.wrapping_add((g + m) * stride_m + (2 * t + k) * stride_k);
    // SAFETY: the caller guarantees that the 16 x 16 elements at `tile` are valid.
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

/// Loads this lane's fragment of B, where B[k][n] is at offset k * `stride_k` + n * `stride_n`.
#[inline(always)]
#[track_caller]
unsafe fn fragment_b(tile: *const f32, stride_k: usize, stride_n: usize) -> [f32; 4] {
    let (g, t) = ((warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    let at = |k: usize| tile.wrapping_add((2 * t + k) * stride_k + g * stride_n);
    // SAFETY: the caller guarantees that the 16 x 8 elements at `tile` are valid.
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
    fn mma_packets(d: &mut [[f32; 4]; 2], [top, bottom]: [Packet<Self>; 2], b: Packet<Self>) {
        let (x, y) = (|i| top.get(i), |i| bottom.get(i));
        let a = [x(0), x(1), y(0), y(1), x(2), x(3), y(2), y(3)];
        backend::mma_f32(&mut d[0], a, [b.get(0), b.get(1), b.get(2), b.get(3)]);
    }

    #[inline(always)]
    fn b_from_accumulators(upper: [f32; 2], lower: [f32; 2]) -> Self::B {
        [upper[0], upper[1], lower[0], lower[1]]
    }

    #[inline(always)]
    fn a_from_packets([a, b, c, d]: [Packet<Self>; 4], i: usize) -> Self::A {
        let pair = |x: Packet<Self>, y: Packet<Self>| [0, 1].map(|k| [x.get(2 * i + k), y.get(2 * i + k)]);
        let ([left_even, left_odd], [right_even, right_odd]) = (pair(a, b), pair(c, d));
        [left_even[0], left_even[1], left_odd[0], left_odd[1], right_even[0], right_even[1], right_odd[0], right_odd[1]]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_a(tile: *const Self, stride: usize) -> Self::A {
        // SAFETY: the caller guarantees that the 16 x 16 elements at `tile` are valid.
        unsafe { fragment_a(tile, stride, 1) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: see `load_a`.
        unsafe { [fragment_b(tile, stride, 1), fragment_b(tile.wrapping_add(8), stride, 1)] }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_b_transposed(tile: *const Self, stride: usize) -> [Self::B; 2] {
        // SAFETY: see `load_a`.
        unsafe { [fragment_b(tile, 1, stride), fragment_b(tile.wrapping_add(8 * stride), 1, stride)] }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_pair(at: *mut Self, first: f32, second: f32) {
        // SAFETY: the caller guarantees that both elements are valid.
        unsafe {
            backend::store(at, first);
            backend::store(at.wrapping_add(1), second);
        }
    }
}
