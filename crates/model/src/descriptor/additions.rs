//! Additions to a decoder that made nanochat's records (<https://github.com/karpathy/nanochat>, commit 92d63d4, after modded-nanogpt).

use super::Descriptor;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An addition to a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addition {
    /// Each layer begins with λ x + μ x0, where x is the residual stream, x0 that of the first layer, and λ and μ are parameters of the
    /// layer.
    ResidualScales,
    /// Every other layer, the last included, adds a gated embedding of the token to the values of attention (Zhou et al., 2024,
    /// arXiv:2410.17897).
    ValueEmbeddings,
    /// The gated embedding of the token before is added to that of each token.
    Smear,
    /// The residual stream after the middle layer, times a parameter, is subtracted from that after the last.
    Backout,
}

impl Addition {
    /// All additions.
    pub const ALL: [Self; 4] = [Self::ResidualScales, Self::ValueEmbeddings, Self::Smear, Self::Backout];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ResidualScales => "residual-scales",
            Self::ValueEmbeddings => "value-embeddings",
            Self::Smear => "smear",
            Self::Backout => "backout",
        }
    }
}

/// A set of additions. In files and flags, it is a list such as `smear,backout`; `none` and `all` stand for no addition and for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Additions(u8);

impl Additions {
    /// No addition.
    pub const NONE: Self = Self(0);
    /// All additions.
    pub const ALL: Self = Self(0xf);

    /// Reports whether the set has an addition.
    pub const fn has(self, addition: Addition) -> bool {
        self.0 & 1 << addition as u8 != 0
    }

    /// Reports whether the set is empty. Files leave it out then.
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }
}

impl FromIterator<Addition> for Additions {
    fn from_iter<I: IntoIterator<Item = Addition>>(additions: I) -> Self {
        Self(additions.into_iter().fold(0, |set, addition| set | 1 << addition as u8))
    }
}

impl fmt::Display for Additions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Addition::ALL.into_iter().filter(|&addition| self.has(addition)).map(Addition::name);
        let names = names.collect::<Vec<_>>();
        f.write_str(&if names.is_empty() { "none".to_owned() } else { names.join(",") })
    }
}

impl From<Additions> for String {
    fn from(additions: Additions) -> Self {
        additions.to_string()
    }
}

impl TryFrom<String> for Additions {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Additions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let of_name = |name: &str| {
            let addition = Addition::ALL.into_iter().find(|addition| addition.name() == name);
            addition.ok_or_else(|| {
                format!("expected a list of residual-scales, value-embeddings, smear and backout, or none or all, found '{name}'")
            })
        };
        match text.trim() {
            "none" => Ok(Self::NONE),
            "all" => Ok(Self::ALL),
            list => list.split(',').map(|name| of_name(name.trim())).collect(),
        }
    }
}

impl Descriptor {
    /// Channels that the gate of a value embedding reads, and those that the gate of the smear reads (nanochat).
    const VALUE_GATE_CHANNELS: usize = 12;
    const SMEAR_GATE_CHANNELS: usize = 24;

    /// Reports whether the model has an addition.
    pub const fn adds(&self, addition: Addition) -> bool {
        self.additions.has(addition)
    }

    /// Returns the channels that the gate of a value embedding reads.
    pub(crate) fn value_gate_channels(&self) -> usize {
        Self::VALUE_GATE_CHANNELS.min(self.channels)
    }

    /// Returns the channels that the gate of the smear reads.
    pub(crate) fn smear_gate_channels(&self) -> usize {
        Self::SMEAR_GATE_CHANNELS.min(self.channels)
    }

    /// Reports whether a layer has a value embedding.
    pub const fn has_value_embedding(&self, layer: usize) -> bool {
        self.adds(Addition::ValueEmbeddings) && layer % 2 == (self.layers - 1) % 2
    }

    /// Reports whether the residual stream that enters a layer is the output of the layer before it, which nothing else reads.
    pub fn has_plain_residual(&self) -> bool {
        !self.adds(Addition::ResidualScales) && !self.adds(Addition::Backout)
    }

    /// Returns the layer whose output is subtracted before the head.
    pub fn backout_layer(&self) -> Option<usize> {
        self.adds(Addition::Backout).then_some(self.layers / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_named_in_one_order() {
        let parsed = |text: &str| text.parse::<Additions>().map(|additions| additions.to_string());
        assert_eq!(parsed("backout, smear"), Ok("smear,backout".to_owned()));
        assert_eq!(parsed("all"), Ok("residual-scales,value-embeddings,smear,backout".to_owned()));
        assert_eq!((parsed("none"), "none".parse()), (Ok("none".to_owned()), Ok(Additions::NONE)));
        assert!(parsed("smear,x0").unwrap_err().ends_with("found 'x0'"));
    }

    #[test]
    fn every_other_layer_and_the_last_have_value_embeddings() {
        let of = |layers| {
            let d = Descriptor { layers, additions: Additions::ALL, ..Descriptor::gpt2(1, 1, 64, 8, 256).unwrap() };
            (0..layers).map(|layer| d.has_value_embedding(layer)).collect::<Vec<_>>()
        };
        assert_eq!(of(4), [false, true, false, true]);
        assert_eq!(of(5), [true, false, true, false, true]);
    }
}
