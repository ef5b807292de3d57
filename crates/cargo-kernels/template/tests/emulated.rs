//! Runs the kernels in the emulator, which checks each memory access. No GPU is needed.

use cuda_std::emulate::{Fault, Memory};
use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, kernel, thread};
use {{ident}}_kernels::{THREADS, block_sums, grid, saxpy};

#[test]
fn saxpy_matches_the_cpu() {
    for n in [1, 31, THREADS, 1000] {
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let mut memory = Memory::new();
        let (x, y) = (memory.input_slice("x", &values), memory.buffer_slice("y", &vec![1.0; n]));
        saxpy(y, x, 2.0).emulate(&mut memory, grid(n)).unwrap();
        assert_eq!(memory.read_slice(y), values.iter().map(|x| 2.0 * x + 1.0).collect::<Vec<_>>());
    }
}

#[test]
fn block_sums_match_the_cpu() {
    let values: Vec<f32> = (0..1000).map(|i| (i % 7) as f32).collect();
    let mut memory = Memory::new();
    let (x, sums) = (memory.input_slice("x", &values), memory.output_slice("sums", 4));
    block_sums(sums, x).emulate(&mut memory, grid(1000)).unwrap();
    assert_eq!(memory.read_slice(sums), values.chunks(THREADS).map(|part| part.iter().sum()).collect::<Vec<f32>>());
}

/// Reverses 64 elements through shared memory, but lacks a barrier between the writes and the reads.
#[kernel(threads = 64, shared = |layout: &mut Layout| layout.array::<f32>(64), checked)]
fn reverse_without_a_barrier(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>) {
    let (reversed, t) = (Layout::new().array::<f32>(64).named("reversed"), thread::thread_idx_x() as usize);
    reversed.set(63 - t, x.at(t));
    y.set(t, reversed.at(t));
}

#[test]
fn a_missing_barrier_is_reported_as_a_data_race() {
    let mut memory = Memory::new();
    let (x, y) = (memory.input_slice("x", &[1.0; 64]), memory.output_slice("y", 64));
    let report = reverse_without_a_barrier(y, x).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    assert_eq!(report.fault, Fault::DataRace);
    println!("{report}"); // cargo kernels test -- --nocapture
}
