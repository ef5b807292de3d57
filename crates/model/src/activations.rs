//! The memory of activations: which of them are kept for every layer, and which share one buffer.

use super::decoder::NormBuffers;
use super::descriptor::{Descriptor, Normalization};
use super::memory_plan::PlanOptions;
use super::params::Param;
use super::recompute::Recompute;
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};

/// Plans activations of (parts, B, T, width), where parts are layers. Layer `l` has part `l % parts`.
pub(super) struct Activations<'a> {
    pub(super) plan: &'a mut Plan,
    pub(super) batch: [usize; 2],
    /// The engine's float type.
    pub(super) dtype: DType,
    pub(super) recompute: Recompute,
    /// Whether training steps compute in FP8.
    pub(super) fp8: bool,
    /// Parts of most activations: all layers, or one if the backward pass recomputes layers or there is none.
    pub(super) kept: usize,
    /// Parts of the outputs of layers.
    pub(super) kept_outputs: usize,
    channels: usize,
    has_mean: bool,
    /// Whether the outputs of sub-layers' norms are kept.
    keeps_norms: bool,
    /// (B, T, C): the output of each norm that is not kept.
    normed: Tensor,
}

impl<'a> Activations<'a> {
    pub(super) fn new(
        plan: &'a mut Plan,
        d: &Descriptor,
        options: &PlanOptions,
        dtype: DType,
        fp8: bool,
        offloads_outputs: bool,
    ) -> Self {
        let PlanOptions { b, t, training, recompute, .. } = *options;
        let layers = if training { d.layers } else { 1 };
        Self {
            batch: [b, t],
            dtype,
            recompute,
            fp8,
            kept: if recompute < Recompute::Layers { layers } else { 1 },
            kept_outputs: if offloads_outputs { layers.min(2) } else { layers },
            channels: d.channels,
            has_mean: d.norm == Normalization::LayerNorm,
            keeps_norms: training && recompute < Recompute::ActivationAndNorms,
            normed: plan.add(Group::Activations, "normed", &[b, t, d.channels], dtype),
            plan,
        }
    }

    /// Returns the tokens of a batch.
    pub(super) fn tokens(&self) -> usize {
        self.batch[0] * self.batch[1]
    }

    /// Plans a tensor (parts, B, T, width).
    pub(super) fn add(&mut self, name: &str, parts: usize, width: usize, dtype: DType) -> Tensor {
        let [b, t] = self.batch;
        self.plan.add(Group::Activations, name, &[parts, b, t, width], dtype)
    }

    /// Plans a tensor (parts, rows, width).
    pub(super) fn add_rows(&mut self, name: &str, parts: usize, rows: usize, width: usize, dtype: DType) -> Tensor {
        self.plan.add(Group::Activations, name, &[parts, rows, width], dtype)
    }

    /// Plans a tensor (parts, B, width, T).
    pub(super) fn add_transposed(&mut self, name: &str, parts: usize, width: usize, dtype: DType) -> Tensor {
        let [b, t] = self.batch;
        self.plan.add(Group::Activations, name, &[parts, b, width, t], dtype)
    }

    /// Plans the norm at the beginning of a sub-layer, in each layer, with these parameters. Its output is the input of the linear layer with
    /// the weight `feeds`.
    pub(super) fn norm(
        &mut self,
        name: &str,
        params: [Param; 2],
        feeds: Param,
    ) -> impl Fn(usize) -> NormBuffers + use<> {
        // In FP8, transposed copies of the inputs of linear layers are kept instead.
        let (parts, kept) = (self.kept, self.keeps_norms && !(self.fp8 && feeds.kind().is_linear()));
        let out = if kept { self.add(name, parts, self.channels, self.dtype) } else { self.normed };
        let (mean, rstd) = self.statistics(name, parts);
        move |layer| {
            let part = |tensor: Tensor| tensor.part(layer % parts, parts);
            NormBuffers {
                params: Some(params),
                layer,
                feeds: Some(feeds),
                out: if kept { part(out) } else { out },
                mean: mean.map(part),
                rstd: part(rstd),
            }
        }
    }

    /// Plans the norm before the head.
    pub(super) fn final_norm(&mut self, params: [Param; 2]) -> NormBuffers {
        let (mean, rstd) = self.statistics("lnf", 1);
        NormBuffers { params: Some(params), layer: 0, feeds: None, out: self.normed, mean, rstd }
    }

    /// Plans the norm of the embeddings, an RMSNorm without parameters.
    pub(super) fn embedding_norm(&mut self) -> NormBuffers {
        let out = self.add("embedding norm", 1, self.channels, self.dtype);
        let (_, rstd) = self.statistics("embedding norm", 1);
        NormBuffers { params: None, layer: 0, feeds: None, out, mean: None, rstd }
    }

    /// Plans the means, which LayerNorm has, and the reciprocal standard deviations of a norm.
    fn statistics(&mut self, name: &str, parts: usize) -> (Option<Tensor>, Tensor) {
        let has_mean = self.has_mean;
        let mut add = |what| self.add(&format!("{name} {what}"), parts, 1, DType::F32);
        (has_mean.then(|| add("mean")), add("rstd"))
    }
}
