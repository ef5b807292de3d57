//! Bulk stores, bulk additions, and counters that order the accesses of different blocks.

use cuda_std::emulate::{Fault, Memory, Report, Schedule};
use cuda_std::hopper::{self, tma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread, warp};

const SHARED: usize = 1 << 10;
/// Elements of a bulk store.
const COUNT: usize = 64;

fn shared() -> SharedArray<f32> {
    Layout::new().array(COUNT)
}

/// Returns the number of the line of this file that ends with `// <mark>`.
fn line(mark: &str) -> u32 {
    let end = format!("// {mark}");
    let mut found = include_str!("counters.rs").lines().enumerate().filter(|(_, l)| l.ends_with(&end));
    found.next().unwrap_or_else(|| panic!("expected a line marked {mark}")).0 as u32 + 1
}

/// Asserts the fault and the marked source lines of a report.
#[track_caller]
fn expect(report: &Report, fault: Fault, at: &str, other: Option<&str>) {
    println!("{report}\n");
    assert_eq!(report.fault, fault, "{report}");
    assert_eq!(report.lines(), [Some(line(at)), other.map(line)], "{report}");
}

/// Deliberate faults of the kernel `ordered_sum`.
#[derive(Clone, Copy, PartialEq)]
#[repr(u32)]
enum Planted {
    NotAcquired,
    NotReleased,
    WaitsForReadOnly,
    NoGlobalProxyFence,
    NoSharedProxyFence,
    AddsToNothing,
    NeverWaits,
    AddsAgainBeforeWait,
    OverwritesSource,
    OverwritesSourceAfterRead,
    WrongCount,
    ReadByOtherWarp,
    OddSize,
}

/// Adds rows of `inp` to `out` in ascending order. Block b adds rows b `rows` .. (b + 1) `rows`. The counter is the number
/// of added rows.
#[kernel(threads = 64)]
fn ordered_sum(out: GlobalMut<f32>, counter: GlobalMut<u32>, inp: Global<f32>, rows: u32, fault: u32) {
    let first = thread::block_idx_x() * rows;
    for row in first..first + rows {
        add_row(out, counter, inp, row, fault);
    }
}

/// Same as [`ordered_sum`] for `rows` rows in total, which blocks take by ticket.
#[kernel(threads = 64)]
fn ordered_sum_by_ticket(
    out: GlobalMut<f32>,
    counter: GlobalMut<u32>,
    ticket_counter: GlobalMut<u32>,
    inp: Global<f32>,
    rows: u32,
) {
    let mut layout = Layout::new();
    layout.array::<f32>(COUNT);
    let ticket: SharedArray<u32> = layout.array(1);
    loop {
        if thread::thread_idx_x() == 0 {
            ticket.set(0, ticket_counter.atomic_add(0, 1));
        }
        thread::sync_threads();
        let row = ticket.at(0);
        if row >= rows {
            break;
        }
        add_row(out, counter, inp, row, u32::MAX);
    }
}

fn add_row(out: GlobalMut<f32>, counter: GlobalMut<u32>, inp: Global<f32>, row: u32, fault: u32) {
    let is = |planted: Planted| fault == planted as u32;
    let (buffer, thread) = (shared(), thread::thread_idx_x() as usize);
    buffer.set(thread, inp.at(row as usize * COUNT + thread)); // write
    if !is(Planted::NoSharedProxyFence) {
        hopper::fence_async_proxy();
    }
    thread::sync_threads();
    if thread == 0 {
        if row > 0 && !is(Planted::NotAcquired) {
            counter.acquire_wait(0, row + u32::from(is(Planted::WrongCount))); // acquire
            if !is(Planted::NoGlobalProxyFence) {
                hopper::fence_async_proxy_global();
            }
        }
        let count = if is(Planted::OddSize) { 3 } else { COUNT as u32 };
        if row == 0 && !is(Planted::AddsToNothing) {
            buffer.store_bulk(0, count, out, 0); // store
        } else {
            buffer.add_bulk(0, count, out, 0); // add
        }
        if is(Planted::AddsAgainBeforeWait) {
            buffer.add_bulk(0, COUNT as u32, out, 0); // add_again
        }
        tma::commit_stores();
        if is(Planted::OverwritesSource) {
            buffer.set(1, 0.5);
        }
        if is(Planted::WaitsForReadOnly) || is(Planted::OverwritesSourceAfterRead) {
            tma::wait_stores_read();
        }
        if is(Planted::OverwritesSourceAfterRead) {
            buffer.set(1, 0.5);
        }
        if !is(Planted::WaitsForReadOnly) && !is(Planted::NeverWaits) {
            tma::wait_stores(); // wait
        }
        if !is(Planted::NotReleased) {
            counter.release_add(0, 1);
        }
    }
    if is(Planted::ReadByOtherWarp) && thread == 32 {
        out.at(0); // read
    }
    thread::sync_threads(); // barrier
}

