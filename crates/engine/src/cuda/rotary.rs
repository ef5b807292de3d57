//! Rotary position embedding, and the norm of queries and keys before it.

use super::{Cuda, Float, shared_bytes};
use crate::ops::{AttentionShape, QkNorm, RotaryBackward, RotaryForward, RotaryPairs, RotaryShape};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{bail, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::column_sum;
use gpu::rotary::{self, Blocks, Norm, Sizes};

/// Returns the f32 elements of scratch memory.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let shape = workload.attention;
    let supported = rotary::supports(shape.head_size) && shape.kv_heads > 0;
    if supported { Blocks::new::<T>(sizes(shape), sm_count).partials(shape.head_size) } else { 0 }
}

fn sizes(shape: AttentionShape) -> Sizes {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    let [rows, sequence, heads, kv_heads, head_size] = [b * t, t, heads, kv_heads, head_size].map(|size| size as u32);
    Sizes { rows, sequence, heads, kv_heads, head_size }
}

/// Checks the shape and the table, and returns the sizes, the table, and the lengths of qkv and of its rotated heads.
fn check<T: Float>(cuda: &Cuda<T>, shape: AttentionShape, table: Tensor) -> Result<(Sizes, Global<f32>, usize, usize)> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    shape.check()?;
    ensure!(
        rotary::supports(head_size),
        "rotary: expected a head size that is a multiple of 16 up to 256, found {head_size}"
    );
    ensure!(
        table.len >= t * head_size,
        "rotary: expected a table of at least {t} positions, found {}; use a shorter sequence",
        table.len / head_size
    );
    let row = b * t * head_size;
    let table = cuda.input("table", table, t * head_size)?;
    Ok((sizes(shape), table, row * shape.packed_heads(), row * (heads + kv_heads)))
}

/// Returns the addresses of the norm's weights; null if there are none.
fn weights<T: Float>(cuda: &Cuda<T>, norm: &QkNorm, head_size: usize) -> Result<[Global<T>; 2]> {
    let Some([q, k]) = norm.weights else { return Ok([Global::new(std::ptr::null()); 2]) };
    Ok([cuda.input("q weight", q, head_size)?, cuda.input("k weight", k, head_size)?])
}

fn scalars(norm: &QkNorm) -> Norm {
    Norm { eps: norm.eps, gain: norm.gain }
}

/// Launches the rotation of `qkv` by the angles of the table, times `sign`.
fn rotate<T: Float>(cuda: &mut Cuda<T>, qkv: Tensor, table: Tensor, shape: RotaryShape, sign: f32) -> Result<()> {
    let (sizes, table, len, _) = check(cuda, shape.attention, table)?;
    let qkv = cuda.output("qkv", qkv, len)?;
    let launch = match shape.pairs {
        RotaryPairs::HalfSplit => rotary::rotary::<T, false>(qkv, table, sizes, sign),
        RotaryPairs::Interleaved => rotary::rotary::<T, true>(qkv, table, sizes, sign),
    };
    cuda.launch(&launch, [sizes.grid::<T>(), 1, 1], 0)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: RotaryForward) -> Result<()> {
    let RotaryForward { qkv, table, qk_norm, shape } = op;
    let Some(norm) = qk_norm else { return rotate(cuda, qkv, table, shape, 1.0) };
    let (sizes, table, len, rotated) = check(cuda, shape.attention, table)?;
    let [q, k] = weights(cuda, &norm, shape.attention.head_size)?;
    let (qkv, saved) = (cuda.output("qkv", qkv, len)?, cuda.output("saved", norm.saved, rotated)?);
    let kernel = match shape.pairs {
        RotaryPairs::HalfSplit => rotary::rotary_norm_forward::<T, false>,
        RotaryPairs::Interleaved => rotary::rotary_norm_forward::<T, true>,
    };
    cuda.launch(&kernel(qkv, saved, table, q, k, sizes, scalars(&norm)), [sizes.norm_grid::<T>(), 1, 1], 0)
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, table, qk_norm, dweights, shape } = op;
    let Some(norm) = qk_norm else { return rotate(cuda, dqkv, table, shape, -1.0) };
    let head_size = shape.attention.head_size;
    let (sizes, table, len, rotated) = check(cuda, shape.attention, table)?;
    let blocks = Blocks::new::<T>(sizes, cuda.executor.sm_count());
    let [q, k] = weights(cuda, &norm, head_size)?;
    let (dqkv, saved) = (cuda.output("dqkv", dqkv, len)?, cuda.input("saved", norm.saved, rotated)?);
    let (partials, gradients) = match (norm.weights, dweights) {
        (None, None) => (GlobalMut::new(std::ptr::null_mut()), None),
        (Some(_), Some([dq, dk])) => {
            let len = blocks.partials(head_size);
            let partials = cuda.output("scratch", cuda.scratch(len)?, len)?;
            let gradients = [cuda.output("dq weight", dq, head_size)?, cuda.output("dk weight", dk, head_size)?];
            (partials, Some(gradients))
        }
        (weights, _) => {
            let [expected, found] = if weights.is_some() { ["two", "none"] } else { ["none", "two"] };
            bail!("rotary: expected {expected} gradients of the norm's weights, found {found}")
        }
    };
    let weighted = gradients.is_some();
    let kernel = match (shape.pairs, weighted) {
        (RotaryPairs::HalfSplit, false) => rotary::rotary_norm_backward::<T, false, false>,
        (RotaryPairs::HalfSplit, true) => rotary::rotary_norm_backward::<T, false, true>,
        (RotaryPairs::Interleaved, false) => rotary::rotary_norm_backward::<T, true, false>,
        (RotaryPairs::Interleaved, true) => rotary::rotary_norm_backward::<T, true, true>,
    };
    let launch = kernel(dqkv, partials, saved, table, q, k, sizes, scalars(&norm), blocks);
    let shared = if weighted { shared_bytes(rotary::rotary_norm_backward_shared::<T>) } else { 0 };
    cuda.launch(&launch, [blocks.grid(), 1, 1], shared)?;
    let Some([dq, dk]) = gradients else { return Ok(()) };
    let launch = rotary::rotary_norm_backward_reduce::<T>(dq, dk, partials.reader(), blocks, head_size as u32);
    cuda.launch(&launch, [column_sum::grid(head_size), 2, 1], shared_bytes(column_sum::shared))
}
