//! Litmus tests: small kernels whose possible results the PTX memory model defines, and the results that the emulator shows.
//!
//! Two or four threads of different blocks, or of one block, access x and y. `shown` are results that some schedule shows, `never`
//! results that the model forbids. Data that is not atomic must also be free of races.

use cuda_std::emulate::{Fault, Memory, Schedule};
use cuda_std::launch::Launch;
use cuda_std::{GlobalMut, fence, kernel, thread};
use std::collections::BTreeSet;

/// How a thread orders its first access before its second one.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(u32)]
enum Order {
    None,
    Block,
    Device,
    System,
    SeqCstBlock,
    SeqCstDevice,
    SeqCstSystem,
    /// The write is a release, the read an acquire.
    Access,
}

const ORDERS: [Order; 8] = [
    Order::None,
    Order::Block,
    Order::Device,
    Order::System,
    Order::SeqCstBlock,
    Order::SeqCstDevice,
    Order::SeqCstSystem,
    Order::Access,
];

impl Order {
    fn is_sequential(self, between_blocks: bool) -> bool {
        matches!(self, Self::SeqCstDevice | Self::SeqCstSystem) || self == Self::SeqCstBlock && !between_blocks
    }

    /// Returns whether the order holds for a pair of threads.
    fn orders(self, between_blocks: bool) -> bool {
        self != Self::None && !(between_blocks && matches!(self, Self::Block | Self::SeqCstBlock))
    }
}

fn fence_of(order: u32) {
    match order {
        _ if order == Order::Block as u32 => fence::block(),
        _ if order == Order::Device as u32 => fence::device(),
        _ if order == Order::System as u32 => fence::system(),
        _ if order == Order::SeqCstBlock as u32 => fence::block_seq_cst(),
        _ if order == Order::SeqCstDevice as u32 => fence::device_seq_cst(),
        _ if order == Order::SeqCstSystem as u32 => fence::system_seq_cst(),
        _ => (),
    }
}

fn store(word: GlobalMut<u32>, i: usize, order: u32) {
    if order == Order::Access as u32 { word.store_release(i, 1) } else { word.store_relaxed(i, 1) }
}

fn load(word: GlobalMut<u32>, i: usize, order: u32) -> u32 {
    if order == Order::Access as u32 { word.load_acquire(i) } else { word.load_relaxed(i) }
}

/// Returns the number of this thread among those of the test: the first threads of the blocks, or of the warps of a single block.
fn actor() -> Option<usize> {
    let (thread, block) = (thread::thread_idx_x() as usize, thread::block_idx_x() as usize);
    match thread::grid_dim_x() {
        1 => thread.is_multiple_of(32).then_some(thread / 32),
        _ => (thread == 0).then_some(block),
    }
}

/// Message passing: thread 0 writes x, then y. Thread 1 reads y, then x. Results: y, x.
#[kernel(threads = 128)]
fn message_passing(words: GlobalMut<u32>, out: GlobalMut<u32>, writer: u32, reader: u32) {
    match actor() {
        Some(0) => {
            words.store_relaxed(0, 1);
            fence_of(writer);
            store(words, 1, writer);
        }
        Some(1) => {
            out.set(0, load(words, 1, reader));
            fence_of(reader);
            out.set(1, words.load_relaxed(0));
        }
        _ => (),
    }
}

/// Message passing of data that is not atomic. Returns no result if thread 1 does not see the flag.
#[kernel(threads = 128)]
fn message_passing_of_data(words: GlobalMut<u32>, out: GlobalMut<u32>, writer: u32, reader: u32) {
    match actor() {
        Some(0) => {
            words.set(0, 1); // data_write
            fence_of(writer);
            store(words, 1, writer);
        }
        Some(1) => {
            let seen = load(words, 1, reader);
            fence_of(reader);
            out.set(0, seen);
            out.set(1, if seen == 1 { words.at(0) } else { 1 }); // data_read
        }
        _ => (),
    }
}

/// Store buffering: each thread writes its word and reads the other one.
#[kernel(threads = 128)]
fn store_buffering(words: GlobalMut<u32>, out: GlobalMut<u32>, first: u32, second: u32) {
    let Some(i) = actor() else { return };
    if i < 2 {
        let order = if i == 0 { first } else { second };
        store(words, i, order);
        fence_of(order);
        out.set(i, load(words, 1 - i, order));
    }
}

/// Load buffering: each thread reads its word and writes the other one.
#[kernel(threads = 128)]
fn load_buffering(words: GlobalMut<u32>, out: GlobalMut<u32>, first: u32, second: u32) {
    let Some(i) = actor() else { return };
    if i < 2 {
        let order = if i == 0 { first } else { second };
        out.set(i, load(words, i, order));
        fence_of(order);
        store(words, 1 - i, order);
    }
}

