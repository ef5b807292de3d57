//! The classifier for large vocabularies. [`classifier`](super::classifier) keeps less than half of such a row in shared
//! memory.
//!
//! A block keeps a whole row in the shared memory and the registers of an SM. On Hopper, 224 KiB and 80 KiB hold 155,648 bf16. So
//! there is one block per SM, and no other block that loads while this one stores. Therefore the kernel is persistent, and loads
//! of the next row overlap the stores of the current one: when a thread has computed the gradient of a packet of columns, it loads
//! the same packet of the block's next row in its place.
//!
//! A thread reads only packets that it has loaded itself, so no barrier is needed. The order of operations is that of
//! [`classifier`](super::classifier), and so are the bits of the results.

use super::{
    LOWEST, MASKED, SCRATCH, Scalars, THREADS, exp_below, fold_logits, mask_padding, scalars_in_fp8, subtract_target,
};
use crate::quantize::pack_eight;
use cuda_std::shared::Layout;
use cuda_std::{
    E5m2, Element, Global, GlobalMut, Packet, SharedArray, async_copy, bf16, block, device, kernel, math, thread,
};

/// Columns of a packet of each thread.
const STEP: u32 = THREADS * bf16::PACKET as u32;
/// Packets that a thread keeps in registers.
const HELD: u32 = 5;
/// Groups of asynchronous copies in a row. The first pass begins when the first group has arrived.
const GROUPS: u32 = 4;

/// Returns how many packets of a row of `padded` columns each thread keeps in `shared_bytes` of shared memory per block, or `None`
/// if the row does not fit into shared memory and registers.
pub fn staged(padded: usize, shared_bytes: usize) -> Option<u32> {
    let row = (padded as u32).div_ceil(STEP);
    let capacity = shared_bytes.saturating_sub(SCRATCH * size_of::<f32>()) / (STEP as usize * size_of::<bf16>());
    let staged = row.min(capacity as u32);
    (row <= staged + HELD).then_some(staged)
}

/// Lays out the shared memory of [`classifier_wide`]: scratch for the block reductions, and `staged` packets of each thread.
pub fn shared(layout: &mut Layout, staged: u32) -> (SharedArray<f32>, SharedArray<bf16>) {
    (layout.array(SCRATCH), layout.array((staged * STEP) as usize))
}

/// The columns of the calling thread, in packets.
#[derive(Clone, Copy)]
struct Columns {
    /// First column of packet 0.
    first: u32,
    padded: u32,
    staged: u32,
    stage: SharedArray<bf16>,
}

#[device]
impl Columns {
    /// Returns the first column of packet `j`.
    const fn of(self, j: u32) -> u32 {
        self.first + j * STEP
    }

    /// Returns the first packet of group `group` in shared memory. The group ends where the next one begins.
    const fn begin(self, group: u32) -> u32 {
        self.staged * group / GROUPS
    }

    /// Starts the copy of packet `j` of a row to shared memory.
    #[track_caller]
    fn copy(self, j: u32, row: Global<bf16>) {
        let i = self.of(j);
        self.stage.copy_packet_async(i as usize, row, i as usize, true);
    }

    /// Loads packet `k` of those in registers.
    #[track_caller]
    fn load(self, k: u32, row: Global<bf16>) -> Packet<bf16> {
        let i = self.of(self.staged + k);
        if i < self.padded { row.packet(i as usize) } else { Packet::zero() }
    }
}

/// Waits for group `group` of a row, the newest.
#[inline(always)]
fn wait_for(group: u32) {
    match group {
        0 => async_copy::wait::<3>(),
        1 => async_copy::wait::<2>(),
        2 => async_copy::wait::<1>(),
        _ => async_copy::wait::<0>(),
    }
}

/// Computes losses (rows) += `-log softmax(logits)[target]`, and replaces logits (rows, Vp) by their gradient, as
/// [`classifier`](super::classifier).
///
/// Grid: any, ideally as many blocks as SMs. Shared memory: [`shared`].
#[kernel(threads = 1024, blocks_per_sm = 1)]
pub fn classifier_wide(
    logits: GlobalMut<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    scalars: Scalars,
    rows: u32,
) {
    let store = |i: usize, p: [f32; 8]| logits.set_packet_streaming(i, Packet::from_fn(|k| p[k]));
    classify_rows(logits.reader(), losses, targets, scalars, rows, store);
}

