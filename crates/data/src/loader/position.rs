//! The state of a data loader, as checkpoints store it.

use crate::mixture::State;
use rng::Mt19937;
use std::sync::Arc;

/// The state that a loader needs to resume with the same batches.
#[derive(Clone, Debug)]
pub struct Position {
    /// Number of shards completed in this epoch.
    pub shard: usize,
    /// Number of samples read from the current shard.
    pub sample: usize,
    /// Permutations of a shuffling loader; `None` for a loader that reads its shards in order. It changes only when a
    /// shard is opened, so storing the position of every batch is cheap.
    pub shuffle: Option<Arc<Shuffle>>,
    /// The state of a mixture, which does not use the other fields.
    pub mixture: Option<Arc<State>>,
}

/// The permutations of a shuffling loader, and the generator that draws the next ones.
#[derive(Clone, Debug)]
pub struct Shuffle {
    /// Generator of the permutations.
    pub rng: Mt19937,
    /// The n-th shard of the epoch is `shards[n]`.
    pub shards: Vec<u32>,
    /// The n-th sample of the current shard is `samples[n]`.
    pub samples: Vec<u32>,
}

impl Position {
    /// Returns the index of the current shard.
    pub(super) fn shard_index(&self) -> usize {
        self.shuffle.as_ref().map_or(self.shard, |shuffle| shuffle.shards[self.shard] as usize)
    }

    /// Returns the index of the next sample in the current shard, which must not be exhausted.
    pub(super) fn sample_index(&self) -> usize {
        self.shuffle.as_ref().map_or(self.sample, |shuffle| shuffle.samples[self.sample] as usize)
    }
}
