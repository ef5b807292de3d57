//! Tests that the default schedules of `emulate_checked` report the faults of `examples/planted-faults`.
//!
//! The correct version of each kernel passes in many schedules. The tests print a table of the faults:
//! `cargo test --release -p cuda_std planted -- --nocapture`.

use cuda_std::emulate::{Memory, Report, Schedule};
use cuda_std::launch::Launch;
use planted_faults_kernels::{BETWEEN_BLOCKS, CORRECT, Found, Kernel, Run, WITHIN_A_BLOCK};

fn in_schedule(launch: &Launch, memory: &mut Memory, blocks: u32, shared: usize, seed: u64) -> Result<(), Report> {
    launch.emulate_scheduled(memory, [blocks, 1, 1], shared, Schedule::new(seed))
}

/// Returns the first of the schedules below `end` that finds a fault.
fn first_seed(kernel: &Kernel, fault: u32, end: u64) -> Option<u64> {
    let passes = |seed| (kernel.run)(fault, &|l, m, b, s| in_schedule(l, m, b, s, seed)).is_ok_and(|right| right);
    (0..end).find(|seed| !passes(*seed))
}

/// Asserts that the correct version of a kernel passes in each schedule below `seeds`.
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
    format!("block {line}").replace("examples/planted-faults/kernels/src/", "").replace('|', "\\|")
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

/// Defines tests of the correct versions of the kernels between blocks, with their number of schedules.
macro_rules! correct {
    ($($test:ident: $kernel:literal, $seeds:literal;)*) => {$(
        #[test]
        fn $test() {
            let kernel = BETWEEN_BLOCKS.iter().find(|kernel| kernel.id == $kernel).expect("a kernel of this name");
            check_correct(kernel, $seeds);
        }
    )*};
}

correct! {
    a_reduction_by_the_last_block_passes: "LastBlock", 1000;
    a_split_k_gemm_passes: "SplitK", 1000;
    a_grid_barrier_that_counts_passes: "Monotonic", 1000;
    a_grid_barrier_with_a_generation_passes: "Generation", 1000;
    a_grid_barrier_with_a_sense_bit_passes: "Sense", 1000;
    a_spin_lock_passes: "Lock", 1000;
    a_ring_buffer_passes: "Ring", 1000;
    a_queue_of_dependent_tasks_passes: "Tasks", 300;
    a_flag_read_once_passes: "Peek", 1000;
    data_through_a_third_block_passes: "Relay", 1000;
    a_warp_parallel_look_back_passes: "LookBack", 300;
    a_histogram_merged_by_atomics_passes: "Histogram", 1000;
    a_table_initialized_once_passes: "Once", 1000;
    a_pool_of_nodes_passes: "Pool", 1000;
    waits_for_earlier_blocks_pass: "Residency", 20;
}
