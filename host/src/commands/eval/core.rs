//! `eval core`: the CORE metric of base models.

use super::STANDARD_OUTPUT;
use crate::commands::generation::tokenizer_of;
use crate::commands::json;
use crate::commands::resources::Hardware;
use crate::evaluate::core::{self, CoreSet, Limits, TaskScore};
use crate::evaluate::questions::Answer;
use crate::output::{self, Kind, Mark};
use crate::terminal;
use crate::values::count;
use anyhow::{Result, ensure};
use data::core_tasks::Bundle;
use engine::{BatchLayout, Engine};
use interchange::ModelSource;
use model::{PlanOptions, Unsharded, fit};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Compute CORE of base models: the mean centered accuracy on 22 tasks, each with examples in its prompts
#[derive(Debug, clap::Args)]
pub struct Core {
    /// Runs, model files or Hugging Face directories
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<PathBuf>,

    /// Directory of the tasks, as `llm-rs data core` writes it
    #[arg(long, value_name = "DIR", default_value = "data/core")]
    bundle: PathBuf,

    /// Only these tasks, separated by commas [default: all]
    #[arg(long, value_name = "TASK,...", value_delimiter = ',')]
    tasks: Option<Vec<String>>,

    /// Use at most N questions of each task, as nanochat selects them [default: all]
    #[arg(long, value_name = "N", value_parser = count)]
    max_per_task: Option<usize>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Sequences of the longest question in a batch. A batch of shorter questions has more sequences
    #[arg(short, long, value_name = "B", default_value = "16", value_parser = count)]
    batch: usize,

    /// Maximum number of tokens in a question with its examples. Longer ones are truncated at the beginning [default: the model's maximum]
    #[arg(short = 't', long, value_name = "T", value_parser = count)]
    seq: Option<usize>,

    /// Also write the answer to each question to this file, as JSON lines. Only with one model
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Also write the results to this file as JSON. Without FILE, print JSON instead of text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STANDARD_OUTPUT)]
    json: Option<PathBuf>,

    #[command(flatten)]
    hardware: Hardware,
}

/// The files that the command writes.
const RESULTS: Kind =
    Kind { name: "results of eval core", mark: Mark::Keys(&["bundle", "version", "machine", "models"]) };
const ANSWERS: Kind = Kind { name: "answers of eval core", mark: Mark::Start(&[b"{\"task\":"]) };

/// Rows of logits at a time. Only scored tokens have logits, and most tokens are not.
const LOGIT_ROWS: usize = 2048;

/// The results, as they are written to JSON.
#[derive(Debug, Serialize)]
struct Results {
    bundle: String,
    version: &'static str,
    machine: String,
    precision: &'static str,
    max_per_task: Option<usize>,
    models: Vec<ModelResults>,
}

/// The results of a model.
#[derive(Debug, Serialize)]
struct ModelResults {
    model: String,
    /// Mean centered accuracy of the tasks.
    core: f64,
    tasks: Vec<TaskScore>,
    /// Duration, without loading the model.
    seconds: f64,
}

/// The answer to a question, as it is written to a line of JSON.
#[derive(Serialize)]
struct AnswerLine<'a> {
    task: &'a str,
    line: usize,
    choice: Option<usize>,
    correct: bool,
    scores: &'a [f64],
}

/// Prints a table of accuracies.
pub fn run(args: &Core) -> Result<()> {
    let json = args.json.as_deref().filter(|path| *path != Path::new(STANDARD_OUTPUT));
    json.map_or(Ok(()), |path| output::check(path, RESULTS))?;
    args.out.as_deref().map_or(Ok(()), |path| output::check(path, ANSWERS))?;
    output::check_distinct(json, args.out.as_deref())?;
    let models = args.models.len();
    ensure!(args.out.is_none() || models == 1, "--out: expected one model, found {models}; evaluate one at a time");
    let bundle = Bundle::open(&args.bundle, args.tasks.as_deref())?;
    let sources = args.models.iter().map(|path| ModelSource::open(path)).collect::<Result<Vec<_>>>()?;
    let mut engine = args.hardware.open_for_inference()?;
    let mut results = Results {
        bundle: args.bundle.display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        machine: engine.describe(),
        precision: args.hardware.weight_format(&*engine),
        max_per_task: args.max_per_task,
        models: Vec::new(),
    };
    let table = Table { models, silent: args.json.as_deref() == Some(Path::new(STANDARD_OUTPUT)) };
    table.heading(&args.models)?;
    for source in sources {
        results.models.push(args.evaluate(source, &bundle, &mut *engine, &table)?);
    }
    table.finish(&results.models)?;
    match args.json.as_deref() {
        Some(path) if path == Path::new(STANDARD_OUTPUT) => json::print(&results),
        Some(path) => json::write(path, &results),
        None => Ok(()),
    }
}

