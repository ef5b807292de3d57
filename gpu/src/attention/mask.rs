//! The causal mask: a query attends to keys up to its own position. Only tiles that intersect the diagonal are masked.
//!
//! [`mask_before`] and [`mask_after`] apply the bounds of [`super::visibility`].

use super::tiles::{Accumulators, lane_column, lane_row, warp_row};

/// The score of a key that documents or a window hide. It is far below every other score, but finite, so that the online softmax also
/// works while all keys of a row are hidden: the factor of the first visible score clears the row. The product of a power of two
/// and the softmax scale is exact.
const HIDDEN: f32 = -1.267_650_6e30;

/// Returns whether the query `first_query` must not attend to one of the `keys` keys from `first_key` on.
#[inline(always)]
pub fn crosses_diagonal(first_query: usize, first_key: usize, keys: usize) -> bool {
    first_key + keys > first_query + 1
}

/// Sets scores (queries x keys) whose key comes after the query to -inf.
#[inline(always)]
#[track_caller]
pub fn mask_scores<const QUERIES: usize, const KEYS: usize>(
    scores: &mut Accumulators<QUERIES, KEYS>,
    first_query: usize,
    first_key: usize,
) {
    let diagonal = diagonal::<QUERIES>(first_query, first_key);
    scores.map(|strip, row, col, s| if col as i32 > diagonal + row_offset(strip, row) { f32::NEG_INFINITY } else { s });
}

/// Does the same as [`mask_scores`] for transposed scores (keys x queries).
#[inline(always)]
#[track_caller]
pub fn mask_scores_transposed<const KEYS: usize, const QUERIES: usize>(
    scores: &mut Accumulators<KEYS, QUERIES>,
    first_key: usize,
    first_query: usize,
) {
    let diagonal = diagonal::<KEYS>(first_key, first_query);
    scores
        .map(|strip, row, col, s| if (col as i32) < diagonal + row_offset(strip, row) { f32::NEG_INFINITY } else { s });
}

/// Hides scores (queries x keys) whose key comes before the query's first key, which `bound` returns.
#[inline(always)]
#[track_caller]
pub fn mask_before<const QUERIES: usize, const KEYS: usize>(
    scores: &mut Accumulators<QUERIES, KEYS>,
    first_query: usize,
    first_key: usize,
    bound: impl Fn(u32) -> u32,
) {
    let bounds = bounds::<QUERIES>(first_query, first_key, bound);
    scores.map(|strip, row, col, s| if (col as i32) < bounds[strip][row] { HIDDEN } else { s });
}

/// Hides transposed scores (keys x queries) whose query comes after the key's last query, which `bound` returns.
#[inline(always)]
#[track_caller]
pub fn mask_after<const KEYS: usize, const QUERIES: usize>(
    scores: &mut Accumulators<KEYS, QUERIES>,
    first_key: usize,
    first_query: usize,
    bound: impl Fn(u32) -> u32,
) {
    let bounds = bounds::<KEYS>(first_key, first_query, bound);
    scores.map(|strip, row, col, s| if col as i32 > bounds[strip][row] { HIDDEN } else { s });
}

/// Returns the columns of the bounds of the lane's rows, relative to the lane's first column.
#[inline(always)]
#[track_caller]
fn bounds<const R: usize>(first_row: usize, first_col: usize, bound: impl Fn(u32) -> u32) -> [[i32; 2]; 2] {
    let (row, col) = (first_row + warp_row::<R>() + lane_row(), (first_col + lane_column()) as i32);
    let mut bounds = [[0; 2]; 2];
    for strip in 0..Accumulators::<R, 16>::STRIPS {
        for i in 0..2 {
            bounds[strip][i] = bound((row + 16 * strip + 8 * i) as u32) as i32 - col;
        }
    }
    bounds
}

/// Returns the column of the diagonal in the lane's first row, relative to the lane's first column.
///
/// All elements of the lane are compared with this value plus a constant, so the comparison takes one register.
#[inline(always)]
#[track_caller]
fn diagonal<const R: usize>(first_row: usize, first_col: usize) -> i32 {
    let row = first_row + warp_row::<R>() + lane_row();
    row as i32 - (first_col + lane_column()) as i32
}

/// Returns the offset of the lane's row `row` of `strip` from its first row.
#[inline(always)]
fn row_offset(strip: usize, row: usize) -> i32 {
    (16 * strip + 8 * row) as i32
}
