//! Detection of faulty hardware: verified micro-batches, and hashes of parameters and optimizer state.

use super::{Run, Session};
use crate::gpu_info::GpuInfo;
use anyhow::{Error, Result};
use checkpoint::recovery::RecoveryPoint;
use distributed::fault::Fault;
use engine::trace::BitFlip;
use model::verification::{Difference, Verification};

/// Settings of the detection of faulty hardware. Intervals count steps; `None` means never.
#[derive(Clone, Debug, Default)]
pub struct HardwareChecks {
    /// Interval at which the first micro-batch of a step is computed twice.
    pub verify_every: Option<usize>,
    /// Interval of logged hashes.
    pub hash_every: Option<usize>,
    /// A fault to inject.
    pub flip: Option<BitFlip>,
    /// This rank's GPU as numbered by the CUDA driver, or `None` on a CPU.
    pub gpu: Option<usize>,
}

impl HardwareChecks {
    /// Name of the environment variable with the bit to flip, as `STEP:RANK:OUTPUT:ELEMENT:BIT`.
    pub const FLIP_VARIABLE: &str = "LLM_RS_FLIP_BIT";

    /// Returns whether the first micro-batch of `step` is verified.
    pub(super) fn is_due(&self, step: usize) -> bool {
        self.verify_every.is_some_and(|n| step.is_multiple_of(n))
    }
}

impl Run<'_> {
    /// Requests the verification of the next step, if it is due.
    pub(super) fn request_verification(&mut self, step: usize, session: &mut Session) {
        let HardwareChecks { flip, .. } = self.settings.hardware;
        if !self.settings.hardware.is_due(step) {
            return;
        }
        let number = session.verified.1;
        session.verified.1 += 1;
        session.step.verify_next(Verification { number, flip: flip.filter(|flip| flip.step == step) });
    }

    /// Logs hashes of parameters and optimizer state, after a comparison of those that ranks have in common.
    pub(super) fn log_hashes(&mut self) -> Result<()> {
        self.ranks.set_operation("hashing parameters");
        let hashes = self.model.digests(self.engine, self.ranks)?;
        self.log.hashes(self.state.step, &hashes)
    }

    /// Converts the error of a verification into a fault that names the GPUs, and states which checkpoint is good. Returns other errors.
    pub(super) fn hardware_fault(&mut self, error: Error, session: &Session) -> Result<Error, Error> {
        let difference = error.downcast::<Difference>()?;
        self.console.finish();
        // A failure to write a checkpoint matters less.
        let _ = self.wait_for_checkpoint();
        let gpus = self.gpus().unwrap_or_else(|error| vec![format!("unknown: {error:#}")]);
        let name = |rank: usize| gpus.get(rank).map_or("unknown", String::as_str);
        let Difference { rank, second, .. } = difference;
        let involved = if rank == second {
            format!("the GPU of rank {rank} is {}", name(rank))
        } else {
            let suspect =
                difference.suspect().map_or(String::new(), |rank| format!("; that of rank {rank} is suspected"));
            format!("the GPU of rank {rank} is {}, and that of rank {second} is {}{suspect}", name(rank), name(second))
        };
        let kept = self.good_checkpoint(session);
        let stage = self.stage();
        Ok(Fault::Hardware(format!("{stage}: faulty hardware: {difference}; {involved}; {kept}")).into())
    }

    /// Returns which checkpoint is good. Those after the last verification may contain wrong values.
    fn good_checkpoint(&self, session: &Session) -> String {
        let Some(checkpoints) = &self.checkpoints else {
            return if self.ranks.is_first() { "nothing is saved with --out none" } else { "see the output of rank 0" }
                .to_owned();
        };
        let Some(verified) = session.verified.0 else {
            return "this process has not verified an earlier step: do not trust its checkpoints".to_owned();
        };
        let RecoveryPoint { last_good, suspect } = match checkpoints.recovery_point(verified + 1) {
            Ok(point) => point,
            Err(error) => return format!("the checkpoints cannot be listed: {error:#}"),
        };
        let Some((step, file)) = last_good else {
            return format!("there is no checkpoint up to step {verified}, the last that was verified");
        };
        let later =
            suspect.map_or(String::new(), |done| format!("delete the later ones, up to {}, and ", done.display()));
        format!("the last good checkpoint is {} of step {step}: {later}resume on other hardware", file.display())
    }

    /// Returns the GPU of each rank, on all ranks.
    fn gpus(&mut self) -> Result<Vec<String>> {
        let own = match self.settings.hardware.gpu {
            None => self.engine.describe(),
            Some(gpu) => {
                GpuInfo::open(gpu).map_or_else(|error| format!("GPU {gpu} ({error:#})"), |info| info.identity())
            }
        };
        let all = self.ranks.gather(own.into_bytes())?;
        let names: Vec<String> = all.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        self.ranks.broadcast(names)
    }
}
