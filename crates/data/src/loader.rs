//! Which tokens make up which batch: llm.c's sharded, shuffled data loader, order for order.
//!
//! A shard is cut into samples of `ranks * B * T` tokens; a tail that fills none is dropped. Each rank reads its own slice
//! of a sample. Every rank draws its own permutations, yet a slice belongs to one rank only, so an epoch covers each slice once.
//!
//! Without a shuffle, a loader of [whole steps](Loader::in_steps_of) gives each step the same tokens however many ranks share them.

use super::Tokens;
use anyhow::{Result, ensure};
use engine::BatchLayout;
use rng::Mt19937;
use std::sync::Arc;

/// Size of a micro-batch, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub b: usize,
    pub t: usize,
    pub ranks: usize,
    pub rank: usize,
}

impl Geometry {
    /// One process with the whole batch.
    pub const fn single(b: usize, t: usize) -> Self {
        Self { b, t, ranks: 1, rank: 0 }
    }

    const fn sample_tokens(self) -> usize {
        self.ranks * self.b * self.t
    }
}

/// Where a loader stands: all that is needed to go on with the same batches.
#[derive(Clone, Debug)]
pub struct Position {
    /// Shards opened since the epoch began, this one not counted.
    pub shard: usize,
    /// Samples read of this shard.
    pub sample: usize,
    /// `None` for a loader that goes through its shards in order. Changes only when a shard is opened, so that the position of
    /// every batch can be kept.
    pub shuffle: Option<Arc<Shuffle>>,
}

