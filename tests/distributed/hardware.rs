//! Detection of faulty hardware by several ranks.

use crate::world::{PERMANENT, World, error_of_rank_0, output_text, program, wait_for_all};
use std::fs;

/// Runs two ranks, the environment of rank 1 with a bit to flip.
fn run(world: &World, out: &str, flip: Option<&str>, more: &[&str]) -> Vec<std::process::Output> {
    let start = |rank: usize| {
        let mut command = world.command(program(), out, more);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("TORCHELASTIC_RUN_ID", format!("hardware {}", world.path(out).display()));
        if let Some(flip) = flip {
            command.env("LLM_RS_FLIP_BIT", flip);
        }
        command.spawn().unwrap()
    };
    wait_for_all([0, 1].map(start))
}

fn succeed(world: &World, out: &str, more: &[&str]) {
    for output in run(world, out, None, more) {
        let (printed, errors) = output_text(&output);
        assert!(output.status.success(), "{printed}{errors}");
    }
}

fn hashes(world: &World, out: &str) -> Vec<String> {
    let log = fs::read_to_string(world.path(out).join("main.jsonl")).unwrap();
    // Without the time.
    let record = |line: &str| line.split_once(",\"time\"").map(|(record, _)| record.to_owned());
    log.lines().filter(|line| line.contains("\"hashes\"")).filter_map(record).collect()
}

#[test]
fn verification_by_other_ranks_finds_a_flipped_bit_and_changes_no_result() {
    let world = World::new();
    succeed(&world, "plain", &["--steps", "8"]);
    succeed(&world, "verified", &["--steps", "8", "--verify-every", "1"]);
    for name in ["model_00000008.bin", "state_00000008_00000.bin", "main.log"] {
        let read = |out: &str| fs::read(world.path(out).join(name)).unwrap();
        assert!(read("plain") == read("verified"), "{name}");
    }
    // Step 4 is verified on the same rank, step 5 on the other one.
    for (step, second) in [(4, "when it was recomputed"), (5, "on rank 0")] {
        let (out, flip) = (format!("flipped{step}"), format!("{step}:1:5:5:3"));
        let error = error_of_rank_0(&run(&world, &out, Some(&flip), &["--verify-every", "1"]), PERMANENT);
        for part in ["faulty hardware: micro-batch of rank 1", second, "`out` of AttentionForward in layer 0", "CPU"] {
            assert!(error.contains(part), "expected {part:?}: {error}");
        }
    }
}

#[test]
fn hashes_do_not_depend_on_how_ranks_shard_the_values() {
    let world = World::new();
    // Stages 2 and 3 compute the same bits. Other stages may add the shares of the gradient norm in another order.
    for stage in ["2", "3"] {
        succeed(&world, stage, &["--hash-every", "2", "--zero-stage", stage]);
    }
    let [two, three] = ["2", "3"].map(|stage| hashes(&world, stage));
    assert_eq!(two.len(), 4);
    assert_eq!(two, three);
    // A resumed run compares its memory with the hashes of the checkpoint.
    for stage in ["1", "2", "3"] {
        let out = format!("from 0 to {stage}");
        succeed(&world, &out, &["--zero-stage", "0"]);
        fs::remove_file(world.path(&out).join("DONE_00000008")).unwrap();
        succeed(&world, &out, &["--zero-stage", stage, "--resume"]);
    }
}
