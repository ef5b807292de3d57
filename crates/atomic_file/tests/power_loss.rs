//! Power failures at every operation of atomic writes, on a simulated disk that loses or tears everything that was not synced.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use system::simulation::{Disk, Fault, ROOT, Simulation, Trigger};

/// Power failures per operation, with different losses.
const SEEDS: u64 = 12;

fn path(name: &str) -> PathBuf {
    [ROOT, name].iter().collect()
}

/// The contents of a version: several sectors that tell versions apart.
fn contents(version: usize) -> Vec<u8> {
    vec![version as u8; 1500 + version]
}

/// Runs `write` for versions 1 to 3. Without `failure`, returns the number of disk operations. With it, the power fails at that
/// operation. Returns the number of versions that were reported as written, and the disk afterwards.
fn run(seed: u64, failure: Option<u64>, write: fn(usize)) -> (usize, u64, Disk) {
    let simulation = Simulation::new(seed);
    if let Some(operation) = failure {
        simulation.schedule(Trigger::DiskOperation(operation), Fault::PowerLoss);
    }
    let reported = Arc::new(AtomicUsize::new(0));
    let report = reported.clone();
    let main = move || {
        for version in 1..=3 {
            write(version);
            report.store(version, Ordering::Relaxed);
        }
    };
    simulation.run(vec![Box::new(main)]).unwrap();
    let operations = simulation.operations().1;
    (reported.load(Ordering::Relaxed), operations, simulation.into_disk())
}

/// Fails at each operation of `write`. `found` returns the contents that the disk has afterwards, if any.
fn at_every_operation(write: fn(usize), found: fn(&Disk) -> Option<Vec<u8>>) {
    let (reported, operations, disk) = run(0, None, write);
    assert!(reported == 3 && found(&disk) == Some(contents(3)));
    for operation in 1..=operations {
        for seed in 0..SEEDS {
            let (reported, _, disk) = run(seed, Some(operation), write);
            let version = match found(&disk) {
                None => 0,
                Some(bytes) => (1..=3).find(|&version| bytes == contents(version)).unwrap_or_else(|| {
                    panic!("operation {operation}, seed {seed}: {} bytes that were never written", bytes.len())
                }),
            };
            assert!(
                version >= reported,
                "operation {operation}, seed {seed}: expected version {reported}, found {version}"
            );
        }
    }
}

#[test]
fn a_file_survives_a_power_failure_at_any_operation() {
    let write = |version| {
        atomic_file::create_directory(&path("a/b")).unwrap();
        atomic_file::write(&path("a/b/file"), |out| Ok(out.write_all(&contents(version))?)).unwrap();
    };
    at_every_operation(write, |disk| disk.read(&path("a/b/file")));
}

#[test]
fn a_directory_survives_a_power_failure_at_any_operation() {
    let write = |version| {
        let fill = |directory: &std::path::Path| {
            let mut file = system::fs::File::create(directory.join("file"))?;
            Ok(file.write_all(&contents(version))?)
        };
        atomic_file::write_directory(&path("a/model"), fill).unwrap();
    };
    // The directory has its file as soon as it exists.
    let found = |disk: &Disk| {
        let exists = disk.names(&path("a")).iter().any(|name| name == "model");
        exists.then(|| disk.read(&path("a/model/file")).unwrap_or_default())
    };
    at_every_operation(write, found);
}
