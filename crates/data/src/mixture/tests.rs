//! Tests of mixtures of small documents whose tokens are all different.

use super::*;
use crate::mask;
use proptest::prelude::*;
use std::collections::BTreeMap;

const T: usize = 8;
const SEPARATOR: u32 = 0;

/// Returns shards of documents with the given lengths, including separators. The tokens count from `first`.
fn shards_of(documents: &[Vec<usize>], first: u32) -> Vec<Tokens> {
    let mut next = first;
    let mut tokens_of = |len: usize| {
        let body = next..next + len as u32 - 1;
        next = body.end;
        std::iter::once(SEPARATOR).chain(body).collect::<Vec<u32>>()
    };
    let mut shard = |lens: &Vec<usize>| lens.iter().flat_map(|&len| tokens_of(len)).collect();
    documents.iter().enumerate().map(|(i, lens)| Tokens::in_memory(format!("{first}/{i}"), shard(lens))).collect()
}

/// Returns a source with 100 documents in three shards. Some are longer than a row, and some are empty.
fn source(name: &str, first: u32, weight: f64) -> Source {
    let lens = |shard: usize| (0..[30, 50, 20][shard]).map(|i| 1 + (i * i + shard) % 13).collect::<Vec<usize>>();
    let mut documents: Vec<Vec<usize>> = (0..3).map(lens).collect();
    documents[1].push(3 * T + 2);
    Source { name: name.to_owned(), shards: shards_of(&documents, first), weight, max_epochs: None }
}

fn two_sources() -> Vec<Source> {
    vec![source("web", 1, 0.7), source("code", 10_000, 0.3)]
}

fn settings(packing: Packing, b: usize, ranks: usize, rank: usize) -> Settings {
    let geometry = Geometry { b, t: T, ranks, rank };
    Settings { geometry, vocab: 100_000, shuffle: Some(42), packing, separator: Some(SEPARATOR) }
}

fn mixture(sources: Vec<Source>, packing: Packing) -> Mixture {
    Mixture::new(sources, settings(packing, 1, 1, 0)).unwrap()
}

const PACKINGS: [Packing; 3] = [Packing::Stream, Packing::BestFit, Packing::Pad];

/// Returns the rows of the next batch: inputs and targets.
fn batch(mixture: &mut Mixture) -> Vec<[Vec<i32>; 2]> {
    let layout = mixture.layout();
    let mut words = vec![0; layout.words()];
    mixture.next(&mut words).unwrap();
    let part = |range: std::ops::Range<usize>| words[range].chunks(T).map(<[i32]>::to_vec).collect::<Vec<_>>();
    part(layout.inputs()).into_iter().zip(part(layout.targets())).map(|(a, b)| [a, b]).collect()
}

/// Returns the next `n` rows.
fn rows(mixture: &mut Mixture, n: usize) -> Vec<[Vec<i32>; 2]> {
    (0..n).flat_map(|_| batch(mixture)).collect()
}

