//! `data chat`: tokenizes conversations, with a mask of the tokens that the assistant says.

use super::output::{print_splits, program};
use crate::chat_template::{ChatTemplate, Training, default_template};
use crate::hints::Invocation;
use crate::terminal::{self, counted};
use crate::values::{count, fraction};
use anyhow::{Context, Result, bail};
use data::conversations::{self, ChatOptions, Summary};
use data::dataset::{CHAT_FILES, ShardNames};
use data::documents::{self, Format};
use interchange::tokenizer::{bos_eos, config_of, pretty, with_special};
use interchange::{ModelSource, companions};
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use tokenizer::{Tokenizer, stored};

/// Tokenize conversations in JSON lines and parquet files, to train a model on the answers of the assistant
#[derive(Debug, clap::Args)]
pub struct Chat {
    /// Files, directories to search, quoted patterns such as 'chats/*.jsonl', or - for standard input
    #[arg(required = true, value_name = "PATH")]
    files: Vec<PathBuf>,

    /// Directory for the shards train_NNNNNN.bin and val_NNNNNN.bin, their masks, and their description dataset.json
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Tokenizer: the directory of a model or a run, or a tokenizer.json, or gpt2 or bytes
    #[arg(long, value_name = "NAME|PATH")]
    tokenizer: String,

    /// Chat template: a file, or chatml [default: the template of the model]
    #[arg(long = "chat-template", value_name = "FILE|chatml")]
    template: Option<String>,

    /// Special token of the chat template that the tokenizer lacks; may be repeated
    #[arg(long, value_name = "TEXT")]
    special: Vec<String>,

    /// Format of all files, instead of the one that each name implies
    #[arg(long, value_name = "jsonl|parquet", value_parser = format)]
    format: Option<Format>,

    /// In directories, use only files with these extensions, such as jsonl,parquet
    #[arg(long, value_name = "EXT,EXT", value_delimiter = ',', value_parser = super::input::extension)]
    extensions: Vec<String>,

    /// Encode special tokens in messages, such as <|im_end|>, as special tokens instead of ordinary text. Only for messages that you trust:
    /// an <|im_end|> ends the turn
    #[arg(long)]
    allow_special: bool,

    /// Fraction of the conversations used for validation
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    val_fraction: f64,

    /// Maximum number of tokens in a shard
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,

    /// Replace the shards in the directory, once the new ones are complete
    #[arg(long)]
    overwrite: bool,
}

fn format(text: &str) -> Result<Format, &'static str> {
    match text {
        "jsonl" => Ok(Format::Jsonl),
        "parquet" => Ok(Format::Parquet),
        _ => Err("expected jsonl or parquet"),
    }
}

/// The tokenizer and the template of a data set.
struct Model {
    tokenizer: Tokenizer,
    /// The special tokens that were added.
    added: Vec<String>,
    /// The `tokenizer_config.json` beside the tokenizer, or null.
    config: Value,
    template: ChatTemplate,
}

/// Tokenizes the files.
pub fn run(args: &Chat) -> Result<()> {
    let found = documents::find(&args.files, &args.extensions, Some(&args.out))?;
    let model = Model::new(args)?;
    model.template.check()?;
    if let Some(note) = model.tokenizer.note() {
        terminal::note(&note)?;
    }
    let options = ChatOptions {
        tokenizer: model.tokenizer.clone(),
        allow_special: args.allow_special,
        format: args.format,
        val_fraction: args.val_fraction,
        shard_tokens: args.shard_tokens,
        overwrite: args.overwrite,
        program: program(),
    };
    let renderer = Training::new(&model.template);
    let written = conversations::write(&found, &args.out, &options, &renderer, |summary| model.files(summary))?;
    report(args, &model, &written)
}

impl Model {
    fn new(args: &Chat) -> Result<Self> {
        let (base, directory) = tokenizer_of(&args.tokenizer).context("--tokenizer")?;
        let config = directory.as_deref().map_or(Ok(Value::Null), companions::tokenizer_config)?;
        let (named, mut special) = match args.template.as_deref() {
            None => (None, Vec::new()),
            Some(name) => match default_template(name) {
                Some((source, tokens)) => (Some((PathBuf::from(name), source.to_owned())), tokens.to_vec()),
                None => (Some(template_of(Path::new(name))?), Vec::new()),
            },
        };
        special.extend(args.special.iter().map(String::as_str));
        let name = args.out.join(stored::JSON).display().to_string();
        let tokenizer = with_special(&base, &special, &name)?;
        let template = match named {
            Some((path, source)) => {
                let [bos, eos] = bos_eos(&base).map(|id| id.map(|id| base.text(&[id])).filter(|_| !base.special().is_empty()));
                let of_base = json!({ "bos_token": bos, "eos_token": eos });
                ChatTemplate::new(&path, source, if config.is_object() { &config } else { &of_base })
            }
            None => directory.as_deref().map_or(Ok(None), ChatTemplate::in_directory)?.with_context(|| {
                format!(
                    "--tokenizer {}: expected a model with a chat template (chat_template.jinja, or chat_template in \
                     tokenizer_config.json), found none; name a template with --chat-template FILE, or use --chat-template chatml",
                    args.tokenizer
                )
            })?,
        };
        let added = tokenizer.special().iter().filter(|token| token.id as usize >= base.vocab());
        let added = added.map(|token| token.text.clone()).collect();
        Ok(Self { tokenizer, added, config, template })
    }

