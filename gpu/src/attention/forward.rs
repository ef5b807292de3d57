//! The forward kernel. A block owns ROWS queries of one head and iterates over tiles of keys up to the diagonal.

use super::Head;
use super::mask::{crosses_diagonal, mask_before, mask_scores};
use super::softmax::{OnlineSoftmax, exponent_scale, scale};
use super::tiles::{Accumulators, KeyTile, KeyTiles, LeftOperand, lane_column, lane_row, load_async, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedTile, async_copy, bf16, kernel, thread};

/// Lays out the shared memory: the queries of the block, and a double buffer of key tiles.
#[inline(always)]
fn shared<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>(
    layout: &mut Layout,
) -> (SharedTile<T, ROWS, HS>, KeyTiles<T, KEYS, HS>) {
    (layout.tile(), KeyTiles::new(layout))
}

/// Computes out (B,T,NH,HS) = softmax(Q Kᵀ / sqrt(HS) + causal mask) V from qkv (B,T,NH+2KV,HS).
///
/// Also writes lse (B,NH,T), the natural log-sum-exp of each query's scaled scores. `first_keys` (B,T) and `window` are the bounds of
/// [`Visibility`]. Grid: (tiles of ROWS queries, NH, B).
#[kernel(
    threads = 128,
    instances(
    bf16_64 = <bf16, 64, 128, 64>(blocks_per_sm = 2),
    bf16_80 = <bf16, 80, 64, 32>(blocks_per_sm = 3),
    bf16_96 = <bf16, 96, 64, 64>(blocks_per_sm = 3),
    bf16_128 = <bf16, 128, 64, 32>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 32>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 32>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(shared::<T, HS, ROWS, KEYS>): fn() -> usize)
)]
pub fn attention_forward<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize>(
    out: GlobalMut<T>,
    lse: GlobalMut<f32>,
    qkv: Global<T>,
    t: u32,
    kv: u32,
    group: u32,
    first_keys: Global<u32>,
    window: u32,
) {
    let head = Head::of_block(t, kv, group, HS);
    // Blocks start in the order of x. The queries with the most keys come first, so that the blocks that start last are
    // short. Tiles of one head run concurrently and share its keys in L2.
    let tiles = head.t.div_ceil(ROWS);
    let first_query = (tiles - 1 - thread::block_idx_x() as usize) * ROWS;
    let key_tiles = head.t.min(first_query + ROWS).div_ceil(KEYS);
    let visible = Visibility::new(first_keys, Global::null(), window, t);
    let first_key_of = |query| visible.first_key(thread::block_idx_z(), query);
    let first_tile = first_key_of(first_query as u32) as usize / KEYS;

    let (query_tile, keys) = shared::<T, HS, ROWS, KEYS>(&mut Layout::new());
    let load = |tile: usize| {
        let KeyTile { k, v } = keys.stage(tile);
        load_async(k, qkv, head.key(), tile * KEYS);
        load_async(v, qkv, head.value(), tile * KEYS);
        async_copy::commit();
    };
    load_async(query_tile, qkv, head.query(), first_query);
    async_copy::commit();
    load(first_tile);
    async_copy::wait::<1>();
    thread::sync_threads();
    let q = LeftOperand::new(query_tile, size_of::<T>() == 2);

    let exponent_scale = exponent_scale::<HS>();
    let warp_query = first_query + warp_row::<ROWS>();
    let last_query = warp_query + ROWS / 4 - 1;
    // Keys before this one are hidden from one of the warp's queries.
    let cut = first_key_of(last_query as u32) as usize;
    let mut softmax = [OnlineSoftmax::new(); 2];
    let mut o = Accumulators::<ROWS, HS>::zero();
    for tile in first_tile..key_tiles {
        // One barrier per tile: it makes this tile visible to all threads, and ensures that all have finished reading
        // the buffer that the next tile overwrites.
        async_copy::wait::<0>();
        thread::sync_threads();
        if tile + 1 < key_tiles {
            load(tile + 1);
        }
        let first_key = tile * KEYS;
        if first_key <= last_query {
            let KeyTile { k, v } = keys.stage(tile);
            let mut s = Accumulators::<ROWS, KEYS>::zero();
            s.add_matmul_transposed::<T, HS>(|strip, i| q.fragment(strip, i), k);
            if crosses_diagonal(warp_query, first_key, KEYS) {
                mask_scores(&mut s, first_query, first_key);
            }
            if first_key < cut {
                mask_before(&mut s, first_query, first_key, first_key_of);
            }
            for strip in 0..Accumulators::<ROWS, HS>::STRIPS {
                let factor = softmax[strip].update(&mut s, strip, exponent_scale);
                o.for_each_in(strip, |row, o| *o *= factor[row]);
            }
            o.add_matmul::<T, KEYS>(|strip, i| s.fragment::<T>(strip, i), v);
        }
    }

    for strip in 0..Accumulators::<ROWS, HS>::STRIPS {
        let (factor, row_lse) = softmax[strip].finish(scale::<HS>());
        o.for_each_in(strip, |row, o| *o *= factor[row]);
        for row in 0..2 {
            let query = warp_query + 16 * strip + lane_row() + 8 * row;
            if lane_column() == 0 && query < head.t {
                lse.set(head.statistics() + query, row_lse[row]);
            }
        }
    }
    o.store(out, head.plain(), first_query, query_tile);
}
