//! `cargo kernels doctor`: lists the tools, and how to install the missing ones.

use crate::project::find_tool;
use anyhow::{Context, Result};
use cuda_builder::Toolchain;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

/// One line of the list.
struct Finding {
    name: &'static str,
    /// The finding, or the reason for its absence and how to fix it.
    state: Result<String, String>,
    /// Whether building and testing need it.
    required: bool,
}

/// Prints the list. Fails if a tool is missing that building and testing need.
pub fn run() -> Result<ExitCode> {
    let current = std::env::current_dir().context("cannot read the working directory")?;
    let mut findings = vec![rustc(), toolchain()];
    for (name, purpose) in
        [("ptxas", "assembles cubins"), ("cuobjdump", "shows machine code"), ("nvdisasm", "shows machine code")]
    {
        let state = find_tool(name).map(|path| path.display().to_string());
        let state = state.ok_or_else(|| format!("not found; it {purpose}; run cargo kernels setup"));
        findings.push(Finding { name, state, required: false });
    }
    findings.push(gpu());
    findings.extend(patch(&current));
    for Finding { name, state, required } in &findings {
        let mark = match state {
            Ok(_) => "found",
            Err(_) if *required => "MISSING",
            Err(_) => "missing",
        };
        let (Ok(text) | Err(text)) = state;
        println!("{mark:8} {name:17} {text}");
    }
    let missing = findings.iter().filter(|finding| finding.required && finding.state.is_err()).count();
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn rustc() -> Finding {
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("--version").output();
    let state = match output {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("cannot start rustc: {error}; install https://rustup.rs")),
    };
    Finding { name: "rustc", state, required: true }
}

fn toolchain() -> Finding {
    let state = Toolchain::find().map(|found| found.to_string()).map_err(|none| none.to_string());
    Finding { name: "device toolchain", state, required: true }
}

fn gpu() -> Finding {
    let info = cuda_driver::device_count().and_then(|_| cuda_driver::device_info(0));
    let state = info.map(|info| {
        let (major, minor) = info.compute_capability;
        format!("{}, compute capability {major}.{minor}", info.name)
    });
    Finding {
        name: "GPU",
        state: state.map_err(|error| format!("{error}; tests run in the emulator")),
        required: false,
    }
}

/// Checks that the crate's lock file has the replacement of find_cuda_helper. `None` outside of a crate that uses cuda_driver.
fn patch(current: &Path) -> Option<Finding> {
    let lock = current.ancestors().find_map(|directory| fs::read_to_string(directory.join("Cargo.lock")).ok())?;
    let state = patch_state(&lock)?;
    Some(Finding { name: "find_cuda_helper", state, required: true })
}

fn patch_state(lock: &str) -> Option<Result<String, String>> {
    let package = lock.split("[[package]]").find(|package| package.contains("name = \"find_cuda_helper\""))?;
    Some(if package.contains("source = \"registry+") {
        Err("expected the replacement of llm.rs, found that of the registry, whose build script needs a CUDA toolkit; add the \
             [patch.crates-io] section of `cargo kernels new` to the workspace's Cargo.toml and run cargo update -p find_cuda_helper"
            .to_owned())
    } else {
        Ok("replaced by that of llm.rs".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_shows_whether_the_helper_is_replaced() {
        let lock = |source: &str| {
            format!(
                "[[package]]\nname = \"cust\"\nsource = \"registry+x\"\n\n[[package]]\nname = \"find_cuda_helper\"\n{source}"
            )
        };
        assert_eq!(patch_state("[[package]]\nname = \"cust\"\n"), None);
        assert!(patch_state(&lock("version = \"0.2.1\"\n")).unwrap().is_ok());
        assert!(patch_state(&lock("source = \"registry+x\"\n")).unwrap().unwrap_err().contains("cargo update"));
    }
}
