//! Rotary position embedding, and the norm of queries and keys before it.

use super::{Cuda, Float, shared_bytes};
use crate::ops::{AttentionShape, HeadNorm, QkNormScope, RotaryBackward, RotaryForward, RotaryPairs, Rotation};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{Context, bail, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::rotary::{self, Blocks, NormScalars, Sizes};
use gpu::{all_heads_norm, bias, column_sum};

/// Returns the f32 elements of scratch memory.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let shape = workload.attention;
    let (supported, sizes) = (rotary::supports(shape.head_size) && shape.kv_heads > 0, sizes(shape));
    match workload.qk_norm {
        _ if !supported => 0,
        Some(QkNormScope::AllHeads) => {
            let blocks = all_heads_norm::backward_grid(sizes, sm_count);
            all_heads_norm::partials(sizes, blocks).iter().sum()
        }
        _ => Blocks::new::<T>(sizes, sm_count).partials(shape.head_size),
    }
}

/// Checks that there are kernels for the norm of queries and keys of a model.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    match workload.qk_norm {
        Some(QkNormScope::AllHeads) => check_all_heads::<T>(workload.attention),
        _ => Ok(()),
    }
}

fn check_all_heads<T: Float>(AttentionShape { heads, kv_heads, head_size, .. }: AttentionShape) -> Result<()> {
    let (found, most) = ((heads + kv_heads) * head_size, all_heads_norm::max_channels::<T>());
    ensure!(
        found <= most,
        "QK-norm of all heads: expected at most {most} channels of queries and keys in {}, found {found}; use --device cpu",
        T::DTYPE.name()
    );
    Ok(())
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
    ensure!(
        rotary::supports(head_size),
        "rotary: expected a head size that is a multiple of 16 up to 256, found {head_size}"
    );
    rotation.check_table(shape)?;
    Ok(RotaryOperands {
        qkv: cuda.output("qkv", qkv, b * t * shape.packed_heads() * head_size)?,
        table: cuda.input("table", rotation.table, t * head_size)?,
        weights: cuda.head_weights(rotation.weights(), rotation.weight_lengths(shape))?,
        sizes: sizes(shape),
    })
}