#[test]
fn rows_do_not_depend_on_ranks_and_micro_batches() {
    for packing in PACKINGS {
        let expected = rows(&mut mixture(two_sources(), packing), 320);
        for (ranks, b) in [(1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (1, 16)] {
            let of_rank = |rank| Mixture::new(two_sources(), settings(packing, b, ranks, rank)).unwrap();
            let mut mixtures: Vec<_> = (0..ranks).map(of_rank).collect();
            let mut found = Vec::new();
            while found.len() < expected.len() {
                found.extend(mixtures.iter_mut().flat_map(batch));
            }
            assert_eq!(found, expected, "{packing:?}, {ranks} ranks, B = {b}");
            assert!(mixtures.iter().all(|mixture| mixture.state() == mixtures[0].state()));
        }
    }
}

#[test]
fn windows_follow_each_other_and_occur_once_per_epoch() {
    let mut mixture = mixture(vec![source("web", 1, 1.0)], Packing::Stream);
    let shards: Vec<Vec<i32>> = mixture
        .shards()
        .map(|shard| {
            let mut tokens = vec![0; shard.len()];
            shard.read(0, &mut tokens).unwrap();
            tokens.into_iter().map(|token| token as i32).collect()
        })
        .collect();
    let mut windows: Vec<[Vec<i32>; 2]> = shards
        .iter()
        .flat_map(|shard| (0..(shard.len() - 1) / T).map(|i| [&shard[i * T..][..T], &shard[i * T + 1..][..T]]))
        .map(|window| window.map(<[i32]>::to_vec))
        .collect();
    windows.sort();
    let mut orders = Vec::new();
    for _epoch in 0..3 {
        let mut epoch = rows(&mut mixture, windows.len());
        assert!(!orders.contains(&epoch));
        orders.push(epoch.clone());
        epoch.sort();
        assert_eq!(epoch, windows);
    }
}

#[test]
fn packed_rows_begin_with_documents() {
    for packing in [Packing::BestFit, Packing::Pad] {
        let mut padded = 0;
        assert_eq!(mixture(two_sources(), packing).masks_targets(), packing == Packing::Pad);
        for [inputs, targets] in rows(&mut mixture(two_sources(), packing), 400) {
            assert_eq!(inputs[0], 0, "{packing:?}");
            // Within a document, tokens count up.
            let masked = targets.iter().position(|&target| target == -1).unwrap_or(T);
            for i in 0..masked {
                assert!(targets[i] == 0 || inputs[i] == 0 || targets[i] == inputs[i] + 1, "{inputs:?} {targets:?}");
                assert!(i + 1 == T || targets[i] == inputs[i + 1]);
            }
            assert!(targets[masked..].iter().all(|&target| target == -1), "{targets:?}");
            assert!(inputs.get(masked + 1..).is_none_or(|rest| rest.iter().all(|&input| input == 0)), "{inputs:?}");
            padded += T - masked;
        }
        assert_eq!(padded > 0, packing == Packing::Pad);
    }
}

/// Without cropping, the rows contain each document, or each part of a long one, once per epoch.
#[test]
fn padded_rows_contain_each_token_once_per_epoch() {
    let epochs = 3;
    let web = Source { max_epochs: Some(epochs), ..source("web", 1, 1.0) };
    let mut expected = BTreeMap::new();
    for shard in &web.shards {
        let mut tokens = vec![0; shard.len()];
        shard.read(0, &mut tokens).unwrap();
        tokens.iter().filter(|token| **token != 0).for_each(|&token| {
            expected.insert(token as i32, epochs);
        });
    }
    let mut mixture = mixture(vec![web], Packing::Pad);
    let estimate = mixture.estimates().unwrap()[0];
    let mut seen = BTreeMap::new();
    let mut words = vec![0; mixture.layout().words()];
    let mut n = 0;
    let error = loop {
        if let Err(error) = mixture.next(&mut words) {
            break error;
        }
        n += 1;
        let row = words[..T].iter().chain([&words[2 * T - 1]]);
        row.filter(|token| **token > 0).for_each(|token| *seen.entry(*token).or_insert(0) += 1);
    };
    assert_eq!(seen, expected);
    assert!(error.to_string().contains(&format!("max_epochs after {n} sequences")), "{error}");
    // The last row of an epoch continues with documents of the next one.
    let three = epochs as usize * estimate.rows as usize;
    assert!(estimate.is_exact && (three - 2..=three).contains(&n), "{n} {estimate:?}");
}

/// The parts of one document exceed the buffer.
#[test]
fn a_document_longer_than_the_buffer_becomes_parts() {
    let len = 3 * packer::BUFFER * T + 5;
    let long = || Source { max_epochs: Some(1), shards: shards_of(&[vec![3, len, 4]], 1), ..source("long", 1, 1.0) };
    for packing in [Packing::BestFit, Packing::Pad] {
        let mut mixture = mixture(vec![long()], packing);
        let (mut n, mut words) = (0, vec![0; mixture.layout().words()]);
        let mut seen = BTreeMap::new();
        while mixture.next(&mut words).is_ok() {
            n += 1;
            assert!(words[0] == 0 && mixture.state().sources[0].buffer.len() <= packer::BUFFER);
            let row = words[..T].iter().chain([&words[2 * T - 1]]);
            row.filter(|token| **token > 0).for_each(|token| *seen.entry(*token).or_insert(0) += 1);
        }
        assert!(n >= 3 * packer::BUFFER && seen.values().all(|&times| times == 1), "{packing:?}: {n}");
        assert!(seen.len() >= 3 * packer::BUFFER * T, "{packing:?}: {}", seen.len());
    }
}

/// A direct transcription of the loop in nanochat's `dataloader.py`.
fn nanochat(documents: &[Vec<i32>], row_tokens: usize, buffer_size: usize) -> Vec<Vec<i32>> {
    let (mut next, mut buffer, mut rows) = (documents.iter().cloned(), Vec::<Vec<i32>>::new(), Vec::new());
    loop {
        let mut row = Vec::new();
        while row.len() < row_tokens {
            while buffer.len() < buffer_size {
                let Some(document) = next.next() else { return rows };
                buffer.push(document);
            }
            let remaining = row_tokens - row.len();
            let mut best: Option<usize> = None;
            for (i, document) in buffer.iter().enumerate() {
                if document.len() <= remaining && best.is_none_or(|best| document.len() > buffer[best].len()) {
                    best = Some(i);
                }
            }
            if let Some(best) = best {
                row.extend(buffer.remove(best));
            } else {
                let shortest = (0..buffer.len()).min_by_key(|&i| buffer[i].len()).unwrap();
                row.extend(&buffer.remove(shortest)[..remaining]);
            }
        }
        rows.push(row);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn best_fit_packs_as_nanochat_does(lens in prop::collection::vec(2..=T + 1, 1500..3000)) {
        let mut first = 1;
        let documents: Vec<Vec<i32>> = lens.iter().map(|&len| {
            first += len as i32;
            std::iter::once(0).chain(first - len as i32..first - 1).collect()
        }).collect();
        let tokens = documents.iter().flatten().map(|&token| token as u32).collect();
        let shards = vec![Tokens::in_memory("shard", tokens)];
        let web = Source { name: "web".to_owned(), shards, weight: 1.0, max_epochs: Some(1) };
        let in_order = Settings { shuffle: None, ..settings(Packing::BestFit, 1, 1, 0) };
        let mut mixture = Mixture::new(vec![web], in_order).unwrap();
        for expected in nanochat(&documents, T + 1, 1000) {
            let [inputs, targets] = batch(&mut mixture).remove(0);
            prop_assert_eq!(&inputs[..], &expected[..T]);
            prop_assert_eq!(&targets[..], &expected[1..]);
        }
    }
}

#[test]
fn a_resumed_mixture_continues_at_every_position() {
    for packing in PACKINGS {
        let limited = || {
            let [web, code] = two_sources().try_into().unwrap();
            vec![Source { max_epochs: Some(2), ..web }, code]
        };
        let mut whole = mixture(limited(), packing);
        let mut kept = Vec::new();
        for _ in 0..500 {
            let state = serde_json::to_string(&whole.state()).unwrap();
            kept.push((state, batch(&mut whole)));
        }
        assert!(whole.state().sources[0].exhausted && whole.state().sources[1].cursor.epoch > 1);
        for (i, (state, _)) in kept.iter().enumerate() {
            let mut resumed = mixture(limited(), packing);
            let state = serde_json::from_str(state).unwrap();
            assert_eq!(resumed.changes(&state), [""; 0]);
            resumed.seek(&state).unwrap();
            assert_eq!(resumed.state(), state);
            for (_, expected) in &kept[i..(i + 20).min(kept.len())] {
                assert_eq!(&batch(&mut resumed), expected, "{packing:?}, after {i} rows");
            }
        }
    }
}

#[test]
fn an_exhausted_source_leaves_its_share_to_the_others() {
    let sources = vec![
        Source { max_epochs: Some(1), ..source("web", 1, 0.5) },
        source("code", 10_000, 0.3),
        source("math", 20_000, 0.2),
    ];
    let mut mixture = mixture(sources, Packing::Stream);
    let estimates = mixture.estimates().unwrap();
    let n = estimates[0].rows as usize;
    let rows_of = |mixture: &Mixture| mixture.sources().map(|source| source.rows as f64).collect::<Vec<_>>();
    rows(&mut mixture, 2 * n);
    for (found, share) in rows_of(&mixture).iter().zip([0.5, 0.3, 0.2]) {
        assert!((found - 2.0 * n as f64 * share).abs() < 1.0);
    }
    rows(&mut mixture, 1000);
    let found = rows_of(&mixture);
    let (expected, missing) = mixture.rows_of_run(&estimates, 2 * n as u64 + 1000);
    assert!(missing < 0.5 && mixture.sources().next().unwrap().rows == n as u64, "{found:?}");
    assert!(
        found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 3.0),
        "{found:?} {expected:?}"
    );
    // The shares restart when the source ends, close to row 2 n.
    let since: u64 = mixture.sources().map(|source| source.phase_rows).sum();
    assert!((995..=1005).contains(&since), "{since}");
    let more = Mixture::new(vec![Source { max_epochs: Some(2), ..source("web", 1, 1.0) }], mixture.settings).unwrap();
    assert_eq!(more.rows_of_run(&estimates[..1], 3 * n as u64), (vec![2.0 * n as f64], n as f64));
}

#[test]
fn other_weights_apply_from_the_saved_counters_on() {
    for packing in PACKINGS {
        let mut before = mixture(two_sources(), packing);
        rows(&mut before, 100);
        let state = before.state();
        let [web, code] = two_sources().try_into().unwrap();
        let sources = vec![Source { weight: 1.0, ..code }, Source { weight: 1.0, ..web }, source("math", 20_000, 2.0)];
        let mut after = mixture(sources, packing);
        let changes = after.changes(&state).join("; ");
        for part in ["web had weight 0.7", "has weight 1,", "data source math is new"] {
            assert!(changes.contains(part), "{part}: {changes}");
        }
        after.seek(&state).unwrap();
        let cursors = |mixture: &Mixture| {
            mixture.sources().map(|source| (source.name.clone(), source.cursor)).collect::<BTreeMap<_, _>>()
        };
        let (was, is) = (cursors(&before), cursors(&after));
        assert!(was.iter().all(|(name, cursor)| is[name] == *cursor));
        rows(&mut after, 400);
        let counts: Vec<u64> = after.sources().map(|source| source.rows).collect();
        assert_eq!(counts, [30 + 100, 70 + 100, 200], "{packing:?}");
    }
    // Another seed begins the next epoch.
    let mut before = mixture(two_sources(), Packing::BestFit);
    rows(&mut before, 5);
    let other = Settings { shuffle: Some(1), ..settings(Packing::BestFit, 1, 1, 0) };
    let mut after = Mixture::new(two_sources(), other).unwrap();
    assert_eq!(after.changes(&before.state()).len(), 1);
    after.seek(&before.state()).unwrap();
    assert!(after.sources().all(|source| source.cursor == Cursor { epoch: 1, ..Cursor::default() }));
}

#[test]
fn sources_in_another_order_are_a_change() {
    let state = mixture(two_sources(), Packing::Stream).state();
    let mut reversed = two_sources();
    reversed.reverse();
    let changes = mixture(reversed, Packing::Stream).changes(&state);
    assert_eq!(changes, ["the order of the data sources has changed"]);
}

#[test]
fn estimates_of_large_sources_are_close() {
    let lens: Vec<Vec<usize>> = (0..4).map(|s| (0..9000).map(|i| 2 + (i * 7919 + s) % 3000).collect()).collect();
    let shards = lens
        .iter()
        .map(|lens| {
            let shard = lens.iter().flat_map(|&len| std::iter::once(0).chain(std::iter::repeat_n(1, len - 1)));
            Tokens::in_memory("shard", shard.collect())
        })
        .collect();
    let web = Source { name: "web".to_owned(), shards, weight: 1.0, max_epochs: Some(1) };
    let settings = Settings { geometry: Geometry::single(1, 1024), ..settings(Packing::BestFit, 1, 1, 0) };
    let mut mixture = Mixture::new(vec![web], settings).unwrap();
    let estimate = mixture.estimates().unwrap()[0];
    let mut n = 0;
    while mixture.next_row().unwrap().is_some() {
        n += 1;
    }
    assert!(!estimate.is_exact && (estimate.rows / f64::from(n) - 1.0).abs() < 0.02, "{n} {estimate:?}");
}

#[test]
fn bad_sources_are_errors_that_name_them() {
    let error =
        |sources: Vec<Source>, settings: Settings| format!("{:#}", Mixture::new(sources, settings).unwrap_err());
    let stream = settings(Packing::Stream, 1, 1, 0);
    let packed = settings(Packing::BestFit, 1, 1, 0);
    for weight in [-0.1, f64::NAN, f64::INFINITY] {
        let error = error(vec![source("web", 1, weight)], stream);
        assert!(error.starts_with("data source web: expected a finite weight of at least 0, found"), "{error}");
    }
    assert!(error(vec![source("web", 1, 0.0), source("code", 1, 0.0)], stream).contains("expected a weight above 0"));
    assert!(error(vec![source("web", 1, 1.0), source("web", 1, 1.0)], stream).contains("two sources with this name"));
    let of = |tokens: Vec<u32>| Source { shards: vec![Tokens::in_memory("shard", tokens)], ..source("web", 1, 1.0) };
    assert!(error(vec![of(vec![0; T])], stream).contains("shard of at least 9 tokens (--seq 8 + 1), found 8 tokens"));
    assert!(
        error(vec![of(vec![5; 100])], packed)
            .contains("begin with token 0, the document token of the tokenizer, found none")
    );
    assert!(error(vec![of(vec![0; 100])], packed).contains("found only empty ones"));
    let unknown = Settings { separator: None, ..packed };
    assert!(error(two_sources(), unknown).contains("use --packing stream"));
    let mut large = Mixture::new(two_sources(), Settings { vocab: 200, ..packed }).unwrap();
    let mut words = vec![0; large.layout().words()];
    let error = (0..100).find_map(|_| large.next(&mut words).err()).unwrap().to_string();
    assert!(error.contains("expected ids below 200") && error.contains("at position"), "{error}");
}

#[test]
fn damaged_states_are_errors() {
    let mut mixture = mixture(two_sources(), Packing::BestFit);
    rows(&mut mixture, 3);
    let good = mixture.state();
    let with = |change: &dyn Fn(&mut SourceState)| {
        let mut state = good.clone();
        change(&mut state.sources[0]);
        state
    };
    for bad in [
        with(&|source| source.buffer[0].shard = 3),
        with(&|source| source.buffer[0].start = u32::MAX),
        with(&|source| source.buffer[0].len = 1),
        with(&|source| source.buffer[0].len = T as u32 + 2),
        with(&|source| source.buffer = vec![source.buffer[0]; 1001]),
    ] {
        let error = mixture.seek(&bad).unwrap_err().to_string();
        assert!(error.contains("use the data set of the checkpoint"), "{error}");
    }
    // Any other position is within the data.
    let max = Cursor { epoch: 7, shard: 2, item: u32::MAX };
    for cursor in [max, Cursor { shard: u32::MAX, ..max }, Cursor { item: 0, ..max }] {
        mixture.seek(&with(&|source| source.cursor = cursor)).unwrap();
        rows(&mut mixture, 50);
    }
}

/// Returns a source of conversations with these lengths, in one shard. The tokens count from `first`. Every third token and the last one of
/// a conversation have loss.
fn chat(name: &str, lens: &[usize], first: u32) -> Source {
    let (mut tokens, mut flags) = (Vec::new(), Vec::new());
    for &len in lens {
        let start = first + tokens.len() as u32;
        tokens.extend(start..start + len as u32);
        let flag = |i: usize| match i {
            0 => mask::START,
            _ => u32::from(i.is_multiple_of(3) || i + 1 == len) * mask::LOSS,
        };
        flags.extend((0..len).map(flag));
    }
    let shard = Tokens::in_memory(name, tokens).with_flags(flags);
    Source { name: name.to_owned(), shards: vec![shard], weight: 1.0, max_epochs: None }
}

#[test]
fn conversations_are_packed_without_separators_and_masked() {
    let lens: Vec<usize> = (0..40).map(|i| 2 + i * i % (T + 1)).collect();
    for packing in [Packing::BestFit, Packing::Pad] {
        // After the epoch, the last row would continue with the next one.
        let source = Source { max_epochs: Some(1), ..chat("chat", &lens, 1) };
        let mut mixture = mixture(vec![source], packing);
        assert!(mixture.masks_targets());
        let (mut seen, mut starts) = (Vec::new(), BTreeMap::new());
        let mut at = 1;
        for &len in &lens {
            starts.insert(at, len);
            at += len as i32;
        }
        let rows_of_epoch = mixture.estimates().unwrap()[0].rows as usize;
        for _ in 0..rows_of_epoch {
            let [inputs, targets] = batch(&mut mixture).remove(0);
            let begins = mixture.document_starts().to_vec();
            for (i, (&input, &target)) in inputs.iter().zip(&targets).enumerate() {
                let is_padding = input == SEPARATOR as i32;
                assert_eq!(begins[i], is_padding || starts.contains_key(&input), "{packing:?}: {inputs:?}, {begins:?}");
                seen.push(input);
                if target == MASKED_TARGET {
                    continue;
                }
                // A target follows its input in the same conversation.
                assert!(!is_padding && target == input + 1 && !starts.contains_key(&target), "{inputs:?} {targets:?}");
                let (start, len) = starts.range(..=target).next_back().unwrap();
                assert!((target - start) % 3 == 0 || target - start + 1 == *len as i32, "{inputs:?} {targets:?}");
            }
        }
        if packing == Packing::Pad {
            // Every conversation is used once per epoch. Its last token may only be a target.
            assert!(starts.keys().all(|start| seen.iter().filter(|token| *token == start).count() == 1));
        }
    }
}

#[test]
fn long_conversations_lose_their_end() {
    let lens = [T + 1, T + 2, 3 * T, 4, 1];
    let mut mixture = mixture(vec![chat("chat", &lens, 1)], Packing::Pad);
    let Estimate { rows: of_epoch, counts, .. } = mixture.estimates().unwrap()[0];
    let cropped = (1 + 2 * T - 1) as u64;
    assert_eq!((of_epoch, counts.cropped, counts.shortened), (4.0, cropped, 2));
    assert_eq!(counts.used, (3 * (T + 1) + 4) as u64);
    // No target is beyond the end, also in the next epoch.
    let first = |row: &[Vec<i32>; 2]| row[0][0];
    let mut firsts: Vec<i32> = rows(&mut mixture, 4).iter().map(first).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, [1, 10, 20, 44]);
}

