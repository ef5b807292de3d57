//! Collects documents into chunks that are encoded in parallel.

use crate::documents::Sink;
use anyhow::{Result, anyhow};
use std::sync::mpsc::SyncSender;
use tokenizer::Tokenizer;
use tokenizer::train::Splitter;

/// The places at which a text may be cut.
pub trait Cuts: Sync {
    /// Reports whether the text may always be cut between these adjacent characters.
    fn divides_between(&self, before: char, after: char) -> bool;
    /// Reports whether a special token may contain these adjacent characters.
    fn special_token_contains(&self, before: char, after: char) -> bool;
}

impl Cuts for Tokenizer {
    fn divides_between(&self, before: char, after: char) -> bool {
        self.divides_between(before, after)
    }

    fn special_token_contains(&self, before: char, after: char) -> bool {
        self.special_token_contains(before, after)
    }
}

impl Cuts for Splitter {
    fn divides_between(&self, before: char, after: char) -> bool {
        self.divides_between(before, after)
    }

    fn special_token_contains(&self, _before: char, _after: char) -> bool {
        false
    }
}

/// Limits of memory. They do not affect the tokens, except `uncut`.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Minimum size of a chunk in bytes, with the positions of its documents. Longer documents consist of several chunks.
    pub chunk: usize,
    /// Minimum size of a batch of chunks in bytes.
    pub batch: usize,
    /// Size in bytes at which a document is cut, although its encoding may depend on the text on both sides.
    pub uncut: usize,
}

/// The sizes that keep the process below 1 GB for any input.
pub const SIZES: Sizes = Sizes { chunk: 256 << 10, batch: 24 << 20, uncut: 4 << 20 };

/// Bytes that are appended between two attempts to cut a document.
const STEP_BYTES: usize = 64 << 10;

/// The text of several documents, or a part of one.
#[derive(Debug, Default)]
pub struct Chunk {
    pub text: String,
    /// The positions in the text at which documents begin. The text before the first continues a document.
    pub starts: Vec<usize>,
}

impl Chunk {
    /// Returns the size in memory.
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&self.starts[..])
    }

    /// Returns the parts of the text, and whether each begins a document.
    pub fn parts(&self) -> impl Iterator<Item = (bool, &str)> {
        parts(&self.starts, self.text.len()).map(|(begins, range)| (begins, &self.text[range]))
    }
}

/// Splits `0..len` at the `starts` of documents. Returns the ranges, and whether each begins a document.
pub fn parts(starts: &[usize], len: usize) -> impl Iterator<Item = (bool, std::ops::Range<usize>)> {
    let first = starts.first().copied().unwrap_or(len);
    let continued = (first > 0).then_some((false, 0..first));
    let ends = starts.iter().skip(1).copied().chain([len]);
    continued.into_iter().chain(starts.iter().copied().zip(ends).map(|(start, end)| (true, start..end)))
}

/// Counts of documents and bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub documents: usize,
    pub empty: usize,
    pub bytes: usize,
    /// Cuts at which the encoding may differ from that of the whole document.
    pub forced_cuts: usize,
    /// Special tokens in the text that were encoded as ordinary text.
    pub plain_special: usize,
}

/// Sends batches of chunks.
pub struct Chunker<'a> {
    cuts: &'a dyn Cuts,
    /// Keep documents without text.
    keep_empty: bool,
    sizes: Sizes,
    batches: SyncSender<Vec<Chunk>>,
    batch: Vec<Chunk>,
    batch_bytes: usize,
    chunk: Chunk,
    /// The position in the chunk at which its last document, or the rest of it, begins.
    begin: usize,
    /// The position in the chunk before which no place for a cut exists.
    searched: usize,
    in_document: bool,
    pub counts: Counts,
}

impl<'a> Chunker<'a> {
    pub fn new(cuts: &'a dyn Cuts, keep_empty: bool, sizes: Sizes, batches: SyncSender<Vec<Chunk>>) -> Self {
        Self {
            cuts,
            keep_empty,
            sizes,
            batches,
            batch: Vec::new(),
            batch_bytes: 0,
            chunk: Chunk::default(),
            begin: 0,
            searched: 0,
            in_document: false,
            counts: Counts::default(),
        }
    }

