//! Random number generators that produce the same bits as PyTorch's CPU generator and llm.c.
//!
//! [`Mt19937`] draws initial weights and data permutations. [`XorShift`] draws stochastic rounding seeds and sampling
//! coins.

#![warn(missing_docs)]

use rayon::prelude::*;

/// Words of state of `mt19937`.
const N: usize = 624;
/// Offset of the word that each state word is combined with.
const M: usize = 397;

/// The Mersenne Twister `mt19937`. Checkpoints store its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mt19937 {
    /// Draws left in the current block of 624 words, plus one.
    pub left: u32,
    /// Index in `state` of the next word to draw.
    pub next: u32,
    /// The current block of untempered words.
    pub state: [u32; N],
}

impl Mt19937 {
    /// Creates a generator from a seed, as `torch.manual_seed` does.
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let last = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        Self { left: 1, next: 0, state }
    }

    /// Generates the next block of state words.
    fn advance(&mut self) {
        let twist = |high: u32, low: u32, far: u32| {
            let mixed = (high & 0x8000_0000) | (low & 0x7fff_ffff);
            far ^ (mixed >> 1) ^ if low & 1 == 1 { 0x9908_b0df } else { 0 }
        };
        let state = &mut self.state;
        for i in 0..N - M {
            state[i] = twist(state[i], state[i + 1], state[i + M]);
        }
        for i in N - M..N - 1 {
            state[i] = twist(state[i], state[i + 1], state[i + M - N]);
        }
        state[N - 1] = twist(state[N - 1], state[0], state[M - 1]);
        (self.left, self.next) = (N as u32, 0);
    }

    /// Returns the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.left -= 1;
        if self.left == 0 {
            self.advance();
        }
        let word = self.state[self.next as usize];
        self.next += 1;
        temper(word)
    }

    /// Returns 64 random bits from two draws. The first draw is the high half.
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        high << 32 | u64::from(self.next_u32())
    }

    /// Returns a uniform value in [0, 1) with 24 random bits.
    pub fn next_f32(&mut self) -> f32 {
        unit_f32(self.next_u32())
    }

    /// Returns a uniform value in [0, 1) with 53 random bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() & ((1 << 53) - 1)) as f64 * 2f64.powi(-53)
    }

    /// Returns an integer below `n`, as `torch.randint(0, n)` does. It takes the remainder of a draw, so the
    /// distribution is slightly biased.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        self.next_u32() % n
    }

    /// Fills `values` from a normal distribution with mean 0 and standard deviation `std`.
    ///
    /// The values match `Tensor.normal_` on a CPU without vector instructions. Draws are sequential; the Box-Muller
    /// transform runs on all threads.
    pub fn normal(&mut self, values: &mut [f32], std: f32) {
        const BLOCK: usize = 16;
        const STRIP: usize = (1 << 16) * BLOCK;
        if values.len() < BLOCK {
            return self.normal_few(values, std);
        }
        let transform = |strip: &mut [f32]| {
            strip.par_chunks_mut(1024 * BLOCK).for_each(|chunk| {
                for block in chunk.as_chunks_mut::<BLOCK>().0 {
                    normal_block(block, std);
                }
            });
        };
        let whole = values.len() / BLOCK * BLOCK;
        // Drawing one strip overlaps with transforming the previous strip.
        let mut drawn: &mut [f32] = &mut [];
        for strip in values.chunks_mut(STRIP) {
            let next = &mut *strip;
            rayon::join(|| self.fill(next), || transform(drawn));
            drawn = strip;
        }
        transform(drawn);
        if whole < values.len()
            && let Some(last) = values.last_chunk_mut::<BLOCK>()
        {
            self.fill(last);
            normal_block(last, std);
        }
    }

    /// Fills `values` with uniform values, as repeated calls of [`next_f32`](Self::next_f32) would.
    fn fill(&mut self, mut values: &mut [f32]) {
        while !values.is_empty() {
            if self.left == 1 {
                self.advance();
                self.left += 1;
            }
            let n = values.len().min(self.left as usize - 1);
            let (head, tail) = values.split_at_mut(n);
            let start = self.next as usize;
            for (value, word) in head.iter_mut().zip(&self.state[start..start + n]) {
                *value = unit_f32(temper(*word));
            }
            self.left -= n as u32;
            self.next += n as u32;
            values = tail;
        }
    }

    /// Implements [`normal`](Self::normal) for fewer than 16 values, in double precision. Each pair of values takes two
    /// draws; an odd last value discards the second value of its pair.
    fn normal_few(&mut self, values: &mut [f32], std: f32) {
        for pair in values.chunks_mut(2) {
            let theta = 2.0 * std::f64::consts::PI * self.next_f64();
            let radius = (-2.0 * (-self.next_f64()).ln_1p()).sqrt();
            let parts = [theta.cos(), theta.sin()];
            for (value, part) in pair.iter_mut().zip(parts) {
                *value = (radius * part * f64::from(std)) as f32;
            }
        }
    }

    /// Shuffles `values` in place with the Fisher-Yates algorithm, starting at the end.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            let j = self.below(i as u32 + 1);
            values.swap(i, j as usize);
        }
    }
}

