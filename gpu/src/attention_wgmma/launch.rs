//! Host side: the kernels with their grid and shared memory.

use super::{
    HS, attention_backward_keys_wgmma, attention_backward_queries_wgmma, attention_forward_wgmma,
    backward_keys_shared_bytes, backward_queries_shared_bytes, forward_shared_bytes,
};
use crate::attention::launch::{Prepared, Shape, backward_dot};
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut, bf16};

/// Whether these kernels take heads of this many channels.
pub fn takes(head_size: usize) -> bool {
    head_size == HS as usize
}

/// A block for every multiprocessor.
fn persistent(launch: Launch, shared_bytes: usize, multiprocessors: usize) -> Prepared {
    Prepared { launch, grid: [multiprocessors as u32, 1, 1], shared_bytes }
}

/// out (B,T,NH,64) and lse (B,NH,T) from the map over qkv (B, T, 3 NH 64).
pub fn forward(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: Shape,
    multiprocessors: usize,
) -> Prepared {
    let (b, t, nh) = (shape.b as u32, shape.t as u32, shape.nh as u32);
    persistent(attention_forward_wgmma(out, lse, qkv, b, t, nh), forward_shared_bytes(), multiprocessors)
}

/// The maps over qkv (B, T, 3 NH 64) and dout (B, T, NH 64).
#[derive(Clone, Copy)]
pub struct Maps {
    pub qkv: Global<TensorMap>,
    pub dout: Global<TensorMap>,
}

/// dqkv (B,T,3,NH,64) from dout and out (B,T,NH,64), qkv and lse (B,NH,T); `d` (B,NH,T) is scratch. Three kernels, to run
/// in this order.
pub fn backward(
    dqkv: GlobalMut<bf16>,
    d: GlobalMut<f32>,
    dout: Global<bf16>,
    out: Global<bf16>,
    lse: Global<f32>,
    maps: Maps,
    shape: Shape,
    multiprocessors: usize,
) -> [Prepared; 3] {
    let (b, t, nh) = (shape.b as u32, shape.t as u32, shape.nh as u32);
    let Maps { qkv, dout: dout_map } = maps;
    let dot = backward_dot(d, dout, out, shape);
    let d = d.reader();
    let keys = attention_backward_keys_wgmma(dqkv, qkv, dout_map, lse, d, b, t, nh);
    let queries = attention_backward_queries_wgmma(dqkv, qkv, dout_map, lse, d, b, t, nh);
    [
        dot,
        persistent(keys, backward_keys_shared_bytes(), multiprocessors),
        persistent(queries, backward_queries_shared_bytes(), multiprocessors),
    ]
}
