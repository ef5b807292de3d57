//! AdamW for the most compact optimizer state: bf16 parameters with 16-bit remainders ([`crate::remainder`]), and m and v in
//! bf16.
//!
//! Weights and moments get the bits that [`adamw`](super::adamw) computes with f32 master weights and bf16 moments. Only weights
//! below about 1e-20 can differ, because intermediate results that are subnormal there are exact here.
//!
//! The kernel moves 18 bytes per parameter. In that time, an H200 issues 127 instructions per parameter and warp. At most 63
//! of them may be integer operations. These differences from [`adamw`](super::adamw) keep the kernel below both limits:
//!
//! * A thread updates eight adjacent elements and accesses each array by one vector of 16 bytes.
//! * Division and square root have no branch for operands outside of a range ([`Scaled`]).
//! * Rounding does not check for NaN. A thread checks its eight new weights together.
//!
//! If one of the eight weights is not finite, the thread discards all and updates one element after the other, as in a partial
//! tile.

use super::{Arrays, Range, Scalars, Update, grad_scale, lerp, range_of};
use crate::block_float::power_of_two;
use crate::noise;
use crate::remainder;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, kernel, math, thread};

/// Elements of a thread.
const EIGHT: usize = bf16::PACKET;
/// Elements of a block, as in [`super::assign_blocks`].
const TILE: usize = 256 * EIGHT;

/// Arguments multiplied by powers of two, which move the operands of square root and division into the ranges of
/// [`math::sqrt_rn_bounded`] and [`math::div_rn_bounded`]. Passed to the kernel by value.
///
/// The kernel computes sqrt(v / (1 - beta2^t)) * 2^32, and the step * 2^64. v and m are 0 or at least 2^-149, so no intermediate
/// result is subnormal. A value that is too large gives a weight that is infinite or NaN.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scaled {
    /// `correction1` * 2^64.
    correction1: f32,
    /// `correction2` * 2^64.
    correction2: f32,
    /// `weight_decay` * 2^64.
    weight_decay: f32,
    /// `learning_rate` * 2^-64.
    learning_rate: f32,
    /// Whether scaling keeps the bits of the results: 0 or 1. If 0, threads update one element after the other.
    exact: u32,
}

impl Scaled {
    /// Returns the scaled arguments.
    pub fn new(scalars: &Scalars) -> Self {
        let Scalars { correction1, correction2, weight_decay, learning_rate, epsilon, .. } = *scalars;
        // The sum with such an epsilon does not depend on the last bits of the root of a subnormal number.
        let root_is_exact = (power_of_two(-36)..=1.0).contains(&epsilon) && correction2 >= 1.0;
        let rate_is_exact = learning_rate == 0.0 || learning_rate.abs() >= power_of_two(-60);
        Self {
            correction1: correction1 * power_of_two(64),
            correction2: correction2 * power_of_two(64),
            weight_decay: weight_decay * power_of_two(64),
            learning_rate: learning_rate * power_of_two(-64),
            exact: u32::from(root_is_exact && rate_is_exact && correction1 >= 1.0),
        }
    }
}

/// The scalars of an update with [`Scaled`] arguments, the same for all elements of a range.
#[derive(Clone, Copy)]
pub(super) struct ScaledUpdate {
    grad_scale: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    scaled: Scaled,
}

impl ScaledUpdate {
    /// Returns the scalars of a range, with or without weight decay.
    #[inline(always)]
    pub(super) fn new(grad_scale: f32, scalars: Scalars, scaled: Scaled, decayed: u32) -> Self {
        let Scalars { beta1, beta2, epsilon, .. } = scalars;
        let weight_decay = if decayed == 0 { 0.0 } else { scaled.weight_decay };
        Self { grad_scale, beta1, beta2, epsilon, scaled: Scaled { weight_decay, ..scaled } }
    }

    /// Reports whether [`apply`](Self::apply) gives the bits of [`Update::apply`].
    #[inline(always)]
    pub(super) fn is_exact(&self) -> bool {
        self.scaled.exact != 0
    }

    /// Returns what [`Update::apply`] returns, if the new weight is finite.
    #[inline(always)]
    pub(super) fn apply(&self, grad: f32, m: f32, v: f32, old: f32) -> [f32; 3] {
        let Scaled { correction1, correction2, weight_decay, learning_rate, .. } = self.scaled;
        let grad = grad * self.grad_scale;
        let m = lerp(grad, m, self.beta1);
        let v = lerp(grad * grad, v, self.beta2);
        let root = math::sqrt_rn_bounded(v * correction2);
        let divisor = math::fma(root, const { power_of_two(-32) }, self.epsilon);
        let step = math::div_rn_bounded(m * correction1, divisor);
        [m, v, math::fma(-learning_rate, math::fma(weight_decay, old, step), old)]
    }
}

