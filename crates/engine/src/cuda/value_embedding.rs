//! Value embeddings and their gates.

use super::{Cuda, Float, gate};
use crate::ops::{AttentionShape, GateInputBackward, RowTokens, ValueEmbed, ValueEmbedBackward, ValueGate};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::ensure;
use cuda_std::Global;
use gpu::value_embedding::{self, Sizes};
use gpu::{gate as gate_kernels, rotary};

/// Returns the f32 elements of scratch memory.
pub(super) fn scratch(workload: &Workload, sm_count: usize) -> usize {
    gate::scratch(workload.attention.kv_heads * workload.channels, sm_count)
}

/// The operands that both passes read.
struct Operands<T> {
    table: Global<T>,
    tokens: Global<i32>,
    input: gate::Input<T>,
    weight: Global<T>,
    sizes: Sizes,
}

/// Checks the sizes, and returns the operands.
fn operands<T: Float>(
    cuda: &Cuda<T>,
    table: Tensor,
    tokens: RowTokens,
    gate: ValueGate,
    shape: AttentionShape,
) -> Result<Operands<T>> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    let ValueGate { inp, rstd, norm_weight, weight, c } = gate;
    let (rows, width) = (b * t, kv_heads * head_size);
    shape.check()?;
    ensure!(
        weight.len.is_multiple_of(kv_heads) && gate.channels(shape) <= c,
        "value embedding: expected a gate of {kv_heads} heads of at most {c} channels, found {} weights",
        weight.len
    );
    ensure!(
        rotary::supports(head_size) && kv_heads <= value_embedding::MAX_HEADS,
        "value embedding: expected a head size that is a multiple of 16 up to 256 and at most {} key-value heads, found \
         {head_size} and {kv_heads}; use --device cpu",
        value_embedding::MAX_HEADS
    );
    ensure!(
        table.len.is_multiple_of(width),
        "value embedding: expected a table with rows of {width} elements, found {} elements",
        table.len
    );
    let sizes = [rows, heads, kv_heads, head_size, c, gate.channels(shape), tokens.stride].map(|size| size as u32);
    let [rows_32, heads, kv_heads, head_size, channels, gate_channels, token_stride] = sizes;
    let largest = ValueGate::LARGEST;
    let rows_of = Sizes { rows: rows_32, heads, kv_heads, head_size, channels, gate_channels, token_stride, largest };
    Ok(Operands {
        table: cuda.input("table", table, table.len)?,
        tokens: cuda.input("tokens", tokens.tokens, (rows - 1) * tokens.stride + 1)?,
        input: gate::Input {
            inp: cuda.input("inp", inp, rows * c)?,
            rstd: cuda.input("rstd", rstd, rows)?,
            norm_weight: cuda.optional_input("norm_weight", norm_weight, c)?,
        },
        weight: cuda.input("weight", weight, weight.len)?,
        sizes: rows_of,
    })
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: ValueEmbed) -> Result<()> {
    let ValueEmbed { qkv, table, tokens, gate, shape } = op;
    let Operands { table, tokens, input, weight, sizes } = operands(cuda, table, tokens, gate, shape)?;
    let rows = shape.b * shape.t;
    let qkv = cuda.output("qkv", qkv, rows * shape.packed_heads() * shape.head_size)?;
    let gate::Input { inp, rstd, norm_weight } = input;
    let launch = value_embedding::value_embed::<T>(qkv, table, tokens, inp, rstd, norm_weight, weight, sizes);
    cuda.launch(launch, [value_embedding::grid(rows), 1, 1], 0)
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: &ValueEmbedBackward) -> Result<()> {
    let ValueEmbedBackward { drows, dgates, dweight, dqkv, table, tokens, gate, shape } = *op;
    let Operands { table, tokens, input, weight, sizes } = operands(cuda, table, tokens, gate, shape)?;
    let (rows, kv_heads) = (shape.b * shape.t, shape.kv_heads);
    let dgates = cuda.output("dgates", dgates, rows * kv_heads)?;
    let gate::Input { inp, rstd, norm_weight } = input;
    let launch = value_embedding::value_embed_backward::<T>(
        cuda.output("drows", drows, rows * kv_heads * shape.head_size)?,
        dgates,
        cuda.input("dqkv", dqkv, rows * shape.packed_heads() * shape.head_size)?,
        table,
        tokens,
        inp,
        rstd,
        norm_weight,
        weight,
        sizes,
    );
    cuda.launch(launch, [value_embedding::grid(rows), 1, 1], 0)?;
    let Some(dweight) = dweight else { return Ok(()) };
    let gradient = gate::WeightGradient { rows, heads: kv_heads, channels: gate.c, weights: gate.weight.len };
    let scratch = cuda.scratch(gradient.partials(cuda))?;
    gradient.add(cuda, dweight, dgates.reader(), input, scratch)
}

pub(super) fn input_backward<T: Float>(cuda: &mut Cuda<T>, op: GateInputBackward) -> Result<()> {
    let GateInputBackward { dinp, dgates, weight, heads, c } = op;
    let rows = dinp.len / c;
    let sizes = gate::WeightGradient { rows, heads, channels: c, weights: weight.len }.sizes();
    ensure!(
        weight.len.is_multiple_of(heads) && sizes.gate_channels <= sizes.channels,
        "gate: expected {heads} heads of at most {c} channels, found {} weights",
        weight.len
    );
    let launch = gate_kernels::gate_input_backward::<T>(
        cuda.output("dinp", dinp, rows * c)?,
        cuda.input("dgates", dgates, rows * heads)?,
        cuda.input("weight", weight, weight.len)?,
        sizes,
    );
    cuda.launch(launch, [gate_kernels::input_grid(rows, sizes.gate_channels as usize), 1, 1], 0)
}
