//! Kernels whose blocks communicate, and faults in them: a scan with decoupled look-back, split-K, a barrier of the grid, and a queue.
//!
//! The correct version of each passes in many schedules. The default schedules find the faults.

use cuda_std::emulate::{Fault, Memory, Report, Schedule};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, fence, kernel, thread};

/// Elements of a tile of the scan: one for each thread.
const TILE: usize = 64;
/// States of a tile.
const AGGREGATE: u32 = 1;
const PREFIX: u32 = 2;

/// Faults of the scan.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(u32)]
enum Scan {
    Correct,
    NoWriterFence,
    NoReaderFence,
    WriterFenceOfBlock,
    ReaderFenceOfBlock,
    FlagBeforeData,
    FenceAfterFlag,
    ReaderFenceBeforeFlag,
    WrongAggregate,
    PlainFlagStore,
    PlainFlagLoad,
    FenceOfOtherThread,
    PrefixFlagBeforeData,
    NoPrefixFence,
    StopsAtAggregate,
    ReadsPrefixForAggregate,
    NoBroadcastBarrier,
    PublishesOfOtherLane,
}

/// An exclusive sum of `inp` with decoupled look-back (Merrill, Garland: Single-pass Parallel Prefix Scan with Decoupled Look-back,
/// 2016). A tile publishes its sum (the aggregate) and then its inclusive prefix, each with a flag.
#[kernel(threads = 64)]
fn scan(
    out: GlobalMut<u32>,
    flags: GlobalMut<u32>,
    aggregates: GlobalMut<u32>,
    prefixes: GlobalMut<u32>,
    tickets: GlobalMut<u32>,
    inp: Global<u32>,
    fault: u32,
) {
    let is = |planted: Scan| fault == planted as u32;
    let mut layout = Layout::new();
    let (sums, words): (SharedArray<u32>, SharedArray<u32>) = (layout.array(TILE), layout.array(2));
    let t = thread::thread_idx_x() as usize;
    if t == 0 {
        words.set(0, tickets.fetch_add(0, 1));
    }
    thread::sync_threads();
    let tile = words.at(0) as usize;
    let value = inp.at(tile * TILE + t);
    sums.set(t, value);
    thread::sync_threads();
    let before = (0..t).fold(0, |sum, i| sum + sums.at(i));
    let total = (0..TILE).fold(0, |sum, i| sum + sums.at(i));
    if is(Scan::FenceOfOtherThread) && t == 1 {
        fence::device();
    }
    if t == 0 {
        let publish = |values: GlobalMut<u32>, value: u32, flag: u32, has_fence: bool, flag_first: bool| {
            let set_flag = || {
                if is(Scan::PlainFlagStore) {
                    flags.set(tile, flag); // plain_flag
                } else {
                    flags.store_relaxed(tile, flag);
                }
            };
            if flag_first {
                fence::device();
                set_flag();
            }
            values.set(tile, value); // published
            if has_fence {
                if is(Scan::WriterFenceOfBlock) { fence::block() } else { fence::device() }
            }
            if !flag_first {
                set_flag();
            }
            if is(Scan::FenceAfterFlag) {
                fence::device();
            }
        };
        let mut prefix = 0;
        if tile > 0 {
            let aggregate = if is(Scan::WrongAggregate) { total + 1 } else { total };
            let has_fence = !is(Scan::NoWriterFence) && !is(Scan::FenceOfOtherThread) && !is(Scan::FenceAfterFlag);
            publish(aggregates, aggregate, AGGREGATE, has_fence, is(Scan::FlagBeforeData));
            let mut other = tile - 1;
            loop {
                if is(Scan::ReaderFenceBeforeFlag) {
                    fence::device();
                }
                let mut flag = 0;
                while flag == 0 {
                    flag = if is(Scan::PlainFlagLoad) { flags.at(other) } else { flags.load_relaxed(other) };
                }
                if is(Scan::ReaderFenceOfBlock) {
                    fence::block();
                } else if !is(Scan::NoReaderFence) && !is(Scan::ReaderFenceBeforeFlag) {
                    fence::device();
                }
                if flag == PREFIX || is(Scan::ReadsPrefixForAggregate) {
                    prefix += prefixes.at(other); // prefix_read
                    break;
                }
                prefix += aggregates.at(other); // aggregate_read
                if is(Scan::StopsAtAggregate) {
                    break;
                }
                other -= 1;
            }
        }
        publish(prefixes, prefix + total, PREFIX, !is(Scan::NoPrefixFence), is(Scan::PrefixFlagBeforeData));
        words.set(1, prefix);
    }
    if is(Scan::PublishesOfOtherLane) && t == 1 {
        prefixes.set(tile, 0);
    }
    if !is(Scan::NoBroadcastBarrier) {
        thread::sync_threads();
    }
    out.set(tile * TILE + t, words.at(1) + before);
}

