//! AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101), over many parameter ranges in one
//! launch.
//!
//! For each element, with g the clipped gradient and t the step, counted from 1:
//!
//! ```text
//! m = beta1 * m + (1 - beta1) * g
//! v = beta2 * v + (1 - beta2) * g^2
//! param -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * param)
//! ```
//!
//! A [`Range`] is a contiguous slice of the tensors with its own seed, with or without weight decay. Its length is
//! arbitrary. The arrays and the start of every range are 16-byte aligned. Each block updates elements of one range,
//! which it finds by binary search in a table in device memory. The result for an element depends on its range and on
//! its index in the range, not on the other ranges of the launch.
//!
//! The weights that receive the update have one of three forms ([`crate::weights`]):
//!
//! * f32 master weights. `params` receives a copy of them, rounded stochastically if T is bf16 ([`crate::noise`], keyed
//!   by index in the range and seed).
//! * bf16 parameters with 16-bit remainders, which together are f32 master weights ([`crate::remainder`]). Nothing is
//!   rounded stochastically.
//! * No master weights: the stochastically rounded parameters are the only copy. An update far below one bf16 step
//!   still moves them in expectation.
//!
//! m and v are f32 or, beside bf16 parameters, bf16 with stochastic rounding. The random bits of parameter, m and v are
//! independent. The parameter is computed from m and v before they are rounded. [`compact`] has the kernel for remainders with
//! bf16 moments.
//!
//! Bytes per bf16 parameter, read and written:
//!
//! | | m and v in f32 | m and v in bf16 |
//! |---|---|---|
//! | f32 master weights | 28 | 20 |
//! | remainders | 26 | 18 |
//! | no master weights | 22 | 14 |
//!
//! Gradients are multiplied by a factor and clipped by their global norm. The kernel reads the norm from device memory, so the host does not have
//! to synchronize between the norm and the update. It also decides on the device whether to skip the step. A gradient
//! scale of 0 would not skip it: 0 times NaN is NaN, and m, v and weight decay would still change. The loss is checked
//! as well as the norm, because a target logit of -inf gives an infinite loss but finite gradients.
//!
//! Every operation is correctly rounded, so every device computes the same bits.

pub mod compact;
pub mod eight_bit;

use crate::float4::Float4Tile;
pub use crate::float4::grid;
use crate::noise::{self, Stream};
use crate::weights::{self, Master};
use cuda_std::{Element, Global, GlobalMut, device, kernel, math, thread};

/// A contiguous range of elements that share a seed and a weight decay setting, as stored in the device table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// Index of the first element, a multiple of [`Range::ALIGNMENT`].
    start: u64,
    len: u64,
    /// Index of the first block of the grid that updates this range.
    first_block: u32,
    /// Whether weight decay applies: 0 or 1.
    decayed: u32,
    seed: u32,
    _padding: u32,
}

impl Range {
    /// Alignment of a range's start, in elements: 16 bytes of bf16.
    pub const ALIGNMENT: usize = 8;
    /// Size of a range in the device table, in 32-bit words.
    pub const WORDS: usize = size_of::<Self>() / 4;

    /// Returns a range of `len` elements from element `start` on. Its random bits are keyed by `seed` plus
    /// [`Scalars::seed`].
    pub const fn new(start: usize, len: usize, decayed: bool, seed: u32) -> Self {
        Self { start: start as u64, len: len as u64, first_block: 0, decayed: decayed as u32, seed, _padding: 0 }
    }

    /// Returns the range in its device memory representation.
    pub const fn words(&self) -> [u32; Self::WORDS] {
        let Self { start, len, first_block, decayed, seed, .. } = *self;
        [start as u32, (start >> 32) as u32, len as u32, (len >> 32) as u32, first_block, decayed, seed, 0]
    }
}

