//! `inspect`: shows the embedded GPU kernels as PTX, as machine code, or as a table of their resources.

use super::doctor::workspace;
use anyhow::{Context, Result, bail, ensure};
use cuda_builder::{Kernel, Module, find_cuda_tool};
use engine::cuda::EMBEDDED;
use std::io::{self, Write};
use std::process::Command;

/// Show the GPU kernels in this program: resources, PTX or machine code
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

/// Prints the kernels.
pub fn run(options: &Inspect) -> Result<()> {
    match inspect(options, EMBEDDED.modules()?, &mut io::stdout().lock()) {
        // `inspect … | head` closes the pipe early.
        Err(error) if is_broken_pipe(&error) => Ok(()),
        outcome => outcome,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes the requested view of `modules` to `out`.
pub fn inspect(options: &Inspect, modules: &[Module], out: &mut impl Write) -> Result<()> {
    let chosen: Vec<&Module> = match &options.arch {
        Some(arch) => modules.iter().filter(|module| module.arch == arch).collect(),
        None if options.ptx || options.sass => modules.last().into_iter().collect(),
        None => modules.iter().collect(),
    };
    let list = |names: Vec<&str>| names.join(", ");
    ensure!(
        !chosen.is_empty(),
        "--arch {}: expected one of the embedded architectures {}",
        options.arch.as_deref().unwrap_or_default(),
        list(modules.iter().map(|module| module.arch).collect())
    );
    let wanted = |kernel: &&Kernel| options.kernel.as_ref().is_none_or(|part| kernel.name.contains(part.as_str()));
    if let Some(part) = &options.kernel
        && !chosen.iter().any(|module| module.kernels.iter().any(|kernel| wanted(&kernel)))
    {
        let archs = list(chosen.iter().map(|module| module.arch).collect());
        bail!(
            "{part}: expected a part of a kernel name, found no such kernel for {archs}; list all names with `inspect`"
        );
    }
    for module in &chosen {
        let kernels: Vec<&Kernel> = module.kernels.iter().filter(wanted).collect();
        if kernels.is_empty() {
            continue;
        }
        if options.ptx {
            ptx(module, &kernels, options.kernel.is_some(), out)?;
        } else if options.sass {
            sass(module, &kernels, options.kernel.is_some(), out)?;
        } else {
            resources(module, &kernels, out)?;
        }
    }
    Ok(())
}

fn resources(module: &Module, kernels: &[&Kernel], out: &mut impl Write) -> Result<()> {
    let columns = ["threads", "blocks/SM", "registers", "shared", "stack", "spilled", "barriers"];
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max(8);
    write!(out, "{:<width$}", module.arch)?;
    for column in columns {
        write!(out, " {column:>9}")?;
    }
    writeln!(out)?;
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
        writeln!(out)?;
    }
    let note =
        "threads and blocks/SM are launch bounds; shared: static bytes per block; stack and spilled: bytes per thread";
    writeln!(out, "{note}\n")?;
    if kernels.iter().any(|kernel| kernel.resources.is_none()) {
        writeln!(out, "-: unknown, since no ptxas was found at build time; `doctor` shows how to install it\n")?;
    }
    Ok(())
}

fn ptx(module: &Module, kernels: &[&Kernel], filtered: bool, out: &mut impl Write) -> Result<()> {
    if !filtered {
        return Ok(out.write_all(module.ptx.as_bytes())?);
    }
    for kernel in kernels {
        let text = find_entry(module.ptx, &kernel.name)
            .with_context(|| format!("the PTX of {} has no entry {}", module.arch, kernel.name))?;
        writeln!(out, "{text}\n")?;
    }
    Ok(())
}

/// Returns the part of a module's PTX that defines a kernel: from `.visible .entry name` to the closing brace of its body.
fn find_entry<'a>(ptx: &'a str, kernel: &str) -> Option<&'a str> {
    let named = |start: &usize| {
        let after = ptx[start + ".entry".len()..].trim_start();
        after.strip_prefix(kernel).is_some_and(|rest| rest.starts_with(|c: char| c == '(' || c.is_whitespace()))
    };
    let entry = ptx.match_indices(".entry").map(|(at, _)| at).find(named)?;
    let start = ptx[..entry].rfind('\n').map_or(0, |newline| newline + 1);
    let mut depth = 0;
    for (at, brace) in ptx[entry..].match_indices(['{', '}']) {
        depth += if brace == "{" { 1 } else { -1 };
        if depth == 0 {
            return Some(&ptx[start..=entry + at]);
        }
    }
    None
}