#[test]
fn conversations_and_text_are_mixed() {
    let sources = || vec![chat("chat", &[5, 6, 3, 9, 2], 50_000), source("web", 1, 1.0)];
    let mut mixture = mixture(sources(), Packing::Pad);
    let rows = rows(&mut mixture, 60);
    let of_chat = |row: &&[Vec<i32>; 2]| row[0][0] >= 50_000;
    let (chats, texts): (Vec<_>, Vec<_>) = rows.iter().partition(|row| of_chat(row));
    assert_eq!((chats.len(), texts.len()), (30, 30));
    // All tokens of a text have loss, but the padding.
    for [inputs, targets] in texts {
        let filled = targets.iter().position(|&target| target == MASKED_TARGET).unwrap_or(T);
        assert!(filled > 0 && inputs[1..filled] == targets[..filled - 1]);
        assert!(targets[filled..].iter().all(|&target| target == MASKED_TARGET));
    }
    assert!(chats.iter().any(|[_, targets]| targets[0] == MASKED_TARGET));
    // A resumed mixture continues with the same rows.
    let state = mixture.state();
    let expected = self::rows(&mut mixture, 20);
    let mut again = Mixture::new(sources(), settings(Packing::Pad, 1, 1, 0)).unwrap();
    let state: State = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    again.seek(&state).unwrap();
    assert_eq!(self::rows(&mut again, 20), expected);
}

