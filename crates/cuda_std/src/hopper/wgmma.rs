//! Warpgroup matrix multiply-accumulate (wgmma): D (64 x N) += A (64 x K) · B (K x N), with 32 bytes of K.
//!
//! A warpgroup is 128 threads: four consecutive warps, the first of which has an index divisible by four. The operands
//! are bf16 (K = 16), B in shared memory and A in shared memory or registers, or FP8 (K = 32), both in shared memory and
//! K-major. The accumulators are f32 in registers. The instruction is asynchronous.
//!
//! With FP8 operands, Hopper's tensor cores align the 32 products and the accumulator to the largest exponent and keep
//! about 14 bits of each before they add them. The emulator adds in f32, in ascending k. A kernel that needs f32
//! accuracy over a long K must add partial sums to other registers.
//!
//! Thread t of the warpgroup (warp w = t / 32, g = t % 32 / 4, c = t % 4) owns, for j in 0..N/8, the accumulators
//! d[4j..4j+4] = D[16w + g][8j + 2c], D[16w + g][8j + 2c + 1], D[16w + g + 8][8j + 2c], D[16w + g + 8][8j + 2c + 1].
//!
//! The required order is [`fence`], one or more [`Accumulators::mma`], [`commit`], [`wait`],
//! [`Accumulators::fence_accumulators`]. The accumulators must not be accessed in between. If a thread has accessed
//! registers of a wgmma (accumulators or A fragments) since the last fence, it must execute another fence before it
//! uses them in a wgmma.

use crate::backend;
use crate::element::{Packet, bf16};
use crate::fp8::Fp8;
use crate::fp8::Fp8Format::{E4m3, E5m2};
use crate::shared::Layout;
use core::ops::IndexMut;

/// A tile of `R` rows of 128 bytes (64 bf16 or 128 FP8) in shared memory with the 128-byte swizzle: 16-byte chunk c of
/// row r is stored at chunk c ^ (r % 8). The tile is aligned to 1024 bytes. Methods count columns in bf16 unless they
/// say otherwise.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct SwizzledTile<const R: usize>(*mut bf16);

impl<const R: usize> SwizzledTile<R> {
    #[inline(always)]
    pub(super) fn pointer(self) -> *mut bf16 {
        self.0
    }

    /// Returns the tile of `S` rows that starts at `row`, a multiple of 8.
    #[inline(always)]
    pub fn rows<const S: usize>(self, row: u32) -> SwizzledTile<S> {
        SwizzledTile(self.0.wrapping_add(row as usize * 64))
    }

