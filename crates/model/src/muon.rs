//! Muon: momentum, orthogonalized by Newton-Schulz iterations, updates the matrices of the layers (Jordan et al., 2024,
//! <https://kellerjordan.github.io/posts/muon/>). AdamW updates everything else.
//!
//! Several layers are updated at a time, as many as fit in the memory that the update shares with other phases of a step.
//! Matrices of one shape are orthogonalized as a batch, because a single one does not fill a GPU.
//!
//! If ranks shard the optimizer state, each computes the momentum of its shard, the update is gathered, each rank
//! orthogonalizes whole matrices, these are exchanged, and each rank applies its shard. The bits of a matrix depend neither on
//! the rank that orthogonalizes it nor on the rest of its batch, so neither do the results.
//!
//! Muon has no second moments of single weights. With [`MuonVariance`], the running means of a matrix are the first elements of its v,
//! so that they are stored, sharded and resumed like v. Ranks exchange them before the update, and each scales all matrices.

use super::decoder::{Decoder, Training};
use super::muon_buffers::{Matrix, fullest_layer, matrices, shapes};
use super::params::{GroupRange, Unit};
use super::sharding::LayerHooks;
use super::update::{Muon, Update};
use anyhow::Context;
use engine::ops::{MuonApply, MuonMomentum, MuonVariance};
use engine::tensor::{Sharded, Tensor};
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
    /// The update, before or after its orthogonalization.
    tensor: Tensor,
    /// The rank that orthogonalizes it.
    owner: usize,
    /// The running means of [`MuonVariance`], in v or, if ranks shard it, gathered from it.
    second: Tensor,
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
        let (layer, matrices) = fullest_layer(&self.layout);
        let start = self.layout.unit(Unit::Layer(layer)).start;
        for shape in shapes(&[&matrices]) {
            let matrix = &matrices[shape[0].1];
            // Only the number of matrices counts, not their places.
            let tensor = buffers.update.slice(matrix.elements.start - start, matrix.elements.len());
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

    /// Updates this rank's shard of the matrices of several layers. `decayed` are their ranges.
    pub(super) fn apply_muon(
        &self,
        engine: &mut dyn Engine,
        (layers, decayed): (Range<usize>, &[GroupRange]),
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
            let (mut first, mut of_layer) = (0, Vec::new());
            for (matrix, owner) in matrices.iter().zip(&mut owners) {
                let tensor = buffers.layer(layer).slice(matrix.elements.start - start, matrix.elements.len());
                let means = matrix.means();
                let second = match buffers.means(layer) {
                    Some(gathered) => gathered.slice(first, means.len()),
                    None => self.state_store(training.v).at(decayed.unit, means.clone()),
                };
                first += means.len();
                of_layer.push(Member { decayed, matrix, tensor, owner, second });
            }
            members.push(of_layer);
        }
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
                    if shard.ranks == 1 {
                        self.apply_matrix(engine, training, result, update, muon)?;
                    } else {
                        engine.copy(member.tensor, result.tensor)?;
                    }
                }
            }
        }
        let members = members.concat();
        if shard.ranks > 1 {
            let owned: Vec<_> = members.iter().map(|member| (member.owner, member.tensor)).collect();
            hooks.exchange_matrices(engine, &owned)?;
            if muon.additions.variance {
                self.gather_means(engine, training, &members, hooks)?;
            }
            members.into_iter().try_for_each(|member| self.apply_matrix(engine, training, member, update, muon))?;
        }
        Ok(())
    }

    /// Updates the momentum of this rank's shard of a layer's matrices, and writes its part of the layer's update `whole`.
    fn momentum(
        &self,
        engine: &mut dyn Engine,
        matrices: &GroupRange,
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
                grad_factor: update.grad_factor,
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

    /// Gathers the running means of matrices, which ranks shard.
    fn gather_means(
        &self,
        engine: &mut dyn Engine,
        training: &Training,
        members: &[Member],
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for &Member { decayed, matrix, second, .. } in members {
            let (unit, own, means) = (self.layout.unit(decayed.unit), self.layout.own(decayed.unit), matrix.means());
            for (rank, start) in unit.step_by(own.len()).enumerate() {
                let part = intersection(&means, &(start..start + own.len()));
                if part.is_empty() {
                    continue;
                }
                let to = second.slice(part.start - means.start, part.len());
                if start == own.start {
                    engine.copy(to, self.state_store(training.v).at(decayed.unit, part))?;
                }
                parts.push((rank, to));
            }
        }
        hooks.exchange_matrices(engine, &parts)
    }

    /// Scales the orthogonalized update of a matrix by its running means, and updates this rank's shard of these.
    fn scale_by_means(
        &self,
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
        })?;
        let mine = intersection(&means, &self.layout.own(decayed.unit));
        if self.layout.shard().ranks > 1 && !mine.is_empty() {
            let from = second.slice(mine.start - means.start, mine.len());
            engine.copy(self.state_store(training.v).at(decayed.unit, mine), from)?;
        }
        Ok(())
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
        if muon.additions.variance {
            self.scale_by_means(engine, training, member, update)?;
        }
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
