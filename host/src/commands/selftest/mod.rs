//! `selftest`: compares every operation of the engine with the CPU engine or the emulator, and checks determinism.

mod determinism;

use super::resources::{Hardware, describe};
use crate::values::{count, whole_number};
use anyhow::{Context, ensure};
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, emulated};
use engine::open::{Device, MatmulBackend, Precision};
use engine::tensor::DType;
use engine::{Engine, Result};
use std::io::{Write, stderr, stdout};
use verify::selftest::{Case, ErrorStats, edge_cases, fp8, model_cases};

/// Check every operation of a GPU against the CPU
///
/// Without a GPU, the kernels run in the emulator, on small shapes.
#[derive(Clone, Debug, clap::Args)]
pub struct Selftest {
    /// Check only cases whose operation or shape contains this text, such as rotary or softcap
    #[arg(value_name = "NAME")]
    pub filter: Option<String>,
    /// Check only small edge-case shapes, for slow tools such as compute-sanitizer
    #[arg(long)]
    pub small: bool,
    /// Compare with the same kernels in the emulator instead. Results must be bitwise equal, or equal within rounding where
    /// the order of a sum differs
    #[arg(long)]
    pub emulator: bool,
    /// With --matmul rust: use the N-th candidate tile configuration of each GEMM (modulo their number) instead of the fastest
    #[arg(long, alias = "tiling", value_name = "N", requires = "matmul", value_parser = whole_number)]
    pub tile_config: Option<usize>,
    /// Train a small model twice from the same seed instead, in each supported precision. Weights, m, v, gradients and losses
    /// must be bitwise equal after every step. Only the second run uses CUDA graphs
    #[arg(long, conflicts_with_all = ["filter", "small", "emulator"])]
    pub determinism: bool,
    /// Steps of each run of --determinism
    #[arg(long, value_name = "N", value_parser = count, default_value = "100", requires = "determinism")]
    pub steps: usize,

    /// Flags of the device.
    #[command(flatten)]
    pub hardware: Hardware,
}

/// Fails if an operation differs from the reference by more than its tolerance.
pub fn run(options: &Selftest) -> Result<()> {
    if options.determinism {
        return determinism::run(&options.hardware, options.steps);
    }
    ensure!(
        options.tile_config.is_none() || options.hardware.matmul == MatmulBackend::Rust,
        "--tile-config: expected --matmul rust, found another kernel choice; tile configurations exist only for the Rust kernels"
    );
    ensure!(
        options.hardware.device != Device::Cpu,
        "--device: expected a GPU or its emulator, found cpu, which is the reference; omit the flag"
    );
    let hardware = Hardware { kernel_config: options.tile_config, ..options.hardware.clone() };
    let opened = hardware.open()?;
    let without_gpu = opened.device == Device::Cpu;
    let engine = &mut *if without_gpu {
        writeln!(stderr(), "no GPU: the kernels run in the emulator, on small shapes; GEMMs are those of a reference")?;
        let precision = options.hardware.precision.unwrap_or(Precision::Fp32);
        emulated(EmulatedGpu::default(), precision, options.hardware.gelu_fusion, true)
    } else {
        writeln!(stderr(), "device: {}, {}", describe(&opened), opened.engine.dtype().name())?;
        opened.engine
    };
    ensure!(
        !(options.emulator && without_gpu),
        "--emulator: expected a GPU to compare with the emulator, found none; omit the flag to compare the emulator with the CPU"
    );
    let reference: &mut dyn Engine = if options.emulator {
        &mut *engine
            .emulated()
            .context("--emulator: expected a GPU, found the CPU, which has no kernels; use --device cuda")?
    } else {
        &mut Cpu::new()
    };
    writeln!(stdout(), "{}, {}, against {}", engine.describe(), engine.dtype().name(), reference.describe())?;
    let wanted = |case: &Case| {
        let contains = |f: &String| case.operation.contains(f.as_str()) || case.shape.contains(f.as_str());
        options.filter.as_ref().is_none_or(contains)
    };
    let mut cases = edge_cases();
    if !options.small && !without_gpu {
        cases.extend(model_cases());
    }
    if engine.fp8_dtype() == Some(DType::Fp8) {
        cases.extend(fp8::edge_cases());
        if !options.small {
            cases.extend(fp8::model_cases());
        }
    }
    check(cases.iter().filter(|c| wanted(c)), engine, reference, options.emulator)
}

fn check<'a>(
    cases: impl Iterator<Item = &'a Case>,
    engine: &mut dyn Engine,
    reference: &mut dyn Engine,
    emulator: bool,
) -> Result<()> {
    writeln!(
        stdout(),
        "\n{:<28} {:<30} {:<10} {:>10} {:>10} {:>10}",
        "operation",
        "shape",
        "worst in",
        "differing",
        "error",
        "allowed"
    )?;
    let (mut passed, mut failed) = (0, 0);
    for case in cases {
        let outcome = if emulator { case.check_emulated(engine, reference)? } else { case.check(engine, reference)? };
        for (tensor, error) in &outcome.errors {
            if error.ok() {
                continue;
            }
            writeln!(
                stdout(),
                "{:<28} {:<30} {tensor}[{}]: expected {}, found {}",
                case.operation,
                case.shape,
                error.index,
                error.expected,
                error.actual
            )?;
        }
        let severity =
            |e: &ErrorStats| if e.ok() { e.max_rel_error / e.tolerance.max(f32::MIN_POSITIVE) } else { f32::INFINITY };
        let worst = outcome.errors.iter().max_by(|a, b| severity(&a.1).total_cmp(&severity(&b.1)));
        if let Some((tensor, error)) = worst {
            let verdict = if error.ok() { "ok" } else { "FAILED" };
            writeln!(
                stdout(),
                "{:<28} {:<30} {tensor:<10} {:>9.4}% {:>10.1e} {:>10.1e} {verdict}",
                case.operation,
                case.shape,
                100.0 * error.mismatches as f64 / error.elements as f64,
                error.max_rel_error,
                error.tolerance
            )?;
        }
        if outcome.errors.iter().all(|(_, error)| error.ok()) {
            passed += 1;
        } else {
            failed += 1;
        }
    }
    writeln!(stdout(), "{passed} cases passed, {failed} failed")?;
    ensure!(passed + failed > 0, "expected at least one case, found none; nothing was compared; choose another NAME");
    ensure!(failed == 0, "{failed} cases differ from the reference by more than their tolerance");
    Ok(())
}
