//! Checked kernels: asynchronous copies and atomics stay within the buffers of the launch.

use cuda_std::emulate::{Fault, Memory};
use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, SharedTile, async_copy, kernel, thread};

const THREADS: usize = 32;

fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedTile<f32, 8, 16>) {
    (layout.array(4 * THREADS), layout.tile())
}

/// Copies inp (n) to the array and to the tile, with zeros after its end, and both to out (8 T) for T threads.
#[kernel(threads = 32, shared = shared, checked)]
fn copy(out: GlobalSliceMut<f32>, inp: GlobalSlice<f32>, n: u32) {
    let ((array, tile), t) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize);
    let (i, valid) = (4 * t, 4 * t < n as usize);
    array.copy_packet_async(i, inp, i, valid);
    tile.copy_packet_async(t / 4, t % 4 * 4, inp, i, valid);
    async_copy::commit();
    async_copy::wait::<0>();
    for k in 0..4 {
        out.set(i + k, array.at(i + k));
        out.set(4 * THREADS + i + k, tile.at(t / 4, t % 4 * 4 + k));
    }
}

#[test]
fn asynchronous_copies_read_checked_buffers() {
    let values: Vec<f32> = (0..100).map(|i| i as f32 + 1.0).collect();
    let mut memory = Memory::new();
    let (out, inp) = (memory.output_slice("out", 8 * THREADS), memory.input_slice("inp", &values));
    copy(out, inp, 100).emulate(&mut memory, [1, 1, 1]).unwrap();
    let mut expected = values;
    expected.resize(4 * THREADS, 0.0);
    assert_eq!(memory.read_slice(out), [expected.clone(), expected].concat());
}

#[test]
fn an_asynchronous_copy_beyond_the_end_is_reported() {
    let mut memory = Memory::new();
    let (out, inp) = (memory.output_slice("out", 8 * THREADS), memory.input_slice("inp", &[0.0; 100]));
    let report = copy(out, inp, 104).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    let text = report.to_string();
    assert_eq!(report.fault, Fault::OutOfBounds, "{text}");
    assert!(text.contains("inp + 400") && text.contains("checked.rs"), "{text}");
}

/// Replaces the first 4 T elements of `values` by those from 4 on, through the array or (`kind` 1) the tile. Thread 31 copies the elements
/// from `last` on to place `to`. With `kind` 2, the elements are written without a barrier after the copy of another thread.
#[kernel(threads = 32, shared = shared, checked)]
fn move_down(values: GlobalSliceMut<f32>, kind: u32, last: u64, to: u64) {
    let ((array, tile), t) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize);
    let (from, to) = if t == 31 { (last as usize, to as usize) } else { (4 * t + 4, 4 * t) };
    if kind == 1 {
        tile.copy_packet_async(to / 16, to % 16, values, from, true);
    } else {
        array.copy_packet_async(to, values, from, true);
    }
    async_copy::commit();
    async_copy::wait::<0>();
    if kind != 2 {
        thread::sync_threads();
    }
    for k in 4 * t..4 * t + 4 {
        values.set(k, if kind == 1 { tile.at(k / 16, k % 16) } else { array.at(k) });
    }
}

#[test]
fn asynchronous_copies_read_mutable_buffers() {
    let run = |kind, last, to| {
        let values: Vec<f32> = (0..132).map(|i| i as f32).collect();
        let mut memory = Memory::new();
        let buffer = memory.buffer_slice("values", &values);
        let result = move_down(buffer, kind, last, to).emulate(&mut memory, [1, 1, 1]);
        result.map(|()| memory.read_slice(buffer)).map_err(|report| (report.fault, report.to_string()))
    };
    let expected: Vec<f32> = (4..132).chain(128..132).map(|i| i as f32).collect();
    for kind in [0, 1] {
        assert_eq!(run(kind, 128, 124).unwrap(), expected);
        let (fault, text) = run(kind, 132, 124).unwrap_err();
        assert!(fault == Fault::OutOfBounds && text.contains("values + 528"), "{text}");
        let (fault, text) = run(kind, 128, 128).unwrap_err();
        let shape = ["index 128 of a SharedArray", "index (8, 0) of a SharedTile"][kind as usize];
        assert!(fault == Fault::OutOfBounds && text.contains(shape), "{text}");
    }
    let (fault, text) = run(2, 128, 124).unwrap_err();
    assert!(fault == Fault::DataRace && text.contains("checked.rs"), "{text}");
}

/// Applies each atomic operation once per thread, from element `first` on.
#[kernel(threads = 32, checked)]
fn update(words: GlobalSliceMut<u32>, signed: GlobalSliceMut<i32>, wide: GlobalSliceMut<u64>, first: u32) {
    let (t, first) = (thread::thread_idx_x(), first as usize);
    words.fetch_min(first, t + 3);
    words.fetch_max(first + 1, 2 * t);
    words.exchange(first + 2, 7);
    words.compare_exchange(first + 3, 5, 9);
    signed.fetch_min(0, -(t as i32));
    signed.fetch_max(1, t as i32);
    wide.exchange(0, 1 << 40);
    wide.compare_exchange(1, 0, 3 << 40);
}

