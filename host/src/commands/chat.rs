//! `chat`: a conversation with a model in the terminal.

mod command;
mod input;

use super::generation::{
    Loaded, SamplingFlags, check_prompt, context, default_sampling, describe_sampling, end_tokens, load, tokenizer_of,
};
use super::resources::{Hardware, ModelPath};
use crate::chat_template::{ChatTemplate, Message};
use crate::generate::{Finish, Request, Scheduler, TextStream};
use crate::signals::Interrupts;
use crate::terminal::{self, counted};
use crate::values::count;
use anyhow::{Result, anyhow, bail, ensure};
use command::Command;
use engine::ops::SlotSampling;
use input::{Input, Line};
use serde_json::json;
use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// Tokens reserved for an answer: the oldest messages are removed to make room. At most a quarter of a short context is reserved.
const MIN_ANSWER: usize = 64;

/// Talk to a model in the terminal
///
/// A model with a chat template (chat_template in tokenizer_config.json, or chat_template.jinja) answers messages. Any other model
/// continues the text. /help lists the commands. Ctrl-C ends an answer; at the prompt, Ctrl-C or Ctrl-D ends the program.
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
    let of_model = default_sampling(&source)?;
    let (capacity, note) = context(&source, args.context);
    note.map_or(Ok(()), |note| terminal::note(&note))?;
    if let Some(sampling) = describe_sampling(of_model) {
        terminal::note(&format!("sampling of generation_config.json, unless flags say otherwise: {sampling}"))?;
    }
    let mut loaded = load(source, &args.hardware, 1, capacity)?;
    let scheduler = Scheduler::new(&loaded.generator, &mut *loaded.engine, loaded.run_ahead)?;
    let mode = match template {
        Some(template) => {
            Mode::Messages { template: Box::new(template), system: args.system.clone(), messages: Vec::new() }
        }
        None => Mode::Text { tokens: vec![tokenizer.document()], answer: None },
    };
    writeln!(stderr(), "{}; /help: commands, /exit: end", mode.description())?;
    let mut input = Input::open()?;
    let mut conversation = Conversation {
        args,
        tokenizer,
        ends,
        sampling: args.sampling.settings().over(of_model),
        loaded,
        scheduler,
        vocab: descriptor.vocab,
        mode,
        unanswered: None,
        saved: None,
        turns: 0,
        interrupts: if input.is_interactive() { Some(Interrupts::listen()?) } else { None },
    };
    loop {
        match input.next()? {
            Line::End => return Ok(()),
            Line::NotUtf8 => {
                writeln!(stderr(), "error: message: expected UTF-8 text, found other bytes; the line is ignored")?;
            }
            Line::Text(line) => match Command::parse(&line) {
                Ok(Some(Command::Exit)) => return Ok(()),
                // A script that sends messages knows the commands that it uses.
                Ok(Some(Command::Unknown(_))) if !input.is_interactive() => conversation.answer(&line)?,
                Ok(Some(command)) => conversation.obey(command)?,
                Err(error) => writeln!(stderr(), "error: {error}")?,
                Ok(None) if line.trim().is_empty() => {}
                Ok(None) => conversation.answer(&line)?,
            },
        }
    }
}

/// The text that the model reads.
enum Mode {
    /// The tokens of the whole text, which the model continues, and where the last answer begins.
    Text { tokens: Vec<u32>, answer: Option<usize> },
    /// Messages, which the template turns into a text.
    Messages { template: Box<ChatTemplate>, system: Option<String>, messages: Vec<Message> },
}

impl Mode {
    fn description(&self) -> &'static str {
        match self {
            Self::Text { .. } => {
                "no chat template: the model continues the text (for answers, tune it with conversations, or put the \
                 chat_template.jinja that it was tuned with next to it)"
            }
            Self::Messages { .. } => "chat template found",
        }
    }
}

struct Conversation<'a> {
    args: &'a Chat,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    sampling: SlotSampling,
    loaded: Loaded,
    /// Keeps the keys and values of the conversation.
    scheduler: Scheduler,
    vocab: usize,
    mode: Mode,
    /// The last message, if it has no answer. It is not part of the conversation.
    unanswered: Option<String>,
    /// The file to which this conversation has been saved.
    saved: Option<PathBuf>,
    turns: u32,
    /// Set in a terminal.
    interrupts: Option<Interrupts>,
}

