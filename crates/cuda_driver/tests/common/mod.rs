//! Builds mock drivers.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles `source` to a shared library in `dir` and returns its path.
pub fn build(dir: &Path, source: &str) -> PathBuf {
    let (file, library) = (dir.join("driver.rs"), dir.join("libmock.so"));
    std::fs::write(&file, source).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "-o"])
        .args([&library, &file])
        .status()
        .unwrap();
    assert!(status.success());
    library
}
