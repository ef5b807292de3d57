//! The causal mask: a query sees keys up to its own position. Only tiles that the diagonal crosses need it.

use super::tiles::{Accumulators, lane_column, lane_row, warp_row};

/// Whether some query of the rows from `first_query` on does not see some of the `keys` from `first_key` on.
#[inline(always)]
pub fn crosses_diagonal(first_query: usize, first_key: usize, keys: usize) -> bool {
    first_key + keys > first_query + 1
}

/// Sets scores (queries x keys) of keys after their query to -inf.
#[inline(always)]
#[track_caller]
pub fn mask_scores<const QUERIES: usize, const KEYS: usize>(
    scores: &mut Accumulators<QUERIES, KEYS>,
    first_query: usize,
    first_key: usize,
) {
    let diagonal = diagonal::<QUERIES>(first_query, first_key);
    scores.map(|strip, row, col, s| if col as i32 > diagonal + place(strip, row) { f32::NEG_INFINITY } else { s });
}

/// As [`mask_scores`] for scores laid out keys x queries.
#[inline(always)]
#[track_caller]
pub fn mask_scores_transposed<const KEYS: usize, const QUERIES: usize>(
    scores: &mut Accumulators<KEYS, QUERIES>,
    first_key: usize,
    first_query: usize,
) {
    let diagonal = diagonal::<KEYS>(first_key, first_query);
    scores.map(|strip, row, col, s| if (col as i32) < diagonal + place(strip, row) { f32::NEG_INFINITY } else { s });
}

/// Where the diagonal crosses the lane's first row, in columns from the lane's first: comparisons with it are then with
/// constants, which take no registers.
#[inline(always)]
#[track_caller]
fn diagonal<const R: usize>(first_row: usize, first_col: usize) -> i32 {
    let row = first_row + warp_row::<R>() + lane_row();
    row as i32 - (first_col + lane_column()) as i32
}

/// Distance from the lane's first row to its row `row` of `strip`.
#[inline(always)]
fn place(strip: usize, row: usize) -> i32 {
    (16 * strip + 8 * row) as i32
}
