//! The backward pass of every decoder, the [forward pass](super::forward) in reverse.
//!
//! attproj and fcproj add to the residual stream. Therefore the gradients of their biases are the column sums of the residual
//! stream's gradient: for attproj after the backward pass of ln2, for fcproj after that of the next layer's ln1 or of the final
//! norm. LayerNorm computes these sums while it writes the gradient, if the engine does that at a lower cost than the GEMM
//! ([`Engine::fuses_column_sums`]).
//!
//! The backward pass reads the activations of each layer. Those that [`Recompute`] selects are not kept: they lie in one buffer
//! for all layers and are recomputed by the operation that computed them, so that gradients keep their bits.

use super::decoder::{Decoder, Layer, Norm, NormOf};
use super::descriptor::{self, Biases};
use super::forward::Rotation;
use super::nvtx::Range;
use super::params::{Param, Unit};
use super::recompute::Recompute;
use super::sharding::{LayerHooks, Store};
use engine::ops::{
    ActivationForward, ActivationInput, AttentionBackward, EncoderBackward, LayerNormBackward, MatmulBackward,
    MatmulShape, RmsNormBackward, RotaryBackward,
};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};

impl Decoder {
    /// Adds the gradients of all parameters, from what [`loss`](Self::loss) computed.
    ///
    /// `hooks` provides the parameters of each layer and receives the gradients: those of the layers from the last to the first,
    /// then those of the embeddings.
    pub fn backward(&self, engine: &mut dyn Engine, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Result<()> {
        let training = self.training()?;
        let d = &self.descriptor;
        let (rows, c) = (layout.b * layout.t, d.channels);
        let layers: Vec<Layer> = self.layers.iter().map(|layer| layer.rows(rows, d)).collect();
        let encoded = self.encoded.slice(0, rows * c);
        let embedding_norm = self.embedding_norm.map(|norm| norm.rows(rows, c));
        let layer_norm = d.norm == descriptor::Norm::LayerNorm && d.biases == Biases::All;
        let pass = BackwardPass {
            model: self,
            layout,
            grads: self.grad_store(training),
            norms_sum_columns: layer_norm && engine.fuses_column_sums(c),
            recompute: training.recompute,
            dresidual: training.dresidual.slice(0, rows * c),
            dchannels: training.dchannels.slice(0, rows * c),
            dattention: training.dchannels.slice(0, rows * d.attention_channels()),
            dwide: training.dwide,
        };

        let last = layers.len() - 1;
        hooks.gather_parameters(engine, last, last.checked_sub(1))?;
        hooks.begin_gradients(engine, last)?;
        engine.zero(pass.dresidual)?;
        let final_norm = self.final_norm.rows(rows, c);
        let column_sums = pass.column_sums(Param::Fcprojb, Some(last));
        pass.norm(engine, NormOf::Head, final_norm, layers[last].residual3, column_sums)?;
        for (l, layer) in layers.iter().enumerate().rev() {
            let _range = Range::new(format_args!("layer {l}"));
            let below = l.checked_sub(1);
            let first = embedding_norm.map_or(encoded, |norm| norm.out);
            let residual = below.map_or(first, |below| layers[below].residual3);
            self.quantize_gathered_weights(engine, l)?;
            if training.recompute == Recompute::Layers {
                self.recompute_layer(engine, l, layer, layout, residual)?;
            }
            pass.mlp(engine, l, layer)?;
            pass.attention(engine, l, layer, residual)?;
            if let Some(below) = below {
                hooks.begin_gradients(engine, below)?;
            }
            let column_sums = pass.column_sums(Param::Fcprojb, below);
            pass.norm(engine, NormOf::Attention(l), layer.ln1, residual, column_sums)?;
            hooks.gradients_ready(engine, Unit::Layer(l))?;
            if let Some(below) = below {
                hooks.gather_parameters(engine, below, below.checked_sub(1))?;
            }
        }
        pass.embedding(engine, embedding_norm, encoded)?;
        hooks.gradients_ready(engine, Unit::Embeddings)
    }
}

/// The tensors that all layers share in a backward pass.
struct BackwardPass<'a> {
    model: &'a Decoder,
    layout: BatchLayout,
    grads: Store<'a>,
    /// Whether LayerNorm's backward pass computes the bias gradients of attproj and fcproj.
    norms_sum_columns: bool,
    recompute: Recompute,
    dresidual: Tensor,
    /// (rows, C)
    dchannels: Tensor,
    /// (rows, NH·HS), in the memory of `dchannels`
    dattention: Tensor,
    dwide: Tensor,
}

