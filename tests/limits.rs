//! Limits of a process and inputs without an end: each is an error, not an abort, and does not block.

use crate::common::runs::{World, lines, wait_until};
use crate::common::{fail, succeed, text};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const TINY: &[&str] =
    &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16", "--steps", "2"];

/// Runs the program under limits of a shell, and ends it after a minute.
fn limited(limits: &str, args: &[&str]) -> Output {
    let script = format!("{limits}\nexec timeout 60 \"$@\"");
    Command::new("sh").args(["-c", &script, "sh", env!("CARGO_BIN_EXE_llm-rs")]).args(args).output().unwrap()
}

/// Asserts that the program ends with exit code 1 and one error line that contains all of `parts`.
fn fails(limits: &str, args: &[&str], parts: &[&str]) {
    let start = Instant::now();
    let output = limited(limits, args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {err}");
    assert!(start.elapsed() < Duration::from_secs(30) && !err.contains("found a panic"), "{args:?}: {err}");
    let errors: Vec<&str> = err.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && parts.iter().all(|part| errors[0].contains(part)), "{args:?}: {parts:?} in {err}");
}

/// The memory of a mistake: without a bound, a reader of a device takes all that there is.
const MEMORY: &str = "ulimit -v 4000000";

#[test]
fn pipes_and_devices_are_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let out = dir.path().join("out");
    let (pipe, out) = (text(&pipe), text(&out));
    let train = |more: &[&'static str]| [&["train", "--device", "cpu"], TINY, more].concat();
    for (path, found) in [(pipe, "found a pipe"), ("/dev/zero", "found a device")] {
        let parts = &[path, "expected a regular file", found];
        fails(MEMORY, &["train", "--config", path], parts);
        fails(MEMORY, &["train", "--device", "cpu", "--model", path], parts);
        fails(MEMORY, &[&train(&[])[..], &["--train", path]].concat(), parts);
        fails(MEMORY, &[&train(&[])[..], &["--tokenizer", path]].concat(), parts);
        fails(MEMORY, &[&train(&[])[..], &["--hellaswag", path]].concat(), parts);
        fails(MEMORY, &["eval", "--model", path, "--val", path], parts);
        fails(MEMORY, &["sample", "--model", path], parts);
        fails(MEMORY, &["verify", path, path], parts);
        fails(MEMORY, &["data", "check", path], &["expected valid token files, found 1 problem"]);
        fails(MEMORY, &["data", "show", path], parts);
        fails(MEMORY, &["data", "hellaswag", "--from", path, "--out", out], parts);
        fails(MEMORY, &["data", "mmlu", "--from", path, "--out", out], parts);
        fails(MEMORY, &["data", "tinyshakespeare", "--from", path, "--out", out], parts);
    }
    // Text may come from a pipe, which is read in pieces.
    let script = "\"$1\" data text --out \"$3\" \"$2\" & yes 'a line of text' | head -n 20000 > \"$2\"; wait $!";
    let output =
        Command::new("sh").args(["-c", script, "sh", env!("CARGO_BIN_EXE_llm-rs"), pipe, out]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn huge_files_of_a_run_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let train = [&["train", "--device", "cpu", "--out", text(&out), "--checkpoint-every", "1"], TINY].concat();
    succeed(&train);
    let model = fs::read(out.join("model_00000002.bin")).unwrap();
    let huge = |name: &str, bytes| File::options().append(true).open(out.join(name)).unwrap().set_len(bytes).unwrap();
    huge("run_00000002.json", 8 << 30);
    // More than the memory of the process.
    huge("main.log", 2 << 30);
    let output = limited("ulimit -v 1500000", &[&train[..], &["--resume"]].concat());
    let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{err}");
    assert!(printed.contains("checkpoint of step 2 is damaged and ignored"), "{printed}");
    assert!(printed.contains("expected at most 67108864 bytes, found 8589934592"), "{printed}");
    assert!(printed.contains("resumed after 1 of 2 steps"), "{printed}");
    assert!(fs::read(out.join("model_00000002.bin")).unwrap() == model);
    let log = fs::read_to_string(out.join("main.log")).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("trl:")).count(), 2, "{log}");
    huge("config.toml", 8 << 30);
    fail(&["train", "--config", text(&out.join("config.toml"))], &["expected at most 1048576 bytes"]);
}

