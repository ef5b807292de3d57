//! Runs all kernels in the emulator, which checks each memory access for bounds, initialization and data races, in several schedules.

use cuda_std::emulate::{Memory, Report, Schedule};
use scan_and_sort::{SCAN_TILE, SORT_TILE, ScanArrays, SortArrays, Step, random_key};
use scan_and_sort_kernels::scan::{AGGREGATE, PREFIX};

/// Runs one launch.
type Run = fn(&Step, &mut Memory) -> Result<(), Report>;

/// Runs a launch in several schedules.
fn run(step: &Step, memory: &mut Memory) -> Result<(), Report> {
    step.launch.emulate_checked(memory, step.grid, step.launch.shared_bytes())
}

/// Runs a launch on a GPU that holds two blocks.
fn run_two_blocks(step: &Step, memory: &mut Memory) -> Result<(), Report> {
    let schedule = Schedule::new(1).with_resident_blocks(2);
    step.launch.emulate_scheduled(memory, step.grid, step.launch.shared_bytes(), schedule)
}

fn scan(values: &[u32], run: Run) -> Result<Vec<u32>, Report> {
    let mut memory = Memory::new();
    let arrays = ScanArrays {
        out: memory.output("out", values.len()),
        inp: memory.input("inp", values),
        states: memory.zeroed("states", ScanArrays::states(values.len())),
        tickets: memory.zeroed("tickets", 1),
    };
    arrays.steps(values.len()).iter().try_for_each(|step| run(step, &mut memory))?;
    Ok(memory.read(arrays.out))
}

fn sort(keys: &[u32], run: Run) -> Result<Vec<u32>, Report> {
    let mut memory = Memory::new();
    let arrays = SortArrays {
        out: memory.output("out", keys.len()),
        inp: memory.input("inp", keys),
        other: memory.output("other", keys.len()),
        states: memory.zeroed("states", SortArrays::states(keys.len())),
        counts: memory.zeroed("counts", SortArrays::COUNTS),
        tickets: memory.zeroed("tickets", SortArrays::TICKETS),
    };
    arrays.steps(keys.len(), 2).iter().try_for_each(|step| run(step, &mut memory))?;
    Ok(memory.read(arrays.out))
}

fn random(n: usize) -> Vec<u32> {
    (0..n as u64).map(random_key).collect()
}

#[track_caller]
fn assert_scans(values: &[u32], run: Run) {
    let expected = values.iter().scan(0u32, |sum, value| {
        *sum = sum.wrapping_add(*value);
        Some(*sum)
    });
    let found = scan(values, run).unwrap_or_else(|report| panic!("{report}"));
    assert!(found.into_iter().eq(expected), "{} elements", values.len());
}

#[track_caller]
fn assert_sorts(keys: &[u32], run: Run) {
    let mut expected = keys.to_vec();
    expected.sort_unstable();
    let found = sort(keys, run).unwrap_or_else(|report| panic!("{report}"));
    assert!(found == expected, "{} keys", keys.len());
}

#[test]
fn scans_of_few_elements_match_the_cpu() {
    for n in [0, 1, 2, 127, 128, 3071] {
        assert_scans(&random(n), run);
    }
}

#[test]
fn scans_of_sizes_around_a_tile_match_the_cpu() {
    for n in [SCAN_TILE - 1, SCAN_TILE, SCAN_TILE + 1, 2 * SCAN_TILE + 33] {
        assert_scans(&random(n), run);
    }
}

#[test]
fn a_scan_of_more_tiles_than_a_warp_reads_matches_the_cpu() {
    assert_scans(&random(35 * SCAN_TILE + 5), run);
}

/// The last tile runs alone. Tile 0 has published a prefix, and the tiles between them only their own sums.
#[test]
fn a_look_back_over_three_windows_adds_each_tile_once() {
    let tiles = 70;
    let values = random(tiles * SCAN_TILE);
    let sum = |values: &[u32]| values.iter().copied().fold(0, u32::wrapping_add);
    let state = |status: u32, tile: &[u32]| u64::from(status) << 32 | u64::from(sum(tile));
    let mut states: Vec<_> = values.chunks(SCAN_TILE).map(|tile| state(AGGREGATE, tile)).collect();
    states[0] = state(PREFIX, &values[..SCAN_TILE]);
    states[tiles - 1] = 0;

    let mut memory = Memory::new();
    let arrays = ScanArrays {
        out: memory.zeroed("out", values.len()),
        inp: memory.input("inp", &values),
        states: memory.buffer("states", &states),
        tickets: memory.buffer("tickets", &[tiles as u32 - 1]),
    };
    let launch = &arrays.steps(values.len())[0].launch;
    launch.emulate_checked(&mut memory, [1, 1, 1], launch.shared_bytes()).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(memory.read(arrays.out).last(), Some(&sum(&values)));
}

#[test]
fn sorts_of_few_keys_match_the_cpu() {
    for n in [0, 1, 2, 33, 3071] {
        assert_sorts(&random(n), run);
    }
}

#[test]
fn sorts_of_sizes_around_a_tile_match_the_cpu() {
    for n in [SORT_TILE, SORT_TILE + 1] {
        assert_sorts(&random(n), run);
    }
}

#[test]
fn a_sort_of_more_tiles_than_a_thread_reads_matches_the_cpu() {
    assert_sorts(&random(6 * SORT_TILE + 3), run);
}

#[test]
fn sorts_of_equal_and_ordered_keys_match_the_cpu() {
    let n = SORT_TILE + 100;
    assert_sorts(&vec![0; n], run);
    assert_sorts(&vec![u32::MAX; n], run);
    assert_sorts(&(0..n as u32).collect::<Vec<_>>(), run);
    assert_sorts(&(0..n as u32).rev().collect::<Vec<_>>(), run);
    assert_sorts(&random(n).into_iter().map(|key| (key % 3) << 15).collect::<Vec<_>>(), run);
}

#[test]
fn two_blocks_at_a_time_suffice() {
    assert_scans(&random(5 * SCAN_TILE), run_two_blocks);
    assert_sorts(&random(5 * SORT_TILE), run_two_blocks);
}
