//! Mixtures of experts.

use super::DescriptorError;
use engine::ops::{ExpertRange, Router, RouterScores};
use serde::{Deserialize, Serialize};

/// The experts of each layer, in place of an MLP (Shazeer et al., 2017, arXiv:1701.06538). Each expert is an MLP without biases. A router, a
/// linear layer of the MLP's input, chooses the experts of each token. Numbers are 32 bits wide, so that descriptors remain small values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// Number of experts (E).
    pub count: u32,
    /// Number of experts of a token (k).
    pub active: u32,
    /// The scores of experts, by which they are chosen and weighted.
    pub scores: RouterScores,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Channels of an MLP that computes all tokens beside the experts; 0 if there is none.
    #[serde(default)]
    pub shared_channels: u32,
    /// Coefficient of the load-balancing loss. It is added to the loss of training, and not to the loss that is reported.
    #[serde(default)]
    pub aux_loss: f32,
    /// Coefficient of the z-loss, likewise.
    #[serde(default)]
    pub z_loss: f32,
}

/// Maximum number of experts.
const MAX_EXPERTS: u32 = 1024;

impl Experts {
    /// The experts of a shape that has an MLP, without their numbers. The weights of a token's experts have the sum 1, so that copies
    /// of one MLP compute what it computes. The coefficients are OLMoE's.
    pub(super) const OF_DENSE_SHAPE: Self = Self {
        count: 1,
        active: 1,
        scores: RouterScores::Softmax,
        normalized: true,
        shared_channels: 0,
        aux_loss: 0.01,
        z_loss: 0.001,
    };

    /// Returns how experts are chosen.
    pub const fn router(&self) -> Router {
        let Self { active, scores, normalized, .. } = *self;
        let count = self.count as usize;
        Router { count, active: active as usize, scores, normalized, local: ExpertRange { first: 0, count } }
    }

    /// Checks the numbers.
    pub(super) fn check(&self) -> Result<(), DescriptorError> {
        let Self { count, active, aux_loss, z_loss, .. } = *self;
        for (name, found, most) in [("experts", count, MAX_EXPERTS), ("active experts", active, count)] {
            if found == 0 {
                return Err(DescriptorError::Zero(name));
            }
            if found > most {
                return Err(DescriptorError::TooMany { name, most: most as usize, found: found as usize });
            }
        }
        let losses = [("coefficient of the load-balancing loss", aux_loss), ("coefficient of the z-loss", z_loss)];
        losses.into_iter().filter(|(_, x)| *x != 0.0).try_for_each(|(name, x)| super::positive(name, x))
    }
}
