//! Causal attention, one tile of queries at a time: only the scores of one tile are stored, never (T, T).

use super::arena::{Arena, Operand};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use crate::Result;
use crate::ops::{AttentionBackward, AttentionForward, AttentionShape};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// Queries of a tile.
const TILE: usize = 64;

/// Views of each head's queries, keys and values in qkv (B, T, 3, NH, HS).
struct Projections<'a> {
    qkv: &'a [f32],
    shape: AttentionShape,
}

impl<'a> Projections<'a> {
    /// Returns (rows, HS) of part 0 (queries), 1 (keys) or 2 (values) of sequence and head `bh`, from row `start`.
    fn rows(&self, part: usize, bh: usize, start: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { t, heads, head_size, .. } = self.shape;
        let c = heads * head_size;
        let (b, head) = (bh / heads, bh % heads);
        let at = (b * t + start) * 3 * c + part * c + head * head_size;
        Matrix::strided(&self.qkv[at..], rows, head_size, 3 * c)
    }
}

/// Returns (rows, HS) of one head in a (B, T, NH, HS) tensor, from row `start`.
fn head_rows(values: &[f32], shape: AttentionShape, bh: usize, start: usize, rows: usize) -> Matrix<'_> {
    let AttentionShape { t, heads, head_size, .. } = shape;
    let at = ((bh / heads * t) + start) * heads * head_size + bh % heads * head_size;
    Matrix::strided(&values[at..], rows, head_size, heads * head_size)
}

fn scale(shape: AttentionShape) -> f32 {
    1.0 / (shape.head_size as f32).sqrt()
}

/// `scratch` is (B, NH, T, HS): the rows of a head are contiguous, so that a task can own them.
pub(super) fn forward(arena: &mut Arena, scratch: Tensor, op: AttentionForward) -> Result<()> {
    let AttentionForward { out, lse, qkv, shape } = op;
    let AttentionShape { b, t, heads, head_size } = shape;
    let n = b * t * heads * head_size;
    if n == 0 {
        return Ok(());
    }
    let operands: [Operand; 4] =
        [("scratch", scratch, n), ("out", out, n), ("lse", lse, b * heads * t), ("qkv", qkv, 3 * n)];
    let [scratch, out, lse, qkv] = arena.split("attention_forward", operands)?;
    let projections = Projections { qkv, shape };

    // The last tile of a head may be short, so tiles are cut head by head.
    let by_head = scratch.chunks_mut(t * head_size).zip(lse.chunks_mut(t)).enumerate();
    let tiles: Vec<_> = by_head
        .flat_map(|(bh, (out, lse))| {
            let tiles = out.chunks_mut(TILE * head_size).zip(lse.chunks_mut(TILE)).enumerate();
            tiles.map(move |(i, (out, lse))| (bh, i * TILE, out, lse))
        })
        .collect();
    // Late tiles have the most keys.
    tiles.into_par_iter().rev().with_max_len(1).for_each_init(Vec::new, |scores, (bh, start, out, lse)| {
        let (rows, keys) = (lse.len(), start + lse.len());
        scores.resize(rows * keys, 0.0);
        let key_rows = projections.rows(1, bh, 0, keys).transposed();
        let queries = projections.rows(0, bh, start, rows);
        multiply(scores, Into::Overwrite, scale(shape), queries, key_rows, Parallelism::None);
        for (i, (scores, lse)) in scores.chunks_mut(keys).zip(lse).enumerate() {
            let (seen, future) = scores.split_at_mut(start + i + 1);
            let max = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0f64;
            for score in &mut *seen {
                *score = (*score - max).exp();
                sum += f64::from(*score);
            }
            let normaliser = (1.0 / sum) as f32;
            for score in seen {
                *score *= normaliser;
            }
            future.fill(0.0);
            *lse = (f64::from(max) + sum.ln()) as f32;
        }
        let weights = Matrix::row_major(scores, rows, keys);
        multiply(out, Into::Overwrite, 1.0, weights, projections.rows(2, bh, 0, keys), Parallelism::None);
    });

    let scratch = &*scratch;
    out.par_chunks_mut(heads * head_size).enumerate().with_min_len(16).for_each(|(row, out)| {
        for (head, out) in out.chunks_mut(head_size).enumerate() {
            let at = ((row / t * heads + head) * t + row % t) * head_size;
            out.copy_from_slice(&scratch[at..][..head_size]);
        }
    });
    Ok(())
}

