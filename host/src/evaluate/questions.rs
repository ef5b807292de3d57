//! Answers to questions by the scores of rows of tokens: multiple choice, and exact matches by greedy choice.
//!
//! Rows are sorted by length. A batch holds rows of about the same length, and at most as many tokens as the layout for which the model
//! was planned. Only the logits of scored tokens are computed.

use super::AHEAD;
use anyhow::Result;
use data::scored::{Rule, ScoredQuestion, ScoredRow};
use engine::{BatchLayout, Engine, HostBuffer, PendingRead};
use model::{Decoder, LayerHooks, TokenScore};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use system::progress::{self, Unit};

/// Sequences and scored tokens are padded to a multiple of this number, so that GEMM tiles are full and there are few shapes.
const PADDING: usize = 64;

/// The answer of a model to a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Index of the chosen row, or `None` if the answer has to match a text and does not.
    pub choice: Option<usize>,
    /// Whether it is correct.
    pub correct: bool,
    /// Mean loss of the scored tokens of each row, NaN if there are none; or the fraction of scored tokens that are most likely.
    pub scores: Vec<f64>,
}

/// Returns the answer to each question. All questions have the same kind of rule. `hooks` provides the parameters, and may end the
/// evaluation between two batches. `name` is the evaluation in the progress display.
pub fn answer(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    planned: BatchLayout,
    questions: &[ScoredQuestion],
    name: &str,
) -> Result<Vec<Answer>> {
    let score = match questions.first().map(|question| question.rule) {
        Some(Rule::AllMostLikely) => TokenScore::MostLikely,
        _ => TokenScore::Loss,
    };
    let rows: Vec<&ScoredRow> = questions.iter().flat_map(|question| &question.rows).collect();
    let mut means = score_rows(model, engine, hooks, planned, (&rows, score), name)?.into_iter();
    let of_question = |question: &ScoredQuestion| {
        let scores: Vec<f64> = means.by_ref().take(question.rows.len()).collect();
        let (choice, correct) = match question.rule {
            Rule::LowestMeanLoss { gold } => {
                let choice = lowest(question, &scores);
                (Some(choice), choice == gold)
            }
            Rule::AllMostLikely => {
                let correct = scores.iter().all(|&score| score >= 1.0);
                (correct.then_some(0), correct)
            }
        };
        Answer { choice, correct, scores }
    };
    Ok(questions.iter().map(of_question).collect())
}

/// Returns the row with the lowest score, the first one of a tie. Equal rows are a tie, even if their batches were rounded differently.
/// A score of NaN is never lower.
fn lowest(ScoredQuestion { rows, .. }: &ScoredQuestion, scores: &[f64]) -> usize {
    let is_lower = |i: usize, best: usize| scores[i] < scores[best] && rows[i] != rows[best];
    (1..scores.len()).fold(0, |best, i| if is_lower(i, best) { i } else { best })
}

/// Returns the number of batches that [`answer`] needs.
pub fn batches(questions: &[ScoredQuestion], planned: BatchLayout) -> usize {
    Batches::new(&questions.iter().flat_map(|question| &question.rows).collect::<Vec<_>>(), planned).layouts.len()
}

/// Runs forward passes of empty batches: ranks that shard parameters must run equally many collectives, and call `hooks` equally often.
pub fn idle(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    planned: BatchLayout,
    batches: usize,
) -> Result<()> {
    let layout = BatchLayout::new(1, PADDING.min(planned.t));
    for _ in 0..batches {
        hooks.between_batches()?;
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        model.forward(engine, layout, hooks)?;
    }
    Ok(())
}

/// Rows in batches. Rows without scored tokens are in none.
struct Batches {
    /// Indices of rows, longest first.
    order: Vec<usize>,
    /// The layout of each batch, and its part of `order`.
    layouts: Vec<(BatchLayout, Range<usize>)>,
}

impl Batches {
    fn new(rows: &[&ScoredRow], planned: BatchLayout) -> Self {
        let mut order: Vec<usize> = (0..rows.len()).filter(|&i| !rows[i].scored.is_empty()).collect();
        order.sort_by_key(|&i| Reverse(inputs(rows[i])));
        let (mut layouts, mut first) = (Vec::new(), 0);
        while let Some(&longest) = order.get(first) {
            let t = inputs(rows[longest]).next_multiple_of(PADDING).min(planned.t);
            let fits = (planned.b * planned.t / t).max(1);
            let end = order.len().min(first + fits);
            layouts.push((BatchLayout::new(end - first, t), first..end));
            first = end;
        }
        Self { order, layouts }
    }
}

/// Returns the number of tokens that a row feeds to the model: the last one is only predicted.
fn inputs(row: &ScoredRow) -> usize {
    row.tokens.len() - 1
}