/// The permutations of a shuffling loader and the generator that draws the next ones.
#[derive(Clone, Debug)]
pub struct Shuffle {
    pub rng: Mt19937,
    /// The n-th shard of the epoch is `shards[n]`.
    pub shards: Vec<u32>,
    /// The n-th sample of the shard is `samples[n]`.
    pub samples: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct Loader {
    shards: Vec<Tokens>,
    geometry: Geometry,
    vocab: usize,
    position: Position,
    /// Of each shard a multiple of this is read.
    samples_of_step: usize,
    /// Begin again after this many batches.
    rewind_after: Option<usize>,
    batches: usize,
    scratch: Vec<u16>,
}

impl Loader {
    /// `shuffle` is the seed of the shuffle, to which the rank is added; without it shards and samples come in order. Every
    /// token must be below `vocab`.
    pub fn new(shards: Vec<Tokens>, geometry: Geometry, vocab: usize, shuffle: Option<u32>) -> Result<Self> {
        ensure!(!shards.is_empty(), "a data loader needs at least one token file");
        for shard in &shards {
            let needed = geometry.sample_tokens() + 1;
            ensure!(
                shard.len() >= needed,
                "{shard} holds {} tokens, expected at least {needed} (batch {} x seq {}{} + 1): use a smaller --batch or --seq",
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
        let position = Position { shard: 0, sample: 0, shuffle };
        let scratch = vec![0; geometry.b * geometry.t + 1];
        let mut loader =
            Self { shards, geometry, vocab, position, samples_of_step: 1, rewind_after: None, batches: 0, scratch };
        loader.begin_epoch();
        Ok(loader)
    }

    /// Cuts shards into steps of `samples` samples, in order, and drops a tail that fills none. So which tokens a step has follows
    /// from their number alone, not from how many ranks and micro-batches share them.
    pub fn in_steps_of(mut self, samples: usize) -> Result<Self> {
        assert!(!self.shuffles(), "only samples in order make up the same steps");
        self.samples_of_step = samples;
        let tokens = samples * self.geometry.sample_tokens();
        for shard in &self.shards {
            ensure!(
                shard.len() > tokens,
                "{shard} holds {} tokens, expected at least {} (--total-batch {tokens} + 1): without --shuffle no step goes \
                 over the end of a shard; use a smaller --total-batch, larger shards, or --shuffle 1",
                shard.len(),
                tokens + 1
            );
        }
        Ok(self)
    }

    /// Begins again after every `batches` batches, so that each evaluation sees the same ones.
    #[must_use]
    pub fn rewinding_after(mut self, batches: usize) -> Self {
        self.rewind_after = Some(batches);
        self
    }

    /// Tokens of all shards.
    pub fn tokens(&self) -> usize {
        self.shards.iter().map(Tokens::len).sum()
    }

    /// Whole batches of an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        self.shards.iter().map(|shard| self.samples_of(shard)).sum()
    }

    pub const fn shuffles(&self) -> bool {
        self.position.shuffle.is_some()
    }

    /// How many share each sample.
    pub fn ranks(&self) -> usize {
        self.geometry.ranks
    }

    pub fn shards(&self) -> &[Tokens] {
        &self.shards
    }

    pub fn layout(&self) -> BatchLayout {
        BatchLayout { b: self.geometry.b, t: self.geometry.t }
    }

    /// Where the next batch comes from.
    pub fn position(&self) -> Position {
        self.position.clone()
    }

    /// Goes back, or on, to a position of a loader of the same shards and geometry.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        let Position { shard, sample, shuffle } = &position;
        ensure!(
            *shard < self.shards.len(),
            "the data position names shard {shard}, but there are {}: not the data set of the checkpoint",
            self.shards.len()
        );
        self.has_order_of(&position)?;
        if let Some(shuffle) = shuffle {
            let in_range = |order: &[u32], n: usize| order.len() == n && order.iter().all(|&i| (i as usize) < n);
            ensure!(
                in_range(&shuffle.shards, self.shards.len()),
                "the data position orders {} shards, but there are {}: not the data set of the checkpoint",
                shuffle.shards.len(),
                self.shards.len()
            );
            let open = &self.shards[shuffle.shards[*shard] as usize];
            ensure!(
                in_range(&shuffle.samples, self.samples_of(open)),
                "the data position orders {} samples of {open}, which has {}: not the data set, batch or seq of the checkpoint",
                shuffle.samples.len(),
                self.samples_of(open)
            );
        }
        let samples = self.samples_of(&self.shards[Self::shard_at(&position)]);
        ensure!(*sample <= samples, "the data position names sample {sample} of a shard of {samples}");
        if self.rewind_after.is_some() {
            // Rewinding loaders go through their shards in order.
            self.batches = self.shards[..*shard].iter().map(|shard| self.samples_of(shard)).sum::<usize>() + sample;
        }
        self.position = position;
        Ok(())
    }

    /// Whether both shuffle, or neither.
    pub fn has_order_of(&self, position: &Position) -> Result<()> {
        let tell = |shuffles| if shuffles { "shuffled" } else { "in order" };
        let (was, is) = (position.shuffle.is_some(), self.shuffles());
        ensure!(was == is, "the data position is of data {}, this is to be data {} (--shuffle)", tell(was), tell(is));
        Ok(())
    }

    /// Goes on as if so many tokens had been read by all ranks together.
    pub fn skip_tokens(&mut self, tokens: u64) {
        for _ in 0..tokens / self.geometry.sample_tokens() as u64 {
            self.make_ready();
            self.advance();
        }
    }

    /// Fills `words`, laid out by [`layout`](Self::layout), with the next batch; all but the sort.
    pub fn next(&mut self, words: &mut [i32]) -> Result<()> {
        self.make_ready();
        let Position { sample, shuffle, .. } = &self.position;
        let sample = shuffle.as_ref().map_or(*sample, |s| s.samples[*sample] as usize);
        let Geometry { b, t, rank, .. } = self.geometry;
        let start = sample * self.geometry.sample_tokens() + rank * b * t;
        let shard = &self.shards[Self::shard_at(&self.position)];
        shard.read(start, &mut self.scratch)?;
        if let Some(i) = self.scratch.iter().position(|&token| usize::from(token) >= self.vocab) {
            anyhow::bail!(
                "{shard}: token {} at position {} is beyond the vocabulary: expected ids below {}; \
                 tokenise the text for this model",
                self.scratch[i],
                start + i,
                self.vocab
            );
        }
        let layout = self.layout();
        let widen = |(to, from): (&mut i32, &u16)| *to = i32::from(*from);
        words[layout.inputs()].iter_mut().zip(&self.scratch).for_each(widen);
        words[layout.targets()].iter_mut().zip(&self.scratch[1..]).for_each(widen);
        self.advance();
        Ok(())
    }

