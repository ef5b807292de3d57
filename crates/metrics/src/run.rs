//! The log of a run, read from `main.jsonl` of llm.rs or from `main.log` of llm.rs and llm.c.

use crate::expert_loads::ExpertLoads;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Largest log file that is read, in bytes. A log of a million steps takes 250 MB.
const MAX_FILE: u64 = 512 << 20;
/// Largest line that is parsed, in bytes. Longer lines count as damaged.
const MAX_LINE: usize = 1 << 16;

/// A training step. A value that is missing or not finite is NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean loss over the step's tokens.
    pub loss: f32,
    /// Learning rate.
    pub lr: f32,
    /// L2 norm of the gradients before clipping.
    pub norm: f32,
    /// Time of the step in milliseconds.
    pub ms: f32,
    /// Throughput in tokens per second.
    pub tokens_per_second: f32,
    /// Model FLOPs utilization as a fraction.
    pub mfu: f32,
    /// The largest load of an expert divided by the mean load: the mean over the layers, and that of the worst layer.
    pub expert_load: [f32; 2],
    /// Number of experts without a token in all layers.
    pub unused_experts: f32,
    /// Tokens trained on so far, including this step.
    pub tokens: Option<u64>,
    /// Unix time in seconds at which the step was logged.
    pub time: f64,
}

/// An evaluation after `step` steps. A value that is not finite is NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Number of steps before the evaluation.
    pub step: u64,
    /// Validation loss, or accuracy as a fraction.
    pub value: f64,
    /// Tokens trained on before the evaluation.
    pub tokens: Option<u64>,
    /// Unix time in seconds at which the evaluation was logged.
    pub time: f64,
}

/// The validation of one of several data sources.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceLog {
    /// Name of the source.
    pub name: String,
    /// Validation losses.
    pub losses: Vec<Evaluation>,
    /// Last loss per byte of text in bits.
    pub bits_per_byte: Option<f64>,
}

impl SourceLog {
    /// Returns a name and the last values for a table.
    pub fn cell(&self) -> (String, String) {
        let loss = self.losses.last().map_or_else(|| "–".to_owned(), |loss| format!("{:.4}", loss.value));
        let bits = self.bits_per_byte.map_or_else(String::new, |bits| format!(", {bits:.4} bits per byte"));
        (format!("validation loss, {}", self.name), loss + &bits)
    }
}

/// The log of a run. Steps are in increasing order and occur once: if a resumed run repeats a step, its last record counts.
#[derive(Clone, Debug, Default)]
pub struct RunLog {
    /// Name of the run, for legends.
    pub name: String,
    /// The file that was read.
    pub path: PathBuf,
    /// Training steps.
    pub steps: Vec<Step>,
    /// Validation losses.
    pub validations: Vec<Evaluation>,
    /// Validation losses of several data sources, in the order of the log.
    pub sources: Vec<SourceLog>,
    /// HellaSwag accuracies.
    pub hellaswag: Vec<Evaluation>,
    /// Values of CORE.
    pub core: Vec<Evaluation>,
    /// Number of lines that could not be parsed, without an incomplete last line.
    pub damaged_lines: u64,
}

/// A line of `main.jsonl`. Older versions of the program wrote fewer fields.
#[derive(Deserialize)]
struct Record {
    step: u64,
    #[serde(default, deserialize_with = "present")]
    loss: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    lr: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    norm: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    ms: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    tokens_per_second: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    mfu: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    val_loss: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    hellaswag: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    core: Option<f64>,
    #[serde(default, deserialize_with = "present")]
    time: Option<f64>,
    tokens: Option<u64>,
    experts: Option<ExpertLoads>,
    #[serde(default)]
    sources: Vec<SourceRecord>,
}

/// The losses of a source in a line of `main.jsonl`.
#[derive(Deserialize)]
struct SourceRecord {
    name: String,
    #[serde(default, deserialize_with = "present")]
    val_loss: Option<f64>,
    bits_per_byte: Option<f64>,
}

/// Reads a number. A null, which stands for a number that is not finite, becomes NaN.
fn present<'a, D: serde::Deserializer<'a>>(value: D) -> Result<Option<f64>, D::Error> {
    Ok(Some(Option::deserialize(value)?.unwrap_or(f64::NAN)))
}

