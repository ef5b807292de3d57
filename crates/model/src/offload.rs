//! Tensors that a GPU keeps in the host's memory.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kind of tensor that can be in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offloadable {
    /// Master weights.
    Master,
    /// The moments of AdamW and Muon.
    Moments,
    /// Parameters. Passes read copies in the GPU's memory: of two layers at a time, and of all other parameters.
    Params,
    /// The residual stream after each layer, which a backward pass with [`Recompute::Layers`](crate::Recompute::Layers) starts from. The GPU's
    /// memory holds those of two layers.
    Activations,
}

impl Offloadable {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Master, Self::Moments, Self::Params, Self::Activations];

    const fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Moments => "moments",
            Self::Params => "params",
            Self::Activations => "activations",
        }
    }
}

/// The tensors that a GPU keeps in page-locked memory of the host, and reads and writes over PCIe. The bits of a run do not depend on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Offload(u8);

impl Offload {
    /// Everything is in the GPU's memory.
    pub const NONE: Self = Self(0);

    /// Reports whether tensors of a kind are in the host's memory.
    pub const fn contains(self, kind: Offloadable) -> bool {
        self.0 & 1 << kind as u8 != 0
    }

    /// Reports whether everything is in the GPU's memory.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

impl FromIterator<Offloadable> for Offload {
    fn from_iter<I: IntoIterator<Item = Offloadable>>(kinds: I) -> Self {
        Self(kinds.into_iter().fold(0, |set, kind| set | 1 << kind as u8))
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        let names = Offloadable::ALL.into_iter().filter(|&kind| self.contains(kind)).map(Offloadable::name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl From<Offload> for String {
    fn from(offload: Offload) -> Self {
        offload.to_string()
    }
}

impl TryFrom<String> for Offload {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Offload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "none" {
            return Ok(Self::NONE);
        }
        let of_name = |name: &str| {
            let kind = Offloadable::ALL.into_iter().find(|kind| kind.name() == name.trim());
            kind.ok_or_else(|| {
                format!("expected none, or a list of master, moments, params and activations, found '{}'", name.trim())
            })
        };
        text.split(',').map(of_name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        let all: Offload = Offloadable::ALL.into_iter().collect();
        let both: Offload = [Offloadable::Moments, Offloadable::Master].into_iter().collect();
        for (text, set, written) in [
            ("none", Offload::NONE, "none"),
            ("moments", [Offloadable::Moments].into_iter().collect(), "moments"),
            ("moments, master", both, "master,moments"),
            ("params,activations,moments,master", all, "master,moments,params,activations"),
        ] {
            assert_eq!(text.parse(), Ok(set));
            assert_eq!(set.to_string(), written);
            assert_eq!(serde_json::from_str::<Offload>(&serde_json::to_string(&set).unwrap()).unwrap(), set);
        }
        for wrong in ["", "grads", "moments,"] {
            let error = wrong.parse::<Offload>().unwrap_err();
            assert!(
                error.starts_with("expected none, or a list of master, moments, params and activations, found '"),
                "{error}"
            );
        }
    }
}
