//! Processes with `--shard-size`: checkpoints, messages and flags. `threads.rs` compares the results of training.

use crate::checkpoints::{assemble_files, succeed, tiny_tensors};
use crate::threads::{close, distance, numbers};
use crate::world::{World, copy_checkpoint, output_text};
use std::fs;

/// A number of ranks, the size of their shard groups, and the ZeRO stage.
#[derive(Clone, Copy, Debug)]
struct Layout(usize, usize, &'static str);

impl Layout {
    /// Returns the number of state files of a checkpoint.
    fn files(self) -> usize {
        if self.2 == "0" { 1 } else { self.1 }
    }

    fn name(self) -> String {
        format!("{}_{}_{}", self.0, self.1, self.2)
    }

    /// Trains, and returns the output of rank 0. The total batch splits evenly among 1, 2, 3, 4 and 6 ranks.
    fn run(self, world: &World, out: &str, more: &[&str]) -> String {
        let Self(ranks, size, stage) = self;
        let size = size.to_string();
        let layout = ["--total-batch", "384", "--zero-stage", stage, "--shard-size", &size];
        let layout = if ranks == 1 { &layout[..2] } else { &layout };
        succeed(&world.ranks(ranks, out, out, &[layout, more].concat()), out)
    }
}

#[test]
fn checkpoints_of_shard_groups_resume_with_any_layout() {
    let world = World::new();
    let single = Layout(1, 1, "0");
    let mut started: Vec<String> = Vec::new();
    for (from, to) in [
        (Layout(4, 2, "1"), Layout(3, 3, "2")),
        (Layout(4, 2, "1"), single),
        (Layout(6, 3, "3"), Layout(6, 2, "2")),
        (Layout(6, 3, "3"), Layout(2, 2, "1")),
        (single, Layout(4, 2, "3")),
        (Layout(3, 3, "1"), Layout(6, 3, "1")),
    ] {
        let what = format!("{}_to_{}", from.name(), to.name());
        let first = format!("from_{}", from.name());
        if !started.contains(&first) {
            let printed = from.run(&world, &first, &[]);
            let Layout(ranks, size, _) = from;
            assert_eq!(
                printed.contains(&format!("ZeRO, {} groups of {size}", ranks / size)),
                ranks > size,
                "{printed}"
            );
            // The files are those of a run of `size` ranks. `assemble_files` checks the headers.
            assemble_files(&world.path(&first), 8, from.files(), &tiny_tensors());
            let beyond = format!("state_00000008_{:05}.bin", from.files());
            assert!(!world.path(&first).join(beyond).exists(), "{what}");
            started.push(first.clone());
        }
        // Resumes with the target layout, and for comparison without sharding.
        let plain = Layout(to.0, to.0, "0");
        let [end, plain] = [(to, "sharded"), (plain, "plain")].map(|(layout, name)| {
            let out = format!("{what}_{name}");
            copy_checkpoint(&world, &first, 4, &out);
            let printed = layout.run(&world, &out, &["--resume"]);
            assert!(printed.contains("resumed after 4 of 8 steps"), "{printed}");
            (numbers(&world.path(&out), "loss"), assemble_files(&world.path(&out), 8, layout.files(), &tiny_tensors()))
        });
        assert_eq!(end.0.len(), 8, "{what}");
        close(&end.0, &plain.0, &what);
        assert!(distance(&end.1, &plain.1) < 1e-4, "{what}: {}", distance(&end.1, &plain.1));
    }
}

#[test]
fn resumed_runs_of_shard_groups_are_bitwise_identical() {
    let world = World::new();
    // Stage 1 verifies micro-batches on ranks of other groups.
    let more = ["--hash-every", "1", "--verify-every", "1"];
    for layout in [Layout(4, 2, "1"), Layout(4, 2, "2"), Layout(6, 3, "3")] {
        let whole = format!("whole_{}", layout.name());
        let resumed = format!("resumed_{}", layout.name());
        layout.run(&world, &whole, &more);
        copy_checkpoint(&world, &whole, 4, &resumed);
        layout.run(&world, &resumed, &[&more[..], &["--resume"]].concat());
        let states = (0..layout.files()).map(|rank| format!("state_00000008_{rank:05}.bin"));
        for name in states.chain(["model_00000008.bin".to_owned(), "main.log".to_owned()]) {
            let [whole, again] = [&whole, &resumed].map(|out| fs::read(world.path(out).join(&name)).unwrap());
            assert!(whole == again, "{name} of {layout:?} differs");
        }
    }
}

#[test]
fn sizes_that_do_not_divide_the_ranks_are_errors_and_those_without_effect_are_noted() {
    let world = World::new();
    let outputs = world.ranks(4, "error", "error", &["--zero-stage", "1", "--shard-size", "3"]);
    assert!(outputs.iter().all(|output| !output.status.success()));
    let (_, errors) = output_text(&outputs[0]);
    let expected = "--shard-size: expected a divisor of the world size 4, found 3; use one of 1, 2, 4";
    assert!(errors.contains(expected), "{errors}");
    for (flags, note) in [
        (["--zero-stage", "0", "--shard-size", "2"], "--shard-size has no effect: --zero-stage is 0"),
        (["--zero-stage", "2", "--shard-size", "1"], "--zero-stage has no effect: --shard-size is 1"),
    ] {
        let printed = succeed(&world.ranks(2, "noted", "noted", &[&flags[..], &["--dry-run"]].concat()), note);
        assert!(printed.contains(&format!("note: {note}\n")), "{printed}");
    }
}
