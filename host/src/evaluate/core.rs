//! The CORE metric: the mean centered accuracy over the tasks of an evaluation bundle.

use super::questions::{self, Answer};
use anyhow::Result;
use data::core_tasks::{Bundle, Kind, Task};
use data::scored::ScoredQuestion;
use engine::{BatchLayout, Engine};
use model::{Decoder, LayerHooks};
use rayon::prelude::*;
use serde::Serialize;
use std::time::Instant;
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// The part of a bundle's questions that one of several ranks answers, as tokens for a model.
#[derive(Debug)]
pub struct CoreSet {
    tasks: Vec<EncodedTask>,
    /// Number of questions of all ranks.
    questions: usize,
}

/// A task with its questions.
#[derive(Debug)]
struct EncodedTask {
    task: Task,
    /// Line of each question in its file.
    lines: Vec<usize>,
    questions: Vec<ScoredQuestion>,
}

/// The limits of the rows of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of tokens in a row. Longer rows lose tokens at their beginning.
    pub longest: usize,
    /// Maximum number of questions in a task.
    pub per_task: Option<usize>,
}

/// The score on a task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskScore {
    /// Name.
    pub task: String,
    /// How it is scored.
    pub kind: Kind,
    /// Number of solved examples before each question.
    pub shots: usize,
    /// Correctly answered questions.
    pub correct: usize,
    /// Evaluated questions.
    pub questions: usize,
    /// Fraction of questions that are answered correctly.
    pub accuracy: f64,
    /// Accuracy on the scale on which guessing is 0 and the best accuracy is 1.
    pub centered: f64,
    /// Duration of the evaluation.
    pub seconds: f64,
}

/// A function that receives the score on a task, and the answers with the line of each question.
pub type EachTask<'a> = dyn FnMut(&TaskScore, &[usize], &[Answer]) -> Result<()> + 'a;

/// Returns CORE, the mean centered accuracy.
pub fn metric(scores: &[TaskScore]) -> f64 {
    scores.iter().map(|score| score.centered).sum::<f64>() / scores.len() as f64
}

impl CoreSet {
    /// Encodes every `ranks`-th question, from question `rank` on.
    pub fn encode(bundle: &Bundle, tokenizer: &Tokenizer, limits: Limits, [rank, ranks]: [usize; 2]) -> Result<Self> {
        let progress = progress::start("tokenizing", Unit::Count, bundle.tasks.len() as u64);
        let mut total = 0;
        let mut encode = |task: &Task| {
            let questions = task.questions(limits.per_task)?;
            total += questions.len();
            let share: Vec<usize> = (rank..questions.len()).step_by(ranks).collect();
            let lines = share.iter().map(|&index| questions.line(index)).collect();
            // Results keep the order, so the error of the first invalid question is reported.
            let encoded: Vec<Result<_>> =
                share.par_iter().map(|&index| questions.encode(index, tokenizer, limits.longest)).collect();
            let encoded = encoded.into_iter().collect::<Result<_>>()?;
            progress.add(1);
            Ok(EncodedTask { task: task.clone(), lines, questions: encoded })
        };
        let tasks = bundle.tasks.iter().map(&mut encode).collect::<Result<_>>()?;
        Ok(Self { tasks, questions: total })
    }

    /// Returns the number of tasks.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the number of questions of all ranks.
    pub fn questions(&self) -> usize {
        self.questions
    }

    /// Returns the number of tokens of the longest row.
    pub fn longest(&self) -> usize {
        let rows = self.tasks.iter().flat_map(|task| &task.questions).flat_map(|question| &question.rows);
        rows.map(|row| row.tokens.len()).max().unwrap_or(0)
    }

    /// Returns the number of batches that [`evaluate`](Self::evaluate) needs.
    pub fn batches(&self, planned: BatchLayout) -> usize {
        self.tasks.iter().map(|task| questions::batches(&task.questions, planned)).sum()
    }

    /// Returns the score on each task. `hooks` provides the parameters, and may end the evaluation between two batches.
    pub fn evaluate(
        &self,
        model: &Decoder,
        engine: &mut dyn Engine,
        hooks: &mut dyn LayerHooks,
        planned: BatchLayout,
        each: &mut EachTask,
    ) -> Result<Vec<TaskScore>> {
        let mut scores = Vec::new();
        for EncodedTask { task, lines, questions } in &self.tasks {
            let start = Instant::now();
            let answers = questions::answer(model, engine, hooks, planned, questions, &task.label)?;
            let correct = answers.iter().filter(|answer| answer.correct).count();
            let score =
                TaskScore { seconds: start.elapsed().as_secs_f64(), ..TaskScore::new(task, correct, answers.len()) };
            each(&score, lines, &answers)?;
            scores.push(score);
        }
        Ok(scores)
    }

    /// Returns the scores for the sums of the counts of all ranks: correct answers and questions of each task.
    pub fn scores(&self, counts: &[[f64; 2]]) -> Vec<TaskScore> {
        let score = |(task, &[correct, questions]): (&EncodedTask, &[f64; 2])| {
            TaskScore::new(&task.task, correct as usize, questions as usize)
        };
        self.tasks.iter().zip(counts).map(score).collect()
    }
}

impl TaskScore {
    fn new(task: &Task, correct: usize, questions: usize) -> Self {
        let accuracy = correct as f64 / questions as f64;
        let Task { label, kind, shots, .. } = task;
        Self {
            task: label.clone(),
            kind: *kind,
            shots: *shots,
            correct,
            questions,
            accuracy,
            centered: task.centered(accuracy),
            seconds: 0.0,
        }
    }
}
