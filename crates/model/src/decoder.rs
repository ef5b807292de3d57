//! A decoder laid out in an engine's memory: handles of its parameters and activations.
//!
//! [`forward`](Decoder::forward), [`loss`](Decoder::loss) and [`backward`](Decoder::backward) are in files of these names. They pass
//! through the layers, each of which is a list of sub-layers.

use super::adapters::AdapterBuffers;
use super::descriptor::Descriptor;
use super::fp8::Fp8;
use super::fp8_weights::Fp8Weights;
use super::muon_buffers::MuonBuffers;
use super::params::{Param, Params};
use super::recompute::Recompute;
use super::sharding::{Copies, LayerHooks, Store, Zero};
use super::stream::{StreamBuffers, StreamGradients};
use anyhow::Context;
use engine::ops::Master;
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, Result};
use std::fmt;
use std::sync::Arc;

/// A model laid out for batches of up to (B, T) tokens. It holds handles into an engine's arena and owns no memory.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Sizes and operations.
    pub descriptor: Descriptor,
    /// Layout of parameters, gradients and optimizer state.
    pub layout: Params,
    /// Tensors that ranks shard.
    pub zero: Zero,
    /// The parameters of the model, if those of [`params`](Self::params) are its adapters.
    pub(super) frozen: Option<Frozen>,
    /// float parameters; a [`Store`] locates each of them.
    pub params: Tensor,
    pub(super) param_copies: Option<Copies>,
    /// (L, B, T, C) float in the host's memory: the outputs of layers, if the backward pass finds them there.
    pub(super) outputs: Option<Tensor>,
    /// i32, see [`BatchLayout`]
    pub batch: Tensor,
    /// (B, T) f32, one loss per token, accumulated over micro-batches
    pub losses: Tensor,
    /// (chunk rows, Vp); shares memory with buffers of the layers' backward pass.
    pub(super) logits: Tensor,
    /// Set if the model was planned for training.
    pub training: Option<Training>,
    /// Set within a training step in FP8.
    pub(super) fp8: Option<Fp8>,
    /// Set outside of training if the weights of linear layers are in FP8.
    pub(super) fp8_weights: Option<Fp8Weights>,
    /// (T, HS/2, 2) f32 cosines and sines of rotary positions
    pub(super) rotary_table: Option<Tensor>,
    pub(super) encoded: Tensor,
    /// The norm of the token embeddings
    pub(super) embedding_norm: Option<NormBuffers>,
    /// The residual stream between layers
    pub(super) stream: StreamBuffers,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: NormBuffers,
}

/// Parameters without gradients. Every rank has all of them.
#[derive(Clone, Debug)]
pub(super) struct Frozen {
    pub(super) layout: Params,
    /// float
    pub(super) params: Tensor,
    pub(super) adapters: AdapterBuffers,
}

/// Tensors that only training needs.
#[derive(Clone, Copy, Debug)]
pub struct Training {
    /// float gradients; a [`Store`] locates each of them.
    pub grads: Tensor,
    pub(super) grad_copies: Option<Copies>,
    /// f32 or float, first moments
    pub m: Tensor,
    /// second moments, of the type of `m`
    pub v: Tensor,
    /// Master weights beside bf16 parameters
    pub master: Master,
    /// (2) f32: sum of the step's losses and gradient norm, read together
    pub stats: Tensor,
    /// (1) f32: squared norm of this rank's shard of the gradients, if they are sharded for the update
    pub squares: Option<Tensor>,
    /// (largest layer or embeddings) f32: optimizer state of one unit while it is gathered
    pub gathered: Option<Tensor>,
    /// (Vp, C) f32: gradient of the head while the chunks of a batch accumulate, if gradients are not f32
    pub(super) dhead: Option<Tensor>,
    /// (B, T, C): gradient of the residual stream, to which every layer adds
    pub(super) dresidual: Tensor,
    /// (B, T, max(C, NH·HS))
    pub(super) dchannels: Tensor,
    /// (B, T, width): the gradient of qkv or fc
    pub(super) dwide: Tensor,
    pub(super) stream: StreamGradients,
    pub(super) recompute: Recompute,
    /// (layers, E) i32: the loads of experts in each layer, see [`Route::loads`](engine::ops::Route::loads)
    pub(super) expert_loads: Option<Tensor>,
    /// Set if the model was planned for Muon.
    pub(super) muon: Option<MuonBuffers>,
    /// Set if the model was planned for FP8.
    pub fp8: Option<Fp8>,
}

