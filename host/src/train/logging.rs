//! Reports of steps, and the end of a run that diverges.

use super::{LaunchedStep, Run, Session, loss_and_norm};
use crate::log::Step;
use crate::mfu::mfu;
use anyhow::{Result, bail};
use checkpoint::recovery::recovery_hint;
use model::guards::{Limits, Skipped};

impl Run<'_> {
    /// Waits for a step's loss and reports it.
    pub(super) fn log_step(&mut self, launched: LaunchedStep, session: &mut Session) -> Result<()> {
        let LaunchedStep { step, learning_rate, stats, verdict } = launched;
        self.ranks.set_operation("waiting for the GPU");
        let before = std::mem::replace(&mut session.boundary.intact, false);
        let read = self.engine.wait(stats)?;
        // Aborted collectives leave values that are no loss.
        if !self.ranks.collectives_are_synchronous() {
            self.ranks.check()?;
        }
        session.boundary.intact = before;
        let layout = self.train.layout();
        let tokens = layout.b * layout.t * self.settings.grad_accum * self.ranks.world_size();
        let [loss, norm] = loss_and_norm(&read, tokens)?;
        let progress = &mut self.state.progress;
        let verdict = verdict.unwrap_or_else(|| progress.guards.judge(loss, norm, &self.settings.limits));
        let elapsed = session.clock.step_ended(read.completed_at, &mut progress.step_time);
        let tokens_per_second = tokens as f64 / elapsed.as_secs_f64();
        progress.tokens += tokens as u64;
        progress.training_seconds += elapsed.as_secs_f64();
        let smoothed = progress.step_time.smoothed().unwrap_or(elapsed.as_secs_f64());
        let flops = self.model.descriptor.flops_per_token(layout.t);
        let step = Step {
            step,
            loss,
            lr: learning_rate,
            norm,
            ms: 1e3 * elapsed.as_secs_f64(),
            tokens_per_second,
            mfu: self.engine.peak().map(|peak| mfu(flops, tokens_per_second / self.ranks.world_size() as f64, &peak)),
            tokens: progress.tokens,
            verdict,
        };
        self.log.step(&step)?;
        if let Some(trouble) = self.log.take_trouble() {
            self.console.line(&format!("warning: log lines wait in memory: {trouble}"))?;
        }
        self.console.step(&step, tokens as f64 / smoothed)?;
        self.report_skip(&step, session)
    }

    /// Reports a skipped update, and ends the run after too many in a row.
    fn report_skip(&mut self, step: &Step, session: &mut Session) -> Result<()> {
        let Limits { loss_z, norm_z, bad_steps } = self.settings.limits;
        let Step { step: number, loss, norm, verdict, .. } = *step;
        let Some(skipped) = verdict.skipped else { return Ok(()) };
        let bad = self.state.progress.guards.bad_in_a_row;
        let outlier = |what, z: Option<f64>, limit: Option<f64>| {
            let (z, limit) = (z.unwrap_or_default(), limit.unwrap_or_default());
            format!("the z-score of the {what} is {z:.2}, above {limit}")
        };
        let reason = match skipped {
            Skipped::NotFinite => format!("loss {loss}, norm {norm}; {bad} in a row, {bad_steps} end the run"),
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
        self.console.last_step()?;
