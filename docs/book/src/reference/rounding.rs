//! Rounding of f32 to bf16, and an experiment with a sum of many small updates.

/// Returns the bf16 nearest to a number that is not NaN, the even one of two equally near ones.
pub fn nearest_even(value: f32) -> u16 {
    let bits = value.to_bits();
    let (kept, discarded) = ((bits >> 16) as u16, bits & 0xffff);
    let up = discarded > 0x8000 || discarded == 0x8000 && kept % 2 == 1;
    // A carry out of the significand adds 1 to the exponent, as it should.
    if up { kept + 1 } else { kept }
}

/// Returns one of the two bf16 next to a number that is not NaN. Up has the probability discarded / 65536 if `random` is uniform.
pub fn stochastic(value: f32, random: u16) -> u16 {
    let bits = value.to_bits();
    ((bits + u32::from(random)) >> 16) as u16
}

/// Returns the number that a bf16 represents.
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// A generator of random bits: xorshift32 (Marsaglia, 2003).
pub struct Random(pub u32);

impl Random {
    /// Returns the next 16 bits.
    pub fn bits(&mut self) -> u16 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        (self.0 >> 16) as u16
    }
}

/// Adds `update` to 1 `steps` times, and rounds to bf16 after each addition.
pub fn accumulate(update: f32, steps: usize, mut round: impl FnMut(f32) -> u16) -> f32 {
    let mut weight = nearest_even(1.0);
    for _ in 0..steps {
        weight = round(to_f32(weight) + update);
    }
    to_f32(weight)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;

    /// Returns PyTorch's pairs of f32 bits and bf16 bits.
    fn pytorch() -> Vec<(u32, u16)> {
        let lines = include_str!("../../pytorch/rounding.txt").lines();
        let pairs = lines.filter_map(|line| line.split_once(' '));
        let parse =
            |(bits, rounded)| Some((u32::from_str_radix(bits, 16).ok()?, u16::from_str_radix(rounded, 16).ok()?));
        pairs.filter_map(parse).collect()
    }

    #[test]
    fn nearest_even_is_that_of_pytorch() {
        let pairs = pytorch();
        assert_eq!(pairs.len(), 10);
        for (bits, expected) in pairs {
            assert_eq!(nearest_even(f32::from_bits(bits)), expected, "{bits:08x}");
        }
    }

    #[test]
    fn updates_below_half_a_step_vanish() {
        assert_eq!(accumulate(1e-3, 1000, nearest_even), 1.0);
        assert!(include_str!("../../pytorch/rounding.txt").ends_with("1 + 1000 * 0.001 = 1.0\n"));
    }

    #[test]
    fn stochastic_rounding_is_exact_on_average_over_all_random_bits() {
        for value in [1.001f32, -1.001, 5.4321, 1e-30, 1.0] {
            let mean = (0..=u16::MAX).map(|random| f64::from(to_f32(stochastic(value, random)))).sum::<f64>() / 65536.0;
            assert_eq!(mean, f64::from(value), "{value}");
        }
    }

    #[test]
    fn stochastic_updates_arrive_on_average() {
        let runs = 400;
        let mut random = Random(1);
        let mut ends = Vec::new();
        for _ in 0..runs {
            ends.push(f64::from(accumulate(1e-3, 1000, |value| stochastic(value, random.bits()))));
        }
        let mean = ends.iter().sum::<f64>() / f64::from(runs);
        let variance = ends.iter().map(|end| (end - mean).powi(2)).sum::<f64>() / f64::from(runs);
        println!("mean {mean:.4}, standard deviation {:.4}", variance.sqrt());
        assert!((mean - 2.0).abs() < 0.02, "{mean}");
        assert!((0.03..0.12).contains(&variance.sqrt()), "{}", variance.sqrt());
    }
}
