//! Runs the kernels in the emulator, which checks each memory access: correct inputs, sizes that are not multiples of the block, and
//! wrong inputs.

use cuda_std::emulate::{Fault, Memory, Pod, Report};
use cuda_std::shared::Layout;
use cuda_std::{Element, GlobalSlice, GlobalSliceMut, bf16, kernel, thread};
use first_kernels_kernels::{histogram, matmul, reduction, saxpy, scan, silu, softmax, transpose};

/// Returns `n` numbers of -8, -7.75 .. 7.75, which bf16 represents and f32 sums exactly.
fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 64) as f32 * 0.25 - 8.0).collect()
}

/// Asserts that a launch stops with an out-of-bounds access at `place`, in the file of the kernel.
#[track_caller]
fn assert_out_of_bounds(result: Result<(), Report>, place: &str, file: &str) {
    let report = result.unwrap_err();
    let text = report.to_string();
    assert_eq!(report.fault, Fault::OutOfBounds, "{text}");
    assert!(text.contains(place) && text.contains(file), "{text}");
}

#[test]
fn saxpy_matches_the_cpu() {
    for n in [1, 31, 256, 257, 1000] {
        let mut memory = Memory::new();
        let (x, y) = (memory.input_slice("x", &numbers(n)), memory.buffer_slice("y", &vec![1.0; n]));
        saxpy::saxpy(y, x, 2.0).emulate(&mut memory, saxpy::grid(n)).unwrap();
        assert_eq!(memory.read_slice(y), numbers(n).iter().map(|x| 2.0 * x + 1.0).collect::<Vec<_>>());
    }
}

#[test]
fn saxpy_reports_an_x_that_is_too_short() {
    let mut memory = Memory::new();
    let (x, y) = (memory.input_slice("x", &numbers(299)), memory.buffer_slice("y", &[1.0; 300]));
    assert_out_of_bounds(saxpy::saxpy(y, x, 2.0).emulate(&mut memory, saxpy::grid(300)), "x + 1196", "saxpy.rs");
}

#[test]
fn block_sums_match_the_cpu() {
    for n in [1, 33, 256, 300, 1023] {
        let mut memory = Memory::new();
        let grid = reduction::grid(n);
        let (x, sums) = (memory.input_slice("x", &numbers(n)), memory.output_slice("sums", grid[0] as usize));
        reduction::block_sums(sums, x).emulate(&mut memory, grid).unwrap();
        let expected: Vec<f32> = numbers(n).chunks(reduction::THREADS).map(|part| part.iter().sum()).collect();
        assert_eq!(memory.read_slice(sums), expected);
    }
}

#[test]
fn block_sums_reports_too_few_sums() {
    let mut memory = Memory::new();
    let (x, sums) = (memory.input_slice("x", &numbers(513)), memory.output_slice("sums", 2));
    assert_out_of_bounds(reduction::block_sums(sums, x).emulate(&mut memory, [3, 1, 1]), "sums + 8", "reduction.rs");
}

/// Adds the elements of a block through shared memory, but lacks the barrier before thread 0 reads them.
#[kernel(threads = 64, shared = |layout: &mut Layout| layout.array::<f32>(64), checked)]
fn sum_without_a_barrier(sum: GlobalSliceMut<f32>, x: GlobalSlice<f32>) {
    let (values, t) = (Layout::new().array::<f32>(64).named("values"), thread::thread_idx_x() as usize);
    values.set(t, x.at(t));
    if t == 0 {
        sum.set(0, (0..64).fold(0.0, |sum, i| sum + values.at(i)));
    }
}

#[test]
fn a_missing_barrier_is_reported_as_a_data_race() {
    let mut memory = Memory::new();
    let (x, sum) = (memory.input_slice("x", &[1.0; 64]), memory.output_slice("sum", 1));
    let report = sum_without_a_barrier(sum, x).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    assert_eq!(report.fault, Fault::DataRace);
    println!("{report}");
}

