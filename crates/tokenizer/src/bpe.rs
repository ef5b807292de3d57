//! Byte-pair encoding with a rank for each merge: the pair of adjacent tokens with the lowest rank is merged first, the
//! leftmost one if there are several (Sennrich et al. 2016, arXiv:1508.07909; byte level as in GPT-2).

use crate::split::Pattern;
use anyhow::{Context, Result, ensure};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The vocabulary and the merges of a byte-level byte-pair encoding.
#[derive(Debug)]
pub struct Bpe {
    pattern: Pattern,
    tokens: Vec<Box<[u8]>>,
    /// The ids of pieces that become one token.
    pieces: FxHashMap<Box<[u8]>, u32>,
    /// The ids of the 256 single bytes.
    bytes: Box<[u32; 256]>,
    /// The rank of merging two adjacent tokens.
    ranks: FxHashMap<(u32, u32), u32>,
    /// The id of the merged token for each rank.
    merged: Vec<u32>,
}

/// A merge in a tokenizer file. Its rank is its position in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The ids of the tokens that are merged.
    pub parts: (u32, u32),
    /// The id of the merged token.
    pub merged: u32,
}

/// Pieces with more bytes are merged with a heap instead of repeated scans.
const MAX_SCANNED_PIECE: usize = 64;

/// No token.
const NO_TOKEN: u32 = u32::MAX;
/// The rank of two tokens that do not merge.
const NO_RANK: u32 = u32::MAX;

impl Bpe {
    /// Creates an encoding from its tokens in the order of their ids. Two tokens merge if their joined bytes are a token.
    /// The id of that token is the rank of the merge.
    pub fn new(pattern: Pattern, tokens: Vec<Box<[u8]>>) -> Result<Self> {
        let mut bpe = Self::without_merges(pattern, tokens)?;
        for (id, token) in bpe.tokens.iter().enumerate() {
            for at in 1..token.len() {
                if let (Some(&left), Some(&right)) = (bpe.pieces.get(&token[..at]), bpe.pieces.get(&token[at..])) {
                    bpe.ranks.insert((left, right), id as u32);
                }
            }
        }
        bpe.merged = (0..bpe.tokens.len() as u32).collect();
        Ok(bpe)
    }

    /// Creates an encoding from its tokens and merges. An unused id has an empty token.
    ///
    /// A piece that is a token is encoded as this token if `ignore_merges` is set, and otherwise only if its merges lead to it.
    pub fn with_merges(pattern: Pattern, tokens: Vec<Box<[u8]>>, merges: &[Pair], ignore_merges: bool) -> Result<Self> {
        let mut bpe = Self::without_merges(pattern, tokens)?;
        bpe.ranks = merges.iter().zip(0..).map(|(pair, rank)| (pair.parts, rank)).collect();
        bpe.merged = merges.iter().map(|pair| pair.merged).collect();
        if !ignore_merges {
            let mut pieces = std::mem::take(&mut bpe.pieces);
            let mut ids = Vec::new();
            pieces.retain(|piece, id| {
                ids.clear();
                bpe.merge(piece, &mut ids);
                ids == [*id]
            });
            bpe.pieces = pieces;
        }
        Ok(bpe)
    }

