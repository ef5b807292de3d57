//! Regression tests of the fuzz targets (`fuzz/`): their seeds are valid, earlier findings stay fixed, and
//! systematically damaged seeds cause neither a panic nor excessive memory use.

#[path = "../fuzz/src/memory.rs"]
mod memory;
#[path = "../fuzz/src/targets.rs"]
mod targets;

use memory::{BUDGET, Limited, within};
use std::path::Path;
use targets::TARGETS;
use xxhash_rust::xxh3::xxh3_64;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Returns copies of a file with one of its first words replaced, truncated copies, and copies with trailing bytes.
fn damaged(good: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let words = (0..good.len().min(160) / 4).flat_map(move |word| {
        [0, 1, -1, 1 << 16, 1 << 30, i32::MAX, i32::MIN].map(|value: i32| {
            let mut bytes = good.to_vec();
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
            bytes
        })
    });
    let cuts = (0..good.len()).step_by(good.len().div_ceil(100)).map(move |len| good[..len].to_vec());
    words.chain(cuts).chain([[good, &[0]].concat(), [good, good].concat()])
}

/// Number of randomly damaged copies of each seed.
const RANDOM_COPIES: u64 = 300;

/// Returns copies of a file with one to four random changes: a byte replaced, a range removed, repeated, or overwritten with another.
/// The same file has the same copies in every run. `scripts/fuzz` searches longer, guided by coverage.
fn randomly_damaged(good: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let mut state = xxh3_64(good);
    let mut random = move |below: usize| {
        state = xxh3_64(&state.to_le_bytes());
        (state % below.max(1) as u64) as usize
    };
    (0..RANDOM_COPIES).map(move |_| {
        let mut bytes = good.to_vec();
        for _ in 0..=random(4) {
            let first = random(bytes.len());
            let range = first..(first + 1 + random(16)).min(bytes.len());
            match random(4) {
                0 if first < bytes.len() => bytes[first] = random(256) as u8,
                1 => drop(bytes.drain(range)),
                2 => bytes.extend_from_within(range),
                _ => {
                    let to = random(bytes.len() + 1 - range.len());
                    bytes.copy_within(range, to);
                }
            }
        }
        bytes
    })
}

/// All targets share one test, because the memory limit applies to the whole process.
#[test]
fn readers_neither_panic_nor_exceed_the_memory_limit() {
    // Syncing the logs to a disk would be slow.
    let shared_memory = Path::new("/dev/shm");
    if shared_memory.is_dir() {
        tempfile::env::override_temp_dir(shared_memory).unwrap();
    }
    for target in &TARGETS {
        for (i, seed) in target.seeds().iter().enumerate() {
            assert!(target.accepts(seed), "{} rejects its seed {i}", target.name);
            damaged(seed).chain(randomly_damaged(seed)).for_each(|bytes| {
                within(BUDGET, || target.accepts(&bytes));
            });
        }
    }
    let findings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/fuzz/*/*");
    for path in glob::glob(findings.to_str().unwrap()).unwrap() {
        let path = path.unwrap();
        let name = path.parent().unwrap().file_name().unwrap();
        let target = TARGETS.iter().find(|target| target.name == name).expect("a directory is named after its target");
        println!("{}", path.display());
        let data = std::fs::read(&path).unwrap();
        within(BUDGET, || target.accepts(&data));
    }
}
