//! Fused classifier: softmax, cross-entropy loss, and the gradient of the logits in place.
//!
//! Shapes: logits (rows, Vp), targets (rows) i32 in 0..V or [`MASKED`], losses (rows) f32. The softmax is over columns 0..V; columns
//! V..Vp are padding. Vp is a multiple of the packet, V need not be. One block processes one row, so rows is below
//! 2^31. Offsets are 64 bits wide.
//!
//! Each row is read once from global memory. Its first `staged` columns are copied asynchronously to shared memory and
//! stay there for the second pass. The columns that do not fit ([`staged`]) are read again, from L2.
//!
//! Both passes compute exponentials of the same argument, (x - max) log2(e), so probabilities sum to 1 up to rounding.
//! Subtracting first is essential: max log2(e) has a rounding error, which for logits above about 2^31 exceeds the
//! whole range of exponents.
//!
//! With SOFTCAP, [`classifier()`] bounds the logits first (`bounded`). Its loss and probabilities are those of the bounded logits; the
//! gradient is that of the logits in memory.
//!
//! [`classifier_fp8`] and [`wide::classifier_wide_fp8`] write the gradient in FP8 instead. Its magnitude is at most dloss, so its
//! scale is known in advance. They compute the gradient times 1 / scale, so quantization takes only the conversion.

mod bounded;
pub mod wide;

use crate::quantize::{pack_eight, scale_of};
use core::f32::consts::LOG2_E;
use cuda_std::shared::Layout;
use cuda_std::{
    E5m2, Element, Fp8, Global, GlobalMut, Packet, SharedArray, async_copy, bf16, block, kernel, math, thread,
};

const THREADS: u32 = 1024;

/// Returns how many of `padded` columns fit in `shared_bytes` of shared memory per block.
pub fn staged<T: Element>(padded: usize, shared_bytes: usize) -> usize {
    padded.min(shared_bytes.saturating_sub(SCRATCH * size_of::<f32>()) / 16 * T::PACKET)
}

/// The target of a masked row, which has neither loss nor gradient.
pub const MASKED: i32 = -1;

/// f32 elements of scratch for the block reductions.
const SCRATCH: usize = 32;

/// Initial value of the running maximum. It is finite because -inf - (-inf) would be NaN for a logit of -inf.
const LOWEST: f32 = f32::MIN;

/// Returns e^(`logit` - `max`).
#[inline(always)]
fn exp_below(logit: f32, max: f32) -> f32 {
    math::exp2((logit - max) * LOG2_E)
}

/// Lays out the shared memory of [`classifier`]: scratch for the block reductions, and the staged columns.
pub fn shared<T: Element>(layout: &mut Layout, staged: usize) -> (SharedArray<f32>, SharedArray<T>) {
    (layout.array(SCRATCH), layout.array(staged))
}

/// The scalar arguments of the kernels. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    /// Gradient of each loss.
    pub dloss: f32,
    /// V, the number of columns that the softmax covers.
    pub vocabulary: u32,
    /// Vp, the number of columns of a row.
    pub padded: u32,
    /// What to keep in shared memory: columns, from [`staged`], or packets of each thread, from [`wide::staged`].
    pub staged: u32,
}

/// Starts the copies of the thread's staged columns, from `first` on in steps of `step`. Returns the end of the first half.
///
/// No barrier is needed: each thread reads only the data it copied. The columns are copied in two halves, so that the
/// first can be processed while the second is in flight.
#[inline(always)]
fn copy_columns<T: Element>(stage: SharedArray<T>, logits: Global<T>, staged: u32, first: u32, step: u32) -> u32 {
    let half = (staged / 2).next_multiple_of(step).min(staged);
    let mut i = first;
    for end in [half, staged] {
        while i < end {
            stage.copy_packet_async(i as usize, logits, i as usize, true);
            // A thread copies few packets. Unrolled four times, the loop and its remainders took a tenth of the kernel's instructions.
            i = thread::opaque(i + step);
        }
        async_copy::commit();
    }
    half
}

