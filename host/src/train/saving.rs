//! Checkpoints of the training loop.

use super::{Run, Session};
use anyhow::Result;
use checkpoint::fp8::Fp8Statistics;
use checkpoint::writer::{WriteOutcome, WriteSummary, format_bytes};

impl Run<'_> {
    /// Reports a checkpoint that was written in the background.
    pub(super) fn poll_checkpoint(&mut self, session: &mut Session) -> Result<()> {
        let Self { checkpoints, ranks, .. } = self;
        let written = checkpoints.as_mut().map_or(Ok(None), |checkpoints| checkpoints.poll(ranks))?;
        self.report_checkpoint(written, session)
    }

    /// Waits for the checkpoint that is being written.
    pub(super) fn wait_for_checkpoint(&mut self) -> Result<Option<WriteOutcome>> {
        let Self { checkpoints, ranks, .. } = self;
        checkpoints.as_mut().map_or(Ok(None), |checkpoints| checkpoints.wait(ranks))
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
        let previous = self.wait_for_checkpoint()?;
        let Self { settings, train, checkpoints, ranks, engine, model, log, state, .. } = self;
        let Some(checkpoints) = checkpoints else { return Ok(()) };
        state.progress.fp8 = Fp8Statistics::read(model, *engine, settings.dloss(model, train.layout()))?;
        let begun = checkpoints.begin(model, *engine, ranks, state.clone(), log.files());
        self.report_checkpoint(previous, session)?;
        match begun {
            Ok(()) => Ok(()),
            Err(error) => {
                self.report_checkpoint(Some(WriteOutcome { step: self.state.step, result: Err(error) }), session)
            }
        }
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
}
