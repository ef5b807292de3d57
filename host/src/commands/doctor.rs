//! `doctor`: lists what this machine has for training on a GPU and for building the kernels, what is missing, and how to
//! install it.

use super::json;
use crate::style::{Tone, is_colored, paint};
use anyhow::Result;
use cuda_builder::{Toolchain, find_cuda_tool};
use cuda_driver::library::SearchPath;
use engine::cuda::{EMBEDDED, select};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::Path;

/// Check this machine for GPU training: list what was found, what is missing, and how to fix it
#[derive(Clone, Debug, clap::Args)]
pub struct Doctor {
    /// Print JSON instead of text: verdict, ready_for_gpu and findings
    #[arg(long)]
    json: bool,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the component.
    pub name: String,
    /// Whether it was found.
    pub state: State,
}

/// The state of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Found: its version and path.
    Found(String),
    /// Missing, and required for training on a GPU.
    Missing {
        /// The problem.
        reason: String,
        /// How to fix it.
        fix: String,
    },
    /// Missing, but not required.
    Optional {
        /// The problem, or what the component is for.
        reason: String,
        /// How to install it.
        fix: String,
    },
}

/// Prints all findings.
pub fn run(args: &Doctor) -> Result<()> {
    let findings = examine();
    if args.json {
        return json::print(&as_json(&findings));
    }
    match print(&findings, is_colored(&io::stdout()), &mut io::stdout().lock()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Runs all checks of this machine and of this program.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![driver()];
    findings.extend(gpus());
    findings.extend([
        kernels(),
        cublaslt(),
        nccl(),
        toolchain(),
        tool("ptxas", "assembles machine code at build time; without it the driver compiles PTX at startup"),
        tool("cuobjdump", "needed by `inspect --sass`"),
    ]);
    findings
}

fn found(name: impl Into<String>, what: String) -> Finding {
    Finding { name: name.into(), state: State::Found(what) }
}

fn missing(name: impl Into<String>, reason: String, fix: &str) -> Finding {
    Finding { name: name.into(), state: State::Missing { reason, fix: fix.into() } }
}

fn optional(name: impl Into<String>, reason: String, fix: &str) -> Finding {
    Finding { name: name.into(), state: State::Optional { reason, fix: fix.into() } }
}

const INSTALL_DRIVER: &str = "install the NVIDIA driver, version 525 or later (Debian: apt-get install nvidia-driver); \
                              start a container with --gpus all";

fn driver() -> Finding {
    let name = "CUDA driver";
    match cuda_driver::driver_version() {
        // Kernel launches use driver functions of CUDA 12.
        Ok((major, minor)) if major < 12 => {
            missing(name, format!("expected support for CUDA 12, found CUDA {major}.{minor}"), INSTALL_DRIVER)
        }
        Ok((major, minor)) => found(name, format!("supports CUDA {major}.{minor}")),
        Err(cuda_driver::Error::NoDriver { reason }) => missing(name, reason, INSTALL_DRIVER),
        Err(error) => missing(name, error.to_string(), INSTALL_DRIVER),
    }
}

fn gpus() -> Vec<Finding> {
    let count = match cuda_driver::device_count() {
        Ok(count) => count,
        // The check of the driver has reported it.
        Err(cuda_driver::Error::NoDriver { .. }) => return Vec::new(),
        Err(error) => return vec![missing("GPU", error.to_string(), "check nvidia-smi and CUDA_VISIBLE_DEVICES")],
    };
    (0..count).flat_map(|index| [Some(gpu(index)), experience(index)]).flatten().collect()
}

/// States whether the kernels that a GPU runs have been measured on its architecture. Without a usable GPU, [`gpu`] says why.
fn experience(index: usize) -> Option<Finding> {
    let info = cuda_driver::device_info(index).ok()?;
    let (name, (major, minor)) = (format!("kernels on GPU {index}"), info.compute_capability);
    let arch = select(EMBEDDED.modules, &info, None).ok()?.module.arch;
    Some(match (major, minor) {
        (9, 0) => found(name, "measured on H100 and H200".to_owned()),
        _ => optional(
            name,
            format!("the kernels for {arch} have not been measured on compute capability {major}.{minor}"),
            "llm-rs selftest --report FILE checks them; please attach the file to an issue",
        ),
    })
}

fn gpu(index: usize) -> Finding {
    let name = format!("GPU {index}");
    let info = match cuda_driver::device_info(index) {
        Ok(info) => info,
        Err(error) => return missing(name, error.to_string(), "check nvidia-smi"),
    };
    let (major, minor) = info.compute_capability;
    let what = format!(
        "{}, compute capability {major}.{minor}, {} SMs at {} MHz, {:.0} GiB, {:.0} MiB L2, {} KiB shared memory per block",
        info.name,
        info.sm_count,
        info.clock_khz / 1000,
        info.memory_bytes as f64 / f64::from(1 << 30),
        info.l2_bytes as f64 / f64::from(1 << 20),
        info.shared_per_block >> 10,
    );
    if major >= 8 { found(name, what) } else { optional(name, what, "use a GPU of compute capability 8.0 or later") }
}

fn kernels() -> Finding {
    let name = "GPU kernels in this program";
    if EMBEDDED.modules.is_empty() {
        return missing(name, EMBEDDED.missing.unwrap_or("none").into(), "run scripts/setup, then build again");
    }
    let each = EMBEDDED.modules.iter().map(|module| {
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
    let fix = "for training on several GPUs: pip install nvidia-nccl-cu13 (or -cu12)";
    match SearchPath::detect().open(&["libnccl.so.2"]) {
        Ok(opened) => {
            let mut version = 0;
            // SAFETY: the signature matches nccl.h, and the call writes one integer through the valid pointer.
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
                _ => optional(name, format!("{}: the version is unknown", opened.path.display()), fix),
            }
        }
        Err(error) => optional(name, error.to_string(), fix),
    }
}

fn toolchain() -> Finding {
    let name = "device toolchain";
    match Toolchain::find() {
        Ok(toolchain) => found(name, toolchain.to_string()),
        Err(none) => optional(name, none.to_string(), "run scripts/setup (needed only to build the kernels)"),
    }
}

fn tool(name: &str, purpose: &str) -> Finding {
    match find_cuda_tool(name, Some(workspace())) {
        Some(path) => found(name, path.display().to_string()),
        None => optional(name, format!("not found; {purpose}"), "run scripts/setup"),
    }
}

/// Returns the checkout that this program was built in. `scripts/setup` installs tools there.
pub(super) fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns whether this machine can train on a GPU, and a line that says so.
fn verdict(findings: &[Finding]) -> (bool, String) {
    let required: Vec<_> =
        findings.iter().filter(|f| matches!(f.state, State::Missing { .. })).map(|f| f.name.as_str()).collect();
    if required.is_empty() {
        (true, "Ready to train on a GPU.".to_owned())
    } else {
        (false, format!("Ready to train on the CPU. To train on a GPU, fix: {}.", required.join(", ")))
    }
}

fn as_json(findings: &[Finding]) -> Value {
    let (ready_for_gpu, verdict) = verdict(findings);
    let finding = |Finding { name, state }: &Finding| match state {
        State::Found(what) => json!({ "name": name, "state": "found", "detail": what }),
        State::Missing { reason, fix } => json!({ "name": name, "state": "missing", "detail": reason, "fix": fix }),
        State::Optional { reason, fix } => json!({ "name": name, "state": "optional", "detail": reason, "fix": fix }),
    };
    let findings: Vec<Value> = findings.iter().map(finding).collect();
    json!({ "verdict": verdict, "ready_for_gpu": ready_for_gpu, "findings": findings })
}

/// Prints a verdict, and one line for each finding, followed by its fix.
pub fn print(findings: &[Finding], colored: bool, out: &mut impl Write) -> io::Result<()> {
    let (ready, verdict) = verdict(findings);
    writeln!(out, "{}\n", paint(&verdict, if ready { Tone::Good } else { Tone::Warning }, colored))?;
    for Finding { name, state } in findings {
        match state {
            State::Found(what) => writeln!(out, "{}       {name}: {what}", paint("ok", Tone::Good, colored))?,
            State::Missing { reason, fix } => {
                writeln!(out, "{}  {name}: {reason}\n         fix: {fix}", paint("MISSING", Tone::Bad, colored))?;
            }
            State::Optional { reason, fix } => writeln!(out, "-        {name}: {reason}\n         fix: {fix}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(findings: &[Finding]) -> String {
        let mut out = Vec::new();
        print(findings, false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_verdict_comes_first_and_depends_on_required_components_only() {
        let driver = found("CUDA driver", "supports CUDA 13.0".into());
        let nccl = optional("libnccl", "not found".into(), "pip install it");
        let text = printed(&[driver.clone(), nccl.clone()]);
        assert!(text.starts_with("Ready to train on a GPU.\n\nok       CUDA driver: "), "{text}");
        assert!(text.contains("-        libnccl: not found\n         fix: pip install it\n"), "{text}");

        let text = printed(&[driver, missing("libcublasLt", "not found".into(), "pip install that"), nccl]);
        assert!(text.starts_with("Ready to train on the CPU. To train on a GPU, fix: libcublasLt.\n"), "{text}");
    }

    #[test]
    fn json_has_the_verdict_and_all_findings() {
        let json = as_json(&[found("a", "1.0".into()), missing("b", "none".into(), "install it")]);
        assert_eq!(json["ready_for_gpu"], false);
        assert_eq!(json["verdict"], "Ready to train on the CPU. To train on a GPU, fix: b.");
        assert_eq!(json["findings"][0], json!({ "name": "a", "state": "found", "detail": "1.0" }));
        assert_eq!(
            json["findings"][1],
            json!({ "name": "b", "state": "missing", "detail": "none", "fix": "install it" })
        );
    }

    #[test]
    fn every_component_is_checked_on_any_machine() {
        let names: Vec<_> = examine().into_iter().map(|finding| finding.name).collect();
        for name in
            ["CUDA driver", "GPU kernels in this program", "libcublasLt", "libnccl", "device toolchain", "ptxas"]
        {
            assert!(names.iter().any(|n| n == name), "{name} is not in {names:?}");
        }
    }
}
