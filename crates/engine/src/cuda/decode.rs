//! Text generation with a KV cache.

use super::{Cuda, Float, matmul as linear, norm, rotary, shared_bytes};
use crate::ops::{
    Activation, AttentionShape, CacheFill, CacheRead, DecodeAttention, DecodeEmbed, DecodeMatmul, Epilogue, HeadNorm,
    MatmulForward, MatmulShape, QkNormScope, RotaryPairs, SampleTokens, Slot, decode_splits,
};
use crate::tensor::Tensor;
use crate::{Result, StepKind};
use anyhow::{Context, bail, ensure};
use cuda_std::GlobalMut;
use gpu::decode::launch::{self, AttentionOperands, Fp8Weight, InputNorm, MatvecOperands, MatvecSize};
use gpu::decode::step::launch::EmbedOperands;
use gpu::decode::{attention as kernels, embed as embeddings, sample as sampling};

/// Returns the operands of an embedding.
pub(super) fn embed_operands<T: Float>(cuda: &Cuda<T>, op: &DecodeEmbed) -> Result<EmbedOperands<T>> {
    let DecodeEmbed { out, slots, wte, wpe, c } = *op;
    ensure!(c.is_multiple_of(T::PACKET), "decode_embed: expected a multiple of {} channels, found {c}", T::PACKET);
    Ok(EmbedOperands {
        out: cuda.output("out", out, slots.len / Slot::WORDS * c)?,
        wte: cuda.input("wte", wte, wte.len)?,
        wpe: cuda.optional_input("wpe", wpe, wpe.map_or(0, |wpe| wpe.len))?,
        channels: c,
    })
}

pub(super) fn embed<T: Float>(cuda: &mut Cuda<T>, op: DecodeEmbed) -> Result<()> {
    let EmbedOperands { out, wte, wpe, channels } = embed_operands(cuda, &op)?;
    let b = op.slots.len / Slot::WORDS;
    let slots = cuda.input("slots", op.slots, b * Slot::WORDS)?;
    let launch = embeddings::decode_embed::<T>(out, slots, wte, wpe, channels as u32);
    cuda.launch(launch, embeddings::grid::<T>(channels, b), 0)
}

/// The fewest rows for which a GEMM may be faster than [`launch::matvec`].
pub(super) const FEWEST_ROWS_OF_GEMM: usize = 9;

/// Returns the operands of a linear layer of few rows that reads `inp` (rows, C), before its norm.
fn matvec_operands<T: Float>(
    cuda: &Cuda<T>,
    op: &DecodeMatmul,
    inp: Tensor,
    norm: InputNorm<T>,
) -> Result<(MatvecOperands<T>, MatvecSize)> {
    let MatmulForward { out, weight, bias, epilogue, shape: MatmulShape { rows, c, oc }, .. } = op.matmul;
    let (residual, activation) = match epilogue {
        Epilogue::None => (None, None),
        Epilogue::Residual(residual) => (Some(residual), None),
        Epilogue::Activation(activation, _) => (None, Some(activation)),
    };
    let inputs = activation.map_or(1, Activation::inputs);
    let fp8 = |scale| -> Result<_> {
        let weight = cuda.fp8("weight in FP8", weight, oc * c)?.reader();
        Ok(Fp8Weight { weight, scale: cuda.input("scale of the weight", scale, 1)? })
    };
    let operands = MatvecOperands {
        out: cuda.output("out", out, rows * (oc / inputs))?,
        inp: cuda.input("inp", inp, rows * c)?,
        weight: cuda.optional_input("weight", Some(weight).filter(|_| op.weight_scale.is_none()), oc * c)?,
        fp8: op.weight_scale.map(fp8).transpose()?,
        bias: cuda.optional_input("bias", bias, oc)?,
        residual: cuda.optional_input("residual", residual, rows * oc)?,
        norm,
    };
    let sm_count = cuda.executor.sm_count();
    Ok((operands, MatvecSize { rows, channels: c, outputs: oc, activation, sm_count }))
}

/// Returns the operands of a linear layer of few rows and the norm before it.
pub(super) fn normed_operands<T: Float>(cuda: &Cuda<T>, op: &DecodeMatmul) -> Result<(MatvecOperands<T>, MatvecSize)> {
    let c = op.matmul.shape.c;
    let Some(norm) = op.norm else { return matvec_operands(cuda, op, op.matmul.inp, InputNorm::None) };
    let weight = cuda.optional_input("norm weight", norm.weight, c)?;
    let fused = match norm.mean {
        Some(_) => InputNorm::LayerNorm(weight, cuda.optional_input("norm bias", norm.bias, c)?),
        None => InputNorm::RmsNorm(weight, norm.eps),
    };
    matvec_operands(cuda, op, norm.inp, fused)
}

/// Reports whether a GEMM may be faster than [`launch::matvec`] for a linear layer that both support.
pub(super) fn may_be_gemm(op: &DecodeMatmul) -> bool {
    (FEWEST_ROWS_OF_GEMM..=launch::MAX_ROWS).contains(&op.matmul.shape.rows) && op.weight_scale.is_none()
}

