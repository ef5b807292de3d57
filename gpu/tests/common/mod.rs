//! What the kernel tests share: watched launches, reproducible data, comparison with f64 references.
#![allow(dead_code, reason = "each test crate uses its own part")]

pub mod attention;
pub mod entries;

use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use cuda_std::{Element, GlobalMut, bf16};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cmp::Ordering;

/// `values`, rounded to T.
pub fn rounded<T: Element>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&x| T::from_f32(x as f32)).collect()
}

pub fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// What `view` holds, all of it written.
pub fn read<T: Element + Pod>(memory: &Memory, view: GlobalMut<T>) -> Vec<f64> {
    wide(&memory.read(view))
}

/// Runs a kernel over buffers of `memory`, every access watched.
#[track_caller]
pub fn run(memory: &mut Memory, launch: &Launch, grid: impl Into<Grid>, shared_bytes: usize) {
    entries::launched(launch);
    if let Err(report) = launch.emulate_checked(memory, grid.into().0, shared_bytes) {
        panic!("{report}");
    }
}

/// Runs `test` on `cases` values of `strategy`, the same on every run, and shrinks the first that fails.
pub fn for_all<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value)) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&strategy, |value| {
        test(value);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

/// Relative error of one rounding to T, with some room for f32 arithmetic.
pub trait Tolerance: Element + Pod {
    const ROUNDING: f64;
    /// What a stochastic rounding may be off.
    const STEP: f64 = 2.0 * Self::ROUNDING;

    /// The values of this type that `value` lies between, the smaller magnitude first; `value` twice if it is one.
    fn neighbours(value: f32) -> [f32; 2];

    /// The nearer neighbour, of two as near the one whose last bit is 0.
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
        // What comes after the largest bf16 counts as 2^128, as IEEE 754 has it.
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

/// Integers from -8 to 8 without pattern, whose sums are exact in f32.
pub fn integers(len: usize, seed: u32) -> Vec<f64> {
    (0..len).map(|i| f64::from(gpu::noise::squirrel5(i as u32, seed) % 17) - 8.0).collect()
}

/// Values in -1..1 without pattern.
pub fn noise(len: usize, seed: u32) -> Vec<f64> {
    (0..len).map(|i| f64::from(gpu::noise::squirrel5(i as u32, seed)) / f64::from(u32::MAX) * 2.0 - 1.0).collect()
}

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

/// Fails where `got` and `want` differ by more than `relative` of the wanted value or, near zero, of `scale`; NaN equals
/// NaN, and an infinity itself.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], relative: f64, scale: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g.total_cmp(&w).is_eq() || g.is_nan() && w.is_nan();
        let bound = relative * w.abs().max(scale);
        let near = w.is_finite() && (g - w).abs() <= bound;
        assert!(same || near, "{what}[{i}]: got {g}, want {w}, off by {} > {bound}", (g - w).abs());
    }
}

/// The same numbers, zeros with their signs; a NaN may change its payload.
#[track_caller]
pub fn assert_same(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.total_cmp(w).is_eq() || g.is_nan() && w.is_nan(), "{what}[{i}]: got {g:e}, want {w:e}");
    }
}

/// Shared memory of a layout function.
pub fn shared_bytes<R>(layout: impl FnOnce(&mut cuda_std::shared::Layout) -> R) -> usize {
    let mut total = cuda_std::shared::Layout::new();
    layout(&mut total);
    total.bytes()
}

/// The tests of a file, and one more: that together they launch every entry point of the kernels they are for.
///
/// `kernels of "bias.rs", "column_sum.rs"; for both types: column_sums; once: other;`: files or folders in `gpu/src`;
/// tests generic over the storage type; tests that are not.
#[macro_export]
macro_rules! tests {
    (
        kernels of $($file:literal),*;
        $(for both types: $($both:ident),* $(,)?;)?
        $(once: $($single:ident),* $(,)?;)?
    ) => {
        mod in_bf16 {
            $($(#[test] pub fn $both() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$both::<cuda_std::bf16>);
            })*)?
        }
        mod in_f32 {
            $($(#[test] pub fn $both() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$both::<f32>);
            })*)?
        }
        mod once {
            $($(#[test] pub fn $single() {
                static DONE: std::sync::Once = std::sync::Once::new();
                $crate::common::entries::once(&DONE, super::$single);
            })*)?
        }
        mod together {
            #[test] fn every_entry_point_is_launched() {
                $($(super::in_bf16::$both(); super::in_f32::$both();)*)?
                $($(super::once::$single();)*)?
                $crate::common::entries::assert_launched(&[$($file),*]);
            }
        }
    };
}
