//! Shows compiled GPU kernels as a table of their resources, as PTX, or as machine code. Where the code has line information, each view
//! names the Rust lines.

#![warn(missing_docs)]

mod ptx;
mod source;

use anyhow::{Context, Result, bail, ensure};
use cuda_builder::Kernel;
use source::Sources;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;

pub use ptx::{bounds, entries, find_entry};

/// Show GPU kernels: resources, PTX or machine code
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Inspect {
    /// Show only kernels whose name contains this text
    #[arg(value_name = "NAME")]
    pub kernel: Option<String>,
    /// Show only this architecture, such as sm_90a [default: all for the table, otherwise the newest]
    #[arg(long)]
    pub arch: Option<String>,
    /// Show the PTX
    #[arg(long, conflicts_with_all = ["sass", "resources"])]
    pub ptx: bool,
    /// Show the machine code, through cuobjdump or nvdisasm
    #[arg(long, conflicts_with = "resources")]
    pub sass: bool,
    /// Show a table of registers, shared memory, stack and spills (the default)
    #[arg(long)]
    pub resources: bool,
}

/// The kernels of one architecture.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// The architecture.
    pub arch: &'a str,
    /// The PTX.
    pub ptx: &'a str,
    /// The cubin, if there is one.
    pub cubin: Option<&'a [u8]>,
    /// The kernels.
    pub kernels: &'a [Kernel],
}

/// Finds a CUDA tool, such as `nvdisasm`.
pub type FindTool<'a> = &'a dyn Fn(&str) -> Option<PathBuf>;

