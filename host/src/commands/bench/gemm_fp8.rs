//! `bench gemm --fp8`: the GEMMs of linear layers in FP8, beside cuBLASLt in bf16 and FP8.

use super::table::{Cell, Column, Json, Table};
use crate::commands::resources::Hardware;
use engine::Result;
use engine::cuda::fp8::{Fp8Bench, Fp8Case};
use engine::open;
use engine::ops::MatmulShape;
use gpu::matmul::launch::GemmShape;
use system::progress::{self, Unit};

const COLUMNS: &[Column] = &[
    Column::text("gemm", "GEMM", 36),
    Column::text("how", "computed by", 30),
    Column::number("us", "us", 9, 1),
    Column::number("tflops", "TFLOP/s", 9, 0),
    Column::number("error", "max error", 10, 4),
    Column::number("gb_per_s", "GB/s", 8, 0),
];

/// Measures the forward pass and the weight gradient of each layer, and the quantization of the first layer's input.
///
/// Errors are in units of the root mean square of the result. Those of timed GEMMs include the rounding of out to bf16. Two
/// more rows of each forward pass give the errors of the kernels' f32 sums, compared with f64.
pub fn run(shapes: &[MatmulShape], hardware: &Hardware, json: &Json) -> Result<()> {
    let mut bench = Fp8Bench::open(&hardware.gpu(open::GPU))?;
    let mut table = Table::of("gemm_fp8", COLUMNS, &bench.describe(), "fp8", json);
    table.print_heading()?;
    let progress = progress::start("timing", Unit::Count, 2 * shapes.len() as u64);
    for &MatmulShape { rows, c, oc } in shapes {
        let forward = GemmShape { m: rows, n: oc, k: c };
        let weight_gradient = GemmShape { m: oc, n: c, k: rows };
        for (shape, weight_gradient) in [(forward, false), (weight_gradient, true)] {
            let GemmShape { m, n, k } = shape;
            let kind = if weight_gradient { " += weight grad" } else { "" };
            let name = format!("{m}x{n}, K = {k}{kind}");
            let (timings, accumulation) = bench.measure(Fp8Case { shape, weight_gradient })?;
            progress.add(1);
            for timing in timings {
                let us = 1e3 * f64::from(timing.milliseconds);
                let rate = 2.0 * (m * n * k) as f64 / us / 1e6;
                let error = timing.error.map_or(Cell::Empty, Cell::from);
                table.row(&[name.clone().into(), timing.name.into(), us.into(), rate.into(), error, Cell::Empty])?;
            }
            let Some(accumulation) = accumulation else { continue };
            for (mode, [rms, largest]) in [("fast", accumulation.fast), ("exact", accumulation.exact)] {
                let text = format!("f32 sums, {mode}: rms error {rms:.1e}");
                table.row(&[
                    name.clone().into(),
                    text.into(),
                    Cell::Empty,
                    Cell::Empty,
                    largest.into(),
                    Cell::Empty,
                ])?;
            }
        }
    }
    if let Some(&MatmulShape { rows, c, .. }) = shapes.first() {
        for timing in bench.measure_quantization(rows, c)? {
            let us = 1e3 * f64::from(timing.milliseconds);
            let rate = timing.bytes as f64 / us / 1e3;
            let name = format!("{rows}x{c}");
            table.row(&[name.into(), timing.name.into(), us.into(), Cell::Empty, Cell::Empty, rate.into()])?;
        }
    }
    table.finish()
}
