//! Attention, version 4: tensor cores (FlashAttention-2).
//!
//! Problem: see the module.
//! Idea: a block of 4 warps computes 64 queries, 16 for each warp, against tiles of 64 keys. Both matmuls use `mma.sync`.
//! A lane has elements of two rows of the scores, and the four lanes of a row combine its maximum and sum by shuffles. After
//! rounding, the fragments of the probabilities have the layout of a left operand: they multiply V without leaving registers.
//! Limit: copies and arithmetic alternate, as in version 7 of GEMM, and a fragment of K or V serves only 16 queries. The version in
//! `gpu/` for Ampere adds a double buffer with `cp.async`, and 32 queries for each warp; the one for Hopper uses TMA, wgmma and
//! warp specialization.

use super::{HS, Head, SCALE, Sizes};
use core::f32::consts::LOG2_E;
use cuda_std::element::pack_pair;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedTile, bf16, kernel, math, thread, warp};

/// Queries of a block, and keys of a tile.
const ROWS: usize = 64;
const THREADS: usize = 128;

type Tile = SharedTile<bf16, ROWS, HS>;

/// Lays out the shared memory: tiles of queries, keys and values.
pub fn shared(layout: &mut Layout) -> [Tile; 3] {
    [layout.tile().named("queries"), layout.tile().named("keys"), layout.tile().named("values")]
}

/// Copies rows `first` .. `first` + 64 of Q, K or V to a tile, with zeros past the last row.
#[inline(always)]
fn copy(tile: Tile, qkv: Global<bf16>, head: Head, part: usize, first: usize) {
    for i in (thread::thread_idx_x() as usize..ROWS * HS / bf16::PACKET).step_by(THREADS) {
        let (row, column) = (i / 8, i % 8 * 8);
        let inside = first + row < head.t;
        let packet = if inside { qkv.packet(head.qkv(part, first + row) + column) } else { Packet::zero() };
        tile.set_packet(row, column, packet);
    }
}

/// Combines a value over the four lanes that share a row.
#[inline(always)]
fn over_row(value: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    let value = op(value, warp::shuffle_xor(value, 1));
    op(value, warp::shuffle_xor(value, 2))
}

/// Computes out and lse. Grid: (T / 64 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_mma(out: GlobalMut<bf16>, lse: GlobalMut<f32>, qkv: Global<bf16>, sizes: Sizes) {
    let [queries, keys, values] = shared(&mut Layout::new());
    let head = Head::new(thread::block_idx_y() as usize, sizes);
    let first_query = thread::block_idx_x() as usize * ROWS;
    let (g, t) = (warp::lane() as usize / 4, warp::lane() as usize % 4);
    let warp_row = 16 * warp::index() as usize;
    copy(queries, qkv, head, 0, first_query);

    let mut o = [[0.0; 4]; HS / 8];
    let (mut max, mut sum) = ([f32::NEG_INFINITY; 2], [0.0; 2]);
    for first_key in (0..first_query + ROWS).step_by(ROWS) {
        copy(keys, qkv, head, 1, first_key);
        copy(values, qkv, head, 2, first_key);
        thread::sync_threads();
        let mut scores = [[0.0; 4]; ROWS / 8];
        for k in 0..HS / 16 {
            let q = queries.a(warp_row, 16 * k);
            for n in 0..ROWS / 16 {
                let [left, right] = keys.b_transposed(16 * n, 16 * k);
                bf16::mma(&mut scores[2 * n], q, left);
                bf16::mma(&mut scores[2 * n + 1], q, right);
            }
        }
        // Element i of fragment n belongs to query g + 8 (i / 2) and key 8 n + 2 t + i % 2 of the warp's part.
        let mut new = max;
        for n in 0..ROWS / 8 {
            for i in 0..4 {
                let (query, key) = (first_query + warp_row + g + i / 2 * 8, first_key + 8 * n + 2 * t + i % 2);
                scores[n][i] = if key > query { f32::NEG_INFINITY } else { scores[n][i] * (SCALE * LOG2_E) };
                new[i / 2] = math::max(new[i / 2], scores[n][i]);
            }
        }
        for row in 0..2 {
            new[row] = over_row(new[row], math::max);
            let factor = math::exp2(max[row] - new[row]);
            sum[row] *= factor;
            for n in 0..HS / 8 {
                o[n][2 * row] *= factor;
                o[n][2 * row + 1] *= factor;
            }
        }
        max = new;
        for n in 0..ROWS / 8 {
            for i in 0..4 {
                scores[n][i] = math::exp2(scores[n][i] - max[i / 2]);
                sum[i / 2] += scores[n][i];
            }
        }
        for k in 0..ROWS / 16 {
            let p = bf16::a_from_accumulators(scores[2 * k], scores[2 * k + 1]);
            for n in 0..HS / 16 {
                let [left, right] = values.b(16 * k, 16 * n);
                bf16::mma(&mut o[2 * n], p, left);
                bf16::mma(&mut o[2 * n + 1], p, right);
            }
        }
        thread::sync_threads();
    }

    for row in 0..2 {
        let (query, sum) = (first_query + warp_row + g + 8 * row, over_row(sum[row], |a, b| a + b));
        if query < head.t {
            for n in 0..HS / 8 {
                let pair = pack_pair(o[n][2 * row] / sum, o[n][2 * row + 1] / sum);
                out.set_pair(head.out(query) + 8 * n + 2 * t, pair);
            }
            if t == 0 {
                lse.set(head.statistics(query), max[row] / LOG2_E + math::ln(sum));
            }
        }
    }
}
