//! Host side: the kernels with their grid and shared memory.

use super::{
    Head, Head64, Head128, attention_backward_keys_wgmma, attention_backward_queries_wgmma, attention_forward_wgmma,
    backward_keys_shared_bytes, backward_queries_shared_bytes, forward_shared_bytes,
};
use crate::attention::launch::{Shape, backward_dot};
use crate::launch::KernelLaunch;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut, bf16};

/// Whether these kernels take heads of this many channels.
pub fn takes(head_size: usize) -> bool {
    matches!(head_size, 64 | 128)
}

/// A block for every multiprocessor.
fn persistent(launch: Launch, shared_bytes: usize, multiprocessors: usize) -> KernelLaunch {
    KernelLaunch { launch, grid: [multiprocessors as u32, 1, 1], shared_bytes }
}

/// out (B,T,NH,HS) and lse (B,NH,T) from the map over qkv (B, T, 3 NH HS).
///
/// # Panics
/// If these kernels do not [take](takes) the head size, as in [`backward`].
pub fn forward(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: Shape,
    multiprocessors: usize,
) -> KernelLaunch {
    let of = match shape.hs {
        64 => forward_of::<Head64>,
        128 => forward_of::<Head128>,
        hs => panic!("attention_wgmma takes heads of 64 or 128 channels, found {hs}"),
    };
    of(out, lse, qkv, shape, multiprocessors)
}

fn forward_of<H: Head>(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: Shape,
    multiprocessors: usize,
) -> KernelLaunch {
    let (b, t, nh) = (shape.b as u32, shape.t as u32, shape.nh as u32);
    persistent(attention_forward_wgmma::<H>(out, lse, qkv, b, t, nh), forward_shared_bytes::<H>(), multiprocessors)
}

/// The maps over qkv (B, T, 3 NH HS) and dout (B, T, NH HS).
#[derive(Clone, Copy)]
pub struct Maps {
    pub qkv: Global<TensorMap>,
    pub dout: Global<TensorMap>,
}

/// dqkv (B,T,3,NH,HS) from dout and out (B,T,NH,HS), qkv and lse (B,NH,T); `d` (B,NH,T) is scratch. Three kernels, to run
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
) -> [KernelLaunch; 3] {
    let dot = backward_dot(d, dout, out, shape);
    let of = match shape.hs {
        64 => backward_of::<Head64>,
        128 => backward_of::<Head128>,
        hs => panic!("attention_wgmma takes heads of 64 or 128 channels, found {hs}"),
    };
    let [keys, queries] = of(dqkv, d.reader(), lse, maps, shape, multiprocessors);
    [dot, keys, queries]
}

fn backward_of<H: Head>(
    dqkv: GlobalMut<bf16>,
    d: Global<f32>,
    lse: Global<f32>,
    Maps { qkv, dout }: Maps,
    shape: Shape,
    multiprocessors: usize,
) -> [KernelLaunch; 2] {
    let (b, t, nh) = (shape.b as u32, shape.t as u32, shape.nh as u32);
    let keys = attention_backward_keys_wgmma::<H>(dqkv, qkv, dout, lse, d, b, t, nh);
    let queries = attention_backward_queries_wgmma::<H>(dqkv, qkv, dout, lse, d, b, t, nh);
    [
        persistent(keys, backward_keys_shared_bytes::<H>(), multiprocessors),
        persistent(queries, backward_queries_shared_bytes::<H>(), multiprocessors),
    ]
}
