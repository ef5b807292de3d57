//! The causal mask of scores on the diagonal, and the masks of documents and windows.
//!
//! The causal mask is the same for every work tile. The comparison uses an opaque value. Otherwise the compiler hoists all 32
//! comparisons out of the loop and keeps their results in registers that the wgmma accumulators need.

use super::panel::{ScoreSquare, thread_row};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{thread, warp};

/// Replaces the scores of keys after their query by `masked`, in the first `columns` columns. Rows are queries. The
/// first query is `ahead` positions after the first key.
#[inline(always)]
pub fn mask_diagonal<S: Accumulators>(s: &mut S, ahead: u32, columns: u32, masked: f32) {
    let (behind, ahead) = (behind(), ahead as i32);
    for i in 0..columns as usize / 2 {
        let (row, column) = offset_of(i);
        // All queries see the keys before the first query.
        if column >= ahead && column - ahead > behind + row {
            s[i] = masked;
        }
    }
}

/// Masks transposed scores: rows are keys, columns are queries, and the first query is at the position of the first
/// key.
#[inline(always)]
pub fn mask_diagonal_transposed(s: &mut ScoreSquare, masked: f32) {
    let behind = behind();
    for i in 0..32 {
        let (row, column) = offset_of(i);
        if column < behind + row {
            s[i] = masked;
        }
    }
}

/// Replaces the scores of keys before their query's first key by `masked`, in the first `columns` columns. Rows are queries.
///
/// `first_keys` are those of the thread's two rows, and `key` is the key of the first column.
#[inline(always)]
pub fn mask_before<S: Accumulators>(s: &mut S, first_keys: [u32; 2], key: u32, columns: u32, masked: f32) {
    let bounds = first_keys.map(|first| first.wrapping_sub(key + 2 * (warp::lane() % 4)) as i32);
    for i in 0..columns as usize / 2 {
        let (row, column) = offset_of(i);
        if column < bounds[row as usize / 8] {
            s[i] = masked;
        }
    }
}

/// Replaces the transposed scores of queries after their key's last query by 0. Rows are keys.
///
/// `last_queries` are those of the thread's two rows, and `query` is the query of the first column.
#[inline(always)]
pub fn mask_after(s: &mut ScoreSquare, last_queries: [u32; 2], query: u32) {
    let bounds = last_queries.map(|last| last.wrapping_sub(query + 2 * (warp::lane() % 4)) as i32);
    for i in 0..32 {
        let (row, column) = offset_of(i);
        if column > bounds[row as usize / 8] {
            s[i] = 0.0;
        }
    }
}

/// Returns the row minus the column of this thread's first accumulator.
#[inline(always)]
fn behind() -> i32 {
    thread::opaque(thread_row().wrapping_sub(2 * (warp::lane() % 4))) as i32
}

/// Returns the row and column of accumulator `i` relative to the thread's first accumulator.
#[inline(always)]
fn offset_of(i: usize) -> (i32, i32) {
    ((i / 2 % 2 * 8) as i32, (i / 4 * 8 + i % 2) as i32)
}
