//! Files of measurements: `bench step --json` and `bench collectives --json`.

use crate::links::Operation;
use anyhow::{Context, Result, anyhow, ensure};
use model::{Descriptor, MasterWeights, Moments, Optimizer, Recompute};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// A measured training step.
#[derive(Clone, Debug)]
pub struct MeasuredStep {
    /// The file.
    pub file: PathBuf,
    /// The model.
    pub descriptor: Descriptor,
    /// The device, and its precision.
    pub machine: String,
    /// Storage type, such as `bf16`.
    pub precision: String,
    /// Whether the layers' matmuls were computed in FP8.
    pub fp8: bool,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Micro-batches of the step.
    pub micro_batches: usize,
    /// Recomputation level.
    pub recompute: Recompute,
    /// Optimizer, and the storage of its state.
    pub storage: Storage,
    /// Number of ranks.
    pub ranks: usize,
    /// ZeRO stage.
    pub zero_stage: u8,
    /// Ranks that shard together.
    pub shard_size: usize,
    /// Median of the step in seconds.
    pub step: f64,
    /// Median of the update alone, in seconds.
    pub update: f64,
    /// Median of the step without CUDA graphs, in seconds.
    pub without_graphs: Option<f64>,
}

/// Optimizer, and the storage of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Optimizer of the layers' matrices.
    pub optimizer: Optimizer,
    /// Master weights.
    pub master_weights: MasterWeights,
    /// Type of the moments.
    pub moments: Moments,
}

/// The fields of `bench step --json` that matter here.
#[derive(Deserialize)]
struct StepFile {
    bench: String,
    machine: String,
    precision: String,
    model: String,
    descriptor: Option<Descriptor>,
    #[serde(default)]
    fp8: bool,
    batch: [usize; 3],
    recompute: Recompute,
    optimizer: Optimizer,
    master_weights: MasterWeights,
    moments: Moments,
    step_ms: [f64; 3],
    update_ms: [f64; 3],
    step_without_graphs_ms: Option<[f64; 3]>,
    ranks: usize,
    zero_stage: u8,
    shard_size: Option<usize>,
}

impl MeasuredStep {
    /// Reads a file of `bench step --json`.
    pub fn read(path: &Path) -> Result<Self> {
        let file: StepFile = read(path, "bench step")?;
        check_bench(path, &file.bench, "step", "bench step")?;
        let name = path.display();
        let descriptor = match file.descriptor {
            Some(descriptor) => descriptor,
            None => file.model.parse().map_err(|_| {
                anyhow!("{name}: expected the name of a model, found '{}'; measure again with this program", file.model)
            })?,
        };
        let [batch, seq, micro_batches] = file.batch;
        let seconds = |key: &str, milliseconds: f64| {
            let valid = milliseconds.is_finite() && milliseconds > 0.0;
            ensure!(valid, "{name}: {key}: expected a positive time, found {milliseconds}; measure again");
            Ok(1e-3 * milliseconds)
        };
        ensure!(
            batch * seq * micro_batches > 0 && file.ranks > 0,
            "{name}: expected sizes of at least 1, found 0; measure again"
        );
        Ok(Self {
            descriptor,
            machine: file.machine,
            precision: file.precision,
            fp8: file.fp8,
            batch,
            seq,
            micro_batches,
            recompute: file.recompute,
            storage: Storage { optimizer: file.optimizer, master_weights: file.master_weights, moments: file.moments },
            ranks: file.ranks,
            zero_stage: file.zero_stage,
            shard_size: file.shard_size.unwrap_or(file.ranks),
            step: seconds("step_ms", file.step_ms[0])?,
            update: seconds("update_ms", file.update_ms[0])?,
            without_graphs: file
                .step_without_graphs_ms
                .map(|ms| seconds("step_without_graphs_ms", ms[0]))
                .transpose()?,
            file: path.to_owned(),
        })
    }
}

/// A measured sweep of collectives.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// The file.
    pub file: PathBuf,
    /// The device.
    pub machine: String,
    /// Number of ranks.
    pub ranks: usize,
    /// The measurements.
    pub points: Vec<Point>,
}

/// A measured collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The operation.
    pub operation: Operation,
    /// Bytes of the whole.
    pub bytes: f64,
    /// Time of one in seconds.
    pub seconds: f64,
    /// Number of collectives that were launched at once. The time of one is the time of all divided by it.
    pub repetitions: f64,
}

#[derive(Deserialize)]
struct SweepFile {
    bench: String,
    machine: String,
    ranks: usize,
    rows: Vec<SweepRow>,
}

#[derive(Deserialize)]
struct SweepRow {
    operation: String,
    bytes: f64,
    us: f64,
    repetitions: Option<f64>,
}

