//! Performs a scenario and judges how it ended.

use super::removal;
use super::scenario::{Operations, STEPS, Scenario, ScenarioShape, directory};
use crate::cli::Cli;
use crate::commands::train;
use crate::signals::Stop;
use anyhow::{Context, Result};
use checkpoint::directory::{model_name, state_name};
use distributed::fault::Fault as RankFault;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use system::simulation::{Disk, End, Ended, Fault, Simulation, Trigger};

/// Maximum simulated time from the failure of a rank to the end of all others.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Ranks that have been silent for less are not lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(20);

/// The outcome of a seed.
pub struct Verdict {
    /// The kind of fault.
    pub kind: &'static str,
    /// Number of faults that occurred.
    pub faults: u64,
    /// Number of restarts.
    pub restarts: usize,
    /// Maximum time from the failure of a rank to the end of the others.
    pub end_after_loss: Duration,
    /// Hash of the course of all starts.
    pub trace: u64,
    /// The failure, if the seed failed.
    pub failure: Option<String>,
    /// Faults and output.
    pub story: Vec<String>,
}

/// The files of an undisturbed run, and the number of its operations.
struct Reference {
    files: BTreeMap<String, Vec<u8>>,
    operations: Operations,
}

/// The undisturbed runs of all shapes.
#[derive(Default)]
pub struct References(Mutex<BTreeMap<ScenarioShape, Arc<Reference>>>);

/// How a rank ended: the error, and whether it leaves the report to rank 0.
pub type Outcome = Result<(), (String, bool)>;

/// One start of a run.
pub struct Start {
    pub ended: Vec<Ended<Outcome>>,
    pub simulation: Simulation,
    /// The faults that have occurred.
    pub faults: Vec<(Duration, Fault)>,
}

/// Starts all ranks and waits until they have ended.
fn start_all(scenario: &Scenario, seed: u64, disk: Disk, faults: &[(Trigger, Fault)]) -> Result<Start> {
    let ranks: Vec<usize> = (0..scenario.shape.ranks).collect();
    start(scenario, &ranks, seed, disk, faults)
}

/// Starts some ranks and waits until they have ended. Faults name processes, which are numbered from 0.
pub fn start(
    scenario: &Scenario,
    ranks: &[usize],
    seed: u64,
    disk: Disk,
    faults: &[(Trigger, Fault)],
) -> Result<Start> {
    let simulation = Simulation::with_disk(seed, disk);
    for (trigger, fault) in faults {
        simulation.schedule(*trigger, *fault);
    }
    let mains = ranks.iter().map(|&rank| main_of(scenario, rank)).collect::<Result<_>>()?;
    let ended = simulation.run(mains)?;
    let faults = simulation.occurred();
    Ok(Start { ended, simulation, faults })
}

/// Returns the main function of the process of a rank.
fn main_of(scenario: &Scenario, rank: usize) -> Result<Box<dyn FnOnce() -> Outcome + Send>> {
    let arguments = scenario.arguments(rank).into_iter().map(OsString::from);
    let options = Cli::from_arguments(arguments)?.into_train().context("simulate: expected flags of train")?;
    Ok(Box::new(move || {
        train::run_until(&options, |_| Ok(Stop::default())).map_err(|error| {
            let silent = matches!(error.downcast_ref(), Some(RankFault::ReportedByRank0 { .. }));
            (format!("{error:#}"), silent)
        })
    }))
}

/// Returns the files that all runs of a shape have in common at their end.
pub fn result(disk: &Disk, shape: ScenarioShape) -> BTreeMap<String, Vec<u8>> {
    let shards = if shape.zero_stage > 0 { shape.shard_size } else { 1 };
    let states = (0..shards).map(|rank| state_name(STEPS, rank));
    let names = [model_name(STEPS), "main.log".to_owned()].into_iter().chain(states);
    names.map(|name| (name.clone(), disk.read(&directory().join(name)).unwrap_or_default())).collect()
}

