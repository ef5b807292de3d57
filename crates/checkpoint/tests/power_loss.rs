//! Power failures and kills at every disk operation of a run that writes checkpoints. In a power failure, the simulated disk loses or
//! tears everything that was not synced.

use checkpoint::RunState;
use checkpoint::directory::{DirectoryLock, Retention, done_steps, remove_temporary_files};
use checkpoint::resume::find_newest;
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use data::loader::Position;
use distributed::Ranks;
use engine::Engine;
use engine::cpu::Cpu;
use model::{Decoder, Descriptor, PlanOptions};
use serde_json::Map;
use std::fmt::Debug;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use system::fs::File;
use system::simulation::{Disk, Fault, ROOT, Simulation, Trigger};

/// Power failures per operation, with different losses.
const SEEDS: u64 = 4;

/// The steps of the checkpoints in the order in which they are written. The last one replaces one that exists.
const STEPS: [usize; 4] = [1, 2, 3, 3];

fn directory() -> PathBuf {
    [ROOT, "runs", "a"].iter().collect()
}

fn log() -> PathBuf {
    directory().join("main.log")
}

fn identity() -> Identity {
    Identity {
        program: "test".to_owned(),
        engine: "CPU".to_owned(),
        config: Map::new(),
        train: Vec::new(),
        val: None,
        ranks: 1,
    }
}

/// Writes the checkpoints of [`STEPS`], and keeps the newest `keep`, or all if it is 0. Stores in `reported` how many were reported as
/// complete.
fn write_checkpoints(keep: usize, reported: &AtomicUsize) {
    let mut engine = Cpu::new();
    let descriptor = Descriptor::gpt2(1, 1, 4, 4, 10).unwrap();
    let (model, plan) = Decoder::plan(descriptor, PlanOptions::training(1, 4), &mut engine);
    engine.allocate(&plan).unwrap();
    model.initialize(&mut engine, 42).unwrap();
    let lock = DirectoryLock::acquire(&directory()).unwrap();
    let mut writer = CheckpointWriter::new(lock, Retention { keep, major_every: 0 }, identity(), None);
    let mut state = RunState::fresh(Position { shard: 0, sample: 0, shuffle: None, mixture: None });
    let mut logged = File::create(log()).unwrap();
    for (i, step) in STEPS.into_iter().enumerate() {
        if step > state.step {
            logged.write_all(format!("s:{} \n", step - 1).as_bytes()).unwrap();
        }
        state.step = step;
        // The files of the two checkpoints of step 3 differ.
        engine.write(model.params.slice(0, 1), &[i as f32]).unwrap();
        let logs = logged.try_clone().map(|log| vec![log]).map_err(anyhow::Error::from);
        let mut ranks = Ranks::Single;
        writer.begin(&model, &mut engine, &mut ranks, state.clone(), logs, &[]).unwrap();
        let outcome = writer.wait(&mut ranks).unwrap().unwrap();
        outcome.result.unwrap();
        reported.store(i + 1, Ordering::Relaxed);
    }
}

/// Runs [`write_checkpoints`], with a fault at a disk operation if it is given. Returns how many checkpoints were reported, the number
/// of disk operations, and the disk.
fn run(seed: u64, keep: usize, fault: Option<(u64, Fault)>) -> (usize, u64, Disk) {
    let simulation = Simulation::new(seed);
    if let Some((operation, fault)) = fault {
        simulation.schedule(Trigger::DiskOperation(operation), fault);
    }
    let reported = Arc::new(AtomicUsize::new(0));
    let count = reported.clone();
    simulation.run(vec![Box::new(move || write_checkpoints(keep, &count))]).unwrap();
    let operations = simulation.operations().1;
    (reported.load(Ordering::Relaxed), operations, simulation.into_disk())
}

/// Runs `find` on a disk after the fault.
fn on<R: Debug + Send + 'static>(disk: Disk, find: impl FnOnce() -> R + Send + 'static) -> R {
    let ended = Simulation::with_disk(0, disk).run(vec![Box::new(find)]).unwrap().remove(0);
    match ended.end {
        system::simulation::End::Returned(found) => found,
        other => panic!("{other:?}"),
    }
}

/// Returns the step of the newest checkpoint, the notes about the others, and the number of log lines.
fn found(disk: Disk) -> (usize, Vec<String>, usize) {
    on(disk, || {
        if !system::fs::exists(&directory()).unwrap() {
            return (0, Vec::new(), 0);
        }
        remove_temporary_files(&directory()).unwrap();
        let lines = bounded_file::read_to_string(&log(), 1 << 20).unwrap_or_default().matches('\n').count();
        match find_newest(&directory()) {
            Ok(found) => (found.checkpoint.map_or(0, |checkpoint| checkpoint.step), found.notes, lines),
            Err(error) => (0, vec![format!("{error:#}")], lines),
        }
    })
}

#[test]
fn a_power_failure_at_any_operation_loses_no_complete_checkpoint() {
    let (reported, operations, disk) = run(0, 1, None);
    assert_eq!((reported, found(disk)), (4, (3, Vec::new(), 3)));
    for operation in 1..=operations {
        for seed in 0..SEEDS {
            let (reported, _, disk) = run(seed, 1, Some((operation, Fault::PowerLoss)));
            let (step, notes, lines) = found(disk);
            let place = format!("operation {operation} of {operations}, seed {seed}");
            // While the checkpoint of step 3 is replaced, the previous one has been deleted.
            let expected = if reported == 3 { 0 } else { reported.checked_sub(1).map_or(0, |last| STEPS[last]) };
            assert!(step >= expected, "{place}: expected the checkpoint of step {expected}, found {step}");
            assert!(notes.is_empty(), "{place}: {notes:?}");
            assert!(lines >= step, "{place}: the checkpoint of step {step} has {lines} lines in its log");
        }
    }
}

/// The files of a checkpoint are complete or removed, also if no later checkpoint replaces them.
#[test]
fn a_killed_process_leaves_no_files_of_an_incomplete_checkpoint() {
    let operations = run(0, 0, None).1;
    let mut published = 0;
    for operation in 1..=operations {
        let (_, _, disk) = run(0, 0, Some((operation, Fault::Kill(0))));
        let (before, after, complete) = on(disk, || {
            let names = || system::fs::names(&directory()).unwrap_or_default();
            let before = names();
            if !before.is_empty() {
                remove_temporary_files(&directory()).unwrap();
            }
            (before, names(), done_steps(&directory()).unwrap())
        });
        let is_incomplete =
            |name: &&String| (1..=3).any(|step| name.contains(&format!("_{step:08}")) && !complete.contains(&step));
        published += before.iter().filter(is_incomplete).count();
        let left: Vec<_> = after.iter().filter(|name| is_incomplete(name) || name.starts_with('.')).collect();
        assert!(left.is_empty(), "operation {operation} of {operations}: {left:?}");
    }
    assert!(published > 0, "no process was killed while it published files");
}
