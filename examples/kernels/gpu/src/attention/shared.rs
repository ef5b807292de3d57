//! Attention, version 3: keys and values in shared memory.
//!
//! Problem: see the module.
//! Idea: the 128 threads of a block copy 32 keys and values to shared memory together, and all of its 128 queries use them from
//! there. Global memory supplies 128 times fewer bytes, and all lanes of a warp read the same key, which shared memory broadcasts.
//! Limit: the arithmetic units for f32, and one load from shared memory for each 8 multiply-adds.

use super::online::Query;
use super::{HS, Head, Sizes};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedTile, bf16, kernel, thread};

/// Keys in shared memory.
const KEYS: usize = 32;
/// Queries of a block, one for each thread.
const QUERIES: usize = 128;

/// Lays out the shared memory: the tiles of keys and values.
pub fn shared(layout: &mut Layout) -> [SharedTile<bf16, KEYS, HS>; 2] {
    [layout.tile().named("keys"), layout.tile().named("values")]
}

/// Computes out and lse. Grid: (T / 128 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_shared(out: GlobalMut<bf16>, lse: GlobalMut<f32>, qkv: Global<bf16>, sizes: Sizes) {
    let [keys, values] = shared(&mut Layout::new());
    let (head, index) = (Head::new(thread::block_idx_y() as usize, sizes), thread::index_1d());
    // Threads past the last query take part in the copies and barriers. They compute the last query again and do not store it.
    let mut query = Query::load(qkv, head, index.min(head.t - 1));
    let end = head.t.min((thread::block_idx_x() as usize + 1) * QUERIES);
    for first in (0..end).step_by(KEYS) {
        for i in (thread::thread_idx_x() as usize..KEYS * HS / bf16::PACKET).step_by(QUERIES) {
            let (row, column) = (i / 8, i % 8 * 8);
            if first + row < head.t {
                keys.set_packet(row, column, qkv.packet(head.qkv(1, first + row) + column));
                values.set_packet(row, column, qkv.packet(head.qkv(2, first + row) + column));
            }
        }
        thread::sync_threads();
        for key in 0..KEYS {
            if first + key <= index.min(head.t - 1) {
                query.add(|p| keys.packet(key, 8 * p), |p| values.packet(key, 8 * p));
            }
        }
        thread::sync_threads();
    }
    if index < head.t {
        query.store(out, lse, head, index);
    }
}
