use super::arena::{Arena, Operand, optional};
use crate::ops::{EncoderBackward, EncoderForward};
use crate::tensor::Tensor;
use crate::{BatchLayout, Result};
use anyhow::ensure;
use rayon::prelude::*;
use std::ops::Range;

pub(super) fn embedding_rows(name: &str, table: Tensor, c: usize) -> Result<usize> {
    ensure!(
        c > 0 && table.len.is_multiple_of(c),
        "{name}: expected rows of {c} elements, found {} elements",
        table.len
    );
    Ok(table.len / c)
}

pub(super) fn check_tokens(tokens: &[i32], rows: usize) -> Result<()> {
    match tokens.iter().position(|&token| !(0..rows as i64).contains(&i64::from(token))) {
        None => Ok(()),
        Some(at) => {
            anyhow::bail!(
                "token at position {at} of the batch: expected an id below {rows}, found {}; \
                 the data was tokenized for another vocabulary",
                tokens[at]
            )
        }
    }
}

/// Returns the number of position embeddings, which may be absent.
fn positions(name: &'static str, wpe: Option<Tensor>, layout: BatchLayout, c: usize) -> Result<usize> {
    let Some(wpe) = wpe else { return Ok(0) };
    let rows = embedding_rows(name, wpe, c)?;
    ensure!(layout.t <= rows, "sequence length: expected at most {rows}, the positions of wpe, found {}", layout.t);
    Ok(rows)
}

pub(super) fn forward(arena: &mut Arena, op: EncoderForward) -> Result<()> {
    let EncoderForward { out, batch, layout, wte, wpe, c } = op;
    let vocab = embedding_rows("wte", wte, c)?;
    let positions = positions("wpe", wpe, layout, c)?;
    let tokens = layout.tensor(batch, layout.inputs());
    let operands: [Operand; 4] = [
        ("out", out, layout.b * layout.t * c),
        ("tokens", tokens, tokens.len),
        ("wte", wte, vocab * c),
        optional("wpe", wpe, positions * c),
    ];
    let [out, tokens, wte, wpe] = arena.split("encoder_forward", operands)?;
    let tokens: &[i32] = bytemuck::cast_slice(tokens);
    check_tokens(tokens, vocab)?;
    let (wte, wpe) = (&*wte, &*wpe);
    out.par_chunks_mut(c).zip(tokens).enumerate().with_min_len(16).for_each(|(i, (out, &token))| {
        let (token, position) = (token as usize, i % layout.t);
        out.copy_from_slice(&wte[token * c..][..c]);
        if let Some(wpe) = wpe.get(position * c..(position + 1) * c) {
            for (out, pe) in out.iter_mut().zip(wpe) {
                *out += pe;
            }
        }
    });
    Ok(())
}

/// Returns each run of equal tokens: its row of `table` and its range in `sorted`, whose tokens ascend and have rows.
fn runs<'a>(table: &'a mut [f32], c: usize, sorted: &[i32]) -> Vec<(&'a mut [f32], Range<usize>)> {
    let (mut rows, mut next, mut end) = (table.chunks_exact_mut(c), 0, 0);
    let run = |run: &[i32]| {
        let (token, begin) = (run[0] as usize, end);
        let row = rows.nth(token - next)?;
        (next, end) = (token + 1, begin + run.len());
        Some((row, begin..end))
    };
    sorted.chunk_by(|a, b| a == b).map_while(run).collect()
}

pub(super) fn backward(arena: &mut Arena, op: EncoderBackward) -> Result<()> {
    let EncoderBackward { dwte, dwpe, dout, batch, layout, c } = op;
    let vocab = embedding_rows("dwte", dwte, c)?;
    let positions = positions("dwpe", dwpe, layout, c)?;
    let words = batch.slice(0, layout.words());
    let operands: [Operand; 4] = [
        ("dwte", dwte, vocab * c),
        optional("dwpe", dwpe, positions * c),
        ("dout", dout, layout.b * layout.t * c),
        ("batch", words, layout.words()),
    ];
    let [dwte, dwpe, dout, words] = arena.split("encoder_backward", operands)?;
    let words: &[i32] = bytemuck::cast_slice(words);
    let (dout, tokens) = (&*dout, &words[layout.inputs()]);
    let (order, sorted) = (&words[layout.order()], &words[layout.sorted()]);
    check_tokens(tokens, vocab)?;
    let token_of = |&position: &i32| usize::try_from(position).ok().and_then(|position| tokens.get(position));
    // Strictly ascending pairs contain every position exactly once.
    let ascending = sorted.iter().zip(order).is_sorted_by(|a, b| a < b);
    ensure!(
        ascending && order.iter().map(token_of).eq(sorted.iter().map(Some)),
        "encoder_backward: expected a sorted batch; call BatchLayout::sort first"
    );
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
    runs(dwte, c, sorted).into_par_iter().with_min_len(8).for_each_init(
        || vec![0.0; c],
        |sum, (row, run)| sum_into(sum, row, &mut order[run].iter().map(|&i| i as usize)),
    );
    dwpe[..(layout.t * c).min(positions * c)].par_chunks_mut(c).enumerate().with_min_len(8).for_each_init(
        || vec![0.0; c],
        |sum, (t, row)| sum_into(sum, row, &mut (0..layout.b).map(|b| b * layout.t + t)),
    );
    Ok(())
}
