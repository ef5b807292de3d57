//! Whether a run fits into memory, said before any of it is allocated.

use crate::{Capacity, Descriptor, Gpt2, Recompute, Zero};
use anyhow::{Result, ensure};
use engine::Engine;
use engine::plan::Plan;

/// Positions in a batch are numbered in an i32.
const MOST_TOKENS: usize = i32::MAX as usize;

/// Plans a model; if its memory does not fit the engine's, the error says by how much, and what would fit.
pub fn plan(descriptor: Descriptor, capacity: Capacity, engine: &mut dyn Engine) -> Result<(Gpt2, Plan)> {
    plan_divided(descriptor, capacity, Zero::NONE, engine)
}

/// As [`plan`], for ranks that divide things among them.
pub fn plan_divided(
    descriptor: Descriptor,
    capacity: Capacity,
    zero: Zero,
    engine: &mut dyn Engine,
) -> Result<(Gpt2, Plan)> {
    let Capacity { b, t, .. } = capacity;
    ensure!(
        b.checked_mul(t).is_some_and(|tokens| tokens <= MOST_TOKENS),
        "--batch {b} x --seq {t}: expected at most {MOST_TOKENS} tokens at once"
    );
    let free = engine.memory_free()?;
    let (model, plan) = Gpt2::plan_divided(descriptor, capacity, zero, engine);
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
        advice(capacity, free, &mut |capacity| bytes(descriptor, capacity, zero, engine))
    );
    Ok((model, plan))
}

fn gib(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// What to change where `capacity` does not fit: the least recomputation that makes room, a smaller batch, or both.
fn advice(capacity: Capacity, free: usize, bytes: &mut dyn FnMut(Capacity) -> usize) -> String {
    let more: Vec<Recompute> =
        Recompute::ALL.into_iter().filter(|&level| capacity.training && level > capacity.recompute).collect();
    let enough = more.iter().copied().find(|&recompute| bytes(Capacity { recompute, ..capacity }) <= free);
    let mut largest = |recompute| largest_batch(Capacity { recompute, ..capacity }, free, bytes);
    let batch = largest(capacity.recompute);
    let smaller = format!("the largest that fits is --batch {batch}");
    if let Some(level) = enough.map(u8::from) {
        let without = if batch > 0 { format!("; without, {smaller}") } else { String::new() };
        return format!("--recompute {level} makes it fit{without}");
    }
    let most = more.last().map(|&level| (u8::from(level), largest(level)));
    match (batch, most) {
        (0, Some((level, b @ 1..))) => format!("--batch {b} with --recompute {level} fits"),
        (0, _) => "not even --batch 1 fits: use a smaller --model or --seq".to_owned(),
        (_, Some((level, b))) if b > batch => format!("{smaller}, or --batch {b} with --recompute {level}"),
        _ => smaller,
    }
}

fn bytes(descriptor: Descriptor, capacity: Capacity, zero: Zero, engine: &mut dyn Engine) -> usize {
    Gpt2::plan_divided(descriptor, capacity, zero, engine).1.bytes()
}

/// Below `capacity.b`, which does not fit; 0 if none does.
fn largest_batch(capacity: Capacity, free: usize, bytes: &mut dyn FnMut(Capacity) -> usize) -> usize {
    let (mut fits, mut too_large) = (0, capacity.b);
    while fits + 1 < too_large {
        let b = fits.midpoint(too_large);
        if bytes(Capacity { b, ..capacity }) <= free {
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
    use engine::cpu::Cpu;

    fn d12() -> Descriptor {
        "d12".parse().unwrap()
    }

    fn capacity(b: usize, recompute: Recompute) -> Capacity {
        Capacity { b, t: 1024, training: true, master_weights: true, recompute }
    }

    fn of_d12(capacity: Capacity) -> usize {
        bytes(d12(), capacity, Zero::NONE, &mut Cpu::new())
    }

    #[test]
    fn the_largest_batch_fits_and_one_more_does_not() {
        let capacity = capacity(1000, Recompute::Nothing);
        let bytes = |b| of_d12(Capacity { b, ..capacity });
        for expected in [1, 2, 37, 999] {
            let (free, more) = (bytes(expected), bytes(expected + 1));
            for free in [free, more - 1] {
                assert_eq!(largest_batch(capacity, free, &mut of_d12), expected);
            }
        }
        let free = bytes(1) - 1;
        assert_eq!(largest_batch(capacity, free, &mut of_d12), 0);
    }

    #[test]
    fn the_least_that_makes_room_is_advised() {
        let bytes = |b, recompute| of_d12(capacity(b, recompute));
        let advice = |b, recompute, free| advice(capacity(b, recompute), free, &mut of_d12);
        let [nothing, gelu, norms] = Recompute::ALL;
        assert!(bytes(8, norms) < bytes(8, gelu) && bytes(8, gelu) < bytes(8, nothing));
        let text = advice(8, nothing, bytes(8, gelu));
        assert!(text.starts_with("--recompute 1 makes it fit; without, the largest that fits is --batch "), "{text}");
        let text = advice(8, nothing, bytes(8, gelu) - 1);
        assert!(text.starts_with("--recompute 2 makes it fit"), "{text}");
        assert_eq!(advice(1, nothing, bytes(1, norms)), "--recompute 2 makes it fit");
        // As many as 20 fit without recomputation, more with it, but not as many as asked for.
        let text = advice(64, nothing, bytes(20, nothing));
        assert!(text.starts_with("the largest that fits is --batch 20, or --batch 3"), "{text}");
        assert!(text.ends_with(" with --recompute 2"), "{text}");
        assert_eq!(advice(64, norms, bytes(20, norms)), "the largest that fits is --batch 20");
        assert_eq!(advice(64, nothing, bytes(1, norms)), "--batch 1 with --recompute 2 fits");
        let inference = Capacity { training: false, ..capacity(64, nothing) };
        let free = of_d12(Capacity { b: 5, ..inference });
        assert_eq!(super::advice(inference, free, &mut of_d12), "the largest that fits is --batch 5");
    }

    #[test]
    fn a_model_too_large_is_refused_with_figures() {
        let descriptor: Descriptor = "gpt3:c12288".parse().unwrap();
        let capacity = Capacity { t: 2048, ..capacity(64, Recompute::Nothing) };
        let message = plan(descriptor, capacity, &mut Cpu::new()).unwrap_err().to_string();
        assert!(message.contains("GiB more than") && message.contains("not even --batch 1"), "{message}");
    }
    #[test]
    fn batches_whose_positions_have_no_number_are_refused() {
        let descriptor = Descriptor::new(1, 1, 1, MOST_TOKENS, 50_257).unwrap();
        let error = |b, t| {
            plan(descriptor, Capacity { t, ..capacity(b, Recompute::Nothing) }, &mut Cpu::new())
                .unwrap_err()
                .to_string()
        };
        for (b, t) in [(2, 1 << 30), (MOST_TOKENS, MOST_TOKENS), (usize::MAX, usize::MAX)] {
            assert_eq!(error(b, t), format!("--batch {b} x --seq {t}: expected at most 2147483647 tokens at once"));
        }
        assert!(error(1, MOST_TOKENS).contains("GiB more than"));
    }
}
