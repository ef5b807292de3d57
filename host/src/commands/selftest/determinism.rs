//! `selftest --determinism`: compares two runs from the same seed. The second one uses CUDA graphs where the engine supports them.

use crate::commands::resources::{Hardware, describe};
use crate::terminal;
use anyhow::bail;
use engine::open::{Device, Precision};
use engine::{Algorithms, Result};
use model::Fp8Recipe;
use std::time::Instant;
use system::progress::{self, Unit};
use verify::selftest::determinism::{GRAD_ACCUM, Group, Trace, Trial, TrialShape};

/// Fails unless both runs are bitwise equal after every step, in the requested precision or in each that the device supports.
pub fn run(hardware: &Hardware, steps: usize) -> Result<()> {
    let opened = hardware.open()?;
    let device = opened.device;
    if opened.note.is_some() {
        terminal::note(&format!("device: {}", describe(&opened)))?;
    }
    // The device's memory is needed by the runs.
    drop(opened);
    let precisions = match (hardware.precision, device) {
        (Some(precision), _) => vec![precision],
        (None, Device::Cuda) => vec![Precision::Bf16, Precision::Fp32],
        (None, _) => vec![Precision::Fp32],
    };
    for precision in precisions {
        let recipes: &[_] = match precision {
            Precision::Fp8 => &[Some(Fp8Recipe::Current), Some(Fp8Recipe::Delayed)],
            Precision::Bf16 | Precision::Fp32 => &[None],
        };
        for &recipe in recipes {
            compare(&Hardware { device, precision: Some(precision), ..hardware.clone() }, recipe, steps)?;
        }
    }
    Ok(())
}

fn compare(hardware: &Hardware, recipe: Option<Fp8Recipe>, steps: usize) -> Result<()> {
    let (first, algorithms) = trace(hardware, recipe, steps, 1, None)?;
    let (second, _) = trace(hardware, recipe, steps, 2, algorithms.as_ref())?;
    terminal::line(&format!("{:<16} {:<16}  run 2", "all steps", "run 1"))?;
    for group in Group::ALL {
        if let Some((a, b)) = first.hash(group).zip(second.hash(group)) {
            terminal::line(&format!(
                "{:<16} {a:016x}  {b:016x}  {}",
                group.name(),
                if a == b { "identical" } else { "DIFFERENT" }
            ))?;
        }
    }
    if let Some((step, part)) = first.first_difference(&second) {
        bail!("two runs from the same seed differ, first after step {step}, in {part}");
    }
    terminal::line("identical\n")?;
    Ok(())
}

/// Trains on a new engine, with the GEMM algorithms of an earlier run if given, and returns hashes of every step.
fn trace(
    hardware: &Hardware,
    recipe: Option<Fp8Recipe>,
    steps: usize,
    number: usize,
    algorithms: Option<&Algorithms>,
) -> Result<(Trace, Option<Algorithms>)> {
    let mut engine = hardware.open()?.engine;
    let scale = TrialShape::STANDARD;
    if number == 1 {
        let TrialShape { layers, channels, b, t, .. } = scale;
        terminal::line(&format!(
            "{}, {}{}: {layers} layers, {channels} channels, two runs of {steps} steps of {GRAD_ACCUM} x {b} x {t} tokens",
            engine.describe(),
            engine.dtype().name(),
            recipe.map_or_else(String::new, |recipe| format!(" and FP8 with {recipe:?} scaling").to_lowercase())
        ))?;
    }
    let began = Instant::now();
    let trial = Trial::new(&mut *engine, scale, recipe, algorithms)?;
    // A CUDA graph must compute the same as separate launches.
    let mut trial = if number == 1 { trial } else { trial.with_cuda_graph() };
    let progress = progress::start("training", Unit::Count, steps as u64);
    for _ in 0..steps {
        trial.step()?;
        progress.add(1);
    }
    drop(progress);
    let trace = trial.into_trace();
    terminal::line(&format!("run {number}: loss {:.6} after {:.1} s", trace.last_loss, began.elapsed().as_secs_f64()))?;
    Ok((trace, engine.algorithms()))
}