/// Assigns consecutive blocks to the ranges of a launch of [`adamw`] and returns the total, which is the grid size.
pub fn assign_blocks<T: Element>(ranges: &mut [Range]) -> u32 {
    let mut blocks = 0;
    for range in ranges {
        range.first_block = blocks;
        blocks += grid::<T>(range.len as usize);
    }
    blocks
}

/// Returns the range that `block` updates, by binary search over `count` ranges, at least one.
#[inline(always)]
fn range_of(block: u32, ranges: Global<Range>, count: u32) -> Range {
    // Finds the last range that begins at or before the block. An empty range has the same first block as its
    // successor.
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

/// The scalar arguments of [`adamw`]. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    /// Factor of the gradients and of their norm, applied before clipping.
    pub grad_factor: f32,
    /// Maximum gradient norm; infinity disables clipping.
    pub clip: f32,
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Bias correction of the first moment, 1 / (1 - beta1^t).
    pub correction1: f32,
    /// Bias correction of the second moment, 1 / (1 - beta2^t).
    pub correction2: f32,
    /// Term added to the denominator for numerical stability.
    pub epsilon: f32,
    /// Weight decay coefficient of the ranges that decay.
    pub weight_decay: f32,
    /// Seed of the stochastic rounding, different for every step.
    pub seed: u32,
    /// Number of ranges in the table, at least one.
    pub range_count: u32,
}

/// The scalars of an update, the same for all elements of a range.
#[derive(Clone, Copy)]
struct Update {
    grad_scale: f32,
    /// The scalars of the launch, with the weight decay of the range.
    scalars: Scalars,
}

impl Update {
    /// Returns the scalars of a range, with or without weight decay.
    #[inline(always)]
    fn new(grad_scale: f32, scalars: Scalars, decayed: u32) -> Self {
        let weight_decay = if decayed == 0 { 0.0 } else { scalars.weight_decay };
        Self { grad_scale, scalars: Scalars { weight_decay, ..scalars } }
    }

    /// Returns the new m, v and parameter of one element.
    #[inline(always)]
    fn apply(&self, grad: f32, m: f32, v: f32, old: f32) -> [f32; 3] {
        let Scalars { learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay, .. } = self.scalars;
        let grad = grad * self.grad_scale;
        let m = lerp(grad, m, beta1);
        let v = lerp(grad * grad, v, beta2);
        let step = math::div_rn(m * correction1, math::sqrt_rn(v * correction2) + epsilon);
        [m, v, math::fma(-learning_rate, math::fma(weight_decay, old, step), old)]
    }
}

/// Returns beta * old + (1 - beta) * new, rounded twice.
#[inline(always)]
pub(crate) fn lerp(new: f32, old: f32, beta: f32) -> f32 {
    math::fma(beta, old, math::fma(-beta, new, new))
}

/// Returns `factor` times the clipping factor of the gradients, or `None` if the step must be skipped. `norm` is that before the
/// multiplication by `factor`.
#[inline(always)]
pub(crate) fn grad_scale(loss: f32, norm: f32, factor: f32, clip: f32) -> Option<f32> {
    let norm = norm * factor;
    if !(loss.is_finite() && norm.is_finite()) {
        return None;
    }
    Some(if norm > clip { factor * math::div_rn(clip, norm) } else { factor })
}

/// The arrays of a range.
#[derive(Clone, Copy)]
struct Arrays<T, M, W> {
    params: GlobalMut<T>,
    masters: GlobalMut<W>,
    m: GlobalMut<M>,
    v: GlobalMut<M>,
    grads: Global<T>,
}

#[device]
impl<T: Element, M: Element, W: Master> Arrays<T, M, W> {
    /// Returns the arrays from element `start` on.
    fn skip(self, start: usize) -> Self {
        let Self { params, masters, m, v, grads } = self;
        let (params, masters, grads) = (params.skip(start), masters.skip(start), grads.skip(start));
        Self { params, masters, m: m.skip(start), v: v.skip(start), grads }
    }

