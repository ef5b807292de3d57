//! `data check`.

use super::show::default_tokenizer;
use crate::commands::json;
use crate::terminal::{self, counted};
use crate::values::count;
use anyhow::{Result, ensure};
use data::check::{self, Report};
use data::{Tokens, dataset, mask, tokens};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use tokenizer::Tokenizer;

/// Vocabulary size and document token of llm.c's 32-bit files.
const LLAMA3: (usize, u32) = (128_256, 128_000);

/// Check token files: header, size, ids, and the hashes in dataset.json, or the token before each document
#[derive(Debug, clap::Args)]
pub struct Check {
    /// Token files (.bin), or patterns for them
    #[arg(required = true, value_name = "GLOB")]
    shards: Vec<String>,

    /// Vocabulary size [default: that of --tokenizer]
    #[arg(long, value_name = "N", value_parser = count)]
    vocab: Option<usize>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory [default: that of dataset.json, or
    /// gpt2 for 16-bit files and the ids of Llama 3 for 32-bit files]
    #[arg(long, value_name = "NAME|PATH")]
    tokenizer: Option<String>,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// The result for a file, as it is written to JSON.
#[derive(Serialize)]
struct FileReport {
    file: String,
    /// `None` if the file is not a token file.
    #[serde(flatten)]
    contents: Option<Contents>,
    problems: Vec<String>,
}

#[derive(Serialize)]
struct Contents {
    tokens: usize,
    bits: usize,
    documents: usize,
    longest: usize,
    largest: u32,
    starts_with_document: bool,
    /// Number of tokens with loss, if the file has a mask.
    #[serde(skip_serializing_if = "Option::is_none")]
    targets: Option<usize>,
}

/// Prints a table of the files, and each problem. Fails if there are any.
pub fn run(args: &Check) -> Result<()> {
    let tokenizer = args.tokenizer.as_deref().map(Tokenizer::named).transpose()?;
    let mut files = Vec::new();
    for pattern in &args.shards {
        // The name of an existing file may contain the characters of a pattern.
        let path = Path::new(pattern);
        files.extend(if path.exists() { vec![path.to_owned()] } else { tokens::find(pattern)? });
    }
    if !args.json {
        terminal::line(&format!(
            "{:>12} {:>5} {:>10} {:>10} {:>8}  start     file",
            "tokens", "bits", "documents", "longest", "largest"
        ))?;
    }
    let (mut total, mut documents, mut problems, mut targets) = (0, 0, 0, None);
    let mut reports = Vec::new();
    for file in &files {
        let report = match check_file(file, args.vocab, tokenizer.as_ref()) {
            Ok(checked) => {
                total += checked.tokens.len();
                documents += checked.report.documents;
                targets =
                    targets.map_or(checked.targets, |targets: usize| Some(targets + checked.targets.unwrap_or(0)));
                problems += checked.report.invalid + checked.problems.len();
                FileReport::new(checked)
            }
            Err(error) => {
                problems += 1;
                FileReport { file: file.display().to_string(), contents: None, problems: vec![format!("{error:#}")] }
            }
        };
        if args.json {
            reports.push(report);
        } else {
            report.print()?;
        }
    }
    let in_files = counted(files.len(), "file");
    if args.json {
        json::print(&json!({ "files": reports, "tokens": total, "documents": documents, "problems": problems }))?;
    } else {
        let targets = targets.map_or_else(String::new, |targets| format!(", {targets} with loss"));
        terminal::line(&format!("{total} tokens{targets}, {} in {in_files}", counted(documents, "document")))?;
    }
    ensure!(problems == 0, "expected valid token files, found {} in {in_files}", counted(problems, "problem"));
    Ok(())
}

/// A file that has been read.
struct Checked {
    tokens: Tokens,
    vocab: usize,
    report: Report,
    /// Number of tokens with loss, if the file has a mask.
    targets: Option<usize>,
    /// Problems other than ids outside of the vocabulary.
    problems: Vec<String>,
}

fn check_file(file: &Path, vocab: Option<usize>, tokenizer: Option<&Tokenizer>) -> Result<Checked> {
    let tokens = Tokens::open(file)?;
    let tokenizer = match tokenizer {
        Some(tokenizer) => Some(tokenizer.clone()),
        None => default_tokenizer(file, &tokens)?,
    };
    let (default, document) = tokenizer.map_or(LLAMA3, |tokenizer| (tokenizer.vocab(), tokenizer.document()));
    let vocab = vocab.unwrap_or(default);
    let mut report = check::shard(&tokens, vocab, document)?;
    let dataset = dataset::read_for_shard(file)?;
    let tokens = dataset.as_ref().map_or(Ok(tokens.clone()), |dataset| dataset.with_hashes(tokens))?;
    let flags = tokens.mask().map(mask::report).transpose()?;
    if let Some(flags) = &flags {
        // Conversations begin where the mask says.
        report = Report {
            documents: flags.conversations,
            longest: flags.longest,
            starts_with_document: flags.starts_with_conversation,
            ..report
        };
    }
    let mut problems = Vec::new();
    match dataset {
        Some(dataset) => problems.extend(different_hash(&tokens, dataset.hash(file))?),
        // A file of a described data set may lie inside of one long document.
        None if report.documents > 0 => {}
        None => problems.push(format!("{tokens}: expected token {document} before each document, found none")),
    }
    if let (Some(mask), Some(flags)) = (tokens.mask(), &flags) {
        problems.extend(mask::different_hash(mask)?);
        problems.extend(flags.problem(mask));
    }
    Ok(Checked { vocab, report, targets: flags.map(|flags| flags.targets), problems, tokens })
}

impl FileReport {
    fn new(Checked { tokens, vocab, report, targets, problems: others }: Checked) -> Self {
        let Report { documents, longest, largest, starts_with_document, .. } = report;
        let bits = tokens.width().map_or(0, |width| 8 * width.bytes());
        let len = tokens.len();
        let contents = Contents { tokens: len, bits, documents, longest, largest, starts_with_document, targets };
        let mut problems = invalid_ids(&tokens, &report, vocab);
        problems.extend(others);
        Self { file: tokens.to_string(), contents: Some(contents), problems }
    }

    fn print(&self) -> Result<()> {
        if let Some(Contents { tokens, bits, documents, longest, largest, starts_with_document, .. }) = &self.contents {
            let start = if *starts_with_document { "document" } else { "inside" };
            let file = &self.file;
            terminal::line(&format!(
                "{tokens:>12} {bits:>5} {documents:>10} {longest:>10} {largest:>8}  {start:<8}  {file}"
            ))?;
        }
        self.problems.iter().try_for_each(|problem| terminal::line(&format!("problem: {problem}")))
    }
}

/// Describes the first ids outside of the vocabulary.
fn invalid_ids(tokens: &Tokens, report: &Report, vocab: usize) -> Vec<String> {
    let invalid = |(position, id): &(usize, u32)| {
        format!("{tokens}: token {id} at position {position}: expected ids below {vocab}")
    };
    let mut problems: Vec<String> = report.first_invalid.iter().map(invalid).collect();
    let more = report.invalid - report.first_invalid.len();
    if more > 0 {
        problems.push(format!("{tokens}: {more} more ids of at least {vocab}"));
    }
    problems
}

/// Compares the tokens with the recorded hash, if there is one.
fn different_hash(tokens: &Tokens, recorded: Option<u64>) -> Result<Option<String>> {
    let Some(recorded) = recorded else { return Ok(None) };
    let found = tokens.hash()?.filter(|found| *found != recorded);
    Ok(found.map(|found| {
        format!(
            "{tokens}: expected tokens with hash {recorded:016x}, as recorded in {}, found {found:016x}; restore the file or make \
             the data set again",
            dataset::FILE_NAME
        )
    }))
}
