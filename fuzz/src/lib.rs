//! Runs a target on libFuzzer's bytes, with a limit on the memory it may take.

pub mod memory;
pub mod targets;

use memory::Limited;
use std::fs;
use std::path::PathBuf;
use targets::Target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Checks the target's valid files, which also loads what stays in memory. If SEEDS names a directory, writes them there and
/// ends.
///
/// # Panics
/// If the target refuses one of them, or they cannot be written.
pub fn begin(target: &Target) {
    let seeds = target.seeds();
    for seed in &seeds {
        assert!(target.accepts(seed), "{} refuses a file of its own writer", target.name);
    }
    if let Some(directory) = std::env::var_os("SEEDS").map(PathBuf::from) {
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed_{i}")), seed).expect("SEEDS names a directory that takes files");
        }
        std::process::exit(0);
    }
}

/// Tries `data` on the target.
pub fn run(target: &Target, data: &[u8]) {
    memory::within(memory::BUDGET, || target.accepts(data));
}