impl RunLog {
    /// Reads the log of a run. `path` is the directory of a run, its `main.jsonl`, or a `main.log` of llm.rs or llm.c.
    ///
    /// A directory's `main.jsonl` is preferred to its `main.log`, which has fewer values. The name of the run is that of its
    /// directory.
    pub fn read(path: &Path) -> Result<Self> {
        let file = find(path)?;
        let directory = if file == path { path.parent() } else { Some(path) };
        let name = directory.map(absolute).and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let shown = file.display();
        // Opening a pipe would wait for its writer.
        let metadata = fs::metadata(&file).with_context(|| format!("cannot read {shown}"))?;
        ensure!(metadata.is_file(), "{shown}: expected a file, found a device or pipe; copy it to a file first");
        ensure!(
            metadata.len() <= MAX_FILE,
            "{shown}: expected a log of at most {} MiB, found {} MiB; shorten it, for example with tail -c {MAX_FILE}",
            MAX_FILE >> 20,
            metadata.len() >> 20
        );
        let opened = File::open(&file).with_context(|| format!("cannot read {shown}"))?;
        let mut log = Self::parse(BufReader::with_capacity(1 << 16, opened).take(MAX_FILE))
            .with_context(|| format!("cannot read {shown}"))?;
        if log.is_empty() {
            let damaged = match log.damaged_lines {
                0 => "an empty log".to_owned(),
                n => format!("{n} lines of another format"),
            };
            bail!(
                "{shown}: expected lines of main.jsonl or main.log, found {damaged}; name the directory of a run that has \
                 finished its first step"
            );
        }
        log.name = name.unwrap_or_else(|| shown.to_string());
        log.path = file;
        Ok(log)
    }

    /// Parses lines of either format.
    pub fn parse(mut reader: impl BufRead) -> io::Result<Self> {
        let mut log = Self::default();
        let mut line = Vec::new();
        while let Some(complete) = read_line(&mut reader, &mut line)? {
            let text = line.trim_ascii();
            if text.is_empty() || log.add(text) {
                continue;
            }
            // The last line of a run that is being written may be incomplete.
            log.damaged_lines += u64::from(complete && !text.starts_with(b"#"));
        }
        keep_last(&mut log.steps, |step| step.step);
        keep_last(&mut log.validations, |evaluation| evaluation.step);
        keep_last(&mut log.hellaswag, |evaluation| evaluation.step);
        keep_last(&mut log.core, |evaluation| evaluation.step);
        for source in &mut log.sources {
            keep_last(&mut source.losses, |evaluation| evaluation.step);
        }
        Ok(log)
    }

