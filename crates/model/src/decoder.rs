//! A decoder laid out in an engine's memory: handles of its parameters and activations.
//!
//! [`forward`](Decoder::forward), [`loss`](Decoder::loss) and [`backward`](Decoder::backward) are in files of these names.

use super::descriptor::Descriptor;
use super::fp8::Fp8;
use super::muon_buffers::MuonBuffers;
use super::params::{Param, Params};
use super::recompute::Recompute;
use super::sharding::{Store, Zero};
use anyhow::Context;
use engine::Result;
use engine::ops::Master;
use engine::tensor::Tensor;

/// A model laid out for batches of up to (B, T) tokens. It holds handles into an engine's arena and owns no memory.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Sizes and operations.
    pub descriptor: Descriptor,
    /// Layout of parameters, gradients and optimizer state.
    pub layout: Params,
    /// Tensors that ranks shard.
    pub zero: Zero,
    /// float parameters; a [`Store`] locates each of them.
    pub params: Tensor,
    pub(super) param_buffers: Option<Tensor>,
    /// i32, see [`BatchLayout`](engine::BatchLayout)
    pub batch: Tensor,
    /// (B, T) f32, one loss per token, accumulated over micro-batches
    pub losses: Tensor,
    /// (chunk rows, Vp); shares memory with buffers of the layers' backward pass.
    pub(super) logits: Tensor,
    /// Set if the model was planned for training.
    pub training: Option<Training>,
    /// Set within a training step in FP8.
    pub(super) fp8: Option<Fp8>,
    /// (T, HS/2, 2) f32 cosines and sines of rotary positions
    pub(super) rotary_table: Option<Tensor>,
    pub(super) encoded: Tensor,
    /// The norm of the token embeddings
    pub(super) embedding_norm: Option<Norm>,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Norm,
}

/// Tensors that only training needs.
#[derive(Clone, Copy, Debug)]
pub struct Training {
    /// float gradients; a [`Store`] locates each of them.
    pub grads: Tensor,
    pub(super) grad_buffers: Option<Tensor>,
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
    /// (B, T, the larger of qkv and fc)
    pub(super) dwide: Tensor,
    pub(super) recompute: Recompute,
    /// Set if the model was planned for Muon.
    pub(super) muon: Option<MuonBuffers>,
    /// Set if the model was planned for FP8.
    pub fp8: Option<Fp8>,
}

/// Output and statistics of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) out: Tensor,
    /// LayerNorm only
    pub(super) mean: Option<Tensor>,
    pub(super) rstd: Tensor,
}

/// Activations of one layer that the backward pass reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub(super) ln1: Norm,
    /// (B, T, NH + 2 KV, HS)
    pub(super) qkv: Tensor,
    /// (B, T, NH + KV, HS): queries and keys before their norm
    pub(super) qk_saved: Option<Tensor>,
    /// (B, T, NH, HS)
    pub(super) attention: Tensor,
    /// (B, NH, T) f32
    pub(super) lse: Tensor,
    pub(super) residual2: Tensor,
    pub(super) ln2: Norm,
    /// (B, T, F), or 2 F if gated: the sums before the activation
    pub(super) fc: Tensor,
    /// (B, T, F)
    pub(super) activated: Tensor,
    pub(super) residual3: Tensor,
}

/// The parameters of a norm.
#[derive(Clone, Copy)]
pub(super) struct NormParams {
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
}

/// A norm of the model.
#[derive(Clone, Copy)]
pub(super) enum NormOf {
    Embedding,
    Attention(usize),
    Mlp(usize),
    Head,
}

impl NormOf {
    /// Returns weight, bias and layer. The norm of embeddings has no parameters.
    fn params(self) -> Option<(Param, Param, usize)> {
        match self {
            Self::Embedding => None,
            Self::Attention(layer) => Some((Param::Ln1w, Param::Ln1b, layer)),
            Self::Mlp(layer) => Some((Param::Ln2w, Param::Ln2b, layer)),
            Self::Head => Some((Param::Lnfw, Param::Lnfb, 0)),
        }
    }
}

impl Norm {
    pub(super) fn rows(self, rows: usize, c: usize) -> Self {
        let statistic = |tensor: Tensor| tensor.slice(0, rows);
        Self { out: self.out.slice(0, rows * c), mean: self.mean.map(statistic), rstd: statistic(self.rstd) }
    }
}

impl Layer {
    /// Returns the activations of the first `rows` rows.
    pub(super) fn rows(&self, rows: usize, d: &Descriptor) -> Self {
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        let c = d.channels;
        Self {
            ln1: self.ln1.rows(rows, c),
            qkv: of(self.qkv, d.qkv_channels()),
            qk_saved: self.qk_saved.map(|saved| of(saved, (d.heads + d.kv_heads) * d.head_size)),
            attention: of(self.attention, d.attention_channels()),
            lse: of(self.lse, d.heads),
            residual2: of(self.residual2, c),
            ln2: self.ln2.rows(rows, c),
            fc: of(self.fc, d.fc_channels()),
            activated: of(self.activated, d.mlp_channels),
            residual3: of(self.residual3, c),
        }
    }
}

impl Decoder {
    /// Returns the length of the longest sequence that a forward pass accepts: learned positions and the activations of a batch permit one
    /// longer than T, rotary positions have a table of T rows.
    pub fn longest_sequence(&self) -> usize {
        let rows = self.rotary_table.map_or(self.losses.len, |table| table.len / self.descriptor.head_size);
        rows.min(self.descriptor.max_seq_len)
    }

    pub(super) fn param(&self, param: Param, layer: usize) -> Tensor {
        self.param_store().tensor(param, layer)
    }

    /// Returns a tensor of `store`, or `None` if the model lacks it.
    pub(super) fn optional(&self, store: Store, param: Param, layer: usize) -> Option<Tensor> {
        param.is_in(&self.descriptor).then(|| store.tensor(param, layer))
    }

    /// Returns the parameters of a norm in `store`, which may contain gradients.
    pub(super) fn norm_params(&self, store: Store, norm: NormOf) -> NormParams {
        let of = |param, layer| self.optional(store, param, layer);
        match norm.params() {
            Some((weight, bias, layer)) => NormParams { weight: of(weight, layer), bias: of(bias, layer) },
            None => NormParams { weight: None, bias: None },
        }
    }

    /// Returns the parameter that multiplies the final norm's output: the head, or the token embedding if they are tied.
    pub(super) fn head_param(&self) -> Param {
        if self.descriptor.tied { Param::Wte } else { Param::LmHead }
    }

    /// Returns the model of training steps: in FP8 if it was planned for it.
    pub(super) fn for_training_steps(&self) -> Self {
        Self { fp8: self.training.and_then(|training| training.fp8), ..self.clone() }
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

    /// Returns where the values of `m`, `v`, the master weights or their remainders are.
    pub fn state_store(&self, kept: Tensor) -> Store<'_> {
        Store::shards(&self.layout, kept)
    }
}
