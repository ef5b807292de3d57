//! The optimizer update: gradient norm, clipping, and AdamW or Muon.

use super::decoder::Decoder;
use super::params::{GroupRange, ParamGroup, Shard, Unit};
use super::sharding::{LayerHooks, Store};
use engine::ops::{AdamW, AdamWUpdate, GlobalNorm, MuonAdditions, MuonCoefficients, SquareRoot, SquaredSum, Sum};
use engine::{Engine, Result};
use serde::{Deserialize, Serialize};

/// The optimizer of the layers' matrices. AdamW updates everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW
    #[default]
    #[value(name = "adamw")]
    AdamW,
    /// Muon, and AdamW for embeddings, head, norms and biases
    Muon,
}

/// Hyperparameters of one Muon update. Clipping and the seed are those of AdamW.
#[derive(Clone, Copy, Debug, Default)]
pub struct Muon {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the momentum.
    pub momentum: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Coefficients of the Newton-Schulz iterations.
    pub coefficients: MuonCoefficients,
    /// Additions.
    pub additions: MuonAdditions,
}

impl Muon {
    /// Decay of the running means of [`MuonVariance`](engine::ops::MuonVariance), as in nanochat.
    pub const BETA2: f32 = 0.9;

    /// Returns the most layers that are updated at a time. If ranks shard the update, these are half of them, so that the parameters of one
    /// half are gathered while the other half is updated.
    pub fn most_layers(layers: usize, shard: Shard) -> usize {
        if shard.ranks > 1 { layers.div_ceil(2) } else { layers }
    }
}

/// AdamW's hyperparameters of a group of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSettings {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay, if the group [decays](ParamGroup::decayed).
    pub weight_decay: f32,
}

impl GroupSettings {
    /// Returns settings with which AdamW subtracts `rate` times the sign of a gradient. With decays of 0, the moments are the gradient and its
    /// square, and the quotient of the gradient and the root is exactly 1 or -1. The square of a gradient above 2^-63 is a normal number,
    /// and epsilon does not change its root.
    pub const fn sign_descent(rate: f32) -> Self {
        Self { learning_rate: rate, beta1: 0.0, beta2: 0.0, eps: f32::MIN_POSITIVE, weight_decay: 0.0 }
    }
}

/// Hyperparameters of one update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// AdamW. Its clip and seed are those of all groups.
    pub adamw: AdamW,
    /// Groups with settings of their own, at the places of [`ParamGroup::ALL`].
    pub groups: [Option<GroupSettings>; ParamGroup::ALL.len()],
    /// Updates the layers' matrices instead of AdamW.
    pub muon: Option<Muon>,
    /// Factor of the gradients and of their norm, applied before clipping. [`TrainStep::run`](crate::TrainStep::run) sets it.
    pub grad_factor: f32,
}

impl From<AdamW> for Update {
    /// Updates all parameters with AdamW, except the biases of routers, which do not change.
    fn from(adamw: AdamW) -> Self {
        let update = Self { adamw, groups: [None; ParamGroup::ALL.len()], muon: None, grad_factor: 1.0 };
        update.with_router_bias_rate(0.0)
    }
}

impl Update {
    /// Sets the change of the biases of routers: each grows by `rate` if the load of its expert is below the mean, and shrinks if it is above.
    #[must_use]
    pub fn with_router_bias_rate(mut self, rate: f32) -> Self {
        self.groups[ParamGroup::RouterBiases as usize] = Some(GroupSettings::sign_descent(rate));
        self
    }

    /// Returns AdamW's hyperparameters of a group.
    fn adamw_of(&self, group: ParamGroup) -> AdamW {
        let Some(settings) = self.groups[group as usize] else { return self.adamw };
        let GroupSettings { learning_rate, beta1, beta2, eps, weight_decay } = settings;
        // Clipping could make these gradients too small for their squares.
        let clip = if group == ParamGroup::RouterBiases { f32::INFINITY } else { self.adamw.clip };
        AdamW { learning_rate, beta1, beta2, eps, weight_decay, clip, ..self.adamw }
    }
}

