//! Training with several processes, and checkpoints of any world size and ZeRO stage.

use crate::threads::{TIMEOUT, close, distance, numbers};
use crate::world::{World, copy_checkpoint, free_endpoint, output_text, program, wait_for_all};
use checkpoint::directory;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn processes_train_together_and_resume_from_a_checkpoint() {
    let world = World::new();
    for (ranks, out) in [(2, "two"), (4, "four")] {
        for (rank, output) in world.ranks(ranks, out, out, &[]).iter().enumerate() {
            let (printed, errors) = output_text(output);
            assert!(output.status.success() && errors.is_empty(), "rank {rank}: {printed}{errors}");
            assert_eq!(printed.is_empty(), rank > 0, "only rank 0 prints: {printed}");
            let log = fs::read_to_string(world.path(out).join(format!("rank-{rank}.log")));
            assert_eq!(log.is_ok(), rank > 0);
            let console = if rank == 0 { printed } else { log.unwrap() };
            assert!(console.contains(&format!("{ranks} ranks, connected by TCP")), "{console}");
            assert!(console.contains("step    8/8 | loss"), "{console}");
        }
    }
    // A resumed run is bitwise identical to the uninterrupted run.
    let whole = world.path("two");
    let resumed = world.path("resumed");
    fs::create_dir(&resumed).unwrap();
    for name in [
        "model_00000004.bin",
        "state_00000004_00000.bin",
        "run_00000004.json",
        "DONE_00000004",
        "main.log",
        "main.jsonl",
    ] {
        fs::copy(whole.join(name), resumed.join(name)).unwrap();
    }
    for output in world.ranks(2, "resumed", "resumed", &["--resume"]) {
        assert!(output.status.success(), "{:?}", output_text(&output));
    }
    for name in ["model_00000008.bin", "state_00000008_00000.bin", "main.log"] {
        assert!(fs::read(whole.join(name)).unwrap() == fs::read(resumed.join(name)).unwrap(), "{name} differs");
    }
    // The world size may change.
    for (ranks, steps) in [(4, "10"), (1, "12")] {
        for output in world.ranks(ranks, "more", "two", &["--resume", "--steps", steps, "--force-resume"]) {
            assert!(output.status.success(), "{:?}", output_text(&output));
        }
        assert_eq!(numbers(&whole, "loss").len().to_string(), steps);
    }
    // The comparison of ranks after each step is not part of the step time.
    assert!(numbers(&whole, "ms").iter().all(|&ms| ms > 0.01), "{:?}", numbers(&whole, "ms"));
    let losses = numbers(&whole, "loss");
    assert!(losses[11] < losses[0], "{losses:?}");
}

/// Parses the state file of a rank independently of the program. Returns the header words (world size, rank, master weights,
/// step), and the f32 values after the header.
fn state_file(path: &Path) -> ([i32; 4], Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    let word = |i: usize| i32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
    assert_eq!((word(0), word(1)), (20240527, 1));
    let floats = bytes[1024..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    ([word(2), word(3), word(4), word(10)], floats)
}

/// Returns the length per layer and the number of layers of each tensor, in the file order of llm.c.
fn llmc_tensors(vp: usize, t: usize, c: usize, l: usize) -> [(usize, usize); 16] {
    let layer = [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c].map(|n| (n, l));
    let mut all = [(vp * c, 1); 16];
    all[1] = (t * c, 1);
    all[2..14].copy_from_slice(&layer);
    all[14..].fill((c, 1));
    all
}

/// Assembles m, v and master weights from the files of all ranks. As in llm.c, each tensor of each layer is split into
/// consecutive parts. If it does not split evenly, which llm.c refuses, the last parts are shorter.
pub fn assemble_files(out: &Path, step: usize, ranks: usize, tensors: &[(usize, usize)]) -> Vec<f32> {
    let names = (0..ranks).map(|rank| out.join(format!("state_{step:08}_{rank:05}.bin")));
    let files: Vec<_> = names.map(|name| state_file(&name)).collect();
    for (rank, (header, _)) in files.iter().enumerate() {
        assert_eq!(*header, [ranks as i32, rank as i32, 1, step as i32]);
    }
    let (mut at, mut all) = (vec![0; ranks], Vec::new());
    for _ in ["m", "v", "masters"] {
        for (n, layers) in tensors {
            for _ in 0..*layers {
                let part = n.div_ceil(ranks);
                for (rank, (_, values)) in files.iter().enumerate() {
                    let len = (*n).min((rank + 1) * part) - (*n).min(rank * part);
                    all.extend(&values[at[rank]..at[rank] + len]);
                    at[rank] += len;
                }
            }
        }
    }
    all
}

/// Returns the tensors of `tests/data/tiny.bin`.
pub fn tiny_tensors() -> Vec<(usize, usize)> {
    let word = |i: usize| i32::from_le_bytes(include_bytes!("../data/tiny.bin")[4 * i..4 * i + 4].try_into().unwrap());
    let [t, l, c, vp] = [2, 4, 6, 7].map(|i| word(i) as usize);
    llmc_tensors(vp, t, c, l).to_vec()
}

pub fn succeed(outputs: &[Output], what: &str) -> String {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{what}, rank {rank}: {:?}", output_text(output));
    }
    output_text(&outputs[0]).0
}

