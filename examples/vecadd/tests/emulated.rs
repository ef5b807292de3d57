//! Runs the kernel in the emulator with every access checked, and shows the reports for two kernels with faults.

use cuda_std::emulate::{Fault, Memory, Report};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, kernel, thread};
use vecadd_kernel::{THREADS, grid, shared, vecadd};

/// Arguments of a kernel: out, sums, a, b, n.
type Arguments = (GlobalMut<f32>, GlobalMut<f32>, Global<f32>, Global<f32>, u64);

/// Runs a kernel on the `n` elements a = i and b = 2 i and returns out and sums.
fn run(kernel: impl Fn(Arguments) -> Launch, n: usize) -> Result<(Vec<f32>, Vec<f32>), Report> {
    let values = |scale: usize| (0..n).map(|i| (scale * i) as f32).collect::<Vec<_>>();
    let mut memory = Memory::new();
    let (a, b) = (memory.input("a", &values(1)), memory.input("b", &values(2)));
    let (out, sums) = (memory.output("out", n), memory.output("sums", grid(n)[0] as usize));
    let mut layout = Layout::new();
    shared(&mut layout);
    kernel((out, sums, a, b, n as u64)).emulate_checked(&mut memory, grid(n), layout.bytes())?;
    Ok((memory.read(out), memory.read(sums)))
}

#[test]
fn vecadd_matches_cpu_reference() {
    for n in [1, 31, THREADS, THREADS + 1, 1000] {
        let (out, sums) = run(|(out, sums, a, b, n)| vecadd(out, sums, a, b, n), n).unwrap();
        let expected: Vec<f32> = (0..n).map(|i| (3 * i) as f32).collect();
        assert_eq!(out, expected);
        assert_eq!(sums, expected.chunks(THREADS).map(|part| part.iter().sum()).collect::<Vec<f32>>());
    }
}

/// Lacks the comparison of the index with `n`.
#[kernel(threads = 256)]
fn unbounded(out: GlobalMut<f32>, a: Global<f32>, b: Global<f32>) {
    let i = thread::index_1d();
    out.set(i, a.at(i) + b.at(i)); // out of bounds
}

/// Lacks the barrier before thread 0 sums the elements.
#[kernel(threads = 256)]
fn missing_barrier(sums: GlobalMut<f32>, a: Global<f32>, b: Global<f32>, n: u64) {
    let (scratch, t) = (Layout::new().array::<f32>(THREADS), thread::thread_idx_x() as usize);
    if t < n as usize {
        scratch.set(t, a.at(t) + b.at(t)); // write
    }
    if t == 0 {
        sums.set(0, (0..n as usize).fold(0.0, |sum, i| sum + scratch.at(i))); // read
    }
}

/// Returns the number of the line of this file that ends with `// <mark>`.
fn line(mark: &str) -> Option<u32> {
    let end = format!("// {mark}");
    include_str!("emulated.rs").lines().position(|line| line.ends_with(&end)).map(|i| i as u32 + 1)
}

#[test]
fn missing_bound_is_reported_as_out_of_bounds() {
    let report = run(|(out, _, a, b, _)| unbounded(out, a, b), 1000).unwrap_err();
    assert_eq!((report.fault, report.lines()), (Fault::OutOfBounds, [line("out of bounds"), None]));
    let text = report.to_string();
    assert!(text.contains("block (3, 0, 0), thread 232: out-of-bounds access: read of 4 bytes at a + 4000"), "{text}");
}

#[test]
fn missing_barrier_is_reported_as_data_race() {
    let report = run(|(_, sums, a, b, n)| missing_barrier(sums, a, b, n), 8).unwrap_err();
    assert_eq!((report.fault, report.lines()), (Fault::DataRace, [line("write"), line("read")]));
}
