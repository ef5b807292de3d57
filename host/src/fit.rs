//! Whether a run fits into memory, said before any of it is allocated.

use crate::engine::Engine;
use crate::model::{Capacity, Descriptor, Gpt2};
use crate::plan::Plan;
use anyhow::{Result, ensure};

/// Plans a model; if its memory does not fit the engine's, the error says by how much, and which batch would.
pub fn plan(descriptor: Descriptor, capacity: Capacity, engine: &mut dyn Engine) -> Result<(Gpt2, Plan)> {
    let free = engine.memory_free()?;
    let (model, plan) = Gpt2::plan(descriptor, capacity, engine);
    let needed = plan.bytes();
    ensure!(
        needed <= free,
        "the model does not fit: batch {} x seq {} takes {} GiB, {} GiB more than the {} GiB free on {}; {}",
        capacity.b,
        capacity.t,
        gib(needed),
        gib(needed - free),
        gib(free),
        engine.describe(),
        match largest_batch(descriptor, capacity, engine, free) {
            0 => "not even --batch 1 fits: use a smaller --model or --seq".to_owned(),
            b => format!("the largest that fits is --batch {b}"),
        }
    );
    Ok((model, plan))
}

fn gib(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// Below `capacity.b`, which does not fit; 0 if none does.
fn largest_batch(descriptor: Descriptor, capacity: Capacity, engine: &mut dyn Engine, free: usize) -> usize {
    let (mut fits, mut too_large) = (0, capacity.b);
    while fits + 1 < too_large {
        let b = fits.midpoint(too_large);
        if Gpt2::plan(descriptor, Capacity { b, ..capacity }, engine).1.bytes() <= free {
            fits = b;
        } else {
            too_large = b;
        }
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;

    #[test]
    fn the_largest_batch_fits_and_one_more_does_not() {
        let descriptor: Descriptor = "d12".parse().unwrap();
        let mut engine = Cpu::new();
        let capacity = Capacity { b: 1000, t: 1024, training: true, master_weights: true };
        let mut bytes = |b| Gpt2::plan(descriptor, Capacity { b, ..capacity }, &mut engine).1.bytes();
        for expected in [1, 2, 37, 999] {
            let (free, more) = (bytes(expected), bytes(expected + 1));
            for free in [free, more - 1] {
                assert_eq!(largest_batch(descriptor, capacity, &mut Cpu::new(), free), expected);
            }
        }
        let free = bytes(1) - 1;
        assert_eq!(largest_batch(descriptor, capacity, &mut engine, free), 0);
    }

    #[test]
    fn a_model_too_large_is_refused_with_figures() {
        let descriptor: Descriptor = "gpt3:c12288".parse().unwrap();
        let capacity = Capacity { b: 64, t: 2048, training: true, master_weights: true };
        let message = plan(descriptor, capacity, &mut Cpu::new()).unwrap_err().to_string();
        assert!(message.contains("GiB more than") && message.contains("not even --batch 1"), "{message}");
    }
}
