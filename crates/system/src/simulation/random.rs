//! Random numbers of a simulation.

use std::time::Duration;

/// SplitMix64, a generator whose next value is a hash of a counter.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Hashes a number: the output function of SplitMix64.
pub(crate) const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Random {
    /// Creates a generator from a seed.
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `n`, or 0 if `n` is 0.
    pub const fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }

    /// Returns a duration of at most `longest`, in microseconds.
    pub const fn up_to(&mut self, longest: Duration) -> Duration {
        if longest.is_zero() { longest } else { Duration::from_micros(self.below(longest.as_micros() as u64 + 1)) }
    }

    /// Returns one of some values.
    pub fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}
