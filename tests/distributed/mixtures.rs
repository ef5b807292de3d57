//! Mixtures: any number of ranks reads the same sequences in the same step, also after resuming.

use crate::threads::numbers;
use crate::world::{PERMANENT, World, copy_checkpoint, error_of_rank_0, output_text, wait_for_all};
use std::fs;

/// Two sources of one shard each; the short flag is not replaced by that of the settings.
const SOURCES: [&str; 4] = ["--train", "train_0.bin=0.7", "-i", "train_1.bin=0.3"];
const STEPS: [&str; 6] = ["--steps", "60", "--checkpoint-every", "20", "--keep", "0"];

fn train(world: &World, ranks: usize, out: &str, more: &[&str]) -> Vec<f64> {
    // The learning rate is low, so a loss depends mostly on its tokens.
    let more = [&SOURCES[..], &STEPS, &["--lr", "0.0001", "--val", "val_*.bin", "-j", "train_1.bin"], more].concat();
    for (rank, output) in world.ranks(ranks, out, out, &more).iter().enumerate() {
        assert!(output.status.success(), "{ranks} ranks, rank {rank}: {:?}", output_text(output));
    }
    numbers(&world.path(out), "loss")
}

/// Checks that losses agree up to the summation order. Losses of other tokens differ a hundred times as much.
fn assert_same(got: &[f64], expected: &[f64], what: &str) {
    assert!(got.len() == 60 && expected.len() == 60, "{what}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 2e-5 * expected, "{what}, step {step}: {got}, {expected}");
    }
}

#[test]
fn ranks_read_the_same_sequences_in_the_same_step() {
    let world = World::new();
    let one = train(&world, 1, "one", &[]);
    let differences: Vec<_> = one.windows(2).map(|pair| (pair[0] - pair[1]).abs() / pair[0]).collect();
    assert!(differences.iter().filter(|difference| **difference > 2e-3).count() > 40, "{differences:?}");
    for ranks in [2, 4] {
        assert_same(&train(&world, ranks, &format!("{ranks}"), &[]), &one, &format!("{ranks} ranks"));
    }
    for (from, to, step) in [("one", 1, 20), ("2", 2, 40), ("2", 4, 20), ("4", 1, 40)] {
        let out = format!("{step}_{from}_{to}");
        copy_checkpoint(&world, from, step, &out);
        let what = format!("run {from} resumed after step {step} with {to} ranks");
        assert_same(&train(&world, to, &out, &["--resume"]), &one, &what);
        if (from, to) == ("2", 2) || (from, to) == ("one", 1) {
            for name in ["model_00000060.bin", "state_00000060_00000.bin", "main.log"] {
                let read = |out: &str| fs::read(world.path(out).join(name)).unwrap();
                assert!(read(&out) == read(from), "{name} differs, {what}");
            }
        }
    }
    // The losses of the validation sources are means over the ranks.
    let sources = |out: &str| {
        let text = fs::read_to_string(world.path(out).join("main.jsonl")).unwrap();
        let mut lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let line = lines.rfind(|line| line["sources"].is_array()).unwrap();
        [0, 1].map(|i| line["sources"][i]["val_loss"].as_f64().unwrap())
    };
    let losses = sources("2");
    assert!(losses.iter().all(|loss| *loss > 3.0) && (losses[0] - losses[1]).abs() > 1e-6, "{losses:?}");
}

#[test]
fn ranks_with_other_weights_are_refused() {
    let world = World::new();
    let children = [("0", "0.3"), ("1", "0.4")].map(|(rank, weight)| {
        let other = format!("train_1.bin={weight}");
        world.rank(rank.parse().unwrap(), 2, "weights", "out", &["--train", "train_0.bin=0.7", "-i", &other])
    });
    let message = error_of_rank_0(&wait_for_all(children), PERMANENT);
    assert!(message.contains("expected --data") && message.contains("start all ranks"), "{message}");
}
