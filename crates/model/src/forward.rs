//! The forward pass of every decoder.
//!
//! A layer is a list of sub-layers (`sublayers/`). Data flow of a layer with attention and an MLP (B, T, C):
//! ```text
//! residual ─┬─ ln1 ─ qkv ─ rotary ─ attention ─ attproj ─┐
//!           └────────────────────────────────────────────┴─ residual2 ─┬─ ln2 ─ fc ─ activation ─ fcproj ─┐
//!                                                                      └──────────────────────────────────┴─ residual3
//! ```
//! attproj and fcproj add the residual stream in their epilogue. A model with experts has them in place of the MLP. The [`Descriptor`]
//! selects the operations:
//!
//! | | GPT-2 | Llama 3 | Qwen3 |
//! |---|---|---|---|
//! | norms | LayerNorm | RMSNorm | RMSNorm |
//! | positions | wpe | rotary | rotary, after a norm of queries and keys |
//! | key-value heads | NH | NH / 4 | NH / 2 |
//! | activation | GELU of 4 C | SwiGLU of F | SwiGLU of F |
//!
//! [`Descriptor`]: super::Descriptor

use super::decoder::{Decoder, ForwardPass, Layer, NormBuffers, Rows};
use super::fp8::Fp8;
use super::nvtx::Range;
use super::params::Param;
use super::sharding::LayerHooks;
use engine::ops::{EncoderForward, Epilogue, MatmulForward, MatmulShape, NormForward, Quantize};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};

/// The eps of the norm of the embeddings in a model with LayerNorm, which has a fixed eps.
const EMBEDDING_EPS: f32 = 1e-5;

