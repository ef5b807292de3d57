//! Exercise: stochastic rounding from random bits.
//!
//! Round an f32 to bf16 with 16 uniform random bits. The number lies between two bf16, or is one. The probability of the one with the
//! larger magnitude is the fraction of the way to it. NaN must remain NaN, and infinities must remain infinite.

/// Returns the bits of a bf16.
pub fn round(value: f32, random: u16) -> u16 {
    unimplemented!("exercise stochastic_rounding")
}
