//! The training loop.

use crate::checkpoint::model::save_step;
use crate::console::Console;
use crate::data::{MultipleChoice, Prefetch};
use crate::engine::{AdamW, BatchLayout, Engine, Reading, Ticket};
use crate::evaluate::{self, multiple_choice};
use crate::log::{Log, Step};
use crate::mfu::mfu;
use crate::model::{Gpt2, Training, init};
use crate::rng::XorShift;
use crate::sample::{self, Sampling};
use crate::schedule::Schedule;
use crate::tokenizer::Tokenizer;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Settings that the loop reads. "Every" counts steps, and the end comes on top; `None` is never.
#[derive(Clone, Debug)]
pub struct Settings {
    pub steps: usize,
    /// Micro-batches whose gradients make one step.
    pub grad_accum: usize,
    pub schedule: Schedule,
    pub weight_decay: f32,
    pub clip: f32,
    /// Before the first step too.
    pub val_every: Option<usize>,
    pub val_batches: usize,
    pub sample_every: Option<usize>,
    pub sample_tokens: usize,
    pub checkpoint_every: Option<usize>,
    pub out: Option<PathBuf>,
}

/// Everything a run consists of.
pub struct Run<'a> {
    pub settings: &'a Settings,
    pub engine: &'a mut dyn Engine,
    pub model: &'a Gpt2,
    /// Without one no text is written.
    pub tokenizer: Option<Tokenizer>,
    pub train: Prefetch,
    pub val: Option<Prefetch>,
    /// Scored when it is validated, but not before the first step.
    pub hellaswag: Option<MultipleChoice>,
    pub console: Console,
    pub log: Log,
}

/// How it went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Validation loss before the first step and after the last.
    pub val: Option<(f64, f64)>,
    pub tokens: u64,
    /// Time of the training steps alone.
    pub training: Duration,
    /// Mean time of a step, the first not counted.
    pub step: Option<Duration>,
    /// The last model file.
    pub model_file: Option<PathBuf>,
}

/// Gives a fresh model its initial weights.
pub fn initialise(model: &Gpt2, engine: &mut dyn Engine, seed: u32) -> Result<()> {
    init::initialise(&model.descriptor, seed, |param, layer, values| {
        engine.write(model.layout.of(model.params, param, layer), values)
    })?;
    match model.training.and_then(|t| t.master) {
        // From the rounded weights, as llm.c does.
        Some(master) => engine.cast(master, model.params),
        None => Ok(()),
    }
}

/// Has the engine find out how to compute the model's matrix products, and says if that took time.
pub fn tune(model: &Gpt2, engine: &mut dyn Engine, layout: BatchLayout) -> Result<Option<String>> {
    let tuning = engine.tune(false, &mut |engine| {
        model.forward(engine, layout)?;
        model.loss(engine, layout, Some(1.0))?;
        model.backward(engine, layout, 0)
    })?;
    if tuning.timings.is_empty() {
        return Ok(None);
    }
    let (products, seconds) = (tuning.timings.len(), tuning.seconds);
    let kept = tuning.not_kept.map_or(String::new(), |why| format!("; the next run must do it again: {why}"));
    Ok(Some(format!("{products} matrix products timed in {seconds:.2} s to find the fastest algorithms{kept}\n")))
}

/// llm.c's, of `AdamW`.
const BETAS: (f32, f32) = (0.9, 0.95);
const EPS: f32 = 1e-8;
/// First state of the generator that seeds stochastic rounding.
const ROUNDING_SEED: u64 = 13_371_337;