impl Decoder {
    /// Computes the sum of `losses` in `stats[0]` and the gradient norm in `stats[1]`.
    ///
    /// If ranks shard the update, it computes the squared norm of this rank's shard in `squares` instead; after the sum over
    /// the ranks, [`finish_norm`](Self::finish_norm) completes the norm.
    pub fn measure(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        engine.run(Sum { out: training.stats.slice(0, 1), values: self.losses })?;
        match training.squares {
            Some(out) => engine.run(SquaredSum { out, values: &self.grad_store(training).all_own() }),
            None => engine.run(GlobalNorm { norm: training.stats.slice(1, 1), grads: training.grads }),
        }
    }

    /// Computes the square root of `squares`, if present, in `stats[1]`.
    pub fn finish_norm(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        let Some(value) = training.squares else { return Ok(()) };
        engine.run(SquareRoot { out: training.stats.slice(1, 1), value })
    }

    /// Clips the gradients by the measured norm and updates this rank's shard, with weight decay of the groups that decay.
    /// Nothing changes unless loss and norm are finite.
    ///
    /// If ranks shard the update, it proceeds unit by unit and calls `hooks` for each. Muon updates several layers before the
    /// first of them, and their parameters are gathered while it updates the next ones.
    pub fn apply_update(&self, engine: &mut dyn Engine, update: &Update, hooks: &mut dyn LayerHooks) -> Result<()> {
        let sharded = self.zero.shards_optimizer();
        let (matrices, others) = self.ranges(update);
        if !sharded {
            self.apply_adamw(engine, None, &others, update)?;
        }
        let mut updated = Vec::new();
        for unit in self.layout.units() {
            if sharded {
                let others: Vec<_> = others.iter().filter(|range| range.unit == unit).cloned().collect();
                self.apply_adamw(engine, Some(unit), &others, update)?;
            }
            if let (Some(muon), Unit::Layer(layer)) = (&update.muon, unit)
                && layer.is_multiple_of(self.muon_layers()?)
            {
                let layers = layer..self.descriptor.layers.min(layer + self.muon_layers()?);
                self.apply_muon(engine, (layers, &matrices), (update, muon), &mut updated, hooks)?;
            }
            updated.push(unit);
            if update.muon.is_none() {
                updated.drain(..).try_for_each(|unit| hooks.parameters_updated(engine, unit))?;
            }
        }
        updated.into_iter().try_for_each(|unit| hooks.parameters_updated(engine, unit))
    }

    /// Returns the ranges of the layers' matrices, if Muon updates them, and all other ranges by group.
    fn ranges(&self, update: &Update) -> (Vec<GroupRange>, Vec<GroupRange>) {
        let is_muons = |range: &GroupRange| update.muon.is_some() && range.group == ParamGroup::Matrices;
        let (matrices, mut others): (Vec<_>, Vec<_>) = self.layout.group_ranges().into_iter().partition(is_muons);
        // Sorting is stable.
        others.sort_by_key(|range| update.groups[range.group as usize].map(|_| range.group));
        (matrices, others)
    }

    /// Applies AdamW to this rank's shard of `ranges`, which lie in `unit` if ranks shard the update. Those of groups with
    /// equal settings are updated together.
    fn apply_adamw(
        &self,
        engine: &mut dyn Engine,
        unit: Option<Unit>,
        ranges: &[GroupRange],
        update: &Update,
    ) -> Result<()> {
        let training = self.training()?;
        let own = unit.map_or(0..self.layout.elements(), |unit| self.layout.own(unit));
        let of = |store: Store| unit.map_or_else(|| store.all(), |unit| store.own(unit));
        let state = |tensor| of(self.state_store(tensor));
        let settings = |range: &GroupRange| update.groups[range.group as usize];
        for ranges in ranges.chunk_by(|a, b| settings(a) == settings(b)) {
            let own_ranges: Vec<_> = ranges.iter().filter_map(|range| range.within(&own)).collect();
            engine.run(AdamWUpdate {
                params: of(self.param_store()),
                grads: of(self.grad_store(training)),
                m: state(training.m),
                v: state(training.v),
                master: training.master.map(state),
                ranges: &own_ranges,
                stats: training.stats,
                grad_factor: update.grad_factor,
                settings: update.adamw_of(ranges[0].group),
            })?;
        }
        Ok(())
    }
}
