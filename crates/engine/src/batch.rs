//! The layout of a batch of tokens in memory.

use crate::tensor::Tensor;
use std::ops::{DerefMut, Range};

/// Host memory for a batch; page-locked if the engine copies from it asynchronously.
pub type HostBuffer = Box<dyn DerefMut<Target = [i32]> + Send>;

/// The layout of a batch of (B, T) tokens, in 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLayout {
    /// Sequences.
    pub b: usize,
    /// Tokens of a sequence.
    pub t: usize,
}

impl BatchLayout {
    const fn tokens(self) -> usize {
        self.b * self.t
    }

    /// Returns the words of a whole batch.
    pub const fn words(self) -> usize {
        4 * self.tokens() + 1
    }

    /// Returns the range of the input tokens (B, T).
    pub fn inputs(self) -> Range<usize> {
        0..self.tokens()
    }

    /// Returns the range of the target tokens (B, T).
    pub fn targets(self) -> Range<usize> {
        self.tokens()..2 * self.tokens()
    }

    /// Returns the range of the positions (B·T) of the inputs, stably sorted by token.
    pub fn order(self) -> Range<usize> {
        2 * self.tokens()..3 * self.tokens()
    }

    /// Returns the range of the input tokens (B·T) in sorted order.
    pub fn sorted(self) -> Range<usize> {
        3 * self.tokens()..4 * self.tokens()
    }

    /// Returns the range of the seed (1) of stochastic rounding in the backward pass, a u32.
    pub fn seed(self) -> Range<usize> {
        4 * self.tokens()..self.words()
    }

    /// Writes the seed.
    pub fn set_seed(self, words: &mut [i32], seed: u32) {
        words[self.seed()][0] = seed.cast_signed();
    }

    /// Computes `order` and `sorted` from `inputs`.
    pub fn sort(self, words: &mut [i32]) {
        let (inputs, rest) = words.split_at_mut(self.tokens());
        let (order, rest) = rest[self.tokens()..].split_at_mut(self.tokens());
        for (i, position) in order.iter_mut().enumerate() {
            *position = i as i32;
        }
        order.sort_by_key(|&i| inputs[i as usize]);
        for (token, &position) in rest.iter_mut().zip(&*order) {
            *token = inputs[position as usize];
        }
    }

    /// Returns a part of the batch as a tensor.
    pub fn tensor(self, batch: Tensor, part: Range<usize>) -> Tensor {
        batch.slice(part.start, part.len())
    }
}
