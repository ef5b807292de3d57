//! Reports of the emulator, PTX and machine code of the kernels in `examples/kernels`.

use anyhow::{Context, Result, ensure};
use kernel_inspect::find_entry;
use kernels::registry::{self, Kernel};
use std::fs;
use std::path::Path;
use std::process::Command;

fn kernel(name: &str) -> Result<Kernel> {
    let found = registry::all().map(|(_, kernel)| kernel).find(|kernel| kernel.name == name);
    found.with_context(|| format!("expected the name of an example kernel, found {name}"))
}

/// Returns the emulator's report of a kernel with a planted fault.
pub fn report(name: &str) -> Result<String> {
    let kernel = kernel(name)?;
    ensure!(kernel.fault.is_some(), "expected a kernel with a planted fault, found {name}");
    kernels::run::check_kernel(&kernel)
}

/// Returns the PTX of a kernel's entry for sm_80.
pub fn ptx(name: &str) -> Result<String> {
    Ok(entry(&kernel(name)?)?.1.to_owned())
}

/// Returns the PTX module with the kernel, and the part with its entry.
fn entry(kernel: &Kernel) -> Result<(&'static str, &'static str)> {
    let architecture = kernel.needs.name();
    let module = kernels::device::modules().iter().find(|module| module.arch == architecture);
    let module =
        module.context("expected the PTX of the example kernels, found none; run scripts/setup, then build again")?;
    let entry = find_entry(module.ptx, kernel.name);
    Ok((module.ptx, entry.with_context(|| format!("{}: the PTX has no entry of this name", kernel.name))?))
}

/// Returns the machine code of a kernel, without its encoding.
pub fn sass(root: &Path, name: &str) -> Result<String> {
    let kernel = kernel(name)?;
    let (module, entry) = entry(&kernel)?;
    let header: Vec<_> =
        module.lines().take_while(|line| !line.contains(".entry") && !line.contains(".global")).collect();
    let scratch = tempfile::tempdir().context("cannot create a temporary directory")?;
    let [ptx, cubin] = ["kernel.ptx", "kernel.cubin"].map(|file| scratch.path().join(file));
    fs::write(&ptx, format!("{}\n{entry}\n", header.join("\n"))).context("cannot write the PTX to a temporary file")?;
    let architecture = format!("--gpu-name={}", kernel.needs.name());
    tool(root, "ptxas", &[&architecture, "--output-file", &cubin.to_string_lossy(), &ptx.to_string_lossy()])?;
    let text = tool(root, "cuobjdump", &["--dump-sass", &cubin.to_string_lossy()])?;
    let lines = text.lines().filter_map(|line| line.split_once("*/")?.1.split_once("/*")).map(|(line, _)| line.trim());
    // The padding after the last jump to itself.
    let lines: Vec<_> = lines.filter(|line| !line.is_empty() && !line.starts_with("NOP")).collect();
    Ok(lines.join("\n"))
}

fn tool(root: &Path, name: &str, arguments: &[&str]) -> Result<String> {
    let path = cuda_builder::find_cuda_tool(name, Some(root));
    let path =
        path.with_context(|| format!("{name}: expected it in .tools or on PATH, found none; run scripts/setup"))?;
    let output =
        Command::new(&path).args(arguments).output().with_context(|| format!("cannot run {}", path.display()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{name} failed: {}{}", text(&output.stdout), text(&output.stderr));
    Ok(text(&output.stdout))
}
