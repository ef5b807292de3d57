//! `AdamW` over a contiguous range of n parameters that share one weight decay, any n; arrays are 16-byte aligned.
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
use cuda_std::{Element, Global, GlobalMut, kernel, math};

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

/// One step on params (n), m (n), v (n) and masters (n, or null for none) with grads (n); none at all unless both `stats` (2)
/// are finite: the sum of the losses, and the norm of all gradients, not of this range alone. `clip` may be infinite.
/// `correction1` is 1 / (1 - beta1^t), `correction2` 1 / (1 - beta2^t), t from 1. `seed` is for this launch only. Grid
/// [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn adamw<T: Element>(
    params: GlobalMut<T>,
    masters: GlobalMut<f32>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<T>,
    stats: Global<f32>,
    n: u64,
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
    let (block, n) = (Fours::<T>::of_thread(), n as usize);
    let Some(grad_scale) = grad_scale(stats.at(0), stats.at(1), clip) else { return };
    let update = Update { grad_scale, learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay };
    let mastered = !masters.is_null();

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

/// params (n) = masters (n), rounded as [`adamw`] rounded them if it was given the same `seed` for the same range: a
/// resumed run gets its parameters back bit for bit. Grid [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn params_from_masters<T: Element>(params: GlobalMut<T>, masters: Global<f32>, n: u64, seed: u32) {
    let (block, n) = (Fours::<T>::of_thread(), n as usize);
    if block.is_whole(n) {
        let mut x = [[0.0; 4]; 2];
        for part in 0..Fours::<T>::PARTS {
            x[part] = masters.four(block.first(part));
        }
        for part in 0..Fours::<T>::PARTS {
            let i = block.first(part);
            params.set_four(i, noise::round_four::<T>(x[part], i, seed));
        }
    } else {
        for i in block.rest(n) {
            params.set(i, noise::round(masters.at(i), i, seed));
        }
    }
}
