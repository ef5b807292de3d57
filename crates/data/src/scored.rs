//! Rows of tokens that pose a question. A model is scored on a part of each row, and a rule turns the scores into an answer.

use anyhow::{Result, ensure};
use std::ops::Range;

/// A sequence of tokens, and the range of them that is scored. Each scored token is predicted from all tokens before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredRow {
    /// At least one token.
    pub tokens: Vec<u32>,
    /// Positions of the scored tokens, from 1 on, up to the end of the row. They may be none.
    pub scored: Range<usize>,
}

/// A question: a row for each answer, and what makes an answer correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredQuestion {
    /// At least one row.
    pub rows: Vec<ScoredRow>,
    /// The rule by which the answer is correct.
    pub rule: Rule,
}

/// The rule by which the answer to a question is correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The row `gold` has the lowest mean loss of its scored tokens. The first row wins a tie.
    LowestMeanLoss {
        /// Index of the correct row.
        gold: usize,
    },
    /// Each scored token of the only row is the most likely one.
    AllMostLikely,
}

impl ScoredRow {
    /// Removes tokens at the beginning, so that at most `longest` remain.
    pub fn crop(&mut self, longest: usize) -> Result<()> {
        let excess = self.tokens.len().saturating_sub(longest);
        let Range { start, end } = self.scored;
        ensure!(
            excess == 0 || excess < start,
            "expected an answer of fewer than {longest} tokens, the longest sequence, found {}; use a longer --seq or another model",
            end - start
        );
        self.tokens.drain(..excess);
        self.scored = start - excess..end - excess;
        Ok(())
    }
}
