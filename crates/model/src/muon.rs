//! Muon: momentum, orthogonalized by Newton-Schulz iterations, updates the matrices of the layers (Jordan et al., 2024,
//! <https://kellerjordan.github.io/posts/muon/>). AdamW updates everything else.
//!
//! A layer is updated at a time. If ranks shard the optimizer state, each computes the momentum of its shard, the update is
//! gathered, each rank orthogonalizes whole matrices, these are exchanged, and each rank applies its shard. The values do not
//! depend on which rank orthogonalizes a matrix, so neither do the results.

use super::decoder::{Decoder, Training};
use super::params::{DecayRange, Param, Params, Unit};
use super::sharding::LayerHooks;
use super::update::Update;
use anyhow::Context;
use engine::ops::{MuonApply, MuonCoefficients, MuonMomentum, Orthogonalize};
use engine::plan::Wanted;
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Engine, Result};
use std::cmp::Reverse;
use std::ops::Range;

/// Hyperparameters of one Muon update. Weight decay, clipping and the seed are those of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct Muon {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the momentum.
    pub momentum: f32,
    /// Coefficients of the Newton-Schulz iterations.
    pub coefficients: MuonCoefficients,
}

/// A matrix that Muon updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements of the parameter block.
    pub(super) elements: Range<usize>,
}

impl Matrix {
    fn flops(&self) -> usize {
        Orthogonalize::flops(self.rows, self.cols)
    }

    /// Returns the factor of the update: a matrix with more rows than columns needs a larger one for outputs of the same size.
    fn scale(&self) -> f32 {
        (self.rows as f32 / self.cols as f32).max(1.0).sqrt()
    }
}

/// Returns the matrices of a layer. Queries, keys and values are matrices of their own, as are up and gate of SwiGLU.
pub(super) fn matrices(layout: &Params, layer: usize) -> Vec<Matrix> {
    let d = layout.descriptor();
    let mut matrices = Vec::new();
    for param in Param::LAYER_MATRICES {
        let (all_rows, cols) = param.shape(d);
        let parts = match param {
            Param::Qkvw => [d.heads, d.kv_heads, d.kv_heads].map(|heads| heads * d.head_size).to_vec(),
            Param::Fcw => vec![d.mlp_channels; d.activation.inputs()],
            _ => vec![all_rows],
        };
        let mut start = layout.range(param, layer).start;
        for rows in parts {
            matrices.push(Matrix { rows, cols, elements: start..start + rows * cols });
            start += rows * cols;
        }
    }
    matrices
}

/// Returns the rank that orthogonalizes each matrix. The most expensive matrices go to the least loaded ranks first.
fn owners(matrices: &[Matrix], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..matrices.len()).collect();
    order.sort_by_key(|&i| Reverse(matrices[i].flops()));
    let (mut owners, mut loads) = (vec![0; matrices.len()], vec![0; ranks]);
    for i in order {
        let rank = (0..ranks).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        owners[i] = rank;
        loads[rank] += matrices[i].flops();
    }
    owners
}

/// Memory of the update of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct MuonBuffers {
    /// (largest layer) float: the layer's update, in the layout of its parameters
    update: Tensor,
    /// (largest matrix) float
    next: Tensor,
    /// (s, s) float for the largest shorter side s
    gram: Tensor,
    polynomial: Tensor,
    /// (1) f32
    norm: Tensor,
}

/// The sizes of [`MuonBuffers`].
pub(super) struct MuonSizes {
    update: [usize; 1],
    next: [usize; 1],
    square: [usize; 2],
}

impl MuonSizes {
    pub(super) fn new(layout: &Params) -> Self {
        let matrices = matrices(layout, 0);
        let largest = |size: fn(&Matrix) -> usize| matrices.iter().map(size).max().unwrap_or(0);
        let side = largest(|matrix| matrix.rows.min(matrix.cols));
        Self { update: [layout.largest_layer()], next: [largest(|matrix| matrix.elements.len())], square: [side, side] }
    }

