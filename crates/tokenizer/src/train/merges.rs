//! The merges of a byte-pair encoding: the most frequent pair of adjacent tokens is merged, again and again.
//!
//! Counts of pairs and the words that contain each pair are updated after each merge, so that a merge visits only the words that it changes.

use super::pieces::{Pieces, Table};
use crate::byte_level;
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::hash_map::Entry;

/// Number of values before the tokens of a word: the number of its tokens, and the lower and upper half of its count.
const HEADER: usize = 3;

/// A pair of tokens: the left id in the upper half, the right one in the lower half. Pairs have the order of their ids.
type PairKey = u64;

fn key(left: u32, right: u32) -> PairKey {
    u64::from(left) << 32 | u64::from(right)
}

fn ids(key: PairKey) -> (u32, u32) {
    ((key >> 32) as u32, key as u32)
}

/// The occurrences of a pair of adjacent tokens.
#[derive(Debug, Default)]
struct Occurrences {
    /// Occurrences in the text. Overlapping ones count, as in `aaa`.
    count: u64,
    /// Positions of the words that contain the pair. Some may no longer contain it.
    words: Vec<u32>,
}

impl Occurrences {
    fn add(&mut self, count: u64, word: u32) {
        self.count += count;
        if self.words.last() != Some(&word) {
            self.words.push(word);
        }
    }
}

/// The tokens and the merges that a training found.
#[derive(Debug)]
pub struct Merges {
    /// The bytes of each token: single bytes in the order of GPT-2's alphabet, and then the merged tokens.
    pub tokens: Vec<Box<[u8]>>,
    /// The ids of the two tokens of each merge.
    pub pairs: Vec<(u32, u32)>,
    /// Tokens of the text after all merges.
    pub encoded: u64,
}

/// The state of a training.
struct Training {
    tokens: Vec<Box<[u8]>>,
    ids: FxHashMap<Box<[u8]>, u32>,
    merges: Vec<(u32, u32)>,
    min_frequency: u64,
    /// All words, one after the other. A word keeps its place when its number of tokens decreases.
    words: Vec<u32>,
    /// Tokens of the text after the merges so far.
    encoded: u64,
    pairs: FxHashMap<PairKey, Occurrences>,
    /// Candidates, the most frequent first, and among those the one with the smallest ids. A count may be outdated: it is then
    /// larger than that in `pairs`.
    heap: BinaryHeap<(u64, Reverse<PairKey>)>,
    /// The pairs that the current merge creates.
    created: FxHashMap<PairKey, Occurrences>,
    /// Occurrences that the current merge removes.
    removed: FxHashMap<PairKey, u64>,
}

/// Merges the most frequent pair until there are `vocab` tokens, or no pair occurs `min_frequency` times. Of several pairs with the same
/// count, the one with the smallest left id is merged, and of those the one with the smallest right id. No merge leads to bytes in
/// `reserved`. Calls `merged` after each merge.
pub fn train(
    pieces: Pieces,
    vocab: usize,
    min_frequency: u64,
    reserved: &[Vec<u8>],
    merged: &mut dyn FnMut(),
) -> Merges {
    let reserved = reserved.iter().map(Vec::as_slice).collect();
    let mut training = Training::new(pieces, min_frequency.max(1));
    while training.tokens.len() < vocab && training.merge_next(&reserved) {
        merged();
    }
    let Training { tokens, merges, encoded, .. } = training;
    Merges { tokens, pairs: merges, encoded }
}

impl Training {
    fn new(pieces: Pieces, min_frequency: u64) -> Self {
        let tokens: Vec<Box<[u8]>> = byte_level::alphabet().map(|byte| Box::from([byte])).collect();
        let ids: FxHashMap<_, _> = tokens.iter().cloned().zip(0..).collect();
        let mut training = Self {
            tokens,
            ids,
            merges: Vec::new(),
            min_frequency,
            words: Vec::new(),
            encoded: 0,
            pairs: FxHashMap::default(),
            heap: BinaryHeap::new(),
            created: FxHashMap::default(),
            removed: FxHashMap::default(),
        };
        let mut bytes = [0; 256];
        for (byte, id) in byte_level::alphabet().zip(0..) {
            bytes[usize::from(byte)] = id;
        }
        pieces.into_tables().for_each(|table| training.add_words(&table, &bytes));
        training.index_pairs();
        training
    }

    /// Adds the pieces of a table. `ids` are the ids of all bytes.
    fn add_words(&mut self, table: &Table, ids: &[u32; 256]) {
        for (piece, count) in table.iter() {
            self.encoded += piece.len() as u64 * count;
            // A single byte has no pairs.
            if piece.len() == 1 {
                continue;
            }
            self.words.extend([piece.len() as u32, count as u32, (count >> 32) as u32]);
            self.words.extend(piece.iter().map(|&byte| ids[usize::from(byte)]));
        }
    }

