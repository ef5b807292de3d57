//! The causal mask of scores on the diagonal.
//!
//! It is the same in every piece of work. What it compares with is opaque, or the compiler would compare once, keep 32
//! results for good, and have no registers left to keep products under way.

use super::panel::{Square, thread_row};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{thread, warp};

/// Replaces what belongs to a key after its query, in the first `columns`. Rows are queries, the first `ahead` places after
/// the first key.
#[inline(always)]
pub fn mask_diagonal<S: Accumulators>(s: &mut S, ahead: u32, columns: u32, hidden: f32) {
    let (behind, ahead) = (behind(), ahead as i32);
    for i in 0..columns as usize / 2 {
        let (row, column) = offset_of(i);
        // Keys before the first query are seen by all.
        if column >= ahead && column - ahead > behind + row {
            s[i] = hidden;
        }
    }
}

/// As [`mask_diagonal`], of the transpose: rows are keys, and the first query is the first key.
#[inline(always)]
pub fn mask_diagonal_transposed(s: &mut Square, hidden: f32) {
    let behind = behind();
    for i in 0..32 {
        let (row, column) = offset_of(i);
        if column < behind + row {
            s[i] = hidden;
        }
    }
}

/// By how much the column of this thread's first accumulator is behind its row.
#[inline(always)]
fn behind() -> i32 {
    thread::opaque(thread_row().wrapping_sub(2 * (warp::lane() % 4))) as i32
}

/// Row and column of accumulator `i`, from those of the thread's first one.
#[inline(always)]
fn offset_of(i: usize) -> (i32, i32) {
    ((i / 2 % 2 * 8) as i32, (i / 4 * 8 + i % 2) as i32)
}