    /// Opens the next shard, or begins again, where the position is at an end.
    fn make_ready(&mut self) {
        if self.rewind_after == Some(self.batches) {
            self.batches = 0;
            self.begin_epoch();
        }
        if self.position.sample >= self.samples_of(self.open_shard()) {
            self.next_shard();
        }
    }

    fn advance(&mut self) {
        self.position.sample += 1;
        self.batches += 1;
    }

    fn samples_of(&self, shard: &Tokens) -> usize {
        let samples = (shard.len() - 1) / self.geometry.sample_tokens();
        samples - samples % self.samples_of_step
    }

    fn shard_at(position: &Position) -> usize {
        position.shuffle.as_ref().map_or(position.shard, |s| s.shards[position.shard] as usize)
    }

    fn open_shard(&self) -> &Tokens {
        &self.shards[Self::shard_at(&self.position)]
    }

    fn next_shard(&mut self) {
        if self.position.shard + 1 == self.shards.len() {
            self.begin_epoch();
        } else {
            self.position.shard += 1;
            self.begin_shard();
        }
    }

    /// Permutations are not started afresh: each epoch shuffles the shards' last order.
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
        let samples = self.samples_of(self.open_shard());
        if let Some(shuffle) = &mut self.position.shuffle {
            let shuffle = Arc::make_mut(shuffle);
            shuffle.samples = (0..samples as u32).collect();
            shuffle.rng.shuffle(&mut shuffle.samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: usize = 4;
    const T: usize = 8;
    const SHARDS: usize = 4;
    const SHARD_TOKENS: usize = 140;

    /// Shards of consecutive numbers.
    fn shards() -> Vec<Tokens> {
        (0..SHARDS)
            .map(|s| {
                let tokens: Vec<u16> = (s * SHARD_TOKENS..(s + 1) * SHARD_TOKENS).map(|i| i as u16).collect();
                Tokens::in_memory(format!("shard {s}"), tokens)
            })
            .collect()
    }

    fn loaders(ranks: usize, shuffle: Option<u32>) -> Vec<Loader> {
        let of_rank = |rank| Loader::new(shards(), Geometry { b: B, t: T, ranks, rank }, 1000, shuffle).unwrap();
        (0..ranks).map(of_rank).collect()
    }

    fn batch(loader: &mut Loader) -> Vec<i32> {
        let mut words = vec![0; loader.layout().words()];
        loader.next(&mut words).unwrap();
        for (input, target) in words[loader.layout().inputs()].iter().zip(&words[loader.layout().targets()]) {
            assert_eq!(input + 1, *target);
        }
        words[loader.layout().inputs()].to_vec()
    }

    #[test]
    fn in_order_ranks_share_each_sample_and_drop_the_tail() {
        for ranks in [1, 2] {
            let mut loaders = loaders(ranks, None);
            let samples = (SHARD_TOKENS - 1) / (ranks * B * T);
            assert_eq!(loaders[0].batches_per_epoch(), SHARDS * samples);
            for _epoch in 0..4 {
                for shard in 0..SHARDS {
                    for sample in 0..samples {
                        for (rank, loader) in loaders.iter_mut().enumerate() {
                            let start = (shard * SHARD_TOKENS + (sample * ranks + rank) * B * T) as i32;
                            assert_eq!(batch(loader), (start..start + (B * T) as i32).collect::<Vec<_>>());
                        }
                    }
                }
            }
        }
    }

    /// Shards of lengths that no step of 128 tokens divides.
    fn uneven() -> Vec<Tokens> {
        let shard =
            |(first, n): (u16, u16)| Tokens::in_memory(format!("from {first}"), (first..first + n).collect::<Vec<_>>());
        [(0, 140), (140, 129), (269, 350), (619, 256)].into_iter().map(shard).collect()
    }

    /// Loaders of `ranks` ranks with batches of `b` sequences, in order, for steps of 128 tokens.
    fn in_steps(ranks: usize, b: usize) -> Vec<Loader> {
        let of_rank = |rank| {
            let loader = Loader::new(uneven(), Geometry { b, t: T, ranks, rank }, 1000, None).unwrap();
            loader.in_steps_of(128 / (ranks * b * T)).unwrap()
        };
        (0..ranks).map(of_rank).collect()
    }

    /// The tokens of a step, of all micro-batches and ranks.
    fn step(loaders: &mut [Loader]) -> Vec<i32> {
        let ranks = loaders.len();
        let micro_batches = 128 / (ranks * loaders[0].layout().inputs().len());
        let mut tokens = Vec::new();
        for _ in 0..micro_batches {
            tokens.extend(loaders.iter_mut().flat_map(batch));
        }
        tokens
    }

    #[test]
    fn in_whole_steps_any_ranks_and_batches_read_the_same_tokens_in_a_step() {
        // A target follows the last token, so 256 tokens are one step.
        let epoch = [0, 140, 269, 397, 619];
        for (ranks, b) in [(1, 4), (2, 4), (4, 4), (1, 16), (2, 8), (4, 1), (8, 2)] {
            let mut loaders = in_steps(ranks, b);
            assert_eq!(loaders[0].batches_per_epoch() * ranks * b * T, epoch.len() * 128);
            for (i, start) in epoch.iter().cycle().enumerate().take(3 * epoch.len()) {
                let expected: Vec<_> = (*start..start + 128).collect();
                assert_eq!(step(&mut loaders), expected, "step {i} of {ranks} ranks with {b}");
            }
        }
        let refused = Loader::new(uneven(), Geometry::single(4, T), 1000, None).unwrap().in_steps_of(5).unwrap_err();
        assert!(refused.to_string().starts_with("from 0 holds 140 tokens, expected at least 161"), "{refused}");
    }

    #[test]
    fn in_whole_steps_a_number_of_tokens_is_the_same_place_for_any_ranks_and_batches() {
        for done in 0..10 {
            let mut whole = in_steps(1, 4);
            for _ in 0..done {
                step(&mut whole);
            }
            let position = whole[0].position();
            let expected: Vec<_> = (done..10).map(|_| step(&mut whole)).collect();
            for (ranks, b) in [(1, 4), (1, 16), (2, 4), (4, 2)] {
                let mut resumed = in_steps(ranks, b);
                for loader in &mut resumed {
                    loader.skip_tokens(128 * done);
                }
                let got: Vec<_> = (done..10).map(|_| step(&mut resumed)).collect();
                assert_eq!(got, expected, "{ranks} ranks with {b} after {done} steps");
            }
            let mut resumed = in_steps(1, 4);
            resumed[0].seek(position).unwrap();
            assert_eq!((done..10).map(|_| step(&mut resumed)).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn shuffled_every_token_comes_once_an_epoch() {
        for ranks in [1, 2] {
            let mut loaders = loaders(ranks, Some(42));
            let mut orders = Vec::new();
            for _epoch in 0..4 {
                let mut seen = vec![0; SHARDS * SHARD_TOKENS];
                let mut order = Vec::new();
                for _ in 0..loaders[0].batches_per_epoch() {
                    for loader in &mut loaders {
                        let tokens = batch(loader);
                        order.push(tokens[0]);
                        for token in tokens {
                            seen[token as usize] += 1;
                        }
                    }
                }
                let used = (SHARD_TOKENS - 1) / (ranks * B * T) * ranks * B * T;
                for (token, times) in seen.into_iter().enumerate() {
                    assert_eq!(times, usize::from(token % SHARD_TOKENS < used), "token {token}, {ranks} ranks");
                }
                assert!(!order.is_sorted());
                assert!(!orders.contains(&order), "epochs differ");
                orders.push(order);
            }
        }
    }

    /// In shards of different lengths, too: samples are counted in the shard that is open.
    #[test]
    fn a_position_brings_back_the_batches_that_followed_it() {
        let uneven = || {
            let of = |n: u16| Tokens::in_memory(format!("shard of {n}"), (0..n).collect::<Vec<_>>());
            vec![of(140), of(300), of(70), of(33)]
        };
        for (shuffle, shards) in [None, Some(7)].into_iter().flat_map(|s| [(s, shards()), (s, uneven())]) {
            let fresh = || Loader::new(shards.clone(), Geometry::single(B, T), 1000, shuffle).unwrap();
            let mut loader = fresh();
            let mut kept = Vec::new();
            for _ in 0..40 {
                let position = loader.position();
                kept.push((position, batch(&mut loader)));
            }
            for (i, (position, _)) in kept.iter().enumerate() {
                let mut resumed = fresh();
                resumed.seek(position.clone()).unwrap();
                for (_, expected) in &kept[i..] {
                    assert_eq!(&batch(&mut resumed), expected);
                }
            }
        }
    }

    #[test]
    fn positions_of_other_data_are_refused() {
        let mut loader = loaders(1, Some(1)).remove(0);
        let good = loader.position();
        let shuffle = good.shuffle.clone().unwrap();
        let with = |change: &dyn Fn(&mut Shuffle)| {
            let mut shuffle = (*shuffle).clone();
            change(&mut shuffle);
            Position { shuffle: Some(Arc::new(shuffle)), ..good.clone() }
        };
        for bad in [
            Position { shard: 4, ..good.clone() },
            Position { sample: 5, ..good.clone() },
            Position { shuffle: None, ..good.clone() },
            with(&|s| s.shards[0] = 9),
            with(&|s| s.shards.truncate(3)),
            with(&|s| s.samples.push(0)),
            with(&|s| s.samples[0] = 4),
        ] {
            assert!(loader.seek(bad.clone()).is_err(), "{bad:?}");
        }
        loader.seek(good).unwrap();
    }

    #[test]
    fn a_rewinding_loader_repeats_its_first_batches() {
        let mut loader = loaders(1, None).remove(0).rewinding_after(3);
        let first: Vec<_> = (0..3).map(|_| batch(&mut loader)).collect();
        let again: Vec<_> = (0..3).map(|_| batch(&mut loader)).collect();
        assert_eq!(first, again);
        assert_ne!(first[0], first[1]);
        batch(&mut loader);
        let position = loader.position();
        let mut resumed = loaders(1, None).remove(0).rewinding_after(3);
        resumed.seek(position).unwrap();
        assert_eq!(
            [batch(&mut resumed), batch(&mut resumed), batch(&mut resumed)],
            [1, 2, 0].map(|i| first[i].clone())
        );
    }

    #[test]
    fn tokens_beyond_the_vocabulary_and_short_shards_are_named() {
        let mut loader = Loader::new(shards(), Geometry::single(B, T), 40, None).unwrap();
        let mut words = vec![0; loader.layout().words()];
        loader.next(&mut words).unwrap();
        let message = loader.next(&mut words).unwrap_err().to_string();
        assert!(message.contains("shard 0: token 40 at position 40") && message.contains("below 40"), "{message}");
        let message = Loader::new(shards(), Geometry::single(35, 4), 1000, None).unwrap_err().to_string();
        assert!(message.contains("shard 0 holds 140 tokens, expected at least 141"), "{message}");
    }
}