fn values(rows: usize) -> Vec<f32> {
    (0..rows * COUNT).map(|i| ((i * 7919 % 1000) as f32 - 500.0) * 1.5f32.powi((i % 23) as i32)).collect()
}

/// Returns the sum of each column, row by row.
fn sums(values: &[f32]) -> Vec<f32> {
    let mut sums = values[..COUNT].to_vec();
    for row in values[COUNT..].chunks(COUNT) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
    }
    sums
}

#[test]
fn blocks_add_in_the_order_of_the_counter() {
    for (rows, blocks) in [(1, 1), (5, 1), (3, 4)] {
        let values = values(rows * blocks);
        let mut memory = Memory::new();
        let (out, counter) = (memory.output("out", COUNT), memory.zeroed("counter", 1));
        let inp = memory.input("inp", &values);
        let launch = ordered_sum(out, counter, inp, rows as u32, u32::MAX);
        launch.emulate_checked(&mut memory, [blocks as u32, 1, 1], SHARED).unwrap();
        assert_eq!(memory.read(out), sums(&values), "{rows} rows for each of {blocks} blocks");
        assert_eq!(memory.read(counter), [(rows * blocks) as u32]);
    }
}

/// Blocks that run in parallel wait for each other. Additions in another order would give other bits.
#[test]
fn parallel_blocks_add_in_the_order_of_the_counter() {
    let values = values(200);
    for _ in 0..10 {
        let mut memory = Memory::new();
        let (out, counter, ticket) =
            (memory.zeroed("out", COUNT), memory.zeroed("counter", 1), memory.zeroed("ticket", 1));
        let inp = memory.input("inp", &values);
        let launch = ordered_sum_by_ticket(out, counter, ticket, inp, 200);
        // SAFETY: the buffers have the sizes that the kernel uses.
        unsafe { launch.emulate([8, 1, 1], SHARED) }.unwrap();
        assert_eq!(memory.read(out), sums(&values));
    }
}

/// Bulk additions without a wait are not ordered.
#[test]
fn faults_are_reported() {
    let run = |fault: u32| {
        let mut memory = Memory::new();
        let (out, counter) = (memory.output("out", COUNT), memory.zeroed("counter", 1));
        let inp = memory.input("inp", &values(4));
        ordered_sum(out, counter, inp, 2, fault).emulate_checked(&mut memory, [2, 1, 1], SHARED)
    };
    run(u32::MAX).unwrap();
    run(Planted::OverwritesSourceAfterRead as u32).unwrap();
    let found = |fault: Planted| run(fault as u32).unwrap_err();
    expect(&found(Planted::NotAcquired), Fault::DataRace, "add", Some("add"));
    expect(&found(Planted::NotReleased), Fault::Deadlock, "acquire", Some("barrier"));
    expect(&found(Planted::WaitsForReadOnly), Fault::AsyncCopy, "add", Some("store"));
    expect(&found(Planted::NoGlobalProxyFence), Fault::DataRace, "add", Some("acquire"));
    expect(&found(Planted::NoSharedProxyFence), Fault::DataRace, "store", Some("write"));
    expect(&found(Planted::AddsToNothing), Fault::Uninitialized, "add", None);
    expect(&found(Planted::NeverWaits), Fault::AsyncCopy, "add", Some("store"));
    expect(&found(Planted::AddsAgainBeforeWait), Fault::AsyncCopy, "add_again", Some("store"));
    expect(&found(Planted::OverwritesSource), Fault::AsyncCopy, "store", Some("wait"));
    expect(&found(Planted::ReadByOtherWarp), Fault::DataRace, "store", Some("read"));
    expect(&found(Planted::OddSize), Fault::Operand, "store", None);
    let wrong = found(Planted::WrongCount);
    expect(&wrong, Fault::Deadlock, "acquire", Some("barrier"));
    let text = wrong.to_string();
    assert!(
        text.contains("acquire_wait for the value 2") && text.contains("of counter + 0 (index 0); the value is 1"),
        "{text}"
    );
}

