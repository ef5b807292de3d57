//! From accumulators to global memory.

use super::panel::{Panel, left_step, warp_row};
use super::{Head, ROWS};
use cuda_std::{GlobalMut, bf16, thread, warp};

/// Where 64 rows of a head lie: row `i` is the HS elements at `first + i * stride`, and those below `rows` exist.
#[derive(Clone, Copy)]
pub struct Target {
    pub out: GlobalMut<bf16>,
    pub first: usize,
    pub stride: usize,
    pub rows: u32,
}

/// Writes this warp's rows of a consumer's sums, each thread's two times `scales`, by way of the panel `through`, which is
/// the consumer's own: stores of 16 bytes, whole rows at a time.
#[inline(always)]
pub fn write_rows<H: Head>(target: Target, sums: &mut H::Sums, scales: [f32; 2], through: Panel<H>) {
    for i in 0..H::HS as usize / 2 {
        sums[i] *= scales[i / 2 % 2];
    }
    // Opaque, for addresses made of these are not to take up registers from before the loops.
    let (first_row, lane) = (thread::opaque(warp_row()), thread::opaque(warp::lane()));
    // The warp has read what it wrote there before.
    warp::sync();
    for step in 0..H::HS / 16 {
        let piece = step % 4 * 2 + lane / 16;
        through.tile(step / 4).store_matrices(first_row + lane % 16, piece, left_step(sums, step as usize));
    }
    warp::sync();
    for i in 0..4 {
        let (row, piece) = (first_row + 4 * i + lane / 8, lane % 8);
        for tile in 0..H::HS / ROWS {
            let packet = through.tile(tile).packet(row, piece);
            if row < target.rows {
                let at = target.first + row as usize * target.stride;
                target.out.set_packet(at + (tile * 64 + piece * 8) as usize, packet);
            }
        }
    }
}
