//! Processes with `--expert-parallel`: the same training as on one rank, checkpoints, evaluations and messages. The tests of `model`
//! compare more settings.

use crate::checkpoints::succeed;
use crate::threads::{close, numbers};
use crate::world::{PERMANENT, World, copy_checkpoint, error_of_rank_0, output_text, program, wait_for_all};
use safetensors::SafeTensors;
use std::fs;

/// Flags of a run whose ranks share the experts.
const SHARED: [&str; 3] = ["--expert-parallel", "--zero-stage", "1"];

/// Creates the directory `experts` with a small model that has 12 experts, which 2, 3, 4 and 6 ranks can share.
pub fn create_model(world: &World) {
    let mut command = world.bare(program());
    let shape = "--model olmoe:1b-7b --layers 2 --channels 32 --heads 4 --ffn 16 --experts 12 --active-experts 3";
    let run = "--device cpu --batch 1 --seq 16 --steps 1 --lr 0 --val-every 0 --sample-every 0 --out experts";
    let output = command.arg("train").args(shape.split(' ')).args(run.split(' ')).output().unwrap();
    assert!(output.status.success(), "{:?}", output_text(&output));
}

/// Trains on steps of 8 sequences in order. `b` is the number of sequences of a micro-batch of a rank. Returns what rank 0 prints.
fn train(world: &World, (ranks, b): (usize, usize), out: &str, more: &[&str]) -> String {
    let b = b.to_string();
    let flags = ["--model", "experts", "--shuffle", "0", "--batch", &b, "--hash-every", "1", "--verify-every", "3"];
    succeed(&world.ranks(ranks, out, out, &[&flags[..], more].concat()), out)
}

