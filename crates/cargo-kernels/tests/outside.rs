//! Creates a crate outside of this workspace, runs its tests in the emulator, and inspects its kernels. No network is used: the crate gets
//! the lock file of this workspace. It shares the target directory and the profile of the workspace, so that dependencies are not compiled
//! again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn kernels(directory: &Path, arguments: &[&str]) -> Output {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    Command::new(env!("CARGO_BIN_EXE_cargo-kernels"))
        .arg("kernels")
        .args(arguments)
        .current_dir(directory)
        .env("CARGO_NET_OFFLINE", "true")
        .env("CARGO_TARGET_DIR", target)
        .env("CUDA_BUILDER_TOOLS", workspace().join(".tools"))
        .output()
        .unwrap()
}

fn succeeds(directory: &Path, arguments: &[&str]) -> String {
    let output = kernels(directory, arguments);
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{arguments:?}:\n{out}\n{err}");
    out
}

/// Returns the files below `directory`, relative to it.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn a_new_crate_outside_of_the_workspace_is_tested_and_inspected() {
    let scratch = tempfile::tempdir().unwrap();
    let checkout = workspace().canonicalize().unwrap();
    succeeds(scratch.path(), &["new", "first-crate", "--path", checkout.to_str().unwrap()]);
    let directory = scratch.path().join("first-crate");

    let manifest = fs::read_to_string(checkout.join("Cargo.toml")).unwrap();
    let profile = manifest.split_once("[profile.release]").unwrap().1.split("[profile.dev]").next().unwrap();
    let created = fs::read_to_string(directory.join("Cargo.toml")).unwrap();
    fs::write(directory.join("Cargo.toml"), format!("{created}\n[profile.release]{profile}")).unwrap();
    fs::copy(checkout.join("Cargo.lock"), directory.join("Cargo.lock")).unwrap();
    let before = files(&directory);

    let text = succeeds(&directory, &["test", "--release", "--", "--nocapture"]);
    assert!(text.contains("3 passed"), "{text}");
    let report = "kernel reverse_without_a_barrier, block (0, 0, 0), thread ";
    assert!(text.contains(report) && text.contains(": data race: "), "{text}");

    let table = succeeds(&directory, &["inspect"]);
    let row = table.lines().find(|line| line.starts_with("saxpy ")).expect("a row for the kernel");
    assert!(row.contains(" 256 ") && row.contains("kernels/src/lib.rs:"), "{table}");
    let ptx = succeeds(&directory, &["inspect", "saxpy", "--ptx"]);
    assert!(ptx.contains("y.set(i, a * x.at(i) + y.at(i));") && ptx.contains("st.global.b32"), "{ptx}");

    assert_eq!(files(&directory), before, "the build wrote into the source tree");
    let again = kernels(scratch.path(), &["new", "first-crate"]);
    let error = String::from_utf8(again.stderr).unwrap();
    assert!(error.contains("expected a directory that does not exist, found one"), "{error}");
}
