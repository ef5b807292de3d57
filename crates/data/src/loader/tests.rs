//! Tests of the batch order against shards of consecutive numbers.

use super::*;

const B: usize = 4;
const T: usize = 8;
const SHARDS: usize = 4;
const SHARD_TOKENS: usize = 140;

/// Returns shards in which token `i`, counted over all shards, is `i`.
fn shards() -> Vec<Tokens> {
    (0..SHARDS)
        .map(|s| {
            let tokens = (s * SHARD_TOKENS..(s + 1) * SHARD_TOKENS).map(|i| i as u32).collect();
            Tokens::in_memory(format!("shard {s}"), tokens)
        })
        .collect()
}

fn loaders(ranks: usize, shuffle: Option<u32>) -> Vec<Loader> {
    let of_rank = |rank| Loader::new(shards(), Geometry { b: B, t: T, ranks, rank }, 1000, shuffle).unwrap();
    (0..ranks).map(of_rank).collect()
}

/// Returns the inputs of the next batch, and checks that the targets follow them.
fn batch(loader: &mut Loader) -> Vec<i32> {
    let mut words = vec![0; loader.layout().words()];
    loader.next(&mut words).unwrap();
    for (input, target) in words[loader.layout().inputs()].iter().zip(&words[loader.layout().targets()]) {
        assert_eq!(input + 1, *target);
    }
    words[loader.layout().inputs()].to_vec()
}

#[test]
fn ranks_in_order_share_each_sample_and_drop_the_tail() {
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

/// Returns shards whose lengths are not multiples of a step of 128 tokens.
fn uneven_shards() -> Vec<Tokens> {
    let shard = |(first, n): (u32, u32)| Tokens::in_memory(format!("from {first}"), (first..first + n).collect());
    [(0, 140), (140, 129), (269, 350), (619, 256)].into_iter().map(shard).collect()
}

/// Returns the loaders of all ranks, in order, with batches of `b` sequences and whole steps of 128 tokens.
fn whole_step_loaders(ranks: usize, b: usize) -> Vec<Loader> {
    let of_rank = |rank| {
        let loader = Loader::new(uneven_shards(), Geometry { b, t: T, ranks, rank }, 1000, None).unwrap();
        loader.with_whole_steps(128 / (ranks * b * T)).unwrap()
    };
    (0..ranks).map(of_rank).collect()
}

/// Returns the tokens of a step, for all micro-batches and ranks.
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
fn whole_steps_contain_the_same_tokens_for_any_world_size_and_batch() {
    // The last token of a shard is a target only, so a shard of 256 tokens holds one step.
    let epoch = [0, 140, 269, 397, 619];
    for (ranks, b) in [(1, 4), (2, 4), (4, 4), (1, 16), (2, 8), (4, 1), (8, 2)] {
        let mut loaders = whole_step_loaders(ranks, b);
        assert_eq!(loaders[0].batches_per_epoch() * ranks * b * T, epoch.len() * 128);
        for (i, start) in epoch.iter().cycle().enumerate().take(3 * epoch.len()) {
            let expected: Vec<_> = (*start..start + 128).collect();
            assert_eq!(step(&mut loaders), expected, "step {i}, {ranks} ranks, B={b}");
        }
    }
    let error =
        Loader::new(uneven_shards(), Geometry::single(4, T), 1000, None).unwrap().with_whole_steps(5).unwrap_err();
    assert!(error.to_string().starts_with("from 0 holds 140 tokens, expected at least 161"), "{error}");
}

#[test]
fn skipping_tokens_reaches_the_same_step_for_any_world_size_and_batch() {
    for done in 0..10 {
        let mut whole = whole_step_loaders(1, 4);
        for _ in 0..done {
            step(&mut whole);
        }
        let position = whole[0].position();
        let expected: Vec<_> = (done..10).map(|_| step(&mut whole)).collect();
        for (ranks, b) in [(1, 4), (1, 16), (2, 4), (4, 2)] {
            let mut resumed = whole_step_loaders(ranks, b);
            for loader in &mut resumed {
                loader.skip_tokens(128 * done);
            }
            let got: Vec<_> = (done..10).map(|_| step(&mut resumed)).collect();
            assert_eq!(got, expected, "{ranks} ranks, B={b}, after {done} steps");
        }
        let mut resumed = whole_step_loaders(1, 4);
        resumed[0].seek(position).unwrap();
        assert_eq!((done..10).map(|_| step(&mut resumed)).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn shuffled_epoch_contains_each_token_once() {
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
            assert!(!orders.contains(&order), "two epochs have the same order");
            orders.push(order);
        }
    }
}

/// Includes shards of different lengths, because samples are counted in the current shard.
#[test]
fn seek_resumes_with_the_batches_that_followed_the_position() {
    let different_lengths = || {
        let of = |n: u32| Tokens::in_memory(format!("shard of {n}"), (0..n).collect());
        vec![of(140), of(300), of(70), of(33)]
    };
    for (shuffle, shards) in [None, Some(7)].into_iter().flat_map(|s| [(s, shards()), (s, different_lengths())]) {
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
fn seek_rejects_positions_of_other_data() {
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
fn rewinding_loader_repeats_its_first_batches() {
    let mut loader = loaders(1, None).remove(0).rewinding_after(3);
    let first: Vec<_> = (0..3).map(|_| batch(&mut loader)).collect();
    let again: Vec<_> = (0..3).map(|_| batch(&mut loader)).collect();
    assert_eq!(first, again);
    assert_ne!(first[0], first[1]);
    batch(&mut loader);
    let position = loader.position();
    let mut resumed = loaders(1, None).remove(0).rewinding_after(3);
    resumed.seek(position).unwrap();
    assert_eq!([batch(&mut resumed), batch(&mut resumed), batch(&mut resumed)], [1, 2, 0].map(|i| first[i].clone()));
}

#[test]
fn errors_name_out_of_vocabulary_tokens_and_short_shards() {
    let mut loader = Loader::new(shards(), Geometry::single(B, T), 40, None).unwrap();
    let mut words = vec![0; loader.layout().words()];
    loader.next(&mut words).unwrap();
    let message = loader.next(&mut words).unwrap_err().to_string();
    assert!(message.contains("shard 0: token 40 at position 40") && message.contains("below 40"), "{message}");
    let message = Loader::new(shards(), Geometry::single(35, 4), 1000, None).unwrap_err().to_string();
    assert!(message.contains("shard 0 holds 140 tokens, expected at least 141"), "{message}");
}
