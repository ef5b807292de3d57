//! Tables, reports, PTX and machine code of the kernels in `examples/kernels`.

use anyhow::{Context, Result, bail, ensure};
use kernel_inspect::find_entry;
use kernels::registry::{self, FAMILIES, Kernel};
use serde::Deserialize;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The output of `kernels run all --device cuda --json FILE`.
const TIMES: &str = "docs/internals/bench/kernel-examples.json";

/// The recorded run.
#[derive(Deserialize)]
struct Times {
    machine: String,
    copy_gbs: f64,
    gemm_tflops: f64,
    rows: Vec<Row>,
}

/// A kernel of the recorded run.
#[derive(Deserialize)]
struct Row {
    name: String,
    us: f64,
    bytes: f64,
    flops: f64,
    bound: String,
    percent_of_roofline: f64,
    library: Option<String>,
    percent_of_library: Option<f64>,
}

impl Row {
    fn cells(&self, with_library: bool) -> String {
        let us = self.us;
        let rate = match &*self.bound {
            "compute" => format!("{} TFLOP/s", rounded(self.flops / us / 1e6)),
            _ => format!("{} GB/s", rounded(self.bytes / us / 1e3)),
        };
        let us = if us < 1000.0 { format!("{us:.1}") } else { format!("{us:.0}") };
        let library = self.library.as_ref().zip(self.percent_of_library).filter(|_| with_library);
        let library = library.map(|(name, percent)| format!(" {} % of {name} |", rounded(percent)));
        let library = library.unwrap_or_else(|| if with_library { " - |".into() } else { String::new() });
        format!(" {us} | {rate} | {} % |{library}", rounded(self.percent_of_roofline))
    }
}

/// Returns a number with at least two digits.
fn rounded(x: f64) -> String {
    match x {
        ..1.0 => format!("{x:.2}"),
        ..10.0 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

/// Returns the table of a family, or of its kernels from the first to the last name, with the times of the recorded run.
pub fn table(root: &Path, family: &str, range: Option<[&str; 2]>) -> Result<String> {
    let Some(found) = FAMILIES.iter().find(|found| found.name == family) else {
        let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
        bail!("expected a family ({}), found {family}", names.join(", "));
    };
    let position = |name: &str| {
        let position = found.kernels.iter().position(|kernel| kernel.name == name);
        position.with_context(|| format!("expected a kernel of {family}, found {name}"))
    };
    let [first, last] = match range {
        Some([first, last]) => [position(first)?, position(last)?],
        None => [0, found.kernels.len() - 1],
    };
    let kernels = found.kernels.get(first..=last).context("expected the first kernel before the last")?;
    let times = times(root)?;
    let row_of = |name: &str| times.as_ref().and_then(|times| times.rows.iter().find(|row| row.name == name));
    let with_library = kernels.iter().any(|kernel| row_of(kernel.name).is_some_and(|row| row.library.is_some()));
    let (title, line, none) = if with_library { (" library |", "---|", " - |") } else { ("", "", "") };
    let mut out = match &times {
        Some(_) => format!(
            "<div class=\"measured\">\n\n| | kernel | idea | us | rate | of the roofline |{title}\n|---|---|---|---|---|---|{line}\n"
        ),
        None => "| | kernel | idea |\n|---|---|---|\n".to_owned(),
    };
    for Kernel { number, name, idea, source, .. } in kernels {
        write!(out, "| {number} | [`{name}`](repo:{source}) | {idea} |")?;
        if times.is_some() {
            out += &row_of(name).map_or_else(|| format!(" - | - | - |{none}"), |row| row.cells(with_library));
        }
        out.push('\n');
    }
    match times {
        Some(Times { machine, copy_gbs, gemm_tflops, .. }) => {
            writeln!(
                out,
                "\n</div>\n\nOne run on {machine} ([data](repo:{TIMES})), where a copy of 1 GiB reaches {copy_gbs:.0} GB/s and cuBLASLt's GEMM of \
                 8192 x 8192 x 8192 {gemm_tflops:.0} TFLOP/s."
            )?;
        }
        None => {
            writeln!(out, "\nTo measure these kernels on your GPU: `cargo run --release -p kernels -- run {family}`.")?;
        }
    }
    Ok(out)
}

fn times(root: &Path) -> Result<Option<Times>> {
    let path = root.join(TIMES);
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {TIMES}"))?;
    serde_json::from_str(&text)
        .map(Some)
        .with_context(|| format!("{TIMES}: expected the JSON of `kernels run all --json`"))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_kernels_of_its_range() {
        let directory = tempfile::tempdir().unwrap();
        let text = table(directory.path(), "gelu", Some(["gelu_bf16", "gelu_packets"])).unwrap();
        assert!(text.starts_with("| | kernel | idea |\n|---|---|---|\n| 2 | [`gelu_bf16`](repo:examples/"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("| ") && line.contains("repo:")).count(), 2, "{text}");
    }

    #[test]
    fn a_table_has_the_times_of_the_recorded_run() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("docs/internals/bench")).unwrap();
        let json = r#"{"machine": "a GPU", "copy_gbs": 4000.0, "gemm_tflops": 700.0, "rows": [{"name": "gelu_bf16", "us": 10.0,
            "bytes": 30000000, "flops": 0, "bound": "memory", "percent_of_roofline": 75.0}]}"#;
        fs::write(directory.path().join(TIMES), json).unwrap();
        let text = table(directory.path(), "gelu", Some(["gelu_naive", "gelu_bf16"])).unwrap();
        assert!(text.contains("| - | - | - |\n") && text.contains("| 10.0 | 3000 GB/s | 75 % |\n"), "{text}");
        assert!(text.contains("One run on a GPU"), "{text}");
    }

    #[test]
    fn a_table_has_a_library_if_a_kernel_is_compared_with_one() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("docs/internals/bench")).unwrap();
        let json = r#"{"machine": "a GPU", "copy_gbs": 4000.0, "gemm_tflops": 700.0, "rows": [{"name": "gemm_mma", "us": 2000.0,
            "bytes": 1, "flops": 4e9, "bound": "compute", "percent_of_roofline": 0.25, "library": "cuBLASLt", "percent_of_library": 11.2}]}"#;
        fs::write(directory.path().join(TIMES), json).unwrap();
        let text = table(directory.path(), "gemm", Some(["gemm_mma", "gemm_cp_async"])).unwrap();
        assert!(text.contains("| of the roofline | library |\n") && text.contains("| - | - | - | - |\n"), "{text}");
        assert!(text.ends_with("8192 x 8192 x 8192 700 TFLOP/s.\n"), "{text}");
        assert!(text.contains("| 2000 | 2.0 TFLOP/s | 0.25 % | 11 % of cuBLASLt |\n"), "{text}");
    }

    #[test]
    fn a_report_names_the_fault() {
        let text = report("fault_missing_barrier").unwrap();
        assert!(text.contains("race"), "{text}");
    }

    #[test]
    fn ptx_and_machine_code_are_of_one_kernel() {
        let ptx = ptx("gelu_naive").unwrap();
        assert!(ptx.contains(".entry gelu_naive(") && ptx.matches(".entry").count() == 1, "{ptx}");
        let sass = sass(&crate::build::repository_root().unwrap(), "gelu_naive").unwrap();
        assert!(sass.contains("EXIT") && sass.contains("LDG"), "{sass}");
    }
}
