//! `tokenizer train`: trains a byte-level BPE on the documents that `data text` reads.

use crate::commands::data::input::ReadingFlags;
use crate::commands::data::output::print_input;
use crate::hints::Invocation;
use crate::terminal;
use crate::values::{bytes, count};
use anyhow::Result;
use data::dataset::ShardNames;
use data::documents;
use data::text::vocabulary::count_pieces;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;
use system::progress::{self, Unit};
use tokenizer::BYTE_VOCAB;
use tokenizer::train::{RANKS, Settings, Splitter, check_output, train};

/// Train a byte-level BPE tokenizer on text, JSON lines, CSV and parquet files, also compressed with gzip or zstd
#[derive(Debug, clap::Args)]
pub struct Train {
    /// Files, directories to search, quoted patterns such as 'docs/*.md', or - for standard input
    #[arg(required = true, value_name = "PATH")]
    files: Vec<PathBuf>,

    /// Directory for tokenizer.json and the rank file tokenizer.tiktoken
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Number of tokens: 256 bytes, merged tokens, and the special tokens
    #[arg(long, value_name = "N", default_value = "32768", value_parser = count)]
    vocab_size: usize,

    /// Pattern that splits text into words, which are merged separately: gpt2, gpt4, llama3, qwen2, or a regular expression
    #[arg(long, value_name = "NAME|REGEX", default_value = "gpt4")]
    pattern: String,

    /// Special token; repeat the flag for several. One of them precedes each document, such as <|endoftext|> or <|bos|>. Special tokens in
    /// the text are ordinary text
    #[arg(long, value_name = "TEXT", default_value = "<|endoftext|>")]
    special: Vec<String>,

    /// Occurrences in the text that a pair of tokens needs to be merged
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    min_frequency: usize,

    /// Use only the first N bytes of the text
    #[arg(long, value_name = "N", value_parser = bytes)]
    max_bytes: Option<usize>,

    #[command(flatten)]
    input: ReadingFlags,

    /// Replace the tokenizer in the directory, once the new one is complete
    #[arg(long)]
    overwrite: bool,
}

/// Trains the tokenizer.
pub fn run(args: &Train) -> Result<()> {
    let start = Instant::now();
    let settings =
        Settings { vocab: args.vocab_size, special: args.special.clone(), min_frequency: args.min_frequency as u64 };
    settings.check()?;
    let splitter = Splitter::new(&args.pattern)?;
    check_output(&args.out, args.overwrite)?;
    let found = documents::find(&args.files, &args.input.extensions, Some(&args.out))?;
    let (mut pieces, written) = count_pieces(&found, &args.input.reading(), &splitter, args.max_bytes)?;
    let (words, removed) = (pieces.len(), pieces.removed());
    let progress = progress::start("merging", Unit::Count, (args.vocab_size - BYTE_VOCAB - args.special.len()) as u64);
    let trained = train(pieces, &splitter, &settings, &mut || progress.add(1))?;
    drop(progress);
    trained.write(&args.out)?;
    print_input(ShardNames::TEXT, &written)?;
    let mut out = stdout();
    if removed > 0 {
        writeln!(
            out,
            "warning: words: expected a text whose distinct words fit into memory, found more; rare words were left out, with \
             {removed} occurrences; use --max-bytes, or a pattern with shorter words"
        )?;
    }
    if trained.vocab() < args.vocab_size {
        writeln!(
            out,
            "warning: vocabulary: expected {} tokens, found {}: no other pair of tokens occurs {} times in the text; use more text, \
             a smaller --vocab-size or a smaller --min-frequency",
            args.vocab_size,
            trained.vocab(),
            args.min_frequency
        )?;
    }
    let bytes = written.input.bytes;
    writeln!(
        out,
        "trained {} tokens, {} merges, on {bytes} bytes with {words} distinct words in {:.1} s: {:.3} bytes per token",
        trained.vocab(),
        trained.merges(),
        start.elapsed().as_secs_f64(),
        bytes as f64 / trained.encoded().max(1) as f64
    )?;
    for name in [tokenizer::stored::JSON, RANKS] {
        writeln!(out, "wrote {}", args.out.join(name).display())?;
    }
    print_next(args)
}

/// Suggests to tokenize the same files.
fn print_next(args: &Train) -> Result<()> {
    if terminal::is_quiet() {
        return Ok(());
    }
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let name = args.out.file_name().unwrap_or("text".as_ref());
    let flags = ["--tokenizer".to_owned(), path(&args.out), "--out".to_owned(), path(&Path::new("data").join(name))];
    let files = args.files.iter().map(|file| path(file));
    let next = ["data", "text"].map(str::to_owned).into_iter().chain(files).chain(args.input.arguments()).chain(flags);
    let next: Vec<String> = next.collect();
    writeln!(stdout(), "\nnext: {}", Invocation::current().command(next.iter().map(String::as_str)))?;
    Ok(())
}
