//! Muon: momentum, orthogonalized by Newton-Schulz iterations, updates the matrices of the layers (Jordan et al., 2024,
//! <https://kellerjordan.github.io/posts/muon/>). AdamW updates everything else.
//!
//! Several layers are updated at a time, as many as fit in the memory that the update shares with other phases of a step.
//! Matrices of one shape are orthogonalized as a batch, because a single one does not fill a GPU.
//!
//! If ranks shard the optimizer state, each matrix has an owner. Each rank computes the momentum of its shard and sends its part of a
//! matrix to the owner, which orthogonalizes it and returns to each rank that rank's part. Each rank applies its shard. The bits of a matrix
//! depend neither on its owner nor on the rest of its batch, so neither do the results. The parameters that were updated last are gathered
//! while the next matrices are orthogonalized. If ranks share the experts, each owns the matrices of its experts, and they are not sent.
//!
//! Muon has no second moments of single weights. With [`MuonVariance`], the running means of a matrix are the first elements of its v,
//! so that they are stored, sharded and resumed like v. They are sent and returned with the matrix.

use super::decoder::{Decoder, Training};
use super::muon_buffers::{Matrix, MuonBuffers, fullest_layer, index, matrices, shapes};
use super::params::{GroupRange, Unit};
use super::sharding::LayerHooks;
use super::update::{Muon, Update};
use anyhow::Context;
use distributed::Transfer;
use engine::ops::{MuonApply, MuonMomentum, MuonVariance};
use engine::tensor::Tensor;
use engine::{Engine, Result};
use std::cmp::Reverse;
use std::ops::Range;

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

/// A matrix of a group of layers.
#[derive(Clone, Copy)]
struct Member<'a> {
    decayed: &'a GroupRange,
    matrix: &'a Matrix,
    /// The update, before or after its orthogonalization. Ranks that shard it have their own part, and its owner has all of it.
    tensor: Tensor,
    /// The rank that orthogonalizes it.
    owner: usize,
    /// The running means of [`MuonVariance`]: in v, or if ranks shard it, in memory of their own, distributed like `tensor`.
    second: Tensor,
}

/// The direction of an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToOwner,
    FromOwner,
}

/// Returns the elements that two ranges share; empty if there are none.
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Scales the orthogonalized update of a matrix by its running means, and updates these.
fn scale_by_means(
    engine: &mut dyn Engine,
    training: &Training,
    Member { decayed, matrix, tensor, second, .. }: Member,
    update: &Update,
) -> Result<()> {
    let (buffers, means) = (training.muon.context("this model was planned for AdamW only")?, matrix.means());
    let range = decayed.part(&means).within(&means).context("a matrix has no elements")?;
    engine.run(MuonVariance {
        update: tensor,
        second,
        sums: buffers.partials.slice(0, means.len()),
        stats: training.stats,
        rows: matrix.rows,
        cols: matrix.cols,
        beta2: Muon::BETA2,
        grad_factor: update.grad_factor,
        seed: update.adamw.seed.wrapping_add(range.seed),
    })
}

impl Decoder {
    /// Lets the engine collect the GEMMs of an update, for autotuning.
    pub(super) fn tune_muon(&self, engine: &mut dyn Engine) -> Result<()> {
        let Some(buffers) = self.training.and_then(|training| training.muon) else { return Ok(()) };
        let (_, matrices) = fullest_layer(&self.layout);
        for shape in shapes(&[&matrices]) {
            let matrix = &matrices[shape[0].1];
            // Only the number of matrices counts, not their places.
            let tensor = buffers.update.slice(0, matrix.elements.len());
            let tensors = vec![tensor; buffers.batches.largest(matrix, shape.len())];
            engine.run(buffers.orthogonalize(&tensors, matrix, &Muon::default()))?;
        }
        Ok(())
    }

    /// Returns the number of layers that Muon updates at a time.
    pub(super) fn muon_layers(&self) -> Result<usize> {
        let buffers = self.training()?.muon.context("this model was planned for AdamW only")?;
        Ok(buffers.batches.layers)
    }