impl References {
    /// Returns the undisturbed run of a shape, which is run the first time.
    fn get(&self, shape: ScenarioShape) -> Result<Arc<Reference>> {
        let runs = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reference) = runs().get(&shape) {
            return Ok(reference.clone());
        }
        // Without the lock: other threads may need other shapes.
        let Start { ended, simulation, .. } = start_all(&Scenario::undisturbed(shape), 0, Disk::default(), &[])?;
        for Ended { end, .. } in ended {
            anyhow::ensure!(matches!(end, End::Returned(Ok(()))), "an undisturbed run failed: {end:?}");
        }
        let operations = simulation.operations();
        let reference = Arc::new(Reference { files: result(&simulation.into_disk(), shape), operations });
        Ok(runs().entry(shape).or_insert(reference).clone())
    }
}

/// Runs a seed.
pub fn run(seed: u64, references: &References) -> Result<Verdict> {
    let scenario = Scenario::new(seed, |shape| Ok(references.get(shape)?.operations))?;
    run_scenario(seed, &scenario, references)
}

/// Runs a scenario until it has completed or failed. The seed determines the order of the threads.
fn run_scenario(seed: u64, scenario: &Scenario, references: &References) -> Result<Verdict> {
    let story = vec![format!("seed {seed}: {scenario:?}")];
    let mut verdict = Verdict {
        kind: scenario.kind,
        faults: 0,
        restarts: 0,
        end_after_loss: Duration::ZERO,
        trace: 0,
        failure: None,
        story,
    };
    if let Some(removal) = scenario.removal {
        removal::run(seed, scenario, removal, &mut verdict)?;
        return Ok(verdict);
    }
    let mut disk = Disk::default();
    let mut reported = None;
    for number in 0..=scenario.faults.len() {
        let faults = scenario.faults.get(number).map_or(&[][..], Vec::as_slice);
        let last = number == scenario.faults.len();
        let started = start_all(scenario, seed.wrapping_mul(31).wrapping_add(number as u64), disk, faults)?;
        verdict.add(&started);
        if let Err(failure) = verdict.judge(&started, &mut reported, last) {
            verdict.failure = Some(failure);
            return Ok(verdict);
        }
        let complete = started.ended.iter().all(|ended| matches!(ended.end, End::Returned(Ok(()))));
        verdict.finish_start(&started);
        disk = started.simulation.into_disk();
        if complete {
            let found = result(&disk, scenario.shape);
            let reference = references.get(scenario.shape)?;
            let differs = reference.files.iter().find(|(name, bytes)| found.get(*name) != Some(bytes));
            verdict.failure = differs.map(|(name, _)| format!("{name} differs from that of an undisturbed run"));
            return Ok(verdict);
        }
        disk.repair();
    }
    verdict.failure = Some("a start without faults did not complete the run".to_owned());
    Ok(verdict)
}

impl Verdict {
    /// Counts the faults of a start and adds it to the story.
    pub fn add(&mut self, start: &Start) {
        self.faults += start.faults.len() as u64;
        self.tell(start);
    }

    /// Counts a start that is followed by a restart unless it has completed the run.
    pub fn finish_start(&mut self, start: &Start) {
        self.trace = self.trace.rotate_left(7) ^ start.simulation.trace();
        let complete = start.ended.iter().all(|ended| matches!(ended.end, End::Returned(Ok(()))));
        self.restarts += usize::from(!complete);
    }

    /// Adds a start to the story.
    fn tell(&mut self, start: &Start) {
        self.story.push(format!("start {}", self.restarts));
        self.story.extend(start.faults.iter().map(|(at, fault)| format!("  {:9.3} s {fault:?}", at.as_secs_f64())));
        for (rank, Ended { end, at, output, errors }) in start.ended.iter().enumerate() {
            for (at, line) in output {
                self.story.push(format!("  {:9.3} s rank {rank}: {line}", at.as_secs_f64()));
            }
            self.story.extend(errors.iter().map(|line| format!("              rank {rank}: {line}")));
            self.story.push(format!("  {:9.3} s rank {rank} ended: {end:?}", at.as_secs_f64()));
        }
    }