/// The second warp overwrites the source of the first warp's store. The first warp arrives at the barrier before the store
/// has read it, unless `wait` is 1.
#[kernel(threads = 64)]
fn passes_the_source_on(out: GlobalMut<f32>, wait: u32) {
    let (buffer, thread) = (shared(), thread::thread_idx_x() as usize);
    buffer.set(thread, 1.0);
    hopper::fence_async_proxy();
    thread::sync_threads();
    if warp::index() == 0 {
        if thread == 0 {
            buffer.store_bulk(0, COUNT as u32, out, 0); // source_read
            tma::commit_stores();
            if wait == 1 {
                tma::wait_stores_read();
            }
        }
        warp::sync();
        thread::arrive_named(1, 64);
        if thread == 0 {
            tma::wait_stores();
        }
    } else {
        thread::sync_named(1, 64);
        buffer.set(thread, 2.0); // source_overwritten
    }
}

#[test]
fn a_store_reads_its_source_until_the_wait() {
    let run = |wait| {
        let mut memory = Memory::new();
        let out = memory.output("out", COUNT);
        passes_the_source_on(out, wait).emulate_checked(&mut memory, [1, 1, 1], SHARED)
    };
    run(1).unwrap();
    expect(&run(0).unwrap_err(), Fault::DataRace, "source_overwritten", Some("source_read"));
}

/// The last stores of a block are waited for only until they are read. They complete after the block's release.
#[kernel(threads = 32)]
fn releases_too_early(out: GlobalMut<f32>, counter: GlobalMut<u32>) {
    let buffer = shared();
    for i in [0, 32] {
        buffer.set(i + warp::lane() as usize, 1.0);
    }
    hopper::fence_async_proxy();
    warp::sync();
    if warp::lane() == 0 {
        if thread::block_idx_x() == 1 {
            counter.acquire_wait(0, 1);
            hopper::fence_async_proxy_global();
        }
        buffer.store_bulk(0, COUNT as u32, out, 0); // early_store
        tma::commit_stores();
        tma::wait_stores_read();
        counter.release_add(0, 1);
    }
}

#[test]
fn a_wait_for_the_read_does_not_order_the_write() {
    let mut memory = Memory::new();
    let (out, counter) = (memory.output("out", COUNT), memory.zeroed("counter", 1));
    let report = releases_too_early(out, counter).emulate_checked(&mut memory, [2, 1, 1], SHARED).unwrap_err();
    expect(&report, Fault::DataRace, "early_store", Some("early_store"));
    assert_eq!(report.block, [1, 0, 0]);
}

#[kernel(threads = 32)]
fn waits_for_the_next_block(counter: GlobalMut<u32>, blocks: u32) {
    let block = thread::block_idx_x();
    if warp::lane() == 0 {
        if block + 1 < blocks {
            counter.acquire_wait(0, blocks - 1 - block); // wait_for_next
        }
        counter.release_add(0, 1);
    }
    warp::sync(); // after_wait
}

/// A block may wait for one with a higher number, if the GPU holds both at a time.
#[test]
fn a_wait_that_nothing_ends_is_a_deadlock() {
    let mut memory = Memory::new();
    let counter = memory.zeroed("counter", 1);
    waits_for_the_next_block(counter, 2).emulate_checked(&mut memory, [2, 1, 1], SHARED).unwrap();
    memory.write(counter, &[0]).unwrap();
    let schedule = Schedule::new(1).with_resident_blocks(1);
    let launch = waits_for_the_next_block(counter, 2);
    let report = launch.emulate_scheduled(&mut memory, [2, 1, 1], SHARED, schedule).unwrap_err();
    expect(&report, Fault::Deadlock, "wait_for_next", Some("after_wait"));
    let text = report.to_string();
    assert!(text.contains("block number 1 has not started: the GPU holds 1 blocks"), "{text}");
    assert!(text.ends_with("[in the schedule of seed 1]"), "{text}");
    // SAFETY: the buffer has the size that the kernel uses.
    let report = unsafe { waits_for_the_next_block(counter, 9).emulate([8, 1, 1], SHARED) }.unwrap_err();
    assert_eq!(report.fault, Fault::Deadlock, "{report}");
}

