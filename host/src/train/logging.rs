//! Reports of steps, and the end of a run that diverges.

use super::{LaunchedStep, Run, Session};
use crate::log::Step;
use crate::mfu::mfu;
use anyhow::{Result, bail};
use checkpoint::recovery::recovery_hint;
use metrics::expert_loads::ExpertLoads;
use model::guards::{Limits, Skipped};

/// Steps whose median loss decides whether a run has diverged.
const LAST_STEPS: usize = 10;

/// Multiple of the loss of an untrained model above which a run has diverged. Losses of batches vary by much less.
const FACTOR: f32 = 1.5;

/// The end of a run that has done all steps but has diverged. Its checkpoints are complete.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Diverged(pub String);

impl Diverged {
    /// The exit code of the process.
    pub const EXIT_CODE: u8 = 5;
}

impl Run<'_> {
    /// Waits for a step's loss and reports it.
    pub(super) fn log_step(&mut self, launched: LaunchedStep, session: &mut Session) -> Result<()> {
        let LaunchedStep { step, learning_rate, flops_per_token, stats, loads, read, verdict } = launched;
        self.ranks.set_operation("waiting for the GPU");
        let before = std::mem::replace(&mut session.boundary.intact, false);
        let loads = loads.map(|loads| self.engine.wait(loads)).transpose()?;
        let read = self.engine.wait(read)?;
        // Aborted collectives leave values that are no loss.
        if !self.ranks.collectives_are_synchronous() {
            self.ranks.check()?;
        }
        session.boundary.intact = before;
        let (tokens, [loss, norm]) = (stats.tokens, stats.loss_and_norm(&read.values)?);
        let progress = &mut self.state.progress;
        let verdict = verdict.unwrap_or_else(|| progress.guards.judge(loss, norm, &self.settings.limits));
        let elapsed = session.clock.step_ended(read.completed_at, &mut progress.step_time);
        let tokens_per_second = tokens as f64 / elapsed.as_secs_f64();
        progress.tokens += tokens as u64;
        if loss.is_finite() {
            progress.first_loss.get_or_insert(loss);
        }
        progress.training_seconds += elapsed.as_secs_f64();
        let smoothed = progress.step_time.smoothed().unwrap_or(elapsed.as_secs_f64());
        let step = Step {
            step,
            loss,
            lr: learning_rate,
            norm,
            ms: 1e3 * elapsed.as_secs_f64(),
            tokens_per_second,
            mfu: self
                .engine
                .peak()
                .map(|peak| mfu(flops_per_token, tokens_per_second / self.ranks.world_size() as f64, &peak)),
            experts: loads.map(|loads| ExpertLoads::of(&self.model.expert_loads(&loads.values))),
            tokens: progress.tokens,
            verdict,
        };
        self.log.step(&step)?;
        if let Some(trouble) = self.log.take_trouble() {
            self.console
                .line(&format!("warning: log lines are held in memory until they can be written: {trouble}"))?;
        }
        self.console.step(&step, tokens as f64 / smoothed)?;
        self.report_skip(&step, session)
    }

    /// Returns in which way the finished run has diverged, and how to avoid that. `val_loss` is the last validation loss.
    ///
    /// A model that predicts all tokens with equal probability has a loss of ln V. A fine-tuned model may begin with a larger one.
    pub(super) fn divergence(&self, val_loss: Option<f64>) -> Option<String> {
        let progress = &self.state.progress;
        let uniform = (self.model.descriptor.vocab as f32).ln();
        let limit = FACTOR * progress.first_loss.map_or(uniform, |first| first.max(uniform));
        let median = progress.guards.median_loss(LAST_STEPS);
        let bad = progress.guards.bad_in_a_row;
        let found = if bad >= LAST_STEPS.min(self.settings.steps) {
            format!("no finite loss and gradient norm in the last {bad} steps")
        } else if let Some(median) = median.filter(|&median| median > limit) {
            format!("{median:.4e}, the median of the last {} steps", LAST_STEPS.min(self.settings.steps))
        } else if let Some(loss) = val_loss.filter(|loss| !loss.is_finite()) {
            format!("a validation loss of {loss}")
        } else {
            return None;
        };
        let expected = format!(
            "expected at most {limit:.4}, {FACTOR} times that of the first step or of equal probabilities, found {found}"
        );
        Some(format!("final training loss: {expected}: the run has diverged; use a smaller --lr or a longer --warmup"))
    }

    /// Reports a skipped update, and ends the run after too many in a row.
    fn report_skip(&mut self, step: &Step, session: &mut Session) -> Result<()> {
        let Limits { loss_z, norm_z, bad_steps } = self.settings.limits;
        let Step { step: number, loss, norm, verdict, .. } = *step;
        let Some(skipped) = verdict.skipped else { return Ok(()) };
        self.console.last_step()?;
        let bad = self.state.progress.guards.bad_in_a_row;
        let outlier = |what, z: Option<f64>, limit: Option<f64>| {
            let (z, limit) = (z.unwrap_or_default(), limit.unwrap_or_default());
            format!("the z-score of the {what} is {z:.2}, above {limit}")
        };
        let reason = match skipped {
            Skipped::NotFinite => format!("loss {loss}, norm {norm}; {bad} in a row; the run ends after {bad_steps}"),
            Skipped::Loss => outlier("loss", verdict.loss_z, loss_z),
            Skipped::Norm => outlier("gradient norm", verdict.norm_z, norm_z),
        };
        self.console.line(&format!("step {}: update skipped: {reason}", number + 1))?;
        if bad < bad_steps {
            return Ok(());
        }
        let written = self.wait_for_checkpoint()?;
        self.report_checkpoint(written, session)?;
        self.console.finish();
        self.log.finish()?;
        let first = (number + 1).saturating_sub(bad);
        let kept = self.checkpoints.as_ref().map(|checkpoints| checkpoints.recovery_point(first)).transpose()?;
        bail!(
            "the last {bad} steps, {} to {}, had no finite loss and gradient norm (loss {loss}, norm {norm}) and changed \
             nothing: {}",
            first + 1,
            number + 1,
            recovery_hint(kept.as_ref())
        )
    }
}
