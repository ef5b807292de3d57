//! The error of a result against its reference, and the error that is allowed.

use engine::tensor::DType;

/// The largest allowed [`ErrorStats::max_rel_error`], by the storage type of the result.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Bound for results stored as f32.
    pub f32: f32,
    /// Bound for results stored as bf16.
    pub bf16: f32,
}

impl Tolerance {
    /// Elementwise operations: rounding errors only. bf16 has 8 significant bits, so half a unit in the last place is
    /// 2^-9.
    pub const ELEMENTWISE: Self = Self { f32: 2e-6, bf16: 2.5e-3 };
    /// Sums of at most a few thousand terms, computed in f32 from inputs of the storage type.
    pub const REDUCTION: Self = Self { f32: 2e-5, bf16: 4e-3 };
    /// Chained operations with intermediate results in the storage type, such as a normalized sum.
    pub const CHAIN: Self = Self { f32: 5e-5, bf16: 2e-2 };
    /// Chained operations with the square of an intermediate result, which doubles its relative error.
    pub const SQUARED_CHAIN: Self = Self { f32: 1e-4, bf16: 4e-2 };
    /// GEMMs that accumulate into their output. cuBLASLt rounds to bf16 before the addition and after it.
    pub const ACCUMULATED: Self = Self { f32: 2e-5, bf16: 8e-3 };
    /// Attention forward. Later rows average over more keys, so most values are small compared with those of the first
    /// rows, whose probabilities (rounded to bf16) are large.
    pub const ATTENTION: Self = Self { f32: 5e-5, bf16: 4e-2 };
    /// Attention backward. The output, the probabilities and their gradients are all rounded to bf16. In f32, each GEMM
    /// consists of three tf32 GEMMs and loses 2^-22 of each term; the observed error is 5.1e-5 for 2048 keys.
    pub const ATTENTION_BACKWARD: Self = Self { f32: 1e-4, bf16: 8e-2 };
    /// Returns [`ATTENTION_BACKWARD`](Self::ATTENTION_BACKWARD) for dK and dV that are sums over a group of query heads. Tensor cores
    /// truncate f32 sums: in a simulation of 1024 queries, the error grew from 2.1e-5 to 2.0e-4 for 4 heads and 8.8e-4 for 8.
    pub fn attention_backward(group: usize) -> Self {
        let (Self { f32, bf16 }, group) = (Self::ATTENTION_BACKWARD, group as f32);
        Self { f32: f32 * group * group, bf16: bf16 * group.sqrt() }
    }

    /// Gradients of a router's logits. They are differences of sums over the channels of experts, and the terms of these sums are rounded
    /// to bf16.
    pub const ROUTER: Self = Self { f32: 1e-4, bf16: 8e-2 };
    /// Newton-Schulz iterations: rounding errors in directions of small singular values grow by up to a factor of a thousand.
    pub const ORTHOGONALIZED: Self = Self { f32: 2e-3, bf16: 2e-1 };
    /// Stochastic rounding: up to one unit in the last place in either direction.
    pub const STOCHASTIC: Self = Self { f32: 2e-5, bf16: 1e-2 };
}

/// The error of a tensor against its reference.
#[derive(Clone, Copy, Debug)]
pub struct ErrorStats {
    /// Largest relative error, |actual - expected| / (|expected| + rms(expected)). It is infinite if only one of the
    /// values is NaN.
    pub max_rel_error: f32,
    /// Index of the element with the largest error.
    pub index: usize,
    /// Value of that element.
    pub actual: f32,
    /// Value of that element in the reference.
    pub expected: f32,
    /// Largest relative error allowed; 0 requires identical bits.
    pub tolerance: f32,
    /// Number of elements.
    pub elements: usize,
    /// Number of elements with different bits. Two NaNs count as equal.
    pub mismatches: usize,
}

impl ErrorStats {
    /// Compares a tensor of type `dtype` with its reference.
    pub fn between(actual: &[f32], expected: &[f32], tolerance: Tolerance, dtype: DType) -> Self {
        let square = expected.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let rms = (square / expected.len().max(1) as f64).sqrt() as f32;
        let tolerance = if dtype == DType::Bf16 { tolerance.bf16 } else { tolerance.f32 };
        let elements = expected.len();
        let mut worst =
            Self { max_rel_error: 0.0, index: 0, actual: 0.0, expected: 0.0, tolerance, elements, mismatches: 0 };
        for (index, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            // Equal bits are handled first, because the difference of two equal infinities is NaN.
            if actual.to_bits() == expected.to_bits() || (actual.is_nan() && expected.is_nan()) {
                continue;
            }
            worst.mismatches += 1;
            let error = (actual - expected).abs() / (expected.abs() + rms);
            let error = if error.is_nan() { f32::INFINITY } else { error };
            if error > worst.max_rel_error {
                worst = Self { max_rel_error: error, index, actual, expected, ..worst };
            }
        }
        worst
    }

    /// Returns whether the error is within the tolerance.
    pub fn ok(&self) -> bool {
        self.max_rel_error <= self.tolerance && (self.tolerance > 0.0 || self.mismatches == 0)
    }
}
