//! Tiles of a block of four warps: copies to and from shared memory, and matmuls on the tensor cores.
//!
//! A block computes R x C matrices, C at most 128. Each warp owns R / 4 consecutive rows of the result and of the left
//! operand, in strips of 16. Every warp reads the whole right operand, once for all its strips.

use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, SharedTile, device, thread, warp};

/// Threads of a block.
pub const THREADS: usize = 128;
const WARPS: usize = THREADS / warp::LANES as usize;
const LANES: usize = warp::LANES as usize;

/// Maximum number of strips of a warp. The arrays below are sized for the largest matrix. Elements outside of R x C are
/// never accessed, so they take no registers.
const STRIPS: usize = 2;
/// Maximum number of columns of a matrix.
const COLUMNS: usize = 128;

/// The T rows of one head, HS elements each, in a packed tensor. Row t begins at element `offset + t * stride`.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Index of the first row's first element.
    pub offset: usize,
    /// Distance between rows, in elements.
    pub stride: usize,
    /// Number of rows, T.
    pub count: usize,
}

impl Rows {
    /// Returns the index of the first element of a row.
    #[inline(always)]
    pub fn element(self, row: usize) -> usize {
        self.offset + row * self.stride
    }

    /// Hides from the compiler that the stride is loop-invariant.
    ///
    /// Otherwise the compiler keeps the offsets of all passes of a copy in registers. With an opaque stride it adds them up in each copy.
    #[inline(always)]
    pub fn with_opaque_stride(self) -> Self {
        Self { stride: thread::opaque(self.stride as u32) as usize, ..self }
    }
}

/// Starts an asynchronous copy of rows `first .. first + R` of `from` to `tile`, with zeros past the last row.
///
/// All threads of the block take part.
#[inline(always)]
#[track_caller]
pub fn load_async<T: Element, const R: usize, const HS: usize>(
    tile: SharedTile<T, R, HS>,
    from: Global<T>,
    rows: Rows,
    first: usize,
) {
    load_rows_async::<T, R, R, HS>(tile, 0, from, rows, first);
}

/// Does the same as [`load_async`] for COUNT rows of `tile`, from row `to` on.
#[inline(always)]
#[track_caller]
fn load_rows_async<T: Element, const COUNT: usize, const R: usize, const HS: usize>(
    tile: SharedTile<T, R, HS>,
    to: usize,
    from: Global<T>,
    rows: Rows,
    first: usize,
) {
    let packets = HS / T::PACKET;
    let rows_per_pass = THREADS / packets;
    let thread = thread::thread_idx_x();
    // If the index is opaque, the values that depend on it are computed again for each tile, and occupy no registers in between. Without
    // divisions that is short.
    let is_opaque = size_of::<T>() == 2 && THREADS.is_multiple_of(packets);
    let thread = if is_opaque { thread::opaque(thread) } else { thread } as usize % THREADS;
    let (row, col) = (thread / packets, thread % packets * T::PACKET);
    if !THREADS.is_multiple_of(packets) && row >= rows_per_pass {
        return;
    }
    // A running index and a 32-bit count keep the address arithmetic between the matmuls short.
    let left = (rows.count as u32).saturating_sub((first + row) as u32);
    let mut at = rows.element(first + row) + col;
    for pass in 0..COUNT.div_ceil(rows_per_pass) {
        let further = pass * rows_per_pass;
        if COUNT.is_multiple_of(rows_per_pass) || row + further < COUNT {
            tile.copy_packet_async(to + row + further, col, from, at, (further as u32) < left);
        }
        at += rows_per_pass * rows.stride;
    }
}

/// Copies the calling warp's rows of `tile` to the rows of `to` from `first` on, except past the last row.
#[inline(always)]
#[track_caller]
fn store<T: Element, const R: usize, const HS: usize>(
    to: GlobalMut<T>,
    rows: Rows,
    first: usize,
    tile: SharedTile<T, R, HS>,
) {
    let packets = HS / T::PACKET;
    let rows_per_pass = LANES / packets;
    let lane = warp::lane() as usize;
    let (row, col) = (lane / packets, lane % packets * T::PACKET);
    let (owned, warp_row) = (R / WARPS, warp_row::<R>());
    if row < rows_per_pass {
        for pass in 0..owned.div_ceil(rows_per_pass) {
            let row = row + pass * rows_per_pass;
            let in_tile = warp_row + row;
            if row < owned && first + in_tile < rows.count {
                to.set_packet(rows.element(first + in_tile) + col, tile.packet(in_tile, col));
            }
        }
    }
}

