//! Warpgroup matrix products: 128 threads (four warps from a multiple of four) compute D (64 x N) += A (64 x 16) · B (16 x N),
//! bf16 operands read straight from shared memory, f32 accumulators in registers, asynchronously.
//!
//! Thread t of the warpgroup (warp w = t / 32, g = t % 32 / 4, c = t % 4) owns, for j in 0..N/8, the accumulators
//! d[4j..4j+4] = D[16w + g][8j + 2c], D[16w + g][8j + 2c + 1], D[16w + g + 8][8j + 2c], D[16w + g + 8][8j + 2c + 1].
//!
//! The order is [`fence`], products, [`commit`], [`wait`], [`Accumulators::settle`]; no accumulator may be touched in
//! between. Registers (accumulators, left operands) that were touched since need another fence before their next product.

use crate::backend;
use crate::element::{Packet, bf16};
use crate::shared::Layout;
use core::ops::IndexMut;

/// `R` rows of 64 bf16 (128 bytes) in shared memory in TMA's 128-byte swizzle: the 16-byte piece p of row r lies at piece
/// p ^ (r % 8). 1024-byte aligned. As an operand its rows are m (or n) and its columns k.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct SwizzledTile<const R: usize>(*mut bf16);

impl<const R: usize> SwizzledTile<R> {
    #[inline(always)]
    pub(super) fn pointer(self) -> *mut bf16 {
        self.0
    }

    /// The tile of `S` rows that begins at `row`, a multiple of 8.
    #[inline(always)]
    pub fn rows<const S: usize>(self, row: u32) -> SwizzledTile<S> {
        SwizzledTile(self.0.wrapping_add(row as usize * 64))
    }

    /// The tile of this size that lies `count` such tiles further on.
    #[must_use]
    #[inline(always)]
    pub fn same_shape_after(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count as usize * R * 64))
    }

    /// What wgmma needs to know of an operand that is columns 16 `k` .. 16 `k` + 16 of this tile: its address, 1024 bytes
    /// from one group of eight rows to the next, 128-byte swizzle.
    #[inline(always)]
    pub fn operand(self, k: u32) -> Operand {
        // The descriptor counts in 16 bytes, and a tile's row spans 8 of those: no carry leaves the address field.
        Operand(backend::hopper::operand(self.0, 2 * k))
    }

    /// As [`operand`](Self::operand), of a tile whose rows are k and whose columns are m (or n): rows 16 `k` .. 16 `k` + 16.
    /// An operand of more than 64 columns goes on in the tiles of this size that follow.
    #[inline(always)]
    pub fn operand_by_rows(self, k: u32) -> OperandByRows {
        // 16 rows are 2048 bytes; the stride between groups of eight rows stays the same.
        OperandByRows(backend::hopper::operand_by_rows(self.0, R as u32 * 128, 128 * k))
    }

    /// Rows `row` .. `row` + 16, columns 16 `k` .. 16 `k` + 16 as a warp's part of a left operand in registers
    /// (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`). `row` a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub fn left(self, row: u32, k: u32) -> [u32; 4] {
        let lane = crate::warp::lane();
        let (row, piece) = (row + lane % 16, 2 * k + lane / 16);
        let at = self.0.wrapping_add((row * 64 + (piece ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` gave the tile R rows; a kernel's rows stay in it.
        unsafe { backend::hopper::left_x4(at.cast()) }
    }

    /// 16-byte piece `piece` of `row` (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, row: u32, piece: u32) -> Packet<bf16> {
        let at = self.0.wrapping_add((row * 64 + (piece ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` gave the tile R rows; a kernel's rows stay in it.
        Packet::from_words(unsafe { backend::hopper::load_x4(at.cast()) })
    }

    /// Writes four 8 x 8 matrices of packed pairs, as the accumulators' ownership above has them, in one instruction
    /// (`stmatrix.sync.aligned.m8n8.x4.shared.b16`): lane l of the warp points at `row`, 16-byte piece `piece`.
    #[inline(always)]
    #[track_caller]
    pub fn store_matrices(self, row: u32, piece: u32, words: [u32; 4]) {
        let at = self.0.wrapping_add((row * 64 + (piece ^ (row % 8)) * 8) as usize);
        // SAFETY: `Layout` gave the tile R rows; a kernel's rows stay in it.
        unsafe { backend::hopper::stmatrix_x4(at.cast(), words) }
    }
}

impl Layout {
    /// A swizzled tile of `R` rows.
    #[inline(always)]
    pub fn swizzled<const R: usize>(&mut self) -> SwizzledTile<R> {
        SwizzledTile(backend::hopper::window(self.take(R * 128, 1024)).cast())
    }
}

/// Descriptor of an operand whose rows are m or n: k runs along memory.
#[derive(Clone, Copy)]
pub struct Operand(u64);

/// Descriptor of an operand whose rows are k: m or n runs along memory.
#[derive(Clone, Copy)]
pub struct OperandByRows(u64);

/// Either kind of descriptor.
pub trait SharedOperand: Copy {
    /// Whether the rows are k (`imm-trans-a`, `imm-trans-b`).
    const BY_ROWS: bool;

    #[doc(hidden)]
    fn descriptor(self) -> u64;

    /// As B: what begins `columns` columns further on, a multiple of 64.
    #[must_use]
    fn after(self, columns: u32) -> Self;
}

impl SharedOperand for Operand {
    const BY_ROWS: bool = false;

    #[inline(always)]
    fn descriptor(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn after(self, columns: u32) -> Self {
        // A column is a row of 128 bytes, 8 units of the address.
        Self(self.0 + u64::from(columns * 8))
    }
}

impl SharedOperand for OperandByRows {
    const BY_ROWS: bool = true;

    #[inline(always)]
    fn descriptor(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn after(self, columns: u32) -> Self {
        // The leading offset, in bits 16..30 and in the same units, is that of 64 columns.
        Self(self.0 + u64::from(columns / 64) * (self.0 >> 16 & 0x3fff))
    }
}

/// Orders accumulators and ordinary shared-memory accesses before the products that follow (`wgmma.fence.sync.aligned`).
#[inline(always)]
pub fn fence() {
    backend::hopper::wgmma_fence();
}

/// Closes a group of products (`wgmma.commit_group.sync.aligned`).
#[inline(always)]
pub fn commit() {
    backend::hopper::wgmma_commit();
}

/// Waits until at most `PENDING` of the newest groups are under way (`wgmma.wait_group.sync.aligned PENDING`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u32>() {
    backend::hopper::wgmma_wait::<PENDING>();
}

/// Accumulators of a 64 x N product: N/2 floats per thread.
pub trait Accumulators: Copy + IndexMut<usize, Output = f32> {
    const ZERO: Self;
    /// N
    const COLUMNS: u32;

    /// Starts D = A · B + (D if `accumulate`) (`wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16`).
    #[track_caller]
    fn product<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool);

    /// As [`product`](Self::product) with A (64 x 16) in registers, 16 rows per warp, as `mma.sync` has it. `a` may not be
    /// overwritten before the wait.
    #[track_caller]
    fn product_with(&mut self, a: [u32; 4], b: Operand, accumulate: bool);

    /// As [`product_with`](Self::product_with), for B in rows of k (`imm-trans-b` = 1).
    #[track_caller]
    fn product_with_rows(&mut self, a: [u32; 4], b: OperandByRows, accumulate: bool);

    /// Keeps the compiler from moving reads of the accumulators before the wait that precedes this call.
    #[track_caller]
    fn settle(&mut self);
}

macro_rules! accumulators {
    ($($floats:literal $product:ident $product_with:ident $settle:ident)*) => {$(
        impl Accumulators for [f32; $floats] {
            const ZERO: Self = [0.0; $floats];
            const COLUMNS: u32 = 2 * $floats;

            #[inline(always)]
            #[track_caller]
            fn product<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool) {
                let (a, b) = (a.descriptor(), b.descriptor());
                match (A::BY_ROWS, B::BY_ROWS) {
                    (false, false) => backend::hopper::$product::<0, 0>(self, a, b, accumulate),
                    (false, true) => backend::hopper::$product::<0, 1>(self, a, b, accumulate),
                    (true, false) => backend::hopper::$product::<1, 0>(self, a, b, accumulate),
                    (true, true) => backend::hopper::$product::<1, 1>(self, a, b, accumulate),
                }
            }

            #[inline(always)]
            #[track_caller]
            fn product_with(&mut self, a: [u32; 4], b: Operand, accumulate: bool) {
                backend::hopper::$product_with::<0>(self, a, b.0, accumulate);
            }

            #[inline(always)]
            #[track_caller]
            fn product_with_rows(&mut self, a: [u32; 4], b: OperandByRows, accumulate: bool) {
                backend::hopper::$product_with::<1>(self, a, b.0, accumulate);
            }

            #[inline(always)]
            #[track_caller]
            fn settle(&mut self) {
                backend::hopper::$settle(self);
            }
        }
    )*};
}

