//! Logits and loss. Logits, V for every token, never exist all at once: they are computed in chunks of rows, from the output of the
//! final norm to the gradients of that output and of the head.

use super::decoder::{Decoder, Training};
use super::fp8_head::Fp8Head;
use super::memory_plan::chunk_rows;
use engine::ops::{Classifier, DecodeMatmul, MatmulBackward, MatmulForward, MatmulShape};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};
use std::ops::Range;

impl Decoder {
    /// Returns the most rows of logits that can exist at a time.
    pub fn logit_rows(&self) -> usize {
        self.logits.len / self.descriptor.padded_vocab()
    }

    /// Computes the logits (rows, Vp) of at most [`logit_rows`](Self::logit_rows) rows of the batch, after a forward pass, without
    /// softcap. They are valid until the model's next operation.
    ///
    /// # Panics
    /// If there are more rows.
    pub fn logits(&self, engine: &mut dyn Engine, rows: Range<usize>) -> Result<Tensor> {
        let c = self.descriptor.channels;
        self.logits_of(engine, self.final_norm.out.slice(rows.start * c, rows.len() * c))
    }

    /// Computes the logits of outputs of the final norm (rows, C), as [`logits`](Self::logits) does.
    pub(super) fn logits_of(&self, engine: &mut dyn Engine, inp: Tensor) -> Result<Tensor> {
        self.head(engine, inp, None)
    }

    /// Computes the logits of outputs of the final norm (rows, C), from their quantized copies if those are given.
    fn head(&self, engine: &mut dyn Engine, inp: Tensor, fp8: Option<&Fp8Head>) -> Result<Tensor> {
        let (c, vp) = (self.descriptor.channels, self.descriptor.padded_vocab());
        let shape = MatmulShape { rows: inp.len / c, c, oc: vp };
        let out = self.logits.slice(0, shape.rows * vp);
        let fp8 = fp8.map(|fp8| fp8.forward(shape));
        let (weight, weight_scale) = self.decoded_weight(self.head_param(), 0);
        let matmul = MatmulForward { fp8, ..MatmulForward::new([out, inp, weight], shape) };
        match weight_scale {
            Some(_) => engine.run(DecodeMatmul { norm: None, matmul, weight_scale })?,
            None => engine.run(matmul)?,
        }
        Ok(out)
    }

    /// Adds each token's loss to `losses`, after a forward pass.
    ///
    /// With `dloss`, the gradient of each token's loss, it also begins the backward pass: it adds the gradient of the head and
    /// computes the gradient of the final norm's output.
    pub fn loss(&self, engine: &mut dyn Engine, layout: BatchLayout, dloss: Option<f32>) -> Result<()> {
        let (c, v) = (self.descriptor.channels, self.descriptor.vocab);
        let (vp, softcap) = (self.descriptor.padded_vocab(), self.descriptor.softcap);
        let (rows, targets) = (layout.b * layout.t, layout.tensor(self.batch, layout.targets()));
        let training = dloss.map(|_| self.training()).transpose()?;
        let dhead = |training: &Training| self.gradient(self.grad_store(training), self.head_param(), 0);
        if let Some(training) = training
            && let (Some(sum), Some(dhead)) = (training.dhead, dhead(training))
        {
            engine.cast(sum, dhead)?;
        }
        let fp8 = self.fp8_head().filter(|_| training.is_some());
        if fp8.is_some() && self.copies_layers() {
            self.quantize_head(engine)?;
        }
        let chunk = chunk_rows(rows, self.logit_rows());
        for first in (0..rows).step_by(chunk) {
            let rows = chunk.min(rows - first);
            let (inp, shape) = (self.final_norm.out.slice(first * c, rows * c), MatmulShape { rows, c, oc: vp });
            if let Some(fp8) = &fp8 {
                engine.run(fp8.quantize_input(inp, shape))?;
            }
            let logits = self.head(engine, inp, fp8.as_ref())?;
            let (losses, targets) = (self.losses.slice(first, rows), targets.slice(first, rows));
            let gradient = fp8.map(|fp8| fp8.gradient(logits));
            engine.run(Classifier { logits, losses, targets, v, vp, dloss, softcap, fp8: gradient })?;
            if let Some(training) = training {
                engine.run(MatmulBackward {
                    fp8: fp8.map(|fp8| fp8.backward(logits, shape)),
                    ..MatmulBackward::new(
                        training.dchannels.slice(first * c, rows * c),
                        training.dhead.or_else(|| dhead(training)),
                        [logits, inp, self.param(self.head_param(), 0)],
                        shape,
                    )
                })?;
            }
        }
        if let Some(training) = training
            && let (Some(sum), Some(dhead)) = (training.dhead, dhead(training))
        {
            engine.cast(dhead, sum)?;
        }
        Ok(())
    }
}
