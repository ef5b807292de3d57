//! Gradient of LayerNorm, version 4: sums in registers, and a second kernel.
//!
//! Problem: as in version 1, with C a multiple of 8 and at most 1024.
//! Idea: a lane always has the same columns, whatever the row. So it adds up their dweight and dbias in registers, over all rows
//! of its warp, and writes them once to `partials` (warps, 2, C). A second kernel adds up the warps in a fixed order. No atomics
//! remain, and the result is the same in every run. The row is in registers too, so it is read once, in packets.
//! Limit: registers. 64 sums for each lane leave room for few warps on an SM, so fewer loads are in flight. The version in `gpu/`
//! reads the next rows to shared memory in the meantime. The second kernel has few blocks, and a thread adds the sums of all warps
//! one after the other.

use cuda_std::{Element, Global, GlobalMut, Packet, bf16, kernel, thread, warp};

/// Packets of each lane.
const PACKETS: usize = 4;
/// Channels that a warp accesses with one instruction.
const STEP: usize = 32 * bf16::PACKET;

/// Adds to dinp, and writes the sums of each warp to `partials`. Grid: any, for example one block for each SM.
#[kernel(threads = 256)]
pub fn layernorm_backward_columns(
    dinp: GlobalMut<bf16>,
    partials: GlobalMut<f32>,
    dout: Global<bf16>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (first, channels, rows) = (warp::lane() as usize * bf16::PACKET, channels as usize, rows as usize);
    let warp_of_grid = thread::block_idx_x() as usize * 8 + warp::index() as usize;
    let (mut dweight, mut dbias) = ([[0.0; 8]; PACKETS], [[0.0; 8]; PACKETS]);
    let mut row = warp_of_grid;
    while row < rows {
        let (m, r) = (mean.at(row), rstd.at(row));
        let (mut g, mut xhat) = ([[0.0; 8]; PACKETS], [[0.0; 8]; PACKETS]);
        let (mut sum_g, mut sum_gx) = (0.0, 0.0);
        for p in 0..PACKETS {
            let c = first + p * STEP;
            if c < channels {
                let (dy, x, w) = (dout.packet(row * channels + c), inp.packet(row * channels + c), weight.packet(c));
                for k in 0..8 {
                    xhat[p][k] = (x.get(k) - m) * r;
                    g[p][k] = dy.get(k) * w.get(k);
                    dweight[p][k] += dy.get(k) * xhat[p][k];
                    dbias[p][k] += dy.get(k);
                    sum_g += g[p][k];
                    sum_gx += g[p][k] * xhat[p][k];
                }
            }
        }
        let (mean_g, mean_gx) = (warp::sum(sum_g) / channels as f32, warp::sum(sum_gx) / channels as f32);
        for p in 0..PACKETS {
            let c = first + p * STEP;
            if c < channels {
                let old = dinp.packet(row * channels + c);
                let dx = |k: usize| r * (g[p][k] - mean_g - xhat[p][k] * mean_gx);
                dinp.set_packet(row * channels + c, Packet::from_fn(|k| old.get(k) + dx(k)));
            }
        }
        row += thread::grid_dim_x() as usize * 8;
    }
    let partials = partials.skip(warp_of_grid * 2 * channels);
    for p in 0..PACKETS {
        for k in 0..8 {
            let c = first + p * STEP + k;
            if c < channels {
                partials.set(c, dweight[p][k]);
                partials.set(channels + c, dbias[p][k]);
            }
        }
    }
}

/// Adds the sums over warps of `partials` (warps, 2, C) to dweight and dbias. Grid: 2 C / 128, rounded up.
#[kernel(threads = 128)]
pub fn layernorm_backward_add_columns(
    dweight: GlobalMut<f32>,
    dbias: GlobalMut<f32>,
    partials: Global<f32>,
    warps: u32,
    channels: u32,
) {
    let (column, channels) = (thread::index_1d(), channels as usize);
    if column < 2 * channels {
        let sum: f32 = (0..warps as usize).map(|w| partials.at(w * 2 * channels + column)).sum();
        let (to, c) = if column < channels { (dweight, column) } else { (dbias, column - channels) };
        to.set(c, to.at(c) + sum);
    }
}
