//! Weights in FP8 for evaluation and generation: those of the layers' linear layers, and of the head.
//!
//! A weight is E4M3 numbers times a scale. The scale is a power of two, so that the weight is exact in bf16: the model computes what one in
//! the engine's type computes from the rounded weights, in each pass and on each engine. A decoding step reads the FP8 numbers. The GEMMs of
//! other passes read each weight of a layer from a buffer, to which it is converted before. No other copy of these weights exists.
//!
//! If the head is the token embedding, that stays in the engine's type beside the head in FP8: embeddings read few of its rows, but a step
//! reads all of the head.

use super::decoder::Decoder;
use super::descriptor::Descriptor;
use super::params::Param;
use anyhow::{Context, ensure};
use engine::ops::{
    Bf16Scale, DecodeMatmul, Dequantize, Fp8Format, Fp8Scale, MatmulForward, NormForward, Quantize, Scaling,
    nearest_bf16,
};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result};

/// Storage of the weights of linear layers outside of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// The engine's type.
    #[default]
    Float,
    /// FP8.
    Fp8,
}

impl WeightFormat {
    /// Returns the engine's type for FP8 numbers if weights are in FP8, after checking that the engine and the model support it.
    pub(super) fn fp8_dtype(self, d: &Descriptor, engine: &dyn Engine) -> Result<Option<DType>> {
        if self == Self::Float {
            return Ok(None);
        }
        let dtype = engine.fp8_dtype().with_context(|| {
            let device = engine.describe();
            format!("--precision fp8: expected a GPU of compute capability 8.9 or later and bf16, found {device}; use --precision bf16")
        })?;
        ensure!(
            d.experts.is_none(),
            "--precision fp8: expected a model without experts, found {d}; use --precision bf16 or fp32"
        );
        for param in Param::linear(d) {
            let (oc, c) = param.shape(d);
            ensure!(
                oc.is_multiple_of(MULTIPLE) && c.is_multiple_of(MULTIPLE),
                "--precision fp8: {}: expected multiples of {MULTIPLE} rows and columns, found {oc} x {c}; use another precision",
                param.name()
            );
        }
        Ok(Some(dtype))
    }
}

/// Rows and columns of all weights are multiples of this.
const MULTIPLE: usize = 16;

/// The weights of a model in FP8.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Weights {
    /// E4M3: those of the linear layers of each layer, then the head.
    numbers: Tensor,
    /// (weights) f32, in the same order
    scales: Tensor,
    /// (largest weight of a layer) float: a weight while a GEMM reads it
    staging: Tensor,
}

/// Returns the weights in FP8, in order.
fn weights(d: &Descriptor) -> impl Iterator<Item = (Param, usize)> {
    let of_layer = |layer| Param::linear(d).map(move |param| (param, layer));
    (0..d.layers).flat_map(of_layer).chain([(Param::head(d), 0)])
}

impl Fp8Weights {
    pub(super) fn plan(plan: &mut Plan, d: &Descriptor, float: DType, fp8: DType) -> Self {
        let elements = weights(d).map(|(param, _)| param.len(d)).sum();
        let largest = Param::linear(d).map(|param| param.len(d)).max().unwrap_or(0);
        Self {
            numbers: plan.add(Group::Parameters, "weights in FP8", &[elements], fp8),
            scales: plan.add(Group::Parameters, "scales of weights", &[weights(d).count()], DType::F32),
            staging: plan.add(Group::Workspace, "weight of a layer", &[largest], float),
        }
    }

    /// Returns the numbers and the scale of a weight.
    fn of(&self, d: &Descriptor, weight: Param, layer: usize) -> [Tensor; 2] {
        let before = weights(d).take_while(|&other| other != (weight, layer));
        let (i, at) = before.fold((0, 0), |(i, at), (param, _)| (i + 1, at + param.len(d)));
        [self.numbers.slice(at, weight.len(d)), self.scales.slice(i, 1)]
    }

    /// Returns where a weight of a layer is while a GEMM reads it. `None` if it is not in FP8, or if it is the head.
    pub(super) fn staged(&self, d: &Descriptor, weight: Param) -> Option<Tensor> {
        weight.kind().is_linear().then(|| self.staging.slice(0, weight.len(d)))
    }
}

