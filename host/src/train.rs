//! The training loop.

use crate::clock::Clock;
use crate::console::Console;
use crate::evaluate;
use crate::evaluate::multiple_choice::{self, Score};
use crate::log::{Log, Step};
use crate::mfu::mfu;
use crate::sample::{self, Sampling};
use crate::signals::Stop;
use anyhow::{Context, Error, Result, bail};
use checkpoint::RunState;
use checkpoint::before::way_on;
use checkpoint::writer::{Checkpoints, Report, Written, size};
use data::tokenizer::Tokenizer;
use data::{MultipleChoice, Prefetch};
use distributed::Ranks;
use engine::{AdamW, Engine, Reading, Recurring, Ticket};
use model::guards::{Limits, Skipped, Skips, Verdict};
use model::schedule::Schedule;
use model::{Exchange, Turns};
use model::{Gpt2, Training, Unit};
use std::path::PathBuf;
use std::time::Duration;

/// Settings that the loop reads. "Every" counts steps, and the end comes on top; `None` is never.
#[derive(Clone, Debug)]
pub struct Settings {
    pub steps: usize,
    /// Micro-batches of each rank whose gradients make one step.
    pub grad_accum: usize,
    pub schedule: Schedule,
    pub weight_decay: f32,
    pub clip: f32,
    pub limits: Limits,
    /// Before the first step too.
    pub val_every: Option<usize>,
    pub val_batches: usize,
    pub sample_every: Option<usize>,
    pub sample_tokens: usize,
    pub checkpoint_every: Option<usize>,
    /// How often ranks compare what must be the same on all of them.
    pub check_ranks_every: Option<usize>,
}

/// Everything a run consists of.
pub struct Run<'a> {
    pub settings: &'a Settings,
    /// The other processes that train the same model, each on its own part of the data.
    pub ranks: &'a mut Ranks,
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
    /// Where the run begins, and then where it stands: what `train` loads next is in it.
    pub state: RunState,
    /// Without them nothing is kept.
    pub checkpoints: Option<Checkpoints>,
    pub stop: Stop,
}

/// How it went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Validation loss before the first step and after the last.
    pub val: Option<(f64, f64)>,
    pub tokens: u64,
    pub skips: Skips,
    /// Time of the training steps alone.
    pub training: Duration,
    /// Mean time of a step, the first not counted.
    pub step: Option<Duration>,
    /// The last model file.
    pub model_file: Option<PathBuf>,
    /// The step before which it was asked to stop.
    pub stopped: Option<usize>,
}

/// llm.c's, of `AdamW`.
const BETAS: (f32, f32) = (0.9, 0.95);
const EPS: f32 = 1e-8;

/// What tells a rank's seeds from the next one's.
const RANK_SEED: u32 = 0x9e37_79b9;

