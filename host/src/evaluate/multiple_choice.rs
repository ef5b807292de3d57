//! Multiple-choice evaluation by the mean loss of each completion, as for HellaSwag.

use super::questions;
use anyhow::Result;
use data::multiple_choice::{Example, MultipleChoice};
use data::scored::{Rule, ScoredQuestion, ScoredRow};
use engine::{BatchLayout, Engine};
use model::{Decoder, LayerHooks};
use std::fmt;
use std::ops::Range;

/// The number of examples that a model answers correctly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Correctly answered examples.
    pub correct: usize,
    /// Evaluated examples.
    pub examples: usize,
}

impl Score {
    /// Returns the fraction of correctly answered examples.
    pub fn accuracy(self) -> f64 {
        self.correct as f64 / self.examples as f64
    }
}

/// Formats the score like llm.c: `2955/10042 = 0.294264`.
impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} = {:.6}", self.correct, self.examples, self.accuracy())
    }
}

/// Counts the examples of `range` whose correct completion has the lowest mean loss per token. The first one wins a tie.
///
/// With fewer than `at_least` batches, further forward passes follow: all ranks must run equally many collectives, and call `hooks`
/// equally often.
pub fn score(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    planned: BatchLayout,
    set: &MultipleChoice,
    range: Range<usize>,
    at_least: usize,
) -> Result<Score> {
    set.check(model.descriptor.vocab, planned.t)?;
    let questions = questions_of(set, range);
    let answers = questions::answer(model, engine, hooks, planned, &questions, "multiple choice")?;
    let idle = at_least.saturating_sub(questions::batches(&questions, planned));
    questions::idle(model, engine, hooks, planned, idle)?;
    Ok(Score { correct: answers.iter().filter(|answer| answer.correct).count(), examples: answers.len() })
}

/// Returns the number of batches that [`score`] needs for `range`.
pub fn batches(set: &MultipleChoice, range: Range<usize>, planned: BatchLayout) -> usize {
    questions::batches(&questions_of(set, range), planned)
}

/// Returns a row for each completion of the examples: the context with the completion.
fn questions_of(set: &MultipleChoice, range: Range<usize>) -> Vec<ScoredQuestion> {
    let question = |Example { context, completions, label }: &Example| {
        let row = |completion: &Vec<u32>| {
            let tokens = [&context[..], completion].concat();
            ScoredRow { scored: context.len()..tokens.len(), tokens }
        };
        ScoredQuestion { rows: completions.iter().map(row).collect(), rule: Rule::LowestMeanLoss { gold: *label } }
    };
    set.examples()[range].iter().map(question).collect()
}
