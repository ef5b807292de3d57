//! AdamW, version 4: gradient clipping on the device.
//!
//! Problem: as in version 3. The gradients are scaled by clip / norm if their norm (1), which an earlier kernel has computed,
//! exceeds clip.
//! Idea: the kernel reads the norm from device memory. If the host read it, it would have to wait for all work queued so far, and
//! the GPU would be idle until the update is launched. A norm that is not finite skips the step: a factor of 0 would not, because
//! 0 times NaN is NaN.
//! Limit: memory bandwidth. The version in `gpu/` also rounds exactly, and updates all tensors of a model in one launch.

use super::Constants;
use super::stochastic::random_bits;
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Updates n parameters. Grid: n / 1024, rounded up.
#[kernel(threads = 256)]
pub fn adamw_clip(
    params: GlobalMut<bf16>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<bf16>,
    norm: Global<f32>,
    clip: f32,
    constants: Constants,
    seed: u32,
    n: u64,
) {
    let (i, norm) = (4 * thread::index_1d(), norm.at(0));
    if i >= n as usize || !norm.is_finite() {
        return;
    }
    let scale = if norm > clip { clip / norm } else { 1.0 };
    let (grad, old_m, old_v, old) = (grads.four(i), m.four(i), v.four(i), params.four(i));
    let (mut new_m, mut new_v, mut new) = ([0.0; 4], [0.0; 4], [0.0; 4]);
    for k in 0..4 {
        [new_m[k], new_v[k], new[k]] = constants.update(scale * grad[k], old_m[k], old_v[k], old[k]);
        new[k] = bf16::round_stochastic(new[k], random_bits(i + k, seed));
    }
    m.set_four(i, new_m);
    v.set_four(i, new_v);
    params.set_four(i, new);
}
