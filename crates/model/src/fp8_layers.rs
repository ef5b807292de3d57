//! The operations of linear layers in FP8: what they quantize, and the operands that they read.

use super::decoder::{Decoder, NormBuffers};
use super::params::{Input, Output, Param, ParamKind};
use engine::ops::{Fp8Backward, Fp8Format, Fp8Forward, MatmulShape, Quantize, Scaling};
use engine::tensor::Tensor;
use engine::{Engine, Result};

impl Decoder {
    /// Quantizes the weights of all layers and of the head, unless each pass does that.
    pub(super) fn quantize_whole_weights(&self, engine: &mut dyn Engine) -> Result<()> {
        let layers = if self.keeps_fp8_weights() { self.descriptor.layers } else { 0 };
        (0..layers).try_for_each(|layer| self.quantize_weights(engine, layer))?;
        if self.copies_layers() && self.frozen.is_none() { Ok(()) } else { self.quantize_head(engine) }
    }

    /// Quantizes the weights of a layer that a pass enters, unless those of all layers are kept.
    pub(super) fn quantize_weights_of_pass(&self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        if self.keeps_fp8_weights() { Ok(()) } else { self.quantize_weights(engine, layer) }
    }

    fn keeps_fp8_weights(&self) -> bool {
        self.fp8.is_none_or(|fp8| fp8.holds_all_layers)
    }

    fn quantize_weights(&self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        if self.fp8.is_none() {
            return Ok(());
        }
        Param::linear(&self.descriptor)
            .try_for_each(|weight| self.quantize_weight(engine, layer, weight, self.param(weight, layer)))
    }

    /// Quantizes the weight `inp` of a linear layer.
    fn quantize_weight(&self, engine: &mut dyn Engine, layer: usize, weight: Param, inp: Tensor) -> Result<()> {
        let Some(fp8) = &self.fp8 else { return Ok(()) };
        let [out, transposed] = fp8.weight(&self.descriptor, layer, weight).map(Some);
        let (oc, c) = weight.linear_shape(&self.descriptor);
        let scale = fp8.slot(fp8.weights, &self.descriptor, layer, weight);
        engine.run(Quantize {
            out,
            transposed,
            matrices: weight.experts(&self.descriptor),
            ..Quantize::new(inp, [oc, c], Fp8Format::E4m3, scale, Scaling::Current)
        })
    }

