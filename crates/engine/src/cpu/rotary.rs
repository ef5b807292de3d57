//! Rotary position embedding of queries and keys, after an optional norm.

use super::arena::{Arena, optional};
use super::norm::{add_row_gradient, reciprocal_rms, weight_at};
use crate::Result;
use crate::ops::{AttentionShape, HeadNorm, RotaryBackward, RotaryForward, RotaryPairs, Rotation};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

/// Returns the tensors of queries and keys.
pub(super) fn split(tensors: Option<[Tensor; 2]>) -> [Option<Tensor>; 2] {
    tensors.map_or([None; 2], |tensors| tensors.map(Some))
}

/// Checks the sizes and returns the rows (B·T) and the heads that are rotated (NH + KV).
fn check(shape: AttentionShape, rotation: &Rotation) -> Result<(usize, usize)> {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    shape.check()?;
    ensure!(head_size.is_multiple_of(2), "rotary: expected an even head size, found {head_size}");
    rotation.check_table(shape)?;
    Ok((b * t, heads + kv_heads))
}

/// Normalizes values in place.
fn normalize(values: &mut [f32], weight: &[f32], HeadNorm { eps, gain, .. }: HeadNorm) {
    let scale = reciprocal_rms(values, eps) * gain;
    for (i, x) in values.iter_mut().enumerate() {
        *x *= scale * weight_at(weight, i);
    }
}

/// Normalizes the queries and keys of a row, if there is a norm, and rotates them by the angles of a position.
pub(super) fn forward_row(
    row: &mut [f32],
    table: &[f32],
    weights: [&[f32]; 2],
    rotation: &Rotation,
    shape: AttentionShape,
) {
    let AttentionShape { heads, kv_heads, head_size: hs, .. } = shape;
    let rotated = &mut row[..(heads + kv_heads) * hs];
    if let Some(norm) = rotation.qk_norm {
        let (queries, keys) = rotated.split_at_mut(heads * hs);
        for ((values, weight), width) in [queries, keys].into_iter().zip(weights).zip(rotation.weight_lengths(shape)) {
            values.chunks_mut(width).for_each(|values| normalize(values, weight, norm));
        }
    }
    rotated.chunks_mut(hs).for_each(|head| rotate(head, table, rotation.pairs, 1.0));
}

/// Rotates a head by the angles of its position, or back if `sign` is -1.
fn rotate(head: &mut [f32], table: &[f32], pairs: RotaryPairs, sign: f32) {
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
    let RotaryForward { qkv, saved, rotation, shape } = op;
    let (rows, rotated) = check(shape, &rotation)?;
    let AttentionShape { t, head_size: hs, .. } = shape;
    let row = shape.packed_heads() * hs;
    let ([q_weight, k_weight], [q_len, k_len]) = (split(rotation.weights()), rotation.weight_lengths(shape));
    let operands = [
        ("qkv", qkv, rows * row),
        optional("saved", saved, rows * rotated * hs),
        ("table", rotation.table.slice(0, t * hs), t * hs),
        optional("q weight", q_weight, q_len),
        optional("k weight", k_weight, k_len),
    ];
    let [qkv, saved, table, q_weight, k_weight] = arena.split("rotary_forward", operands)?;
    let weights = [&*q_weight, &*k_weight];
    let mut saved: Vec<&mut [f32]> = saved.chunks_mut(rotated * hs).collect();
    saved.resize_with(rows, Default::default);
    qkv.par_chunks_mut(row).zip(saved).enumerate().with_min_len(4).for_each(|(i, (row, saved))| {
        saved.copy_from_slice(&row[..saved.len()]);
        forward_row(row, &table[i % t * hs..][..hs], weights, &rotation, shape);
    });
    Ok(())
}

pub(super) fn backward(arena: &mut Arena, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, saved, dweights, rotation, shape } = op;
    let (rows, rotated) = check(shape, &rotation)?;
    let AttentionShape { t, heads, head_size: hs, .. } = shape;
    let row = shape.packed_heads() * hs;
    let ([q_weight, k_weight], [dq_weight, dk_weight]) = (split(rotation.weights()), split(dweights));
    let widths = rotation.weight_lengths(shape);
    let operands = [
        ("dqkv", dqkv, rows * row),
        optional("saved", saved, rows * rotated * hs),
        ("table", rotation.table.slice(0, t * hs), t * hs),
        optional("q weight", q_weight, widths[0]),
        optional("k weight", k_weight, widths[1]),
        optional("dq weight", dq_weight, widths[0]),
        optional("dk weight", dk_weight, widths[1]),
    ];
    let [dqkv, saved, table, q_weight, k_weight, dq_weight, dk_weight] = arena.split("rotary_backward", operands)?;
    let (saved, weights) = (&*saved, [&*q_weight, &*k_weight]);
    dqkv.par_chunks_mut(row).enumerate().with_min_len(4).for_each(|(i, row)| {
        for head in row[..rotated * hs].chunks_mut(hs) {
            rotate(head, &table[i % t * hs..][..hs], rotation.pairs, -1.0);
        }
    });
    let Some(HeadNorm { eps, gain, .. }) = rotation.qk_norm else { return Ok(()) };

    let parts = [0..heads * hs, heads * hs..rotated * hs];
    for ((dweight, part), width) in [dq_weight, dk_weight].into_iter().zip(&parts).zip(widths) {
        dweight.par_iter_mut().enumerate().for_each(|(channel, dweight)| {
            let mut sum = 0.0f64;
            for (row, inp) in dqkv.chunks(row).zip(saved.chunks(rotated * hs)) {
                for (dout, inp) in row[part.clone()].chunks(width).zip(inp[part.clone()].chunks(width)) {
                    let n = inp[channel] * reciprocal_rms(inp, eps) * gain;
                    sum += f64::from(dout[channel]) * f64::from(n);
                }
            }
            *dweight += sum as f32;
        });
    }
    let of_rows = dqkv.par_chunks_mut(row).zip(saved.par_chunks(rotated * hs)).with_min_len(4);
    of_rows.for_each_init(Vec::new, |dout, (row, inp)| {
        for ((part, weight), width) in parts.iter().zip(weights).zip(widths) {
            let values = row[part.clone()].chunks_mut(width).zip(inp[part.clone()].chunks(width));
            for (values, inp) in values {
                dout.clear();
                dout.extend(values.iter().map(|d| d * gain));
                values.fill(0.0);
                add_row_gradient(values, dout, inp, weight, (None, reciprocal_rms(inp, eps)));
            }
        }
    });
    Ok(())
}
