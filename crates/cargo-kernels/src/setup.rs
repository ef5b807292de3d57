//! `cargo kernels setup`: runs the script that `scripts/setup` of the repository uses, too.

use anyhow::{Context, Result, ensure};
use cuda_builder::tools_directory;
use std::io::Write;
use std::process::Command;

/// Installs the device toolchain, and CUDA's tools into the user's directory.
pub const SCRIPT: &str = include_str!("../setup.sh");

/// Installs what is missing.
pub fn run() -> Result<()> {
    let mut script = tempfile::NamedTempFile::new().context("cannot create a temporary file")?;
    script.write_all(SCRIPT.as_bytes()).context("cannot write the setup script to a temporary file")?;
    let status = Command::new("bash").arg(script.path()).arg(tools_directory()).status().context("cannot run bash")?;
    ensure!(status.success(), "setup: not all tools could be installed; see the message above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::SCRIPT;

    #[test]
    fn the_script_installs_the_toolchain_that_the_builder_searches() {
        assert!(SCRIPT.contains(&format!("nightly={} ", cuda_builder::NIGHTLY)));
    }
}
