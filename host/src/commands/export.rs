//! `export`: writes a model in a format of another program.

use super::generation::trial_command;
use super::resources::open_with_adapters;
use crate::output::{self, Kind, Mark};
use crate::terminal;
use anyhow::{Result, bail, ensure};
use checkpoint::config;
use checkpoint::directory::{done_steps, model_name};
use checkpoint::model_file;
use engine::open::Precision;
use engine::tensor::DType;
use interchange::export::{self, WrittenTokenizer};
use interchange::peft::paths_of;
use interchange::{ModelSource, tokenizer};
use model::Descriptor;
use std::fs;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  Load a trained model with transformers:
    llm-rs export --format hf runs/a model
    python -c \"from transformers import pipeline; \\
      print(pipeline('text-generation', 'model')('The '))\"

  Run it with llama.cpp:
    llm-rs export --format gguf runs/a model.gguf
    llama-cli -m model.gguf -p 'The '

  Convert a Hugging Face model for llm.c:
    llm-rs export --format llmc --dtype bf16 gpt2/ gpt2_124M_bf16.bin";

/// Write a model for other programs: transformers, llama.cpp or llm.c
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Export {
    /// Format of the output
    #[arg(long, value_enum)]
    format: Format,

    /// Number format of the weights [default: that of the checkpoint]
    #[arg(long, value_enum, value_name = "bf16|fp32", hide_possible_values = true)]
    dtype: Option<Precision>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Replace an existing export
    #[arg(long)]
    overwrite: bool,

    /// With --format hf, for a model with low-rank adapters: write the whole model, with the adapters added to its weights, instead of a
    /// directory of PEFT. Other formats always contain the whole model
    #[arg(long)]
    merge: bool,

    /// Add low-rank adapters to the model: a directory of PEFT, or a run with --lora-rank
    #[arg(long, value_name = "DIR")]
    lora: Option<PathBuf>,

    /// Model file (.bin or .safetensors), directory of a run (its newest checkpoint), Hugging Face directory, or model_STEP.pt of nanochat
    checkpoint: PathBuf,

    /// Directory (hf) or file (llmc, gguf) to write
    out: PathBuf,
}

/// The first bytes of llm.c's model files of GPT-2 and of Llama.
const MODEL_FILES: [&[u8]; 2] = [&model_file::gpt2::MAGIC.to_le_bytes(), &model_file::llama::MAGIC.to_le_bytes()];

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    /// Hugging Face directory, for transformers
    Hf,
    /// Model file (.bin), for llm.c
    Llmc,
    /// GGUF file, for llama.cpp
    Gguf,
}

/// Writes the model and prints a summary.
pub fn run(args: &Export) -> Result<()> {
    let source = open_with_adapters(&args.checkpoint, args.lora.as_deref())?;
    ensure!(
        !args.merge || source.adapters().is_some(),
        "--merge: expected a model with low-rank adapters, found one without; omit --merge"
    );
    let dtype = match args.dtype {
        Some(Precision::Bf16) => DType::Bf16,
        Some(Precision::Fp32) => DType::F32,
        Some(Precision::Fp8) => bail!("--dtype: expected bf16 or fp32, found fp8"),
        None => source.dtype(),
    };
    args.check_output(&source)?;
    let (out, named, overwrite) = (args.out.as_path(), args.tokenizer.as_deref(), args.overwrite);
    let tokenizer = match args.format {
        Format::Hf if source.adapters().is_some() && !args.merge => {
            Some(export::adapters(&source, out, dtype, overwrite)?)
        }
        Format::Hf => Some(export::hugging_face(&source, named, out, dtype, overwrite)?),
        Format::Gguf => Some(export::gguf(&source, named, out, dtype, overwrite)?),
        Format::Llmc => {
            export::llmc(&source, out, dtype, overwrite)?;
            None
        }
    };
    let rounded = if dtype == DType::Bf16 && source.dtype() == DType::F32 { ", rounded from fp32" } else { "" };
    let mut lines = stdout().lock();
    writeln!(lines, "read {}: {}", source.path().display(), source.descriptor())?;
    writeln!(
        lines,
        "wrote {}: {}{rounded}, {:.1} MB{}",
        out.display(),
        dtype.name(),
        bytes(out)? as f64 / 1e6,
        tokenizer.map_or(String::new(), |tokenizer| format!(", {}", describe(tokenizer)))
    )?;
    if let (Format::Hf, Some(WrittenTokenizer::None)) = (args.format, tokenizer) {
        writeln!(
            lines,
            "note: there is no built-in tokenizer for a vocabulary of {}; pass --tokenizer FILE, or add {} to the directory",
            source.descriptor().vocab,
            tokenizer::FILES[0]
        )?;
    }
    if let Format::Hf | Format::Llmc = args.format
        && !terminal::is_quiet()
    {
        writeln!(lines, "\nnext: {}", trial_command(out))?;
    }
    Ok(())
}

