//! Special functions and conversions. The device's special functions are approximations with errors of a few ulp; these
//! are correctly rounded and flush subnormals like the device. `fma` and the `_rn` functions match the device bit for
//! bit.

use super::access::check_accumulator_read;
use super::report::Site;
use crate::fp8::Fp8Format;
use std::panic::Location;

/// Flushes subnormals to zero of the same sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Stops the kernel if an operand comes from accumulators that were read before their wait.
#[inline(always)]
fn check_operands<const N: usize>(operands: [f32; N], at: Site) {
    for operand in operands {
        check_accumulator_read(operand.to_bits(), at);
    }
}

#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

#[inline]
#[track_caller]
pub fn exp2(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(flush(x).exp2())
}

#[inline]
#[track_caller]
pub fn log2(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(x).log2()
}

#[inline]
#[track_caller]
pub fn recip(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(flush(x).recip())
}

#[inline]
#[track_caller]
pub fn rsqrt(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(x).sqrt().recip()
}

#[inline]
#[track_caller]
pub fn sqrt(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(x).sqrt()
}

#[inline]
#[track_caller]
pub fn sin_approx(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(flush(x).sin())
}

#[inline]
#[track_caller]
pub fn cos_approx(x: f32) -> f32 {
    check_operands([x], Location::caller());
    flush(flush(x).cos())
}

#[inline]
#[track_caller]
pub fn sqrt_rn(x: f32) -> f32 {
    check_operands([x], Location::caller());
    x.sqrt()
}

#[inline]
#[track_caller]
pub fn div_rn(a: f32, b: f32) -> f32 {
    check_operands([a, b], Location::caller());
    a / b
}

#[inline]
#[track_caller]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    check_operands([a, b, c], Location::caller());
    a.mul_add(b, c)
}

pub fn sqrt_f64(x: f64) -> f64 {
    x.sqrt()
}

pub fn fma_f64(a: f64, b: f64, c: f64) -> f64 {
    a.mul_add(b, c)
}

/// Returns the larger operand. If one operand is NaN, returns the other.
#[inline]
#[track_caller]
pub fn max(a: f32, b: f32) -> f32 {
    check_operands([a, b], Location::caller());
    a.max(b)
}

/// Returns the smaller operand, or NaN if one operand is NaN.
#[inline]
#[track_caller]
pub fn min_or_nan(a: f32, b: f32) -> f32 {
    check_operands([a, b], Location::caller());
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.min(b) }
}

/// Rounds `x` to bf16 bits, to nearest even. Every NaN becomes 0x7fff, as in `cvt.rn.bf16x2.f32`.
#[inline]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() { 0x7fff } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }
}

/// Rounds `low` and `high` to bf16 and packs them into one word, with `high` in the upper half.
#[inline]
#[track_caller]
pub fn bf16x2(low: f32, high: f32) -> u32 {
    check_operands([low, high], Location::caller());
    bf16_bits(low) | bf16_bits(high) << 16
}

/// Returns the larger magnitude of each half, or NaN (0x7fff) if one is NaN. The sign bit is the exclusive or of both sign bits.
#[inline]
pub fn larger_magnitudes(a: u32, b: u32) -> u32 {
    let half = |a: u32, b: u32| {
        let larger = (a & 0x7fff).max(b & 0x7fff);
        (a ^ b) & 0x8000 | if larger > 0x7f80 { 0x7fff } else { larger }
    };
    half(a & 0xffff, b & 0xffff) | half(a >> 16, b >> 16) << 16
}

/// Multiplies each half of `a` by that of `b`, as bf16, rounded to nearest even.
#[inline]
pub fn multiply_bf16x2(a: u32, b: u32) -> u32 {
    // A multiplication of two bf16 is exact in f32, unless the result is subnormal.
    let low = f32::from_bits(a << 16) * f32::from_bits(b << 16);
    let high = f32::from_bits(a & 0xffff_0000) * f32::from_bits(b & 0xffff_0000);
    bf16_bits(low) | bf16_bits(high) << 16
}

/// Rounds `low` and `high` to E4M3, saturating, and packs them with `high` in the upper byte.
#[inline]
#[track_caller]
pub fn e4m3x2(low: f32, high: f32) -> u16 {
    fp8x2(Fp8Format::E4m3, low, high, Location::caller())
}

/// Rounds `low` and `high` to E5M2, saturating, and packs them with `high` in the upper byte.
#[inline]
#[track_caller]
pub fn e5m2x2(low: f32, high: f32) -> u16 {
    fp8x2(Fp8Format::E5m2, low, high, Location::caller())
}

#[inline]
fn fp8x2(format: Fp8Format, low: f32, high: f32, at: Site) -> u16 {
    check_operands([low, high], at);
    u16::from_le_bytes([format.encode(low), format.encode(high)])
}

/// Returns the four bytes of `low` and `high` that the hexadecimal digits of `selector` name, the lowest first.
#[inline]
pub fn permute_bytes(low: u32, high: u32, selector: u32) -> u32 {
    let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| bytes[(selector >> (4 * i) & 7) as usize]))
}

/// Rounds `x` to f16 bits, to nearest even. Every NaN becomes 0x7fff, as in `cvt.rn.f16x2.f32`.
#[inline]
fn f16_bits(x: f32) -> u32 {
    if x.is_nan() { 0x7fff } else { u32::from(half::f16::from_f32(x).to_bits()) }
}

/// Rounds `low` and `high` to f16 and packs them into one word, with `high` in the upper half.
#[inline]
#[track_caller]
pub fn f16x2(low: f32, high: f32) -> u32 {
    check_operands([low, high], Location::caller());
    f16_bits(low) | f16_bits(high) << 16
}

/// Converts the bits of an f16 to f32.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

/// Rounds to tf32, which has ten mantissa bits, with ties away from zero (`cvt.rna.tf32.f32`).
#[inline]
pub fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}
