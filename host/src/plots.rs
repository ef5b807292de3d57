//! The plots that a run writes into its directory when it ends, and the files that `plot` writes.

use crate::output::{self, Kind, Mark};
use anyhow::{Context, Result, bail};
use checkpoint::config;
use metrics::figure::{Figure, FigureOptions};
use metrics::png;
use metrics::report;
use metrics::roofline::Roofline;
use metrics::run::RunLog;
use metrics::svg;
use std::io::{Read, Write};
use std::path::Path;

/// The figure in the directory of a run.
pub const FIGURE: &str = "plots.svg";
/// The page in the directory of a run: final values, figure and settings.
pub const REPORT: &str = "report.html";
/// Largest configuration file that a page contains, in bytes.
const MAX_SETTINGS: u64 = 1 << 16;

/// Fails if `path` exists and is not a file that [`write()`] or [`write_roofline`] has written in this format.
pub fn check(path: &Path) -> Result<()> {
    let (name, mark) = match extension(path).as_deref() {
        Some("svg") => ("a figure of plot", Mark::Contains(svg::MARK)),
        Some("png") => ("a figure of plot", Mark::Contains(png::MARK)),
        // The figure of the page follows its style.
        _ => ("a page of plot", Mark::Contains(report::MARK)),
    };
    output::check(path, Kind { name, mark })
}

/// Draws the log of a run into its directory.
pub fn write_into(directory: &Path, run: &RunLog) -> Result<()> {
    let runs = std::slice::from_ref(run);
    write(runs, &FigureOptions::default(), &directory.join(FIGURE))?;
    write(runs, &FigureOptions::default(), &directory.join(REPORT))
}

/// Writes the figure of runs to a file in the format of its extension: SVG, PNG, or an HTML page with a table of the runs.
pub fn write(runs: &[RunLog], options: &FigureOptions, path: &Path) -> Result<()> {
    let bytes = match extension(path).as_deref() {
        Some("svg") => Figure::new(runs, options)?.to_svg(true).into_bytes(),
        Some("png") => Figure::new(runs, options)?.to_png()?,
        Some("html" | "htm") => {
            let settings: Vec<Option<String>> = runs.iter().map(settings).collect();
            report::page(runs, &settings, options)?.into_bytes()
        }
        _ => bail!("{}: expected a name that ends in .svg, .png or .html; change it", path.display()),
    };
    save(path, &bytes)
}

/// Writes a roofline to a file in the format of its extension: SVG or PNG.
pub fn write_roofline(figure: &Roofline, path: &Path) -> Result<()> {
    let bytes = match extension(path).as_deref() {
        Some("svg") => figure.to_svg(true).into_bytes(),
        Some("png") => figure.to_png()?,
        _ => bail!("{}: expected a name that ends in .svg or .png; change it", path.display()),
    };
    save(path, &bytes)
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase())
}

fn save(path: &Path, bytes: &[u8]) -> Result<()> {
    atomic_file::write(path, |file| Ok(file.write_all(bytes)?))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the settings of a run, if they are next to its log.
fn settings(run: &RunLog) -> Option<String> {
    let file = bounded_file::open(&run.path.with_file_name(config::FILE)).ok()?;
    let mut text = String::new();
    file.take(MAX_SETTINGS).read_to_string(&mut text).ok()?;
    Some(text)
}
