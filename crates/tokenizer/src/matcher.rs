//! Finds tokens that have a text of their own, such as `<|endoftext|>`, in a text.

use crate::Special;
use aho_corasick::{AhoCorasick, MatchKind};
use anyhow::Result;
use std::ops::Range;

/// Finds some tokens. The leftmost match counts, and the longest one if several begin there.
#[derive(Debug)]
pub struct Matcher {
    tokens: Vec<Special>,
    automaton: AhoCorasick,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Text without any of the tokens. It is not empty.
    Text(&'a str),
    /// The id of a token.
    Token(u32),
}

impl Matcher {
    /// Creates a matcher. A token without text is never found.
    pub fn new(mut tokens: Vec<Special>) -> Result<Self> {
        tokens.retain(|token| !token.text.is_empty());
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| &token.text))?;
        Ok(Self { tokens, automaton })
    }

    pub fn tokens(&self) -> &[Special] {
        &self.tokens
    }

    /// Returns the bytes of a token.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.iter().find(|token| token.id == id).map(|token| token.text.as_bytes())
    }

    /// Reports whether a token contains these characters, one after the other.
    pub fn contains(&self, before: char, after: char) -> bool {
        let contains = |text: &str| text.chars().zip(text.chars().skip(1)).any(|pair| pair == (before, after));
        self.tokens.iter().any(|token| contains(&token.text))
    }

    /// Returns the number of tokens in a text.
    pub fn count(&self, text: &str) -> usize {
        if self.tokens.is_empty() { 0 } else { self.automaton.find_iter(text).count() }
    }

    /// Passes each token in a text to `found`, as the bytes of its text.
    pub fn find(&self, text: &str, found: &mut dyn FnMut(Range<usize>)) {
        if !self.tokens.is_empty() {
            self.automaton.find_iter(text).for_each(|token| found(token.range()));
        }
    }

    /// Passes the parts of a text to `put`, in order.
    pub fn split(&self, text: &str, mut put: impl FnMut(Part) -> Result<()>) -> Result<()> {
        self.split_unless(text, |_| false, |part, _| put(part))
    }

    /// Passes the parts of a text and their positions to `put`, in order. Tokens for which `is_text` is true are text.
    pub fn split_unless(
        &self,
        text: &str,
        is_text: impl Fn(&Range<usize>) -> bool,
        mut put: impl FnMut(Part, usize) -> Result<()>,
    ) -> Result<()> {
        let mut begin = 0;
        if !self.tokens.is_empty() {
            for found in self.automaton.find_iter(text).filter(|found| !is_text(&found.range())) {
                if begin < found.start() {
                    put(Part::Text(&text[begin..found.start()]), begin)?;
                }
                put(Part::Token(self.tokens[found.pattern().as_usize()].id), found.start())?;
                begin = found.end();
            }
        }
        if begin < text.len() { put(Part::Text(&text[begin..]), begin) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leftmost_and_longest_token_is_found() {
        let tokens = ["<a>", "<a><b>", "b", ""].into_iter().zip(7..);
        let matcher = Matcher::new(tokens.map(|(text, id)| Special { text: text.into(), id }).collect()).unwrap();
        let mut parts = Vec::new();
        matcher
            .split("x<a><b><a>y", |part| {
                parts.push(match part {
                    Part::Text(text) => text.to_owned(),
                    Part::Token(id) => id.to_string(),
                });
                Ok(())
            })
            .unwrap();
        assert_eq!(parts, ["x", "8", "7", "y"]);
        assert_eq!((matcher.tokens().len(), matcher.count("x<a><b><a>y")), (3, 2));
        assert_eq!((matcher.bytes(7), matcher.bytes(10)), (Some(&b"<a>"[..]), None));
        assert_eq!((matcher.contains('>', '<'), matcher.contains('a', 'b')), (true, false));
    }
}
