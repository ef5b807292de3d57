//! `selftest --determinism`: two runs from one seed, the second with its micro-steps recorded, where the engine records.

use crate::commands::resources::Hardware;
use anyhow::bail;
use engine::open::{Device, Opened, Precision};
use engine::{Algorithms, Result};
use std::time::Instant;
use verify::selftest::determinism::{GRAD_ACCUM, Group, Scale, Trace, Trial};

/// Fails unless both runs leave the same bits after every step: in the precision that was asked for, or in each there is.
pub fn run(hardware: &Hardware, steps: usize) -> Result<()> {
    let Opened { engine, device, note, .. } = hardware.open()?;
    drop(engine);
    if let Some(note) = note {
        eprintln!("{note}");
    }
    let precisions = match (hardware.precision, device) {
        (Some(precision), _) => vec![precision],
        (None, Device::Cuda) => vec![Precision::Bf16, Precision::Fp32],
        (None, _) => vec![Precision::Fp32],
    };
    for precision in precisions {
        compare(&Hardware { device, precision: Some(precision), ..hardware.clone() }, steps)?;
    }
    Ok(())
}

fn compare(hardware: &Hardware, steps: usize) -> Result<()> {
    let (first, algorithms) = trace(hardware, steps, 1, None)?;
    let (second, _) = trace(hardware, steps, 2, algorithms.as_ref())?;
    println!("{:<16} {:<16}  run 2", "of every step", "run 1");
    for group in Group::ALL {
        if let Some((a, b)) = first.hash(group).zip(second.hash(group)) {
            println!("{:<16} {a:016x}  {b:016x}  {}", group.name(), if a == b { "identical" } else { "DIFFERENT" });
        }
    }
    if let Some((step, part)) = first.first_difference(&second) {
        bail!("two runs from one seed are not the same: they differ first after step {step}, in {part}");
    }
    println!("identical\n");
    Ok(())
}

/// A run on an engine of its own, which finds out how to compute matrix products, or computes them as another run did.
fn trace(
    hardware: &Hardware,
    steps: usize,
    number: usize,
    algorithms: Option<&Algorithms>,
) -> Result<(Trace, Option<Algorithms>)> {
    let mut engine = hardware.open()?.engine;
    let scale = Scale::STANDARD;
    if number == 1 {
        let Scale { layers, channels, b, t, .. } = scale;
        println!(
            "{}, {}: {layers} layers of {channels} channels, two runs of {steps} steps of {GRAD_ACCUM} x {b} x {t} tokens",
            engine.describe(),
            engine.dtype().name()
        );
    }
    let began = Instant::now();
    let trial = Trial::new(&mut *engine, scale, algorithms)?;
    // Recorded or queued piece by piece, the work is the same.
    let mut trial = if number == 1 { trial } else { trial.with_cuda_graph() };
    for _ in 0..steps {
        trial.step()?;
    }
    let trace = trial.into_trace();
    println!("run {number}: loss {:.6} after {:.1} s", trace.last_loss, began.elapsed().as_secs_f64());
    Ok((trace, engine.algorithms()))
}