    /// Sends what is left.
    pub fn finish(mut self) -> Result<Counts> {
        if !self.chunk.text.is_empty() || !self.chunk.starts.is_empty() {
            self.end_chunk(self.chunk.text.len())?;
        }
        self.send()?;
        Ok(self.counts)
    }

    /// Cuts the current document wherever its parts are long enough.
    fn cut(&mut self) -> Result<()> {
        while let Some(at) = self.next_cut() {
            self.end_chunk(at)?;
        }
        Ok(())
    }

    /// Returns the first place for a cut. The place depends on the document only, not on how it arrives.
    fn next_cut(&mut self) -> Option<usize> {
        let text = &self.chunk.text;
        let from = text.ceil_char_boundary(self.searched.max(self.begin + self.sizes.chunk));
        let forced = self.begin + self.sizes.uncut;
        let mut before = text[..from].chars().next_back();
        for (at, after) in text[from..].char_indices() {
            if from + at > forced {
                break;
            }
            if before.is_some_and(|before| self.cuts.divides_between(before, after)) {
                return Some(from + at);
            }
            before = Some(after);
        }
        self.searched = text.len();
        if text.len() <= forced {
            return None;
        }
        self.counts.forced_cuts += 1;
        Some(forced_cut(&text[self.begin..], self.sizes.uncut, self.cuts) + self.begin)
    }

