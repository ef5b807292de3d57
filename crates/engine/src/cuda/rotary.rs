//! Rotary position embedding, and the norm of queries and keys before it.

use super::{Cuda, Float, experts, shared_bytes};
use crate::ops::{AttentionShape, HeadNorm, RotaryBackward, RotaryForward, RotaryPairs, Rotation};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{Context, bail, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::column_sum;
use gpu::rotary::{self, Blocks, NormScalars, Sizes};

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

/// The operands that the forward and the backward pass have in common.
struct RotaryOperands<T> {
    /// The queries, keys and values, or their gradients.
    qkv: GlobalMut<T>,
    table: Global<f32>,
    /// The weights of queries and keys; null if there are none.
    weights: [Global<T>; 2],
    sizes: Sizes,
}

/// Checks the shape and the rotation, and returns the operands.
fn operands<T: Float>(
    cuda: &Cuda<T>,
    qkv: Tensor,
    rotation: &Rotation,
    shape: AttentionShape,
) -> Result<RotaryOperands<T>> {
    let AttentionShape { b, t, head_size, .. } = shape;
    shape.check()?;
    experts::check_norm(rotation.qk_norm.map(|norm| norm.scope))?;
    ensure!(
        rotary::supports(head_size),
        "rotary: expected a head size that is a multiple of 16 up to 256, found {head_size}"
    );
    rotation.check_table(shape)?;
    Ok(RotaryOperands {
        qkv: cuda.output("qkv", qkv, b * t * shape.packed_heads() * head_size)?,
        table: cuda.input("table", rotation.table, t * head_size)?,
        weights: cuda.head_weights(rotation.weights(), head_size)?,
        sizes: sizes(shape),
    })
}

impl<T: Float> Cuda<T> {
    /// Returns the weights of the norm of queries and keys; null if there are none.
    pub(super) fn head_weights(&self, weights: Option<[Tensor; 2]>, head_size: usize) -> Result<[Global<T>; 2]> {
        let Some([q, k]) = weights else { return Ok([Global::null(); 2]) };
        Ok([self.input("q weight", q, head_size)?, self.input("k weight", k, head_size)?])
    }
}

/// Returns the queries and keys before the norm, and the scalars of the norm.
fn norm_operands<T: Float>(
    cuda: &Cuda<T>,
    saved: Option<Tensor>,
    norm: HeadNorm,
    shape: AttentionShape,
) -> Result<(GlobalMut<T>, NormScalars)> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    let saved = saved.context("rotary: expected memory for the queries and keys before their norm, found none")?;
    let saved = cuda.output("saved", saved, b * t * (heads + kv_heads) * head_size)?;
    Ok((saved, NormScalars { eps: norm.eps, gain: norm.gain }))
}

/// Launches a rotation without norm by the angles of the table, times `sign`.
fn rotate<T: Float>(cuda: &mut Cuda<T>, operands: &RotaryOperands<T>, pairs: RotaryPairs, sign: f32) -> Result<()> {
    let RotaryOperands { qkv, table, sizes, .. } = *operands;
    let launch = match pairs {
        RotaryPairs::HalfSplit => rotary::rotary::<T, false>(qkv, table, sizes, sign),
        RotaryPairs::Interleaved => rotary::rotary::<T, true>(qkv, table, sizes, sign),
    };
    cuda.launch(launch, [sizes.grid::<T>(), 1, 1], 0)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: RotaryForward) -> Result<()> {
    let RotaryForward { qkv, saved, rotation, shape } = op;
    let operands = operands(cuda, qkv, &rotation, shape)?;
    let Some(norm) = rotation.qk_norm else { return rotate(cuda, &operands, rotation.pairs, 1.0) };
    let (saved, norm) = norm_operands(cuda, saved, norm, shape)?;
    let RotaryOperands { qkv, table, weights: [q, k], sizes } = operands;
    let kernel = match rotation.pairs {
        RotaryPairs::HalfSplit => rotary::rotary_norm_forward::<T, false>,
        RotaryPairs::Interleaved => rotary::rotary_norm_forward::<T, true>,
    };
    cuda.launch(kernel(qkv, saved, table, q, k, sizes, norm), [sizes.norm_grid::<T>(), 1, 1], 0)
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, saved, dweights, rotation, shape } = op;
    let operands = operands(cuda, dqkv, &rotation, shape)?;
    let Some(norm) = rotation.qk_norm else { return rotate(cuda, &operands, rotation.pairs, -1.0) };
    let (saved, scalars) = norm_operands(cuda, saved, norm, shape)?;
    let (RotaryOperands { qkv: dqkv, table, weights: [q, k], sizes }, head_size) = (operands, shape.head_size);
    let blocks = Blocks::new::<T>(sizes, cuda.executor.sm_count());
    let (partials, gradients) = match (norm.weights, dweights) {
        (None, None) => (GlobalMut::null(), None),
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
    let kernel = match (rotation.pairs, weighted) {
        (RotaryPairs::HalfSplit, false) => rotary::rotary_norm_backward::<T, false, false>,
        (RotaryPairs::HalfSplit, true) => rotary::rotary_norm_backward::<T, false, true>,
        (RotaryPairs::Interleaved, false) => rotary::rotary_norm_backward::<T, true, false>,
        (RotaryPairs::Interleaved, true) => rotary::rotary_norm_backward::<T, true, true>,
    };
    let launch = kernel(dqkv, partials, saved.reader(), table, q, k, sizes, scalars, blocks);
    let shared = if weighted { shared_bytes(rotary::rotary_norm_backward_shared::<T>) } else { 0 };
    cuda.launch(launch, [blocks.grid(), 1, 1], shared)?;
    let Some([dq, dk]) = gradients else { return Ok(()) };
    let launch = rotary::rotary_norm_backward_reduce::<T>(dq, dk, partials.reader(), blocks, head_size as u32);
    cuda.launch(launch, [column_sum::grid(head_size), 2, 1], shared_bytes(column_sum::shared))
}
