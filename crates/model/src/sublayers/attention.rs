//! Attention: qkv, rotary positions with a norm of queries and keys, attention, attproj.

use crate::activations::Activations;
use crate::decoder::{BackwardPass, Cache, DecodePass, Decoder, ForwardPass, NormBuffers, Rows, SubLayer};
use crate::descriptor::{Descriptor, Positions, QkNorm};
use crate::params::Param;
use crate::recompute::Recompute;
use crate::sharding::LayerHooks;
use engine::ops::{
    AttentionBackward, AttentionForward, AttentionMask, DecodeAttention, EncoderBackward, Epilogue, GateInputBackward,
    HeadNorm, MatmulForward, RotaryBackward, RotaryForward, Rotation, RowTokens, Slot, ValueEmbed, ValueEmbedBackward,
    ValueGate,
};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Result};
use std::sync::Arc;

/// The activations of attention in one layer.
#[derive(Clone, Copy, Debug)]
struct Attention {
    layer: usize,
    ln1: NormBuffers,
    /// (B, T, NH + 2 KV, HS), in generation after the rows of the past
    qkv: Tensor,
    /// (B, T, NH + KV, HS): queries and keys before their norm
    qk_saved: Option<Tensor>,
    /// (B, T, NH, HS): what attproj reads, in generation after the rows of the past
    attended: Tensor,
    /// (B, NH, T) f32
    lse: Tensor,
    /// (B, T, C)
    residual2: Tensor,
}

/// Plans the activations of attention in all layers. Returns the sub-layer of each layer.
pub fn plan(activations: &mut Activations, d: &Descriptor) -> impl Fn(usize) -> Arc<dyn SubLayer> + use<> {
    let (kept, dtype) = (activations.kept, activations.dtype);
    let ln1 = activations.norm("ln1", [Param::Ln1w, Param::Ln1b], Param::Qkvw);
    let qkv = activations.add("qkv", kept, d.qkv_channels(), dtype);
    let qk_channels = qk_channels(d);
    let qk_saved = d.qk_norm.map(|_| activations.add("q and k before norm", kept, qk_channels, dtype));
    let attended = activations.add("attention", kept, d.attention_channels(), dtype);
    let lse = activations.add_transposed("attention lse", kept, d.heads, DType::F32);
    let residual2 = activations.add("residual2", kept, d.channels, dtype);
    move |layer| {
        let part = |tensor: Tensor| tensor.part(layer % kept, kept);
        Arc::new(Attention {
            layer,
            ln1: ln1(layer),
            qkv: part(qkv),
            qk_saved: qk_saved.map(part),
            attended: part(attended),
            lse: part(lse),
            residual2: part(residual2),
        })
    }
}

/// Returns the channels of queries and keys.
fn qk_channels(d: &Descriptor) -> usize {
    (d.heads + d.kv_heads) * d.head_size
}

impl Attention {
    /// Returns the rotation of queries and keys, or `None` if positions are learned.
    fn rotation(&self, model: &Decoder) -> Option<Rotation> {
        let d = &model.descriptor;
        let (Positions::Rotary(rotary), Some(table)) = (d.positions, model.rotary_table) else { return None };
        let qk_norm = d.qk_norm.map(|QkNorm { eps, weights, gain, scope }| {
            let weights = weights.then(|| [Param::QNormw, Param::KNormw].map(|param| model.param(param, self.layer)));
            HeadNorm { weights, eps, gain, scope }
        });
        Some(Rotation { table, pairs: rotary.pairs, qk_norm })
    }

    /// Returns what hides keys from `t` queries besides the causal mask.
    fn mask(&self, model: &Decoder, layout: BatchLayout, t: usize) -> AttentionMask {
        let window = model.descriptor.window(self.layer, t);
        AttentionMask { documents: layout.documents_of(model.batch), window }
    }

    /// Returns the linear layer that computes `qkv`, the rows of the batch.
    fn qkv(&self, model: &Decoder, qkv: Tensor) -> MatmulForward {
        model.linear(self.layer, [Param::Qkvw, Param::Qkvb], qkv, self.ln1.out, Epilogue::None)
    }

    /// Returns the linear layer that reads `attended`, the rows of the batch.
    fn attproj(&self, model: &Decoder, attended: Tensor, residual: Tensor) -> MatmulForward {
        let (params, epilogue) = ([Param::Attprojw, Param::Attprojb], Epilogue::Residual(residual));
        model.linear(self.layer, params, self.residual2, attended, epilogue)
    }