impl Decoder {
    /// Computes the batch up to the final norm. The sizes in `layout` must not exceed those of the plan. `hooks` provides the
    /// parameters of each layer.
    pub fn forward(&self, engine: &mut dyn Engine, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Result<()> {
        self.forward_after(engine, 0, layout, hooks)
    }

    /// Computes a batch that continues a sequence of `past` tokens, whose keys and values [`LayerHooks::qkv_computed`] provides. With `past`
    /// tokens, the batch must have one sequence, and the plan must have room for both.
    pub fn forward_after(
        &self,
        engine: &mut dyn Engine,
        past: usize,
        layout: BatchLayout,
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let rows = layout.b * layout.t;
        let layers = self.layers(Rows { own: rows, past, common: hooks.common_rows(rows)? });
        let after = |layer: usize| (layer + 1 < layers.len()).then_some(layer + 1);

        hooks.gather_embeddings(engine)?;
        let first = self.embed(engine, past, layout)?;
        let (mut residual, mut middle) = (first, first);
        let pass = ForwardPass { model: self, layout, past };
        hooks.gather_parameters(engine, 0, after(0))?;
        for (l, layer) in layers.iter().enumerate() {
            let _range = Range::new(format_args!("layer {l}"));
            residual = self.enter_layer(engine, l, [residual, first])?;
            for (i, sublayer) in layer.iter().enumerate() {
                self.norm(engine, &sublayer.norm(), residual)?;
                if i == 0 {
                    hooks.gather_parameters(engine, l, after(l))?;
                    self.quantize_weights_of_pass(engine, l)?;
                }
                sublayer.forward(engine, &pass, hooks, residual)?;
                residual = sublayer.output();
            }
            self.leave_layer(engine, l, residual)?;
            if self.descriptor.backout_layer() == Some(l) {
                middle = residual;
            }
            if let Some(next) = after(l) {
                hooks.gather_parameters(engine, next, None)?;
                self.keep_output(engine, hooks, l, residual)?;
            }
        }
        let residual = self.leave_layers(engine, residual, middle)?;
        self.norm(engine, &self.final_norm.rows(rows, self.descriptor.channels), residual)
    }

    /// Embeds the tokens and returns the residual stream of the first layer.
    fn embed(&self, engine: &mut dyn Engine, past: usize, layout: BatchLayout) -> Result<Tensor> {
        let embedded = self.embed_tokens(engine, past, layout)?;
        let before = self.stream.before().filter(|_| past > 0);
        let before = before.map(|before| before.slice(0, layout.b * self.descriptor.channels));
        self.smear(engine, layout, embedded, before)
    }

    /// Embeds the tokens of the batch, which follow `past` ones, with their norm if there is one.
    pub(super) fn embed_tokens(&self, engine: &mut dyn Engine, past: usize, layout: BatchLayout) -> Result<Tensor> {
        let (rows, c) = (layout.b * layout.t, self.descriptor.channels);
        let (wte, wpe) = (self.param(Param::Wte, 0), self.optional(Param::Wpe, 0));
        let wpe = wpe.map(|wpe| wpe.slice(past * c, wpe.len - past * c));
        let encoded = self.encoded.slice(0, rows * c);
        engine.run(EncoderForward { out: encoded, batch: self.batch, layout, wte, wpe, c })?;
        self.norm_embeddings(engine, encoded)
    }

    /// Normalizes the embeddings of tokens (rows, C), if the model does that.
    pub(super) fn norm_embeddings(&self, engine: &mut dyn Engine, encoded: Tensor) -> Result<Tensor> {
        let Some(norm) = self.embedding_norm else { return Ok(encoded) };
        let norm = norm.rows(encoded.len / self.descriptor.channels, self.descriptor.channels);
        self.norm(engine, &norm, encoded)?;
        Ok(norm.out)
    }

    /// Returns a linear layer of layer `l` from `inp` (rows, C) to `out` (rows, OC). The model may lack the bias.
    pub(super) fn linear(
        &self,
        l: usize,
        [weight, bias]: [Param; 2],
        out: Tensor,
        inp: Tensor,
        epilogue: Epilogue,
    ) -> MatmulForward {
        let shape = self.linear_shape(weight, inp);
        let fp8 = self.fp8_forward(l, weight, shape);
        let (weight, bias) = (self.param(weight, l), self.optional(bias, l));
        MatmulForward { bias, epilogue, fp8, ..MatmulForward::new([out, inp, weight], shape) }
    }

    /// Returns the sizes of a linear layer with the input `inp` (rows, C).
    pub(super) fn linear_shape(&self, weight: Param, inp: Tensor) -> MatmulShape {
        let (oc, c) = weight.linear_shape(&self.descriptor);
        MatmulShape { rows: inp.len / c, c, oc }
    }

    /// Recomputes the activations of a layer, except its output, from the residual stream before it and the first one. The losses of FP8
    /// have been counted.
    pub(super) fn recompute_layer(
        &self,
        engine: &mut dyn Engine,
        hooks: &mut dyn LayerHooks,
        (l, layer): (usize, &Layer),
        layout: BatchLayout,
        [residual, first]: [Tensor; 2],
    ) -> Result<()> {
        let mut residual = self.enter_layer(engine, l, [residual, first])?;
        let model = Self { fp8: self.fp8.map(Fp8::uncounted), ..self.clone() };
        let pass = ForwardPass { model: &model, layout, past: 0 };
        for (i, sublayer) in layer.iter().enumerate() {
            model.norm(engine, &sublayer.norm(), residual)?;
            sublayer.recompute(engine, &pass, hooks, residual, i + 1 == layer.len())?;
            residual = sublayer.output();
        }
        Ok(())
    }

    /// Normalizes `inp` (rows, C) in the forward pass. Quantizes the input of a linear layer in FP8.
    pub(super) fn norm(&self, engine: &mut dyn Engine, norm: &NormBuffers, inp: Tensor) -> Result<()> {
        engine.run(self.norm_of(norm, inp, self.fp8_norm(norm)))
    }

    /// Normalizes `inp` (rows, C) again, for the gradient of the weight of the linear layer that follows.
    pub(super) fn recompute_norm(&self, engine: &mut dyn Engine, norm: &NormBuffers, inp: Tensor) -> Result<()> {
        engine.run(self.norm_of(norm, inp, self.fp8_recomputed_norm(norm)))
    }

    /// Returns the norm of `inp` (rows, C).
    pub(super) fn norm_of(&self, norm: &NormBuffers, inp: Tensor, quantized: Option<Quantize>) -> NormForward {
        let (c, params) = (self.descriptor.channels, self.norm_params(norm));
        let NormBuffers { out, mean, rstd, .. } = *norm;
        let eps = self.descriptor.norm.eps().unwrap_or(EMBEDDING_EPS);
        NormForward { out, mean, rstd, inp, weight: params.weight, bias: params.bias, c, eps, quantized }
    }
}
