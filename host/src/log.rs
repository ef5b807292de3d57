//! The log files of a run: `main.log` in llm.c's format, `main.jsonl` with every measured value of each step, and optionally an
//! event file for TensorBoard.

use crate::console::{STALL, unusable};
use crate::evaluate::core::{self, TaskScore};
use crate::evaluate::multiple_choice::Score;
use crate::train::SourceLoss;
use anyhow::{Context, Result, anyhow};
use metrics::expert_loads::ExpertLoads;
use metrics::run::RunLog;
use metrics::tensorboard;
use model::digests::Digests;
use model::guards::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::fs::File;
use system::process;

/// One training step.
#[derive(Clone, Debug, Serialize)]
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
    /// Loads of the experts, if the model has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLoads>,
    /// Tokens trained on so far, including this step.
    pub tokens: u64,
    /// Z-scores, and whether the update was skipped.
    #[serde(flatten)]
    pub verdict: Verdict,
}

#[derive(Serialize)]
struct Validation<'a> {
    step: usize,
    val_loss: f64,
    /// Tokens trained on before the evaluation.
    tokens: u64,
    /// The losses of several sources.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    sources: &'a [SourceLoss],
}

#[derive(Serialize)]
struct ScoreLine {
    step: usize,
    /// Accuracy as a fraction.
    hellaswag: f64,
    correct: usize,
    examples: usize,
    /// Tokens trained on before the evaluation.
    tokens: u64,
}

#[derive(Serialize)]
struct CoreLine<'a> {
    step: usize,
    /// Mean centered accuracy.
    core: f64,
    /// Accuracy on each task.
    core_tasks: BTreeMap<&'a str, f64>,
    /// Tokens trained on before the evaluation.
    tokens: u64,
}

/// A record of `main.jsonl` with the Unix time in seconds at which it was logged.
#[derive(Serialize)]
struct Timed<'a, R> {
    #[serde(flatten)]
    record: &'a R,
    time: f64,
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
    files: Vec<LineFile>,
    /// Event file of TensorBoard.
    events: Option<LineFile>,
    /// The generated texts, from the first one on.
    samples: Option<LineFile>,
    /// Whether the lines of `main.jsonl` are also printed to standard output.
    printed: bool,
    /// The write error that has not been reported yet.
    error: Option<String>,
}

/// No line of a log is as long. Longer lines are removed when a run resumes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The log files of a run.
pub const NAMES: [&str; 2] = ["main.log", "main.jsonl"];

/// The file of the texts that a run generates: JSON objects with `step`, `text` and `time`.
pub const SAMPLES: &str = "samples.jsonl";

/// Returns the last step in the log of a run, if there is one.
pub fn last_step(directory: &Path) -> Option<usize> {
    const TAIL: u64 = 4096;
    let file = File::open(directory.join(NAMES[0])).ok()?;
    let len = file.size().ok()?;
    let read = len.min(TAIL);
    let mut tail = vec![0; read as usize];
    file.read_exact_at(&mut tail, len - read).ok()?;
    let step = |line: &str| line.strip_prefix("s:")?.split(' ').next()?.parse().ok();
    String::from_utf8_lossy(&tail).lines().rev().find_map(step)
}

/// A file of lines. Lines that cannot be written, as on a full disk, are kept in memory and written with a later line.
#[derive(Debug)]
pub(crate) struct LineFile {
    path: PathBuf,
    file: File,
    /// Length of the file in bytes, without a partly written line.
    len: u64,
    /// Whether the file may end with a partly written line.
    torn: bool,
    /// Lines or records that could not be written yet.
    pending: Vec<u8>,
}

