//! Validation, HellaSwag, CORE, text samples and the comparison of ranks.

use super::{Due, Run, Session};
use crate::evaluate;
use crate::evaluate::core;
use crate::evaluate::multiple_choice::{self, Score};
use crate::evaluate::questions;
use crate::evaluate::text::{self, TextScore, TokenBytes};
use crate::sample::{self, Sampling};
use anyhow::Result;
use data::Prefetch;
use model::fp8::{Fp8, Fp8Counts};
use model::{Interrupted, StopRequest, Training};
use serde::Serialize;
use std::f64::consts::LN_2;
use tokenizer::Tokenizer;

/// The validation data of a run.
#[derive(Debug, Default)]
pub struct Validation {
    /// The sources, each with a loss of its own.
    pub sources: Vec<ValidationSource>,
    /// The lengths of the tokens, for the bits per byte of several sources.
    pub token_bytes: TokenBytes,
}

/// A source of validation data.
#[derive(Debug)]
pub struct ValidationSource {
    /// Name in the log and in the plots.
    pub name: String,
    /// The batches, from the first one on after `batches` batches.
    pub data: Prefetch,
    /// Batches of a validation.
    pub batches: usize,
}

/// The result of a validation for one of several sources.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceLoss {
    /// Name of the source.
    pub name: String,
    /// Mean loss of the targets that are not masked.
    pub val_loss: f64,
    /// Loss per byte of text in bits, if the tokenizer is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
}

