//! `verify`: compares this program with a debug state of llm.c or PyTorch.

use super::json;
use super::resources::{Hardware, describe};
use crate::style::{Tone, is_colored, paint};
use crate::terminal;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use verify::llmc::{Bound, Comparison, Verification};

/// Number of optimizer steps that are compared if the debug state has no losses.
const STEPS: usize = 10;

/// Compare logits, loss, gradients and ten AdamW steps with a debug state, as llm.c's test programs do
#[derive(Clone, Debug, clap::Args)]
pub struct Verify {
    /// Model file (.bin or .safetensors), directory of a run (its newest checkpoint) or Hugging Face directory
    #[arg(value_name = "FILE|DIR")]
    model: PathBuf,

    /// Debug state of the model, written by train_gpt2.py or train_llama3.py of llm.c (…_debug_state.bin)
    state: PathBuf,

    /// Expected losses of ten AdamW steps, one per line [default: the losses in the debug state, if any]
    #[arg(long, value_name = "FILE")]
    losses: Option<PathBuf>,

    /// Print JSON instead of text: the comparisons, the losses of the steps, and okay
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    hardware: Hardware,
}

/// Prints all comparisons, and fails if one exceeds its tolerance.
pub fn run(args: &Verify) -> Result<()> {
    let expected = args.losses.as_deref().map(read_losses).transpose()?;
    let mut opened = args.hardware.open()?;
    terminal::note(&format!("device: {}, {}", describe(&opened), opened.engine.dtype().name()))?;
    let mut verification = Verification::open(&args.model, &args.state, &mut *opened.engine, opened.tf32)?;
    let mut comparisons = verification.gradients()?;
    if !args.json {
        print(&comparisons)?;
    }
    let recorded = verification.recorded_losses()?;
    let expected = expected.unwrap_or(recorded);
    let losses = verification.steps(if expected.is_empty() { STEPS } else { expected.len() })?;
    let steps = verification.compare_losses(&losses, &expected);
    let of_gradients = comparisons.len();
    comparisons.extend(steps);
    let failed = comparisons.iter().filter(|c| !c.ok()).count();
    if args.json {
        let comparisons: Vec<Value> = comparisons.iter().map(as_json).collect();
        json::print(&json!({ "comparisons": comparisons, "losses": losses, "okay": failed == 0 }))?;
    } else {
        print_steps(&losses, &comparisons[of_gradients..])?;
        writeln!(stdout(), "overall okay: {}", u8::from(failed == 0))?;
    }
    if failed > 0 {
        bail!("{failed} of {} comparisons exceed their tolerance", comparisons.len());
    }
    Ok(())
}

fn print(comparisons: &[Comparison]) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{:<12} {:>12} {:>12} {:>22}", "tensor", "absolute", "relative", "allowed")?;
    for c in comparisons {
        let allowed = match c.bound {
            Bound::Absolute(bound) => format!("{bound:.0e} absolute"),
            Bound::Relative(bound) => format!("{bound:.0e} relative"),
        };
        writeln!(
            out,
            "{:<12} {:>12.2e} {:>12.2e} {allowed:>22}  {}",
            c.name,
            c.max_abs_error,
            c.max_rel_error,
            verdict(c)
        )?;
    }
    Ok(())
}

fn print_steps(losses: &[f32], comparisons: &[Comparison]) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out)?;
    for (i, loss) in losses.iter().enumerate() {
        let compared = comparisons.get(i);
        let verdict =
            compared.map_or_else(String::new, |c| format!("  difference {:.1e}  {}", c.max_abs_error, verdict(c)));
        writeln!(out, "step {:>2}: loss {loss:.6}{verdict}", i + 1)?;
    }
    Ok(())
}

fn as_json(comparison: &Comparison) -> Value {
    let Comparison { name, max_abs_error, max_rel_error, bound } = comparison;
    let (kind, allowed) = match bound {
        Bound::Absolute(bound) => ("absolute", bound),
        Bound::Relative(bound) => ("relative", bound),
    };
    json!({
        "name": name,
        "max_abs_error": max_abs_error,
        "max_rel_error": max_rel_error,
        "allowed": { kind: allowed },
        "okay": comparison.ok(),
    })
}

fn verdict(comparison: &Comparison) -> String {
    let (text, tone) = if comparison.ok() { ("ok", Tone::Good) } else { ("FAILED", Tone::Bad) };
    paint(text, tone, is_colored(&stdout()))
}

fn read_losses(path: &Path) -> Result<Vec<f32>> {
    let text = bounded_file::read_to_string(path, bounded_file::SETTINGS)
        .with_context(|| format!("cannot read losses {}", path.display()))?;
    let number = |(i, line): (usize, &str)| {
        let number = line.trim().parse::<f32>().ok().filter(|loss| loss.is_finite());
        number.with_context(|| format!("{}, line {}: expected a loss, found '{line}'", path.display(), i + 1))
    };
    let losses = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(number);
    let losses = losses.collect::<Result<Vec<_>>>()?;
    ensure!(losses.len() == STEPS, "{}: expected {STEPS} losses, one per line, found {}", path.display(), losses.len());
    Ok(losses)
}
