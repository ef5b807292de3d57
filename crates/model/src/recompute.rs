//! The activations that the backward pass recomputes.

use serde::{Deserialize, Serialize};

/// Selects the activations that the backward pass recomputes instead of keeping them for every layer. The numbers are llm.c's
/// (`-r`), except 3, which llm.c lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Recompute {
    /// Keeps all activations.
    #[default]
    Nothing,
    /// Recomputes the output of the activation.
    Activation,
    /// Recomputes the outputs of the activation and of the layers' norms.
    ActivationAndNorms,
    /// Recomputes everything in a layer from its input.
    Layers,
}

impl Recompute {
    /// All levels in order.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::Activation, Self::ActivationAndNorms, Self::Layers];
}

impl From<Recompute> for u8 {
    fn from(recompute: Recompute) -> Self {
        recompute as Self
    }
}

impl TryFrom<u8> for Recompute {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        Self::ALL.get(usize::from(number)).copied().ok_or("expected 0, 1, 2 or 3")
    }
}
