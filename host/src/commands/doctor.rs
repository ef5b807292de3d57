//! `doctor`: what this machine has for training on a GPU and for building the kernels, what is missing, and the command
//! that mends it.

use crate::kernels::{MODULES, MODULES_MISSING};
use anyhow::Result;
use cuda_builder::{Toolchain, find_cuda_tool};
use cuda_driver::library::SearchPath;
use std::io::{self, Write};
use std::path::Path;

/// Shows what this machine has for GPU training, what is missing, and the command that mends it
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Doctor {}

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub name: String,
    pub state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// What it is, and where.
    Found(String),
    /// Without it there is no training on a GPU: what was found instead, and what to do.
    Missing { why: String, mend: String },
    /// Training works without it.
    Optional { why: String, mend: String },
}

pub fn run(_: &Doctor) -> Result<()> {
    let findings = examine();
    match print(&findings, &mut io::stdout().lock()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Looks at the machine and at this program.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![driver()];
    findings.extend(gpus());
    findings.extend([
        kernels(),
        cublaslt(),
        nccl(),
        toolchain(),
        tool("ptxas", "makes machine code at build time; without it the driver compiles PTX at start"),
        tool("cuobjdump", "lets `inspect --sass` show machine code"),
    ]);
    findings
}

fn found(name: impl Into<String>, what: String) -> Finding {
    Finding { name: name.into(), state: State::Found(what) }
}

fn missing(name: impl Into<String>, why: String, mend: &str) -> Finding {
    Finding { name: name.into(), state: State::Missing { why, mend: mend.into() } }
}

fn optional(name: impl Into<String>, why: String, mend: &str) -> Finding {
    Finding { name: name.into(), state: State::Optional { why, mend: mend.into() } }
}

const INSTALL_DRIVER: &str = "install NVIDIA's driver, 525 or later (Debian: apt-get install nvidia-driver); in a \
                              container: start it with --gpus all";

fn driver() -> Finding {
    let name = "CUDA driver";
    match cuda_driver::driver_version() {
        // A driver of CUDA 12 has every call that the kernels' launches need.
        Ok((major, minor)) if major < 12 => {
            missing(name, format!("supports CUDA {major}.{minor} only"), INSTALL_DRIVER)
        }
        Ok((major, minor)) => found(name, format!("supports CUDA {major}.{minor}")),
        Err(cuda_driver::Error::NoDriver { reason }) => missing(name, reason, INSTALL_DRIVER),
        Err(error) => missing(name, error.to_string(), INSTALL_DRIVER),
    }
}

fn gpus() -> Vec<Finding> {
    let count = match cuda_driver::device_count() {
        Ok(count) => count,
        // The driver's finding has said so.
        Err(cuda_driver::Error::NoDriver { .. }) => return Vec::new(),
        Err(error) => return vec![missing("GPU", error.to_string(), "check nvidia-smi and CUDA_VISIBLE_DEVICES")],
    };
    (0..count).map(gpu).collect()
}

fn gpu(index: usize) -> Finding {
    let name = format!("GPU {index}");
    let info = match cuda_driver::device_info(index) {
        Ok(info) => info,
        Err(error) => return missing(name, error.to_string(), "check nvidia-smi"),
    };
    let (major, minor) = info.compute_capability;
    let what = format!(
        "{}, compute capability {major}.{minor}, {} multiprocessors at {} MHz, {:.0} GiB, {:.0} MiB L2, {} KiB shared \
         memory a block",
        info.name,
        info.sm_count,
        info.clock_khz / 1000,
        info.memory_bytes as f64 / f64::from(1 << 30),
        info.l2_bytes as f64 / f64::from(1 << 20),
        info.shared_per_block >> 10,
    );
    if major >= 8 { found(name, what) } else { optional(name, what, "needs compute capability 8.0: use another GPU") }
}

fn kernels() -> Finding {
    let name = "GPU kernels in this program";
    if MODULES.is_empty() {
        return missing(name, MODULES_MISSING.unwrap_or("none").into(), "scripts/setup, then build again");
    }
    let each = MODULES.iter().map(|module| {
        let code = if module.cubin.is_some() { "PTX and cubin" } else { "PTX" };
        format!("{} ({} kernels, {code})", module.arch, module.kernels.len())
    });
    found(name, each.collect::<Vec<_>>().join(", "))
}

fn cublaslt() -> Finding {
    match cublaslt::find() {
        Ok((path, version)) => found(
            "libcublasLt",
            format!("{}.{}.{}, {}", version / 10000, version / 100 % 100, version % 100, path.display()),
        ),
        Err(error) => missing("libcublasLt", error.to_string(), "pip install nvidia-cublas"),
    }
}

fn nccl() -> Finding {
    let name = "libnccl";
    let mend = "for training on several GPUs: pip install nvidia-nccl-cu13 (or -cu12)";
    match SearchPath::detect().open(&["libnccl.so.2"]) {
        Ok(opened) => {
            let mut version = 0;
            // SAFETY: the signature is that of nccl.h; the call writes one integer.
            let status = unsafe {
                opened
                    .library
                    .get::<unsafe extern "C" fn(*mut i32) -> i32>("ncclGetVersion")
                    .map(|get| get(&raw mut version))
            };
            match status {
                Ok(0) => {
                    let (major, minor, patch) = (version / 10000, version / 100 % 100, version % 100);
                    found(name, format!("{major}.{minor}.{patch}, {}", opened.path.display()))
                }
                _ => optional(name, format!("{} does not say its version", opened.path.display()), mend),
            }
        }
        Err(error) => optional(name, error.to_string(), mend),
    }
}

fn toolchain() -> Finding {
    let name = "device toolchain";
    match Toolchain::find() {
        Ok(toolchain) => found(name, toolchain.to_string()),
        Err(none) => optional(name, none.to_string(), "scripts/setup (needed only to build the kernels)"),
    }
}

fn tool(name: &str, what: &str) -> Finding {
    match find_cuda_tool(name, Some(workspace())) {
        Some(path) => found(name, path.display().to_string()),
        None => optional(name, format!("not found; {what}"), "scripts/setup"),
    }
}

/// Where this program was built; tools lie below it, if it is still there.
pub(super) fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// One line for each finding, what to do about it below, and what it comes to at the end.
pub fn print(findings: &[Finding], out: &mut impl Write) -> io::Result<()> {
    for Finding { name, state } in findings {
        match state {
            State::Found(what) => writeln!(out, "ok       {name}: {what}")?,
            State::Missing { why, mend } => writeln!(out, "MISSING  {name}: {why}\n         mend: {mend}")?,
            State::Optional { why, mend } => writeln!(out, "-        {name}: {why}\n         mend: {mend}")?,
        }
    }
    let lacking: Vec<_> =
        findings.iter().filter(|f| matches!(f.state, State::Missing { .. })).map(|f| f.name.as_str()).collect();
    if lacking.is_empty() {
        writeln!(out, "\nReady to train on a GPU.")
    } else {
        writeln!(out, "\nReady to train on the CPU. For a GPU, mend: {}.", lacking.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(findings: &[Finding]) -> String {
        let mut out = Vec::new();
        print(findings, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_missing_decides_and_what_is_optional_does_not() {
        let driver = found("CUDA driver", "supports CUDA 13.0".into());
        let nccl = optional("libnccl", "not found".into(), "pip install it");
        let text = printed(&[driver.clone(), nccl.clone()]);
        assert!(text.ends_with("Ready to train on a GPU.\n"), "{text}");
        assert!(text.contains("-        libnccl: not found\n         mend: pip install it\n"), "{text}");

        let text = printed(&[driver, missing("libcublasLt", "not found".into(), "pip install that"), nccl]);
        assert!(text.ends_with("Ready to train on the CPU. For a GPU, mend: libcublasLt.\n"), "{text}");
    }

    #[test]
    fn this_machine_is_examined_whatever_it_has() {
        let names: Vec<_> = examine().into_iter().map(|finding| finding.name).collect();
        for name in
            ["CUDA driver", "GPU kernels in this program", "libcublasLt", "libnccl", "device toolchain", "ptxas"]
        {
            assert!(names.iter().any(|n| n == name), "{name} is not in {names:?}");
        }
    }
}