    /// Writes the frozen weights of a model with adapters. `read` returns the values of a tensor of a layer, which may lack the padding of the
    /// vocabulary.
    pub fn load_frozen(
        &self,
        engine: &mut dyn Engine,
        mut read: impl FnMut(Param, usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Some(frozen) = &self.frozen else { return Ok(()) };
        let base = self.descriptor.base();
        for (param, layer) in frozen.layout.file_order() {
            let mut values = read(param, layer)?;
            values.resize(param.len(&base), 0.0);
            self.weights().write(engine, param, layer, &values)?;
        }
        let Some(staging) = self.fp8.and_then(|fp8| fp8.staging()) else { return Ok(()) };
        for layer in 0..base.layers {
            for weight in Param::linear(&base) {
                let staged = staging.slice(0, weight.len(&base));
                engine.write(staged, &read(weight, layer)?)?;
                self.quantize_weight(engine, layer, weight, staged)?;
            }
        }
        Ok(())
    }

    /// Returns a hash of the frozen weights, and their type.
    pub fn frozen_digest(&self, engine: &mut dyn Engine) -> Result<Option<String>> {
        let Some(frozen) = &self.frozen else { return Ok(None) };
        let mut sum = engine.digest(frozen.params, 0)?;
        let fp8 = self.fp8.filter(|fp8| fp8.staging().is_some());
        if let Some(fp8) = fp8 {
            sum = sum.wrapping_add(engine.digest(fp8.weights_copy(), 1 << 40)?);
        }
        let dtype = if fp8.is_some() { "fp8" } else { frozen.params.dtype.name() };
        Ok(Some(format!("{sum:016x} {dtype}")))
    }

    /// Returns the quantization of a norm's output, if it is the input of a linear layer in FP8.
    pub(super) fn fp8_norm(&self, norm: &NormBuffers) -> Option<Quantize> {
        self.fp8_input(norm.layer, norm.feeds?, norm.out)
    }

    /// Returns the quantization of a norm's output that the backward pass recomputes for the gradient of a weight.
    pub(super) fn fp8_recomputed_norm(&self, norm: &NormBuffers) -> Option<Quantize> {
        let forward = self.fp8_norm(norm)?;
        let transposed = self.fp8.as_ref()?.buffers.inp_transposed.slice(0, norm.out.len);
        Some(Quantize { transposed: Some(transposed), scaling: Scaling::Given, ..forward })
    }

    /// Returns the quantization of `inp` (rows, C), the input of a linear layer, by the operation that computes it. If the transposed copy
    /// is not kept, the backward pass makes it. The inputs of a frozen model are quantized afterwards.
    pub(super) fn fp8_input(&self, layer: usize, weight: Param, inp: Tensor) -> Option<Quantize> {
        if self.frozen.is_some() { None } else { self.quantized_input(layer, weight, inp) }
    }

    /// Returns the quantization of `inp` (rows, C), the input of a linear layer.
    pub(super) fn quantized_input(&self, layer: usize, weight: Param, inp: Tensor) -> Option<Quantize> {
        let (fp8, d) = (self.fp8.as_ref().filter(|_| weight.kind().is_linear())?, &self.descriptor);
        let (_, c) = weight.shape(d);
        let shape = [inp.len / c, c];
        let scale = fp8.slot(fp8.inputs, d, layer, weight);
        Some(Quantize {
            out: Some(fp8.buffers.input(weight).slice(0, inp.len)),
            transposed: fp8.kept_input(d, layer, weight, shape),
            ..Quantize::new(inp, shape, Fp8Format::E4m3, scale, fp8.scaling)
        })
    }

    /// Returns the quantization of an input that is not kept, for the gradient of the weight.
    pub(super) fn fp8_unkept_input(&self, layer: usize, weight: Param, inp: Tensor) -> Option<Quantize> {
        let forward = self.quantized_input(layer, weight, inp).filter(|forward| forward.transposed.is_none())?;
        let transposed = self.fp8.as_ref()?.buffers.inp_transposed.slice(0, inp.len);
        Some(Quantize { out: None, transposed: Some(transposed), scaling: Scaling::Given, ..forward })
    }

    /// Returns the quantization of `dout` (rows, OC), the gradient of a linear layer's output, by the operation that computes it. That
    /// operation adds the column sums to `dbias`.
    pub(super) fn fp8_output_gradient(
        &self,
        layer: usize,
        weight: Param,
        dout: Tensor,
        dbias: Option<Tensor>,
    ) -> Option<Quantize> {
        let (fp8, d) = (self.fp8.as_ref().filter(|_| self.frozen.is_none())?, &self.descriptor);
        let (oc, _) = weight.linear_shape(d);
        let [out, transposed] = fp8.buffers.output_gradient(weight, dout.len).map(Some);
        let scale = fp8.slot(fp8.gradients, d, layer, weight);
        Some(Quantize {
            out,
            transposed,
            column_sums: dbias,
            ..Quantize::new(dout, [dout.len / oc, oc], Fp8Format::E5m2, scale, fp8.scaling)
        })
    }

    /// Returns the FP8 operands of a linear layer's forward pass.
    pub(super) fn fp8_forward(&self, layer: usize, weight: Param, shape: MatmulShape) -> Option<Fp8Forward> {
        let (fp8, d) = (self.fp8.as_ref().filter(|_| weight.kind().is_linear())?, &self.descriptor);
        Some(Fp8Forward {
            inp: fp8.buffers.input(weight).slice(0, shape.rows * shape.c),
            inp_scale: fp8.slot(fp8.inputs, d, layer, weight).scale,
            out: None,
            weight: fp8.weight(d, layer, weight)[0],
            weight_scale: fp8.slot(fp8.weights, d, layer, weight).scale,
            accumulation: fp8.options.accumulation,
        })
    }

    /// Returns the FP8 operands of a linear layer's backward pass.
    pub(super) fn fp8_backward(&self, layer: usize, weight: Param, shape: MatmulShape) -> Option<Fp8Backward> {
        let (fp8, d) = (self.fp8.as_ref()?, &self.descriptor);
        let ParamKind::Linear(input, output) = weight.kind() else { return None };
        let kept = fp8.kept_input(d, layer, weight, [shape.rows, shape.c]);
        Some(Fp8Backward {
            dout: fp8.buffers.output_gradient(weight, shape.rows * shape.oc),
            // By the backward pass of the linear layer that reads the activation.
            dout_is_quantized: output == Output::Activation && self.frozen.is_none(),
            dout_scale: fp8.slot(fp8.gradients, d, layer, weight),
            dout_is_of_logits: false,
            scaling: fp8.scaling,
            inp_transposed: kept.unwrap_or_else(|| {
                let transposed = fp8.buffers.inp_transposed;
                transposed.slice(0, transposed.len.min(shape.rows * shape.c))
            }),
            // Norms also quantize the outputs that they recompute.
            inp_is_quantized: kept.is_some() || input == Input::Norm,
            inp_scale: fp8.slot(fp8.inputs, d, layer, weight),
            weight_transposed: fp8.weight(d, layer, weight)[1],
            weight_scale: fp8.slot(fp8.weights, d, layer, weight).scale,
            accumulation: fp8.options.accumulation,
            dinp: None,
        })
    }
}
