//! The dense MLP: fc, activation, fcproj.

use crate::activations::Activations;
use crate::decoder::{BackwardPass, DecodePass, Decoder, ForwardPass, NormBuffers, Rows, SubLayer};
use crate::descriptor::Descriptor;
use crate::fp8;
use crate::params::Param;
use crate::recompute::Recompute;
use crate::sharding::LayerHooks;
use engine::ops::{ActivationForward, ActivationInput, Epilogue, MatmulBackward, MatmulForward};
use engine::tensor::Tensor;
use engine::{Engine, Result};
use std::sync::Arc;

/// The activations of the MLP in one layer.
#[derive(Clone, Copy, Debug)]
struct Mlp {
    layer: usize,
    ln2: NormBuffers,
    /// (B, T, F), or 2 F if gated: the sums before the activation
    fc: Tensor,
    /// (B, T, F)
    activated: Tensor,
    /// (B, T, C)
    residual3: Tensor,
}

/// Plans the activations of the MLP in all layers. Returns the sub-layer of each layer. `dwide` is the gradient of the widest activation in
/// training.
pub fn plan(
    activations: &mut Activations,
    d: &Descriptor,
    dwide: Option<Tensor>,
) -> impl Fn(usize) -> Arc<dyn SubLayer> + use<> {
    let (kept, dtype, recompute) = (activations.kept, activations.dtype, activations.recompute);
    let ln2 = activations.norm("ln2", [Param::Ln2w, Param::Ln2b], Param::Fcw);
    let fc = activations.add("fc", kept, d.fc_channels(), dtype);
    // In FP8, a transposed copy is kept instead. The forward pass then uses `activated` only for evaluation, and the backward pass only if
    // the activation is gated.
    let keeps_fp8 = activations.fp8 && fp8::keeps_input(d, Param::Fcprojw, recompute);
    let parts = if recompute < Recompute::Activation && !keeps_fp8 { kept } else { 1 };
    let activated = match dwide.filter(|_| keeps_fp8 && !d.activation.is_gated()) {
        Some(dwide) => dwide.slice(0, activations.tokens() * d.mlp_channels),
        None => activations.add("activated", parts, d.mlp_channels, dtype),
    };
    let outputs = activations.kept_outputs;
    let residual3 = activations.add("residual3", outputs, d.channels, dtype);
    move |layer| {
        let k = layer % kept;
        Arc::new(Mlp {
            layer,
            ln2: ln2(layer),
            fc: fc.part(k, kept),
            activated: activated.part(k % parts, parts),
            residual3: residual3.part(layer % outputs, outputs),
        })
    }
}

impl Mlp {
    /// Returns the first linear layer, with the activation.
    fn fc(&self, model: &Decoder) -> MatmulForward {
        let epilogue = Epilogue::Activation(model.descriptor.activation, self.fc);
        model.linear(self.layer, [Param::Fcw, Param::Fcb], self.activated, self.ln2.out, epilogue)
    }

    /// Returns the second linear layer, which adds the sub-layer's input `residual`.
    fn fcproj(&self, model: &Decoder, residual: Tensor) -> MatmulForward {
        let (params, epilogue) = ([Param::Fcprojw, Param::Fcprojb], Epilogue::Residual(residual));
        model.linear(self.layer, params, self.residual3, self.activated, epilogue)
    }
}

impl SubLayer for Mlp {
    fn rows(&self, Rows { own: rows, .. }: Rows, d: &Descriptor) -> Arc<dyn SubLayer> {
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        Arc::new(Self {
            layer: self.layer,
            ln2: self.ln2.rows(rows, d.channels),
            fc: of(self.fc, d.fc_channels()),
            activated: of(self.activated, d.mlp_channels),
            residual3: of(self.residual3, d.channels),
        })
    }

    fn norm(&self) -> NormBuffers {
        self.ln2
    }

    fn output(&self) -> Tensor {
        self.residual3
    }

    fn output_bias(&self) -> Param {
        Param::Fcprojb
    }

    fn forward(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        _hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        let mut fc = self.fc(pass.model);
        if let Some(fp8) = &mut fc.fp8 {
            fp8.out = pass.model.fp8_input(self.layer, Param::Fcprojw, self.activated);
        }
        pass.model.run_linear(engine, self.layer, Param::Fcw, &fc)?;
        pass.model.run_linear(engine, self.layer, Param::Fcprojw, &self.fcproj(pass.model, residual))
    }

    fn recompute(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        _hooks: &mut dyn LayerHooks,
        residual: Tensor,
        last: bool,
    ) -> Result<()> {
        let model = pass.model;
        model.run_linear(engine, self.layer, Param::Fcw, &self.fc(model))?;
        if last {
            model.recompute_adapter(engine, self.layer, Param::Fcprojw, self.activated)
        } else {
            model.run_linear(engine, self.layer, Param::Fcprojw, &self.fcproj(model, residual))
        }
    }

    fn backward(
        &self,
        engine: &mut dyn Engine,
        pass: &BackwardPass,
        _hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        let Self { layer, ref ln2, fc, activated, .. } = *self;
        let (model, activation) = (pass.model, pass.model.descriptor.activation);
        let in_fp8 = model.fp8.is_some();
        // A layer that was recomputed as a whole has the outputs of ln2 and of the activation.
        if pass.recompute == Recompute::ActivationAndNorms && !in_fp8 {
            model.recompute_norm(engine, ln2, residual)?;
        }
        let recomputes = matches!(pass.recompute, Recompute::Activation | Recompute::ActivationAndNorms);
        let recompute = recomputes.then(|| ActivationForward {
            inp: ln2.out,
            weight: model.param(Param::Fcw, layer),
            bias: model.optional(Param::Fcb, layer),
            shape: model.linear_shape(Param::Fcw, ln2.out),
        });
        let dfc = pass.dwide.slice(0, fc.len);
        let dfcb = model.gradient(pass.grads, Param::Fcb, layer);
        let dbias = pass.output_bias_gradient(self);
        let mut fcproj = MatmulBackward {
            activation: Some(ActivationInput { activation, preactivation: fc, recompute }),
            ..pass.linear(layer, Param::Fcprojw, [dfc, pass.dresidual], activated, dbias)
        };
        if let Some(fp8) = &mut fcproj.fp8 {
            fp8.dinp = model.fp8_output_gradient(layer, Param::Fcw, dfc, dfcb);
        }
        pass.run_linear(engine, layer, Param::Fcprojw, &fcproj)?;
        // In FP8, only the gradient of fc's weight reads the output of ln2, in memory that the gradient of fcproj's weight uses before.
        if pass.recompute >= Recompute::ActivationAndNorms && in_fp8 {
            model.recompute_norm(engine, ln2, residual)?;
        }
        // In FP8, the operation above quantizes dfc, and computes this gradient from it.
        let dbias = dfcb.filter(|_| !in_fp8);
        let fc = pass.linear(layer, Param::Fcw, [pass.dchannels, dfc], ln2.out, dbias);
        pass.run_linear(engine, layer, Param::Fcw, &fc)
    }

    fn decode(&self, engine: &mut dyn Engine, pass: &DecodePass, residual: Tensor) -> Result<()> {
        let (model, layer) = (pass.model, self.layer);
        let norm = model.norm_of(&self.ln2, residual, None);
        engine.run(model.decode_matmul(Some(&norm), (Param::Fcw, layer), &self.fc(model)))?;
        engine.run(model.decode_matmul(None, (Param::Fcprojw, layer), &self.fcproj(model, residual)))
    }
}
