//! The special-function unit and conversions. The device's functions are approximations with errors of a few units in
//! the last place; these are the correctly rounded neighbours, with the same flushing of subnormals. `fma` and the `_rn`
//! functions are the device's bit for bit.

use super::hopper::catch_early;
use super::report::Site;
use std::panic::Location;

/// Subnormals as zero of the same sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

#[inline(always)]
fn catch<const N: usize>(operands: [f32; N], at: Site) {
    for operand in operands {
        catch_early(operand.to_bits(), at);
    }
}

#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

#[inline]
#[track_caller]
pub fn exp2(x: f32) -> f32 {
    catch([x], Location::caller());
    flush(flush(x).exp2())
}

#[inline]
#[track_caller]
pub fn log2(x: f32) -> f32 {
    catch([x], Location::caller());
    flush(x).log2()
}

#[inline]
#[track_caller]
pub fn recip(x: f32) -> f32 {
    catch([x], Location::caller());
    flush(flush(x).recip())
}

#[inline]
#[track_caller]
pub fn rsqrt(x: f32) -> f32 {
    catch([x], Location::caller());
    flush(x).sqrt().recip()
}

#[inline]
#[track_caller]
pub fn sqrt(x: f32) -> f32 {
    catch([x], Location::caller());
    flush(x).sqrt()
}

#[inline]
#[track_caller]
pub fn tanh(x: f32) -> f32 {
    catch([x], Location::caller());
    x.tanh()
}

#[inline]
#[track_caller]
pub fn sqrt_rn(x: f32) -> f32 {
    catch([x], Location::caller());
    x.sqrt()
}

#[inline]
#[track_caller]
pub fn div_rn(a: f32, b: f32) -> f32 {
    catch([a, b], Location::caller());
    a / b
}

#[inline]
#[track_caller]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    catch([a, b, c], Location::caller());
    a.mul_add(b, c)
}

/// The larger; the other one if one is NaN.
#[inline]
#[track_caller]
pub fn max(a: f32, b: f32) -> f32 {
    catch([a, b], Location::caller());
    a.max(b)
}

/// Upper half of `x` rounded to nearest even; every NaN becomes 0x7fff, as `cvt.rn.bf16x2.f32` makes it.
#[inline]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() { 0x7fff } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }
}

/// `low` and `high` rounded to bf16, `high` in the upper half.
#[inline]
#[track_caller]
pub fn bf16x2(low: f32, high: f32) -> u32 {
    catch([low, high], Location::caller());
    bf16_bits(low) | bf16_bits(high) << 16
}

/// Rounded to tf32's ten mantissa bits, ties away from zero (`cvt.rna.tf32.f32`).
#[inline]
pub fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}
