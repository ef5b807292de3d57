//! The training loop.
//!
//! This file contains the loop: load a batch, run a step, log, and do what is due. `evaluation.rs` validates, scores and samples;
//! `saving.rs` writes checkpoints, also after an error; `logging.rs` reports steps and guards against divergence; `hardware.rs` verifies
//! micro-batches and logs hashes.

mod evaluation;
mod hardware;
mod logging;
mod optimizer;
mod saving;

pub use evaluation::{SourceLoss, Validation, ValidationSource};
pub use hardware::HardwareChecks;
pub use logging::Diverged;
pub use optimizer::{CLIP, GroupFlag, MuonSettings, OptimizerSettings};
pub use saving::flight_recorder_name;

use crate::clock::Clock;
use crate::console::Console;
use crate::evaluate::core::CoreSet;
use crate::log::Log;
use crate::signals::Stop;
use anyhow::{Context, Error, Result, anyhow};
use checkpoint::RunState;
use checkpoint::writer::CheckpointWriter;
use data::loader::Position;
use data::{MultipleChoice, Prefetch};
use distributed::Ranks;
use distributed::fault::Fault;
use engine::{BatchLayout, Engine, PendingRead};
use model::guards::{Limits, Skips, Verdict};
use model::schedule::Schedule;
use model::{Decoder, StepStats, TrainStep, Training};
use rng::XorShift;
use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use system::time;
use tokenizer::Tokenizer;

/// Settings of the loop. An interval ("every") counts steps; the end of the run counts as due; `None` means never.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of steps of the whole run.
    pub steps: usize,
    /// Micro-batches of each rank in one step.
    pub grad_accum: usize,
    /// Learning rate over the steps.
    pub schedule: Schedule,
    /// Optimizer, and learning rates of groups of parameters.
    pub optimizer: OptimizerSettings,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Maximum gradient norm.
    pub clip: f32,
    /// When a step must not change the model.
    pub limits: Limits,
    /// Interval of validation and HellaSwag. Validation also happens before the first step.
    pub val_every: Option<usize>,
    /// Interval of CORE.
    pub core_every: Option<usize>,
    /// Interval of text samples.
    pub sample_every: Option<usize>,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// Interval of checkpoints.
    pub checkpoint_every: Option<usize>,
    /// Interval at which rank 0 prints how many values FP8 loses.
    pub fp8_stats_every: Option<usize>,
    /// Time since the last checkpoint after which another one is due.
    pub checkpoint_after: Option<Duration>,
    /// Interval at which ranks compare their replicas.
    pub check_ranks_every: Option<usize>,
    /// Detection of faulty hardware.
    pub hardware: HardwareChecks,
}

impl Settings {
    /// Returns the gradient of each token's loss in steps of micro-batches of `layout`.
    pub fn dloss(&self, model: &Decoder, layout: BatchLayout) -> f32 {
        model.zero.dloss(layout.b * layout.t * self.grad_accum)
    }
}

/// Everything that a run consists of.
pub struct Run<'a> {
    /// Settings of the loop.
    pub settings: &'a Settings,
    /// The processes that train the same model, each on its own part of the data.
    pub ranks: &'a mut Ranks,
    /// The engine.
    pub engine: &'a mut dyn Engine,
    /// The model.
    pub model: &'a Decoder,
    /// Set if samples are written.
    pub tokenizer: Option<Tokenizer>,
    /// Training data.
    pub train: Prefetch,
    /// Validation data.
    pub val: Validation,
    /// Scored after each validation except the one before the first step.
    pub hellaswag: Option<MultipleChoice>,
    /// This rank's share of the questions of CORE.
    pub core: Option<CoreSet>,
    /// Terminal output.
    pub console: Console,
    /// Log files.
    pub log: Log,
    /// The state between two steps: the start of the run, then its progress.
    pub state: RunState,
    /// Set if the run writes checkpoints.
    pub checkpoints: Option<CheckpointWriter>,
    /// Stop requests by signals.
    pub stop: Stop,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// First and last validation loss.
    pub val: Option<(f64, f64)>,
    /// Tokens trained on.
    pub tokens: u64,
    /// Skipped updates.
    pub skips: Skips,
    /// Time of the training steps.
    pub training: Duration,
    /// The number of steps after which the run was resumed, and the time of the training steps since then.
    pub resumed: Option<(usize, Duration)>,
    /// Mean time of a step, without the first one.
    pub step: Option<Duration>,
    /// The last model file.
    pub model_file: Option<PathBuf>,
    /// The step before which a stop was requested.
    pub stopped: Option<usize>,
    /// In which way the run has diverged, if it has done all steps.
    pub divergence: Option<String>,
}

