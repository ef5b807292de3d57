//! The gradient of layer normalization.

use super::file;
use super::layernorm::{sizes, statistics};
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks, shared_bytes};
use crate::values::Values;
use anyhow::{Context, Result};
use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::norm::launch::{BackwardOperands, NormKind, Size, Weight, backward, backward_partials};
use kernels_gpu::layernorm_backward;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

pub const FAMILY: Family = Family {
    name: "layernorm_backward",
    problem: "dinp (rows, C) += the gradient of inp; dweight and dbias (C) += sums over rows.",
    kernels: &[
        Kernel::new(
            29,
            "layernorm_backward_naive",
            file!("layernorm_backward/naive.rs"),
            "One thread for each row, and atomic additions for each element.",
            |s| {
                let Problem { dinp, dweight, dbias, dout, inp, weight, mean, rstd, rows, channels } =
                    problem::<f32>(s)?;
                let launch = layernorm_backward::naive::layernorm_backward_naive(
                    dinp,
                    dweight,
                    dbias,
                    dout,
                    inp,
                    weight,
                    mean,
                    rstd,
                    rows as u32,
                    channels as u32,
                );
                s.launch(launch, blocks(rows, 128), 0);
                Ok(())
            },
        ),
        Kernel::new(
            30,
            "layernorm_backward_warp",
            file!("layernorm_backward/warp.rs"),
            "One warp for each row.",
            |s| {
                let Problem { dinp, dweight, dbias, dout, inp, weight, mean, rstd, rows, channels } =
                    problem::<f32>(s)?;
                let launch = layernorm_backward::warp::layernorm_backward_warp(
                    dinp,
                    dweight,
                    dbias,
                    dout,
                    inp,
                    weight,
                    mean,
                    rstd,
                    rows as u32,
                    channels as u32,
                );
                s.launch(launch, blocks(rows, 8), 0);
                Ok(())
            },
        ),
        Kernel::new(
            31,
            "layernorm_backward_shared",
            file!("layernorm_backward/shared_sums.rs"),
            "Sums of a block in shared memory: one global addition for each block and column.",
            |s| {
                let Problem { dinp, dweight, dbias, dout, inp, weight, mean, rstd, rows, channels } =
                    problem::<f32>(s)?;
                let launch = layernorm_backward::shared_sums::layernorm_backward_shared(
                    dinp,
                    dweight,
                    dbias,
                    dout,
                    inp,
                    weight,
                    mean,
                    rstd,
                    rows as u32,
                    channels as u32,
                );
                let shared = shared_bytes(|layout| layernorm_backward::shared_sums::shared(layout, channels));
                s.launch(launch, [2 * s.sm_count() as u32, 1, 1], shared);
                Ok(())
            },
        ),
        Kernel::new(
            32,
            "layernorm_backward_columns",
            file!("layernorm_backward/columns.rs"),
            "Each lane keeps the sums of its columns in registers, and a second kernel adds up the warps: no atomics.",
            columns,
        ),
        Kernel::new(
            33,
            "layernorm_backward_production",
            "gpu/src/norm/backward.rs",
            "Rows wait in shared memory, so registers hold only the sums.",
            production,
        ),
    ],
};

struct Problem<T> {
    dinp: GlobalMut<bf16>,
    dweight: GlobalMut<T>,
    dbias: GlobalMut<T>,
    dout: Global<bf16>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: usize,
    channels: usize,
}

/// The operands of the reference.
#[derive(Clone)]
struct Operands {
    dout: Values<bf16>,
    inp: Values<bf16>,
    weight: Values<bf16>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    channels: usize,
}

impl Operands {
    /// Returns the normalized input.
    fn normed(&self, i: usize) -> f64 {
        let row = i / self.channels;
        (self.inp.at(i) - f64::from(self.mean[row])) * f64::from(self.rstd[row])
    }

    /// Returns the gradient of inp.
    fn dinp(&self, i: usize) -> f64 {
        let (row, n) = (i / self.channels, self.channels as f64);
        let elements = row * self.channels..(row + 1) * self.channels;
        let g = |i: usize| self.dout.at(i) * self.weight.at(i % self.channels);
        let mean_g = elements.clone().map(g).sum::<f64>() / n;
        let mean_gx = elements.map(|i| g(i) * self.normed(i)).sum::<f64>() / n;
        f64::from(self.rstd[row]) * (g(i) - mean_g - self.normed(i) * mean_gx)
    }
}

