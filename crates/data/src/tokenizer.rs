//! Text to token ids and back.

use anyhow::{Result, bail};
use tiktoken_rs::r50k_base_singleton;

/// Tokens of the GPT-2 encoding.
pub const GPT2_VOCAB: usize = 50257;

/// Tokens of the byte-level encoding.
pub const BYTE_VOCAB: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// GPT-2's byte-pair encoding.
    Gpt2,
    /// Each byte is its own id.
    Bytes,
}

impl Tokenizer {
    /// The encoding of a model with this vocabulary.
    pub fn of_vocab(vocab: usize) -> Result<Self> {
        match vocab {
            GPT2_VOCAB => Ok(Self::Gpt2),
            BYTE_VOCAB => Ok(Self::Bytes),
            _ => bail!(
                "no tokenizer for a vocabulary of {vocab}: expected {GPT2_VOCAB} (GPT-2's encoding) or {BYTE_VOCAB} (bytes)"
            ),
        }
    }

    pub const fn vocab(self) -> usize {
        match self {
            Self::Gpt2 => GPT2_VOCAB,
            Self::Bytes => BYTE_VOCAB,
        }
    }

    /// What stands before a document: `<|endoftext|>`; for bytes, a new line.
    pub const fn document(self) -> u16 {
        match self {
            Self::Gpt2 => 50256,
            Self::Bytes => b'\n' as u16,
        }
    }

    /// Ids of plain text: `<|endoftext|>` written out is text like any other. A run of thousands of letters, digits, signs or
    /// spaces is encoded in parts.
    pub fn encode(self, text: &str) -> Vec<u16> {
        match self {
            Self::Gpt2 => {
                let bpe = r50k_base_singleton();
                let encode = |span| bpe.encode_ordinary(span).into_iter().map(|id| id as u16);
                without_long_runs(text).flat_map(encode).collect()
            }
            Self::Bytes => text.bytes().map(u16::from).collect(),
        }
    }

    /// The bytes of tokens, which need not be whole characters. Ids that mean nothing (a model's vocabulary may be padded)
    /// give none.
    pub fn decode(self, tokens: &[u16]) -> Vec<u8> {
        match self {
            Self::Gpt2 => {
                let bpe = r50k_base_singleton();
                tokens.iter().flat_map(|&id| bpe.decode_bytes(&[u32::from(id)]).unwrap_or_default()).collect()
            }
            Self::Bytes => tokens.iter().filter_map(|&id| u8::try_from(id).ok()).collect(),
        }
    }

    /// As [`decode`](Self::decode), with `�` for broken characters.
    pub fn text(self, tokens: &[u16]) -> String {
        String::from_utf8_lossy(&self.decode(tokens)).into_owned()
    }
}

/// Bytes of one kind of character in a row. The encoding takes time with the square of it, and its regular expression's
/// stack is finite.
const LONGEST_RUN: usize = 4096;

#[derive(PartialEq)]
enum Kind {
    Letter,
    Digit,
    Space,
    Sign,
}

impl Kind {
    fn of(c: char) -> Self {
        match c {
            _ if c.is_whitespace() => Self::Space,
            _ if c.is_alphabetic() => Self::Letter,
            _ if c.is_numeric() => Self::Digit,
            _ => Self::Sign,
        }
    }
}

/// Cuts text inside runs that are longer than [`LONGEST_RUN`], and nowhere else.
fn without_long_runs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (mut run, mut kind) = (0, Kind::Sign);
        let cut = rest.char_indices().find(|&(at, c)| {
            let next = Kind::of(c);
            if next != kind {
                (run, kind) = (at, next);
            }
            at - run >= LONGEST_RUN
        });
        let (span, after) = rest.split_at(cut.map_or(rest.len(), |(at, _)| at));
        rest = after;
        Some(span)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_are_gpt2s() {
        let ids = |text| Tokenizer::Gpt2.encode(text);
        assert_eq!(ids("Hello, world!"), [15496, 11, 995, 0]);
        assert_eq!(ids("First Citizen:\nBefore we proceed"), [5962, 22307, 25, 198, 8421, 356, 5120]);
        assert_ne!(ids("<|endoftext|>"), [50256]);
        assert_eq!(Tokenizer::Gpt2.text(&[50256, 15496]), "<|endoftext|>Hello");
        assert_eq!(Tokenizer::Bytes.encode("né"), [110, 0xc3, 0xa9]);
        assert_eq!(Tokenizer::Bytes.text(&[0xc3]), "\u{fffd}");
        assert_eq!(Tokenizer::Gpt2.text(&[60000]), "");
        assert!(Tokenizer::of_vocab(300).unwrap_err().to_string().contains("vocabulary of 300"));
    }

    #[test]
    fn endless_runs_are_encoded_in_parts() {
        let long = 3 * LONGEST_RUN + 5;
        for c in [" ", "\n", "a", "é", "7", "!", "\u{3000}"] {
            let text = format!("before {} after", c.repeat(long));
            let spans: Vec<&str> = without_long_runs(&text).collect();
            assert!(spans.len() > 3 && spans.concat() == text, "{c}");
            assert_eq!(Tokenizer::Gpt2.text(&Tokenizer::Gpt2.encode(&text)), text);
        }
        let mixed = "word, 7! ".repeat(2000);
        assert_eq!(without_long_runs(&mixed).collect::<Vec<_>>(), [mixed.as_str()]);
    }

    proptest! {
        #[test]
        fn text_comes_back(text in "\\PC*|(?s).{0,200}") {
            for tokenizer in [Tokenizer::Gpt2, Tokenizer::Bytes] {
                let ids = tokenizer.encode(&text);
                prop_assert!(ids.iter().all(|&id| usize::from(id) < tokenizer.vocab()));
                prop_assert_eq!(tokenizer.text(&ids), text.clone());
            }
        }
    }
}
