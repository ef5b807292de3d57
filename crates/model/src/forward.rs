//! The forward pass of every decoder.
//!
//! Data flow of a layer (B, T, C):
//! ```text
//! residual ─┬─ ln1 ─ qkv ─ rotary ─ attention ─ attproj ─┐
//!           └────────────────────────────────────────────┴─ residual2 ─┬─ ln2 ─ fc ─ activation ─ fcproj ─┐
//!                                                                      └──────────────────────────────────┴─ residual3
//! ```
//! attproj and fcproj add the residual stream in their epilogue. Layer `l` ends with the ln1 of layer `l + 1`. The [`Descriptor`]
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

use super::decoder::{Decoder, Layer, Norm, NormOf};
use super::descriptor::{self, Positions};
use super::fp8::Fp8;
use super::nvtx::Range;
use super::params::Param;
use super::sharding::LayerHooks;
use engine::ops::{
    AttentionForward, EncoderForward, Epilogue, LayerNormForward, MatmulForward, MatmulShape, NormForward, QkNorm,
    Quantize, RmsNormForward, RotaryForward, RotaryShape,
};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};

/// The eps of the norm of the embeddings in a model with LayerNorm, which has a fixed eps.
const EMBEDDING_EPS: f32 = 1e-5;

impl Decoder {
    /// Computes the batch up to the final norm. The sizes in `layout` must not exceed those of the plan. `hooks` provides the
    /// parameters of each layer.
    pub fn forward(&self, engine: &mut dyn Engine, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Result<()> {
        let rows = layout.b * layout.t;
        let layers: Vec<Layer> = self.layers.iter().map(|layer| layer.rows(rows, &self.descriptor)).collect();
        let final_norm = self.final_norm.rows(rows, self.descriptor.channels);
        let after = |layer: usize| (layer + 1 < layers.len()).then_some(layer + 1);

        let mut residual = self.embed(engine, layout)?;
        hooks.gather_parameters(engine, 0, after(0))?;
        self.norm(engine, NormOf::Attention(0), layers[0].ln1, residual)?;
        for (l, layer) in layers.iter().enumerate() {
            let _range = Range::new(format_args!("layer {l}"));
            self.quantize_gathered_weights(engine, l)?;
            self.attention_layer(engine, l, layer, layout, residual)?;
            hooks.qkv_computed(engine, l, layer.qkv)?;
            self.norm(engine, NormOf::Mlp(l), layer.ln2, layer.residual2)?;
            self.mlp_input(engine, l, layer, false)?;
            self.mlp_output(engine, l, layer)?;
            match after(l) {
                Some(next) => {
                    hooks.gather_parameters(engine, next, None)?;
                    self.norm(engine, NormOf::Attention(next), layers[next].ln1, layer.residual3)?;
                    hooks.gather_parameters(engine, next, after(next))?;
                }
                None => self.norm(engine, NormOf::Head, final_norm, layer.residual3)?,
            }
            residual = layer.residual3;
        }
        Ok(())
    }

    /// Embeds the tokens and returns the residual stream of the first layer.
    fn embed(&self, engine: &mut dyn Engine, layout: BatchLayout) -> Result<Tensor> {
        let (rows, c) = (layout.b * layout.t, self.descriptor.channels);
        let (wte, wpe) = (self.param(Param::Wte, 0), self.optional(self.param_store(), Param::Wpe, 0));
        let encoded = self.encoded.slice(0, rows * c);
        engine.run(EncoderForward { out: encoded, batch: self.batch, layout, wte, wpe, c })?;
        let Some(norm) = self.embedding_norm else { return Ok(encoded) };
        let norm = norm.rows(rows, c);
        self.norm(engine, NormOf::Embedding, norm, encoded)?;
        Ok(norm.out)
    }

    /// Computes qkv, rotary positions, attention and attproj of a layer. `residual` is the layer's input.
    fn attention_layer(
        &self,
        engine: &mut dyn Engine,
        l: usize,
        layer: &Layer,
        layout: BatchLayout,
        residual: Tensor,
    ) -> Result<()> {
        let Layer { qkv, attention, lse, .. } = *layer;
        engine.run(self.qkv(l, layer))?;
        if let Some(Rotation { table, qk_norm, shape }) = self.rotation(l, layer, layout) {
            engine.run(RotaryForward { qkv, table, qk_norm, shape })?;
        }
        let shape = self.descriptor.attention(layout.b, layout.t);
        let quantized = self.fp8_attention(l, attention);
        engine.run(AttentionForward { out: attention, lse, qkv, shape, quantized })?;
        engine.run(self.attproj(l, layer, residual))
    }

    /// Computes fc and the activation of a layer, for [`mlp_output`](Self::mlp_output) or, with `recomputes`, for the backward
    /// pass.
    fn mlp_input(&self, engine: &mut dyn Engine, l: usize, layer: &Layer, recomputes: bool) -> Result<()> {
        let mut operation = self.fc(l, layer);
        if recomputes && let Some(fp8) = &mut operation.fp8 {
            fp8.out = None;
        }
        engine.run(operation)
    }

    /// Computes fcproj of a layer.
    fn mlp_output(&self, engine: &mut dyn Engine, l: usize, layer: &Layer) -> Result<()> {
        engine.run(self.fcproj(l, layer))
    }

    /// Returns the linear layer of queries, keys and values.
    pub(super) fn qkv(&self, l: usize, layer: &Layer) -> MatmulForward {
        let (d, Layer { ln1, qkv, .. }) = (&self.descriptor, *layer);
        let shape = MatmulShape { rows: ln1.rstd.len, c: d.channels, oc: d.qkv_channels() };
        self.linear(l, [Param::Qkvw, Param::Qkvb], qkv, ln1.out, Epilogue::None, shape)
    }

    /// Returns the projection of attention's output, which adds the layer's input `residual`.
    pub(super) fn attproj(&self, l: usize, layer: &Layer, residual: Tensor) -> MatmulForward {
        let (d, Layer { ln1, attention, residual2, .. }) = (&self.descriptor, *layer);
        let shape = MatmulShape { rows: ln1.rstd.len, c: d.attention_channels(), oc: d.channels };
        let epilogue = Epilogue::Residual(residual);
        self.linear(l, [Param::Attprojw, Param::Attprojb], residual2, attention, epilogue, shape)
    }

    /// Returns the first linear layer of the MLP, with its activation.
    pub(super) fn fc(&self, l: usize, layer: &Layer) -> MatmulForward {
        let (d, Layer { ln2, fc, activated, .. }) = (&self.descriptor, *layer);
        let shape = MatmulShape { rows: ln2.rstd.len, c: d.channels, oc: d.fc_channels() };
        let epilogue = Epilogue::Activation(d.activation, fc);
        self.linear(l, [Param::Fcw, Param::Fcb], activated, ln2.out, epilogue, shape)
    }

    /// Returns the second linear layer of the MLP.
    pub(super) fn fcproj(&self, l: usize, layer: &Layer) -> MatmulForward {
        let (d, Layer { residual2, ln2, activated, residual3, .. }) = (&self.descriptor, *layer);
        let shape = MatmulShape { rows: ln2.rstd.len, c: d.mlp_channels, oc: d.channels };
        let epilogue = Epilogue::Residual(residual2);
        self.linear(l, [Param::Fcprojw, Param::Fcprojb], residual3, activated, epilogue, shape)
    }

    /// Returns a linear layer of layer `l` from `inp` to `out`. The model may lack the bias.
    fn linear(
        &self,
        l: usize,
        [weight, bias]: [Param; 2],
        out: Tensor,
        inp: Tensor,
        epilogue: Epilogue,
        shape: MatmulShape,
    ) -> MatmulForward {
        let fp8 = self.fp8_forward(l, weight, shape, out);
        let (weight, bias) = (self.param(weight, l), self.optional(self.param_store(), bias, l));
        MatmulForward { out, inp, weight, bias, epilogue, shape, fp8 }
    }

    /// Recomputes the activations of a layer from its input `residual`, except its output. The losses of FP8 have been counted.
    pub(super) fn recompute_layer(
        &self,
        engine: &mut dyn Engine,
        l: usize,
        layer: &Layer,
        layout: BatchLayout,
        residual: Tensor,
    ) -> Result<()> {
        let model = Self { fp8: self.fp8.map(Fp8::uncounted), ..self.clone() };
        model.norm(engine, NormOf::Attention(l), layer.ln1, residual)?;
        model.attention_layer(engine, l, layer, layout, residual)?;
        model.norm(engine, NormOf::Mlp(l), layer.ln2, layer.residual2)?;
        model.mlp_input(engine, l, layer, true)
    }

    /// Normalizes `inp` (rows, C) in the forward pass. Quantizes the input of a linear layer in FP8.
    pub(super) fn norm(&self, engine: &mut dyn Engine, of: NormOf, norm: Norm, inp: Tensor) -> Result<()> {
        run_norm(engine, &self.norm_of(of, norm, inp, self.fp8_norm(of, norm.out)))
    }

    /// Normalizes `inp` (rows, C) again, for the gradient of the weight of the linear layer that follows.
    pub(super) fn recompute_norm(&self, engine: &mut dyn Engine, of: NormOf, norm: Norm, inp: Tensor) -> Result<()> {
        run_norm(engine, &self.norm_of(of, norm, inp, self.fp8_recomputed_norm(of, norm.out)))
    }

    /// Returns the norm of `inp` (rows, C).
    pub(super) fn norm_of(&self, of: NormOf, norm: Norm, inp: Tensor, quantized: Option<Quantize>) -> NormForward {
        let (c, params) = (self.descriptor.channels, self.norm_params(self.param_store(), of));
        let Norm { out, mean, rstd } = norm;
        if let (Some(mean), Some(weight), Some(bias)) = (mean, params.weight, params.bias) {
            return NormForward::LayerNorm(LayerNormForward { out, mean, rstd, inp, weight, bias, c, quantized });
        }
        let eps = self.descriptor.norm.eps().unwrap_or(EMBEDDING_EPS);
        NormForward::RmsNorm(RmsNormForward { out, rstd, inp, weight: params.weight, c, eps, quantized })
    }

    /// Returns the rotation of a layer's queries and keys, or `None` if positions are learned.
    pub(super) fn rotation(&self, l: usize, layer: &Layer, layout: BatchLayout) -> Option<Rotation> {
        let d = &self.descriptor;
        let (Positions::Rotary(rotary), Some(table)) = (d.positions, self.rotary_table) else { return None };
        let qk_norm = d.qk_norm.zip(layer.qk_saved).map(|(norm, saved)| {
            let descriptor::QkNorm { eps, weights, gain } = norm;
            let weights = weights.then(|| [self.param(Param::QNormw, l), self.param(Param::KNormw, l)]);
            QkNorm { saved, weights, eps, gain }
        });
        let shape = RotaryShape { attention: d.attention(layout.b, layout.t), pairs: rotary.pairs };
        Some(Rotation { table, qk_norm, shape })
    }
}

fn run_norm(engine: &mut dyn Engine, norm: &NormForward) -> Result<()> {
    match *norm {
        NormForward::LayerNorm(op) => engine.run(op),
        NormForward::RmsNorm(op) => engine.run(op),
    }
}

/// The operands that the rotation of queries and keys and its gradient share.
pub(super) struct Rotation {
    pub(super) table: Tensor,
    pub(super) qk_norm: Option<QkNorm>,
    pub(super) shape: RotaryShape,
}
