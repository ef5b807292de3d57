//! Runs the program as a user does.

pub mod hub;
pub mod runs;

use std::path::Path;
use std::process::{Command, Output};

/// The address that replaces the Hugging Face Hub. Nothing listens on this port.
pub const NO_SERVER: &str = "http://127.0.0.1:1";

/// Runs the program in a directory of the build: a run without `--out` creates a directory in the current one.
pub fn llm_rs(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.current_dir(env!("CARGO_TARGET_TMPDIR")).args(args).env("HF_ENDPOINT", NO_SERVER).output().unwrap()
}

/// Returns flags with values, without those that `more` repeats, followed by `more`.
pub fn overridden<'a>(flags: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let kept = flags.chunks(2).filter(|pair| !more.contains(&pair[0]));
    kept.flatten().chain(more).copied().collect()
}

/// Returns what the program prints.
pub fn succeed(args: &[&str]) -> String {
    let output = llm_rs(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {out}{err}");
    out.into_owned()
}

/// Asserts that the program fails with one error, which contains all of `parts`. Returns all that it prints.
pub fn fail(args: &[&str], parts: &[&str]) -> String {
    let output = llm_rs(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "{args:?}: {err}");
    let errors = err.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!((errors, err.contains("found a panic")), (1, false), "{args:?}: {err}");
    let message = &err[err.find("error: ").unwrap()..];
    for part in parts {
        assert!(message.contains(part), "{args:?}: expected '{part}' in: {err}");
    }
    format!("{}{err}", String::from_utf8_lossy(&output.stdout))
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
