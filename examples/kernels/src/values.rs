//! Reproducible random inputs.

use cuda_std::Element;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::sync::Arc;

/// The values of an array, shared by the references that need them.
#[derive(Clone)]
pub struct Values<T>(Arc<Vec<T>>);

/// Returns 64 bits that look random, from an index and a seed: the function of SplitMix64 (Steele et al., 2014).
fn hash(index: u64, seed: u64) -> u64 {
    let mut bits = index.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns a seed from the name of an array.
fn seed(name: &str) -> u64 {
    name.bytes().fold(0, |seed, byte| hash(u64::from(byte), seed))
}

impl<T: Element> Values<T> {
    /// Returns `len` numbers, uniform in ±`range` and rounded to T. Arrays of other names have other numbers.
    pub fn noise(name: &str, len: usize, range: f32) -> Self {
        let seed = seed(name);
        let value = |i: usize| {
            let unit = (hash(i as u64, seed) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            T::from_f32(range * unit)
        };
        Self(Arc::new((0..len).into_par_iter().with_min_len(1 << 16).map(value).collect()))
    }

    /// Returns element `i`.
    pub fn at(&self, i: usize) -> f64 {
        f64::from(self.0[i].to_f32())
    }

    /// Returns the elements.
    pub fn as_slice(&self) -> &[T] {
        &self.0
    }
}

/// Returns `len` numbers in 0..`bound`, with a square-law distribution: small numbers are more frequent, as are some tokens.
pub fn tokens(name: &str, len: usize, bound: usize) -> Vec<i32> {
    let seed = seed(name);
    let token = |i: usize| {
        let unit = (hash(i as u64, seed) >> 11) as f64 / (1_u64 << 53) as f64;
        (unit * unit * bound as f64) as i32
    };
    (0..len).map(token).collect()
}
