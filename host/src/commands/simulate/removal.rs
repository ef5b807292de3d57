//! Runs that lose a rank for good and continue with the others (`--min-ranks`).
//!
//! There are no supervisors: all ranks end after a fault, and those that are left start again. A run must end with the bits of a run with
//! that number of ranks from the same checkpoint, or say that too few ranks are left.

use super::scenario::{Removal, STEPS, Scenario, ScenarioShape, directory};
use super::trial::{Start, Verdict, result, start};
use anyhow::{Context, Result};
use checkpoint::directory::done_name;
use distributed::ShardGroups;
use serde_json::Value;
use std::collections::BTreeMap;
use system::simulation::{Disk, End};

/// The expected result of a run without the lost rank: that of a run of `ranks` ranks from this disk.
struct Origin {
    disk: Disk,
    ranks: usize,
}

/// Runs a scenario with a removed rank.
pub fn run(seed: u64, scenario: &Scenario, removal: Removal, verdict: &mut Verdict) -> Result<()> {
    let all: Vec<usize> = (0..scenario.shape.ranks).collect();
    let left: Vec<usize> = all.iter().copied().filter(|&rank| rank != removal.rank).collect();
    let starts = [Some(&all), Some(&left), removal.returns.then_some(&all)];
    let (mut disk, mut origin, mut reported) = (Disk::default(), None, None);
    for (number, ranks) in starts.into_iter().flatten().enumerate() {
        let faults = scenario.faults.get(number).map_or(&[][..], Vec::as_slice);
        let before = disk.clone();
        let started = start(scenario, ranks, seed.wrapping_mul(31).wrapping_add(number as u64), disk, faults)?;
        verdict.add(&started);
        if let Err(failure) = verdict.judge(&started, &mut reported, false) {
            verdict.failure = Some(failure);
            return Ok(());
        }
        let ends: Vec<_> = started.ended.iter().map(|ended| &ended.end).collect();
        let is_complete = ends.iter().any(|end| matches!(end, End::Returned(Ok(()))));
        let too_few = ends.iter().any(|end| {
            matches!(end, End::Returned(Err((text, _))) if text.starts_with("rendezvous: expected at least ")
                || text.starts_with("rendezvous: expected a number of ranks "))
        });
        let (disturbed, trained) = (!started.faults.is_empty(), has_trained(&started));
        verdict.finish_start(&started);
        disk = started.simulation.into_disk();
        if trained {
            origin = Some(Origin { disk: before, ranks: members(&disk)? });
        }
        if is_complete {
            verdict.failure = compare(scenario, &disk, origin)?;
            return Ok(());
        }
        if !disturbed {
            let ended_as_documented = too_few && scenario.world_size(ranks.len()).is_none();
            verdict.failure =
                (!ended_as_documented).then(|| format!("start {number} without faults did not complete the run"));
            return Ok(());
        }
        disk.repair();
    }
    verdict.failure = Some("no start completed the run".to_owned());
    Ok(())
}

/// Returns whether the ranks of a start have begun to train.
fn has_trained(start: &Start) -> bool {
    let mut lines = start.ended.iter().flat_map(|ended| ended.output.iter().map(|(_, line)| line));
    lines.any(|line| line.starts_with("step ") || line.starts_with("resumed after "))
}

/// Returns the number of ranks of the last run.
fn members(disk: &Disk) -> Result<usize> {
    let contents = disk.read(&directory().join("run.lock")).context("simulate: expected a run.lock")?;
    let contents: Value = serde_json::from_slice(&contents)?;
    contents["members"]["ranks"].as_array().map(Vec::len).context("simulate: expected the ranks in run.lock")
}

/// Compares the result with that of a run that has as many ranks all the time. Returns the difference.
fn compare(scenario: &Scenario, disk: &Disk, origin: Option<Origin>) -> Result<Option<String>> {
    if disk.read(&directory().join(done_name(STEPS))).is_none() {
        return Ok(Some("the run ended without its last checkpoint".to_owned()));
    }
    let Some(Origin { disk: mut before, ranks }) = origin else {
        return Ok(Some("the run ended without a training step".to_owned()));
    };
    before.repair();
    let ScenarioShape { ranks: launched, shard_size, .. } = scenario.shape;
    let shard_size = if shard_size == launched { ranks } else { ShardGroups::smallest_size(ranks, shard_size) };
    let shape = ScenarioShape { ranks, shard_size, ..scenario.shape };
    let fixed = scenario.with_shape(shape);
    let all: Vec<usize> = (0..ranks).collect();
    let reference = start(&fixed, &all, 0, before, &[])?;
    if let Some(failed) = reference.ended.iter().find(|ended| !matches!(ended.end, End::Returned(Ok(())))) {
        return Ok(Some(format!("a run of {ranks} ranks from the same checkpoint failed: {:?}", failed.end)));
    }
    let expected: BTreeMap<String, Vec<u8>> = result(&reference.simulation.into_disk(), shape);
    let found = result(disk, shape);
    let differs = expected.iter().find(|(name, bytes)| found.get(*name) != Some(bytes));
    Ok(differs.map(|(name, _)| format!("{name} differs from that of a run of {ranks} ranks from the same checkpoint")))
}
