//! AdamW beside bf16 parameters with m and v in eight bits per value ([`crate::block_float`]).
//!
//! Weights get the bits that [`adamw`](super::adamw) computes from the stored moments. Each thread updates the eight values of a block. It
//! moves 10 bytes per parameter without master weights, 14 with remainders, and 18 with f32 master weights.

use super::compact::{Scaled, ScaledUpdate};
use super::{Range, Scalars, Update, grad_scale, range_of};
use crate::block_float::{BLOCK, decode, encode};
use crate::noise;
use crate::weights::{self, Master};
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Values of a thread block, as in [`super::assign_blocks`].
const TILE: usize = 256 * BLOCK;

/// Applies one AdamW step to the elements of `ranges`, like [`adamw`](super::adamw).
///
/// `scaled` is [`Scaled::new`] of `scalars`. `m` and `v` have one element for eight parameters. The blocks of a range begin at its start, and
/// values past its end are zero. Grid: the return value of [`assign_blocks`](super::assign_blocks) for bf16.
#[kernel(threads = 256, instances(f32 = <f32>, remainder = <u16>))]
pub fn adamw_8bit<W: Master>(
    params: GlobalMut<bf16>,
    masters: GlobalMut<W>,
    m: GlobalMut<u64>,
    v: GlobalMut<u64>,
    grads: Global<bf16>,
    stats: Global<f32>,
    ranges: Global<Range>,
    scalars: Scalars,
    scaled: Scaled,
) {
    let [loss, norm] = [stats.at(0), stats.at(1)];
    let range = range_of(thread::block_idx_x(), ranges, scalars.range_count);
    let Some(grad_scale) = grad_scale(loss, norm, scalars.grad_factor, scalars.clip) else { return };
    let (start, n) = (range.start as usize, range.len as usize);
    let i = (thread::block_idx_x() - range.first_block) as usize * TILE + thread::thread_idx_x() as usize * BLOCK;
    if i >= n {
        return;
    }
    let seed = scalars.seed.wrapping_add(range.seed);
    let has_masters = weights::exist(masters);
    let (params, masters, grads) = (params.skip(start), masters.skip(start), grads.skip(start));
    let block = (start + i) / BLOCK;

    let (old_m, old_v) = (m.at(block), v.at(block));
    let (mut grad, mut weight) = ([0.0; BLOCK], [0.0; BLOCK]);
    let is_full = i + BLOCK <= n;
    if is_full {
        let packet = grads.packet(i);
        for half in 0..2 {
            let first = i + 4 * half;
            let four = if has_masters { W::four(masters, params, first) } else { params.four(first) };
            for k in 0..4 {
                (grad[4 * half + k], weight[4 * half + k]) = (packet.get(4 * half + k), four[k]);
            }
        }
    } else {
        for k in 0..BLOCK {
            if i + k < n {
                grad[k] = grads.at(i + k).to_f32();
                weight[k] = if has_masters { W::at(masters, params, i + k) } else { params.at(i + k).to_f32() };
            }
        }
    }

    let (old_m, old_v) = (decode::<true>(old_m), decode::<false>(old_v));
    let (mut new_m, mut new_v, mut new) = (old_m, old_v, weight);
    let fast = ScaledUpdate::new(grad_scale, scalars, scaled, range.decayed);
    let mut check = 0.0;
    for k in 0..BLOCK {
        [new_m[k], new_v[k], new[k]] = fast.apply(grad[k], old_m[k], old_v[k], weight[k]);
        // Infinity times 0 is NaN.
        check = math::fma(new[k], 0.0, check);
    }
    if !fast.is_exact() || check.is_nan() {
        let update = Update::new(grad_scale, scalars, range.decayed);
        for k in 0..BLOCK {
            [new_m[k], new_v[k], new[k]] = update.apply(grad[k], old_m[k], old_v[k], weight[k]);
        }
    }
    let (mut noise_m, mut noise_v) = ([0; BLOCK], [0; BLOCK]);
    for k in 0..BLOCK {
        noise_m[k] = noise::moment_bits(i + k, seed);
        noise_v[k] = noise_m[k].rotate_left(16);
    }
    m.set(block, encode::<true>(new_m, noise_m));
    v.set(block, encode::<false>(new_v, noise_v));

    if is_full {
        for half in 0..2 {
            let (first, four) = (i + 4 * half, core::array::from_fn(|k| new[4 * half + k]));
            if has_masters {
                W::set_four(masters, first, four);
            }
            params.set_four(first, W::params::<bf16>(four, first, seed));
        }
    } else {
        for k in 0..BLOCK {
            if i + k < n {
                if has_masters {
                    W::set(masters, i + k, new[k]);
                }
                params.set(i + k, W::param(new[k], i + k, seed));
            }
        }
    }
}
