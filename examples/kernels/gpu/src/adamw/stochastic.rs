//! AdamW, version 3: parameters and gradients in bf16, with stochastic rounding.
//!
//! Problem: as in version 2, with params and grads in bf16; m and v stay f32. There is no f32 copy of the parameters.
//! Idea: an update is often far below one step of bf16, and rounding to nearest would discard it. Stochastic rounding rounds up
//! with a probability equal to the discarded fraction, so the expected value of the parameter is exact. The random bits are a
//! hash of the index and the seed: no state, and the same result for every grid.
//! Limit: memory bandwidth: 12 bytes read and 10 bytes written for each parameter.

use super::Constants;
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Returns 32 bits that look random, from an index and a seed: two rounds of multiplication and shift.
#[inline(always)]
pub(super) fn random_bits(index: usize, seed: u32) -> u32 {
    let mut bits = (index as u32).wrapping_mul(0x9e37_79b1) ^ seed;
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x2c1b_3c6d);
    bits = (bits ^ (bits >> 12)).wrapping_mul(0x297a_2d39);
    bits ^ (bits >> 15)
}

/// Updates n parameters. Grid: n / 1024, rounded up.
#[kernel(threads = 256)]
pub fn adamw_stochastic(
    params: GlobalMut<bf16>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<bf16>,
    constants: Constants,
    seed: u32,
    n: u64,
) {
    let i = 4 * thread::index_1d();
    if i >= n as usize {
        return;
    }
    let (grad, old_m, old_v, old) = (grads.four(i), m.four(i), v.four(i), params.four(i));
    let (mut new_m, mut new_v, mut new) = ([0.0; 4], [0.0; 4], [0.0; 4]);
    for k in 0..4 {
        [new_m[k], new_v[k], new[k]] = constants.update(grad[k], old_m[k], old_v[k], old[k]);
        new[k] = bf16::round_stochastic(new[k], random_bits(i + k, seed));
    }
    m.set_four(i, new_m);
    v.set_four(i, new_v);
    params.set_four(i, new);
}