    /// Returns the tile of the same size that starts `count` tiles after this one.
    #[must_use]
    #[inline(always)]
    pub fn offset_tiles(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count as usize * R * 64))
    }

    /// Returns the tile unchanged, but hides its address from the compiler.
    ///
    /// Descriptors are then computed where they are needed instead of occupying registers across a loop.
    #[must_use]
    #[inline(always)]
    pub fn opaque(self) -> Self {
        Self(backend::hopper::opaque(self.0))
    }

    /// Returns the memory from `row`, a multiple of 8, on as a tile of `S` rows of 64 bytes.
    #[inline(always)]
    pub fn narrow<const S: usize>(self, row: u32) -> NarrowTile<S> {
        NarrowTile(self.rows::<R>(row).0)
    }

    /// Returns the descriptor of a K-major operand: bytes 32 `k` .. 32 `k` + 32 of each row, which are 16 columns of bf16
    /// or 32 columns of FP8. The tile's rows are m (or n).
    #[inline(always)]
    pub fn k_major_operand(self, k: u32) -> KMajorOperand {
        // The descriptor holds addresses in units of 16 bytes. A row of the tile spans 8 units, so no carry leaves the
        // address field.
        KMajorOperand(backend::hopper::k_major_operand(self.0, 2 * k))
    }

    /// Returns the descriptor of an MN-major operand: rows 16 `k` .. 16 `k` + 16 of this tile. The tile's rows are k
    /// and its columns are m (or n). An operand of more than 64 columns continues in the following tiles of this size.
    #[inline(always)]
    pub fn mn_major_operand(self, k: u32) -> MnMajorOperand {
        // 16 rows are 2048 bytes, that is 128 units of 16 bytes.
        MnMajorOperand(backend::hopper::mn_major_operand(self.0, R as u32 * 128, 128 * k))
    }

    /// Loads rows `row` .. `row` + 16, columns 16 `k` .. 16 `k` + 16 as a warp's fragment of A in registers
    /// (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`). `row` must be a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub fn load_a_fragment(self, row: u32, k: u32) -> [u32; 4] {
        let lane = crate::warp::lane();
        let (row, chunk) = (row + lane % 16, 2 * k + lane / 16);
        let at = self.0.wrapping_add((row * 64 + (chunk ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` reserved R rows for the tile, and the kernel's rows stay within it.
        unsafe { backend::hopper::load_a_x4(at.cast()) }
    }

    /// Loads 16-byte chunk `chunk` of `row` (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, row: u32, chunk: u32) -> Packet<bf16> {
        let at = self.0.wrapping_add((row * 64 + (chunk ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` reserved R rows for the tile, and the kernel's rows stay within it.
        Packet::from_words(unsafe { backend::hopper::load_x4(at.cast()) })
    }

    /// Stores four 8 x 8 bf16 matrices in one instruction (`stmatrix.sync.aligned.m8n8.x4.shared.b16`).
    ///
    /// `words` holds a packed pair of each matrix in the accumulator layout of this module. Lane l of the warp gives
    /// the destination of row l % 8 of matrix l / 8: 16-byte chunk `chunk` of `row`.
    #[inline(always)]
    #[track_caller]
    pub fn store_matrices(self, row: u32, chunk: u32, words: [u32; 4]) {
        let at = self.0.wrapping_add((row * 64 + (chunk ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` reserved R rows for the tile, and the kernel's rows stay within it.
        unsafe { backend::hopper::stmatrix_x4(at.cast(), words) }
    }

    /// Stores the transposes of four 8 x 8 bf16 matrices in one instruction
    /// (`stmatrix.sync.aligned.m8n8.x4.trans.shared.b16`).
    ///
    /// `words` is that of [`store_matrices`](Self::store_matrices). Lane l of the warp gives the destination of column
    /// l % 8 of matrix l / 8: 16-byte chunk `chunk` of `row`.
    #[inline(always)]
    #[track_caller]
    pub fn store_transposed_matrices(self, row: u32, chunk: u32, words: [u32; 4]) {
        let at = self.0.wrapping_add((row * 64 + (chunk ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` reserved R rows for the tile, and the kernel's rows stay within it.
        unsafe { backend::hopper::stmatrix_x4_trans(at.cast(), words) }
    }
}

impl SwizzledTile<64> {
    /// Stores 64 x 64 elements, each warp of a warpgroup 16 rows, with four `stmatrix` instructions.
    ///
    /// `fragments` are the accumulators of 64 rows x 64 columns, rounded to bf16: word j of fragment i holds a packed pair
    /// of the accumulators 8 i + 2 j and 8 i + 2 j + 1.
    #[inline(always)]
    #[track_caller]
    pub fn store_fragments(self, fragments: &[[u32; 4]; 4]) {
        let (lane, warp) = (crate::warp::lane(), crate::thread::thread_idx_x() / 32 % 4);
        let row = warp * 16 + lane % 16;
        let first = self.0.wrapping_add((row * 64 + ((lane / 16) ^ (row % 8)) * 8) as usize);
        for i in 0..4 {
            // Chunk 2 i of a row. The tile is aligned, so the address has the bits of the chunk.
            let at = first.map_addr(|address| address ^ (32 * i));
            // SAFETY: `Layout` reserved 64 rows for the tile.
            unsafe { backend::hopper::stmatrix_x4(at.cast(), fragments[i]) }
        }
    }
}

/// A tile of `R` rows of 64 bytes (32 bf16 or 64 FP8) in shared memory with the 64-byte swizzle: 16-byte chunk c of row r
/// is stored at chunk c ^ (r / 2 % 4). The tile is aligned to 512 bytes, and `R` is a multiple of 8.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct NarrowTile<const R: usize>(*mut bf16);

impl<const R: usize> NarrowTile<R> {
    #[inline(always)]
    pub(super) fn pointer(self) -> *mut bf16 {
        self.0
    }

    /// Returns the tile of the same size that starts `count` tiles after this one.
    #[must_use]
    #[inline(always)]
    pub fn offset_tiles(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count as usize * R * 32))
    }

    /// Returns a pointer to 16-byte chunk `chunk` of `row`.
    #[inline(always)]
    fn chunk(self, row: u32, chunk: u32) -> *mut bf16 {
        self.0.wrapping_add((row * 32 + (chunk ^ (row / 2 % 4)) * 8) as usize)
    }

    /// Loads rows `row` .. `row` + 16, columns 16 `k` .. 16 `k` + 16 in the layout of [`SwizzledTile::load_a_fragment`].
    #[inline(always)]
    #[track_caller]
    pub fn load_a_fragment(self, row: u32, k: u32) -> [u32; 4] {
        let lane = crate::warp::lane();
        // SAFETY: `Layout` reserved the memory of the tile, and the kernel's rows stay within it.
        unsafe { backend::hopper::load_a_x4(self.chunk(row + lane % 16, 2 * k + lane / 16).cast()) }
    }

    /// Stores four 8 x 8 bf16 matrices. See [`SwizzledTile::store_matrices`].
    #[inline(always)]
    #[track_caller]
    pub fn store_matrices(self, row: u32, chunk: u32, words: [u32; 4]) {
        // SAFETY: see `load_a_fragment`.
        unsafe { backend::hopper::stmatrix_x4(self.chunk(row, chunk).cast(), words) }
    }

    /// Stores the transposes of four 8 x 8 matrices of 16-bit elements. See [`SwizzledTile::store_transposed_matrices`].
    #[inline(always)]
    #[track_caller]
    pub fn store_transposed_matrices(self, row: u32, chunk: u32, words: [u32; 4]) {
        // SAFETY: see `load_a_fragment`.
        unsafe { backend::hopper::stmatrix_x4_trans(self.chunk(row, chunk).cast(), words) }
    }

    /// Loads 16-byte chunk `chunk` of `row` (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn chunk_words(self, row: u32, chunk: u32) -> [u32; 4] {
        // SAFETY: see `load_a_fragment`.
        unsafe { backend::hopper::load_x4(self.chunk(row, chunk).cast()) }
    }

    /// Stores the FP8 numbers of columns `column` (the low byte of `pair`) and `column` + 1 of `row` (`st.shared.b16`).
    /// `column` counts FP8 numbers and must be even.
    #[inline(always)]
    #[track_caller]
    pub fn set_fp8_pair(self, row: u32, column: u32, pair: u16) {
        let at = self.chunk(row, column / 16).wrapping_add((column % 16 / 2) as usize);
        // SAFETY: see `load_a_fragment`.
        unsafe { backend::hopper::store_b16(at.cast(), pair) }
    }
}

#[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
impl Layout {
    /// Reserves a swizzled tile of `R` rows.
    #[inline(always)]
    #[track_caller]
    pub fn swizzled<const R: usize>(&mut self) -> SwizzledTile<R> {
        let tile = self.take::<SwizzledTile<R>, bf16>(R * 128, 1024, Some((64, 64)));
        SwizzledTile(backend::hopper::window(tile.pointer()))
    }
}

/// Descriptor of a K-major operand: consecutive elements in memory are consecutive in k.
#[derive(Clone, Copy)]
pub struct KMajorOperand(u64);

/// Descriptor of an MN-major operand: consecutive elements in memory are consecutive in m (or n).
#[derive(Clone, Copy)]
pub struct MnMajorOperand(u64);

/// A descriptor of an operand in shared memory, K-major or MN-major.
pub trait SharedOperand: Copy {
    /// Whether the operand is MN-major (`imm-trans-a`, `imm-trans-b`).
    const MN_MAJOR: bool;

    #[doc(hidden)]
    fn descriptor(self) -> u64;

    /// Returns the descriptor of B from column `columns` on, a multiple of 64.
    #[must_use]
    fn skip_columns(self, columns: u32) -> Self;
}

impl SharedOperand for KMajorOperand {
    const MN_MAJOR: bool = false;

    #[inline(always)]
    fn descriptor(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn skip_columns(self, columns: u32) -> Self {
        // A column is a row of 128 bytes, 8 units of the address.
        Self(self.0 + u64::from(columns * 8))
    }
}

impl SharedOperand for MnMajorOperand {
    const MN_MAJOR: bool = true;

    #[inline(always)]
    fn descriptor(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn skip_columns(self, columns: u32) -> Self {
        // Bits 16..30 hold the leading offset, which is the distance of 64 columns in the same units.
        Self(self.0 + u64::from(columns / 64) * (self.0 >> 16 & 0x3fff))
    }
}

/// Orders earlier accesses to registers and shared memory before the wgmma instructions that follow
/// (`wgmma.fence.sync.aligned`).
#[inline(always)]
pub fn fence() {
    backend::hopper::wgmma_fence();
}

/// Commits the wgmma instructions since the last commit as a group (`wgmma.commit_group.sync.aligned`).
#[inline(always)]
pub fn commit() {
    backend::hopper::wgmma_commit();
}

/// Waits until at most the `PENDING` newest groups are in flight (`wgmma.wait_group.sync.aligned PENDING`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u32>() {
    backend::hopper::wgmma_wait::<PENDING>();
}

/// A thread's accumulators of a 64 x N tile of D: N / 2 floats.
pub trait Accumulators: Copy + IndexMut<usize, Output = f32> {
    /// Accumulators of value zero.
    const ZERO: Self;
    /// The tile's N.
    const COLUMNS: u32;

    /// Issues D = A · B + (D if `accumulate`) with both operands in shared memory
    /// (`wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16`).
    #[track_caller]
    fn mma<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool);

    /// Issues D = A · B + (D if `accumulate`) with A in registers and B in shared memory.
    ///
    /// Each warp holds 16 rows of A in the fragment layout of [`crate::mma`]. `a` must not be overwritten before the
    /// wait.
    #[track_caller]
    fn mma_with_a_registers<B: SharedOperand>(&mut self, a: [u32; 4], b: B, accumulate: bool);

    /// Issues D = A · B + (D if `accumulate`) with both operands FP8 in shared memory
    /// (`wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3` and the other pairs of types).
    #[track_caller]
    fn mma_fp8<A: Fp8, B: Fp8>(&mut self, a: KMajorOperand, b: KMajorOperand, accumulate: bool);

    /// Prevents the compiler from moving reads of the accumulators before the wait that precedes this call.
    #[track_caller]
    fn fence_accumulators(&mut self);
}

macro_rules! accumulators {
    ($($floats:literal $wgmma_ss:ident $wgmma_rs:ident $wgmma_fp8:ident $fence:ident)*) => {$(
        impl Accumulators for [f32; $floats] {
            const ZERO: Self = [0.0; $floats];
            const COLUMNS: u32 = 2 * $floats;

            #[inline(always)]
            #[track_caller]
            fn mma<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool) {
                let (a, b) = (a.descriptor(), b.descriptor());
                match (A::MN_MAJOR, B::MN_MAJOR) {
                    (false, false) => backend::hopper::$wgmma_ss::<0, 0>(self, a, b, accumulate),
                    (false, true) => backend::hopper::$wgmma_ss::<0, 1>(self, a, b, accumulate),
                    (true, false) => backend::hopper::$wgmma_ss::<1, 0>(self, a, b, accumulate),
                    (true, true) => backend::hopper::$wgmma_ss::<1, 1>(self, a, b, accumulate),
                }
            }

            #[inline(always)]
            #[track_caller]
            fn mma_with_a_registers<B: SharedOperand>(&mut self, a: [u32; 4], b: B, accumulate: bool) {
                let b = b.descriptor();
                if B::MN_MAJOR {
                    backend::hopper::$wgmma_rs::<1>(self, a, b, accumulate);
                } else {
                    backend::hopper::$wgmma_rs::<0>(self, a, b, accumulate);
                }
            }

            #[inline(always)]
            #[track_caller]
            fn mma_fp8<A: Fp8, B: Fp8>(&mut self, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
                let (a, b) = (a.descriptor(), b.descriptor());
                match (A::FORMAT, B::FORMAT) {
                    (E4m3, E4m3) => backend::hopper::$wgmma_fp8::<false, false>(self, a, b, accumulate),
                    (E4m3, E5m2) => backend::hopper::$wgmma_fp8::<false, true>(self, a, b, accumulate),
                    (E5m2, E4m3) => backend::hopper::$wgmma_fp8::<true, false>(self, a, b, accumulate),
                    (E5m2, E5m2) => backend::hopper::$wgmma_fp8::<true, true>(self, a, b, accumulate),
                }
            }

            #[inline(always)]
            #[track_caller]
            fn fence_accumulators(&mut self) {
                backend::hopper::$fence(self);
            }
        }
    )*};
}

