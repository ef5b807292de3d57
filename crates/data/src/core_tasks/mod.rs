//! The tasks of the CORE metric (DCLM; Li et al., 2024, arXiv:2406.11794), as nanochat evaluates them: the files of the evaluation
//! bundle, the questions of each task, and their prompts with examples. Scoring a model on them does not belong here.
//!
//! A bundle is a directory:
//!
//! - `core.yaml` lists the tasks: label, type, file, number of examples in a prompt, and the text between question and answer;
//! - `eval_meta_data.csv` has the accuracy of guessing, in percent, for each label;
//! - `eval_data/` has a file for each task, with one question per line as JSON.

mod prompts;
mod questions;
mod source;

pub use questions::{Question, Questions};
pub use source::{open_source, remote};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

/// The list of tasks.
const TASKS: &str = "core.yaml";
/// The table with the accuracy of guessing.
const BASELINES: &str = "eval_meta_data.csv";
/// The directory of the questions.
const DATA: &str = "eval_data";

/// The columns of the table that are read.
const BASELINE_COLUMNS: [&str; 2] = ["Eval Task", "Random baseline"];

/// How a task is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One question with several answers: the answer with the lowest mean loss is chosen.
    MultipleChoice,
    /// Several contexts with the same continuation: the context that gives the continuation the lowest mean loss is chosen.
    Schema,
    /// Each token of the continuation must be the most likely one.
    LanguageModeling,
}

/// A task of a bundle.
#[derive(Clone, Debug)]
pub struct Task {
    /// Name, unique in the bundle.
    pub label: String,
    /// How it is scored.
    pub kind: Kind,
    /// Number of solved examples before each question.
    pub shots: usize,
    /// Accuracy of guessing, from 0 to below 1.
    pub baseline: f64,
    /// Text between question and answer.
    delimiter: String,
    /// The file with the questions.
    pub file: PathBuf,
}

impl Task {
    /// Returns the accuracy on the scale on which guessing is 0 and the best accuracy is 1.
    pub fn centered(&self, accuracy: f64) -> f64 {
        (accuracy - self.baseline) / (1.0 - self.baseline)
    }
}

/// The tasks of a bundle.
#[derive(Clone, Debug)]
pub struct Bundle {
    /// The directory.
    pub directory: PathBuf,
    /// The tasks in the order of the list.
    pub tasks: Vec<Task>,
}

/// `core.yaml`. Other fields are ignored.
#[derive(Deserialize)]
struct List {
    icl_tasks: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    label: String,
    dataset_uri: PathBuf,
    /// Numbers of examples. Only the first one is used.
    num_fewshot: Vec<usize>,
    icl_task_type: Kind,
    #[serde(default = "space")]
    continuation_delimiter: String,
}

fn space() -> String {
    " ".to_owned()
}

impl Bundle {
    /// Reads the list of tasks in a directory and checks that their files exist. `only` names the tasks to keep, in any order; all of
    /// them without it.
    pub fn open(directory: &Path, only: Option<&[String]>) -> Result<Self> {
        ensure!(
            directory.is_dir(),
            "{}: expected the directory of an evaluation bundle, found none; llm-rs data core downloads it",
            directory.display()
        );
        let path = directory.join(TASKS);
        let text = bounded_file::read_to_string(&path, bounded_file::SETTINGS);
        let text = text.with_context(|| {
            format!("cannot read {}: expected an evaluation bundle; llm-rs data core downloads one", path.display())
        })?;
        let tasks = tasks(directory, &text).with_context(|| path.display().to_string())?;
        let bundle = Self { directory: directory.to_owned(), tasks: select(tasks, only, &path)? };
        for task in &bundle.tasks {
            ensure!(
                task.file.is_file(),
                "{}: expected the questions of task {}, found no such file; the bundle is incomplete, llm-rs data core downloads it",
                task.file.display(),
                task.label
            );
        }
        Ok(bundle)
    }

    /// Returns the files that the bundle needs, relative to its directory.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let relative = |task: &Task| Ok(task.file.strip_prefix(&self.directory)?.to_owned());
        let mut files = self.tasks.iter().map(relative).collect::<Result<Vec<_>>>()?;
        files.extend([TASKS, BASELINES].map(PathBuf::from));
        files.sort();
        files.dedup();
        Ok(files)
    }
}