/// Eight adjacent elements of each array. A word holds two of them, the first in the lower half.
#[derive(Clone, Copy)]
struct Eight {
    params: [u32; 4],
    remainders: [u32; 4],
    m: [u32; 4],
    v: [u32; 4],
}

/// Returns the lower halves of two words as a word.
#[inline(always)]
const fn lower_halves(low: u32, high: u32) -> u32 {
    low & 0xffff | high << 16
}

/// Returns the upper halves of two words as a word.
#[inline(always)]
const fn upper_halves(low: u32, high: u32) -> u32 {
    low >> 16 | high & 0xffff_0000
}

impl Eight {
    /// Returns the new values of the elements from element `i` of a range on, or `None` if a weight is not finite.
    #[inline(always)]
    fn updated(self, grads: Packet<bf16>, i: usize, seed: u32, update: &ScaledUpdate) -> Option<Self> {
        let mut new = self;
        let (old_m, old_v) = (Packet::<bf16>::from_words(self.m), Packet::<bf16>::from_words(self.v));
        let mut check = 0.0;
        for word in 0..4 {
            let (remainders, params) = (self.remainders[word], self.params[word]);
            let old = [lower_halves(remainders, params), upper_halves(remainders, params)].map(remainder::join_bits);
            let mut bits = [[0; 3]; 2];
            for half in 0..2 {
                let k = 2 * word + half;
                let [m, v, weight] = update.apply(grads.get(k), old_m.get(k), old_v.get(k), f32::from_bits(old[half]));
                // Infinity times 0 is NaN.
                check = math::fma(weight, 0.0, check);
                let noise = !noise::moment_bits(i + k, seed);
                let m = m.to_bits().wrapping_add(noise >> 16);
                let v = v.to_bits().wrapping_add(noise & 0xffff);
                bits[half] = [m, v, weight.to_bits()];
            }
            let [[low_m, low_v, low], [high_m, high_v, high]] = bits;
            new.m[word] = upper_halves(low_m, high_m);
            new.v[word] = upper_halves(low_v, high_v);
            new.params[word] = upper_halves(low.wrapping_add(0x8000), high.wrapping_add(0x8000));
            new.remainders[word] = lower_halves(low, high);
        }
        if check.is_nan() { None } else { Some(new) }
    }
}

impl Arrays<bf16, bf16, u16> {
    /// Updates elements `i` to `i` + 7. Returns false if it has updated none, because a new weight is not finite.
    #[inline(always)]
    #[track_caller]
    fn update_eight(self, i: usize, seed: u32, update: &ScaledUpdate) -> bool {
        let Self { params, masters: remainders, m, v, grads } = self;
        let grads = grads.packet(i);
        let old = Eight {
            params: params.packet(i).words(),
            remainders: remainders.eight(i),
            m: m.packet(i).words(),
            v: v.packet(i).words(),
        };
        let Some(new) = old.updated(grads, i, seed, update) else { return false };
        m.set_packet(i, Packet::from_words(new.m));
        v.set_packet(i, Packet::from_words(new.v));
        params.set_packet(i, Packet::from_words(new.params));
        remainders.set_eight(i, new.remainders);
        true
    }
}

/// Applies one AdamW step to the elements of `ranges`, like [`adamw`](super::adamw).
///
/// The arrays have the same length, and start at multiples of 16 bytes. `scaled` is [`Scaled::new`] of `scalars`. Grid: the return
/// value of [`assign_blocks`](super::assign_blocks) for bf16.
// With four blocks per SM, ptxas issues all loads of a thread before it waits for one. By itself it uses 48 registers instead of
// 64, and loads parameters and remainders late.
#[kernel(threads = 256, blocks_per_sm = 4)]
pub fn adamw_compact(
    params: GlobalMut<bf16>,
    remainders: GlobalMut<u16>,
    m: GlobalMut<bf16>,
    v: GlobalMut<bf16>,
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
    let arrays = Arrays { params, masters: remainders, m, v, grads }.skip(start);
    let block = (thread::block_idx_x() - range.first_block) as usize;
    let first = block * TILE + thread::thread_idx_x() as usize * EIGHT;
    let seed = scalars.seed.wrapping_add(range.seed);

    let fast = ScaledUpdate::new(grad_scale, scalars, scaled, range.decayed);
    if fast.is_exact() && first + EIGHT <= n && arrays.update_eight(first, seed, &fast) {
        return;
    }
    let update = Update::new(grad_scale, scalars, range.decayed);
    for i in first..n.min(first + EIGHT) {
        arrays.update_one(i, seed, &update, true);
    }
}
