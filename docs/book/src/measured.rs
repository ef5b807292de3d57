//! Tables of the measurements of the kernels in `examples/kernels`.

use crate::links::read;
use anyhow::{Context, Result, bail};
use kernels::registry::{FAMILIES, Kernel};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// The output of `kernels run all --device cuda --json FILE`.
const TIMES: &str = "docs/internals/bench/kernel-examples.json";
/// The output of `examples/kernels/profile.py`.
const PROFILES: &str = "docs/internals/bench/kernel-profiles.json";
/// Percentage from which a kernel counts as one that uses tensor cores. The counter of kernels without them is up to 2.
const TENSOR_CORES: f64 = 5.0;

#[derive(Deserialize)]
struct Times {
    machine: String,
    copy_gbs: f64,
    gemm_tflops: f64,
    rows: Vec<Time>,
}

/// The time of a kernel.
#[derive(Deserialize)]
struct Time {
    name: String,
    us: f64,
    bytes: f64,
    flops: f64,
    bound: String,
    percent_of_roofline: f64,
    library: Option<String>,
    percent_of_library: Option<f64>,
}

#[derive(Deserialize)]
struct Profiles {
    machine: String,
    rows: Vec<Profile>,
}

/// The longest launch of an entry point.
#[derive(Deserialize)]
struct Profile {
    entry: String,
    us: f64,
    dram_percent: f64,
    tensor_percent: f64,
    issue_percent: f64,
    warps_percent: f64,
    registers: u32,
    /// Reasons and cycles for each issued instruction, the largest first.
    stalls: Vec<(String, f64)>,
    /// Architecture of the compiled code: that of a cubin, or sm_80 if the driver compiled PTX.
    arch: String,
}

/// Returns the kernels of a family, or of a range from its first to its last name, with their times.
pub fn times(root: &Path, family: &str, range: &[&str]) -> Result<String> {
    let Some(kernels) = FAMILIES.iter().find(|found| found.name == family).map(|family| family.kernels) else {
        let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
        bail!("expected a family ({}), found {family}", names.join(", "));
    };
    let position = |name: &str| {
        let position = kernels.iter().position(|kernel| kernel.name == name);
        position.with_context(|| format!("expected a kernel of {family}, found {name}"))
    };
    let kernels = match *range {
        [] => kernels,
        [first, last] => kernels.get(position(first)?..=position(last)?).context("expected the first kernel first")?,
        _ => bail!("expected the first and the last kernel, found {}", range.join(" ")),
    };
    let Times { machine, copy_gbs, gemm_tflops, rows } = json(root, TIMES)?;
    let times: Vec<_> = kernels.iter().map(|kernel| rows.iter().find(|row| row.name == kernel.name)).collect();
    let mut columns = vec!["", "kernel", "idea"];
    if times.iter().any(Option::is_some) {
        columns.extend(["us", "rate", "of the roofline"]);
    }
    if times.iter().flatten().any(|row| row.library.is_some()) {
        columns.push("library");
    }
    let cells = kernels.iter().zip(times).map(|(Kernel { number, name, idea, source, .. }, time)| {
        let mut cells = vec![number.to_string(), format!("[`{name}`](../../../{source})"), (*idea).to_owned()];
        cells.extend(time.into_iter().flat_map(Time::cells));
        cells.resize(columns.len(), "-".to_owned());
        cells
    });
    let table = table(&columns, cells);
    if columns.len() == 3 {
        return Ok(table);
    }
    Ok(format!(
        "{table}\nOne run on {machine} ([data](../../../{TIMES})), where a copy of 1 GiB reaches {copy_gbs:.0} GB/s\n\
         and cuBLASLt's GEMM of 8192 x 8192 x 8192 {gemm_tflops:.0} TFLOP/s.\n"
    ))
}

impl Time {
    fn cells(&self) -> Vec<String> {
        let rate = match &*self.bound {
            "compute" => format!("{} TFLOP/s", rounded(self.flops / self.us / 1e6)),
            _ => format!("{} GB/s", rounded(self.bytes / self.us / 1e3)),
        };
        let library = self.library.as_ref().zip(self.percent_of_library);
        let library = library.map(|(name, percent)| format!("{} % of {name}", rounded(percent)));
        let roofline = format!("{} %", rounded(self.percent_of_roofline));
        [one_decimal_below(1000.0, self.us), rate, roofline].into_iter().chain(library).collect()
    }
}

/// Returns what the profiler measured of entry points.
pub fn profiles(root: &Path, entries: &[&str]) -> Result<String> {
    let Profiles { machine, rows } = json(root, PROFILES)?;
    let rows = entries.iter().map(|entry| {
        let row = rows.iter().find(|row| row.entry == *entry);
        row.with_context(|| {
            format!("{PROFILES}: expected entry point {entry}, found none; add it with examples/kernels/profile.py")
        })
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    let tensor_cores = rows.iter().any(|row| row.tensor_percent >= TENSOR_CORES);
    let mut columns = vec!["entry point", "us under `ncu`", "DRAM %", "tensor cores %", "issue slots %", "warps %"];
    columns.extend(["registers", "stalls, cycles per instruction"]);
    columns.retain(|&column| tensor_cores || column != "tensor cores %");
    let table = table(&columns, rows.iter().map(|row| row.cells(tensor_cores)));
    let portable = rows.iter().filter(|row| row.arch == "sm_80").map(|row| format!("`{}`", row.entry));
    let portable = portable.collect::<Vec<_>>().join(", ");
    let portable = match &*portable {
        "" => String::new(),
        _ => format!("\nThe driver compiled these from PTX for sm_80: {portable}."),
    };
    Ok(format!(
        "{table}\n`ncu` on {machine} ([data](../../../{PROFILES})). [The introduction](introduction.md#profiler-tables) \n\
         explains the columns.{portable}\n"
    ))
}

impl Profile {
    fn cells(&self, tensor_cores: bool) -> Vec<String> {
        let percent = |x| one_decimal_below(10.0, x);
        let stalls: Vec<_> = self.stalls.iter().map(|(reason, cycles)| format!("{reason} {cycles:.1}")).collect();
        let mut cells =
            vec![format!("`{}`", self.entry), one_decimal_below(1000.0, self.us), percent(self.dram_percent)];
        cells.extend(tensor_cores.then(|| percent(self.tensor_percent)));
        cells.extend([percent(self.issue_percent), percent(self.warps_percent), self.registers.to_string()]);
        cells.push(stalls.join("<br>"));
        cells
    }
}

fn json<T: DeserializeOwned>(root: &Path, path: &str) -> Result<T> {
    serde_json::from_str(&read(&root.join(path))?).with_context(|| format!("{path}: expected recorded measurements"))
}

fn table(columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<_> = rows.map(|cells| format!("| {} |\n", cells.join(" | "))).collect();
    let table = format!("| {} |\n|{}\n{}", columns.join(" | "), "---|".repeat(columns.len()), rows.concat());
    format!("<div class=\"measured\">\n\n{table}\n</div>\n")
}

fn rounded(x: f64) -> String {
    if x < 1.0 { format!("{x:.2}") } else { one_decimal_below(10.0, x) }
}

fn one_decimal_below(limit: f64, x: f64) -> String {
    if x < limit { format!("{x:.1}") } else { format!("{x:.0}") }
}
