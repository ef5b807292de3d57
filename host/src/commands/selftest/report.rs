//! `selftest --report`: one file about the GPUs of this machine, to attach to an issue.

use crate::commands::json;
use crate::{terminal, version};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::env;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Lines of standard error that the report holds.
const ERROR_LINES: usize = 40;

/// The commands of a report. Each runs in a process of its own, so that one that crashes does not end the others.
const COMMANDS: [&[&str]; 6] = [
    &["doctor", "--json"],
    &["selftest", "--json", "--quiet"],
    &["selftest", "--small", "--precision", "fp32", "--json", "--quiet"],
    &["selftest", "--determinism", "--steps", "20", "--quiet"],
    &["bench", "step", "--model", "d12", "--batch", "4", "--grad-accum", "4", "--quiet"],
    &["bench", "generate", "--model", "d12", "--batch", "1,8", "--quiet"],
];

/// Runs the commands, and writes what they print and how they end to a new file.
pub fn run(path: &Path) -> Result<()> {
    let gpus = cuda_driver::device_count().context("--report: expected a GPU, found none that this program can use")?;
    ensure!(gpus > 0, "--report: expected a GPU, found none; see llm-rs doctor");
    write(path, &env::current_exe().context("cannot find the program file")?, &COMMANDS)
}

fn write(path: &Path, program: &Path, commands: &[&[&str]]) -> Result<()> {
    let shown = path.display();
    ensure!(!path.exists(), "--report {shown}: expected a new file, found an existing one; choose another name");
    let (mut parts, mut failed) = (Vec::new(), Vec::new());
    for &arguments in commands {
        let command = arguments.join(" ");
        terminal::note(&format!("running {command}"))?;
        let start = Instant::now();
        let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot start {}", program.display()))?;
        let [printed, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        let errors: Vec<_> = errors.lines().collect();
        parts.push(json!({
            "command": command,
            "result": output.status.to_string(),
            "seconds": start.elapsed().as_secs(),
            "output": serde_json::from_str::<Value>(&printed).unwrap_or_else(|_| printed.lines().collect()),
            "errors": errors[errors.len().saturating_sub(ERROR_LINES)..],
        }));
        if !output.status.success() {
            failed.push(command);
        }
    }
    json::write(path, &json!({ "program": version::long().lines().collect::<Vec<_>>(), "parts": parts }))?;
    ensure!(
        failed.is_empty(),
        "{} of {} commands failed: {}; {shown} has their messages, attach it to an issue",
        failed.len(),
        commands.len(),
        failed.join("; ")
    );
    terminal::line(&format!("all {} commands succeeded; {shown} has their results", commands.len()))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_report_holds_what_commands_print_and_how_they_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        let shell = Path::new("/bin/sh");
        let succeeds: &[&str] = &["-c", "echo '{ \"passed\": 3 }'"];
        let crashes: &[&str] = &["-c", "echo one; echo two; seq 100 >&2; kill -9 $$"];
        let error = write(&path, shell, &[succeeds, crashes]).unwrap_err().to_string();
        assert!(error.starts_with("1 of 2 commands failed: -c echo one;"), "{error}");
        let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let parts = &report["parts"];
        assert_eq!(parts[0]["output"]["passed"], 3);
        assert_eq!(parts[0]["result"], "exit status: 0");
        assert_eq!(parts[1]["output"], json!(["one", "two"]));
        assert!(parts[1]["result"].as_str().unwrap().starts_with("signal: 9"), "{}", parts[1]);
        assert_eq!(parts[1]["errors"].as_array().unwrap().len(), ERROR_LINES);
        assert_eq!(parts[1]["errors"][ERROR_LINES - 1], "100");

        let error = write(&path, shell, &[succeeds]).unwrap_err().to_string();
        assert!(error.contains("expected a new file, found an existing one"), "{error}");
        write(&directory.path().join("other.json"), shell, &[succeeds]).unwrap();
    }
}
