//! The residual stream between layers: its scales, the smear of the embeddings and the backout, if the model has these
//! [additions](super::descriptor::Addition).

use super::activations::Activations;
use super::decoder::{BackwardPass, Decoder};
use super::descriptor::{Addition, Descriptor};
use super::params::Param;
use engine::ops::{Mix, MixBackward, Smear, SmearBackward};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Result};

/// The activations of the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamBuffers {
    smear: Option<SmearBuffers>,
    /// (kept layers, B, T, C): the inputs of the layers
    mixed: Option<Tensor>,
    kept: usize,
    backout: Option<BackoutBuffers>,
}

#[derive(Clone, Copy, Debug)]
struct SmearBuffers {
    /// (B, T, C)
    out: Tensor,
    /// (B, T) f32
    gates: Tensor,
    /// (B·T, C): the embedding of the token before each sequence, in generation
    before: Option<Tensor>,
}

#[derive(Clone, Copy, Debug)]
struct BackoutBuffers {
    /// (B, T, C): the output of the middle layer, if the outputs of layers are not kept
    middle: Option<Tensor>,
    /// (B, T, C): the input of the final norm
    out: Tensor,
}

/// The gradients that the backward pass keeps beside that of the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamGradients {
    /// (B, T, C): of the first residual stream
    first: Option<Tensor>,
    /// (B, T, C): of the input of the final norm
    last: Option<Tensor>,
    /// (B, T, KV) f32: of the gates of value embeddings
    pub(super) gates: Option<Tensor>,
}

impl StreamBuffers {
    pub(super) fn plan(activations: &mut Activations, d: &Descriptor, training: bool) -> Self {
        let (dtype, kept, c) = (activations.dtype, activations.kept, d.channels);
        let smear = d.adds(Addition::Smear).then(|| SmearBuffers {
            out: activations.add("smear", 1, c, dtype),
            gates: activations.add("smear gates", 1, 1, DType::F32),
            before: (!training).then(|| activations.add("embeddings before", 1, c, dtype)),
        });
        let mixed = d.adds(Addition::ResidualScales).then(|| activations.add("mixed", kept, c, dtype));
        let backout = d.adds(Addition::Backout).then(|| BackoutBuffers {
            middle: (!training).then(|| activations.add("middle", 1, c, dtype)),
            out: activations.add("backout", 1, c, dtype),
        });
        Self { smear, mixed, kept, backout }
    }

    /// Returns the input of a layer, before which the residual stream was `residual`.
    pub(super) fn layer_input(&self, layer: usize, residual: Tensor) -> Tensor {
        self.mixed.map_or(residual, |mixed| mixed.part(layer % self.kept, self.kept).slice(0, residual.len))
    }

    /// Returns the input of the final norm, before which the residual stream was `residual`.
    pub(super) fn final_input(&self, residual: Tensor) -> Tensor {
        self.backout.map_or(residual, |backout| backout.out.slice(0, residual.len))
    }

    /// Returns the first residual stream if the embeddings are `embedded`.
    pub(super) fn first(&self, embedded: Tensor) -> Tensor {
        self.smear.map_or(embedded, |smear| smear.out.slice(0, embedded.len))
    }

    /// Returns the embeddings of the tokens before sequences (B·T, C), if there is a smear.
    pub(super) fn before(&self) -> Option<Tensor> {
        self.smear?.before
    }

    /// Returns the buffers with the embedding before sequence number `i` as that before the first.
    pub(super) fn after_sequence(mut self, i: usize, c: usize) -> Self {
        if let Some(SmearBuffers { before: Some(before), .. }) = &mut self.smear {
            *before = before.slice(i * c, c);
        }
        self
    }
}

impl StreamGradients {
    pub(super) fn plan(plan: &mut Plan, d: &Descriptor, [b, t]: [usize; 2], dtype: DType) -> Self {
        let mut add = |addition, name: &str, width, dtype| {
            d.adds(addition).then(|| plan.add(Group::Activations, name, &[b, t, width], dtype))
        };
        Self {
            first: add(Addition::ResidualScales, "d first residual", d.channels, dtype),
            last: add(Addition::Backout, "d last residual", d.channels, dtype),
            gates: add(Addition::ValueEmbeddings, "d gates", d.kv_heads, DType::F32),
        }
    }
}

impl Decoder {
    /// Adds the embeddings of the tokens before to the embeddings (B, T, C), if the model does that, and returns the first residual stream.
    /// `before` (B, C) precedes the sequences.
    pub(super) fn smear(
        &self,
        engine: &mut dyn Engine,
        layout: BatchLayout,
        embedded: Tensor,
        before: Option<Tensor>,
    ) -> Result<Tensor> {
        let Some(SmearBuffers { gates, .. }) = self.stream.smear else { return Ok(embedded) };
        let c = self.descriptor.channels;
        let out = self.stream.first(embedded);
        engine.run(Smear {
            out,
            gates: gates.slice(0, embedded.len / c),
            inp: embedded,
            before,
            weight: self.param(Param::SmearGate, 0),
            scale: self.param(Param::SmearScale, 0),
            documents: layout.documents_of(self.batch),
            t: layout.t,
            c,
        })?;
        Ok(out)
    }

