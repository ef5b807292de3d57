//! The process that renders a chat template.
//!
//! A template of an unknown model may run for ever, take all memory, or recurse until the stack overflows. minijinja limits the first
//! two in part, and the last one not for values that contain themselves. Nothing but the end of a process stops all of them.
//!
//! The process reads the template, and then requests, each a line of JSON. It answers each request with a line of JSON. Its memory is
//! limited, and so is the processor time of each request.

use super::{ChatTemplate, Compiled, Rendered, TemplateError, value_of};
use anyhow::{Context, Result};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::env;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The first argument of the process. It is not a command of users.
const COMMAND: &str = "render-chat-template";

/// The maximum processor time of a request, and the maximum address space of the process.
const MAX_SECONDS: u64 = 2;
const MAX_BYTES: u64 = 1 << 30;

/// Maximum length of a result as JSON in bytes. The body of a request to the server has at most 1 MiB.
const MAX_RESULT: u64 = 16 << 20;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// The text up to the beginning of the model's answer.
    Answer,
    /// The whole text, and the turns of the assistant in it.
    Training,
}

/// A request: the values that the template sees, as a JSON object.
#[derive(Serialize, Deserialize)]
struct Request<V> {
    purpose: Purpose,
    values: V,
}

/// A running process. Dropping it ends the process.
#[derive(Debug)]
pub struct Renderer {
    child: Child,
    requests: ChildStdin,
    results: BufReader<ChildStdout>,
}

impl Renderer {
    /// Starts the process.
    pub fn start(template: &ChatTemplate) -> Result<Self> {
        // The running program, even if its file has been replaced.
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Ctrl-C in a terminal goes to the process group of `chat`, where it must not end the process.
        command.process_group(0);
        let mut child = command.spawn().context("cannot start the process that renders the chat template")?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, results) = pipes.context("the process that renders the chat template has no pipes")?;
        let mut renderer = Self { child, requests, results: BufReader::new(results) };
        renderer.send(template)?;
        Ok(renderer)
    }

    /// Renders a conversation. An error means that the process has exceeded its limits, and has ended.
    pub fn render(&mut self, purpose: Purpose, values: &impl Serialize) -> Result<Result<Rendered, TemplateError>> {
        self.send(&Request { purpose, values })?;
        let mut result = Vec::new();
        // After an error, the result is incomplete.
        let _ = self.results.by_ref().take(MAX_RESULT).read_until(b'\n', &mut result);
        serde_json::from_slice(&result).ok().with_context(|| {
            format!(
                "expected a chat template that renders within {MAX_SECONDS} s, {} MiB of memory and {} MiB of text, found one that \
                 exceeds a limit or overflows the stack; use another template",
                MAX_BYTES >> 20,
                MAX_RESULT >> 20
            )
        })
    }

    fn send(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        // A process that has ended does not read, and gives no result.
        let _ = self.requests.write_all(&line);
        Ok(())
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether this process is to render a template.
pub fn is_requested() -> bool {
    env::args_os().nth(1).is_some_and(|argument| argument == COMMAND)
}

/// Reads a template and requests from standard input, and writes the results to standard output.
pub fn run() -> Result<()> {
    limit(Resource::Core, 0)?;
    limit(Resource::Cpu, MAX_SECONDS)?;
    limit(Resource::As, MAX_BYTES)?;
    let (mut input, mut line) = (stdin().lock(), String::new());
    input.read_line(&mut line)?;
    let template: ChatTemplate = serde_json::from_str(&line)?;
    let compiled = Compiled::new(&template);
    loop {
        line.clear();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        // The limit is one of the whole process. It counts whole seconds.
        limit(Resource::Cpu, seconds_used()? + 1 + MAX_SECONDS)?;
        let rendered = match &compiled {
            Ok(compiled) => {
                let Request { purpose, values } = serde_json::from_str(&line)?;
                compiled.render(purpose, &value_of(&values))
            }
            Err(error) => Err(error.clone()),
        };
        let mut result = serde_json::to_vec(&rendered)?;
        result.push(b'\n');
        let mut out = stdout().lock();
        out.write_all(&result)?;
        out.flush()?;
    }
}

/// Returns the processor time of this process in whole seconds.
fn seconds_used() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may contain spaces. Fields 14 and 15 are the times, and the next is field 3.
    let (_, fields) = text.rsplit_once(')').context("/proc/self/stat: expected a name in parentheses")?;
    let times: Vec<u64> = fields.split_whitespace().skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
    Ok(times.iter().sum::<u64>() / clock_ticks_per_second())
}

/// Sets a limit of this process.
fn limit(resource: Resource, value: u64) -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(resource);
    let current = Some(maximum.map_or(value, |maximum| maximum.min(value)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_this_process_is_known() {
        let before = seconds_used().unwrap();
        let start = std::time::Instant::now();
        while seconds_used().unwrap() == before {
            assert!(start.elapsed().as_secs() < 60, "the processor time does not increase");
        }
        assert_eq!(seconds_used().unwrap(), before + 1);
    }
}