/// Computes the same as [`classifier_wide`], but writes the gradient in FP8, as [`classifier_fp8`](super::classifier_fp8).
///
/// Grid: any, ideally as many blocks as SMs. Shared memory: [`shared`].
#[kernel(threads = 1024, blocks_per_sm = 1)]
pub fn classifier_wide_fp8(
    out: GlobalMut<E5m2>,
    scale: GlobalMut<f32>,
    logits: Global<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    scalars: Scalars,
    rows: u32,
) {
    let scalars = scalars_in_fp8(scalars, scale);
    let store = |i: usize, gradient| out.set_eight(i, pack_eight::<E5m2>(gradient));
    classify_rows(logits, losses, targets, scalars, rows, store);
}

/// Computes the losses of the block's rows, and passes their gradients to `store`, a packet at a time with the index of its first element.
#[inline(always)]
fn classify_rows(
    logits: Global<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    scalars: Scalars,
    rows: u32,
    store: impl Fn(usize, [f32; 8]),
) {
    let Scalars { dloss, vocabulary, padded, staged } = scalars;
    let (scratch, stage) = shared(&mut Layout::new(), staged);
    let first = thread::thread_idx_x() * bf16::PACKET as u32;
    let columns = Columns { first, padded, staged, stage };
    let first_of = |row: u32| row as usize * padded as usize;
    let row_of = |row: u32| logits.skip(first_of(row));
    let mut row = thread::block_idx_x();
    if row >= rows {
        return;
    }

    let first_row = row_of(row);
    for group in 0..GROUPS {
        let mut j = columns.begin(group);
        while j < columns.begin(group + 1) && columns.of(j) < padded {
            columns.copy(j, first_row);
            j += 1;
        }
        async_copy::commit();
    }
    let mut held = [Packet::zero(); HELD as usize];
    for k in 0..HELD {
        held[k as usize] = columns.load(k, first_row);
    }

    while row < rows {
        let (logits, first_element) = (row_of(row), first_of(row));
        let (mut max, mut sum) = (LOWEST, 0.0);
        let mut fold = |i: u32, mut x: Packet<bf16>| {
            mask_padding(&mut x, i, vocabulary);
            fold_logits::<bf16>(&mut max, &mut sum, |k| x.get(k));
        };
        for group in 0..GROUPS {
            wait_for(group);
            let mut j = columns.begin(group);
            while j < columns.begin(group + 1) && columns.of(j) < vocabulary {
                fold(columns.of(j), stage.packet(columns.of(j) as usize));
                j += 1;
            }
        }
        for k in 0..HELD {
            let i = columns.of(staged + k);
            if i < vocabulary {
                fold(i, held[k as usize]);
            }
        }
        // The reductions delay the gradient of every thread until all have read the target's logit.
        let target = targets.at(row as usize);
        let masked = target == MASKED;
        let target = target as u32;
        let target_logit = if masked { 0.0 } else { logits.at(target as usize).to_f32() };
        let row_max = block::max(max, scratch);
        let sum = block::sum(sum * exp_below(max, row_max), scratch);
        if first == 0 && !masked {
            let loss = math::ln(sum) - (target_logit - row_max);
            losses.set(row as usize, losses.at(row as usize) + loss);
        }

        let scale = dloss * math::recip(sum);
        let gradient = |i: u32, x: Packet<bf16>| {
            let mut p = core::array::from_fn(|k| exp_below(x.get(k), row_max) * scale);
            subtract_target::<bf16>(&mut p, i, target, dloss, vocabulary);
            store(first_element + i as usize, if masked { [0.0; 8] } else { p });
        };
        row += thread::grid_dim_x();
        let (continues, next) = (row < rows, row_of(row));
        for group in 0..GROUPS {
            let mut j = columns.begin(group);
            while j < columns.begin(group + 1) && columns.of(j) < padded {
                gradient(columns.of(j), stage.packet(columns.of(j) as usize));
                if continues {
                    columns.copy(j, next);
                }
                j += 1;
            }
            async_copy::commit();
        }
        for k in 0..HELD {
            let i = columns.of(staged + k);
            if i < padded {
                gradient(i, held[k as usize]);
            }
            if continues {
                held[k as usize] = columns.load(k, next);
            }
        }
    }
}
