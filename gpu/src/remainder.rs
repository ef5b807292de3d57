//! f32 master weights as bf16 parameters and 16-bit remainders: 4 bytes per weight in place of 6, without loss.
//!
//! The remainder is the lower half of the master weight. The parameter is the master weight rounded to nearest, ties
//! away from zero. The direction of that rounding is the uppermost bit of the remainder, so the upper half of the
//! master weight can be recovered:
//!
//! ```text
//! param = upper + (remainder >> 15)          upper = param - (remainder >> 15)
//! ```
//!
//! With ties to even, the direction would also depend on `upper`. NaN becomes a NaN parameter with remainder 0. A finite
//! master weight above the largest bf16 has an infinite parameter and is recovered.

/// Returns the parameter, which bf16 represents exactly, and the remainder of a master weight.
#[inline(always)]
pub const fn split(master: f32) -> (f32, u16) {
    let bits = master.to_bits();
    // The addition could carry a NaN into the sign.
    if master.is_nan() {
        return (f32::NAN, 0);
    }
    (f32::from_bits(bits.wrapping_add(0x8000) & 0xffff_0000), bits as u16)
}

/// Returns the master weight of a parameter and its remainder.
#[inline(always)]
pub const fn join(param: f32, remainder: u16) -> f32 {
    f32::from_bits(join_bits(param.to_bits() | remainder as u32))
}

/// Returns the bits of the master weight of a parameter, given in the upper half of `bits`, and its remainder in the lower half.
#[inline(always)]
pub const fn join_bits(bits: u32) -> u32 {
    bits.wrapping_sub((bits & 0x8000) << 1)
}

#[cfg(test)]
mod tests {
    use super::{join, split};

    /// Returns the bf16 nearest to a finite number, ties away from zero, by comparing distances in f64.
    fn nearest(value: f32) -> f32 {
        let below = f32::from_bits(value.to_bits() & 0xffff_0000);
        let above = f32::from_bits(below.to_bits() + 0x1_0000);
        // For rounding, the value after the largest finite one is 2^128.
        let size = |x: f32| if x.is_infinite() { 128f64.exp2() } else { f64::from(x).abs() };
        let [low, middle, high] = [size(below), f64::from(value).abs(), size(above)];
        if middle - low < high - middle { below } else { above }
    }

    /// Steps through the bit patterns, with every pattern next to a tie.
    fn patterns() -> impl Iterator<Item = u32> {
        let near = (0..=u16::MAX)
            .flat_map(|upper| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| u32::from(upper) << 16 | lower));
        near.chain((0..1 << 20).map(|i: u32| i.wrapping_mul(2_654_435_761)))
    }

    #[test]
    fn every_master_weight_is_recovered() {
        for bits in patterns() {
            let master = f32::from_bits(bits);
            let (param, remainder) = split(master);
            assert_eq!(param.to_bits() & 0xffff, 0, "{bits:#010x}");
            let joined = join(param, remainder);
            assert!(joined.to_bits() == bits || joined.is_nan() && master.is_nan() && param.is_nan(), "{bits:#010x}");
        }
    }

    #[test]
    fn parameters_are_the_nearest_bf16() {
        for value in patterns().map(f32::from_bits).filter(|value| value.is_finite()) {
            assert_eq!(split(value).0.to_bits(), nearest(value).to_bits(), "{value:e}");
        }
        assert_eq!(split(f32::NEG_INFINITY), (f32::NEG_INFINITY, 0));
        // Ties go away from zero, where round to nearest even would keep the even 1.0.
        let tie = f32::from_bits(0x3f80_8000);
        assert_eq!(split(tie), (f32::from_bits(0x3f81_0000), 0x8000));
        assert_eq!(split(-tie), (f32::from_bits(0xbf81_0000), 0x8000));
    }

    #[test]
    fn bf16_has_no_remainder() {
        for upper in (0..=u16::MAX).filter(|upper| upper & 0x7fff <= 0x7f80) {
            let value = f32::from_bits(u32::from(upper) << 16);
            assert_eq!((split(value).0.to_bits(), split(value).1), (value.to_bits(), 0));
            assert_eq!(join(value, 0).to_bits(), value.to_bits());
        }
    }
}
