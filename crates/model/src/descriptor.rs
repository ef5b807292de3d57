//! The shape of a model, and the names of known shapes.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The hyperparameters that determine the shapes of a model's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Number of layers.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of channels.
    pub channels: usize,
    /// Longest sequence that has position embeddings.
    pub max_seq_len: usize,
    /// Size of the vocabulary without padding.
    pub vocab: usize,
}

/// Size of the vocabulary of the GPT-2 encoding.
pub const GPT2_VOCAB: usize = 50257;

/// An invalid shape or an unknown name.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DescriptorError {
    /// The name is unknown.
    #[error(
        "unknown model '{0}': expected gpt2, gpt2-medium, gpt2-large, gpt2-xl, dN (d6, d12, d24, d36, d48, d60, d72, d84) or \
         gpt3:cN (c384, c768, c1024, c1536, c2048, c2560, c4096, c12288)"
    )]
    Unknown(String),
    /// The number of channels is not a multiple of the number of heads.
    #[error("{heads} heads do not divide {channels} channels")]
    HeadsDoNotDivide {
        /// Number of heads found.
        heads: usize,
        /// Number of channels found.
        channels: usize,
    },
    /// A size is 0.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A size is above its limit.
    #[error("{name} must be at most {most}, found {found}")]
    TooMany {
        /// Name of the size.
        name: &'static str,
        /// Its limit.
        most: usize,
        /// Value found.
        found: usize,
    },
    /// The number of parameters is above the limit.
    #[error("{0} parameters are beyond what any memory holds")]
    TooLarge(u128),
}

/// Limits within which planning cannot overflow, for batches of less than 2^31 tokens.
const MOST_LAYERS: usize = 8192;
const MOST_PARAMETERS: u128 = 1 << 41;
const MOST_VOCAB: usize = 1 << 20;

impl Descriptor {
    /// Creates a custom shape.
    pub fn new(
        layers: usize,
        heads: usize,
        channels: usize,
        max_seq_len: usize,
        vocab: usize,
    ) -> Result<Self, DescriptorError> {
        let sizes =
            [(layers, "layers"), (heads, "heads"), (channels, "channels"), (max_seq_len, "seq"), (vocab, "vocab")];
        if let Some((_, name)) = sizes.iter().find(|(size, _)| *size == 0) {
            return Err(DescriptorError::Zero(name));
        }
        if !channels.is_multiple_of(heads) {
            return Err(DescriptorError::HeadsDoNotDivide { heads, channels });
        }
        for (name, found, most) in [("layers", layers, MOST_LAYERS), ("vocab", vocab, MOST_VOCAB)] {
            if found > most {
                return Err(DescriptorError::TooMany { name, most, found });
            }
        }
        let [c, l, t, vp] = [channels, layers, max_seq_len, vocab.next_multiple_of(128)].map(|n| n as u128);
        // `None` if the number overflows 128 bits.
        let in_layers = c.checked_mul(c).and_then(|square| square.checked_mul(12 * l));
        let elsewhere = (t + vp).checked_mul(c);
        let parameters = in_layers.zip(elsewhere).and_then(|(a, b)| a.checked_add(b)).unwrap_or(u128::MAX);
        if parameters > MOST_PARAMETERS {
            return Err(DescriptorError::TooLarge(parameters));
        }
        Ok(Self { layers, heads, channels, max_seq_len, vocab })
    }

    /// Returns the vocabulary size rounded up to a multiple of 128, the number of rows of wte and of columns of the logits.
    pub const fn padded_vocab(&self) -> usize {
        self.vocab.next_multiple_of(128)
    }

    /// Returns the number of channels of a head.
    pub const fn head_size(&self) -> usize {
        self.channels / self.heads
    }

    /// Returns the number of parameters with the padded vocabulary (llm.c's N).
    pub const fn parameters(&self) -> usize {
        let c = self.channels;
        self.padded_vocab() * c + self.max_seq_len * c + self.layers * (12 * c * c + 13 * c) + 2 * c
    }

    /// Returns llm.c's estimate of the training FLOPs per token: 6N + 6LCT.
    pub const fn flops_per_token(&self, t: usize) -> usize {
        6 * self.parameters() + 6 * self.layers * self.channels * t
    }
}

impl FromStr for Descriptor {
    type Err = DescriptorError;