    /// Computes the input of a layer from the residual stream and the first residual stream.
    pub(super) fn enter_layer(
        &self,
        engine: &mut dyn Engine,
        layer: usize,
        [residual, first]: [Tensor; 2],
    ) -> Result<Tensor> {
        let out = self.stream.layer_input(layer, residual);
        if self.stream.mixed.is_some() {
            let [scale, added_scale] = self.scales(layer);
            let (scale, added_scale) = (Some(scale), Some(added_scale));
            engine.run(Mix { out, inp: residual, added: first, scale, added_scale, subtracts: false })?;
        }
        Ok(out)
    }

    fn scales(&self, layer: usize) -> [Tensor; 2] {
        [Param::ResidualScale, Param::EmbeddingScale].map(|param| self.param(param, layer))
    }

    /// Keeps the output of the middle layer until the last, if it would be overwritten.
    pub(super) fn leave_layer(&self, engine: &mut dyn Engine, layer: usize, residual: Tensor) -> Result<()> {
        match self.stream.backout.and_then(|backout| backout.middle) {
            Some(middle) if self.descriptor.backout_layer() == Some(layer) => {
                engine.copy(middle.slice(0, residual.len), residual)
            }
            _ => Ok(()),
        }
    }

    /// Subtracts the output of the middle layer from the residual stream after the last, if the model does that, and returns the input of the
    /// final norm. `middle` is that output in training.
    pub(super) fn leave_layers(&self, engine: &mut dyn Engine, residual: Tensor, middle: Tensor) -> Result<Tensor> {
        let Some(BackoutBuffers { middle: copied, .. }) = self.stream.backout else { return Ok(residual) };
        let out = self.stream.final_input(residual);
        let added = copied.map_or(middle, |copied| copied.slice(0, residual.len));
        let added_scale = Some(self.param(Param::BackoutScale, 0));
        engine.run(Mix { out, inp: residual, added, scale: None, added_scale, subtracts: true })?;
        Ok(out)
    }
}

impl BackwardPass<'_> {
    /// Begins the backward pass of the layers.
    pub(super) fn begin_stream(&self, engine: &mut dyn Engine) -> Result<()> {
        if let Some(last) = self.stream.last {
            engine.copy(last.slice(0, self.dresidual.len), self.dresidual)?;
        }
        self.stream.first.map_or(Ok(()), |first| engine.zero(first.slice(0, self.dresidual.len)))
    }

    /// Adds the gradient of the output of a layer through the backout, before the backward pass of the layer.
    pub(super) fn leave_layer(&self, engine: &mut dyn Engine, layer: usize, output: Tensor) -> Result<()> {
        let Some(last) = self.stream.last.filter(|_| self.model.descriptor.backout_layer() == Some(layer)) else {
            return Ok(());
        };
        engine.run(MixBackward {
            dout: last.slice(0, self.dresidual.len),
            dadded: self.dresidual,
            dscale: None,
            dadded_scale: self.model.gradient(self.grads, Param::BackoutScale, 0),
            inp: output,
            added: output,
            scale: None,
            added_scale: Some(self.model.param(Param::BackoutScale, 0)),
            subtracts: true,
        })
    }

    /// Computes the gradients of the residual stream before a layer from that of the layer's input.
    pub(super) fn enter_layer(
        &self,
        engine: &mut dyn Engine,
        layer: usize,
        [residual, first]: [Tensor; 2],
    ) -> Result<()> {
        let Some(dfirst) = self.stream.first else { return Ok(()) };
        let gradient = |param| self.model.gradient(self.grads, param, layer);
        let [scale, added_scale] = self.model.scales(layer).map(Some);
        engine.run(MixBackward {
            dout: self.dresidual,
            dadded: dfirst.slice(0, self.dresidual.len),
            dscale: gradient(Param::ResidualScale),
            dadded_scale: gradient(Param::EmbeddingScale),
            inp: residual,
            added: first,
            scale,
            added_scale,
            subtracts: false,
        })
    }

    /// Computes the gradient of the embeddings, before the smear, and returns it with a buffer that is free. `embedded` are the embeddings.
    pub(super) fn finish_stream(&self, engine: &mut dyn Engine, embedded: Tensor) -> Result<[Tensor; 2]> {
        let model = self.model;
        if let Some(first) = self.stream.first {
            engine.run(MixBackward {
                dout: first.slice(0, self.dresidual.len),
                dadded: self.dresidual,
                dscale: None,
                dadded_scale: None,
                inp: embedded,
                added: embedded,
                scale: None,
                added_scale: None,
                subtracts: false,
            })?;
        }
        let Some(SmearBuffers { gates, .. }) = model.stream.smear else { return Ok([self.dresidual, self.dchannels]) };
        let c = model.descriptor.channels;
        engine.run(SmearBackward {
            dinp: self.dchannels,
            dweight: model.gradient(self.grads, Param::SmearGate, 0),
            dscale: model.gradient(self.grads, Param::SmearScale, 0),
            dout: self.dresidual,
            gates: gates.slice(0, embedded.len / c),
            inp: embedded,
            weight: model.param(Param::SmearGate, 0),
            scale: model.param(Param::SmearScale, 0),
            documents: self.layout.documents_of(model.batch),
            t: self.layout.t,
            c,
        })?;
        Ok([self.dchannels, self.dresidual])
    }
}
