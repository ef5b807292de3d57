//! Launches the kernels on the first GPU and compares each result with the CPU.

use cuda_driver::{Buffer, CheckedModule, Error, Gpu, Stream};
use cuda_std::{Element, bf16};
use first_kernels_kernels::{histogram, matmul, reduction, saxpy, scan, silu, softmax, transpose};
use std::process::ExitCode;

/// Elements of the one-dimensional inputs: not a multiple of a block.
const N: usize = 1_000_003;
/// Rows and columns of the matrices: not multiples of a tile.
const ROWS: usize = 1001;
const COLS: usize = 777;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("error: {wrong} kernels: expected the results of the CPU, found others");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all kernels, and returns the number of those with wrong results.
fn run() -> Result<usize, Error> {
    let gpu = Gpu::open(0)?;
    let (stream, module) = (Stream::new(&gpu)?, CheckedModule::load(&gpu, &first_kernels::KERNELS)?);
    println!("{}, {}", gpu.info().name, module.architecture());
    let device = Device { stream, module };
    let results = [
        ("saxpy", device.saxpy()?),
        ("block_sums", device.block_sums()?),
        ("histogram", device.histogram()?),
        ("transpose", device.transpose()?),
        ("softmax", device.softmax()?),
        ("matmul", device.matmul()?),
        ("scan", device.scan()?),
        ("silu, f32", device.silu::<f32>(1e-6)?),
        ("silu, bf16", device.silu::<bf16>(1.0 / 256.0)?),
    ];
    for (name, error) in results {
        println!("{name:<12} {}", if error <= 1.0 { "as on the CPU" } else { "WRONG" });
    }
    Ok(results.iter().filter(|(_, error)| *error > 1.0).count())
}

struct Device {
    stream: Stream,
    module: CheckedModule,
}

/// Each method runs a kernel and returns its largest error as a fraction of the allowed one.
impl Device {
    fn saxpy(&self) -> Result<f64, Error> {
        let x = Buffer::from_slice(&self.stream, &numbers(N))?;
        let mut y = Buffer::from_slice(&self.stream, &vec![1.0; N])?;
        self.module.launch(&self.stream, saxpy::grid(N), &saxpy::saxpy(y.slice_mut(), x.slice(), 2.0))?;
        Ok(worst(&y.read()?, numbers(N).into_iter().map(|x| f64::from(2.0 * x + 1.0)), 0.0))
    }

    fn block_sums(&self) -> Result<f64, Error> {
        let grid = reduction::grid(N);
        let x = Buffer::from_slice(&self.stream, &numbers(N))?;
        let mut sums = Buffer::zeroed(&self.stream, grid[0] as usize)?;
        self.module.launch(&self.stream, grid, &reduction::block_sums(sums.slice_mut(), x.slice()))?;
        let expected = numbers(N);
        Ok(worst(&sums.read()?, expected.chunks(reduction::THREADS).map(|part| part.iter().sum::<f32>().into()), 0.0))
    }

    fn histogram(&self) -> Result<f64, Error> {
        let bytes: Vec<u8> = (0..N).map(|i| (i * i % 251) as u8).collect();
        let x = Buffer::from_slice(&self.stream, &bytes)?;
        let mut counts = Buffer::zeroed(&self.stream, 256)?;
        let launch = histogram::histogram(counts.slice_mut(), x.slice());
        self.module.launch(&self.stream, histogram::grid(N, 132), &launch)?;
        let mut expected = [0u32; 256];
        for byte in bytes {
            expected[usize::from(byte)] += 1;
        }
        Ok(if counts.read()? == expected { 0.0 } else { f64::INFINITY })
    }

    fn transpose(&self) -> Result<f64, Error> {
        let values = numbers(ROWS * COLS);
        let x = Buffer::from_slice(&self.stream, &values)?;
        let mut out = Buffer::zeroed(&self.stream, ROWS * COLS)?;
        let launch = transpose::transpose(out.slice_mut(), x.slice(), ROWS as u32, COLS as u32);
        self.module.launch(&self.stream, transpose::grid(ROWS, COLS), &launch)?;
        let expected = (0..ROWS * COLS).map(|i| values[i % ROWS * COLS + i / ROWS].into());
        Ok(worst(&out.read()?, expected, 0.0))
    }