/// Returns the weights of the model of a step, in the order of their names.
fn weights(world: &World, out: &str, step: usize) -> Vec<f32> {
    let bytes = fs::read(world.path(out).join(format!("model_{step:08}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = file.tensors();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let values = tensors.iter().flat_map(|(_, tensor)| tensor.data().chunks_exact(4));
    values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Checks that losses and weights of two runs agree up to rounding.
fn assert_close(world: &World, out: &str, expected: &str) {
    close(&numbers(&world.path(out), "loss"), &numbers(&world.path(expected), "loss"), out);
    close(&numbers(&world.path(out), "val_loss"), &numbers(&world.path(expected), "val_loss"), out);
    let [found, expected] = [out, expected].map(|out| weights(world, out, 8));
    let distance = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(found.len() == expected.len() && distance < 2e-4, "{out}: {distance}");
}

#[test]
fn ranks_that_share_experts_train_like_one_rank_and_resume_with_any_layout() {
    let world = World::new();
    create_model(&world);
    train(&world, (1, 4), "one", &[]);
    // All layouts validate on the same sequences.
    let hybrid = ["--expert-parallel", "--zero-stage", "2", "--shard-size", "2", "--val-batches", "1"];
    let gathered = ["--expert-parallel", "--zero-stage", "3", "--recompute", "2"];
    for (out, layout, more) in [
        ("two", (2, 2), &SHARED[..]),
        ("four", (4, 1), &SHARED[..]),
        ("hybrid", (4, 2), &hybrid[..]),
        ("gathered", (2, 2), &gathered[..]),
    ] {
        train(&world, layout, out, more);
        assert_close(&world, out, "one");
        // The same layout resumes with the same bits.
        let resumed = format!("{out}_resumed");
        copy_checkpoint(&world, out, 4, &resumed);
        train(&world, layout, &resumed, &[more, &["--resume"]].concat());
        let states = (0..if out == "four" { 4 } else { 2 }).map(|rank| format!("state_00000008_{rank:05}.bin"));
        for name in states.chain(["model_00000008.safetensors".to_owned(), "main.log".to_owned()]) {
            let [whole, again] = [out, &resumed].map(|out| fs::read(world.path(out).join(&name)).unwrap());
            assert!(whole == again, "{name} of {out} differs");
        }
    }
    // Other layouts, with the flag and without, have the same micro-batches of the experts.
    for (from, to, layout, more) in [
        ("two", "two_to_four", (4, 1), &SHARED[..]),
        ("four", "four_to_hybrid", (4, 2), &hybrid[..]),
        ("hybrid", "hybrid_to_two", (2, 2), &gathered[..]),
        ("gathered", "gathered_to_one", (1, 4), &[]),
        ("one", "one_to_two", (2, 2), &SHARED[..]),
        ("two", "two_to_separate", (2, 4), &["--zero-stage", "1", "--val-batches", "1"]),
    ] {
        copy_checkpoint(&world, from, 4, to);
        let printed = train(&world, layout, to, &[more, &["--resume", "--force-resume"]].concat());
        assert!(printed.contains("resumed after 4 of 8 steps"), "{printed}");
        assert_close(&world, to, "one");
    }
}

#[test]
fn ranks_that_share_experts_sample_together() {
    let world = World::new();
    let run = |ranks: usize, more: &[&str]| {
        let out = format!("{ranks}");
        let shape = "--model olmoe:1b-7b --layers 2 --channels 32 --heads 4 --ffn 16 --experts 4 --active-experts 2";
        let flags = "--device cpu --seq 16 --total-batch 64 --steps 4 --shuffle 0 --val-every 2 --sample-every 2 --sample-length 12";
        let children = (0..ranks).map(|rank| {
            let mut command = world.bare(program());
            command.arg("train").args(shape.split(' ')).args(flags.split(' ')).args(["--out", &out]).args(more);
            command.args(["--rank", &rank.to_string(), "--world-size", &ranks.to_string()]);
            command.spawn().unwrap()
        });
        let printed = succeed(&wait_for_all(children.collect::<Vec<_>>()), &out);
        let texts = printed.split("generating:").skip(1).map(|text| text.split("\n---\n").nth(1).unwrap().to_owned());
        (texts.collect::<Vec<_>>(), numbers(&world.path(&out), "val_loss"))
    };
    let (one, two) = (run(1, &["--batch", "4"]), run(2, &["--batch", "2", "--expert-parallel", "-z", "1"]));
    assert_eq!(one.0.len(), 2);
    assert_eq!(one.0, two.0);
    close(&one.1, &two.1, "validation");
}

#[test]
fn experts_that_ranks_cannot_share_are_errors() {
    let world = World::new();
    create_model(&world);
    let experts = ["--model", "experts"];
    for (ranks, more, message) in [
        (
            2,
            &["--model", "experts", "--expert-parallel"][..],
            "found --zero-stage 0 and groups of 2; use --zero-stage 1",
        ),
        (
            2,
            &["--model", "experts", "--expert-parallel", "-z", "1", "--shard-size", "1"],
            "found --zero-stage 1 and groups of 1",
        ),
        (
            2,
            &SHARED[..],
            "--expert-parallel: expected a model with experts, found one with a dense MLP; leave the flag out",
        ),
        (
            5,
            &["--model", "experts", "--expert-parallel", "-z", "1", "--total-batch", "160"],
            "that the 5 ranks of a shard group divide, found 12",
        ),
    ] {
        let outputs = world.ranks(ranks, "error", "error", more);
        let errors: String = outputs.iter().map(|output| output_text(output).1).collect();
        assert!(outputs.iter().all(|output| !output.status.success()), "{more:?}");
        assert!(errors.contains(message), "{more:?}: {errors}");
    }
    let children = (0..2).map(|rank| {
        let more = [&experts[..], &SHARED, if rank == 0 { &[] } else { &["--expert-parallel", "0"] }].concat();
        world.rank(rank, 2, "differ", "differ", &more)
    });
    let message = error_of_rank_0(&wait_for_all(children.collect::<Vec<_>>()), PERMANENT);
    assert!(message.contains("expected --expert-parallel true as on rank 0, found false"), "{message}");
    let printed =
        succeed(&world.ranks(1, "noted", "noted", &[&experts[..], &SHARED, &["--dry-run"]].concat()), "noted");
    assert!(printed.contains("note: --expert-parallel has no effect: the run has one rank\n"), "{printed}");
}
