//! Entry points for libFuzzer, which run a target under a memory limit.

pub mod memory;
pub mod targets;

use memory::Limited;
use std::fs;
use std::path::PathBuf;
use targets::Target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Checks that the target accepts its seeds. If `SEEDS` names a directory, writes the seeds there and exits.
///
/// The check also initializes lazily allocated data, which would otherwise count towards the memory limit.
///
/// # Panics
/// If the target rejects a seed, or a seed cannot be written.
pub fn begin(target: &Target) {
    let seeds = target.seeds();
    for seed in &seeds {
        assert!(target.accepts(seed), "{} rejects a file from the program's own writer", target.name);
    }
    if let Some(directory) = std::env::var_os("SEEDS").map(PathBuf::from) {
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed_{i}")), seed).expect("SEEDS names a writable directory");
        }
        std::process::exit(0);
    }
}

/// Runs the target on `data` under the memory limit.
pub fn run(target: &Target, data: &[u8]) {
    memory::within(memory::BUDGET, || target.accepts(data));
}
