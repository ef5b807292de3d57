use super::CHUNK;
use super::arena::Arena;
use crate::Result;
use crate::ops::{GlobalNorm, SquareRoot, SquaredSum, Sum};
use rayon::prelude::*;

/// Returns the sum of `term(value)` in double precision, in an order that does not depend on the number of threads.
pub(super) fn total(values: &[f32], term: impl Fn(f64) -> f64 + Sync) -> f64 {
    const LANES: usize = 16;
    let chunk_total = |chunk: &[f32]| {
        let mut lanes = [0.0; LANES];
        let (whole, rest) = chunk.as_chunks::<LANES>();
        for values in whole {
            for (lane, &value) in lanes.iter_mut().zip(values) {
                *lane += term(f64::from(value));
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&value| term(f64::from(value))).sum::<f64>()
    };
    let totals: Vec<f64> = values.par_chunks(CHUNK).map(chunk_total).collect();
    totals.iter().sum()
}

pub(super) fn sum(arena: &mut Arena, Sum { out, values }: Sum) -> Result<()> {
    let [out, values] = arena.split("sum", [("out", out, 1), ("values", values, values.len)])?;
    out[0] = total(values, |x| x) as f32;
    Ok(())
}

pub(super) fn global_norm(arena: &mut Arena, GlobalNorm { norm, grads }: GlobalNorm) -> Result<()> {
    let [norm, grads] = arena.split("global_norm", [("norm", norm, 1), ("grads", grads, grads.len)])?;
    norm[0] = total(grads, |x| x * x).sqrt() as f32;
    Ok(())
}

pub(super) fn squared_sum(arena: &mut Arena, SquaredSum { out, values }: SquaredSum) -> Result<()> {
    let totals = values.iter().map(|tensor| Ok(total(arena.get(*tensor)?, |x| x * x)));
    let sum: f64 = totals.sum::<Result<f64>>()?;
    let [out] = arena.split("squared_sum", [("out", out, 1)])?;
    out[0] = sum as f32;
    Ok(())
}

pub(super) fn square_root(arena: &mut Arena, SquareRoot { out, value }: SquareRoot) -> Result<()> {
    let [out, value] = arena.split("square_root", [("out", out, 1), ("value", value, 1)])?;
    out[0] = value[0].sqrt();
    Ok(())
}
