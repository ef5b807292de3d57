//! The classifier of bounded logits z = cap · tanh(x / cap) ([`crate::softcap`]).
//!
//! tanh increases, so the largest z of a row is that of the largest x, which a first pass finds. A second pass computes what needs tanh
//! and an exponential: e^(z - max), and the part of the gradient that does not depend on the row's sum. This part replaces the logits in
//! shared memory, as f16. The last pass multiplies it by a factor of the row. With f32 logits, and for columns that do not fit in shared
//! memory, the last pass computes both functions again.

use super::{
    LOWEST, MASKED, Scalars, clear_row, columns, copy_columns, exp_below, mask_padding, read_copied_columns, shared,
    subtract_target,
};
use crate::softcap::Softcap;
use core::f32::consts::LOG2_E;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, block, device, f16, math};

/// The factor of gradients in f16: the largest power of two. Gradients below 2^-29 dloss lose bits, and those below 2^-40 dloss become 0.
const STORED: f32 = 32_768.0;

/// Computes e^(z - max) and dz/dx from a logit x.
#[derive(Clone, Copy)]
struct Exponential {
    softcap: Softcap,
    /// The largest z of the row.
    max: f32,
    /// Factor of x, and factor and addend of r: e^(z - max) · 4 STORED = 2^(factor r + addend), with r = 1 / (1 + e), e = e^(2 x / cap)
    /// and tanh(x / cap) = 1 - 2 r. The derivative dz/dx is 4 e r².
    terms: [f32; 3],
}

#[device]
impl Exponential {
    fn new(cap: f32, softcap: Softcap, max: f32) -> Self {
        let terms = [math::div_rn(2.0 * LOG2_E, cap), -2.0 * cap * LOG2_E, math::fma(cap - max, LOG2_E, 17.0)];
        Self { softcap, max, terms }
    }

    /// Returns 4 STORED e^(z - max), and dz/dx / 4. The absolute error of z is cap / 2^21 for 16-bit logits, whose own rounding error is
    /// up to cap / 2^9.
    fn of<T: Element>(self, x: f32) -> [f32; 2] {
        if size_of::<T>() == 4 {
            let [z, slope] = self.softcap.value_and_slope(x);
            return [4.0 * STORED * exp_below(z, self.max), 0.25 * slope];
        }
        let [inner, factor, addend] = self.terms;
        let e = math::exp2(x * inner);
        let r = math::recip(1.0 + e);
        // If e is infinite, r is 0.
        [math::exp2(math::fma(r, factor, addend)), e.min(f32::MAX) * r * r]
    }
}

/// Does what the other [`classify_row`](super::classify_row) does, for bounded logits. `logits` and the gradient are not bounded.
#[inline(always)]
pub(super) fn classify_row<T: Element>(
    logits: Global<T>,
    loss: GlobalMut<f32>,
    target: i32,
    scalars: Scalars,
    gradients: bool,
    cap: f32,
    store: impl Fn(u32, [f32; 8]),
) {
    let Scalars { dloss, vocabulary, padded, staged } = scalars;
    let (scratch, stage) = shared::<T>(&mut Layout::new(), staged as usize);
    let ([first, step], packet) = (columns::<T>(), T::PACKET as u32);
    if target == MASKED {
        clear_row::<T>(gradients, padded, store);
        return;
    }
    let (target, softcap) = (target as u32, Softcap::new(cap));
    let [target_logit, target_slope] = softcap.value_and_slope(logits.at(target as usize).to_f32());
    let half = copy_columns(stage, logits, staged, first, step);

    let mut max = LOWEST;
    read_copied_columns(stage, logits, [half, staged, vocabulary], |i, mut x: Packet<T>| {
        mask_padding(&mut x, i, vocabulary);
        for k in 0..T::PACKET {
            max = math::max(max, x.get(k));
        }
    });
    let row_max = softcap.value(block::max(max, scratch));

    let exponential = Exponential::new(cap, softcap, row_max);
    let unscaled = |x: Packet<T>, k: usize| {
        let [power, slope] = exponential.of::<T>(x.get(k));
        power * slope
    };
    let stores = size_of::<T>() == 2;
    let mut sum = 0.0;
    let mut add = |i: u32, end: u32| {
        let x = if i < staged { stage.packet(i as usize) } else { logits.packet(i as usize) };
        let mut gradient = [0.0; 8];
        for k in 0..T::PACKET {
            if i + (k as u32) < end {
                let [power, slope] = exponential.of::<T>(x.get(k));
                sum += power;
                gradient[k] = power * slope;
            }
        }
        if stores && i < staged {
            stage.set_packet(i as usize, Packet::from_words(Packet::<f16>::from_fn(|k| gradient[k]).words()));
        }
    };
    let mut i = first;
    while i + packet <= vocabulary {
        // No column of this packet is padding.
        add(i, u32::MAX);
        i += step;
    }
    if i < vocabulary {
        add(i, vocabulary);
    }
    let sum = block::sum(sum, scratch) * (0.25 / STORED);
    if first == 0 {
        loss.set(0, loss.at(0) + (math::ln(sum) - (target_logit - row_max)));
    }
    if !gradients {
        return;
    }

    let scale = dloss * math::recip(sum) * (1.0 / STORED);
    let mut i = first;
    while i < padded {
        let x = if i < staged { stage.packet(i as usize) } else { logits.packet(i as usize) };
        let mut p = [0.0; 8];
        if stores {
            // Other columns are rounded to f16, too, so that the bits do not depend on `staged`.
            let stored =
                if i < staged { Packet::from_words(x.words()) } else { Packet::<f16>::from_fn(|k| unscaled(x, k)) };
            for k in 0..T::PACKET {
                p[k] = scale * stored.get(k);
            }
        } else {
            for k in 0..T::PACKET {
                p[k] = scale * unscaled(x, k);
            }
        }
        subtract_target::<T>(&mut p, i, target, dloss * target_slope, vocabulary);
        store(i, p);
        i += step;
    }
}
