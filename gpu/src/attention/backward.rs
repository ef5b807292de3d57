//! Backward, deterministic: nothing is added to memory, every gradient is summed in registers by one block.
//!
//! With P the probabilities (made again from lse), D = rowsum(dout ∘ out) and dS = P ∘ (dout Vᵀ - D):
//! dV = Pᵀ dout, dK = dSᵀ Q / sqrt(HS), dQ = dS K / sqrt(HS). A first kernel makes D; a second owns keys, walks the
//! queries and works on transposed scores, so that Pᵀ and dSᵀ are left operands as they stand in the accumulators; a
//! third owns queries and walks the keys.

use super::mask::{crosses_diagonal, mask_scores, mask_scores_transposed};
use super::softmax::{exponent_scale, scale};
use super::tiles::{Accumulators, Columns, Left, lane_row, load_async, stage, warp_row};
use super::{Head, KEY, QUERY, VALUE};
use core::f32::consts::LOG2_E;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, SharedTile, async_copy, bf16, kernel, math, thread, warp};

/// Lanes that share a row of [`attention_backward_dot`], and so rows of a block.
const DOT_LANES: usize = 8;
pub(super) const DOT_ROWS: usize = super::tiles::THREADS / DOT_LANES;

/// d (B,NH,T) = rowsum(dout (B,T,NH,HS) ∘ out (B,T,NH,HS)). Grid: (tiles of 16 rows, NH, B).
#[kernel(threads = 128, instances(bf16 = <bf16>, f32 = <f32>))]
pub fn attention_backward_dot<T: Element>(
    d: GlobalMut<f32>,
    dout: Global<T>,
    out: Global<T>,
    t: u32,
    nh: u32,
    hs: u32,
) {
    let head = Head::of_block(t, nh, hs as usize);
    let thread = thread::thread_idx_x() as usize;
    let row = thread::block_idx_x() as usize * DOT_ROWS + thread / DOT_LANES;
    let mut sum = 0.0;
    if row < head.t {
        let first = head.plain().element(row);
        for col in (thread % DOT_LANES * T::PACKET..head.hs).step_by(DOT_LANES * T::PACKET) {
            let (a, b) = (dout.packet_streaming(first + col), out.packet_streaming(first + col));
            for i in 0..T::PACKET {
                sum = math::fma(a.get(i), b.get(i), sum);
            }
        }
    }
    for mask in [1, 2, 4] {
        sum += warp::shuffle_xor(sum, mask);
    }
    if row < head.t && thread.is_multiple_of(DOT_LANES) {
        d.set(head.statistics() + row, sum);
    }
}

/// The exponent offset of a row's probabilities, P = 2^(c s + shift); that of a row past the end makes P zero.
#[inline(always)]
fn shift_of(lse: Option<f32>) -> f32 {
    match lse {
        Some(lse) => -lse * LOG2_E,
        None => f32::NEG_INFINITY,
    }
}

/// A tile of queries, the gradients of their outputs, and their exponent offsets and D.
#[derive(Clone, Copy)]
struct QueryTile<T, const QUERIES: usize, const HS: usize> {
    q: SharedTile<T, QUERIES, HS>,
    dout: SharedTile<T, QUERIES, HS>,
    shift: SharedArray<f32>,
    d: SharedArray<f32>,
}

/// The block's keys and values, and two stages of queries.
struct KeysShared<T, const HS: usize, const ROWS: usize, const QUERIES: usize> {
    k: SharedTile<T, ROWS, HS>,
    v: SharedTile<T, ROWS, HS>,
    stages: [QueryTile<T, QUERIES, HS>; 2],
}

impl<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize> KeysShared<T, HS, ROWS, QUERIES> {
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

/// Dynamic shared memory of [`attention_backward_keys`] with these arguments, in bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn keys_shared_bytes<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize>() -> usize {
    let mut layout = Layout::new();
    let _ = KeysShared::<T, HS, ROWS, QUERIES>::new(&mut layout);
    layout.bytes()
}