/// Multiplied by the rank, makes the rounding seeds of the ranks distinct (golden ratio in 32 bits).
const RANK_SEED: u32 = 0x9e37_79b9;

/// Returns the rounding seed of a micro-batch of a rank. All ranks have drawn the same number.
const fn micro_batch_seed(drawn: u32, rank: usize) -> u32 {
    drawn.wrapping_add((rank as u32).wrapping_mul(RANK_SEED))
}

/// A step that was launched and not yet logged.
struct LaunchedStep {
    step: usize,
    learning_rate: f32,
    /// FLOPs per token of this rank.
    flops_per_token: usize,
    stats: StepStats,
    /// The loads of the experts in the last micro-batch, if the model has any.
    loads: Option<PendingRead>,
    read: PendingRead,
    /// Set if the verdict was needed before the update.
    verdict: Option<Verdict>,
}

/// State of this process between its first and its last step.
struct Session {
    /// The step that this process started with.
    first: usize,
    /// Time of the training steps before it.
    trained_before: Duration,
    clock: Clock,
    /// A step's loss is read while the engine computes the next step, so that the engine never waits for the host.
    launched: Option<LaunchedStep>,
    boundary: Boundary,
    /// The time of the last checkpoint, or of the start.
    last_save: Instant,
    step: TrainStep,
    last_val_loss: Option<f64>,
    model_file: Option<PathBuf>,
    /// The latest checkpoint and the reason, if it could not be written.
    unsaved: Option<(usize, Error)>,
    stopped: Option<usize>,
    /// The last step whose first micro-batch was verified, and the number of verifications of this process.
    verified: (Option<usize>, usize),
    /// The run has failed, so that collectives would not complete.
    failed: bool,
}

/// The part of the state that changes within a step, as it was before the step.
struct Boundary {
    rounding: XorShift,
    rounding_before_update: XorShift,
    data: Position,
    /// Whether the tensors have the values after the last completed step. False while an update is queued, and after the failure to
    /// read a step's loss.
    intact: bool,
}

impl Boundary {
    fn of(state: &RunState) -> Self {
        let RunState { rounding, rounding_before_update, ref data, .. } = *state;
        Self { rounding, rounding_before_update, data: data.clone(), intact: true }
    }
}

/// The tasks that are due before a step.
#[expect(clippy::struct_excessive_bools, reason = "the tasks are due independently of each other")]
struct Due {
    validate: bool,
    score: bool,
    core: bool,
    sample: Option<Tokenizer>,
    save: bool,
    /// Whether only the time since the last checkpoint requests one.
    timed: bool,
    /// A stop was requested or the run is complete.
    end: bool,
    /// Whether any rank evaluates.
    evaluates: bool,
}

impl Due {
    fn any(&self) -> bool {
        self.evaluates || self.save || self.end
    }
}

