//! Experts: router, dispatch, fc and activation of each expert, fcproj of each expert, combine; and an MLP of all tokens beside them.

use crate::activations::Activations;
use crate::decoder::{BackwardPass, DecodePass, Decoder, ForwardPass, NormBuffers, SubLayer};
use crate::descriptor::{Descriptor, Experts};
use crate::params::Param;
use crate::recompute::Recompute;
use crate::sharding::LayerHooks;
use anyhow::Context;
use engine::ops::{
    ActivationForward, ActivationInput, ChoiceGradients, Combine, Dispatch, Epilogue, MatmulBackward, MatmulForward,
    Route, RouteBackward, Router,
};
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result};
use std::sync::Arc;

/// The activations of the experts in one layer. P is the number of rows in expert order, see [`Router::rows`].
#[derive(Clone, Copy, Debug)]
struct Mixture {
    layer: usize,
    experts: Experts,
    ln2: NormBuffers,
    /// (B, T, E)
    logits: Tensor,
    gradients: Option<RouterGradients>,
    /// (B, T, k) i32
    chosen: Tensor,
    /// (B, T, k) f32
    weights: Tensor,
    /// (B, T, k) i32
    positions: Tensor,
    /// (P) i32
    sources: Tensor,
    /// i32, see [`Route::groups`]
    groups: Tensor,
    /// (E) i32, see [`Route::loads`]
    loads: Tensor,
    /// (P, C): the outputs of ln2 in expert order
    dispatched: Tensor,
    /// (P, 2 F): the sums before the activation
    fc: Tensor,
    /// (P, F)
    activated: Tensor,
    /// (P, C): the outputs of experts, and gradients
    outputs: Tensor,
    shared: Option<SharedExpert>,
    /// (B, T, C)
    residual3: Tensor,
}

/// The gradients of a router in training.
#[derive(Clone, Copy, Debug)]
struct RouterGradients {
    /// (B, T, E)
    logits: Tensor,
    /// (B, T, k) f32, see [`ChoiceGradients`]
    choices: Tensor,
}

/// The activations of the MLP beside the experts.
#[derive(Clone, Copy, Debug)]
struct SharedExpert {
    /// (B, T, 2 S): the sums before the activation
    fc: Tensor,
    /// (B, T, S)
    activated: Tensor,
}

/// Returns the elements of the widest gradient of a batch of `tokens` tokens.
pub fn widest_gradient(d: &Descriptor, experts: &Experts, tokens: usize) -> usize {
    (experts.router().rows(tokens) * d.fc_channels()).max(tokens * 2 * d.shared_channels())
}