impl Export {
    /// Fails if the output is the model itself, the model from which the run started, or an existing file that is not an export in this
    /// format.
    fn check_output(&self, source: &ModelSource) -> Result<()> {
        let (out, directory) = (self.out.as_path(), source.companions());
        for input in [source.path(), source.directory()].into_iter().chain(directory.as_deref()) {
            output::check_input(out, input)?;
        }
        if let Some(model) = models_of_run(source.directory()).into_iter().find(|model| output::is_same(out, model)) {
            bail!(
                "cannot write {}: expected a path other than the model {} from which the run started, found the same path; choose \
                 another name",
                out.display(),
                model.display()
            );
        }
        let (name, mark) = match self.format {
            Format::Hf => return Ok(()),
            Format::Gguf => ("a GGUF file", Mark::Start(&[b"GGUF"])),
            Format::Llmc => ("a model file of llm.c", Mark::Start(&MODEL_FILES)),
        };
        // Without --overwrite, too: the advice to add it must be right.
        output::check_existing(out, Kind { name, mark })?;
        // A link may have another name.
        let Ok(target) = out.canonicalize() else { return Ok(()) };
        let in_run = |step: &usize| target.file_name().is_some_and(|name| name == model_name(*step).as_str());
        let steps = done_steps(atomic_file::parent(&target))?;
        if let Some(step) = steps.into_iter().find(in_run) {
            bail!(
                "cannot write {}: expected a new file or an export to replace, found the checkpoint of step {step} of a run; choose \
                 another name",
                out.display()
            );
        }
        Ok(())
    }
}

/// Returns the paths that the model may have from which a run started. Its path may be relative to a directory above the run.
fn models_of_run(run: &Path) -> Vec<PathBuf> {
    let model = config::saved(run, "model").and_then(|model| model.as_str().map(str::to_owned));
    let Some(model) = model.filter(|model| model.parse::<Descriptor>().is_err()) else { return Vec::new() };
    // A file may stand for the directory of a model.
    paths_of(&model, run)
        .into_iter()
        .flat_map(|path| [path.is_file().then(|| atomic_file::parent(&path).to_owned()), Some(path)])
        .flatten()
        .collect()
}

fn describe(tokenizer: WrittenTokenizer) -> String {
    match tokenizer {
        WrittenTokenizer::Copied => "tokenizer of the source".to_owned(),
        WrittenTokenizer::BuiltIn(size) if size == ::tokenizer::BYTE_VOCAB => "byte-level tokenizer".to_owned(),
        WrittenTokenizer::BuiltIn(_) => "GPT-2's tokenizer".to_owned(),
        WrittenTokenizer::None => "no tokenizer".to_owned(),
    }
}

/// Returns the size of a file, or of the files in a directory.
fn bytes(path: &Path) -> Result<u64> {
    if !path.is_dir() {
        return Ok(fs::metadata(path)?.len());
    }
    fs::read_dir(path)?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}
