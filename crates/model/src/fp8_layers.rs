//! The operations of linear layers in FP8: what they quantize, and the operands that they read.

use super::decoder::{Decoder, NormOf};
use super::fp8::{Buffers, WEIGHTS};
use super::params::Param;
use engine::ops::{Fp8Backward, Fp8Format, Fp8Forward, MatmulShape, Quantize, Scaling};
use engine::tensor::Tensor;
use engine::{Engine, Result};

impl Decoder {
    /// Quantizes the weights of all layers, unless ranks shard them.
    pub(super) fn quantize_whole_weights(&self, engine: &mut dyn Engine) -> Result<()> {
        let layers = if self.zero.shards_parameters() { 0 } else { self.descriptor.layers };
        (0..layers).try_for_each(|layer| self.quantize_weights(engine, layer))
    }

    /// Quantizes the weights of a layer, if ranks shard the parameters and this rank has just gathered them.
    pub(super) fn quantize_gathered_weights(&self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        if self.zero.shards_parameters() { self.quantize_weights(engine, layer) } else { Ok(()) }
    }

    fn quantize_weights(&self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        let Some(fp8) = &self.fp8 else { return Ok(()) };
        WEIGHTS.into_iter().try_for_each(|weight| {
            let [out, transposed] = fp8.weight(&self.descriptor, layer, weight).map(Some);
            let (oc, c) = weight.shape(&self.descriptor);
            engine.run(Quantize {
                out,
                transposed,
                inp: self.param(weight, layer),
                scale: fp8.weights.slot(layer, weight, fp8.counting),
                scaling: Scaling::Current,
                format: Fp8Format::E4m3,
                shape: [oc, c],
                column_sums: None,
            })
        })
    }

    /// Returns the quantization of a norm's output `inp`, if it is the input of a linear layer in FP8.
    pub(super) fn fp8_norm(&self, of: NormOf, inp: Tensor) -> Option<Quantize> {
        let (fp8, d) = (self.fp8.as_ref()?, &self.descriptor);
        let (weight, layer) = match of {
            NormOf::Attention(layer) => (Param::Qkvw, layer),
            NormOf::Mlp(layer) => (Param::Fcw, layer),
            NormOf::Embedding | NormOf::Head => return None,
        };
        let (rows, c) = (inp.len / d.channels, d.channels);
        Some(Quantize {
            out: Some(fp8.buffers.narrow.slice(0, inp.len)),
            transposed: fp8.kept_input(d, layer, weight, [rows, c]),
            inp,
            scale: fp8.inputs.slot(layer, weight, fp8.counting),
            scaling: fp8.scaling,
            format: Fp8Format::E4m3,
            shape: [rows, c],
            column_sums: None,
        })
    }

    /// Returns the quantization of attention's output `inp`, the input of attproj. The backward pass quantizes its transpose.
    pub(super) fn fp8_attention(&self, layer: usize, inp: Tensor) -> Option<Quantize> {
        let (fp8, c) = (self.fp8.as_ref()?, self.descriptor.attention_channels());
        Some(Quantize {
            out: Some(fp8.buffers.narrow.slice(0, inp.len)),
            transposed: None,
            inp,
            scale: fp8.inputs.slot(layer, Param::Attprojw, fp8.counting),
            scaling: fp8.scaling,
            format: Fp8Format::E4m3,
            shape: [inp.len / c, c],
            column_sums: None,
        })
    }

    /// Returns the quantization of a norm's output that the backward pass recomputes for the gradient of a weight.
    pub(super) fn fp8_recomputed_norm(&self, of: NormOf, inp: Tensor) -> Option<Quantize> {
        let forward = self.fp8_norm(of, inp)?;
        let transposed = self.fp8.as_ref()?.buffers.inp_transposed.slice(0, inp.len);
        Some(Quantize { transposed: Some(transposed), scaling: Scaling::Given, ..forward })
    }

    /// Returns the FP8 operands of a linear layer's forward pass. That of fc also quantizes `out`, the input of fcproj.
    pub(super) fn fp8_forward(
        &self,
        layer: usize,
        weight: Param,
        shape: MatmulShape,
        out: Tensor,
    ) -> Option<Fp8Forward> {
        let (fp8, d) = (self.fp8.as_ref()?, &self.descriptor);
        let activated = [shape.rows, d.mlp_channels];
        let (narrow, wide) = (fp8.buffers.narrow, fp8.buffers.wide.slice(0, shape.rows * d.mlp_channels));
        let next = (weight == Param::Fcw).then(|| Quantize {
            out: Some(wide),
            transposed: fp8.kept_input(d, layer, Param::Fcprojw, activated),
            inp: out,
            scale: fp8.inputs.slot(layer, Param::Fcprojw, fp8.counting),
            scaling: fp8.scaling,
            format: Fp8Format::E4m3,
            shape: activated,
            column_sums: None,
        });
        Some(Fp8Forward {
            inp: if weight == Param::Fcprojw { wide } else { narrow.slice(0, shape.rows * shape.c) },
            inp_scale: fp8.inputs.slot(layer, weight, fp8.counting).scale,
            out: next,
            weight: fp8.weight(d, layer, weight)[0],
            weight_scale: fp8.weights.slot(layer, weight, false).scale,
            accumulation: fp8.options.accumulation,
        })
    }

    /// Returns the FP8 operands of a linear layer's backward pass. That of fcproj also quantizes `dinp`, the gradient of fc's
    /// output, and adds its column sums to `dinp_sums`, the gradient of fc's bias.
    pub(super) fn fp8_backward(
        &self,
        layer: usize,
        weight: Param,
        shape: MatmulShape,
        dinp: Tensor,
        dinp_sums: Option<Tensor>,
    ) -> Option<Fp8Backward> {
        let (fp8, d) = (self.fp8.as_ref()?, &self.descriptor);
        let Buffers { narrow, wide, dout_transposed, inp_transposed } = fp8.buffers;
        let (inp_len, dout_len) = (shape.rows * shape.c, shape.rows * shape.oc);
        let kept = fp8.kept_input(d, layer, weight, [shape.rows, shape.c]);
        let is_normed = matches!(weight, Param::Qkvw | Param::Fcw);
        let next_len = shape.rows * d.fc_channels();
        let next = (weight == Param::Fcprojw).then(|| Quantize {
            out: Some(wide.slice(0, next_len)),
            transposed: Some(dout_transposed.slice(0, next_len)),
            inp: dinp,
            scale: fp8.gradients.slot(layer, Param::Fcw, fp8.counting),
            scaling: fp8.scaling,
            format: fp8.options.gradients,
            shape: [shape.rows, d.fc_channels()],
            column_sums: dinp_sums,
        });
        let dout = if is_normed { wide } else { narrow };
        Some(Fp8Backward {
            dout: [dout.slice(0, dout_len), dout_transposed.slice(0, dout_len)],
            dout_is_quantized: weight == Param::Fcw,
            dout_scale: fp8.gradients.slot(layer, weight, fp8.counting),
            scaling: fp8.scaling,
            format: fp8.options.gradients,
            inp_transposed: kept.unwrap_or_else(|| inp_transposed.slice(0, inp_len)),
            // Norms also quantize the outputs that they recompute.
            inp_is_quantized: kept.is_some() || is_normed,
            inp_scale: fp8.inputs.slot(layer, weight, fp8.counting),
            weight_transposed: fp8.weight(d, layer, weight)[1],
            weight_scale: fp8.weights.slot(layer, weight, false).scale,
            accumulation: fp8.options.accumulation,
            dinp: next,
        })
    }
}