const TILES: usize = 12;

/// Runs the scan, and returns whether its results are right.
fn run_scan(fault: Scan, run: impl Fn(&Launch, &mut Memory) -> Result<(), Report>) -> Result<bool, Report> {
    let values: Vec<u32> = (0..TILES * TILE).map(|i| (i * 7919 % 13) as u32).collect();
    let mut memory = Memory::new();
    let out = memory.output("out", values.len());
    let (flags, tickets) = (memory.zeroed("flags", TILES), memory.zeroed("tickets", 1));
    let (aggregates, prefixes) = (memory.output("aggregates", TILES), memory.output("prefixes", TILES));
    let inp = memory.input("inp", &values);
    run(&scan(out, flags, aggregates, prefixes, tickets, inp, fault as u32), &mut memory)?;
    let mut sum = 0;
    let expected = values.iter().map(|value| {
        sum += value;
        sum - value
    });
    Ok(memory.read(out).into_iter().eq(expected))
}

#[test]
fn a_scan_with_look_back_passes_in_many_schedules() {
    for seed in 0..1000 {
        let run = |launch: &Launch, memory: &mut Memory| {
            launch.emulate_scheduled(memory, [TILES as u32, 1, 1], 1 << 10, Schedule::new(seed))
        };
        assert!(run_scan(Scan::Correct, run).unwrap(), "seed {seed}");
    }
}

#[test]
fn faults_of_a_scan_are_found() {
    use Scan::*;
    let run = |fault| run_scan(fault, |launch, memory| launch.emulate_checked(memory, [TILES as u32, 1, 1], 1 << 10));
    assert!(run(Correct).unwrap());
    let races = [
        NoWriterFence,
        NoReaderFence,
        WriterFenceOfBlock,
        ReaderFenceOfBlock,
        FlagBeforeData,
        FenceAfterFlag,
        ReaderFenceBeforeFlag,
        PlainFlagStore,
        FenceOfOtherThread,
        PrefixFlagBeforeData,
        NoPrefixFence,
        NoBroadcastBarrier,
        PublishesOfOtherLane,
    ];
    for fault in races {
        let report = run(fault).expect_err(&format!("{fault:?} must be found"));
        println!("{fault:?}: {report}");
        assert!(matches!(report.fault, Fault::DataRace | Fault::Uninitialized), "{fault:?}: {report}");
    }
    for fault in [WrongAggregate, StopsAtAggregate] {
        assert!(!run(fault).unwrap(), "{fault:?} must give wrong sums");
    }
    for fault in [ReadsPrefixForAggregate, PlainFlagLoad] {
        let report = run(fault).expect_err(&format!("{fault:?} must be found"));
        println!("{fault:?}: {report}");
    }
}