    /// Updates element `i`.
    #[track_caller]
    fn update_one(self, i: usize, seed: u32, update: &Update, has_masters: bool) {
        let Self { params, masters, m, v, grads } = self;
        let old = if has_masters { W::at(masters, params, i) } else { params.at(i).to_f32() };
        let [new_m, new_v, new] = update.apply(grads.at(i).to_f32(), m.at(i).to_f32(), v.at(i).to_f32(), old);
        m.set(i, noise::round(Stream::M, new_m, i, seed));
        v.set(i, noise::round(Stream::V, new_v, i, seed));
        if has_masters {
            W::set(masters, i, new);
        }
        params.set(i, W::param(new, i, seed));
    }
}

/// Applies one AdamW step to the elements of `ranges`. `M` is the type of the moments.
///
/// `params`, `masters`, `m`, `v` and `grads` have the same length; `masters` is null if there are no master weights.
/// The ranges ascend, do not overlap, and have blocks from [`assign_blocks`]. Elements outside the ranges do not
/// change. `stats` (2) holds the sum of the losses and the norm of all gradients, including those of other tensors. The
/// step is skipped unless both are finite. Grid: the return value of [`assign_blocks`].
#[kernel(
    threads = 256,
    instances(
        bf16 = <cuda_std::bf16, f32, f32>,
        f32 = <f32, f32, f32>,
        bf16_moments = <cuda_std::bf16, cuda_std::bf16, f32>,
        bf16_remainder = <cuda_std::bf16, f32, u16>,
    )
)]
pub fn adamw<T: Element, M: Element, W: Master>(
    params: GlobalMut<T>,
    masters: GlobalMut<W>,
    m: GlobalMut<M>,
    v: GlobalMut<M>,
    grads: Global<T>,
    stats: Global<f32>,
    ranges: Global<Range>,
    scalars: Scalars,
) {
    let [loss, norm] = [stats.at(0), stats.at(1)];
    let range = range_of(thread::block_idx_x(), ranges, scalars.range_count);
    let Some(grad_scale) = grad_scale(loss, norm, scalars.grad_factor, scalars.clip) else { return };
    let (tile, n) = (Float4Tile::<T>::of_block(thread::block_idx_x() - range.first_block), range.len as usize);
    let update = Update::new(grad_scale, scalars, range.decayed);
    let seed = scalars.seed.wrapping_add(range.seed);
    let has_masters = weights::exist(masters);
    let arrays = Arrays { params, masters, m, v, grads }.skip(range.start as usize);
    let Arrays { params, masters, m, v, grads } = arrays;

    // Not `Float4Tile::process`, with which ptxas schedules the f32 instance differently.
    if tile.is_full(n) {
        let mut old = [[[0.0; 4]; 4]; 2];
        for part in 0..Float4Tile::<T>::VECTORS {
            let i = tile.vector(part);
            let old_weights = if has_masters { W::four(masters, params, i) } else { params.four(i) };
            old[part] = [grads.four(i), m.four(i), v.four(i), old_weights];
        }
        for part in 0..Float4Tile::<T>::VECTORS {
            let [grad, old_m, old_v, old] = old[part];
            let mut new = [[0.0; 4]; 3];
            for k in 0..4 {
                let [m, v, weight] = update.apply(grad[k], old_m[k], old_v[k], old[k]);
                (new[0][k], new[1][k], new[2][k]) = (m, v, weight);
            }
            let i = tile.vector(part);
            m.set_four(i, noise::round_four::<M>(Stream::M, new[0], i, seed));
            v.set_four(i, noise::round_four::<M>(Stream::V, new[1], i, seed));
            if has_masters {
                W::set_four(masters, i, new[2]);
            }
            params.set_four(i, W::params::<T>(new[2], i, seed));
        }
    } else {
        for i in tile.tail(n) {
            arrays.update_one(i, seed, &update, has_masters);
        }
    }
}