impl BackwardPass<'_> {
    /// Returns the bias gradient that a LayerNorm computes as column sums.
    fn column_sums(&self, param: Param, layer: Option<usize>) -> Option<Tensor> {
        layer.filter(|_| self.norms_sum_columns).map(|layer| self.grads.tensor(param, layer))
    }

    /// Returns the bias gradient that a GEMM computes, because no LayerNorm does.
    fn gemm_bias(&self, param: Param, layer: usize) -> Option<Tensor> {
        if self.norms_sum_columns { None } else { self.model.optional(self.grads, param, layer) }
    }

    fn rows(&self) -> usize {
        self.layout.b * self.layout.t
    }

    fn shape(&self, c: usize, oc: usize) -> MatmulShape {
        MatmulShape { rows: self.rows(), c, oc }
    }

    /// Adds the gradient through a norm, from `dchannels`, to `dresidual`.
    fn norm(
        &self,
        engine: &mut dyn Engine,
        of: NormOf,
        norm: Norm,
        inp: Tensor,
        column_sums: Option<Tensor>,
    ) -> Result<()> {
        self.norm_gradient(engine, of, norm, inp, [self.dresidual, self.dchannels], column_sums)
    }

    /// Adds the gradient through a norm, from `dout`, to `dinp`.
    fn norm_gradient(
        &self,
        engine: &mut dyn Engine,
        of: NormOf,
        Norm { mean, rstd, .. }: Norm,
        inp: Tensor,
        [dinp, dout]: [Tensor; 2],
        column_sums: Option<Tensor>,
    ) -> Result<()> {
        let (model, c) = (self.model, self.model.descriptor.channels);
        let (params, grads) = (model.norm_params(model.param_store(), of), model.norm_params(self.grads, of));
        match (mean, params.weight, grads.weight.zip(grads.bias)) {
            (Some(mean), Some(weight), Some((dweight, dbias))) => {
                engine.run(LayerNormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c })
            }
            _ => engine.run(RmsNormBackward { dinp, dweight: grads.weight, dout, inp, weight: params.weight, rstd, c }),
        }
    }

    /// Computes the gradients of fcproj, activation, fc and ln2 of a layer.
    fn mlp(&self, engine: &mut dyn Engine, l: usize, layer: &Layer) -> Result<()> {
        let Layer { residual2, ln2, fc, activated, .. } = *layer;
        let (model, d) = (self.model, &self.model.descriptor);
        let (p, g) = (|param| model.param(param, l), |param| self.grads.tensor(param, l));
        // A layer that was recomputed as a whole has the outputs of ln2 and of the activation.
        if self.recompute == Recompute::ActivationAndNorms && model.fp8.is_none() {
            model.recompute_norm(engine, NormOf::Mlp(l), ln2, residual2)?;
        }
        let recomputes = matches!(self.recompute, Recompute::Activation | Recompute::ActivationAndNorms);
        let fc_shape = self.shape(d.channels, d.fc_channels());
        let (weight, bias) = (p(Param::Fcw), model.optional(model.param_store(), Param::Fcb, l));
        let forward = ActivationForward { inp: ln2.out, weight, bias, shape: fc_shape };
        let recompute = recomputes.then_some(forward);
        let dfc = self.dwide.slice(0, fc.len);
        let shape = self.shape(d.mlp_channels, d.channels);
        let dfcb = model.optional(self.grads, Param::Fcb, l);
        engine.run(MatmulBackward {
            dinp: dfc,
            dweight: g(Param::Fcprojw),
            dbias: self.gemm_bias(Param::Fcprojb, l),
            dout: self.dresidual,
            inp: activated,
            weight: p(Param::Fcprojw),
            activation: Some(ActivationInput { activation: d.activation, preactivation: fc, recompute }),
            shape,
            fp8: model.fp8_backward(l, Param::Fcprojw, shape, dfc, dfcb),
        })?;
        // In FP8, only the gradient of fc's weight reads the output of ln2, in memory that the gradient of fcproj's weight uses before.
        if self.recompute >= Recompute::ActivationAndNorms && model.fp8.is_some() {
            model.recompute_norm(engine, NormOf::Mlp(l), ln2, residual2)?;
        }
        engine.run(MatmulBackward {
            dinp: self.dchannels,
            dweight: g(Param::Fcw),
            // In FP8, the operation above quantizes dfc, and computes this gradient from it.
            dbias: dfcb.filter(|_| model.fp8.is_none()),
            dout: dfc,
            inp: ln2.out,
            weight,
            activation: None,
            shape: fc_shape,
            fp8: model.fp8_backward(l, Param::Fcw, fc_shape, self.dchannels, None),
        })?;
        let column_sums = self.column_sums(Param::Attprojb, Some(l));
        self.norm(engine, NormOf::Mlp(l), ln2, residual2, column_sums)
    }

    /// Computes the gradients of attproj, attention, rotary positions and qkv of a layer. `residual` is the layer's input.
    fn attention(&self, engine: &mut dyn Engine, l: usize, layer: &Layer, residual: Tensor) -> Result<()> {
        let Layer { ln1, qkv, attention, lse, .. } = *layer;
        let (model, d) = (self.model, &self.model.descriptor);
        let (p, g) = (|param| model.param(param, l), |param| self.grads.tensor(param, l));
        let attention_shape = d.attention(self.layout.b, self.layout.t);
        let dqkv = self.dwide.slice(0, qkv.len);
        let shape = self.shape(d.attention_channels(), d.channels);
        engine.run(MatmulBackward {
            dinp: self.dattention,
            dweight: g(Param::Attprojw),
            dbias: self.gemm_bias(Param::Attprojb, l),
            dout: self.dresidual,
            inp: attention,
            weight: p(Param::Attprojw),
            activation: None,
            shape,
            fp8: model.fp8_backward(l, Param::Attprojw, shape, self.dattention, None),
        })?;
        let (dout, shape) = (self.dattention, attention_shape);
        engine.run(AttentionBackward { dqkv, dout, qkv, out: attention, lse, shape })?;
        if let Some(Rotation { table, qk_norm, shape }) = model.rotation(l, layer, self.layout) {
            let weights = qk_norm.and_then(|norm| norm.weights);
            let dweights = weights.map(|_| [g(Param::QNormw), g(Param::KNormw)]);
            engine.run(RotaryBackward { dqkv, table, qk_norm, dweights, shape })?;
        }
        // Both norms of a layer share one buffer, which ln2 has overwritten.
        if self.recompute >= Recompute::ActivationAndNorms {
            model.recompute_norm(engine, NormOf::Attention(l), ln1, residual)?;
        }
        let shape = self.shape(d.channels, d.qkv_channels());
        engine.run(MatmulBackward {
            dinp: self.dchannels,
            dweight: g(Param::Qkvw),
            dbias: model.optional(self.grads, Param::Qkvb, l),
            dout: dqkv,
            inp: ln1.out,
            weight: p(Param::Qkvw),
            activation: None,
            shape,
            fp8: model.fp8_backward(l, Param::Qkvw, shape, self.dchannels, None),
        })
    }

    /// Computes the gradients of the embeddings, and of their norm if there is one.
    fn embedding(&self, engine: &mut dyn Engine, norm: Option<Norm>, encoded: Tensor) -> Result<()> {
        let mut dout = self.dresidual;
        if let Some(norm) = norm {
            engine.zero(self.dchannels)?;
            self.norm_gradient(engine, NormOf::Embedding, norm, encoded, [self.dchannels, dout], None)?;
            dout = self.dchannels;
        }
        let (dwte, dwpe) = (self.grads.tensor(Param::Wte, 0), self.model.optional(self.grads, Param::Wpe, 0));
        let (layout, c) = (self.layout, self.model.descriptor.channels);
        engine.run(EncoderBackward { dwte, dwpe, dout, batch: self.model.batch, layout, c })
    }
}
