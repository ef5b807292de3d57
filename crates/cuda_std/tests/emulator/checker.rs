//! Kernels with deliberate faults: the checker must report the kind of each fault and its source lines.

use cuda_std::emulate::{Fault, Memory, Report, Schedule};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{
    Element, Global, GlobalMut, Packet, SharedArray, SharedTile, async_copy, bf16, fence, kernel, thread, warp,
};

/// Returns the number of the line of this file that ends with `// <mark>`.
fn line(mark: &str) -> u32 {
    let end = format!("// {mark}");
    let found: Vec<_> = include_str!("checker.rs").lines().enumerate().filter(|(_, l)| l.ends_with(&end)).collect();
    assert_eq!(found.len(), 1, "expected one line marked {mark}");
    found[0].0 as u32 + 1
}

/// Asserts the fault and the marked source lines of a report.
#[track_caller]
fn expect(report: &Report, fault: Fault, at: &str, other: Option<&str>) {
    println!("{report}\n");
    assert_eq!(report.fault, fault, "{report}");
    assert_eq!(report.lines(), [Some(line(at)), other.map(line)], "{report}");
    for site in [report.at, report.other].into_iter().flatten() {
        let text = format!("{}:{}", site.file(), site.line());
        assert!(site.file().ends_with("checker.rs") && report.to_string().contains(&text), "{report}");
    }
}

/// Runs a kernel over an output of 1024 words and an input of 1024 floats and returns its fault.
fn fault_of(kernel: impl Fn(GlobalMut<u32>, Global<f32>) -> Launch) -> Report {
    let mut memory = Memory::new();
    let (out, inp) = (memory.output("out", 1024), memory.input("inp", &[1.0; 1024]));
    kernel(out, inp).emulate_checked(&mut memory, [2, 1, 1], 4096).unwrap_err()
}

fn shared() -> SharedArray<f32> {
    Layout::new().array(1024)
}

#[kernel(threads = 64)]
fn missing_barrier(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    shared().set(t, inp.at(t)); // missing_barrier.write
    shared().at(63 - t); // missing_barrier.read
}

#[test]
fn read_after_write_without_barrier_is_a_data_race() {
    // The first warp reads an uninitialized location, which the second warp writes later.
    expect(
        &fault_of(|_, inp| missing_barrier(inp)),
        Fault::DataRace,
        "missing_barrier.write",
        Some("missing_barrier.read"),
    );
}

#[kernel(threads = 64)]
fn read_then_write(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    shared().set(t, inp.at(t));
    thread::sync_threads();
    let x = shared().at(t ^ 32); // read_then_write.read
    shared().set(t, x); // read_then_write.write
}

#[test]
fn write_after_read_without_barrier_is_a_data_race() {
    let report = fault_of(|_, inp| read_then_write(inp));
    expect(&report, Fault::DataRace, "read_then_write.read", Some("read_then_write.write"));
    assert_eq!((report.block, report.thread), ([0, 0, 0], Some(0)));
    assert!(report.to_string().contains("shared memory + 128"), "{report}");
}

#[kernel(threads = 64)]
fn two_writers() {
    shared().set(thread::thread_idx_x() as usize / 2, 0.0); // two_writers
}

#[test]
fn two_writes_to_one_word_are_a_data_race() {
    expect(&fault_of(|_, _| two_writers()), Fault::DataRace, "two_writers", Some("two_writers"));
}

#[kernel(threads = 32)]
fn missing_warp_sync(inp: Global<f32>) {
    let lane = warp::lane() as usize;
    shared().set(lane, inp.at(lane));
    warp::sync();
    let sum = shared().at(0) + shared().at(lane ^ 1); // missing_warp_sync.read
    shared().set(lane, warp::sum(sum)); // missing_warp_sync.write
}

#[test]
fn shuffles_do_not_order_memory() {
    expect(
        &fault_of(|_, inp| missing_warp_sync(inp)),
        Fault::DataRace,
        "missing_warp_sync.write",
        Some("missing_warp_sync.read"),
    );
}

#[kernel(threads = 64)]
fn out_of_bounds_read(inp: Global<f32>) {
    inp.at(thread::index_1d() * 10); // out_of_bounds_read
}

#[test]
fn out_of_bounds_read_is_reported() {
    let report = fault_of(|_, inp| out_of_bounds_read(inp));
    expect(&report, Fault::OutOfBounds, "out_of_bounds_read", None);
    assert_eq!((report.kernel, report.block, report.thread), ("out_of_bounds_read", [1, 0, 0], Some(39)));
    assert!(report.to_string().contains("inp + 4120 (index 1030), which has 4096 bytes (1024 elements)"), "{report}");
}