    fn without_merges(pattern: Pattern, tokens: Vec<Box<[u8]>>) -> Result<Self> {
        let mut pieces = FxHashMap::default();
        for (id, token) in tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            let previous = pieces.insert(token.clone(), id as u32);
            ensure!(previous.is_none(), "token {id}: expected distinct tokens, found {token:?} twice");
        }
        let mut bytes = Box::new([0; 256]);
        for (byte, id) in bytes.iter_mut().enumerate() {
            *id = *pieces
                .get(&[byte as u8][..])
                .with_context(|| format!("expected a token for every byte, found none for byte {byte}"))?;
        }
        Ok(Self { pattern, tokens, pieces, bytes, ranks: FxHashMap::default(), merged: Vec::new() })
    }

    /// Returns the pattern that splits text into pieces.
    pub fn pattern(&self) -> Pattern {
        self.pattern
    }

    /// Returns the tokens in the order of their ids. An unused id has an empty token.
    pub fn tokens(&self) -> &[Box<[u8]>] {
        &self.tokens
    }

    /// Appends the ids of a text to `out`.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        self.pattern.split(text, |piece| match self.pieces.get(piece.as_bytes()) {
            Some(&id) => out.push(id),
            None => self.merge(piece.as_bytes(), out),
        });
    }

    /// Appends the ids of a piece, which is not empty.
    fn merge(&self, piece: &[u8], out: &mut Vec<u32>) {
        if piece.len() <= MAX_SCANNED_PIECE {
            self.merge_by_scanning(piece, out);
        } else {
            self.merge_by_heap(piece, out);
        }
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks.get(&(left, right)).copied().unwrap_or(NO_RANK)
    }

    /// Merges a short piece: each round finds the lowest rank in the list of pairs.
    fn merge_by_scanning(&self, piece: &[u8], out: &mut Vec<u32>) {
        let mut ids = [0; MAX_SCANNED_PIECE];
        // `ranks[i]` is the rank of merging tokens i and i + 1.
        let mut ranks = [NO_RANK; MAX_SCANNED_PIECE];
        let mut len = piece.len();
        for (id, &byte) in ids.iter_mut().zip(piece) {
            *id = self.bytes[usize::from(byte)];
        }
        for i in 0..len - 1 {
            ranks[i] = self.rank(ids[i], ids[i + 1]);
        }
        loop {
            let (mut at, mut lowest) = (0, NO_RANK);
            for (i, &rank) in ranks[..len - 1].iter().enumerate() {
                if rank < lowest {
                    (at, lowest) = (i, rank);
                }
            }
            if lowest == NO_RANK {
                break;
            }
            ids[at] = self.merged[lowest as usize];
            ids.copy_within(at + 2..len, at + 1);
            ranks.copy_within(at + 1..len - 1, at);
            len -= 1;
            ranks[len - 1] = NO_RANK;
            if at > 0 {
                ranks[at - 1] = self.rank(ids[at - 1], ids[at]);
            }
            if at + 1 < len {
                ranks[at] = self.rank(ids[at], ids[at + 1]);
            }
        }
        out.extend_from_slice(&ids[..len]);
    }

    /// Merges a long piece in O(n log n). The heap holds candidate pairs; pairs that no longer exist are skipped.
    fn merge_by_heap(&self, piece: &[u8], out: &mut Vec<u32>) {
        let n = piece.len();
        let mut ids: Vec<u32> = piece.iter().map(|&byte| self.bytes[usize::from(byte)]).collect();
        // A doubly linked list of the remaining tokens. A merged token keeps the position of its left part.
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        let mut heap = BinaryHeap::new();
        let push = |heap: &mut BinaryHeap<_>, ids: &[u32], left: usize, right: usize| {
            let rank = self.rank(ids[left], ids[right]);
            if rank != NO_RANK {
                heap.push(Reverse((rank, left, right)));
            }
        };
        for left in 0..n - 1 {
            push(&mut heap, &ids, left, left + 1);
        }
        while let Some(Reverse((rank, left, right))) = heap.pop() {
            let exists = ids[left] != NO_TOKEN && next[left] == right && self.rank(ids[left], ids[right]) == rank;
            if !exists {
                continue;
            }
            ids[left] = self.merged[rank as usize];
            ids[right] = NO_TOKEN;
            next[left] = next[right];
            if next[left] < n {
                previous[next[left]] = left;
                push(&mut heap, &ids, left, next[left]);
            }
            if previous[left] < n {
                push(&mut heap, &ids, previous[left], left);
            }
        }
        out.extend(ids.into_iter().filter(|&id| id != NO_TOKEN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An encoding with all bytes and some longer tokens.
    fn small() -> Bpe {
        let bytes = (0..=255u8).map(|byte| Box::from([byte]));
        let longer = ["ab", "bc", "abc", "aa", "aaaa", "ba", "cab"].map(|token| Box::from(token.as_bytes()));
        Bpe::new(Pattern::Gpt2, bytes.chain(longer).collect()).unwrap()
    }

    /// Merges the leftmost pair of the lowest rank until none is left, on byte strings.
    fn reference(bpe: &Bpe, piece: &[u8]) -> Vec<u32> {
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|&byte| vec![byte]).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let ranked = pairs.filter_map(|(i, pair)| Some((*bpe.pieces.get(&pair.concat()[..])?, i)));
            let Some((_, at)) = ranked.min() else { break };
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        parts.iter().map(|part| bpe.pieces[&part[..]]).collect()
    }

    #[test]
    fn missing_bytes_and_repeated_tokens_are_errors() {
        let error = |tokens: Vec<Box<[u8]>>| Bpe::new(Pattern::Gpt2, tokens).unwrap_err().to_string();
        assert!(error(vec![Box::from(*b"a")]).contains("none for byte 0"));
        assert!(error(vec![Box::from(*b"a"), Box::from(*b"a")]).contains("twice"));
    }

    proptest! {
        #[test]
        fn both_merge_algorithms_match_the_definition(piece in "[abc]{2,64}") {
            let bpe = small();
            let (mut scanned, mut heaped) = (Vec::new(), Vec::new());
            bpe.merge_by_scanning(piece.as_bytes(), &mut scanned);
            bpe.merge_by_heap(piece.as_bytes(), &mut heaped);
            prop_assert_eq!(&scanned, &reference(&bpe, piece.as_bytes()));
            prop_assert_eq!(&heaped, &scanned);
        }
    }
}
