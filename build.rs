//! Build script of `host`. It builds the GPU kernels and the default training text.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};

fn main() -> Result<()> {
    cuda_builder::CudaBuilder::new("gpu").arch("sm_80").arch("sm_90a").build()?;
    write_corpus()
}

/// Writes `OUT_DIR/corpus.txt`, the concatenation of this project's sources and documents in the order of their paths.
///
/// Cargo does not watch these files: an outdated text serves as well, and watching would rebuild `host` after each edit.
fn write_corpus() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the package has no parent directory")?;
    let mut files = Vec::new();
    find_texts(root, &mut files)?;
    files.sort();
    let mut corpus = Vec::new();
    for file in &files {
        corpus.extend(fs::read(file).with_context(|| format!("cannot read {}", file.display()))?);
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