    /// Returns the buffers to plan, in the order that [`MuonBuffers::new`] takes them.
    pub(super) fn wanted(&self, dtype: DType) -> [Wanted<'_>; 5] {
        [
            ("muon update", &self.update, dtype),
            ("muon next", &self.next, dtype),
            ("muon gram", &self.square, dtype),
            ("muon polynomial", &self.square, dtype),
            ("muon norm", &[1], DType::F32),
        ]
    }
}

impl MuonBuffers {
    /// Creates the handles of planned buffers.
    pub(super) fn new([update, next, gram, polynomial, norm]: [Tensor; 5]) -> Self {
        Self { update, next, gram, polynomial, norm }
    }

    /// Orthogonalizes a matrix in place.
    fn orthogonalize(
        &self,
        engine: &mut dyn Engine,
        tensor: Tensor,
        matrix: &Matrix,
        coefficients: MuonCoefficients,
    ) -> Result<()> {
        let Matrix { rows, cols, .. } = *matrix;
        let square = rows.min(cols).pow(2);
        engine.run(Orthogonalize {
            matrix: tensor,
            next: self.next.slice(0, rows * cols),
            gram: self.gram.slice(0, square),
            polynomial: self.polynomial.slice(0, square),
            norm: self.norm,
            rows,
            cols,
            coefficients,
        })
    }
}

/// Returns the elements that two ranges share; empty if there are none.
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

impl Decoder {
    /// Lets the engine collect the GEMMs of an update, for autotuning.
    pub(super) fn tune_muon(&self, engine: &mut dyn Engine) -> Result<()> {
        let Some(buffers) = self.training.and_then(|training| training.muon) else { return Ok(()) };
        let start = self.layout.unit(Unit::Layer(0)).start;
        for matrix in matrices(&self.layout, 0) {
            let tensor = buffers.update.slice(matrix.elements.start - start, matrix.elements.len());
            buffers.orthogonalize(engine, tensor, &matrix, MuonCoefficients::default())?;
        }
        Ok(())
    }

    /// Updates this rank's shard of the matrices of a layer. `decayed` is their range.
    pub(super) fn apply_muon(
        &self,
        engine: &mut dyn Engine,
        (layer, decayed): (usize, &DecayRange),
        update: &Update,
        muon: &Muon,
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let training = self.training()?;
        let buffers = training.muon.context("this model was planned for AdamW only")?;
        let (unit, shard) = (Unit::Layer(layer), self.layout.shard());
        let range = self.layout.unit(unit);
        let whole = buffers.update.slice(0, range.len());
        self.momentum(engine, decayed, whole, update, muon)?;
        if shard.ranks > 1 {
            hooks.gather_update(engine, Sharded { whole, shard: whole.part(shard.rank, shard.ranks) })?;
        }
        let matrices = matrices(&self.layout, layer);
        let owners = owners(&matrices, shard.ranks);
        let tensors: Vec<Tensor> = matrices
            .iter()
            .map(|matrix| whole.slice(matrix.elements.start - range.start, matrix.elements.len()))
            .collect();
        for ((matrix, &tensor), &owner) in matrices.iter().zip(&tensors).zip(&owners) {
            if owner == shard.rank {
                buffers.orthogonalize(engine, tensor, matrix, muon.coefficients)?;
            }
        }
        if shard.ranks > 1 {
            let owned: Vec<_> = owners.into_iter().zip(tensors.iter().copied()).collect();
            hooks.exchange_matrices(engine, &owned)?;
        }
        matrices.iter().zip(tensors).try_for_each(|(matrix, tensor)| {
            self.apply_matrix(engine, training, (decayed, matrix), tensor, update, muon)
        })
    }

