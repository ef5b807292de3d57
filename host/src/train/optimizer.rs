//! Hyperparameters of the optimizer over the steps.

use super::Settings;
use clap::ValueEnum;
use engine::ops::{AdamW, MuonAdditions, MuonCoefficients};
use model::schedule::{Schedule, WeightDecaySchedule};
use model::{GroupSettings, Muon, ParamGroup, Update};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum gradient norm, as in llm.c.
pub const CLIP: f32 = 1.0;

/// AdamW's decay rates and epsilon, as in llm.c.
const BETAS: (f32, f32) = (0.9, 0.95);
const EPS: f32 = 1e-8;

/// Learning rates of groups of parameters, and the optimizer of the layers' matrices. The default is AdamW with one learning
/// rate.
#[derive(Clone, Debug, Default)]
pub struct OptimizerSettings {
    /// Groups of parameters with other hyperparameters of AdamW. Later ones take precedence.
    pub groups: Vec<GroupFlag>,
    /// Change of the biases of routers in each step. The schedule does not apply to it.
    pub router_bias_rate: f32,
    /// Set if Muon updates the layers' matrices.
    pub muon: Option<MuonSettings>,
}

/// AdamW's hyperparameters of a group of parameters, as in `head:lr=0.008,beta2=0.96`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct GroupFlag {
    group: ParamGroup,
    /// In the order of `KEYS`.
    values: [Option<f32>; 5],
}

impl GroupFlag {
    /// Peak learning rate, decay of the moments, epsilon and weight decay.
    const KEYS: [&str; 5] = ["lr", "beta1", "beta2", "eps", "decay"];

    /// Creates the hyperparameters: peak learning rate, β1, β2, ε and weight decay. Those that are absent are those of all parameters.
    pub const fn new(group: ParamGroup, values: [Option<f32>; 5]) -> Self {
        Self { group, values }
    }

    /// Replaces the settings of the group in `update`. `rate` returns the learning rate of a step from the peak.
    fn apply(&self, update: &mut Update, rate: impl Fn(f32) -> f32) {
        let AdamW { learning_rate, beta1, beta2, eps, weight_decay, .. } = update.adamw;
        let settings = update.groups[self.group as usize].get_or_insert(GroupSettings {
            learning_rate,
            beta1,
            beta2,
            eps,
            weight_decay,
        });
        let [lr, beta1, beta2, eps, decay] = self.values;
        settings.learning_rate = lr.map_or(settings.learning_rate, rate);
        for (setting, value) in [
            (&mut settings.beta1, beta1),
            (&mut settings.beta2, beta2),
            (&mut settings.eps, eps),
            (&mut settings.weight_decay, decay),
        ] {
            *setting = value.unwrap_or(*setting);
        }
    }
}

impl fmt::Display for GroupFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = Self::KEYS.iter().zip(self.values).filter_map(|(key, value)| Some(format!("{key}={:?}", value?)));
        write!(f, "{}:{}", name_of(self.group), values.collect::<Vec<_>>().join(","))
    }
}

impl From<GroupFlag> for String {
    fn from(flag: GroupFlag) -> Self {
        flag.to_string()
    }
}

impl TryFrom<String> for GroupFlag {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for GroupFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The biases of routers have a flag of their own.
        let groups = || ParamGroup::ALL.into_iter().filter(|&group| group != ParamGroup::RouterBiases);
        let names = || groups().map(name_of).collect::<Vec<_>>().join(", ");
        let (name, list) = text.split_once(':').ok_or_else(|| {
            format!("expected GROUP:KEY=VALUE,... such as head:lr=0.004, where GROUP is {}, found '{text}'", names())
        })?;
        let group = groups().find(|&group| name_of(group) == name);
        let group = group.ok_or_else(|| format!("expected a group of {}, found '{name}'", names()))?;
        let mut values = [None; 5];
        for entry in list.split(',') {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            let at = Self::KEYS.iter().position(|known| *known == key);
            let at = at.ok_or_else(|| format!("expected a key of {}, found '{key}'", Self::KEYS.join(", ")))?;
            let value = value.parse::<f32>().ok().filter(|x| *x >= 0.0 && x.is_finite() && (at == 0 || *x < 1.0));
            let range = if at == 0 { "a number of at least 0" } else { "a number from 0 to below 1" };
            values[at] = Some(value.ok_or_else(|| format!("{key}: expected {range}, found '{entry}'"))?);
        }
        Ok(Self { group, values })
    }
}

