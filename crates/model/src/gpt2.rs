//! GPT-2's forward and backward pass.
//!
//! Data flow of a layer (B, T, C):
//! ```text
//! residual ─┬─ ln1 ─ qkv ─ attention ─ attproj ─┐
//!           └───────────────────────────────────┴─ residual2 ─┬─ ln2 ─ fc ─ gelu ─ fcproj ─┐
//!                                                             └────────────────────────────┴─ residual3
//! ```
//! attproj and fcproj add the residual stream in their epilogue. Layer `l` ends with the ln1 of layer `l + 1`.
//!
//! Therefore the gradients of their biases are the column sums of the residual stream's gradient: for attproj after the backward
//! pass of ln2, for fcproj after that of the next layer's ln1 or of the final norm. The norm computes these sums while it writes
//! the gradient, if the engine does that at a lower cost than the GEMM ([`Engine::fuses_column_sums`]).
//!
//! The backward pass reads the activations of each layer. Those that [`Recompute`] selects are not kept: they lie in one buffer
//! for all layers and are recomputed by the operation that computed them, so that gradients keep their bits.
//!
//! Logits, V for every token, never exist all at once. [`Gpt2::loss`] computes them in chunks of rows, from the output of
//! the final norm to the gradients of that output and of wte.

use super::Descriptor;
use super::memory_plan::{Recompute, chunk_rows};
use super::params::{Param, Params, Unit};
use super::sharding::{LayerHooks, Store, Zero};
use anyhow::Context;
use engine::ops::{
    AttentionBackward, AttentionForward, AttentionShape, Classifier, EncoderBackward, EncoderForward, Epilogue,
    GeluForward, GeluInput, LayerNormBackward, LayerNormForward, MatmulBackward, MatmulForward, MatmulShape,
};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};
use std::ops::Range;

/// A model laid out for batches of up to (B, T) tokens: handles into an engine's arena, without memory of its own.
#[derive(Clone, Debug)]
pub struct Gpt2 {
    /// Sizes.
    pub descriptor: Descriptor,
    /// Layout of parameters, gradients and optimizer state.
    pub layout: Params,
    /// Tensors that ranks shard.
    pub zero: Zero,
    /// float parameters; a [`Store`] locates each of them.
    pub params: Tensor,
    pub(super) param_buffers: Option<Tensor>,
    /// i32, see [`BatchLayout`]
    pub batch: Tensor,
    /// (B, T) f32, one loss per token, accumulated over micro-batches
    pub losses: Tensor,
    /// (chunk rows, Vp); shares memory with buffers of the layers' backward pass.
    pub(super) logits: Tensor,
    /// Set if the model was planned for training.
    pub training: Option<Training>,
    pub(super) encoded: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Norm,
}

/// Tensors that only training needs.
#[derive(Clone, Copy, Debug)]
pub struct Training {
    /// float gradients; a [`Store`] locates each of them.
    pub grads: Tensor,
    pub(super) grad_buffers: Option<Tensor>,
    /// f32, first moments
    pub m: Tensor,
    /// f32, second moments
    pub v: Tensor,
    /// f32 master weights
    pub master: Option<Tensor>,
    /// (2) f32: sum of the step's losses and gradient norm, read together
    pub stats: Tensor,
    /// (1) f32: squared norm of this rank's shard of the gradients, if they are sharded for the update
    pub squares: Option<Tensor>,
    /// (largest layer or embeddings) f32: optimizer state of one unit while it is gathered
    pub gathered: Option<Tensor>,
    /// (Vp, C) f32: gradient of wte while the chunks of a batch accumulate, if gradients are not f32
    pub(super) dwte: Option<Tensor>,
    /// (B, T, C): gradient of the residual stream, to which every layer adds
    pub(super) dresidual: Tensor,
    /// (B, T, C)
    pub(super) dchannels: Tensor,
    /// (B, T, 4C)
    pub(super) dwide: Tensor,
    pub(super) recompute: Recompute,
}

/// Output and statistics of a LayerNorm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) out: Tensor,
    pub(super) mean: Tensor,
    pub(super) rstd: Tensor,
}