#[kernel(threads = 64)]
fn before_the_start(out: GlobalMut<u32>) {
    out.set(0usize.wrapping_sub(1), 0); // before_the_start
}

#[test]
fn write_before_the_start_of_a_buffer_is_reported() {
    let report = fault_of(|out, _| before_the_start(out));
    expect(&report, Fault::OutOfBounds, "before_the_start", None);
    assert!(report.to_string().contains("out - 4 (index -1), which"), "{report}");
}

#[kernel(threads = 64)]
fn straddles_the_end(inp: Global<f32>) {
    inp.packet(1022); // straddles_the_end
}

#[test]
fn packet_that_crosses_the_end_of_a_buffer_is_reported() {
    expect(&fault_of(|_, inp| straddles_the_end(inp)), Fault::OutOfBounds, "straddles_the_end", None);
}

/// The launch provides 4096 bytes of shared memory, fewer than this array has.
#[kernel(threads = 64)]
fn outside_shared() {
    let array: SharedArray<f32> = Layout::new().array(1028);
    array.set_packet(1024, Packet::zero()); // outside_shared
}

#[test]
fn out_of_bounds_access_to_shared_memory_is_reported() {
    let report = fault_of(|_, _| outside_shared());
    expect(&report, Fault::OutOfBounds, "outside_shared", None);
    assert!(report.to_string().contains("shared memory + 4096, which has 4096 bytes"), "{report}");
}

#[kernel(threads = 64)]
fn misaligned_packet(inp: Global<f32>) {
    inp.packet_streaming(2); // misaligned_packet
}

#[test]
fn misaligned_packet_is_reported() {
    expect(&fault_of(|_, inp| misaligned_packet(inp)), Fault::Misaligned, "misaligned_packet", None);
}

#[kernel(threads = 32)]
fn uninitialized_fragment() {
    let tile: SharedTile<bf16, 16, 16> = Layout::new().tile();
    let lane = warp::lane() as usize;
    if lane < 31 {
        tile.set_packet(lane / 2, lane % 2 * 8, Packet::zero());
    }
    warp::sync();
    tile.a(0, 0); // uninitialized_fragment
}

#[kernel(threads = 32)]
fn uninitialized_f32_fragment() {
    let tile: SharedTile<f32, 16, 16> = Layout::new().tile();
    let lane = warp::lane() as usize;
    for i in (lane..255).step_by(32) {
        tile.set(i / 16, i % 16, 0.0);
    }
    warp::sync();
    tile.b_transposed(0, 0); // uninitialized_f32_fragment
}

#[kernel(threads = 64)]
fn uninitialized_global(out: GlobalMut<u32>) {
    out.atomic_add(5, 1); // uninitialized_global
}

#[test]
fn uninitialized_reads_are_reported() {
    expect(&fault_of(|_, _| uninitialized_fragment()), Fault::Uninitialized, "uninitialized_fragment", None);
    expect(&fault_of(|_, _| uninitialized_f32_fragment()), Fault::Uninitialized, "uninitialized_f32_fragment", None);
    expect(&fault_of(|out, _| uninitialized_global(out)), Fault::Uninitialized, "uninitialized_global", None);
}

#[kernel(threads = 64)]
fn write_to_input(inp: Global<f32>) {
    // SAFETY: a view is an address. The write through this one is the deliberate fault.
    let view: GlobalMut<f32> = unsafe { std::mem::transmute(inp) };
    view.set(0, 0.0); // write_to_input
}

#[test]
fn write_to_an_input_is_reported() {
    expect(&fault_of(|_, inp| write_to_input(inp)), Fault::ReadOnly, "write_to_input", None);
}

#[kernel(threads = 32)]
fn early_async_read(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    shared().copy_packet_async(4 * t, inp, 4 * t, true); // early_async_read.copy
    async_copy::commit();
    shared().copy_packet_async(4 * t + 128, inp, 4 * t, true);
    async_copy::commit();
    async_copy::wait::<2>();
    warp::sync();
    shared().at(4 * t); // early_async_read.read
}

#[test]
fn read_before_the_wait_for_an_async_copy_is_reported() {
    expect(
        &fault_of(|_, inp| early_async_read(inp)),
        Fault::AsyncCopy,
        "early_async_read.read",
        Some("early_async_read.copy"),
    );
}

#[kernel(threads = 32)]
fn async_without_barrier(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    shared().copy_packet_async(4 * t, inp, 4 * t, true); // async_without_barrier.copy
    async_copy::commit();
    async_copy::wait::<0>();
    if t != 31 {
        shared().at(4 * t);
    }
    warp::ballot(true);
    shared().at(4 * (t ^ 1)); // async_without_barrier.read
}

#[test]
fn async_copy_read_by_another_thread_needs_a_barrier() {
    let report = fault_of(|_, inp| async_without_barrier(inp));
    expect(&report, Fault::DataRace, "async_without_barrier.read", Some("async_without_barrier.copy"));
}

