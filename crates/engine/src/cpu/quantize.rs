//! FP8 on the CPU. FP8 numbers are stored as f32: rounding is exact, and products of two numbers are exact in f32.

use super::CHUNK;
use super::arena::{Arena, optional};
use crate::Result;
use crate::ops::{Dequantize, Fp8Format, Fp8Scale, Fp8Scales, Groups, Quantize, Scaling, largest_rounded};
use crate::tensor::Tensor;
use anyhow::ensure;
use cuda_std::{E4m3, E5m2, Element};
use gpu::quantize::{scale_of, scaled};
use rayon::prelude::*;

/// Returns max(a, |b|), and NaN if either is a NaN.
fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.abs().to_bits()))
}

/// Returns the value of a tensor of one element.
pub(super) fn scalar(arena: &Arena, name: &str, tensor: Tensor) -> Result<f32> {
    ensure!(tensor.len == 1, "{name}: expected 1 element, found {}", tensor.len);
    Ok(arena.get(tensor)?[0])
}

/// Sets the value of a tensor of one element.
pub(super) fn set_scalar(arena: &mut Arena, name: &'static str, tensor: Tensor, value: f32) -> Result<()> {
    let [to] = arena.split("quantize", [(name, tensor, 1)])?;
    to[0] = value;
    Ok(())
}

pub(super) fn quantize(arena: &mut Arena, op: Quantize) -> Result<()> {
    let Quantize { out, transposed, inp, scale: Fp8Scale { scale, amax, counts }, scaling, format, .. } = op;
    let Quantize { shape: [rows, columns], column_sums, groups, .. } = op;
    ensure!(
        rows.is_multiple_of(16) && columns.is_multiple_of(16),
        "quantize: expected rows and columns that are multiples of 16, found {rows} x {columns}"
    );
    ensure!(
        column_sums.is_none() || out.is_some() && transposed.is_some() && op.matrices == 1,
        "quantize: column sums: expected both layouts of one matrix, found one layout or several matrices"
    );
    let used_rows = match groups {
        Some(Groups { layout, count }) => bytemuck::cast_slice::<f32, i32>(arena.get(layout)?)[count] as usize,
        None => rows,
    };
    let used = op.elements() / rows * used_rows;
    if scaling != Scaling::Given {
        let before = if scaling == Scaling::Current { 0.0 } else { scalar(arena, "amax", amax)? };
        let largest =
            arena.get(inp)?[..used].par_chunks(CHUNK).map(|chunk| chunk.iter().fold(0.0, |a, &b| larger(a, b)));
        let largest = largest.reduce(|| before, larger);
        set_scalar(arena, "amax", amax, largest)?;
        if scaling != Scaling::Delayed {
            set_scalar(arena, "scale", scale, scale_of(largest, format.max()))?;
        }
    }
    let scale = scalar(arena, "scale", scale)?;
    let factor = 1.0 / scale;
    if let Some(counts) = counts.filter(|_| scaling != Scaling::Given) {
        count_losses(arena, counts, inp.slice(0, used), factor, format)?;
    }
    let round = |x: f32| match format {
        Fp8Format::E4m3 => E4m3::from_f32(scaled(x, factor)).to_f32(),
        Fp8Format::E5m2 => E5m2::from_f32(scaled(x, factor)).to_f32(),
    };
    let operands = [
        optional("out", out, op.elements()),
        optional("transposed", transposed, op.elements()),
        ("inp", inp, op.elements()),
        optional("column sums", column_sums, columns),
    ];
    let [out, transposed, inp, sums] = arena.split("quantize", operands)?;
    out.par_iter_mut().with_min_len(CHUNK).zip(&inp[..used]).for_each(|(out, &x)| *out = round(x));
    transposed.par_chunks_mut(rows).enumerate().for_each(|(i, out)| {
        let (first, column) = (i / columns * rows, i % columns);
        for (row, out) in out[..used_rows].iter_mut().enumerate() {
            *out = round(inp[(first + row) * columns + column]);
        }
    });
    sums.iter_mut().zip(transposed.chunks(rows)).for_each(|(sum, column)| {
        *sum += (f64::from(scale) * column.iter().map(|x| f64::from(*x)).sum::<f64>()) as f32;
    });
    Ok(())
}

/// Adds the numbers of values of `inp` that saturate, and that become 0, to `counts`.
fn count_losses(arena: &mut Arena, counts: Tensor, inp: Tensor, factor: f32, format: Fp8Format) -> Result<()> {
    let (mut saturated, mut zeroed) = (0, 0);
    for &x in arena.get(inp)? {
        let value = scaled(x, factor).abs();
        saturated += i32::from(value > largest_rounded(format));
        zeroed += i32::from(value <= format.largest_rounded_to_zero() && x != 0.0);
    }
    let [counts] = arena.split("quantize", [("counts", counts, 2)])?;
    let counts: &mut [i32] = bytemuck::cast_slice_mut(counts);
    counts[0] += saturated;
    counts[1] += zeroed;
    Ok(())
}

pub(super) fn dequantize(arena: &mut Arena, op: Dequantize) -> Result<()> {
    let Dequantize { out, inp, scale } = op;
    let scale = scalar(arena, "scale", scale)?;
    let [out, inp] = arena.split("dequantize", [("out", out, inp.len), ("inp", inp, inp.len)])?;
    out.par_iter_mut().with_min_len(CHUNK).zip(&*inp).for_each(|(out, x)| *out = x * scale);
    Ok(())
}

pub(super) fn scales(arena: &mut Arena, op: Fp8Scales) -> Result<()> {
    let Fp8Scales { scales, amaxes, largest } = op;
    let n = scales.len;
    ensure!(
        n > 0 && amaxes.len.is_multiple_of(n),
        "scales: expected amaxes of whole steps of {n}, found {}",
        amaxes.len
    );
    let [scales, amaxes] = arena.split("scales", [("scales", scales, n), ("amaxes", amaxes, amaxes.len)])?;
    for (i, scale) in scales.iter_mut().enumerate() {
        let finite = amaxes.iter().skip(i).step_by(n).filter(|amax| amax.is_finite());
        *scale = scale_of(finite.fold(0.0, |a, &b| larger(a, b)), largest);
    }
    amaxes.copy_within(..amaxes.len() - n, n);
    amaxes[..n].fill(0.0);
    Ok(())
}