    /// Updates this rank's shard of the matrices of several layers. `decayed` are the ranges of the matrices of all layers. `updated` lists
    /// units that are updated already. Their parameters are gathered while this function computes.
    pub(super) fn apply_muon(
        &self,
        engine: &mut dyn Engine,
        (layers, decayed): (Range<usize>, &[GroupRange]),
        (update, muon): (&Update, &Muon),
        updated: &mut Vec<Unit>,
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let training = self.training()?;
        let buffers = training.muon.context("this model was planned for AdamW only")?;
        let shard = self.layout.shard();
        for (i, layer) in layers.clone().enumerate() {
            let of_layer = decayed.iter().filter(|range| range.unit.layer() == Some(layer));
            for range in of_layer {
                self.momentum(engine, range, buffers.layer(i), update, muon)?;
            }
        }
        let matrices: Vec<Vec<Matrix>> = layers.map(|layer| matrices(&self.layout, layer)).collect();
        let members = self.members(training, &buffers, &matrices, decayed)?;
        let of_all: Vec<Member> = members.concat();
        if shard.ranks > 1 {
            if muon.additions.variance {
                self.own_means(training, &of_all).try_for_each(|(copy, own)| engine.copy(copy, own))?;
            }
            hooks.exchange(engine, &self.transfers(&of_all, muon, Direction::ToOwner))?;
            hooks.wait_for_exchanges(engine)?;
        }
        updated.drain(..).try_for_each(|unit| hooks.parameters_updated(engine, unit))?;
        // Equal positions in all layers are neighbors: their distances are equal, so that one kernel scales them.
        for shape in shapes(&matrices) {
            let of_shape: Vec<Member> = shape.iter().map(|&(layer, position)| members[layer][position]).collect();
            let own: Vec<Member> = of_shape.iter().filter(|member| member.owner == shard.rank).copied().collect();
            let matrix = of_shape[0].matrix;
            for batch in own.chunks(buffers.batches.of(matrix, shape.len())) {
                let tensors: Vec<Tensor> = batch.iter().map(|member| member.tensor).collect();
                let orthogonalize = buffers.orthogonalize(&tensors, matrix, muon);
                engine.run(orthogonalize)?;
                for (i, &member) in batch.iter().enumerate() {
                    let result = Member { tensor: orthogonalize.result(i), ..member };
                    if muon.additions.variance {
                        scale_by_means(engine, training, result, update)?;
                    }
                    if shard.ranks == 1 {
                        self.apply_matrix(engine, training, result, update, muon)?;
                    } else {
                        engine.copy(member.tensor, result.tensor)?;
                    }
                }
            }
            if shard.ranks > 1 {
                hooks.exchange(engine, &self.transfers(&of_shape, muon, Direction::FromOwner))?;
            }
        }
        if shard.ranks > 1 {
            hooks.wait_for_exchanges(engine)?;
            if muon.additions.variance {
                self.own_means(training, &of_all).try_for_each(|(copy, own)| engine.copy(own, copy))?;
            }
            of_all.into_iter().try_for_each(|member| self.apply_matrix(engine, training, member, update, muon))?;
        }
        Ok(())
    }

