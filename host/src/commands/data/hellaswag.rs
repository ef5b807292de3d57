//! `data hellaswag`.

use super::download::local_or_downloaded;
use super::evaluation;
use anyhow::Result;
use data::hellaswag;
use std::path::{Path, PathBuf};

/// Download and convert HellaSwag for --hellaswag: questions that ask for the most plausible of four endings
#[derive(Debug, clap::Args)]
pub struct Hellaswag {
    /// Read JSON lines with ctx, endings and label from this file instead of downloading hellaswag_val.jsonl of
    /// <https://github.com/rowanz/hellaswag>
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// Evaluation file to write
    #[arg(short, long, value_name = "FILE", default_value = "data/hellaswag/hellaswag_val.bin")]
    out: PathBuf,
}

/// Writes the evaluation file.
pub fn run(args: &Hellaswag) -> Result<()> {
    evaluation::check(&args.out)?;
    let directory = args.out.parent().unwrap_or(Path::new(""));
    let from = local_or_downloaded(args.from.as_deref(), || Ok(hellaswag::remote()), directory)?;
    evaluation::write("--hellaswag", &args.out, &hellaswag::read(&from)?)
}
