//! Text generation that computes the whole text for every token. It needs no memory beside the buffers of a forward pass, and works with
//! sharded parameters, so `train` writes its samples with it. [`generate`](crate::generate) is faster.

use anyhow::{Result, ensure};
use engine::{BatchLayout, Engine};
use model::{Decoder, LayerHooks};
use rng::Mt19937;

/// Settings of text generation.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Number of most likely tokens to sample from; 0 samples from all tokens.
    pub top_k: usize,
    /// Softmax temperature. 1 samples from the model's distribution; 0 always takes the most likely token.
    pub temperature: f32,
    /// Seed of the random number generator.
    pub seed: u32,
}

/// Sequences are padded to a multiple of this length, so that an engine tunes GEMMs for few shapes.
const PADDING: usize = 64;

/// Generates `tokens` tokens after `prompt`, which holds at least one token, and passes each of them to `each`.
///
/// `hooks` gathers the parameters of each layer, and may end the text between two tokens. Of a text that is longer than the longest
/// sequence of the plan, the model reads the end.
pub fn generate(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    prompt: &[u32],
    tokens: usize,
    sampling: Sampling,
    mut each: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    ensure!(!prompt.is_empty(), "prompt: expected at least one token, found none; pass a non-empty --prompt");
    let (v, vp) = (model.descriptor.vocab, model.descriptor.padded_vocab());
    let window = model.longest_sequence();
    let mut rng = Mt19937::new(sampling.seed);
    let mut text = prompt.to_vec();
    for _ in 0..tokens {
        hooks.between_batches()?;
        let seen = &text[text.len().saturating_sub(window)..];
        let layout = BatchLayout::new(1, seen.len().next_multiple_of(PADDING).min(window));
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        // Attention is causal, so the padding after the text does not affect its logits.
        words[..seen.len()].iter_mut().zip(seen).for_each(|(word, &token)| *word = token as i32);
        layout.sort(&mut words);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        model.forward(engine, layout, hooks)?;
        // Computes a fixed number of rows that include the last position, so that the GEMM has the same shape for every token.
        let (last, rows) = (seen.len() - 1, PADDING.min(model.logit_rows()));
        let first = last / rows * rows;
        let logits = model.logits(engine, first..layout.t.min(first + rows))?;
        let mut logits = engine.read(logits.slice((last - first) * vp, v))?;
        for logit in &mut logits {
            *logit = model.descriptor.softcapped(*logit);
        }
        let token = pick(&logits, sampling, rng.next_f32()) as u32;
        text.push(token);
        each(token)?;
    }
    Ok(())
}