/// Plans the activations of experts in all layers. Returns the sub-layer of each layer.
pub fn plan(
    activations: &mut Activations,
    d: &Descriptor,
    experts: Experts,
    training: bool,
) -> impl Fn(usize) -> Arc<dyn SubLayer> + use<> {
    let (kept, dtype, tokens) = (activations.kept, activations.dtype, activations.tokens());
    let router @ Router { count, active, .. } = experts.router();
    let shared_channels = d.shared_channels();
    let rows = router.rows(tokens);
    let recomputed = if activations.recompute < Recompute::Activation { kept } else { 1 };
    let ln2 = activations.norm("ln2", [Param::Ln2w, Param::Ln2b], Param::Router);
    let logits = activations.add("router logits", kept, count, dtype);
    let gradients = training.then(|| RouterGradients {
        logits: activations.add("d router logits", 1, count, dtype),
        choices: activations.add("d choices of experts", 1, active, DType::F32),
    });
    let chosen = activations.add("chosen experts", kept, active, DType::I32);
    let weights = activations.add("weights of experts", kept, active, DType::F32);
    let positions = activations.add("positions in expert order", kept, active, DType::I32);
    let mut add = |name, parts, width, dtype| activations.add_rows(name, parts, rows, width, dtype);
    let sources = add("sources in expert order", kept, 1, DType::I32);
    let dispatched = add("dispatched", recomputed, d.channels, dtype);
    let fc = add("fc", kept, d.fc_channels(), dtype);
    let activated = add("activated", recomputed, d.mlp_channels, dtype);
    let outputs = add("outputs of experts", 1, d.channels, dtype);
    let groups = activations.add_rows("groups of experts", kept, 1, router.layout_len(tokens), DType::I32);
    let loads = activations.add_rows("loads of experts", kept, 1, count, DType::I32);
    let shared = (shared_channels > 0).then(|| SharedExpert {
        fc: activations.add("shared fc", kept, 2 * shared_channels, dtype),
        activated: activations.add("shared activated", recomputed, shared_channels, dtype),
    });
    let kept_outputs = activations.kept_outputs;
    let residual3 = activations.add("residual3", kept_outputs, d.channels, dtype);
    move |layer| {
        let part = |tensor: Tensor| tensor.part(layer % kept, kept);
        let recomputed = |tensor: Tensor| tensor.part(layer % recomputed, recomputed);
        Arc::new(Mixture {
            layer,
            experts,
            ln2: ln2(layer),
            logits: part(logits),
            gradients,
            chosen: part(chosen),
            weights: part(weights),
            positions: part(positions),
            sources: part(sources),
            groups: part(groups),
            loads: part(loads),
            dispatched: recomputed(dispatched),
            fc: part(fc),
            activated: recomputed(activated),
            outputs,
            shared: shared
                .map(|SharedExpert { fc, activated }| SharedExpert { fc: part(fc), activated: recomputed(activated) }),
            residual3: residual3.part(layer % kept_outputs, kept_outputs),
        })
    }
}

/// Returns a linear layer without a bias.
fn linear(model: &Decoder, layer: usize, weight: Param, [out, inp]: [Tensor; 2], epilogue: Epilogue) -> MatmulForward {
    // A model with experts lacks the biases of the MLP.
    model.linear(layer, [weight, Param::Fcb], out, inp, epilogue)
}

impl SharedExpert {
    /// Returns the first linear layer, with the activation.
    fn fc(&self, model: &Decoder, layer: usize, inp: Tensor) -> MatmulForward {
        let epilogue = Epilogue::Activation(model.descriptor.activation, self.fc);
        linear(model, layer, Param::SharedFcw, [self.activated, inp], epilogue)
    }

    /// Returns the second linear layer, which adds `residual`.
    fn fcproj(&self, model: &Decoder, layer: usize, [out, residual]: [Tensor; 2]) -> MatmulForward {
        linear(model, layer, Param::SharedFcprojw, [out, self.activated], Epilogue::Residual(residual))
    }
}

impl Mixture {
    /// Returns the linear layer of the router.
    fn router(&self, model: &Decoder) -> MatmulForward {
        linear(model, self.layer, Param::Router, [self.logits, self.ln2.out], Epilogue::None)
    }

    fn route(&self) -> Route {
        let Self { logits, chosen: experts, weights, positions, sources, groups, loads, .. } = *self;
        let (router, trains) = (self.experts.router(), self.gradients.is_some());
        Route { logits, experts, weights, positions, sources, groups, loads, router, trains }
    }

    /// Returns the copy of `inp` (B, T, C) to expert order.
    fn dispatch(&self, model: &Decoder, out: Tensor, inp: Tensor, weights: Option<Tensor>) -> Dispatch {
        let (c, router) = (model.descriptor.channels, self.experts.router());
        let (groups, active) = (router.groups(self.groups), router.active);
        Dispatch { out, inp, sources: self.sources, groups, weights, c, active }
    }

    /// Returns the sums of rows in expert order for each token.
    fn combine(&self, model: &Decoder, out: Tensor, residual: Option<Tensor>, weights: Option<Tensor>) -> Combine {
        let (c, active) = (model.descriptor.channels, self.experts.router().active);
        Combine { out, residual, inp: self.outputs, weights, positions: self.positions, c, active }
    }