    /// Returns the table of the layer's value embedding and its gate, which reads the sub-layer's input `residual`, if there is one.
    fn value_embedding(&self, model: &Decoder, residual: Tensor) -> Option<(Tensor, ValueGate)> {
        let (d, param) = (&model.descriptor, |param| model.param(param, self.layer));
        d.has_value_embedding(self.layer).then(|| {
            let (rstd, norm_weight) = (self.ln1.rstd, model.norm_params(&self.ln1).weight);
            let gate = ValueGate { inp: residual, rstd, norm_weight, weight: param(Param::ValueGate), c: d.channels };
            (param(Param::ValueTable), gate)
        })
    }

    /// Computes queries, keys and values of the batch from the output of the norm and the sub-layer's input `residual`.
    fn project(&self, engine: &mut dyn Engine, pass: &ForwardPass, residual: Tensor) -> Result<()> {
        let (model, d) = (pass.model, &pass.model.descriptor);
        let qkv = after(self.qkv, pass.past * d.qkv_channels());
        model.run_linear(engine, self.layer, Param::Qkvw, &self.qkv(model, qkv))?;
        if let Some((table, gate)) = self.value_embedding(model, residual) {
            let shape = d.attention(pass.layout.b, pass.layout.t);
            engine.run(ValueEmbed { qkv, table, tokens: tokens(model, pass.layout), gate, shape })?;
        }
        let Some(rotation) = self.rotation(model) else { return Ok(()) };
        let rotation = Rotation { table: after(rotation.table, pass.past * d.head_size), ..rotation };
        let shape = d.attention(pass.layout.b, pass.layout.t);
        engine.run(RotaryForward { qkv, saved: self.qk_saved, rotation, shape })
    }

    /// Computes the output from queries, keys and values. The output of the `last` sub-layer that is recomputed is not needed.
    fn attend(&self, engine: &mut dyn Engine, pass: &ForwardPass, residual: Tensor, last: bool) -> Result<()> {
        let Self { qkv, attended: out, lse, .. } = *self;
        let (model, past, t) = (pass.model, pass.past, pass.past + pass.layout.t);
        let shape = model.descriptor.attention(pass.layout.b, t);
        let attended = after(out, past * model.descriptor.attention_channels());
        let quantized = model.fp8_input(self.layer, Param::Attprojw, attended);
        let mask = self.mask(model, pass.layout, t);
        engine.run(AttentionForward { out, lse, qkv, shape, first_query: past, mask, quantized })?;
        if last {
            model.recompute_adapter(engine, self.layer, Param::Attprojw, attended)
        } else {
            model.run_linear(engine, self.layer, Param::Attprojw, &self.attproj(model, attended, residual))
        }
    }
}

/// Returns the tokens of the batch.
fn tokens(model: &Decoder, layout: BatchLayout) -> RowTokens {
    RowTokens { tokens: layout.tensor(model.batch, layout.inputs()), stride: 1 }
}

/// Returns a tensor without its first elements.
fn after(tensor: Tensor, elements: usize) -> Tensor {
    tensor.slice(elements, tensor.len - elements)
}

impl SubLayer for Attention {
    fn rows(&self, Rows { own: rows, past, .. }: Rows, d: &Descriptor) -> Arc<dyn SubLayer> {
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        Arc::new(Self {
            layer: self.layer,
            ln1: self.ln1.rows(rows, d.channels),
            qkv: self.qkv.slice(0, (past + rows) * d.qkv_channels()),
            qk_saved: self.qk_saved.map(|saved| of(saved, qk_channels(d))),
            attended: self.attended.slice(0, (past + rows) * d.attention_channels()),
            lse: self.lse.slice(0, (past + rows) * d.heads),
            residual2: of(self.residual2, d.channels),
        })
    }

    fn norm(&self) -> NormBuffers {
        self.ln1
    }

    fn output(&self) -> Tensor {
        self.residual2
    }

    fn output_bias(&self) -> Param {
        Param::Attprojb
    }

    fn forward(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        self.project(engine, pass, residual)?;
        hooks.qkv_computed(engine, self.layer, self.qkv)?;
        self.attend(engine, pass, residual, false)
    }

    fn recompute(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        _hooks: &mut dyn LayerHooks,
        residual: Tensor,
        last: bool,
    ) -> Result<()> {
        self.project(engine, pass, residual)?;
        self.attend(engine, pass, residual, last)
    }