/// Activations of one layer that the backward pass reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub(super) ln1: Norm,
    pub(super) qkv: Tensor,
    pub(super) attention: Tensor,
    pub(super) lse: Tensor,
    pub(super) residual2: Tensor,
    pub(super) ln2: Norm,
    pub(super) fc: Tensor,
    pub(super) fc_gelu: Tensor,
    pub(super) residual3: Tensor,
}

/// The weight and bias of a LayerNorm, and their layer.
#[derive(Clone, Copy)]
struct NormParams(Param, Param, usize);

impl NormParams {
    fn ln1(layer: usize) -> Self {
        Self(Param::Ln1w, Param::Ln1b, layer)
    }

    fn ln2(layer: usize) -> Self {
        Self(Param::Ln2w, Param::Ln2b, layer)
    }

    fn final_norm() -> Self {
        Self(Param::Lnfw, Param::Lnfb, 0)
    }
}

impl Norm {
    fn rows(self, rows: usize, c: usize) -> Self {
        Self { out: self.out.slice(0, rows * c), mean: self.mean.slice(0, rows), rstd: self.rstd.slice(0, rows) }
    }
}

impl Layer {
    /// Returns the activations of the first `rows` rows.
    fn rows(&self, rows: usize, c: usize, heads: usize) -> Self {
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        Self {
            ln1: self.ln1.rows(rows, c),
            qkv: of(self.qkv, 3 * c),
            attention: of(self.attention, c),
            lse: of(self.lse, heads),
            residual2: of(self.residual2, c),
            ln2: self.ln2.rows(rows, c),
            fc: of(self.fc, 4 * c),
            fc_gelu: of(self.fc_gelu, 4 * c),
            residual3: of(self.residual3, c),
        }
    }
}

impl Gpt2 {
    fn param(&self, param: Param, layer: usize) -> Tensor {
        self.param_store().tensor(param, layer)
    }

    pub(super) fn training(&self) -> Result<&Training> {
        self.training.as_ref().context("this model was planned for inference only")
    }

