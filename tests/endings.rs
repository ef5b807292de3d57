//! The end of a run: it never ends silently, and it never ends without saving what it can.

use crate::common::runs::{Results, World, entries, lines, signal, wait_until};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Starts a command with pipes for its output and its errors.
fn piped(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the only line of standard error that starts with `start`.
fn line_of(output: &Output, start: &str) -> String {
    let err = text(&output.stderr);
    let found: Vec<&str> = err.lines().filter(|line| line.starts_with(start)).collect();
    assert!(found.len() == 1 && !err.contains("found a panic"), "expected one line '{start}': {err}");
    found[0].to_owned()
}

#[test]
fn a_run_whose_standard_output_is_closed_continues_in_a_file() {
    let world = World::new();
    world.succeed("reference", &[]);
    let reference = Results::read(&world.path("reference"), 40);
    for (out, read) in [("at-once", 0), ("later", 30)] {
        let mut child = piped(&mut world.command(out, &[]));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let seen: Vec<String> = lines.take(read).map(Result::unwrap).collect();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), seen.len()), (Some(0), read), "{}", text(&output.stderr));
        let warning = line_of(&output, "warning: standard output is closed (");
        assert!(warning.contains(&format!("output continues in {out}/console.log")), "{warning}");
        // All lines are in one of the two places.
        let printed = seen.join("\n") + "\n" + &fs::read_to_string(world.path(out).join("console.log")).unwrap();
        for step in 1..=40 {
            assert!(printed.contains(&format!("step {step:4}/40 | loss ")), "step {step}: {printed}");
        }
        assert!(printed.contains(&warning) && printed.contains("\nnext: "), "{printed}");
        let mut results = Results::read(&world.path(out), 40);
        results.names.retain(|name| name != "console.log");
        results.assert_equals(&reference, out);
    }
}

#[test]
fn a_run_that_prints_records_continues_without_its_reader() {
    let world = World::new();
    world.succeed("reference", &[]);
    let reference = Results::read(&world.path("reference"), 40);
    for (out, read) in [("at-once", 0), ("later", 30)] {
        let mut child = piped(&mut world.command(out, &["--json"]));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let seen: Vec<String> = lines.take(read).map(Result::unwrap).collect();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), seen.len()), (Some(0), read), "{}", text(&output.stderr));
        let warning = line_of(&output, "warning: standard output is closed (");
        assert!(warning.contains(&format!("output continues in {out}/main.jsonl")), "{warning}");
        assert!(text(&output.stderr).contains("\nnext: "), "{}", text(&output.stderr));
        let logged = fs::read_to_string(world.path(out).join("main.jsonl")).unwrap();
        assert!(seen.iter().zip(logged.lines()).all(|(seen, logged)| seen == logged), "{seen:?}: {logged}");
        Results::read(&world.path(out), 40).assert_equals(&reference, out);
    }
    // Settings and results go to standard error.
    let mut child = piped(&mut world.command("silent", &["--json"]));
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout).lines().count()), (Some(0), reference.records.len()));
    let printed = fs::read_to_string(world.path("silent/console.log")).unwrap();
    assert!(printed.starts_with("warning: standard error is closed (") && printed.contains("\nnext: "), "{printed}");
}

