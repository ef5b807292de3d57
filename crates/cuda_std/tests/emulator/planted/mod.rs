//! Kernels with planted faults: what the default schedules of `emulate_checked` report for each fault.
//!
//! A fault changes a result, or ends a launch, in some execution that the PTX memory model allows. The correct version of each kernel
//! passes in many schedules. The tests print a table of the faults: `cargo test --release -p cuda_std planted -- --nocapture`.

mod grid_barrier;
mod histogram;
mod lock;
mod look_back;
mod once;
mod reduction;
mod relay;
mod residency;
mod ring;
mod tasks;
mod within_async;
mod within_block;

use cuda_std::emulate::{Fault, Memory, Report, Schedule};
use cuda_std::launch::Launch;

/// The outcome of a checked launch of a faulty kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    Race,
    Uninitialized,
    Deadlock,
    Livelock,
    Divergence,
    AsyncCopy,
    OutOfBounds,
    Operand,
    /// The results of the default schedules are wrong.
    Wrong,
    /// The default schedules report nothing, and the results are right.
    Missed,
}

impl From<Fault> for Found {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::DataRace => Self::Race,
            Fault::Uninitialized => Self::Uninitialized,
            Fault::Deadlock => Self::Deadlock,
            Fault::Livelock => Self::Livelock,
            Fault::Divergence => Self::Divergence,
            Fault::AsyncCopy => Self::AsyncCopy,
            Fault::OutOfBounds => Self::OutOfBounds,
            Fault::Operand => Self::Operand,
            other => panic!("unexpected fault {other:?}"),
        }
    }
}

/// A planted fault.
pub struct Planted {
    pub number: u32,
    pub name: &'static str,
    pub text: &'static str,
    /// The expected outcome in the default schedules.
    pub found: Found,
}

/// Launches a kernel over a number of blocks with bytes of shared memory.
pub type Run<'a> = &'a dyn Fn(&Launch, &mut Memory, u32, usize) -> Result<(), Report>;

