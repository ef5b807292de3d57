//! Helpers of the kernel tests: checked launches, reproducible data, and comparison with f64 references.

pub mod activation;
pub mod attention;
pub mod entries;
pub mod fp8_weight;
pub mod gemm;
pub mod norm;
pub mod quantized;

use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use cuda_std::{Element, GlobalMut, bf16};
pub use gpu::launch::shared_bytes;
use proptest::bool::ANY;
use proptest::sample::select;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns `values` rounded to T.
pub fn rounded<T: Element>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&x| T::from_f32(x as f32)).collect()
}

/// Returns `values` converted to f64.
pub fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// Returns the contents of `view` in f64. Fails if an element was never written.
pub fn read<T: Element + Pod>(memory: &Memory, view: GlobalMut<T>) -> Vec<f64> {
    wide(&memory.read(view))
}

/// Runs a kernel on buffers of `memory` in the emulator, which checks every access.
#[track_caller]
pub fn run(memory: &mut Memory, launch: &Launch, grid: impl Into<Grid>, shared_bytes: usize) {
    entries::launched(launch);
    if let Err(report) = launch.emulate_checked(memory, grid.into().0, shared_bytes) {
        panic!("{report}");
    }
}

/// Runs `test` on `cases` values of `strategy`, the same in every run, and shrinks the first failure.
///
/// `TestRunner::run` does the same, but its instances took half of the build time of these tests.
pub fn for_all<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value)) {
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    for _ in 0..cases {
        // The generator of each case, as in `TestRunner::run`.
        let generator = runner.new_rng();
        runner = TestRunner::new_with_rng(Config::default(), generator);
        let mut tree = strategy.new_tree(&mut runner).unwrap();
        let fails = |value| catch_unwind(AssertUnwindSafe(|| test(value))).is_err();
        if !fails(tree.current()) {
            continue;
        }
        let mut smallest = format!("{:?}", tree.current());
        for _ in 0..MAX_SHRINKS {
            if fails(tree.current()) {
                smallest = format!("{:?}", tree.current());
                if !tree.simplify() {
                    break;
                }
            } else if !tree.complicate() {
                break;
            }
        }
        panic!("fails for {smallest}");
    }
}

/// The largest number of simpler values that are tried.
const MAX_SHRINKS: usize = 200;

/// Returns a strategy for the rows of a matrix, with the edges of tiles.
pub fn matrix_rows() -> impl Strategy<Value = usize> {
    let rows = (1..=400usize, select(vec![1, 63, 64, 65, 127, 128, 129]), ANY);
    rows.prop_map(|(any, edge, is_edge)| if is_edge { edge } else { any })
}

/// Returns a strategy for multiples of 8 up to `most`.
pub fn multiples_of_8(most: usize) -> impl Strategy<Value = usize> {
    (1..=most / 8).prop_map(|packets| 8 * packets)
}

/// The rounding behaviour of a storage type.
pub trait Tolerance: Element + Pod {
    /// Allowed relative error of one rounding to nearest, with a margin for f32 arithmetic.
    const ROUNDING: f64;
    /// Allowed relative error of one stochastic rounding.
    const STEP: f64 = 2.0 * Self::ROUNDING;

    /// Returns the two adjacent values of this type that enclose `value`, the smaller magnitude first. Returns `value`
    /// twice if it is representable.
    fn neighbours(value: f32) -> [f32; 2];

    /// Returns `value` rounded to nearest even.
    fn nearest(value: f32) -> f32;
}

impl Tolerance for f32 {
    const ROUNDING: f64 = 4e-6;

    fn neighbours(value: f32) -> [f32; 2] {
        [value; 2]
    }

    fn nearest(value: f32) -> f32 {
        value
    }
}

impl Tolerance for bf16 {
    const ROUNDING: f64 = 1.0 / 250.0;

    fn neighbours(value: f32) -> [f32; 2] {
        let (bits, cut) = (value.to_bits(), value.to_bits() & 0xffff_0000);
        let away = if bits == cut || value.is_nan() { bits } else { cut + 0x1_0000 };
        [f32::from_bits(cut), f32::from_bits(away)]
    }

    fn nearest(value: f32) -> f32 {
        let [low, high] = Self::neighbours(value);
        // For rounding, IEEE 754 treats the value after the largest finite one as 2^128.
        let size = |x: f32| if x.is_infinite() { 128f64.exp2() } else { f64::from(x).abs() };
        let even = low.to_bits() & 0x1_0000 == 0;
        match (f64::from(value).abs() - size(low)).total_cmp(&(size(high) - f64::from(value).abs())) {
            _ if value.is_infinite() => low,
            Ordering::Less => low,
            Ordering::Equal if even => low,
            _ => high,
        }
    }
}

