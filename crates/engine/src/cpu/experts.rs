//! Mixtures of experts: the router, copies to and from expert order, and linear layers with a matrix for each expert.

use super::activation;
use super::arena::{Arena, optional};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use super::matmul::scales_product;
use super::quantize;
use crate::Result;
use crate::ops::{
    ActivationInput, BIAS_GRADIENT, ChoiceGradients, Combine, Dispatch, Epilogue, GROUP_ROWS, Groups, MatmulBackward,
    MatmulForward, MatmulShape, Route, RouteBackward, Router, RouterScores,
};
use anyhow::ensure;
use rayon::prelude::*;
use std::cmp::Ordering;
use std::ops::Range;

/// Minimum rows of one task.
const ROWS: usize = 8;

/// Uses all threads of the current pool.
const ALL: Parallelism = Parallelism::Rayon(0);

fn check(router: Router) -> Result<()> {
    ensure!(
        (1..=router.count).contains(&router.active),
        "router: expected 1 to {} active experts, found {}",
        router.count,
        router.active
    );
    Ok(())
}

/// Returns the rows of each local expert in expert order, without padding.
fn rows_of_experts(layout: &[i32], count: usize) -> impl Iterator<Item = Range<usize>> {
    let (starts, counts) = (&layout[..count], &layout[count + 1..][..count]);
    starts.iter().zip(counts).map(|(&start, &rows)| start as usize..(start + rows) as usize)
}

/// Returns softmax(logits) and logsumexp(logits).
fn softmax(logits: &[f32]) -> (Vec<f32>, f32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let values: Vec<f64> = logits.iter().map(|logit| f64::from((logit - max).exp())).collect();
    let sum: f64 = values.iter().sum();
    (values.iter().map(|value| (value / sum) as f32).collect(), max + sum.ln() as f32)
}

/// Returns the scores of all experts.
fn scores(logits: &[f32], scores: RouterScores) -> Vec<f32> {
    match scores {
        RouterScores::Softmax => softmax(logits).0,
        RouterScores::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    }
}

/// Writes the experts of a token and their weights. The bias is empty if there is none.
fn choose(router: Router, logits: &[f32], bias: &[f32], experts: &mut [i32], weights: &mut [f32]) {
    let scores = scores(logits, router.scores);
    let biased: Vec<f32> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    let numbers = if bias.is_empty() { logits } else { &biased };
    let key = |expert: usize| if numbers[expert].is_nan() { f32::NEG_INFINITY } else { numbers[expert] };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // The sort is stable, so the lower of equal experts precedes.
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal));
    let sum: f64 = order[..router.active].iter().map(|&expert| f64::from(scores[expert])).sum();
    let divisor = if router.normalized { sum } else { 1.0 };
    for ((&expert, chosen), weight) in order.iter().zip(experts).zip(weights) {
        *chosen = expert as i32;
        *weight = (f64::from(scores[expert]) / divisor) as f32;
    }
}

