//! The program that times CUB.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running `cub.cu`. It waits for requests while the kernels of this program are timed.
pub struct Cub {
    /// The version of CUB.
    pub version: String,
    program: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Cub {
    /// Starts the program.
    pub fn start(path: &str) -> Result<Self, Box<dyn Error>> {
        let program = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut program =
            program.map_err(|error| format!("--cub {path}: expected cub.cu, compiled by nvcc: {error}"))?;
        let requests = program.stdin.take();
        let answers = BufReader::new(program.stdout.take().ok_or("cub: no output")?);
        let mut cub = Self { version: String::new(), program, requests, answers };
        cub.version = cub.answer()?;
        Ok(cub)
    }

    /// Returns the mean seconds of `runs` runs of `operation`: `scan` or `sort`.
    pub fn time(&mut self, operation: &str, n: usize, runs: u32) -> Result<f64, Box<dyn Error>> {
        let requests = self.requests.as_mut().ok_or("cub: no input")?;
        writeln!(requests, "{operation} {n} {runs}")?;
        requests.flush()?;
        Ok(self.answer()?.parse()?)
    }

    fn answer(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("cub: expected an answer, found the end of its output".into());
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for Cub {
    fn drop(&mut self) {
        // The end of its input ends the program.
        self.requests = None;
        let _ = self.program.wait();
    }
}