    /// Updates the momentum of this rank's shard of a layer's matrices, and writes its part of the layer's update `whole`.
    fn momentum(
        &self,
        engine: &mut dyn Engine,
        matrices: &DecayRange,
        whole: Tensor,
        update: &Update,
        muon: &Muon,
    ) -> Result<()> {
        let training = self.training()?;
        let unit = matrices.unit;
        let (start, own) = (self.layout.unit(unit).start, self.layout.own(unit));
        let mine = intersection(&matrices.elements, &own);
        if let Some(range) = matrices.within(&mine) {
            engine.run(MuonMomentum {
                update: whole.slice(mine.start - start, mine.len()),
                m: self.state_store(training.m).at(unit, mine.clone()),
                grads: self.grad_store(training).at(unit, mine.clone()),
                stats: training.stats,
                momentum: muon.momentum,
                clip: update.adamw.clip,
                seed: update.adamw.seed.wrapping_add(range.seed),
            })?;
        }
        // The shard is gathered as a whole, but no rank reads the places of vectors and padding.
        let rest = mine.end.max(own.start)..own.end;
        if self.layout.shard().ranks > 1 && !rest.is_empty() {
            engine.zero(whole.slice(rest.start - start, rest.len()))?;
        }
        Ok(())
    }

    /// Applies the orthogonalized update of a matrix to this rank's shard of it.
    fn apply_matrix(
        &self,
        engine: &mut dyn Engine,
        training: &Training,
        (decayed, matrix): (&DecayRange, &Matrix),
        tensor: Tensor,
        update: &Update,
        muon: &Muon,
    ) -> Result<()> {
        let unit = decayed.unit;
        let mine = intersection(&matrix.elements, &self.layout.own(unit));
        let Some(range) = decayed.part(&matrix.elements).within(&mine) else { return Ok(()) };
        engine.run(MuonApply {
            params: self.param_store().at(unit, mine.clone()),
            master: training.master.map(|master| self.state_store(master).at(unit, mine.clone())),
            update: tensor.slice(mine.start - matrix.elements.start, mine.len()),
            stats: training.stats,
            learning_rate: muon.learning_rate,
            scale: matrix.scale(),
            weight_decay: update.adamw.weight_decay,
            seed: update.adamw.seed.wrapping_add(range.seed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Descriptor, Shard};

    #[test]
    fn matrices_cover_the_layers_matrices_and_split_queries_keys_and_values() {
        let descriptor = Descriptor::gpt2(3, 2, 24, 10, 60).unwrap();
        let layout = Params::new(descriptor);
        let of = |layer| matrices(&layout, layer);
        let shapes: Vec<_> = of(1).iter().map(|matrix| (matrix.rows, matrix.cols)).collect();
        assert_eq!(shapes, [(24, 24), (24, 24), (24, 24), (24, 24), (96, 24), (24, 96)]);
        assert_eq!(of(1)[0].elements.start, layout.range(Param::Qkvw, 1).start);
        assert_eq!(of(1)[2].elements.end, layout.range(Param::Qkvw, 1).end);
        assert_eq!(of(2)[5].elements, layout.range(Param::Fcprojw, 2));
        assert_eq!([4, 5].map(|i| of(0)[i].scale().to_bits()), [2.0f32, 1.0].map(f32::to_bits));
    }

    #[test]
    fn the_most_expensive_matrices_go_to_different_ranks() {
        let descriptor = Descriptor::gpt2(1, 2, 64, 10, 60).unwrap();
        let matrices = matrices(&Params::sharded(descriptor, Shard { rank: 0, ranks: 2 }), 0);
        // q, k, v and proj cost a third of fc and fcproj.
        assert_eq!(3 * matrices[0].flops(), matrices[4].flops());
        assert_eq!(owners(&matrices, 1), [0; 6]);
        assert_eq!(owners(&matrices, 2), [0, 1, 0, 1, 0, 1]);
        assert_eq!(owners(&matrices, 3), [2, 2, 2, 0, 0, 1]);
        assert_eq!(owners(&matrices, 8), [2, 3, 4, 5, 0, 1]);
    }
}