pub(super) fn route(arena: &mut Arena, op: Route) -> Result<()> {
    let Route { logits, bias, experts, weights, positions, sources, groups, loads, router, trains } = op;
    check(router)?;
    let Router { count, active: k, local, .. } = router;
    let rows = logits.len / count;
    let operands = [
        ("logits", logits, rows * count),
        ("experts", experts, rows * k),
        ("weights", weights, rows * k),
        ("positions", positions, rows * k),
        ("sources", sources, router.rows(rows)),
        ("groups", groups, router.layout_len(rows)),
        ("loads", loads, count),
        optional("bias", bias, count),
    ];
    let [logits, experts, weights, positions, sources, groups, loads, bias] = arena.split("route", operands)?;
    let bias = &*bias;
    let experts: &mut [i32] = bytemuck::cast_slice_mut(experts);
    let chosen = experts.par_chunks_mut(k).zip(weights.par_chunks_mut(k));
    let tokens = logits.par_chunks(count).zip(chosen).with_min_len(ROWS);
    tokens.for_each(|(logits, (experts, weights))| choose(router, logits, bias, experts, weights));

    let [positions, sources, groups, loads] =
        [positions, sources, groups, loads].map(bytemuck::cast_slice_mut::<f32, i32>);
    groups.fill(0);
    sources.fill(-1);
    loads.fill(0);
    for &expert in &*experts {
        loads[expert as usize] += 1;
    }
    let (starts, rest) = groups.split_at_mut(local.count + 1);
    let (counts, blocks) = rest.split_at_mut(local.count);
    counts.copy_from_slice(&loads[local.first..][..local.count]);
    for (expert, &rows) in counts.iter().enumerate() {
        let padded = (rows as usize).max(usize::from(trains)).next_multiple_of(GROUP_ROWS);
        let start = starts[expert] as usize;
        starts[expert + 1] = (start + padded) as i32;
        blocks[start / GROUP_ROWS..][..padded / GROUP_ROWS].fill(expert as i32);
    }
    let mut next = starts.to_vec();
    for (source, (&expert, position)) in experts.iter().zip(positions).enumerate() {
        *position = -1;
        let of_local = (expert as usize).checked_sub(local.first).filter(|&expert| expert < local.count);
        let Some(expert) = of_local else { continue };
        let next = &mut next[expert];
        *position = *next;
        sources[*next as usize] = source as i32;
        *next += 1;
    }
    Ok(())
}

pub(super) fn dispatch(arena: &mut Arena, op: &Dispatch) -> Result<()> {
    let Dispatch { out, inp, sources, weights, c, active: k, fp8, .. } = *op;
    let rows = inp.len / c;
    let operands = [
        ("out", out, sources.len * c),
        ("inp", inp, rows * c),
        ("sources", sources, sources.len),
        optional("weights", weights, rows * k),
    ];
    let [out, inp, sources, weights] = arena.split("dispatch", operands)?;
    let (inp, weights) = (&*inp, &*weights);
    let sources: &[i32] = bytemuck::cast_slice(sources);
    out.par_chunks_mut(c).zip(sources).with_min_len(ROWS).for_each(|(out, &source)| {
        let Ok(source) = usize::try_from(source) else { return out.fill(0.0) };
        let weight = weights.get(source).copied().unwrap_or(1.0);
        out.iter_mut().zip(&inp[source / k * c..]).for_each(|(out, x)| *out = weight * x);
    });
    fp8.map_or(Ok(()), |quantized| quantize::quantize(arena, quantized))
}

pub(super) fn combine(arena: &mut Arena, op: Combine) -> Result<()> {
    let Combine { out, residual, inp, weights, positions, c, active: k } = op;
    let (rows, adds_to_out) = (out.len / c, residual == Some(out));
    let operands = [
        ("out", out, rows * c),
        optional("residual", residual.filter(|_| !adds_to_out), rows * c),
        ("inp", inp, inp.len),
        optional("weights", weights, rows * k),
        ("positions", positions, rows * k),
    ];
    let [out, residual, inp, weights, positions] = arena.split("combine", operands)?;
    let (inp, weights, residual) = (&*inp, &*weights, &*residual);
    let positions: &[i32] = bytemuck::cast_slice(positions);
    let tokens = out.par_chunks_mut(c).zip(positions.par_chunks(k)).enumerate().with_min_len(ROWS);
    tokens.for_each(|(token, (out, positions))| {
        match residual.get(token * c..(token + 1) * c) {
            Some(residual) => out.copy_from_slice(residual),
            None if adds_to_out => {}
            None => out.fill(0.0),
        }
        for (choice, &position) in positions.iter().enumerate() {
            let Ok(position) = usize::try_from(position) else { continue };
            let weight = weights.get(token * k + choice).copied().unwrap_or(1.0);
            out.iter_mut().zip(&inp[position * c..]).for_each(|(out, x)| *out += weight * x);
        }
    });
    Ok(())
}