accumulators! {
    32 wgmma_n64 wgmma_with_n64 settle_n64
    64 wgmma_n128 wgmma_with_n128 settle_n128
    96 wgmma_n192 wgmma_with_n192 settle_n192
    128 wgmma_n256 wgmma_with_n256 settle_n256
}

/// Columns of the first of the two products that one of 320 columns is: no instruction is as wide.
const FIRST: u32 = 192;

/// Accumulators of a product of 320 columns, and of the rest of it.
#[inline(always)]
fn halves(d: &mut [f32; 160]) -> (&mut [f32; 96], &mut [f32; 64]) {
    let (first, rest) = d.split_at_mut(96);
    // Both have the lengths they were split at.
    let (Ok(first), Ok(rest)) = (first.try_into(), rest.try_into()) else { unreachable!() };
    (first, rest)
}

impl Accumulators for [f32; 160] {
    const ZERO: Self = [0.0; 160];
    const COLUMNS: u32 = 320;

    #[inline(always)]
    #[track_caller]
    fn product<A: SharedOperand, B: SharedOperand>(&mut self, a: A, b: B, accumulate: bool) {
        let (first, rest) = halves(self);
        first.product(a, b, accumulate);
        rest.product(a, b.after(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn product_with(&mut self, a: [u32; 4], b: Operand, accumulate: bool) {
        let (first, rest) = halves(self);
        first.product_with(a, b, accumulate);
        rest.product_with(a, b.after(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn product_with_rows(&mut self, a: [u32; 4], b: OperandByRows, accumulate: bool) {
        let (first, rest) = halves(self);
        first.product_with_rows(a, b, accumulate);
        rest.product_with_rows(a, b.after(FIRST), accumulate);
    }

    #[inline(always)]
    #[track_caller]
    fn settle(&mut self) {
        let (first, rest) = halves(self);
        first.settle();
        rest.settle();
    }
}