impl Run<'_> {
    pub fn train(&mut self) -> Result<Outcome> {
        self.ranks.begin();
        match self.all_steps() {
            Ok(outcome) => self.ranks.close().map(|()| outcome),
            Err(error) => {
                let stage = format!("step {} of {}", self.state.step + 1, self.settings.steps);
                let cause = self.ranks.cause(error, &stage);
                self.ranks.abandon();
                Err(cause)
            }
        }
    }

    fn all_steps(&mut self) -> Result<Outcome> {
        let training = self.model.training.context("this model was planned for inference only")?;
        let Settings { steps, val_every, sample_every, checkpoint_every, .. } = *self.settings;
        let first = self.state.step;
        let mut session = Session {
            clock: Clock::start(self.engine_time(&training)?),
            model_file: self.checkpoints.as_ref().and_then(Checkpoints::model_file),
            ..Session::default()
        };
        // A step's loss is read while the engine works on the next, so that it never waits for the host.
        let mut queued: Option<Queued> = None;

        for step in first..=steps {
            let last = step == steps;
            self.ranks.note(|| format!("step {} of {steps}", step + 1));
            self.ranks.doing("waiting for the others");
            let stop = self.ranks.any(self.stop.requested())?;
            self.ranks.doing("computing");
            let due = |every: Option<usize>| every.is_some_and(|n| last || (step > 0 && step % n == 0));
            // Who asks for a stop wants it now; the run that goes on from here does what is due.
            let evaluate = !stop && !self.state.progress.evaluated;
            let validate = evaluate && self.val.is_some() && (due(val_every) || (step == 0 && val_every.is_some()));
            let score = evaluate && self.hellaswag.is_some() && due(val_every);
            // Where ranks divide the parameters, a text takes all of them.
            let together = self.ranks.is_first() || self.model.zero.divides_parameters();
            let sample = self.tokenizer.filter(|_| evaluate && due(sample_every) && together);
            let save = step > first && (due(checkpoint_every) || stop);
            if validate || score || sample.is_some() || save || stop || last {
                self.report(queued.take(), &mut session)?;
                if validate {
                    self.validate(step, &mut session)?;
                }
                if score {
                    self.score(step, &mut session)?;
                }
                if let Some(tokenizer) = sample {
                    self.sample(tokenizer, &mut session)?;
                }
                self.state.progress.evaluated |= evaluate;
                if save && (last || stop || self.worth_keeping()?) {
                    self.save(&mut session)?;
                }
                session.clock.resume(self.engine_time(&training)?);
            }
            if stop {
                session.stopped = Some(step);
            }
            if last || stop {
                break;
            }
            let Self { checkpoints, ranks, .. } = self;
            let written = checkpoints.as_mut().map_or(Ok(None), |checkpoints| checkpoints.poll(ranks))?;
            self.tell(written, &mut session)?;
            let now = self.queue(step, &training, &mut session)?;
            self.report(queued.replace(now), &mut session)?;
            if self.settings.check_ranks_every.is_some_and(|n| (step + 1) % n == 0) {
                self.report(queued.take(), &mut session)?;
                self.check_ranks(&training)?;
                session.clock.resume(self.engine_time(&training)?);
            }
        }
        self.finish(session)
    }

    /// Waits for the last checkpoint.
    fn finish(&mut self, mut session: Session) -> Result<Outcome> {
        let written = self.wait_for_checkpoint()?;
        self.tell(written, &mut session)?;
        self.console.finish();
        if let Some((step, error)) = session.unsaved {
            return Err(error.context(format!("the last checkpoint, of step {step}, is not written")));
        }
        self.log.finish()?;
        let progress = &self.state.progress;
        Ok(Outcome {
            val: progress.first_val_loss.zip(session.last_val_loss),
            tokens: progress.tokens,
            skips: progress.guards.skips,
            training: Duration::from_secs_f64(progress.training_seconds),
            step: progress.pace.mean().map(Duration::from_secs_f64),
            model_file: session.model_file,
            stopped: session.stopped,
        })
    }

    fn wait_for_checkpoint(&mut self) -> Result<Option<Written>> {
        let Self { checkpoints, ranks, .. } = self;
        checkpoints.as_mut().map_or(Ok(None), |checkpoints| checkpoints.wait(ranks))
    }

    /// Whether the last step was finite. While none is, weights stay what they were, and checkpoints with them would push out
    /// those of better times.
    fn worth_keeping(&self) -> Result<bool> {
        let bad = self.state.progress.guards.bad_in_a_row;
        if bad > 0 {
            let step = self.state.step;
            let since = step.saturating_sub(bad);
            self.console.line(&format!("no checkpoint of step {step}: nothing has changed since step {since}"))?;
        }
        Ok(bad == 0)
    }

    /// Begins to write a checkpoint; the one before is finished first. What goes wrong is told, and the run goes on.
    fn save(&mut self, session: &mut Session) -> Result<()> {
        let before = self.wait_for_checkpoint()?;
        let Self { checkpoints, ranks, engine, model, log, state, .. } = self;
        let Some(checkpoints) = checkpoints else { return Ok(()) };
        let begun = checkpoints.begin(model, *engine, ranks, state.clone(), log.files());
        self.tell(before, session)?;
        match begun {
            Ok(()) => Ok(()),
            Err(error) => self.tell(Some(Written { step: self.state.step, result: Err(error) }), session),
        }
    }

    /// Says what has become of a checkpoint.
    fn tell(&mut self, written: Option<Written>, session: &mut Session) -> Result<()> {
        let (Some(Written { step, result }), Some(checkpoints)) = (written, &self.checkpoints) else { return Ok(()) };
        match result {
            Ok(Report { model_file, bytes, time, pause, warning }) => {
                self.console.line(&format!(
                    "checkpoint of step {step}: {}, {} in {:.2} s after a pause of {:.3} s",
                    model_file.display(),
                    size(bytes),
                    time.as_secs_f64(),
                    pause.as_secs_f64()
                ))?;
                if let Some(warning) = warning {
                    self.console.line(&format!("warning: {warning}"))?;
                }
                session.model_file = Some(model_file);
                session.unsaved = None;
            }
            Err(error) => {
                let newest = match checkpoints.newest() {
                    Some(step) => format!("the newest is of step {step}"),
                    None => "there is none yet".to_owned(),
                };
                self.console.line(&format!("warning: no checkpoint of step {step}, {newest}: {error:#}"))?;
                session.unsaved = Some((step, error));
            }
        }
        Ok(())
    }

    /// Queues one optimizer step.
    fn queue(&mut self, step: usize, training: &Training, session: &mut Session) -> Result<Queued> {
        let Self { settings, engine, model, state, ranks, console, .. } = self;
        let Session { turns, micro_step: recurring, .. } = session;
        let layout = self.train.layout();
        let dloss = model.zero.dloss(layout.b * layout.t * settings.grad_accum);
        engine.zero(model.losses)?;
        engine.zero(training.grads)?;
        for micro_step in 1..=settings.grad_accum {
            // The update's draws must be the same on all ranks, these need not.
            let seed = state.rounding.next_u32().wrapping_add((ranks.rank() as u32).wrapping_mul(RANK_SEED));
            state.data = self.train.load_next(*engine, model.batch, seed)?;
            let last = micro_step == settings.grad_accum;
            let exchange = &mut Exchange { model, ranks, turns, last };
            if let Some(why) = exchange.micro_step(*engine, layout, dloss, Some(recurring))? {
                console
                    .line(&format!("warning: micro-steps are queued piece by piece, they cannot be recorded: {why}"))?;
            }
        }
        let mut exchange = Exchange { model, ranks, turns, last: true };
        exchange.settle(*engine)?;
        let learning_rate = settings.schedule.at(step);
        state.rounding_before_update = state.rounding;
        let adamw = AdamW {
            learning_rate,
            beta1: BETAS.0,
            beta2: BETAS.1,
            eps: EPS,
            weight_decay: settings.weight_decay,
            step: step as u32 + 1,
            clip: settings.clip,
            seed: state.rounding.next_u32(),
        };
        exchange.measure(*engine)?;
        let tokens = layout.b * layout.t * settings.grad_accum * exchange.ranks.count();
        let verdict = if settings.limits.decide_before_update() {
            let measured = engine.read_later(training.stats)?;
            let [loss, norm] = stats_of(&engine.wait(measured)?, tokens)?;
            Some(state.progress.guards.judge(loss, norm, &settings.limits))
        } else {
            None
        };
        if verdict.is_none_or(|verdict| verdict.skipped.is_none()) {
            exchange.apply(*engine, &adamw)?;
        }
        let stats = engine.read_later(training.stats)?;
        state.step = step + 1;
        state.progress.evaluated = false;
        Ok(Queued { step, learning_rate, stats, verdict })
    }

    /// The engine's time once it has done everything queued so far.
    fn engine_time(&mut self, training: &Training) -> Result<Duration> {
        let ticket = self.engine.read_later(training.stats)?;
        Ok(self.engine.wait(ticket)?.at)
    }

    /// Waits for a step's loss and tells of it.
    fn report(&mut self, queued: Option<Queued>, session: &mut Session) -> Result<()> {
        let Some(Queued { step, learning_rate, stats, verdict }) = queued else { return Ok(()) };
        self.ranks.doing("waiting for the GPU");
        let reading = self.engine.wait(stats)?;
        // What collectives that were aborted have left is no loss to be told of.
        self.ranks.check()?;
        let layout = self.train.layout();
        let tokens = layout.b * layout.t * self.settings.grad_accum * self.ranks.count();
        let [loss, norm] = stats_of(&reading, tokens)?;
        let progress = &mut self.state.progress;
        let verdict = verdict.unwrap_or_else(|| progress.guards.judge(loss, norm, &self.settings.limits));
        let elapsed = session.clock.step_ended(reading.at, &mut progress.pace);
        let tokens_per_second = tokens as f64 / elapsed.as_secs_f64();
        progress.tokens += tokens as u64;
        progress.training_seconds += elapsed.as_secs_f64();
        let lately = progress.pace.smoothed().unwrap_or(elapsed.as_secs_f64());
        let flops = self.model.descriptor.flops_per_token(layout.t);
        let step = Step {
            step,
            loss,
            lr: learning_rate,
            norm,
            ms: 1e3 * elapsed.as_secs_f64(),
            tokens_per_second,
            mfu: self.engine.peak().map(|peak| mfu(flops, tokens_per_second / self.ranks.count() as f64, &peak)),
            tokens: progress.tokens,
            verdict,
        };
        self.log.step(&step)?;
        if let Some(trouble) = self.log.take_trouble() {
            self.console.line(&format!("warning: log lines wait in memory: {trouble}"))?;
        }
        self.console.step(&step, tokens as f64 / lately)?;
        self.guard(&step, session)
    }

    /// Tells of a skipped update, and ends the run if there were too many in a row.
    fn guard(&mut self, step: &Step, session: &mut Session) -> Result<()> {
        let Limits { loss_z, norm_z, bad_steps } = self.settings.limits;
        let Step { step: number, loss, norm, verdict, .. } = *step;
        let Some(skipped) = verdict.skipped else { return Ok(()) };
        let bad = self.state.progress.guards.bad_in_a_row;
        let outlier = |what, z: Option<f64>, limit: Option<f64>| {
            let (z, limit) = (z.unwrap_or_default(), limit.unwrap_or_default());
            format!("the z-score of the {what} is {z:.2}, above {limit}")
        };
        let why = match skipped {
            Skipped::NotFinite => format!("loss {loss}, norm {norm}; {bad} in a row, {bad_steps} end the run"),
            Skipped::Loss => outlier("loss", verdict.loss_z, loss_z),
            Skipped::Norm => outlier("gradient norm", verdict.norm_z, norm_z),
        };
        self.console.line(&format!("step {}: update skipped: {why}", number + 1))?;
        if bad < bad_steps {
            return Ok(());
        }
        let written = self.wait_for_checkpoint()?;
        self.tell(written, session)?;
        self.console.finish();
        self.log.finish()?;
        let first = (number + 1).saturating_sub(bad);
        let kept = self.checkpoints.as_ref().map(|checkpoints| checkpoints.before(first)).transpose()?;
        bail!(
            "the last {bad} steps, {} to {}, had no finite loss and gradient norm (loss {loss}, norm {norm}) and changed \
             nothing: {}",
            first + 1,
            number + 1,
            way_on(kept.as_ref())
        )
    }

    fn validate(&mut self, step: usize, session: &mut Session) -> Result<()> {
        let Some(val) = &mut self.val else { return Ok(()) };
        let layers = &mut Exchange { model: self.model, ranks: self.ranks, turns: &mut session.turns, last: false };
        let mut loss = [evaluate::loss(self.model, self.engine, layers, val, self.settings.val_batches)?];
        self.ranks.sum(&mut loss)?;
        let loss = loss[0] / self.ranks.count() as f64;
        self.state.progress.first_val_loss.get_or_insert(loss);
        session.last_val_loss = Some(loss);
        self.log.validation(step, loss)?;
        self.console.validation(step, loss)
    }

    fn score(&mut self, step: usize, session: &mut Session) -> Result<()> {
        let Some(set) = &self.hellaswag else { return Ok(()) };
        let planned = self.train.layout();
        let n = self.ranks.count();
        let share = set.share(self.ranks.rank(), n);
        // Where ranks divide the parameters, all take as many batches.
        let of_all = (0..n).filter(|_| self.model.zero.divides_parameters()).map(|rank| set.share(rank, n));
        let batches = of_all.map(|share| multiple_choice::batches(set, share, planned)).max().unwrap_or(0);
        let layers = &mut Exchange { model: self.model, ranks: self.ranks, turns: &mut session.turns, last: false };
        let score = multiple_choice::score_with(self.model, self.engine, layers, planned, set, share, batches)?;
        let mut counts = [score.correct as f64, score.examples as f64];
        self.ranks.sum(&mut counts)?;
        let [correct, examples] = counts.map(|count| count as usize);
        let score = Score { correct, examples };
        self.log.hellaswag(step, score)?;
        self.console.hellaswag(step, score)
    }

    /// Compares what all ranks have of model and optimizer.
    fn check_ranks(&mut self, training: &Training) -> Result<()> {
        let (zero, params) = (self.model.zero, self.model.params);
        let mut tensors = vec![if zero.divides_parameters() {
            ("wte and wpe", self.model.param_store().unit(Unit::Embeddings))
        } else {
            ("params", params)
        }];
        if !zero.divides_optimizer() {
            tensors.extend([("m", training.m), ("v", training.v)]);
            tensors.extend(training.master.map(|master| ("master", master)));
        }
        self.ranks.check_same(self.engine, &tensors)
    }

    fn sample(&mut self, tokenizer: Tokenizer, session: &mut Session) -> Result<()> {
        // The same draws every time, so that samples differ by what the model has learnt.
        let sampling = Sampling { top_k: 0, temperature: 1.0, seed: 1337 };
        let mut tokens = Vec::new();
        let prompt = [tokenizer.document()];
        let layers = &mut Exchange { model: self.model, ranks: self.ranks, turns: &mut session.turns, last: false };
        let length = self.settings.sample_tokens;
        sample::generate_with(self.model, self.engine, layers, &prompt, length, sampling, |token| {
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
    /// If it had to be known before the update.
    verdict: Option<Verdict>,
}

/// Mean loss and gradient norm of a step of so many tokens.
fn stats_of(reading: &Reading, tokens: usize) -> Result<[f32; 2]> {
    let [loss_sum, norm] = reading.values[..] else {
        bail!("expected loss and norm, read {} values", reading.values.len())
    };
    Ok([loss_sum / tokens as f32, norm])
}

/// What a run gathers from its start, or from where it was taken up, to its end.
#[derive(Default)]
struct Session {
    clock: Clock,
    turns: Turns,
    micro_step: Recurring,
    last_val_loss: Option<f64>,
    model_file: Option<PathBuf>,
    /// The latest checkpoint, if it could not be written.
    unsaved: Option<(usize, Error)>,
    stopped: Option<usize>,
}
