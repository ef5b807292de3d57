//! Additions to the residual stream.

use super::arena::{Arena, optional};
use crate::Result;
use crate::ops::{Documents, Mix, MixBackward, Smear, SmearBackward};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

/// Elements of one task.
const CHUNK: usize = 1 << 12;

/// Returns the tensor, or `None` if it is `other`: tensors of an operation must not overlap.
fn distinct(tensor: Tensor, other: Tensor) -> Option<Tensor> {
    (tensor != other).then_some(tensor)
}

/// Returns the factor of a term, which is 1 if there is none.
fn factor(scale: &[f32]) -> f32 {
    scale.first().copied().unwrap_or(1.0)
}

fn sign(subtracts: bool) -> f32 {
    if subtracts { -1.0 } else { 1.0 }
}

/// Returns Σ a · b, in an order that does not depend on the number of threads.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let part = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let parts: Vec<f64> = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK)).map(part).collect();
    parts.into_iter().sum::<f64>() as f32
}

pub(super) fn mix(arena: &mut Arena, op: Mix) -> Result<()> {
    let Mix { out, inp, added, scale, added_scale, subtracts } = op;
    let n = out.len;
    let operands = [
        ("out", out, n),
        ("inp", inp, n),
        optional("added", distinct(added, inp), n),
        optional("scale", scale, 1),
        optional("added_scale", added_scale, 1),
    ];
    let [out, inp, added, scale, added_scale] = arena.split("mix", operands)?;
    let (scale, added_scale) = (factor(scale), sign(subtracts) * factor(added_scale));
    let added = if added.is_empty() { &*inp } else { added };
    out.par_iter_mut().with_min_len(CHUNK).zip(&*inp).zip(added).for_each(|((out, x), y)| {
        *out = scale * x + added_scale * y;
    });
    Ok(())
}

pub(super) fn mix_backward(arena: &mut Arena, op: MixBackward) -> Result<()> {
    let MixBackward { dout, dadded, dscale, dadded_scale, inp, added, scale, added_scale, subtracts } = op;
    let n = dout.len;
    let operands = [
        ("dout", dout, n),
        ("dadded", dadded, n),
        optional("dscale", dscale, 1),
        optional("dadded_scale", dadded_scale, 1),
        ("inp", inp, n),
        optional("added", distinct(added, inp), n),
        optional("scale", scale, 1),
        optional("added_scale", added_scale, 1),
    ];
    let [dout, dadded, dscale, dadded_scale, inp, added, scale, added_scale] = arena.split("mix_backward", operands)?;
    let (sign, scales) = (sign(subtracts), !scale.is_empty());
    let (scale, added_scale) = (factor(scale), sign * factor(added_scale));
    let added = if added.is_empty() { &*inp } else { added };
    for dscale in dscale {
        *dscale += dot(dout, inp);
    }
    for dscale in dadded_scale {
        *dscale += sign * dot(dout, added);
    }
    dadded.par_iter_mut().with_min_len(CHUNK).zip(dout.par_iter_mut()).for_each(|(dadded, dout)| {
        *dadded += added_scale * *dout;
        if scales {
            *dout *= scale;
        }
    });
    Ok(())
}

/// Returns the first position of the document of each token, if the batch states it.
fn first_keys(documents: Option<Documents>) -> Option<Tensor> {
    documents.map(|documents| documents.first_keys)
}

/// Reports whether row `i` has no token before it in its sequence and document.
fn is_first(i: usize, t: usize, first_keys: &[i32]) -> bool {
    first_keys.get(i).map_or(i.is_multiple_of(t), |&first| first as usize == i % t)
}

