//! A file with the logits and the losses of a model, for comparisons with other programs.
//!
//! A safetensors file of f32: `logits` (tokens, V), after the softcap, and `losses` (tokens) in nats. Row i belongs to the
//! i-th target token of the validation data, in the order in which `eval` reads them.

use anyhow::{Result, ensure};
use engine::{BatchLayout, Engine};
use interchange::element::{Element, NewTensor};
use interchange::safetensors_file;
use model::Decoder;
use std::io::Write;

/// Writes the logits batch by batch. The losses follow at the end.
pub struct Predictions<'a> {
    out: &'a mut dyn Write,
    losses: Vec<f32>,
    tokens: usize,
}

impl<'a> Predictions<'a> {
    /// Begins a file for `tokens` target tokens of a model with `vocab` tokens.
    pub fn new(out: &'a mut dyn Write, tokens: usize, vocab: usize) -> Result<Self> {
        let tensor = |name: &str, shape| NewTensor { name: name.to_owned(), shape, element: Element::F32 };
        let tensors = [tensor("logits", vec![tokens, vocab]), tensor("losses", vec![tokens])];
        safetensors_file::write_header(&mut &mut *out, &tensors)?;
        Ok(Self { out, losses: Vec::with_capacity(tokens), tokens })
    }

    /// Appends a batch after its forward pass. `losses` (B, T) are those of its target tokens.
    pub fn append(
        &mut self,
        model: &Decoder,
        engine: &mut dyn Engine,
        layout: BatchLayout,
        losses: &[f32],
    ) -> Result<()> {
        let (v, vp) = (model.descriptor.vocab, model.descriptor.padded_vocab());
        let (rows, most) = (layout.b * layout.t, model.logit_rows());
        for first in (0..rows).step_by(most) {
            let logits = model.logits(engine, first..rows.min(first + most))?;
            for row in engine.read(logits)?.chunks_exact(vp) {
                let logits = row[..v].iter().map(|&logit| model.descriptor.softcapped(logit));
                self.out.write_all(&logits.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
            }
        }
        self.losses.extend(losses);
        Ok(())
    }

    /// Completes the file.
    pub fn finish(self) -> Result<()> {
        let found = self.losses.len();
        ensure!(found == self.tokens, "logits: expected {} target tokens, found {found}", self.tokens);
        Ok(self.out.write_all(&self.losses.iter().flat_map(|loss| loss.to_le_bytes()).collect::<Vec<u8>>())?)
    }
}
