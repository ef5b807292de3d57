//! The questions of a task.

use super::{Kind, Task};
use crate::python_random;
use anyhow::{Context, Result, ensure};
use rayon::prelude::*;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Seed of the order of the questions.
const ORDER_SEED: u32 = 1337;

/// A question with its correct answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// See [`Kind::MultipleChoice`].
    MultipleChoice {
        /// The question.
        query: String,
        /// The answers.
        choices: Vec<String>,
        /// Index of the correct one.
        gold: usize,
    },
    /// See [`Kind::Schema`].
    Schema {
        /// The contexts.
        contexts: Vec<String>,
        /// The continuation of each of them.
        continuation: String,
        /// Index of the correct context.
        gold: usize,
    },
    /// See [`Kind::LanguageModeling`].
    LanguageModeling {
        /// The context.
        context: String,
        /// The correct continuation.
        continuation: String,
    },
}

#[derive(Deserialize)]
struct MultipleChoice {
    query: String,
    choices: Vec<String>,
    gold: usize,
}

#[derive(Deserialize)]
struct Schema {
    context_options: Vec<String>,
    continuation: String,
    gold: usize,
}

#[derive(Deserialize)]
struct LanguageModeling {
    context: String,
    continuation: String,
}

/// The questions of a task, in the order in which they are evaluated.
#[derive(Clone, Debug)]
pub struct Questions<'a> {
    /// The task.
    pub task: &'a Task,
    /// Each question with its line in the file, from 1.
    pub(super) questions: Vec<(usize, Question)>,
}

impl Task {
    /// Reads the questions in nanochat's order, and keeps the first `most`. Examples are drawn from those that are kept.
    pub fn questions(&self, most: Option<usize>) -> Result<Questions<'_>> {
        let mut questions = read(&self.file, self.kind)?;
        python_random::shuffle(ORDER_SEED, &mut questions);
        questions.truncate(most.unwrap_or(usize::MAX));
        ensure!(
            questions.len() > self.shots,
            "{}: expected more than {} questions, because task {} puts {} others before each (and --max-per-task \
             counts), found {}",
            self.file.display(),
            self.shots,
            self.label,
            self.shots,
            questions.len()
        );
        Ok(Questions { task: self, questions })
    }
}

impl Questions<'_> {
    /// Returns the number of questions.
    pub fn len(&self) -> usize {
        self.questions.len()
    }

    /// Returns the line of question `index` in its file, from 1.
    pub fn line(&self, index: usize) -> usize {
        self.questions[index].0
    }

    /// Returns whether there are no questions.
    pub fn is_empty(&self) -> bool {
        self.questions.is_empty()
    }
}

/// Reads a file with one JSON object per line.
fn read(path: &Path, kind: Kind) -> Result<Vec<(usize, Question)>> {
    let name = path.display();
    let text = bounded_file::read_to_string(path, bounded_file::TEXT).with_context(|| format!("cannot read {name}"))?;
    let lines: Vec<(usize, &str)> = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    ensure!(!lines.is_empty(), "{name}: expected one question per line, found none");
    ensure!(u32::try_from(lines.len()).is_ok(), "{name}: expected fewer than 2^32 questions, found {}", lines.len());
    // Results keep the line order, so the error of the first invalid line is reported.
    let parsed: Vec<Result<_>> = lines
        .par_iter()
        .map(|(i, line)| Ok((i + 1, parse(line, kind).with_context(|| format!("{name}, line {}", i + 1))?)))
        .collect();
    parsed.into_iter().collect()
}

fn parse(line: &str, kind: Kind) -> Result<Question> {
    Ok(match kind {
        Kind::MultipleChoice => {
            let MultipleChoice { query, choices, gold } = fields(line)?;
            check_gold("choices", &choices, gold)?;
            Question::MultipleChoice { query, choices, gold }
        }
        Kind::Schema => {
            let Schema { context_options: contexts, continuation, gold } = fields(line)?;
            check_gold("context_options", &contexts, gold)?;
            Question::Schema { contexts, continuation, gold }
        }
        Kind::LanguageModeling => {
            let LanguageModeling { context, continuation } = fields(line)?;
            ensure!(!continuation.trim().is_empty(), "continuation: expected text, found none");
            Question::LanguageModeling { context, continuation }
        }
    })
}

fn fields<T: DeserializeOwned>(line: &str) -> Result<T> {
    serde_json::from_str(line).map_err(|error| {
        let message = error.to_string();
        // The position in the file is known better than in the text of one line.
        let message = message.rsplit_once(" at line ").map_or(&*message, |(message, _)| message);
        anyhow::anyhow!("column {}: {message}", error.column())
    })
}

fn check_gold(field: &str, options: &[String], gold: usize) -> Result<()> {
    ensure!(!options.is_empty(), "{field}: expected at least one, found none");
    ensure!(gold < options.len(), "gold: expected the index of one of {} {field}, from 0, found {gold}", options.len());
    Ok(())
}