/// Returns the first row that the calling warp owns in a matrix of R rows.
#[inline(always)]
#[track_caller]
pub fn warp_row<const R: usize>() -> usize {
    // The modulus tells the compiler the bound. Without it, ptxas spills a register in `dkdv`.
    warp::index() as usize % WARPS * (R / WARPS)
}

/// The left operand of a matmul, R x K. If `keep`, its fragments stay in registers; otherwise each use reads the tile.
#[derive(Clone, Copy)]
pub struct LeftOperand<T: TensorCore, const R: usize, const K: usize> {
    tile: SharedTile<T, R, K>,
    row: usize,
    keep: bool,
    fragments: [[T::A; COLUMNS / 16]; STRIPS],
}

#[device]
impl<T: TensorCore, const R: usize, const K: usize> LeftOperand<T, R, K> {
    /// Returns the operand in `tile`, and loads its fragments if `keep`.
    #[track_caller]
    pub fn new(tile: SharedTile<T, R, K>, keep: bool) -> Self {
        let blank = T::a_from_accumulators([0.0; 4], [0.0; 4]);
        let mut operand = Self { tile, row: warp_row::<R>(), keep, fragments: [[blank; COLUMNS / 16]; STRIPS] };
        if keep {
            for strip in 0..R / (16 * WARPS) {
                for k in 0..K / 16 {
                    operand.fragments[strip][k] = tile.a(operand.row + 16 * strip, 16 * k);
                }
            }
        }
        operand
    }

    /// Returns columns 16 k .. 16 k + 16 of a strip.
    #[track_caller]
    pub fn fragment(&self, strip: usize, k: usize) -> T::A {
        if self.keep { self.fragments[strip][k] } else { self.tile.a(self.row + 16 * strip, 16 * k) }
    }
}

/// f32 accumulators of an R x C matrix.
///
/// With g = lane / 4 and t = lane % 4, a lane owns rows g and g + 8 of each strip, and in them columns 8 n + 2 t and
/// 8 n + 2 t + 1 (see [`cuda_std::mma`]).
#[derive(Clone, Copy)]
pub struct Accumulators<const R: usize, const C: usize>([[[f32; 4]; COLUMNS / 8]; STRIPS]);

#[device]
impl<const R: usize, const C: usize> Accumulators<R, C> {
    /// Number of strips of a warp.
    pub const STRIPS: usize = R / (16 * WARPS);

    /// Returns accumulators of zeros.
    pub fn zero() -> Self {
        const { assert!(R.is_multiple_of(16 * WARPS) && Self::STRIPS <= STRIPS && C.is_multiple_of(16) && C <= COLUMNS) };
        Self([[[0.0; 4]; COLUMNS / 8]; STRIPS])
    }

    /// Adds left · rightᵀ. The right operand has C rows.
    #[track_caller]
    pub fn add_matmul_transposed<T: TensorCore, const R2: usize, const K: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        right: TileRows<T, R2, K>,
    ) {
        for k in 0..K / 16 {
            self.add_k_slice::<T>(|strip| left(strip, k), |n| right.tile.b_transposed(right.first + 16 * n, 16 * k));
        }
    }

    /// Adds left · right. The right operand has K rows.
    #[track_caller]
    pub fn add_matmul<T: TensorCore, const K: usize, const R2: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        right: TileRows<T, R2, C>,
    ) {
        for k in 0..K / 16 {
            self.add_k_slice::<T>(|strip| left(strip, k), |n| right.tile.b(right.first + 16 * k, 16 * n));
        }
    }

    /// Adds A · B for one k slice of 16. `a` returns the fragment of a strip, `b` those of 16 columns.
    #[track_caller]
    fn add_k_slice<T: TensorCore>(&mut self, a: impl Fn(usize) -> T::A, b: impl Fn(usize) -> [T::B; 2]) {
        let first = a(0);
        let last = if Self::STRIPS == 2 { a(1) } else { first };
        for n in 0..C / 16 {
            let [left, right] = b(n);
            T::mma(&mut self.0[0][2 * n], first, left);
            T::mma(&mut self.0[0][2 * n + 1], first, right);
            if Self::STRIPS == 2 {
                T::mma(&mut self.0[1][2 * n], last, left);
                T::mma(&mut self.0[1][2 * n + 1], last, right);
            }
        }
    }

    /// Returns columns 16 k .. 16 k + 16 of a strip, rounded to T, as a left operand.
    pub fn fragment<T: TensorCore>(&self, strip: usize, k: usize) -> T::A {
        T::a_from_accumulators(self.0[strip][2 * k], self.0[strip][2 * k + 1])
    }

    /// Calls `f` with (index of the row, 0 or 1; element) for each element of the lane's two rows of `strip`.
    pub fn for_each_in(&mut self, strip: usize, mut f: impl FnMut(usize, &mut f32)) {
        for n in 0..C / 8 {
            for i in 0..4 {
                f(i / 2, &mut self.0[strip][n][i]);
            }
        }
    }

    /// Replaces each element with the result of `f`.
    ///
    /// The arguments of `f` are the strip, the index of the row (0 or 1), the column relative to [`lane_column`], and
    /// the element.
    pub fn map(&mut self, f: impl Fn(usize, usize, usize, f32) -> f32) {
        for strip in 0..Self::STRIPS {
            for n in 0..C / 8 {
                for i in 0..4 {
                    let element = &mut self.0[strip][n][i];
                    *element = f(strip, i / 2, 8 * n + i % 2, *element);
                }
            }
        }
    }

    /// Does the same as [`map`](Self::map), with the corresponding element of `other` as the last argument of `f`.
    pub fn zip(&mut self, other: &Self, f: impl Fn(usize, usize, usize, f32, f32) -> f32) {
        for strip in 0..Self::STRIPS {
            for n in 0..C / 8 {
                for i in 0..4 {
                    let (mine, its) = (self.0[strip][n][i], other.0[strip][n][i]);
                    self.0[strip][n][i] = f(strip, i / 2, 8 * n + i % 2, mine, its);
                }
            }
        }
    }

    /// Rounds the warp's rows to T and writes them to the rows of `to` from `first` on.
    ///
    /// The data passes through the warp's own rows of `staging`, for coalesced stores.
    #[track_caller]
    pub fn store<T: TensorCore>(&self, to: GlobalMut<T>, rows: Rows, first: usize, staging: SharedTile<T, R, C>) {
        // Other lanes of the warp may still be reading the previous contents of the staging rows.
        warp::sync();
        for strip in 0..Self::STRIPS {
            for n in 0..C / 8 {
                staging.set_accumulators(warp_row::<R>() + 16 * strip, 8 * n, self.0[strip][n]);
            }
        }
        warp::sync();
        store(to, rows, first, staging);
    }
}