/// A thread acquires the other block's writes. Only a barrier passes them on to another warp.
#[kernel(threads = 64)]
fn passes_on(out: GlobalMut<f32>, counter: GlobalMut<u32>, barrier: u32) {
    let thread = thread::thread_idx_x() as usize;
    if thread::block_idx_x() == 0 {
        out.set(thread, 1.0); // passed_write
        thread::sync_threads();
        if thread == 0 {
            counter.release_add(0, 1);
        }
    } else {
        if thread == 0 {
            counter.acquire_wait(0, 1);
        }
        if barrier == 1 {
            thread::sync_threads();
        }
        out.set(thread, 2.0); // passed_on
    }
}

#[test]
fn a_barrier_passes_on_what_a_thread_has_acquired() {
    let run = |barrier| {
        let mut memory = Memory::new();
        let (out, counter) = (memory.output("out", 64), memory.zeroed("counter", 1));
        passes_on(out, counter, barrier).emulate_checked(&mut memory, [2, 1, 1], SHARED)
    };
    run(1).unwrap();
    expect(&run(0).unwrap_err(), Fault::DataRace, "passed_on", Some("passed_write"));
}

/// Words that a thread of `waits_for_all_words` needs at the same time.
const WORDS: usize = 4;

/// Block 1 waits until it has seen all words of block 0 in one pass, while block 0 waits for its answer.
#[kernel(threads = 32)]
fn waits_for_all_words(words: GlobalMut<u32>, answer: GlobalMut<u32>) {
    let thread = thread::thread_idx_x() as usize;
    if thread::block_idx_x() == 0 {
        while answer.load_relaxed(0) == 0 {}
        words.store_relaxed(thread, 1);
        while answer.load_relaxed(1) == 0 {}
    } else {
        if thread == 0 {
            answer.store_relaxed(0, 1);
        }
        loop {
            let mut all = true;
            for i in 0..WORDS {
                all &= words.load_relaxed((thread + i) % 32) != 0;
            }
            if all {
                break;
            }
        }
        if thread == 0 {
            answer.store_relaxed(1, 1);
        }
    }
}

/// Each block waits until all have arrived.
#[kernel(threads = 32)]
fn waits_for_all_blocks(counter: GlobalMut<u32>, out: GlobalMut<u32>) {
    let blocks = thread::grid_dim_x();
    if thread::thread_idx_x() == 0 {
        counter.fetch_add(0, 1);
        while counter.load_relaxed(0) < blocks {}
        out.set(thread::block_idx_x() as usize, 1);
    }
    counter.release_add(1, 1);
    counter.acquire_wait(1, 32 * blocks);
}

/// More blocks than the machine has cores are resident at a time.
#[test]
fn unchecked_blocks_wait_for_each_other() {
    let (mut counter, mut out) = ([0u32; 2], [0u32; 300]);
    let views = (GlobalMut::new(counter.as_mut_ptr()), GlobalMut::new(out.as_mut_ptr()));
    // SAFETY: the buffers have the sizes that the kernel uses.
    unsafe { waits_for_all_blocks(views.0, views.1).emulate([300, 1, 1], 0) }.unwrap();
    assert_eq!((counter, out), ([300, 9600], [1; 300]));
    // A wait for a block that does not exist.
    let mut counter = [0u32; 2];
    let view = GlobalMut::new(counter.as_mut_ptr());
    // SAFETY: as above.
    let report = unsafe { waits_for_the_next_block(view, 20).emulate([8, 1, 1], SHARED) }.unwrap_err();
    assert_eq!(report.fault, Fault::Deadlock, "{report}");
}

/// A block that polls several words must run again although memory does not change: it stops at each word that it has read before.
#[test]
fn blocks_that_poll_several_words_continue() {
    let mut memory = Memory::new();
    let (words, answer) = (memory.zeroed("words", 32), memory.zeroed("answer", 2));
    waits_for_all_words(words, answer).emulate_checked(&mut memory, [2, 1, 1], 0).unwrap();
    // Without the answer, both blocks poll forever.
    let mut memory = Memory::new();
    let (words, answer) = (memory.zeroed("words", 32), memory.zeroed("answer", 2));
    let report = waits_for_all_words(words, answer).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::Livelock, "{report}");
}
