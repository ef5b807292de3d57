//! Mathematical functions of f32, and in [`double`] of f64. Functions with the suffix `_rn` round to nearest. [`sin`], [`cos`] and
//! [`pow`] are those of the crate `libm`, with errors of about one ulp over the whole range. The others use the special-function unit
//! and have errors of a few ulp, except [`sin_approx`] and [`cos_approx`].
//!
//! The device compiler contracts multiplications and additions to fused multiply-adds and approximates `/`, so these
//! results can differ from the CPU's. A kernel that uses only [`fma`], [`div_rn`], [`sqrt_rn`], their bounded forms, and
//! multiplications and additions that cannot be contracted computes the same bits on both.

use crate::backend;

/// Returns `a * b + c`, rounded once.
#[inline(always)]
#[track_caller]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    backend::fma(a, b, c)
}

/// Returns the larger operand. If one operand is NaN, returns the other.
#[inline(always)]
#[track_caller]
pub fn max(a: f32, b: f32) -> f32 {
    backend::max(a, b)
}

/// Returns 2^x (`ex2.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn exp2(x: f32) -> f32 {
    backend::exp2(x)
}

/// Returns e^x, computed as 2^(x log2 e).
#[inline(always)]
#[track_caller]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Returns the natural logarithm, computed from log2 x (`lg2.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn ln(x: f32) -> f32 {
    backend::log2(x) * core::f32::consts::LN_2
}

/// Returns 1 / x (`rcp.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn recip(x: f32) -> f32 {
    backend::recip(x)
}

/// Returns 1 / sqrt(x) (`rsqrt.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn rsqrt(x: f32) -> f32 {
    backend::rsqrt(x)
}

/// Returns the square root (`sqrt.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn sqrt(x: f32) -> f32 {
    backend::sqrt(x)
}

/// Returns a / b, correctly rounded (`div.rn.f32`).
#[inline(always)]
#[track_caller]
pub fn div_rn(a: f32, b: f32) -> f32 {
    backend::div_rn(a, b)
}

/// Returns the square root, correctly rounded (`sqrt.rn.f32`).
#[inline(always)]
#[track_caller]
pub fn sqrt_rn(x: f32) -> f32 {
    backend::sqrt_rn(x)
}

/// Returns the square root of `x`, correctly rounded, in fewer instructions than [`sqrt_rn`].
///
/// `x` must be 0 or at least 2^-100. The result is NaN if `x` is negative, -0, infinite or NaN.
#[inline(always)]
#[track_caller]
pub fn sqrt_rn_bounded(x: f32) -> f32 {
    // This is what ptxas makes of `sqrt.rn`, without its branch for operands outside of a range. It does not need the bound, which
    // replaces the infinity of 0.
    let y = backend::min_or_nan(rsqrt(x), const { f32::from_bits((127 + 60) << 23) });
    let root = x * y;
    fma(fma(-root, root, x), 0.5 * y, root)
}

/// Returns a / b, correctly rounded, in fewer instructions than [`div_rn`].
///
/// |a| must be 0 or at least 2^-86, and `b` from 2^-40 to 2^40. The result is infinite or NaN if an operand is, and if the quotient
/// overflows. It may be so from 2^127 on.
#[inline(always)]
#[track_caller]
pub fn div_rn_bounded(a: f32, b: f32) -> f32 {
    // This is what ptxas makes of `div.rn`, without its branch for operands outside of a range.
    let y = recip(b);
    let y = fma(y, fma(-b, y, 1.0), y);
    let quotient = a * y;
    fma(y, fma(-b, quotient, a), quotient)
}

/// Returns the sine of `x` radians in one instruction (`sin.approx.ftz.f32`). [`sin`] is accurate, and slower.
///
/// The absolute error is at most 2^-20.5 for |x| up to 2 pi and 2^-14.7 for |x| up to 100 pi. NVIDIA states no bound beyond. The
/// emulator's result has an error of about one ulp for any `x`.
#[inline(always)]
#[track_caller]
pub fn sin_approx(x: f32) -> f32 {
    backend::sin_approx(x)
}

/// Returns the cosine of `x` radians in one instruction (`cos.approx.ftz.f32`). Its errors are those of [`sin_approx`].
#[inline(always)]
#[track_caller]
pub fn cos_approx(x: f32) -> f32 {
    backend::cos_approx(x)
}

/// Returns tanh x, computed as 1 - 2 / (e^2x + 1) with an absolute error below 1e-6. Saturates to ±1.
#[inline(always)]
#[track_caller]
pub fn tanh(x: f32) -> f32 {
    fma(-2.0, recip(exp(2.0 * x) + 1.0), 1.0)
}