#[test]
fn histogram_matches_the_cpu() {
    let mut memory = Memory::new();
    let counts = memory.zeroed_slice("counts", 256);
    let mut expected = [0; 256];
    for n in [0, 1, 255, 5000, 20_001] {
        let bytes: Vec<u8> = (0..n).map(|i| (i * i % 251) as u8).collect();
        let x = memory.input_slice("x", &bytes);
        histogram::histogram(counts, x).emulate(&mut memory, histogram::grid(n, 4)).unwrap();
        for byte in bytes {
            expected[byte as usize] += 1;
        }
        assert_eq!(memory.read_slice(counts), expected, "{n} bytes");
    }
}

#[test]
fn histogram_reports_too_few_counts() {
    let mut memory = Memory::new();
    let (x, counts) = (memory.input_slice("x", &[255u8; 10]), memory.zeroed_slice("counts", 255));
    assert_out_of_bounds(
        histogram::histogram(counts, x).emulate(&mut memory, [1, 1, 1]),
        "counts + 1020",
        "histogram.rs",
    );
}

#[test]
fn transpose_matches_the_cpu() {
    for (rows, cols) in [(1, 1), (32, 32), (33, 31), (1, 100), (100, 1), (70, 65)] {
        let x = numbers(rows * cols);
        let mut memory = Memory::new();
        let (view, out) = (memory.input_slice("x", &x), memory.output_slice("out", rows * cols));
        let launch = transpose::transpose(out, view, rows as u32, cols as u32);
        launch.emulate(&mut memory, transpose::grid(rows, cols)).unwrap();
        let expected: Vec<f32> = (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect();
        assert_eq!(memory.read_slice(out), expected, "{rows} x {cols}");
    }
}

#[test]
fn transpose_reports_an_input_that_is_too_short() {
    let mut memory = Memory::new();
    let (x, out) = (memory.input_slice("x", &numbers(1088)), memory.output_slice("out", 33 * 33));
    let launch = transpose::transpose(out, x, 33, 33);
    assert_out_of_bounds(launch.emulate(&mut memory, transpose::grid(33, 33)), "x + 4352", "transpose.rs");
}

/// Runs softmax on a matrix of `cols` columns.
fn softmax_of(x: &[f32], cols: usize) -> Result<Vec<f32>, Report> {
    let mut memory = Memory::new();
    let (view, y) = (memory.input_slice("x", x), memory.output_slice("y", x.len()));
    softmax::softmax(y, view, cols as u32).emulate(&mut memory, softmax::grid(x.len() / cols))?;
    Ok(memory.read_slice(y))
}

#[test]
fn softmax_matches_the_cpu() {
    for (rows, cols) in [(1, 1), (3, 31), (2, 256), (2, 300), (1, 1000)] {
        let x: Vec<f32> = numbers(rows * cols).iter().map(|x| 20.0 * x).collect();
        let y = softmax_of(&x, cols).unwrap();
        for (x, y) in x.chunks(cols).zip(y.chunks(cols)) {
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f64> = x.iter().map(|x| f64::from(x - largest).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for (y, power) in y.iter().zip(powers) {
                assert!((f64::from(*y) - power / sum).abs() < 1e-6, "{rows} x {cols}: {y}, {}", power / sum);
            }
        }
    }
}

#[test]
fn softmax_masks_infinity_and_keeps_nan() {
    let y = softmax_of(&[f32::NEG_INFINITY, 1.0, 1.0, 1.0, f32::NAN, 1.0], 3).unwrap();
    assert_eq!(y[..3], [0.0, 0.5, 0.5]);
    assert!(y[3..].iter().all(|y| y.is_nan()), "{y:?}");
}

#[test]
fn softmax_reports_a_matrix_that_is_too_short() {
    let mut memory = Memory::new();
    let (x, y) = (memory.input_slice("x", &numbers(30)), memory.output_slice("y", 32));
    assert_out_of_bounds(softmax::softmax(y, x, 16).emulate(&mut memory, [2, 1, 1]), "x + 120", "softmax.rs");
}

#[test]
fn matmul_matches_the_cpu() {
    for (m, n, k) in [(16, 16, 16), (1, 1, 1), (17, 40, 33), (50, 5, 64)] {
        let (a, b) = (numbers(m * k), numbers(k * n));
        let rounded = |values: &[f32]| values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>();
        let mut memory = Memory::new();
        let (a_view, b_view) = (memory.input_slice("a", &rounded(&a)), memory.input_slice("b", &rounded(&b)));
        let c = memory.output_slice("c", m * n);
        let launch = matmul::matmul(c, a_view, b_view, m as u32, n as u32, k as u32);
        launch.emulate(&mut memory, matmul::grid(m, n)).unwrap();
        let product = |i: usize, j: usize, l: usize| f64::from(a[i * k + l]) * f64::from(b[l * n + j]);
        for (i, c) in memory.read_slice(c).into_iter().enumerate() {
            let expected: f64 = (0..k).map(|l| product(i / n, i % n, l)).sum();
            assert!((f64::from(c) - expected).abs() < 1e-3, "{m} x {n} x {k}: {c}, {expected}");
        }
    }
}

#[test]
fn matmul_reports_a_matrix_that_is_too_short() {
    let mut memory = Memory::new();
    let ones = vec![bf16::from_f32(1.0); 20 * 20];
    let (a, b) = (memory.input_slice("a", &ones), memory.input_slice("b", &ones[..399]));
    let launch = matmul::matmul(memory.output_slice("c", 400), a, b, 20, 20, 20);
    assert_out_of_bounds(launch.emulate(&mut memory, matmul::grid(20, 20)), "b + 798", "matmul.rs");
}

#[test]
fn scan_matches_the_cpu() {
    for n in [1, 31, 256, 257, 5000, 140_000] {
        let values: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let (mut memory, grid) = (Memory::new(), scan::grid(n));
        let (x, sums) = (memory.buffer_slice("x", &values), memory.output_slice("sums", grid[0] as usize));
        scan::scan_blocks(x, sums).emulate(&mut memory, grid).unwrap();
        scan::scan_sums(sums).emulate(&mut memory, [1, 1, 1]).unwrap();
        scan::add_sums(x, sums).emulate(&mut memory, grid).unwrap();
        let mut sum = 0u32;
        let expected: Vec<u32> = values
            .iter()
            .map(|x| {
                sum = sum.wrapping_add(*x);
                sum
            })
            .collect();
        assert_eq!(memory.read_slice(x), expected, "{n} elements");
    }
}

#[test]
fn scan_reports_too_few_sums() {
    let mut memory = Memory::new();
    let (x, sums) = (memory.buffer_slice("x", &[1; 1000]), memory.output_slice("sums", 3));
    assert_out_of_bounds(scan::scan_blocks(x, sums).emulate(&mut memory, [4, 1, 1]), "sums + 12", "scan.rs");
}

/// Runs SiLU on `x` rounded to `T`, and compares with f64 up to the relative error `tolerance`.
fn assert_silu<T: Element + Pod>(x: &[f32], tolerance: f64) {
    let rounded: Vec<T> = x.iter().copied().map(T::from_f32).collect();
    let mut memory = Memory::new();
    let (view, y) = (memory.input_slice("x", &rounded), memory.output_slice("y", x.len()));
    silu::silu::<T>(y, view).emulate(&mut memory, silu::grid::<T>(x.len())).unwrap();
    for (y, x) in memory.read_slice(y).into_iter().zip(rounded) {
        let (y, x) = (f64::from(y.to_f32()), f64::from(x.to_f32()));
        let expected = x / (1.0 + (-x).exp());
        assert!(
            (y - expected).abs() <= tolerance * expected.abs() || (y.is_nan() && x.is_nan()),
            "{x}: {y}, {expected}"
        );
    }
}

#[test]
fn silu_matches_the_cpu() {
    for n in [1, 3, 8, 1023, 2049] {
        assert_silu::<f32>(&numbers(n), 1e-6);
        assert_silu::<bf16>(&numbers(n), 1.0 / 256.0);
    }
    assert_silu::<f32>(&[88.0, -80.0, 1e30, f32::NAN, 0.0], 1e-5);
}

#[test]
fn silu_reports_an_x_that_is_too_short() {
    let mut memory = Memory::new();
    let (x, y) = (memory.input_slice("x", &numbers(5)), memory.output_slice("y", 8));
    assert_out_of_bounds(silu::silu::<f32>(y, x).emulate(&mut memory, [1, 1, 1]), "x + 16", "silu.rs");
}