    /// Returns whether the log has no records.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.validations.is_empty() && self.hellaswag.is_empty() && self.core.is_empty()
    }

    /// Adds a line. Returns false if it has neither format.
    fn add(&mut self, line: &[u8]) -> bool {
        if line.starts_with(b"{") { self.add_json(line) } else { self.add_plain(line) }
    }

    fn add_json(&mut self, line: &[u8]) -> bool {
        let Ok(record) = serde_json::from_slice::<Record>(line) else { return false };
        let Record { step, tokens, .. } = record;
        let experts = record.experts.as_ref();
        let time = record.time.unwrap_or(f64::NAN);
        let f32_or_nan = |value: Option<f64>| finite(value.unwrap_or(f64::NAN) as f32);
        // Only training steps have a learning rate.
        let is_step = record.lr.is_some() || record.loss.is_some();
        if is_step {
            self.steps.push(Step {
                step,
                loss: f32_or_nan(record.loss),
                lr: f32_or_nan(record.lr),
                norm: f32_or_nan(record.norm),
                ms: f32_or_nan(record.ms),
                tokens_per_second: f32_or_nan(record.tokens_per_second),
                mfu: f32_or_nan(record.mfu),
                expert_load: experts.map_or([f32::NAN; 2], |experts| [experts.mean(), experts.worst()].map(finite)),
                unused_experts: experts.map_or(f32::NAN, |experts| experts.all_unused() as f32),
                tokens,
                time,
            });
        }
        let evaluation = |value| Evaluation { step, value, tokens, time };
        self.validations.extend(record.val_loss.map(evaluation));
        self.hellaswag.extend(record.hellaswag.map(evaluation));
        self.core.extend(record.core.map(evaluation));
        for SourceRecord { name, val_loss, bits_per_byte } in record.sources {
            let known = self.sources.iter().position(|source| source.name == name);
            let at = known.unwrap_or_else(|| {
                self.sources.push(SourceLog { name, ..SourceLog::default() });
                self.sources.len() - 1
            });
            let source = &mut self.sources[at];
            source.losses.extend(val_loss.map(evaluation));
            source.bits_per_byte = bits_per_byte.or(source.bits_per_byte);
        }
        is_step || record.val_loss.is_some() || record.hellaswag.is_some() || record.core.is_some()
    }

    /// Adds a line of llm.c's format: `s:STEP` and `trl`, `lr`, `norm`, or `tel`, or `eval`. `core` is an addition.
    fn add_plain(&mut self, line: &[u8]) -> bool {
        let Ok(text) = str::from_utf8(line) else { return false };
        let mut fields = text.split_ascii_whitespace().map(|field| field.split_once(':'));
        let Some(Some(("s", step))) = fields.next() else { return false };
        let Ok(step) = step.parse() else { return false };
        let (mut loss, mut lr, mut norm, mut value, mut accuracy, mut core) = (None, None, None, None, None, None);
        for field in fields {
            // A damaged line may join two lines. Its values cannot be trusted.
            let Some((key, Ok(number))) = field.map(|(key, text)| (key, text.parse::<f64>())) else { return false };
            let target = match key {
                "trl" => &mut loss,
                "lr" => &mut lr,
                "norm" => &mut norm,
                "tel" => &mut value,
                "eval" => &mut accuracy,
                "core" => &mut core,
                _ => continue,
            };
            *target = Some(if number.is_finite() { number } else { f64::NAN });
        }
        let number = |value: Option<f64>| finite(value.unwrap_or(f64::NAN) as f32);
        self.steps.extend(loss.map(|loss| Step {
            step,
            loss: finite(loss as f32),
            lr: number(lr),
            norm: number(norm),
            ms: f32::NAN,
            tokens_per_second: f32::NAN,
            mfu: f32::NAN,
            expert_load: [f32::NAN; 2],
            unused_experts: f32::NAN,
            tokens: None,
            time: f64::NAN,
        }));
        let evaluation = |value| Evaluation { step, value, tokens: None, time: f64::NAN };
        self.validations.extend(value.map(evaluation));
        self.hellaswag.extend(accuracy.map(evaluation));
        self.core.extend(core.map(evaluation));
        loss.is_some() || value.is_some() || accuracy.is_some() || core.is_some()
    }

    /// Sets the token counts of a log without any: each step has `tokens` tokens.
    pub fn assume_tokens_per_step(&mut self, tokens: u64) {
        for step in &mut self.steps {
            step.tokens.get_or_insert((step.step.saturating_add(1)).saturating_mul(tokens));
        }
        let of_sources = self.sources.iter_mut().flat_map(|source| &mut source.losses);
        for evaluation in self.validations.iter_mut().chain(&mut self.hellaswag).chain(&mut self.core).chain(of_sources)
        {
            evaluation.tokens.get_or_insert(evaluation.step.saturating_mul(tokens));
        }
    }
}

/// Reads the logs of several runs. `NAME=PATH` sets the name of a run, unless there is a file of that name.
///
/// Runs of equal names get their paths as names.
pub fn read_all(paths: &[PathBuf]) -> Result<Vec<RunLog>> {
    let read = |path: &PathBuf| match path.to_str().and_then(|text| text.split_once('=')) {
        Some((name, rest)) if !path.exists() && !name.is_empty() => {
            Ok(RunLog { name: name.to_owned(), ..RunLog::read(Path::new(rest))? })
        }
        _ => RunLog::read(path),
    };
    let mut runs = paths.iter().map(read).collect::<Result<Vec<_>>>()?;
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for run in &mut runs {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = run.path.display().to_string();
        }
    }
    Ok(runs)
}

/// Returns the log file that a path names.
fn find(path: &Path) -> Result<PathBuf> {
    let shown = path.display();
    ensure!(path.exists(), "{shown}: expected the directory of a run or a log file, found nothing; check the path");
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let candidates = ["main.jsonl", "main.log"].map(|name| path.join(name));
    let has_content = |file: &&PathBuf| file.metadata().is_ok_and(|metadata| metadata.len() > 0);
    let found = candidates.iter().find(has_content).or_else(|| candidates.iter().find(|file| file.exists()));
    found.cloned().with_context(|| {
        format!("{shown}: expected main.jsonl or main.log in it, found neither; name the directory of a run")
    })
}