    /// Returns where the parameters are.
    pub fn param_store(&self) -> Store<'_> {
        Store::whole_or_buffered(&self.layout, self.params, self.param_buffers)
    }

    /// Returns where the gradients are.
    pub fn grad_store<'a>(&'a self, training: &Training) -> Store<'a> {
        Store::whole_or_buffered(&self.layout, training.grads, training.grad_buffers)
    }

    /// Returns where the values of `m`, `v` or the master weights are.
    pub fn state_store(&self, kept: Tensor) -> Store<'_> {
        Store::shards(&self.layout, kept)
    }

    fn attention_shape(&self, layout: BatchLayout) -> AttentionShape {
        let Descriptor { heads, .. } = self.descriptor;
        AttentionShape { b: layout.b, t: layout.t, heads, head_size: self.descriptor.head_size() }
    }

    fn layernorm(&self, engine: &mut dyn Engine, norm: Norm, params: NormParams, inp: Tensor) -> Result<()> {
        let (Norm { out, mean, rstd }, NormParams(weight, bias, layer)) = (norm, params);
        let (weight, bias) = (self.param(weight, layer), self.param(bias, layer));
        engine.run(LayerNormForward { out, mean, rstd, inp, weight, bias, c: self.descriptor.channels })
    }

    /// Computes the batch, whose `layout` must fit the plan, up to the final norm. `hooks` provides the parameters of each layer.
    pub fn forward(&self, engine: &mut dyn Engine, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Result<()> {
        let Descriptor { channels: c, heads, .. } = self.descriptor;
        let (rows, batch) = (layout.b * layout.t, self.batch);
        let linear = |c, oc| MatmulShape { rows, c, oc };
        let layers: Vec<Layer> = self.layers.iter().map(|layer| layer.rows(rows, c, heads)).collect();
        let final_norm = self.final_norm.rows(rows, c);
        let after = |layer: usize| (layer + 1 < layers.len()).then_some(layer + 1);

        let out = self.encoded.slice(0, rows * c);
        let (wte, wpe) = (self.param(Param::Wte, 0), self.param(Param::Wpe, 0));
        engine.run(EncoderForward { out, batch, layout, wte, wpe, c })?;
        hooks.gather_parameters(engine, 0, after(0))?;
        self.layernorm(engine, layers[0].ln1, NormParams::ln1(0), out)?;
        let mut residual = out;
        for (l, layer) in layers.iter().enumerate() {
            let Layer { ln1, qkv, attention, lse, residual2, ln2, fc, fc_gelu, residual3 } = *layer;
            let p = |param| self.param(param, l);
            engine.run(MatmulForward {
                out: qkv,
                inp: ln1.out,
                weight: p(Param::Qkvw),
                bias: Some(p(Param::Qkvb)),
                epilogue: Epilogue::None,
                shape: linear(c, 3 * c),
            })?;
            engine.run(AttentionForward { out: attention, lse, qkv, shape: self.attention_shape(layout) })?;
            engine.run(MatmulForward {
                out: residual2,
                inp: attention,
                weight: p(Param::Attprojw),
                bias: Some(p(Param::Attprojb)),
                epilogue: Epilogue::Residual(residual),
                shape: linear(c, c),
            })?;
            self.layernorm(engine, ln2, NormParams::ln2(l), residual2)?;
            engine.run(MatmulForward {
                out: fc_gelu,
                inp: ln2.out,
                weight: p(Param::Fcw),
                bias: Some(p(Param::Fcb)),
                epilogue: Epilogue::Gelu(fc),
                shape: linear(c, 4 * c),
            })?;
            engine.run(MatmulForward {
                out: residual3,
                inp: fc_gelu,
                weight: p(Param::Fcprojw),
                bias: Some(p(Param::Fcprojb)),
                epilogue: Epilogue::Residual(residual2),
                shape: linear(4 * c, c),
            })?;
            match after(l) {
                Some(next) => {
                    hooks.gather_parameters(engine, next, None)?;
                    self.layernorm(engine, layers[next].ln1, NormParams::ln1(next), residual3)?;
                    hooks.gather_parameters(engine, next, after(next))?;
                }
                None => self.layernorm(engine, final_norm, NormParams::final_norm(), residual3)?,
            }
            residual = residual3;
        }
        Ok(())
    }

    /// Returns the most rows of logits that can exist at a time.
    pub fn logit_rows(&self) -> usize {
        self.logits.len / self.descriptor.padded_vocab()
    }

    /// Computes the logits (rows, Vp) of at most [`logit_rows`](Self::logit_rows) rows of the batch, after a forward pass. They are
    /// valid until the model's next operation.
    ///
    /// # Panics
    /// If there are more rows.
    pub fn logits(&self, engine: &mut dyn Engine, rows: Range<usize>) -> Result<Tensor> {
        let (c, vp) = (self.descriptor.channels, self.descriptor.padded_vocab());
        let (first, rows) = (rows.start, rows.len());
        let out = self.logits.slice(0, rows * vp);
        engine.run(MatmulForward {
            out,
            inp: self.final_norm.out.slice(first * c, rows * c),
            weight: self.param(Param::Wte, 0),
            bias: None,
            epilogue: Epilogue::None,
            shape: MatmulShape { rows, c, oc: vp },
        })?;
        Ok(out)
    }

    /// Adds each token's loss to `losses`, after a forward pass.
    ///
    /// With `dloss`, the gradient of each token's loss, it also begins the backward pass: it adds the gradient of wte as the
    /// output head and computes the gradient of the final norm's output.
    pub fn loss(&self, engine: &mut dyn Engine, layout: BatchLayout, dloss: Option<f32>) -> Result<()> {
        let Descriptor { channels: c, vocab: v, .. } = self.descriptor;
        let vp = self.descriptor.padded_vocab();
        let (rows, targets) = (layout.b * layout.t, layout.tensor(self.batch, layout.targets()));
        let training = dloss.map(|_| self.training()).transpose()?;
        let dwte = |training: &Training| self.grad_store(training).tensor(Param::Wte, 0);
        if let Some(training) = training
            && let Some(sum) = training.dwte
        {
            engine.cast(sum, dwte(training))?;
        }
        let chunk = chunk_rows(rows, self.logit_rows());
        for first in (0..rows).step_by(chunk) {
            let rows = chunk.min(rows - first);
            let logits = self.logits(engine, first..first + rows)?;
            let (losses, targets) = (self.losses.slice(first, rows), targets.slice(first, rows));
            engine.run(Classifier { logits, losses, targets, v, vp, dloss })?;
            if let Some(training) = training {
                engine.run(MatmulBackward {
                    dinp: training.dchannels.slice(first * c, rows * c),
                    dweight: training.dwte.unwrap_or_else(|| dwte(training)),
                    dbias: None,
                    dout: logits,
                    inp: self.final_norm.out.slice(first * c, rows * c),
                    weight: self.param(Param::Wte, 0),
                    gelu: None,
                    shape: MatmulShape { rows, c, oc: vp },
                })?;
            }
        }
        match training {
            Some(training) => training.dwte.map_or(Ok(()), |sum| engine.cast(dwte(training), sum)),
            None => Ok(()),
        }
    }

    /// Adds the gradients of all parameters, from what [`loss`](Self::loss) computed.
    ///
    /// `hooks` provides the parameters of each layer and receives the gradients: those of the layers from the last to the first,
    /// then those of the embeddings.
    pub fn backward(&self, engine: &mut dyn Engine, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Result<()> {
        let training = self.training()?;
        let Descriptor { channels: c, heads, .. } = self.descriptor;
        let rows = layout.b * layout.t;
        let layers: Vec<Layer> = self.layers.iter().map(|layer| layer.rows(rows, c, heads)).collect();
        let encoded = self.encoded.slice(0, rows * c);
        let grads = self.grad_store(training);
        let pass = BackwardPass {
            model: self,
            layout,
            grads,
            norms_sum_columns: engine.fuses_column_sums(c),
            recompute: training.recompute,
            dresidual: training.dresidual.slice(0, rows * c),
            dchannels: training.dchannels.slice(0, rows * c),
            dwide: training.dwide.slice(0, rows * 4 * c),
        };

        let last = layers.len() - 1;
        hooks.gather_parameters(engine, last, last.checked_sub(1))?;
        hooks.begin_gradients(engine, last)?;
        engine.zero(pass.dresidual)?;
        let final_norm = self.final_norm.rows(rows, c);
        let column_sums = pass.column_sums(Param::Fcprojb, Some(last));
        pass.layernorm(engine, final_norm, NormParams::final_norm(), layers[last].residual3, column_sums)?;
        for (l, layer) in layers.iter().enumerate().rev() {
            let below = l.checked_sub(1);
            let residual = below.map_or(encoded, |below| layers[below].residual3);
            pass.mlp(engine, l, layer)?;
            pass.attention(engine, l, layer, residual)?;
            if let Some(below) = below {
                hooks.begin_gradients(engine, below)?;
            }
            let column_sums = pass.column_sums(Param::Fcprojb, below);
            pass.layernorm(engine, layer.ln1, NormParams::ln1(l), residual, column_sums)?;
            hooks.gradients_ready(engine, Unit::Layer(l))?;
            if let Some(below) = below {
                hooks.gather_parameters(engine, below, below.checked_sub(1))?;
            }
        }
        let (dwte, dwpe) = (grads.tensor(Param::Wte, 0), grads.tensor(Param::Wpe, 0));
        engine.run(EncoderBackward { dwte, dwpe, dout: pass.dresidual, batch: self.batch, layout, c })?;
        hooks.gradients_ready(engine, Unit::Embeddings)
    }
}

/// The tensors that all layers share in a backward pass.
struct BackwardPass<'a> {
    model: &'a Gpt2,
    layout: BatchLayout,
    grads: Store<'a>,
    /// Whether LayerNorm's backward pass computes the bias gradients of attproj and fcproj.
    norms_sum_columns: bool,
    recompute: Recompute,
    dresidual: Tensor,
    dchannels: Tensor,
    dwide: Tensor,
}

