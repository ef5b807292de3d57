//! Check that a run fits into memory, before anything is allocated.

use crate::{Decoder, Descriptor, PlanOptions, Recompute};
use anyhow::{Result, ensure};
use engine::Engine;
use engine::plan::Plan;

/// Most tokens of a batch: positions are stored as i32.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Plans a model. If its memory exceeds the engine's, the error states by how much, and what would fit.
pub fn plan(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> Result<(Decoder, Plan)> {
    let PlanOptions { b, t, .. } = options;
    ensure!(
        b.checked_mul(t).is_some_and(|tokens| tokens <= MAX_TOKENS),
        "--batch {b} x --seq {t}: expected at most {MAX_TOKENS} tokens at once"
    );
    let free = engine.free_memory()?;
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    let needed = plan.bytes();
    ensure!(
        needed <= free,
        "the model does not fit: batch {} x seq {} takes {} GiB, {} GiB more than the {} GiB free on {}; {}",
        options.b,
        options.t,
        gib(needed),
        gib(needed - free),
        gib(free),
        engine.describe(),
        advice(options, free, &mut |options| bytes(descriptor, options, engine))
    );
    Ok((model, plan))
}

fn gib(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// Returns the changes that make `options` fit: the least recomputation, a smaller batch, or both.
fn advice(options: PlanOptions, free: usize, bytes: &mut dyn FnMut(PlanOptions) -> usize) -> String {
    let more: Vec<Recompute> =
        Recompute::ALL.into_iter().filter(|&level| options.training && level > options.recompute).collect();
    let enough = more.iter().copied().find(|&recompute| bytes(PlanOptions { recompute, ..options }) <= free);
    let mut largest = |recompute| largest_batch(PlanOptions { recompute, ..options }, free, bytes);
    let batch = largest(options.recompute);
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

fn bytes(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> usize {
    Decoder::plan(descriptor, options, engine).1.bytes()
}

/// Returns the largest batch below `options.b` that fits, or 0 if none does.
fn largest_batch(options: PlanOptions, free: usize, bytes: &mut dyn FnMut(PlanOptions) -> usize) -> usize {
    let (mut fits, mut too_large) = (0, options.b);
    while fits + 1 < too_large {
        let b = fits.midpoint(too_large);
        if bytes(PlanOptions { b, ..options }) <= free {
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

    fn options(b: usize, recompute: Recompute) -> PlanOptions {
        PlanOptions { recompute, ..PlanOptions::training(b, 1024) }
    }

    fn of_d12(options: PlanOptions) -> usize {
        bytes(d12(), options, &mut Cpu::new())
    }

    #[test]
    fn the_largest_batch_fits_and_one_more_does_not() {
        let options = options(1000, Recompute::Nothing);
        let bytes = |b| of_d12(PlanOptions { b, ..options });
        for expected in [1, 2, 37, 999] {
            let (free, more) = (bytes(expected), bytes(expected + 1));
            for free in [free, more - 1] {
                assert_eq!(largest_batch(options, free, &mut of_d12), expected);
            }
        }
        let free = bytes(1) - 1;
        assert_eq!(largest_batch(options, free, &mut of_d12), 0);
    }

    #[test]
    fn advice_names_the_least_change_that_fits() {
        let bytes = |b, recompute| of_d12(options(b, recompute));
        let advice = |b, recompute, free| advice(options(b, recompute), free, &mut of_d12);
        let [nothing, gelu, norms, layers] = Recompute::ALL;
        assert!([layers, norms, gelu, nothing].map(|level| bytes(8, level)).is_sorted());
        let text = advice(8, nothing, bytes(8, gelu));
        assert!(text.starts_with("--recompute 1 makes it fit; without, the largest that fits is --batch "), "{text}");
        let text = advice(8, nothing, bytes(8, gelu) - 1);
        assert!(text.starts_with("--recompute 2 makes it fit"), "{text}");
        assert_eq!(advice(1, nothing, bytes(1, norms)), "--recompute 2 makes it fit");
        // 20 sequences fit without recomputation, more with it, but fewer than requested.
        let text = advice(256, nothing, bytes(20, nothing));
        assert!(text.starts_with("the largest that fits is --batch 20, or --batch "), "{text}");
        assert!(text.ends_with(" with --recompute 3"), "{text}");
        assert_eq!(advice(64, layers, bytes(20, layers)), "the largest that fits is --batch 20");
        assert_eq!(advice(64, nothing, bytes(1, layers)), "--batch 1 with --recompute 3 fits");
        let inference = PlanOptions { training: false, ..options(64, nothing) };
        let free = of_d12(PlanOptions { b: 5, ..inference });
        assert_eq!(super::advice(inference, free, &mut of_d12), "the largest that fits is --batch 5");
    }

    #[test]
    fn a_model_that_is_too_large_is_refused_with_sizes() {
        let descriptor: Descriptor = "gpt3:c12288".parse().unwrap();
        let options = PlanOptions { t: 2048, ..options(64, Recompute::Nothing) };
        let message = plan(descriptor, options, &mut Cpu::new()).unwrap_err().to_string();
        assert!(message.contains("GiB more than") && message.contains("not even --batch 1"), "{message}");
    }

    #[test]
    fn batches_with_too_many_tokens_are_refused() {
        let descriptor = Descriptor::gpt2(1, 1, 1, MAX_TOKENS, 50_257).unwrap();
        let error = |b, t| {
            plan(descriptor, PlanOptions { t, ..options(b, Recompute::Nothing) }, &mut Cpu::new())
                .unwrap_err()
                .to_string()
        };
        for (b, t) in [(2, 1 << 30), (MAX_TOKENS, MAX_TOKENS), (usize::MAX, usize::MAX)] {
            assert_eq!(error(b, t), format!("--batch {b} x --seq {t}: expected at most 2147483647 tokens at once"));
        }
        assert!(error(1, MAX_TOKENS).contains("GiB more than"));
    }
}