    fn from_str(text: &str) -> Result<Self, DescriptorError> {
        let unknown = || DescriptorError::Unknown(text.to_owned());
        let size = match text {
            "gpt2" => "d12",
            "gpt2-medium" => "d24",
            "gpt2-large" => "d36",
            "gpt2-xl" => "d48",
            other => other,
        };
        let (family, size) = size.split_once(':').unwrap_or(("gpt2", size));
        let number = |prefix| size.strip_prefix(prefix).and_then(|n: &str| n.parse::<usize>().ok());
        let (layers, heads, channels, max_seq_len) = match family {
            "gpt2" => {
                let layers = number('d').ok_or_else(unknown)?;
                let (channels, heads) = match layers {
                    6 => (384, 6),
                    12 => (768, 12),
                    24 => (1024, 16),
                    36 => (1280, 20),
                    48 => (1600, 25),
                    60 => (1920, 30),
                    72 => (2880, 30),
                    84 => (3456, 36),
                    _ => return Err(unknown()),
                };
                (layers, heads, channels, 1024)
            }
            "gpt3" => {
                let channels = number('c').ok_or_else(unknown)?;
                let (layers, head_size) = match channels {
                    384 => (6, 64),
                    768 => (12, 64),
                    1024 => (24, 64),
                    1536 => (24, 96),
                    2048 => (24, 128),
                    2560 => (32, 80),
                    4096 => (32, 128),
                    12288 => (96, 128),
                    _ => return Err(unknown()),
                };
                (layers, channels / head_size, channels, 2048)
            }
            _ => return Err(unknown()),
        };
        Self::new(layers, heads, channels, max_seq_len, GPT2_VOCAB)
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, heads, channels, max_seq_len, vocab } = self;
        write!(f, "{layers} layers, {heads} heads, {channels} channels, up to {max_seq_len} tokens, vocabulary {vocab}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_match_llm_c() {
        let counts = [
            ("d6", 30_357_504),
            ("d12", 124_475_904),
            ("gpt2:d24", 354_871_296),
            ("d48", 1_557_686_400),
            ("gpt3:c768", 125_262_336),
            ("gpt3:c1536", 760_372_224),
            ("gpt3:c2560", 2_651_673_600),
            ("gpt3:c12288", 174_604_836_864),
        ];
        for (name, parameters) in counts {
            assert_eq!(name.parse::<Descriptor>().unwrap().parameters(), parameters, "{name}");
        }
        assert_eq!("d12".parse::<Descriptor>().unwrap().flops_per_token(1024), 803_478_528);
    }

    #[test]
    fn shapes_beyond_the_limits_are_rejected() {
        let error = |l, h, c, t, v| Descriptor::new(l, h, c, t, v).unwrap_err().to_string();
        assert_eq!(error(8193, 1, 64, 8, 256), "layers must be at most 8192, found 8193");
        assert_eq!(error(1, 1, 64, 8, 1_048_577), "vocab must be at most 1048576, found 1048577");
        let many = usize::MAX;
        for (c, t) in [(1 << 20, 8), (64, 1 << 40), (many, 8), (64, many), (many, many)] {
            assert!(error(1, 1, c, t, 256).ends_with("parameters are beyond what any memory holds"), "{c} {t}");
        }
        assert_eq!(error(1, 1, 1 << 20, 8, 256), "13194416357376 parameters are beyond what any memory holds");
        let largest = Descriptor::new(8192, 1, 4096, 1 << 20, 1 << 20).unwrap();
        assert!(largest.parameters() > 1 << 40);
    }

    #[test]
    fn the_names_of_gpt2_are_aliases() {
        for (name, alias) in [("gpt2", "d12"), ("gpt2-medium", "d24"), ("gpt2-large", "d36"), ("gpt2-xl", "d48")] {
            assert_eq!(name.parse::<Descriptor>(), alias.parse(), "{name}");
        }
    }

    #[test]
    fn unknown_names_are_rejected() {
        for name in ["", "d", "d13", "gpt3:c5140", "gpt4:d12", "dd12", "d12x", "gpt2-small", "gpt2:gpt2"] {
            assert_eq!(name.parse::<Descriptor>(), Err(DescriptorError::Unknown(name.into())), "{name}");
        }
    }
}
