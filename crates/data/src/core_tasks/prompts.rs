//! The prompts of a question: solved examples, the question and an answer, as text and as tokens.

use super::{Question, Questions, Task};
use crate::python_random;
use crate::scored::{Rule, ScoredQuestion, ScoredRow};
use anyhow::{Context, Result, ensure};
use tokenizer::Tokenizer;

/// The question with index i draws its examples with the seed `EXAMPLES_SEED` + i.
const EXAMPLES_SEED: u32 = 1234;

impl Questions<'_> {
    /// Returns the prompts of question `index` for a model that reads at most `longest` tokens. Longer rows lose tokens at their beginning.
    /// Each row begins with the document token.
    pub fn encode(&self, index: usize, tokenizer: &Tokenizer, longest: usize) -> Result<ScoredQuestion> {
        let encoded = || {
            let mut encoded = self.encode_whole(index, tokenizer)?;
            encoded.rows.iter_mut().try_for_each(|row| row.crop(longest))?;
            anyhow::Ok(encoded)
        };
        encoded().with_context(|| format!("{}, line {}", self.task.file.display(), self.line(index)))
    }

    fn encode_whole(&self, index: usize, tokenizer: &Tokenizer) -> Result<ScoredQuestion> {
        let question = &self.questions[index].1;
        let examples = self.examples(index);
        let texts = self.task.texts(question, &examples);
        let ids = texts.iter().map(|text| {
            let mut ids = vec![tokenizer.document()];
            ids.extend(tokenizer.encode(text)?);
            Ok(ids)
        });
        let mut ids = ids.collect::<Result<Vec<_>>>()?;
        let (starts, rule) = match question {
            // The choices are what follows the longest common prefix.
            Question::MultipleChoice { gold, .. } => {
                (vec![common(&ids, <[u32]>::get); ids.len()], Rule::LowestMeanLoss { gold: *gold })
            }
            // The continuation is the longest common suffix.
            Question::Schema { gold, .. } => {
                let suffix = common(&ids, |ids, i| ids.len().checked_sub(i + 1).map(|i| &ids[i]));
                (ids.iter().map(|ids| ids.len() - suffix).collect(), Rule::LowestMeanLoss { gold: *gold })
            }
            // The second text has the continuation. It usually continues the tokens of the first; where a token extends over the
            // boundary, that token is scored too.
            Question::LanguageModeling { .. } => {
                let start = common(&ids, <[u32]>::get);
                ids.remove(0);
                ensure!(start < ids[0].len(), "continuation: expected at least one token of {tokenizer}, found none");
                (vec![start], Rule::AllMostLikely)
            }
        };
        let row = |(tokens, start): (Vec<u32>, usize)| {
            // A row that begins with its continuation has no token that predicts it: it scores nothing, like an empty choice.
            let scored = if start == 0 { tokens.len()..tokens.len() } else { start..tokens.len() };
            ScoredRow { tokens, scored }
        };
        Ok(ScoredQuestion { rows: ids.into_iter().zip(starts).map(row).collect(), rule })
    }

    /// Returns the examples of a question, in the order of the prompt.
    fn examples(&self, index: usize) -> Vec<&Question> {
        let others = self.questions.len() as u32 - 1;
        let drawn = python_random::sample(EXAMPLES_SEED.wrapping_add(index as u32), others, self.task.shots as u32);
        let skip = |i: u32| i as usize + usize::from(i as usize >= index);
        drawn.into_iter().map(|i| &self.questions[skip(i)].1).collect()
    }
}

impl Task {
    /// Returns the texts of a question: one for each answer, or one without and one with the continuation.
    fn texts(&self, question: &Question, examples: &[&Question]) -> Vec<String> {
        let d = &self.delimiter;
        let before: String = examples.iter().map(|example| self.solved(example) + "\n\n").collect();
        match question {
            Question::MultipleChoice { query, choices, .. } => {
                choices.iter().map(|choice| format!("{before}{query}{d}{choice}")).collect()
            }
            Question::Schema { contexts, continuation, .. } => {
                contexts.iter().map(|context| format!("{before}{context}{d}{continuation}")).collect()
            }
            Question::LanguageModeling { context, continuation } => {
                let without = format!("{before}{}{d}", strip(context));
                // Without its last space, which most encodings join to the next word.
                vec![strip(&without).to_owned(), without + continuation]
            }
        }
    }

    /// Returns a question with its correct answer.
    fn solved(&self, question: &Question) -> String {
        let d = &self.delimiter;
        match question {
            Question::MultipleChoice { query, choices, gold } => format!("{query}{d}{}", choices[*gold]),
            Question::Schema { contexts, continuation, gold } => format!("{}{d}{continuation}", contexts[*gold]),
            Question::LanguageModeling { context, continuation } => format!("{}{d}{continuation}", strip(context)),
        }
    }
}

/// Removes what Python's `str.strip` removes: Unicode's white space, and four separators of ASCII.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c))
}

/// Returns the number of indices from 0 on at which `at` returns the same token for all rows.
fn common(rows: &[Vec<u32>], at: impl Fn(&[u32], usize) -> Option<&u32>) -> usize {
    let [first, rest @ ..] = rows else { return 0 };
    (0..first.len()).take_while(|&i| rest.iter().all(|row| at(row, i) == at(first, i))).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripped_white_space_is_pythons() {
        assert_eq!(strip("\u{3000}\x1f a\x1cb \u{85}\u{a0}\n"), "a\x1cb");
        // Not white space in Python or Unicode.
        assert_eq!(strip("\u{200b}x\u{feff}"), "\u{200b}x\u{feff}");
    }
}
