//! llm.c's distributed data loader, with the same sharding and the same shuffled order.
//!
//! A shard is read in samples of `ranks * B * T` tokens; an incomplete sample at the end of a shard is dropped. Each
//! rank reads its own window of `B * T` tokens of a sample, plus one token for the last target. Ranks draw different
//! permutations, but a window always belongs to the same rank, so an epoch covers each window once.
//!
//! Without a shuffle, a loader with [whole steps](Loader::with_whole_steps) gives each step the same tokens for any
//! number of ranks.

mod position;
#[cfg(test)]
mod tests;

pub use position::{Position, Shuffle};

use super::Tokens;
use anyhow::{Result, ensure};
use engine::BatchLayout;
use rng::Mt19937;
use std::sync::Arc;

/// The shape of a micro-batch, and the rank that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Sequences in a micro-batch.
    pub b: usize,
    /// Tokens in a sequence.
    pub t: usize,
    /// World size.
    pub ranks: usize,
    /// Rank of this process, below `ranks`.
    pub rank: usize,
}

impl Geometry {
    /// Returns the geometry of a single process that reads whole samples.
    pub const fn single(b: usize, t: usize) -> Self {
        Self { b, t, ranks: 1, rank: 0 }
    }

    /// Returns the tokens that one rank reads of a sample.
    const fn window_tokens(self) -> usize {
        self.b * self.t
    }

    const fn sample_tokens(self) -> usize {
        self.ranks * self.window_tokens()
    }
}

/// Reads batches from token shards, in order or shuffled.
#[derive(Clone, Debug)]
pub struct Loader {
    shards: Vec<Tokens>,
    geometry: Geometry,
    vocab: usize,
    position: Position,
    /// The number of samples read from a shard is a multiple of this.
    samples_per_step: usize,
    /// Number of batches after which the loader starts over.
    rewind_after: Option<usize>,
    batches_since_rewind: usize,
    /// The tokens of one batch: inputs, shifted by one for the targets.
    window: Vec<u32>,
}

impl Loader {
    /// Creates a loader at the start of its first epoch.
    ///
    /// `shuffle` is the shuffle's seed, to which the rank is added. Without it, shards and samples are read in order.
    /// Every token must be below `vocab`.
    pub fn new(shards: Vec<Tokens>, geometry: Geometry, vocab: usize, shuffle: Option<u32>) -> Result<Self> {
        ensure!(!shards.is_empty(), "data loader: expected at least one token file, found none");
        for shard in &shards {
            ensure!(shard.mask().is_none(), "{shard}: expected tokens without a mask, which this loader does not read");
            let needed = geometry.sample_tokens() + 1;
            ensure!(
                shard.len() >= needed,
                "{shard} holds {} tokens, expected at least {needed} (batch {} x seq {}{} + 1); \
                 use a smaller --batch or --seq",
                shard.len(),
                geometry.b,
                geometry.t,
                if geometry.ranks > 1 { format!(" x {} ranks", geometry.ranks) } else { String::new() }
            );
        }
        let shuffle = shuffle.map(|seed| {
            Arc::new(Shuffle {
                rng: Mt19937::new(seed.wrapping_add(geometry.rank as u32)),
                shards: (0..shards.len() as u32).collect(),
                samples: Vec::new(),
            })
        });
        let mut loader = Self {
            shards,
            geometry,
            vocab,
            position: Position { shard: 0, sample: 0, shuffle, mixture: None },
            samples_per_step: 1,
            rewind_after: None,
            batches_since_rewind: 0,
            window: vec![0; geometry.window_tokens() + 1],
        };
        loader.begin_epoch();
        Ok(loader)
    }

    /// Reads only whole optimizer steps of `samples_per_step` samples from each shard.
    ///
    /// The tokens of a step then depend only on the step number, not on the number of ranks or micro-batches. An
    /// incomplete step at the end of a shard is dropped.
    ///
    /// # Panics
    /// If the loader shuffles.
    pub fn with_whole_steps(mut self, samples_per_step: usize) -> Result<Self> {
        assert!(!self.shuffles(), "whole steps require a loader without a shuffle");
        self.samples_per_step = samples_per_step;
        let tokens = samples_per_step * self.geometry.sample_tokens();
        for shard in &self.shards {
            ensure!(
                shard.len() > tokens,
                "{shard} holds {} tokens, expected at least {} (--total-batch {tokens} + 1), \
                 because without --shuffle a step cannot cross the end of a shard; \
                 use a smaller --total-batch, larger shards, or --shuffle 1",
                shard.len(),
                tokens + 1
            );
        }
        Ok(self)
    }

    /// Starts over after every `batches` batches, so that each evaluation reads the same batches.
    #[must_use]
    pub fn rewinding_after(mut self, batches: usize) -> Self {
        self.rewind_after = Some(batches);
        self
    }

    /// Returns the number of tokens in all shards.
    pub fn tokens(&self) -> usize {
        self.shards.iter().map(Tokens::len).sum()
    }

