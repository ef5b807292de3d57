//! The choice of tokens against a reference in f64.

use crate::common::{Tolerance, noise, rounded, run, shared_bytes, wide};
use cuda_std::emulate::Memory;
use gpu::decode::{WORDS, sample};

tests! {
    kernels of "decode" where |entry| entry.starts_with("sample_tokens");
    for both types: tokens_match_the_reference;
    slow in f32: tokens_of_special_logits, blocks_of_a_slot_agree;
    once: gumbel_noise_matches_f64;
}

fn gumbel_noise_matches_f64() {
    let (mut sum, n) = (0.0, 200_000);
    for token in 0..n {
        let u = (f64::from(gpu::noise::squirrel5(token, 3)) + 0.5) / 4_294_967_296.0;
        let (got, want) = (f64::from(sample::gumbel(token, 3)), -(-(-u).ln_1p()).ln());
        // u is rounded to f32, which matters where 1 - u is small, and so is 1 - u, which matters where ln(1 - u) is.
        assert!((got - want).abs() < 1e-5 + 1e-7 / (1.0 - u), "{token}: expected {want}, found {got}");
        sum += got;
    }
    // The mean is Euler's constant, with a standard deviation of 0.003.
    assert!((sum / f64::from(n) - 0.577).abs() < 0.01, "{}", sum / f64::from(n));
}

/// The settings of a slot.
#[derive(Clone, Copy, Debug)]
struct Sampling {
    position: i32,
    seed: i32,
    penalty: f32,
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
}