impl BackwardPass<'_> {
    /// Returns the bias gradient that a LayerNorm computes as column sums.
    fn column_sums(&self, param: Param, layer: Option<usize>) -> Option<Tensor> {
        layer.filter(|_| self.norms_sum_columns).map(|layer| self.grads.tensor(param, layer))
    }

    /// Returns the bias gradient that a GEMM computes, because no LayerNorm does.
    fn gemm_bias(&self, param: Param, layer: usize) -> Option<Tensor> {
        (!self.norms_sum_columns).then(|| self.grads.tensor(param, layer))
    }

    fn shape(&self, c: usize, oc: usize) -> MatmulShape {
        MatmulShape { rows: self.layout.b * self.layout.t, c, oc }
    }

    /// Adds the gradient through a norm, from `dchannels`, to `dresidual`.
    fn layernorm(
        &self,
        engine: &mut dyn Engine,
        Norm { mean, rstd, .. }: Norm,
        NormParams(weight, bias, layer): NormParams,
        inp: Tensor,
        column_sums: Option<Tensor>,
    ) -> Result<()> {
        engine.run(LayerNormBackward {
            dinp: self.dresidual,
            dweight: self.grads.tensor(weight, layer),
            dbias: self.grads.tensor(bias, layer),
            column_sums,
            dout: self.dchannels,
            inp,
            weight: self.model.param(weight, layer),
            mean,
            rstd,
            c: self.model.descriptor.channels,
        })
    }

    /// fcproj, GELU, fc and ln2 of a layer.
    fn mlp(&self, engine: &mut dyn Engine, l: usize, layer: &Layer) -> Result<()> {
        let Layer { residual2, ln2, fc, fc_gelu, .. } = *layer;
        let c = self.model.descriptor.channels;
        let (p, g) = (|param| self.model.param(param, l), |param| self.grads.tensor(param, l));
        if self.recompute >= Recompute::GeluAndNorms {
            self.model.layernorm(engine, ln2, NormParams::ln2(l), residual2)?;
        }
        let (weight, bias) = (p(Param::Fcw), Some(p(Param::Fcb)));
        let forward = GeluForward { inp: ln2.out, weight, bias, shape: self.shape(c, 4 * c) };
        let recompute = (self.recompute >= Recompute::Gelu).then_some(forward);
        engine.run(MatmulBackward {
            dinp: self.dwide,
            dweight: g(Param::Fcprojw),
            dbias: self.gemm_bias(Param::Fcprojb, l),
            dout: self.dresidual,
            inp: fc_gelu,
            weight: p(Param::Fcprojw),
            gelu: Some(GeluInput { pre_gelu: fc, recompute }),
            shape: self.shape(4 * c, c),
        })?;
        engine.run(MatmulBackward {
            dinp: self.dchannels,
            dweight: g(Param::Fcw),
            dbias: Some(g(Param::Fcb)),
            dout: self.dwide,
            inp: ln2.out,
            weight,
            gelu: None,
            shape: self.shape(c, 4 * c),
        })?;
        let column_sums = self.column_sums(Param::Attprojb, Some(l));
        self.layernorm(engine, ln2, NormParams::ln2(l), residual2, column_sums)
    }

    /// attproj, attention and qkv of a layer; `residual` is the layer's input.
    fn attention(&self, engine: &mut dyn Engine, l: usize, layer: &Layer, residual: Tensor) -> Result<()> {
        let Layer { ln1, qkv, attention, lse, .. } = *layer;
        let c = self.model.descriptor.channels;
        let (p, g) = (|param| self.model.param(param, l), |param| self.grads.tensor(param, l));
        let shape = self.model.attention_shape(self.layout);
        let dqkv = self.dwide.slice(0, qkv.len);
        engine.run(MatmulBackward {
            dinp: self.dchannels,
            dweight: g(Param::Attprojw),
            dbias: self.gemm_bias(Param::Attprojb, l),
            dout: self.dresidual,
            inp: attention,
            weight: p(Param::Attprojw),
            gelu: None,
            shape: self.shape(c, c),
        })?;
        engine.run(AttentionBackward { dqkv, dout: self.dchannels, qkv, out: attention, lse, shape })?;
        if self.recompute >= Recompute::GeluAndNorms {
            self.model.layernorm(engine, ln1, NormParams::ln1(l), residual)?;
        }
        engine.run(MatmulBackward {
            dinp: self.dchannels,
            dweight: g(Param::Qkvw),
            dbias: Some(g(Param::Qkvb)),
            dout: dqkv,
            inp: ln1.out,
            weight: p(Param::Qkvw),
            gelu: None,
            shape: self.shape(c, 3 * c),
        })
    }
}