/// A norm of the model: its parameters, and the buffers of its output and its statistics.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormBuffers {
    /// Weight and bias. The norm of embeddings has none.
    pub(super) params: Option<[Param; 2]>,
    pub(super) layer: usize,
    /// Weight of the linear layer of `layer` that reads the output
    pub(super) feeds: Option<Param>,
    pub(super) out: Tensor,
    /// LayerNorm only
    pub(super) mean: Option<Tensor>,
    pub(super) rstd: Tensor,
}

/// A layer: its sub-layers in order.
pub(super) type Layer = Vec<Arc<dyn SubLayer>>;

/// A part of a layer that adds to the residual stream. It begins with a norm and ends with a linear layer that adds the residual stream in
/// its epilogue. It holds the handles of the activations that the backward pass reads.
pub(super) trait SubLayer: fmt::Debug + Send + Sync {
    /// Returns the sub-layer with the first rows of its activations, and with room for past rows before those in the activations of
    /// attention.
    fn rows(&self, rows: Rows, d: &Descriptor) -> Arc<dyn SubLayer>;

    /// Returns the norm at the beginning. The passes compute it, and its gradient.
    fn norm(&self) -> NormBuffers;

    /// Returns the residual stream (B, T, C) after the sub-layer.
    fn output(&self) -> Tensor;

    /// Returns the bias of the last linear layer.
    fn output_bias(&self) -> Param;

    /// Computes the output from the output of the norm and the sub-layer's input `residual`.
    fn forward(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()>;

    /// Computes the activations again from the output of the norm and the sub-layer's input `residual`. The output of the `last` sub-layer is
    /// not needed.
    fn recompute(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
        last: bool,
    ) -> Result<()>;

    /// Computes the gradients of the parameters except those of the norm, and from `dresidual`, the gradient of the output, `dchannels`, the
    /// gradient of the norm's output. `residual` is the sub-layer's input.
    fn backward(
        &self,
        engine: &mut dyn Engine,
        pass: &BackwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()>;

    /// Computes the output, norm included, for the newest token of each sequence.
    fn decode(&self, engine: &mut dyn Engine, pass: &DecodePass, residual: Tensor) -> Result<()>;
}

/// Numbers of rows in a pass.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Rows of this rank.
    pub(super) own: usize,
    /// Rows before them in the activations of attention.
    pub(super) past: usize,
    /// Largest number of rows of a rank, if ranks exchange tokens.
    pub(super) common: usize,
}

impl Rows {
    /// Returns the rows of a pass in which all ranks have the same number.
    pub(super) const fn new(rows: usize) -> Self {
        Self { own: rows, past: 0, common: rows }
    }
}

/// Values that the sub-layers share in a forward pass.
pub(super) struct ForwardPass<'a> {
    pub(super) model: &'a Decoder,
    pub(super) layout: BatchLayout,
    /// Number of positions before the batch whose keys and values attention reads. If there are any, the batch has one sequence.
    pub(super) past: usize,
}

/// Values that the sub-layers share in a backward pass.
pub(super) struct BackwardPass<'a> {
    pub(super) model: &'a Decoder,
    pub(super) layout: BatchLayout,
    /// Gradient of each token's loss.
    pub(super) dloss: f32,
    pub(super) grads: Store<'a>,
    /// Whether LayerNorm's backward pass computes the gradients of the output biases.
    pub(super) norms_sum_columns: bool,
    pub(super) recompute: Recompute,
    pub(super) dresidual: Tensor,
    /// (rows, C)
    pub(super) dchannels: Tensor,
    /// (rows, NH·HS), in the memory of `dchannels`
    pub(super) dattention: Tensor,
    /// (rows, KV·HS), in the memory of `dchannels`
    pub(super) dvalues: Tensor,
    pub(super) dwide: Tensor,
    pub(super) stream: StreamGradients,
}