/// Returns the sine of `x` radians. [`sin_approx`] is faster.
#[inline(always)]
pub fn sin(x: f32) -> f32 {
    libm::sinf(x)
}

/// Returns the cosine of `x` radians. [`cos_approx`] is faster.
#[inline(always)]
pub fn cos(x: f32) -> f32 {
    libm::cosf(x)
}

/// Returns `x` to the power of `y`.
#[inline(always)]
pub fn pow(x: f32, y: f32) -> f32 {
    libm::powf(x, y)
}

/// Mathematical functions of f64, those of the crate `libm`: errors are about one ulp. A GPU contracts multiplications and additions,
/// so the last bit can differ from the CPU's.
pub mod double {
    macro_rules! functions {
        ($($(#[$doc:meta])* $name:ident($($x:ident),*) = $function:ident;)*) => {$(
            $(#[$doc])*
            #[inline(always)]
            pub fn $name($($x: f64),*) -> f64 {
                libm::$function($($x),*)
            }
        )*};
    }

    functions! {
        /// Returns the sine of `x` radians.
        sin(x) = sin;
        /// Returns the cosine of `x` radians.
        cos(x) = cos;
        /// Returns `x` to the power of `y`.
        pow(x, y) = pow;
        /// Returns e^x.
        exp(x) = exp;
        /// Returns 2^x.
        exp2(x) = exp2;
        /// Returns the natural logarithm.
        ln(x) = log;
        /// Returns the logarithm to base 2.
        log2(x) = log2;
        /// Returns the hyperbolic tangent.
        tanh(x) = tanh;
        /// Returns the error function.
        erf(x) = erf;
    }

    /// Returns the square root, correctly rounded (`sqrt.rn.f64`).
    #[inline(always)]
    pub fn sqrt(x: f64) -> f64 {
        crate::backend::sqrt_f64(x)
    }

    /// Returns `a * b + c`, rounded once (`fma.rn.f64`).
    #[inline(always)]
    pub fn fma(a: f64, b: f64, c: f64) -> f64 {
        crate::backend::fma_f64(a, b, c)
    }
}

#[cfg(test)]
mod tests {
    use super::{div_rn_bounded, sqrt_rn_bounded};

    /// Returns numbers with random mantissas and exponents in `exponents`.
    fn numbers(seed: u64, exponents: std::ops::Range<i32>) -> impl Iterator<Item = f32> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exponent = exponents.start + ((state >> 33) % exponents.len() as u64) as i32;
            // Half of the mantissas are near a power of two.
            let mantissa = (state >> 10) as u32 & 0x7f_ffff;
            let mantissa = if state >> 63 == 0 { mantissa } else { (mantissa & 0x1f).wrapping_sub(16) & 0x7f_ffff };
            f32::from_bits(((127 + exponent) as u32) << 23 | mantissa)
        })
    }

    /// Covers every mantissa. The root of 4x is twice that of x.
    #[test]
    fn bounded_roots_are_correctly_rounded() {
        for x in (1f32.to_bits()..4f32.to_bits()).map(f32::from_bits).chain(numbers(1, -100..128).take(1 << 20)) {
            assert_eq!(sqrt_rn_bounded(x).to_bits(), x.sqrt().to_bits(), "{x:e}");
        }
        let roots = [0.0, f32::MAX].map(|x| sqrt_rn_bounded(x).to_bits());
        assert_eq!(roots, [0, f32::MAX.sqrt().to_bits()]);
        assert!([-1.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN].iter().all(|&x| sqrt_rn_bounded(x).is_nan()));
    }

    #[test]
    fn bounded_quotients_are_correctly_rounded() {
        for (a, b) in numbers(2, -86..128).zip(numbers(3, -40..40)).take(1 << 22) {
            for a in [a, -a] {
                let (got, want) = (div_rn_bounded(a, b), a / b);
                let overflows = want.abs() >= 2f32.powi(127) && !got.is_finite();
                assert!(got.to_bits() == want.to_bits() || overflows, "{a:e} / {b:e} = {got:e}");
            }
        }
        assert_eq!(div_rn_bounded(0.0, 3.0).to_bits(), 0);
        assert!([f32::INFINITY, f32::NEG_INFINITY, f32::NAN].iter().all(|&a| div_rn_bounded(a, 3.0).is_nan()));
        assert!(div_rn_bounded(3.0, f32::NAN).is_nan() && !div_rn_bounded(f32::MAX, 0.1).is_finite());
    }
}