    /// Returns the number of batches in an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        self.shards.iter().map(|shard| self.samples_in(shard)).sum()
    }

    /// Returns whether shards and samples are shuffled.
    pub const fn shuffles(&self) -> bool {
        self.position.shuffle.is_some()
    }

    /// Returns the number of ranks that share each sample.
    pub fn ranks(&self) -> usize {
        self.geometry.ranks
    }

    /// Returns the shards in unshuffled order.
    pub fn shards(&self) -> &[Tokens] {
        &self.shards
    }

    /// Returns the layout of a batch.
    pub fn layout(&self) -> BatchLayout {
        BatchLayout::new(self.geometry.b, self.geometry.t)
    }

    /// Returns the position of the next batch.
    pub fn position(&self) -> Position {
        self.position.clone()
    }

    /// Moves to a position of a loader with the same shards and geometry.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        self.check_position(&position)?;
        if self.rewind_after.is_some() {
            // A rewinding loader reads its shards in order.
            let completed = self.shards[..position.shard].iter().map(|shard| self.samples_in(shard)).sum::<usize>();
            self.batches_since_rewind = completed + position.sample;
        }
        self.position = position;
        Ok(())
    }

    fn check_position(&self, position: &Position) -> Result<()> {
        let Position { shard, sample, shuffle, .. } = position;
        let shards = self.shards.len();
        ensure!(
            *shard < shards,
            "data position: expected a shard below {shards}, found {shard}; use the data set of the checkpoint"
        );
        self.check_order(position)?;
        if let Some(shuffle) = shuffle {
            let is_valid = |order: &[u32], n: usize| order.len() == n && order.iter().all(|&i| (i as usize) < n);
            ensure!(
                is_valid(&shuffle.shards, shards),
                "data position: expected a permutation of {shards} shards, found one of {}; \
                 use the data set of the checkpoint",
                shuffle.shards.len()
            );
            let current = &self.shards[position.shard_index()];
            let samples = self.samples_in(current);
            ensure!(
                is_valid(&shuffle.samples, samples),
                "data position: expected a permutation of the {samples} samples of {current}, found one of {}; \
                 use the data set, --batch and --seq of the checkpoint",
                shuffle.samples.len()
            );
        }
        let samples = self.samples_in(&self.shards[position.shard_index()]);
        ensure!(
            *sample <= samples,
            "data position: expected a sample of at most {samples} in this shard, found {sample}; \
             use the data set, --batch and --seq of the checkpoint"
        );
        Ok(())
    }

    /// Fails unless the loader and the position are both shuffled or both in order.
    pub fn check_order(&self, position: &Position) -> Result<()> {
        let name = |shuffles| if shuffles { "shuffled" } else { "in order" };
        let (saved, current) = (position.shuffle.is_some(), self.shuffles());
        ensure!(
            saved == current,
            "data order: expected data {}, as in the checkpoint, found data {}; \
             set --shuffle as in the checkpoint's run",
            name(saved),
            name(current)
        );
        Ok(())
    }

    /// Advances by a number of tokens, counted over all ranks.
    pub fn skip_tokens(&mut self, tokens: u64) {
        for _ in 0..tokens / self.geometry.sample_tokens() as u64 {
            self.prepare_sample();
            self.advance();
        }
    }

    /// Reads the inputs and targets of the next batch into `words`, laid out by [`layout`](Self::layout). The caller
    /// sorts the batch.
    pub fn next(&mut self, words: &mut [i32]) -> Result<()> {
        self.prepare_sample();
        let window_tokens = self.geometry.window_tokens();
        let start = self.position.sample_index() * self.geometry.sample_tokens() + self.geometry.rank * window_tokens;
        let shard = &self.shards[self.position.shard_index()];
        shard.read(start, &mut self.window)?;
        if let Some(i) = self.window.iter().position(|&token| token as usize >= self.vocab) {
            anyhow::bail!(
                "{shard}: token {} at position {}: expected ids below {}, the vocabulary size; \
                 tokenize the text for this model",
                self.window[i],
                start + i,
                self.vocab
            );
        }
        let layout = self.layout();
        // Ids are below the vocabulary size, which fits into an i32.
        let convert = |(to, from): (&mut i32, &u32)| *to = *from as i32;
        words[layout.inputs()].iter_mut().zip(&self.window).for_each(convert);
        words[layout.targets()].iter_mut().zip(&self.window[1..]).for_each(convert);
        self.advance();
        Ok(())
    }

    /// Rewinds, or opens the next shard, if the position is at an end.
    fn prepare_sample(&mut self) {
        if self.rewind_after == Some(self.batches_since_rewind) {
            self.batches_since_rewind = 0;
            self.begin_epoch();
        }
        if self.position.sample >= self.samples_in(self.current_shard()) {
            self.next_shard();
        }
    }

    fn advance(&mut self) {
        self.position.sample += 1;
        self.batches_since_rewind += 1;
    }

    /// Returns the number of samples that are read from a shard. Its last token is a target only.
    fn samples_in(&self, shard: &Tokens) -> usize {
        let samples = (shard.len() - 1) / self.geometry.sample_tokens();
        samples - samples % self.samples_per_step
    }

    fn current_shard(&self) -> &Tokens {
        &self.shards[self.position.shard_index()]
    }

    fn next_shard(&mut self) {
        if self.position.shard + 1 == self.shards.len() {
            self.begin_epoch();
        } else {
            self.position.shard += 1;
            self.begin_shard();
        }
    }

    /// Each epoch shuffles the shard order of the epoch before, as in llm.c. It does not start from the identity
    /// permutation.
    fn begin_epoch(&mut self) {
        self.position.shard = 0;
        if let Some(shuffle) = &mut self.position.shuffle {
            let Shuffle { rng, shards, .. } = Arc::make_mut(shuffle);
            rng.shuffle(shards);
        }
        self.begin_shard();
    }

    fn begin_shard(&mut self) {
        self.position.sample = 0;
        let samples = self.samples_in(self.current_shard());
        if let Some(shuffle) = &mut self.position.shuffle {
            let shuffle = Arc::make_mut(shuffle);
            shuffle.samples = (0..samples as u32).collect();
            shuffle.rng.shuffle(&mut shuffle.samples);
        }
    }
}
