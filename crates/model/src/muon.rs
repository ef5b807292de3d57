//! Muon: momentum, orthogonalized by Newton-Schulz iterations, updates the matrices of the layers (Jordan et al., 2024,
//! <https://kellerjordan.github.io/posts/muon/>). AdamW updates everything else.
//!
//! Several layers are updated at a time, as many as fit in the memory that the update shares with other phases of a step.
//! Matrices of one shape are orthogonalized as a batch, because a single one does not fill a GPU.
//!
//! If ranks shard the optimizer state, each computes the momentum of its shard, the update is gathered, each rank
//! orthogonalizes whole matrices, these are exchanged, and each rank applies its shard. The bits of a matrix depend neither on
//! the rank that orthogonalizes it nor on the rest of its batch, so neither do the results.

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

/// Returns the matrices of a layer. Queries, keys and values are matrices of their own, as are up and gate of a gated activation.
pub(super) fn matrices(layout: &Params, layer: usize) -> Vec<Matrix> {
    let d = layout.descriptor();
    let mut matrices = Vec::new();
    for param in Param::linear() {
        let (_, cols) = param.shape(d);
        let mut start = layout.range(param, layer).start;
        for rows in param.matrices(d) {
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

/// Tiles of 128 x 128 on and above the diagonal of a batch of symmetric matrices that fill a large GPU: eight for each of 132 SMs.
/// Larger batches take more memory and gain little.
const BATCH_TILES: usize = 1056;

/// Returns the most matrices of this shape that a batch should have.
fn largest_batch(matrix: &Matrix) -> usize {
    let tiles = matrix.rows.min(matrix.cols).div_ceil(128);
    BATCH_TILES.div_ceil(tiles * (tiles + 1) / 2)
}

/// Returns the matrices of a layer by shape: the positions in `matrices` of those with the same rows and columns.
fn shapes(matrices: &[Matrix]) -> Vec<Vec<usize>> {
    let mut shapes: Vec<Vec<usize>> = Vec::new();
    for (i, matrix) in matrices.iter().enumerate() {
        let same = |shape: &&mut Vec<usize>| {
            let other = &matrices[shape[0]];
            (other.rows, other.cols) == (matrix.rows, matrix.cols)
        };
        match shapes.iter_mut().find(same) {
            Some(shape) => shape.push(i),
            None => shapes.push(vec![i]),
        }
    }
    shapes
}

/// How many layers are updated at a time, and how many of their matrices are orthogonalized at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batches {
    layers: usize,
    /// Most matrices of a batch. Large matrices have smaller batches, see [`largest_batch`].
    matrices: usize,
}

impl Batches {
    /// Returns the matrices of a batch, of a shape that each layer has `per_layer` times.
    fn of(self, matrix: &Matrix, per_layer: usize) -> usize {
        (self.layers * per_layer).min(self.matrices).min(largest_batch(matrix))
    }
}

/// Memory of the update of several layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct MuonBuffers {
    batches: Batches,
    /// (layers, largest layer) float: the updates, in the layout of the layers' parameters
    update: Tensor,
    /// (largest batch) float: orthogonalized matrices
    out: Tensor,
    /// (largest batch) float
    next: Tensor,
    /// (matrices, s, s) float of the largest batch for the shorter side s
    gram: Tensor,
    polynomial: Tensor,
    /// (matrices, partial sums) f32
    partials: Tensor,
}

/// The sizes of [`MuonBuffers`].
pub(super) struct MuonSizes {
    batches: Batches,
    update: [usize; 2],
    batch: [usize; 1],
    square: [usize; 1],
    partials: [usize; 2],
}

impl MuonSizes {
    /// Returns the sizes for as many layers as possible in `free` bytes, or the smallest sizes. `dtype` is that of the parameters.
    pub(super) fn new(layout: &Params, dtype: DType, free: usize) -> Self {
        let matrices = matrices(layout, 0);
        let (layers, most) = (layout.descriptor().layers, matrices.len());
        let whole = (1..=layers).rev().map(|layers| Batches { layers, matrices: usize::MAX });
        let parts = (1..most).rev().map(|matrices| Batches { layers: 1, matrices });
        let mut sizes = whole.chain(parts).map(|batches| Self::of(layout, &matrices, batches));
        let fitting = sizes.find(|sizes| sizes.bytes(dtype) <= free);
        fitting.unwrap_or_else(|| Self::of(layout, &matrices, Batches { layers: 1, matrices: 1 }))
    }

    fn of(layout: &Params, matrices: &[Matrix], batches: Batches) -> Self {
        let shapes = shapes(matrices);
        let largest = |elements: fn(&Matrix) -> usize| {
            let of = |shape: &Vec<usize>| {
                let matrix = &matrices[shape[0]];
                batches.of(matrix, shape.len()) * Orthogonalize::stride(elements(matrix))
            };
            shapes.iter().map(of).max().unwrap_or(0)
        };
        let count = shapes.iter().map(|shape| batches.of(&matrices[shape[0]], shape.len())).max().unwrap_or(0);
        Self {
            batches,
            update: [batches.layers, layout.largest_layer()],
            batch: [largest(|matrix| matrix.elements.len())],
            square: [largest(|matrix| matrix.rows.min(matrix.cols).pow(2))],
            partials: [count, gpu::muon::PARTIALS as usize],
        }
    }

    /// Returns the buffers to plan, in the order that [`MuonBuffers::new`] takes them.
    pub(super) fn wanted(&self, dtype: DType) -> [Wanted<'_>; 6] {
        [
            ("muon update", &self.update, dtype),
            ("muon out", &self.batch, dtype),
            ("muon next", &self.batch, dtype),
            ("muon gram", &self.square, dtype),
            ("muon polynomial", &self.square, dtype),
            ("muon partials", &self.partials, DType::F32),
        ]
    }

    fn bytes(&self, dtype: DType) -> usize {
        engine::plan::bytes(&self.wanted(dtype))
    }
}

impl MuonBuffers {
    /// Creates the handles of planned buffers.
    pub(super) fn new(sizes: &MuonSizes, [update, out, next, gram, polynomial, partials]: [Tensor; 6]) -> Self {
        Self { batches: sizes.batches, update, out, next, gram, polynomial, partials }
    }

    /// Returns the memory of the update of layer number `i` of a group.
    fn layer(&self, i: usize) -> Tensor {
        self.update.part(i, self.batches.layers)
    }

    /// Returns the operation that orthogonalizes matrices of the shape of `matrix`.
    fn orthogonalize<'a>(
        &self,
        matrices: &'a [Tensor],
        matrix: &Matrix,
        coefficients: MuonCoefficients,
    ) -> Orthogonalize<'a> {
        let Self { out, next, gram, polynomial, partials, .. } = *self;
        let Matrix { rows, cols, .. } = *matrix;
        Orthogonalize { matrices, out, next, gram, polynomial, partials, rows, cols, coefficients }
    }
}