impl LineFile {
    /// Opens a file for appending.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let open = || {
            let file = File::append(&path)?;
            let len = file.size()?;
            Ok::<_, io::Error>((file, len))
        };
        let (file, len) = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file, len, torn: false, pending: Vec::new() })
    }

    /// Writes a line and all lines before it that could not be written.
    pub(crate) fn line(&mut self, line: &str) -> Result<()> {
        self.append(format!("{line}\n").as_bytes())
    }

    /// Writes lines or records, and all before them that could not be written.
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend(bytes);
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        if !self.file.has_name().with_context(cannot)? {
            self.restore()?;
        }
        self.write_pending().with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn write_pending(&mut self) -> io::Result<()> {
        self.remove_torn_line()?;
        if let Err(error) = self.file.write_all(&self.pending) {
            self.torn = true;
            // If this fails, too, the next attempt begins with it.
            let _ = self.remove_torn_line();
            return Err(error);
        }
        self.len += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Reopens the log after another program has removed or replaced it. Lines of a removed file are copied from the open file.
    fn restore(&mut self) -> Result<()> {
        let replaced =
            system::fs::exists(&self.path).with_context(|| format!("cannot read {}", self.path.display()))?;
        let copied = if replaced { Ok(()) } else { self.copy_lines() };
        let Self { file, len, .. } = Self::open(self.path.clone())?;
        (self.file, self.len, self.torn) = (file, len, false);
        let (path, how) = (self.path.display(), if replaced { "replaced" } else { "removed" });
        let then = match copied {
            _ if replaced => "the run continues in the new file".to_owned(),
            Ok(()) => "its lines were written again".to_owned(),
            // On a network file system, a file that another computer removed can no longer be read.
            Err(error) => format!("its lines are lost: {error:#}"),
        };
        let _ = process::print_error_within(
            &format!("warning: {path} was {how} during the run: {then}"),
            Duration::from_secs(1),
        );
        Ok(())
    }

    /// Writes the lines of a file that was removed into a new one.
    fn copy_lines(&self) -> Result<()> {
        let mut lines = self.file.try_clone()?;
        lines.seek(SeekFrom::Start(0))?;
        atomic_file::write(&self.path, |file| Ok(io::copy(&mut lines.take(self.len), file).map(drop)?))
    }

    fn remove_torn_line(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.len)?;
            self.torn = false;
        }
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
        match system::fs::remove_file(&directory.join(SAMPLES)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", directory.join(SAMPLES).display()))
            }
            _ => Self::open(directory),
        }
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
        for path in [&main, &jsonl].into_iter().filter(|_| step > 0) {
            if system::fs::exists(path).with_context(|| format!("cannot read {}", path.display()))? {
                continue;
            }
            process::print_error(&format!(
                "warning: {}: expected the lines of {step} steps, found no file; the log begins after these steps unless you \
                 restore the file and resume again",
                path.display()
            ));
        }
        retain_lines(&main, |line| keep(Line::from_main(line)))?;
        retain_lines(&jsonl, |line| keep(Line::from_jsonl(line)))?;
        let samples = directory.join(SAMPLES);
        if system::fs::exists(&samples).with_context(|| format!("cannot read {}", samples.display()))? {
            retain_lines(&samples, |line| keep(Line::from_jsonl(line)))?;
        }
        Self::open(directory)
    }

    fn open(directory: &Path) -> Result<Self> {
        let [main, jsonl] = NAMES.map(|name| LineFile::open(directory.join(name)));
        Ok(Self { files: vec![main?, jsonl?], ..Self::default() })
    }

    /// Also writes an event file for TensorBoard into `directory`. The run starts or resumes before the update of `step`.
    ///
    /// A resumed run writes a new file, and TensorBoard discards what earlier files contain from that step on. Evaluations of that
    /// step that the log keeps are written again.
    pub fn write_events(&mut self, directory: &Path, step: usize) -> Result<()> {
        let now = unix_time();
        let mut output = LineFile::open(directory.join(tensorboard::file_name(now)))?;
        output.append(&tensorboard::start(now, step as u64))?;
        // TensorBoard also discards the evaluations before the update of `step`, which are not repeated.
        let kept =
            if step > 0 { RunLog::read(&directory.join("main.jsonl")).unwrap_or_default() } else { RunLog::default() };
        let tags = [tensorboard::VAL_LOSS, tensorboard::HELLASWAG, tensorboard::CORE];
        for (tag, evaluations) in tags.into_iter().zip([kept.validations, kept.hellaswag, kept.core]) {
            for found in evaluations.iter().filter(|evaluation| evaluation.step == step as u64) {
                let time = if found.time.is_finite() { found.time } else { now };
                output.append(&tensorboard::scalars(time, found.step, &[(tag, found.value as f32)]))?;
            }
        }
        self.events = Some(output);
        Ok(())
    }

    /// Returns this log, which prints the lines of `main.jsonl` to standard output if `printed` is set.
    pub fn printed(self, printed: bool) -> Self {
        Self { printed, ..self }
    }

    /// Writes all pending lines, or fails, and returns handles of the files.
    pub fn flushed(&mut self) -> Result<Vec<File>> {
        self.finish()?;
        self.files
            .iter()
            .chain(&self.events)
            .chain(&self.samples)
            .map(|output| output.file.try_clone().context("cannot share the log"))
            .collect()
    }

    /// Continues in `directory`, to which the open files have moved.
    pub fn follow(&mut self, directory: &Path) {
        for output in self.files.iter_mut().chain(&mut self.events).chain(&mut self.samples) {
            output.path = directory.join(output.path.file_name().unwrap_or_default());
        }
    }

    /// Returns the reason why lines are kept in memory, once each time that writing starts to fail.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.error.take()
    }

    /// Writes all pending lines, or fails.
    pub fn finish(&mut self) -> Result<()> {
        self.files.iter_mut().chain(&mut self.events).chain(&mut self.samples).try_for_each(LineFile::flush)
    }

    /// Logs a training step.
    pub fn step(&mut self, step: &Step) -> Result<()> {
        let Step { step: s, loss, lr, norm, tokens_per_second, mfu, experts, .. } = step;
        let mut values = vec![
            (tensorboard::TRAIN_LOSS, *loss),
            (tensorboard::LEARNING_RATE, *lr),
            (tensorboard::GRADIENT_NORM, *norm),
            (tensorboard::TOKENS_PER_SECOND, *tokens_per_second as f32),
        ];
        values.extend(mfu.map(|mfu| (tensorboard::MFU, mfu as f32)));
        if let Some(experts) = experts {
            values.extend([
                (tensorboard::EXPERT_LOAD, experts.mean()),
                (tensorboard::WORST_EXPERT_LOAD, experts.worst()),
                (tensorboard::UNUSED_EXPERTS, experts.all_unused() as f32),
            ]);
        }
        let line = format!("s:{s} trl:{loss:.4} lr:{lr:.6} norm:{norm:.2}");
        self.write(*s, Some(&line), step, &values)
    }

    /// Logs a validation loss after `tokens` tokens, and those of the sources if there are several.
    pub fn validation(&mut self, step: usize, tokens: u64, val_loss: f64, sources: &[SourceLoss]) -> Result<()> {
        let tags: Vec<String> =
            sources.iter().map(|source| format!("{}/{}", tensorboard::VAL_LOSS, source.name)).collect();
        let mut values = vec![(tensorboard::VAL_LOSS, val_loss as f32)];
        values.extend(tags.iter().zip(sources).map(|(tag, source)| (tag.as_str(), source.val_loss as f32)));
        let line = format!("s:{step} tel:{val_loss:.4}");
        self.write(step, Some(&line), &Validation { step, val_loss, tokens, sources }, &values)
    }

    /// Logs a HellaSwag score after `tokens` tokens.
    pub fn hellaswag(&mut self, step: usize, tokens: u64, score: Score) -> Result<()> {
        let (hellaswag, Score { correct, examples }) = (score.accuracy(), score);
        let record = ScoreLine { step, hellaswag, correct, examples, tokens };
        let values = [(tensorboard::HELLASWAG, hellaswag as f32)];
        self.write(step, Some(&format!("s:{step} eval:{hellaswag:.4}")), &record, &values)
    }

    /// Logs CORE after `tokens` tokens.
    pub fn core(&mut self, step: usize, tokens: u64, scores: &[TaskScore]) -> Result<()> {
        let core = core::metric(scores);
        let core_tasks = scores.iter().map(|score| (score.task.as_str(), score.accuracy)).collect();
        let values = [(tensorboard::CORE, core as f32)];
        let line = format!("s:{step} core:{core:.4}");
        self.write(step, Some(&line), &CoreLine { step, core, core_tasks, tokens }, &values)
    }

    /// Logs hashes of parameters and optimizer state after `step` steps, in `main.jsonl` only.
    pub fn hashes(&mut self, step: usize, hashes: &Digests) -> Result<()> {
        self.write(step, None, &Hashes { step, hashes }, &[])
    }

    /// Logs a text that the model generated before the update of `step`. The file is created for the first one.
    pub fn sample(&mut self, step: usize, text: &str) -> Result<()> {
        #[derive(Serialize)]
        struct Sample<'a> {
            step: usize,
            text: &'a str,
        }
        let Some(main) = self.files.first() else { return Ok(()) };
        if self.samples.is_none() {
            self.samples = Some(LineFile::open(main.path.with_file_name(SAMPLES))?);
        }
        let time = (1e3 * unix_time()).round() / 1e3;
        let json = serde_json::to_string(&Timed { record: &Sample { step, text }, time })?;
        // As with other lines, one that cannot be written waits in memory.
        if let Some(Err(error)) = self.samples.as_mut().map(|samples| samples.line(&json)) {
            self.error.get_or_insert(format!("{error:#}"));
        }
        Ok(())
    }

    /// Prints a record to standard output if that is wanted. If standard output is closed during the run, the records continue in
    /// `main.jsonl` only; without that file, it is an error.
    fn print(&mut self, json: &str) -> Result<()> {
        if !self.printed {
            return Ok(());
        }
        let print =
            |json| if self.files.is_empty() { process::print(json) } else { process::print_within(json, STALL) };
        let Err(error) = print(json) else { return Ok(()) };
        let [_, jsonl] = &*self.files else { return Err(closed_stdout(&error)) };
        self.printed = false;
        let path = jsonl.path.display();
        let warning = format!("warning: standard output {}: output continues in {path}", unusable(&error));
        let _ = process::print_error_within(&warning, Duration::from_secs(1));
        Ok(())
    }

    /// Writes `line` to `main.log`, if there is one, `record` to `main.jsonl`, and `values` to the event file, unless there are none.
    fn write(
        &mut self,
        step: usize,
        line: Option<&str>,
        record: &impl Serialize,
        values: &[(&str, f32)],
    ) -> Result<()> {
        let time = unix_time();
        let rounded = (1e3 * time).round() / 1e3;
        let json = serde_json::to_string(&Timed { record, time: rounded })?;
        self.print(&json)?;
        let lines = [line, Some(&json)].map(|line| line.map(|line| format!("{line}\n").into_bytes()));
        let wanted = self.events.is_some() && !values.is_empty();
        let event = wanted.then(|| tensorboard::scalars(time, step as u64, values));
        for (output, bytes) in self.files.iter_mut().chain(&mut self.events).zip(lines.into_iter().chain([event])) {
            let Some(bytes) = bytes else { continue };
            let failed_before = !output.pending.is_empty();
            if let Err(error) = output.append(&bytes)
                && !failed_before
            {
                self.error = Some(format!("{error:#}"));
            }
        }
        Ok(())
    }
}

