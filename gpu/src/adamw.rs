//! `AdamW` over ranges of parameters in one launch; each decays or does not and has a seed of its own. Of any length; arrays are
//! 16-byte aligned and so is where a range begins.
//!
//! A block takes elements of one range, which it finds in a table in device memory by its number: what becomes of an element
//! depends on its range and its place in that, not on which ranges share the launch.
//!
//! m and v are f32. With fp32 masters these are the parameters, and `params` is their image, rounded stochastically if
//! it is bf16 ([`crate::noise`], by index in the range and seed): an update far below a bf16 step still moves it on
//! average. Without masters the rounded parameters are all there is.
//!
//! The gradients are scaled by what brings their norm down to `clip`, found on the device, so that no host round trip
//! stands between the norm and the update. For the same reason it is decided here that a step changes nothing: a scale of 0
//! would not do, since 0 times NaN is NaN and m, v and weight decay would go on. The norm alone does not tell, either: the
//! loss of a token whose logit is -inf is infinite, its gradient is not.
//!
//! Every operation is correctly rounded, so that any device gives the same bits: the kernel waits for memory, not for them.

use crate::fours::Fours;
pub use crate::fours::grid;
use crate::noise;
use cuda_std::{Element, Global, GlobalMut, kernel, math, thread};

/// A range of a launch's arrays, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// First element, a multiple of [`Range::ALIGNMENT`].
    start: u64,
    len: u64,
    first_block: u32,
    decayed: u32,
    seed: u32,
    _padding: u32,
}

impl Range {
    /// Elements: 16 bytes of bf16.
    pub const ALIGNMENT: usize = 8;
    /// Of 32 bits, in device memory.
    pub const WORDS: usize = size_of::<Self>() / 4;

    /// `seed` is added to the launch's.
    pub const fn new(start: usize, len: usize, decayed: bool, seed: u32) -> Self {
        Self { start: start as u64, len: len as u64, first_block: 0, decayed: decayed as u32, seed, _padding: 0 }
    }

    /// As it lies in device memory.
    pub const fn words(&self) -> [u32; Self::WORDS] {
        let Self { start, len, first_block, decayed, seed, .. } = *self;
        [start as u32, (start >> 32) as u32, len as u32, (len >> 32) as u32, first_block, decayed, seed, 0]
    }
}

/// Gives the ranges of a launch of [`adamw`] their blocks, one after another; the grid is how many there are.
pub fn assign_blocks<T: Element>(ranges: &mut [Range]) -> u32 {
    let mut blocks = 0;
    for range in ranges {
        range.first_block = blocks;
        blocks += grid::<T>(range.len as usize);
    }
    blocks
}

/// Of `count` ranges, at least one, the one that a block takes elements of.
#[inline(always)]
fn range_of(block: u32, ranges: Global<Range>, count: u32) -> Range {
    // The last that begins no later: one without elements begins where the next does.
    let (mut first, mut end) = (0, count);
    while end - first > 1 {
        let middle = first.midpoint(end);
        if ranges.at(middle as usize).first_block <= block {
            first = middle;
        } else {
            end = middle;
        }
    }
    ranges.at(first as usize)
}

/// The numbers of an update that all elements share.
#[derive(Clone, Copy)]
struct Update {
    grad_scale: f32,
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    correction1: f32,
    correction2: f32,
    epsilon: f32,
    weight_decay: f32,
}

impl Update {
    /// New m, v and parameter.
    #[inline(always)]
    fn apply(&self, grad: f32, m: f32, v: f32, old: f32) -> [f32; 3] {
        let grad = grad * self.grad_scale;
        let m = lerp(grad, m, self.beta1);
        let v = lerp(grad * grad, v, self.beta2);
        let step = math::div_rn(m * self.correction1, math::sqrt_rn(v * self.correction2) + self.epsilon);
        [m, v, math::fma(-self.learning_rate, math::fma(self.weight_decay, old, step), old)]
    }
}

/// beta * old + (1 - beta) * new, in two roundings.
#[inline(always)]
fn lerp(new: f32, old: f32, beta: f32) -> f32 {
    math::fma(beta, old, math::fma(-beta, new, new))
}

/// What the gradients are multiplied by, or `None` for a step that must change nothing.
#[inline(always)]
fn grad_scale(loss: f32, norm: f32, clip: f32) -> Option<f32> {
    if !(loss.is_finite() && norm.is_finite()) {
        return None;
    }
    Some(if norm > clip { math::div_rn(clip, norm) } else { 1.0 })
}

/// One step on params, m, v and masters (null for none) with grads, all of one length: on the elements of `ranges` (`count`),
/// which ascend and do not overlap, with the blocks that [`assign_blocks`] gave them; on others none. None at all unless
/// both `stats` (2) are finite: the sum of the losses, and the norm of all gradients, not of these alone. `clip` may be infinite.
/// `correction1` is 1 / (1 - beta1^t), `correction2` 1 / (1 - beta2^t), t from 1. `weight_decay` is that of ranges that decay.
/// `seed` is for this step only. Grid: what [`assign_blocks`] returned.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn adamw<T: Element>(
    params: GlobalMut<T>,
    masters: GlobalMut<f32>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<T>,
    stats: Global<f32>,
    ranges: Global<Range>,
    count: u32,
    clip: f32,
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    correction1: f32,
    correction2: f32,
    epsilon: f32,
    weight_decay: f32,
    seed: u32,
) {
    let [loss, norm] = [stats.at(0), stats.at(1)];
    let range = range_of(thread::block_idx_x(), ranges, count);
    let Some(grad_scale) = grad_scale(loss, norm, clip) else { return };
    let (block, n) = (Fours::<T>::in_block(thread::block_idx_x() - range.first_block), range.len as usize);
    let weight_decay = if range.decayed == 0 { 0.0 } else { weight_decay };
    let update = Update { grad_scale, learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay };
    let seed = seed.wrapping_add(range.seed);
    let mastered = !masters.is_null();
    let start = range.start as usize;
    let (params, masters, grads) = (params.skip(start), masters.skip(start), grads.skip(start));
    let (m, v) = (m.skip(start), v.skip(start));

    if block.is_whole(n) {
        let mut old = [[[0.0; 4]; 4]; 2];
        for part in 0..Fours::<T>::PARTS {
            let i = block.first(part);
            let params = if mastered { masters.four(i) } else { params.four(i) };
            old[part] = [grads.four(i), m.four(i), v.four(i), params];
        }
        for part in 0..Fours::<T>::PARTS {
            let [grad, old_m, old_v, old] = old[part];
            let mut new = [[0.0; 4]; 3];
            for k in 0..4 {
                let [m, v, param] = update.apply(grad[k], old_m[k], old_v[k], old[k]);
                (new[0][k], new[1][k], new[2][k]) = (m, v, param);
            }
            let i = block.first(part);
            m.set_four(i, new[0]);
            v.set_four(i, new[1]);
            if mastered {
                masters.set_four(i, new[2]);
            }
            params.set_four(i, noise::round_four::<T>(new[2], i, seed));
        }
    } else {
        for i in block.rest(n) {
            let old = if mastered { masters.at(i) } else { params.at(i).to_f32() };
            let [new_m, new_v, new] = update.apply(grads.at(i).to_f32(), m.at(i), v.at(i), old);
            m.set(i, new_m);
            v.set(i, new_v);
            if mastered {
                masters.set(i, new);
            }
            params.set(i, noise::round(new, i, seed));
        }
    }
}