/// Returns the smallest power of two with which the largest of `values` does not exceed the largest E4M3 number.
fn scale_of(values: &[f32]) -> f32 {
    let largest = values.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let ratio = (largest / Fp8Format::E4m3.max()).max(Bf16Scale::MIN);
    // Rounds up to a number without a mantissa.
    f32::from_bits((ratio.to_bits() + 0x7f_ffff) & !0x7f_ffff)
}

impl Decoder {
    /// Returns the weights that are in FP8, the head included even if it is also the token embedding.
    pub fn weights_in_fp8(&self) -> Vec<(Param, usize)> {
        self.fp8_weights.iter().flat_map(|_| weights(&self.descriptor)).collect()
    }

    /// Quantizes the values of a weight in FP8. They may lack the padding of the vocabulary.
    pub fn write_in_fp8(&self, engine: &mut dyn Engine, weight: Param, layer: usize, values: &[f32]) -> Result<()> {
        let Some(fp8) = self.fp8_weights else { return Ok(()) };
        let (_, c) = weight.shape(&self.descriptor);
        let [numbers, scale] = fp8.of(&self.descriptor, weight, layer);
        // Otherwise engines that store f32 would round once, and others twice.
        let mut values: Vec<f32> = values.iter().map(|&x| nearest_bf16(x)).collect();
        let of_weight = scale_of(&values);
        ensure!(
            of_weight <= Bf16Scale::MAX,
            "--precision fp8: {}: expected magnitudes up to {}, found larger ones; use another precision",
            weight.name(),
            Bf16Scale::MAX * Fp8Format::E4m3.max()
        );
        engine.write(scale, &[of_weight])?;
        values.resize(numbers.len, 0.0);
        let chunk = fp8.staging.len / c / MULTIPLE * MULTIPLE * c;
        for (i, values) in values.chunks(chunk).enumerate() {
            let (inp, out) = (fp8.staging.slice(0, values.len()), numbers.slice(i * chunk, values.len()));
            engine.write(inp, values)?;
            // The largest magnitude neither changes nor matters.
            let scale = Fp8Scale { scale, amax: scale, counts: None };
            engine.run(Quantize {
                out: Some(out),
                ..Quantize::new(inp, [values.len() / c, c], Fp8Format::E4m3, scale, Scaling::Given)
            })?;
        }
        Ok(())
    }

    /// Converts a weight of a layer for the GEMM that follows, if it is in FP8.
    pub(super) fn stage_weight(&self, engine: &mut dyn Engine, weight: Param, layer: usize) -> Result<()> {
        let Some(fp8) = self.fp8_weights else { return Ok(()) };
        let Some(out) = fp8.staged(&self.descriptor, weight) else { return Ok(()) };
        let [inp, scale] = fp8.of(&self.descriptor, weight, layer);
        engine.run(Dequantize { out, inp, scale })
    }

    /// Returns a weight as a decoding step reads it, and its scale if it is in FP8.
    pub(super) fn decoded_weight(&self, weight: Param, layer: usize) -> (Tensor, Option<Tensor>) {
        match self.fp8_weights.map(|fp8| fp8.of(&self.descriptor, weight, layer)) {
            Some([numbers, scale]) => (numbers, Some(scale)),
            None => (self.param(weight, layer), None),
        }
    }

    /// Returns a linear layer of a decoding step.
    pub(super) fn decode_matmul(
        &self,
        norm: Option<&NormForward>,
        (weight, layer): (Param, usize),
        matmul: &MatmulForward,
    ) -> DecodeMatmul {
        let (weight, weight_scale) = self.decoded_weight(weight, layer);
        DecodeMatmul { norm: norm.copied(), matmul: MatmulForward { weight, ..*matmul }, weight_scale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_the_smallest_powers_of_two_without_saturation() {
        for (largest, scale) in
            [(448.0, 1.0), (448.5, 2.0), (225.0, 1.0), (224.0, 0.5), (1.75 * 0.0625, 2f32.powi(-12))]
        {
            assert_eq!(scale_of(&[0.0, -largest, largest / 3.0]).to_bits(), f32::to_bits(scale), "{largest}");
        }
        assert_eq!(scale_of(&[0.0]).to_bits(), Bf16Scale::MIN.to_bits());
        assert_eq!(scale_of(&[]).to_bits(), Bf16Scale::MIN.to_bits());
    }
}
