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
    let packets = HS / T::PACKET;
    let rows_per_pass = THREADS / packets;
    let thread = thread::thread_idx_x() as usize;
    let (row, col) = (thread / packets, thread % packets * T::PACKET);
    if !THREADS.is_multiple_of(packets) && row >= rows_per_pass {
        return;
    }
    // A running index and a 32-bit count keep the address arithmetic between the matmuls short.
    let left = rows.count.saturating_sub(first + row) as u32;
    let mut at = rows.element(first + row) + col;
    for pass in 0..R.div_ceil(rows_per_pass) {
        let further = pass * rows_per_pass;
        if R.is_multiple_of(rows_per_pass) || row + further < R {
            tile.copy_packet_async(row + further, col, from, at, (further as u32) < left);
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
    warp::index() as usize * (R / WARPS)
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

    /// Adds left · tileᵀ.
    #[track_caller]
    pub fn add_matmul_transposed<T: TensorCore, const K: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        tile: SharedTile<T, C, K>,
    ) {
        for k in 0..K / 16 {
            self.add_k_slice::<T>(|strip| left(strip, k), |n| tile.b_transposed(16 * n, 16 * k));
        }
    }

    /// Adds left · tile.
    #[track_caller]
    pub fn add_matmul<T: TensorCore, const K: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        tile: SharedTile<T, K, C>,
    ) {
        for k in 0..K / 16 {
            self.add_k_slice::<T>(|strip| left(strip, k), |n| tile.b(16 * k, 16 * n));
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

/// A tile of keys and values.
#[derive(Clone, Copy)]
pub struct KeyTile<T, const KEYS: usize, const HS: usize> {
    pub k: SharedTile<T, KEYS, HS>,
    pub v: SharedTile<T, KEYS, HS>,
}

/// A double buffer of key tiles.
pub struct KeyTiles<T, const KEYS: usize, const HS: usize>([KeyTile<T, KEYS, HS>; 2]);

#[device]
impl<T: TensorCore, const KEYS: usize, const HS: usize> KeyTiles<T, KEYS, HS> {
    /// Takes the buffer from `layout`.
    pub fn new(layout: &mut Layout) -> Self {
        let mut tile = || KeyTile { k: layout.tile(), v: layout.tile() };
        Self([tile(), tile()])
    }

    /// Returns the buffer of key tile `tile`.
    pub fn stage(&self, tile: usize) -> KeyTile<T, KEYS, HS> {
        let [even, odd] = self.0;
        KeyTile { k: stage(even.k, odd.k, tile), v: stage(even.v, odd.v, tile) }
    }
}

/// Returns the view of a double buffer that holds tile number `tile`: `even` or `odd`.
///
/// Takes each view as a separate value. For a struct of views, the compiler would select its address, which would place
/// the struct in local memory.
#[inline(always)]
pub fn stage<S>(even: S, odd: S, tile: usize) -> S {
    core::hint::select_unpredictable(tile.is_multiple_of(2), even, odd)
}