pub(super) fn choice_gradients(arena: &mut Arena, op: ChoiceGradients) -> Result<()> {
    let ChoiceGradients { out, positions, preactivation, dpreactivation, channels } = op;
    let operands = [
        ("out", out, out.len),
        ("positions", positions, out.len),
        ("preactivation", preactivation, preactivation.len),
        ("dpreactivation", dpreactivation, preactivation.len),
    ];
    let [out, positions, preactivation, dpreactivation] = arena.split("choice_gradients", operands)?;
    let (up, dup) = (&*preactivation, &*dpreactivation);
    let positions: &[i32] = bytemuck::cast_slice(positions);
    out.par_iter_mut().zip(positions).with_min_len(ROWS).for_each(|(out, &position)| {
        let of_row = |row: usize| dot(&up[row * 2 * channels..][..channels], &dup[row * 2 * channels..][..channels]);
        *out = usize::try_from(position).map_or(0.0, of_row);
    });
    Ok(())
}

pub(super) fn route_backward(arena: &mut Arena, op: &RouteBackward) -> Result<()> {
    let RouteBackward { dlogits, dbias, logits, experts, weights, gradients, loads, .. } = *op;
    let RouteBackward { tokens, router, aux_loss, .. } = *op;
    check(router)?;
    let Router { count, active: k, .. } = router;
    let rows = logits.len / count;
    let operands = [
        ("dlogits", dlogits, rows * count),
        ("logits", logits, rows * count),
        ("experts", experts, rows * k),
        ("weights", weights, rows * k),
        ("gradients", gradients, rows * k),
        ("loads", loads, count),
        optional("dbias", dbias, count),
    ];
    let [dlogits, logits, experts, weights, gradients, loads, dbias] = arena.split("route_backward", operands)?;
    let (logits, weights, gradients) = (&*logits, &*weights, &*gradients);
    let [experts, loads] = [experts, loads].map(|words| bytemuck::cast_slice::<f32, i32>(words));
    for (dbias, &load) in dbias.iter_mut().zip(loads) {
        *dbias += BIAS_GRADIENT * (i64::from(load) * count as i64 - (tokens * k) as i64) as f32;
    }
    // The gradient of the load-balancing loss with respect to each score of a token.
    let dscores = loads.iter().map(|&load| (load as usize * count) as f32 / tokens as f32);
    let dscores: Vec<f32> = dscores.map(|dscore| aux_loss * dscore).collect();
    dlogits.par_chunks_mut(count).enumerate().with_min_len(ROWS).for_each(|(token, dlogits)| {
        let choices = token * k..(token + 1) * k;
        let chosen = experts[choices.clone()].iter().map(|&expert| expert as usize);
        let chosen = chosen.zip(weights[choices.clone()].iter().copied()).zip(gradients[choices].iter().copied());
        let logits = &logits[token * count..][..count];
        gradient_of_logits(op, logits, dlogits, &dscores, chosen);
    });
    Ok(())
}

/// Returns Σ a · b.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

