//! Softmax of rows: out = e^(inp - max) / sum of e^(inp - max).

pub mod block;
pub mod naive;
pub mod online;
pub mod packets;
pub mod registers;
pub mod warp;

use cuda_std::warp::lane;
use cuda_std::{Element, Global, GlobalMut, bf16, math};

/// Elements that a lane loads before it stores the first result. The compiler does not move a load above a store, because both
/// arrays could overlap, and a load in flight at a time leaves the memory idle.
const BATCH: usize = 4;
/// Threads of a warp.
const LANES: usize = 32;

/// Stores e^(inp - max) `scale` for a row of n elements. All lanes of a warp call this.
#[inline(always)]
#[track_caller]
fn store_row(out: GlobalMut<bf16>, inp: Global<bf16>, n: usize, max: f32, scale: f32) {
    for first in (lane() as usize..n).step_by(LANES * BATCH) {
        let mut values = [0.0; BATCH];
        for k in 0..BATCH {
            let i = first + k * LANES;
            if i < n {
                values[k] = inp.at(i).to_f32();
            }
        }
        for k in 0..BATCH {
            let i = first + k * LANES;
            if i < n {
                out.set(i, bf16::from_f32(math::exp(values[k] - max) * scale));
            }
        }
    }
}
