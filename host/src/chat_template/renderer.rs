//! The process that renders a chat template.
//!
//! A template of an unknown model may run for ever, take all memory, or recurse until the stack overflows. minijinja limits the first
//! two in part, and the last one not for values that contain themselves. Nothing but the end of a process stops all of them.

use super::template::{ChatTemplate, Message, TemplateError};
use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::env;
use std::io::{Read, Write, stdin, stdout};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// The first argument of the process. It is not a command of users.
const COMMAND: &str = "render-chat-template";

/// The maximum processor time and address space of the process.
const MAX_SECONDS: u64 = 2;
const MAX_BYTES: u64 = 1 << 30;

/// Maximum length of a result as JSON in bytes. The body of a request has at most 1 MiB.
const MAX_RESULT: u64 = 16 << 20;

/// Renders in a process. An error means that the process has exceeded its limits.
pub fn render(template: &ChatTemplate, messages: &[&Message]) -> Result<Result<String, TemplateError>> {
    let input = serde_json::to_vec(&(template, messages))?;
    // The running program, even if its file has been replaced.
    let mut command = Command::new("/proc/self/exe");
    command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    // Ctrl-C in a terminal goes to the process group of `chat`, where it must not end the process.
    command.process_group(0);
    let mut child = command.spawn().context("cannot start the process that renders the chat template")?;
    if let Some(mut stdin) = child.stdin.take() {
        // A process that has ended does not read.
        let _ = stdin.write_all(&input);
    }
    let mut result = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let _ = stdout.take(MAX_RESULT).read_to_end(&mut result);
    }
    let _ = child.wait();
    serde_json::from_slice(&result).ok().with_context(|| {
        format!(
            "expected a chat template that renders within {MAX_SECONDS} s, {} MiB of memory and {} MiB of text, found one that \
             exceeds a limit or overflows the stack; use another template",
            MAX_BYTES >> 20,
            MAX_RESULT >> 20
        )
    })
}

/// Returns whether this process is to render a template.
pub fn is_requested() -> bool {
    env::args_os().nth(1).is_some_and(|argument| argument == COMMAND)
}

/// Reads a template and messages from standard input, and writes the result to standard output.
pub fn run() -> Result<()> {
    limit(Resource::Core, 0)?;
    limit(Resource::Cpu, MAX_SECONDS)?;
    limit(Resource::As, MAX_BYTES)?;
    let (template, messages): (ChatTemplate, Vec<Message>) = serde_json::from_reader(stdin().lock())?;
    let rendered = template.render_here(&messages);
    Ok(stdout().write_all(&serde_json::to_vec(&rendered)?)?)
}

/// Lowers a limit of this process.
fn limit(resource: Resource, value: u64) -> Result<()> {
    let Rlimit { current, maximum } = getrlimit(resource);
    let current = Some(current.map_or(value, |current| current.min(value)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}