    /// Returns a linear layer with a matrix for each expert.
    fn of_experts(&self, model: &Decoder, weight: Param, tensors: [Tensor; 2], epilogue: Epilogue) -> MatmulForward {
        let groups = Some(self.experts.router().groups(self.groups));
        MatmulForward { groups, ..linear(model, self.layer, weight, tensors, epilogue) }
    }

    /// Computes the activations of the experts from the logits.
    fn activate(&self, engine: &mut dyn Engine, model: &Decoder) -> Result<()> {
        engine.run(self.route())?;
        engine.run(self.dispatch(model, self.dispatched, self.ln2.out, None))?;
        let epilogue = Epilogue::Activation(model.descriptor.activation, self.fc);
        engine.run(self.of_experts(model, Param::Fcw, [self.activated, self.dispatched], epilogue))
    }

    /// Computes the output from the activations. `residual` includes the output of the MLP beside the experts.
    fn finish(&self, engine: &mut dyn Engine, model: &Decoder, residual: Tensor) -> Result<()> {
        engine.run(self.of_experts(model, Param::Fcprojw, [self.outputs, self.activated], Epilogue::None))?;
        engine.run(self.combine(model, self.residual3, Some(residual), Some(self.weights)))
    }

    /// Computes the activations from the output of ln2, and the output unless it is not needed.
    fn compute(&self, engine: &mut dyn Engine, model: &Decoder, mut residual: Tensor, output: bool) -> Result<()> {
        engine.run(self.router(model))?;
        self.activate(engine, model)?;
        if let Some(shared) = &self.shared {
            engine.run(shared.fc(model, self.layer, self.ln2.out))?;
            if output {
                engine.run(shared.fcproj(model, self.layer, [self.residual3, residual]))?;
                residual = self.residual3;
            }
        }
        if output { self.finish(engine, model, residual) } else { Ok(()) }
    }

    /// Returns the backward pass of a linear layer with a matrix for each expert.
    fn experts_backward(&self, pass: &BackwardPass, weight: Param, grads: [Tensor; 2], inp: Tensor) -> MatmulBackward {
        let groups = Some(self.experts.router().groups(self.groups));
        MatmulBackward { groups, ..pass.linear(self.layer, weight, grads, inp, None) }
    }

    /// Returns the gradient of the logits.
    fn route_backward(&self, pass: &BackwardPass, gradients: RouterGradients) -> RouteBackward {
        let Self { logits, chosen: experts, weights, loads, .. } = *self;
        let (d, router) = (&pass.model.descriptor, self.experts.router());
        let scale = pass.dloss / d.layers as f32;
        let [aux_loss, z_loss] = [self.experts.aux_loss, self.experts.z_loss].map(|coefficient| scale * coefficient);
        let RouterGradients { logits: dlogits, choices: gradients } = gradients;
        let tokens = logits.len / router.count;
        RouteBackward { dlogits, logits, experts, weights, gradients, loads, tokens, router, aux_loss, z_loss }
    }
}

