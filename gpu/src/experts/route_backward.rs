//! The gradient of the router's logits.
//!
//! With the scores s of a token, the weights w of its choices and g = w · dw, where dw is the gradient of a weight:
//!
//! ```text
//! softmax:              dlogit = [chosen] g - s G,  G = Σ g
//! softmax, normalized:  dlogit = [chosen] (g - w G)
//! sigmoid:              dlogit = [chosen] g (1 - s)
//! sigmoid, normalized:  dlogit = [chosen] (g - w G) (1 - s)
//! ```
//!
//! An activation is linear in up, so g = Σ dup · up over the channels of a choice's row, where dup includes the weight. The weights do not need
//! the outputs of the experts then. The gradient of the load-balancing loss is that of a · E Σ f s, where f is the share of an expert's
//! entries per token, and that of the z-loss 2 z logsumexp(logits) · softmax(logits).
//!
//! The bias for the choice of experts has no gradient. [`route_bias_backward`] gives it one, of which only the sign is used.

use super::Router;
use super::route::Logits;
use cuda_std::{Element, Global, GlobalMut, kernel, math, thread, warp};

const WARPS: usize = 256 / LANES;
const LANES: usize = warp::LANES as usize;

/// The factor of the gradients of the bias. They are so small that they do not change the norm of all gradients, and their squares are normal
/// numbers.
pub const BIAS_GRADIENT: f32 = 1.0 / (1u64 << 50) as f32;

/// The scalars of [`route_backward`]. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BackwardSizes {
    /// Tokens.
    pub rows: u32,
    /// Tokens that the loads count.
    pub tokens: u32,
    /// The coefficient a of the load-balancing loss, times the gradient of a token's loss.
    pub aux_loss: f32,
    /// The coefficient z of the z-loss, times the gradient of a token's loss.
    pub z_loss: f32,
}

/// Returns Σ dup · up of a row (2, F).
#[inline(always)]
fn dot<T: Element>(up: Global<T>, dup: Global<T>, channels: usize) -> f32 {
    let mut sum = 0.0;
    let mut column = warp::lane() as usize * T::PACKET;
    while column < channels {
        let (up, dup) = (up.packet_streaming(column), dup.packet(column));
        for i in 0..T::PACKET {
            sum = math::fma(dup.get(i), up.get(i), sum);
        }
        column += LANES * T::PACKET;
    }
    warp::sum(sum)
}

/// Computes out (entries), the gradients g, from their positions (entries) in the order of experts, and the preactivation (P, 2, F) with
/// its gradient. g is 0 if the position is negative. F is a multiple of the packet.
///
/// One warp per entry. Grid: [`grid`](super::grid) of the entries.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn choice_gradients<T: Element>(
    out: GlobalMut<f32>,
    positions: Global<i32>,
    preactivation: Global<T>,
    dpreactivation: Global<T>,
    entries: u32,
    channels: u32,
) {
    let entry = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if entry >= entries as usize {
        return;
    }
    let (position, channels) = (positions.at(entry), channels as usize);
    let mut gradient = 0.0;
    if position >= 0 {
        let at = position as u32 as usize * 2 * channels;
        gradient = dot(preactivation.skip(at), dpreactivation.skip(at), channels);
    }
    if warp::lane() == 0 {
        out.set(entry, gradient);
    }
}

/// Computes dlogits (rows, E) from logits (rows, E), experts, weights and gradients g (rows, K), and loads (E), the entries of each expert.
/// `N` is at least E / 32.
///
/// One warp per token. Grid: [`route_choose_grid`](super::route_choose_grid).
#[kernel(
    threads = 256,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [e32 = 1, e64 = 2, e128 = 4, e256 = 8, e512 = 16])
)]
pub fn route_backward<T: Element, const N: usize>(
    dlogits: GlobalMut<T>,
    logits: Global<T>,
    experts: Global<i32>,
    weights: Global<f32>,
    gradients: Global<f32>,
    loads: Global<u32>,
    router: Router,
    sizes: BackwardSizes,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= sizes.rows as usize {
        return;
    }
    let (lane, count) = (warp::lane(), router.experts as usize);
    // Each lane holds a choice: its expert, its weight and its gradient g.
    let (mut expert, mut weight, mut gradient) = (0, 0.0, 0.0);
    if lane < router.active {
        let at = row * router.active as usize + lane as usize;
        (expert, weight, gradient) = (experts.at(at) as u32, weights.at(at), gradients.at(at));
    }
    let total = warp::sum(gradient);
    if router.normalized == 1 {
        gradient -= weight * total;
    }

    let logits = Logits::<N>::load(logits.skip(row * count), router.experts);
    let balance = sizes.aux_loss * router.experts as f32 / sizes.tokens as f32;
    // Gradients of the scores from the load-balancing loss, and for the softmax their mean.
    let (mut dscores, mut mean) = ([0.0; N], 0.0);
    for i in 0..N {
        let expert = i * LANES + lane as usize;
        if sizes.aux_loss != 0.0 && expert < count {
            dscores[i] = balance * loads.at(expert) as f32;
            mean = math::fma(logits.softmax(logits.logit(i)), dscores[i], mean);
        }
    }
    let mean = warp::sum(mean);
    let z = 2.0 * sizes.z_loss * logits.log_sum_exp();
    for i in 0..N {
        let this = (i * LANES) as u32 + lane;
        let mut chosen = 0.0;
        for choice in 0..router.active {
            let (expert, gradient) = (warp::shuffle(expert, choice), warp::shuffle(gradient, choice));
            if expert == this {
                chosen = gradient;
            }
        }
        if this < router.experts {
            let softmax = logits.softmax(logits.logit(i));
            let dlogit = if router.sigmoid == 1 {
                let score = logits.score(logits.logit(i), router);
                (chosen + score * dscores[i]) * (1.0 - score)
            } else {
                let weights = if router.normalized == 1 { 0.0 } else { total };
                chosen + softmax * (dscores[i] - mean - weights)
            };
            dlogits.set(row * count + this as usize, T::from_f32(math::fma(z, softmax, dlogit)));
        }
    }
}

/// Adds [`BIAS_GRADIENT`] · (E · load - entries) to each element of dbias (E), from loads (E), the number of entries of each expert. The difference
/// is an integer: E times that from the mean load. Grid: 1.
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn route_bias_backward<T: Element>(dbias: GlobalMut<T>, loads: Global<u32>, entries: u32, count: u32) {
    let expert = thread::thread_idx_x() as usize;
    if expert >= count as usize {
        return;
    }
    let load = loads.at(expert);
    let excess = i64::from(load) * i64::from(count) - i64::from(entries);
    dbias.set(expert, T::from_f32(math::fma(BIAS_GRADIENT, excess as f32, dbias.at(expert).to_f32())));
}