#[kernel(threads = 32)]
fn async_over_reads(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    shared().set(t, 1.0);
    warp::sync();
    shared().at(t ^ 4); // async_over_reads.read
    warp::ballot(true);
    shared().copy_packet_async(t / 8 * 4, inp, 0, t.is_multiple_of(8)); // async_over_reads.copy
}

#[test]
fn async_copy_over_data_being_read_is_a_data_race() {
    let report = fault_of(|_, inp| async_over_reads(inp));
    expect(&report, Fault::DataRace, "async_over_reads.copy", Some("async_over_reads.read"));
}

#[kernel(threads = 32)]
fn async_never_waited(inp: Global<f32>) {
    shared().copy_packet_async(4 * thread::thread_idx_x() as usize, inp, 0, true); // async_never_waited
    async_copy::commit();
    async_copy::wait::<1>();
}

#[test]
fn async_copy_without_a_wait_is_reported() {
    let report = fault_of(|_, inp| async_never_waited(inp));
    expect(&report, Fault::AsyncCopy, "async_never_waited", None);
    assert_eq!(report.thread, Some(0));
}

/// The first warp loads fragments from a tile that the second warp refills. It releases the tile before the load.
#[kernel(threads = 64)]
fn released_early() {
    let tile: SharedTile<bf16, 16, 16> = Layout::new().tile();
    let lane = warp::lane() as usize;
    if thread::thread_idx_x() < 32 {
        thread::sync_named(1, 64);
        thread::arrive_named(2, 64);
        tile.a(0, 0); // released_early.ldmatrix
    } else {
        tile.set_packet(lane / 2, lane % 2 * 8, Packet::zero());
        thread::arrive_named(1, 64);
        thread::sync_named(2, 64);
        tile.set_packet(lane / 2, lane % 2 * 8, Packet::zero()); // released_early.refill
    }
}

#[test]
fn stage_released_before_ldmatrix_is_a_data_race() {
    let report = fault_of(|_, _| released_early());
    expect(&report, Fault::DataRace, "released_early.refill", Some("released_early.ldmatrix"));
    assert!(report.to_string().contains("thread 32: data race: write of 16 bytes at shared memory + 0"), "{report}");
}

/// Three warps read a word. The fourth warp then writes it after a barrier with only two of them.
#[kernel(threads = 128)]
fn one_reader_too_many() {
    let t = thread::thread_idx_x();
    if t == 0 {
        shared().set(0, 1.0);
    }
    thread::sync_threads();
    if t < 96 {
        shared().at(0); // one_reader_too_many.read
    }
    if t >= 32 {
        thread::sync_named(1, 96);
    }
    if t == 96 {
        shared().set(0, 2.0); // one_reader_too_many.write
    }
}

#[test]
fn write_must_be_ordered_after_every_reader() {
    let report = fault_of(|_, _| one_reader_too_many());
    expect(&report, Fault::DataRace, "one_reader_too_many.write", Some("one_reader_too_many.read"));
    assert!(report.to_string().contains("and read by thread 31"), "{report}");
}

#[kernel(threads = 32)]
fn blocks_write_one_word(out: GlobalMut<u32>) {
    if warp::lane() == 0 {
        out.set(7, thread::block_idx_x()); // blocks_write_one_word
    }
}

#[kernel(threads = 32)]
fn blocks_without_fence(out: GlobalMut<u32>) {
    let (b, lane) = (thread::block_idx_x() as usize, warp::lane());
    if lane == 0 {
        out.set(b, 1); // blocks_without_fence.write
        if b == 1 {
            out.at(0); // blocks_without_fence.read
        }
    }
}

#[kernel(threads = 32)]
fn plain_write_among_atomics(out: GlobalMut<u32>) {
    if warp::lane() == 0 {
        out.set(0, 0); // plain_write_among_atomics.write
    }
    warp::ballot(true);
    out.atomic_add(0, 1); // plain_write_among_atomics.add
}

#[test]
fn unordered_accesses_of_two_blocks_are_data_races() {
    expect(
        &fault_of(|out, _| blocks_write_one_word(out)),
        Fault::DataRace,
        "blocks_write_one_word",
        Some("blocks_write_one_word"),
    );
    let report = fault_of(|out, _| blocks_without_fence(out));
    expect(&report, Fault::DataRace, "blocks_without_fence.read", Some("blocks_without_fence.write"));
    let report = fault_of(|out, _| plain_write_among_atomics(out));
    expect(&report, Fault::DataRace, "plain_write_among_atomics.add", Some("plain_write_among_atomics.write"));
}