/// A kernel with planted faults.
pub struct Kernel {
    pub name: &'static str,
    pub faults: &'static [Planted],
    /// Runs the kernel with a fault, and returns whether its results are right.
    pub run: fn(u32, Run<'_>) -> Result<bool, Report>,
}

/// Defines the faults of a kernel, with what the default schedules find.
macro_rules! faults {
    ($(#[$doc:meta])* $name:ident { $($fault:ident = $found:ident $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(u32)]
        #[allow(clippy::enum_variant_names, reason = "some faults contain the name of their kernel")]
        enum $name { $($fault),* }

        impl $name {
            const ALL: &[$crate::planted::Planted] = &[$($crate::planted::Planted {
                number: Self::$fault as u32,
                name: stringify!($fault),
                text: $text,
                found: $crate::planted::Found::$found,
            }),*];
        }
    };
}
use faults;

/// The number of the correct version of a kernel.
const CORRECT: u32 = u32::MAX;

const BETWEEN_BLOCKS: [&Kernel; 15] = [
    &reduction::LAST_BLOCK,
    &reduction::SPLIT_K,
    &grid_barrier::GENERATION,
    &grid_barrier::SENSE,
    &grid_barrier::MONOTONIC,
    &lock::LOCK,
    &ring::RING,
    &tasks::TASKS,
    &relay::RELAY,
    &relay::PEEK,
    &look_back::LOOK_BACK,
    &histogram::HISTOGRAM,
    &once::ONCE,
    &once::POOL,
    &residency::RESIDENCY,
];

const WITHIN_A_BLOCK: [&Kernel; 8] = [
    &within_block::RADIX,
    &within_block::COMPACTION,
    &within_block::WARP_SCAN,
    &within_block::BYTES,
    &within_block::EXCHANGE,
    &within_block::FLAG,
    &within_async::PIPELINE,
    &within_async::MBARRIER,
];

fn in_schedule(launch: &Launch, memory: &mut Memory, blocks: u32, shared: usize, seed: u64) -> Result<(), Report> {
    launch.emulate_scheduled(memory, [blocks, 1, 1], shared, Schedule::new(seed))
}

/// Returns the first of the schedules below `end` that finds a fault.
fn first_seed(kernel: &Kernel, fault: u32, end: u64) -> Option<u64> {
    let passes = |seed| (kernel.run)(fault, &|l, m, b, s| in_schedule(l, m, b, s, seed)).is_ok_and(|right| right);
    (0..end).find(|seed| !passes(*seed))
}

/// Asserts that the correct version passes in each schedule below `seeds`.
fn check_correct(kernel: &Kernel, seeds: u64) {
    for seed in 0..seeds {
        let right = (kernel.run)(CORRECT, &|l, m, b, s| in_schedule(l, m, b, s, seed));
        assert!(right.unwrap_or_else(|report| panic!("{}, seed {seed}: {report}", kernel.name)), "seed {seed}");
    }
}

/// Prints the table of the faults, and returns those that the default schedules miss.
fn check_faults(kernels: &[&Kernel]) -> Vec<String> {
    let (mut missed, mut wrong) = (Vec::new(), Vec::new());
    println!("\n| kernel | fault | outcome | seed | report |\n|---|---|---|---|---|");
    for kernel in kernels {
        for planted in kernel.faults {
            let checked: Run<'_> =
                &|launch, memory, blocks, shared| launch.emulate_checked(memory, [blocks, 1, 1], shared);
            let (found, seed, text) = match (kernel.run)(planted.number, checked) {
                Err(report) => (report.fault.into(), report.schedule, short(&report)),
                Ok(false) => {
                    let seed = first_seed(kernel, planted.number, Schedule::DEFAULT_SEEDS.end);
                    (Found::Wrong, seed, "wrong results".to_owned())
                }
                Ok(true) => {
                    let text = match first_seed(kernel, planted.number, 1000) {
                        Some(seed) => format!("first found in the schedule of seed {seed}"),
                        None => "not found by any of 1000 schedules".to_owned(),
                    };
                    missed.push(format!("{} {}", kernel.name, planted.name));
                    (Found::Missed, None, text)
                }
            };
            let is_found = if found == Found::Missed { "missed" } else { "found" };
            let seed = seed.map_or_else(String::new, |seed| seed.to_string());
            println!("| {} | {} ({}) | {is_found} | {seed} | {text} |", kernel.name, planted.text, planted.name);
            if found != planted.found {
                wrong.push(format!("{} {}: expected {:?}, found {found:?}", kernel.name, planted.name, planted.found));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    missed
}

/// Returns the first line of a report, without the name of the kernel and the paths of its lines.
fn short(report: &Report) -> String {
    let text = report.to_string();
    let line = text.lines().next().unwrap_or_default();
    let line = line.split_once(", block ").map_or(line, |(_, rest)| rest);
    format!("block {line}").replace("crates/cuda_std/tests/emulator/planted/", "").replace('|', "\\|")
}

/// The faults that the default schedules miss, and why:
/// * A later schedule happens to give right results, and `emulate_checked` leaves those: TicketOfEachThread, ResetByFirst. `emulate_each`
///   finds them.
/// * A barrier extends an acquire-release fence to other threads, which PTX guarantees for sequentially consistent fences only:
///   FencesBeforeBarrier, FencesAfterBarrier.
/// * None of the six schedules has the timing: GenerationReadLate.
#[test]
fn faults_between_blocks() {
    let missed = [
        "reduction by the last block TicketOfEachThread",
        "reduction by the last block ResetByFirst",
        "reduction by the last block FencesBeforeBarrier",
        "reduction by the last block FencesAfterBarrier",
        "grid barrier with a generation GenerationReadLate",
    ];
    assert_eq!(check_faults(&BETWEEN_BLOCKS), missed);
}

#[test]
fn faults_within_a_block() {
    assert_eq!(check_faults(&WITHIN_A_BLOCK), <[String; 0]>::default());
}

#[test]
fn correct_kernels_within_a_block_pass() {
    for kernel in WITHIN_A_BLOCK {
        check_correct(kernel, 100);
    }
}
