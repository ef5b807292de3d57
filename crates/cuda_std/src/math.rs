//! f32 functions. Unless their names end in `_rn` (rounded to nearest) they have the speed of the special-function unit, and
//! errors of a few units in the last place.
//!
//! The device compiler contracts products and sums to fused multiply-adds and approximates `/`, so results differ from the
//! CPU's there. A kernel of [`fma`], [`div_rn`], [`sqrt_rn`] and lone products or sums gives the same bits on both.

use crate::backend;

/// `a * b + c`, rounded once.
#[inline(always)]
#[track_caller]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    backend::fma(a, b, c)
}

/// The larger; the other one if one is NaN.
#[inline(always)]
#[track_caller]
pub fn max(a: f32, b: f32) -> f32 {
    backend::max(a, b)
}

/// 2^x (`ex2.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn exp2(x: f32) -> f32 {
    backend::exp2(x)
}

/// e^x as 2^(x log2 e).
#[inline(always)]
#[track_caller]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Natural logarithm, from log2 x (`lg2.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn ln(x: f32) -> f32 {
    backend::log2(x) * core::f32::consts::LN_2
}

/// 1 / x (`rcp.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn recip(x: f32) -> f32 {
    backend::recip(x)
}

/// 1 / sqrt(x) (`rsqrt.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn rsqrt(x: f32) -> f32 {
    backend::rsqrt(x)
}

/// Square root (`sqrt.approx.ftz.f32`).
#[inline(always)]
#[track_caller]
pub fn sqrt(x: f32) -> f32 {
    backend::sqrt(x)
}

/// a / b, correctly rounded (`div.rn.f32`).
#[inline(always)]
#[track_caller]
pub fn div_rn(a: f32, b: f32) -> f32 {
    backend::div_rn(a, b)
}

/// Square root, correctly rounded (`sqrt.rn.f32`).
#[inline(always)]
#[track_caller]
pub fn sqrt_rn(x: f32) -> f32 {
    backend::sqrt_rn(x)
}

/// tanh x = 1 - 2 / (e^2x + 1): absolute error under 1e-6. Saturates to ±1.
#[inline(always)]
#[track_caller]
pub fn tanh(x: f32) -> f32 {
    fma(-2.0, recip(exp(2.0 * x) + 1.0), 1.0)
}

/// tanh in one instruction, relative error 2^-11 (`tanh.approx.f32`).
#[inline(always)]
#[track_caller]
pub fn tanh_fast(x: f32) -> f32 {
    backend::tanh(x)
}
