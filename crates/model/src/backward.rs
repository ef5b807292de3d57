//! The backward pass of every decoder, the [forward pass](super::forward) in reverse.
//!
//! The last linear layer of a sub-layer adds to the residual stream. Therefore the gradient of its bias is the column sums of the residual
//! stream's gradient after the backward pass of the norm that follows. LayerNorm computes these sums while it writes the gradient, if the
//! engine does that at a lower cost than the GEMM ([`Engine::fuses_column_sums`]).
//!
//! The backward pass reads the activations of each layer. Those that [`Recompute`] selects are not kept: they lie in one buffer
//! for all layers and are recomputed by the operation that computed them, so that gradients keep their bits.

use super::decoder::{BackwardPass, Decoder, NormBuffers, Rows, SubLayer};
use super::descriptor::Normalization;
use super::nvtx::Range;
use super::params::{Param, Unit};
use super::recompute::Recompute;
use super::sharding::LayerHooks;
use engine::ops::{EncoderBackward, MatmulBackward, NormBackward};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};
use std::sync::Arc;

impl Decoder {
    /// Adds the gradients of all parameters, from what [`loss`](Self::loss) computed with the same `dloss`.
    ///
    /// `hooks` provides the parameters of each layer and receives the gradients: those of the layers and their value embeddings from the
    /// last to the first, then those of the embeddings.
    pub fn backward(
        &self,
        engine: &mut dyn Engine,
        layout: BatchLayout,
        dloss: f32,
        hooks: &mut dyn LayerHooks,
    ) -> Result<()> {
        let training = self.training()?;
        let d = &self.descriptor;
        let (rows, c) = (layout.b * layout.t, d.channels);
        let layers = self.layers(Rows::new(rows));
        let encoded = self.encoded.slice(0, rows * c);
        let embedding_norm = self.embedding_norm.map(|norm| norm.rows(rows, c));
        let embedded = embedding_norm.map_or(encoded, |norm| norm.out);
        let first = self.stream.first(embedded);
        let layer_norm = d.norm == Normalization::LayerNorm && d.has(Param::Attprojb) && d.has_plain_residual();
        let pass = BackwardPass {
            model: self,
            layout,
            dloss,
            grads: self.grad_store(training),
            norms_sum_columns: layer_norm && engine.fuses_column_sums(c),
            recompute: training.recompute,
            dresidual: training.dresidual.slice(0, rows * c),
            dchannels: training.dchannels.slice(0, rows * c),
            dattention: training.dchannels.slice(0, rows * d.attention_channels()),
            dvalues: training.dchannels.slice(0, rows * d.kv_heads * d.head_size),
            dwide: training.dwide,
            stream: training.stream,
        };
        // The sub-layer before each, and its output.
        let before = |l: usize, i: usize| match i {
            0 => l.checked_sub(1).and_then(|below| layers[below].last()),
            _ => Some(&layers[l][i - 1]),
        };
        let of_layer = |l: usize| layers[l].last().map(|sublayer| sublayer.output());
        let output = |sublayer: Option<&Arc<dyn SubLayer>>| sublayer.map_or(first, |sublayer| sublayer.output());
        let input = |l: usize, i: usize| {
            let residual = output(before(l, i));
            if i == 0 { self.stream.layer_input(l, residual) } else { residual }
        };

        let last = layers.len() - 1;
        hooks.gather_parameters(engine, last, last.checked_sub(1))?;
        hooks.begin_gradients(engine, last)?;
        engine.zero(pass.dresidual)?;
        pass.zero_discarded(engine)?;
        let top = layers[last].last();
        pass.norm(engine, &self.final_norm.rows(rows, c), self.stream.final_input(output(top)), top)?;
        pass.begin_stream(engine)?;
        self.fetch_output(engine, hooks, last, last.checked_sub(2).and_then(of_layer))?;
        for (l, layer) in layers.iter().enumerate().rev() {
            let _range = Range::new(format_args!("layer {l}"));
            let below = l.checked_sub(1);
            self.quantize_weights_of_pass(engine, l)?;
            pass.leave_layer(engine, l, output(layer.last()))?;
            let residual = output(before(l, 0));
            if training.recompute == Recompute::Layers {
                self.recompute_layer(engine, hooks, (l, layer), layout, [residual, first])?;
            }
            for (i, sublayer) in layer.iter().enumerate().rev() {
                sublayer.backward(engine, &pass, hooks, input(l, i))?;
                if let (0, Some(below)) = (i, below) {
                    hooks.begin_gradients(engine, below)?;
                }
                pass.norm(engine, &sublayer.norm(), input(l, i), before(l, i))?;
            }
            pass.enter_layer(engine, l, [residual, first])?;
            hooks.gradients_ready(engine, Unit::Layer(l))?;
            for unit in self.layout.units_of(l).filter(|unit| *unit != Unit::Layer(l)) {
                hooks.gradients_ready(engine, unit)?;
            }
            if let Some(below) = below {
                self.fetch_output(engine, hooks, below, below.checked_sub(2).and_then(of_layer))?;
                hooks.gather_parameters(engine, below, below.checked_sub(1))?;
            }
        }
        pass.embedding(engine, embedding_norm, [encoded, embedded])?;
        hooks.gradients_ready(engine, Unit::Embeddings)
    }
}