    /// Judges one start. `reported` is the newest checkpoint that the run has reported as complete.
    pub fn judge(&mut self, start: &Start, reported: &mut Option<usize>, last: bool) -> Result<(), String> {
        let Start { ended, simulation, faults } = start;
        if let Some(stopped) = simulation.stopped() {
            return Err(format!("the run did not end: {stopped:?}"));
        }
        for (rank, Ended { end, .. }) in ended.iter().enumerate() {
            if let End::Panicked(text) = end {
                return Err(format!("rank {rank} panicked: {text}"));
            }
            if last && !matches!(end, End::Returned(Ok(()))) {
                return Err(format!("rank {rank} failed without a fault: {end:?}"));
            }
        }
        check_checkpoints(ended, reported)?;
        check_errors(ended, faults)?;
        self.check_times(ended, faults)
    }

    /// Checks that the loss of a rank ended all ranks in time.
    fn check_times(&mut self, ended: &[Ended<Outcome>], faults: &[(Duration, Fault)]) -> Result<(), String> {
        let lost = faults.iter().find_map(|(at, fault)| match *fault {
            Fault::Kill(rank) | Fault::LoseHost(rank) => Some((*at, rank, Duration::ZERO)),
            Fault::Freeze(rank, time) | Fault::Isolate(rank, time) if time > HEARTBEAT_TIMEOUT => {
                Some((*at, rank, time))
            }
            _ => None,
        });
        // Other faults may have ended the run before, or make it slow.
        let (Some((at, lost, absent)), [_]) = (lost, &failures(faults)[..]) else { return Ok(()) };
        for (rank, Ended { end, at: ended_at, .. }) in ended.iter().enumerate() {
            // A rank that cannot run or be reached has the same time when it is back.
            let since = if rank == lost { at + absent } else { at };
            let after = ended_at.saturating_sub(since);
            if matches!(end, End::Returned(Ok(())) | End::Killed) {
                continue;
            }
            self.end_after_loss = self.end_after_loss.max(after);
            if after > END_LIMIT {
                return Err(format!("rank {rank} ended {:.1} s after the loss of rank {lost}", after.as_secs_f64()));
            }
        }
        Ok(())
    }
}

/// Checks that a resumed run begins at the newest checkpoint that was reported as complete, or a later one, and that no checkpoint
/// is damaged.
fn check_checkpoints(ended: &[Ended<Outcome>], reported: &mut Option<usize>) -> Result<(), String> {
    let lines = || ended.iter().flat_map(|ended| ended.output.iter().map(|(_, line)| line.as_str()));
    if let Some(line) = lines().find(|line| line.contains("is damaged")) {
        return Err(line.to_owned());
    }
    let number = |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
    let resumed: Option<usize> = lines().find_map(|line| line.strip_prefix("resumed after ").and_then(number));
    // A start that failed before its first step has resumed nothing.
    let trained = lines().any(|line| line.starts_with("step "));
    if (resumed.is_some() || trained) && resumed < *reported {
        return Err(format!(
            "expected to resume after step {reported:?}, which was reported as saved, found {resumed:?}"
        ));
    }
    let newest = lines().filter_map(|line| line.strip_prefix("checkpoint of step ").and_then(number)).max();
    *reported = (*reported).max(newest);
    Ok(())
}

/// Returns the faults that can end a run.
fn failures(faults: &[(Duration, Fault)]) -> Vec<(Duration, Fault)> {
    faults.iter().copied().filter(|(_, fault)| !matches!(fault, Fault::SmallSockets(_))).collect()
}

