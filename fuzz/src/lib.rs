//! Fuzz targets for every file reader, run by libFuzzer with a memory limit.

pub mod memory;
pub mod targets;

use memory::Limited;
use std::fs;
use std::path::PathBuf;
use targets::Target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Checks that the target accepts its seed files, which also initializes data that stays in memory. If the environment
/// variable SEEDS names a directory, writes the seeds there and exits.
///
/// # Panics
/// Panics if the target rejects a seed, or if a seed cannot be written.
pub fn begin(target: &Target) {
    let seeds = target.seeds();
    for seed in &seeds {
        assert!(target.accepts(seed), "{}: rejects a file written by the program", target.name);
    }
    if let Some(directory) = std::env::var_os("SEEDS").map(PathBuf::from) {
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed_{i}")), seed).expect("SEEDS must name a writable directory");
        }
        std::process::exit(0);
    }
}

/// Runs the target on `data` within the memory budget.
pub fn run(target: &Target, data: &[u8]) {
    memory::within(memory::BUDGET, || target.accepts(data));
}
