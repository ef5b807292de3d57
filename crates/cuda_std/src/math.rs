//! f32 functions at the speed of the special-function unit, with errors of a few units in the last place.
//! Products and sums are contracted to fused multiply-adds by the device compiler; results differ from the CPU's there.

use crate::backend;

/// `a * b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    backend::fma(a, b, c)
}

/// The larger; the other one if one is NaN.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    a.max(b)
}

/// 2^x (`ex2.approx.ftz.f32`).
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    backend::exp2(x)
}

/// e^x as 2^(x log2 e).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Natural logarithm, from log2 x (`lg2.approx.ftz.f32`).
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    backend::log2(x) * core::f32::consts::LN_2
}

/// 1 / x (`rcp.approx.ftz.f32`).
#[inline(always)]
pub fn recip(x: f32) -> f32 {
    backend::recip(x)
}

/// 1 / sqrt(x) (`rsqrt.approx.ftz.f32`).
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    backend::rsqrt(x)
}

/// Square root (`sqrt.approx.ftz.f32`).
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    backend::sqrt(x)
}

/// tanh x = 1 - 2 / (e^2x + 1): absolute error under 1e-6. Saturates to ±1.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    fma(-2.0, recip(exp(2.0 * x) + 1.0), 1.0)
}

/// tanh in one instruction, relative error 2^-11 (`tanh.approx.f32`).
#[inline(always)]
pub fn tanh_fast(x: f32) -> f32 {
    backend::tanh(x)
}