/// The K and V parts of dqkv (B,T,3,NH,HS) from dout (B,T,NH,HS), qkv (B,T,3,NH,HS), lse and d (B,NH,T).
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
pub fn attention_backward_keys<T: TensorCore, const HS: usize, const ROWS: usize, const QUERIES: usize>(
    dqkv: GlobalMut<T>,
    dout: Global<T>,
    qkv: Global<T>,
    lse: Global<f32>,
    d: Global<f32>,
    t: u32,
    nh: u32,
) {
    let head = Head::of_block(t, nh, HS);
    // The first keys are seen by the most queries, so the longest blocks start first.
    let first_key = thread::block_idx_x() as usize * ROWS;
    let tiles = head.t.div_ceil(QUERIES);
    let first_tile = first_key / QUERIES;

    let shared = KeysShared::<T, HS, ROWS, QUERIES>::new(&mut Layout::new());
    let load = |tile: usize| {
        let to = shared.stage(tile);
        load_async(to.q, qkv, head.packed(QUERY), tile * QUERIES);
        load_async(to.dout, dout, head.plain(), tile * QUERIES);
        async_copy::commit();
    };
    // Threads 0 .. QUERIES carry the exponent offsets, the next ones D: through a register, for (B,NH,T) begins at any
    // multiple of 4 bytes.
    let thread = thread::thread_idx_x() as usize;
    let statistic = |tile: usize| {
        let query = tile * QUERIES + thread % QUERIES;
        let inside = query < head.t;
        let at = head.statistics() + query;
        if thread < QUERIES {
            shift_of(inside.then(|| lse.at(at)))
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
    let (k, v) = (Left::new(shared.k, keep), Left::new(shared.v, keep));

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
        p.add_product_transposed::<T, HS>(|strip, i| k.fragment(strip, i), queries.q);
        if last_key > first_query {
            mask_scores_transposed(&mut p, first_key, first_query);
        }
        let shift = Columns::load::<QUERIES>(queries.shift);
        p.map(|_, _, col, s| math::exp2(math::fma(s, exponent_scale, shift.at(col))));
        dv.add_product::<T, QUERIES>(|strip, i| p.fragment::<T>(strip, i), queries.dout);

        let mut ds = Accumulators::<ROWS, QUERIES>::zero();
        ds.add_product_transposed::<T, HS>(|strip, i| v.fragment(strip, i), queries.dout);
        let d = Columns::load::<QUERIES>(queries.d);
        ds.zip(&p, |_, _, col, dp, p| p * (dp - d.at(col)));
        dk.add_product::<T, QUERIES>(|strip, i| ds.fragment::<T>(strip, i), queries.q);

        if tile + 1 < tiles {
            set_statistic(tile + 1, next);
        }
        // Publishes the next tile and tells that all have done with this one.
        async_copy::wait::<0>();
        thread::sync_threads();
    }

    let scale = scale::<HS>();
    dk.map(|_, _, _, dk| dk * scale);
    dk.store(dqkv, head.packed(KEY), first_key, shared.k);
    dv.store(dqkv, head.packed(VALUE), first_key, shared.v);
}

/// A tile of keys and their values.
#[derive(Clone, Copy)]
struct KeyTile<T, const KEYS: usize, const HS: usize> {
    k: SharedTile<T, KEYS, HS>,
    v: SharedTile<T, KEYS, HS>,
}

/// The block's queries and the gradients of their outputs, and two stages of keys.
struct QueriesShared<T, const HS: usize, const ROWS: usize, const KEYS: usize> {
    q: SharedTile<T, ROWS, HS>,
    dout: SharedTile<T, ROWS, HS>,
    stages: [KeyTile<T, KEYS, HS>; 2],
}

impl<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize> QueriesShared<T, HS, ROWS, KEYS> {
    #[inline(always)]
    fn new(layout: &mut Layout) -> Self {
        let (q, dout) = (layout.tile(), layout.tile());
        let mut tile = || KeyTile { k: layout.tile(), v: layout.tile() };
        Self { q, dout, stages: [tile(), tile()] }
    }

    #[inline(always)]
    fn stage(&self, tile: usize) -> KeyTile<T, KEYS, HS> {
        let [even, odd] = self.stages;
        KeyTile { k: stage(even.k, odd.k, tile), v: stage(even.v, odd.v, tile) }
    }
}

/// Dynamic shared memory of [`attention_backward_queries`] with these arguments, in bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn queries_shared_bytes<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>() -> usize {
    let mut layout = Layout::new();
    let _ = QueriesShared::<T, HS, ROWS, KEYS>::new(&mut layout);
    layout.bytes()
}

