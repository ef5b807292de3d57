//! Statistics of FP8 with delayed scaling, which determine the scales of the next step.

use anyhow::{Context, Result};
use engine::Engine;
use model::Decoder;
use serde::{Deserialize, Serialize};

/// The largest magnitudes of inputs and gradients in the last steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fp8Statistics {
    /// f32 bits in hexadecimal: the gradient of a token's loss, to which gradients are proportional, then the magnitudes.
    bits: String,
}

impl Fp8Statistics {
    /// Reads the statistics of a model in which the gradient of a token's loss is `dloss`. Returns `None` if it has none.
    pub fn read(model: &Decoder, engine: &mut dyn Engine, dloss: f32) -> Result<Option<Self>> {
        let tensors = model.training.and_then(|training| training.fp8).map_or_else(Vec::new, |fp8| fp8.state());
        if tensors.is_empty() {
            return Ok(None);
        }
        let mut bits = format!("{:08x}", dloss.to_bits());
        for tensor in tensors {
            bits.extend(engine.read(tensor)?.into_iter().map(|amax| format!("{:08x}", amax.to_bits())));
        }
        Ok(Some(Self { bits }))
    }

    /// Writes the statistics to a model. Returns false and writes nothing if they belong to a model with other scales or gradients.
    pub fn restore(&self, model: &Decoder, engine: &mut dyn Engine, dloss: f32) -> Result<bool> {
        let tensors = model.training.and_then(|training| training.fp8).map_or_else(Vec::new, |fp8| fp8.state());
        let words =
            self.bits.as_bytes().chunks(8).map(|word| -> Result<f32> {
                Ok(f32::from_bits(u32::from_str_radix(std::str::from_utf8(word)?, 16)?))
            });
        let words: Vec<f32> = words.collect::<Result<_>>().context("FP8 statistics: expected hexadecimal words")?;
        let len: usize = tensors.iter().map(|tensor| tensor.len).sum();
        let Some((of, mut amaxes)) = words.split_first() else { return Ok(false) };
        if tensors.is_empty() || amaxes.len() != len || of.to_bits() != dloss.to_bits() {
            return Ok(false);
        }
        for tensor in tensors {
            let (own, rest) = amaxes.split_at(tensor.len);
            engine.write(tensor, own)?;
            amaxes = rest;
        }
        Ok(true)
    }
}