impl BackwardPass<'_> {
    /// Returns the gradient of a sub-layer's output bias that a GEMM computes, because no LayerNorm does.
    pub(super) fn output_bias_gradient(&self, sublayer: &dyn SubLayer) -> Option<Tensor> {
        if self.norms_sum_columns { None } else { self.bias_gradient(sublayer) }
    }

    fn bias_gradient(&self, sublayer: &dyn SubLayer) -> Option<Tensor> {
        self.model.gradient(self.grads, sublayer.output_bias(), sublayer.norm().layer)
    }

    /// Returns the backward pass of a linear layer of layer `l`, from the gradient `dout` of its output to that of its input `inp`.
    pub(super) fn linear(
        &self,
        l: usize,
        weight: Param,
        [dinp, dout]: [Tensor; 2],
        inp: Tensor,
        dbias: Option<Tensor>,
    ) -> MatmulBackward {
        let model = self.model;
        let shape = model.linear_shape(weight, inp);
        let (fp8, dweight) = (model.fp8_backward(l, weight, shape), model.gradient(self.grads, weight, l));
        let (weight, activation, adds_to_dinp) = (model.param(weight, l), None, false);
        MatmulBackward {
            adds_to_dinp,
            dbias,
            activation,
            fp8,
            ..MatmulBackward::new(dinp, dweight, [dout, inp, weight], shape)
        }
    }

    /// Adds the gradient through a norm, from `dchannels`, to `dresidual`, which is then that of the output of the sub-layer `before`.
    fn norm(
        &self,
        engine: &mut dyn Engine,
        norm: &NormBuffers,
        inp: Tensor,
        before: Option<&Arc<dyn SubLayer>>,
    ) -> Result<()> {
        let column_sums =
            before.filter(|_| self.norms_sum_columns).and_then(|sublayer| self.bias_gradient(&**sublayer));
        self.norm_gradient(engine, norm, inp, [self.dresidual, self.dchannels], column_sums)
    }

    /// Adds the gradient through a norm, from `dout`, to `dinp`.
    fn norm_gradient(
        &self,
        engine: &mut dyn Engine,
        norm: &NormBuffers,
        inp: Tensor,
        [dinp, dout]: [Tensor; 2],
        column_sums: Option<Tensor>,
    ) -> Result<()> {
        let (model, c) = (self.model, self.model.descriptor.channels);
        let weight = model.norm_params(norm).weight;
        let NormBuffers { mean, rstd, .. } = *norm;
        let gradient = |i: usize| norm.params.and_then(|params| self.vector_gradient(params[i], norm.layer, i));
        let [dweight, dbias] = [0, 1].map(gradient);
        engine.run(NormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c })
    }

    /// Computes the gradients of the embeddings, of their smear and of their norm, if the model has these. `embedded` are the embeddings after
    /// their norm.
    fn embedding(
        &self,
        engine: &mut dyn Engine,
        norm: Option<NormBuffers>,
        [encoded, embedded]: [Tensor; 2],
    ) -> Result<()> {
        let [dwte, dwpe] = [Param::Wte, Param::Wpe].map(|param| self.model.gradient(self.grads, param, 0));
        let Some(dwte) = dwte else { return Ok(()) };
        let [mut dout, free] = self.finish_stream(engine, embedded)?;
        if let Some(norm) = norm {
            engine.zero(free)?;
            self.norm_gradient(engine, &norm, encoded, [free, dout], None)?;
            dout = free;
        }
        let (layout, c) = (self.layout, self.model.descriptor.channels);
        engine.run(EncoderBackward { dwte, dwpe, dout, batch: self.model.batch, layout, c })
    }
}
