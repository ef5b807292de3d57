//! Entry points for libFuzzer, which run a target under a memory limit.

pub mod memory;
pub mod targets;

use memory::Limited;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// The target that `FUZZ_TARGET` names. Without the variable, the program prints the names of all targets and exits.
static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let Some(name) = std::env::var_os("FUZZ_TARGET") else {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        std::process::exit(0);
    };
    TARGETS.iter().find(|target| name == target.name).expect("FUZZ_TARGET names a target")
});

/// Checks that the target accepts its seeds. If `SEEDS` names a directory, writes the seeds there and exits.
///
/// The check also initializes lazily allocated data, which would otherwise count towards the memory limit.
///
/// # Panics
/// If the target rejects a seed, or a seed cannot be written.
pub fn begin() {
    let seeds = TARGET.seeds();
    for seed in &seeds {
        assert!(TARGET.accepts(seed), "{} rejects a file from the program's own writer", TARGET.name);
    }
    if let Some(directory) = std::env::var_os("SEEDS").map(PathBuf::from) {
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed_{i}")), seed).expect("SEEDS names a writable directory");
        }
        std::process::exit(0);
    }
}

/// Runs the target on `data` under the memory limit.
pub fn run(data: &[u8]) {
    memory::within(memory::BUDGET, || TARGET.accepts(data));
}
