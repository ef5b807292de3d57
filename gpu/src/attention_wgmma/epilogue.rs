//! Stores of accumulators to global memory.

use super::panel::{Panel, a_fragment, warp_row};
use super::{Head, ROWS};
use crate::norm::rows::RowOutput;
use cuda_std::{bf16, thread, warp};

/// 64 rows of a head in global memory. Row `i` is the HS elements from `first + i * stride` on. Rows below `rows`
/// exist.
#[derive(Clone, Copy)]
pub struct OutputRows<O> {
    pub out: O,
    pub first: usize,
    pub stride: usize,
    pub rows: u32,
}

/// Multiplies accumulators by `scales` for the thread's two rows.
#[inline(always)]
pub fn scale_rows<H: Head>(acc: &mut H::OutputAccumulators, scales: [f32; 2]) {
    for i in 0..H::HS as usize / 2 {
        acc[i] *= scales[i / 2 % 2];
    }
}

/// Stores this warp's rows of a consumer's accumulators, multiplied by `scales` for the thread's two rows.
///
/// The rows go through `buffer`, the consumer's own panel in shared memory, so that stores are coalesced: 16 bytes per
/// thread, whole rows at a time.
#[inline(always)]
pub fn store_rows<H: Head>(
    mut rows: OutputRows<impl RowOutput<bf16>>,
    acc: &mut H::OutputAccumulators,
    scales: [f32; 2],
    buffer: Panel<H>,
) {
    scale_rows::<H>(acc, scales);
    // Opaque values keep the compiler from computing the addresses before the loops, where they would occupy registers.
    let (first_row, lane) = (thread::opaque(warp_row()), thread::opaque(warp::lane()));
    // The warp has finished reading its previous rows from the buffer.
    warp::sync();
    for step in 0..H::HS / 16 {
        let piece = step % 4 * 2 + lane / 16;
        buffer.tile(step / 4).store_matrices(first_row + lane % 16, piece, a_fragment(acc, step as usize));
    }
    warp::sync();
    for i in 0..4 {
        let (row, piece) = (first_row + 4 * i + lane / 8, lane % 8);
        for tile in 0..H::HS / ROWS {
            let packet = buffer.tile(tile).packet(row, piece);
            if row < rows.rows {
                let at = rows.first + row as usize * rows.stride;
                rows.out.set_packet(at + (tile * 64 + piece * 8) as usize, packet);
            }
        }
    }
}
