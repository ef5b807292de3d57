//! Causal attention, one tile of queries at a time: only the scores of one tile are stored, never (T, T).

use super::arena::{Arena, Operand};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use super::quantize;
use crate::Result;
use crate::ops::{AttentionBackward, AttentionForward, AttentionShape};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// Queries of a tile.
const TILE: usize = 64;

/// Views of each head's queries, keys and values in qkv (B, T, NH + 2 KV, HS).
struct Projections<'a> {
    qkv: &'a [f32],
    shape: AttentionShape,
}

impl<'a> Projections<'a> {
    /// Returns (rows, HS) of the queries of sequence and query head `bh`, from row `start`.
    fn queries(&self, bh: usize, start: usize, rows: usize) -> Matrix<'a> {
        self.rows(bh / self.shape.heads, bh % self.shape.heads, start, rows)
    }

    /// Returns (rows, HS) of the keys that query head `bh` reads.
    fn keys(&self, bh: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        self.rows(bh / heads, heads + bh % heads / (heads / kv_heads), 0, rows)
    }

    /// Returns (rows, HS) of the values that query head `bh` reads.
    fn values(&self, bh: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        self.rows(bh / heads, heads + kv_heads + bh % heads / (heads / kv_heads), 0, rows)
    }

    fn rows(&self, b: usize, packed_head: usize, start: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { t, head_size, .. } = self.shape;
        let stride = self.shape.packed_heads() * head_size;
        Matrix::strided(&self.qkv[(b * t + start) * stride + packed_head * head_size..], rows, head_size, stride)
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
pub(super) fn forward(arena: &mut Arena, scratch: Tensor, op: &AttentionForward) -> Result<()> {
    let AttentionForward { out, lse, qkv, shape, quantized } = *op;
    shape.check()?;
    let AttentionShape { b, t, heads, head_size, .. } = shape;
    let n = b * t * heads * head_size;
    if n == 0 {
        return Ok(());
    }
    let packed = b * t * shape.packed_heads() * head_size;
    let operands: [Operand; 4] =
        [("scratch", scratch, n), ("out", out, n), ("lse", lse, b * heads * t), ("qkv", qkv, packed)];
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
        let key_rows = projections.keys(bh, keys).transposed();
        let queries = projections.queries(bh, start, rows);
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
        multiply(out, Into::Overwrite, 1.0, weights, projections.values(bh, keys), Parallelism::None);
    });

    let scratch = &*scratch;
    out.par_chunks_mut(heads * head_size).enumerate().with_min_len(16).for_each(|(row, out)| {
        for (head, out) in out.chunks_mut(head_size).enumerate() {
            let at = ((row / t * heads + head) * t + row % t) * head_size;
            out.copy_from_slice(&scratch[at..][..head_size]);
        }
    });
    quantized.map_or(Ok(()), |next| quantize::quantize(arena, next))
}

/// Tiles of one task.
#[derive(Default)]
struct Tiles {
    weights: Vec<f32>,
    dscores: Vec<f32>,
}

/// `scratch` is dq (B, NH, T, HS), then dk and dv (B, KV, T, HS) each, with the rows of a head contiguous, so that a task can own
/// them. A task computes a key-value head with all query heads that read it.
pub(super) fn backward(arena: &mut Arena, scratch: Tensor, op: AttentionBackward) -> Result<()> {
    let AttentionBackward { dqkv, dout, qkv, out, lse, shape } = op;
    shape.check()?;
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    let (n, kv_n) = (b * t * heads * head_size, b * t * kv_heads * head_size);
    if n == 0 {
        return Ok(());
    }
    let operands: [Operand; 6] = [
        ("scratch", scratch, n + 2 * kv_n),
        ("dqkv", dqkv, n + 2 * kv_n),
        ("dout", dout, n),
        ("qkv", qkv, n + 2 * kv_n),
        ("out", out, n),
        ("lse", lse, b * heads * t),
    ];
    let [scratch, dqkv, dout, qkv, out, lse] = arena.split("attention_backward", operands)?;
    let (dout, out) = (&*dout, &*out);
    let pass = Backward { projections: Projections { qkv, shape }, dout, out };

    let (per_head, group) = (t * head_size, heads / kv_heads);
    let (dq, rest) = scratch.split_at_mut(n);
    let (dk, dv) = rest.split_at_mut(kv_n);
    let gradients = dk.par_chunks_mut(per_head).zip(dv.par_chunks_mut(per_head));
    let by_group = dq.par_chunks_mut(group * per_head).zip(lse.par_chunks(group * t)).zip(gradients).enumerate();
    by_group.with_max_len(1).for_each_init(Tiles::default, |tiles, (kv, ((dq, lse), (dk, dv)))| {
        dk.fill(0.0);
        dv.fill(0.0);
        for (i, (dq, lse)) in dq.chunks_mut(per_head).zip(lse.chunks(t)).enumerate() {
            pass.head(kv * group + i, tiles, lse, [dq, dk, dv]);
        }
    });

    let scratch = &*scratch;
    dqkv.par_chunks_mut(shape.packed_heads() * head_size).enumerate().with_min_len(16).for_each(|(row, dqkv)| {
        for (i, dqkv) in dqkv.chunks_mut(head_size).enumerate() {
            let (first, of_part, head) = match i {
                _ if i < heads => (0, heads, i),
                _ if i < heads + kv_heads => (n, kv_heads, i - heads),
                _ => (n + kv_n, kv_heads, i - heads - kv_heads),
            };
            let at = first + ((row / t * of_part + head) * t + row % t) * head_size;
            dqkv.copy_from_slice(&scratch[at..][..head_size]);
        }
    });
    Ok(())
}

/// The inputs of the backward pass.
struct Backward<'a> {
    projections: Projections<'a>,
    dout: &'a [f32],
    out: &'a [f32],
}

impl Backward<'_> {
    /// Computes dq (T, HS) of query head `bh`, and adds its part of dk and dv (T, HS).
    fn head(&self, bh: usize, tiles: &mut Tiles, lse: &[f32], [dq, dk, dv]: [&mut [f32]; 3]) {
        let shape = self.projections.shape;
        let AttentionShape { t, heads, head_size, .. } = shape;
        for (i, (dq, lse)) in dq.chunks_mut(TILE * head_size).zip(lse.chunks(TILE)).enumerate() {
            let (start, rows) = (i * TILE, lse.len());
            let keys = start + rows;
            tiles.weights.resize(rows * keys, 0.0);
            tiles.dscores.resize(rows * keys, 0.0);
            let queries = self.projections.queries(bh, start, rows);
            let key_rows = self.projections.keys(bh, keys);
            let values = self.projections.values(bh, keys);
            let dout_rows = head_rows(self.dout, shape, bh, start, rows);
            let serial = Parallelism::None;
            multiply(&mut tiles.weights, Into::Overwrite, scale(shape), queries, key_rows.transposed(), serial);
            multiply(&mut tiles.dscores, Into::Overwrite, 1.0, dout_rows, values.transposed(), serial);
            let scores = tiles.weights.chunks_mut(keys).zip(tiles.dscores.chunks_mut(keys));
            for (row, ((weights, dscores), lse)) in scores.zip(lse).enumerate() {
                let at = ((bh / heads * t) + start + row) * heads * head_size + bh % heads * head_size;
                let both = self.dout[at..][..head_size].iter().zip(&self.out[at..][..head_size]);
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
    }
}