impl Run<'_> {
    pub fn train(&mut self) -> Result<Outcome> {
        let training = self.model.training.context("this model was planned for inference only")?;
        let Settings { steps, val_every, sample_every, checkpoint_every, .. } = *self.settings;
        let mut rounding = XorShift { state: ROUNDING_SEED };
        let mut outcome = Outcome::default();
        let mut clock = Clock::start(self.engine_time(training)?);
        // A step's loss is read while the engine works on the next, so that it never waits for the host.
        let mut queued: Option<Queued> = None;

        for step in 0..=steps {
            let last = step == steps;
            let due = |every: Option<usize>| every.is_some_and(|n| last || (step > 0 && step % n == 0));
            let validate = self.val.is_some() && (due(val_every) || (step == 0 && val_every.is_some()));
            let score = self.hellaswag.is_some() && due(val_every);
            let sample = self.tokenizer.filter(|_| due(sample_every));
            let save = due(checkpoint_every);
            if validate || score || sample.is_some() || save || last {
                self.report(queued.take(), &mut clock, &mut outcome)?;
                if validate {
                    self.validate(step, &mut outcome)?;
                }
                if score {
                    self.score(step)?;
                }
                if let Some(tokenizer) = sample {
                    self.sample(tokenizer)?;
                }
                if save && let Some(out) = &self.settings.out {
                    let path = save_step(out, step, self.model, self.engine)?;
                    self.console.line(&format!("wrote {}", path.display()))?;
                    outcome.model_file = Some(path);
                }
                clock.resume(self.engine_time(training)?);
            }
            if last {
                break;
            }
            let now = self.queue(step, training, &mut rounding)?;
            self.report(queued.replace(now), &mut clock, &mut outcome)?;
        }
        self.console.finish();
        outcome.step = clock.mean();
        Ok(outcome)
    }

    /// Queues one optimizer step.
    fn queue(&mut self, step: usize, training: Training, rounding: &mut XorShift) -> Result<Queued> {
        let Self { settings, engine, model, .. } = self;
        let layout = self.train.layout();
        let dloss = 1.0 / (layout.b * layout.t * settings.grad_accum) as f32;
        engine.zero(model.losses)?;
        engine.zero(training.grads)?;
        for _ in 0..settings.grad_accum {
            self.train.load_next(*engine, model.batch)?;
            model.forward(*engine, layout)?;
            model.loss(*engine, layout, Some(dloss))?;
            model.backward(*engine, layout, rounding.next_u32())?;
        }
        let learning_rate = settings.schedule.at(step);
        let adamw = AdamW {
            learning_rate,
            beta1: BETAS.0,
            beta2: BETAS.1,
            eps: EPS,
            weight_decay: settings.weight_decay,
            step: step as u32 + 1,
            clip: settings.clip,
            seed: rounding.next_u32(),
        };
        model.update(*engine, &adamw)?;
        let stats = engine.read_later(training.stats)?;
        Ok(Queued { step, learning_rate, stats })
    }

    /// The engine's time once it has done everything queued so far.
    fn engine_time(&mut self, training: Training) -> Result<Duration> {
        let ticket = self.engine.read_later(training.stats)?;
        Ok(self.engine.wait(ticket)?.at)
    }

    /// Waits for a step's loss and tells of it.
    fn report(&mut self, queued: Option<Queued>, clock: &mut Clock, outcome: &mut Outcome) -> Result<()> {
        let Some(Queued { step, learning_rate, stats }) = queued else { return Ok(()) };
        let Reading { values, at } = self.engine.wait(stats)?;
        let [loss_sum, norm] = values[..] else {
            anyhow::bail!("expected loss and norm, read {} values", values.len())
        };
        let elapsed = clock.step_ended(at);
        let layout = self.train.layout();
        let tokens = layout.b * layout.t * self.settings.grad_accum;
        let tokens_per_second = tokens as f64 / elapsed.as_secs_f64();
        outcome.tokens += tokens as u64;
        outcome.training += elapsed;
        let flops = self.model.descriptor.flops_per_token(layout.t);
        let step = Step {
            step,
            loss: loss_sum / tokens as f32,
            lr: learning_rate,
            norm,
            ms: 1e3 * elapsed.as_secs_f64(),
            tokens_per_second,
            mfu: self.engine.peak().map(|peak| mfu(flops, tokens_per_second, &peak)),
            tokens: outcome.tokens,
        };
        self.log.step(&step)?;
        self.console.step(&step, tokens as f64 / clock.smoothed())
    }

    fn validate(&mut self, step: usize, outcome: &mut Outcome) -> Result<()> {
        let Some(val) = &mut self.val else { return Ok(()) };
        let loss = evaluate::loss(self.model, self.engine, val, self.settings.val_batches)?;
        outcome.val = Some((outcome.val.map_or(loss, |(before, _)| before), loss));
        self.log.validation(step, loss)?;
        self.console.line(&format!("val loss {loss:.6}"))
    }

    fn score(&mut self, step: usize) -> Result<()> {
        let Some(set) = &self.hellaswag else { return Ok(()) };
        let planned = self.train.layout();
        let score = multiple_choice::score(self.model, self.engine, planned, set, set.share(0, 1))?;
        self.log.hellaswag(step, score)?;
        self.console.line(&format!("HellaSwag: {score}"))
    }

    fn sample(&mut self, tokenizer: Tokenizer) -> Result<()> {
        // The same draws every time, so that samples differ by what the model has learnt.
        let sampling = Sampling { top_k: 0, temperature: 1.0, seed: 1337 };
        let mut tokens = Vec::new();
        let prompt = [tokenizer.document()];
        sample::generate(self.model, self.engine, &prompt, self.settings.sample_tokens, sampling, |token| {
            tokens.push(token);
            Ok(())
        })?;
        self.console.line(&format!("generating:\n---\n{}\n---", tokenizer.text(&tokens)))
    }
}

