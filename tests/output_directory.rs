//! The directory of a run: it never replaces files of others, runs without `--out` get one of their own, and it may be moved.

use crate::common::runs::{Results, World, entries, lines, signal, wait_until};
use crate::common::{overridden, succeed, text};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// The file that marks the directory of a run.
const MARKER: &str = ".llm-rs-run";

/// Returns the files of a directory with their contents.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = entries(dir).into_iter().filter(|name| dir.join(name).is_file());
    files.map(|name| (name.clone(), fs::read(dir.join(&name)).unwrap())).collect()
}

/// Returns a run of the small model of `world` without `--out`, in its directory.
fn without_out(world: &World, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.current_dir(world.dir.path()).args(["train", "--device", "cpu", "--train", "train_*.bin"]);
    let flags = ["--model", "tiny.bin", "--batch", "2", "--seq", "16", "--sample-every", "0"];
    command.args(overridden(&flags, more));
    command
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_directory_with_files_that_a_run_would_overwrite_is_refused() {
    let world = World::new();
    let config = "train = \"train_*.bin\"\nmodel = \"tiny.bin\"\nbatch = 2\nseq = 16\nsteps = 2\n";
    let names = ["config.toml", "main.log", "report.html", "plots.svg", "model_00000002.bin", "rank-1.log"];
    for files in [&names[..], &names[..1], &names[1..2], &names[2..3], &names[3..4], &names[4..5], &names[5..]] {
        let project = world.path("proj");
        fs::create_dir(&project).unwrap();
        for name in files {
            fs::write(project.join(name), config).unwrap();
        }
        let before = contents(&project);
        let expected =
            ["--out proj: expected an empty directory or the directory of a run, found ", "choose another --out"];
        for more in [&[][..], &["--resume=auto"], &["--dry-run"]] {
            world.fail("proj", more, &[&expected[..], &files[..1]].concat());
        }
        if files.contains(&"config.toml") {
            let mut train = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
            train.args(["train", "--device", "cpu", "--config", "proj/config.toml", "--out", "proj"]);
            let output = train.current_dir(world.dir.path()).output().unwrap();
            assert!(output.status.code() == Some(1) && printed(&output).contains(expected[0]), "{}", printed(&output));
        }
        assert!(contents(&project) == before, "{files:?}");
        fs::remove_dir_all(&project).unwrap();
    }
}

#[test]
fn a_file_is_no_output_directory() {
    let world = World::new();
    world.fail(
        "tiny.bin",
        &["--steps", "2"],
        &["--out tiny.bin: expected a directory or a new name, found a file; choose"],
    );
}

/// Batch systems and file systems put files of their own into the directory before the run starts.
#[test]
fn other_files_in_the_directory_do_not_matter() {
    let world = World::new();
    let out = world.path("here");
    fs::create_dir_all(out.join("lost+found")).unwrap();
    for name in ["slurm-123.out", "job.sh", ".nfs0001", "output.txt"] {
        fs::write(out.join(name), "of others").unwrap();
    }
    let output = world
        .command(".", &["--train", "../train_*.bin", "--val", "../val_0.bin", "--model", "../tiny.bin"])
        .current_dir(&out)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", printed(&output));
    assert!(out.join("DONE_00000040").exists() && out.join("lost+found").is_dir());
    for name in ["slurm-123.out", "job.sh", ".nfs0001", "output.txt"] {
        assert_eq!(fs::read_to_string(out.join(name)).unwrap(), "of others");
    }
}

#[test]
fn runs_of_versions_without_the_marker_are_recognized() {
    let world = World::new();
    let short = ["--steps", "6"];
    world.succeed("run", &short);
    fs::remove_file(world.path("run").join(MARKER)).unwrap();
    assert!(world.succeed("run", &["--steps", "6", "--resume"]).contains("resumed after 6 of 6 steps"));
    assert!(world.path("run").join(MARKER).exists());

    // A run that was killed before its first checkpoint.
    let unsaved = ["--steps", "6", "--checkpoint-every", "0"];
    world.succeed("killed", &unsaved);
    fs::remove_file(world.path("killed").join(MARKER)).unwrap();
    world.succeed("killed", &["--steps", "6", "--resume=auto"]);

    // Settings that were copied from a run do not make a run.
    fs::create_dir(world.path("copy")).unwrap();
    fs::copy(world.path("run/config.toml"), world.path("copy/config.toml")).unwrap();
    world.fail("copy", &short, &["expected an empty directory or the directory of a run, found config.toml"]);
}

#[test]
fn a_run_that_fails_before_it_writes_leaves_no_directory() {
    let world = World::new();
    let huge = ["--model", "gpt3:c12288"];
    world.fail("run", &huge, &["the model does not fit"]);
    assert!(!world.path("run").exists());
    fs::create_dir(world.path("empty")).unwrap();
    world.fail("empty", &huge, &["the model does not fit"]);
    assert!(entries(&world.path("empty")).is_empty());
    let output = without_out(&world, &["--steps", "2", "--model", "gpt3:c12288"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", printed(&output));
    assert!(!world.path("runs").exists() || entries(&world.path("runs")).is_empty());
    let output = without_out(&world, &["--steps", "2", "--dry-run"]).output().unwrap();
    assert!(output.status.success(), "{}", printed(&output));
    assert!(!world.path("runs").exists() || entries(&world.path("runs")).is_empty());
}

#[test]
fn runs_without_out_get_directories_of_their_own() {
    let world = World::new();
    let mut children: Vec<Child> = (0..3).map(|_| start(&mut without_out(&world, &["--steps", "4"]))).collect();
    let mut used = Vec::new();
    for child in children.drain(..) {
        let output = child.wait_with_output().unwrap();
        let printed = printed(&output);
        assert!(output.status.success(), "{printed}");
        let row = printed.lines().find(|line| line.starts_with("output  ")).unwrap();
        let out = row.split_whitespace().nth(1).unwrap().trim_end_matches(',').to_owned();
        let model = format!("{out}/model_00000004.bin");
        assert!(printed.contains(&format!("\nmodel: {model}\n")) && world.path(&model).exists(), "{printed}");
        assert!(printed.contains(&format!("sample --model {model} ")), "{printed}");
        assert_eq!(lines(&world.path(&out).join("main.jsonl")), 4);
        used.push(out);
    }
    used.sort();
    assert_eq!(used, ["runs/tiny-1", "runs/tiny-2", "runs/tiny-3"]);

    // A number is used once, as long as there is a later one. The command that resumes names the directory.
    fs::remove_dir_all(world.path("runs/tiny-2")).unwrap();
    let child = start(&mut without_out(&world, &["--steps", "100000"]));
    wait_until("the run has logged some steps", || lines(&world.path("runs/tiny-4/main.log")) > 5);
    signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    let next = printed(&output);
    assert_eq!(output.status.code(), Some(130), "{next}");
    assert!(next.contains(" --out runs/tiny-4 --resume\n"), "{next}");
    assert_eq!(entries(&world.path("runs")), ["tiny-1", "tiny-3", "tiny-4"]);

    let output = without_out(&world, &["--steps", "2", "--out", "none"]).output().unwrap();
    assert!(printed(&output).contains("\nmodel: not saved\n"), "{}", printed(&output));
    assert!(!world.path("none").exists() && entries(&world.path("runs")).len() == 3);
    let output = without_out(&world, &["--steps", "2", "--out", "none", "--resume"]).output().unwrap();
    assert!(printed(&output).contains("error: --resume: expected the --out of a run, found --out none"));
}

#[test]
fn the_ranks_of_a_run_without_out_use_one_directory() {
    let world = World::new();
    let rendezvous = format!("file://{}", world.path("meeting").display());
    fs::create_dir(world.path("meeting")).unwrap();
    let rank = |rank: &str| {
        let flags = ["--steps", "4", "--rank", rank, "--world-size", "2", "--rendezvous", &rendezvous];
        start(&mut without_out(&world, &flags))
    };
    for child in [rank("0"), rank("1")] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
    }
    assert_eq!(entries(&world.path("runs")), ["tiny-1"]);
    let names = entries(&world.path("runs/tiny-1"));
    for name in ["DONE_00000004", "rank-1.log", "report.html"] {
        assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
    }
}

#[test]
fn the_first_run_keeps_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let llm_rs = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        let output = command.current_dir(dir.path()).env_remove("CARGO").args(args).output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
        printed(&output)
    };
    let shown = llm_rs(&["train", "--device", "cpu", "--steps", "2", "--val-every", "0", "--sample-every", "0"]);
    let (_, next) = shown.split_once("\nnext: ").unwrap();
    let words = shlex::split(next.trim()).unwrap();
    assert_eq!(words[1..4], ["sample", "--model", "runs/small-1/model_00000002.bin"]);
    llm_rs(&words[1..].iter().map(String::as_str).chain(["--tokens", "4", "--device", "cpu"]).collect::<Vec<_>>());
    // The repository does not track the model of the first run in a clone.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    assert!(fs::read_to_string(root.join(".gitignore")).unwrap().lines().any(|line| line == "/runs/"));
}