accumulators! {
    32 wgmma_ss_n64 wgmma_rs_n64 wgmma_fp8_n64 fence_accumulators_n64
    64 wgmma_ss_n128 wgmma_rs_n128 wgmma_fp8_n128 fence_accumulators_n128
    96 wgmma_ss_n192 wgmma_rs_n192 wgmma_fp8_n192 fence_accumulators_n192
    128 wgmma_ss_n256 wgmma_rs_n256 wgmma_fp8_n256 fence_accumulators_n256
}

/// Columns of the first of the two instructions that compute N = 320. The largest N of one instruction is 256.
const FIRST: u32 = 192;

/// Splits the accumulators of N = 320 into those of the two instructions, N = 192 and N = 128.
#[inline(always)]
fn split_320(d: &mut [f32; 160]) -> (&mut [f32; 96], &mut [f32; 64]) {
    let (first, rest) = d.split_at_mut(96);
    // The lengths match by construction.
    let (Ok(first), Ok(rest)) = (first.try_into(), rest.try_into()) else { unreachable!() };
    (first, rest)
}

impl Accumulators for [f32; 160] {
    const ZERO: Self = [0.0; 160];
    const COLUMNS: u32 = 320;

    #[inline(always)]
    #[track_caller]
    fn mma<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool) {
        let (first, rest) = split_320(self);
        first.mma(a, b, accumulate);
        rest.mma(a, b.skip_columns(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn mma_with_a_registers<B: SharedOperand>(&mut self, a: [u32; 4], b: B, accumulate: bool) {
        let (first, rest) = split_320(self);
        first.mma_with_a_registers(a, b, accumulate);
        rest.mma_with_a_registers(a, b.skip_columns(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn mma_fp8<A: Fp8, B: Fp8>(&mut self, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        let (first, rest) = split_320(self);
        first.mma_fp8::<A, B>(a, b, accumulate);
        rest.mma_fp8::<A, B>(a, b.skip_columns(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn fence_accumulators(&mut self) {
        let (first, rest) = split_320(self);
        first.fence_accumulators();
        rest.fence_accumulators();
    }
}
