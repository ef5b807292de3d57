//! The layout of a batch of tokens in memory.

use crate::ops::Documents;
use crate::tensor::Tensor;
use std::ops::{DerefMut, Range};

/// Host memory for a batch; page-locked if the engine copies from it asynchronously.
pub type HostBuffer = Box<dyn DerefMut<Target = [i32]> + Send>;

/// The target of a masked position, which has neither loss nor gradient.
pub const MASKED_TARGET: i32 = gpu::classifier::MASKED;

/// The layout of a batch of (B, T) tokens, in 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLayout {
    /// Sequences.
    pub b: usize,
    /// Tokens of a sequence.
    pub t: usize,
    /// Whether the batch states its documents, for attention within documents.
    pub documents: bool,
}

/// Rows of the tiles whose order a batch with documents states: the work tiles of the `sm_90a` attention kernels.
const TILE: usize = gpu::attention_wgmma::TILE as usize;

impl BatchLayout {
    /// Creates the layout of a batch without documents.
    pub const fn new(b: usize, t: usize) -> Self {
        Self { b, t, documents: false }
    }

    /// Returns the layout of a batch of the same size with documents.
    pub const fn with_documents(self) -> Self {
        Self { documents: true, ..self }
    }

    const fn tokens(self) -> usize {
        self.b * self.t
    }

    /// Returns the tiles of a sequence.
    const fn tiles(self) -> usize {
        self.t.div_ceil(TILE)
    }

    /// Returns the words of a whole batch.
    pub const fn words(self) -> usize {
        let documents = if self.documents { 2 * (self.tokens() + self.b * self.tiles()) } else { 0 };
        4 * self.tokens() + 1 + documents
    }

    /// Returns the range of the input tokens (B, T).
    pub fn inputs(self) -> Range<usize> {
        0..self.tokens()
    }

    /// Returns the range of the target tokens (B, T), some of which may be [`MASKED_TARGET`].
    pub fn targets(self) -> Range<usize> {
        self.tokens()..2 * self.tokens()
    }

    /// Returns the number of targets that are not masked.
    pub fn count_targets(self, words: &[i32]) -> usize {
        words[self.targets()].iter().filter(|&&target| target != MASKED_TARGET).count()
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
        4 * self.tokens()..4 * self.tokens() + 1
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

    /// Returns the documents of the batch `batch`, if it states them.
    pub fn documents_of(self, batch: Tensor) -> Option<Documents> {
        let (n, tiles, start) = (self.tokens(), self.b * self.tiles(), self.seed().end);
        self.documents.then(|| Documents {
            first_keys: batch.slice(start, n),
            last_queries: batch.slice(start + n, n),
            query_tiles: batch.slice(start + 2 * n, tiles),
            key_tiles: batch.slice(start + 2 * n + tiles, tiles),
        })
    }

    /// Computes the parts of [`documents_of`](Self::documents_of) from `inputs`, if the layout has them. A document begins at each
    /// `separator`, and at the start of a sequence.
    pub fn find_documents(self, words: &mut [i32], separator: i32) {
        let begins: Vec<bool> = words[self.inputs()].iter().map(|&token| token == separator).collect();
        self.set_documents(words, &begins);
    }

    /// Does the same as [`find_documents`](Self::find_documents) for documents that begin at the positions (B·T) that `begins` states, and
    /// at the start of a sequence.
    pub fn set_documents(self, words: &mut [i32], begins: &[bool]) {
        if !self.documents {
            return;
        }
        let documents = &mut words[self.seed().end..];
        let (first_keys, rest) = documents.split_at_mut(self.tokens());
        let (last_queries, order) = rest.split_at_mut(self.tokens());
        let (query_tiles, key_tiles) = order.split_at_mut(self.b * self.tiles());
        for (b, begins) in begins.chunks(self.t).enumerate() {
            let positions = b * self.t..(b + 1) * self.t;
            let (first_keys, last_queries) = (&mut first_keys[positions.clone()], &mut last_queries[positions]);
            let mut starts: Vec<_> = (0..self.t).filter(|&i| i == 0 || begins[i]).collect();
            starts.push(self.t);
            for document in starts.windows(2) {
                first_keys[document[0]..document[1]].fill(document[0] as i32);
                last_queries[document[0]..document[1]].fill(document[1] as i32 - 1);
            }
            // The tiles with the most keys, or queries, come first.
            let tiles = b * self.tiles()..(b + 1) * self.tiles();
            let last = |tile: i32| ((tile as usize + 1) * TILE).min(self.t) - 1;
            sort_tiles(&mut query_tiles[tiles.clone()], |tile| tile - first_keys[tile as usize * TILE] / TILE as i32);
            sort_tiles(&mut key_tiles[tiles], |tile| last_queries[last(tile)] / TILE as i32 - tile);
        }
    }

    /// Returns the length of each document of a batch whose documents have been found, or of each sequence.
    pub fn document_lengths(self, words: &[i32]) -> Vec<usize> {
        if !self.documents {
            return vec![self.t; self.b];
        }
        let first_keys = words[self.seed().end..][..self.tokens()].chunks(self.t);
        first_keys.flat_map(|row| row.chunk_by(|one, next| one == next).map(<[i32]>::len)).collect()
    }

    /// Returns a part of the batch as a tensor.
    pub fn tensor(self, batch: Tensor, part: Range<usize>) -> Tensor {
        batch.slice(part.start, part.len())
    }
}

/// Sorts the indices of tiles by descending cost.
fn sort_tiles(tiles: &mut [i32], cost: impl Fn(i32) -> i32) {
    for (i, tile) in tiles.iter_mut().enumerate() {
        *tile = i as i32;
    }
    tiles.sort_by_key(|&tile| std::cmp::Reverse(cost(tile)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_begin_at_separators_and_at_sequences() {
        let layout = BatchLayout::new(2, 5).with_documents();
        let mut words = vec![0; layout.words()];
        words[layout.inputs()].copy_from_slice(&[1, 9, 9, 2, 3, 4, 5, 9, 6, 7]);
        layout.find_documents(&mut words, 9);
        assert_eq!(layout.document_lengths(&words), [1, 1, 3, 2, 3]);
        let plain = BatchLayout::new(2, 5);
        assert_eq!(plain.document_lengths(&words), [5, 5]);
    }
}