    fn softmax(&self) -> Result<f64, Error> {
        let values = numbers(ROWS * COLS);
        let x = Buffer::from_slice(&self.stream, &values)?;
        let mut y = Buffer::zeroed(&self.stream, ROWS * COLS)?;
        let launch = softmax::softmax(y.slice_mut(), x.slice(), COLS as u32);
        self.module.launch(&self.stream, softmax::grid(ROWS), &launch)?;
        let expected = values.chunks(COLS).flat_map(|row| {
            let powers: Vec<_> = row.iter().map(|x| f64::from(*x).exp()).collect();
            let sum: f64 = powers.iter().sum();
            powers.into_iter().map(move |power| power / sum)
        });
        Ok(worst(&y.read()?, expected, 1e-6))
    }

    fn matmul(&self) -> Result<f64, Error> {
        let (m, n, k) = (ROWS, COLS, 333);
        let (a, b) = (numbers(m * k), numbers(k * n));
        let rounded = |values: &[f32]| values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>();
        let (left, right) = (rounded(&a), rounded(&b));
        let (left, right) = (Buffer::from_slice(&self.stream, &left)?, Buffer::from_slice(&self.stream, &right)?);
        let mut c = Buffer::zeroed(&self.stream, m * n)?;
        let launch = matmul::matmul(c.slice_mut(), left.slice(), right.slice(), m as u32, n as u32, k as u32);
        self.module.launch(&self.stream, matmul::grid(m, n), &launch)?;
        let product = |i: usize, j: usize, l: usize| f64::from(a[i * k + l]) * f64::from(b[l * n + j]);
        let expected = (0..m * n).map(|i| (0..k).map(|l| product(i / n, i % n, l)).sum());
        Ok(worst(&c.read()?, expected, 1e-2))
    }

    fn scan(&self) -> Result<f64, Error> {
        let values: Vec<u32> = (0..N as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let grid = scan::grid(N);
        let mut x = Buffer::from_slice(&self.stream, &values)?;
        let mut sums = Buffer::zeroed(&self.stream, grid[0] as usize)?;
        self.module.launch(&self.stream, grid, &scan::scan_blocks(x.slice_mut(), sums.slice_mut()))?;
        self.module.launch(&self.stream, [1, 1, 1], &scan::scan_sums(sums.slice_mut()))?;
        self.module.launch(&self.stream, grid, &scan::add_sums(x.slice_mut(), sums.slice_mut()))?;
        let expected = values.iter().scan(0u32, |sum, x| {
            *sum = sum.wrapping_add(*x);
            Some(*sum)
        });
        Ok(if x.read()?.into_iter().eq(expected) { 0.0 } else { f64::INFINITY })
    }

    /// The allowed error is relative.
    fn silu<T: Element + cuda_driver::Pod>(&self, tolerance: f64) -> Result<f64, Error> {
        let values: Vec<T> = numbers(N).into_iter().map(T::from_f32).collect();
        let x = Buffer::from_slice(&self.stream, &values)?;
        let mut y = Buffer::zeroed(&self.stream, N)?;
        self.module.launch(&self.stream, silu::grid::<T>(N), &silu::silu::<T>(y.slice_mut(), x.slice()))?;
        let errors = y.read()?.into_iter().zip(values).map(|(y, x)| {
            let (y, x) = (f64::from(y.to_f32()), f64::from(x.to_f32()));
            let expected = x / (1.0 + (-x).exp());
            (y - expected).abs() / (tolerance * expected.abs()).max(f64::MIN_POSITIVE)
        });
        Ok(errors.fold(0.0, f64::max))
    }
}

/// Returns `n` numbers of -8, -7.75 .. 7.75, which bf16 represents and whose sums f32 represents.
fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 64) as f32 * 0.25 - 8.0).collect()
}

/// Returns the largest error as a fraction of `tolerance`; infinity for a NaN, a wrong length, or an error where none is allowed.
fn worst(found: &[f32], expected: impl Iterator<Item = f64>, tolerance: f64) -> f64 {
    let (mut count, mut worst) = (0, 0.0f64);
    for (found, expected) in found.iter().zip(expected) {
        count += 1;
        let error = (f64::from(*found) - expected).abs();
        worst = worst.max(if error == 0.0 { 0.0 } else { error / tolerance });
        if error.is_nan() {
            return f64::INFINITY;
        }
    }
    if count == found.len() { worst } else { f64::INFINITY }
}
