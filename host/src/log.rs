//! What a run leaves in its directory: `main.log` in llm.c's format, and `main.jsonl` with everything known of each step.

use crate::evaluate::multiple_choice::Score;
use anyhow::{Context, Result};
use model::guards::Verdict;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
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
    #[serde(flatten)]
    pub verdict: Verdict,
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

/// Both files, or none where a run has no directory. Every line is in its file when the call returns; if it cannot be, as on
/// a full disk, it waits for the next call.
#[derive(Debug, Default)]
pub struct Log {
    files: Option<[Output; 2]>,
    trouble: Option<String>,
}

const NAMES: [&str; 2] = ["main.log", "main.jsonl"];

#[derive(Debug)]
struct Output {
    path: PathBuf,
    file: File,
    /// Bytes in the file.
    written: u64,
    /// Lines that could not be written yet.
    waiting: String,
}

impl Output {
    /// Goes on at the end of a file.
    fn open(path: PathBuf) -> Result<Self> {
        let open = || {
            let file = File::options().append(true).create(true).open(&path)?;
            let written = file.metadata()?.len();
            Ok::<_, io::Error>((file, written))
        };
        let (file, written) = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file, written, waiting: String::new() })
    }

    fn line(&mut self, line: &str) -> Result<()> {
        self.waiting.push_str(line);
        self.waiting.push('\n');
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        if let Err(error) = self.file.write_all(self.waiting.as_bytes()) {
            // Half a line would be joined by the next one.
            let _ = self.file.set_len(self.written);
            return Err(error).with_context(|| format!("cannot write {}", self.path.display()));
        }
        self.written += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }
}

impl Log {
    /// Starts both files afresh.
    pub fn create(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else { return Ok(Self::default()) };
        for name in NAMES {
            let path = directory.join(name);
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Self::open(directory)
    }

    /// Goes on with the files of a run that is taken up again before `step`'s update: what was logged after that is cut off.
    /// Validations at `step` stay if they are `evaluated`.
    pub fn resume(directory: &Path, step: usize, evaluated: bool) -> Result<Self> {
        let stays = |line: Option<Line>| match line {
            Some(Line { step: s, training: true }) => s < step,
            Some(Line { step: s, training: false }) => s < step || (s == step && evaluated),
            None => true,
        };
        let [main, jsonl] = NAMES.map(|name| directory.join(name));
        cut(&main, |line| stays(Line::of_main(line)))?;
        cut(&jsonl, |line| stays(Line::of_jsonl(line)))?;
        Self::open(directory)
    }

    fn open(directory: &Path) -> Result<Self> {
        let [main, jsonl] = NAMES.map(|name| Output::open(directory.join(name)));
        Ok(Self { files: Some([main?, jsonl?]), trouble: None })
    }

    /// Handles of the files.
    pub fn files(&self) -> Result<Vec<File>> {
        self.files.iter().flatten().map(|output| output.file.try_clone().context("cannot share the log")).collect()
    }

    /// Why lines wait; told once each time it begins.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// Writes the lines that wait; that some cannot be written is an error now.
    pub fn finish(&mut self) -> Result<()> {
        self.files.iter_mut().flatten().try_for_each(Output::flush)
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
        let Some(files) = &mut self.files else { return Ok(()) };
        for (output, line) in files.iter_mut().zip([line, serde_json::to_string(record)?]) {
            let waited = !output.waiting.is_empty();
            if let Err(error) = output.line(&line)
                && !waited
            {
                self.trouble = Some(format!("{error:#}"));
            }
        }
        Ok(())
    }
}

/// What a line of a log is about.
struct Line {
    step: usize,
    /// Of a step's update, as opposed to a validation before it.
    training: bool,
}

impl Line {
    fn of_main(line: &str) -> Option<Self> {
        let (step, rest) = line.strip_prefix("s:")?.split_once(' ')?;
        Some(Self { step: step.parse().ok()?, training: rest.starts_with("trl:") })
    }

    fn of_jsonl(line: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Record {
            step: usize,
            /// Steps have one; their loss is null if it is not finite.
            lr: Option<serde_json::Value>,
        }
        let record: Record = serde_json::from_str(line).ok()?;
        Some(Self { step: record.step, training: record.lr.is_some() })
    }
}

/// Keeps the whole lines of a file that `stay`, if there is such a file.
fn cut(path: &Path, stays: impl Fn(&str) -> bool) -> Result<()> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let text = String::from_utf8_lossy(&text);
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n') && stays(line.trim_end()));
    atomic_file::write(path, |file| lines.into_iter().try_for_each(|line| Ok(file.write_all(line.as_bytes())?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::guards::Skipped;

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
            verdict: Verdict::default(),
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
        assert!(["loss_z", "norm_z", "skipped"].iter().all(|key| records[1].get(key).is_none()), "{}", records[1]);
        Log::default().step(&step).unwrap();

        // JSON has no NaN, and a step is one all the same.
        let verdict = Verdict { loss_z: None, norm_z: Some(-0.5), skipped: Some(Skipped::NotFinite) };
        log.step(&Step { step: 21, loss: f32::NAN, norm: f32::INFINITY, verdict, ..step }).unwrap();
        let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
        let (main, jsonl) = (read("main.log"), read("main.jsonl"));
        assert_eq!(main.lines().last().unwrap(), "s:21 trl:NaN lr:0.000300 norm:inf");
        let record: serde_json::Value = serde_json::from_str(jsonl.lines().last().unwrap()).unwrap();
        assert_eq!((&record["loss"], &record["norm_z"]), (&serde_json::Value::Null, &(-0.5).into()));
        assert_eq!((&record["skipped"], record.get("loss_z")), (&"not-finite".into(), None));
        drop(Log::resume(dir.path(), 22, true).unwrap());
        assert_eq!((read("main.log"), read("main.jsonl")), (main, jsonl.clone()));
        drop(Log::resume(dir.path(), 21, true).unwrap());
        assert_eq!(read("main.jsonl").lines().count() + 1, jsonl.lines().count());
    }
}
