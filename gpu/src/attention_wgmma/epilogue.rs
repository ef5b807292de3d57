//! From accumulators to global memory.

use super::Head;
use cuda_std::{GlobalMut, bf16, element, warp};

/// Writes a row of accumulators times `scale` to the HS elements at `at`.
#[inline(always)]
pub fn write_row<H: Head, const ROW: usize>(out: GlobalMut<bf16>, at: usize, d: &H::Sums, scale: f32) {
    for j in 0..H::HS as usize / 8 {
        let i = 4 * j + 2 * ROW;
        let pair = element::pack_pair(d[i] * scale, d[i + 1] * scale);
        out.set_pair(at + 8 * j + 2 * (warp::lane() % 4) as usize, pair);
    }
}
