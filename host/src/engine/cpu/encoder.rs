use super::arena::{Arena, Operand};
use crate::engine::{BatchLayout, Result};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;
use std::ops::Range;

fn embedding_rows(name: &str, table: Tensor, c: usize) -> Result<usize> {
    ensure!(c > 0 && table.len.is_multiple_of(c), "{name} has {} elements, not rows of {c}", table.len);
    Ok(table.len / c)
}

fn check_tokens(tokens: &[i32], rows: usize) -> Result<()> {
    match tokens.iter().position(|&token| !(0..rows as i64).contains(&i64::from(token))) {
        None => Ok(()),
        Some(at) => {
            anyhow::bail!(
                "token {} at position {at} of the batch is not below {rows}, the rows of wte: \
                 the data was made for another vocabulary",
                tokens[at]
            )
        }
    }
}

fn check_positions(layout: BatchLayout, rows: usize) -> Result<()> {
    ensure!(layout.t <= rows, "sequences of {} tokens do not fit the {rows} positions of wpe", layout.t);
    Ok(())
}

pub(super) fn forward(
    arena: &mut Arena,
    out: Tensor,
    batch: Tensor,
    layout: BatchLayout,
    wte: Tensor,
    wpe: Tensor,
    c: usize,
) -> Result<()> {
    let (vocab, positions) = (embedding_rows("wte", wte, c)?, embedding_rows("wpe", wpe, c)?);
    check_positions(layout, positions)?;
    let tokens = layout.tensor(batch, layout.inputs());
    let operands: [Operand; 4] = [
        ("out", out, layout.b * layout.t * c),
        ("tokens", tokens, tokens.len),
        ("wte", wte, vocab * c),
        ("wpe", wpe, positions * c),
    ];
    let [out, tokens, wte, wpe] = arena.split("encoder_forward", operands)?;
    let tokens: &[i32] = bytemuck::cast_slice(tokens);
    check_tokens(tokens, vocab)?;
    let (wte, wpe) = (&*wte, &*wpe);
    out.par_chunks_mut(c).zip(tokens).enumerate().with_min_len(16).for_each(|(i, (out, &token))| {
        let (token, position) = (token as usize, i % layout.t);
        let embeddings = wte[token * c..][..c].iter().zip(&wpe[position * c..][..c]);
        for (out, (te, pe)) in out.iter_mut().zip(embeddings) {
            *out = te + pe;
        }
    });
    Ok(())
}

/// The rows of `table` whose numbers are `ascending`, each borrowed on its own.
fn rows_mut(mut table: &mut [f32], c: usize, ascending: impl Iterator<Item = usize>) -> Result<Vec<&mut [f32]>> {
    let mut passed = 0;
    let mut rows = Vec::new();
    for row in ascending {
        ensure!(
            row >= passed && (row + 1 - passed) * c <= table.len(),
            "encoder_backward: the batch's order does not sort its inputs: sort the batch first"
        );
        let (taken, rest) = table.split_at_mut((row + 1 - passed) * c);
        rows.push(&mut taken[(row - passed) * c..]);
        (table, passed) = (rest, row + 1);
    }
    Ok(rows)
}

/// Where each run of equal tokens lies in `order`, if the parts fit each other.
fn runs_of(layout: BatchLayout, words: &[i32]) -> Option<Vec<Range<usize>>> {
    let (inputs, order, sorted) = (&words[layout.inputs()], &words[layout.order()], &words[layout.sorted()]);
    let token_of = |&position: &i32| usize::try_from(position).ok().and_then(|position| inputs.get(position));
    let fits =
        sorted.is_sorted() && order.iter().zip(sorted).all(|(position, token)| token_of(position) == Some(token));
    let mut end = 0;
    let run = |run: &[i32]| {
        let begin = end;
        end += run.len();
        begin..end
    };
    fits.then(|| sorted.chunk_by(|a, b| a == b).map(run).collect())
}

pub(super) fn backward(
    arena: &mut Arena,
    dwte: Tensor,
    dwpe: Tensor,
    dout: Tensor,
    batch: Tensor,
    layout: BatchLayout,
    c: usize,
) -> Result<()> {
    let (vocab, positions) = (embedding_rows("dwte", dwte, c)?, embedding_rows("dwpe", dwpe, c)?);
    check_positions(layout, positions)?;
    let words = batch.slice(0, layout.words());
    let operands: [Operand; 4] = [
        ("dwte", dwte, vocab * c),
        ("dwpe", dwpe, positions * c),
        ("dout", dout, layout.b * layout.t * c),
        ("batch", words, layout.words()),
    ];
    let [dwte, dwpe, dout, words] = arena.split("encoder_backward", operands)?;
    let words: &[i32] = bytemuck::cast_slice(words);
    let (dout, tokens, order) = (&*dout, &words[layout.inputs()], &words[layout.order()]);
    check_tokens(tokens, vocab)?;
    let Some(runs) = runs_of(layout, words) else {
        anyhow::bail!("encoder_backward: the batch's order does not sort its inputs: sort the batch first")
    };
    let rows = rows_mut(dwte, c, runs.iter().map(|run| tokens[order[run.start] as usize] as usize))?;
    let sum_into = |sum: &mut Vec<f32>, row: &mut [f32], positions: &mut dyn Iterator<Item = usize>| {
        sum.fill(0.0);
        for position in positions {
            for (sum, d) in sum.iter_mut().zip(&dout[position * c..][..c]) {
                *sum += d;
            }
        }
        for (row, sum) in row.iter_mut().zip(&*sum) {
            *row += sum;
        }
    };
    rows.into_par_iter().zip(runs).with_min_len(8).for_each_init(
        || vec![0.0; c],
        |sum, (row, run)| sum_into(sum, row, &mut order[run].iter().map(|&i| i as usize)),
    );
    dwpe[..layout.t * c].par_chunks_mut(c).enumerate().with_min_len(8).for_each_init(
        || vec![0.0; c],
        |sum, (t, row)| sum_into(sum, row, &mut (0..layout.b).map(|b| b * layout.t + t)),
    );
    Ok(())
}