/// Writes the requested view to standard output. `inspect … | head` closes the pipe early, which is not an error.
pub fn print(options: &Inspect, codes: &[Code], find_tool: FindTool) -> Result<()> {
    match inspect(options, codes, find_tool, &mut io::stdout().lock()) {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        outcome => outcome,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes the requested view of `codes` to `out`.
pub fn inspect(options: &Inspect, codes: &[Code], find_tool: FindTool, out: &mut impl Write) -> Result<()> {
    let wanted = |kernel: &&Kernel| options.kernel.as_ref().is_none_or(|part| kernel.name.contains(part.as_str()));
    // Several device crates may have kernels for the same architecture.
    let newest = codes.iter().rev().find(|code| code.kernels.iter().any(|kernel| wanted(&kernel))).or(codes.last());
    let arch = options.arch.as_deref().or(newest.filter(|_| options.ptx || options.sass).map(|code| code.arch));
    let chosen: Vec<&Code> = codes.iter().filter(|code| arch.is_none_or(|arch| code.arch == arch)).collect();
    let list = |names: Vec<&str>| names.join(", ");
    ensure!(
        !chosen.is_empty(),
        "--arch {}: expected one of the built architectures {}, found another",
        options.arch.as_deref().unwrap_or_default(),
        list(codes.iter().map(|code| code.arch).collect())
    );
    if let Some(part) = &options.kernel
        && !chosen.iter().any(|code| code.kernels.iter().any(|kernel| wanted(&kernel)))
    {
        let archs = list(chosen.iter().map(|code| code.arch).collect());
        bail!(
            "{part}: expected a part of a kernel name, found no such kernel for {archs}; list all names with `inspect`"
        );
    }
    for code in &chosen {
        let kernels: Vec<&Kernel> = code.kernels.iter().filter(wanted).collect();
        if kernels.is_empty() {
            continue;
        }
        if options.ptx {
            ptx_view(code, &kernels, options.kernel.is_some(), out)?;
        } else if options.sass {
            sass_view(code, &kernels, options.kernel.is_some(), find_tool, out)?;
        } else {
            resources(code, &kernels, out)?;
        }
    }
    Ok(())
}

fn resources(code: &Code, kernels: &[&Kernel], out: &mut impl Write) -> Result<()> {
    let columns = ["threads", "blocks/SM", "registers", "shared", "stack", "spilled", "barriers"];
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max(8);
    let files = ptx::files(code.ptx);
    write!(out, "{:<width$}", code.arch)?;
    for column in columns {
        write!(out, " {column:>9}")?;
    }
    writeln!(out, "{}", if files.is_empty() { "" } else { "  source" })?;
    for kernel in kernels {
        let or_dash = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
        let used = kernel.resources;
        let cells = [
            or_dash(kernel.bounds.threads.map(|[x, y, z]| x * y * z)),
            or_dash(kernel.bounds.blocks_per_sm),
            or_dash(used.map(|used| used.registers)),
            or_dash(used.map(|used| used.static_shared)),
            or_dash(used.map(|used| used.stack)),
            or_dash(used.map(|used| used.spill_stores + used.spill_loads)),
            or_dash(used.map(|used| used.barriers)),
        ];
        write!(out, "{:<width$}", kernel.name)?;
        for cell in cells {
            write!(out, " {cell:>9}")?;
        }
        writeln!(out, "{}", declaration(code.ptx, &kernel.name, &files).unwrap_or_default())?;
    }
    let note =
        "threads and blocks/SM are launch bounds; shared: static bytes per block; stack and spilled: bytes per thread";
    writeln!(out, "{note}\n")?;
    if kernels.iter().any(|kernel| kernel.resources.is_none()) {
        writeln!(out, "-: unknown, since no ptxas was found at build time; `doctor` shows how to install it\n")?;
    }
    Ok(())
}

/// Returns the line of a kernel's declaration as `  path:line`.
fn declaration(ptx: &str, kernel: &str, files: &[(u32, &str)]) -> Option<String> {
    let (number, line) = find_entry(ptx, kernel)?.lines().find_map(ptx::location)?;
    let (_, path) = files.iter().find(|(file, _)| *file == number)?;
    Some(format!("  {}:{line}", source::short(path)))
}

fn ptx_view(code: &Code, kernels: &[&Kernel], filtered: bool, out: &mut impl Write) -> Result<()> {
    if !filtered {
        return Ok(out.write_all(code.ptx.as_bytes())?);
    }
    let (files, mut sources) = (ptx::files(code.ptx), Sources::default());
    for kernel in kernels {
        let text = find_entry(code.ptx, &kernel.name)
            .with_context(|| format!("the PTX of {} has no entry {}", code.arch, kernel.name))?;
        let mut shown = None;
        for line in text.lines().filter(|line| !line.starts_with("$L__tmp")) {
            let Some(location) = ptx::location(line) else {
                writeln!(out, "{line}")?;
                continue;
            };
            // Line 0: an instruction of no particular line.
            let (number, source_line) = location;
            let path = files.iter().find(|(file, _)| *file == number).map_or("?", |(_, path)| path);
            if source_line > 0 && shown.replace(location) != Some(location) {
                writeln!(out, "\t// {}", sources.describe(path, source_line))?;
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

fn sass_view(
    code: &Code,
    kernels: &[&Kernel],
    filtered: bool,
    find_tool: FindTool,
    out: &mut impl Write,
) -> Result<()> {
    let cubin = code.cubin.with_context(|| {
        format!(
            "--sass: expected machine code for {}, found PTX only, since no ptxas was found at build time; run scripts/setup or cargo \
             kernels setup, then build again",
            code.arch
        )
    })?;
    let mut file = tempfile::Builder::new().suffix(".cubin").tempfile().context("cannot create a temporary file")?;
    file.write_all(cubin).context("cannot write the cubin to a temporary file")?;
    let has_lines = !ptx::files(code.ptx).is_empty();
    let nvdisasm = find_tool("nvdisasm");
    let mut command = match (find_tool("cuobjdump"), &nvdisasm) {
        (_, Some(nvdisasm)) if has_lines => {
            let mut command = Command::new(nvdisasm);
            command.args(["--print-code", "--print-line-info"]);
            command
        }
        (Some(cuobjdump), _) => {
            let mut command = Command::new(cuobjdump);
            command.arg("--dump-sass");
            if filtered {
                let names: Vec<_> = kernels.iter().map(|kernel| &*kernel.name).collect();
                command.arg("--function").arg(names.join(","));
            }
            command
        }
        // Without a filter of kernels, as it prints them by section.
        (None, Some(nvdisasm)) => Command::new(nvdisasm),
        (None, None) => {
            bail!("--sass: expected cuobjdump or nvdisasm, found neither; run scripts/setup or cargo kernels setup")
        }
    };
    let output = command.arg(file.path()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    if has_lines && nvdisasm.is_some() {
        let text = String::from_utf8_lossy(&output.stdout);
        return with_source(&text, |name| kernels.iter().any(|kernel| kernel.name == name), out);
    }
    Ok(out.write_all(&output.stdout)?)
}

/// Writes the code of the wanted kernels from the output of nvdisasm, with the text of source lines.
fn with_source(sass: &str, wanted: impl Fn(&str) -> bool, out: &mut impl Write) -> Result<()> {
    let (mut inside, mut sources) = (false, Sources::default());
    for line in sass.lines() {
        if let Some(section) = line.trim_start().strip_prefix(".section\t.text.") {
            inside = wanted(section.split([',', '.']).next().unwrap_or_default());
        }
        if !inside || line.starts_with("//-----") {
            continue;
        }
        let location = line.trim_start().strip_prefix("//## File \"").and_then(|rest| rest.split_once("\", line "));
        match location.and_then(|(path, number)| Some((path, number.split_whitespace().next()?.parse().ok()?))) {
            Some((path, number)) => writeln!(out, "\t// {}", sources.describe(path, number))?,
            None => writeln!(out, "{line}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