/// Values that the sub-layers share when each of the sequences in B slots gets one token.
pub(super) struct DecodePass<'a> {
    pub(super) model: &'a Decoder,
    /// Number of slots (B).
    pub(super) rows: usize,
    pub(super) cache: Cache,
}

/// The buffers of generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    /// Number of slots (B).
    pub(super) slot_count: usize,
    /// Maximum number of tokens of a sequence (T).
    pub(super) capacity: usize,
    /// (B, KV, T, HS) of each layer, where T is the window if it is smaller. Position p is at p mod T.
    pub(super) keys: Tensor,
    /// The values, with the shape of `keys`.
    pub(super) values: Tensor,
    /// (B, NH, splits, HS + 2) f32
    pub(super) partials: Tensor,
    /// (B, 8) i32
    pub(super) slots: Tensor,
    /// (B, Vp) i32
    pub(super) seen: Tensor,
    /// (B) f32
    pub(super) sampled: Tensor,
    /// (B, Vp) f32
    pub(super) scratch: Tensor,
    /// Memory through which the thread blocks of [`SampleTokens`](engine::SampleTokens) exchange results
    pub(super) exchange: Tensor,
    /// Memory of a step in one launch
    pub(super) step: Option<[Tensor; 2]>,
}

/// The parameters of a norm.
#[derive(Clone, Copy)]
pub(super) struct NormParams {
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
}

impl NormBuffers {
    pub(super) fn rows(self, rows: usize, c: usize) -> Self {
        let statistic = |tensor: Tensor| tensor.slice(0, rows);
        Self { out: self.out.slice(0, rows * c), mean: self.mean.map(statistic), rstd: statistic(self.rstd), ..self }
    }
}

impl Decoder {
    /// Returns the length of the longest sequence that a forward pass accepts: learned positions and the activations of a batch permit one
    /// longer than T, rotary positions have a table of T rows.
    pub fn longest_sequence(&self) -> usize {
        let rows = self.rotary_table.map_or(self.losses.len, |table| table.len / self.descriptor.head_size);
        rows.min(self.descriptor.max_seq_len)
    }