    /// Finds the words of all pairs of bytes.
    fn index_pairs(&mut self) {
        // Lists of the final size need no copies while they grow.
        let mut sizes = vec![0; 1 << 16];
        let index = |pair: &[u32]| (pair[0] << 8 | pair[1]) as usize;
        self.each_word(|_, _, tokens| tokens.windows(2).for_each(|pair| sizes[index(pair)] += 1));
        let list = |&size: &usize| Occurrences { count: 0, words: Vec::with_capacity(size) };
        let mut lists: Vec<Occurrences> = sizes.iter().map(list).collect();
        self.each_word(|at, count, tokens| tokens.windows(2).for_each(|pair| lists[index(pair)].add(count, at)));
        for (index, found) in (0..).zip(lists) {
            self.consider(key(index >> 8, index & 0xff), found);
        }
    }

    /// Passes position, count and tokens of each word to `visit`. The words must be unchanged.
    fn each_word(&self, mut visit: impl FnMut(u32, u64, &[u32])) {
        let mut at = 0;
        while at < self.words.len() {
            let end = at + HEADER + self.words[at] as usize;
            visit(at as u32, count(&self.words[at..]), &self.words[at + HEADER..end]);
            at = end;
        }
    }

    /// Makes a pair a candidate if it is frequent enough. Its count does not increase later, except if two merges have the same result.
    fn consider(&mut self, key: PairKey, found: Occurrences) {
        let count = match self.pairs.entry(key) {
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                known.words.extend(found.words);
                known.count += found.count;
                known.count
            }
            Entry::Vacant(place) if found.count >= self.min_frequency => place.insert(found).count,
            Entry::Vacant(_) => return,
        };
        self.heap.push((count, Reverse(key)));
    }

    /// Merges the most frequent pair. Returns false if there is none.
    fn merge_next(&mut self, reserved: &FxHashSet<&[u8]>) -> bool {
        while let Some((count, Reverse(key))) = self.heap.pop() {
            let Some(found) = self.pairs.get(&key) else { continue };
            if found.count != count {
                self.heap.push((found.count, Reverse(key)));
                continue;
            }
            let Occurrences { words, .. } = self.pairs.remove(&key).unwrap_or_default();
            let (left, right) = ids(key);
            let bytes = [&*self.tokens[left as usize], &*self.tokens[right as usize]].concat();
            if reserved.contains(&*bytes) {
                continue;
            }
            let next = self.tokens.len() as u32;
            let merged = *self.ids.entry(bytes.into()).or_insert_with_key(|bytes| {
                self.tokens.push(bytes.clone());
                next
            });
            self.merges.push((left, right));
            for word in words {
                self.merge_word(word, key, merged);
            }
            self.update_pairs();
            return true;
        }
        false
    }

    /// Replaces a pair in a word, from left to right, and notes the pairs that this creates and removes.
    fn merge_word(&mut self, at: u32, pair: PairKey, merged: u32) {
        let (left, right) = ids(pair);
        let word = &mut self.words[at as usize..];
        let (len, count) = (word[0] as usize, count(word));
        let tokens = &mut word[HEADER..HEADER + len];
        let (mut from, mut to) = (0, 0);
        // Whether the token before `to` is a merged one, which ended in `right`.
        let mut after_merged = false;
        while from < len {
            let is_pair = from + 1 < len && (tokens[from], tokens[from + 1]) == (left, right);
            let (first, token) = if is_pair { (left, merged) } else { (tokens[from], tokens[from]) };
            if to > 0 && (is_pair || after_merged) {
                let before = tokens[to - 1];
                *self.removed.entry(key(if after_merged { right } else { before }, first)).or_default() += count;
                self.created.entry(key(before, token)).or_default().add(count, at);
            }
            tokens[to] = token;
            to += 1;
            from += 1 + usize::from(is_pair);
            after_merged = is_pair;
        }
        word[0] = to as u32;
        self.encoded -= (len - to) as u64 * count;
    }

    /// Applies the notes of a merge.
    fn update_pairs(&mut self) {
        let (mut removed, mut created) = (std::mem::take(&mut self.removed), std::mem::take(&mut self.created));
        for (key, count) in removed.drain() {
            let Some(found) = self.pairs.get_mut(&key) else { continue };
            // A rare pair is forgotten, and may return if two merges have the same result.
            found.count = found.count.saturating_sub(count);
            if found.count < self.min_frequency {
                self.pairs.remove(&key);
            }
        }
        for (key, found) in created.drain() {
            self.consider(key, found);
        }
        (self.removed, self.created) = (removed, created);
    }
}

/// Returns the count of a word.
fn count(word: &[u32]) -> u64 {
    u64::from(word[1]) | u64::from(word[2]) << 32
}
