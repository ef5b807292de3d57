//! Layer normalization.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks};
use crate::values::Values;
use anyhow::{Context, Result};
use cuda_std::{Global, GlobalMut, bf16};
use gpu::norm::launch::{ForwardOperands, NormKind, Size, forward};
use kernels_gpu::layernorm;

/// Launches a kernel of this family with `$rows` rows for each block.
macro_rules! launch {
    ($kernel:path, $rows:literal) => {
        |s| {
            let Problem { out, mean, rstd, inp, weight, bias, rows, channels } = problem(s)?;
            let launch = $kernel(out, mean, rstd, inp, weight, bias, rows as u32, channels as u32);
            s.launch(launch, blocks(rows, $rows), 0);
            Ok(())
        }
    };
}

pub const FAMILY: Family = Family {
    name: "layernorm",
    problem: "out (rows, C) = (inp - mean) rstd weight + bias, with mean and variance of each row.",
    kernels: &[
        Kernel::new(
            23,
            "layernorm_naive",
            file!("layernorm/naive.rs"),
            "One thread for each row, three passes.",
            launch!(layernorm::naive::layernorm_naive, 128),
        ),
        Kernel::new(
            24,
            "layernorm_warp",
            file!("layernorm/warp.rs"),
            "One warp for each row: coalesced loads, sums by shuffles.",
            launch!(layernorm::warp::layernorm_warp, 8),
        ),
        Kernel::new(
            25,
            "layernorm_one_pass",
            file!("layernorm/one_pass.rs"),
            "Mean and variance in one pass, from sums of shifted elements.",
            launch!(layernorm::one_pass::layernorm_one_pass, 8),
        ),
        Kernel::new(
            26,
            "layernorm_packets",
            file!("layernorm/packets.rs"),
            "Eight channels for each access.",
            launch!(layernorm::packets::layernorm_packets, 8),
        ),
        Kernel::new(
            27,
            "layernorm_registers",
            file!("layernorm/registers.rs"),
            "The row stays in registers and is read once.",
            launch!(layernorm::registers::layernorm_registers, 8),
        ),
        Kernel::new(
            28,
            "layernorm_production",
            "gpu/src/norm/forward.rs",
            "The next rows are copied to shared memory while the current ones are normalized.",
            |s| {
                let Problem { out, mean, rstd, inp, weight, bias, rows, channels } = problem(s)?;
                let operands = ForwardOperands { mean, rstd, inp, weight, bias, eps: 0.0 };
                let size = Size { norm: NormKind::LayerNorm, rows, channels, sm_count: s.sm_count() };
                let kernel = forward::<bf16>(out, operands, size, false).context("no instance for these channels")?;
                s.launch_all([kernel]);
                Ok(())
            },
        ),
    ],
};

/// Returns the rows and channels.
pub(super) fn sizes(s: &Session) -> [usize; 2] {
    s.pick([37, 776], [65536, 768])
}

/// Returns mean and rstd of a row.
pub(super) fn statistics(inp: &Values<bf16>, row: usize, channels: usize) -> [f64; 2] {
    let elements = || (row * channels..(row + 1) * channels).map(|i| inp.at(i));
    let mean = elements().sum::<f64>() / channels as f64;
    let variance = elements().map(|x| (x - mean).powi(2)).sum::<f64>() / channels as f64;
    [mean, (variance + 1e-5).sqrt().recip()]
}

struct Problem {
    out: GlobalMut<bf16>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    bias: Global<bf16>,
    rows: usize,
    channels: usize,
}

fn problem(s: &mut Session) -> Result<Problem> {
    let [rows, channels] = sizes(s);
    let inp = s.noise::<bf16>("inp", rows * channels, 2.0)?;
    let (weight, bias) = (s.noise::<bf16>("weight", channels, 1.0)?, s.noise::<bf16>("bias", channels, 1.0)?);
    let (out, mean, rstd) = (s.output("out", rows * channels)?, s.output("mean", rows)?, s.output("rstd", rows)?);
    s.work.bytes = 4 * rows * channels + 8 * rows + 4 * channels;
    let (x, w, b) = (inp.values.clone(), weight.values, bias.values);
    s.expect("out", out, rows * channels, Tolerance::BF16, move |i| {
        let (row, c) = (i / channels, i % channels);
        let [mean, rstd] = statistics(&x, row, channels);
        (x.at(i) - mean) * rstd * w.at(c) + b.at(c)
    });
    let (x, y) = (inp.values.clone(), inp.values);
    s.expect("mean", mean, rows, Tolerance::F32, move |row| statistics(&x, row, channels)[0]);
    s.expect("rstd", rstd, rows, Tolerance::F32, move |row| statistics(&y, row, channels)[1]);
    Ok(Problem { out, mean, rstd, inp: inp.view, weight: weight.view, bias: bias.view, rows, channels })
}