#[test]
fn sharded_state_files_have_the_layout_of_llm_c() {
    let world = World::new();
    // The tensors do not split evenly among 5 ranks.
    for (ranks, total) in [(2, "128"), (3, "96"), (5, "160")] {
        let total = ["--total-batch", total];
        let names: Vec<String> = (0..=3).map(|stage| format!("{ranks}_{stage}")).collect();
        for (stage, out) in names.iter().enumerate() {
            let stage = stage.to_string();
            let more = [&total[..], &["--zero-stage", &stage]].concat();
            let printed = succeed(&world.ranks(ranks, out, out, &more), out);
            // The memory table has the size and the savings of each stage.
            let row = |stage| {
                let row = printed.lines().find(|line| line.starts_with(&format!("  stage {stage}"))).unwrap();
                row.split_whitespace().rev().take(5).map(|cell| cell.parse::<f64>().unwrap()).collect::<Vec<_>>()
            };
            assert!(printed.contains(&format!("  stage {stage}, this run ")), "{printed}");
            assert!(row(1)[2] <= row(0)[2] / ranks as f64 + 0.1 && row(1)[0] > 0.0 && row(0)[0] == 0.0, "{printed}");
        }
        let unsharded = assemble_files(&world.path(&names[0]), 8, 1, &tiny_tensors());
        for out in &names[1..] {
            let sharded = assemble_files(&world.path(out), 8, ranks, &tiny_tensors());
            assert!(sharded.len() == unsharded.len() && distance(&sharded, &unsharded) < 1e-4, "{out}");
            let model = |out: &str| fs::read(world.path(out).join("model_00000008.bin")).unwrap();
            let [got, expected] = [model(out), model(&names[0])].map(|bytes| {
                bytes[1024..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
            });
            assert!(distance(&got, &expected) < 1e-4, "{out}");
            // f32 weights are their own master weights, so the state files contain those of the model file.
            assert!(sharded[2 * got.len()..][..got.len()] == got, "{out}");
        }
    }
}

#[test]
fn checkpoints_resume_with_any_world_size_and_zero_stage() {
    let world = World::new();
    // The total batch splits evenly among 1, 2, 3 and 4 ranks.
    let run = |ranks: usize, stage: &str, out: &str, more: &[&str]| {
        let more = [&["--total-batch", "384", "--zero-stage", stage][..], more].concat();
        succeed(&world.ranks(ranks, out, out, &more), out)
    };
    let start = |ranks: usize, stage: &str| {
        let out = format!("from_{ranks}_{stage}");
        run(ranks, stage, &out, &[]);
        out
    };
    for (from, from_stage, to, to_stage) in
        [(4, "1", 2, "1"), (2, "2", 3, "2"), (1, "0", 4, "1"), (2, "1", 2, "3"), (3, "3", 2, "0"), (3, "3", 1, "0")]
    {
        let what = format!("{from} ranks, stage {from_stage} to {to}, stage {to_stage}");
        let first = format!("from_{from}_{from_stage}");
        if !world.path(&first).exists() {
            start(from, from_stage);
        }
        // Resumes with the target stage, and for comparison without sharding.
        let [end, plain] = [to_stage, "0"].map(|stage| {
            let out = format!("{first}_to_{to}_{stage}");
            if !world.path(&out).exists() {
                copy_checkpoint(&world, &first, 4, &out);
                let printed = run(to, stage, &out, &["--resume"]);
                assert!(printed.contains("resumed after 4 of 8 steps"), "{printed}");
            }
            out
        });
        let ranks_of = |stage: &str| if stage == "0" { 1 } else { to };
        let got = assemble_files(&world.path(&end), 8, ranks_of(to_stage), &tiny_tensors());
        let expected = assemble_files(&world.path(&plain), 8, 1, &tiny_tensors());
        assert!(distance(&got, &expected) < 1e-4, "{what}");
        let losses = [&end, &plain].map(|out| numbers(&world.path(out), "loss"));
        assert_eq!(losses[0].len(), 8, "{what}");
        close(&losses[0], &losses[1], &what);
    }
}

/// The state files hold Muon's momentum in place of the first moments, and its running means in that of second moments, so any number of
/// ranks can resume. Whether they shard the update changes only the order of sums.
#[test]
fn muon_resumes_with_any_world_size_and_zero_stage() {
    let world = World::new();
    let run = |ranks: usize, stage: &str, out: &str, more: &[&str]| {
        let batch = ["--total-batch", "384", "--zero-stage", stage];
        let muon = ["--optimizer", "muon", "--muon-momentum-warmup", "4", "--muon-variance"];
        succeed(&world.ranks(ranks, out, out, &[&batch[..], &muon, more].concat()), out)
    };
    run(1, "0", "from_1", &[]);
    run(2, "1", "from_2", &[]);
    for (from, ranks, stage) in [("from_2", 1, "0"), ("from_2", 3, "1"), ("from_1", 2, "2"), ("from_1", 2, "3")] {
        let [end, plain] = [stage, "0"].map(|stage| {
            let out = format!("{from}_to_{ranks}_{stage}");
            if !world.path(&out).exists() {
                copy_checkpoint(&world, from, 4, &out);
                let printed = run(ranks, stage, &out, &["--resume"]);
                assert!(printed.contains("resumed after 4 of 8 steps"), "{printed}");
            }
            let files = if stage == "0" { 1 } else { ranks };
            assemble_files(&world.path(&out), 8, files, &tiny_tensors())
        });
        assert!(distance(&end, &plain) < 1e-3, "{from} to {ranks}, stage {stage}: {}", distance(&end, &plain));
    }
    // The same world size and stage as before gives the same bits.
    copy_checkpoint(&world, "from_2", 4, "again");
    run(2, "1", "again", &["--resume"]);
    for name in ["model_00000008.bin", "state_00000008_00000.bin", "state_00000008_00001.bin"] {
        let [whole, again] = ["from_2", "again"].map(|out| fs::read(world.path(out).join(name)).unwrap());
        assert!(whole == again, "{name}");
    }
}

/// A small model whose experts are balanced by biases.
const BALANCED_EXPERTS: &[&str] = &[
    "--model",
    "olmoe:1b-7b",
    "--layers",
    "2",
    "--channels",
    "32",
    "--heads",
    "4",
    "--ffn",
    "16",
    "--experts",
    "6",
    "--active-experts",
    "3",
    "--router-bias-rate",
    "0.01",
];

#[test]
fn resumed_sharded_runs_are_bitwise_identical() {
    let world = World::new();
    for (ranks, stage, shape) in [(2, "1", &[][..]), (3, "3", &[]), (2, "2", BALANCED_EXPERTS)] {
        let out = format!("whole_{stage}");
        let batch = ["--total-batch", if ranks == 2 { "128" } else { "96" }, "--zero-stage", stage];
        let more = [shape, &batch].concat();
        let model = if shape.is_empty() { "model_00000008.bin".to_owned() } else { directory::decoder_name(8) };
        succeed(&world.ranks(ranks, &out, &out, &more), &out);
        let resumed = format!("resumed_{stage}");
        copy_checkpoint(&world, &out, 4, &resumed);
        succeed(&world.ranks(ranks, &resumed, &resumed, &[&more[..], &["--resume"]].concat()), &resumed);
        let states = (0..ranks).map(|rank| format!("state_00000008_{rank:05}.bin"));
        for name in states.chain([model, "main.log".to_owned()]) {
            let [whole, again] = [&out, &resumed].map(|out| fs::read(world.path(out).join(&name)).unwrap());
            assert!(whole == again, "{name} of stage {stage} differs");
        }
    }
}

#[test]
fn a_killed_rank_leaves_only_complete_checkpoints() {
    let world = World::new();
    let more = ["--total-batch", "96", "--zero-stage", "2", "--checkpoint-every", "1", "--steps", "12"];
    succeed(&world.ranks(3, "whole", "whole", &more), "whole");
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, "killed rank", "killed", &more)).collect();
    let deadline = Instant::now() + TIMEOUT;
    while !world.path("killed/DONE_00000003").exists() {
        assert!(Instant::now() < deadline, "the run does not start");
        thread::sleep(Duration::from_millis(1));
    }
    children[1].kill().unwrap();
    for child in children {
        assert!(!child.wait_with_output().unwrap().status.success(), "a run without one of its ranks");
    }
    succeed(&world.ranks(3, "again", "killed", &[&more[..], &["--resume"]].concat()), "again");
    for name in ["model_00000012.bin", "state_00000012_00000.bin", "state_00000012_00002.bin", "main.log"] {
        let [whole, again] = ["whole", "killed"].map(|out| fs::read(world.path(out).join(name)).unwrap());
        assert!(whole == again, "{name} differs");
    }
    // A damaged state file of another rank makes the checkpoint invalid.
    let part = world.path("killed/state_00000012_00002.bin");
    let mut bytes = fs::read(&part).unwrap();
    bytes[2000] ^= 1;
    fs::write(&part, bytes).unwrap();
    let printed = succeed(&world.ranks(3, "damaged", "killed", &[&more[..], &["--resume"]].concat()), "damaged");
    assert!(printed.contains("state_00000012_00002.bin is damaged") && printed.contains("after 11 of 12"), "{printed}");
}

