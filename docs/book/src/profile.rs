//! Tables of what Nsight Compute measured of the kernels in `examples/kernels`.

use anyhow::{Context, Result};
use serde::Deserialize;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The output of `examples/kernels/profile.py`.
const PROFILES: &str = "docs/internals/bench/kernel-profiles.json";
/// Percentage from which a kernel counts as one that uses tensor cores. The counter of kernels without them is up to 2.
const TENSOR_CORES: f64 = 5.0;

/// The recorded profiles.
#[derive(Deserialize)]
struct Profiles {
    machine: String,
    rows: Vec<Row>,
}

/// The longest launch of an entry point.
#[derive(Deserialize)]
struct Row {
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

impl Row {
    fn cells(&self, tensor_cores: bool) -> String {
        let Self { entry, us, registers, .. } = self;
        let us = if *us < 1000.0 { format!("{us:.1}") } else { format!("{us:.0}") };
        let [dram, tensor, issue, warps] =
            [self.dram_percent, self.tensor_percent, self.issue_percent, self.warps_percent].map(percent);
        let tensor = if tensor_cores { format!(" {tensor} |") } else { String::new() };
        let stalls: Vec<_> = self.stalls.iter().map(|(reason, cycles)| format!("{reason} {cycles:.1}")).collect();
        let stalls = stalls.join("<br>");
        format!("| `{entry}` | {us} | {dram} |{tensor} {issue} | {warps} | {registers} | {stalls} |")
    }
}

/// Returns a percentage with the digits that the data has.
fn percent(x: f64) -> String {
    if x < 10.0 { format!("{x:.1}") } else { format!("{x:.0}") }
}

/// Returns the table of entry points in the recorded profiles.
pub fn table(root: &Path, entries: &[&str]) -> Result<String> {
    let path = root.join(PROFILES);
    if !path.exists() {
        return Ok(
            "To profile kernels on your GPU: `examples/kernels/profile.py PROGRAM FILE KERNEL…`, where PROGRAM is \
                   `kernels`.\n"
                .into(),
        );
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {PROFILES}"))?;
    let profiles: Profiles = serde_json::from_str(&text)
        .with_context(|| format!("{PROFILES}: expected the JSON of examples/kernels/profile.py"))?;
    let rows = entries.iter().map(|entry| {
        let row = profiles.rows.iter().find(|row| row.entry == *entry);
        row.with_context(|| {
            format!("{PROFILES}: expected entry point {entry}, found none; add it with examples/kernels/profile.py")
        })
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    let tensor_cores = rows.iter().any(|row| row.tensor_percent >= TENSOR_CORES);
    let (title, line) = if tensor_cores { (" tensor cores % |", "---|") } else { ("", "") };
    let mut out = format!(
        "<div class=\"measured\">\n\n\
         | entry point | us under `ncu` | DRAM % |{title} issue slots % | warps % | registers | stalls, cycles per instruction |\n\
         |---|---|---|{line}---|---|---|---|\n"
    );
    for row in &rows {
        writeln!(out, "{}", row.cells(tensor_cores))?;
    }
    write!(
        out,
        "\n</div>\n\n`ncu` on {} ([data](repo:{PROFILES})). [The introduction](introduction.md#profiler-tables) explains the columns.",
        profiles.machine
    )?;
    let portable = rows.iter().filter(|row| row.arch == "sm_80").map(|row| format!("`{}`", row.entry));
    let portable = portable.collect::<Vec<_>>().join(", ");
    if !portable.is_empty() {
        write!(out, " The driver compiled these from PTX for sm_80: {portable}.")?;
    }
    out.push('\n');
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("docs/internals/bench")).unwrap();
        let json = r#"{"machine": "a GPU", "rows": [
            {"entry": "gelu_naive", "us": 205.4, "dram_percent": 52.4, "tensor_percent": 2.0, "issue_percent": 36.1,
             "warps_percent": 72.0, "registers": 16, "stalls": [["long_scoreboard", 24.4], ["wait", 2.4]], "arch": "sm_90a"},
            {"entry": "gemm_mma", "us": 842.2, "dram_percent": 4.9, "tensor_percent": 26.1, "issue_percent": 27.8,
             "warps_percent": 24.6, "registers": 125, "stalls": [["long_scoreboard", 5.5], ["wait", 2.1]], "arch": "sm_80"}]}"#;
        fs::write(directory.path().join(PROFILES), json).unwrap();
        directory
    }

    #[test]
    fn a_table_has_the_measured_entry_points() {
        let text = table(repository().path(), &["gelu_naive"]).unwrap();
        let row = "| `gelu_naive` | 205.4 | 52 | 36 | 72 | 16 | long_scoreboard 24.4<br>wait 2.4 |\n";
        assert!(text.contains(row) && text.contains("`ncu` on a GPU"), "{text}");
        assert!(!text.contains("tensor") && !text.contains("gemm_mma") && !text.contains("sm_80"), "{text}");
    }

    #[test]
    fn tensor_cores_have_a_column_if_a_kernel_uses_them() {
        let text = table(repository().path(), &["gemm_mma", "gelu_naive"]).unwrap();
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert!(
            rows[0].contains(" tensor cores % |") && rows[2].starts_with("| `gemm_mma` | 842.2 | 4.9 | 26 |"),
            "{text}"
        );
        assert!(rows[3].starts_with("| `gelu_naive` | 205.4 | 52 | 2.0 |"), "{text}");
        assert!(text.ends_with("The driver compiled these from PTX for sm_80: `gemm_mma`.\n"), "{text}");
        assert!(rows.iter().all(|row| row.matches('|').count() == 9), "{text}");
    }

    #[test]
    fn an_unknown_entry_point_is_an_error() {
        let error = table(repository().path(), &["gelu_naive", "gelu_fast"]).unwrap_err().to_string();
        assert!(
            error.starts_with("docs/internals/bench/kernel-profiles.json: expected entry point gelu_fast"),
            "{error}"
        );
    }

    #[test]
    fn without_profiles_the_text_says_how_to_measure() {
        let text = table(tempfile::tempdir().unwrap().path(), &["gelu_naive"]).unwrap();
        assert!(text.contains("examples/kernels/profile.py") && !text.contains('|'), "{text}");
    }
}
