//! Muon.

use super::CHUNK;
use super::adamw::gradient_scale;
use super::arena::Arena;
use super::gemm::{Into, Matrix, Parallelism, multiply};
use super::global_norm::total;
use crate::Result;
use crate::ops::{Master, MuonApply, MuonMomentum, MuonVariance, Orthogonalize, SMALLEST_NORM, SMALLEST_VARIANCE};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

/// Uses all threads of the current pool.
const ALL: Parallelism = Parallelism::Rayon(0);

pub(super) fn momentum(arena: &mut Arena, op: MuonMomentum) -> Result<()> {
    let MuonMomentum { update, m, grads, stats, momentum, grad_factor, clip, seed: _ } = op;
    let n = update.len;
    let operands = [("update", update, n), ("m", m, n), ("grads", grads, n), ("stats", stats, 2)];
    let [update, m, grads, stats] = arena.split("muon_momentum", operands)?;
    let Some(grad_scale) = gradient_scale(stats, grad_factor, clip) else { return Ok(()) };
    let chunks = update.par_chunks_mut(CHUNK).zip(m.par_chunks_mut(CHUNK)).zip(grads.par_chunks(CHUNK));
    chunks.for_each(|((update, m), grads)| {
        for ((update, m), grad) in update.iter_mut().zip(m).zip(grads) {
            let grad = grad * grad_scale;
            *m = momentum * *m + (1.0 - momentum) * grad;
            *update = momentum * *m + (1.0 - momentum) * grad;
        }
    });
    Ok(())
}

pub(super) fn orthogonalize(arena: &mut Arena, op: Orthogonalize) -> Result<()> {
    (0..op.matrices.len()).try_for_each(|i| orthogonalize_one(arena, op, i))
}

/// Orthogonalizes matrix `i` of the batch.
fn orthogonalize_one(arena: &mut Arena, op: Orthogonalize, i: usize) -> Result<()> {
    let Orthogonalize { out, next, gram, polynomial, rows, cols, coefficients, additions, .. } = op;
    let (n, side) = (rows * cols, op.side());
    let part = |batch: Tensor, elements: usize| batch.slice(i * Orthogonalize::stride(elements), elements);
    let operands = [
        ("matrix", op.matrices[i], n),
        ("out", part(out, n), n),
        ("next", part(next, n), n),
        ("gram", part(gram, side * side), side * side),
        ("polynomial", part(polynomial, side * side), side * side),
    ];
    let [matrix, out, next, gram, polynomial] = arena.split("orthogonalize", operands)?;
    let norm = |values: &[f32]| total(values, |x| x * x).sqrt() as f32;
    let (factor, epsilon) = coefficients.scaling();
    if additions.equilibrate {
        let target = norm(matrix) / (rows as f32).sqrt();
        let both = next.par_chunks_mut(cols).zip(matrix.par_chunks(cols));
        both.for_each(|(to, from)| {
            let scale = target / norm(from).max(SMALLEST_NORM);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = scale * from);
        });
        let scale = 1.0 / (norm(next) * factor + epsilon);
        next.par_iter_mut().for_each(|x| *x *= scale);
    } else {
        scale_into(next, 1.0 / (norm(matrix) * factor + epsilon), matrix);
    }
    let (mut from, mut to) = (next, out);
    for [a, b, c] in coefficients.steps() {
        let x = Matrix::row_major(from, rows, cols);
        let (left, right) = if rows <= cols { (x, x.transposed()) } else { (x.transposed(), x) };
        multiply(gram, Into::Overwrite, 1.0, left, right, ALL);
        scale_into(polynomial, b, gram);
        let square = Matrix::row_major(gram, side, side);
        multiply(polynomial, Into::Add, c, square, square, ALL);
        scale_into(to, a, from);
        let factor = Matrix::row_major(polynomial, side, side);
        let (left, right) = if rows <= cols { (factor, x) } else { (x, factor) };
        multiply(to, Into::Add, 1.0, left, right, ALL);
        std::mem::swap(&mut from, &mut to);
    }
    if additions.renormalize {
        scale_into(to, (side as f32).sqrt() / norm(from).max(SMALLEST_NORM), from);
    }
    Ok(())
}

/// to = scale · from
fn scale_into(to: &mut [f32], scale: f32, from: &[f32]) {
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| {
        for (to, from) in to.iter_mut().zip(from) {
            *to = scale * from;
        }
    });
}

pub(super) fn variance(arena: &mut Arena, op: MuonVariance) -> Result<()> {
    let MuonVariance { update, second, sums, stats, rows, cols, beta2, grad_factor, seed: _ } = op;
    let n = rows.max(cols);
    let operands = [("update", update, rows * cols), ("second", second, n), ("sums", sums, n), ("stats", stats, 2)];
    let [update, second, sums, stats] = arena.split("muon_variance", operands)?;
    if gradient_scale(stats, grad_factor, f32::INFINITY).is_none() {
        return Ok(());
    }
    let side = |row: usize, col: usize| if rows >= cols { row } else { col };
    sums.fill(0.0);
    for (row, values) in update.chunks(cols).enumerate() {
        values.iter().enumerate().for_each(|(col, x)| sums[side(row, col)] += x * x);
    }
    let (mut before, mut after) = (0.0, 0.0);
    for (sum, second) in sums.iter_mut().zip(second) {
        *second = beta2 * *second + (1.0 - beta2) * *sum / rows.min(cols) as f32;
        let step = 1.0 / second.max(SMALLEST_VARIANCE).sqrt();
        before += f64::from(*sum);
        after += f64::from(*sum * step * step);
        *sum = step;
    }
    let scale = (before.sqrt() / after.sqrt().max(f64::from(SMALLEST_VARIANCE))) as f32;
    update.par_chunks_mut(cols).enumerate().for_each(|(row, values)| {
        values.iter_mut().enumerate().for_each(|(col, x)| *x *= sums[side(row, col)] * scale);
    });
    Ok(())
}

pub(super) fn apply(arena: &mut Arena, op: MuonApply) -> Result<()> {
    let MuonApply { params, master, update, stats, learning_rate, scale, .. } = op;
    ensure!(master == Master::None, "muon: the CPU engine's parameters are f32 and take no master weights");
    let n = params.len;
    let operands = [("params", params, n), ("update", update, n), ("stats", stats, 2)];
    let [params, update, stats] = arena.split("muon_apply", operands)?;
    if gradient_scale(stats, op.grad_factor, f32::INFINITY).is_none() {
        return Ok(());
    }
    params.par_chunks_mut(CHUNK).zip(update.par_chunks(CHUNK)).for_each(|(params, update)| {
        for (param, update) in params.iter_mut().zip(update) {
            let decay = if op.cautious_decay && update * *param < 0.0 { 0.0 } else { op.weight_decay };
            *param -= learning_rate * (scale * update + decay * *param);
        }
    });
    Ok(())
}
