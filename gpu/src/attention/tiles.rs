//! Tiles of a block of four warps: their way in and out of shared memory, and products on the tensor cores.
//!
//! A block computes matrices of R x C, C at most 128, spread over its warps by rows: each warp owns R / 4 consecutive
//! rows, in strips of 16. Left operands have the same owner as the result; right operands are read by every warp, once
//! per warp for all its strips.

use cuda_std::mma::TensorCore;
use cuda_std::{Element, Global, GlobalMut, SharedArray, SharedTile, thread, warp};

pub const THREADS: usize = 128;
const WARPS: usize = THREADS / warp::LANES as usize;
const LANES: usize = warp::LANES as usize;

/// Most strips a warp owns. The arrays below have room for the largest matrix; what R and C do not reach is never
/// touched, so it takes no register.
const STRIPS: usize = 2;
const COLUMNS: usize = 128;

/// One head's T rows of HS elements inside a packed tensor: row t begins at element `offset + t * stride`.
#[derive(Clone, Copy)]
pub struct Rows {
    pub offset: usize,
    pub stride: usize,
    pub count: usize,
}

impl Rows {
    #[inline(always)]
    pub fn element(self, row: usize) -> usize {
        self.offset + row * self.stride
    }
}

/// Starts copying rows `first .. first + R` of `from` to `tile`, by all threads of the block; zeros past the last row.
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
    // Running position and a 32-bit count: little address arithmetic between the products.
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

/// Copies the calling warp's rows of `tile` to rows `first ..` of `to`, up to the last.
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

/// The first row that the calling warp owns of a matrix of R rows.
#[inline(always)]
#[track_caller]
pub fn warp_row<const R: usize>() -> usize {
    warp::index() as usize * (R / WARPS)
}

/// The left operand of products, R x K: its fragments in registers if `keep`, else read from the tile at each use.
#[derive(Clone, Copy)]
pub struct Left<T: TensorCore, const R: usize, const K: usize> {
    tile: SharedTile<T, R, K>,
    row: usize,
    keep: bool,
    fragments: [[T::A; COLUMNS / 16]; STRIPS],
}

impl<T: TensorCore, const R: usize, const K: usize> Left<T, R, K> {
    #[inline(always)]
    #[track_caller]
    pub fn new(tile: SharedTile<T, R, K>, keep: bool) -> Self {
        let blank = T::a_from_accumulators([0.0; 4], [0.0; 4]);
        let mut left = Self { tile, row: warp_row::<R>(), keep, fragments: [[blank; COLUMNS / 16]; STRIPS] };
        if keep {
            for strip in 0..R / (16 * WARPS) {
                for k in 0..K / 16 {
                    left.fragments[strip][k] = tile.a(left.row + 16 * strip, 16 * k);
                }
            }
        }
        left
    }

    #[inline(always)]
    #[track_caller]
    pub fn fragment(&self, strip: usize, k: usize) -> T::A {
        if self.keep { self.fragments[strip][k] } else { self.tile.a(self.row + 16 * strip, 16 * k) }
    }
}

/// f32 accumulators of an R x C matrix. A lane owns of each strip rows g and g + 8, columns 8 n + 2 t and the next one
/// (g = lane / 4, t = lane % 4): see [`cuda_std::mma`].
#[derive(Clone, Copy)]
pub struct Accumulators<const R: usize, const C: usize>([[[f32; 4]; COLUMNS / 8]; STRIPS]);

impl<const R: usize, const C: usize> Accumulators<R, C> {
    /// Strips of a warp.
    pub const STRIPS: usize = R / (16 * WARPS);

    #[inline(always)]
    pub fn zero() -> Self {
        const { assert!(R.is_multiple_of(16 * WARPS) && Self::STRIPS <= STRIPS && C.is_multiple_of(16) && C <= COLUMNS) };
        Self([[[0.0; 4]; COLUMNS / 8]; STRIPS])
    }

    /// self += left · tileᵀ.
    #[inline(always)]
    #[track_caller]
    pub fn add_product_transposed<T: TensorCore, const K: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        tile: SharedTile<T, C, K>,
    ) {
        for k in 0..K / 16 {
            self.add_outer::<T>(|strip| left(strip, k), |n| tile.b_transposed(16 * n, 16 * k));
        }
    }

    /// self += left · tile.
    #[inline(always)]
    #[track_caller]
    pub fn add_product<T: TensorCore, const K: usize>(
        &mut self,
        left: impl Fn(usize, usize) -> T::A,
        tile: SharedTile<T, K, C>,
    ) {
        for k in 0..K / 16 {
            self.add_outer::<T>(|strip| left(strip, k), |n| tile.b(16 * k, 16 * n));
        }
    }

    /// self += A · B for one k slice of 16: A by strips, B by 16 columns.
    #[inline(always)]
    #[track_caller]
    fn add_outer<T: TensorCore>(&mut self, a: impl Fn(usize) -> T::A, b: impl Fn(usize) -> [T::B; 2]) {
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

    /// Columns 16 k .. 16 k + 16 of a strip as a left operand, rounded.
    #[inline(always)]
    pub fn fragment<T: TensorCore>(&self, strip: usize, k: usize) -> T::A {
        T::a_from_accumulators(self.0[strip][2 * k], self.0[strip][2 * k + 1])
    }

    /// The lane's row pair of `strip`: (which of the two rows, element), column by column.
    #[inline(always)]
    pub fn for_each_in(&mut self, strip: usize, mut f: impl FnMut(usize, &mut f32)) {
        for n in 0..C / 8 {
            for i in 0..4 {
                f(i / 2, &mut self.0[strip][n][i]);
            }
        }
    }

    /// Replaces each element by `f` of its strip, its row in the lane's row pair, its column less [`lane_column`], and
    /// itself.
    #[inline(always)]
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

    /// As [`map`](Self::map), with the same element of `other` after it.
    #[inline(always)]
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

    /// Rounds, and writes the warp's rows to rows `first ..` of `to` through the warp's own rows of `staging`.
    #[inline(always)]
    #[track_caller]
    pub fn store<T: TensorCore>(&self, to: GlobalMut<T>, rows: Rows, first: usize, staging: SharedTile<T, R, C>) {
        // Other lanes of the warp may still read what lies in the staging rows.
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

/// First of a lane's two rows of a strip; the other is 8 further.
#[inline(always)]
pub fn lane_row() -> usize {
    warp::lane() as usize / 4
}

/// First of a lane's columns.
#[inline(always)]
pub fn lane_column() -> usize {
    warp::lane() as usize % 4 * 2
}

/// A value for each of a lane's columns of a C-column matrix.
#[derive(Clone, Copy)]
pub struct Columns([[f32; 2]; COLUMNS / 8]);

impl Columns {
    #[inline(always)]
    #[track_caller]
    pub fn load<const C: usize>(values: SharedArray<f32>) -> Self {
        let mut columns = [[0.0; 2]; COLUMNS / 8];
        for n in 0..C / 8 {
            columns[n] = values.pair(8 * n + lane_column());
        }
        Self(columns)
    }

    /// That of a column less [`lane_column`].
    #[inline(always)]
    pub fn at(&self, col: usize) -> f32 {
        self.0[col / 8][col % 8]
    }
}

/// One of two stages of a pipeline, by the parity of the tile it holds. Takes views one by one, as values: of a struct of
/// them the compiler would select the address, and so keep the struct in local memory.
#[inline(always)]
pub fn stage<S>(even: S, odd: S, tile: usize) -> S {
    core::hint::select_unpredictable(tile.is_multiple_of(2), even, odd)
}