/// Returns the random bits of a state word.
fn temper(mut word: u32) -> u32 {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c_5680;
    word ^= (word << 15) & 0xefc6_0000;
    word ^ (word >> 18)
}

/// Converts the low 24 bits of a draw to a value in [0, 1).
fn unit_f32(word: u32) -> f32 {
    (word & 0x00ff_ffff) as f32 * 2f32.powi(-24)
}

/// Returns the radius and angle of the Box-Muller transform.
///
/// llm.c adds a small epsilon to `u1`; PyTorch does not, and neither does this function. The epsilon changes the last
/// bits of a few values in a million. `u1` is at least 2^-24, so the logarithm is finite.
fn polar(u1: f32, u2: f32) -> (f32, f32) {
    let radius = (-2.0 * u1.ln()).sqrt();
    (radius, (2.0 * std::f64::consts::PI * f64::from(u2)) as f32)
}

/// Transforms 16 uniform values to normal values. Elements `i` and `i + 8` form a Box-Muller pair.
fn normal_block(block: &mut [f32; 16], std: f32) {
    let (first, second) = block.split_at_mut(8);
    for (first, second) in first.iter_mut().zip(second) {
        let (radius, theta) = polar(1.0 - *first, *second);
        *first = radius * theta.cos() * std;
        *second = radius * theta.sin() * std;
    }
}

/// The xorshift64* generator, which draws seeds for stochastic rounding and coins for sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XorShift {
    /// The 64 bits of state, which must not be zero.
    pub state: u64,
}

impl XorShift {
    /// Returns the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Returns a uniform value in [0, 1) with 24 random bits.
    pub fn next_f32(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * 2f32.powi(-24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn generators_match_published_sequences() {
        let first = |seed, n: usize| {
            let mut rng = Mt19937::new(seed);
            (0..n).map(|_| rng.next_u32()).collect::<Vec<_>>()
        };
        assert_eq!(first(137, 5), [4053805790, 2173880614, 380293709, 1237255315, 2986595568]);
        assert_eq!(first(42, 3), [1608637542, 3421126067, 4083286876]);
        // The C++ standard specifies the 10,000th draw of the default seed.
        assert_eq!(first(5489, 10_000)[9_999], 4123659995);
        let outputs = |state| {
            let mut rng = XorShift { state };
            [rng.next_u32(), rng.next_u32(), rng.next_u32()]
        };
        assert_eq!(outputs(13371337), [740755583, 337499614, 90980514]);
        assert_eq!(outputs(1337), [989205090, 818269915, 1335155955]);
    }

    #[test]
    fn shuffle_matches_llm_c() {
        let mut values: Vec<u32> = (0..10).collect();
        Mt19937::new(42).shuffle(&mut values);
        assert_eq!(values, [1, 3, 9, 7, 6, 0, 8, 4, 5, 2]);
    }

    /// The reference is `torch.empty(n).normal_(0, std, generator)` with seed 42 and `ATEN_CPU_CAPABILITY=default`.
    /// Each row lists n, std and the CRC-32 of the bytes, as printed by `scripts/pytorch_reference.py --normal`.
    #[test]
    fn normal_matches_pytorch_bit_for_bit() {
        let residual = (0.02 / 24f64.sqrt()) as f32;
        for (n, std, expected) in [
            (16, 1.0, 0xb57c6a94),
            (37, 0.02, 0xe729f0e7),
            (5, 1.0, 0xffc88a70),
            (4096 * 24, 0.02, 0xa8fb6d8c),
            (50257 * 16 + 3, residual, 0x3fbbaa64),
            (50257 * 768, 0.02, 0x882ff8cf),
        ] {
            let mut values = vec![0.0; n];
            Mt19937::new(42).normal(&mut values, std);
            let crc = crc32fast::hash(bytemuck::cast_slice(&values));
            assert_eq!(
                crc,
                expected,
                "{n} values with standard deviation {std}: {crc:08x}, {:x?}",
                values[0].to_bits()
            );
        }
    }

    proptest! {
        #[test]
        fn fill_matches_single_draws(lengths in prop::collection::vec(0usize..1500, 1..6), seed: u32) {
            let (mut blocks, mut single) = (Mt19937::new(seed), Mt19937::new(seed));
            for n in lengths {
                let mut values = vec![0.0; n];
                blocks.fill(&mut values);
                let expected: Vec<f32> = (0..n).map(|_| single.next_f32()).collect();
                prop_assert_eq!(values, expected);
                prop_assert_eq!(blocks.next_u32(), single.next_u32());
                prop_assert_eq!(&blocks, &single);
            }
        }
    }
}
