//! `eval`: the loss of a model on token files, and its accuracy on HellaSwag and MMLU. `eval core` computes CORE,
//! and `eval generate` the accuracy of generated answers.

mod core;
mod generate;

use super::json;
use super::resources::{Hardware, ModelPath, load};
use crate::datasets::{Datasets, document_start, has_masks};
use crate::evaluate;
use crate::evaluate::multiple_choice::{self, Score};
use crate::evaluate::predictions::Predictions;
use crate::evaluate::text::{self, TextScore, TokenBytes};
use crate::output::{self, Kind, Mark};
use crate::terminal;
use crate::values::{count, switch};
use anyhow::{Context, Result};
use checkpoint::config;
use clap::ArgAction;
use data::mixture::{Packing, Settings, Source};
use data::{Batches, DocumentStart, Geometry, Loader, Mixture, MultipleChoice, Prefetch, mask};
use engine::{BatchLayout, Engine};
use interchange::ModelSource;
use model::{Decoder, Descriptor, Unsharded, fit};
use serde::Serialize;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;
use tokenizer::stored::Search;

/// Compute a model's loss, perplexity and bits per byte on token files, and its accuracy on HellaSwag and MMLU
///
/// A run whose directory is named core or generate is ./core or ./generate.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Eval {
    #[command(subcommand)]
    command: Option<EvalCommand>,

    #[command(flatten)]
    model: ModelPath,

    /// Token files (.bin); quote the pattern
    #[arg(short = 'j', long, value_name = "GLOB", required_unless_present_any = ["hellaswag", "mmlu"])]
    val: Option<String>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or that of the token
    /// files, or the built-in one with the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Evaluation file (.bin) of `llm-rs data hellaswag`
    #[arg(long, value_name = "FILE")]
    hellaswag: Option<PathBuf>,

    /// Use only the first N examples of --hellaswag [default: all]
    #[arg(long, value_name = "N", value_parser = count, requires = "hellaswag")]
    hellaswag_examples: Option<usize>,

    /// Evaluation file (.bin) of `llm-rs data mmlu`
    #[arg(long, value_name = "FILE")]
    mmlu: Option<PathBuf>,

    /// Use only the first N examples of --mmlu [default: all]
    #[arg(long, value_name = "N", value_parser = count, requires = "mmlu")]
    mmlu_examples: Option<usize>,

    /// Sequences in a batch
    #[arg(short, long, value_name = "B", default_value = "4", value_parser = count)]
    batch: usize,

    /// Tokens in a sequence [default: for --val and a run, the sequence length of the run; otherwise 1024, or the model's maximum if that
    /// is smaller]
    #[arg(short = 't', long, value_name = "T", value_parser = count)]
    seq: Option<usize>,

    /// Attention only within documents, as in `train` [default: for --val and a run, that of the run; otherwise 1 for conversations, and 0
    /// for text]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, requires = "val")]
    document_mask: Option<bool>,

    /// Number of batches to evaluate, at most as many as the data has [default: all]
    #[arg(short = 'm', long, value_name = "N", value_parser = count)]
    val_batches: Option<usize>,

    /// Also write the logits and the loss of each target token of --val to this file, as safetensors of f32. Each target token takes 4
    /// bytes for each token of the vocabulary
    #[arg(long, value_name = "FILE", requires = "val")]
    logits: Option<PathBuf>,

    /// Also write the results to this file as JSON. Without FILE, print JSON instead of text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STANDARD_OUTPUT)]
    json: Option<PathBuf>,

    #[command(flatten)]
    hardware: Hardware,
}

#[derive(Debug, clap::Subcommand)]
enum EvalCommand {
    Core(core::Core),
    Generate(generate::Generate),
}

/// The file name that stands for standard output.
const STANDARD_OUTPUT: &str = "-";

/// The files that the command writes.
const RESULTS: Kind = Kind { name: "results of eval", mark: Mark::Keys(&["model", "version", "machine", "batch"]) };
const LOGITS: Kind = Kind { name: "logits of eval", mark: Mark::Tensors(&["logits", "losses"]) };

/// The results, as they are written to JSON.
#[derive(Debug, Serialize)]
struct Results {
    model: String,
    version: &'static str,
    machine: String,
    precision: &'static str,
    /// Sequences in a batch, and tokens in a sequence.
    batch: [usize; 2],
    #[serde(skip_serializing_if = "Option::is_none")]
    validation: Option<Validation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hellaswag: Option<SetScore>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mmlu: Option<SetScore>,
}

/// The loss on token files.
#[derive(Debug, Serialize)]
struct Validation {
    data: String,
    loss: f64,
    perplexity: f64,
    /// `None` if the vocabulary has no tokenizer, or if all tokens are special.
    bits_per_byte: Option<f64>,
    tokens: usize,
    /// Bytes of the tokens' text. `None` if the vocabulary has no tokenizer.
    bytes: Option<u64>,
}

