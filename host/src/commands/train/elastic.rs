//! Start of a run that may continue with fewer ranks (`--min-ranks`): the parts of its files that waiting processes look at, and the
//! device, which is opened before the ranks meet.

use super::{Start, TrainOptions, multi_rank};
use crate::log;
use crate::values::{Count, Resume};
use anyhow::{Context, Result, bail, ensure};
use checkpoint::directory::{done_steps, sidecar_name};
use checkpoint::sidecar::Sidecar;
use distributed::launcher;
use distributed::rendezvous::elastic::{self, Elastic, Joined, Members, RunFiles, RunLock, WorldSizes};
use distributed::{Ranks, ShardGroups};
use engine::open::Device;
use std::path::Path;
use system::fs::exists;

/// The part of this process in a run.
pub struct Part {
    pub ranks: Ranks,
    pub start: Start,
    /// The lock of the run, on rank 0. It must be kept until the run has ended.
    pub lock: Option<RunLock>,
}

/// Returns the flags for any process of the run. One that comes late finds checkpoints.
pub fn flags(args: &TrainOptions) -> TrainOptions {
    let resume = if args.resume == Resume::No { Resume::Auto } else { args.resume };
    TrainOptions { resume, ..args.clone() }
}

/// Waits until this process is part of the run. Returns `None` if the run has completed all its steps.
pub fn join(args: &TrainOptions, min_ranks: usize) -> Result<Option<Part>> {
    let world = launcher::from_environment(multi_rank::launcher_flags(&args.launch))?;
    let sizes = WorldSizes { min_ranks, micro_batches: micro_batches(args)? };
    let directory = args.out().context("--min-ranks: expected --out, found none; add it")?;
    let Some(Count::Some(steps)) = args.steps else {
        bail!(
            "--min-ranks: expected a number of --steps, found none; add it, because the number of steps in an epoch may depend on \
             the number of ranks"
        );
    };
    let cpu = args.hardware.device == Device::Cpu;
    ensure!(
        cpu || world.local_rank.is_some() || world.world_size == 1,
        "--min-ranks: expected the local rank of this process, found none; add --local-rank, because the ranks on a host may change"
    );
    let local_rank = world.local_rank.unwrap_or_default();
    // A process whose GPU fails must not take part.
    let gpu = multi_rank::gpu_of(local_rank, world.world_size == 1, args.hardware.device)?;
    let opened = args.hardware.open_on(gpu)?;
    let secret = multi_rank::secret(&args.launch)?;
    let timeouts = multi_rank::timeouts(&args.launch);
    let run = Elastic { directory, sizes, files: &Files { directory, steps } };
    let Some(joined) = elastic::connect(&world, args.launch.rendezvous.as_ref(), secret, timeouts, &run)? else {
        return Ok(None);
    };
    let Joined { connected, members, lock } = joined;
    let ranks = match connected {
        Some(connected) => multi_rank::connected(connected.group, &args.launch),
        None => Ranks::Single,
    };
    Ok(Some(Part { ranks, start: Start { local_rank, opened: Some((gpu, opened)), members: Some(members) }, lock }))
}

/// Returns the micro-batches in a step of all ranks together.
fn micro_batches(args: &TrainOptions) -> Result<usize> {
    let (Some(b), Some(t), Some(total)) = (args.batch, args.seq, args.total_batch) else {
        bail!(
            "--min-ranks: expected --batch, --seq and --total-batch, found fewer; add them, because a step must not depend on the number of ranks"
        );
    };
    ensure!(
        total.is_multiple_of(b * t),
        "--total-batch {total}: expected a multiple of batch x seq = {b} x {t} = {}",
        b * t
    );
    Ok(total / (b * t))
}

/// The files of a run.
struct Files<'a> {
    directory: &'a Path,
    /// Optimizer steps of the run.
    steps: usize,
}

impl RunFiles for Files<'_> {
    fn is_finished(&self) -> Result<bool> {
        let newest = done_steps(self.directory)?.pop();
        let Some(step) = newest.filter(|&step| step >= self.steps) else { return Ok(false) };
        let sidecar = self.directory.join(sidecar_name(step));
        // A damaged checkpoint is found when the run resumes.
        let exists = exists(&sidecar).with_context(|| format!("cannot read {}", sidecar.display()))?;
        Ok(exists && Sidecar::read(&sidecar).is_ok_and(|sidecar| sidecar.progress.evaluated))
    }

    fn progress(&self) -> String {
        match log::last_step(self.directory) {
            Some(step) => format!("step {step} of {}", self.steps),
            None => "its start".to_owned(),
        }
    }
}

/// Returns the size of a shard group among `world_size` ranks, and a note if it is not that of `--shard-size`. Larger groups need less
/// memory in each rank.
pub fn shard_size(world_size: usize, wanted: usize) -> (usize, Option<String>) {
    let size = ShardGroups::smallest_size(world_size, wanted);
    let note = format!(
        "--shard-size is {size} instead of {wanted}: {}",
        if wanted > world_size {
            format!("there are {world_size} ranks")
        } else {
            format!("{wanted} does not divide {world_size} ranks")
        }
    );
    (size, (size != wanted).then_some(note))
}

/// Returns a note on the ranks of the run, if some are missing.
pub fn note(members: &Members, args: &TrainOptions) -> Option<String> {
    let text = members.describe()?;
    let each = micro_batches(args).ok()? / members.ranks.len();
    Some(format!("{text}; each rank computes {each} micro-batches in a step"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::Progress;
    use checkpoint::directory::done_name;
    use checkpoint::sidecar::Identity;
    use std::fs;

    fn write_checkpoint(directory: &Path, step: usize, evaluated: bool) {
        let identity = Identity {
            program: String::new(),
            engine: String::new(),
            config: serde_json::Map::new(),
            train: Vec::new(),
            val: None,
            ranks: 3,
        };
        let progress = Progress { evaluated, ..Progress::default() };
        let sidecar = Sidecar { step, identity, progress, mixture: None, algorithms: None, files: Vec::new() };
        let mut text = Vec::new();
        sidecar.write(&mut text).unwrap();
        fs::write(directory.join(sidecar_name(step)), text).unwrap();
        fs::write(directory.join(done_name(step)), "").unwrap();
    }

    #[test]
    fn a_run_has_finished_when_its_last_step_is_evaluated() {
        let dir = tempfile::tempdir().unwrap();
        let is_finished = || Files { directory: dir.path(), steps: 20 }.is_finished().unwrap();
        assert!(!is_finished());
        write_checkpoint(dir.path(), 10, true);
        assert!(!is_finished());
        // A stop was requested before the last validation.
        write_checkpoint(dir.path(), 20, false);
        assert!(!is_finished());
        write_checkpoint(dir.path(), 20, true);
        assert!(is_finished());
        fs::remove_file(dir.path().join(sidecar_name(20))).unwrap();
        assert!(!is_finished());
    }
}