impl Conversation<'_> {
    /// Obeys any command but that to exit. An invalid one is an error message.
    fn obey(&mut self, command: Command) -> Result<()> {
        let done = match command {
            Command::Exit => Ok(None),
            Command::Unknown(name) => Err(anyhow!(
                "{name}: expected a command, found an unknown one; /help lists them, and a space before it makes it a message"
            )),
            Command::Help => Ok(Some(command::HELP.to_owned())),
            Command::Clear => {
                self.clear();
                Ok(None)
            }
            Command::Retry => return self.retry(),
            Command::Save(path) => self.save(&path).map(Some),
            Command::System(text) => self.set_system(text).map(Some),
        };
        match done {
            Ok(Some(note)) => writeln!(stderr(), "{note}")?,
            Ok(None) => {}
            Err(error) => writeln!(stderr(), "error: {error:#}")?,
        }
        Ok(())
    }

    fn clear(&mut self) {
        (self.unanswered, self.saved) = (None, None);
        match &mut self.mode {
            Mode::Text { tokens, answer } => {
                tokens.truncate(1);
                *answer = None;
            }
            Mode::Messages { messages, .. } => messages.clear(),
        }
    }

    fn set_system(&mut self, text: Option<String>) -> Result<String> {
        let Mode::Messages { system, .. } = &mut self.mode else {
            bail!("/system: expected a model with a chat template, found one without");
        };
        *system = text;
        Ok(match system {
            Some(_) => "the instructions precede the conversation from the next answer on".to_owned(),
            None => "the conversation has no instructions; /system TEXT sets them".to_owned(),
        })
    }

    /// Writes the conversation as a JSON object with `messages`, or with the `text` of a model without a template.
    fn save(&mut self, path: &Path) -> Result<String> {
        let name = path.display();
        let exists = path.exists();
        ensure!(
            !exists || self.saved.as_deref() == Some(path),
            "/save {name}: expected a new file, found an existing one, which would be overwritten; choose another name"
        );
        let json = match &self.mode {
            Mode::Text { tokens, .. } => json!({ "text": self.tokenizer.text(&tokens[1..]) }),
            Mode::Messages { system, messages, .. } => {
                let system = system.as_deref().map(|text| Message::new("system", text));
                json!({ "messages": system.iter().chain(messages).collect::<Vec<_>>() })
            }
        };
        atomic_file::write(path, |file| Ok(writeln!(file, "{json}")?))?;
        self.saved = Some(path.to_owned());
        Ok(if exists {
            format!("saved to {name} again, in place of the earlier state")
        } else {
            format!("saved to {name}")
        })
    }

    /// Adds the user's line and prints the model's answer.
    fn answer(&mut self, line: &str) -> Result<()> {
        self.unanswered = None;
        match &mut self.mode {
            Mode::Text { tokens, answer } => {
                tokens.extend(self.tokenizer.encode(line)?);
                *answer = Some(tokens.len());
            }
            Mode::Messages { messages, .. } => messages.push(Message::new("user", line)),
        }
        self.generate()
    }

    /// Prints another answer to the last message.
    fn retry(&mut self) -> Result<()> {
        if let Some(line) = self.unanswered.take() {
            return self.answer(&line);
        }
        match &mut self.mode {
            Mode::Text { tokens, answer: Some(answer) } => tokens.truncate(*answer),
            Mode::Messages { messages, .. } if messages.last().is_some_and(Message::is_answer) => {
                messages.pop();
            }
            _ => return Ok(writeln!(stderr(), "error: /retry: expected a message before it, found none; write one")?),
        }
        self.generate()
    }

    /// Prints the model's answer to the conversation, and adds it.
    fn generate(&mut self) -> Result<()> {
        let prompt = match &self.mode {
            Mode::Text { tokens, .. } => tokens.clone(),
            Mode::Messages { .. } => match self.rendered()? {
                Some(prompt) => prompt,
                None => return Ok(()),
            },
        };
        check_prompt(&prompt, self.vocab)?;
        let capacity = self.loaded.generator.capacity();
        let room = match self.mode {
            // A text that exceeds the context continues from its newest half.
            Mode::Text { .. } => usize::MAX,
            // The last token needs no place in the cache.
            Mode::Messages { .. } => capacity + 1 - prompt.len(),
        };
        let request = Request {
            prompt,
            tokens: self.args.tokens.min(room),
            // Every answer has random numbers of its own.
            seed: self.args.sampling.seed.wrapping_add(self.turns),
            sampling: self.sampling,
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
        let interrupts = self.interrupts.as_ref();
        interrupts.inspect(|interrupts| interrupts.clear());
        let is_interrupted = || interrupts.is_some_and(Interrupts::is_set);
        let Loaded { generator, engine, .. } = &mut self.loaded;
        let finishes = self.scheduler.generate(generator, &mut **engine, &[request], &mut |_, token| {
            if is_interrupted() {
                return Ok(false);
            }
            tokens.push(token);
            print(&mut text, stream.push(token))?;
            Ok(!stream.stopped())
        })?;
        print(&mut text, stream.finish())?;
        writeln!(stdout())?;
        if room < self.args.tokens && finishes == [Finish::Length] {
            let advice = if self.interrupts.is_some() { "; /clear begins a new conversation" } else { "" };
            writeln!(stderr(), "note: the answer ends because the context of {capacity} tokens is full{advice}")?;
        }
        if is_interrupted() {
            writeln!(stderr(), "note: the answer was interrupted; /retry begins another one")?;
        }
        self.add(&text, &tokens, is_interrupted());
        Ok(())
    }

    /// Adds an answer. A message whose answer was interrupted before it began is not part of the conversation.
    fn add(&mut self, text: &str, new: &[u32], is_interrupted: bool) {
        match &mut self.mode {
            Mode::Text { tokens, .. } => tokens.extend(new),
            Mode::Messages { messages, .. } if text.is_empty() && is_interrupted => {
                self.unanswered = messages.pop().map(Message::into_content);
            }
            Mode::Messages { messages, .. } => messages.push(Message::new("assistant", text)),
        }
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