/// Two writes by each of two threads, in opposite orders (2+2W). Results: the last values.
#[kernel(threads = 128)]
fn opposite_writes(words: GlobalMut<u32>) {
    let Some(i) = actor() else { return };
    if i < 2 {
        words.store_relaxed(i, 1);
        words.store_relaxed(1 - i, 2);
    }
}

/// Independent reads of independent writes: threads 0 and 1 write, threads 2 and 3 read both words in opposite orders.
#[kernel(threads = 128)]
fn independent_reads(words: GlobalMut<u32>, out: GlobalMut<u32>, first: u32, second: u32) {
    match actor() {
        Some(i @ 0..=1) => words.store_relaxed(i, 1),
        Some(i) => {
            let order = if i == 2 { first } else { second };
            out.set(2 * (i - 2), load(words, i - 2, order));
            fence_of(order);
            out.set(2 * (i - 2) + 1, load(words, 3 - i, order));
        }
        None => (),
    }
}

/// Coherence of one word: thread 0 writes 1 and 2, thread 1 reads twice.
#[kernel(threads = 128)]
fn coherence(words: GlobalMut<u32>, out: GlobalMut<u32>) {
    match actor() {
        Some(0) => {
            words.store_relaxed(0, 1);
            words.store_relaxed(0, 2);
        }
        Some(1) => {
            out.set(0, words.load_relaxed(0));
            out.set(1, words.load_relaxed(0));
        }
        _ => (),
    }
}

/// Causality through a third thread: thread 0 writes x, thread 1 reads x and releases y, thread 2 acquires y and reads x.
#[kernel(threads = 128)]
fn causality(words: GlobalMut<u32>, out: GlobalMut<u32>) {
    match actor() {
        Some(0) => words.store_relaxed(0, 1),
        Some(1) => {
            let x = words.load_relaxed(0);
            words.store_release(1, x);
        }
        Some(2) => {
            out.set(0, words.load_acquire(1));
            out.set(1, words.load_relaxed(0));
        }
        _ => (),
    }
}

/// A release that a chain of read-modify-writes of other threads passes on: thread 0 publishes x with y += 1, thread 1 adds to y
/// without an order, thread 2 acquires y.
#[kernel(threads = 128)]
fn release_sequence(words: GlobalMut<u32>, out: GlobalMut<u32>, update: u32) {
    match actor() {
        Some(0) => {
            words.set(0, 1); // chain_write
            words.release_add(1, 1);
        }
        Some(1) => {
            if update == 1 {
                words.fetch_add(1, 2);
            } else if words.load_relaxed(1) == 1 {
                words.store_relaxed(1, 3);
            }
        }
        Some(2) => {
            let y = words.load_acquire(1);
            out.set(0, y);
            out.set(1, if y == 3 { words.at(0) } else { 1 }); // chain_read
        }
        _ => (),
    }
}

/// Number of schedules of each test.
const SEEDS: u64 = 400;

/// Runs a test in each schedule, and returns its results, or the lines of the race.
fn outcomes<const N: usize>(
    between_blocks: bool,
    test: impl Fn(GlobalMut<u32>, GlobalMut<u32>) -> Launch,
) -> Result<BTreeSet<[u32; N]>, [Option<u32>; 2]> {
    let mut results = BTreeSet::new();
    for seed in 0..SEEDS {
        let mut memory = Memory::new();
        let (words, out) = (memory.zeroed("words", 2), memory.zeroed("out", N));
        let blocks = if between_blocks { 4 } else { 1 };
        match test(words, out).emulate_scheduled(&mut memory, [blocks, 1, 1], 0, Schedule::new(seed)) {
            Ok(()) => results.insert(memory.read(out).try_into().unwrap()),
            Err(report) if report.fault == Fault::DataRace => return Err(report.lines()),
            Err(report) => panic!("{report}"),
        };
    }
    Ok(results)
}

/// Calls `check` with each pair of orders, between blocks and in a block.
fn for_all(mut check: impl FnMut(bool, Order, Order)) {
    for between_blocks in [true, false] {
        for first in ORDERS {
            for second in ORDERS {
                check(between_blocks, first, second);
            }
        }
    }
}

/// The flag is seen, but not the message.
#[test]
fn message_passing_needs_a_release_and_an_acquire() {
    for_all(|between_blocks, writer, reader| {
        let found =
            outcomes(between_blocks, |words, out| message_passing(words, out, writer as u32, reader as u32)).unwrap();
        let forbidden = writer.orders(between_blocks) && reader.orders(between_blocks);
        assert_eq!(
            found.contains(&[1, 0]),
            !forbidden,
            "{writer:?} {reader:?} between blocks: {between_blocks}: {found:?}"
        );
        assert!([[0, 0], [0, 1], [1, 1]].iter().all(|result| found.contains(result)), "{found:?}");
    });
}

