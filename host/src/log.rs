//! The log files of a run: `main.log` in llm.c's format, and `main.jsonl` with every measured value of each step.

use crate::evaluate::multiple_choice::Score;
use anyhow::{Context, Result};
use model::digests::Digests;
use model::guards::Verdict;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// One training step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Step {
    /// Number of the step, from 0.
    pub step: usize,
    /// Mean loss over the step's tokens.
    pub loss: f32,
    /// Learning rate.
    pub lr: f32,
    /// L2 norm of the gradients before clipping.
    pub norm: f32,
    /// Time of the step in milliseconds.
    pub ms: f64,
    /// Throughput of this step.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization as a fraction, if the peak of the device is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Tokens trained on so far, including this step.
    pub tokens: u64,
    /// Z-scores, and whether the update was skipped.
    #[serde(flatten)]
    pub verdict: Verdict,
}

#[derive(Serialize)]
struct Validation {
    step: usize,
    val_loss: f64,
}

#[derive(Serialize)]
struct ScoreLine {
    step: usize,
    /// Accuracy as a fraction.
    hellaswag: f64,
    correct: usize,
    examples: usize,
}

#[derive(Serialize)]
struct Hashes<'a> {
    step: usize,
    hashes: &'a Digests,
}

/// The log files of a run; none for a run without a directory.
///
/// Each call writes its line to the files before it returns. A line that cannot be written, as on a full disk, is kept in
/// memory and written by a later call.
#[derive(Debug, Default)]
pub struct Log {
    files: Option<[LineFile; 2]>,
    /// The write error that has not been reported yet.
    error: Option<String>,
}

/// No line of a log is as long. Longer lines are removed when a run resumes.
const MAX_LINE_BYTES: u64 = 1 << 20;

const NAMES: [&str; 2] = ["main.log", "main.jsonl"];

/// A file of lines. Lines that cannot be written, as on a full disk, are kept in memory and written with a later line.
#[derive(Debug)]
pub(crate) struct LineFile {
    path: PathBuf,
    file: File,
    /// Length of the file in bytes.
    len: u64,
    /// Lines that could not be written yet.
    pending: String,
}

