//! Scores of some tokens of a batch: the logits of all others are not computed.

use super::decoder::Decoder;
use super::memory_plan::chunk_rows;
use engine::ops::{Classifier, EncoderForward, MostLikely};
use engine::{BatchLayout, Engine, Result};

/// The value that is computed for each scored token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenScore {
    /// Its loss in nats.
    Loss,
    /// 1 if it is the most likely token, the lowest of equally likely ones; else 0.
    MostLikely,
}

impl Decoder {
    /// Computes the scores of `count` tokens after a forward pass, and writes them to the beginning of `losses`.
    ///
    /// The batch states the tokens: [`order`](BatchLayout::order) begins with the positions (B·T) that predict them, and
    /// [`sorted`](BatchLayout::sorted) with the tokens. Only a backward pass needs what these parts usually contain.
    pub fn score_tokens(
        &self,
        engine: &mut dyn Engine,
        layout: BatchLayout,
        count: usize,
        score: TokenScore,
    ) -> Result<()> {
        let (c, v, vp) = (self.descriptor.channels, self.descriptor.vocab, self.descriptor.padded_vocab());
        let softcap = self.descriptor.softcap;
        let targets = layout.tensor(self.batch, layout.sorted()).slice(0, count);
        // The embedding of a position in the table of the final norm's outputs: the memory of the token embeddings is idle by now.
        let outputs = self.encoded.slice(0, count * c);
        engine.run(EncoderForward {
            out: outputs,
            batch: layout.tensor(self.batch, layout.order()),
            layout: BatchLayout::new(1, count),
            wte: self.final_norm.out.slice(0, layout.b * layout.t * c),
            wpe: None,
            c,
        })?;
        engine.zero(self.losses.slice(0, count))?;
        let chunk = chunk_rows(count, self.logit_rows());
        for first in (0..count).step_by(chunk) {
            let rows = chunk.min(count - first);
            let logits = self.logits_of(engine, outputs.slice(first * c, rows * c))?;
            let (scores, targets) = (self.losses.slice(first, rows), targets.slice(first, rows));
            match score {
                TokenScore::Loss => {
                    engine.run(Classifier {
                        logits,
                        losses: scores,
                        targets,
                        v,
                        vp,
                        dloss: None,
                        softcap,
                        fp8: None,
                    })?;
                }
                TokenScore::MostLikely => engine.run(MostLikely { hits: scores, logits, targets, v, vp })?,
            }
        }
        Ok(())
    }
}
