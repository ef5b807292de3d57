//! Whether targets are the most likely tokens, against a search in f64.

use crate::common::{Tolerance, assert_close, for_all, noise, read, rounded, run, shared_bytes, wide};
use cuda_std::emulate::Memory;
use gpu::most_likely::{most_likely, shared};

tests! {
    kernels of "most_likely.rs";
    for both types: each_token_is_found, the_first_of_equal_logits_wins, nan_is_never_below;
    slow in f32: random_shapes_match_a_search;
}

/// Returns the hits for logits (rows, V). The padding columns are larger than all logits.
fn hits<T: Tolerance>(logits: &[T], targets: &[i32], padded: usize) -> Vec<f64> {
    let vocabulary = logits.len() / targets.len();
    let padding = rounded::<T>(&vec![1000.0; padded - vocabulary]);
    let logits: Vec<T> = logits.chunks(vocabulary).flat_map(|row| [row, &padding].concat()).collect();
    let (mut memory, rows) = (Memory::new(), targets.len());
    let (logits, targets) = (memory.input("logits", &logits), memory.input("targets", targets));
    let hits = memory.output::<f32>("hits", rows);
    let launch = most_likely(hits, logits, targets, vocabulary as u32, padded as u32);
    run(&mut memory, &launch, rows as u32, shared_bytes(shared));
    read(&memory, hits)
}

/// The largest logit is at each position in turn: in each packet of each thread, and behind the first round of the block.
fn each_token_is_found<T: Tolerance>() {
    for vocabulary in [1, 5, 16, 4100] {
        let padded = usize::next_multiple_of(vocabulary + 1, 8);
        for best in (0..vocabulary).step_by(if vocabulary < 100 { 1 } else { 371 }).chain([vocabulary - 1]) {
            let logits: Vec<f64> = (0..vocabulary).map(|token| if token == best { 2.0 } else { 1.0 }).collect();
            let logits = rounded::<T>(&logits.repeat(2));
            let other = (best + 1) % vocabulary;
            let expected = [1.0, f64::from(u8::from(other == best))];
            assert_close("hits", &hits(&logits, &[best as i32, other as i32], padded), &expected, 0.0, 0.0);
        }
    }
}

fn the_first_of_equal_logits_wins<T: Tolerance>() {
    let logits = rounded::<T>(&[[-1.0, 3.0, 0.0, 3.0, 3.0, -2.0]; 6].concat());
    assert_close("hits", &hits(&logits, &[0, 1, 2, 3, 4, 5], 8), &[0.0, 1.0, 0.0, 0.0, 0.0, 0.0], 0.0, 0.0);
}

fn nan_is_never_below<T: Tolerance>() {
    let row = |at: usize| {
        let mut row = [1.0, 2.0, 3.0];
        row[at] = f64::NAN;
        row
    };
    let logits = rounded::<T>(&[row(0), row(0), row(2)].concat());
    assert_close("hits", &hits(&logits, &[2, 0, 1], 8), &[0.0; 3], 0.0, 0.0);
}

fn random_shapes_match_a_search<T: Tolerance>() {
    for_all(40, (1..4usize, 1..3000usize, 0..9u32), |(rows, vocabulary, seed)| {
        let logits = rounded::<T>(&noise(rows * vocabulary, seed));
        let best = |row: &[f64]| (0..vocabulary).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        let best: Vec<usize> = wide(&logits).chunks(vocabulary).map(best).collect();
        let targets: Vec<i32> =
            best.iter().enumerate().map(|(i, &best)| (best + i % 2) as i32 % vocabulary as i32).collect();
        let expected: Vec<f64> =
            best.iter().zip(&targets).map(|(&best, &target)| f64::from(best as i32 == target)).collect();
        assert_close("hits", &hits(&logits, &targets, usize::next_multiple_of(vocabulary, 8)), &expected, 0.0, 0.0);
    });
}
