//! Multiple-choice evaluation by the mean loss of each completion, as for HellaSwag.

use super::AHEAD;
use anyhow::Result;
use data::multiple_choice::{COMPLETIONS, Example, MultipleChoice};
use engine::{BatchLayout, Engine, HostBuffer, PendingRead};
use model::{Decoder, LayerHooks};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use system::progress::{self, Unit};

/// Sequences are padded to a multiple of this length, so that GEMM tiles are full.
const PADDING: usize = 64;

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
/// Each row of a batch is a context with one completion. Rows are as short as the longest example permits, and a batch holds at
/// most as many tokens as the layout for which the model was `planned`.
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
    let extra_passes = at_least.saturating_sub(batches(set, range.clone(), planned));
    let examples = &set.examples()[range];
    let rows = COMPLETIONS * examples.len();
    let layout = layout_of(examples, planned);
    let t = layout.t;
    let mut losses = Losses { examples, t, rows: Vec::with_capacity(rows) };
    let mut queued: VecDeque<PendingRead> = VecDeque::new();
    let mut spare: Vec<HostBuffer> = Vec::new();
    let progress = progress::start("multiple choice", Unit::Count, rows.div_ceil(layout.b) as u64);
    for first in (0..rows).step_by(layout.b) {
        hooks.between_batches()?;
        let mut words = match spare.pop() {
            Some(words) => words,
            None => engine.host_buffer(layout.words())?,
        };
        fill(&mut words, layout, examples, first..rows.min(first + layout.b));
        let returned = engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        // The returned buffer may belong to a smaller batch that was loaded before this evaluation.
        spare.extend(returned.filter(|buffer| buffer.len() >= layout.words()));
        let batch_losses = model.losses.slice(0, layout.b * t);
        engine.zero(batch_losses)?;
        model.forward(engine, layout, hooks)?;
        model.loss(engine, layout, None)?;
        queued.push_back(engine.read_async(batch_losses)?);
        if queued.len() > AHEAD
            && let Some(oldest) = queued.pop_front()
        {
            losses.take(&engine.wait(oldest)?.values);
            progress.add(1);
        }
    }
    for read in queued {
        losses.take(&engine.wait(read)?.values);
    }
    for _ in 0..extra_passes {
        hooks.between_batches()?;
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        model.forward(engine, layout, hooks)?;
    }
    Ok(losses.score())
}

/// Returns the number of batches that [`score`] needs for `range`.
pub fn batches(set: &MultipleChoice, range: Range<usize>, planned: BatchLayout) -> usize {
    let examples = &set.examples()[range];
    (COMPLETIONS * examples.len()).div_ceil(layout_of(examples, planned).b)
}

/// Returns the layout of the batches for some examples.
fn layout_of(examples: &[Example], planned: BatchLayout) -> BatchLayout {
    let t = examples.iter().map(Example::longest).max().unwrap_or(1).next_multiple_of(PADDING).min(planned.t);
    BatchLayout::new((planned.b * planned.t / t).min(COMPLETIONS * examples.len()).max(1), t)
}

/// Returns the example and the completion of a row.
const fn of_row(row: usize) -> (usize, usize) {
    (row / COMPLETIONS, row % COMPLETIONS)
}

/// Writes rows to a batch. The target of each position is the next token. The rest of the batch is token 0, whose losses are
/// ignored. The tokens are not sorted, because only the backward pass needs that.
fn fill(words: &mut [i32], layout: BatchLayout, examples: &[Example], rows: Range<usize>) {
    words[..layout.words()].fill(0);
    let (inputs, targets) = words.split_at_mut(layout.targets().start);
    for (i, row) in rows.enumerate() {
        let (example, completion) = of_row(row);
        let Example { context, completions, .. } = &examples[example];
        let tokens = || context.iter().chain(&completions[completion]).map(|&token| token as i32);
        inputs[i * layout.t..][..layout.t].iter_mut().zip(tokens()).for_each(|(to, token)| *to = token);
        targets[i * layout.t..][..layout.t].iter_mut().zip(tokens().skip(1)).for_each(|(to, token)| *to = token);
    }
}

/// The mean losses of the completions of all rows so far.
struct Losses<'a> {
    examples: &'a [Example],
    t: usize,
    rows: Vec<f64>,
}

impl Losses<'_> {
    /// Adds the rows of the next batch, given the losses (b, t) of its tokens.
    fn take(&mut self, values: &[f32]) {
        for row in values.chunks_exact(self.t) {
            let (example, completion) = of_row(self.rows.len());
            let Some(Example { context, completions, .. }) = self.examples.get(example) else { return };
            // The last position of the context predicts the first token of the completion.
            let predicting = &row[context.len() - 1..][..completions[completion].len()];
            let sum: f64 = predicting.iter().map(|&loss| f64::from(loss)).sum();
            self.rows.push(sum / predicting.len() as f64);
        }
    }

    fn score(&self) -> Score {
        let chosen =
            |losses: &[f64]| (1..COMPLETIONS).fold(0, |best, i| if losses[i] < losses[best] { i } else { best });
        let answered = self.rows.chunks_exact(COMPLETIONS).zip(self.examples);
        let correct = answered.filter(|(losses, example)| chosen(losses) == example.label).count();
        Score { correct, examples: self.examples.len() }
    }
}