impl<T: Float> Cuda<T> {
    /// Returns the weights of the norm of queries and keys, of these lengths; null if there are none.
    pub(super) fn head_weights(&self, weights: Option<[Tensor; 2]>, lengths: [usize; 2]) -> Result<[Global<T>; 2]> {
        let Some([q, k]) = weights else { return Ok([Global::null(); 2]) };
        Ok([self.input("q weight", q, lengths[0])?, self.input("k weight", k, lengths[1])?])
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

/// Normalizes the queries and keys of all heads of qkv (B, T, NH + 2 KV, HS) in place. Copies them before the norm to `saved`, unless
/// that is null.
pub(super) fn normalize_all_heads<T: Float>(
    cuda: &mut Cuda<T>,
    qkv: Tensor,
    saved: GlobalMut<T>,
    norm: HeadNorm,
    shape: AttentionShape,
) -> Result<()> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    check_all_heads::<T>(shape)?;
    let qkv = cuda.output("qkv", qkv, b * t * shape.packed_heads() * head_size)?;
    let [q, k] = cuda.head_weights(norm.weights, norm.scope.widths(heads, kv_heads, head_size))?;
    let (sizes, scalars) = (sizes(shape), NormScalars { eps: norm.eps, gain: norm.gain });
    let instance = (all_heads_norm::packets::<T>(sizes),);
    let launch = all_heads_norm::all_heads_norm_forward_select(instance, qkv, saved, q, k, sizes, scalars);
    let launch = launch.context("internal error: no kernel for a norm of all heads; please report it")?;
    cuda.launch(launch, [sizes.rows, 1, 1], shared_bytes(all_heads_norm::shared))
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: RotaryForward) -> Result<()> {
    let RotaryForward { qkv, saved, rotation, shape } = op;
    let operands = operands(cuda, qkv, &rotation, shape)?;
    let Some(norm) = rotation.qk_norm else { return rotate(cuda, &operands, rotation.pairs, 1.0) };
    let (saved, scalars) = norm_operands(cuda, saved, norm, shape)?;
    if norm.scope == QkNormScope::AllHeads {
        normalize_all_heads(cuda, qkv, saved, norm, shape)?;
        return rotate(cuda, &operands, rotation.pairs, 1.0);
    }
    let RotaryOperands { qkv, table, weights: [q, k], sizes } = operands;
    let kernel = match rotation.pairs {
        RotaryPairs::HalfSplit => rotary::rotary_norm_forward::<T, false>,
        RotaryPairs::Interleaved => rotary::rotary_norm_forward::<T, true>,
    };
    cuda.launch(kernel(qkv, saved, table, q, k, sizes, scalars), [sizes.norm_grid::<T>(), 1, 1], 0)
}

/// Returns the gradients of the weights of a norm, if it has weights.
fn weight_gradients<T: Float>(
    cuda: &Cuda<T>,
    norm: HeadNorm,
    dweights: Option<[Tensor; 2]>,
    lengths: [usize; 2],
) -> Result<Option<[GlobalMut<T>; 2]>> {
    match (norm.weights, dweights) {
        (None, None) => Ok(None),
        (Some(_), Some([dq, dk])) => {
            Ok(Some([cuda.output("dq weight", dq, lengths[0])?, cuda.output("dk weight", dk, lengths[1])?]))
        }
        (weights, _) => {
            let [expected, found] = if weights.is_some() { ["two", "none"] } else { ["none", "two"] };
            bail!("rotary: expected {expected} gradients of the norm's weights, found {found}")
        }
    }
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, saved, dweights, rotation, shape } = op;
    let operands = operands(cuda, dqkv, &rotation, shape)?;
    let Some(norm) = rotation.qk_norm else { return rotate(cuda, &operands, rotation.pairs, -1.0) };
    let (saved, scalars) = norm_operands(cuda, saved, norm, shape)?;
    let lengths = rotation.weight_lengths(shape);
    let gradients = weight_gradients(cuda, norm, dweights, lengths)?;
    if norm.scope == QkNormScope::AllHeads {
        check_all_heads::<T>(shape)?;
        rotate(cuda, &operands, rotation.pairs, -1.0)?;
        return all_heads_backward(
            cuda,
            &operands,
            saved.reader(),
            scalars,
            gradients.map(|dweights| (dweights, lengths)),
        );
    }
    let (RotaryOperands { qkv: dqkv, table, weights: [q, k], sizes }, head_size) = (operands, shape.head_size);
    let blocks = Blocks::new::<T>(sizes, cuda.executor.sm_count());
    let weighted = gradients.is_some();
    let partials = partial_sums(cuda, if weighted { blocks.partials(head_size) } else { 0 })?;
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

/// Returns scratch memory for `len` partial sums; null if there are none.
fn partial_sums<T: Float>(cuda: &Cuda<T>, len: usize) -> Result<GlobalMut<f32>> {
    if len == 0 { Ok(GlobalMut::null()) } else { cuda.output("scratch", cuda.scratch(len)?, len) }
}

/// Propagates gradients that have been rotated back through a norm of all heads. `gradients` are those of the weights, with their
/// lengths.
fn all_heads_backward<T: Float>(
    cuda: &mut Cuda<T>,
    operands: &RotaryOperands<T>,
    saved: Global<T>,
    scalars: NormScalars,
    gradients: Option<([GlobalMut<T>; 2], [usize; 2])>,
) -> Result<()> {
    let RotaryOperands { qkv: dqkv, weights: [q, k], sizes, .. } = *operands;
    let blocks = all_heads_norm::backward_grid(sizes, cuda.executor.sm_count());
    let [of_queries, of_keys] = all_heads_norm::partials(sizes, blocks);
    let partials = partial_sums(cuda, if gradients.is_some() { of_queries + of_keys } else { 0 })?;
    let instance = (all_heads_norm::packets::<T>(sizes),);
    let launch = all_heads_norm::all_heads_norm_backward_select(instance, dqkv, partials, saved, q, k, sizes, scalars);
    let launch = launch.context("internal error: no kernel for a norm of all heads; please report it")?;
    cuda.launch(launch, [blocks, 1, 1], shared_bytes(all_heads_norm::shared))?;
    let Some((gradients, lengths)) = gradients else { return Ok(()) };
    for ((gradient, first), length) in gradients.into_iter().zip([0, of_queries]).zip(lengths) {
        let launch = bias::bias_backward_reduce(gradient, partials.reader().skip(first), blocks, length as u32);
        cuda.launch(launch, [column_sum::grid(length), 1, 1], shared_bytes(column_sum::shared))?;
    }
    Ok(())
}