impl Core {
    fn evaluate(
        &self,
        source: ModelSource,
        bundle: &Bundle,
        engine: &mut dyn Engine,
        table: &Table,
    ) -> Result<ModelResults> {
        let name = source.path().display().to_string();
        let descriptor = source.descriptor();
        let tokenizer = tokenizer_of(&source, self.tokenizer.as_deref())?;
        let longest = self.seq.unwrap_or(descriptor.max_seq_len);
        fit::check_batch(&descriptor, 1, longest)?;
        let start = Instant::now();
        let limits = Limits { longest, per_task: self.max_per_task };
        let set = CoreSet::encode(bundle, &tokenizer, limits, [0, 1])?;
        let planned = BatchLayout::new(self.batch, set.longest());
        let tokenizing = start.elapsed();
        let options = PlanOptions { logit_rows: LOGIT_ROWS, ..PlanOptions::inference(planned.b, planned.t) };
        let options = options.with_weights(self.hardware.weights(), &descriptor, engine)?;
        let (model, plan) = fit::plan(descriptor, options, engine)?;
        engine.allocate(&plan)?;
        source.load(&model, engine)?;
        let start = Instant::now();
        let mut evaluate = |mut answers: Option<&mut dyn Write>| {
            set.evaluate(&model, engine, &mut Unsharded, planned, &mut |score, lines, given| {
                if let Some(file) = &mut answers {
                    write_answers(file, &score.task, lines, given)?;
                }
                table.task(score)
            })
        };
        let tasks = match &self.out {
            Some(path) => atomic_file::write(path, |file| evaluate(Some(file)))?,
            None => evaluate(None)?,
        };
        let seconds = (tokenizing + start.elapsed()).as_secs_f64();
        Ok(ModelResults { model: name, core: core::metric(&tasks), tasks, seconds })
    }
}

fn write_answers(file: &mut dyn Write, task: &str, lines: &[usize], answers: &[Answer]) -> Result<()> {
    for (&line, Answer { choice, correct, scores }) in lines.iter().zip(answers) {
        serde_json::to_writer(&mut *file, &AnswerLine { task, line, choice: *choice, correct: *correct, scores })?;
        writeln!(file)?;
    }
    Ok(())
}

/// The printed table: a row for each task. With one model, a row is printed when its task is complete; with several, each has a column.
struct Table {
    models: usize,
    silent: bool,
}

/// Width of the column of tasks. The longest label of the public bundle has 32 characters.
const TASK_WIDTH: usize = 33;

impl Table {
    fn line(&self, text: &str) -> Result<()> {
        if self.silent { Ok(()) } else { terminal::line(text.trim_end()) }
    }

    fn heading(&self, models: &[PathBuf]) -> Result<()> {
        if self.models == 1 {
            return self.line(&format!(
                "{:TASK_WIDTH$}{:>6}{:>11}{:>11}{:>11}{:>9}",
                "task", "shots", "questions", "accuracy", "centered", "seconds"
            ));
        }
        let number = |(i, path): (usize, &PathBuf)| self.line(&format!("model {}: {}", i + 1, path.display()));
        models.iter().enumerate().try_for_each(number)
    }

    fn task(&self, score: &TaskScore) -> Result<()> {
        let TaskScore { task, shots, questions, accuracy, centered, seconds, .. } = score;
        if self.models > 1 {
            return Ok(());
        }
        self.line(&format!("{task:TASK_WIDTH$}{shots:>6}{questions:>11}{accuracy:>11.4}{centered:>11.4}{seconds:>9.1}"))
    }

    fn finish(&self, models: &[ModelResults]) -> Result<()> {
        let cells = |cell: &dyn Fn(usize, &ModelResults) -> String| {
            let cells = models.iter().enumerate().map(|(i, model)| format!("{:>11}", cell(i, model)));
            cells.collect::<Vec<_>>().concat()
        };
        let [first, ..] = models else { return Ok(()) };
        if let [only] = models {
            let ModelResults { core, seconds, .. } = only;
            return self
                .line(&format!("{:TASK_WIDTH$}{:>6}{:>11}{:>11}{core:>11.4}{seconds:>9.1}", "CORE", "", "", ""));
        }
        let numbers = cells(&|i, _| format!("model {}", i + 1));
        self.line(&format!("\n{:TASK_WIDTH$}{:>6}{:>11}{numbers}", "accuracy", "shots", "questions"))?;
        for (i, TaskScore { task, shots, questions, .. }) in first.tasks.iter().enumerate() {
            let accuracies = cells(&|_, model| format!("{:.4}", model.tasks[i].accuracy));
            self.line(&format!("{task:TASK_WIDTH$}{shots:>6}{questions:>11}{accuracies}"))?;
        }
        let core = cells(&|_, model| format!("{:.4}", model.core));
        self.line(&format!("{:TASK_WIDTH$}{:>6}{:>11}{core}", "CORE", "", ""))
    }
}