/// Computes the gradient of a token's logits. `chosen` has its experts, with their weights and the gradients of these times the weights;
/// `dscores` has the gradients of all scores from the load-balancing loss.
fn gradient_of_logits(
    op: &RouteBackward,
    logits: &[f32],
    dlogits: &mut [f32],
    dscores: &[f32],
    chosen: impl Iterator<Item = ((usize, f32), f32)> + Clone,
) {
    let Router { scores: kind, normalized, .. } = op.router;
    let scores = scores(logits, kind);
    let sum: f32 = chosen.clone().map(|(_, dweight)| dweight).sum();
    dlogits.fill(0.0);
    for ((expert, weight), dweight) in chosen {
        dlogits[expert] = if normalized { dweight - weight * sum } else { dweight };
    }
    match kind {
        RouterScores::Softmax => {
            let sum = dot(&scores, dscores) + if normalized { 0.0 } else { sum };
            for ((dlogit, score), dscore) in dlogits.iter_mut().zip(&scores).zip(dscores) {
                *dlogit += score * (dscore - sum);
            }
        }
        RouterScores::Sigmoid => {
            for ((dlogit, score), dscore) in dlogits.iter_mut().zip(&scores).zip(dscores) {
                *dlogit = (*dlogit + score * dscore) * (1.0 - score);
            }
        }
    }
    if op.z_loss != 0.0 {
        let (probabilities, lse) = softmax(logits);
        dlogits.iter_mut().zip(probabilities).for_each(|(dlogit, p)| *dlogit += 2.0 * op.z_loss * lse * p);
    }
}

fn check_groups(bias: bool, other: bool) -> Result<()> {
    ensure!(!bias && !other, "matmul of experts: expected neither a bias, a residual nor an addition");
    Ok(())
}

/// Computes a linear layer with a matrix for each expert.
pub(super) fn matmul_forward(arena: &mut Arena, op: &MatmulForward, groups: Groups) -> Result<()> {
    let MatmulForward { out, inp, weight, bias, epilogue, shape, fp8, .. } = *op;
    let (MatmulShape { rows, c, oc }, Groups { layout, count }) = (shape, groups);
    check_groups(bias.is_some(), matches!(epilogue, Epilogue::Residual(_)))?;
    let (inp, weight, scale) = match fp8 {
        Some(fp8) => (fp8.inp, fp8.weight, scales_product(arena, fp8.inp_scale, fp8.weight_scale)?),
        None => (inp, weight, 1.0),
    };
    let (preactivation, inputs) = match epilogue {
        Epilogue::Activation(activation, preactivation) => (Some(preactivation), activation.inputs()),
        Epilogue::None | Epilogue::Residual(_) => (None, 1),
    };
    let operands = [
        ("out", out, rows * (oc / inputs)),
        ("inp", inp, rows * c),
        ("weight", weight, count * oc * c),
        optional("preactivation", preactivation, rows * oc),
        ("groups", layout, 2 * count + 1 + rows / GROUP_ROWS),
    ];
    let [out, inp, weight, preactivation, layout] = arena.split("matmul_forward", operands)?;
    let sums = if preactivation.is_empty() { &mut *out } else { &mut *preactivation };
    sums.par_chunks_mut(super::CHUNK).for_each(|sums| sums.fill(0.0));
    let weights = weight.chunks(oc * c).map(|weight| Matrix::row_major(weight, oc, c).transposed());
    for (rows, weight) in rows_of_experts(bytemuck::cast_slice(layout), count).zip(weights) {
        multiply(&mut sums[rows.start * oc..], Into::Overwrite, scale, rows_of(inp, &rows, c), weight, ALL);
    }
    if let Epilogue::Activation(activation, _) = epilogue {
        activation::forward(activation, out, preactivation, oc / inputs);
    }
    fp8.and_then(|fp8| fp8.out).map_or(Ok(()), |next| quantize::quantize(arena, next))
}

/// Returns some rows of a matrix of `width` columns.
fn rows_of<'a>(values: &'a [f32], rows: &Range<usize>, width: usize) -> Matrix<'a> {
    Matrix::row_major(&values[rows.start * width..], rows.len(), width)
}

/// Returns some columns of a matrix of `height` rows and `width` columns.
fn columns_of<'a>(values: &'a [f32], columns: &Range<usize>, height: usize, width: usize) -> Matrix<'a> {
    Matrix::strided(&values[columns.start..], height, columns.len(), width)
}

