//! The loss of a model on text: perplexity and bits per byte.

use super::predictions::Predictions;
use anyhow::{Result, ensure};
use data::Prefetch;
use engine::{BatchLayout, Engine};
use model::{Decoder, LayerHooks};
use std::f64::consts::LN_2;
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// The number of bytes that each token stands for. Special tokens, and tokens that are not in the list, stand for none.
#[derive(Clone, Debug, Default)]
pub struct TokenBytes(Vec<u32>);

impl TokenBytes {
    /// Returns the lengths of all tokens of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        // A newline marks documents in the byte-level encoding, but it is text.
        let is_special = |id| tokenizer.special().iter().any(|token| token.id == id);
        let length = |id| if is_special(id) { 0 } else { tokenizer.decode(&[id]).len() as u32 };
        Self((0..tokenizer.vocab()).map(|id| length(id as u32)).collect())
    }

    /// Returns the number of bytes of a token.
    fn of(&self, token: i32) -> u32 {
        usize::try_from(token).ok().and_then(|id| self.0.get(id)).copied().unwrap_or(0)
    }
}

/// The loss of a model on the target tokens of some batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TextScore {
    /// Number of target tokens that are not masked.
    pub tokens: usize,
    /// Mean loss per token in nats, as `train` computes it.
    pub loss: f64,
    /// Bytes of the text of the targets. Special tokens have none.
    pub bytes: u64,
    /// Sum of the losses of the targets that have bytes, in nats.
    pub nats: f64,
}

impl TextScore {
    /// Returns e to the power of the mean loss per token.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }

    /// Returns the loss per byte of text in bits, or `None` without any text.
    ///
    /// Unlike the loss per token, it does not depend on the tokenizer. The definition is that of nanochat's
    /// `nanochat/loss_eval.py`: the losses of special tokens are left out, because these tokens stand for no text.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nats / LN_2 / self.bytes as f64)
    }
}

/// Computes the loss on the next `batches` batches, and fails unless it is finite. See [`sums`].
pub fn score(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    data: &mut Prefetch,
    batches: usize,
    token_bytes: &TokenBytes,
    predictions: Option<&mut Predictions>,
) -> Result<TextScore> {
    let score = sums(model, engine, hooks, data, batches, token_bytes, predictions)?;
    ensure!(
        score.loss.is_finite(),
        "validation loss: expected a finite number, found {}; the activations exceed the range of {}: evaluate an earlier \
         checkpoint",
        score.loss,
        engine.dtype().name()
    );
    Ok(score)
}

/// Computes the loss on the next `batches` batches. `hooks` provides the parameters, and may end the evaluation between two batches.
/// `predictions` receives every batch.
pub fn sums(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    data: &mut Prefetch,
    batches: usize,
    token_bytes: &TokenBytes,
    mut predictions: Option<&mut Predictions>,
) -> Result<TextScore> {
    let layout = data.layout();
    let tokens = layout.b * layout.t;
    let losses = model.losses.slice(0, tokens);
    // Sums by position in f32, as `evaluate::loss` has them, so that `eval` prints the digits of `train`.
    let mut sums = vec![0.0f32; tokens];
    let mut score = TextScore::default();
    let progress = progress::start("validation", Unit::Count, batches as u64);
    for _ in 0..batches {
        hooks.between_batches()?;
        engine.zero(losses)?;
        score.tokens += data.load_next(engine, model.batch, 0)?.targets;
        model.forward(engine, layout, hooks)?;
        model.loss(engine, layout, None)?;
        let targets = targets(model, engine, layout)?;
        let of_batch = engine.read(losses)?;
        if let Some(predictions) = &mut predictions {
            predictions.append(model, engine, layout, &of_batch)?;
        }
        for ((sum, loss), target) in sums.iter_mut().zip(of_batch).zip(targets) {
            *sum += loss;
            let bytes = token_bytes.of(target);
            if bytes > 0 {
                score.bytes += u64::from(bytes);
                score.nats += f64::from(loss);
            }
        }
        progress.add(1);
    }
    score.loss = sums.into_iter().map(f64::from).sum::<f64>() / score.tokens.max(1) as f64;
    Ok(score)
}

