//! What a run leaves in its directory: `main.log` in llm.c's format, and `main.jsonl` with everything known of each step.

use crate::evaluate::multiple_choice::Score;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// One training step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Step {
    /// Counted from 0.
    pub step: usize,
    /// Mean over the step's tokens.
    pub loss: f32,
    pub lr: f32,
    /// L2 norm of the gradients, before clipping.
    pub norm: f32,
    pub ms: f64,
    pub tokens_per_second: f64,
    /// In 0..1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Tokens trained on, this step included.
    pub tokens: u64,
}

#[derive(Serialize)]
struct Validation {
    step: usize,
    val_loss: f64,
}

#[derive(Serialize)]
struct Choices {
    step: usize,
    /// Share of the examples, in 0..=1.
    hellaswag: f64,
    correct: usize,
    examples: usize,
}

/// Both files, or none where a run has no directory. Every line is in the file when the call returns.
#[derive(Debug, Default)]
pub struct Log {
    files: Option<(Output, Output)>,
}

#[derive(Debug)]
struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file })
    }

    fn line(&mut self, mut line: String) -> Result<()> {
        line.push('\n');
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Log {
    /// Starts both files afresh.
    pub fn create(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else { return Ok(Self::default()) };
        let file = |name| Output::create(directory.join(name));
        Ok(Self { files: Some((file("main.log")?, file("main.jsonl")?)) })
    }

    pub fn step(&mut self, step: &Step) -> Result<()> {
        let Step { step: s, loss, lr, norm, .. } = step;
        self.write(format!("s:{s} trl:{loss:.4} lr:{lr:.6} norm:{norm:.2}"), step)
    }

    pub fn validation(&mut self, step: usize, val_loss: f64) -> Result<()> {
        self.write(format!("s:{step} tel:{val_loss:.4}"), &Validation { step, val_loss })
    }

    pub fn hellaswag(&mut self, step: usize, score: Score) -> Result<()> {
        let (hellaswag, Score { correct, examples }) = (score.accuracy(), score);
        self.write(format!("s:{step} eval:{hellaswag:.4}"), &Choices { step, hellaswag, correct, examples })
    }

    fn write(&mut self, line: String, record: &impl Serialize) -> Result<()> {
        let Some((main, jsonl)) = &mut self.files else { return Ok(()) };
        main.line(line)?;
        jsonl.line(serde_json::to_string(record)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn lines_are_llm_cs_and_records_json() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::create(Some(dir.path())).unwrap();
        log.validation(0, 10.98765).unwrap();
        let step = Step {
            step: 0,
            loss: 5.270_007,
            lr: 3e-4,
            norm: 12.345,
            ms: 100.0,
            tokens_per_second: 2560.0,
            mfu: None,
            tokens: 256,
        };
        log.step(&step).unwrap();
        log.hellaswag(20, Score { correct: 2955, examples: 10042 }).unwrap();
        let main = fs::read_to_string(dir.path().join("main.log")).unwrap();
        assert_eq!(main, "s:0 tel:10.9877\ns:0 trl:5.2700 lr:0.000300 norm:12.35\ns:20 eval:0.2943\n");
        let jsonl = fs::read_to_string(dir.path().join("main.jsonl")).unwrap();
        let records: Vec<serde_json::Value> = jsonl.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(records[0]["val_loss"], 10.98765);
        assert_eq!((&records[1]["tokens"], records[1].get("mfu")), (&256.into(), None));
        assert_eq!((&records[2]["step"], &records[2]["correct"]), (&20.into(), &2955.into()));
        Log::default().step(&step).unwrap();
    }
}
