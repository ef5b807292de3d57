//! Rotary position embedding of queries and keys, after an optional norm of each head.

use super::arena::{ABSENT, Arena};
use super::rmsnorm::{add_row_gradient, reciprocal_rms, weight_at};
use crate::Result;
use crate::ops::{AttentionShape, QkNorm, RotaryBackward, RotaryForward, RotaryPairs, RotaryShape};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

/// The operands of a [`QkNorm`], absent ones empty.
struct NormOperands {
    saved: Tensor,
    weights: [Tensor; 2],
}

impl NormOperands {
    fn of(norm: Option<QkNorm>) -> Self {
        let weights = norm.and_then(|norm| norm.weights).unwrap_or([ABSENT; 2]);
        Self { saved: norm.map_or(ABSENT, |norm| norm.saved), weights }
    }
}

/// Checks the sizes and returns the rows (B·T) and the heads that are rotated (NH + KV).
fn check(shape: RotaryShape, table: Tensor) -> Result<(usize, usize)> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape.attention;
    shape.attention.check()?;
    ensure!(head_size.is_multiple_of(2), "rotary: expected an even head size, found {head_size}");
    ensure!(
        table.len >= t * head_size,
        "rotary: expected a table of at least {t} positions, found {}; use a shorter sequence",
        table.len / head_size.max(1)
    );
    Ok((b * t, heads + kv_heads))
}

/// Rotates a head by the angles of its position, or back if `sign` is -1.
pub(super) fn rotate(head: &mut [f32], table: &[f32], pairs: RotaryPairs, sign: f32) {
    let half = head.len() / 2;
    for (i, angle) in table.chunks_exact(2).enumerate() {
        let (a, b) = match pairs {
            RotaryPairs::HalfSplit => (i, i + half),
            RotaryPairs::Interleaved => (2 * i, 2 * i + 1),
        };
        let (cos, sin) = (angle[0], sign * angle[1]);
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

pub(super) fn forward(arena: &mut Arena, op: RotaryForward) -> Result<()> {
    let RotaryForward { qkv, table, qk_norm, shape } = op;
    let (rows, rotated) = check(shape, table)?;
    let AttentionShape { t, heads, head_size: hs, .. } = shape.attention;
    let row = shape.attention.packed_heads() * hs;
    let norm = NormOperands::of(qk_norm);
    let saved_len = if qk_norm.is_some() { rows * rotated * hs } else { 0 };
    let operands = [
        ("qkv", qkv, rows * row),
        ("saved", norm.saved, saved_len),
        ("table", table.slice(0, t * hs), t * hs),
        ("q weight", norm.weights[0], norm.weights[0].len.min(hs)),
        ("k weight", norm.weights[1], norm.weights[1].len.min(hs)),
    ];
    let [qkv, saved, table, q_weight, k_weight] = arena.split("rotary_forward", operands)?;
    let mut saved: Vec<&mut [f32]> = saved.chunks_mut(rotated * hs).collect();
    saved.resize_with(rows, Default::default);
    qkv.par_chunks_mut(row).zip(saved).enumerate().with_min_len(4).for_each(|(i, (row, saved))| {
        let table = &table[i % t * hs..][..hs];
        for (h, head) in row[..rotated * hs].chunks_mut(hs).enumerate() {
            if let Some(QkNorm { eps, gain, .. }) = qk_norm {
                saved[h * hs..][..hs].copy_from_slice(head);
                let weight = if h < heads { &*q_weight } else { &*k_weight };
                let scale = reciprocal_rms(head, eps) * gain;
                for (i, x) in head.iter_mut().enumerate() {
                    *x *= scale * weight_at(weight, i);
                }
            }
            rotate(head, table, shape.pairs, 1.0);
        }
    });
    Ok(())
}

pub(super) fn backward(arena: &mut Arena, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, table, qk_norm, dweights, shape } = op;
    let (rows, rotated) = check(shape, table)?;
    let AttentionShape { t, heads, head_size: hs, .. } = shape.attention;
    let row = shape.attention.packed_heads() * hs;
    let norm = NormOperands::of(qk_norm);
    let saved_len = if qk_norm.is_some() { rows * rotated * hs } else { 0 };
    let dweights = dweights.unwrap_or([ABSENT; 2]);
    let operands = [
        ("dqkv", dqkv, rows * row),
        ("saved", norm.saved, saved_len),
        ("table", table.slice(0, t * hs), t * hs),
        ("q weight", norm.weights[0], norm.weights[0].len.min(hs)),
        ("k weight", norm.weights[1], norm.weights[1].len.min(hs)),
        ("dq weight", dweights[0], norm.weights[0].len.min(hs)),
        ("dk weight", dweights[1], norm.weights[1].len.min(hs)),
    ];
    let [dqkv, saved, table, q_weight, k_weight, dq_weight, dk_weight] = arena.split("rotary_backward", operands)?;
    let (saved, weights) = (&*saved, [&*q_weight, &*k_weight]);
    dqkv.par_chunks_mut(row).enumerate().with_min_len(4).for_each(|(i, row)| {
        for head in row[..rotated * hs].chunks_mut(hs) {
            rotate(head, &table[i % t * hs..][..hs], shape.pairs, -1.0);
        }
    });
    let Some(QkNorm { eps, gain, .. }) = qk_norm else { return Ok(()) };

    let saved_head = |i: usize, h: usize| &saved[(i * rotated + h) * hs..][..hs];
    for (dweight, range) in [(dq_weight, 0..heads), (dk_weight, heads..rotated)] {
        dweight.par_iter_mut().enumerate().for_each(|(channel, dweight)| {
            let mut sum = 0.0f64;
            for (i, row) in dqkv.chunks(row).enumerate() {
                for h in range.clone() {
                    let head = saved_head(i, h);
                    let n = head[channel] * reciprocal_rms(head, eps) * gain;
                    sum += f64::from(row[h * hs + channel]) * f64::from(n);
                }
            }
            *dweight += sum as f32;
        });
    }
    dqkv.par_chunks_mut(row).enumerate().with_min_len(4).for_each_init(Vec::new, |dout, (i, row)| {
        for (h, head) in row[..rotated * hs].chunks_mut(hs).enumerate() {
            dout.clear();
            dout.extend(head.iter().map(|d| d * gain));
            head.fill(0.0);
            let inp = saved_head(i, h);
            add_row_gradient(head, dout, inp, weights[usize::from(h >= heads)], reciprocal_rms(inp, eps));
        }
    });
    Ok(())
}
