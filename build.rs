//! Build script of `host`: gathers the built-in corpus, and records what `--version` prints.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the package is expected in the workspace")?;
    write_corpus(root)?;
    println!("cargo::rustc-env=LLM_RS_COMMIT={}", commit(root));
    for name in ["PROFILE", "TARGET"] {
        println!("cargo::rustc-env=LLM_RS_{name}={}", env::var(name)?);
    }
    Ok(())
}

/// Returns the short hash of the checked-out commit, with `-dirty` if tracked files differ from it; `unknown` outside git.
///
/// Watches HEAD and the branch that it names, so that a new commit runs this script again.
fn commit(root: &Path) -> String {
    let Some(hash) = git(root, &["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let branch = git(root, &["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD", branch.as_deref().unwrap_or("HEAD"), "packed-refs"] {
        let path = git(root, &["rev-parse", "--git-path", name]).map(|path| root.join(path));
        // Cargo considers a missing file changed.
        if let Some(path) = path.filter(|path| path.exists()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let changes = git(root, &["status", "--porcelain", "--untracked-files=no"]);
    if changes.is_some_and(|changes| !changes.is_empty()) { hash + "-dirty" } else { hash }
}

/// Returns the trimmed output of a git command, or `None` if it fails.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).current_dir(root).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Writes `OUT_DIR/corpus.txt`: the sources and documents of this project, concatenated in the order of their paths.
///
/// The files are not watched: a stale corpus serves as well, and watching them would rebuild `host` after every edit.
fn write_corpus(root: &Path) -> Result<()> {
    let mut files = Vec::new();
    find_texts(root, &mut files)?;
    files.sort();
    let mut corpus = String::new();
    for file in &files {
        let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        corpus.push_str(&String::from_utf8_lossy(&text));
    }
    let path = Path::new(&env::var("OUT_DIR")?).join("corpus.txt");
    fs::write(&path, corpus).with_context(|| format!("cannot write {}", path.display()))
}

/// Appends the Rust, Markdown and TOML files below `directory` to `files`.
fn find_texts(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || name == "target" || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            find_texts(&path, files)?;
        } else if ["rs", "md", "toml"].iter().any(|kind| path.extension().is_some_and(|extension| extension == *kind)) {
            files.push(path);
        }
    }
    Ok(())
}