/// The data of a run disappears while it trains, and comes back before it resumes.
#[test]
fn a_run_that_fails_saves_its_last_step_first() {
    let world = World::new();
    let long = ["--steps", "800", "--checkpoint-every", "800", "--keep", "0"];
    world.succeed("reference", &long);
    let child = piped(&mut world.command("run", &long));
    let log = world.path("run/main.log");
    wait_until("the run has logged some steps", || lines(&log) > 50);
    let shards = ["train_0.bin", "train_1.bin", "train_2.bin"].map(|name| world.path(name));
    let contents = shards.each_ref().map(|shard| fs::read(shard).unwrap());
    for (shard, bytes) in shards.iter().zip(&contents) {
        fs::write(shard, &bytes[..1030]).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let error = line_of(&output, "error: ");
    let trained = fs::read_to_string(&log).unwrap().lines().filter(|line| line.contains("trl:")).count();
    assert!((20..800).contains(&trained), "{trained}");
    assert!(error.starts_with(&format!("error: step {} of 800: ", trained + 1)) && error.contains("train_"), "{error}");
    let continuation = format!("; the newest checkpoint is of step {trained}; continue with ");
    assert!(error.contains(&continuation) && error.ends_with(" --resume"), "{error}");
    assert!(world.path(&format!("run/DONE_{trained:08}")).exists());

    for (shard, bytes) in shards.iter().zip(&contents) {
        fs::write(shard, bytes).unwrap();
    }
    let printed = world.succeed("run", &[&long[..], &["--resume"]].concat());
    assert!(printed.contains(&format!("resumed after {trained} of 800 steps")), "{printed}");
    let mut results = Results::read(&world.path("run"), 800);
    results.names.retain(|name| !name.contains(&format!("{trained:08}")));
    results.assert_equals(&Results::read(&world.path("reference"), 800), "after an error");
}

/// The size and the time of the last change of the contents are those of before.
#[test]
fn a_shard_that_is_rewritten_in_place_ends_a_run() {
    let world = World::new();
    let long = ["--steps", "20000", "--checkpoint-every", "20000"];
    let child = piped(&mut world.command("run", &long));
    let log = world.path("run/main.log");
    wait_until("the run has logged some steps", || lines(&log) > 50);
    for shard in ["train_0.bin", "train_1.bin", "train_2.bin"].map(|name| world.path(name)) {
        let mut bytes = fs::read(&shard).unwrap();
        bytes[1024..].rotate_left(2);
        let file = fs::File::options().write(true).open(&shard).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.set_modified(modified).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let error = line_of(&output, "error: ");
    for part in ["train_", "the file changed after it was opened", "; the newest checkpoint is of step "] {
        assert!(error.contains(part), "{error}");
    }
}

/// The description of the data set records the hashes of its shards.
#[test]
fn a_run_continues_with_shards_that_are_touched_or_replaced_by_copies() {
    let world = World::new();
    fs::write(world.path("text.txt"), "To be, or not to be, that is the question. ".repeat(40)).unwrap();
    let program = env!("CARGO_BIN_EXE_llm-rs");
    let data = ["data", "text", "text.txt", "--out", "data", "--tokenizer", "bytes", "--shard-tokens", "600"];
    assert!(Command::new(program).current_dir(world.dir.path()).args(data).status().unwrap().success());
    let mut train = Command::new(program);
    train.current_dir(world.dir.path()).args([
        "train",
        "--device",
        "cpu",
        "--train",
        "data/train_*.bin",
        "--out",
        "run",
    ]);
    train.args(["--layers", "1", "--heads", "1", "--channels", "16", "--batch", "2", "--seq", "16", "--steps", "1500"]);
    let child = piped(train.args(["--sample-every", "0"]));
    let log = world.path("run/main.log");
    wait_until("the run has logged some steps", || lines(&log) > 50);
    for (i, name) in ["train_000000.bin", "train_000001.bin", "train_000002.bin"].iter().enumerate() {
        let shard = world.path("data").join(name);
        if i == 0 {
            fs::File::open(&shard).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
        } else {
            let copy = world.path("copy");
            fs::copy(&shard, &copy).unwrap();
            fs::rename(&copy, &shard).unwrap();
        }
    }
    assert!(lines(&log) < 1500, "the run ended too early");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_run_without_a_directory_says_that_nothing_is_kept() {
    let world = World::new();
    let mut command = world.command("unused", &["--steps", "1000000"]);
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let out = arguments.iter().position(|argument| argument == "--out").unwrap();
    let mut without_out = Command::new(command.get_program());
    without_out.current_dir(world.dir.path()).args(&arguments[..out]);
    let rest: Vec<_> =
        arguments[out + 2..].chunks(2).filter(|pair| pair[0] != "--checkpoint-every" && pair[0] != "--keep").collect();
    command = without_out;
    command.args(rest.concat()).args(["--out", "none", "--log-every", "1"]);
    for (flag, start) in [(None, "step    5/"), (Some("--json"), "{\"step\":4,")] {
        let mut child = piped(command.args(flag));
        let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
        printed.find(|line| line.as_ref().unwrap().starts_with(start)).unwrap().unwrap();
        drop(printed);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let error = line_of(&output, "error: ");
        assert!(
            error.contains("standard output: expected an open file or pipe, found a closed one (Broken pipe"),
            "{error}"
        );
        assert!(error.ends_with("; nothing is saved with --out none"), "{error}");
    }
}

/// Checkpoints of a run that asks for none but the last: every 0.06 s here, every 15 minutes by default.
#[test]
fn checkpoints_are_written_by_time_and_replaced_by_newer_ones() {
    let world = World::new();
    let long = ["--steps", "800", "--checkpoint-every", "800", "--keep", "0"];
    let timed = [&long[..], &["--checkpoint-minutes", "0.001"]].concat();
    world.succeed("reference", &long);
    let config = fs::read_to_string(world.path("reference/config.toml")).unwrap();
    assert!(config.contains("\ncheckpoint-minutes = 15.0\n"), "{config}");
    let of_steps = |out: &str| entries(&world.path(out)).iter().filter(|name| name.starts_with("DONE_")).count();

    let mut child = world.start("run", &timed);
    let log = world.path("run/main.log");
    let mut most = 0;
    wait_until("the run has logged many steps", || lines(&log) > 300);
    for _ in 0..20 {
        most = most.max(of_steps("run"));
        sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Two are kept. A third one exists until the older one is deleted.
    assert!((1..=3).contains(&most) && (1..=3).contains(&of_steps("run")), "{most}, {}", of_steps("run"));
    let printed = world.succeed("run", &[&timed[..], &["--resume"]].concat());
    let resumed = printed.lines().find_map(|line| line.strip_prefix("resumed after ")).unwrap();
    let step: usize = resumed.split(' ').next().unwrap().parse().unwrap();
    assert!(step > 100, "{resumed}");
    // The last checkpoint replaces all of them.
    Results::read(&world.path("run"), 800)
        .assert_equals(&Results::read(&world.path("reference"), 800), "with checkpoints by time");

    world.succeed("never", &["--checkpoint-every", "0", "--steps", "2"]);
    let config = fs::read_to_string(world.path("never/config.toml")).unwrap();
    assert!(config.contains("\ncheckpoint-minutes = 0.0\n") && of_steps("never") == 0, "{config}");
}

#[test]
fn resuming_needs_a_checkpoint_unless_it_is_automatic() {
    let world = World::new();
    let short = ["--steps", "6"];
    let with = |more: &[&'static str]| [&short[..], more].concat();
    let parts = |found| ["--resume: expected a checkpoint in ru, found ", found, "check --out", "--resume=auto"];
    world.fail("ru", &with(&["--resume"]), &parts("no such directory;"));
    assert!(!world.path("ru").exists());
    fs::create_dir(world.path("ru")).unwrap();
    world.fail("ru", &with(&["--resume=required"]), &parts("none;"));
    assert!(entries(&world.path("ru")).is_empty());
    // llm.c's flag starts a new run, as in llm.c.
    world.succeed("ru", &with(&["-y", "1"]));
    assert!(world.succeed("ru", &with(&["--resume"])).contains("resumed after 6 of 6 steps"));
    assert!(world.succeed("ru", &with(&["--resume=auto"])).contains("resumed after 6 of 6 steps"));

    // If flags have changed, the error says how to resume with the previous ones.
    let hint = "resume with the previous settings by --config ru/config.toml --resume";
    world.fail("ru", &with(&["--resume", "--lr", "0.001"]), &["--lr was 0.003, is now 0.001", hint]);
    world.fail("ru", &with(&["--resume", "--model", "d6"]), &["2 layers", "6 layers", hint]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.current_dir(world.dir.path()).args(["train", "--config", "ru/config.toml", "--resume"]);
    let output = command.output().unwrap();
    assert!(text(&output.stdout).contains("resumed after 6 of 6 steps"), "{}", text(&output.stderr));
    // From another directory, the error says where the paths of the settings begin.
    let [run, elsewhere] = ["ru", "elsewhere"].map(|name| world.path(name));
    fs::create_dir(&elsewhere).unwrap();
    let (run, config) = (run.to_str().unwrap(), run.join("config.toml"));
    for flags in [&["--resume"][..], &["--resume", "--out", run]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(&elsewhere).args(["train", "--config"]).arg(&config).args(flags);
        let error = line_of(&command.output().unwrap(), "error: ");
        let origin = world.dir.path().canonicalize().unwrap();
        let hint = format!("; the paths in the file of --config are relative to {}: run the command", origin.display());
        assert!(error.contains(&hint), "{error}");
    }
}

/// `nohup` and daemons start processes with SIGHUP ignored.
#[test]
fn an_ignored_hangup_does_not_stop_a_run() {
    let world = World::new();
    let train = world.command("run", &["--steps", "1000", "--checkpoint-every", "1000"]);
    let mut shell = Command::new("sh");
    shell.current_dir(world.dir.path()).args(["-c", "trap '' HUP\nexec \"$@\"", "sh"]);
    let child = piped(shell.arg(train.get_program()).args(train.get_args()));
    let log = world.path("run/main.log");
    wait_until("the run has logged some steps", || lines(&log) > 50);
    signal(&child, "HUP");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(world.path("run/DONE_00001000").exists());
}
