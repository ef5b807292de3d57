//! Builds a mock of the CUDA driver and NCCL.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the mock to a shared library in `directory` with additional compiler flags, and returns its path.
pub fn build(directory: &Path, flags: &[&str]) -> PathBuf {
    let library = directory.join("libmock.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mock/library.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "--check-cfg=cfg(old)", "-Awarnings"])
        .args(flags)
        .arg("-o")
        .args([&library, &source])
        .status()
        .unwrap();
    assert!(status.success());
    library
}