#[test]
fn limits_of_memory_threads_and_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let d12 =
        ["train", "--device", "cpu", "--model", "d12", "--batch", "1", "--seq", "64", "--steps", "2", "--out", "none"];
    fails("ulimit -v 1000000", &d12, &["does not fit"]);
    // Every limit ends in success or in an error. The program itself takes 100 MB, and a thread needs addresses, too.
    for limit in (200..700).step_by(100) {
        let limits = format!("ulimit -v {}", limit * 1000);
        let output = limited(&limits, &[&["train", "--device", "cpu", "--out", "none"], TINY].concat());
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)) && !err.contains("found a panic"), "{limits}: {err}");
    }
    let train = [&["train", "--device", "cpu", "--out", text(&out)], TINY].concat();
    let files = format!("ulimit -f 20; cd {}", Path::new("/").display());
    fails(&files, &train, &["model_00000002.bin: File too large", "; there is no checkpoint yet"]);
}

/// A limit that is reached during the run. The standard library aborts if a new thread gets no memory.
#[test]
fn checkpoints_need_no_further_memory() {
    let world = World::new();
    for first in [false, true] {
        let out = if first { "before" } else { "after" };
        let every = if first { "800" } else { "100" };
        let settings = ["--steps", "800", "--checkpoint-every", every, "--val-every", "0", "--keep", "2"];
        let mut child = world.command(out, &settings).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = world.path(out).join("main.log");
        wait_until("the run has logged some steps", || lines(&log) > 100);
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
        let kilobytes: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
        let limit = format!("--as={}", kilobytes << 10);
        let limited = Command::new("prlimit").args(["--pid", &child.id().to_string(), &limit]).status().unwrap();
        assert!(limited.success() && child.try_wait().unwrap().is_none());
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        // There may be too little memory for the plots.
        assert!(matches!(output.status.code(), Some(0 | 1)) && !err.contains("found a panic"), "{err}");
        assert!(world.path(out).join("DONE_00000800").exists(), "{err}");
    }
}

/// Each number of threads that a user may start ends in success or in one error. The limit does not apply to root.
#[test]
fn each_limit_of_threads_is_an_error_or_enough() {
    let id = Command::new("id").arg("-u").output().unwrap();
    if id.stdout != b"0\n" {
        eprintln!("skipped: expected root, which can run the program as a user without other processes");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = dir.path().join("llm-rs");
    fs::copy(env!("CARGO_BIN_EXE_llm-rs"), &program).unwrap();
    fs::write(dir.path().join("text.txt"), "some text\n".repeat(1000)).unwrap();
    let commands = [
        "train --device cpu --layers 1 --heads 1 --channels 16 --batch 2 --seq 16 --steps 2 --val-every 1 --sample-every 1 --out run",
        "data text text.txt --overwrite --out data",
        "data check data/train_000000.bin",
        "simulate --seeds 1",
    ];
    let user = ["--reuid", "54321", "--regid", "54321", "--clear-groups"];
    for arguments in commands {
        let mut succeeded = false;
        for limit in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 200] {
            let _ = fs::remove_dir_all(dir.path().join("run"));
            let script = format!("ulimit -u {limit}\nexec timeout 60 setpriv {} \"$0\" {arguments}", user.join(" "));
            let output = Command::new("bash").current_dir(&dir).args(["-c", &script, text(&program)]).output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            let errors = err.lines().filter(|line| line.starts_with("error: ")).count();
            let ended = (output.status.code(), errors);
            assert!(matches!(ended, (Some(0), 0) | (Some(1), 1)), "{arguments}, {limit}: {ended:?} {err}");
            assert!(!err.contains("found a panic"), "{arguments}, {limit}: {err}");
            succeeded = errors == 0;
        }
        assert!(succeeded, "{arguments}");
    }
}
