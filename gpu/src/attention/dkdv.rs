//! The second kernel of the backward pass: dK and dV.
//!
//! A block owns ROWS keys of one head and iterates over tiles of queries, from the diagonal on. It computes the
//! transposed scores, so that Pᵀ and dSᵀ are in the accumulator layout that the left operand of the next matmul needs:
//! dV = Pᵀ dout, dK = dSᵀ Q / sqrt(HS).

use super::mask::mask_scores_transposed;
use super::softmax::{exponent_scale, exponent_shift, scale};
use super::tiles::{Accumulators, Columns, LeftOperand, load_async, stage, warp_row};
use super::{Head, KEY, QUERY, VALUE};
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, SharedTile, async_copy, bf16, kernel, math, thread};

/// A tile of queries with the gradients of their outputs, their exponent shifts, and D.
#[derive(Clone, Copy)]
struct QueryTile<T, const QUERIES: usize, const HS: usize> {
    q: SharedTile<T, QUERIES, HS>,
    dout: SharedTile<T, QUERIES, HS>,
    shift: SharedArray<f32>,
    d: SharedArray<f32>,
}

/// Shared memory: the keys and values of the block, and a double buffer of query tiles.
struct Shared<T, const HS: usize, const ROWS: usize, const QUERIES: usize> {
    k: SharedTile<T, ROWS, HS>,
    v: SharedTile<T, ROWS, HS>,
    stages: [QueryTile<T, QUERIES, HS>; 2],
}

impl<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize> Shared<T, HS, ROWS, QUERIES> {
    #[inline(always)]
    fn new(layout: &mut Layout) -> Self {
        let (k, v) = (layout.tile(), layout.tile());
        let mut tile = || QueryTile {
            q: layout.tile(),
            dout: layout.tile(),
            shift: layout.array(QUERIES),
            d: layout.array(QUERIES),
        };
        Self { k, v, stages: [tile(), tile()] }
    }

    /// Returns the buffer of query tile `tile`.
    #[inline(always)]
    fn stage(&self, tile: usize) -> QueryTile<T, QUERIES, HS> {
        let [even, odd] = self.stages;
        QueryTile {
            q: stage(even.q, odd.q, tile),
            dout: stage(even.dout, odd.dout, tile),
            shift: stage(even.shift, odd.shift, tile),
            d: stage(even.d, odd.d, tile),
        }
    }
}

/// Returns the dynamic shared memory of [`attention_backward_dkdv`] with these generic arguments, in bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn dkdv_shared_bytes<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize>() -> usize {
    let mut layout = Layout::new();
    let _ = Shared::<T, HS, ROWS, QUERIES>::new(&mut layout);
    layout.bytes()
}

/// Computes the K and V parts of dqkv (B,T,3,NH,HS) from dout (B,T,NH,HS), qkv (B,T,3,NH,HS), lse and d (B,NH,T).
///
/// Grid: (tiles of ROWS keys, NH, B).
#[kernel(threads = 128, instances(
    bf16_64 = <bf16, 64, 64, 32>(blocks_per_sm = 3),
    bf16_80 = <bf16, 80, 64, 64>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 64, 32>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16>(blocks_per_sm = 2),
))]
pub fn attention_backward_dkdv<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize>(
    dqkv: GlobalMut<T>,
    dout: Global<T>,
    qkv: Global<T>,
    lse: Global<f32>,
    d: Global<f32>,
    t: u32,
    nh: u32,
) {
    let head = Head::of_block(t, nh, HS);
    // The first keys are visible to the most queries, so the blocks with the most work start first.
    let first_key = thread::block_idx_x() as usize * ROWS;
    let tiles = head.t.div_ceil(QUERIES);
    let first_tile = first_key / QUERIES;

    let shared = Shared::<T, HS, ROWS, QUERIES>::new(&mut Layout::new());
    let load = |tile: usize| {
        let to = shared.stage(tile);
        load_async(to.q, qkv, head.packed(QUERY), tile * QUERIES);
        load_async(to.dout, dout, head.plain(), tile * QUERIES);
        async_copy::commit();
    };
    // Threads 0..QUERIES load the exponent shifts and the next QUERIES threads load D. They use registers and not
    // asynchronous 16-byte copies, because rows of (B,NH,T) are only 4-byte aligned.
    let thread = thread::thread_idx_x() as usize;
    let statistic = |tile: usize| {
        let query = tile * QUERIES + thread % QUERIES;
        let inside = query < head.t;
        let at = head.statistics() + query;
        if thread < QUERIES {
            exponent_shift(inside.then(|| lse.at(at)))
        } else if inside && thread < 2 * QUERIES {
            d.at(at)
        } else {
            0.0
        }
    };
    let set_statistic = |tile: usize, value: f32| {
        let to = shared.stage(tile);
        if thread < QUERIES {
            to.shift.set(thread, value);
        } else if thread < 2 * QUERIES {
            to.d.set(thread - QUERIES, value);
        }
    };

    load_async(shared.k, qkv, head.packed(KEY), first_key);
    load_async(shared.v, qkv, head.packed(VALUE), first_key);
    load(first_tile);
    set_statistic(first_tile, statistic(first_tile));
    async_copy::wait::<0>();
    thread::sync_threads();
    let keep = size_of::<T>() * HS <= 128;
    let (k, v) = (LeftOperand::new(shared.k, keep), LeftOperand::new(shared.v, keep));

    let exponent_scale = exponent_scale::<HS>();
    let last_key = first_key + warp_row::<ROWS>() + ROWS / 4 - 1;
    let mut dk = Accumulators::<ROWS, HS>::zero();
    let mut dv = Accumulators::<ROWS, HS>::zero();
    for tile in first_tile..tiles {
        let mut next = 0.0;
        if tile + 1 < tiles {
            load(tile + 1);
            next = statistic(tile + 1);
        }
        let queries = shared.stage(tile);
        let first_query = tile * QUERIES;

        let mut p = Accumulators::<ROWS, QUERIES>::zero();
        p.add_matmul_transposed::<T, HS>(|strip, i| k.fragment(strip, i), queries.q);
        if last_key > first_query {
            mask_scores_transposed(&mut p, first_key, first_query);
        }
        let shift = Columns::load::<QUERIES>(queries.shift);
        p.map(|_, _, col, s| math::exp2(math::fma(s, exponent_scale, shift.at(col))));
        dv.add_matmul::<T, QUERIES>(|strip, i| p.fragment::<T>(strip, i), queries.dout);

        let mut ds = Accumulators::<ROWS, QUERIES>::zero();
        ds.add_matmul_transposed::<T, HS>(|strip, i| v.fragment(strip, i), queries.dout);
        let d = Columns::load::<QUERIES>(queries.d);
        ds.zip(&p, |_, _, col, dp, p| p * (dp - d.at(col)));
        dk.add_matmul::<T, QUERIES>(|strip, i| ds.fragment::<T>(strip, i), queries.q);

        if tile + 1 < tiles {
            set_statistic(tile + 1, next);
        }
        // Makes the next tile visible to all threads, and ensures that all have finished reading this one.
        async_copy::wait::<0>();
        thread::sync_threads();
    }

    let scale = scale::<HS>();
    dk.map(|_, _, _, dk| dk * scale);
    dk.store(dqkv, head.packed(KEY), first_key, shared.k);
    dv.store(dqkv, head.packed(VALUE), first_key, shared.v);
}
