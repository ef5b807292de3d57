//! Predictions against measurements of one and two GPUs. With `--nocapture` it prints the table of docs/internals/scaling.md.

use engine::open::{Precision, planning_engine};
use model::MasterWeights;
use planner::compute::Assumptions;
use planner::measured::{MeasuredStep, Sweep};
use planner::{Cluster, Links, Planned, Request, fit, schedule};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/internals/bench/plan");

/// Returns all measured steps whose file names begin with `prefix`, in the order of names.
fn steps(prefix: &str) -> Vec<MeasuredStep> {
    let files = std::fs::read_dir(DIRECTORY).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut files: Vec<PathBuf> = files.filter(|path| name(path).starts_with(prefix)).collect();
    files.sort();
    files.iter().map(|path| MeasuredStep::read(path).unwrap()).collect()
}

fn links() -> Links {
    let sweep = Sweep::read(&Path::new(DIRECTORY).join("collectives.json")).unwrap();
    let fitted = fit::fit(&sweep, Cluster::new(2, 2).unwrap().world()).unwrap();
    for fitted in &fitted {
        println!("{fitted:?}");
        assert!(fitted.median_error < 0.05 && fitted.largest_error < 0.30, "{fitted:?}");
    }
    Links { intra: fitted.map(|fitted| fitted.bandwidth), inter: [50e9; 3] }
}

/// Predicts a measured step from other measurements.
fn predict(step: &MeasuredStep, measured: Vec<MeasuredStep>, links: Links) -> Planned {
    let request = Request {
        expert_parallel: false,
        descriptor: step.descriptor,
        cluster: Cluster::new(step.ranks, step.ranks).unwrap(),
        links,
        slowdown: schedule::SLOWDOWN,
        hbm: 140 << 30,
        seq: step.seq,
        total_batch: Some(step.batch * step.seq * step.ranks * step.micro_batches),
        batches: vec![step.batch],
        recompute: vec![step.recompute],
        stages: vec![step.zero_stage],
        shard_sizes: vec![step.shard_size],
        precision: Precision::Bf16,
        fp8: None,
        storage: step.storage,
        measured,
        assumptions: Assumptions { mfu: 0.5, peak: 989.4e12, memory_bandwidth: 4e12 },
    };
    let mut planned = request.plan(&mut *planning_engine(Precision::Bf16)).unwrap();
    assert_eq!(planned.len(), 1);
    planned.remove(0)
}

/// Checks a prediction and prints a row of the table. Returns the relative error.
fn check(step: &MeasuredStep, planned: &Planned) -> f64 {
    let (predicted, measured) = (1e3 * planned.timeline.step, 1e3 * step.step);
    let error = predicted / measured - 1.0;
    let file = step.file.file_stem().unwrap().to_str().unwrap();
    println!("| {file} | {measured:.1} | {predicted:.1} | {:+.1} % |", 100.0 * error);
    assert!(error.abs() < 0.05, "{file}: predicted {predicted}, measured {measured}");
    error
}

#[test]
fn other_steps_of_one_gpu_are_predicted() {
    let all = steps("one-");
    assert_eq!(all.len(), 8);
    for step in &all {
        // All other measurements of the model.
        let others = all.iter().filter(|other| other.file != step.file && other.descriptor == step.descriptor);
        check(step, &predict(step, others.cloned().collect(), Links::new(300e9, 50e9)));
    }
}

#[test]
fn steps_of_two_gpus_are_predicted_from_those_of_one() {
    let (one, two, links) = (steps("one-"), steps("two-"), links());
    assert_eq!(two.len(), 14);
    let mut errors = Vec::new();
    for step in &two {
        assert_eq!(step.storage.master_weights, MasterWeights::F32);
        errors.push(check(step, &predict(step, one.clone(), links)));
    }
    // The model has no bias beyond the spread of the measurements.
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    assert!(mean.abs() < 0.02, "{mean}");
}