    /// Ends the chunk before position `at` of its text.
    fn end_chunk(&mut self, at: usize) -> Result<()> {
        let rest = self.chunk.text.split_off(at);
        self.batch_bytes += self.chunk.bytes();
        self.batch.push(std::mem::replace(&mut self.chunk, Chunk { text: rest, starts: Vec::new() }));
        self.begin = 0;
        self.searched = 0;
        if self.batch_bytes >= self.sizes.batch { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<()> {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        // The receiver reports the error.
        self.batches.send(batch).map_err(|_| anyhow!("the encoder has stopped"))
    }
}

impl Sink for Chunker<'_> {
    fn text(&mut self, mut text: &str) -> Result<()> {
        self.counts.bytes += text.len();
        while !text.is_empty() {
            if !self.in_document {
                self.in_document = true;
                self.counts.documents += 1;
                self.begin = self.chunk.text.len();
                self.chunk.starts.push(self.begin);
            }
            let (step, rest) = text.split_at(text.ceil_char_boundary(STEP_BYTES));
            self.chunk.text.push_str(step);
            self.cut()?;
            text = rest;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        if !self.in_document {
            self.counts.empty += 1;
            if !self.keep_empty {
                return Ok(());
            }
            self.chunk.starts.push(self.chunk.text.len());
        }
        self.in_document = false;
        if self.chunk.bytes() >= self.sizes.chunk { self.end_chunk(self.chunk.text.len()) } else { Ok(()) }
    }
}

/// Returns the last place in the first `limit` bytes that lies after a line break, or else the last one outside of special
/// tokens.
fn forced_cut(text: &str, limit: usize, cuts: &dyn Cuts) -> usize {
    let head = &text[..text.floor_char_boundary(limit.max(4))];
    let pairs = || head.char_indices().rev().zip(head.char_indices().rev().skip(1));
    let mut allowed = pairs().filter(|&((_, after), (_, before))| !cuts.special_token_contains(before, after));
    let last = allowed.clone().next();
    let line = allowed.find(|(_, (_, before))| *before == '\n');
    line.or(last).map_or(head.len(), |((at, _), _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc::sync_channel;

    /// Returns the chunks of documents that arrive in pieces of `piece` bytes.
    fn chunks(documents: &[&str], tokenizer: &Tokenizer, sizes: Sizes, piece: usize) -> (Vec<Chunk>, Counts) {
        let (send, receive) = sync_channel(1000);
        let mut chunker = Chunker::new(tokenizer, false, sizes, send);
        for document in documents {
            let mut rest = *document;
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(rest.ceil_char_boundary(piece));
                chunker.text(head).unwrap();
                rest = tail;
            }
            chunker.end().unwrap();
        }
        let counts = chunker.finish().unwrap();
        (receive.into_iter().flatten().collect(), counts)
    }

    #[test]
    fn a_document_without_a_place_to_cut_is_cut_by_force_and_counted() {
        let sizes = Sizes { chunk: 10, batch: 1, uncut: 40 };
        let text = "x".repeat(100);
        let (chunks, counts) = chunks(&[&text], &Tokenizer::gpt2(), sizes, 7);
        assert_eq!(chunks.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), text);
        assert_eq!(counts.forced_cuts, 2);
        assert!(chunks.iter().all(|chunk| chunk.text.len() <= 40), "{chunks:?}");
        assert_eq!(chunks.iter().map(|chunk| chunk.starts.len()).sum::<usize>(), 1);
    }

    #[test]
    fn forced_cuts_prefer_line_breaks_and_avoid_special_tokens() {
        let tokenizer = Tokenizer::gpt2();
        assert_eq!(forced_cut("one\ntwo three", 9, &tokenizer), 4);
        assert_eq!(forced_cut("aaaa<|endoftext|>bbbb", 12, &tokenizer), 4);
    }

    /// The positions of documents need more memory than the text of short documents.
    #[test]
    fn short_documents_do_not_exceed_the_size_of_a_chunk() {
        let sizes = Sizes { chunk: 1000, batch: 3000, uncut: 4000 };
        let (one, counts) = chunks(&vec!["a"; 10_000], &Tokenizer::gpt2(), sizes, 10);
        assert_eq!((counts.documents, one.iter().map(|chunk| chunk.starts.len()).sum::<usize>()), (10_000, 10_000));
        assert!(one.iter().all(|chunk| chunk.bytes() < 1010), "{} chunks", one.len());
        let (send, receive) = sync_channel(1000);
        let gpt2 = Tokenizer::gpt2();
        let mut chunker = Chunker::new(&gpt2, true, sizes, send);
        (0..10_000).for_each(|_| chunker.end().unwrap());
        chunker.finish().unwrap();
        let batches: Vec<Vec<Chunk>> = receive.into_iter().collect();
        assert!(batches.iter().all(|batch| batch.len() <= 3), "{batches:?}");
        let empty = batches.iter().flatten();
        assert_eq!(empty.clone().map(|chunk| chunk.starts.len()).sum::<usize>(), 10_000);
        assert!(empty.clone().all(|chunk| chunk.bytes() <= 1000));
    }

    #[test]
    fn empty_documents_are_counted_and_left_out() {
        let (chunks, counts) = chunks(&["", "a", ""], &Tokenizer::gpt2(), SIZES, 10);
        assert_eq!((counts.documents, counts.empty, counts.bytes), (1, 2, 1));
        assert_eq!((chunks.len(), chunks[0].starts.as_slice()), (1, &[0][..]));
    }

    proptest! {
        #[test]
        fn chunks_encode_like_whole_documents(
            documents in proptest::collection::vec("(([a-zR1é.!' ]{0,4}[ \n\t\r\u{a0}]{0,3})|<\\|endoftext\\|>){0,20}", 0..5),
            chunk in 1..30usize,
            piece in 1..50usize,
        ) {
            let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
            let tokenizer = Tokenizer::gpt2();
            let sizes = Sizes { chunk, batch: 40, uncut: 10_000 };
            let (chunks, _) = chunks(&documents, &tokenizer, sizes, piece);
            let mut found: Vec<Vec<u32>> = Vec::new();
            for (begins, part) in chunks.iter().flat_map(Chunk::parts) {
                if begins {
                    found.push(Vec::new());
                }
                found.last_mut().unwrap().extend(tokenizer.encode_with_special(part).unwrap());
            }
            let expected: Vec<Vec<u32>> = documents
                .iter()
                .filter(|document| !document.is_empty())
                .map(|document| tokenizer.encode_with_special(document).unwrap())
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}
