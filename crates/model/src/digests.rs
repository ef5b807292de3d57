//! Digests of parameters and optimizer state, equal on all ranks and for any sharding.

use super::decoder::{Decoder, Training};
use super::params::Param;
use super::sharding::Store;
use anyhow::bail;
use distributed::Ranks;
use distributed::fault::Fault;
use engine::{Engine, Result};
use std::collections::BTreeMap;

/// Digests in hexadecimal, by the name and type of the values, for example `m f32`.
pub type Digests = BTreeMap<String, String>;

/// Distance between the positions of the elements of two tensors. No tensor is as long.
const TENSOR: u64 = 1 << 40;

/// Distance between the numbers of a tensor in two layers: the number of parameters without adapters.
const LAYER: usize = 19;

impl Decoder {
    /// Returns the digests of parameters, moments and master weights. All ranks must call it.
    ///
    /// # Errors
    /// A [`Fault::ReplicaMismatch`] if ranks that have the same values differ.
    pub fn digests(&self, engine: &mut dyn Engine, ranks: &mut Ranks) -> Result<Digests> {
        let Some(Training { m, v, master, .. }) = self.training else {
            bail!("this model was planned for inference only")
        };
        let master = master.tensor().map(|master| ("master", master));
        let mut stores = vec![("params", self.param_store(), self.params)];
        for (name, tensor) in [("m", m), ("v", v)].into_iter().chain(master) {
            stores.push((name, self.state_store(tensor), tensor));
        }
        let mut sums = Vec::new();
        for (_, store, _) in &stores {
            sums.extend(self.digest_of(engine, *store)?);
        }
        let all = ranks.gather(sums.iter().flat_map(|sum| sum.to_le_bytes()).collect())?;
        let all: Vec<Vec<u64>> = all.iter().map(|bytes| words(bytes)).collect();
        let (mut digests, mut differs) = (Digests::new(), None);
        for (i, (name, _, tensor)) in stores.iter().enumerate() {
            let Some(first) = all.first() else { break };
            // Each shard group has all shards, in the same order.
            let group = self.zero.shard().ranks;
            let of_first_group = |rank: usize| &all[rank % group];
            let differing = (0..all.len()).find_map(|rank| {
                let common = (all[rank][2 * i] != first[2 * i]).then_some(0);
                let shard = (all[rank][2 * i + 1] != of_first_group(rank)[2 * i + 1]).then_some(rank % group);
                common.or(shard).map(|expected| (rank, expected))
            });
            differs = differs.or(differing.map(|ranks| (ranks, (*name).to_owned())));
            let shards = all.iter().take(group).map(|sums| sums[2 * i + 1]);
            let sum = shards.fold(first[2 * i], u64::wrapping_add);
            digests.insert(format!("{name} {}", tensor.dtype.name()), format!("{sum:016x}"));
        }
        let (digests, differs) = ranks.broadcast((digests, differs))?;
        if let Some(((rank, expected), tensor)) = differs {
            let peer = ranks.tcp_group().map_or_else(|| format!("rank {rank}"), |group| group.peer_name(rank));
            bail!(Fault::ReplicaMismatch { peer, expected, tensor });
        }
        Ok(digests)
    }

    /// Returns the digests of the values that every rank has, and of this rank's shards.
    fn digest_of(&self, engine: &mut dyn Engine, store: Store) -> Result<[u64; 2]> {
        let mut sums = [0u64; 2];
        for (i, param) in Param::ALL.into_iter().enumerate().filter(|(_, param)| self.descriptor.has(*param)) {
            for layer in param.layers(&self.descriptor) {
                let Some((range, tensor)) = store.held(param, layer) else { continue };
                let position = (i + layer * LAYER) as u64 * TENSOR + range.start as u64;
                let digest = engine.digest(tensor, position)?;
                let is_sharded = store.is_sharded(self.layout.unit_of(param, layer));
                let sum = &mut sums[usize::from(is_sharded)];
                *sum = sum.wrapping_add(digest);
            }
        }
        Ok(sums)
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))).collect()
}
