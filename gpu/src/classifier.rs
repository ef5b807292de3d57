//! Fused classifier: softmax, cross-entropy and the gradient of the logits, in place.
//!
//! Shapes: logits (rows, Vp), of which columns 0..V count; targets (rows) i32 in 0..V; losses (rows) f32. Vp is a multiple
//! of the packet, V need not be. One block per row, so rows is below 2^31; offsets are 64 bits wide.
//!
//! A row is read once from memory. Its first `staged` columns pass through shared memory, all under way at once, and stay there
//! for the second pass; what does not fit there ([`staged`]) is read again, from L2. Exponentials of both passes have the same argument,
//! (x - max) log2(e), so probabilities sum to 1 to rounding. The difference comes first: max log2(e) would have a rounding
//! error of its own, which from logits near 2^31 on is larger than all exponents there are.

use core::f32::consts::LOG2_E;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, async_copy, block, kernel, math, thread};

const THREADS: u32 = 1024;

/// How many columns of a row to keep in shared memory: all of it if a block may have `shared_bytes`.
pub const fn staged<T: Element>(padded: usize, shared_bytes: usize) -> usize {
    let room = shared_bytes.saturating_sub(SCRATCH * size_of::<f32>()) / 16 * T::PACKET;
    if padded < room { padded } else { room }
}

const SCRATCH: usize = 32;

/// Where a maximum starts: a row may hold -inf, which less itself would be NaN.
const LOWEST: f32 = f32::MIN;

/// e^(`logit` - `max`)
#[inline(always)]
fn exp_below(logit: f32, max: f32) -> f32 {
    math::exp2((logit - max) * LOG2_E)
}

/// Shared memory of [`classifier`]: scratch of the block's reductions, and the staged columns.
pub fn shared<T: Element>(layout: &mut Layout, staged: usize) -> (SharedArray<f32>, SharedArray<T>) {
    (layout.array(SCRATCH), layout.array(staged))
}

/// losses (rows) += -log softmax(logits)[target]. If `gradients` is not 0 also logits (rows, Vp) =
/// (softmax(logits) - onehot(target)) * dloss, and 0 in the columns V..Vp. Grid: rows. `vocabulary` is V, `padded` Vp,
/// `staged` as computed by [`staged`], shared memory [`shared`].
#[kernel(threads = 1024, blocks_per_sm = 2, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn classifier<T: Element>(
    logits: GlobalMut<T>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    dloss: f32,
    vocabulary: u32,
    padded: u32,
    staged: u32,
    gradients: u32,
) {
    let (scratch, stage) = shared::<T>(&mut Layout::new(), staged as usize);
    let row = thread::block_idx_x() as usize;
    let logits = logits.skip(row * padded as usize);
    let target = targets.at(row) as u32;
    let target_logit = logits.at(target as usize).to_f32();
    // Columns of a row fit in 32 bits, which halves their registers.
    let packet = T::PACKET as u32;
    let first = thread::thread_idx_x() * packet;
    let step = THREADS * packet;

    // A thread reads back only what it copied itself, so no barrier is needed.
    // The first half is worked on while the second is on its way.
    let half = (staged / 2).next_multiple_of(step).min(staged);
    let mut i = first;
    while i < half {
        stage.copy_packet_async(i as usize, logits.reader(), i as usize, true);
        i += step;
    }
    async_copy::commit();
    while i < staged {
        stage.copy_packet_async(i as usize, logits.reader(), i as usize, true);
        i += step;
    }
    async_copy::commit();

    let (mut max, mut sum) = (LOWEST, 0.0);
    let mut fold = |i: u32, mut x: Packet<T>| {
        if i + packet > vocabulary {
            x = Packet::from_fn(|k| if i + (k as u32) < vocabulary { x.get(k) } else { f32::NEG_INFINITY });
        }
        let mut new = max;
        for k in 0..T::PACKET {
            new = math::max(new, x.get(k));
        }
        sum *= exp_below(max, new);
        max = new;
        for k in 0..T::PACKET {
            sum += exp_below(x.get(k), max);
        }
    };
    let mut i = first;
    async_copy::wait::<1>();
    while i < half.min(vocabulary) {
        fold(i, stage.packet(i as usize));
        i += step;
    }
    async_copy::wait::<0>();
    while i < staged.min(vocabulary) {
        fold(i, stage.packet(i as usize));
        i += step;
    }
    while i < vocabulary {
        fold(i, logits.packet(i as usize));
        i += step;
    }
    let row_max = block::max(max, scratch);
    let sum = block::sum(sum * exp_below(max, row_max), scratch);
    if first == 0 {
        let loss = math::ln(sum) - (target_logit - row_max);
        losses.set(row, losses.at(row) + loss);
    }
    if gradients == 0 {
        return;
    }

    let scale = dloss * math::recip(sum);
    let gradient = |i: u32, x: Packet<T>| {
        let mut p = [0.0; 8];
        for k in 0..T::PACKET {
            p[k] = exp_below(x.get(k), row_max) * scale;
        }
        if target.wrapping_sub(i) < packet || i + packet > vocabulary {
            for k in 0..T::PACKET {
                let with_target = if i + k as u32 == target { p[k] - dloss } else { p[k] };
                p[k] = if i + (k as u32) < vocabulary { with_target } else { 0.0 };
            }
        }
        logits.set_packet_streaming(i as usize, Packet::from_fn(|k| p[k]));
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
