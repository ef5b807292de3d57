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

use crate::noise;
use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread};

const THREADS: usize = 256;

/// Blocks of both kernels.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
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

/// One step on params (n), m (n), v (n) and masters (n, or null for none) with grads (n); none at all unless both `stats` (2)
/// are finite: the sum of the losses, and the norm of all gradients, not of this range alone. `clip` may be infinite.
/// `correction1` is 1 / (1 - beta1^t), `correction2` 1 / (1 - beta2^t), t from 1. `seed` is for this launch only. One packet
/// of T per thread.
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
    let (first, n) = (thread::index_1d() * T::PACKET, n as usize);
    let Some(grad_scale) = grad_scale(stats.at(0), stats.at(1), clip) else { return };
    let update = Update { grad_scale, learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay };
    let mastered = !masters.is_null();

    if first + T::PACKET <= n {
        let grad = grads.packet_streaming(first);
        let mut old_m = [Packet::zero(); 2];
        let mut old_v = [Packet::zero(); 2];
        let mut old = [0.0; 8];
        for part in 0..T::PACKET / f32::PACKET {
            old_m[part] = m.packet(first + part * f32::PACKET);
            old_v[part] = v.packet(first + part * f32::PACKET);
        }
        if mastered {
            for part in 0..T::PACKET / f32::PACKET {
                let packet = masters.packet(first + part * f32::PACKET);
                for k in 0..f32::PACKET {
                    old[part * f32::PACKET + k] = packet.get(k);
                }
            }
        } else {
            let packet = params.packet(first);
            for k in 0..T::PACKET {
                old[k] = packet.get(k);
            }
        }
        let mut new = [[0.0; 3]; 8];
        for k in 0..T::PACKET {
            let (part, i) = (k / f32::PACKET, k % f32::PACKET);
            new[k] = update.apply(grad.get(k), old_m[part].get(i), old_v[part].get(i), old[k]);
        }
        for part in 0..T::PACKET / f32::PACKET {
            let offset = part * f32::PACKET;
            m.set_packet(first + offset, Packet::from_fn(|k| new[offset + k][0]));
            v.set_packet(first + offset, Packet::from_fn(|k| new[offset + k][1]));
            if mastered {
                masters.set_packet(first + offset, Packet::from_fn(|k| new[offset + k][2]));
            }
        }
        params.set_packet(first, noise::round_packet(first, seed, |k| new[k][2]));
    } else {
        for i in first..n {
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
/// resumed run gets its parameters back bit for bit. One packet of T per thread.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn params_from_masters<T: Element>(params: GlobalMut<T>, masters: Global<f32>, n: u64, seed: u32) {
    let (first, n) = (thread::index_1d() * T::PACKET, n as usize);
    if first + T::PACKET <= n {
        let mut x = [Packet::zero(); 2];
        for part in 0..T::PACKET / f32::PACKET {
            x[part] = masters.packet_streaming(first + part * f32::PACKET);
        }
        params.set_packet(first, noise::round_packet(first, seed, |k| x[k / f32::PACKET].get(k % f32::PACKET)));
    } else {
        for i in first..n {
            params.set(i, noise::round(masters.at(i), i, seed));
        }
    }
}