/// `T` is the type of the gradients of the parameters.
fn problem<T: Element + Pod>(s: &mut Session) -> Result<Problem<T>> {
    let [rows, channels] = sizes(s);
    let n = rows * channels;
    let (dout, inp) = (s.noise::<bf16>("dout", n, 1.0)?, s.noise::<bf16>("inp", n, 2.0)?);
    let weight = s.noise::<bf16>("weight", channels, 1.0)?;
    let of_rows: Vec<[f64; 2]> = (0..rows).into_par_iter().map(|row| statistics(&inp.values, row, channels)).collect();
    let [mean, rstd] = [0, 1].map(|k| of_rows.iter().map(|of_row| of_row[k] as f32).collect::<Vec<_>>());
    let (dinp, old_dinp) = s.noisy_buffer::<bf16>("dinp", n, 1.0)?;
    let (dweight, old_dweight) = s.noisy_buffer::<T>("dweight", channels, 1.0)?;
    let (dbias, old_dbias) = s.noisy_buffer::<T>("dbias", channels, 1.0)?;
    let (mean_view, rstd_view) = (s.input("mean", &mean)?, s.input("rstd", &rstd)?);
    s.work.bytes = 8 * n + 8 * rows + channels * (2 + 4 * size_of::<T>());
    let operands = Operands { dout: dout.values, inp: inp.values, weight: weight.values, mean, rstd, channels };
    let (for_dweight, for_dbias) = (operands.clone(), operands.dout.clone());
    s.expect("dinp", dinp, n, Tolerance::BF16, move |i| old_dinp.at(i) + operands.dinp(i));
    s.expect("dweight", dweight, channels, Tolerance::BF16, move |c| {
        let terms = (c..n).step_by(channels).map(|i| for_dweight.dout.at(i) * for_dweight.normed(i));
        old_dweight.at(c) + terms.sum::<f64>()
    });
    s.expect("dbias", dbias, channels, Tolerance::BF16, move |c| {
        old_dbias.at(c) + (c..n).step_by(channels).map(|i| for_dbias.at(i)).sum::<f64>()
    });
    Ok(Problem {
        dinp,
        dweight,
        dbias,
        dout: dout.view,
        inp: inp.view,
        weight: weight.view,
        mean: mean_view,
        rstd: rstd_view,
        rows,
        channels,
    })
}

fn columns(s: &mut Session) -> Result<()> {
    use layernorm_backward::columns::{layernorm_backward_add_columns, layernorm_backward_columns};
    let Problem { dinp, dweight, dbias, dout, inp, weight, mean, rstd, rows, channels } = problem::<f32>(s)?;
    let (grid, c) = (s.sm_count() as u32, channels as u32);
    let warps = 8 * grid;
    let partials = s.output("partials", warps as usize * 2 * channels)?;
    let launch =
        layernorm_backward_columns(dinp, partials, dout, inp, weight, mean, rstd, rows as u32, channels as u32);
    s.launch(launch, [grid, 1, 1], 0);
    let launch = layernorm_backward_add_columns(dweight, dbias, partials.reader(), warps, c);
    s.launch(launch, blocks(2 * channels, 128), 0);
    Ok(())
}

fn production(s: &mut Session) -> Result<()> {
    let Problem { dinp, dweight, dbias, dout, inp, weight, mean, rstd, rows, channels } = problem::<bf16>(s)?;
    let size = Size { norm: NormKind::LayerNorm, rows, channels, sm_count: s.sm_count() };
    let partials = backward_partials::<bf16>(size, 2).context("no instance for these channels")?;
    let partials = s.output("partials", partials)?;
    let weight = Weight { weight, dweight, dbias: Some(dbias), column_sums: None, partials };
    let operands = BackwardOperands { dinp, dout, inp, mean: Some(mean), rstd, weight: Some(weight) };
    s.launch_all(backward::<bf16>(operands, size).context("no instance for these channels")?);
    Ok(())
}