/// A matrix of a group of layers.
#[derive(Clone, Copy)]
struct Member<'a> {
    decayed: &'a DecayRange,
    matrix: &'a Matrix,
    /// The update, before or after its orthogonalization.
    tensor: Tensor,
    /// The rank that orthogonalizes it.
    owner: usize,
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
        let (matrices, start) = (matrices(&self.layout, 0), self.layout.unit(Unit::Layer(0)).start);
        for shape in shapes(&matrices) {
            let matrix = &matrices[shape[0]];
            // Only the number of matrices counts, not their places.
            let tensor = buffers.update.slice(matrix.elements.start - start, matrix.elements.len());
            let tensors = vec![tensor; buffers.batches.of(matrix, shape.len())];
            engine.run(buffers.orthogonalize(&tensors, matrix, MuonCoefficients::default()))?;
        }
        Ok(())
    }

    /// Returns the number of layers that Muon updates at a time.
    pub(super) fn muon_layers(&self) -> Result<usize> {
        let buffers = self.training()?.muon.context("this model was planned for AdamW only")?;
        Ok(buffers.batches.layers)
    }

    /// Updates this rank's shard of the matrices of several layers. `decayed` are their ranges.
    pub(super) fn apply_muon(
        &self,
        engine: &mut dyn Engine,
        (layers, decayed): (Range<usize>, &[DecayRange]),
        update: &Update,
        muon: &Muon,
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let training = self.training()?;
        let buffers = training.muon.context("this model was planned for AdamW only")?;
        let shard = self.layout.shard();
        for (i, decayed) in decayed.iter().enumerate() {
            let whole = buffers.layer(i).slice(0, self.layout.unit(decayed.unit).len());
            self.momentum(engine, decayed, whole, update, muon)?;
            if shard.ranks > 1 {
                hooks.gather_update(engine, Sharded { whole, shard: whole.part(shard.rank, shard.ranks) })?;
            }
        }
        let matrices: Vec<Vec<Matrix>> = layers.map(|layer| matrices(&self.layout, layer)).collect();
        let mut owners = owners(&matrices.concat(), shard.ranks).into_iter();
        let mut members = Vec::new();
        for (layer, (matrices, decayed)) in matrices.iter().zip(decayed).enumerate() {
            let start = self.layout.unit(decayed.unit).start;
            for (matrix, owner) in matrices.iter().zip(&mut owners) {
                let tensor = buffers.layer(layer).slice(matrix.elements.start - start, matrix.elements.len());
                members.push(Member { decayed, matrix, tensor, owner });
            }
        }
        for shape in shapes(&matrices[0]) {
            // Equal positions in all layers are neighbors: their distances are equal, so that one kernel scales them.
            let of = |&i: &usize| members.iter().skip(i).step_by(matrices[0].len());
            let own: Vec<Member> = shape.iter().flat_map(of).filter(|of| of.owner == shard.rank).copied().collect();
            let matrix = &matrices[0][shape[0]];
            for batch in own.chunks(buffers.batches.of(matrix, shape.len())) {
                let tensors: Vec<Tensor> = batch.iter().map(|member| member.tensor).collect();
                let orthogonalize = buffers.orthogonalize(&tensors, matrix, muon.coefficients);
                engine.run(orthogonalize)?;
                for (i, &member) in batch.iter().enumerate() {
                    let result = Member { tensor: orthogonalize.result(i), ..member };
                    if shard.ranks == 1 {
                        self.apply_matrix(engine, training, result, update, muon)?;
                    } else {
                        engine.copy(member.tensor, result.tensor)?;
                    }
                }
            }
        }
        if shard.ranks > 1 {
            let owned: Vec<_> = members.iter().map(|member| (member.owner, member.tensor)).collect();
            hooks.exchange_matrices(engine, &owned)?;
            members.into_iter().try_for_each(|member| self.apply_matrix(engine, training, member, update, muon))?;
        }
        Ok(())
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
        Member { decayed, matrix, tensor, .. }: Member,
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
    use engine::ops::Activation;

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

    #[test]
    fn matrices_of_one_shape_form_a_batch() {
        let gpt2 = Descriptor::gpt2(3, 2, 24, 10, 60).unwrap();
        assert_eq!(shapes(&matrices(&Params::new(gpt2), 0)), [vec![0, 1, 2, 3], vec![4], vec![5]]);
        let gated = Descriptor { activation: Activation::SwiGlu, kv_heads: 1, ..gpt2 };
        assert_eq!(shapes(&matrices(&Params::new(gated), 0)), [vec![0, 3], vec![1, 2], vec![4, 5], vec![6]]);
        let square = |side| Matrix { rows: side, cols: 4 * side, elements: 0..0 };
        assert_eq!([64, 768, 2048, 8192].map(|side| largest_batch(&square(side))), [1056, 51, 8, 1]);
    }

    /// Less memory leads to fewer layers at a time, then to smaller batches.
    #[test]
    fn batches_fit_in_the_memory_that_is_free() {
        let layout = Params::new(Descriptor::gpt2(12, 12, 768, 1024, 50257).unwrap());
        let sizes = |free| MuonSizes::new(&layout, DType::Bf16, free);
        let all = sizes(usize::MAX);
        assert_eq!(all.batches, Batches { layers: 12, matrices: usize::MAX });
        assert_eq!((all.update, all.batch, all.partials[0]), ([12, layout.largest_layer()], [12 * 3072 * 768], 48));
        let mut previous = all;
        let mut seen = Vec::new();
        while previous.batches.matrices > 1 {
            let next = sizes(previous.bytes(DType::Bf16) - 1);
            assert!(next.bytes(DType::Bf16) < previous.bytes(DType::Bf16));
            seen.push((next.batches.layers, next.batches.matrices.min(99)));
            previous = next;
        }
        let layers = (1..12).rev().map(|layers| (layers, 99));
        assert!(seen.starts_with(&layers.collect::<Vec<_>>()), "{seen:?}");
        assert_eq!(seen.last(), Some(&(1, 1)));
        assert_eq!(sizes(0).batches, previous.batches);
    }
}
