//! Checkpoints of the training loop.

use super::{Boundary, Run, Session};
use crate::hints::Invocation;
use anyhow::{Result, ensure};
use checkpoint::fp8::Fp8Statistics;
use checkpoint::writer::{CheckpointWriter, WriteOutcome, WriteSummary, format_bytes};
use model::guards::Limits;
use system::time;

/// Returns the name of the file in the directory of a run that receives the last operations of a rank after a failure.
pub fn flight_recorder_name(rank: usize) -> String {
    format!("flight-recorder-{rank}.txt")
}

impl Run<'_> {
    /// Reports a checkpoint that was written in the background.
    pub(super) fn poll_checkpoint(&mut self, session: &mut Session) -> Result<()> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let written = checkpoints.poll(self.ranks)?;
        self.report_checkpoint(written, session)
    }

    /// Waits for the checkpoint that is being written.
    pub(super) fn wait_for_checkpoint(&mut self) -> Result<Option<WriteOutcome>> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(None) };
        checkpoints.wait(self.ranks)
    }

    /// Reports whether the last step was finite. While none is, the weights do not change, and further checkpoints would replace
    /// earlier ones that differ.
    pub(super) fn is_worth_saving(&self) -> Result<bool> {
        let bad = self.state.progress.guards.bad_in_a_row;
        if bad > 0 {
            let step = self.state.step;
            let since = step.saturating_sub(bad);
            self.console.line(&format!("no checkpoint of step {step}: nothing has changed since step {since}"))?;
        }
        Ok(bad == 0)
    }

    /// Begins to write a checkpoint after the previous one is complete. A failure is reported and the run continues.
    pub(super) fn save(&mut self, session: &mut Session) -> Result<()> {
        self.follow_directory(session)?;
        let previous = self.wait_for_checkpoint()?;
        let Self { settings, train, checkpoints, ranks, engine, model, log, state, .. } = self;
        // After an error on this rank, the others do not hash their part.
        if !session.failed && (checkpoints.is_some() || ranks.world_size() > 1) {
            state.progress.hashes = model.digests(*engine, ranks)?;
        } else {
            state.progress.hashes.clear();
        }
        let Some(checkpoints) = checkpoints else { return Ok(()) };
        state.progress.fp8 = Fp8Statistics::read(model, *engine, settings.dloss(model, train.layout()))?;
        let replaced = state.progress.replaced(state.step == settings.steps);
        let begun = checkpoints.begin(model, *engine, ranks, state.clone(), log.flushed(), replaced);
        session.last_save = time::now();
        self.report_checkpoint(previous, session)?;
        match begun {
            Ok(()) => Ok(()),
            Err(error) => {
                self.report_checkpoint(Some(WriteOutcome { step: self.state.step, result: Err(error) }), session)
            }
        }
    }

    /// If the directory of the run was moved, all further files are written there: the open log files have moved with it.
    pub(super) fn follow_directory(&mut self, session: &mut Session) -> Result<()> {
        let Self { checkpoints: Some(checkpoints), log, console, ranks, .. } = self else { return Ok(()) };
        let Some(now) = checkpoints.moved() else { return Ok(()) };
        let before = checkpoints.directory().display();
        console.line(&format!(
            "warning: {before} was moved to {0} during the run; the run continues in {0}",
            now.display()
        ))?;
        log.follow(&now);
        console.follow(&now);
        ranks.set_flight_recorder_file(now.join(flight_recorder_name(ranks.rank())));
        checkpoints.follow(now);
        session.model_file = checkpoints.model_file();
        Ok(())
    }

    /// Reports the result of writing a checkpoint.
    pub(super) fn report_checkpoint(&mut self, written: Option<WriteOutcome>, session: &mut Session) -> Result<()> {
        let (Some(WriteOutcome { step, result }), Some(checkpoints)) = (written, &self.checkpoints) else {
            return Ok(());
        };
        match result {
            Ok(WriteSummary { model_file, bytes, time, pause, warning }) => {
                self.console.line(&format!(
                    "checkpoint of step {step}: {}, {} in {:.2} s after a pause of {:.3} s",
                    model_file.display(),
                    format_bytes(bytes),
                    time.as_secs_f64(),
                    pause.as_secs_f64()
                ))?;
                if let Some(warning) = warning {
                    self.console.line(&format!("warning: {warning}"))?;
                }
                session.model_file = Some(model_file);
                session.unsaved = None;
                let replaced = self.state.progress.replaced(step == self.settings.steps).len();
                self.state.progress.timed.drain(..replaced);
            }
            Err(error) => {
                let newest = match checkpoints.newest() {
                    Some(step) => format!("the newest one is of step {step}"),
                    None => "there is none yet".to_owned(),
                };
                self.console.line(&format!("warning: no checkpoint of step {step}, {newest}: {error:#}"))?;
                session.unsaved = Some((step, error));
            }
        }
        Ok(())
    }

    /// Saves the last completed step after an error. Returns how to continue the run, unless the error says so itself.
    pub(super) fn save_after_error(&mut self, mut session: Session) -> Option<String> {
        let Limits { bad_steps, .. } = self.settings.limits;
        // Rank 0 reports for all ranks. A run that diverged has reported which checkpoint precedes the failure.
        if !self.ranks.is_first() || self.state.progress.guards.bad_in_a_row >= bad_steps {
            return None;
        }
        self.console.finish();
        // The error that ends the run is reported in any case.
        let _ = self.console.last_step();
        if let Err(error) = self.save_last_step(&mut session) {
            let step = self.state.step;
            let _ = self.console.line(&format!("warning: no checkpoint of step {step}: {error:#}"));
        }
        if let Err(error) = self.log.finish() {
            let _ = self.console.line(&format!("warning: the last lines of the log were not written: {error:#}"));
        }
        self.continuation()
    }

    /// Returns how to continue the run. Rank 0 reports it for all ranks.
    pub(super) fn continuation(&self) -> Option<String> {
        if !self.ranks.is_first() {
            return None;
        }
        let Some(checkpoints) = &self.checkpoints else {
            return Some("nothing is saved with --out none".to_owned());
        };
        let command = Invocation::current().resuming(checkpoints.directory(), true);
        Some(match checkpoints.newest() {
            Some(step) => format!("the newest checkpoint is of step {step}; continue with {command}"),
            None => "there is no checkpoint yet".to_owned(),
        })
    }

    /// Writes a checkpoint of the last completed step, if it has none and this rank has all of its state.
    fn save_last_step(&mut self, session: &mut Session) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        let is_saved = checkpoints.newest() == Some(self.state.step);
        if is_saved || (self.state.step == session.first && session.launched.is_none()) {
            return Ok(());
        }
        let sharded = self.model.zero.shards_optimizer() && self.ranks.world_size() > 1;
        ensure!(!sharded, "each rank has only a part of the optimizer state");
        self.log_launched(session)?;
        self.console.last_step()?;
        ensure!(session.boundary.intact, "the error interrupted the next step's update");
        if self.state.progress.guards.bad_in_a_row > 0 {
            return Ok(());
        }
        let Boundary { rounding, rounding_before_update, ref data, .. } = session.boundary;
        (self.state.rounding, self.state.rounding_before_update) = (rounding, rounding_before_update);
        self.state.data = data.clone();
        session.step.restore_statistics(self.engine)?;
        let previous = self.wait_after_error()?;
        self.report_checkpoint(previous, session)?;
        let newest = self.checkpoints.as_ref().and_then(CheckpointWriter::newest);
        let failed = session.unsaved.as_ref().map(|(step, _)| *step);
        if [newest, failed].contains(&Some(self.state.step)) {
            return Ok(());
        }
        session.failed = true;
        self.save(session)?;
        let written = self.wait_after_error()?;
        self.report_checkpoint(written, session)
    }

    /// Waits for the checkpoint that is being written, although another rank may have failed.
    fn wait_after_error(&mut self) -> Result<Option<WriteOutcome>> {
        self.ranks.set_saving();
        self.wait_for_checkpoint()
    }
}