    /// Returns the matrices of each layer of a group, which are in the ranges `decayed` of the parameters.
    fn members<'a>(
        &self,
        training: &Training,
        buffers: &MuonBuffers,
        matrices: &'a [Vec<Matrix>],
        decayed: &'a [GroupRange],
    ) -> Result<Vec<Vec<Member<'a>>>> {
        let shard = self.layout.shard();
        let is_shared = |matrix: &Matrix| matrix.elements.start >= self.layout.experts();
        let exchanged: Vec<Matrix> = matrices.iter().flatten().filter(|matrix| !is_shared(matrix)).cloned().collect();
        let mut owners = owners(&exchanged, shard.ranks).into_iter();
        let layers = matrices.iter().enumerate();
        let members = layers.map(|(layer, matrices)| {
            let mut first = 0;
            let of_layer = matrices.iter().map(|matrix| {
                let holds = |range: &&GroupRange| range.elements.contains(&matrix.elements.start);
                let decayed = decayed.iter().find(holds).context("a matrix is in no range of the parameters")?;
                let owner = if is_shared(matrix) { Some(shard.rank) } else { owners.next() };
                let owner = owner.context("a matrix has no owner")?;
                let at = index(&self.layout, decayed.unit, matrix.elements.start);
                let tensor = buffers.layer(layer).slice(at, matrix.elements.len());
                let means = matrix.means();
                let second = match buffers.means(layer) {
                    Some(copies) => copies.slice(first, means.len()),
                    None => self.state_store(training.v).at(decayed.unit, means.clone()),
                };
                first += means.len();
                Ok(Member { decayed, matrix, tensor, owner, second })
            });
            of_layer.collect()
        });
        members.collect()
    }

    /// Returns the transfers between the owner of each matrix and the ranks that have a part of it, or of its running means.
    fn transfers(&self, members: &[Member], muon: &Muon, direction: Direction) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for &Member { decayed, matrix, tensor, owner, second } in members {
            let (unit, own) = (self.layout.unit(decayed.unit), self.layout.own(decayed.unit));
            let means = muon.additions.variance.then(|| (second, matrix.means()));
            for (tensor, elements) in [(tensor, matrix.elements.clone())].into_iter().chain(means) {
                for (rank, start) in unit.clone().step_by(own.len()).enumerate().filter(|(rank, _)| *rank != owner) {
                    let part = intersection(&elements, &(start..start + own.len()));
                    if !part.is_empty() {
                        let tensor = tensor.slice(part.start - elements.start, part.len());
                        let (from, to) = if direction == Direction::ToOwner { (rank, owner) } else { (owner, rank) };
                        transfers.push(Transfer { tensor, from, to });
                    }
                }
            }
        }
        transfers
    }

    /// Returns this rank's parts of the running means, as pairs: the memory from which ranks send them, and the memory that keeps them.
    fn own_means(&self, training: &Training, members: &[Member]) -> impl Iterator<Item = (Tensor, Tensor)> {
        members.iter().filter_map(|member| {
            let (unit, means) = (member.decayed.unit, member.matrix.means());
            let mine = intersection(&means, &self.layout.own(unit));
            (!mine.is_empty()).then(|| {
                let copy = member.second.slice(mine.start - means.start, mine.len());
                (copy, self.state_store(training.v).at(unit, mine))
            })
        })
    }

    /// Updates the momentum of this rank's shard of a range of a layer's matrices, and writes this rank's part of the update to `of_layer`.
    fn momentum(
        &self,
        engine: &mut dyn Engine,
        matrices: &GroupRange,
        of_layer: Tensor,
        update: &Update,
        muon: &Muon,
    ) -> Result<()> {
        let training = self.training()?;
        let unit = matrices.unit;
        let mine = intersection(&matrices.elements, &self.layout.own(unit));
        let Some(range) = matrices.within(&mine) else { return Ok(()) };
        engine.run(MuonMomentum {
            update: of_layer.slice(index(&self.layout, unit, mine.start), mine.len()),
            m: self.state_store(training.m).at(unit, mine.clone()),
            grads: self.grad_store(training).at(unit, mine.clone()),
            stats: training.stats,
            momentum: muon.momentum,
            grad_factor: update.grad_factor,
            clip: update.adamw.clip,
            seed: update.adamw.seed.wrapping_add(range.seed),
        })
    }

    /// Applies the orthogonalized update of a matrix to this rank's shard of it.
    fn apply_matrix(
        &self,
        engine: &mut dyn Engine,
        training: &Training,
        member: Member,
        update: &Update,
        muon: &Muon,
    ) -> Result<()> {
        let Member { decayed, matrix, tensor, .. } = member;
        let unit = decayed.unit;
        let mine = intersection(&matrix.elements, &self.layout.own(unit));
        let Some(range) = decayed.part(&matrix.elements).within(&mine) else { return Ok(()) };
        // nanochat's learning rate contains the scale, and so does its decay.
        let decay_scale = if muon.additions.cautious_decay { matrix.scale() } else { 1.0 };
        engine.run(MuonApply {
            params: self.param_store().at(unit, mine.clone()),
            master: training.master.map(|master| self.state_store(master).at(unit, mine.clone())),
            update: tensor.slice(mine.start - matrix.elements.start, mine.len()),
            stats: training.stats,
            grad_factor: update.grad_factor,
            learning_rate: muon.learning_rate,
            scale: matrix.scale(),
            weight_decay: muon.weight_decay * decay_scale,
            cautious_decay: muon.additions.cautious_decay,
            seed: update.adamw.seed.wrapping_add(range.seed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Descriptor, Params, Shard};

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
