//! `plot`: draws the logs of runs.

mod live;

use crate::output;
use crate::plots;
use crate::values::{count, momentum};
use anyhow::{Context, Result, ensure};
use metrics::curves::{Metric, XAxis};
use metrics::figure::FigureOptions;
use metrics::references::{self, REFERENCES, Reference};
use metrics::roofline::Roofline;
use metrics::run::{RunLog, read_all};
use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  Draw a run into plots.svg:
    llm-rs plot runs/a

  Compare runs, one of them of llm.c, over tokens, with the loss of OpenAI's GPT-2 on FineWeb:
    llm-rs plot runs/a muon=runs/b llmc=log124M/main.log --x tokens --tokens-per-step 524288 \\
      --reference gpt2-124m --out compare.png

  Write a page with curves, final values and settings:
    llm-rs plot runs/a runs/b --html compare.html

  Watch the loss of a run in the terminal:
    llm-rs plot runs/a --live

  Draw how close each operation of a training step comes to what the machine can do:
    llm-rs bench kernels -e d12 --json kernels.json
    llm-rs plot --roofline kernels.json --out roofline.svg";

/// Draw the losses and other values of runs as SVG, PNG or HTML, or in the terminal; or a roofline
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Plot {
    /// Directories of runs, or their main.jsonl or main.log; main.log may be llm.c's. NAME=RUN sets the name in the legend
    #[arg(value_name = "RUN", required_unless_present = "roofline")]
    runs: Vec<PathBuf>,

    /// Draw the measurements of `bench kernels --json FILE` instead of runs
    #[arg(long, value_name = "FILE", conflicts_with_all = ["runs", "html", "live", "x", "metrics", "reference"])]
    roofline: Option<PathBuf>,

    /// File to write. Its extension selects the format: .svg, .png or .html [default: plots.svg]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Write an HTML page with the curves, the final values and the settings of the runs
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Horizontal axis
    #[arg(long, value_enum, default_value_t)]
    x: XAxis,

    /// Tokens per optimizer step, for logs without token counts, such as llm.c's
    #[arg(long, value_name = "N", value_parser = count)]
    tokens_per_step: Option<usize>,

    /// Values to draw, separated by commas [default: all that the logs contain]
    #[arg(long, value_enum, value_name = "NAME,…", value_delimiter = ',')]
    metrics: Vec<Metric>,

    /// Factor of the exponential moving average of noisy curves; 0: no smoothing [default: 0.9, less for short runs, up to 0.999 for
    /// long ones]
    #[arg(long, value_name = "X", value_parser = momentum)]
    smooth: Option<f32>,

    /// Logarithmic horizontal axis
    #[arg(long)]
    log_x: bool,

    /// Logarithmic vertical axes for loss, learning rate and gradient norm
    #[arg(long)]
    log_y: bool,

    /// Published results to draw as lines, separated by commas: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m (loss on FineWeb, and
    /// HellaSwag), gpt3-125m, gpt3-350m, gpt3-760m, gpt3-1.3b (HellaSwag); none [default: HellaSwag of similar models]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = reference)]
    reference: Option<Vec<Option<Reference>>>,

    /// Draw the loss in the terminal, and follow the log while the run continues. q: quit
    #[arg(long, conflicts_with_all = ["out", "html", "metrics", "reference"])]
    live: bool,
}

/// Parses the name of a published model, or `none`.
fn reference(name: &str) -> Result<Option<Reference>, String> {
    match (name, references::find(name)) {
        ("none", _) => Ok(None),
        (_, Some(reference)) => Ok(Some(reference)),
        _ => Err(format!("expected {} or none", REFERENCES.map(|reference| reference.id).join(", "))),
    }
}

/// Runs the command.
pub fn run(args: &Plot) -> Result<()> {
    let read = || {
        let mut runs = read_all(&args.runs)?;
        if let Some(tokens) = args.tokens_per_step {
            for run in &mut runs {
                run.assume_tokens_per_step(tokens as u64);
            }
        }
        Ok(runs)
    };
    if let Some(measurements) = &args.roofline {
        return roofline(measurements, args.out.as_deref());
    }
    let runs = read()?;
    let options = FigureOptions {
        x: args.x,
        log_x: args.log_x,
        log_y: args.log_y,
        // The shortest decimal number is what the user typed.
        smoothing: args.smooth.map(|factor| factor.to_string().parse()).transpose()?,
        metrics: args.metrics.clone(),
        references: args.reference.as_ref().map(|names| names.iter().copied().flatten().collect()),
        ..FigureOptions::default()
    };
    if args.live {
        return live::run(&read, &options);
    }
    let out = args.out.clone().or_else(|| args.html.is_none().then(|| PathBuf::from("plots.svg")));
    if let Some(html) = &args.html {
        let is_page = html.extension().is_some_and(|extension| extension == "html" || extension == "htm");
        ensure!(is_page, "--html: expected a name that ends in .html, found {}; change it", html.display());
    }
    out.iter().chain(&args.html).try_for_each(|path| plots::check(path))?;
    output::check_distinct(args.out.as_deref(), args.html.as_deref())?;
    report_damage(&runs)?;
    for path in out.iter().chain(&args.html) {
        plots::write(&runs, &options, path)?;
        writeln!(stdout(), "wrote {}", path.display())?;
    }
    Ok(())
}

/// Draws the measurements of `bench kernels`.
fn roofline(measurements: &Path, out: Option<&Path>) -> Result<()> {
    let name = measurements.display().to_string();
    let text =
        bounded_file::read(measurements, bounded_file::DESCRIPTION).with_context(|| format!("cannot read {name}"))?;
    let figure = Roofline::parse(&name, &text)?;
    let out = out.unwrap_or(Path::new("roofline.svg"));
    plots::check(out)?;
    plots::write_roofline(&figure, out)?;
    Ok(writeln!(stdout(), "wrote {}", out.display())?)
}

/// Reports lines that could not be read.
pub fn report_damage(runs: &[RunLog]) -> Result<()> {
    for run in runs.iter().filter(|run| run.damaged_lines > 0) {
        let n = run.damaged_lines;
        let lines = if n == 1 { "1 damaged line was".to_owned() } else { format!("{n} damaged lines were") };
        writeln!(stderr(), "warning: {}: {lines} left out", run.path.display())?;
    }
    Ok(())
}