/// Returns the first column of the thread's packets, and the distance of these packets. Column indices of a row fit in 32 bits, which
/// halves their registers.
#[inline(always)]
fn columns<T: Element>() -> [u32; 2] {
    let packet = T::PACKET as u32;
    [thread::thread_idx_x() * packet, THREADS * packet]
}

/// Stores the gradient of a masked row (`padded`).
#[inline(always)]
fn clear_row<T: Element>(gradients: bool, padded: u32, store: impl Fn(u32, [f32; 8])) {
    let [mut i, step] = columns::<T>();
    while gradients && i < padded {
        store(i, [0.0; 8]);
        i += step;
    }
}

/// Passes the thread's packets of the columns below `vocabulary` to `read`, with their first columns: those that [`copy_columns`] copies,
/// in two halves, and those after them.
#[inline(always)]
fn read_copied_columns<T: Element>(
    stage: SharedArray<T>,
    logits: Global<T>,
    [half, staged, vocabulary]: [u32; 3],
    mut read: impl FnMut(u32, Packet<T>),
) {
    let [mut i, step] = columns::<T>();
    async_copy::wait::<1>();
    while i < half.min(vocabulary) {
        read(i, stage.packet(i as usize));
        i += step;
    }
    async_copy::wait::<0>();
    while i < staged.min(vocabulary) {
        read(i, stage.packet(i as usize));
        i += step;
    }
    while i < vocabulary {
        read(i, logits.packet(i as usize));
        i += step;
    }
}

/// Adds `logit(0)` to `logit(T::PACKET - 1)` to the maximum of logits and the sum of e^(logit - max).
#[inline(always)]
fn fold_logits<T: Element>(max: &mut f32, sum: &mut f32, logit: impl Fn(usize) -> f32) {
    let mut new = *max;
    for k in 0..T::PACKET {
        new = math::max(new, logit(k));
    }
    *sum *= exp_below(*max, new);
    *max = new;
    for k in 0..T::PACKET {
        *sum += exp_below(logit(k), *max);
    }
}

/// Sets columns from `vocabulary` on to -inf in the packet of columns from `i` on.
#[inline(always)]
fn mask_padding<T: Element>(x: &mut Packet<T>, i: u32, vocabulary: u32) {
    if i + T::PACKET as u32 > vocabulary {
        *x = Packet::from_fn(|k| if i + (k as u32) < vocabulary { x.get(k) } else { f32::NEG_INFINITY });
    }
}

/// Subtracts `target_gradient` from the target's element of `p`, the packet of columns from `i` on, and sets columns from
/// `vocabulary` on to 0.
#[inline(always)]
fn subtract_target<T: Element>(p: &mut [f32; 8], i: u32, target: u32, target_gradient: f32, vocabulary: u32) {
    if target.wrapping_sub(i) < T::PACKET as u32 || i + T::PACKET as u32 > vocabulary {
        for k in 0..T::PACKET {
            let with_target = if i + k as u32 == target { p[k] - target_gradient } else { p[k] };
            p[k] = if i + (k as u32) < vocabulary { with_target } else { 0.0 };
        }
    }
}

/// Computes losses (rows) += `-log softmax(logits)[target]`, and the gradient of the logits if `gradients` is not 0. With SOFTCAP,
/// the logits are bounded first: softcap · tanh(logits / softcap).
///
/// The gradient replaces logits (rows, Vp) with (softmax(logits) - onehot(target)) * dloss, and with 0 in columns
/// V..Vp. Without gradients, the logits do not change. The gradient of a [`MASKED`] row is 0, and its loss does not change.
/// Grid: rows. Shared memory: [`shared`].
#[kernel(
    threads = 1024,
    blocks_per_sm = 2,
    instances([_ = false, softcap = true] * [bf16 = cuda_std::bf16, f32 = f32])
)]
pub fn classifier<const SOFTCAP: bool, T: Element>(
    logits: GlobalMut<T>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    scalars: Scalars,
    gradients: u32,
    softcap: f32,
) {
    let row = thread::block_idx_x() as usize;
    let logits = logits.skip(row * scalars.padded as usize);
    let store = |i: u32, p: [f32; 8]| logits.set_packet_streaming(i as usize, Packet::from_fn(|k| p[k]));
    let (logits, loss, target) = (logits.reader(), losses.skip(row), targets.at(row));
    if SOFTCAP {
        bounded::classify_row(logits, loss, target, scalars, gradients != 0, softcap, store);
    } else {
        classify_row(logits, loss, target, scalars, gradients != 0, store);
    }
}