    /// Returns the files of the data set for a model that is trained on it.
    fn files(&self, summary: &Summary) -> Result<Vec<(&'static str, Vec<u8>)>> {
        // A template that prints the token must print the same one again.
        let end = summary.end.filter(|_| !self.template.source().contains("eos_token"));
        let end = end.map(|id| self.tokenizer.text(&[id]));
        let config = config_of(&self.config, &self.tokenizer, end.as_deref(), !self.added.is_empty());
        let [template, tokenizer_config] = CHAT_FILES;
        Ok(vec![(template, self.template.source().as_bytes().to_vec()), (tokenizer_config, pretty(&config)?)])
    }
}

/// Returns the named tokenizer, and the directory with its other files.
fn tokenizer_of(name: &str) -> Result<(Tokenizer, Option<PathBuf>)> {
    let path = Path::new(name);
    if name == "gpt2" || name == "bytes" || !path.exists() {
        return Ok((Tokenizer::named(name)?, None));
    }
    if !path.is_dir() {
        return Ok((Tokenizer::open(path)?, Some(atomic_file::parent(path).to_owned())));
    }
    let tokenizer = stored::in_directory(path)?.map_or_else(|| Tokenizer::open(path), Ok)?;
    Ok((tokenizer, Some(path.to_owned())))
}

/// Reads the file of a template.
fn template_of(path: &Path) -> Result<(PathBuf, String)> {
    let flag = || format!("--chat-template {}: expected chatml or a file with a template", path.display());
    let source = bounded_file::read_to_string(path, bounded_file::SETTINGS).with_context(flag)?;
    if source.trim().is_empty() {
        bail!("{}, found an empty file", flag());
    }
    Ok((path.to_owned(), source))
}

fn report(args: &Chat, model: &Model, written: &Summary) -> Result<()> {
    let mut out = stdout();
    let [conversations, files] =
        [(written.input.documents, "conversation"), (written.input.files, "file")].map(|(n, noun)| counted(n, noun));
    writeln!(out, "read {conversations}, {} bytes of text, from {files}", written.input.bytes)?;
    for skipped in [written.skipped.to_string(), written.skipped_records.to_string()] {
        if !skipped.is_empty() {
            writeln!(out, "{skipped}")?;
        }
    }
    let tokens = written.train.tokens + written.val.tokens;
    writeln!(
        out,
        "tokens of the assistant, which have loss: {} of {tokens}; longest conversation: {} tokens",
        written.targets, written.longest
    )?;
    print_splits(&args.out, ShardNames::TEXT, [&written.train, &written.val])?;
    if !model.added.is_empty() {
        terminal::note(&format!(
            "note: added special tokens to the tokenizer: {}; `train --model` adds their rows to the embeddings of the model",
            model.added.join(", ")
        ))?;
    }
    if written.plain_special > 0 {
        terminal::note(&format!(
            "note: special tokens in messages that became ordinary text: {}; for messages that you trust, --allow-special encodes them as \
             special tokens",
            written.plain_special
        ))?;
    }
    if written.endless_turns > 0 {
        writeln!(
            out,
            "warning: expected a special token at the end of each turn of the assistant, found {} of {} turns without one; a model does \
             not learn to end them: {}",
            written.endless_turns,
            written.turns,
            if model.template.source().contains("endgeneration") {
                "put the end token into the {% generation %} block of the template"
            } else {
                "use a template with an end token that is a special token of the tokenizer (--special)"
            }
        )?;
    }
    if args.val_fraction > 0.0 && written.val.shards == 0 {
        writeln!(
            out,
            "warning: validation split: expected at least {:.0} conversations for --val-fraction {}, found {}",
            (1.0 / args.val_fraction).ceil(),
            args.val_fraction,
            written.input.documents
        )?;
    }
    if terminal::is_quiet() {
        return Ok(());
    }
    let data = |name: &str| {
        [format!("--{name}"), args.out.join(ShardNames::TEXT.pattern(name)).to_string_lossy().into_owned()]
    };
    let val = if written.val.shards > 0 { data("val").to_vec() } else { Vec::new() };
    let is_model = ModelSource::open(Path::new(&args.tokenizer)).is_ok();
    let name = if is_model { args.tokenizer.clone() } else { "MODEL".to_owned() };
    let next = [vec!["train".to_owned(), "--model".to_owned(), name], data("train").to_vec(), val].concat();
    writeln!(out, "\nnext: {}", Invocation::current().command(next.iter().map(String::as_str)))?;
    Ok(())
}