/// Tiles of one task.
#[derive(Default)]
struct Tiles {
    weights: Vec<f32>,
    dscores: Vec<f32>,
}

/// `scratch` is (3, B, NH, T, HS): dq, dk and dv, with the rows of a head contiguous, so that a task can own them.
pub(super) fn backward(arena: &mut Arena, scratch: Tensor, op: AttentionBackward) -> Result<()> {
    let AttentionBackward { dqkv, dout, qkv, out, lse, shape } = op;
    let AttentionShape { b, t, heads, head_size } = shape;
    let c = heads * head_size;
    let n = b * t * c;
    if n == 0 {
        return Ok(());
    }
    let operands: [Operand; 6] = [
        ("scratch", scratch, 3 * n),
        ("dqkv", dqkv, 3 * n),
        ("dout", dout, n),
        ("qkv", qkv, 3 * n),
        ("out", out, n),
        ("lse", lse, b * heads * t),
    ];
    let [scratch, dqkv, dout, qkv, out, lse] = arena.split("attention_backward", operands)?;
    let (dout, out) = (&*dout, &*out);
    let projections = Projections { qkv, shape };

    let per_head = t * head_size;
    let (dq, rest) = scratch.split_at_mut(n);
    let (dk, dv) = rest.split_at_mut(n);
    let gradients = dq.par_chunks_mut(per_head).zip(dk.par_chunks_mut(per_head).zip(dv.par_chunks_mut(per_head)));
    let by_head = gradients.zip(lse.par_chunks(t)).enumerate().with_max_len(1);
    by_head.for_each_init(Tiles::default, |tiles, (bh, ((dq, (dk, dv)), lse))| {
        dk.fill(0.0);
        dv.fill(0.0);
        for (i, (dq, lse)) in dq.chunks_mut(TILE * head_size).zip(lse.chunks(TILE)).enumerate() {
            let (start, rows) = (i * TILE, lse.len());
            let keys = start + rows;
            tiles.weights.resize(rows * keys, 0.0);
            tiles.dscores.resize(rows * keys, 0.0);
            let queries = projections.rows(0, bh, start, rows);
            let key_rows = projections.rows(1, bh, 0, keys);
            let values = projections.rows(2, bh, 0, keys);
            let dout_rows = head_rows(dout, shape, bh, start, rows);
            let serial = Parallelism::None;
            multiply(&mut tiles.weights, Into::Overwrite, scale(shape), queries, key_rows.transposed(), serial);
            multiply(&mut tiles.dscores, Into::Overwrite, 1.0, dout_rows, values.transposed(), serial);
            let scores = tiles.weights.chunks_mut(keys).zip(tiles.dscores.chunks_mut(keys));
            for (row, ((weights, dscores), lse)) in scores.zip(lse).enumerate() {
                let at = ((bh / heads * t) + start + row) * c + bh % heads * head_size;
                let both = dout[at..][..head_size].iter().zip(&out[at..][..head_size]);
                let dot = both.map(|(d, o)| f64::from(*d) * f64::from(*o)).sum::<f64>() as f32;
                let seen = start + row + 1;
                for (weight, dscore) in weights[..seen].iter_mut().zip(&mut dscores[..seen]) {
                    *weight = (*weight - lse).exp();
                    *dscore = *weight * (*dscore - dot);
                }
                weights[seen..].fill(0.0);
                dscores[seen..].fill(0.0);
            }
            let weights = Matrix::row_major(&tiles.weights, rows, keys).transposed();
            let dscores = Matrix::row_major(&tiles.dscores, rows, keys);
            multiply(dq, Into::Overwrite, scale(shape), dscores, key_rows, serial);
            multiply(&mut dk[..keys * head_size], Into::Add, scale(shape), dscores.transposed(), queries, serial);
            multiply(&mut dv[..keys * head_size], Into::Add, 1.0, weights, dout_rows, serial);
        }
    });

    let scratch = &*scratch;
    dqkv.par_chunks_mut(3 * c).enumerate().with_min_len(16).for_each(|(row, dqkv)| {
        for (i, dqkv) in dqkv.chunks_mut(head_size).enumerate() {
            let (part, head) = (i / heads, i % heads);
            let at = part * n + ((row / t * heads + head) * t + row % t) * head_size;
            dqkv.copy_from_slice(&scratch[at..][..head_size]);
        }
    });
    Ok(())
}
