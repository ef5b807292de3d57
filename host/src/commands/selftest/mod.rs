//! `selftest`: every operation of the engine at hand against the CPU engine or the emulator; whether two runs agree.

mod determinism;

use super::resources::Hardware;
use crate::cli::count;
use anyhow::{Context, ensure};
use engine::cpu::Cpu;
use engine::open::MatmulBackend;
use engine::{Engine, Result};
use verify::selftest::{Case, ErrorStats, edge_cases, model_cases};

/// Checks every operation of a GPU against the CPU
#[derive(Clone, Debug, clap::Args)]
pub struct Selftest {
    /// Only operations whose name contains this
    pub filter: Option<String>,
    /// Only the small, awkward shapes (for compute-sanitizer, which slows a kernel down a hundredfold)
    #[arg(long)]
    pub small: bool,
    /// Compare with the same kernels in the emulator instead: the same bits where a kernel's operations are exact, the same
    /// values within rounding where sums run in another order
    #[arg(long)]
    pub emulator: bool,
    /// With --matmul rust: the N-th of the tilings of each product that may be the fastest on this GPU, counted round, instead of
    /// the one that was found to be
    #[arg(long, value_name = "N", requires = "matmul")]
    pub kernel_config: Option<usize>,
    /// Train a small model twice from one seed instead, in bf16 and in fp32 where there are both: weights, m, v, gradients and
    /// losses must be the same in every bit after every step; the second records its micro-steps, as `train` does
    #[arg(long, conflicts_with_all = ["filter", "small", "emulator"])]
    pub determinism: bool,
    /// Steps of each of these runs
    #[arg(long, value_name = "N", value_parser = count, default_value = "100", requires = "determinism")]
    pub steps: usize,

    #[command(flatten)]
    pub hardware: Hardware,
}

/// Fails if an operation differs from the reference by more than allowed.
pub fn run(options: &Selftest) -> Result<()> {
    if options.determinism {
        return determinism::run(&options.hardware, options.steps);
    }
    ensure!(
        options.kernel_config.is_none() || options.hardware.matmul == MatmulBackend::Rust,
        "--kernel-config: expected --matmul rust, which it configures"
    );
    let engine = &mut *Hardware { kernel_config: options.kernel_config, ..options.hardware.clone() }.open_quietly()?;
    let reference: &mut dyn Engine = if options.emulator {
        &mut *engine.emulated().context("--emulator: the CPU engine has no kernels; use --device cuda")?
    } else {
        &mut Cpu::new()
    };
    println!("{}, {}, against {}", engine.describe(), engine.dtype().name(), reference.describe());
    let wanted = |case: &Case| options.filter.as_ref().is_none_or(|f| case.operation.contains(f.as_str()));
    let mut cases = edge_cases();
    if !options.small {
        cases.extend(model_cases());
    }
    check(cases.iter().filter(|c| wanted(c)), engine, reference, options.emulator)
}

fn check<'a>(
    cases: impl Iterator<Item = &'a Case>,
    engine: &mut dyn Engine,
    reference: &mut dyn Engine,
    emulator: bool,
) -> Result<()> {
    println!(
        "\n{:<28} {:<30} {:<10} {:>10} {:>10} {:>10}",
        "operation", "shape", "worst in", "differing", "error", "allowed"
    );
    let (mut passed, mut failed) = (0, 0);
    for case in cases {
        let outcome = if emulator { case.check_emulated(engine, reference)? } else { case.check(engine, reference)? };
        for (tensor, error) in &outcome.errors {
            if error.ok() {
                continue;
            }
            println!(
                "{:<28} {:<30} {tensor}[{}] is {}, the reference has {}",
                case.operation, case.shape, error.index, error.actual, error.expected
            );
        }
        let share =
            |e: &ErrorStats| if e.ok() { e.max_rel_error / e.tolerance.max(f32::MIN_POSITIVE) } else { f32::INFINITY };
        let worst = outcome.errors.iter().max_by(|a, b| share(&a.1).total_cmp(&share(&b.1)));
        if let Some((tensor, error)) = worst {
            let verdict = if error.ok() { "ok" } else { "FAILED" };
            println!(
                "{:<28} {:<30} {tensor:<10} {:>9.4}% {:>10.1e} {:>10.1e} {verdict}",
                case.operation,
                case.shape,
                100.0 * error.mismatches as f64 / error.elements as f64,
                error.max_rel_error,
                error.tolerance
            );
        }
        if outcome.errors.iter().all(|(_, error)| error.ok()) {
            passed += 1;
        } else {
            failed += 1;
        }
    }
    println!("{passed} cases passed, {failed} failed");
    ensure!(failed == 0, "{failed} cases differ from the reference by more than allowed");
    Ok(())
}