pub(super) fn smear(arena: &mut Arena, op: Smear) -> Result<()> {
    let Smear { out, gates, inp, before, weight, scale, documents, t, c } = op;
    let (n, rows, channels) = (out.len, gates.len, weight.len);
    ensure!(
        t > 0 && channels <= c,
        "smear: expected tokens and at most {c} channels of the gate, found {t} and {channels}"
    );
    let operands = [
        ("out", out, rows * c),
        ("gates", gates, rows),
        ("inp", inp, n),
        optional("before", before, rows / t * c),
        ("weight", weight, channels),
        ("scale", scale, 1),
        optional("first_keys", first_keys(documents), rows),
    ];
    let [out, gates, inp, before, weight, scale, first_keys] = arena.split("smear", operands)?;
    let (inp, before, weight, scale) = (&*inp, &*before, &*weight, scale[0]);
    let first_keys: &[i32] = bytemuck::cast_slice(first_keys);
    out.par_chunks_mut(c).zip(gates).enumerate().for_each(|(i, (out, gate))| {
        let row = &inp[i * c..][..c];
        *gate = sigmoid(row[..channels].iter().zip(weight).map(|(x, w)| x * w).sum());
        let previous = match i % t {
            0 => before.get(i / t * c..(i / t + 1) * c),
            _ if is_first(i, t, first_keys) => None,
            _ => Some(&inp[(i - 1) * c..][..c]),
        };
        out.copy_from_slice(row);
        if let Some(previous) = previous {
            let factor = scale * *gate;
            out.iter_mut().zip(previous).for_each(|(out, x)| *out += factor * x);
        }
    });
    Ok(())
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn smear_backward(arena: &mut Arena, op: &SmearBackward) -> Result<()> {
    let SmearBackward { dinp, dweight, dscale, dout, gates, inp, weight, scale, documents, t, c } = *op;
    let (rows, channels) = (gates.len, weight.len);
    ensure!(
        t > 0 && channels <= c,
        "smear: expected tokens and at most {c} channels of the gate, found {t} and {channels}"
    );
    let operands = [
        ("dinp", dinp, rows * c),
        optional("dweight", dweight, channels),
        optional("dscale", dscale, 1),
        ("dout", dout, rows * c),
        ("gates", gates, rows),
        ("inp", inp, rows * c),
        ("weight", weight, channels),
        ("scale", scale, 1),
        optional("first_keys", first_keys(documents), rows),
    ];
    let [dinp, dweight, dscale, dout, gates, inp, weight, scale, first_keys] =
        arena.split("smear_backward", operands)?;
    let (dout, gates, inp, weight, scale) = (&*dout, &*gates, &*inp, &*weight, scale[0]);
    let first_keys: &[i32] = bytemuck::cast_slice(first_keys);
    let row = |i: usize| i * c..(i + 1) * c;
    let has_previous = |i: usize| i < rows && !is_first(i, t, first_keys);
    // The gradient of each gate: dout · inp of the token before, or 0.
    let dgates: Vec<f32> = (0..rows)
        .into_par_iter()
        .map(|i| {
            if !has_previous(i) {
                return 0.0;
            }
            let (d, x) = (&dout[row(i)], &inp[row(i - 1)]);
            d.iter().zip(x).map(|(d, x)| f64::from(*d) * f64::from(*x)).sum::<f64>() as f32
        })
        .collect();
    let dsum = |i: usize| dgates[i] * scale * gates[i] * (1.0 - gates[i]);
    dinp.par_chunks_mut(c).enumerate().for_each(|(i, dinp)| {
        dinp.copy_from_slice(&dout[row(i)]);
        if has_previous(i + 1) {
            let factor = scale * gates[i + 1];
            dinp.iter_mut().zip(&dout[row(i + 1)]).for_each(|(dinp, d)| *dinp += factor * d);
        }
        dinp.iter_mut().zip(weight).for_each(|(dinp, w)| *dinp += dsum(i) * w);
    });
    for (channel, dweight) in dweight.iter_mut().enumerate() {
        *dweight += (0..rows).map(|i| f64::from(dsum(i)) * f64::from(inp[i * c + channel])).sum::<f64>() as f32;
    }
    for dscale in dscale {
        *dscale += dgates.iter().zip(gates).map(|(d, gate)| f64::from(*d) * f64::from(*gate)).sum::<f64>() as f32;
    }
    Ok(())
}
