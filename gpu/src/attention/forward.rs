//! The forward kernel. A block owns ROWS queries of one head and iterates over tiles of keys up to the diagonal.

use super::Head;
use super::mask::{crosses_diagonal, mask_before, mask_scores};
use super::softmax::{OnlineSoftmax, exponent_scale, scale};
use super::tiles::{Accumulators, LeftOperand, Ring, Rows, lane_column, lane_row, load_async, warp_row};
use super::visibility::Visibility;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedTile, async_copy, bf16, kernel, thread};

/// Lays out the shared memory: the queries of the block, and rings of tiles of keys and of values.
#[inline(always)]
fn shared<T: TensorCore, const HS: usize, const ROWS: usize, const KEYS: usize, const RING: usize>(
    layout: &mut Layout,
) -> (SharedTile<T, ROWS, HS>, Ring<T, KEYS, RING, HS>, Ring<T, KEYS, RING, HS>) {
    (layout.tile(), Ring::new(layout), Ring::new(layout))
}

/// Computes out (B,T,NH,HS) = softmax(Q Kᵀ / sqrt(HS) + causal mask) V from qkv (B,T,NH+2KV,HS).
///
/// Also writes lse (B,NH,T), the natural log-sum-exp of each query's scaled scores. `first_keys` (B,T) and `window` are the bounds of
/// [`Visibility`]. Grid: (tiles of ROWS queries, NH, B).
///
/// The rings of keys and values have RING rows each. If they hold two tiles, the next tile is loaded during the whole step. If they hold
/// one, values are loaded during the matmul of the scores and the next keys after it, with a second barrier. If KEEP, the fragments of
/// queries stay in registers.
#[kernel(
    threads = 128,
    instances(
    bf16_64 = <bf16, 64, 128, 64, 128, true>(blocks_per_sm = 2),
    bf16_80 = <bf16, 80, 64, 32, 64, true>(blocks_per_sm = 3),
    bf16_96 = <bf16, 96, 64, 64, 128, true>(blocks_per_sm = 3),
    bf16_128 = <bf16, 128, 128, 64, 64, false>(blocks_per_sm = 2),
    f32_64 = <f32, 64, 64, 32, 64, false>(blocks_per_sm = 2),
    f32_80 = <f32, 80, 64, 32, 64, false>(blocks_per_sm = 2),
    f32_96 = <f32, 96, 64, 32, 64, false>(blocks_per_sm = 2),
    f32_128 = <f32, 128, 64, 32, 64, false>(blocks_per_sm = 2),
),
    select(HS: usize => ROWS: usize, || crate::launch::shared_bytes(shared::<T, HS, ROWS, KEYS, RING>): fn() -> usize)
)]
pub fn attention_forward<
    T: TensorCore,
    const HS: usize,
    const ROWS: usize,
    const KEYS: usize,
    const RING: usize,
    const KEEP: bool,
>(
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
    let tiles = t.div_ceil(ROWS as u32);
    let first_query = (tiles - 1 - thread::block_idx_x()) * ROWS as u32;
    let key_tiles = t.min(first_query + ROWS as u32).div_ceil(KEYS as u32);
    let visible = Visibility::new(first_keys, Global::null(), window, t);
    let first_key_of = |query| visible.first_key(thread::block_idx_z(), query);
    let first_tile = first_key_of(first_query) / KEYS as u32;
    let first_query = first_query as usize;

    let (query_tile, keys, values) = shared::<T, HS, ROWS, KEYS, RING>(&mut Layout::new());
    let one_tile = RING == KEYS;
    // The compiler keeps the addresses of all copies in registers. With 128 rows there are not enough, so an opaque size and stride make
    // it compute the addresses again for each tile.
    let is_opaque = ROWS == 128;
    let load_head = || if is_opaque { Head::of_block(thread::opaque(t), kv, group, HS) } else { head };
    let rows = |rows: Rows| if is_opaque { rows.with_opaque_stride() } else { rows };
    let load_keys = |tile: u32| {
        keys.load_async(tile as usize, qkv, rows(load_head().key()));
        async_copy::commit();
    };
    let load_values = |tile: u32| {
        values.load_async(tile as usize, qkv, rows(load_head().value()));
        async_copy::commit();
    };
    load_async(query_tile, qkv, head.query(), first_query);
    async_copy::commit();
    load_keys(first_tile);
    if one_tile {
        async_copy::wait::<1>();
    } else {
        load_values(first_tile);
        async_copy::wait::<2>();
    }
    thread::sync_threads();
    let q = LeftOperand::new(query_tile, KEEP);

    let exponent_scale = exponent_scale::<HS>();
    let warp_query = first_query + warp_row::<ROWS>();
    let last_query = warp_query + ROWS / 4 - 1;
    // Keys before this one are hidden from one of the warp's queries.
    let cut = first_key_of(last_query as u32) as usize;
    let mut softmax = [OnlineSoftmax::new(); 2];
    let mut o = Accumulators::<ROWS, HS>::zero();
    for tile in first_tile..key_tiles {
        // Makes this tile visible to all threads, and ensures that all have finished reading the buffer that the next
        // load overwrites.
        async_copy::wait::<0>();
        thread::sync_threads();
        if one_tile {
            load_values(tile);
        } else if tile + 1 < key_tiles {
            load_keys(tile + 1);
            load_values(tile + 1);
        }
        let first_key = (tile * KEYS as u32) as usize;
        // All threads must reach the second barrier of a ring with one tile.
        if one_tile || first_key <= last_query {
            let mut s = Accumulators::<ROWS, KEYS>::zero();
            s.add_matmul_transposed::<T, RING, HS>(|strip, i| q.fragment(strip, i), keys.rows(tile as usize));
            if one_tile {
                async_copy::wait::<0>();
                thread::sync_threads();
                if tile + 1 < key_tiles {
                    load_keys(tile + 1);
                }
            }
            if crosses_diagonal(warp_query, first_key, KEYS) {
                mask_scores(&mut s, first_query, first_key);
            }
            if first_key < cut {
                mask_before(&mut s, first_query, first_key, first_key_of);
            }
            for strip in 0..Accumulators::<ROWS, HS>::STRIPS {
                if let Some(factor) = softmax[strip].update(&mut s, strip, exponent_scale) {
                    o.for_each_in(strip, |row, o| *o *= factor[row]);
                }
            }
            o.add_matmul::<T, KEYS, RING>(|strip, i| s.fragment::<T>(strip, i), values.rows(tile as usize));
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