/// Returns the first of a lane's two rows of a strip. The second is 8 rows below.
#[inline(always)]
pub fn lane_row() -> usize {
    warp::lane() as usize / 4
}

/// Returns the first of a lane's columns.
#[inline(always)]
pub fn lane_column() -> usize {
    warp::lane() as usize % 4 * 2
}

/// One value per column of a matrix, for the columns that a lane owns.
#[derive(Clone, Copy)]
pub struct Columns([[f32; 2]; COLUMNS / 8]);

#[device]
impl Columns {
    /// Loads the values of the lane's columns from `values` (C).
    #[track_caller]
    pub fn load<const C: usize>(values: SharedArray<f32>) -> Self {
        let mut columns = [[0.0; 2]; COLUMNS / 8];
        for n in 0..C / 8 {
            columns[n] = values.pair(8 * n + lane_column());
        }
        Self(columns)
    }

    /// Returns the value of a column, given relative to [`lane_column`].
    pub fn at(&self, col: usize) -> f32 {
        self.0[col / 8][col % 8]
    }
}

/// The rows of `tile` from `first` on, the right operand of a matmul.
#[derive(Clone, Copy)]
pub struct TileRows<T, const R: usize, const HS: usize> {
    tile: SharedTile<T, R, HS>,
    first: usize,
}

/// A ring of tiles of TILE rows in shared memory, RING rows in all. Tile i replaces tile i - RING / TILE.
#[derive(Clone, Copy)]
pub struct Ring<T, const TILE: usize, const RING: usize, const HS: usize>(SharedTile<T, RING, HS>);

#[device]
impl<T: TensorCore, const TILE: usize, const RING: usize, const HS: usize> Ring<T, TILE, RING, HS> {
    /// Takes the ring from `layout`.
    pub fn new(layout: &mut Layout) -> Self {
        const { assert!(RING.is_multiple_of(TILE)) };
        Self(layout.tile())
    }

    /// Returns the first row of tile `tile` in the ring.
    pub fn first_row(tile: usize) -> usize {
        tile % (RING / TILE) * TILE
    }

    /// Returns the rows of tile `tile`.
    pub fn rows(self, tile: usize) -> TileRows<T, RING, HS> {
        TileRows { tile: self.0, first: Self::first_row(tile) }
    }

    /// Starts an asynchronous copy of rows `TILE * tile ..` of `from` to the place of tile `tile`, with zeros past the last row.
    #[track_caller]
    pub fn load_async(self, tile: usize, from: Global<T>, rows: Rows) {
        load_rows_async::<T, TILE, RING, HS>(self.0, Self::first_row(tile), from, rows, TILE * tile);
    }
}