impl SubLayer for Mixture {
    fn rows(&self, rows: usize, _past: usize, d: &Descriptor) -> Arc<dyn SubLayer> {
        let router @ Router { count, active, .. } = self.experts.router();
        let shared_channels = d.shared_channels();
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        let sorted = |tensor: Tensor, width: usize| tensor.slice(0, router.rows(rows) * width);
        Arc::new(Self {
            layer: self.layer,
            experts: self.experts,
            ln2: self.ln2.rows(rows, d.channels),
            logits: of(self.logits, count),
            gradients: self.gradients.map(|RouterGradients { logits, choices }| RouterGradients {
                logits: of(logits, count),
                choices: of(choices, active),
            }),
            chosen: of(self.chosen, active),
            weights: of(self.weights, active),
            positions: of(self.positions, active),
            sources: sorted(self.sources, 1),
            groups: self.groups.slice(0, router.layout_len(rows)),
            loads: self.loads,
            dispatched: sorted(self.dispatched, d.channels),
            fc: sorted(self.fc, d.fc_channels()),
            activated: sorted(self.activated, d.mlp_channels),
            outputs: sorted(self.outputs, d.channels),
            shared: self.shared.map(|SharedExpert { fc, activated }| SharedExpert {
                fc: of(fc, 2 * shared_channels),
                activated: of(activated, shared_channels),
            }),
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
        self.compute(engine, pass.model, residual, true)
    }

    fn recompute(&self, engine: &mut dyn Engine, pass: &ForwardPass, residual: Tensor, last: bool) -> Result<()> {
        self.compute(engine, pass.model, residual, !last)
    }

    fn backward(&self, engine: &mut dyn Engine, pass: &BackwardPass, residual: Tensor) -> Result<()> {
        let Self { layer, ref ln2, fc, activated, outputs, dispatched, .. } = *self;
        let (model, activation) = (pass.model, pass.model.descriptor.activation);
        let gradients = self.gradients.context("this model was planned for inference only")?;
        // A layer that was recomputed as a whole has all activations.
        if pass.recompute == Recompute::ActivationAndNorms {
            model.recompute_norm(engine, ln2, residual)?;
        }
        let recomputes = matches!(pass.recompute, Recompute::Activation | Recompute::ActivationAndNorms);
        if recomputes {
            engine.run(self.dispatch(model, dispatched, ln2.out, None))?;
        }
        let activation_of = |preactivation: Tensor, weight: Param, inp: Tensor| {
            let shape = model.linear_shape(weight, inp);
            let forward = ActivationForward { inp, weight: model.param(weight, layer), bias: None, shape };
            Some(ActivationInput { activation, preactivation, recompute: recomputes.then_some(forward) })
        };

        engine.run(self.dispatch(model, outputs, pass.dresidual, Some(self.weights)))?;
        let dfc = pass.dwide.slice(0, fc.len);
        let fcproj = self.experts_backward(pass, Param::Fcprojw, [dfc, outputs], activated);
        engine.run(MatmulBackward { activation: activation_of(fc, Param::Fcw, dispatched), ..fcproj })?;
        let (out, positions, channels) = (gradients.choices, self.positions, model.descriptor.mlp_channels);
        engine.run(ChoiceGradients { out, positions, preactivation: fc, dpreactivation: dfc, channels })?;
        engine.run(self.route_backward(pass, gradients))?;
        engine.run(self.experts_backward(pass, Param::Fcw, [outputs, dfc], dispatched))?;
        engine.run(self.combine(model, pass.dchannels, None, None))?;
        let router = pass.linear(layer, Param::Router, [pass.dchannels, gradients.logits], ln2.out, None);
        engine.run(MatmulBackward { adds_to_dinp: true, ..router })?;

        let Some(SharedExpert { fc, activated }) = self.shared else { return Ok(()) };
        let dfc = pass.dwide.slice(0, fc.len);
        let fcproj = pass.linear(layer, Param::SharedFcprojw, [dfc, pass.dresidual], activated, None);
        engine.run(MatmulBackward { activation: activation_of(fc, Param::SharedFcw, ln2.out), ..fcproj })?;
        let fc = pass.linear(layer, Param::SharedFcw, [pass.dchannels, dfc], ln2.out, None);
        engine.run(MatmulBackward { adds_to_dinp: true, ..fc })
    }

    fn decode(&self, engine: &mut dyn Engine, pass: &DecodePass, residual: Tensor) -> Result<()> {
        let (model, layer) = (pass.model, self.layer);
        let mut residual = residual;
        // The experts read the norm's output, which a kernel of both norm and matmul does not write.
        engine.run(model.norm_of(&self.ln2, residual, None))?;
        engine.run(model.decode_matmul(None, (Param::Router, layer), &self.router(model)))?;
        self.activate(engine, model)?;
        if let Some(shared) = &self.shared {
            let fc = shared.fc(model, layer, self.ln2.out);
            engine.run(model.decode_matmul(None, (Param::SharedFcw, layer), &fc))?;
            let fcproj = shared.fcproj(model, layer, [self.residual3, residual]);
            engine.run(model.decode_matmul(None, (Param::SharedFcprojw, layer), &fcproj))?;
            residual = self.residual3;
        }
        self.finish(engine, model, residual)
    }
}
