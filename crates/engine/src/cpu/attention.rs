//! Causal attention, with masks of documents and windows, one tile of queries at a time: only the scores of one tile are stored, never (T, T).

use super::arena::{Arena, Operand, optional};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use super::quantize;
use crate::Result;
use crate::ops::{AttentionBackward, AttentionForward, AttentionMask, AttentionShape};
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

    /// Returns (rows, HS) of the keys that query head `bh` reads, from row `start`.
    fn keys(&self, bh: usize, start: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        self.rows(bh / heads, heads + bh % heads / (heads / kv_heads), start, rows)
    }

    /// Returns (rows, HS) of the values that query head `bh` reads, from row `start`.
    fn values(&self, bh: usize, start: usize, rows: usize) -> Matrix<'a> {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        self.rows(bh / heads, heads + kv_heads + bh % heads / (heads / kv_heads), start, rows)
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

/// The first key that each query attends to.
#[derive(Clone, Copy)]
struct FirstKeys<'a> {
    /// (B, T), or empty if a sequence is one document.
    documents: &'a [i32],
    window: Option<usize>,
    shape: AttentionShape,
}

impl FirstKeys<'_> {
    fn of(self, bh: usize, query: usize) -> usize {
        let AttentionShape { t, heads, .. } = self.shape;
        let document = self.documents.get(bh / heads * t + query).map_or(0, |&first| first as usize);
        document.max(self.window.map_or(0, |window| (query + 1).saturating_sub(window)))
    }
}

/// Returns the operand of the first keys of documents.
fn first_keys(mask: AttentionMask, shape: AttentionShape) -> Operand {
    optional("first keys", mask.documents.map(|documents| documents.first_keys), shape.b * shape.t)
}

fn scale(shape: AttentionShape) -> f32 {
    1.0 / (shape.head_size as f32).sqrt()
}