    fn backward(
        &self,
        engine: &mut dyn Engine,
        pass: &BackwardPass,
        _hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        let Self { layer, ref ln1, qkv, attended, lse, .. } = *self;
        let (model, d) = (pass.model, &pass.model.descriptor);
        let dqkv = pass.dwide.slice(0, qkv.len);
        let dbias = pass.output_bias_gradient(self);
        let attproj = pass.linear(layer, Param::Attprojw, [pass.dattention, pass.dresidual], attended, dbias);
        pass.run_linear(engine, layer, Param::Attprojw, &attproj)?;
        let (dout, shape) = (pass.dattention, d.attention(pass.layout.b, pass.layout.t));
        let mask = self.mask(model, pass.layout, pass.layout.t);
        engine.run(AttentionBackward { dqkv, dout, qkv, out: attended, lse, shape, mask })?;
        if let Some(rotation) = self.rotation(model) {
            let weights = rotation.qk_norm.and_then(|norm| norm.weights);
            let [dq, dk] = [(Param::QNormw, 0), (Param::KNormw, 1)]
                .map(|(param, place)| pass.vector_gradient(param, layer, place));
            let dweights = weights.and(dq.zip(dk)).map(|(dq, dk)| [dq, dk]);
            engine.run(RotaryBackward { dqkv, saved: self.qk_saved, dweights, rotation, shape })?;
        }
        let value_embedding = self.value_embedding(model, residual).zip(pass.stream.gates);
        if let Some(((table, gate), dgates)) = value_embedding {
            let width = d.kv_heads * d.head_size;
            let rows = pass.layout.b * pass.layout.t;
            let (dgates, drows) = (dgates.slice(0, rows * d.kv_heads), pass.dvalues);
            let dweight = model.gradient(pass.grads, Param::ValueGate, layer);
            let tokens = tokens(model, pass.layout);
            engine.run(ValueEmbedBackward { drows, dgates, dweight, dqkv, table, tokens, gate, shape })?;
            if let Some(dwte) = model.gradient(pass.grads, Param::ValueTable, layer) {
                let (batch, layout) = (model.batch, pass.layout);
                engine.run(EncoderBackward { dwte, dwpe: None, dout: drows, batch, layout, c: width })?;
            }
        }
        // The norms of all sub-layers share one buffer, which those that follow have overwritten.
        if pass.recompute >= Recompute::ActivationAndNorms {
            model.recompute_norm(engine, ln1, residual)?;
        }
        let dbias = model.gradient(pass.grads, Param::Qkvb, layer);
        let qkv = pass.linear(layer, Param::Qkvw, [pass.dchannels, dqkv], ln1.out, dbias);
        pass.run_linear(engine, layer, Param::Qkvw, &qkv)?;
        let Some(((_, gate), dgates)) = value_embedding else { return Ok(()) };
        let (dinp, heads) = (pass.dchannels, d.kv_heads);
        let dgates = dgates.slice(0, pass.layout.b * pass.layout.t * heads);
        engine.run(GateInputBackward { dinp, dgates, weight: gate.weight, heads, c: d.channels })
    }

    fn decode(&self, engine: &mut dyn Engine, pass: &DecodePass, residual: Tensor) -> Result<()> {
        let (model, d) = (pass.model, &pass.model.descriptor);
        let mut norm = Some(model.norm_of(&self.ln1, residual, None));
        let value_embedding = self.value_embedding(model, residual);
        if value_embedding.is_some() {
            // The gate reads the norm's statistics, which a kernel of both norm and matmul does not write.
            norm.take().map_or(Ok(()), |norm| engine.run(norm))?;
        }
        engine.run(model.decode_matmul(norm.as_ref(), (Param::Qkvw, self.layer), &self.qkv(model, self.qkv)))?;
        if let Some((table, gate)) = value_embedding {
            let tokens = RowTokens { tokens: pass.cache.slots, stride: Slot::WORDS };
            engine.run(ValueEmbed { qkv: self.qkv, table, tokens, gate, shape: d.attention(pass.rows, 1) })?;
        }
        let Cache { keys, values, partials, slots, .. } = pass.cache;
        engine.run(DecodeAttention {
            out: self.attended,
            qkv: self.qkv,
            keys: pass.cache.of_layer(keys, d, self.layer),
            values: pass.cache.of_layer(values, d, self.layer),
            slots,
            partials,
            rotation: self.rotation(model),
            shape: d.attention(pass.rows, pass.cache.positions(d, self.layer)),
        })?;
        let attproj = self.attproj(model, self.attended, residual);
        engine.run(model.decode_matmul(None, (Param::Attprojw, self.layer), &attproj))
    }
}