const GREEDY: Sampling =
    Sampling { position: 4, seed: 9, penalty: 1.0, temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
const CAPACITY: u32 = 100;

/// Runs the kernel on rows of `v` logits, padded to `vp` with large values and NaN. Checks the new slots and seen tokens, and returns the tokens.
fn choose<T: Tolerance>(logits: &[Vec<f64>], vp: usize, seen: &[i32], slots: &[Sampling], softcap: f32) -> Vec<usize> {
    choose_with::<T>(1, logits, vp, seen, slots, softcap)
}

/// Same as [`choose`], with several blocks for each slot.
fn choose_with<T: Tolerance>(
    blocks: u32,
    logits: &[Vec<f64>],
    vp: usize,
    seen: &[i32],
    slots: &[Sampling],
    softcap: f32,
) -> Vec<usize> {
    let (b, v) = (slots.len(), logits[0].len());
    let padded: Vec<f64> = logits
        .iter()
        .flat_map(|row| row.iter().copied().chain([1e4, f64::NAN].into_iter().cycle().take(vp - v)))
        .collect();
    let words: Vec<i32> = slots
        .iter()
        .flat_map(|slot| {
            let bits = |x: f32| x.to_bits().cast_signed();
            [
                7,
                slot.position,
                slot.seed,
                bits(slot.penalty),
                bits(slot.temperature),
                slot.top_k,
                bits(slot.top_p),
                bits(slot.min_p),
            ]
        })
        .collect();
    let mut memory = Memory::new();
    let (sampled, scores) = (memory.output::<f32>("sampled", b), memory.output::<f32>("scores", b * vp));
    let (results, arrived) =
        (memory.output::<u64>("results", 2 * b * sample::groups(vp)), memory.buffer("arrived", &vec![0; b]));
    let (state, marks) = (memory.buffer("slots", &words), memory.buffer("seen", seen));
    let inp = memory.input("logits", &rounded::<T>(&padded));
    let sizes = sample::Sizes { vocab: v as u32, padded_vocab: vp as u32, capacity: CAPACITY, softcap };
    let launch = sample::sample_tokens::<T>(sampled, state, marks, scores, results, arrived, inp, sizes);
    run(&mut memory, &launch, [blocks, b as u32, 1], shared_bytes(sample::shared));
    assert_eq!(memory.read(arrived), vec![0; b]);
    let tokens: Vec<usize> = memory.read(sampled).into_iter().map(|token| token as usize).collect();
    let (new, marks) = (memory.read(state), memory.read(marks));
    let (mut want, mut want_marks) = (words, seen.to_vec());
    for (i, &token) in tokens.iter().enumerate() {
        want[i * WORDS] = token as i32;
        want[i * WORDS + 1] = (want[i * WORDS + 1] + 1).min(CAPACITY as i32 - 1);
        want_marks[i * vp + token] = 1;
    }
    assert_eq!((new, marks), (want, want_marks));
    tokens
}

/// Returns the token that the settings choose, in f64.
fn expected(logits: &[f64], seen: &[i32], slot: Sampling, softcap: f64) -> usize {
    let argmax = |scores: &[f64]| (0..scores.len()).rev().max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
    let mut scores: Vec<f64> = logits
        .iter()
        .zip(seen)
        .map(|(&x, &seen)| {
            let x = if softcap > 0.0 { softcap * (x / softcap).tanh() } else { x };
            let penalty = if seen != 0 { f64::from(slot.penalty) } else { 1.0 };
            if x > 0.0 { x / penalty } else { x * penalty }
        })
        .collect();
    if slot.temperature == 0.0 {
        return argmax(&scores);
    }
    for score in &mut scores {
        *score /= f64::from(slot.temperature);
    }
    let most = scores[argmax(&scores)];
    let mut sorted = scores.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mut least = f64::NEG_INFINITY;
    if slot.top_k > 0 {
        least = sorted[(slot.top_k as usize).min(sorted.len()) - 1];
        sorted.retain(|&score| score >= least);
    }
    if slot.top_p < 1.0 {
        let weights: Vec<f64> = sorted.iter().map(|score| (score - most).exp()).collect();
        let (target, mut sum) = (f64::from(slot.top_p) * weights.iter().sum::<f64>(), 0.0);
        least = sorted[weights
            .iter()
            .position(|weight| {
                sum += weight;
                sum >= target
            })
            .unwrap_or(weights.len() - 1)];
    }
    if slot.min_p > 0.0 {
        least = least.max(most + f64::from(slot.min_p).ln());
    }
    let seed = gpu::noise::squirrel5(slot.position as u32, slot.seed as u32);
    let noisy: Vec<f64> = scores
        .iter()
        .enumerate()
        .map(
            |(token, &score)| {
                if score >= least { score + f64::from(sample::gumbel(token as u32, seed)) } else { f64::NEG_INFINITY }
            },
        )
        .collect();
    argmax(&noisy)
}

fn tokens_match_the_reference<T: Tolerance>() {
    let plain = Sampling { temperature: 1.0, ..GREEDY };
    let settings = [
        GREEDY,
        Sampling { penalty: 1.7, ..GREEDY },
        plain,
        Sampling { temperature: 0.3, position: 99, ..plain },
        Sampling { top_k: 1, ..plain },
        Sampling { top_k: 40, ..plain },
        Sampling { top_k: 100_000, ..plain },
        Sampling { top_p: 0.5, ..plain },
        Sampling { top_p: 0.01, ..plain },
        Sampling { top_p: 0.0, ..plain },
        Sampling { min_p: 0.2, ..plain },
        Sampling { min_p: 1.0, ..plain },
        Sampling { top_k: 30, top_p: 0.8, min_p: 0.05, penalty: 1.3, temperature: 0.8, ..plain },
    ];
    for (v, vp, softcap) in [(5, 128, 0.0), (257, 384, 3.0), (17_000, 17_024, 0.0)] {
        let mut cases = Vec::new();
        // The largest vocabulary takes two batches of vectors.
        for seed in 0..if v > 10_000 { 1 } else { 2 } {
            for (i, setting) in settings.into_iter().enumerate() {
                let scaled = noise(v, seed * 100 + i as u32).iter().map(|x| x * 5.0 - 1.0).collect::<Vec<_>>();
                cases.push((wide(&rounded::<T>(&scaled)), Sampling { seed: seed as i32 + 5, ..setting }));
            }
        }
        let seen: Vec<i32> = (0..cases.len() * vp).map(|i| i32::from(i % 3 == 0)).collect();
        let (logits, slots): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
        let got = choose::<T>(&logits, vp, &seen, &slots, softcap);
        for (i, slot) in slots.iter().enumerate() {
            let want = expected(&logits[i], &seen[i * vp..][..v], *slot, f64::from(softcap));
            assert_eq!(got[i], want, "row {i} of {v} logits, {slot:?}");
        }
    }
}

/// Several blocks choose the tokens that one chooses: with a group of tokens for each, with fewer groups, and with many. The logits of the
/// last case are equal, so sums of weights are rounded at the threshold of top-p.
fn blocks_of_a_slot_agree<T: Tolerance>() {
    let plain = Sampling { temperature: 1.0, ..GREEDY };
    let filtered = Sampling { top_k: 300, top_p: 0.8, min_p: 0.01, penalty: 1.3, temperature: 0.8, ..plain };
    for (blocks, v, vp, scale) in [(3, 300, 384, 5.0), (4, 130, 256, 5.0), (2, 5000, 5120, 0.0)] {
        let slots = [Sampling { penalty: 1.7, ..GREEDY }, plain, filtered];
        let logits: Vec<_> =
            (0..3).map(|i| wide(&rounded::<T>(&noise(v, i).iter().map(|x| x * scale).collect::<Vec<_>>()))).collect();
        let seen: Vec<i32> = (0..3 * vp).map(|i| i32::from(i % 3 == 0)).collect();
        let [several, one] = [blocks, 1].map(|blocks| choose_with::<T>(blocks, &logits, vp, &seen, &slots, 0.0));
        assert_eq!(several, one, "{blocks} blocks, {v} tokens");
    }
}

/// Ties choose the first token without noise; non-finite logits still give a token.
fn tokens_of_special_logits<T: Tolerance>() {
    let one = |logits: &[f64], slot| choose::<T>(&[logits.to_vec()], 128, &[0; 128], &[slot], 0.0)[0];
    let sampled = Sampling { temperature: 1.0, top_k: 2, top_p: 0.9, min_p: 0.1, ..GREEDY };
    assert_eq!(one(&[1.0, 3.0, 3.0, 2.0], GREEDY), 1);
    assert_eq!(one(&[0.0; 100], GREEDY), 0);
    assert_eq!(one(&[-1.0, -0.0, 0.0], GREEDY), 1);
    assert_eq!(one(&[-5.0, -4.0, -4.5], GREEDY), 1);
    // The warp that has the last token loads it in its second batch, and a thread reads the result of its group as its second one.
    for v in [8_300, 65_700] {
        let late: Vec<f64> = (0..v).map(|token| f64::from(u8::from(token == v - 1))).collect();
        assert_eq!(choose::<T>(&[late], v + 112, &vec![0; v + 112], &[GREEDY], 0.0), [v - 1]);
    }
    // The penalty makes a seen token less likely, also if its logit is negative.
    let penalized = |logits: [f64; 3]| {
        let seen: Vec<i32> = (0..128).map(|token| i32::from(token == 0)).collect();
        choose::<T>(&[logits.to_vec()], 128, &seen, &[Sampling { penalty: 1.5, ..GREEDY }], 0.0)[0]
    };
    assert_eq!((penalized([2.0, 1.75, -1.0]), penalized([-1.0, -1.25, -9.0])), (1, 1));
    assert_eq!((penalized([2.0, 1.0, -1.0]), penalized([-1.0, -1.75, -9.0])), (0, 0));
    // Top-p counts the probability of the tokens that top-k keeps: 6 of 9, not 6 of 12.
    let logits = [1f64, 3.0, 2.0, 6.0].map(f64::ln);
    let both = |seed| one(&logits, Sampling { seed, top_k: 2, top_p: 0.6, temperature: 1.0, ..GREEDY });
    assert!((0..8).all(|seed| both(seed) == 3));
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    for slot in [GREEDY, sampled] {
        assert_eq!((one(&[nan; 3], slot), one(&[-inf; 3], slot)), (0, 0));
        assert_eq!((one(&[1.0, inf, 2.0], slot), one(&[nan, -inf, inf, inf], slot)), (1, 2));
        assert_eq!(one(&[nan, -inf, 5.0, -100.0], slot), 2);
    }
    // Of tokens with equal logits, each is chosen by some seed, even beyond top-k.
    let chosen = |top_k| {
        let tokens =
            (0..16).map(|seed| one(&[2.0, 2.0, 2.0, -9.0], Sampling { seed, top_k, temperature: 1.0, ..GREEDY }));
        tokens.collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    assert_eq!((chosen(1), chosen(3)), (vec![0, 1, 2], vec![0, 1, 2]));
}