#[kernel(threads = 64)]
fn consumer_too_early(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    if t < 32 {
        shared().set(t, inp.at(t));
        thread::arrive_named(1, 64);
        shared().set(t, 2.0); // named.write_after_arrival
    } else {
        thread::sync_named(1, 64);
        shared().at(t - 32); // named.read
    }
}

#[test]
fn arrival_orders_only_earlier_accesses() {
    expect(
        &fault_of(|_, inp| consumer_too_early(inp)),
        Fault::DataRace,
        "named.read",
        Some("named.write_after_arrival"),
    );
}

#[kernel(threads = 128)]
fn divergent_barrier() {
    let t = thread::thread_idx_x();
    if t < 64 {
        thread::sync_threads(); // divergent_barrier
    } else if t < 96 {
        thread::sync_named(3, 64); // divergent_barrier.named
    }
}

#[test]
fn barrier_divergence_is_a_deadlock() {
    let report = fault_of(|_, _| divergent_barrier());
    expect(&report, Fault::Deadlock, "divergent_barrier", Some("divergent_barrier.named"));
    let text = report.to_string();
    for part in [
        "block (0, 0, 0): deadlock",
        "threads 0-63: waiting in sync_threads",
        "threads 64-95: waiting in sync_named(3, 64)",
        "threads 96-127: finished",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[kernel(threads = 128)]
fn warps_return_before_a_barrier(out: GlobalMut<f32>, returning: u32, late: u32) {
    let t = thread::thread_idx_x();
    if t / 32 == returning {
        return;
    }
    shared().set(t as usize, t as f32);
    if t / 32 == late {
        // A warp that returns after the others have arrived.
        return;
    }
    thread::sync_threads();
    thread::sync_threads();
    let other = (t as usize + 32) % 128;
    if other / 32 != returning as usize && other / 32 != late as usize {
        out.set(t as usize, shared().at(other));
    }
}

/// As on a GPU, `sync_threads` waits only for threads that have not returned.
#[test]
fn a_warp_that_has_returned_is_not_waited_for() {
    for (returning, late, sum) in [(3, 9, 32 + 33 + 64 + 65), (0, 9, 64 + 65 + 96 + 97), (0, 3, 64 + 65), (9, 9, 0)] {
        let mut memory = Memory::new();
        let out = memory.zeroed("out", 128);
        let launch = warps_return_before_a_barrier(out, returning, late);
        launch.emulate_checked(&mut memory, [1, 1, 1], 4096).unwrap_or_else(|report| panic!("{report}"));
        let values: Vec<f32> = memory.read(out);
        if sum > 0 {
            // Two values of each warp that was read.
            let pairs: f32 = (0..4).flat_map(|warp| [values[32 * warp], values[32 * warp + 1]]).sum();
            assert_eq!(pairs as u32, sum, "{returning} {late}");
        }
    }
}

#[kernel(threads = 64)]
fn too_few_arrivals() {
    if thread::thread_idx_x() < 32 {
        thread::arrive_named(5, 96);
    } else {
        thread::sync_named(5, 96); // too_few_arrivals
    }
}

#[test]
fn named_barrier_with_too_few_arrivals_is_a_deadlock() {
    let report = fault_of(|_, _| too_few_arrivals());
    expect(&report, Fault::Deadlock, "too_few_arrivals", None);
    let text = report.to_string();
    for part in
        ["threads 32-63: waiting in sync_named(5, 96)", "32 of 96 threads have not arrived", "threads 0-31: finished"]
    {
        assert!(text.contains(part), "{text}");
    }
}

#[kernel(threads = 64)]
fn polls() {
    shared().set(0, 0.0);
    while shared().at(0) == 0.0 {} // polls
}

#[kernel(threads = 64)]
fn polls_between_barriers() {
    if thread::thread_idx_x() == 0 {
        shared().set(0, 0.0);
    }
    loop {
        thread::sync_threads(); // polls_between_barriers
        if shared().at(0) != 0.0 {
            return;
        }
    }
}

#[test]
fn polling_is_a_livelock() {
    let report = fault_of(|_, _| polls());
    expect(&report, Fault::Livelock, "polls", None);
    assert!(report.to_string().contains("thread 0: livelock: the thread polls shared memory + 0"), "{report}");
    expect(&fault_of(|_, _| polls_between_barriers()), Fault::Livelock, "polls_between_barriers", None);
}

#[kernel(threads = 64)]
fn missing_lane() {
    if thread::thread_idx_x() != 40 {
        warp::sum(1.0); // missing_lane
    }
}

#[kernel(threads = 64)]
fn lanes_apart() {
    if warp::lane() < 16 {
        warp::any(true); // lanes_apart.vote
    } else {
        warp::sync(); // lanes_apart.sync
    }
}

#[test]
fn warp_wide_operations_require_all_lanes() {
    let report = fault_of(|_, _| missing_lane());
    expect(&report, Fault::Deadlock, "missing_lane", None);
    assert!(report.to_string().contains("threads 32-39, 41-63"), "{report}");
    expect(&fault_of(|_, _| lanes_apart()), Fault::Divergence, "lanes_apart.sync", Some("lanes_apart.vote"));
}

#[kernel(threads = 64)]
fn barrier_of_two_sizes() {
    if thread::thread_idx_x() < 32 {
        thread::sync_named(2, 64); // barrier_of_two_sizes.64
    } else {
        thread::sync_named(2, 96); // barrier_of_two_sizes.96
    }
}

#[kernel(threads = 64)]
fn no_such_barrier() {
    thread::sync_named(16, 64); // no_such_barrier
}

#[kernel(threads = 48)]
fn no_such_lane() {
    warp::shuffle_xor(0u32, 16); // no_such_lane
}

#[test]
fn invalid_operands_are_reported() {
    let report = fault_of(|_, _| barrier_of_two_sizes());
    expect(&report, Fault::Operand, "barrier_of_two_sizes.96", Some("barrier_of_two_sizes.64"));
    expect(&fault_of(|_, _| no_such_barrier()), Fault::Operand, "no_such_barrier", None);
    expect(&fault_of(|_, _| no_such_lane()), Fault::Operand, "no_such_lane", None);
}

#[kernel(threads = 64)]
fn panics() {
    let t = thread::thread_idx_x();
    assert!(t < 50, "no thread {t}"); // panics
    thread::sync_threads();
}

#[test]
fn panic_is_reported_with_its_line() {
    let report = fault_of(|_, _| panics());
    assert_eq!((report.fault, report.thread), (Fault::Panic, Some(50)));
    let end = format!("thread 50: panicked at {}:{}:5: no thread 50", file!(), line("panics"));
    assert!(report.to_string().ends_with(&end), "{report}");
}

/// A kernel without faults that sums rows of 128 floats. It uses asynchronous copies in two stages, named barriers
/// between warps, a last block that combines the results of the others, and a tile that one warp reuses.
#[kernel(threads = 64)]
fn valid(out: GlobalMut<f32>, counter: GlobalMut<u32>, inp: Global<f32>) {
    let mut layout = Layout::new();
    let stages: SharedArray<f32> = layout.array(256);
    let last: SharedArray<u32> = layout.array(1);
    let tile: SharedTile<bf16, 16, 16> = layout.tile();
    let (t, b) = (thread::thread_idx_x() as usize, thread::block_idx_x() as usize);
    let mut sum = 0.0;
    if t < 32 {
        let copy = |stage: usize| {
            stages.copy_packet_async(stage % 2 * 128 + 4 * t, inp, (b * 4 + stage) * 128 + 4 * t, stage < 3);
            async_copy::commit();
        };
        copy(0);
        for stage in 0..4 {
            copy(stage + 1);
            async_copy::wait::<1>();
            thread::arrive_named(1 + stage as u32 % 2, 64);
            thread::sync_named(3, 64);
        }
        async_copy::wait::<0>();
        for i in 0..4 {
            tile.set(t / 2, t % 2 * 8 + 2 * i, bf16::from_f32(1.0));
            tile.set(t / 2, t % 2 * 8 + 2 * i + 1, bf16::from_f32(1.0));
        }
        warp::sync();
        tile.a(0, 0);
        tile.set_packet(t / 2, t % 2 * 8, Packet::zero());
    } else {
        for stage in 0..4 {
            thread::sync_named(1 + stage % 2, 64);
            for i in 0..4 {
                sum += stages.at(stage as usize % 2 * 128 + (t - 32) * 4 + i);
            }
            thread::sync_named(3, 64);
        }
        sum = warp::sum(sum);
    }
    if t == 32 {
        out.set(b, sum);
        fence::device();
        last.set(0, counter.atomic_add(0, 1));
    }
    thread::sync_threads();
    if last.at(0) == thread::grid_dim_x() - 1 {
        fence::device();
        if t == 0 {
            let total = (0..thread::grid_dim_x() as usize).fold(0.0, |sum, i| sum + out.at(i));
            out.set(thread::grid_dim_x() as usize, total);
        }
    }
}

#[test]
fn valid_kernel_passes() {
    let mut memory = Memory::new();
    let inp: Vec<f32> = (0..3 * 512).map(|i| (i % 7) as f32).collect();
    let (out, counter, view) = (memory.output("out", 4), memory.buffer("counter", &[0]), memory.input("inp", &inp));
    valid(out, counter, view).emulate_checked(&mut memory, [3, 1, 1], 4096).unwrap();
    let sums: Vec<f32> = inp.chunks(512).map(|row| row[..384].iter().sum()).collect();
    assert_eq!(memory.read(out), [sums[0], sums[1], sums[2], sums.iter().sum()]);
}

#[test]
#[should_panic(expected = "out + 12 was never written")]
fn host_read_of_an_unwritten_output_panics() {
    let mut memory = Memory::new();
    let out = memory.output::<u32>("out", 4);
    #[kernel(threads = 32)]
    fn writes_three(out: GlobalMut<u32>) {
        if warp::lane() < 3 {
            out.set(warp::lane() as usize, 0);
        }
    }
    writes_three(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    memory.read(out);
}

#[test]
fn host_accesses_are_checked() {
    let mut memory = Memory::new();
    let (out, inp) = (memory.output::<u32>("out", 4), memory.input("inp", &[1u32, 2, 3]));
    memory.write(out.skip(1), &[7, 8]).unwrap();
    assert_eq!(memory.slice(out.skip(1).reader(), 2).unwrap(), [7, 8]);
    assert_eq!(memory.slice(inp.skip(1), 2).unwrap(), [2, 3]);
    let refusals = [
        (memory.slice(out.reader(), 2).unwrap_err(), "out + 0 was never written"),
        (memory.slice(out.skip(1).reader(), 3).unwrap_err(), "out + 12 was never written"),
        (memory.slice(inp, 4).unwrap_err(), "16 bytes at inp + 0, which has 12 bytes"),
        (memory.write(out.skip(3), &[7, 8]).unwrap_err(), "8 bytes at out + 12, which has 16 bytes"),
        (memory.slice(inp.skip(4), 1).unwrap_err(), "which is in no buffer"),
    ];
    for (error, text) in refusals {
        assert!(error.to_string().ends_with(text), "{error}");
    }
    let zeroed = memory.zeroed::<f32>("zeroed", 3);
    assert_eq!(memory.read(zeroed), [0.0; 3]);
}

#[test]
fn invalid_launches_are_reported() {
    let launch = no_such_barrier();
    for (grid, shared, text) in [([1, 0, 1], 0, "grid"), ([1, 1, 65536], 0, "65535"), ([1; 3], 300 << 10, "307200")] {
        let report = launch.emulate_checked(&mut Memory::new(), grid, shared).unwrap_err();
        assert!(report.fault == Fault::Launch && report.to_string().contains(text), "{report}");
    }
}

/// The scores (32 floats) and the counts (32 words) that follow them in shared memory.
fn two_arrays() -> (SharedArray<f32>, SharedArray<u32>) {
    let mut layout = Layout::new();
    let scores = layout.array(32).named("scores"); // two_arrays.scores
    (scores, layout.array(32))
}

#[kernel(threads = 32)]
fn beyond_the_first_array(inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    let (scores, counts) = two_arrays();
    counts.set(t, 1);
    scores.set(t + 1, inp.at(t)); // beyond_the_first_array
}

#[test]
fn access_beyond_one_array_into_the_next_is_reported_with_its_name_and_index() {
    let report = fault_of(|_, inp| beyond_the_first_array(inp));
    expect(&report, Fault::OutOfBounds, "beyond_the_first_array", None);
    assert_eq!((report.kernel, report.thread), ("beyond_the_first_array", Some(31)));
    let reserved = format!("checker.rs:{}:25", line("two_arrays.scores"));
    let expected = "index 32 of scores, a SharedArray of 32 elements reserved at";
    let text = report.to_string();
    assert!(text.contains(expected) && text.contains(&reserved), "{text}");
    let column = format!("checker.rs:{}:12)", line("beyond_the_first_array"));
    assert!(text.contains(&column), "{text}");
}

#[kernel(threads = 32)]
fn before_the_second_array() {
    let (_, counts) = two_arrays();
    counts.skip(4).set(0usize.wrapping_sub(5), 0); // before_the_second_array
}

#[test]
fn access_before_one_array_into_the_previous_is_reported() {
    let report = fault_of(|_, _| before_the_second_array());
    expect(&report, Fault::OutOfBounds, "before_the_second_array", None);
    assert!(report.to_string().contains("index -1 of a SharedArray of 32 elements"), "{report}");
}

#[kernel(threads = 32)]
fn in_the_padding_of_a_tile() {
    let tile: SharedTile<f32, 4, 16> = Layout::new().tile();
    tile.set(1, 16, 0.0); // in_the_padding_of_a_tile
}

#[test]
fn access_beyond_a_row_of_a_tile_is_reported() {
    let report = fault_of(|_, _| in_the_padding_of_a_tile());
    expect(&report, Fault::OutOfBounds, "in_the_padding_of_a_tile", None);
    assert!(report.to_string().contains("index (1, 16) of a SharedTile of 4 x 16 elements"), "{report}");
}

#[kernel(threads = 64)]
fn race_on_a_named_array() {
    two_arrays().1.named("counts").set(7, thread::thread_idx_x()); // race_on_a_named_array
}

#[test]
fn races_in_shared_memory_are_reported_with_array_and_index() {
    let report = fault_of(|_, _| race_on_a_named_array());
    expect(&report, Fault::DataRace, "race_on_a_named_array", Some("race_on_a_named_array"));
    assert!(report.to_string().contains("shared memory + 156 (index 7 of counts, a SharedArray of 32"), "{report}");
}

/// Needs about `depth` KiB of stack.
#[inline(never)]
fn recurse(depth: u64) -> u64 {
    let mut frame = [depth; 128];
    std::hint::black_box(&mut frame);
    if depth == 0 { 0 } else { recurse(depth - 1) + frame[5] }
}

#[kernel(threads = 64)]
fn recurses(out: GlobalMut<u64>, depth: u64) {
    let t = thread::thread_idx_x();
    out.set(t as usize, if t == 40 { recurse(depth) } else { 0 });
}

#[test]
fn stack_overflow_of_a_thread_is_reported() {
    let mut memory = Memory::new();
    let out = memory.output("out", 64);
    recurses(out, 50).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    // Twice, to find out whether stacks remain usable.
    for _ in 0..2 {
        let report = recurses(out, 100_000).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
        assert_eq!((report.kernel, report.fault, report.thread), ("recurses", Fault::StackOverflow, Some(40)));
        assert!(report.to_string().contains("stack overflow: the thread needs more than 256 KiB"), "{report}");
    }
    recurses(out, 50).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    assert_eq!(memory.read(out)[40], 50 * 51 / 2);
}

#[kernel(threads = 32)]
fn wild_pointer(address: u64) {
    if thread::thread_idx_x() == 7 {
        let pointer: *const u32 = std::ptr::without_provenance(address as usize);
        // SAFETY: none; the emulator must report the access.
        std::hint::black_box(unsafe { pointer.read_volatile() });
    }
}

#[test]
fn access_through_a_wild_pointer_is_reported() {
    for checked in [true, false] {
        let launch = wild_pointer(64);
        let result = if checked {
            launch.emulate_checked(&mut Memory::new(), [1, 1, 1], 0)
        } else {
            // SAFETY: none, as above.
            unsafe { launch.emulate([1, 1, 1], 0) }
        };
        let report = result.unwrap_err();
        assert_eq!((report.fault, report.thread), (Fault::Segmentation, Some(7)), "{report}");
        assert!(report.to_string().contains("access to address 0x40"), "{report}");
    }
}

#[test]
fn a_view_cannot_be_read_outside_of_a_kernel() {
    let values = [1.0f32; 4];
    let view = Global::new(values.as_ptr());
    for read in [|view: Global<f32>| view.at(0), |view: Global<f32>| view.packet(0).get(0)] {
        let panic = std::panic::catch_unwind(|| read(view)).expect_err("no launch makes the pointer valid");
        let text = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(text.contains("outside a kernel"), "{text}");
    }
}

/// Two threads of different warps write bytes `first` and `second` of a word.
#[kernel(threads = 64)]
fn writes_bytes(out: GlobalMut<u8>, first: u64, second: u64) {
    match thread::thread_idx_x() {
        0 => out.set(first as usize, 1),   // byte_of_first
        32 => out.set(second as usize, 2), // byte_of_second
        _ => (),
    }
}

#[test]
fn races_on_single_bytes_are_reported() {
    let run = |first, second| {
        let mut memory = Memory::new();
        let out = memory.output("out", 40);
        writes_bytes(out, first, second).emulate_checked(&mut memory, [1, 1, 1], 0)
    };
    for byte in 0..18 {
        let report = run(byte, byte).unwrap_err();
        expect(&report, Fault::DataRace, "byte_of_second", Some("byte_of_first"));
        assert!(report.to_string().contains(&format!("out + {byte} ")), "{report}");
        run(byte, byte + 1).unwrap();
        run(byte + 1, byte).unwrap();
    }
}

/// All threads read a word. Then thread 0 writes a byte of it.
#[kernel(threads = 64)]
fn writes_a_byte_of_a_word(words: GlobalMut<u32>, bytes: GlobalMut<u8>, barrier: u32) {
    words.at(0); // word_read
    if barrier == 1 {
        thread::sync_threads();
    }
    if thread::thread_idx_x() == 0 {
        bytes.set(3, 1); // byte_write
    }
}

#[test]
fn a_race_of_a_byte_with_a_word_is_reported() {
    let run = |barrier| {
        let mut memory = Memory::new();
        let words = memory.zeroed::<u32>("words", 8);
        let bytes = GlobalMut::new(words.pointer().cast());
        writes_a_byte_of_a_word(words, bytes, barrier).emulate_checked(&mut memory, [1, 1, 1], 0)
    };
    run(1).unwrap();
    // The second warp has read the word before or after.
    let report = run(0).unwrap_err();
    let lines = [Some(line("byte_write")), Some(line("word_read"))];
    assert!(
        report.fault == Fault::DataRace && (report.lines() == lines || report.lines() == [lines[1], lines[0]]),
        "{report}"
    );
}

/// Thread 32 waits until thread 0 has set a flag: in shared memory, or in global memory if `global` is 1.
#[kernel(threads = 64)]
fn spins(flags: GlobalMut<u32>, out: GlobalMut<u32>, global: u32, sets: u32) {
    let flag: SharedArray<u32> = Layout::new().array(1);
    if thread::thread_idx_x() == 0 {
        flag.set(0, 0);
    }
    thread::sync_threads();
    match thread::thread_idx_x() {
        32 if global == 1 => while flags.load_relaxed(0) == 0 {}, // spin_global
        32 => while flag.fetch_add(0, 0) == 0 {},                 // spin_shared
        0 if sets == 1 => {
            if global == 1 {
                flags.store_relaxed(0, 1);
            } else {
                flag.exchange(0, 1);
            }
        }
        _ => (),
    }
    out.set(thread::thread_idx_x() as usize, 1);
}

#[test]
fn a_warp_may_spin_until_another_warp_sets_a_flag() {
    for global in [0, 1] {
        {
            let run = |sets| {
                let mut memory = Memory::new();
                let (flags, out) = (memory.zeroed("flags", 1), memory.zeroed("out", 64));
                let launch = spins(flags, out, global, sets);
                for seed in 0..50 {
                    launch.emulate_scheduled(&mut memory, [1, 1, 1], 64, Schedule::new(seed))?;
                    memory.write(flags, &[0]).unwrap();
                }
                // SAFETY: the buffers have the sizes that the kernel uses.
                unsafe { launch.emulate([1, 1, 1], 64) }
            };
            run(1).unwrap();
            let report = run(0).unwrap_err();
            assert_eq!(report.fault, Fault::Livelock, "{report}");
            let text = report.to_string();
            assert!(text.contains("threads 32: waiting in a loop that reads the value 0"), "{text}");
            assert!(text.contains(if global == 1 { "flags + 0" } else { "shared memory + 0" }), "{text}");
        }
    }
}

/// Both lanes write, but only lane 0 arrives at the mbarrier. `sync` is 1 if the warp synchronizes before.
#[kernel(threads = 64)]
fn arrives_for_its_warp(out: GlobalMut<u32>, sync: u32) {
    let mut layout = Layout::new();
    let words: SharedArray<u32> = layout.array(32);
    let barriers = layout.mbarriers(1);
    let t = thread::thread_idx_x();
    if t == 0 {
        barriers.at(0).init(1);
    }
    thread::sync_threads();
    if t < 32 {
        words.set(t as usize, t); // lane_write
        if sync == 1 {
            warp::sync();
        }
        if t == 0 {
            barriers.at(0).arrive();
        }
    } else {
        barriers.at(0).wait(0);
        out.set(t as usize - 32, words.at(t as usize - 32)); // lane_read
    }
}

#[test]
fn an_arrival_of_a_lane_orders_only_its_own_accesses() {
    let run = |sync| {
        let mut memory = Memory::new();
        let out = memory.output("out", 32);
        arrives_for_its_warp(out, sync).emulate_checked(&mut memory, [1, 1, 1], 1 << 10)
    };
    run(1).unwrap();
    expect(&run(0).unwrap_err(), Fault::DataRace, "lane_read", Some("lane_write"));
}

/// Thread 0 spins on an atomic of core, which the emulator cannot see.
#[kernel(threads = 64)]
fn spins_on_core_atomics(address: u64) {
    if thread::thread_idx_x() == 5 {
        let pointer: *mut u32 = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the test passes the address of an atomic that lives until the launch ends.
        let flag = unsafe { std::sync::atomic::AtomicU32::from_ptr(pointer) };
        while flag.load(std::sync::atomic::Ordering::Relaxed) == 0 {}
    }
}

#[test]
fn an_endless_loop_on_core_atomics_is_reported() {
    let flag = std::sync::atomic::AtomicU32::new(0);
    let launch = spins_on_core_atomics(flag.as_ptr().expose_provenance() as u64);
    let report = launch.emulate_checked(&mut Memory::new(), [1, 1, 1], 0).unwrap_err();
    assert_eq!((report.fault, report.thread), (Fault::Livelock, Some(5)), "{report}");
    assert!(report.to_string().contains("use the atomics of a view"), "{report}");
}