#[test]
fn validation_starts_over() {
    let settings = Settings { shuffle: None, ..settings(Packing::Pad, 2, 1, 0) };
    let source = Source { max_epochs: Some(1), ..chat("chat", &[9, 9, 9, 9, 9], 1) };
    let mixture = Mixture::new(vec![source], settings).unwrap();
    assert_eq!(mixture.batches_per_epoch().unwrap(), 3);
    for batches in [1, 2, 3] {
        let mut mixture = mixture.clone().rewinding_after(batches);
        let first = rows(&mut mixture, batches);
        let starts: Vec<i32> = first.iter().map(|row| row[0][0]).collect();
        assert_eq!(starts, [1, 10, 19, 28, 37, 0][..2 * batches]);
        assert_eq!(rows(&mut mixture, batches), first);
        assert_eq!(rows(&mut mixture, batches), first);
        if batches == 3 {
            // The last batch is not full.
            assert_eq!(first[5], [vec![SEPARATOR as i32; T], vec![MASKED_TARGET; T]]);
        }
    }
}

#[test]
fn windows_of_conversations_are_masked() {
    let mut mixture = mixture(vec![chat("chat", &[5, 6, 9, 14], 1)], Packing::Stream);
    let starts = [1, 6, 12, 21];
    for [inputs, targets] in rows(&mut mixture, 8) {
        for (input, target) in inputs.into_iter().zip(targets) {
            assert!(target == MASKED_TARGET || target == input + 1 && !starts.contains(&target));
        }
    }
}

#[test]
fn sources_have_masks_for_all_files_or_none() {
    let mut some = chat("chat", &[5, 6, 9, 14], 1);
    some.shards.extend(source("web", 1, 1.0).shards);
    let error = Mixture::new(vec![some], settings(Packing::Pad, 1, 1, 0)).unwrap_err().to_string();
    assert!(
        error.contains("data source chat: expected masks for all files or for none, found 1 in 4 files"),
        "{error}"
    );
    let error = Mixture::new(vec![chat("chat", &[1, 1], 1)], settings(Packing::Pad, 1, 1, 0)).unwrap_err().to_string();
    assert!(error.contains("expected conversations of at least 2 tokens"), "{error}");
}
