//! The third kernel of the backward pass: dQ.
//!
//! A block owns ROWS queries of one head and iterates over tiles of keys up to the diagonal: dQ = dS K / sqrt(HS).

use super::Head;
use super::mask::{crosses_diagonal, mask_before, mask_scores};
use super::softmax::{exponent_scale, exponent_shift, scale};
use super::tiles::{Accumulators, LeftOperand, Ring, Rows, lane_row, load_async, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedTile, async_copy, bf16, kernel, math, thread};

/// The views of the shared memory: the queries of the block, the gradients of their outputs, and rings of tiles of keys and of values.
type Shared<T, const HS: usize, const ROWS: usize, const KEYS: usize, const K_RING: usize, const V_RING: usize> =
    ([SharedTile<T, ROWS, HS>; 2], Ring<T, KEYS, K_RING, HS>, Ring<T, KEYS, V_RING, HS>);

/// Lays out the shared memory.
#[inline(always)]
fn shared<
    T: TensorCore,
    const HS: usize,
    const ROWS: usize,
    const KEYS: usize,
    const K_RING: usize,
    const V_RING: usize,
>(
    layout: &mut Layout,
) -> Shared<T, HS, ROWS, KEYS, K_RING, V_RING> {
    ([layout.tile(), layout.tile()], Ring::new(layout), Ring::new(layout))
}

/// Computes the Q part of dqkv (B,T,NH+2KV,HS) from dout (B,T,NH,HS), qkv (B,T,NH+2KV,HS), lse and d (B,NH,T).
/// `first_keys` (B,T) and `window` are the bounds of [`Visibility`].
///
/// Grid: (tiles of ROWS queries, NH, B).
///
/// The ring of keys has K_RING rows, two tiles. That of values has V_RING rows. If it holds one tile, it is loaded during the matmul of
/// the scores, with a second barrier. If KEEP, the fragments of queries and of the gradients of outputs stay in registers.
#[kernel(
    threads = 128,
    instances(
    bf16_64 = <bf16, 64, 128, 32, 64, 64, true>(blocks_per_sm = 2),
    bf16_80 = <bf16, 80, 64, 64, 128, 128, true>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64, 128, 128, true>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 128, 32, 64, 32, false>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32, 64, 64, false>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32, 64, 64, false>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16, 32, 32, false>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16, 32, 32, false>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(shared::<T, HS, ROWS, KEYS, K_RING, V_RING>): fn() -> usize)
)]
pub fn attention_backward_dq<
    T: TensorCore,
    const HS: usize,
    const ROWS: usize,
    const KEYS: usize,
    const K_RING: usize,
    const V_RING: usize,
    const KEEP: bool,
>(
    dqkv: GlobalMut<T>,
    dout: Global<T>,
    qkv: Global<T>,
    lse: Global<f32>,
    d: Global<f32>,
    t: u32,
    kv: u32,
    group: u32,
    first_keys: Global<u32>,
    window: u32,
) {
    let head = Head::of_block(t, kv, group, HS);
    // The queries with the most keys first, as in the forward kernel.
    let tiles = t.div_ceil(ROWS as u32);
    let first_query = (tiles - 1 - thread::block_idx_x()) * ROWS as u32;
    let key_tiles = t.min(first_query + ROWS as u32).div_ceil(KEYS as u32);
    let visible = Visibility::new(first_keys, Global::null(), window, t);
    let first_key_of = |query| visible.first_key(thread::block_idx_z(), query);
    let first_tile = first_key_of(first_query) / KEYS as u32;
    let first_query = first_query as usize;

    let ([query_tile, dout_tile], keys, values) = shared::<T, HS, ROWS, KEYS, K_RING, V_RING>(&mut Layout::new());
    let one_tile = V_RING == KEYS;
    // See the forward kernel.
    let is_opaque = ROWS == 128;
    let load_head = || if is_opaque { Head::of_block(thread::opaque(t), kv, group, HS) } else { head };
    let rows = |rows: Rows| if is_opaque { rows.with_opaque_stride() } else { rows };
    let load_keys = |tile: u32| keys.load_async(tile as usize, qkv, rows(load_head().key()));
    let load_values = |tile: u32| values.load_async(tile as usize, qkv, rows(load_head().value()));
    load_async(query_tile, qkv, head.query(), first_query);
    load_async(dout_tile, dout, head.plain(), first_query);
    load_keys(first_tile);
    if !one_tile {
        load_values(first_tile);
    }
    async_copy::commit();

    let warp_query = first_query + warp_row::<ROWS>();
    // Keys before this one are hidden from one of the warp's queries.
    let cut = first_key_of((warp_query + ROWS / 4 - 1) as u32) as usize;
    let mut shift = [[0.0; 2]; 2];
    let mut dot = [[0.0; 2]; 2];
    for strip in 0..Accumulators::<ROWS, HS>::STRIPS {
        for row in 0..2 {
            let query = warp_query + 16 * strip + lane_row() + 8 * row;
            let inside = query < head.t;
            shift[strip][row] = exponent_shift(inside.then(|| lse.at(head.statistics() + query)));
            dot[strip][row] = if inside { d.at(head.statistics() + query) } else { 0.0 };
        }
    }
    async_copy::wait::<0>();
    thread::sync_threads();
    let (q, dout) = (LeftOperand::new(query_tile, KEEP), LeftOperand::new(dout_tile, KEEP));

    let exponent_scale = exponent_scale::<HS>();
    let mut dq = Accumulators::<ROWS, HS>::zero();
    for tile in first_tile..key_tiles {
        if one_tile {
            load_values(tile);
            async_copy::commit();
        }
        if tile + 1 < key_tiles {
            load_keys(tile + 1);
            if !one_tile {
                load_values(tile + 1);
            }
        }
        async_copy::commit();
        let first_key = (tile * KEYS as u32) as usize;
        // All threads must reach the second barrier of a ring with one tile.
        if one_tile || first_key < warp_query + ROWS / 4 {
            let mut p = Accumulators::<ROWS, KEYS>::zero();
            p.add_matmul_transposed::<T, K_RING, HS>(|strip, i| q.fragment(strip, i), keys.rows(tile as usize));
            if crosses_diagonal(warp_query, first_key, KEYS) {
                mask_scores(&mut p, first_query, first_key);
            }
            if first_key < cut {
                mask_before(&mut p, first_query, first_key, first_key_of);
            }
            p.map(|strip, row, _, s| math::exp2(math::fma(s, exponent_scale, shift[strip][row])));

            if one_tile {
                async_copy::wait::<1>();
                thread::sync_threads();
            }
            let mut ds = Accumulators::<ROWS, KEYS>::zero();
            ds.add_matmul_transposed::<T, V_RING, HS>(|strip, i| dout.fragment(strip, i), values.rows(tile as usize));
            ds.zip(&p, |strip, row, _, dp, p| p * (dp - dot[strip][row]));
            dq.add_matmul::<T, KEYS, K_RING>(|strip, i| ds.fragment::<T>(strip, i), keys.rows(tile as usize));
        }
        async_copy::wait::<0>();
        thread::sync_threads();
    }

    let scale = scale::<HS>();
    dq.map(|_, _, _, dq| dq * scale);
    dq.store(dqkv, head.query(), first_query, query_tile);
}