/// Without a fence, sums are wrong in some schedule, because a block reads an aggregate or a prefix before it arrives.
#[test]
fn the_effect_of_a_race_can_be_shown() {
    for fault in [Scan::Correct, Scan::NoWriterFence, Scan::NoReaderFence, Scan::PrefixFlagBeforeData] {
        let mut wrong = 0;
        for seed in 4..40 {
            let run = |launch: &Launch, memory: &mut Memory| {
                launch.emulate_scheduled(memory, [TILES as u32, 1, 1], 1 << 10, Schedule::new(seed).showing_races())
            };
            match run_scan(fault, run) {
                Ok(is_right) => wrong += usize::from(!is_right),
                Err(report) => panic!("{report}"),
            }
        }
        assert_eq!(wrong > 0, fault != Scan::Correct, "{fault:?}: {wrong} wrong results");
    }
}

/// All blocks of the grid wait for each other.
#[kernel(threads = 128)]
fn meets(counter: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        counter.release_add(0, 1);
        counter.acquire_wait(0, thread::grid_dim_x());
    }
    thread::sync_threads();
}

/// A block on nearly every SM of an H100 can wait for all others. More blocks than the GPU or the emulator holds cannot.
#[test]
fn a_block_on_each_sm_can_meet_the_others() {
    let mut memory = Memory::new();
    let counter = memory.zeroed("counter", 1);
    meets(counter).emulate_checked(&mut memory, [120, 1, 1], 0).unwrap();
    memory.write(counter, &[0]).unwrap();
    let report = meets(counter).emulate_checked(&mut memory, [132 * 16 + 1, 1, 1], 0).unwrap_err();
    let text = report.to_string();
    assert!(report.fault == Fault::Deadlock && text.contains("has not started"), "{text}");
}

/// Two blocks wait for each other in each round: each advances its own word, and polls the other's.
#[kernel(threads = 32)]
fn ping_pong(words: GlobalMut<u32>) {
    let block = thread::block_idx_x() as usize;
    if thread::thread_idx_x() == 0 {
        for round in 1..10 {
            words.store_release(block, round);
            while words.load_acquire(1 - block) < round {}
        }
    }
}

/// A block that has read an older value must run again, even if the other block polls, too.
#[test]
fn blocks_that_poll_each_other_make_progress() {
    for seed in 0..1000 {
        let mut memory = Memory::new();
        let words = memory.zeroed("words", 2);
        ping_pong(words).emulate_scheduled(&mut memory, [2, 1, 1], 0, Schedule::new(seed)).unwrap();
    }
}

/// Blocks take positions by an atomic, so that `order` depends on the schedule. Block 1 traps if it comes first.
#[kernel(threads = 32)]
fn takes_positions(order: GlobalMut<u32>, counter: GlobalMut<u32>) {
    let block = thread::block_idx_x();
    if thread::thread_idx_x() == 0 {
        let position = counter.fetch_add(0, 1);
        if block == 1 && position == 0 {
            thread::trap();
        }
        order.set(block as usize, position);
    }
}

/// The first schedule runs block 0 first, and the second one block 3. Their results differ, but the later schedules run, too.
#[test]
fn results_that_depend_on_the_schedule_do_not_end_the_search() {
    let mut memory = Memory::new();
    let (order, counter) = (memory.output("order", 4), memory.zeroed("counter", 1));
    let report = takes_positions(order, counter).emulate_checked(&mut memory, [4, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::Trap, "{report}");
    assert!(report.schedule > Some(1), "{report}");
}

/// Block 0 reads the flag once. Block 1 sets it without a release.
#[kernel(threads = 32)]
fn reads_once(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        if thread::block_idx_x() == 1 {
            data.set(0, 1);
            flag.store_relaxed(0, 1);
        } else if flag.load_acquire(0) == 1 {
            out.set(0, data.at(0));
        }
    }
}

/// In the first schedule, block 0 reads the flag before block 1 sets it, so the blocks exchange nothing.
#[test]
fn a_read_before_the_write_of_another_block_counts_as_communication() {
    let mut memory = Memory::new();
    let (data, flag, out) = (memory.output("data", 1), memory.zeroed("flag", 1), memory.output("out", 1));
    let report = reads_once(data, flag, out).emulate_checked(&mut memory, [2, 1, 1], 0).unwrap_err();
    assert_eq!((report.fault, report.schedule), (Fault::DataRace, Some(1)), "{report}");
}
