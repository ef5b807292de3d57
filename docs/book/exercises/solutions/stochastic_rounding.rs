//! Exercise: stochastic rounding from random bits.
//!
//! Round an f32 to bf16 with 16 uniform random bits. The number lies between two bf16, or is one. The probability of the one with the
//! larger magnitude is the fraction of the way to it. NaN must remain NaN, and infinities must remain infinite.

/// Returns the bits of a bf16.
pub fn round(value: f32, random: u16) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The upper half alone could be that of infinity, and a carry could turn it into zero. Bit 6 is a bit of the significand.
        return (bits >> 16) as u16 | 1 << 6;
    }
    // The sum carries into the upper half for `discarded` of the 65536 random numbers.
    ((bits + u32::from(random)) >> 16) as u16
}
