//! Value embeddings and their gates.

use super::arena::{Arena, Operand, optional};
use super::encoder::{check_tokens, embedding_rows};
use super::norm::weight_at;
use super::stream::sigmoid;
use crate::Result;
use crate::ops::{AttentionShape, GateInputBackward, RowTokens, ValueEmbed, ValueEmbedBackward, ValueGate};
use anyhow::ensure;
use rayon::prelude::*;

/// Returns the operands of the tokens and of a gate.
fn operands(gate: ValueGate, tokens: RowTokens, rows: usize) -> [Operand; 5] {
    let ValueGate { inp, rstd, norm_weight, weight, c } = gate;
    [
        ("inp", inp, rows * c),
        ("rstd", rstd, rows),
        optional("norm_weight", norm_weight, c),
        ("weight", weight, weight.len),
        ("tokens", tokens.tokens.slice(0, (rows - 1) * tokens.stride + 1), (rows - 1) * tokens.stride + 1),
    ]
}

/// The values of a gate, and the tokens.
struct Gates<'a> {
    inp: &'a [f32],
    rstd: &'a [f32],
    norm_weight: &'a [f32],
    weight: &'a [f32],
    tokens: Vec<i32>,
    c: usize,
    /// Channels that the gate reads.
    channels: usize,
}

impl<'a> Gates<'a> {
    fn new(
        [inp, rstd, norm_weight, weight, tokens]: [&'a mut [f32]; 5],
        stride: usize,
        c: usize,
        heads: usize,
    ) -> Self {
        let tokens: &[i32] = bytemuck::cast_slice(tokens);
        let tokens = tokens.iter().step_by(stride).copied().collect();
        Self { inp, rstd, norm_weight, channels: weight.len() / heads, weight, tokens, c }
    }

    /// Returns a channel of the normalized input.
    fn input(&self, row: usize, channel: usize) -> f32 {
        self.inp[row * self.c + channel] * self.rstd[row] * weight_at(self.norm_weight, channel)
    }

    /// Returns the sigmoid of a head's gate.
    fn sigmoid(&self, row: usize, head: usize) -> f32 {
        let weight = &self.weight[head * self.channels..][..self.channels];
        sigmoid(weight.iter().enumerate().map(|(channel, w)| w * self.input(row, channel)).sum())
    }
}

fn check(gate: ValueGate, shape: AttentionShape) -> Result<()> {
    shape.check()?;
    ensure!(
        gate.weight.len.is_multiple_of(shape.kv_heads) && gate.channels(shape) <= gate.c,
        "value embedding: expected a gate of {} heads of at most {} channels, found {} weights",
        shape.kv_heads,
        gate.c,
        gate.weight.len
    );
    Ok(())
}

pub(super) fn forward(arena: &mut Arena, op: ValueEmbed) -> Result<()> {
    let ValueEmbed { qkv, table, tokens, gate, shape } = op;
    check(gate, shape)?;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    let (rows, row, width) = (b * t, shape.packed_heads() * hs, kv_heads * hs);
    let vocab = embedding_rows("table", table, width)?;
    let [inp, rstd, norm_weight, weight, words] = operands(gate, tokens, rows);
    let all = [("qkv", qkv, rows * row), ("table", table, vocab * width), inp, rstd, norm_weight, weight, words];
    let [qkv, table, inp, rstd, norm_weight, weight, words] = arena.split("value_embed", all)?;
    let gates = Gates::new([inp, rstd, norm_weight, weight, words], tokens.stride, gate.c, kv_heads);
    check_tokens(&gates.tokens, vocab)?;
    qkv.par_chunks_mut(row).enumerate().with_min_len(4).for_each(|(i, row)| {
        let embedding = &table[gates.tokens[i] as usize * width..][..width];
        let values = &mut row[(heads + kv_heads) * hs..];
        for (h, (value, embedding)) in values.chunks_mut(hs).zip(embedding.chunks(hs)).enumerate() {
            let gate = ValueGate::LARGEST * gates.sigmoid(i, h);
            value.iter_mut().zip(embedding).for_each(|(v, e)| *v += gate * e);
        }
    });
    Ok(())
}

pub(super) fn backward(arena: &mut Arena, op: &ValueEmbedBackward) -> Result<()> {
    let ValueEmbedBackward { drows, dgates, dweight, dqkv, table, tokens, gate, shape } = *op;
    check(gate, shape)?;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    let (rows, row, width) = (b * t, shape.packed_heads() * hs, kv_heads * hs);
    let vocab = embedding_rows("table", table, width)?;
    let [inp, rstd, norm_weight, weight, words] = operands(gate, tokens, rows);
    let all = [
        ("drows", drows, rows * width),
        ("dgates", dgates, rows * kv_heads),
        optional("dweight", dweight, gate.weight.len),
        ("dqkv", dqkv, rows * row),
        ("table", table, vocab * width),
        inp,
        rstd,
        norm_weight,
        weight,
        words,
    ];
    let [drows, dgates, dweight, dqkv, table, inp, rstd, norm_weight, weight, words] =
        arena.split("value_embed_backward", all)?;
    let gates = Gates::new([inp, rstd, norm_weight, weight, words], tokens.stride, gate.c, kv_heads);
    check_tokens(&gates.tokens, vocab)?;
    let of_rows = drows.par_chunks_mut(width).zip(dgates.par_chunks_mut(kv_heads)).zip(dqkv.par_chunks(row));
    of_rows.enumerate().with_min_len(4).for_each(|(i, ((drow, dgates), dqkv))| {
        let embedding = &table[gates.tokens[i] as usize * width..][..width];
        let dvalues = &dqkv[(heads + kv_heads) * hs..];
        for (h, dgate) in dgates.iter_mut().enumerate() {
            let (head, sigmoid) = (h * hs..(h + 1) * hs, gates.sigmoid(i, h));
            let (dvalue, embedding) = (&dvalues[head.clone()], &embedding[head.clone()]);
            let products = dvalue.iter().zip(embedding).map(|(d, e)| f64::from(*d) * f64::from(*e));
            *dgate = products.sum::<f64>() as f32 * ValueGate::LARGEST * sigmoid * (1.0 - sigmoid);
            let gate = ValueGate::LARGEST * sigmoid;
            drow[head].iter_mut().zip(dvalue).for_each(|(drow, d)| *drow = gate * d);
        }
    });
    let dgates = &*dgates;
    dweight.par_iter_mut().enumerate().for_each(|(i, dweight)| {
        let (h, channel) = (i / gates.channels, i % gates.channels);
        let term = |row: usize| f64::from(dgates[row * kv_heads + h]) * f64::from(gates.input(row, channel));
        *dweight += (0..rows).map(term).sum::<f64>() as f32;
    });
    Ok(())
}

pub(super) fn input_backward(arena: &mut Arena, op: GateInputBackward) -> Result<()> {
    let GateInputBackward { dinp, dgates, weight, heads, c } = op;
    let (rows, channels) = (dinp.len / c, weight.len / heads);
    let operands = [("dinp", dinp, rows * c), ("dgates", dgates, rows * heads), ("weight", weight, heads * channels)];
    let [dinp, dgates, weight] = arena.split("gate_input_backward", operands)?;
    dinp.par_chunks_mut(c).zip(dgates.par_chunks(heads)).with_min_len(64).for_each(|(dinp, dgates)| {
        for (dgate, weight) in dgates.iter().zip(weight.chunks(channels)) {
            dinp.iter_mut().zip(weight).for_each(|(dinp, w)| *dinp += dgate * w);
        }
    });
    Ok(())
}
