//! Without shuffling, any number of ranks reads the same tokens in the same step.

use crate::threads::numbers;
use crate::world::{PERMANENT, World, copy_checkpoint, error_of_rank_0, output_text, wait_for_all};
use std::fs;

/// An epoch takes 23 steps of the first shard and 31 of the second. Neither shard is a whole number of steps.
const STEPS: [&str; 6] = ["--steps", "60", "--checkpoint-every", "20", "--keep", "0"];

fn losses(world: &World, out: &str) -> Vec<f64> {
    numbers(&world.path(out), "loss")
}

/// Checks that losses agree up to the summation order. Losses of other tokens differ a hundred times as much.
fn assert_same_losses(got: &[f64], expected: &[f64], what: &str) {
    assert!(got.len() == 60 && expected.len() == 60, "{what}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 2e-5 * expected, "{what}, step {step}: {got}, {expected}");
    }
}

fn train(world: &World, ranks: usize, out: &str, more: &[&str]) {
    // The learning rate is low, so a loss depends mostly on its tokens.
    let order = if more.contains(&"--shuffle") { &[][..] } else { &["--shuffle", "0"] };
    let more = [&STEPS[..], &["--lr", "0.0001"], order, more].concat();
    for (rank, output) in world.ranks(ranks, out, out, &more).iter().enumerate() {
        assert!(output.status.success(), "{ranks} ranks, rank {rank}: {:?}", output_text(output));
    }
}

#[test]
fn ranks_read_the_same_tokens_in_the_same_step_over_shards_and_epochs() {
    let world = World::new();
    train(&world, 1, "one", &[]);
    let one = losses(&world, "one");
    let differences: Vec<_> = one.windows(2).map(|pair| (pair[0] - pair[1]).abs() / pair[0]).collect();
    assert!(differences.iter().filter(|difference| **difference > 2e-3).count() > 40, "{differences:?}");
    for ranks in [2, 4] {
        let out = format!("{ranks}");
        train(&world, ranks, &out, &[]);
        assert_same_losses(&losses(&world, &out), &one, &format!("{ranks} ranks"));
    }
    // With shuffling the tokens differ.
    train(&world, 2, "shuffled", &["--shuffle", "1"]);
    let shuffled = losses(&world, "shuffled");
    assert!(shuffled.iter().zip(&one).filter(|(a, b)| (*a - *b).abs() > 2e-3 * *b).count() > 40);

    // Resume within the first and within the second shard, with the same and with other world sizes.
    for (step, pairs) in [(20, &[("2", 2), ("one", 1), ("2", 4)][..]), (40, &[("4", 1), ("one", 2)])] {
        for &(from, to) in pairs {
            let out = format!("{step}_{from}_{to}");
            copy_checkpoint(&world, from, step, &out);
            train(&world, to, &out, &["--resume"]);
            let what = format!("run {from} resumed after step {step} with {to} ranks");
            assert_same_losses(&losses(&world, &out), &one, &what);
            if (from, to) == ("2", 2) || (from, to) == ("one", 1) {
                for name in ["model_00000060.bin", "state_00000060_00000.bin", "main.log"] {
                    let read = |out: &str| fs::read(world.path(out).join(name)).unwrap();
                    assert!(read(&out) == read(from), "{name} differs, {what}");
                }
            }
        }
    }
}

#[test]
fn ranks_with_different_shuffle_settings_are_refused() {
    let world = World::new();
    let children = [("0", "1"), ("1", "0")]
        .map(|(rank, shuffle)| world.rank(rank.parse().unwrap(), 2, "order", "out", &["--shuffle", shuffle]));
    let outputs = wait_for_all(children);
    let message = error_of_rank_0(&outputs, PERMANENT);
    assert!(message.contains("expected --shuffle true as on rank 0, found false; start all ranks"), "{message}");
}