/// Writes the scale of gradients in FP8 of at most dloss to `scale` (1), and returns the scalars that give gradients divided by it.
#[inline(always)]
fn scalars_in_fp8(scalars: Scalars, scale: GlobalMut<f32>) -> Scalars {
    let gradient_scale = scale_of(scalars.dloss, E5m2::FORMAT.max());
    if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
        scale.set(0, gradient_scale);
    }
    Scalars { dloss: scalars.dloss * math::div_rn(1.0, gradient_scale), ..scalars }
}

/// Computes the same as [`classifier()`] with gradients, but writes the gradient to out (rows, Vp) in E5M2, and its scale, dloss / the
/// largest number of the format, to scale (1). The logits do not change.
///
/// Grid: rows. Shared memory: [`shared`].
#[kernel(
    threads = 1024,
    blocks_per_sm = 2,
    instances([uncapped = false, softcap = true])
)]
pub fn classifier_fp8<const SOFTCAP: bool>(
    out: GlobalMut<E5m2>,
    scale: GlobalMut<f32>,
    logits: Global<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    scalars: Scalars,
    softcap: f32,
) {
    let row = thread::block_idx_x() as usize;
    let scalars = scalars_in_fp8(scalars, scale);
    let first = row * scalars.padded as usize;
    let store = |i: u32, gradient| out.set_eight(first + i as usize, pack_eight::<E5m2>(gradient));
    let (logits, loss, target) = (logits.skip(first), losses.skip(row), targets.at(row));
    if SOFTCAP {
        bounded::classify_row(logits, loss, target, scalars, true, softcap, store);
    } else {
        classify_row(logits, loss, target, scalars, true, store);
    }
}

/// Adds the loss of the row of `logits` (Vp) to `loss` (1). With `gradients`, passes the gradient to `store`, a packet at a time with the
/// index of its first column.
#[inline(always)]
fn classify_row<T: Element>(
    logits: Global<T>,
    loss: GlobalMut<f32>,
    target: i32,
    scalars: Scalars,
    gradients: bool,
    store: impl Fn(u32, [f32; 8]),
) {
    let Scalars { dloss, vocabulary, padded, staged } = scalars;
    let (scratch, stage) = shared::<T>(&mut Layout::new(), staged as usize);
    let [first, step] = columns::<T>();
    if target == MASKED {
        clear_row::<T>(gradients, padded, store);
        return;
    }
    let target = target as u32;
    let target_logit = logits.at(target as usize).to_f32();

    let half = copy_columns(stage, logits, staged, first, step);

    let (mut max, mut sum) = (LOWEST, 0.0);
    read_copied_columns(stage, logits, [half, staged, vocabulary], |i, mut x: Packet<T>| {
        mask_padding(&mut x, i, vocabulary);
        fold_logits::<T>(&mut max, &mut sum, |k| x.get(k));
    });
    let row_max = block::max(max, scratch);
    let sum = block::sum(sum * exp_below(max, row_max), scratch);
    if first == 0 {
        loss.set(0, loss.at(0) + (math::ln(sum) - (target_logit - row_max)));
    }
    if !gradients {
        return;
    }

    let scale = dloss * math::recip(sum);
    let gradient = |i: u32, x: Packet<T>| {
        let mut p = [0.0; 8];
        for k in 0..T::PACKET {
            p[k] = exp_below(x.get(k), row_max) * scale;
        }
        subtract_target::<T>(&mut p, i, target, dloss, vocabulary);
        store(i, p);
    };
    let mut i = first;
    while i < staged {
        gradient(i, stage.packet(i as usize));
        i += step;
    }
    while i < padded {
        gradient(i, logits.packet(i as usize));
        i += step;
    }
}
