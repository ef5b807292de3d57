//! Rotary position embedding of queries and keys, after an optional norm of each head.

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

/// Normalizes a head in place, if there is a norm.
pub(super) fn normalize(head: &mut [f32], weight: &[f32], norm: Option<HeadNorm>) {
    let Some(HeadNorm { eps, gain, .. }) = norm else { return };
    let scale = reciprocal_rms(head, eps) * gain;
    for (i, x) in head.iter_mut().enumerate() {
        *x *= scale * weight_at(weight, i);
    }
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
    let RotaryForward { qkv, saved, rotation, shape } = op;
    let (rows, rotated) = check(shape, &rotation)?;
    let AttentionShape { t, heads, head_size: hs, .. } = shape;
    let row = shape.packed_heads() * hs;
    let [q_weight, k_weight] = split(rotation.weights());
    let operands = [
        ("qkv", qkv, rows * row),
        optional("saved", saved, rows * rotated * hs),
        ("table", rotation.table.slice(0, t * hs), t * hs),
        optional("q weight", q_weight, hs),
        optional("k weight", k_weight, hs),
    ];
    let [qkv, saved, table, q_weight, k_weight] = arena.split("rotary_forward", operands)?;
    let mut saved: Vec<&mut [f32]> = saved.chunks_mut(rotated * hs).collect();
    saved.resize_with(rows, Default::default);
    qkv.par_chunks_mut(row).zip(saved).enumerate().with_min_len(4).for_each(|(i, (row, saved))| {
        let table = &table[i % t * hs..][..hs];
        for (h, head) in row[..rotated * hs].chunks_mut(hs).enumerate() {
            if let Some(saved) = saved.get_mut(h * hs..(h + 1) * hs) {
                saved.copy_from_slice(head);
            }
            normalize(head, if h < heads { q_weight } else { k_weight }, rotation.qk_norm);
            rotate(head, table, rotation.pairs, 1.0);
        }
    });
    Ok(())
}

pub(super) fn backward(arena: &mut Arena, op: RotaryBackward) -> Result<()> {
    let RotaryBackward { dqkv, saved, dweights, rotation, shape } = op;
    let (rows, rotated) = check(shape, &rotation)?;
    let AttentionShape { t, heads, head_size: hs, .. } = shape;
    let row = shape.packed_heads() * hs;
    let ([q_weight, k_weight], [dq_weight, dk_weight]) = (split(rotation.weights()), split(dweights));
    let operands = [
        ("dqkv", dqkv, rows * row),
        optional("saved", saved, rows * rotated * hs),
        ("table", rotation.table.slice(0, t * hs), t * hs),
        optional("q weight", q_weight, hs),
        optional("k weight", k_weight, hs),
        optional("dq weight", dq_weight, hs),
        optional("dk weight", dk_weight, hs),
    ];
    let [dqkv, saved, table, q_weight, k_weight, dq_weight, dk_weight] = arena.split("rotary_backward", operands)?;
    let (saved, weights) = (&*saved, [&*q_weight, &*k_weight]);
    dqkv.par_chunks_mut(row).enumerate().with_min_len(4).for_each(|(i, row)| {
        for head in row[..rotated * hs].chunks_mut(hs) {
            rotate(head, &table[i % t * hs..][..hs], rotation.pairs, -1.0);
        }
    });
    let Some(HeadNorm { eps, gain, .. }) = rotation.qk_norm else { return Ok(()) };

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
            add_row_gradient(head, dout, inp, weights[usize::from(h >= heads)], (None, reciprocal_rms(inp, eps)));
        }
    });
    Ok(())
}