/// Computes the gradients of a linear layer with a matrix for each expert.
pub(super) fn matmul_backward(arena: &mut Arena, op: &MatmulBackward, groups: Groups) -> Result<()> {
    let MatmulBackward { dinp, adds_to_dinp, dweight, dbias, dout, inp, weight, activation, shape, fp8, .. } = *op;
    let (MatmulShape { rows, c, oc }, Groups { layout, count }) = (shape, groups);
    check_groups(dbias.is_some(), adds_to_dinp)?;
    let inputs = activation.map_or(1, |input| input.activation.inputs());
    ensure!(activation.is_none() || inputs == 2, "matmul of experts: expected a gated activation, found another");
    if let Some(ActivationInput { activation, preactivation, recompute: Some(_) }) = activation {
        let operands = [("inp", inp, rows * c), ("preactivation", preactivation, rows * c * inputs)];
        let [inp, preactivation] = arena.split("matmul_backward", operands)?;
        activation::forward(activation, inp, preactivation, c);
    }
    let [mut scale, mut weight_gradient_scale] = [1.0; 2];
    if let Some(fp8) = fp8 {
        for next in fp8.quantize_dout(op).into_iter().chain(fp8.quantize_inp(op)) {
            quantize::quantize(arena, next)?;
        }
        scale = scales_product(arena, fp8.dout_scale.scale, fp8.weight_scale)?;
        weight_gradient_scale = scales_product(arena, fp8.dout_scale.scale, fp8.inp_scale.scale)?;
    }
    let operands = [
        ("dinp", dinp, rows * c * inputs),
        optional("dweight", dweight, count * oc * c),
        ("dout", fp8.map_or(dout, |fp8| fp8.dout[0]), rows * oc),
        // A quantized input may share memory with other operands, unless the gradient of the activation replaces it.
        optional("inp", (fp8.is_none() || activation.is_some()).then_some(inp), rows * c),
        ("weight", fp8.map_or(weight, |fp8| fp8.weight_transposed), count * oc * c),
        optional("preactivation", activation.map(|input| input.preactivation), rows * c * inputs),
        ("groups", layout, 2 * count + 1 + rows / GROUP_ROWS),
        optional("dout in FP8, transposed", fp8.map(|fp8| fp8.dout[1]), rows * oc),
        optional("inp in FP8, transposed", fp8.map(|fp8| fp8.inp_transposed), rows * c),
    ];
    let [dinp, dweight, dout, inp, weight, preactivation, layout, dout8_t, inp8_t] =
        arena.split("matmul_backward", operands)?;
    let layout: &[i32] = bytemuck::cast_slice(layout);
    for (of_expert, dweight) in rows_of_experts(layout, count).zip(dweight.chunks_mut(oc * c)) {
        let [a, b] = if fp8.is_some() {
            [columns_of(dout8_t, &of_expert, oc, rows), columns_of(inp8_t, &of_expert, c, rows).transposed()]
        } else {
            [rows_of(dout, &of_expert, oc).transposed(), rows_of(inp, &of_expert, c)]
        };
        multiply(dweight, Into::Add, weight_gradient_scale, a, b, ALL);
    }
    let dinp_of_matmul = if activation.is_some() { &mut *inp } else { &mut *dinp };
    dinp_of_matmul.par_chunks_mut(super::CHUNK).for_each(|values| values.fill(0.0));
    for (rows, weight) in rows_of_experts(layout, count).zip(weight.chunks(oc * c)) {
        let weight = match fp8 {
            Some(_) => Matrix::row_major(weight, c, oc).transposed(),
            None => Matrix::row_major(weight, oc, c),
        };
        let dout = rows_of(dout, &rows, oc);
        multiply(&mut dinp_of_matmul[rows.start * c..], Into::Overwrite, scale, dout, weight, ALL);
    }
    if let Some(input) = activation {
        activation::backward(input.activation, dinp, inp, preactivation, c);
    }
    fp8.and_then(|fp8| fp8.dinp).map_or(Ok(()), |next| quantize::quantize(arena, next))
}