/// The Q part of dqkv (B,T,3,NH,HS) from dout (B,T,NH,HS), qkv (B,T,3,NH,HS), lse and d (B,NH,T).
/// Grid: (tiles of ROWS queries, NH, B).
#[kernel(threads = 128, instances(
    bf16_64 = <bf16, 64, 64, 64>(blocks_per_sm = 3),
    bf16_80 = <bf16, 80, 64, 64>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 64, 32>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16>(blocks_per_sm = 2),
))]
pub fn attention_backward_queries<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>(
    dqkv: GlobalMut<T>,
    dout: Global<T>,
    qkv: Global<T>,
    lse: Global<f32>,
    d: Global<f32>,
    t: u32,
    nh: u32,
) {
    let head = Head::of_block(t, nh, HS);
    // The longest rows first, as in the forward.
    let tiles = head.t.div_ceil(ROWS);
    let first_query = (tiles - 1 - thread::block_idx_x() as usize) * ROWS;
    let key_tiles = head.t.min(first_query + ROWS).div_ceil(KEYS);

    let shared = QueriesShared::<T, HS, ROWS, KEYS>::new(&mut Layout::new());
    let load = |tile: usize| {
        let to = shared.stage(tile);
        load_async(to.k, qkv, head.packed(KEY), tile * KEYS);
        load_async(to.v, qkv, head.packed(VALUE), tile * KEYS);
        async_copy::commit();
    };
    load_async(shared.q, qkv, head.packed(QUERY), first_query);
    load_async(shared.dout, dout, head.plain(), first_query);
    load(0);

    let warp_query = first_query + warp_row::<ROWS>();
    let mut shift = [[0.0; 2]; 2];
    let mut dot = [[0.0; 2]; 2];
    for strip in 0..Accumulators::<ROWS, HS>::STRIPS {
        for row in 0..2 {
            let query = warp_query + 16 * strip + lane_row() + 8 * row;
            let inside = query < head.t;
            shift[strip][row] = shift_of(inside.then(|| lse.at(head.statistics() + query)));
            dot[strip][row] = if inside { d.at(head.statistics() + query) } else { 0.0 };
        }
    }
    async_copy::wait::<0>();
    thread::sync_threads();
    let keep = size_of::<T>() * HS <= 192;
    let (q, dout) = (Left::new(shared.q, keep), Left::new(shared.dout, keep));

    let exponent_scale = exponent_scale::<HS>();
    let mut dq = Accumulators::<ROWS, HS>::zero();
    for tile in 0..key_tiles {
        if tile + 1 < key_tiles {
            load(tile + 1);
        }
        let first_key = tile * KEYS;
        if first_key < warp_query + ROWS / 4 {
            let keys = shared.stage(tile);
            let mut p = Accumulators::<ROWS, KEYS>::zero();
            p.add_product_transposed::<T, HS>(|strip, i| q.fragment(strip, i), keys.k);
            if crosses_diagonal(warp_query, first_key, KEYS) {
                mask_scores(&mut p, first_query, first_key);
            }
            p.map(|strip, row, _, s| math::exp2(math::fma(s, exponent_scale, shift[strip][row])));

            let mut ds = Accumulators::<ROWS, KEYS>::zero();
            ds.add_product_transposed::<T, HS>(|strip, i| dout.fragment(strip, i), keys.v);
            ds.zip(&p, |strip, row, _, dp, p| p * (dp - dot[strip][row]));
            dq.add_product::<T, KEYS>(|strip, i| ds.fragment::<T>(strip, i), keys.k);
        }
        async_copy::wait::<0>();
        thread::sync_threads();
    }

    let scale = scale::<HS>();
    dq.map(|_, _, _, dq| dq * scale);
    dq.store(dqkv, head.packed(QUERY), first_query, shared.q);
}
