//! How far two results may lie apart.

use engine::tensor::DType;

/// Largest allowed [`Error::relative`], by the type the result is stored in.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub f32: f32,
    pub bf16: f32,
}

impl Tolerance {
    /// One operation on each element: rounding only. bf16 keeps 8 bits, so half a unit is 2^-9.
    pub const ELEMENTWISE: Self = Self { f32: 2e-6, bf16: 2.5e-3 };
    /// Sums over at most a few thousand terms, computed in f32 from inputs of the storage type.
    pub const REDUCTION: Self = Self { f32: 2e-5, bf16: 4e-3 };
    /// Several roundings to the storage type on the way (a rounded sum, then its norm; probabilities, then their product).
    pub const CHAIN: Self = Self { f32: 5e-5, bf16: 2e-2 };
    /// Added to what is there: cuBLASLt rounds a product to bf16 before it adds, so two roundings.
    pub const ACCUMULATED: Self = Self { f32: 2e-5, bf16: 8e-3 };
    /// Attention: averages over more and more keys, so most values are small beside the first ones, whose probabilities
    /// (rounded to bf16) are large. The backward has one link more: output, probabilities and their gradients are rounded;
    /// in f32 its products are three of tf32, which loses 2^-22 of each term (5.1e-5 seen over 2048 keys).
    pub const ATTENTION: Self = Self { f32: 5e-5, bf16: 4e-2 };
    pub const ATTENTION_BACKWARD: Self = Self { f32: 1e-4, bf16: 8e-2 };
    /// Rounded stochastically: a whole unit either way.
    pub const STOCHASTIC: Self = Self { f32: 2e-5, bf16: 1e-2 };
}

/// How far a result lies from its reference.
#[derive(Clone, Copy, Debug)]
pub struct Error {
    /// Largest |got - want| / (|want| + rms(want)); infinite where one is NaN and the other not.
    pub relative: f32,
    /// Where that is.
    pub at: usize,
    pub got: f32,
    pub want: f32,
    pub allowed: f32,
    /// Values compared, and how many differ in some bit (two NaNs do not).
    pub values: usize,
    pub differing: usize,
}

impl Error {
    pub fn between(got: &[f32], want: &[f32], tolerance: Tolerance, dtype: DType) -> Self {
        let square = want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
        let rms = (square / want.len().max(1) as f64).sqrt() as f32;
        let allowed = if dtype == DType::Bf16 { tolerance.bf16 } else { tolerance.f32 };
        let mut worst = Self { relative: 0.0, at: 0, got: 0.0, want: 0.0, allowed, values: want.len(), differing: 0 };
        for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
            // Equal bits first: infinities that agree have no distance.
            if got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()) {
                continue;
            }
            worst.differing += 1;
            let relative = (got - want).abs() / (want.abs() + rms);
            let relative = if relative.is_nan() { f32::INFINITY } else { relative };
            if relative > worst.relative {
                worst = Self { relative, at, got, want, ..worst };
            }
        }
        worst
    }

    pub fn ok(&self) -> bool {
        self.relative <= self.allowed && (self.allowed > 0.0 || self.differing == 0)
    }
}