/// Returns the name of a group in flags.
fn name_of(group: ParamGroup) -> String {
    group.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
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
    /// Momentum at the end of a trapezoidal schedule, to which it changes while the learning rate decays.
    pub final_momentum: Option<f32>,
    /// Schedule of the weight decay.
    pub weight_decay: WeightDecaySchedule,
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
        final_momentum: None,
        weight_decay: WeightDecaySchedule::Constant,
        coefficients: MuonCoefficients::PolarExpress,
        additions: MuonAdditions { equilibrate: false, renormalize: false, variance: false, cautious_decay: false },
    };

    /// The momentum of the first step.
    const FIRST_MOMENTUM: f32 = 0.85;

    /// Returns the momentum of a step, counted from 0. It increases linearly, and then changes linearly to the final momentum.
    fn momentum_at(&self, step: usize, schedule: &Schedule) -> f32 {
        if step >= self.warmup {
            let Some(last) = self.final_momentum else { return self.momentum };
            return self.momentum - schedule.warmdown_share(step) * (self.momentum - last);
        }
        let first = Self::FIRST_MOMENTUM.min(self.momentum);
        first + step as f32 / self.warmup as f32 * (self.momentum - first)
    }
}

impl Settings {
    /// Returns the hyperparameters of a step, counted from 0. The learning rates of all groups have the same schedule.
    pub(super) fn update(&self, step: usize, seed: u32) -> Update {
        let rate = |peak: f32| Schedule { peak, ..self.schedule }.at(step);
        let OptimizerSettings { groups, router_bias_rate, muon } = &self.optimizer;
        let mut update = Update::from(AdamW {
            learning_rate: self.schedule.at(step),
            beta1: BETAS.0,
            beta2: BETAS.1,
            eps: EPS,
            weight_decay: self.weight_decay,
            step: step as u32 + 1,
            clip: self.clip,
            seed,
        });
        for group in groups {
            group.apply(&mut update, rate);
        }
        update = update.with_router_bias_rate(*router_bias_rate);
        update.muon = muon.map(|muon| Muon {
            learning_rate: rate(muon.lr),
            momentum: muon.momentum_at(step, &self.schedule),
            weight_decay: (f64::from(self.weight_decay) * muon.weight_decay.factor(step, self.schedule.steps)) as f32,
            coefficients: muon.coefficients,
            additions: muon.additions,
        });
        update
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use model::schedule::ScheduleKind;

    const SCHEDULE: Schedule = Schedule {
        kind: ScheduleKind::Trapezoidal,
        peak: 1.0,
        warmup: 40,
        steps: 1210,
        final_fraction: 0.05,
        warmdown: 0.65,
    };

    /// The expected values were computed with nanochat's `get_muon_momentum` for 1210 steps and a warmdown of 0.65 (786.5 steps, rounded to
    /// 786).
    #[test]
    fn momentum_agrees_with_nanochat() {
        let settings = MuonSettings { momentum: 0.97, warmup: 400, final_momentum: Some(0.9), ..MuonSettings::DEFAULT };
        let expected = [0.85, 0.91, 0.969_7, 0.97, 0.97, 0.97, 0.969_910_9, 0.933_842_2, 0.900_089_1, 0.9];
        for (step, expected) in [0, 200, 399, 400, 423, 424, 425, 830, 1209, 1210].into_iter().zip(expected) {
            let found = settings.momentum_at(step, &SCHEDULE);
            assert!((found - expected).abs() < 1e-6f32, "step {step}: {found}, expected {expected}");
        }
    }

    #[test]
    fn groups_have_their_own_settings() {
        let parse = |text: &str| text.parse::<GroupFlag>();
        let flag = parse("head:lr=0.004,beta2=0.96").unwrap();
        assert_eq!(flag.to_string(), "head:lr=0.004,beta2=0.96");
        let (learning_rate, beta1, beta2, eps) = (0.1, 0.9, 0.95, 1e-8);
        let adamw = AdamW { learning_rate, beta1, beta2, eps, weight_decay: 0.2, step: 1, clip: 1.0, seed: 0 };
        let mut update = Update::from(adamw);
        for flag in [flag, parse("head:decay=0.01,lr=0.002").unwrap()] {
            flag.apply(&mut update, |peak| peak / 2.0);
        }
        let head = GroupSettings { learning_rate: 0.001, beta1, beta2: 0.96, eps, weight_decay: 0.01 };
        assert_eq!(update.groups[ParamGroup::Head as usize], Some(head));
        assert_eq!(update.groups[ParamGroup::Embeddings as usize], None);
        assert!(parse("lr=0.1").unwrap_err().contains("value-embeddings"));
        for (text, expected) in [
            ("tail:lr=1", "'tail'"),
            ("router-biases:lr=1", "'router-biases'"),
            ("head:beta=1", "'beta'"),
            ("head:beta1=1", "'beta1=1'"),
        ] {
            assert!(parse(text).unwrap_err().ends_with(expected), "{text}");
        }
    }

    #[test]
    fn momentum_increases_linearly_from_085() {
        let settings = MuonSettings { warmup: 10, ..MuonSettings::DEFAULT };
        let near = |settings: MuonSettings, step, expected: f32| {
            let found = settings.momentum_at(step, &SCHEDULE);
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