pub(super) fn matmul<T: Float>(cuda: &mut Cuda<T>, op: &DecodeMatmul) -> Result<()> {
    let rows = op.matmul.shape.rows;
    // A tuning pass collects the GEMMs of both kinds of steps.
    let is_chosen = cuda.gemms.is_collecting() || cuda.steps.kind == StepKind::Gemms;
    let is_gemm = may_be_gemm(op) && is_chosen || rows > launch::MAX_ROWS && op.weight_scale.is_none();
    let (operands, size) = normed_operands(cuda, op)?;
    if let Some(kernel) = launch::matvec(operands, size).filter(|_| !is_gemm) {
        return cuda.launch_kernel(&kernel);
    }
    if let Some(of_input) = &op.norm {
        norm::forward(cuda, of_input)?;
    }
    if is_gemm {
        return linear::forward(cuda, &op.matmul);
    }
    // No GEMM reads a weight in FP8 beside an input in bf16.
    for first in (0..rows).step_by(launch::MAX_ROWS) {
        let part = rows_of(&op.matmul, first, launch::MAX_ROWS.min(rows - first));
        let part = DecodeMatmul { norm: None, matmul: part, ..*op };
        let (operands, size) = matvec_operands(cuda, &part, part.matmul.inp, InputNorm::None)?;
        match launch::matvec(operands, size) {
            Some(kernel) => cuda.launch_kernel(&kernel)?,
            None if op.weight_scale.is_none() => return linear::forward(cuda, &op.matmul),
            None => {
                let MatmulShape { c, oc, .. } = op.matmul.shape;
                bail!(
                    "decode_matmul: expected bf16 and a multiple of 16 channels for a weight in FP8, found {oc} x {c}"
                )
            }
        }
    }
    Ok(())
}

/// Returns `rows` rows of a linear layer, from row `first` on.
fn rows_of(op: &MatmulForward, first: usize, rows: usize) -> MatmulForward {
    let MatmulShape { c, oc, .. } = op.shape;
    let part = |tensor: Tensor, columns: usize| tensor.slice(first * columns, rows * columns);
    let (epilogue, inputs) = match op.epilogue {
        Epilogue::Residual(residual) => (Epilogue::Residual(part(residual, oc)), 1),
        Epilogue::Activation(activation, _) => (op.epilogue, activation.inputs()),
        Epilogue::None => (Epilogue::None, 1),
    };
    let shape = MatmulShape { rows, ..op.shape };
    MatmulForward { out: part(op.out, oc / inputs), inp: part(op.inp, c), epilogue, shape, ..*op }
}

/// Returns the norm of the queries and keys of all heads, which the attention kernels do not compute.
pub(super) fn all_heads_norm(op: &DecodeAttention) -> Option<HeadNorm> {
    op.rotation?.qk_norm.filter(|norm| norm.scope == QkNormScope::AllHeads)
}

/// Returns the operands of attention, after [`all_heads_norm`].
pub(super) fn attention_operands<T: Float>(
    cuda: &Cuda<T>,
    op: &DecodeAttention,
) -> Result<(AttentionOperands<T>, kernels::Sizes)> {
    let DecodeAttention { out, qkv, keys, values, slots, partials, rotation, shape } = *op;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    shape.check()?;
    let (cache, splits) = (b * kv_heads * t * hs, decode_splits(b, kv_heads, t));
    // A few blocks for each SM hide the latency of memory; more only add partial results.
    let enough = (3 * cuda.executor.sm_count()).div_ceil(b * kv_heads);
    let splits = splits.min(enough);
    let (table, norm) = (rotation.map(|rotation| rotation.table), rotation.and_then(|rotation| rotation.qk_norm));
    let norm = norm.filter(|norm| norm.scope == QkNormScope::Head);
    let [q_weight, k_weight] = cuda.head_weights(norm.and_then(|norm| norm.weights), [hs; 2])?;
    let sizes = kernels::Sizes {
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_size: hs as u32,
        capacity: t as u32,
        splits: splits as u32,
        rotation: match rotation.map(|rotation| rotation.pairs) {
            None => kernels::NO_ROTATION,
            Some(RotaryPairs::HalfSplit) => kernels::HALF_SPLIT,
            Some(RotaryPairs::Interleaved) => kernels::INTERLEAVED,
        },
        qk_norm: u32::from(norm.is_some()),
        eps: norm.map_or(0.0, |norm| norm.eps),
        gain: norm.map_or(1.0, |norm| norm.gain),
    };
    let partials = match splits {
        0 | 1 => GlobalMut::null(),
        _ => cuda.output("partials", partials, b * heads * splits * (hs + 2))?,
    };
    let operands = AttentionOperands {
        out: cuda.output("out", out, b * heads * hs)?,
        partials,
        keys: cuda.output("keys", keys, cache)?,
        values: cuda.output("values", values, cache)?,
        qkv: cuda.input("qkv", qkv, b * shape.packed_heads() * hs)?,
        slots: cuda.input("slots", slots, b * Slot::WORDS)?,
        table: cuda.optional_input("table", table, table.map_or(0, |table| table.len))?,
        q_weight,
        k_weight,
    };
    Ok((operands, sizes))
}