/// Samples a token from its logits. `coin` is uniform in [0, 1).
fn pick(logits: &[f32], sampling: Sampling, coin: f32) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_probability = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let kept = match sampling {
        Sampling { temperature, .. } if temperature <= 0.0 => 1,
        Sampling { top_k: 0, .. } => logits.len(),
        Sampling { top_k, .. } => top_k.min(logits.len()),
    };
    if kept < order.len() {
        order.select_nth_unstable_by(kept - 1, by_probability);
        order.truncate(kept);
        order.sort_unstable();
    }
    if kept == 1 {
        return order[0];
    }
    let highest = order.iter().map(|&i| logits[i]).fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| f64::from((logits[i] - highest) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut remaining = f64::from(coin) * total;
    for &i in &order {
        remaining -= weight(i);
        if remaining < 0.0 {
            return i;
        }
    }
    order[order.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use model::{Descriptor, PlanOptions, Unsharded, init};

    /// Returns the relative frequency of each token for evenly spaced coins.
    fn frequencies(logits: &[f32], top_k: usize, temperature: f32) -> Vec<f64> {
        let n = 20_000;
        let mut counts = vec![0; logits.len()];
        for i in 0..n {
            counts[pick(logits, Sampling { top_k, temperature, seed: 0 }, i as f32 / n as f32)] += 1;
        }
        counts.into_iter().map(|c| f64::from(c) / f64::from(n)).collect()
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "{got:?}, expected {expected:?}");
    }

    #[test]
    fn token_frequencies_match_the_softmax_distribution() {
        let logits = [1.0f32, 3.0, 2.0, 6.0].map(f32::ln);
        assert_close(&frequencies(&logits, 0, 1.0), &[1.0 / 12.0, 3.0 / 12.0, 2.0 / 12.0, 6.0 / 12.0]);
        assert_close(&frequencies(&logits, 2, 1.0), &[0.0, 1.0 / 3.0, 0.0, 2.0 / 3.0]);
        assert_close(&frequencies(&logits, 0, 0.5), &[1.0 / 50.0, 9.0 / 50.0, 4.0 / 50.0, 36.0 / 50.0]);
        assert_close(&frequencies(&logits, 0, 0.0), &[0.0, 0.0, 0.0, 1.0]);
        assert_close(&frequencies(&logits, 1, 1.0), &[0.0, 0.0, 0.0, 1.0]);
        // A shift of all logits changes nothing, although exp overflows or underflows for these values.
        for shift in [2000.0, -2000.0] {
            let shifted = logits.map(|logit| logit + shift);
            assert_close(&frequencies(&shifted, 0, 1.0), &[1.0 / 12.0, 3.0 / 12.0, 2.0 / 12.0, 6.0 / 12.0]);
        }
    }

    #[test]
    fn non_finite_logits_still_give_a_token() {
        for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3], [f32::INFINITY; 3]] {
            assert!(pick(&logits, Sampling { top_k: 2, temperature: 1.0, seed: 0 }, 0.5) < 3);
        }
    }

    /// Returns `n` tokens of an untrained model that is planned for `b` sequences of `t` tokens.
    fn text(descriptor: Descriptor, [b, t]: [usize; 2], n: usize, logit_rows: usize) -> Vec<u32> {
        let mut engine = Cpu::new();
        let options = PlanOptions { logit_rows, ..PlanOptions::inference(b, t) };
        let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
        engine.allocate(&plan).unwrap();
        init::generate(&descriptor, 42, |p, l, values| {
            // Makes the distribution far from uniform.
            let values: Vec<f32> = values.iter().map(|v| v * 20.0).collect();
            engine.write(model.layout.of(model.params, p, l), &values)
        })
        .unwrap();
        let mut out = Vec::new();
        let sampling = Sampling { top_k: 0, temperature: 1.0, seed: 7 };
        generate(&model, &mut engine, &mut Unsharded, &[1, 2, 3], n, sampling, |token| {
            out.push(token);
            Ok(())
        })
        .unwrap();
        out
    }

    #[test]
    fn padding_batch_size_and_chunk_size_do_not_change_the_text() {
        let descriptor = Descriptor::gpt2(2, 2, 16, 160, 50).unwrap();
        let one = text(descriptor, [1, 100], 80, 100);
        assert_eq!(one, text(descriptor, [4, 160], 80, 200));
        // Fewer rows of logits than the padding of a sequence.
        assert_eq!(one, text(descriptor, [1, 100], 80, 10));
        assert!(one.iter().any(|t| *t != one[0]));
        // The text exceeds the planned length.
        assert_eq!(text(descriptor, [1, 16], 40, 100).len(), 40);
    }

    /// The table of rotary positions has the length of a sequence, not that of a batch.
    #[test]
    fn texts_of_rotary_models_may_exceed_the_sequences_of_the_batch() {
        let descriptor: Descriptor = "modern:d2".parse().unwrap();
        let descriptor = Descriptor { vocab: 50, ..descriptor };
        let one = text(descriptor, [1, 16], 40, 16);
        assert_eq!(one, text(descriptor, [4, 16], 40, 16));
        assert_eq!(one.len(), 40);
    }
}