/// Checks that the ranks that stopped say why.
fn check_errors(ended: &[Ended<Outcome>], faults: &[(Duration, Fault)]) -> Result<(), String> {
    let mut texts = Vec::new();
    for (rank, Ended { end, errors, .. }) in ended.iter().enumerate() {
        match end {
            End::Returned(Err((text, _))) if text.is_empty() => {
                return Err(format!("rank {rank} stopped without a reason"));
            }
            End::Returned(Err((text, _))) => texts.push((rank, text.as_str())),
            End::Exited(_) => texts.extend(errors.iter().map(|text| (rank, text.as_str()))),
            _ => {}
        }
    }
    // Of several faults, any may be the cause.
    let [(_, fault)] = &failures(faults)[..] else { return Ok(()) };
    let rank_0_is_silent = vec!["timed out".to_owned(), "rank 0".to_owned()];
    let causes: Vec<String> = match *fault {
        // Rank 0 relays all messages. When it is isolated, the others are silent for it.
        Fault::Isolate(0, _) => rank_0_is_silent,
        // An isolated rank hears nothing of rank 0. The others may have completed the run.
        Fault::Isolate(isolated, _) if texts.iter().all(|(rank, _)| *rank == isolated) => rank_0_is_silent,
        Fault::Kill(rank) | Fault::LoseHost(rank) | Fault::Freeze(rank, _) | Fault::Isolate(rank, _) => {
            // If ranks may be missing, the error that too few have come lists these by the launcher's numbers.
            let too_few = "rendezvous: expected at least ".to_owned();
            vec![format!("rank {rank}"), format!("missing rank {rank}"), too_few]
        }
        Fault::ResetConnection => vec!["disconnected".to_owned(), "closes the connection".to_owned()],
        Fault::DiskFull(_) => vec!["No space left".to_owned(), "of free space".to_owned()],
        Fault::DiskErrors(_) => vec!["Input/output error".to_owned()],
        _ => return Ok(()),
    };
    if texts.is_empty() || texts.iter().any(|(_, text)| causes.iter().any(|cause| text.contains(cause))) {
        return Ok(());
    }
    Err(format!("no error names the cause, {fault:?}: {texts:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::directory::done_steps;
    use checkpoint::resume::Checkpoint;
    use system::simulation::Random;
    use system::thread;

    /// Number of frozen ranks.
    const TRIALS: u64 = 20;

    #[test]
    fn a_frozen_rank_is_named_with_the_collective_and_the_layer_that_wait_for_it() {
        let shape = ScenarioShape { ranks: 2, zero_stage: 2, shard_size: 2, shuffle: false };
        let scenario = Scenario::undisturbed(shape);
        let (operations, _) = References::default().get(shape).unwrap().operations;
        let mut named = 0;
        for i in 0..16 {
            let freeze =
                (Trigger::Operation(operations / 4 + i * operations / 32), Fault::Freeze(1, Duration::from_mins(2)));
            let Start { ended, simulation, .. } = start_all(&scenario, i, Disk::default(), &[freeze]).unwrap();
            let text = match &ended[0].end {
                End::Returned(Err((text, _))) => text.clone(),
                _ => ended[0].errors.join("\n"),
            };
            assert!(text.contains("rank 1") && text.contains("timed out"), "{text}");
            if text.contains("(reduce-scatter ") && text.contains(" of layer 0, ") {
                let file = simulation.into_disk().read(&directory().join("flight-recorder-0.txt")).unwrap_or_default();
                let recorder = String::from_utf8(file).unwrap();
                let waiting = recorder.lines().rfind(|line| line.contains(" | waiting | ")).unwrap_or_default();
                assert!(waiting.contains("| reduce-scatter ") && waiting.contains(" of layer 0, "), "{recorder}");
                named += 1;
            }
        }
        assert!(named > 0, "no freeze hit a reduce-scatter of layer 0");
    }

    /// Returns the steps of the complete checkpoints on a disk, or the error of the first damaged one.
    fn verify_checkpoints(disk: Disk) -> Result<Vec<usize>, String> {
        let verify = || {
            let steps = done_steps(&directory()).map_err(|error| format!("{error:#}"))?;
            let opened = steps.iter().try_for_each(|&step| Checkpoint::open_verified(&directory(), step).map(|_| ()));
            opened.map(|()| steps).map_err(|error| format!("{error:#}"))
        };
        let mains = vec![Box::new(verify) as Box<dyn FnOnce() -> _ + Send>];
        match Simulation::with_disk(0, disk).run(mains).unwrap().remove(0).end {
            End::Returned(result) => result,
            other => panic!("{other:?}"),
        }
    }

    /// A rank is frozen before it writes its file of a checkpoint, and runs again while the other ranks, which continue without it,
    /// write theirs. One of these now has its number.
    #[test]
    fn a_rank_that_thaws_in_the_next_attempt_damages_no_checkpoint() {
        let shape = ScenarioShape { ranks: 3, zero_stage: 1, shard_size: 3, shuffle: false };
        let scenario = Scenario::without_rank(1, shape);
        let first = start_all(&scenario, 0, Disk::default(), &[]).unwrap();
        let (_, on_disk) = first.simulation.operations();
        let (mut thawed, restart) = (0, Duration::from_mins(1));
        for seed in 0..TRIALS {
            let simulation = Simulation::new(seed);
            let random = &mut Random::new(seed);
            let freeze = Duration::from_secs(85) + Duration::from_millis(random.below(15_000));
            // The time of the first checkpoint.
            let at = Trigger::DiskOperation(on_disk * 3 / 8 + random.below(on_disk * 5 / 64));
            simulation.schedule(at, Fault::Freeze(1, freeze));
            // Writing takes so long that the frozen rank runs again meanwhile.
            simulation.schedule(Trigger::Time(restart), Fault::SlowDisk(Duration::from_millis(500)));
            let mut mains: Vec<_> = (0..3).map(|rank| main_of(&scenario, rank).unwrap()).collect();
            for rank in [0, 2] {
                let main = main_of(&scenario, rank).unwrap();
                mains.push(Box::new(move || {
                    thread::sleep(restart);
                    main()
                }));
            }
            let ended = simulation.run(mains).unwrap();
            // Before the first step, the frozen rank may lead the rendezvous, which the others cannot do then.
            if !ended[0].output.iter().any(|(_, line)| line.starts_with("step ")) {
                continue;
            }
            assert!(
                ended[3..].iter().all(|ended| matches!(ended.end, End::Returned(Ok(())))),
                "seed {seed}: {ended:?}"
            );
            thawed += u32::from(ended[1].at < ended[3].at);
            assert_eq!(verify_checkpoints(simulation.into_disk()), Ok(vec![2, 4, 6]), "seed {seed}");
        }
        assert!(thawed > 0, "no frozen rank ran again during the next attempt");
    }

    #[test]
    fn a_disk_that_fails_for_a_moment_takes_no_line_of_the_log() {
        let shape = ScenarioShape { ranks: 2, zero_stage: 0, shard_size: 2, shuffle: false };
        let references = References::default();
        let (_, on_disk) = references.get(shape).unwrap().operations;
        for operation in (1..=on_disk).step_by(5) {
            let mut scenario = Scenario::undisturbed(shape);
            // The loss of the other rank ends the run before it writes its log again.
            scenario.faults = vec![vec![
                (Trigger::DiskOperation(operation), Fault::DiskErrors(1 + operation as u32 / 2 % 3)),
                (Trigger::DiskOperation(operation + 10 + operation * 7 % 20), Fault::Kill(1)),
            ]];
            let verdict = run_scenario(operation, &scenario, &references).unwrap();
            assert_eq!(verdict.failure, None, "{}", verdict.story.join("\n"));
        }
    }
}
