//! Mathematical functions of f32. Functions whose names end in `_rn` round to nearest. The others use the
//! special-function unit and have errors of a few ulp.
//!
//! The device compiler contracts multiplications and additions to fused multiply-adds and approximates `/`, so these
//! results can differ from the CPU's. A kernel that uses only [`fma`], [`div_rn`], [`sqrt_rn`], and multiplications and
//! additions that cannot be contracted computes the same bits on both.

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

/// Returns tanh x, computed as 1 - 2 / (e^2x + 1) with an absolute error below 1e-6. Saturates to ±1.
#[inline(always)]
#[track_caller]
pub fn tanh(x: f32) -> f32 {
    fma(-2.0, recip(exp(2.0 * x) + 1.0), 1.0)
}
