//! Pseudorandom matrices for the autotuner.

use crate::gemm::GemmPrecision;
use half::bf16;

/// Returns uniform numbers in ±1 of a storage type, as bytes.
pub fn noise(precision: GemmPrecision, bytes: usize) -> Vec<u8> {
    let size = match precision {
        GemmPrecision::Bf16 | GemmPrecision::Fp8 { .. } => 2,
        GemmPrecision::F32 | GemmPrecision::Tf32 => 4,
    };
    let number = |i: usize| gpu::noise::squirrel5(i as u32, 0) as f32 / u32::MAX as f32 * 2.0 - 1.0;
    (0..bytes / size)
        .flat_map(|i| {
            let bits = if size == 2 { u32::from(bf16::from_f32(number(i)).to_bits()) } else { number(i).to_bits() };
            bits.to_le_bytes().into_iter().take(size)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_small_numbers_of_either_sign() {
        let bytes = noise(GemmPrecision::Bf16, 4096);
        let numbers: Vec<_> = bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        assert!(numbers.iter().all(|x| x.abs() <= 1.0));
        let negative = numbers.iter().filter(|x| **x < 0.0).count();
        assert!((900..1150).contains(&negative), "{negative} of {}", numbers.len());
        assert_eq!(noise(GemmPrecision::F32, 10).len(), 8);
    }
}