    /// Returns where the model's own parameters are, without adapters.
    pub(super) fn weights(&self) -> Store<'_> {
        let frozen = self.frozen.as_ref();
        frozen
            .map_or_else(|| self.param_store(), |frozen| Store::whole_or_buffered(&frozen.layout, frozen.params, None))
    }

    /// Returns a parameter. A weight that is in FP8 only has a tensor that nothing reads, or that
    /// [`stage_weight`](Self::stage_weight) writes. A head in FP8 has none.
    pub(super) fn param(&self, param: Param, layer: usize) -> Tensor {
        let staging = self.fp8.and_then(|fp8| fp8.staging()).filter(|_| param.kind().is_linear());
        if let Some(staging) = staging {
            return staging.slice(0, param.len(&self.descriptor));
        }
        if let Some(staged) = self.fp8_weights.and_then(|fp8| fp8.staged(&self.descriptor, param)) {
            return staged;
        }
        if param.is_adapter() { self.param_store() } else { self.weights() }.tensor(param, layer)
    }

    /// Returns a parameter, or `None` if the model lacks it.
    pub(super) fn optional(&self, param: Param, layer: usize) -> Option<Tensor> {
        param.is_in(&self.descriptor).then(|| self.param(param, layer))
    }

    /// Returns the gradient of a parameter, or `None` if the model lacks the parameter or it is frozen.
    pub(super) fn gradient(&self, grads: Store, param: Param, layer: usize) -> Option<Tensor> {
        self.descriptor.has(param).then(|| grads.tensor(param, layer))
    }

    /// Returns the model without its adapters, with its parameters as the frozen ones of this model.
    pub fn frozen_model(&self) -> Option<Self> {
        let frozen = self.frozen.clone()?;
        let descriptor = self.descriptor.base();
        let (layout, params) = (frozen.layout, frozen.params);
        Some(Self {
            descriptor,
            layout,
            params,
            param_copies: None,
            outputs: None,
            frozen: None,
            zero: Zero::NONE,
            training: None,
            ..self.clone()
        })
    }

    /// Returns the layers with these rows of their activations.
    pub(super) fn layers(&self, rows: Rows) -> Vec<Layer> {
        let of = |layer: &Layer| layer.iter().map(|sublayer| sublayer.rows(rows, &self.descriptor)).collect();
        self.layers.iter().map(of).collect()
    }

    /// Returns the parameters of a norm.
    pub(super) fn norm_params(&self, norm: &NormBuffers) -> NormParams {
        let [weight, bias] =
            norm.params.map_or([None; 2], |params| params.map(|param| self.optional(param, norm.layer)));
        NormParams { weight, bias }
    }

    /// Returns the parameter that multiplies the final norm's output: the head, or the token embedding if they are tied.
    pub(super) fn head_param(&self) -> Param {
        Param::head(&self.descriptor)
    }

    /// Returns the model of training steps: in FP8 if it was planned for it.
    pub(super) fn for_training_steps(&self) -> Self {
        Self { fp8: self.training.and_then(|training| training.fp8), ..self.clone() }
    }

    pub(super) fn training(&self) -> Result<&Training> {
        self.training.as_ref().context("this model was planned for inference only")
    }

    /// Reports whether passes copy tensors beside other work.
    pub fn copies_ahead(&self) -> bool {
        self.copies_layers() || self.outputs.is_some()
    }

    /// Begins to copy the output of a layer to the host's memory, if the backward pass finds it there. The copy has ended when the next layer
    /// ends, before the layer after that one writes to the same memory. The last copy of a pass that no backward pass follows may read what a later
    /// pass writes, and nothing reads that copy.
    pub(super) fn keep_output(
        &self,
        engine: &mut dyn Engine,
        hooks: &mut dyn LayerHooks,
        layer: usize,
        output: Tensor,
    ) -> Result<()> {
        let Some(kept) = self.outputs else { return Ok(()) };
        hooks.wait_for_copies(engine)?;
        engine.copy_ahead(kept.part(layer, self.descriptor.layers).slice(0, output.len), output)
    }

    /// Waits for the output of the layer before `layer`, and begins to copy the one before that to `to`. No later work of the pass reads the
    /// output of `layer`, which was there.
    pub(super) fn fetch_output(
        &self,
        engine: &mut dyn Engine,
        hooks: &mut dyn LayerHooks,
        layer: usize,
        to: Option<Tensor>,
    ) -> Result<()> {
        let Some(kept) = self.outputs else { return Ok(()) };
        hooks.wait_for_copies(engine)?;
        let (Some(to), Some(from)) = (to, layer.checked_sub(2)) else { return Ok(()) };
        engine.copy_ahead(to, kept.part(from, self.descriptor.layers).slice(0, to.len))
    }

    /// Reports whether passes use copies of layers: ranks shard the parameters, or they are in the host's memory.
    pub fn copies_layers(&self) -> bool {
        self.param_copies.is_some()
    }

    /// Returns where the parameters are.
    pub fn param_store(&self) -> Store<'_> {
        Store::whole_or_buffered(&self.layout, self.params, self.param_copies)
    }

    /// Returns where the gradients are.
    pub fn grad_store<'a>(&'a self, training: &Training) -> Store<'a> {
        Store::whole_or_buffered(&self.layout, training.grads, training.grad_copies)
    }

    /// Returns where the values of `m`, `v`, the master weights or their remainders are.
    pub fn state_store(&self, kept: Tensor) -> Store<'_> {
        Store::shards(&self.layout, kept)
    }
}
