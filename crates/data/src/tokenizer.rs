//! Tokenizers: GPT-2's byte-pair encoding, and plain bytes.

use anyhow::{Result, bail};
use tiktoken_rs::r50k_base_singleton;

/// Vocabulary size of GPT-2's encoding.
pub const GPT2_VOCAB: usize = 50257;

/// Vocabulary size of the byte-level encoding.
pub const BYTE_VOCAB: usize = 256;

/// A mapping between text and token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// GPT-2's byte-pair encoding.
    Gpt2,
    /// The byte-level encoding: the id of a byte is its value.
    Bytes,
}

impl Tokenizer {
    /// Returns the tokenizer of a model with this vocabulary size.
    pub fn of_vocab(vocab: usize) -> Result<Self> {
        match vocab {
            GPT2_VOCAB => Ok(Self::Gpt2),
            BYTE_VOCAB => Ok(Self::Bytes),
            _ => bail!(
                "no tokenizer for a vocabulary of {vocab} tokens: expected {GPT2_VOCAB} (GPT-2) or {BYTE_VOCAB} (bytes)"
            ),
        }
    }

    /// Returns the vocabulary size.
    pub const fn vocab(self) -> usize {
        match self {
            Self::Gpt2 => GPT2_VOCAB,
            Self::Bytes => BYTE_VOCAB,
        }
    }

    /// Returns the token that precedes each document: `<|endoftext|>`, or a newline for bytes.
    pub const fn document(self) -> u16 {
        match self {
            Self::Gpt2 => 50256,
            Self::Bytes => b'\n' as u16,
        }
    }

    /// Returns the ids of plain text.
    ///
    /// `<|endoftext|>` in the text is encoded as ordinary text, not as the special token. A run of more than 4096 bytes
    /// of letters, digits, whitespace or other characters is split before encoding, so its ids may differ from
    /// tiktoken's.
    pub fn encode(self, text: &str) -> Vec<u16> {
        match self {
            Self::Gpt2 => {
                let bpe = r50k_base_singleton();
                let encode = |span| bpe.encode_ordinary(span).into_iter().map(|id| id as u16);
                split_long_runs(text).flat_map(encode).collect()
            }
            Self::Bytes => text.bytes().map(u16::from).collect(),
        }
    }

    /// Returns the bytes of tokens, which may end inside a character. Ids outside the vocabulary, such as those of a
    /// padded vocabulary, decode to nothing.
    pub fn decode(self, tokens: &[u16]) -> Vec<u8> {
        match self {
            Self::Gpt2 => {
                let bpe = r50k_base_singleton();
                tokens.iter().flat_map(|&id| bpe.decode_bytes(&[u32::from(id)]).unwrap_or_default()).collect()
            }
            Self::Bytes => tokens.iter().filter_map(|&id| u8::try_from(id).ok()).collect(),
        }
    }

    /// Decodes tokens to text. Invalid UTF-8 becomes U+FFFD.
    pub fn text(self, tokens: &[u16]) -> String {
        String::from_utf8_lossy(&self.decode(tokens)).into_owned()
    }
}

/// The longest run of characters of one class that is encoded at once, in bytes. Encoding time grows with the square of
/// the run length, and the regular expression's stack is finite.
const MAX_RUN: usize = 4096;

/// Character classes of GPT-2's pattern.
#[derive(PartialEq)]
enum CharClass {
    Letter,
    Digit,
    Space,
    Other,
}

impl CharClass {
    fn of(c: char) -> Self {
        match c {
            _ if c.is_whitespace() => Self::Space,
            _ if c.is_alphabetic() => Self::Letter,
            _ if c.is_numeric() => Self::Digit,
            _ => Self::Other,
        }
    }
}

/// Splits text inside runs that are longer than [`MAX_RUN`], and nowhere else.
fn split_long_runs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (mut run_start, mut class) = (0, CharClass::Other);
        let split = rest.char_indices().find(|&(at, c)| {
            let next = CharClass::of(c);
            if next != class {
                (run_start, class) = (at, next);
            }
            at - run_start >= MAX_RUN
        });
        let (span, after) = rest.split_at(split.map_or(rest.len(), |(at, _)| at));
        rest = after;
        Some(span)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_match_gpt2() {
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
    fn long_runs_are_split_before_encoding() {
        let long = 3 * MAX_RUN + 5;
        for c in [" ", "\n", "a", "é", "7", "!", "\u{3000}"] {
            let text = format!("before {} after", c.repeat(long));
            let spans: Vec<&str> = split_long_runs(&text).collect();
            assert!(spans.len() > 3 && spans.concat() == text, "{c}");
            assert_eq!(Tokenizer::Gpt2.text(&Tokenizer::Gpt2.encode(&text)), text);
        }
        let mixed = "word, 7! ".repeat(2000);
        assert_eq!(split_long_runs(&mixed).collect::<Vec<_>>(), [mixed.as_str()]);
    }

    proptest! {
        #[test]
        fn decoding_restores_the_encoded_text(text in "\\PC*|(?s).{0,200}") {
            for tokenizer in [Tokenizer::Gpt2, Tokenizer::Bytes] {
                let ids = tokenizer.encode(&text);
                prop_assert!(ids.iter().all(|&id| usize::from(id) < tokenizer.vocab()));
                prop_assert_eq!(tokenizer.text(&ids), text.clone());
            }
        }
    }
}