#[test]
fn a_rank_that_cannot_write_its_state_is_reported_and_the_run_continues() {
    let world = World::new();
    let other_directory = tempfile::tempdir().unwrap();
    for name in ["train_0.bin", "train_1.bin", "val_0.bin", "tiny.bin"] {
        fs::copy(world.path(name), other_directory.path().join(name)).unwrap();
    }
    let endpoint = free_endpoint();
    let start = |rank: &str| {
        let more = ["--rank", rank, "--world-size", "2", "--rendezvous", &endpoint, "--zero-stage", "1"];
        let mut command = world.command(program(), "out", &more);
        if rank == "1" {
            command.current_dir(other_directory.path());
        }
        command.spawn().unwrap()
    };
    let outputs = wait_for_all(["0", "1"].map(start));
    let (printed, message) = output_text(&outputs[0]);
    let warning =
        "warning: no checkpoint of step 4, there is none yet: rank 1: cannot write out/.unfinished-checkpoint-";
    let line = printed.lines().find(|line| line.starts_with(warning));
    assert!(line.is_some_and(|line| line.contains("/state_00000004_00001.bin: ")), "{printed}");
    assert!(
        printed.contains("step    8/8 | loss") && message.contains("the last checkpoint (step 8) could not be written"),
        "{message}"
    );
}

