//! The check that loaded values are finite: NaN or infinite weights would turn every result into NaN.

use anyhow::{Result, bail};
use engine::tensor::DType;

/// Counts the values of a tensor that are NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonFinite {
    nan: usize,
    infinite: usize,
}

impl NonFinite {
    /// Counts the values in `bytes`, which have type `dtype` and are little-endian.
    pub fn add(&mut self, bytes: &[u8], dtype: DType) {
        match dtype {
            DType::Bf16 => {
                let values = bytes.as_chunks().0;
                self.count(values, |&value| u32::from(u16::from_le_bytes(value)) << 16);
            }
            DType::F32 => self.count(bytes.as_chunks().0, |&value| u32::from_le_bytes(value)),
            DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {}
        }
    }

    /// Counts values, given the bits of each as f32.
    fn count<T>(&mut self, values: &[T], bits: impl Fn(&T) -> u32) {
        const EXPONENT: u32 = 0x7f80_0000;
        const MAGNITUDE: u32 = 0x7fff_ffff;
        // Finite values are the rule, and the compiler vectorizes this loop.
        let non_finite = values.iter().map(|value| u32::from(bits(value) & EXPONENT == EXPONENT)).sum::<u32>() as usize;
        if non_finite > 0 {
            let infinite = values.iter().filter(|value| bits(value) & MAGNITUDE == EXPONENT).count();
            self.infinite += infinite;
            self.nan += non_finite - infinite;
        }
    }

    /// Fails if a value was not finite. `tensor` names the tensor, for example `qkvw of layer 3`.
    pub fn check(self, tensor: &str) -> Result<()> {
        let found = match self {
            Self { nan: 0, infinite: 0 } => return Ok(()),
            Self { nan, infinite: 0 } => format!("{nan} NaN"),
            Self { nan: 0, infinite } => format!("{infinite} infinite"),
            Self { nan, infinite } => format!("{nan} NaN and {infinite} infinite"),
        };
        bail!(
            "{tensor}: expected finite values, found {found} values; the file is damaged or the training diverged: use an \
             earlier checkpoint"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn count(values: &[f32], dtype: DType) -> NonFinite {
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            }
        };
        let mut found = NonFinite::default();
        // Two chunks of one tensor.
        let (first, second) = bytes.split_at(2 * dtype.bytes());
        found.add(first, dtype);
        found.add(second, dtype);
        found
    }

    #[test]
    fn nan_and_infinite_values_are_counted_in_both_types() {
        let values = [f32::NAN, 1.0, f32::INFINITY, -f32::NAN, 0.0, -0.0, f32::NEG_INFINITY, 1e-40, -1e38, f32::NAN];
        for dtype in [DType::F32, DType::Bf16] {
            assert_eq!(count(&values, dtype), NonFinite { nan: 3, infinite: 2 }, "{dtype:?}");
        }
        // The bits of integers mean nothing as floats.
        assert_eq!(count(&values, DType::I32), NonFinite::default());
        assert_eq!(count(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE, 0.0], DType::F32), NonFinite::default());
    }

    #[test]
    fn the_error_names_the_tensor_and_the_counts() {
        let message = |nan, infinite| NonFinite { nan, infinite }.check("qkvw of layer 3").unwrap_err().to_string();
        assert!(message(12, 0).starts_with("qkvw of layer 3: expected finite values, found 12 NaN values; "));
        assert!(message(0, 1).contains("found 1 infinite values; "));
        assert!(
            message(2, 3).contains("found 2 NaN and 3 infinite values; the file is damaged or the training diverged")
        );
        assert!(NonFinite::default().check("wte").is_ok());
    }
}