/// The score on a multiple-choice set.
#[derive(Debug, Serialize)]
struct SetScore {
    data: String,
    accuracy: f64,
    correct: usize,
    examples: usize,
}

/// The data to evaluate on. Nothing has been computed yet.
struct Inputs {
    loader: Option<Batches>,
    hellaswag: Option<MultipleChoice>,
    mmlu: Option<MultipleChoice>,
}

/// Prints the loss and the accuracies.
pub fn run(args: &Eval) -> Result<()> {
    if let Some(command) = &args.command {
        return match command {
            EvalCommand::Core(args) => core::run(args),
            EvalCommand::Generate(args) => generate::run(args),
        };
    }
    let json = args.json.as_deref().filter(|path| *path != Path::new(STANDARD_OUTPUT));
    json.map_or(Ok(()), |path| output::check(path, RESULTS))?;
    args.logits.as_deref().map_or(Ok(()), |path| output::check(path, LOGITS))?;
    output::check_distinct(json, args.logits.as_deref())?;
    let file = args.model.open()?;
    let descriptor = file.descriptor();
    let [of_text, planned] = args.layouts(&file)?;
    let datasets = args.datasets()?;
    let tokenizer = args.tokenizer(&file, &datasets)?;
    let Inputs { loader, hellaswag, mmlu } =
        args.inputs(descriptor, [of_text, planned], (&datasets, tokenizer.as_ref()))?;
    let of_run = || config::saved(file.directory(), "document-mask")?.as_bool();
    let is_masked = loader.as_ref().is_some_and(|loader| loader.shards().iter().any(|shard| shard.mask().is_some()));
    let mask = args.document_mask.or_else(of_run).unwrap_or(is_masked) && loader.is_some();
    let documents = document_start(mask, tokenizer.as_ref(), is_masked)?;
    let mut engine = args.hardware.open_for_inference()?;
    let engine = &mut *engine;
    let model = load(file, [planned.b, planned.t], args.hardware.weights(), engine)?;
    let mut results = Results {
        model: args.model.get().display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        machine: engine.describe(),
        precision: args.hardware.weight_format(engine),
        batch: [of_text.b, of_text.t],
        validation: None,
        hellaswag: None,
        mmlu: None,
    };
    if let Some(loader) = loader {
        let validation = args.validate(&model, engine, (loader, documents), tokenizer.as_ref())?;
        args.print(&validation.describe(of_text))?;
        results.validation = Some(validation);
    }
    let sets = [("HellaSwag", hellaswag, &mut results.hellaswag), ("MMLU", mmlu, &mut results.mmlu)];
    for (name, set, result) in sets {
        let Some(set) = set else { continue };
        let all = set.share(0, 1);
        let score = multiple_choice::score(&model, engine, &mut Unsharded, planned, &set, all, 0)?;
        args.print(&format!("{name}: {score}"))?;
        *result = Some(SetScore::new(&set, score));
    }
    match args.json.as_deref() {
        Some(path) if path == Path::new(STANDARD_OUTPUT) => json::print(&results),
        Some(path) => json::write(path, &results),
        None => Ok(()),
    }
}

impl Eval {
    /// Returns the shape of the batches of text, and the largest shape of all batches: multiple-choice questions may be longer than the
    /// sequences of the run.
    fn layouts(&self, model: &ModelSource) -> Result<[BatchLayout; 2]> {
        let descriptor = model.descriptor();
        let default = self.seq.unwrap_or(descriptor.max_seq_len.min(1024));
        let of_run = || usize::try_from(config::saved(model.directory(), "seq")?.as_integer()?).ok();
        let of_text = self.val.as_ref().and(self.seq.or_else(of_run)).unwrap_or(default);
        let has_sets = self.hellaswag.is_some() || self.mmlu.is_some();
        let longest = if has_sets { of_text.max(default) } else { of_text };
        let named = || self.model.get().display().to_string();
        fit::check_batch(&descriptor, self.batch, longest).with_context(named)?;
        Ok([of_text, longest].map(|t| BatchLayout::new(self.batch, t)))
    }

    /// Reads the description of the data.
    fn datasets(&self) -> Result<Datasets> {
        Datasets::open(&self.val.as_deref().map(|val| ("--val", val)).into_iter().collect::<Vec<_>>())
    }

    /// Finds the tokenizer. An unknown one is reported, because only bits per byte and the evaluation sets need it.
    fn tokenizer(&self, model: &ModelSource, datasets: &Datasets) -> Result<Option<Tokenizer>> {
        let named = self.tokenizer.as_deref().map(Tokenizer::named).transpose().context("--tokenizer")?;
        let vocab = model.descriptor().vocab;
        datasets.check_vocab(&self.model.get().display().to_string(), vocab)?;
        let (named, data) = (named.as_ref(), datasets.tokenizer());
        let found = Search { named, model: Some(model.directory()), data, vocab }.find()?;
        if let Some(note) = &found.note {
            writeln!(stderr(), "warning: {note}")?;
        }
        Ok(found.tokenizer)
    }