/// Reads the tasks of the list `text`, and their baselines.
fn tasks(directory: &Path, text: &str) -> Result<Vec<Task>> {
    let List { icl_tasks } = serde_yaml_ng::from_str(text)?;
    ensure!(!icl_tasks.is_empty(), "icl_tasks: expected at least one task, found none");
    let baselines = baselines(&directory.join(BASELINES))?;
    let mut tasks: Vec<Task> = Vec::new();
    for Entry { label, dataset_uri, num_fewshot, icl_task_type, continuation_delimiter } in icl_tasks {
        ensure!(
            tasks.iter().all(|task| task.label != label),
            "task {label}: expected different labels, found it twice"
        );
        let is_inside = dataset_uri.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        ensure!(
            is_inside && dataset_uri.file_name().is_some(),
            "task {label}: dataset_uri: expected a file in {DATA}/, found {}",
            dataset_uri.display()
        );
        let Some(&shots) = num_fewshot.first() else {
            bail!("task {label}: num_fewshot: expected a list of one number, found an empty list")
        };
        let baseline = baselines.of(&label)?;
        let (kind, delimiter, file) = (icl_task_type, continuation_delimiter, directory.join(DATA).join(dataset_uri));
        tasks.push(Task { label, kind, shots, baseline, delimiter, file });
    }
    Ok(tasks)
}

/// Keeps the tasks that `only` names.
fn select(tasks: Vec<Task>, only: Option<&[String]>, path: &Path) -> Result<Vec<Task>> {
    let Some(only) = only else { return Ok(tasks) };
    if let Some(unknown) = only.iter().find(|label| tasks.iter().all(|task| task.label != **label)) {
        let labels: Vec<&str> = tasks.iter().map(|task| task.label.as_str()).collect();
        bail!("--tasks: expected tasks of {}, found '{unknown}'; its tasks are {}", path.display(), labels.join(", "));
    }
    Ok(tasks.into_iter().filter(|task| only.contains(&task.label)).collect())
}

/// The accuracies of guessing.
struct Baselines {
    file: String,
    /// Percent as text, and its line, for each label.
    values: HashMap<String, (String, u64)>,
}

/// Reads the table of baselines.
fn baselines(path: &Path) -> Result<Baselines> {
    let file = path.display().to_string();
    let bytes = bounded_file::read(path, bounded_file::DESCRIPTION);
    let bytes =
        bytes.with_context(|| format!("cannot read {file}, which has the accuracy of guessing for each task"))?;
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(&bytes[..]);
    let header = reader.headers().with_context(|| format!("cannot read {file}"))?.clone();
    let column = |name: &str| {
        let found = header.iter().position(|column| column == name);
        found.with_context(|| format!("{file}, line 1: expected the column '{name}', found none"))
    };
    let [label, baseline] = [column(BASELINE_COLUMNS[0])?, column(BASELINE_COLUMNS[1])?];
    let mut values = HashMap::new();
    for row in reader.records() {
        let row = row.with_context(|| format!("cannot read {file}"))?;
        let line = row.position().map_or(0, csv::Position::line);
        let [label, value] = [label, baseline].map(|column| row.get(column).unwrap_or_default().trim().to_owned());
        values.insert(label, (value, line));
    }
    Ok(Baselines { file, values })
}

impl Baselines {
    /// Returns the accuracy of guessing for a task.
    fn of(&self, label: &str) -> Result<f64> {
        let Self { file, values } = self;
        let (value, line) =
            values.get(label).with_context(|| format!("{file}: expected a row for task {label}, found none"))?;
        let percent = value.parse::<f64>().ok().filter(|percent| (0.0..100.0).contains(percent));
        let percent = percent.with_context(|| {
            format!(
                "{file}, line {line}: column '{}': expected a percentage from 0 to below 100, found '{value}'",
                BASELINE_COLUMNS[1]
            )
        })?;
        Ok(0.01 * percent)
    }
}