/// Returns the error of a run that has lost its standard output and has no file for its results.
///
/// The reason is text: such a run must not end like `head` closing a pipe.
pub(crate) fn closed_stdout(error: &io::Error) -> anyhow::Error {
    anyhow!(
        "standard output: expected an open file or pipe, found a closed one ({error}); keep it open, or give --out DIR"
    )
}

/// Returns the Unix time in seconds.
fn unix_time() -> f64 {
    system::time::since_epoch().as_secs_f64()
}

/// The content of a log line, as far as resuming needs it.
struct Line {
    step: usize,
    /// Whether the line logs a training step, or the hashes after it, rather than an evaluation.
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
    let mut lines = match bounded_file::open_of_run(path) {
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
    use std::fs::{self, File};

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
        log.validation(0, 0, 10.98765, &[]).unwrap();
        let step = Step {
            step: 0,
            loss: 5.270_007,
            lr: 3e-4,
            norm: 12.345,
            ms: 100.0,
            tokens_per_second: 2560.0,
            mfu: None,
            experts: Some(ExpertLoads::of(&[vec![3, 0], vec![1, 1]])),
            tokens: 256,
            verdict: Verdict::default(),
        };
        log.step(&step).unwrap();
        log.hellaswag(20, 256, Score { correct: 2955, examples: 10042 }).unwrap();
        let main = fs::read_to_string(dir.path().join("main.log")).unwrap();
        assert_eq!(main, "s:0 tel:10.9877\ns:0 trl:5.2700 lr:0.000300 norm:12.35\ns:20 eval:0.2943\n");
        let jsonl = fs::read_to_string(dir.path().join("main.jsonl")).unwrap();
        let records: Vec<serde_json::Value> = jsonl.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!((&records[0]["val_loss"], &records[0]["tokens"]), (&10.98765.into(), &0.into()));
        let times: Vec<f64> = records.iter().map(|record| record["time"].as_f64().unwrap()).collect();
        assert!(times[0] > 1.7e9 && times.is_sorted(), "{times:?}");
        assert_eq!((&records[1]["tokens"], records[1].get("mfu")), (&256.into(), None));
        assert_eq!(records[1]["experts"].to_string(), r#"{"max_load":[2.0,1.0],"unused":[1,0]}"#);
        assert_eq!((&records[2]["step"], &records[2]["correct"]), (&20.into(), &2955.into()));
        assert_eq!(records[2]["tokens"], 256);
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

    #[test]
    fn a_log_that_is_removed_or_replaced_during_the_run_continues() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::create(Some(dir.path())).unwrap();
        log.validation(0, 0, 5.5, &[]).unwrap();
        log.validation(1, 256, 5.25, &[]).unwrap();
        let path = dir.path().join("main.log");
        fs::remove_file(&path).unwrap();
        log.validation(2, 512, 5.0, &[]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "s:0 tel:5.5000\ns:1 tel:5.2500\ns:2 tel:5.0000\n");
        let edited = dir.path().join("edited");
        fs::write(&edited, "edited\n").unwrap();
        fs::rename(&edited, &path).unwrap();
        log.validation(3, 768, 4.75, &[]).unwrap();
        log.validation(4, 1024, 4.5, &[]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "edited\ns:3 tel:4.7500\ns:4 tel:4.5000\n");

        // Lines wait in memory if the directory is gone.
        fs::remove_dir_all(dir.path()).unwrap();
        log.validation(5, 1280, 4.25, &[]).unwrap();
        assert!(log.take_trouble().is_some_and(|trouble| trouble.contains("main.")));
        fs::create_dir(dir.path()).unwrap();
        log.finish().unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("s:4 tel:4.5000\ns:5 tel:4.2500\n"));
    }

    #[test]
    fn a_resumed_run_writes_another_event_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::create(Some(dir.path())).unwrap();
        log.write_events(dir.path(), 0).unwrap();
        log.validation(0, 0, 5.5, &[]).unwrap();
        log.finish().unwrap();
        assert_eq!(log.flushed().unwrap().len(), 3);
        let files = || {
            let entries = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
            entries.filter(|path| path.to_string_lossy().contains(tensorboard::MARKER)).collect::<Vec<_>>()
        };
        let written = fs::read(&files()[0]).unwrap();
        // A record has 16 bytes around its data. The time of an event is unknown, its size is not.
        let start = tensorboard::start(0.0, 0).len();
        assert_eq!(written.len(), start + tensorboard::scalars(0.0, 0, &[(tensorboard::VAL_LOSS, 5.5)]).len());
        assert!(
            written[start..].ends_with(&written[written.len() - 4..]) && written.windows(9).any(|w| w == b"eval/loss")
        );
    }
}