impl LineFile {
    /// Opens a file for appending.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let open = || {
            let file = File::options().append(true).create(true).open(&path)?;
            let len = file.metadata()?.len();
            Ok::<_, io::Error>((file, len))
        };
        let (file, len) = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file, len, pending: String::new() })
    }

    /// Writes a line and all lines before it that could not be written.
    pub(crate) fn line(&mut self, line: &str) -> Result<()> {
        self.pending.push_str(line);
        self.pending.push('\n');
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        if let Err(error) = self.file.write_all(self.pending.as_bytes()) {
            // Remove a partly written line, so that the next attempt does not continue it.
            let _ = self.file.set_len(self.len);
            return Err(error).with_context(|| format!("cannot write {}", self.path.display()));
        }
        self.len += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

impl Log {
    /// Creates both files, replacing existing ones.
    pub fn create(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else { return Ok(Self::default()) };
        for name in NAMES {
            let path = directory.join(name);
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Self::open(directory)
    }

    /// Opens the files of a run that resumes before the update of `step`, and removes the lines that were logged after it.
    ///
    /// Evaluations at `step` are kept if the checkpoint was written after them (`evaluated`).
    pub fn resume(directory: &Path, step: usize, evaluated: bool) -> Result<Self> {
        let keep = |line: Option<Line>| match line {
            Some(Line { step: s, training: true }) => s < step,
            Some(Line { step: s, training: false }) => s < step || (s == step && evaluated),
            None => true,
        };
        let [main, jsonl] = NAMES.map(|name| directory.join(name));
        retain_lines(&main, |line| keep(Line::from_main(line)))?;
        retain_lines(&jsonl, |line| keep(Line::from_jsonl(line)))?;
        Self::open(directory)
    }

    fn open(directory: &Path) -> Result<Self> {
        let [main, jsonl] = NAMES.map(|name| LineFile::open(directory.join(name)));
        Ok(Self { files: Some([main?, jsonl?]), error: None })
    }

    /// Returns handles of the files.
    pub fn files(&self) -> Result<Vec<File>> {
        self.files.iter().flatten().map(|output| output.file.try_clone().context("cannot share the log")).collect()
    }

    /// Returns the reason why lines are kept in memory, once each time that writing starts to fail.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.error.take()
    }

    /// Writes all pending lines, or fails.
    pub fn finish(&mut self) -> Result<()> {
        self.files.iter_mut().flatten().try_for_each(LineFile::flush)
    }

    /// Logs a training step.
    pub fn step(&mut self, step: &Step) -> Result<()> {
        let Step { step: s, loss, lr, norm, .. } = step;
        self.write(format!("s:{s} trl:{loss:.4} lr:{lr:.6} norm:{norm:.2}"), step)
    }

    /// Logs a validation loss.
    pub fn validation(&mut self, step: usize, val_loss: f64) -> Result<()> {
        self.write(format!("s:{step} tel:{val_loss:.4}"), &Validation { step, val_loss })
    }

    /// Logs a HellaSwag score.
    pub fn hellaswag(&mut self, step: usize, score: Score) -> Result<()> {
        let (hellaswag, Score { correct, examples }) = (score.accuracy(), score);
        self.write(format!("s:{step} eval:{hellaswag:.4}"), &ScoreLine { step, hellaswag, correct, examples })
    }

    /// Logs hashes of parameters and optimizer state after `step` steps, in `main.jsonl` only.
    pub fn hashes(&mut self, step: usize, hashes: &Digests) -> Result<()> {
        let Some([_, jsonl]) = &mut self.files else { return Ok(()) };
        let failed_before = !jsonl.pending.is_empty();
        let record = serde_json::to_string(&Hashes { step, hashes })?;
        if let (Err(error), false) = (jsonl.line(&record), failed_before) {
            self.error = Some(format!("{error:#}"));
        }
        Ok(())
    }

    fn write(&mut self, line: String, record: &impl Serialize) -> Result<()> {
        let Some(files) = &mut self.files else { return Ok(()) };
        for (output, line) in files.iter_mut().zip([line, serde_json::to_string(record)?]) {
            let failed_before = !output.pending.is_empty();
            if let Err(error) = output.line(&line)
                && !failed_before
            {
                self.error = Some(format!("{error:#}"));
            }
        }
        Ok(())
    }
}

/// The content of a log line, as far as resuming needs it.
struct Line {
    step: usize,
    /// Whether the line logs a training step rather than an evaluation.
    training: bool,
}

impl Line {
    fn from_main(line: &str) -> Option<Self> {
        let (step, rest) = line.strip_prefix("s:")?.split_once(' ')?;
        Some(Self { step: step.parse().ok()?, training: rest.starts_with("trl:") })
    }

    fn from_jsonl(line: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Record {
            step: usize,
            /// Only training steps have a learning rate. Their loss is null if it is not finite.
            lr: Option<serde_json::Value>,
            hashes: Option<serde_json::Value>,
        }
        let Record { step, lr, hashes } = serde_json::from_str(line).ok()?;
        // Hashes after a number of steps belong to the last of these.
        let step = if hashes.is_some() { usize::checked_sub(step, 1)? } else { step };
        Some(Self { step, training: lr.is_some() || hashes.is_some() })
    }
}

/// Removes the lines of a file for which `keep` is false, and an incomplete last line. A missing file is no error.
fn retain_lines(path: &Path, keep: impl Fn(&str) -> bool) -> Result<()> {
    let cannot = || format!("cannot read {}", path.display());
    let mut lines = match bounded_file::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => BufReader::with_capacity(1 << 20, opened.with_context(cannot)?),
    };
    atomic_file::write(path, |file| {
        let mut line = Vec::new();
        while read_line(&mut lines, &mut line).with_context(cannot)? {
            if line.ends_with(b"\n") && keep(String::from_utf8_lossy(&line).trim_end()) {
                file.write_all(&line)?;
            }
        }
        Ok(())
    })
}

/// Reads the next line with its end. Of a line that is too long for a log, only the beginning is returned. Returns false at the end
/// of the file.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line)?;
    if !line.ends_with(b"\n") && !line.is_empty() {
        reader.skip_until(b'\n')?;
    }
    Ok(!line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::guards::Skipped;
    use std::fs;

    #[test]
    fn a_log_with_gigabytes_of_zeros_is_read_line_by_line() {
        let dir = tempfile::tempdir().unwrap();
        for name in NAMES {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let path = dir.path().join(NAMES[0]);
        fs::write(&path, "s:0 trl:5.2700 lr:0.000300 norm:12.35\nnot of a log\n").unwrap();
        // A sparse file: no disk space.
        let file = File::options().append(true).open(&path).unwrap();
        file.set_len(2 << 30).unwrap();
        (&file).write_all(b"\ns:1 trl:5.2 lr:0 norm:1\ns:2 trl:5.2 lr:0 norm:1\ns:3 t").unwrap();
        drop(Log::resume(dir.path(), 2, true).unwrap());
        let kept = "s:0 trl:5.2700 lr:0.000300 norm:12.35\nnot of a log\ns:1 trl:5.2 lr:0 norm:1\n";
        assert!(fs::read_to_string(&path).unwrap() == kept);
    }

    #[test]
    fn main_log_has_the_format_of_llm_c_and_main_jsonl_holds_records() {
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

        // JSON has no NaN: the loss is null, and the line still counts as a training step.
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
