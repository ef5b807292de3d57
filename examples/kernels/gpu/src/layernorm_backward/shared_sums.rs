//! Gradient of LayerNorm, version 3: sums of a block in shared memory.
//!
//! Problem: as in version 1.
//! Idea: a block processes many rows and adds its terms to 2 C sums in shared memory, whose atomics are faster and shared by 8
//! warps only. At the end, the block adds its sums to global memory: one global addition for each block and column instead of one
//! for each row and column.
//! Limit: waits for loads. An f32 addition to shared memory is a loop with compare-and-swap, so the loop over the columns is not
//! unrolled, and each iteration waits for its loads of 2 bytes. Two blocks for each SM are few warps to hide this. The result
//! depends on the order of the additions.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, thread, warp};

/// Lays out the shared memory: the sums of dweight, then those of dbias.
pub fn shared(layout: &mut Layout, channels: usize) -> SharedArray<f32> {
    layout.array(2 * channels).named("sums")
}

/// Adds the gradients. Grid: any, for example 2 blocks for each SM.
#[kernel(threads = 256)]
pub fn layernorm_backward_shared(
    dinp: GlobalMut<bf16>,
    dweight: GlobalMut<f32>,
    dbias: GlobalMut<f32>,
    dout: Global<bf16>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (lane, channels, rows) = (warp::lane() as usize, channels as usize, rows as usize);
    let (sums, t, threads) =
        (shared(&mut Layout::new(), channels), thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
    for i in (t..2 * channels).step_by(threads) {
        sums.set(i, 0.0);
    }
    thread::sync_threads();
    let mut row = thread::block_idx_x() as usize * 8 + warp::index() as usize;
    while row < rows {
        let (m, r) = (mean.at(row), rstd.at(row));
        let (dinp, dout, inp) = (dinp.skip(row * channels), dout.skip(row * channels), inp.skip(row * channels));
        let (mut sum_g, mut sum_gx) = (0.0, 0.0);
        for c in (lane..channels).step_by(32) {
            let g = dout.at(c).to_f32() * weight.at(c).to_f32();
            sum_g += g;
            sum_gx += g * (inp.at(c).to_f32() - m) * r;
        }
        let (mean_g, mean_gx) = (warp::sum(sum_g) / channels as f32, warp::sum(sum_gx) / channels as f32);
        for c in (lane..channels).step_by(32) {
            let (dy, xhat) = (dout.at(c).to_f32(), (inp.at(c).to_f32() - m) * r);
            let dx = r * (dy * weight.at(c).to_f32() - mean_g - xhat * mean_gx);
            dinp.set(c, bf16::from_f32(dinp.at(c).to_f32() + dx));
            sums.fetch_add(c, dy * xhat);
            sums.fetch_add(channels + c, dy);
        }
        row += thread::grid_dim_x() as usize * 8;
    }
    thread::sync_threads();
    for c in (t..channels).step_by(threads) {
        dweight.atomic_add(c, sums.at(c));
        dbias.atomic_add(c, sums.at(channels + c));
    }
}
