//! Text from a model, a token at a time.

use anyhow::{Result, ensure};
use engine::{BatchLayout, Engine};
use model::{Gpt2, LayerHooks};
use rng::Mt19937;

#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Choose among the likeliest so many tokens; 0 for all.
    pub top_k: usize,
    /// 0 always takes the likeliest token; 1 is the model's own distribution.
    pub temperature: f32,
    pub seed: u32,
}

/// Sequences are padded to a multiple of this, so that an engine sees few shapes.
const PADDING: usize = 64;

/// Continues `prompt`, which holds at least one token, by `tokens` tokens, and passes each to `each`. `hooks` provides the
/// parameters. If the text exceeds the planned length, the model sees its end.
pub fn generate(
    model: &Gpt2,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    prompt: &[u16],
    tokens: usize,
    sampling: Sampling,
    mut each: impl FnMut(u16) -> Result<()>,
) -> Result<()> {
    ensure!(!prompt.is_empty(), "sampling needs a token to begin with");
    let (v, vp) = (model.descriptor.vocab, model.descriptor.padded_vocab());
    let window = model.losses.len.min(model.descriptor.max_seq_len);
    let mut rng = Mt19937::new(sampling.seed);
    let mut text = prompt.to_vec();
    for _ in 0..tokens {
        let seen = &text[text.len().saturating_sub(window)..];
        let layout = BatchLayout { b: 1, t: seen.len().next_multiple_of(PADDING).min(window) };
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        // What follows a position does not change it, so the padding can be any token.
        words[..seen.len()].iter_mut().zip(seen).for_each(|(word, &token)| *word = i32::from(token));
        layout.sort(&mut words);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        model.forward(engine, layout, hooks)?;
        // The last position's, in rows of which an engine has seen as many before.
        let (last, rows) = (seen.len() - 1, PADDING.min(model.logit_rows()));
        let first = last / rows * rows;
        let logits = model.logits(engine, first..layout.t.min(first + rows))?;
        let logits = engine.read(logits.slice((last - first) * vp, v))?;
        let token = pick(&logits, sampling, rng.next_f32()) as u16;
        text.push(token);
        each(token)?;
    }
    Ok(())
}

/// The token that `coin`, uniform in [0, 1), falls on.
fn pick(logits: &[f32], sampling: Sampling, coin: f32) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let kept = match sampling {
        Sampling { temperature, .. } if temperature <= 0.0 => 1,
        Sampling { top_k: 0, .. } => logits.len(),
        Sampling { top_k, .. } => top_k.min(logits.len()),
    };
    if kept < order.len() {
        order.select_nth_unstable_by(kept - 1, likelier);
        order.truncate(kept);
        order.sort_unstable();
    }
    if kept == 1 {
        return order[0];
    }
    let highest = order.iter().map(|&i| logits[i]).fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| f64::from((logits[i] - highest) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut left = f64::from(coin) * total;
    for &i in &order {
        left -= weight(i);
        if left < 0.0 {
            return i;
        }
    }
    order[order.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use model::{Descriptor, PlanOptions, Recompute, init};

    fn shares(logits: &[f32], top_k: usize, temperature: f32) -> Vec<f64> {
        let n = 20_000;
        let mut counts = vec![0; logits.len()];
        for i in 0..n {
            counts[pick(logits, Sampling { top_k, temperature, seed: 0 }, i as f32 / n as f32)] += 1;
        }
        counts.into_iter().map(|c| f64::from(c) / f64::from(n)).collect()
    }

    fn close(got: &[f64], expected: &[f64]) {
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "{got:?}, expected {expected:?}");
    }

    #[test]
    fn tokens_come_as_often_as_they_should() {
        let logits = [1.0f32, 3.0, 2.0, 6.0].map(f32::ln);
        close(&shares(&logits, 0, 1.0), &[1.0 / 12.0, 3.0 / 12.0, 2.0 / 12.0, 6.0 / 12.0]);
        close(&shares(&logits, 2, 1.0), &[0.0, 1.0 / 3.0, 0.0, 2.0 / 3.0]);
        close(&shares(&logits, 0, 0.5), &[1.0 / 50.0, 9.0 / 50.0, 4.0 / 50.0, 36.0 / 50.0]);
        close(&shares(&logits, 0, 0.0), &[0.0, 0.0, 0.0, 1.0]);
        close(&shares(&logits, 1, 1.0), &[0.0, 0.0, 0.0, 1.0]);
        // Only differences count: powers of e this large, or small, are beyond any number format.
        for shift in [2000.0, -2000.0] {
            let shifted = logits.map(|logit| logit + shift);
            close(&shares(&shifted, 0, 1.0), &[1.0 / 12.0, 3.0 / 12.0, 2.0 / 12.0, 6.0 / 12.0]);
        }
    }

    #[test]
    fn broken_logits_still_give_a_token() {
        for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3], [f32::INFINITY; 3]] {
            assert!(pick(&logits, Sampling { top_k: 2, temperature: 1.0, seed: 0 }, 0.5) < 3);
        }
    }

    #[test]
    fn neither_padding_nor_batch_nor_chunk_size_changes_the_text() {
        let descriptor = Descriptor::new(2, 2, 16, 160, 50).unwrap();
        let text = |b, t, n, chunk| {
            let mut engine = Cpu::new();
            let capacity = PlanOptions::inference(b, t);
            let (model, plan) = Gpt2::plan_in_chunks(descriptor, capacity, chunk, &mut engine);
            engine.allocate(&plan).unwrap();
            init::generate(&descriptor, 42, |p, l, values| {
                // Far from uniform.
                let values: Vec<f32> = values.iter().map(|v| v * 20.0).collect();
                engine.write(model.layout.of(model.params, p, l), &values)
            })
            .unwrap();
            let mut out = Vec::new();
            let sampling = Sampling { top_k: 0, temperature: 1.0, seed: 7 };
            generate(&model, &mut engine, &[1, 2, 3], n, sampling, |token| {
                out.push(token);
                Ok(())
            })
            .unwrap();
            out
        };
        let one = text(1, 100, 80, 100);
        assert_eq!(one, text(4, 160, 80, 200));
        // Fewer rows of logits at a time than a sequence is padded to.
        assert_eq!(one, text(1, 100, 80, 10));
        assert!(one.iter().any(|t| *t != one[0]));
        // Beyond the window.
        assert_eq!(text(1, 16, 40, 100).len(), 40);
    }
}
