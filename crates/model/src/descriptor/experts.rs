//! Mixtures of experts.

use super::{Descriptor, DescriptorError};
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
    /// Whether each expert has a bias that is added to its score for the choice. Training changes it so that experts get equal numbers of
    /// tokens (Wang et al., 2024, arXiv:2408.15664).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
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

/// Settings that replace those of the routers of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterOverrides {
    /// The scores of experts.
    pub scores: Option<RouterScores>,
    /// Coefficient of the load-balancing loss. By default 0 if biases are added, else that of the model.
    pub aux_loss: Option<f32>,
    /// Coefficient of the z-loss.
    pub z_loss: Option<f32>,
    /// Adds biases to a model without biases.
    pub bias: bool,
}

impl Descriptor {
    /// Returns the model with other settings of its routers.
    pub fn with_router(self, overrides: RouterOverrides) -> Result<Self, DescriptorError> {
        if overrides == RouterOverrides::default() {
            return Ok(self);
        }
        let own = self.experts.ok_or_else(|| DescriptorError::WithoutRouter(self.to_string()))?;
        let RouterOverrides { scores, aux_loss, z_loss, bias } = overrides;
        let default_aux_loss = if bias && !own.bias { 0.0 } else { own.aux_loss };
        let experts = Experts {
            scores: scores.unwrap_or(own.scores),
            aux_loss: aux_loss.unwrap_or(default_aux_loss),
            z_loss: z_loss.unwrap_or(own.z_loss),
            bias: bias || own.bias,
            ..own
        };
        Self { experts: Some(experts), ..self }.checked()
    }
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
        bias: false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_routers_replace_those_of_the_model() {
        let known: Descriptor = "qwen3:30b-a3b".parse().unwrap();
        let with = |d: Descriptor, overrides| d.with_router(overrides).map(|d| d.experts.unwrap());
        let (own, none) = (known.experts.unwrap(), RouterOverrides::default());
        assert_eq!(with(known, none), Ok(own));
        let all = RouterOverrides { scores: Some(RouterScores::Sigmoid), z_loss: Some(0.5), ..none };
        assert_eq!(with(known, all), Ok(Experts { scores: RouterScores::Sigmoid, z_loss: 0.5, ..own }));
        // Biases replace the load-balancing loss, unless its coefficient is given or the model has biases already.
        let bias = RouterOverrides { bias: true, ..none };
        let with_aux_loss = |aux_loss| Ok(Experts { bias: true, aux_loss, ..own });
        assert_eq!(with(known, bias), with_aux_loss(0.0));
        let biased = known.with_router(RouterOverrides { aux_loss: Some(0.25), ..bias }).unwrap();
        assert_eq!([with(biased, none), with(biased, bias)], [with_aux_loss(0.25), with_aux_loss(0.25)]);
        let error = "llama3:1b".parse::<Descriptor>().unwrap().with_router(bias).unwrap_err().to_string();
        assert!(error.starts_with("router: expected a model with experts for --router-scores"), "{error}");
    }

    /// Model files of earlier versions have no biases, and those without biases are as before.
    #[test]
    fn files_have_biases_only_if_the_model_has_them() {
        let experts = "olmoe:1b-7b".parse::<Descriptor>().unwrap().experts.unwrap();
        let text = serde_json::to_string(&experts).unwrap();
        assert!(!text.contains("bias"), "{text}");
        assert_eq!(serde_json::from_str::<Experts>(&text).unwrap(), experts);
        let biased = Experts { bias: true, ..experts };
        assert_eq!(serde_json::from_str::<Experts>(&serde_json::to_string(&biased).unwrap()).unwrap(), biased);
    }
}
