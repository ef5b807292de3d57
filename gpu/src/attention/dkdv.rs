//! The second kernel of the backward pass: dK and dV.
//!
//! A block owns ROWS keys of one key-value head. For each query head of its group, it iterates over tiles of queries,
//! from the diagonal on. It computes the transposed scores, so that Pᵀ and dSᵀ are in the accumulator layout that the
//! left operand of the next matmul needs: dV = Pᵀ dout, dK = dSᵀ Q / sqrt(HS).

use super::Head;
use super::mask::{mask_after, mask_scores_transposed};
use super::softmax::{exponent_scale, exponent_shift, scale};
use super::tiles::{Accumulators, Columns, LeftOperand, Ring, THREADS, load_async, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, SharedTile, async_copy, bf16, device, kernel, math, thread};

/// Shared memory: the keys and values of the block, and rings of two tiles of queries, the gradients of their outputs, their exponent
/// shifts, and D.
struct Shared<T, const HS: usize, const ROWS: usize, const QUERIES: usize, const RING: usize> {
    /// The number of the query head within its group, one copy per thread. In f32 no register is left for it.
    member: SharedArray<u32>,
    k: SharedTile<T, ROWS, HS>,
    v: SharedTile<T, ROWS, HS>,
    q: Ring<T, QUERIES, RING, HS>,
    dout: Ring<T, QUERIES, RING, HS>,
    shift: SharedArray<f32>,
    d: SharedArray<f32>,
}

#[device]
impl<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize, const RING: usize>
    Shared<T, HS, ROWS, QUERIES, RING>
{
    fn new(layout: &mut Layout) -> Self {
        Self {
            member: layout.array(THREADS),
            k: layout.tile(),
            v: layout.tile(),
            q: Ring::new(layout),
            dout: Ring::new(layout),
            shift: layout.array(RING),
            d: layout.array(RING),
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
    bf16_64 = <bf16, 64, 128, 32, 64>(blocks_per_sm = 2),
    bf16_80 = <bf16, 80, 64, 64, 128>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64, 128>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 64, 48, 96>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32, 64>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32, 64>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16, 32>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16, 32>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(Shared::<T, HS, ROWS, QUERIES, RING>::new): fn() -> usize)
)]
pub fn attention_backward_dkdv<
    T: TensorCore,
    const HS: usize,
    const ROWS: usize,
    const QUERIES: usize,
    const RING: usize,
>(
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

    let shared = Shared::<T, HS, ROWS, QUERIES, RING>::new(&mut Layout::new());
    let load = |head: Head, tile: u32| {
        shared.q.load_async(tile as usize, qkv, head.query().with_opaque_stride());
        shared.dout.load_async(tile as usize, dout, head.plain().with_opaque_stride());
        async_copy::commit();
    };
    // Threads 0..QUERIES load the exponent shifts and the next QUERIES threads load D. They use registers and not
    // asynchronous 16-byte copies, because rows of (B,NH,T) are only 4-byte aligned.
    // With 128 rows, no register is left for the index of the thread.
    let thread = || {
        let thread = thread::thread_idx_x();
        if ROWS == 128 { thread::opaque(thread) as usize } else { thread as usize }
    };
    let statistic = |head: Head, tile: u32| {
        let thread = thread();
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
        let thread = thread();
        let first = Ring::<T, QUERIES, RING, HS>::first_row(tile as usize);
        if thread < QUERIES {
            shared.shift.set(first + thread, value);
        } else if thread < 2 * QUERIES {
            shared.d.set(first + thread - QUERIES, value);
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
            shared.member.set(thread(), member);
        }
        // All threads have finished reading the previous head's tiles. The first wait is also that for K and V.
        let head = head_of_group(member);
        let block = thread::opaque(thread::block_idx_x());
        let first_tile = if ROWS.is_multiple_of(QUERIES) {
            block * (ROWS / QUERIES) as u32
        } else {
            block * ROWS as u32 / QUERIES as u32
        };
        load(head, first_tile);
        set_statistic(first_tile, statistic(head, first_tile));
        async_copy::wait::<0>();
        thread::sync_threads();
        let keep = size_of::<T>() * HS <= 128 && ROWS == 64;
        let (k, v) = (LeftOperand::new(shared.k, keep), LeftOperand::new(shared.v, keep));

        for tile in first_tile..tiles {
            let mut next = 0.0;
            if tile + 1 < tiles {
                load(head, tile + 1);
                next = statistic(head, tile + 1);
            }
            let first_row = Ring::<T, QUERIES, RING, HS>::first_row(tile as usize);
            let (q, dout) = (shared.q.rows(tile as usize), shared.dout.rows(tile as usize));
            let first_query = tile as usize * QUERIES;

            let mut p = Accumulators::<ROWS, QUERIES>::zero();
            p.add_matmul_transposed::<T, RING, HS>(|strip, i| k.fragment(strip, i), q);
            if last_key > first_query {
                mask_scores_transposed(&mut p, first_key, first_query);
            }
            if first_query + QUERIES > cut + 1 {
                mask_after(&mut p, first_key, first_query, last_query_of);
            }
            let shift = Columns::load::<QUERIES>(shared.shift.skip(first_row));
            p.map(|_, _, col, s| math::exp2(math::fma(s, exponent_scale, shift.at(col))));
            dv.add_matmul::<T, QUERIES, RING>(|strip, i| p.fragment::<T>(strip, i), dout);

            let mut ds = Accumulators::<ROWS, QUERIES>::zero();
            ds.add_matmul_transposed::<T, RING, HS>(|strip, i| v.fragment(strip, i), dout);
            let d = Columns::load::<QUERIES>(shared.d.skip(first_row));
            ds.zip(&p, |_, _, col, dp, p| p * (dp - d.at(col)));
            dk.add_matmul::<T, QUERIES, RING>(|strip, i| ds.fragment::<T>(strip, i), q);

            if tile + 1 < tiles {
                set_statistic(tile + 1, next);
            }
            // Makes the next tile visible to all threads, and ensures that all have finished reading this one.
            async_copy::wait::<0>();
            thread::sync_threads();
        }
        if size_of::<T>() == 4 {
            member = shared.member.at(thread());
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
