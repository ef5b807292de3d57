//! Tests of the output of a run, its default schedule, the limits of its settings, and divergence.

use crate::common::runs::{World, entries};
use crate::common::{llm_rs, succeed, text};
use std::fs;
use std::process::{Command, Output};

/// Returns the numbers of the steps that were printed.
fn printed_steps(printed: &str) -> Vec<usize> {
    let number =
        |line: &str| line.strip_prefix("step ")?.split_once(" | loss ")?.0.trim().split('/').next()?.parse().ok();
    printed.lines().filter_map(number).collect()
}

#[test]
fn a_long_run_without_a_terminal_prints_about_a_hundred_steps() {
    let world = World::new();
    let long = ["--steps", "250", "--checkpoint-every", "250", "--val-every", "100"];
    let printed = world.succeed("run", &long);
    // Every third step, the first, the last, and those before a validation.
    let expected: Vec<usize> = (1..=250).filter(|n| [1, 100, 200, 250].contains(n) || n % 3 == 0).collect();
    assert_eq!(printed_steps(&printed), expected);
    let last = printed.find("step  100/250 | loss").unwrap();
    assert!(printed.find("step  100/250 | val loss").unwrap() > last, "{printed}");
    let log = fs::read_to_string(world.path("run/main.log")).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("trl:")).count(), 250);
    let printed = world.succeed("all", &[&long[..], &["--log-every", "1"]].concat());
    assert_eq!(printed_steps(&printed), (1..=250).collect::<Vec<_>>());
    let printed = world.succeed("few", &[&long[..], &["--log-every", "1000"]].concat());
    assert_eq!(printed_steps(&printed), [1, 100, 200, 250]);
    // A short run prints every step.
    assert_eq!(printed_steps(&world.succeed("short", &[])), (1..=40).collect::<Vec<_>>());
}

/// Returns the row of the learning rate that `train --dry-run` prints for a GPT-2 of one layer.
fn schedule(flags: &[&str]) -> String {
    let shape = ["train", "--dry-run", "--device", "cpu", "--layers", "1", "--heads", "2", "--channels", "16"];
    let printed = succeed(&[&shape[..], flags].concat());
    let row = printed.lines().find_map(|line| line.strip_prefix("learning rate ")).unwrap();
    row.trim().to_owned()
}

