//! Low-rank adapters.

use super::DescriptorError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Low-rank adapters of linear layers (LoRA; Hu et al., 2021, arXiv:2106.09685): W x becomes W x + α / R · B (A x). W (OC, C) and all other
/// parameters of the model are frozen; A (R, C) and B (OC, R) are trained.
///
/// A linear layer that computes several matrices, such as queries, keys and values, has one adapter for each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapters {
    /// Rank (R).
    pub rank: usize,
    /// The products are scaled by α / R.
    pub alpha: f32,
    /// The matrices with an adapter.
    pub targets: AdapterTargets,
    /// How the weights of the frozen linear layers are stored.
    #[serde(default, skip_serializing_if = "AdapterBase::is_default")]
    pub base: AdapterBase,
}

/// The storage of frozen weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterBase {
    /// The type of activations: bf16 on a GPU
    #[default]
    Bf16,
    /// FP8, also outside of training steps
    Fp8,
}

impl AdapterBase {
    /// Reports whether this is the default, which files leave out.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Adapters have this multiple of rows and columns, because GEMMs need aligned rows. Those beyond the rank are 0.
const RANK_MULTIPLE: usize = 8;

impl Adapters {
    /// Returns the factor of the products.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Returns the rows of A and the columns of B in memory: the rank, rounded up.
    pub const fn padded_rank(&self) -> usize {
        self.rank.next_multiple_of(RANK_MULTIPLE)
    }

    /// Checks the numbers. `widest` is the largest rank that the smallest matrix permits.
    pub(super) fn check(&self, widest: usize) -> Result<(), DescriptorError> {
        if self.rank == 0 {
            return Err(DescriptorError::Zero("LoRA rank"));
        }
        if self.rank > widest {
            return Err(DescriptorError::TooMany { name: "LoRA rank", most: widest, found: self.rank });
        }
        super::positive("LoRA alpha", self.alpha)
    }
}

/// A matrix that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterTarget {
    /// Queries
    Q,
    /// Keys
    K,
    /// Values
    V,
    /// The projection of attention's output
    Attproj,
    /// The first layer of the MLP; if it is gated, the part that is not the gate
    Up,
    /// The gate of the MLP's first layer
    Gate,
    /// The second layer of the MLP
    Fcproj,
}

impl AdapterTarget {
    /// All targets.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::Attproj, Self::Up, Self::Gate, Self::Fcproj];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Attproj => "attproj",
            Self::Up => "up",
            Self::Gate => "gate",
            Self::Fcproj => "fcproj",
        }
    }
}

/// A set of matrices with adapters. In files and flags, it is a list such as `q,k,v,attproj`; `qkv` and `mlp` stand for three targets
/// each, and `all` for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct AdapterTargets(u8);

impl AdapterTargets {
    /// All matrices of all linear layers.
    pub const ALL: Self = Self(0x7f);

    /// Reports whether a matrix has an adapter.
    pub const fn contains(self, target: AdapterTarget) -> bool {
        self.0 & 1 << target as u8 != 0
    }

    /// Reports whether a matrix of the MLP has an adapter.
    pub(super) fn has_mlp(self) -> bool {
        [AdapterTarget::Up, AdapterTarget::Gate, AdapterTarget::Fcproj].into_iter().any(|target| self.contains(target))
    }
}

impl FromIterator<AdapterTarget> for AdapterTargets {
    fn from_iter<I: IntoIterator<Item = AdapterTarget>>(targets: I) -> Self {
        Self(targets.into_iter().fold(0, |set, target| set | 1 << target as u8))
    }
}

impl fmt::Display for AdapterTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = AdapterTarget::ALL.into_iter().filter(|&target| self.contains(target)).map(AdapterTarget::name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl From<AdapterTargets> for String {
    fn from(targets: AdapterTargets) -> Self {
        targets.to_string()
    }
}

impl TryFrom<String> for AdapterTargets {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for AdapterTargets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use AdapterTarget::{Attproj, Fcproj, Gate, K, Q, Up, V};
        let of_name = |name: &str| match name.trim() {
            "qkv" => Ok(vec![Q, K, V]),
            "mlp" => Ok(vec![Up, Gate, Fcproj]),
            "attproj" => Ok(vec![Attproj]),
            "all" => Ok(AdapterTarget::ALL.to_vec()),
            other => {
                let target = AdapterTarget::ALL.into_iter().find(|target| target.name() == other);
                target.map(|target| vec![target]).ok_or_else(|| {
                    format!("expected a list of all, qkv, attproj, mlp, q, k, v, up, gate and fcproj, found '{other}'")
                })
            }
        };
        let targets: Vec<Vec<AdapterTarget>> = text.split(',').map(of_name).collect::<Result<_, _>>()?;
        Ok(targets.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_named_in_one_order() {
        let parsed = |text: &str| text.parse::<AdapterTargets>().map(|targets| targets.to_string());
        assert_eq!(parsed("mlp, qkv"), Ok("q,k,v,up,gate,fcproj".to_owned()));
        assert_eq!(parsed("all"), Ok(AdapterTargets::ALL.to_string()));
        assert_eq!(parsed("v,q,v"), Ok("q,v".to_owned()));
        assert!(parsed("q,head").unwrap_err().ends_with("found 'head'"));
        assert!(parsed("").unwrap_err().ends_with("found ''"));
        let (text, set) = ("\"q,v\"", AdapterTargets::from_iter([AdapterTarget::V, AdapterTarget::Q]));
        assert_eq!((serde_json::to_string(&set).unwrap().as_str(), serde_json::from_str(text).unwrap()), (text, set));
    }
}