impl Sweep {
    /// Reads a file of `bench collectives --json`.
    pub fn read(path: &Path) -> Result<Self> {
        let file: SweepFile = read(path, "bench collectives")?;
        check_bench(path, &file.bench, "collectives", "bench collectives")?;
        let name = path.display();
        ensure!(file.ranks > 1, "{name}: ranks: expected at least 2, found {}; measure again", file.ranks);
        let point = |SweepRow { operation, bytes, us, repetitions }: SweepRow| {
            let known = Operation::MEASURED.into_iter().find(|known| known.name() == operation);
            let known =
                known.with_context(|| format!("{name}: expected a collective, found '{operation}'; measure again"))?;
            let valid = bytes > 0.0 && us > 0.0 && bytes.is_finite() && us.is_finite();
            ensure!(valid, "{name}: expected positive sizes and times, found {bytes} bytes in {us} us; measure again");
            // Files of earlier versions lack the number. It was this one.
            let repetitions = repetitions.unwrap_or_else(|| (f64::from(1 << 28) / bytes).floor().clamp(2.0, 50.0));
            ensure!(repetitions >= 1.0, "{name}: repetitions: expected at least 1, found {repetitions}; measure again");
            Ok(Point { operation: known, bytes, seconds: 1e-6 * us, repetitions })
        };
        let points = file.rows.into_iter().map(point).collect::<Result<_>>()?;
        Ok(Self { file: path.to_owned(), machine: file.machine, ranks: file.ranks, points })
    }
}

fn read<T: DeserializeOwned>(path: &Path, command: &str) -> Result<T> {
    let name = path.display();
    let bytes = bounded_file::read(path, bounded_file::DESCRIPTION).with_context(|| format!("cannot read {name}"))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        anyhow!("{name}: expected a file of `{command} --json`, found other contents ({error}); write it with `{command} --json {name}`")
    })
}

fn check_bench(path: &Path, found: &str, expected: &str, command: &str) -> Result<()> {
    let name = path.display();
    ensure!(
        found == expected,
        "{name}: expected a file of `{command} --json`, found one of `bench {found}`; write it with `{command} --json {name}`"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn step() -> Value {
        json!({
            "bench": "step", "machine": "NVIDIA H200", "precision": "bf16", "model": "d12", "batch": [64, 1024, 2],
            "recompute": 0, "optimizer": "adamw", "master_weights": true, "moments": "f32", "step_ms": [200.0, 199.0, 201.0],
            "update_ms": [1.0, 0.9, 1.1], "ranks": 1, "zero_stage": 0, "rows": [],
        })
    }

    fn written(value: &Value) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.json");
        std::fs::write(&path, value.to_string()).unwrap();
        (dir, path)
    }

    fn step_error(value: &Value) -> String {
        let (_dir, path) = written(value);
        MeasuredStep::read(&path).unwrap_err().to_string()
    }

    #[test]
    fn steps_of_named_and_other_models_are_read() {
        let (_dir, path) = written(&step());
        let found = MeasuredStep::read(&path).unwrap();
        assert_eq!((found.batch, found.seq, found.micro_batches, found.shard_size), (64, 1024, 2, 1));
        assert_eq!((found.step, found.update, found.fp8), (0.2, 0.001, false));
        let mut other = step();
        other["model"] = "some/directory".into();
        assert!(step_error(&other).contains("expected the name of a model, found 'some/directory'"));
        let descriptor = Descriptor::gpt2(3, 2, 64, 128, 256).unwrap();
        other["descriptor"] = serde_json::to_value(descriptor).unwrap();
        let (_dir, path) = written(&other);
        assert_eq!(MeasuredStep::read(&path).unwrap().descriptor, descriptor);
    }

    #[test]
    fn other_files_are_rejected() {
        let with = |key: &str, value: Value| {
            let mut changed = step();
            changed[key] = value;
            step_error(&changed)
        };
        assert!(
            with("bench", "kernels".into()).contains("found one of `bench kernels`; write it with `bench step --json ")
        );
        assert!(with("step_ms", json!([0.0, 0.0, 0.0])).contains("step_ms: expected a positive time, found 0"));
        assert!(with("batch", json!([0, 1024, 1])).contains("expected sizes of at least 1, found 0"));
        assert!(step_error(&json!([1])).contains("expected a file of `bench step --json`, found other contents"));
        let error = MeasuredStep::read(Path::new("/nowhere.json")).unwrap_err().to_string();
        assert_eq!(error, "cannot read /nowhere.json");
        let error = format!("{:#}", Sweep::read(Path::new("/dev/zero")).unwrap_err());
        assert!(error.contains("expected a regular file, found a device"), "{error}");
    }

    #[test]
    fn sweeps_are_read() {
        let rows = json!([{"operation": "all-reduce", "bytes": 1024.0, "us": 1e6}]);
        let mut value = json!({"bench": "collectives", "machine": "NVIDIA H200", "ranks": 2, "rows": rows});
        let (_dir, path) = written(&value);
        let points = Sweep::read(&path).unwrap().points;
        assert_eq!(points, [Point { operation: Operation::AllReduce, bytes: 1024.0, seconds: 1.0, repetitions: 50.0 }]);
        value["rows"][0]["operation"] = "all-to-all".into();
        let (_dir, path) = written(&value);
        let error = Sweep::read(&path).unwrap_err().to_string();
        assert!(error.contains("expected a collective, found 'all-to-all'"), "{error}");
    }
}
