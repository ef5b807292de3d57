//! Hyperparameters of the optimizer over the steps.

use super::Settings;
use engine::ops::{AdamW, MuonAdditions, MuonCoefficients};
use model::schedule::Schedule;
use model::{Muon, Update};

/// Maximum gradient norm, as in llm.c.
pub const CLIP: f32 = 1.0;

/// AdamW's decay rates and epsilon, as in llm.c.
const BETAS: (f32, f32) = (0.9, 0.95);
const EPS: f32 = 1e-8;

/// Learning rates of groups of parameters, and the optimizer of the layers' matrices. The default is AdamW with one learning
/// rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct OptimizerSettings {
    /// Peak learning rate of the embeddings, if it is another one.
    pub embedding_lr: Option<f32>,
    /// Peak learning rate of the head, if it is another one.
    pub head_lr: Option<f32>,
    /// Set if Muon updates the layers' matrices.
    pub muon: Option<MuonSettings>,
}

/// Settings of Muon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonSettings {
    /// Peak learning rate.
    pub lr: f32,
    /// Momentum after its warmup.
    pub momentum: f32,
    /// Steps in which the momentum increases.
    pub warmup: usize,
    /// Coefficients of the Newton-Schulz iterations.
    pub coefficients: MuonCoefficients,
    /// Additions.
    pub additions: MuonAdditions,
}

impl MuonSettings {
    /// The settings of modded-nanogpt and nanochat.
    pub const DEFAULT: Self = Self {
        lr: 0.02,
        momentum: 0.95,
        warmup: 300,
        coefficients: MuonCoefficients::PolarExpress,
        additions: MuonAdditions { equilibrate: false, renormalize: false, cautious_decay: false },
    };

    /// The momentum of the first step.
    const FIRST_MOMENTUM: f32 = 0.85;

    /// Returns the momentum of a step, counted from 0. It increases linearly.
    fn momentum_at(&self, step: usize) -> f32 {
        if step >= self.warmup {
            return self.momentum;
        }
        let first = Self::FIRST_MOMENTUM.min(self.momentum);
        first + step as f32 / self.warmup as f32 * (self.momentum - first)
    }
}

impl Settings {
    /// Returns the hyperparameters of a step, counted from 0. The learning rates of all groups have the same schedule.
    pub(super) fn update(&self, step: usize, seed: u32) -> Update {
        let rate = |peak: f32| Schedule { peak, ..self.schedule }.at(step);
        let OptimizerSettings { embedding_lr, head_lr, muon } = self.optimizer;
        let learning_rate = self.schedule.at(step);
        Update {
            adamw: AdamW {
                learning_rate,
                beta1: BETAS.0,
                beta2: BETAS.1,
                eps: EPS,
                weight_decay: self.weight_decay,
                step: step as u32 + 1,
                clip: self.clip,
                seed,
            },
            embedding_learning_rate: embedding_lr.map_or(learning_rate, rate),
            head_learning_rate: head_lr.map_or(learning_rate, rate),
            muon: muon.map(|muon| Muon {
                learning_rate: rate(muon.lr),
                momentum: muon.momentum_at(step),
                coefficients: muon.coefficients,
                additions: muon.additions,
            }),
            grad_factor: 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentum_increases_linearly_from_085() {
        let settings = MuonSettings { warmup: 10, ..MuonSettings::DEFAULT };
        let near = |settings: MuonSettings, step, expected: f32| {
            let found = settings.momentum_at(step);
            assert!((found - expected).abs() < 1e-6, "step {step}: {found}, expected {expected}");
        };
        for (step, expected) in [(0, 0.85), (5, 0.9), (10, 0.95), (99, 0.95)] {
            near(settings, step, expected);
        }
        near(MuonSettings { warmup: 0, ..settings }, 0, 0.95);
        // It never decreases.
        near(MuonSettings { momentum: 0.5, ..settings }, 3, 0.5);
    }
}