/// Returns the mean score of the scored tokens of each row, NaN for a row without any.
fn score_rows(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    planned: BatchLayout,
    (rows, score): (&[&ScoredRow], TokenScore),
    name: &str,
) -> Result<Vec<f64>> {
    let Batches { order, layouts } = Batches::new(rows, planned);
    let mut means = vec![f64::NAN; rows.len()];
    let mut take = |range: Range<usize>, scores: &[f32]| {
        let mut scores = scores.iter().map(|&score| f64::from(score));
        for &row in &order[range] {
            let count = rows[row].scored.len();
            means[row] = scores.by_ref().take(count).sum::<f64>() / count as f64;
        }
    };
    let mut queued: VecDeque<(Range<usize>, PendingRead)> = VecDeque::new();
    let mut spare: Vec<HostBuffer> = Vec::new();
    let words = layouts.iter().map(|(layout, _)| layout.words()).max().unwrap_or(0);
    let progress = progress::start(name, Unit::Count, layouts.len() as u64);
    for (layout, range) in layouts {
        hooks.between_batches()?;
        let mut buffer = spare.pop().map_or_else(|| engine.host_buffer(words), Ok)?;
        let count = fill(&mut buffer, layout, order[range.clone()].iter().map(|&row| rows[row]));
        let returned = engine.load_batch(model.batch.slice(0, layout.words()), layout, buffer)?;
        // The returned buffer may belong to a smaller batch that was loaded before this evaluation.
        spare.extend(returned.filter(|buffer| buffer.len() >= words));
        model.forward(engine, layout, hooks)?;
        let padded = count.next_multiple_of(PADDING).min(layout.b * layout.t);
        model.score_tokens(engine, layout, padded, score)?;
        queued.push_back((range, engine.read_async(model.losses.slice(0, count))?));
        if queued.len() > AHEAD
            && let Some((range, oldest)) = queued.pop_front()
        {
            take(range, &engine.wait(oldest)?.values);
            progress.add(1);
        }
    }
    for (range, read) in queued {
        take(range, &engine.wait(read)?.values);
        progress.add(1);
    }
    Ok(means)
}

/// Writes rows to a batch, and the positions and tokens that [`Decoder::score_tokens`] reads. Returns the number of scored tokens. The
/// rest of the batch is token 0.
fn fill<'a>(words: &mut [i32], layout: BatchLayout, rows: impl Iterator<Item = &'a ScoredRow>) -> usize {
    words[..layout.words()].fill(0);
    let (inputs, rest) = words.split_at_mut(layout.targets().start);
    let (positions, targets) = rest[layout.targets().len()..].split_at_mut(layout.order().len());
    let mut count = 0;
    for (i, ScoredRow { tokens, scored }) in rows.enumerate() {
        let first = i * layout.t;
        inputs[first..][..layout.t].iter_mut().zip(tokens).for_each(|(to, &token)| *to = token as i32);
        for at in scored.clone() {
            (positions[count], targets[count]) = ((first + at - 1) as i32, tokens[at] as i32);
            count += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_answers_wins_and_nan_is_never_lower() {
        let row = |token| ScoredRow { tokens: vec![0, token], scored: 1..2 };
        let lowest = |tokens: &[u32], scores: &[f64]| {
            let rows = tokens.iter().map(|&token| row(token)).collect();
            lowest(&ScoredQuestion { rows, rule: Rule::LowestMeanLoss { gold: 0 } }, scores)
        };
        assert_eq!(lowest(&[1, 2, 3], &[2.0, 1.0, 1.0]), 1);
        // The same rows, rounded differently.
        assert_eq!(lowest(&[1, 1, 2], &[2.0, 1.9, 3.0]), 0);
        // As in Python: `min` keeps the first value unless a later one is lower.
        assert_eq!(lowest(&[1, 2, 3], &[f64::NAN, 1.0, 2.0]), 0);
        assert_eq!(lowest(&[1, 2, 3], &[2.0, f64::NAN, 1.0]), 2);
    }

    #[test]
    fn batches_have_rows_of_similar_length_and_fit_the_plan() {
        let row = |len: usize| ScoredRow { tokens: vec![0; len], scored: 1..len };
        let rows: Vec<ScoredRow> = [2, 190, 65, 66, 1, 129, 64].map(row).into();
        let rows: Vec<&ScoredRow> = rows.iter().collect();
        let Batches { order, layouts } = Batches::new(&rows, BatchLayout::new(2, 192));
        // Row 4 has no scored tokens.
        assert_eq!(order, [1, 5, 3, 2, 6, 0]);
        let shapes: Vec<_> = layouts.iter().map(|(layout, range)| (layout.b, layout.t, range.clone())).collect();
        assert_eq!(shapes, [(2, 192, 0..2), (3, 128, 2..5), (1, 64, 5..6)]);
    }
}