/// A step the engine has been given.
struct Queued {
    step: usize,
    learning_rate: f32,
    stats: Ticket,
}

/// Times steps from the end of one to the end of the next, on the engine's clock.
struct Clock {
    last: Duration,
    steps: u32,
    /// Of all but the first step, which is often slower.
    total: Duration,
    /// Exponential average of the same, in seconds, before bias correction.
    average: f64,
    latest: Duration,
}

impl Clock {
    const SMOOTHING: f64 = 0.95;

    fn start(now: Duration) -> Self {
        Self { last: now, steps: 0, total: Duration::ZERO, average: 0.0, latest: Duration::ZERO }
    }

    /// Forgets the time since the last step: it went into something else.
    fn resume(&mut self, now: Duration) {
        self.last = now;
    }

    fn step_ended(&mut self, at: Duration) -> Duration {
        self.latest = at.saturating_sub(self.last).max(Duration::from_nanos(1));
        self.last = at;
        if self.steps > 0 {
            self.total += self.latest;
            self.average += (1.0 - Self::SMOOTHING) * (self.latest.as_secs_f64() - self.average);
        }
        self.steps += 1;
        self.latest
    }

    /// Seconds per step, smoothed.
    fn smoothed(&self) -> f64 {
        match self.steps {
            0 | 1 => self.latest.as_secs_f64(),
            n => self.average / (1.0 - Self::SMOOTHING.powi(n as i32 - 1)),
        }
    }

    /// Mean time of a step, the first not counted.
    fn mean(&self) -> Option<Duration> {
        (self.steps > 1).then(|| self.total / (self.steps - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_and_pauses_do_not_count() {
        let start = Duration::from_secs(3);
        let mut clock = Clock::start(start);
        let ms = Duration::from_millis;
        assert_eq!(clock.step_ended(start + ms(900)), ms(900));
        assert!((clock.smoothed() - 0.9).abs() < 1e-9);
        assert_eq!(clock.mean(), None);
        assert_eq!(clock.step_ended(start + ms(1000)), ms(100));
        assert!((clock.smoothed() - 0.1).abs() < 1e-9);
        clock.resume(start + ms(5000));
        assert_eq!(clock.step_ended(start + ms(5200)), ms(200));
        assert!((clock.smoothed() - (0.95 * 0.05 * 0.1 + 0.05 * 0.2) / (1.0 - 0.95f64.powi(2))).abs() < 1e-9);
        assert_eq!(clock.mean(), Some(ms(150)));
    }
}
