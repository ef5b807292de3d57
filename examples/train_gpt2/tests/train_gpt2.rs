//! Runs the program as a user does, against references that PyTorch computed (`scripts/pytorch_reference.py`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SOURCE: &str = include_str!("../train_gpt2.rs");

fn run(arguments: &[&str], directory: &Path) -> (Output, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_train_gpt2")).args(arguments).current_dir(directory).output().unwrap();
    let printed = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    (output, printed)
}

fn reference(name: &str) -> String {
    format!("{}/../../tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns an empty directory that only this test uses.
fn directory(test: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    directory
}

#[test]
fn the_references_of_pytorch_are_reproduced() {
    for name in ["tiny", "wide"] {
        let [model, state, losses] = ["", "_debug_state", "_losses"].map(|part| format!("{name}{part}"));
        let [model, state, losses] = [model + ".bin", state + ".bin", losses + ".txt"].map(|name| reference(&name));
        let (output, printed) = run(&["test", &model, &state, &losses], Path::new("."));
        assert!(output.status.success() && printed.contains("overall okay: 1"), "{name}: {printed}");
        assert_eq!(printed.matches("OK     step ").count(), 10, "{printed}");
    }
}

#[test]
fn a_changed_weight_and_a_file_that_is_cut_off_fail() {
    let directory = directory("changed");
    let mut model = fs::read(reference("tiny.bin")).unwrap();
    let state = reference("tiny_debug_state.bin");
    // A weight of the second layer's qkvw, 0.02 larger.
    let at = 1024 + 4 * (128 * 48 + 20 * 48 + 4 * 48 + 3 * 48 * 48 + 1000);
    let weight = f32::from_le_bytes(model[at..at + 4].try_into().unwrap()) + 0.02;
    model[at..at + 4].copy_from_slice(&weight.to_le_bytes());
    fs::write(directory.join("changed.bin"), &model).unwrap();
    let (output, printed) = run(&["test", "changed.bin", &state], &directory);
    assert!(output.status.code() == Some(1) && printed.contains("NOT OK logits"), "{printed}");
    fs::write(directory.join("cut.bin"), &model[..model.len() - 3]).unwrap();
    let (output, printed) = run(&["test", "cut.bin", &state], &directory);
    assert!(output.status.code() == Some(1) && printed.starts_with("error: cut.bin: expected "), "{printed}");
}

#[test]
fn what_is_missing_is_named() {
    let directory = directory("missing");
    let (output, printed) = run(&["model.bin", "train.bin", "val.bin"], &directory);
    assert!(output.status.code() == Some(1) && printed.starts_with("error: model.bin: "), "{printed}");
    let (output, printed) = run(&[], &directory);
    assert!(
        output.status.code() == Some(1) && printed.contains("the text: expected more than 512 tokens"),
        "{printed}"
    );
}

/// The file can be read in an evening, and compiled by `rustc` alone.
#[test]
fn the_program_is_one_short_file_of_safe_code() {
    assert!(SOURCE.lines().count() <= 1000, "{} lines", SOURCE.lines().count());
    assert!(!SOURCE.contains("unsafe"));
    assert!(SOURCE.lines().filter(|line| line.starts_with("use ")).all(|line| line.starts_with("use std::")));
}
