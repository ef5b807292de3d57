//! Softmax of rows.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks, shared_bytes};
use crate::values::Values;
use anyhow::Result;
use cuda_std::{Global, GlobalMut, bf16};
use kernels_gpu::softmax;

pub const FAMILY: Family = Family {
    name: "softmax",
    problem: "out (rows, n) = e^(inp - max) / sum of e^(inp - max), for each row.",
    kernels: &[
        Kernel::new(34, "softmax_naive", file!("softmax/naive.rs"), "One thread for each row, three passes.", |s| {
            let Problem { out, inp, rows, n } = problem(s)?;
            s.launch(softmax::naive::softmax_naive(out, inp, rows as u32, n as u32), blocks(rows, 32), 0);
            Ok(())
        }),
        Kernel::new(35, "softmax_warp", file!("softmax/warp.rs"), "One warp for each row.", |s| {
            let Problem { out, inp, rows, n } = problem(s)?;
            s.launch(softmax::warp::softmax_warp(out, inp, rows as u32, n as u32), blocks(rows, 4), 0);
            Ok(())
        }),
        Kernel::new(
            36,
            "softmax_online",
            file!("softmax/online.rs"),
            "Online softmax: maximum and sum in one pass.",
            |s| {
                let Problem { out, inp, rows, n } = problem(s)?;
                s.launch(softmax::online::softmax_online(out, inp, rows as u32, n as u32), blocks(rows, 4), 0);
                Ok(())
            },
        ),
        Kernel::new(37, "softmax_block", file!("softmax/block.rs"), "A block of 1024 threads for each row.", |s| {
            let Problem { out, inp, rows, n } = problem(s)?;
            let shared = shared_bytes(softmax::block::shared);
            s.launch(softmax::block::softmax_block(out, inp, n as u32), blocks(rows, 1), shared);
            Ok(())
        }),
        Kernel::new(
            38,
            "softmax_packets",
            file!("softmax/packets.rs"),
            "Eight elements for each access and each rescaling.",
            |s| {
                let Problem { out, inp, rows, n } = problem(s)?;
                let shared = shared_bytes(softmax::block::shared);
                s.launch(softmax::packets::softmax_packets(out, inp, n as u32), blocks(rows, 1), shared);
                Ok(())
            },
        ),
        Kernel::new(
            39,
            "softmax_registers",
            file!("softmax/registers.rs"),
            "The row stays in the registers of the block and is read once.",
            |s| {
                let Problem { out, inp, rows, n } = problem(s)?;
                let shared = shared_bytes(softmax::block::shared);
                s.launch(softmax::registers::softmax_registers(out, inp, n as u32), blocks(rows, 1), shared);
                Ok(())
            },
        ),
    ],
};

struct Problem {
    out: GlobalMut<bf16>,
    inp: Global<bf16>,
    rows: usize,
    n: usize,
}

/// Returns the natural logarithm of the sum of e^x over `n` elements from `first` on.
pub(super) fn log_sum_exp(x: &Values<bf16>, first: usize, n: usize) -> f64 {
    let elements = || (first..first + n).map(|i| x.at(i));
    let max = elements().fold(f64::NEG_INFINITY, f64::max);
    max + elements().map(|x| (x - max).exp()).sum::<f64>().ln()
}

fn problem(s: &mut Session) -> Result<Problem> {
    let [rows, n] = s.pick([5, 1000], [2048, 50304]);
    let (inp, out) = (s.noise::<bf16>("inp", rows * n, 8.0)?, s.output("out", rows * n)?);
    s.work.bytes = 4 * rows * n;
    let x = inp.values;
    s.expect("out", out, rows * n, Tolerance::BF16, move |i| (x.at(i) - log_sum_exp(&x, i / n * n, n)).exp());
    Ok(Problem { out, inp: inp.view, rows, n })
}