/// `scratch` is (B, NH, T, HS): the rows of a head are contiguous, so that a task can own them.
pub(super) fn forward(arena: &mut Arena, scratch: Tensor, op: &AttentionForward) -> Result<()> {
    let AttentionForward { out, lse, qkv, shape, first_query, mask, quantized } = *op;
    shape.check()?;
    let AttentionShape { b, t, heads, head_size, .. } = shape;
    let n = b * t * heads * head_size;
    if n == 0 {
        return Ok(());
    }
    let packed = b * t * shape.packed_heads() * head_size;
    let operands: [Operand; 5] = [
        ("scratch", scratch, n),
        ("out", out, n),
        ("lse", lse, b * heads * t),
        ("qkv", qkv, packed),
        first_keys(mask, shape),
    ];
    let [scratch, out, lse, qkv, documents] = arena.split("attention_forward", operands)?;
    let first_keys = FirstKeys { documents: bytemuck::cast_slice(documents), window: mask.window, shape };
    let projections = Projections { qkv, shape };

    // The last tile of a head may be short, so tiles are cut head by head.
    let by_head = scratch.chunks_mut(t * head_size).zip(lse.chunks_mut(t)).enumerate();
    let tiles: Vec<_> = by_head
        .flat_map(|(bh, (out, lse))| {
            let tiles = out.chunks_mut(TILE * head_size).zip(lse.chunks_mut(TILE)).enumerate();
            tiles.map(move |(i, (out, lse))| (bh, i * TILE, out, lse)).skip(first_query / TILE)
        })
        .collect();
    // Late tiles have the most keys.
    tiles.into_par_iter().rev().with_max_len(1).for_each_init(Vec::new, |scores, (bh, start, out, lse)| {
        let (rows, first) = (lse.len(), first_keys.of(bh, start));
        let keys = start + rows - first;
        scores.resize(rows * keys, 0.0);
        let key_rows = projections.keys(bh, first, keys).transposed();
        let queries = projections.queries(bh, start, rows);
        multiply(scores, Into::Overwrite, scale(shape), queries, key_rows, Parallelism::None);
        for (i, (scores, lse)) in scores.chunks_mut(keys).zip(lse).enumerate() {
            let (past, future) = scores.split_at_mut(start + i + 1 - first);
            let (hidden, seen) = past.split_at_mut(first_keys.of(bh, start + i) - first);
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
            hidden.fill(0.0);
            future.fill(0.0);
            *lse = (f64::from(max) + sum.ln()) as f32;
        }
        let weights = Matrix::row_major(scores, rows, keys);
        multiply(out, Into::Overwrite, 1.0, weights, projections.values(bh, first, keys), Parallelism::None);
    });

    let scratch = &*scratch;
    out.par_chunks_mut(heads * head_size).enumerate().with_min_len(16).for_each(|(row, out)| {
        if row % t < first_query {
            return;
        }
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
pub(super) fn backward(arena: &mut Arena, scratch: Tensor, op: &AttentionBackward) -> Result<()> {
    let AttentionBackward { dqkv, dout, qkv, out, lse, shape, mask } = *op;
    shape.check()?;
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape;
    let (n, kv_n) = (b * t * heads * head_size, b * t * kv_heads * head_size);
    if n == 0 {
        return Ok(());
    }
    let operands: [Operand; 7] = [
        ("scratch", scratch, n + 2 * kv_n),
        ("dqkv", dqkv, n + 2 * kv_n),
        ("dout", dout, n),
        ("qkv", qkv, n + 2 * kv_n),
        ("out", out, n),
        ("lse", lse, b * heads * t),
        first_keys(mask, shape),
    ];
    let [scratch, dqkv, dout, qkv, out, lse, documents] = arena.split("attention_backward", operands)?;
    let (dout, out) = (&*dout, &*out);
    let first_keys = FirstKeys { documents: bytemuck::cast_slice(documents), window: mask.window, shape };
    let pass = Backward { projections: Projections { qkv, shape }, first_keys, dout, out };

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
    first_keys: FirstKeys<'a>,
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
            let first = self.first_keys.of(bh, start);
            let keys = start + rows - first;
            tiles.weights.resize(rows * keys, 0.0);
            tiles.dscores.resize(rows * keys, 0.0);
            let queries = self.projections.queries(bh, start, rows);
            let key_rows = self.projections.keys(bh, first, keys);
            let values = self.projections.values(bh, first, keys);
            let dout_rows = head_rows(self.dout, shape, bh, start, rows);
            let serial = Parallelism::None;
            multiply(&mut tiles.weights, Into::Overwrite, scale(shape), queries, key_rows.transposed(), serial);
            multiply(&mut tiles.dscores, Into::Overwrite, 1.0, dout_rows, values.transposed(), serial);
            let scores = tiles.weights.chunks_mut(keys).zip(tiles.dscores.chunks_mut(keys));
            for (row, ((weights, dscores), lse)) in scores.zip(lse).enumerate() {
                let at = ((bh / heads * t) + start + row) * heads * head_size + bh % heads * head_size;
                let both = self.dout[at..][..head_size].iter().zip(&self.out[at..][..head_size]);
                let dot = both.map(|(d, o)| f64::from(*d) * f64::from(*o)).sum::<f64>() as f32;
                let (hidden, end) = (self.first_keys.of(bh, start + row) - first, start + row + 1 - first);
                for (weight, dscore) in weights[hidden..end].iter_mut().zip(&mut dscores[hidden..end]) {
                    *weight = (*weight - lse).exp();
                    *dscore = *weight * (*dscore - dot);
                }
                for scores in [&mut *weights, &mut *dscores] {
                    scores[..hidden].fill(0.0);
                    scores[end..].fill(0.0);
                }
            }
            let weights = Matrix::row_major(&tiles.weights, rows, keys).transposed();
            let dscores = Matrix::row_major(&tiles.dscores, rows, keys);
            let seen = first * head_size..(first + keys) * head_size;
            multiply(dq, Into::Overwrite, scale(shape), dscores, key_rows, serial);
            multiply(&mut dk[seen.clone()], Into::Add, scale(shape), dscores.transposed(), queries, serial);
            multiply(&mut dv[seen], Into::Add, 1.0, weights, dout_rows, serial);
        }
    }
}