/// Returns a path with a file name, also for `.` and `..`.
fn absolute(path: &Path) -> PathBuf {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Replaces infinity by NaN. JSON has neither, and no plot can show them.
fn finite(x: f32) -> f32 {
    if x.is_finite() { x } else { f32::NAN }
}

/// Reads the next line into `line` without its end. Returns whether the line was ended by a newline, or `None` at the end.
///
/// A line of more than [`MAX_LINE`] bytes is skipped: `line` receives text that has no valid format.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    let read = reader.by_ref().take(MAX_LINE as u64).read_until(b'\n', line)?;
    if read == 0 {
        return Ok(None);
    }
    if line.ends_with(b"\n") || read < MAX_LINE {
        return Ok(Some(line.ends_with(b"\n")));
    }
    line.clear();
    line.extend(b"too long");
    loop {
        let available = reader.fill_buf()?;
        if available.is_empty() {
            return Ok(Some(true));
        }
        let newline = available.iter().position(|&byte| byte == b'\n');
        let used = newline.map_or(available.len(), |at| at + 1);
        reader.consume(used);
        if newline.is_some() {
            return Ok(Some(true));
        }
    }
}

/// Sorts records by step, and keeps the last record of each step.
fn keep_last<T>(records: &mut Vec<T>, step: impl Fn(&T) -> u64) {
    // The sort is stable: after the reversal, the last record of a step is the first, which `dedup` keeps.
    records.reverse();
    records.sort_by_key(&step);
    records.dedup_by_key(|record| step(record));
    records.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> RunLog {
        RunLog::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn both_formats_have_the_same_values() {
        let json = parse(
            r#"{"step":0,"val_loss":5.5,"tokens":0,"time":1700000000.25}
{"step":0,"loss":5.4,"lr":0.001,"norm":1.5,"ms":250.0,"tokens_per_second":256.0,"mfu":0.5,"tokens":64,"time":1700000001.5}
{"step":1,"hellaswag":0.25,"correct":1,"examples":4}
"#,
        );
        let plain = parse("# a comment\ns:0 tel:5.5\ns:0 trl:5.4 lr:0.001 norm:1.5\ns:1 eval:0.25\n");
        for log in [&json, &plain] {
            let step = log.steps[0];
            assert_eq!((log.steps.len(), step.step, step.loss, step.lr, step.norm), (1, 0, 5.4, 0.001, 1.5));
            assert_eq!((log.validations[0].step, log.validations[0].value), (0, 5.5));
            assert_eq!((log.hellaswag[0].step, log.hellaswag[0].value), (1, 0.25));
            assert_eq!(log.damaged_lines, 0);
        }
        let step = json.steps[0];
        assert_eq!((step.ms, step.tokens_per_second, step.mfu, step.tokens), (250.0, 256.0, 0.5, Some(64)));
        assert!(step.expert_load.iter().all(|load| load.is_nan()) && step.unused_experts.is_nan());
        let experts = parse(r#"{"step":0,"loss":5.4,"lr":0.1,"experts":{"max_load":[1.5,2.5],"unused":[0,3]}}"#);
        assert_eq!((experts.steps[0].expert_load, experts.steps[0].unused_experts), ([2.0, 2.5], 3.0));
        assert_eq!((step.time, json.validations[0].time), (1700000001.5, 1700000000.25));
        assert!(plain.steps[0].tokens.is_none() && plain.steps[0].ms.is_nan());
    }

    #[test]
    fn losses_of_sources_are_read() {
        let log = parse(
            r#"{"step":0,"val_loss":5.5,"sources":[{"name":"a","val_loss":5.0,"bits_per_byte":1.5},{"name":"b","val_loss":6.0}]}
{"step":9,"val_loss":4.5,"sources":[{"name":"b","val_loss":null},{"name":"a","val_loss":4.0,"bits_per_byte":1.25}]}
{"step":9,"val_loss":4.5,"sources":[{"name":"a","val_loss":4.25}]}
"#,
        );
        let values = |source: &SourceLog| source.losses.iter().map(|loss| loss.value).collect::<Vec<_>>();
        assert_eq!((log.sources.len(), log.validations.len(), log.damaged_lines), (2, 2, 0));
        assert_eq!((values(&log.sources[0]), log.sources[0].bits_per_byte), (vec![5.0, 4.25], Some(1.25)));
        assert!(values(&log.sources[1])[1].is_nan() && log.sources[1].bits_per_byte.is_none());
        let cell = log.sources[0].cell();
        assert_eq!((cell.0.as_str(), cell.1.as_str()), ("validation loss, a", "4.2500, 1.2500 bits per byte"));
    }

    #[test]
    fn the_last_record_of_a_repeated_step_counts() {
        let log = parse("s:0 trl:5\ns:1 trl:4\ns:2 trl:3\ns:1 trl:4.5\ns:0 tel:1\ns:0 tel:2\n");
        let losses: Vec<_> = log.steps.iter().map(|step| (step.step, step.loss)).collect();
        assert_eq!(losses, [(0, 5.0), (1, 4.5), (2, 3.0)]);
        assert_eq!(log.validations.iter().map(|v| v.value).collect::<Vec<_>>(), [2.0]);
    }

    #[test]
    fn values_that_are_not_finite_are_nan_and_missing_fields_are_accepted() {
        let log = parse(
            "{\"step\":3,\"loss\":null,\"lr\":0.1,\"norm\":null}\n{\"step\":4,\"val_loss\":null}\ns:5 trl:-nan\n",
        );
        assert!(log.steps[0].loss.is_nan() && log.steps[0].norm.is_nan() && log.steps[0].ms.is_nan());
        assert!(log.validations[0].value.is_nan());
        assert_eq!((log.damaged_lines, log.steps.len()), (0, 2));
        assert!(parse("s:1 trl:inf norm:1e400\n").steps[0].norm.is_nan());
    }

    #[test]
    fn damaged_lines_are_counted_and_an_incomplete_last_line_is_not() {
        let long = format!("{{\"step\":1,\"loss\":1,\"x\":\"{}\"}}\n", "x".repeat(MAX_LINE));
        let text =
            format!("s:1 trl:2.0\n\0\0\0\ns:2 trl:2.0s:3 trl:1\n{long}{{\"step\":-1,\"loss\":1}}\ns:4 trl:3\ns:5 tr");
        let log = parse(&text);
        assert_eq!(log.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [1, 4]);
        assert_eq!(log.damaged_lines, 4);
    }

    #[test]
    fn directories_and_files_are_found_and_errors_say_what_is_expected() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("my run");
        let error = |path: &Path| format!("{:#}", RunLog::read(path).unwrap_err());
        assert!(error(&run).contains("expected the directory of a run or a log file, found nothing"));
        fs::create_dir(&run).unwrap();
        assert!(error(&run).contains("expected main.jsonl or main.log in it, found neither"));
        fs::write(run.join("main.jsonl"), "").unwrap();
        assert!(error(&run).contains("found an empty log"));
        fs::write(run.join("main.log"), "s:0 trl:5\n").unwrap();
        assert_eq!(RunLog::read(&run).unwrap().path, run.join("main.log"));
        fs::write(run.join("main.jsonl"), "{\"step\":0,\"loss\":4.0,\"lr\":1}\n").unwrap();
        for path in [run.clone(), run.join("main.jsonl"), run.join("../my run/.")] {
            let log = RunLog::read(&path).unwrap();
            assert_eq!((log.name.as_str(), log.steps[0].loss), ("my run", 4.0));
        }
        fs::write(run.join("main.jsonl"), "hello\n").unwrap();
        assert!(error(&run).contains("found 1 lines of another format"));
        assert!(error(Path::new("/dev/zero")).contains("expected a file"));
        let sparse = File::create(run.join("main.jsonl")).unwrap();
        sparse.set_len(MAX_FILE + 1).unwrap();
        assert!(error(&run).contains("expected a log of at most 512 MiB, found 512 MiB"));
        sparse.set_len(100 << 20).unwrap();
        assert!(error(&run).contains("found 1 lines"), "{}", error(&run));
    }

    #[test]
    fn several_runs_have_different_names() {
        let dir = tempfile::tempdir().unwrap();
        let create = |name: &str| {
            fs::create_dir_all(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("main.log"), "s:0 trl:5\n").unwrap();
            dir.path().join(name)
        };
        let (a, b, c) = (create("x/run"), create("y/run"), create("lr=0.1"));
        let renamed = PathBuf::from(format!("best={}", a.display()));
        let names = |paths: &[PathBuf]| read_all(paths).unwrap().into_iter().map(|run| run.name).collect::<Vec<_>>();
        assert_eq!(names(&[renamed, b.clone(), c]), ["best", "run", "lr=0.1"]);
        let paths = [&a, &b].map(|path| path.join("main.log").display().to_string());
        assert_eq!(names(&[a, b]), paths);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            RunLog::parse(bytes.as_slice()).unwrap();
        }

        #[test]
        fn any_damage_leaves_increasing_steps(at in 0_usize..200, byte: u8) {
            let mut text = b"{\"step\":7,\"loss\":5.4,\"lr\":0.001}\ns:7 trl:5.4 lr:0.1\ns:8 tel:5.5\n{\"step\":9,\"val_loss\":1}\n".to_vec();
            let at = at % text.len();
            text[at] = byte;
            let log = RunLog::parse(text.as_slice()).unwrap();
            prop_assert!(log.steps.windows(2).all(|pair| pair[0].step < pair[1].step));
        }
    }
}