/// Pseudo-random integers from -8 to 8, whose sums are exact in f32.
pub fn integers(len: usize, seed: u32) -> Vec<f64> {
    (0..len).map(|i| f64::from(gpu::noise::squirrel5(i as u32, seed) % 17) - 8.0).collect()
}

/// Pseudo-random values in -1..1.
pub fn noise(len: usize, seed: u32) -> Vec<f64> {
    (0..len).map(|i| f64::from(gpu::noise::squirrel5(i as u32, seed)) / f64::from(u32::MAX) * 2.0 - 1.0).collect()
}

/// The number of blocks along x, y and z.
pub struct Grid([u32; 3]);

impl From<u32> for Grid {
    fn from(x: u32) -> Self {
        Self([x, 1, 1])
    }
}

impl From<[u32; 3]> for Grid {
    fn from(grid: [u32; 3]) -> Self {
        Self(grid)
    }
}

/// Fails if an element of `got` differs from that of `want` by more than `relative` times the larger of the expected
/// value and `scale`. NaN equals NaN, and an infinity equals itself.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], relative: f64, scale: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g.total_cmp(&w).is_eq() || g.is_nan() && w.is_nan();
        let bound = relative * w.abs().max(scale);
        let near = w.is_finite() && (g - w).abs() <= bound;
        assert!(same || near, "{what}[{i}]: expected {w}, found {g}; the error is {}, allowed {bound}", (g - w).abs());
    }
}

/// Fails unless the elements are bit-identical. NaNs may have different payloads.
#[track_caller]
pub fn assert_same(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.total_cmp(w).is_eq() || g.is_nan() && w.is_nan(), "{what}[{i}]: expected {w:e}, found {g:e}");
    }
}

/// Returns the product of an m x k and a k x n matrix.
pub fn product([m, n, k]: [usize; 3], a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let b: Vec<f64> = (0..k * n).map(|at| b(at / n, at % n)).collect();
    let mut product = vec![0.0; m * n];
    for (i, row) in product.chunks_exact_mut(n).enumerate() {
        for (l, b) in b.chunks_exact(n).enumerate() {
            let a = a(i, l);
            row.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    product
}

/// Declares the tests of a file, plus one which checks that together they launch every entry point of their kernels.
///
/// The syntax is `kernels of "bias.rs", "column_sum.rs"; for both types: column_sums; slow in f32: large; once: other; slow: huge;`:
/// * files or directories in `gpu/src`; `where |entry| …` selects some of their entry points by name,
/// * tests that are generic over the storage type,
/// * generic tests that are slow in f32: `scripts/nightly` runs their f32 instances,
/// * other tests,
/// * other tests that are slow: `scripts/nightly` runs them.
macro_rules! tests {
    (
        kernels of $($file:literal),* $(where $covered:expr)?;
        $(for both types: $($both:ident),* $(,)?;)?
        $(slow in f32: $($slow:ident),* $(,)?;)?
        $(once: $($single:ident),* $(,)?;)?
        $(slow: $($long:ident),* $(,)?;)?
    ) => {
        mod in_bf16 {
            $($(#[test] pub fn $both() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$both::<cuda_std::bf16>);
            })*)?
            $($(#[test] pub fn $slow() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$slow::<cuda_std::bf16>);
            })*)?
        }
        mod in_f32 {
            $($(#[test] pub fn $both() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$both::<f32>);
            })*)?
            $($(#[test] #[ignore = "slow: scripts/nightly runs it"] fn $slow() {
                super::$slow::<f32>();
            })*)?
        }
        mod once {
            $($(#[test] pub fn $single() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$single);
            })*)?
            $($(#[test] #[ignore = "slow: scripts/nightly runs it"] fn $long() {
                super::$long();
            })*)?
        }
        mod together {
            #[test] fn every_entry_point_is_launched() {
                $($(super::in_bf16::$both(); super::in_f32::$both();)*)?
                $($(super::in_bf16::$slow();)*)?
                $($(super::once::$single();)*)?
                let covered: [fn(&str) -> bool; _] = [$($covered,)? |_| true];
                $crate::common::entries::assert_launched(&[$($file),*], covered[0]);
            }
        }
    };
}