fn sass(module: &Module, kernels: &[&Kernel], filtered: bool, out: &mut impl Write) -> Result<()> {
    let cubin = module.cubin.with_context(|| {
        format!(
            "--sass: expected machine code for {}, found PTX only, since no ptxas was found at build time; run scripts/setup, then build again",
            module.arch
        )
    })?;
    let mut file = tempfile::Builder::new().suffix(".cubin").tempfile().context("cannot create a temporary file")?;
    file.write_all(cubin).context("cannot write the cubin to a temporary file")?;
    let mut command = if let Some(cuobjdump) = find_cuda_tool("cuobjdump", Some(workspace())) {
        let mut command = Command::new(cuobjdump);
        command.arg("--dump-sass");
        if filtered {
            let names: Vec<_> = kernels.iter().map(|kernel| &*kernel.name).collect();
            command.arg("--function").arg(names.join(","));
        }
        command
    } else if let Some(nvdisasm) = find_cuda_tool("nvdisasm", Some(workspace())) {
        // nvdisasm has no filter; it prints all kernels.
        Command::new(nvdisasm)
    } else {
        bail!("--sass: expected cuobjdump or nvdisasm, found neither; run scripts/setup");
    };
    let output = command.arg(file.path()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(out.write_all(&output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_builder::{LaunchBounds, Resources};
    use std::borrow::Cow;

    const PTX: &str = "\
.version 8.8
.visible .entry scale_f32(
    .param .u64 scale_f32_param_0
)
.maxntid 256
{
    { nested; }
    ret;
}
// next
.visible .entry scale(.param .u64 p)
{
    ret;
}
";

    fn modules() -> Vec<Module> {
        let kernel = |name, resources| Kernel {
            name: Cow::Borrowed(name),
            bounds: LaunchBounds { threads: Some([256, 1, 1]), blocks_per_sm: Some(2), ..LaunchBounds::default() },
            resources,
            signature: None,
        };
        let used =
            Resources { registers: 40, stack: 16, spill_stores: 24, spill_loads: 8, static_shared: 128, barriers: 1 };
        let kernels = Box::leak(Box::new([kernel("scale", None), kernel("scale_f32", Some(used))]));
        let module = |arch| Module { arch, ptx: PTX, cubin: None, kernels, shared_limit: None };
        vec![module("sm_80"), module("sm_90a")]
    }

    fn shown(options: &Inspect) -> Result<String> {
        let mut out = Vec::new();
        inspect(options, &modules(), &mut out)?;
        Ok(String::from_utf8(out)?)
    }

    #[test]
    fn the_table_lists_resources_of_every_architecture() {
        let text = shown(&Inspect::default()).unwrap();
        let row = text.lines().find(|line| line.starts_with("scale_f32")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["scale_f32", "256", "2", "40", "128", "16", "32", "1"]);
        let row = text.lines().find(|line| line.starts_with("scale ")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>()[3..], ["-", "-", "-", "-", "-"]);
        assert!(text.contains("sm_80") && text.contains("sm_90a"), "{text}");
        let one = shown(&Inspect { arch: Some("sm_80".into()), ..Inspect::default() }).unwrap();
        assert!(!one.contains("sm_90a"), "{one}");
    }

    #[test]
    fn ptx_of_one_kernel_is_its_entry_only() {
        assert_eq!(find_entry(PTX, "scale").unwrap(), ".visible .entry scale(.param .u64 p)\n{\n    ret;\n}");
        let text = find_entry(PTX, "scale_f32").unwrap();
        assert!(text.starts_with(".visible .entry scale_f32(") && text.ends_with("ret;\n}"), "{text}");
        assert!(find_entry(PTX, "scal").is_none());
        assert_eq!(shown(&Inspect { ptx: true, ..Inspect::default() }).unwrap(), PTX);
        let both = shown(&Inspect { ptx: true, kernel: Some("scale".into()), ..Inspect::default() }).unwrap();
        assert_eq!(both.matches(".entry").count(), 2);
    }

    #[test]
    fn errors_name_what_is_missing() {
        let error = |options| shown(&options).unwrap_err().to_string();
        let text = error(Inspect { kernel: Some("gelu".into()), ..Inspect::default() });
        assert_eq!(
            text,
            "gelu: expected a part of a kernel name, found no such kernel for sm_80, sm_90a; list all names with `inspect`"
        );
        let text = error(Inspect { arch: Some("sm_75".into()), ..Inspect::default() });
        assert_eq!(text, "--arch sm_75: expected one of the embedded architectures sm_80, sm_90a");
        let text = error(Inspect { sass: true, ..Inspect::default() });
        assert!(text.contains("expected machine code for sm_90a") && text.contains("scripts/setup"), "{text}");
    }

    /// Passes with an explanatory error if the program has no machine code or the tools are missing.
    #[test]
    fn sass_of_an_embedded_kernel_names_the_kernel() {
        let options = Inspect { sass: true, kernel: Some("gelu_forward_f32".into()), ..Inspect::default() };
        let mut out = Vec::new();
        match EMBEDDED.modules().and_then(|modules| inspect(&options, modules, &mut out)) {
            Ok(()) => assert!(String::from_utf8(out).unwrap().contains("gelu_forward_f32")),
            Err(error) => assert!(error.to_string().contains("scripts/setup"), "{error:#}"),
        }
    }
}