impl Run<'_> {
    /// Trains to the last step or until a stop is requested.
    pub fn train(&mut self) -> Result<Outcome> {
        self.ranks.end_startup();
        let training = self.model.training.context("this model was planned for inference only")?;
        let outcome = match self.session(&training) {
            Ok(mut session) => match self.run_steps(&training, &mut session) {
                Ok(()) => self.finish(session).map_err(|error| (error, None)),
                Err(error) => match self.hardware_fault(error, &session) {
                    Ok(fault) => Err((fault, None)),
                    Err(error) => Err((error, self.save_after_error(session))),
                },
            },
            Err(error) => Err((error, None)),
        };
        match outcome {
            Ok(outcome) => self.ranks.close().map(|()| outcome),
            Err((error, continuation)) => {
                let stage = self.stage();
                let cause = self.ranks.failure_cause(error, &stage);
                self.ranks.abort_collectives();
                Err(self.explain(cause, &stage, continuation))
            }
        }
    }

    /// Returns the current step in words.
    fn stage(&self) -> String {
        let Settings { steps, .. } = *self.settings;
        if self.state.step == steps {
            return format!("after step {steps} of {steps}");
        }
        format!("step {} of {steps}", self.state.step + 1)
    }

    /// Adds to the cause of a failed run in which step it failed and how to continue.
    fn explain(&self, cause: Error, stage: &str, continuation: Option<String>) -> Error {
        let Some(continuation) = continuation else { return cause };
        if cause.is::<Fault>() {
            // The exit code and the other ranks depend on the type of the error, and a fault names its step.
            return match self.console.line(&continuation) {
                Ok(()) => cause,
                Err(error) => cause.context(error),
            };
        }
        anyhow!("{stage}: {cause:#}; {continuation}")
    }

    fn session(&mut self, training: &Training) -> Result<Session> {
        Ok(Session {
            first: self.state.step,
            trained_before: Duration::from_secs_f64(self.state.progress.training_seconds),
            clock: Clock::start(self.engine_time(training)?),
            launched: None,
            boundary: Boundary::of(&self.state),
            last_save: time::now(),
            step: TrainStep::new(self.model, self.train.layout(), self.settings.grad_accum)
                .mask_targets(self.train.masks_targets())
                .capture_graphs(),
            last_val_loss: None,
            model_file: self.checkpoints.as_ref().and_then(CheckpointWriter::model_file),
            unsaved: None,
            stopped: None,
            verified: (None, 0),
            failed: false,
        })
    }

    fn run_steps(&mut self, training: &Training, session: &mut Session) -> Result<()> {
        for step in session.first..=self.settings.steps {
            if self.before_step(step, training, session)?.is_break() {
                break;
            }
            self.poll_checkpoint(session)?;
            self.request_verification(step, session);
            let launched = self.launch_step(step, training, session)?;
            if let Some(previous) = session.launched.replace(launched) {
                self.log_step(previous, session)?;
            }
            self.after_step(step + 1, training, session)?;
        }
        Ok(())
    }

    /// Evaluates and saves, if that is due before `step`. Breaks after the last step and after a stop request.
    fn before_step(&mut self, step: usize, training: &Training, session: &mut Session) -> Result<ControlFlow<()>> {
        let (mut stop, time_to_save) = self.poll(step, session)?;
        let mut due = self.due(step, session.first, stop, time_to_save);
        if due.any() {
            self.log_launched(session)?;
            self.follow_directory(session)?;
            if due.evaluates || due.end {
                self.console.last_step()?;
            }
            if due.evaluates {
                self.state.progress.evaluated = self.evaluate(step, &due, session)?;
                (stop, _) = self.poll(step, session)?;
                if stop {
                    due = self.due(step, session.first, stop, time_to_save);
                }
            } else {
                self.state.progress.evaluated |= !stop;
            }
            self.save_if_due(step, &due, stop, session)?;
            session.clock.resume(self.engine_time(training)?);
        }
        if stop {
            session.stopped = Some(step);
        }
        Ok(if due.end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    /// Reports and checks what is due after `done` steps.
    fn after_step(&mut self, done: usize, training: &Training, session: &mut Session) -> Result<()> {
        let is_due = |every: Option<usize>| every.is_some_and(|n| done.is_multiple_of(n));
        let Settings { fp8_stats_every, check_ranks_every, ref hardware, .. } = *self.settings;
        let [counts, hashes, ranks] = [fp8_stats_every, hardware.hash_every, check_ranks_every].map(is_due);
        if !(counts || hashes || ranks) {
            return Ok(());
        }
        self.log_launched(session)?;
        if counts {
            self.print_fp8_counts(done - 1, session)?;
        }
        if hashes {
            self.log_hashes()?;
        }
        if ranks {
            self.check_ranks(training)?;
        }
        session.clock.resume(self.engine_time(training)?);
        Ok(())
    }

    /// Waits for the step that was launched last, if its loss has not been read, and reports it.
    fn log_launched(&mut self, session: &mut Session) -> Result<()> {
        let Some(launched) = session.launched.take() else { return Ok(()) };
        self.log_step(launched, session)
    }

    /// Returns whether any rank was asked to stop, and whether the last checkpoint is too old.
    fn poll(&mut self, step: usize, session: &Session) -> Result<(bool, bool)> {
        let steps = self.settings.steps;
        self.ranks.set_stage(|| format!("step {} of {steps}", step + 1));
        self.ranks.set_operation("waiting for the others");
        let old = self.settings.checkpoint_after.is_some_and(|after| time::now() - session.last_save >= after);
        let [stop, save] = self.ranks.any_ranks([self.stop.requested(), old && self.ranks.is_first()])?;
        self.ranks.set_operation("computing");
        Ok((stop, save))
    }

    /// Returns the tasks that are due before `step`. A stop request takes effect immediately, also during evaluations; the resumed run
    /// performs them.
    fn due(&self, step: usize, first: usize, stop: bool, time_to_save: bool) -> Due {
        let Settings { steps, val_every, core_every, sample_every, checkpoint_every, .. } = *self.settings;
        let last = step == steps;
        let due = |every: Option<usize>| every.is_some_and(|n| last || (step > 0 && step.is_multiple_of(n)));
        let evaluate = !stop && !self.state.progress.evaluated;
        // If ranks exchange parameters or tokens in a forward pass, all of them take part in sampling.
        let samples = self.ranks.is_first() || self.model.zero.forward_communicates();
        let validate =
            evaluate && !self.val.sources.is_empty() && (due(val_every) || (step == 0 && val_every.is_some()));
        let score = evaluate && self.hellaswag.is_some() && due(val_every);
        let core = evaluate && self.core.is_some() && due(core_every);
        let sample = evaluate && due(sample_every);
        Due {
            validate,
            score,
            core,
            sample: self.tokenizer.clone().filter(|_| sample && samples),
            save: step > first && (due(checkpoint_every) || stop || time_to_save),
            timed: !due(checkpoint_every) && !stop,
            end: last || stop,
            evaluates: validate || score || core || sample,
        }
    }

    fn save_if_due(&mut self, step: usize, due: &Due, stop: bool, session: &mut Session) -> Result<()> {
        let required = stop || step == self.settings.steps;
        if due.save && (required || self.is_worth_saving()?) {
            if due.timed {
                self.state.progress.timed.push(step);
            }
            self.save(session)?;
        }
        Ok(())
    }

    /// Launches one optimizer step.
    fn launch_step(&mut self, step: usize, training: &Training, session: &mut Session) -> Result<LaunchedStep> {
        session.boundary = Boundary::of(&self.state);
        let Self { settings, engine, model, state, ranks, train, .. } = self;
        let rank = ranks.rank();
        let learning_rate = settings.schedule.at(step);
        let verified = settings.hardware.is_due(step).then_some(step);
        let mut verdict = None;
        let intact = &mut session.boundary.intact;
        let state = RefCell::new(state);
        let mut documents = Vec::new();
        // The seeds of micro-batches differ between ranks; the seed of the update must be equal on all of them.
        let load = &mut |engine: &mut dyn Engine| {
            let mut state = state.borrow_mut();
            let seed = micro_batch_seed(state.rounding.next_u32(), rank);
            let loaded = train.load_next(engine, model.batch, seed)?;
            state.data = loaded.next_position;
            documents.extend(loaded.document_lengths);
            Ok(loaded.targets)
        };
        let decide = &mut |engine: &mut dyn Engine, stats: StepStats| {
            let mut state = state.borrow_mut();
            state.rounding_before_update = state.rounding;
            let seed = state.rounding.next_u32();
            if settings.limits.decide_before_update() {
                let read = engine.read_async(stats.tensor)?;
                let [loss, norm] = stats.loss_and_norm(&engine.wait(read)?.values)?;
                verdict = Some(state.progress.guards.judge(loss, norm, &settings.limits));
            }
            let skipped = verdict.as_ref().is_some_and(|verdict| verdict.skipped.is_some());
            *intact = skipped;
            Ok((!skipped).then(|| settings.update(step, seed)))
        };
        if settings.fp8_stats_every.is_some_and(|n| (step + 1).is_multiple_of(n)) {
            session.step.count_fp8();
        }
        let (stats, capture_error) = session.step.run(*engine, ranks, load, decide)?;
        let flops_per_token = model.descriptor.flops_of_documents(&documents);
        if let Some(step) = verified {
            session.verified.0 = Some(step);
            self.state.progress.verified = Some(step);
            self.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.keep_verified(step));
        }
        if let Some(error) = capture_error {
            self.console
                .line(&format!("warning: CUDA graph capture failed, kernels are launched individually: {error}"))?;
        }
        let loads = self.model.read_loads(self.engine)?;
        let read = self.engine.read_async(training.stats)?;
        self.state.step = step + 1;
        self.state.progress.evaluated = false;
        session.boundary = Boundary::of(&self.state);
        Ok(LaunchedStep { step, learning_rate, flops_per_token, stats, loads, read, verdict })
    }

    /// Waits for the last checkpoint and returns the result of the run.
    fn finish(&mut self, mut session: Session) -> Result<Outcome> {
        let written = self.wait_for_checkpoint()?;
        self.report_checkpoint(written, &mut session)?;
        self.console.finish();
        if let Some((step, error)) = session.unsaved {
            let failed = format!("the last checkpoint (step {step}) could not be written");
            return Err(match self.continuation() {
                Some(continuation) if !error.is::<Fault>() => anyhow!("{failed}: {error:#}; {continuation}"),
                _ => error.context(failed),
            });
        }
        self.log.finish()?;
        let finished = session.stopped.is_none();
        let divergence = finished.then(|| self.divergence(session.last_val_loss)).flatten();
        self.follow_directory(&mut session)?;
        let progress = &self.state.progress;
        let training = Duration::from_secs_f64(progress.training_seconds);
        Ok(Outcome {
            divergence,
            val: progress.first_val_loss.zip(session.last_val_loss),
            tokens: progress.tokens,
            skips: progress.guards.skips,
            training,
            resumed: (session.first > 0).then(|| (session.first, training.saturating_sub(session.trained_before))),
            step: progress.step_time.mean().map(Duration::from_secs_f64),
            model_file: session.model_file,
            stopped: session.stopped,
        })
    }

    /// Returns the engine's time when all work launched so far is complete.
    fn engine_time(&mut self, training: &Training) -> Result<Duration> {
        let read = self.engine.read_async(training.stats)?;
        Ok(self.engine.wait(read)?.completed_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Rounding errors of ranks with equal seeds would be equal, and would not cancel in the sum of their gradients.
    #[test]
    fn ranks_have_different_rounding_seeds() {
        for drawn in [0, 1, u32::MAX] {
            assert_eq!(micro_batch_seed(drawn, 0), drawn);
            let seeds: HashSet<u32> = (0..1 << 14).map(|rank| micro_batch_seed(drawn, rank)).collect();
            assert_eq!(seeds.len(), 1 << 14);
        }
    }
}
