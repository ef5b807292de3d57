//! `chat`: a conversation with a model in the terminal.

mod date;
pub mod renderer;
pub mod template;

use super::generation::{Loaded, SamplingFlags, check_prompt, context, end_tokens, load, tokenizer_of};
use super::resources::{Hardware, ModelPath};
use crate::generate::{Finish, Request, TextStream, generate};
use crate::terminal::{self, counted};
use crate::values::count;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, IsTerminal, Read, Write, stderr, stdin, stdout};
use template::{ChatTemplate, Message};
use tokenizer::Tokenizer;

/// Tokens reserved for an answer: the oldest messages are removed to make room. At most a quarter of a short context is reserved.
const MIN_ANSWER: usize = 64;

/// Maximum length of a line of a conversation in bytes, including the line break.
const MAX_LINE: u64 = 1 << 20;

/// Talk to a model in the terminal
///
/// A model with a chat template (chat_template in tokenizer_config.json, or chat_template.jinja) answers messages. Any other model
/// continues the text. /clear begins a new conversation. /exit or the end of the input ends the program.
#[derive(Debug, clap::Args)]
pub struct Chat {
    #[command(flatten)]
    model: ModelPath,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Instructions that precede the conversation, for a model with a chat template
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Maximum number of tokens in an answer
    #[arg(short = 'g', long, value_name = "N", default_value = "512", value_parser = count)]
    tokens: usize,

    /// Maximum number of tokens of the conversation that the model reads [default: 8192, or the longest sequence of the model]
    #[arg(long, value_name = "N", value_parser = count)]
    context: Option<usize>,

    /// End an answer before this string; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    hardware: Hardware,
}

/// Reads messages from standard input and prints answers until the input ends.
pub fn run(args: &Chat) -> Result<()> {
    let source = args.model.open()?;
    let descriptor = source.descriptor();
    let tokenizer = tokenizer_of(&source, args.tokenizer.as_deref())?;
    let ends = end_tokens(&tokenizer, &source)?;
    let template = ChatTemplate::of(&source)?;
    if template.is_none() && args.system.is_some() {
        bail!(
            "--system: expected a model with a chat template, found none in {}; omit --system",
            source.directory().display()
        );
    }
    // A template that cannot be used is an error before the first message.
    template.as_ref().map_or(Ok(()), ChatTemplate::check)?;
    let (capacity, note) = context(&source, args.context);
    note.map_or(Ok(()), |note| terminal::note(&note))?;
    let loaded = load(source, &args.hardware, 1, capacity)?;
    let mode = match template {
        Some(template) => {
            Mode::Messages { template: Box::new(template), system: args.system.clone(), messages: Vec::new() }
        }
        None => Mode::Text(vec![tokenizer.document()]),
    };
    let mut conversation = Conversation { args, tokenizer, ends, loaded, vocab: descriptor.vocab, mode, turns: 0 };
    let terminal = stdin().is_terminal();
    let kind = match conversation.mode {
        Mode::Text(_) => "no chat template: the model continues the text",
        Mode::Messages { .. } => "chat template found",
    };
    writeln!(stderr(), "{kind}; /clear: new conversation, /exit: end")?;
    let mut input = stdin().lock();
    loop {
        if terminal {
            write!(stderr(), "> ")?;
        }
        let Some(line) = read_line(&mut input)? else { return Ok(()) };
        let Ok(line) = String::from_utf8(line) else {
            writeln!(stderr(), "error: message: expected UTF-8 text, found other bytes; the line is ignored")?;
            continue;
        };
        match line.trim() {
            "/exit" => return Ok(()),
            "/clear" => conversation.clear(),
            "" => {}
            _ => conversation.answer(&line)?,
        }
    }
}

/// Returns the next line without its end, or `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let read = input.take(MAX_LINE + 1).read_until(b'\n', &mut line).context("cannot read standard input")?;
    ensure!(
        read as u64 <= MAX_LINE,
        "message: expected a line of at most {MAX_LINE} bytes, found a longer one; shorten it"
    );
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok((read > 0).then_some(line))
}

/// The text that the model reads.
enum Mode {
    /// The tokens of the whole text, which the model continues.
    Text(Vec<u32>),
    /// Messages, which the template turns into a text.
    Messages { template: Box<ChatTemplate>, system: Option<String>, messages: Vec<Message> },
}

