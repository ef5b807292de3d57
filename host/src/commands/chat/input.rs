//! The lines of a conversation: edited in a terminal, with a history, or read from standard input.

use anyhow::{Context, Result, ensure};
use rustyline::Editor;
use rustyline::config::Config;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use std::env;
use std::fs;
use std::io::{BufRead, IsTerminal, Read, Write, stderr, stdin, stdout};
use std::path::{Path, PathBuf};

/// Maximum length of a line of a conversation in bytes, including the line break.
const MAX_LINE: u64 = 1 << 20;
/// Number of lines of the history.
const MAX_HISTORY: usize = 1000;

/// The input of the user.
pub enum Line {
    /// A line without its end. A pasted text may have several.
    Text(String),
    /// Bytes that are no text.
    NotUtf8,
    /// The end of the input.
    End,
}

/// The source of lines.
pub enum Input {
    /// A terminal, and the file of the history if it can be written.
    Terminal(Box<Editor<(), FileHistory>>, Option<PathBuf>),
    /// Standard input, with a prompt if it is a terminal.
    Plain { prompt: bool },
}

impl Input {
    /// Opens the terminal if standard input and output are one, else standard input.
    pub fn open() -> Result<Self> {
        // An editor draws what is typed on standard output.
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(Self::Plain { prompt: stdin().is_terminal() });
        }
        let config = Config::builder().max_history_size(MAX_HISTORY)?.history_ignore_space(false).build();
        let mut editor = Editor::with_config(config).context("cannot edit lines in this terminal")?;
        let history = history_file().filter(|path| match prepare(path) {
            Ok(()) => true,
            Err(error) => {
                let _ = writeln!(stderr(), "note: lines are not kept for another conversation: {error:#}");
                false
            }
        });
        if let Some(path) = &history {
            // There is no history before the first conversation.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal(Box::new(editor), history))
    }

    /// Returns whether a user edits the lines.
    pub fn is_interactive(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// Returns the next line.
    pub fn next(&mut self) -> Result<Line> {
        let (editor, history) = match self {
            Self::Terminal(editor, history) => (editor, history),
            Self::Plain { prompt } => {
                if *prompt {
                    write!(stderr(), "> ")?;
                }
                return plain_line(&mut stdin().lock());
            }
        };
        loop {
            match editor.readline("> ") {
                Ok(line) => {
                    ensure!(
                        line.len() < MAX_LINE as usize,
                        "message: expected a line of at most {MAX_LINE} bytes, found a longer one; shorten it"
                    );
                    if !line.trim().is_empty() && editor.add_history_entry(&line)? {
                        let written = history.as_ref().map_or(Ok(()), |path| editor.append_history(path));
                        if let Err(error) = written {
                            writeln!(stderr(), "note: lines are not kept for another conversation: {error}")?;
                            *history = None;
                        }
                    }
                    return Ok(Line::Text(line));
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(Line::End),
                // The size of the window has changed.
                Err(ReadlineError::Signal(_)) => {}
                Err(error) => return Err(error).context("cannot read the terminal"),
            }
        }
    }
}

/// Returns the file of the history, in the user's directory for the state of programs.
fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("llm-rs").join("chat_history"))
}

/// Creates the directory of the history.
fn prepare(path: &Path) -> Result<()> {
    let directory = atomic_file::parent(path);
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))
}

/// Reads a line of at most [`MAX_LINE`] bytes.
fn plain_line(input: &mut impl BufRead) -> Result<Line> {
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
    Ok(match String::from_utf8(line) {
        _ if read == 0 => Line::End,
        Ok(line) => Line::Text(line),
        Err(_) => Line::NotUtf8,
    })
}