#[test]
fn sampling_hellaswag_and_core_with_sharded_parameters_match_unsharded() {
    let world = World::new();
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.bin");
    let small = ["train", "--device", "cpu", "--layers", "3", "--heads", "1", "--channels", "32", "--batch", "1"];
    // The built-in text is tokenized by bytes, so samples can be decoded.
    let texts = ["--seq", "32", "--steps", "2", "--sample-every", "1", "--sample-length", "12", "--val-batches", "2"];
    // The three ranks have 3, 2 and 2 of the examples.
    let scores = ["--seq", "64", "--steps", "2", "--train", "train_*.bin", "--val", "val_*.bin", "--val-every", "1"];
    let scores = [&scores[..], &["--hellaswag", set.to_str().unwrap(), "--hellaswag-examples", "7"]].concat();
    // The ranks have 3, 3 and 2 questions of each task, in different numbers of batches.
    let bundle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/core/bundle");
    let core = ["--core", bundle.to_str().unwrap(), "--core-every", "1", "--core-max-per-task", "8"];
    let scores = [&scores[..], &core].concat();
    let run = |ranks: usize, stage: &str, more: &[&str]| {
        let endpoint = free_endpoint();
        let start = |rank: usize| {
            let mut command = Command::new(program());
            command.current_dir(world.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.args(small).args(more).args(["--zero-stage", stage, "--rendezvous", &endpoint]);
            command.args(["--rank", &rank.to_string(), "--world-size", &ranks.to_string()]).spawn().unwrap()
        };
        let children: Vec<_> = (0..ranks).map(start).collect();
        let outputs = wait_for_all(children);
        succeed(&outputs, stage)
    };
    let [unsharded, sharded] = ["0", "3"].map(|stage| {
        let printed = run(2, stage, &texts);
        let texts =
            printed.split("generating:\n---\n").skip(1).map(|text| text.split("\n---").next().unwrap().to_owned());
        let texts: Vec<_> = texts.collect();
        assert_eq!(texts.len(), 2, "{printed}");
        let printed = run(3, stage, &scores);
        let is_score = |line: &&str| line.contains("HellaSwag: ") || line.contains("CORE: ");
        let scores: Vec<_> = printed.lines().filter(is_score).map(str::to_owned).collect();
        assert_eq!(scores.len(), 4, "{printed}");
        (texts, scores)
    });
    assert_eq!(unsharded, sharded);
}