    /// Opens the data, and checks that it fits the model.
    fn inputs(
        &self,
        descriptor: Descriptor,
        [BatchLayout { b, t, .. }, planned]: [BatchLayout; 2],
        (datasets, tokenizer): (&Datasets, Option<&Tokenizer>),
    ) -> Result<Inputs> {
        let loader = |val: &String| -> Result<Batches> {
            let (shards, geometry, vocab) = (datasets.tokens(val)?, Geometry::single(b, t), descriptor.vocab);
            if !has_masks(&shards) {
                return Ok(Loader::new(shards, geometry, vocab, None)?.into());
            }
            mask::check(&shards)?;
            let source = Source { name: "val".to_owned(), shards, weight: 1.0, max_epochs: Some(1) };
            let separator = tokenizer.map(Tokenizer::document);
            let settings = Settings { geometry, vocab, shuffle: None, packing: Packing::Pad, separator };
            Ok(Mixture::new(vec![source], settings)?.into())
        };
        let open = |path: Option<&Path>, examples| {
            let set =
                path.map(|path| MultipleChoice::open_first(path, examples)?.with_tokenizer(tokenizer)).transpose()?;
            if let Some(set) = &set {
                set.check(descriptor.vocab, planned.t)?;
            }
            anyhow::Ok(set)
        };
        Ok(Inputs {
            loader: self.val.as_ref().map(loader).transpose()?,
            hellaswag: open(self.hellaswag.as_deref(), self.hellaswag_examples)?,
            mmlu: open(self.mmlu.as_deref(), self.mmlu_examples)?,
        })
    }

    fn validate(
        &self,
        model: &Decoder,
        engine: &mut dyn Engine,
        (loader, documents): (Batches, Option<DocumentStart>),
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Validation> {
        let token_bytes = tokenizer.map(TokenBytes::new);
        let all = loader.batches_per_epoch()?;
        let batches = self.val_batches.map_or(all, |wanted| wanted.min(all));
        if let Some(note) = self.val_batches.and_then(|wanted| evaluate::excess_batches(wanted, all)) {
            terminal::note(&format!("note: {note}"))?;
        }
        let mut data = Prefetch::start_with_documents(loader.rewinding_after(batches), engine, documents)?;
        let lengths = token_bytes.clone().unwrap_or_default();
        let BatchLayout { b, t, .. } = data.layout();
        let mut score = |predictions: Option<&mut Predictions>| {
            text::score(model, engine, &mut Unsharded, &mut data, batches, &lengths, predictions)
        };
        let score = match &self.logits {
            Some(path) => atomic_file::write(path, |file| {
                let mut predictions = Predictions::new(file, batches * b * t, model.descriptor.vocab)?;
                let score = score(Some(&mut predictions))?;
                predictions.finish()?;
                Ok(score)
            })?,
            None => score(None)?,
        };
        Ok(Validation::new(self.val.clone().unwrap_or_default(), &score, token_bytes.is_some()))
    }

    /// Prints a line, unless standard output is for JSON.
    fn print(&self, line: &str) -> Result<()> {
        if self.json.as_deref() != Some(Path::new(STANDARD_OUTPUT)) {
            terminal::line(line)?;
        }
        Ok(())
    }
}

impl Validation {
    /// `has_bytes` states whether the lengths of the tokens are known.
    fn new(data: String, score: &TextScore, has_bytes: bool) -> Self {
        Self {
            data,
            loss: score.loss,
            perplexity: score.perplexity(),
            bits_per_byte: score.bits_per_byte(),
            tokens: score.tokens,
            bytes: has_bytes.then_some(score.bytes),
        }
    }

    fn describe(&self, BatchLayout { b, t, .. }: BatchLayout) -> String {
        let Self { loss, perplexity, tokens, .. } = self;
        let bits = match self.bits_per_byte {
            Some(bits) => format!("{bits:.4} bits per byte"),
            None if self.bytes.is_some() => "no bits per byte: all tokens are special".to_owned(),
            None => "no bits per byte: the vocabulary has no tokenizer".to_owned(),
        };
        let bytes = self.bytes.map(|bytes| format!(", {bytes} bytes")).unwrap_or_default();
        format!(
            "val loss {loss:.6} | perplexity {perplexity:.2} | {bits} | {tokens} tokens{bytes}, batches of {b} x {t}"
        )
    }
}

impl SetScore {
    fn new(set: &MultipleChoice, score: Score) -> Self {
        let Score { correct, examples } = score;
        Self { data: set.name().to_owned(), accuracy: score.accuracy(), correct, examples }
    }
}
