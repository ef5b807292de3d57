//! The third kernel of the backward pass: dQ.
//!
//! A block owns ROWS queries of one head and iterates over tiles of keys up to the diagonal: dQ = dS K / sqrt(HS).

use super::Head;
use super::mask::{crosses_diagonal, mask_before, mask_scores};
use super::softmax::{exponent_scale, exponent_shift, scale};
use super::tiles::{Accumulators, KeyTile, KeyTiles, LeftOperand, lane_row, load_async, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedTile, async_copy, bf16, kernel, math, thread};

/// Lays out the shared memory: the queries of the block, the gradients of their outputs, and a double buffer of key tiles.
#[inline(always)]
fn shared<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>(
    layout: &mut Layout,
) -> ([SharedTile<T, ROWS, HS>; 2], KeyTiles<T, KEYS, HS>) {
    ([layout.tile(), layout.tile()], KeyTiles::new(layout))
}

/// Computes the Q part of dqkv (B,T,NH+2KV,HS) from dout (B,T,NH,HS), qkv (B,T,NH+2KV,HS), lse and d (B,NH,T).
/// `first_keys` (B,T) and `window` are the bounds of [`Visibility`].
///
/// Grid: (tiles of ROWS queries, NH, B).
#[kernel(
    threads = 128,
    instances(
    bf16_64 = <bf16, 64, 64, 64>(blocks_per_sm = 3),
    bf16_80 = <bf16, 80, 64, 64>(blocks_per_sm = 2),
    bf16_96 = <bf16, 96, 64, 64>(blocks_per_sm = 2),
    bf16_128 = <bf16, 128, 64, 32>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 16>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 16>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(shared::<T, HS, ROWS, KEYS>): fn() -> usize)
)]
pub fn attention_backward_dq<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>(
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
    let tiles = head.t.div_ceil(ROWS);
    let first_query = (tiles - 1 - thread::block_idx_x() as usize) * ROWS;
    let key_tiles = head.t.min(first_query + ROWS).div_ceil(KEYS);
    let visible = Visibility::new(first_keys, Global::null(), window, t);
    let first_key_of = |query| visible.first_key(thread::block_idx_z(), query);
    let first_tile = first_key_of(first_query as u32) as usize / KEYS;

    let ([query_tile, dout_tile], keys) = shared::<T, HS, ROWS, KEYS>(&mut Layout::new());
    let load = |tile: usize| {
        let KeyTile { k, v } = keys.stage(tile);
        load_async(k, qkv, head.key(), tile * KEYS);
        load_async(v, qkv, head.value(), tile * KEYS);
        async_copy::commit();
    };
    load_async(query_tile, qkv, head.query(), first_query);
    load_async(dout_tile, dout, head.plain(), first_query);
    load(first_tile);

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
    let keep = size_of::<T>() * HS <= 192;
    let (q, dout) = (LeftOperand::new(query_tile, keep), LeftOperand::new(dout_tile, keep));

    let exponent_scale = exponent_scale::<HS>();
    let mut dq = Accumulators::<ROWS, HS>::zero();
    for tile in first_tile..key_tiles {
        if tile + 1 < key_tiles {
            load(tile + 1);
        }
        let first_key = tile * KEYS;
        if first_key < warp_query + ROWS / 4 {
            let KeyTile { k, v } = keys.stage(tile);
            let mut p = Accumulators::<ROWS, KEYS>::zero();
            p.add_matmul_transposed::<T, HS>(|strip, i| q.fragment(strip, i), k);
            if crosses_diagonal(warp_query, first_key, KEYS) {
                mask_scores(&mut p, first_query, first_key);
            }
            if first_key < cut {
                mask_before(&mut p, first_query, first_key, first_key_of);
            }
            p.map(|strip, row, _, s| math::exp2(math::fma(s, exponent_scale, shift[strip][row])));

            let mut ds = Accumulators::<ROWS, KEYS>::zero();
            ds.add_matmul_transposed::<T, HS>(|strip, i| dout.fragment(strip, i), v);
            ds.zip(&p, |strip, row, _, dp, p| p * (dp - dot[strip][row]));
            dq.add_matmul::<T, KEYS>(|strip, i| ds.fragment::<T>(strip, i), k);
        }
        async_copy::wait::<0>();
        thread::sync_threads();
    }

    let scale = scale::<HS>();
    dq.map(|_, _, _, dq| dq * scale);
    dq.store(dqkv, head.query(), first_query, query_tile);
}
