//! Single errors of the file system, at each call of a run that resumes, of a data set that is replaced, and of an export. Nothing that
//! was complete may be lost.

use crate::common::runs::{Results, World, entries};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Compiles the library that makes a call fail.
fn failing_calls(directory: &Path) -> PathBuf {
    let library = directory.join("failing_calls.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/common/failing_calls.c");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args([source, "-ldl"]).status();
    assert!(built.unwrap().success());
    library
}

/// Runs a command many times. Run n gets an I/O error at its n-th call for a path that contains `failing-n`. Ends when a run makes fewer
/// than n such calls. `command` creates the command for the name `failing-n`.
fn at_each_call(library: &Path, command: impl Fn(&str) -> Command + Sync, check: impl Fn(&str, &Output, &str) + Sync) {
    let next = AtomicUsize::new(1);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let name = format!("failing-{number}");
            let mut command = command(&name);
            command.env("LD_PRELOAD", library).env("FAIL_PATH", &name).env("FAIL_AT", number.to_string());
            let output = command.output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr).into_owned();
            let Some(call) = err.lines().find(|line| line.starts_with("failing call: ")) else {
                assert!(number > 1, "expected a call that fails, found none: {err}");
                return;
            };
            check(&name, &output, call);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for name in entries(from) {
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

#[test]
fn a_run_loses_no_checkpoint_by_an_error_of_the_file_system() {
    let world = World::new();
    let library = failing_calls(world.dir.path());
    world.succeed("reference", &["--keep", "1"]);
    let reference = Results::read(&world.path("reference"), 40);
    // The run was killed after step 36.
    world.succeed("base", &["--keep", "0", "--checkpoint-every", "6"]);
    for name in entries(&world.path("base")).into_iter().filter(|name| name.contains("000000") && !name.contains("36"))
    {
        fs::remove_file(world.path("base").join(name)).unwrap();
    }
    let flags = ["--keep", "1", "--resume=auto"];
    let command = |name: &str| {
        copy(&world.path("base"), &world.path(name));
        world.command(name, &flags)
    };
    at_each_call(&library, command, |name, output, call| {
        let done = entries(&world.path(name)).into_iter().rfind(|name| name.starts_with("DONE_"));
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(done.is_some_and(|done| output.status.code() != Some(0) || done == "DONE_00000040"), "{call}: {err}");
        world.succeed(name, &flags);
        Results::read(&world.path(name), 40).assert_equals(&reference, call);
        fs::remove_dir_all(world.path(name)).unwrap();
    });
}

/// Returns the names and contents of the files in a directory.
fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    entries(directory)
        .into_iter()
        .map(|name| (name.clone(), fs::read(directory.join(name)).unwrap_or_default()))
        .collect()
}

#[test]
fn a_data_set_is_replaced_as_a_whole_in_spite_of_an_error_of_the_file_system() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let library = failing_calls(directory.path());
    fs::write(path("old.txt"), "old text ".repeat(300)).unwrap();
    fs::write(path("new.txt"), "newer text ".repeat(100)).unwrap();
    let convert = |text: &str, out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(directory.path()).args(["data", "text", text, "--tokenizer", "bytes", "--overwrite"]);
        command.args(["--val-fraction", "0", "--shard-tokens", "500", "--out", out]);
        command
    };
    for (text, out) in [("old.txt", "old"), ("new.txt", "new")] {
        assert!(convert(text, out).status().unwrap().success());
    }
    let (old, new) = (contents(&path("old")), contents(&path("new")));
    assert!(old.len() > new.len());
    let command = |name: &str| {
        copy(&path("old"), &path(name));
        convert("new.txt", name)
    };
    at_each_call(&library, command, |name, output, call| {
        let mut found = contents(&path(name));
        let is_marked = path(name).join(".unfinished-dataset/COMPLETE").exists();
        if output.status.success() {
            assert!(found == new, "{call}: {:?}", entries(&path(name)));
        } else {
            // The next command discards an incomplete data set.
            found.retain(|(name, _)| name != ".unfinished-dataset");
            assert!(
                is_marked || [&old, &new].iter().any(|whole| found == **whole),
                "{call}: {:?}",
                entries(&path(name))
            );
            assert!(convert("new.txt", name).status().unwrap().success());
            assert!(contents(&path(name)) == new, "{call}");
        }
        fs::remove_dir_all(path(name)).unwrap();
    });
}

#[test]
fn an_export_replaces_no_directory_because_of_an_error_of_the_file_system() {
    let world = World::new();
    let library = failing_calls(world.dir.path());
    let command = |name: &str| {
        fs::create_dir(world.path(name)).unwrap();
        fs::write(world.path(name).join("thesis.tex"), "").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(world.dir.path()).args(["export", "--format", "hf", "tiny.bin", name]);
        command
    };
    at_each_call(&library, command, |name, output, call| {
        assert_eq!(output.status.code(), Some(1), "{call}");
        assert_eq!(entries(&world.path(name)), ["thesis.tex"], "{call}");
    });
}