/// Returns the target tokens of the loaded batch.
fn targets(model: &Decoder, engine: &mut dyn Engine, layout: BatchLayout) -> Result<Vec<i32>> {
    let targets = layout.tensor(model.batch, layout.targets());
    let mut bytes = vec![0; targets.bytes()];
    engine.read_bytes(targets, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|&word| i32::from_ne_bytes(word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate;
    use data::{Geometry, Loader, Tokens};
    use engine::cpu::Cpu;
    use model::{Descriptor, Param, PlanOptions, Unsharded};

    #[test]
    fn token_bytes_are_the_lengths_of_the_text() {
        let gpt2 = TokenBytes::new(&Tokenizer::gpt2());
        // "!", " world", "\n", "\n\n", <|endoftext|>.
        assert_eq!([0, 995, 198, 628, 50256].map(|id| gpt2.of(id)), [1, 6, 1, 2, 0]);
        assert_eq!(gpt2.0.len(), 50257);
        assert_eq!((gpt2.of(-1), gpt2.of(50257)), (0, 0));
        // The three tokens of a character of four bytes.
        let parts = Tokenizer::gpt2().encode("\u{1f642}").unwrap();
        assert_eq!((parts.len() > 1, parts.iter().map(|&id| gpt2.of(id as i32)).sum::<u32>()), (true, 4));
        let bytes = TokenBytes::new(&Tokenizer::bytes());
        assert_eq!((0..256).map(|id| bytes.of(id)).sum::<u32>(), 256);
    }

    /// Returns the score of a model with the same prediction at every position: all parameters are zero, except that the last
    /// LayerNorm gives (1, 0, …) and the first channel of `wte` holds the logit of each token.
    fn score_of(vocab: usize, logits: &[(usize, f32)], tokens: &[u32], token_bytes: &TokenBytes) -> Result<TextScore> {
        let descriptor = Descriptor::gpt2(1, 1, 4, 8, vocab).unwrap();
        let mut engine = Cpu::new();
        let (model, plan) = Decoder::plan(descriptor, PlanOptions::inference(2, 3), &mut engine);
        engine.allocate(&plan).unwrap();
        engine.write(model.layout.of(model.params, Param::Lnfb, 0), &[1.0, 0.0, 0.0, 0.0]).unwrap();
        let wte = model.layout.of(model.params, Param::Wte, 0);
        for &(token, logit) in logits {
            engine.write(wte.slice(4 * token, 1), &[logit]).unwrap();
        }
        let loader = || {
            Loader::new(vec![Tokens::in_memory("tokens", tokens.to_vec())], Geometry::single(2, 3), vocab, None)
                .unwrap()
        };
        let batches = loader().batches_per_epoch();
        let mut data = Prefetch::start(loader(), &engine).unwrap();
        let score = score(&model, &mut engine, &mut Unsharded, &mut data, batches, token_bytes, None)?;
        let mut data = Prefetch::start(loader(), &engine).unwrap();
        let [sum, targets] = evaluate::loss(&model, &mut engine, &mut Unsharded, &mut data, batches).unwrap();
        assert_eq!(score.loss.to_bits(), (sum / targets).to_bits());
        Ok(score)
    }

    #[test]
    fn special_tokens_count_for_the_loss_but_not_for_bits_per_byte() {
        // Tokens 0, 1 and 2 have 0, 1 and 5 bytes; the other 5 have one.
        let token_bytes = TokenBytes(vec![0, 1, 5, 1, 1, 1, 1, 1]);
        let logits = [(0, 3f32.ln()), (2, 5f32.ln())];
        // Two batches of 6 targets: 1 2 0 2 1 1, 0 0 2 1 2 2.
        let tokens = [7, 1, 2, 0, 2, 1, 1, 0, 0, 2, 1, 2, 2];
        let found = score_of(8, &logits, &tokens, &token_bytes).unwrap();
        // Probabilities: 3/14, 1/14 and 5/14.
        let loss = |weight: f64| (14.0 / weight).ln();
        let nats = 4.0 * loss(1.0) + 5.0 * loss(5.0);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} {b}");
        assert_eq!((found.tokens, found.bytes), (12, 4 + 5 * 5));
        close(found.nats, nats);
        close(found.loss, (nats + 3.0 * loss(3.0)) / 12.0);
        close(found.perplexity(), ((nats + 3.0 * loss(3.0)) / 12.0).exp());
        close(found.bits_per_byte().unwrap(), nats / 2f64.ln() / 29.0);
    }

    #[test]
    fn a_uniform_prediction_of_bytes_needs_eight_bits_per_byte() {
        let text: Vec<u32> = (0..=40 * 6).map(|i| i * 7 % 256).collect();
        let bytes = TokenBytes::new(&Tokenizer::bytes());
        let found = score_of(256, &[], &text, &bytes).unwrap();
        assert_eq!((found.tokens, found.bytes), (240, 240));
        assert!((found.bits_per_byte().unwrap() - 8.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn bits_per_byte_need_text_and_the_loss_must_be_finite() {
        let none = TokenBytes(vec![0; 8]);
        let found = score_of(8, &[], &[1; 7], &none).unwrap();
        assert_eq!((found.bytes, found.nats, found.bits_per_byte()), (0, 0.0, None));
        assert!((found.perplexity() - 8.0).abs() < 1e-5);
        let error = score_of(8, &[(1, f32::INFINITY)], &[1; 7], &none).unwrap_err().to_string();
        assert!(error.starts_with("validation loss: expected a finite number, found "), "{error}");
    }
}