#[test]
fn the_learning_rate_decays_unless_flags_are_those_of_llm_c() {
    let world = World::new();
    let train = world.path("train_0.bin");
    let data = ["--train", text(&train), "--batch", "2", "--seq", "16"];
    let long = |flags: &[&'static str]| schedule(&[&data[..], &["--steps", "50"], flags].concat());
    assert_eq!(long(&["--lr", "1e-3"]), "cosine, peak 1.00e-3, warmup 0 steps, final 1.00e-4");
    assert_eq!(long(&["--schedule", "linear"]), "linear, peak 3.00e-4, warmup 0 steps, final 3.00e-5");
    assert_eq!(long(&["--schedule", "wsd"]), "wsd, peak 3.00e-4, warmup 0 steps, final 3.00e-5");
    assert_eq!(long(&["--schedule", "constant"]), "constant, 3.00e-4");
    let constant = "final 1.00e-3, so that it does not decay: see --final-fraction";
    assert!(long(&["--lr", "1e-3", "--final-fraction", "1"]).ends_with(constant));
    let short = schedule(&["-i", text(&train), "-b", "2", "-t", "16", "-x", "50", "-l", "1e-3", "-k", "cosine"]);
    assert_eq!(short, format!("cosine, peak 1.00e-3, warmup 0 steps, {constant}"));
    assert!(
        schedule(&["-i", text(&train), "-x", "50", "-q", "0.3", "-l", "1e-3", "-b", "2", "-t", "16"])
            .ends_with("final 3.00e-4")
    );
    assert!(schedule(&[]).ends_with("warmup 100 steps, final 4.00e-4"));
}

#[test]
fn a_resumed_run_keeps_its_final_learning_rate() {
    let world = World::new();
    let mut command = world.command("run", &["--final-fraction", "0.37", "--steps", "6"]);
    assert!(command.output().unwrap().status.success());
    // The default was 1 in earlier versions.
    let settings = "train --device cpu --out run --train train_*.bin --val val_*.bin --model tiny.bin --batch 2 --seq 16 --total-batch 64 \
                    --steps 6 --lr 0.003 --warmup 5 --weight-decay 0.1 --val-every 7 --resume --sample-every 0";
    let output = || {
        Command::new(env!("CARGO_BIN_EXE_llm-rs"))
            .current_dir(world.dir.path())
            .args(settings.split_whitespace())
            .output()
    };
    let (printed, err) = streams(&output().unwrap());
    assert!(printed.contains("resumed after 6 of 6 steps") && printed.contains("final 1.11e-3"), "{printed}{err}");
}

fn streams(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_run_that_diverges_keeps_its_checkpoint_and_fails() {
    let world = World::new();
    let ended = |out: &str, flags: &[&str]| {
        let output = world.output(out, flags);
        (output.status.code(), streams(&output))
    };
    let (code, (printed, err)) = ended("high", &["--lr", "10", "--warmup", "0"]);
    assert_eq!(code, Some(5), "{printed}{err}");
    let error = err.lines().find(|line| line.starts_with("error: ")).unwrap();
    for part in
        ["final training loss: expected at most ", "found ", "the median of the last 10 steps", "diverged", "--lr"]
    {
        assert!(error.contains(part), "{part}: {err}");
    }
    assert!(
        printed.contains("\nfinal train loss ") && entries(&world.path("high")).contains(&"DONE_00000040".to_owned())
    );
    // The result does not depend on where a run was interrupted.
    let (code, (printed, err)) = ended("high", &["--lr", "10", "--warmup", "0", "--resume"]);
    assert_eq!((code, err.matches("diverged").count()), (Some(5), 1), "{printed}{err}");
    // Short runs and runs that learn nothing are no errors.
    for (out, flags) in [
        ("one", &["--steps", "1", "--lr", "1000", "--warmup", "0", "--val-every", "0"][..]),
        ("two", &["--steps", "2", "--warmup", "0"]),
        ("still", &["--lr", "0", "--warmup", "0"]),
        ("noisy", &["--lr", "0.05", "--warmup", "0"]),
    ] {
        let (code, (printed, err)) = ended(out, flags);
        assert_eq!(code, Some(0), "{out}: {printed}{err}");
    }
}

#[test]
fn huge_settings_are_no_panics() {
    let world = World::new();
    for minutes in ["1e18", "3.4e38"] {
        world.succeed(&format!("minutes-{minutes}"), &["--steps", "2", "--checkpoint-minutes", minutes]);
    }
    for variable in ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"] {
        for arguments in [&["train", "--dry-run", "--device", "cpu"][..], &["data", "show", "none.bin"]] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
            let output = command.args(arguments).env(variable, "50000").output().unwrap();
            let (_, err) = streams(&output);
            assert_eq!(output.status.code(), Some(1), "{err}");
            let expected = format!("error: {variable}: expected at most ");
            assert!(err.starts_with(&expected) && err.contains(" threads, found 50000; "), "{err}");
        }
    }
}

/// Completes the last word of a command line as bash does.
fn completions(script: &str, words: &str) -> Vec<String> {
    let bash = "source \"$0\"; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                \"$(complete -p llm-rs | sed 's/.*-F \\([^ ]*\\).*/\\1/')\" llm-rs \"${COMP_WORDS[-1]}\" \"${COMP_WORDS[-2]}\"; \
                printf '%s\\n' \"${COMPREPLY[@]}\"";
    let output = Command::new("bash").args(["-c", bash, script]).args(words.split(' ')).output().unwrap();
    let (printed, err) = streams(&output);
    assert!(output.status.success(), "{printed}{err}");
    printed.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_their_flags() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("llm-rs");
    fs::write(&script, llm_rs(&["completions", "bash"]).stdout).unwrap();
    for (words, expected) in [
        ("llm-rs ", &["train", "data", "serve"][..]),
        ("llm-rs tr", &["train"]),
        ("llm-rs train --", &["--train", "--log-every", "--resume"]),
        ("llm-rs train --lo", &["--log-every"]),
        ("llm-rs train --schedule ", &["cosine", "wsd"]),
        ("llm-rs data ", &["text", "hellaswag"]),
        ("llm-rs data text --", &["--tokenizer"]),
        ("llm-rs bench step --", &["--json"]),
    ] {
        let found = completions(text(&script), words);
        assert!(expected.iter().all(|word| found.iter().any(|found| found == word)), "{words}: {found:?}");
    }
    assert_eq!(completions(text(&script), "llm-rs train --fp8-ac"), ["--fp8-accumulation"]);
}