pub(super) fn attention<T: Float>(cuda: &mut Cuda<T>, op: &DecodeAttention) -> Result<()> {
    if let Some(norm) = all_heads_norm(op) {
        // A slot has one new token.
        rotary::normalize_all_heads(cuda, op.qkv, GlobalMut::null(), norm, AttentionShape { t: 1, ..op.shape })?;
    }
    let (operands, sizes) = attention_operands(cuda, op)?;
    let kernels = launch::attention(operands, sizes, op.shape.b).with_context(|| {
        let found = op.shape.head_size;
        format!("decode_attention: expected a head size that is a multiple of 16 up to 128, found {found}")
    })?;
    cuda.launch_all(&kernels)
}

pub(super) fn cache_fill<T: Float>(cuda: &mut Cuda<T>, op: CacheFill) -> Result<()> {
    let CacheFill { keys, values, qkv, shape, first, capacity } = op;
    let sizes = cache_sizes::<T>(shape, first, capacity)?;
    let len = shape.kv_heads * capacity * shape.head_size;
    let (keys, values) = (cuda.output("keys", keys, len)?, cuda.output("values", values, len)?);
    let qkv = cuda.input("qkv", qkv, shape.t * shape.packed_heads() * shape.head_size)?;
    cuda.launch(kernels::cache_fill::<T>(keys, values, qkv, sizes), [sizes.fill_grid::<T>(), 1, 1], 0)
}

pub(super) fn cache_read<T: Float>(cuda: &mut Cuda<T>, op: CacheRead) -> Result<()> {
    let CacheRead { qkv, keys, values, shape, capacity } = op;
    let sizes = cache_sizes::<T>(shape, 0, capacity)?;
    let len = shape.kv_heads * capacity * shape.head_size;
    let (keys, values) = (cuda.input("keys", keys, len)?, cuda.input("values", values, len)?);
    let qkv = cuda.output("qkv", qkv, shape.t * shape.packed_heads() * shape.head_size)?;
    cuda.launch(kernels::cache_read::<T>(qkv, keys, values, sizes), [sizes.read_grid::<T>(), 1, 1], 0)
}

/// Returns the scalars of a copy between a cache and the rows of a forward pass.
fn cache_sizes<T: Float>(shape: AttentionShape, first: usize, capacity: usize) -> Result<kernels::CacheSizes> {
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    shape.check()?;
    ensure!(
        b == 1 && capacity > 0,
        "cache: expected one sequence and a position of the cache, found {b} and {capacity}"
    );
    ensure!(
        hs.is_multiple_of(T::PACKET),
        "cache: expected a head size that is a multiple of {}, found {hs}",
        T::PACKET
    );
    let [tokens, first, heads, kv_heads, head_size, capacity] =
        [t, first, heads, kv_heads, hs, capacity].map(|size| size as u32);
    Ok(kernels::CacheSizes { tokens, first, heads, kv_heads, head_size, capacity })
}

/// The groups of tokens from which on a slot has another block to choose its next token. A block has 32 warps.
const GROUPS_PER_BLOCK: usize = 8;

pub(super) fn sample<T: Float>(cuda: &mut Cuda<T>, op: SampleTokens) -> Result<()> {
    let SampleTokens { sampled, slots, seen, scratch, exchange, logits, v, vp, capacity, softcap } = op;
    let (b, groups) = (sampled.len, sampling::groups(vp));
    ensure!(
        0 < v && v <= vp && vp.is_multiple_of(4) && vp <= 1 << 24,
        "sample: expected a vocabulary of at most {vp} tokens, found {v}"
    );
    let expected = SampleTokens::exchange_len(b, vp);
    ensure!(exchange.len == expected, "exchange: expected {expected} words, found {}", exchange.len);
    let sizes = sampling::Sizes {
        vocab: v as u32,
        padded_vocab: vp as u32,
        capacity: capacity as u32,
        softcap: softcap.unwrap_or(0.0),
    };
    let counters = 4 * groups * b;
    let launch = sampling::sample_tokens::<T>(
        cuda.output("sampled", sampled, b)?,
        cuda.output("slots", slots, b * Slot::WORDS)?,
        cuda.output("seen", seen, b * vp)?,
        cuda.output("scratch", scratch, b * vp)?,
        GlobalMut::new(cuda.arena.bytes_of("exchange", exchange)?.cast()),
        GlobalMut::new(cuda.arena.bytes_of("exchange", exchange.slice(counters, b))?.cast()),
        cuda.input("logits", logits, b * vp)?,
        sizes,
    );
    // Blocks of a slot wait for each other.
    let together = if cuda.executor.runs_blocks_together() { cuda.executor.sm_count() / b } else { 1 };
    let blocks = together.clamp(1, groups.div_ceil(GROUPS_PER_BLOCK));
    cuda.launch(launch, [blocks as u32, b as u32, 1], shared_bytes(sampling::shared))
}
