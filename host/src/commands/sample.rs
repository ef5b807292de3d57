//! `sample`: generates text with a model.

use super::generation::{Loaded, PLAIN_SAMPLING, SamplingFlags, check_prompt, end_tokens, load, tokenizer_of};
use super::resources::{Hardware, ModelPath};
use crate::generate::{Finish, Request, TextStream, generate};
use crate::terminal::{self, counted};
use crate::values::count;
use anyhow::{Context, Result};
use serde_json::json;
use std::io::{Read, Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;
use system::progress::{self, Progress, Unit};

/// Maximum number of sequences to generate at the same time.
const MAX_SLOTS: usize = 64;

/// Generate text with a model
#[derive(Debug, clap::Args)]
pub struct Sample {
    #[command(flatten)]
    model: ModelPath,

    /// Text to continue [default: none; the model starts a new document]
    #[arg(short, long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prompt: String,

    /// Read the text to continue from this file; -: from standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Number of tokens to generate
    #[arg(short = 'g', long, value_name = "N", default_value = "256", value_parser = count)]
    tokens: usize,

    /// Number of texts. Text i uses seed + i
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = count)]
    n: usize,

    /// End the text before this string; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Continue after the token that ends a text
    #[arg(long)]
    ignore_end: bool,

    /// Print one JSON object per text: index, prompt, text, tokens and finish_reason
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    hardware: Hardware,
}

/// Prints the prompt and its continuation.
pub fn run(args: &Sample) -> Result<()> {
    let source = args.model.open()?;
    let descriptor = source.descriptor();
    let tokenizer = tokenizer_of(&source, args.tokenizer.as_deref())?;
    let text = args.text()?;
    let mut prompt = vec![tokenizer.document()];
    prompt.extend(tokenizer.encode_with_special(&text)?);
    check_prompt(&prompt, descriptor.vocab)?;
    let ends = if args.ignore_end { Vec::new() } else { end_tokens(&tokenizer, &source)? };
    let capacity = descriptor.max_seq_len.min(prompt.len().saturating_add(args.tokens));
    let Loaded { generator, mut engine, run_ahead } = load(source, &args.hardware, args.n.min(MAX_SLOTS), capacity)?;
    let (tokens, sampling) = (args.tokens, args.sampling.settings().over(PLAIN_SAMPLING));
    let request = |i: usize| {
        let seed = args.sampling.seed.wrapping_add(i as u32);
        Request { prompt: prompt.clone(), tokens, seed, sampling, ends: ends.clone() }
    };
    let requests: Vec<Request> = (0..args.n).map(request).collect();
    let mut output = Output {
        args,
        prompt: &text,
        streams: requests.iter().map(|_| TextStream::new(&tokenizer, &args.stop).after(&prompt)).collect(),
        texts: vec![(String::new(), Vec::new()); args.n],
    };
    output.begin()?;
    let start = Instant::now();
    // A text that is printed as it is generated shows its own progress.
    let total = (args.n * args.tokens) as u64;
    let progress =
        if output.streams() { Progress::default() } else { progress::start("generating", Unit::Count, total) };
    let finishes = generate(&generator, &mut *engine, &requests, run_ahead, &mut |i, token| {
        progress.add(1);
        output.take(i, token)
    })?;
    drop(progress);
    let seconds = start.elapsed().as_secs_f64();
    let generated = output.end(&finishes)?;
    let rate = generated as f64 / seconds;
    let generated = counted(generated, "token");
    terminal::note(&format!("generated {generated} in {seconds:.2} s: {rate:.1} tokens/s, prompt included"))
}

impl Sample {
    fn text(&self) -> Result<String> {
        match &self.prompt_file {
            None => Ok(self.prompt.clone()),
            Some(path) if path == Path::new("-") => {
                let mut text = String::new();
                stdin()
                    .take(bounded_file::TEXT)
                    .read_to_string(&mut text)
                    .context("--prompt-file -: cannot read UTF-8 text")?;
                Ok(text)
            }
            Some(path) => bounded_file::read_to_string(path, bounded_file::TEXT)
                .with_context(|| format!("--prompt-file {}: cannot read UTF-8 text", path.display())),
        }
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints texts: a single one as it is generated, several ones in order at the end.
struct Output<'a> {
    args: &'a Sample,
    prompt: &'a str,
    streams: Vec<TextStream>,
    /// Text and tokens of each sequence.
    texts: Vec<(String, Vec<u32>)>,
}

impl Output<'_> {
    fn streams(&self) -> bool {
        self.args.n == 1 && !self.args.json
    }

    fn begin(&self) -> Result<()> {
        if self.streams() { print(self.prompt) } else { Ok(()) }
    }

    /// Takes a token of text `i` and returns whether the text continues.
    fn take(&mut self, i: usize, token: u32) -> Result<bool> {
        let new = self.streams[i].push(token);
        self.texts[i].1.push(token);
        self.add(i, &new)?;
        Ok(!self.streams[i].stopped())
    }

    fn add(&mut self, i: usize, new: &str) -> Result<()> {
        self.texts[i].0 += new;
        if self.streams() { print(new) } else { Ok(()) }
    }

    /// Prints what remains and returns the number of tokens.
    fn end(&mut self, finishes: &[Finish]) -> Result<usize> {
        for (i, finish) in finishes.iter().enumerate() {
            let rest = self.streams[i].finish();
            self.add(i, &rest)?;
            let (text, tokens) = &self.texts[i];
            if self.args.json {
                let finish = finish.name();
                let line = json!({ "index": i, "prompt": self.prompt, "text": text, "tokens": tokens, "finish_reason": finish });
                print(&format!("{line}\n"))?;
            } else if self.streams() {
                print("\n")?;
            } else {
                let separator = if i > 0 { "---\n" } else { "" };
                print(&format!("{separator}{}{text}\n", self.prompt))?;
            }
        }
        Ok(self.texts.iter().map(|(_, tokens)| tokens.len()).sum())
    }
}