#[test]
fn atomics_update_checked_buffers() {
    let mut memory = Memory::new();
    let (words, signed) = (memory.buffer_slice("words", &[1000, 0, 0, 5]), memory.buffer_slice("signed", &[0, 0]));
    let wide = memory.zeroed_slice("wide", 2);
    update(words, signed, wide, 0).emulate(&mut memory, [1, 1, 1]).unwrap();
    assert_eq!(memory.read_slice(words), [3, 62, 7, 9]);
    assert_eq!(memory.read_slice(signed), [-31, 31]);
    assert_eq!(memory.read_slice(wide), [1 << 40, 3 << 40]);

    let report = update(words, signed, wide, 1).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    let text = report.to_string();
    assert_eq!(report.fault, Fault::OutOfBounds, "{text}");
    assert!(text.contains("words + 16") && text.contains("checked.rs"), "{text}");
}

/// Reads element `read` of x, and writes element `write` of y and element `shared` of an array.
#[kernel(threads = 32, shared = shared, checked)]
fn access(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, read: u64, write: u64, element: u64) {
    let (array, _) = shared(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        array.named("array").set(element as usize, 1.0);
        y.set(write as usize, x.at(read as usize));
    }
}

/// Copies a packet of `x` from element `read` on.
#[kernel(threads = 32, shared = shared, checked)]
fn copy_packet(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, read: u64) {
    let (array, _) = shared(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        array.copy_packet_async(0, x, read as usize, true);
        async_copy::commit();
        async_copy::wait::<0>();
        y.set(0, array.at(0));
    }
}

#[test]
fn an_asynchronous_copy_reports_the_line_of_the_kernel() {
    let run = |read| {
        let mut memory = Memory::new();
        let (x, y) = (memory.input_slice("x", &[1.0; 64]), memory.buffer_slice("y", &[0.0; 64]));
        copy_packet(y, x, read).emulate(&mut memory, [1, 1, 1])
    };
    run(60).unwrap();
    let report = run(1 << 20).unwrap_err().to_string();
    assert!(report.contains("index 1048576 of x, which has 64 elements") && report.contains("checked.rs:"), "{report}");
}

/// On a GPU, checked views compare the index with the length. The emulator must not accept the address that an index wraps around to, nor
/// an address in another buffer.
#[test]
fn an_index_whose_address_is_valid_is_reported() {
    let run = |read: u64, write: u64, element: u64| {
        let mut memory = Memory::new();
        let (x, y) = (memory.input_slice("x", &[1.0; 64]), memory.buffer_slice("y", &[0.0; 64]));
        access(y, x, read, write, element).emulate(&mut memory, [1, 1, 1]).map_err(|report| {
            assert_eq!(report.fault, Fault::OutOfBounds, "{report}");
            report.to_string()
        })
    };
    assert!(run(63, 63, 127).is_ok());
    for (indices, expected) in [
        ((1 << 62, 0, 0), "index 4611686018427387904 of x, which has 64 elements"),
        ((0, (1 << 63) - 1, 0), "index 9223372036854775807 of y, which has 64 elements"),
        ((0, u64::MAX, 0), "y - 4 (index -1), which has 256 bytes"),
        ((0, 0, 1 << 62), "index 4611686018427387904 of array, a SharedArray of 128 elements"),
    ] {
        let (read, write, element) = indices;
        let report = run(read, write, element).unwrap_err();
        assert!(report.contains(expected), "{report}");
    }
    // The distance of the two buffers, in elements.
    let mut memory = Memory::new();
    let (x, y) = (memory.input("x", &[1.0f32; 64]), memory.buffer("y", &[0.0f32; 64]));
    let distance = (y.pointer().addr() as i64 - x.pointer().addr() as i64) / 4;
    let mut memory = Memory::new();
    let (x, y) = (memory.input_slice("x", &[1.0; 64]), memory.buffer_slice("y", &[0.0; 64]));
    let report = access(y, x, distance as u64, 0, 0).emulate(&mut memory, [1, 1, 1]).unwrap_err().to_string();
    assert!(report.contains("of x, which has 64 elements") || report.contains("in no buffer"), "{report}");
}

/// Copies four values asynchronously and overwrites one before the wait, if `fault` is 1, or after it.
#[kernel(threads = 32, shared = four_values, checked)]
fn overwrites_the_source_of_a_copy(values: GlobalSliceMut<f32>, fault: u32) {
    let copy = four_values(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        copy.copy_packet_async(0, values, 0, true); // copied_source
        async_copy::commit();
        if fault == 1 {
            values.set(2, 5.0);
        }
        async_copy::wait::<0>(); // copied_wait
        values.set(2, copy.at(2) + 1.0);
    }
}

fn four_values(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(4)
}

#[test]
fn a_write_to_the_source_of_a_copy_before_its_wait_is_reported() {
    let run = |fault| {
        let mut memory = Memory::new();
        let values = memory.buffer_slice("values", &[0.0f32, 1.0, 2.0, 3.0]);
        let launch = overwrites_the_source_of_a_copy(values, fault);
        launch.emulate(&mut memory, [1, 1, 1]).map(|()| memory.read_slice(values))
    };
    assert_eq!(run(0).unwrap(), [0.0, 1.0, 3.0, 3.0]);
    let report = run(1).unwrap_err();
    let line =
        |mark: &str| include_str!("checked.rs").lines().position(|line| line.ends_with(mark)).map(|i| i as u32 + 1);
    assert_eq!(
        (report.fault, report.lines()),
        (Fault::AsyncCopy, [line("// copied_source"), line("// copied_wait")]),
        "{report}"
    );
}
