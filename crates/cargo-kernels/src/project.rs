//! The crate in the working directory: runs cargo, and finds the compiled kernels.

use anyhow::{Context, Result, ensure};
use cuda_builder::{Kernel, Resources, find_cuda_tool};
use kernel_inspect::{Code, Inspect};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Runs a subcommand of cargo and returns its exit code.
pub fn cargo(subcommand: &str, arguments: &[impl AsRef<OsStr>]) -> Result<ExitCode> {
    let mut command = command();
    let status = command.arg(subcommand).args(arguments).status().with_context(|| format!("cannot run {command:?}"))?;
    Ok(status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(code as u8)))
}

fn command() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Compiles the kernels and shows them.
pub fn inspect(options: &Inspect) -> Result<()> {
    let ptx = compiled()?;
    let scratch = tempfile::tempdir().context("cannot create a temporary directory")?;
    let ptxas = find_tool("ptxas");
    if ptxas.is_none() {
        eprintln!("warning: ptxas: found none, so registers and machine code are unknown; run cargo kernels setup");
    }
    let modules: Vec<Assembled> =
        ptx.iter().map(|path| Assembled::of(path, ptxas.as_deref(), scratch.path())).collect::<Result<_>>()?;
    kernel_inspect::print(options, &modules.iter().map(Assembled::code).collect::<Vec<_>>(), &find_tool)
}

/// Finds a CUDA tool for the crate in the working directory.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let current = std::env::current_dir().ok()?;
    let root = current.ancestors().find(|directory| directory.join(".tools").is_dir());
    find_cuda_tool(name, root)
}

/// Returns the PTX files of the crate in the working directory, by architecture.
fn compiled() -> Result<Vec<PathBuf>> {
    let mut files = compiled_by(&[])?;
    if files.is_empty() {
        // The kernel crate itself has no build script. The build script of the crate that contains it compiles the kernels.
        files = compiled_by(&["--workspace"])?;
    }
    files.sort_by_key(|path| (number(path), path.clone()));
    ensure!(
        !files.is_empty(),
        "kernels: expected PTX of a build script that calls CudaBuilder, found none; run this in a crate of `cargo kernels new`, and \
         `cargo kernels doctor` if its build printed a warning"
    );
    Ok(files)
}

/// Returns the PTX files that `cargo check` with these arguments compiles.
fn compiled_by(arguments: &[&str]) -> Result<Vec<PathBuf>> {
    let mut command = command();
    command
        .args(["check", "--quiet", "--message-format=json-render-diagnostics"])
        .args(arguments)
        .stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed; see the message of cargo above");
    let mut files = Vec::new();
    for directory in build_script_directories(&String::from_utf8_lossy(&output.stdout)) {
        find_ptx(&directory, 3, &mut files)?;
    }
    Ok(files)
}

/// Appends the PTX files of the builders that wrote to `directory` or below it, up to `depth` levels: two builders of one build script
/// have different output directories.
fn find_ptx(directory: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let has_kernels = directory.join("kernels.rs").is_file();
    for path in entries.flatten().map(|entry| entry.path()) {
        if has_kernels && path.extension() == Some("ptx".as_ref()) {
            files.push(path);
        } else if depth > 0 && path.is_dir() && !path.is_symlink() {
            find_ptx(&path, depth - 1, files)?;
        }
    }
    Ok(())
}

/// Returns 90 for `sm_90a.ptx`.
fn number(path: &Path) -> Option<u32> {
    let name = path.file_stem()?.to_str()?.strip_prefix("sm_")?;
    name.trim_end_matches(char::is_alphabetic).parse().ok()
}

/// Returns the output directories of the build scripts in cargo's messages.
fn build_script_directories(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let scripts = messages.filter(|message| message["reason"] == "build-script-executed");
    scripts.filter_map(|message| message["out_dir"].as_str().map(PathBuf::from)).collect()
}

/// PTX, and what ptxas makes of it.
struct Assembled {
    arch: String,
    ptx: String,
    cubin: Option<Vec<u8>>,
    kernels: Vec<Kernel>,
}

impl Assembled {
    fn of(path: &Path, ptxas: Option<&Path>, scratch: &Path) -> Result<Self> {
        let arch = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let ptx = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (cubin, resources) = match ptxas {
            Some(ptxas) => {
                let (cubin, resources) = assemble(ptxas, &arch, path, &scratch.join(&arch))?;
                (Some(cubin), resources)
            }
            None => (None, BTreeMap::new()),
        };
        let kernel = |name: &str| Kernel {
            name: name.to_owned().into(),
            bounds: kernel_inspect::find_entry(&ptx, name).map(kernel_inspect::bounds).unwrap_or_default(),
            resources: resources.get(name).copied(),
            signature: None,
        };
        let kernels = kernel_inspect::entries(&ptx).into_iter().map(kernel).collect();
        Ok(Self { arch, ptx, cubin, kernels })
    }

    fn code(&self) -> Code<'_> {
        Code { arch: &self.arch, ptx: &self.ptx, cubin: self.cubin.as_deref(), kernels: &self.kernels }
    }
}

/// Assembles PTX. Returns the cubin and the resources of its functions.
fn assemble(ptxas: &Path, arch: &str, ptx: &Path, cubin: &Path) -> Result<(Vec<u8>, BTreeMap<String, Resources>)> {
    let mut command = Command::new(ptxas);
    command.args(["-v", "-lineinfo"]).arg(format!("-arch={arch}")).arg(ptx).arg("-o").arg(cubin);
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed:\n{}", log.trim());
    let code = fs::read(cubin).with_context(|| format!("cannot read {}", cubin.display()))?;
    Ok((code, cuda_builder::parse_ptxas_log(&log)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ptx_of_each_builder_of_a_build_script_is_found() {
        let out = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = out.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        ["kernels.rs", "sm_80.ptx", "second/kernels.rs", "second/sm_90.ptx", "other/x.ptx"].into_iter().for_each(write);
        let mut files = Vec::new();
        find_ptx(out.path(), 3, &mut files).unwrap();
        files.sort();
        assert_eq!(files, ["second/sm_90.ptx", "sm_80.ptx"].map(|name| out.path().join(name)));
    }

    #[test]
    fn output_directories_are_read_from_cargos_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"out_dir\":\"/no\"}\nnot json\n\
                        {\"reason\":\"build-script-executed\",\"out_dir\":\"/t/build/a/out\"}\n";
        assert_eq!(build_script_directories(messages), [Path::new("/t/build/a/out")]);
        assert!(number(Path::new("/t/sm_90a.ptx")) < number(Path::new("/t/sm_100.ptx")));
    }
}