struct Conversation<'a> {
    args: &'a Chat,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    loaded: Loaded,
    vocab: usize,
    mode: Mode,
    turns: u32,
}

impl Conversation<'_> {
    fn clear(&mut self) {
        match &mut self.mode {
            Mode::Text(text) => text.truncate(1),
            Mode::Messages { messages, .. } => messages.clear(),
        }
    }

    /// Adds the user's line and prints the model's answer.
    fn answer(&mut self, line: &str) -> Result<()> {
        let prompt = match &mut self.mode {
            Mode::Text(text) => {
                text.extend(self.tokenizer.encode(line)?);
                text.clone()
            }
            Mode::Messages { messages, .. } => {
                messages.push(Message::new("user", line));
                match self.rendered()? {
                    Some(prompt) => prompt,
                    None => return Ok(()),
                }
            }
        };
        check_prompt(&prompt, self.vocab)?;
        let capacity = self.loaded.generator.capacity();
        let room = match self.mode {
            // A text that exceeds the context continues from its newest half.
            Mode::Text(_) => usize::MAX,
            // The last token needs no place in the cache.
            Mode::Messages { .. } => capacity + 1 - prompt.len(),
        };
        let request = Request {
            prompt,
            tokens: self.args.tokens.min(room),
            // Every answer has random numbers of its own.
            seed: self.args.sampling.seed.wrapping_add(self.turns),
            sampling: self.args.sampling.sampling(),
            ends: self.ends.clone(),
        };
        self.turns = self.turns.wrapping_add(1);
        let (mut stream, mut text, mut tokens) =
            (TextStream::new(&self.tokenizer, &self.args.stop), String::new(), Vec::new());
        let print = |text: &mut String, new: String| -> Result<()> {
            let mut out = stdout();
            out.write_all(new.as_bytes())?;
            out.flush()?;
            *text += &new;
            Ok(())
        };
        let Loaded { generator, engine, run_ahead } = &mut self.loaded;
        let finishes = generate(generator, &mut **engine, &[request], *run_ahead, &mut |_, token| {
            tokens.push(token);
            print(&mut text, stream.push(token))?;
            Ok(!stream.stopped())
        })?;
        print(&mut text, stream.finish())?;
        writeln!(stdout())?;
        if room < self.args.tokens && finishes == [Finish::Length] {
            writeln!(stderr(), "note: the answer ends because the context of {capacity} tokens is full")?;
        }
        match &mut self.mode {
            Mode::Text(whole) => whole.extend(tokens),
            Mode::Messages { messages, .. } => messages.push(Message::new("assistant", &text)),
        }
        Ok(())
    }

    /// Returns the tokens of the conversation. If they and the shortest answer exceed the context, the oldest messages are removed. If the
    /// last message alone exceeds it, it is removed and the result is `None`.
    fn rendered(&mut self) -> Result<Option<Vec<u32>>> {
        let capacity = self.loaded.generator.capacity();
        let most = capacity - self.args.tokens.min(MIN_ANSWER).min(capacity / 4);
        let Mode::Messages { template, system, messages } = &mut self.mode else { return Ok(None) };
        let mut removed = 0;
        loop {
            let system = system.as_deref().map(|text| Message::new("system", text));
            let all: Vec<&Message> = system.iter().chain(&*messages).collect();
            let prompt = self.tokenizer.encode_with_special(&template.render(&all)?)?;
            let is_single = messages.len() <= 1;
            if prompt.len() <= if is_single { capacity } else { most } {
                if removed > 0 {
                    writeln!(
                        stderr(),
                        "note: the conversation and an answer exceed {capacity} tokens; removed the oldest {}",
                        counted(removed, "message")
                    )?;
                }
                return Ok(Some(prompt));
            }
            if is_single {
                messages.pop();
                writeln!(
                    stderr(),
                    "error: message: expected at most {capacity} tokens with its template, found {}; shorten it",
                    prompt.len()
                )?;
                return Ok(None);
            }
            // A question goes with its answer, so that the roles keep alternating.
            let pair = 2.min(messages.len() - 1);
            messages.drain(..pair);
            removed += pair;
        }
    }
}
