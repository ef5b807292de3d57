//! `selftest`: compares every operation of the engine with the CPU engine or the emulator, and checks determinism.

mod determinism;
mod report;

use super::json;
use super::resources::{Hardware, describe};
use crate::style::{Tone, is_colored, paint};
use crate::terminal;
use crate::values::{count, whole_number};
use anyhow::{Context, ensure};
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, HAS_EMULATOR, emulated};
use engine::open::{Device, MatmulBackend, Precision};
use engine::tensor::DType;
use engine::{Engine, Result};
use serde_json::{Value, json};
use std::io::stdout;
use std::path::PathBuf;
use system::progress::{self, Unit};
use verify::selftest::{Case, ErrorStats, Outcome, edge_cases, fp8, model_cases};

/// Check every operation of a GPU against the CPU
///
/// Without a GPU, the kernels run in the emulator, on small shapes, if the program was built with the feature `emulator`. The NAME fp8
/// selects the operations in FP8.
#[derive(Clone, Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
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

    /// On a GPU: write a new JSON file with the results of doctor, selftest and short benchmarks, for an issue about this GPU
    #[arg(long, value_name = "FILE", conflicts_with_all = ["filter", "small", "emulator", "determinism", "json"])]
    pub report: Option<PathBuf>,

    /// Print JSON instead of text: the largest error of each tensor of each case
    #[arg(long, conflicts_with = "determinism")]
    pub json: bool,

    /// Flags of the device.
    #[command(flatten)]
    pub hardware: Hardware,
}

/// Fails if an operation differs from the reference by more than its tolerance.
pub fn run(options: &Selftest) -> Result<()> {
    if let Some(path) = &options.report {
        return report::run(path);
    }
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
    ensure!(
        HAS_EMULATOR || !(without_gpu || options.emulator),
        "selftest: expected a GPU or a program with the emulator, found neither; run it with cargo run --release -p host --features \
         emulator -- selftest"
    );
    let engine = &mut *if without_gpu {
        terminal::note(
            "no GPU: the kernels run in the emulator, on small shapes; GEMMs use a reference implementation",
        )?;
        let fp8 = options.filter.as_ref().is_some_and(|filter| filter.contains("fp8"));
        let precision = if fp8 { Precision::Bf16 } else { options.hardware.precision.unwrap_or(Precision::Fp32) };
        emulated(EmulatedGpu { fp8, ..EmulatedGpu::new(fp8) }, precision, options.hardware.gelu_fusion, true)
    } else {
        terminal::note(&format!("device: {}, {}", describe(&opened), opened.engine.dtype().name()))?;
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
    let title = format!("{}, {}, against {}", engine.describe(), engine.dtype().name(), reference.describe());
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
        if !options.small && !without_gpu {
            cases.extend(fp8::model_cases());
        }
    }
    cases.retain(|case| wanted(case) && case.is_supported(&*engine));
    let print = if options.json { None } else { Some(print_case as fn(&Case, &Outcome) -> Result<()>) };
    if print.is_some() {
        print_heading(&title)?;
    }
    let outcomes = check(&cases, engine, reference, options.emulator, print)?;
    let passed = outcomes.iter().filter(|outcome| outcome.ok()).count();
    let failed = outcomes.len() - passed;
    if options.json {
        let cases: Vec<Value> = cases.iter().zip(&outcomes).map(|(case, outcome)| as_json(case, outcome)).collect();
        json::print(&json!({ "title": title, "cases": cases, "passed": passed, "failed": failed }))?;
    } else {
        terminal::line(&format!("{passed} cases passed, {failed} failed"))?;
    }
    ensure!(passed + failed > 0, "expected at least one case, found none; nothing was compared; choose another NAME");
    ensure!(failed == 0, "{failed} cases differ from the reference by more than their tolerance");
    Ok(())
}

fn check(
    cases: &[Case],
    engine: &mut dyn Engine,
    reference: &mut dyn Engine,
    emulator: bool,
    print: Option<fn(&Case, &Outcome) -> Result<()>>,
) -> Result<Vec<Outcome>> {
    let progress = progress::start("checking operations", Unit::Count, cases.len() as u64);
    let check = |case: &Case| {
        let outcome = if emulator { case.check_emulated(engine, reference)? } else { case.check(engine, reference)? };
        print.map_or(Ok(()), |print| print(case, &outcome))?;
        progress.add(1);
        Ok(outcome)
    };
    cases.iter().map(check).collect()
}

fn print_heading(title: &str) -> Result<()> {
    let [operation, shape, worst, differing, error, allowed] =
        ["operation", "shape", "worst in", "differing", "error", "allowed"];
    terminal::line(&format!(
        "{title}\n\n{operation:<28} {shape:<30} {worst:<10} {differing:>10} {error:>10} {allowed:>10}"
    ))
}

fn print_case(case: &Case, outcome: &Outcome) -> Result<()> {
    let Case { operation, shape, .. } = case;
    for (tensor, error) in outcome.errors.iter().filter(|(_, error)| !error.ok()) {
        let ErrorStats { index, expected, actual, .. } = error;
        terminal::line(&format!("{operation:<28} {shape:<30} {tensor}[{index}]: expected {expected}, found {actual}"))?;
    }
    let severity =
        |e: &ErrorStats| if e.ok() { e.max_rel_error / e.tolerance.max(f32::MIN_POSITIVE) } else { f32::INFINITY };
    let worst = outcome.errors.iter().max_by(|a, b| severity(&a.1).total_cmp(&severity(&b.1)));
    let Some((tensor, error)) = worst else { return Ok(()) };
    let colored = is_colored(&stdout());
    terminal::line(&format!(
        "{operation:<28} {shape:<30} {tensor:<10} {:>9.4}% {:>10.1e} {:>10.1e} {}",
        100.0 * error.mismatches as f64 / error.elements as f64,
        error.max_rel_error,
        error.tolerance,
        if error.ok() { paint("ok", Tone::Good, colored) } else { paint("FAILED", Tone::Bad, colored) }
    ))
}

fn as_json(case: &Case, outcome: &Outcome) -> Value {
    let tensor = |(tensor, error): &(&str, ErrorStats)| {
        json!({
            "tensor": tensor,
            "elements": error.elements,
            "differing": error.mismatches,
            "max_rel_error": error.max_rel_error,
            "allowed": error.tolerance,
            "okay": error.ok(),
        })
    };
    let tensors: Vec<Value> = outcome.errors.iter().map(tensor).collect();
    json!({ "operation": case.operation, "shape": case.shape, "okay": outcome.ok(), "tensors": tensors })
}
