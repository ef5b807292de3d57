//! Comparison of tensors that a kernel quantizes with their quantization after it.

use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::{Fp8, GlobalMut};
use gpu::quantize::scaled;
use std::any::type_name;

/// Returns the bits of FP8 numbers.
pub fn bits<T: Fp8>(values: &[T]) -> Vec<u8> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Returns the transpose of `values` (rows, `columns`).
pub fn transposed(values: &[u8], columns: usize) -> Vec<u8> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

/// Returns the FP8 bits of `values`, which are numbers in bf16, divided by `scale`. A packet with an infinity or a NaN becomes NaN.
pub fn reference<T: Fp8>(values: &[f64], scale: f32) -> Vec<u8> {
    let packet = |packet: &[f64]| -> Vec<u8> {
        let number =
            |x: f64| if packet.iter().all(|x| x.is_finite()) { scaled(x as f32, 1.0 / scale) } else { f32::NAN };
        packet.iter().map(|&x| T::from_f32(number(x)).to_bits()).collect()
    };
    values.chunks(8).flat_map(packet).collect()
}

/// Returns the bits of the largest magnitude of `values` and `before`.
pub fn largest(values: &[f64], before: f32) -> u32 {
    values.iter().map(|&x| (x as f32).abs().to_bits()).fold(before.to_bits(), u32::max)
}

/// Checks that `out` is the quantization of `values`, which are numbers in bf16, and, if it is given, that `amax` is the largest
/// magnitude of `values` and of what it was before.
#[track_caller]
pub fn check<T: Fp8 + Pod>(
    memory: &Memory,
    out: GlobalMut<T>,
    values: &[f64],
    scale: f32,
    amax: Option<(GlobalMut<u32>, f32)>,
) {
    assert!(bits(&memory.read(out)) == reference::<T>(values, scale), "{} values, scale {scale}", values.len());
    if let Some((amax, before)) = amax {
        assert_eq!(memory.read(amax)[0], largest(values, before));
    }
}

/// Returns the sums of the columns of each tile of 128 rows of FP8 numbers (rows, columns), times `scale`, and the sums of
/// magnitudes.
fn column_sums<T: Fp8>(values: &[u8], columns: usize, scale: f32) -> Vec<[f64; 2]> {
    let tile = |tile: &[u8]| -> Vec<[f64; 2]> {
        let value = |bits: &u8| f64::from(T::from_bits(*bits).to_f32()) * f64::from(scale);
        let sum = |column| tile.iter().skip(column).step_by(columns).map(value);
        (0..columns).map(|column| [sum(column).sum(), sum(column).map(f64::abs).sum()]).collect()
    };
    values.chunks(128 * columns).flat_map(tile).collect()
}

/// Checks column sums; a NaN must not spread to other columns or tiles.
#[track_caller]
pub fn check_column_sums<T: Fp8>(got: &[f32], values: &[u8], columns: usize, scale: f32) {
    let want = column_sums::<T>(values, columns, scale);
    assert_eq!(got.len(), want.len());
    for (i, (got, [want, magnitude])) in got.iter().zip(want).enumerate() {
        let near = (f64::from(*got) - want).abs() <= 1e-6 * magnitude || got.is_nan() && want.is_nan();
        assert!(near, "{}, {columns} columns, sum {i}: expected {want}, found {got}", type_name::<T>());
    }
}