#[test]
fn a_run_follows_its_directory_when_it_is_moved() {
    let world = World::new();
    let long = ["--steps", "600", "--checkpoint-every", "600", "--keep", "0"];
    world.succeed("reference", &long);
    let reference = Results::read(&world.path("reference"), 600);
    for (name, replaced) in [("a", true), ("b", false)] {
        let moved = world.path(&format!("{name}-moved"));
        let child = start(&mut world.command(name, &long));
        wait_until("the run has logged some steps", || lines(&world.path(name).join("main.log")) > 50);
        fs::rename(world.path(name), &moved).unwrap();
        if replaced {
            fs::create_dir(world.path(name)).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let shown = printed(&output);
        assert!(output.status.success(), "{shown}");
        let now = moved.canonicalize().unwrap();
        let warning =
            format!("warning: {name} was moved to {0} during the run; the run continues in {0}", now.display());
        assert_eq!(shown.matches("warning: ").count(), 1, "{shown}");
        assert!(shown.contains(&warning), "{shown}");
        assert!(shown.contains(&format!("\nmodel: {}/model_00000600.bin\n", now.display())), "{shown}");
        Results::read(&moved, 600).assert_equals(&reference, "after it was moved");
        assert!(!world.path(name).exists() || entries(&world.path(name)).is_empty());
    }
    // The command that continues a stopped run names the new path.
    let child = start(&mut world.command("c", &long));
    wait_until("the run has logged some steps", || lines(&world.path("c/main.log")) > 50);
    fs::rename(world.path("c"), world.path("d")).unwrap();
    signal(&child, "TERM");
    let output = child.wait_with_output().unwrap();
    let next = format!(" --out {} --resume\n", world.path("d").canonicalize().unwrap().display());
    assert!(output.status.code() == Some(143) && printed(&output).contains(&next), "{}", printed(&output));
}

#[test]
fn the_times_of_a_resumed_run_are_consistent() {
    let world = World::new();
    let slow = ["--steps", "400", "--checkpoint-every", "400", "--keep", "0"];
    let line = |shown: &str| shown.lines().find(|line| line.contains(" of training, ")).unwrap().to_owned();
    let first = line(&world.succeed("run", &slow));
    assert!(!first.contains("resumed"), "{first}");
    let resumed = line(&world.succeed("run", &[&slow[..], &["--resume"]].concat()));
    let (whole, session) = resumed.split_once(" of training; since it was resumed after step 400: ").expect(&resumed);
    let number = |text: &str| text.split(' ').next().unwrap().parse::<f64>().unwrap();
    let (_, total) = session.split_once(" of training, ").unwrap();
    let whole = number(whole.rsplit_once("tokens in ").unwrap().1);
    assert!(number(session) <= number(total) && number(session) <= whole, "{resumed}");
}

#[test]
fn all_reports_have_one_training_loss() {
    let world = World::new();
    let run = ["--steps", "60", "--checkpoint-every", "30", "--keep", "0"];
    world.succeed("whole", &run);
    let stopped = world.succeed("run", &["--steps", "30", "--checkpoint-every", "30", "--keep", "0"]);
    assert!(stopped.contains("final train loss "), "{stopped}");
    let shown = world.succeed("run", &[&run[..], &["--resume", "--force-resume"]].concat());
    let loss = |shown: &str| {
        let (_, rest) = shown.split_once("final train loss ").expect(shown);
        rest.split([',', '\n']).next().unwrap().to_owned()
    };
    let page = fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(page.contains(&format!("<td>{}</td>", loss(&shown))), "{}", loss(&shown));
    assert!(succeed(&["log", text(&world.path("run"))]).contains(&loss(&shown)));
    // The moving average of all losses, corrected for its start: an average over 3 of 60 steps.
    let log = fs::read_to_string(world.path("run/main.jsonl")).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let losses: Vec<f64> = records.filter_map(|record| record["loss"].as_f64()).collect();
    let (mut average, mut weight) = (0.0, 0.0);
    for loss in &losses {
        (average, weight) = (0.667 * average + 0.333 * loss, 0.667 * weight + 0.333);
    }
    assert_eq!((losses.len(), format!("{:.4}", average / weight)), (60, loss(&shown)));
}
