//! Gradient of LayerNorm, version 2: one warp for each row.
//!
//! Problem: as in version 1.
//! Idea: coalesced accesses and shuffles, as in version 2 of the forward pass.
//! Limit: the atomic additions. All warps of the GPU wait for the same 2 C addresses.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread, warp};

/// Adds the gradients. Grid: rows / 8, rounded up: one warp for each row.
#[kernel(threads = 256)]
pub fn layernorm_backward_warp(
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
    let row = thread::block_idx_x() as usize * 8 + warp::index() as usize;
    let (lane, channels) = (warp::lane() as usize, channels as usize);
    if row >= rows as usize {
        return;
    }
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
        dweight.atomic_add(c, dy * xhat);
        dbias.atomic_add(c, dy);
    }
}
