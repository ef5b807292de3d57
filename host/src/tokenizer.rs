//! Text to token ids and back.

use crate::model::descriptor::GPT2_VOCAB;
use anyhow::{Result, bail};
use tiktoken_rs::r50k_base_singleton;

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

    /// Ids of plain text: `<|endoftext|>` written out is text like any other.
    pub fn encode(self, text: &str) -> Vec<u16> {
        match self {
            Self::Gpt2 => r50k_base_singleton().encode_ordinary(text).into_iter().map(|id| id as u16).collect(),
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
