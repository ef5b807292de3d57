//! Weights in FP8, times a power of two.

use cuda_std::emulate::Memory;
use cuda_std::{E4m3, Element};
use gpu::decode::launch::Fp8Weight;

/// Returns the scale of a tensor, which depends on its name.
pub fn scale_of(name: &str) -> f32 {
    2f32.powi(-8 - (name.bytes().map(u32::from).sum::<u32>() % 3) as i32)
}

/// Rounds values to E4M3 numbers times `scale`.
pub fn rounded(values: &[f64], scale: f32) -> Vec<f64> {
    let number = |x: f64| E4m3::from_f32((x / f64::from(scale)) as f32).to_f32() * scale;
    values.iter().map(|&x| f64::from(number(x))).collect()
}

/// Writes a weight to memory. [`rounded`] returns its values.
pub fn input(memory: &mut Memory, name: &str, values: &[f64], scale: f32) -> Fp8Weight {
    let numbers: Vec<_> = values.iter().map(|&x| E4m3::from_f32((x / f64::from(scale)) as f32)).collect();
    Fp8Weight { weight: memory.input(name, &numbers), scale: memory.input(&format!("scale of {name}"), &[scale]) }
}
