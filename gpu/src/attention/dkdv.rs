//! The second kernel of the backward pass: dK and dV.
//!
//! A block owns ROWS keys of one key-value head. For each query head of its group, it iterates over tiles of queries,
//! from the diagonal on. It computes the transposed scores, so that Pᵀ and dSᵀ are in the accumulator layout that the
//! left operand of the next matmul needs: dV = Pᵀ dout, dK = dSᵀ Q / sqrt(HS).

use super::Head;
use super::mask::{mask_after, mask_scores_transposed};
use super::softmax::{exponent_scale, exponent_shift, scale};
use super::tiles::{Accumulators, Columns, LeftOperand, Rows, THREADS, load_async, stage, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, SharedTile, async_copy, bf16, device, kernel, math, thread};

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
    /// The number of the query head within its group, one copy per thread. In f32 no register is left for it.
    member: SharedArray<u32>,
    k: SharedTile<T, ROWS, HS>,
    v: SharedTile<T, ROWS, HS>,
    stages: [QueryTile<T, QUERIES, HS>; 2],
}

#[device]
impl<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize> Shared<T, HS, ROWS, QUERIES> {
    fn new(layout: &mut Layout) -> Self {
        let member = layout.array(THREADS);
        let (k, v) = (layout.tile(), layout.tile());
        let mut tile = || QueryTile {
            q: layout.tile(),
            dout: layout.tile(),
            shift: layout.array(QUERIES),
            d: layout.array(QUERIES),
        };
        Self { member, k, v, stages: [tile(), tile()] }
    }

    /// Returns the buffer of query tile `tile`.
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

/// Computes the K and V parts of dqkv (B,T,NH+2KV,HS) from dout (B,T,NH,HS), qkv (B,T,NH+2KV,HS), lse and d (B,NH,T).
/// `last_queries` (B,T) and `window` are the bounds of [`Visibility`].
///
/// Grid: (tiles of ROWS keys, KV, B).
#[kernel(
    threads = 128,
    instances(
    bf16_64 = <bf16, 64, 64, 32>(blocks_per_sm = 3),
    bf16_80 = <bf16, 80, 64, 64>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 64, 32>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(Shared::<T, HS, ROWS, QUERIES>::new): fn() -> usize)
)]
pub fn attention_backward_dkdv<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize>(
    dqkv: GlobalMut<T>,
    dout: Global<T>,
    qkv: Global<T>,
    lse: Global<f32>,
    d: Global<f32>,
    t: u32,
    kv: u32,
    group: u32,
    last_queries: Global<u32>,
    window: u32,
) {
    // The first keys are visible to the most queries, so the blocks with the most work start first.
    let first_key = thread::block_idx_x() as usize * ROWS;
    let visible = Visibility::new(Global::null(), last_queries, window, t);
    let last_query_of = |key| visible.last_query(thread::block_idx_z(), key);
    let tiles = last_query_of((first_key + ROWS - 1) as u32) / QUERIES as u32 + 1;
    let head_of_group = |member: u32| Head::of_group(member, t, kv, group, HS);

    let shared = Shared::<T, HS, ROWS, QUERIES>::new(&mut Layout::new());
    // The compiler keeps the addresses of all passes of a copy in registers. In f32, and with seven passes for 96
    // channels, there are not enough. With an opaque stride it adds them up in each copy.
    let opaque_stride = size_of::<T>() == 4 || HS == 96;
    let rows = |rows: Rows| {
        if opaque_stride { Rows { stride: thread::opaque(rows.stride as u32) as usize, ..rows } } else { rows }
    };
    let load = |head: Head, tile: u32| {
        let (to, first) = (shared.stage(tile as usize), tile as usize * QUERIES);
        load_async(to.q, qkv, rows(head.query()), first);
        load_async(to.dout, dout, rows(head.plain()), first);
        async_copy::commit();
    };
    // Threads 0..QUERIES load the exponent shifts and the next QUERIES threads load D. They use registers and not
    // asynchronous 16-byte copies, because rows of (B,NH,T) are only 4-byte aligned.
    let thread = thread::thread_idx_x() as usize;
    let statistic = |head: Head, tile: u32| {
        let query = tile * QUERIES as u32 + (thread % QUERIES) as u32;
        let at = head.statistics() + query as usize;
        let inside = query < t;
        if thread < QUERIES {
            exponent_shift(inside.then(|| lse.at(at)))
        } else if inside && thread < 2 * QUERIES {
            d.at(at)
        } else {
            0.0
        }
    };
    let set_statistic = |tile: u32, value: f32| {
        let to = shared.stage(tile as usize);
        if thread < QUERIES {
            to.shift.set(thread, value);
        } else if thread < 2 * QUERIES {
            to.d.set(thread - QUERIES, value);
        }
    };

    load_async(shared.k, qkv, head_of_group(0).key(), first_key);
    load_async(shared.v, qkv, head_of_group(0).value(), first_key);
    let exponent_scale = exponent_scale::<HS>();
    let last_key = first_key + warp_row::<ROWS>() + ROWS / 4 - 1;
    // Queries after this one do not attend to one of the warp's keys.
    let cut = last_query_of((first_key + warp_row::<ROWS>()) as u32) as usize;
    let mut dk = Accumulators::<ROWS, HS>::zero();
    let mut dv = Accumulators::<ROWS, HS>::zero();
    let mut member = 0;
    loop {
        if size_of::<T>() == 4 {
            shared.member.set(thread, member);
        }
        // All threads have finished reading the previous head's tiles. The first wait is also that for K and V.
        let head = head_of_group(member);
        let first_tile = thread::opaque(thread::block_idx_x()) * (ROWS / QUERIES) as u32;
        load(head, first_tile);
        set_statistic(first_tile, statistic(head, first_tile));
        async_copy::wait::<0>();
        thread::sync_threads();
        let keep = size_of::<T>() * HS <= 128;
        let (k, v) = (LeftOperand::new(shared.k, keep), LeftOperand::new(shared.v, keep));

        for tile in first_tile..tiles {
            let mut next = 0.0;
            if tile + 1 < tiles {
                load(head, tile + 1);
                next = statistic(head, tile + 1);
            }
            let queries = shared.stage(tile as usize);
            let first_query = tile as usize * QUERIES;

            let mut p = Accumulators::<ROWS, QUERIES>::zero();
            p.add_matmul_transposed::<T, HS>(|strip, i| k.fragment(strip, i), queries.q);
            if last_key > first_query {
                mask_scores_transposed(&mut p, first_key, first_query);
            }
            if first_query + QUERIES > cut + 1 {
                mask_after(&mut p, first_key, first_query, last_query_of);
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
        if size_of::<T>() == 4 {
            member = shared.member.at(thread);
        }
        member += 1;
        if member == group {
            break;
        }
    }

    let scale = scale::<HS>();
    dk.map(|_, _, _, dk| dk * scale);
    dk.store(dqkv, head_of_group(0).key(), first_key, shared.k);
    dv.store(dqkv, head_of_group(0).value(), first_key, shared.v);
}