#[test]
fn data_without_a_release_or_an_acquire_is_a_race() {
    for_all(|between_blocks, writer, reader| {
        let found = outcomes::<2>(between_blocks, |words, out| {
            message_passing_of_data(words, out, writer as u32, reader as u32)
        });
        let ordered = writer.orders(between_blocks) && reader.orders(between_blocks);
        match found {
            Ok(results) => {
                assert!(ordered && results == BTreeSet::from([[0, 1], [1, 1]]), "{writer:?} {reader:?} {results:?}");
            }
            Err(lines) => {
                assert!(!ordered, "{writer:?} {reader:?} between blocks: {between_blocks}");
                let [write, read] = ["data_write", "data_read"].map(line);
                assert!([[Some(read), Some(write)], [Some(write), Some(read)]].contains(&lines), "{lines:?}");
            }
        }
    });
}

/// Neither thread sees the other's write.
#[test]
fn store_buffering_needs_sequentially_consistent_fences() {
    for_all(|between_blocks, first, second| {
        let found =
            outcomes(between_blocks, |words, out| store_buffering(words, out, first as u32, second as u32)).unwrap();
        let forbidden = first.is_sequential(between_blocks) && second.is_sequential(between_blocks);
        assert_eq!(
            found.contains(&[0, 0]),
            !forbidden,
            "{first:?} {second:?} between blocks: {between_blocks}: {found:?}"
        );
        assert!([[0, 1], [1, 0], [1, 1]].iter().all(|result| found.contains(result)), "{found:?}");
    });
}

/// Both threads see a write that follows their read. PTX allows it without an order; the emulator runs reads in order and never shows it.
#[test]
fn load_buffering_is_never_shown() {
    for_all(|between_blocks, first, second| {
        let found =
            outcomes(between_blocks, |words, out| load_buffering(words, out, first as u32, second as u32)).unwrap();
        assert_eq!(found, BTreeSet::from([[0, 0], [0, 1], [1, 0]]), "{first:?} {second:?}");
    });
}

/// Both first writes are the last ones of their words. PTX allows it without an order; the emulator keeps writes in the order in which
/// they run, and never shows it.
#[test]
fn reordered_writes_are_never_shown() {
    for between_blocks in [true, false] {
        for seed in 0..SEEDS {
            let mut memory = Memory::new();
            let words = memory.zeroed("words", 2);
            let blocks = if between_blocks { 4 } else { 1 };
            let launch = opposite_writes(words);
            launch.emulate_scheduled(&mut memory, [blocks, 1, 1], 0, Schedule::new(seed)).unwrap();
            assert_ne!(memory.read(words), [1, 1], "seed {seed}");
        }
    }
}

/// The readers see the writes in opposite orders.
#[test]
fn independent_reads_need_sequentially_consistent_fences() {
    for_all(|between_blocks, first, second| {
        let found: BTreeSet<[u32; 4]> =
            outcomes(between_blocks, |words, out| independent_reads(words, out, first as u32, second as u32)).unwrap();
        let forbidden = first.is_sequential(between_blocks) && second.is_sequential(between_blocks);
        let opposite = [1, 0, 1, 0];
        assert_eq!(found.contains(&opposite), !forbidden, "{first:?} {second:?} between blocks: {between_blocks}");
        assert!(found.contains(&[1, 1, 1, 1]) && found.contains(&[0, 0, 0, 0]), "{found:?}");
    });
}

#[test]
fn one_word_is_coherent() {
    for between_blocks in [true, false] {
        let found = outcomes(between_blocks, coherence).unwrap();
        let allowed = [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]];
        assert_eq!(found, BTreeSet::from(allowed));
    }
}

#[test]
fn order_passes_through_a_third_thread() {
    for between_blocks in [true, false] {
        let found = outcomes(between_blocks, causality).unwrap();
        assert!(found.contains(&[1, 1]) && found.contains(&[0, 0]) && found.contains(&[0, 1]), "{found:?}");
        assert!(!found.contains(&[1, 0]), "{found:?}");
    }
}

#[test]
fn updates_pass_on_a_release_and_stores_do_not() {
    for between_blocks in [true, false] {
        let found = outcomes::<2>(between_blocks, |words, out| release_sequence(words, out, 1)).unwrap();
        assert!(found.contains(&[3, 1]) && found.iter().all(|result| result[1] == 1), "{found:?}");
        let lines = outcomes::<2>(between_blocks, |words, out| release_sequence(words, out, 0)).unwrap_err();
        assert!(lines.contains(&Some(line("chain_write"))) && lines.contains(&Some(line("chain_read"))), "{lines:?}");
    }
}

/// Returns the number of the line of this file that ends with `// <mark>`.
fn line(mark: &str) -> u32 {
    let end = format!("// {mark}");
    let mut found = include_str!("litmus.rs").lines().enumerate().filter(|(_, l)| l.ends_with(&end));
    found.next().unwrap_or_else(|| panic!("expected a line marked {mark}")).0 as u32 + 1
}