impl Run<'_> {
    /// Performs the evaluations that are due. Returns false if a stop request has ended them early. Results that are not complete are not
    /// reported, and the resumed run performs all of them.
    pub(super) fn evaluate(&mut self, step: usize, due: &Due, session: &mut Session) -> Result<bool> {
        match self.report_evaluations(step, due, session) {
            Err(error) if error.is::<Interrupted>() => Ok(false),
            result => result.map(|()| true),
        }
    }

    fn report_evaluations(&mut self, step: usize, due: &Due, session: &mut Session) -> Result<()> {
        if due.validate {
            self.validate(step, session)?;
        }
        if due.score {
            self.score(step, session)?;
        }
        if due.core {
            self.core(step, session)?;
        }
        due.sample.as_ref().map_or(Ok(()), |tokenizer| self.sample(tokenizer, session))
    }

    fn validate(&mut self, step: usize, session: &mut Session) -> Result<()> {
        let (loss, sources) = if let [only] = &mut self.val.sources[..] {
            let mut sums = {
                let stop = || self.stop.requested();
                let hooks = &mut session.step.hooks(self.ranks, StopRequest::OfAnyRank(&stop));
                evaluate::loss(self.model, self.engine, hooks, &mut only.data, only.batches)?
            };
            self.ranks.all_reduce_sum_f64(&mut sums)?;
            let [loss, targets] = sums;
            (loss / targets.max(1.0), Vec::new())
        } else {
            self.validate_sources(session)?
        };
        self.state.progress.first_val_loss.get_or_insert(loss);
        session.last_val_loss = Some(loss);
        self.log.validation(step, self.state.progress.tokens, loss, &sources)?;
        self.console.validation(step, loss, &sources)
    }

    /// Returns the mean loss over the tokens of all sources, and the loss of each.
    fn validate_sources(&mut self, session: &mut Session) -> Result<(f64, Vec<SourceLoss>)> {
        let Validation { sources, token_bytes } = &mut self.val;
        let mut sums = Vec::new();
        for source in &mut *sources {
            let stop = || self.stop.requested();
            let hooks = &mut session.step.hooks(self.ranks, StopRequest::OfAnyRank(&stop));
            let ValidationSource { data, batches, .. } = source;
            let score = text::sums(self.model, self.engine, hooks, data, *batches, token_bytes, None)?;
            let TextScore { tokens, loss, bytes, nats } = score;
            sums.extend([loss * tokens as f64, tokens as f64, nats, bytes as f64]);
        }
        self.ranks.all_reduce_sum_f64(&mut sums)?;
        let sums = sums.as_chunks::<4>().0;
        let total = |i: usize| sums.iter().map(|sums| sums[i]).sum::<f64>();
        let of_source = |(source, &[loss, tokens, nats, bytes]): (&ValidationSource, &[f64; 4])| SourceLoss {
            name: source.name.clone(),
            val_loss: loss / tokens.max(1.0),
            bits_per_byte: (bytes > 0.0).then(|| nats / LN_2 / bytes),
        };
        Ok((total(0) / total(1).max(1.0), sources.iter().zip(sums).map(of_source).collect()))
    }

    fn score(&mut self, step: usize, session: &mut Session) -> Result<()> {
        let Some(set) = &self.hellaswag else { return Ok(()) };
        let planned = self.train.layout();
        let n = self.ranks.world_size();
        let share = set.share(self.ranks.rank(), n);
        // All ranks run the same number of batches, because each one communicates.
        let shares = (0..n).map(|rank| set.share(rank, n));
        let batches = shares.map(|share| multiple_choice::batches(set, share, planned)).max().unwrap_or(0);
        let score = {
            let stop = || self.stop.requested();
            let hooks = &mut session.step.hooks(self.ranks, StopRequest::OfAnyRank(&stop));
            multiple_choice::score(self.model, self.engine, hooks, planned, set, share, batches)?
        };
        let mut counts = [score.correct as f64, score.examples as f64];
        self.ranks.all_reduce_sum_f64(&mut counts)?;
        let [correct, examples] = counts.map(|count| count as usize);
        let score = Score { correct, examples };
        self.log.hellaswag(step, self.state.progress.tokens, score)?;
        self.console.hellaswag(step, score)
    }

    fn core(&mut self, step: usize, session: &mut Session) -> Result<()> {
        let Some(set) = &self.core else { return Ok(()) };
        let planned = self.train.layout();
        // All ranks run the same number of batches, because each one communicates.
        let own = set.batches(planned);
        let mut batches = vec![0.0; self.ranks.world_size()];
        batches[self.ranks.rank()] = own as f64;
        self.ranks.all_reduce_sum_f64(&mut batches)?;
        let most = batches.into_iter().fold(0.0, f64::max) as usize;
        let scores = {
            let stop = || self.stop.requested();
            let hooks = &mut session.step.hooks(self.ranks, StopRequest::OfAnyRank(&stop));
            let scores = set.evaluate(self.model, self.engine, hooks, planned, &mut |_, _, _| Ok(()))?;
            questions::idle(self.model, self.engine, hooks, planned, most - own)?;
            scores
        };
        let mut counts: Vec<f64> =
            scores.iter().flat_map(|score| [score.correct as f64, score.questions as f64]).collect();
        self.ranks.all_reduce_sum_f64(&mut counts)?;
        let scores = set.scores(counts.as_chunks().0);
        self.log.core(step, self.state.progress.tokens, &scores)?;
        self.console.core(step, core::metric(&scores))
    }

    fn sample(&mut self, tokenizer: &Tokenizer, session: &mut Session) -> Result<()> {
        // The seed is fixed, so that samples differ only by what the model has learned.
        let sampling = Sampling { top_k: 0, temperature: 1.0, seed: 1337 };
        let mut tokens = Vec::new();
        let prompt = [tokenizer.document()];
        let stop = || self.stop.requested();
        let shared = self.model.zero.forward_communicates();
        let stop = if shared { StopRequest::OfAnyRank(&stop) } else { StopRequest::OfThisRank(&stop) };
        let hooks = &mut session.step.hooks(self.ranks, stop);
        let length = self.settings.sample_tokens;
        sample::generate(self.model, self.engine, hooks, &prompt, length, sampling, |token| {
            tokens.push(token);
            Ok(())
        })?;
        let text = tokenizer.text(&tokens);
        self.log.sample(self.state.step, &text)?;
        self.console.line(&format!("generating:\n---\n{text}\n---"))
    }

    /// Prints how many values FP8 loses.
    pub(super) fn print_fp8_counts(&mut self, step: usize, session: &Session) -> Result<()> {
        for Fp8Counts { tensor, values, saturated, zeroed } in session.step.fp8_counts(self.engine)? {
            let percent = |n: u64| 100.0 * n as f64 / values as f64;
            let (saturated, zeroed) = (percent(saturated), percent(zeroed));
            self.console.line(&format!(
                "fp8 step {} | {tensor:<24} {values:>12} values | {saturated:>9.6} % saturated | {zeroed:>9.6} % become 0",
                step + 1
            ))?;
        }
        Ok(())
    }

    /// Compares the replicated parts of model and optimizer on all ranks, and shards with their replicas.
    pub(super) fn check_ranks(&mut self, training: &Training) -> Result<()> {
        let zero = self.model.zero;
        let [replicated, own] = self.model.param_store().replicated_and_own();
        let mut tensors = vec![(if zero.shards_parameters() { "the embeddings" } else { "params" }, replicated)];
        if !zero.shards_optimizer() {
            tensors.extend(training.state());
        }
        tensors.extend(training.fp8.iter().flat_map(Fp8::state).map(|tensor| ("FP8 statistics", tensor)));
        let mut shards = if own.len > 0 { vec![("params", own)] } else { Vec::new() };
        if zero.shards_optimizer() {
            shards.extend(training.state());
        }
        self.ranks.check_replicas(self.engine, &tensors, &shards)
    }
}
