//! `bench kernels`: times each operation and compares it with the roofline of the machine.

use super::table::{Cell, Column, Json, Spread, Table};
use crate::commands::resources::Hardware;
use crate::values::count;
use anyhow::ensure;
use engine::Result;
use engine::tensor::DType;
use model::Descriptor;
use system::progress::{self, Unit};
use verify::selftest::{Case, Work, copy, square_matmul, training_step_cases};

/// Time every operation of a training step, each after a short cooldown, as a percentage of the bandwidth of a copy or of the
/// throughput of a GEMM measured in the same run
#[derive(Clone, Debug, clap::Args)]
pub struct Kernels {
    /// Time only operations whose name contains this text
    #[arg(value_name = "NAME")]
    filter: Option<String>,
    /// Model sizes, separated by commas [default: d12 with batch 64, d24 with 32, d48 with 16]
    #[arg(short = 'e', long, value_name = "NAME", value_delimiter = ',')]
    model: Vec<String>,
    /// Sequences in a batch, for every model
    #[arg(short, long, value_name = "B", value_parser = count)]
    batch: Option<usize>,
    /// Tokens in a sequence
    #[arg(short = 't', long, value_name = "T", default_value = "1024", value_parser = count)]
    seq: usize,
    /// Number of elements in the copy that measures the ceiling of memory-bound operations
    #[arg(long, value_name = "N", default_value = "536870912", value_parser = count)]
    copy: usize,
    /// Rows and columns of the GEMM that measures the ceiling of compute-bound operations
    #[arg(long, alias = "product", value_name = "N", default_value = "8192", value_parser = count)]
    gemm: usize,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

/// The models and batches that are timed by default.
const DEFAULT: [(&str, usize); 3] = [("d12", 64), ("d24", 32), ("d48", 16)];

const COLUMNS: &[Column] = &[
    Column::text("model", "model", 9),
    Column::text("operation", "operation, kernels indented", 76),
    Column::text("shape", "shape", 26),
    Column::number("us", "us", 9, 1),
    Column::number("us_least", "min", 9, 1),
    Column::number("us_most", "max", 9, 1),
    Column::number("gbs", "GB/s", 6, 0),
    Column::number("percent_of_copy", "% copy", 7, 1),
    Column::number("tflops", "TFLOP/s", 8, 0),
    Column::number("percent_of_product", "% GEMM", 7, 1),
    Column::number("flop_per_byte", "FLOP/B", 7, 1),
];

/// The roofline: bytes and FLOPs per second.
#[derive(Clone, Copy)]
struct Ceilings {
    bytes: f64,
    flops: f64,
}

pub fn run(options: &Kernels) -> Result<()> {
    let default = DEFAULT.map(|(model, batch)| (model.to_owned(), batch));
    let named = options.model.iter().map(|model| (model.clone(), options.batch.unwrap_or(DEFAULT[0].1)));
    let mut models: Vec<_> = if options.model.is_empty() { default.into() } else { named.collect() };
    for (_, batch) in &mut models {
        *batch = options.batch.unwrap_or(*batch);
    }
    let models = models.iter().map(|(model, batch)| Ok((model, model.parse()?, *batch)));
    let models: Vec<(&String, Descriptor, usize)> = models.collect::<Result<_>>()?;

    let engine = &mut *options.hardware.open_quietly()?;
    let float = engine.dtype();
    let mut table = Table::new("kernels", COLUMNS, engine, &options.json);
    table.print_heading()?;
    let mut ceilings = Ceilings { bytes: f64::NAN, flops: f64::NAN };
    let case = copy(options.copy);
    let time = Spread::of(case.time(engine)?.samples);
    ceilings.bytes = case.work.bytes(float) as f64 / time.median;
    table.row(&cells("", case.operation, &case.shape, time, Work { flops: 0, ..case.work }, float, ceilings))?;
    let case = square_matmul(options.gemm);
    let time = Spread::of(case.time(engine)?.samples);
    ceilings.flops = case.work.flops as f64 / time.median;
    table.row(&cells("", "gemm", &case.shape, time, case.work, float, ceilings))?;
    table.note("copy_gbs", ceilings.bytes / 1e9);
    table.note("product_tflops", ceilings.flops / 1e12);

    let mut found = false;
    for (model, descriptor, batch) in models {
        let wanted = |case: &Case| options.filter.as_ref().is_none_or(|f| case.operation.contains(f.as_str()));
        let mut cases = training_step_cases(&descriptor, batch, options.seq, engine);
        cases.retain(wanted);
        let progress = progress::start("timing", Unit::Count, cases.len() as u64);
        for case in &cases {
            found = true;
            let speed = case.time(engine)?;
            progress.add(1);
            let time = Spread::of(speed.samples);
            table.row(&cells(model, case.operation, &case.shape, time, case.work, float, ceilings))?;
            if speed.kernels.len() > 1 {
                for (name, samples) in speed.kernels {
                    let part = case.parts.iter().find(|(part, _)| part.matches(&name));
                    let work = part.map_or(Work::default(), |(_, work)| *work);
                    table.row(&cells(model, &format!("  {name}"), "", Spread::of(samples), work, float, ceilings))?;
                }
            }
        }
    }
    let filter = options.filter.as_deref().unwrap_or_default();
    ensure!(
        found,
        "expected an operation whose name contains '{filter}', found none; `bench kernels` without a name lists them"
    );
    table.finish_rows()
}

/// Returns the cells of a row. Operations with FLOPs are compared with the GEMM, all others with the copy.
fn cells(
    model: &str,
    operation: &str,
    shape: &str,
    seconds: Spread,
    work: Work,
    float: DType,
    ceilings: Ceilings,
) -> [Cell; 11] {
    let rate = |amount: usize| (amount > 0).then(|| amount as f64 / seconds.median);
    let (bytes, flops) = (rate(if work.flops > 0 { 0 } else { work.bytes(float) }), rate(work.flops));
    let us = |seconds: f64| Cell::from(1e6 * seconds);
    [
        model.into(),
        operation.into(),
        shape.into(),
        us(seconds.median),
        us(seconds.least),
        us(seconds.most),
        bytes.map(|rate| rate / 1e9).into(),
        bytes.map(|rate| 100.0 * rate / ceilings.bytes).into(),
        flops.map(|rate| rate / 1e12).into(),
        flops.map(|rate| 100.0 * rate / ceilings.flops).into(),
        flops.map(|_| work.flops as f64 / work.bytes(float) as f64).into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_use_the_median_and_percentages_the_ceilings() {
        let seconds = Spread { median: 1e-3, least: 5e-4, most: 2e-3 };
        let ceilings = Ceilings { bytes: 4e12, flops: 8e14 };
        let row = |work| cells("d12", "sum", "8", seconds, work, DType::Bf16, ceilings);
        let moved = row(Work { floats: 1_000_000_000, bytes: 1_000_000, flops: 0 });
        let number = |x: f64| Cell::Number(x);
        assert_eq!(moved[3..6], [number(1000.0), number(500.0), number(2000.0)]);
        let close = |cell: &Cell, want: f64| matches!(cell, Cell::Number(x) if (x / want - 1.0).abs() < 1e-9);
        assert!(close(&moved[6], 2001.0) && close(&moved[7], 50.025), "{moved:?}");
        assert_eq!(moved[8..], [Cell::Empty, Cell::Empty, Cell::Empty]);
        let computed = row(Work { floats: 5, bytes: 5, flops: 400_000_000_000 });
        assert!(close(&computed[8], 400.0) && close(&computed[9], 50.0), "{computed:?}");
        // Five floats of two bytes, and five bytes.
        assert!(close(&computed[10], 4e11 / 15.0), "{computed:?}");
        assert_eq!(computed[6..8], [Cell::Empty, Cell::Empty]);
    }
}
