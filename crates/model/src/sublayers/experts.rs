//! Experts: router, dispatch, fc and activation of each expert, fcproj of each expert, combine; and an MLP of all tokens beside them.

use crate::activations::Activations;
use crate::decoder::{BackwardPass, DecodePass, Decoder, ForwardPass, NormBuffers, Rows, SubLayer};
use crate::descriptor::{Descriptor, Experts};
use crate::params::{Param, Shard};
use crate::recompute::Recompute;
use crate::sharding::{LayerHooks, Zero};
use anyhow::Context;
use engine::ops::{
    ActivationForward, ActivationInput, ChoiceGradients, Combine, Dispatch, Epilogue, MatmulBackward, MatmulForward,
    Mix, Quantize, Route, RouteBackward, Router,
};
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Engine, Result};
use std::sync::Arc;

/// The activations of the experts in one layer. P is the number of rows in expert order, see [`Router::rows`]. If R ranks share the
/// experts, the tokens of all of them are routed, and the router of each rank has its own experts as the local ones; otherwise R is 1.
#[derive(Clone, Copy, Debug)]
struct Mixture {
    layer: usize,
    experts: Experts,
    router: Router,
    exchange: Option<Exchange>,
    ln2: NormBuffers,
    /// (B, T, E)
    logits: Tensor,
    gradients: Option<RouterGradients>,
    /// (R, B, T, k) i32
    chosen: Tensor,
    /// (R, B, T, k) f32
    weights: Tensor,
    /// (R, B, T, k) i32
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

/// The buffers through which the ranks that share experts exchange the values of their tokens. Each rank's part has room for the tokens of
/// the largest batch of a rank. The values after a smaller batch are undefined, and so is what is computed from them.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    shard: Shard,
    /// (R, B, T, C): the outputs of ln2, then the sums of this rank's experts; likewise the gradients
    tokens: Tensor,
    /// (R, B, T, E)
    logits: Tensor,
    /// This rank's parts: the outputs of ln2 (B, T, C), and the logits (B, T, E)
    own: [Tensor; 2],
}

impl Exchange {
    /// Returns the part of a rank of values of all tokens.
    fn part(&self, all: Tensor, rank: usize) -> Tensor {
        all.part(rank, self.shard.ranks)
    }
}

/// The gradients of a router in training.
#[derive(Clone, Copy, Debug)]
struct RouterGradients {
    /// (B, T, E)
    logits: Tensor,
    /// (R, B, T, k) f32, see [`ChoiceGradients`]
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
pub fn widest_gradient(d: &Descriptor, zero: Zero, experts: &Experts, tokens: usize) -> usize {
    let rows = zero.router(experts).rows(zero.expert_ranks() * tokens);
    (rows * d.fc_channels()).max(tokens * 2 * d.shared_channels())
}

/// Plans the loads of experts: in training those of all layers, which are reported.
pub fn plan_loads(activations: &mut Activations, d: &Descriptor, experts: Experts, training: bool) -> Tensor {
    let layers = if training { d.layers } else { 1 };
    activations.add_rows("loads of experts", layers, 1, experts.count as usize, DType::I32)
}

/// Plans the activations of experts in all layers. Returns the sub-layer of each layer.
pub fn plan(
    activations: &mut Activations,
    d: &Descriptor,
    (experts, zero): (Experts, Zero),
    loads: Tensor,
    training: bool,
) -> impl Fn(usize) -> Arc<dyn SubLayer> + use<> {
    let (kept, dtype) = (activations.kept, activations.dtype);
    let router @ Router { count, active, .. } = zero.router(&experts);
    let shared_channels = d.shared_channels();
    let tokens = zero.expert_ranks() * activations.tokens();
    let rows = router.rows(tokens);
    // In FP8, transposed copies are kept instead.
    let keeps = activations.recompute < Recompute::Activation && !activations.fp8;
    let recomputed = if keeps { kept } else { 1 };
    let ln2 = activations.norm("ln2", [Param::Ln2w, Param::Ln2b], Param::Router);
    let logits = activations.add("router logits", kept, count, dtype);
    let gradients = training.then(|| RouterGradients {
        logits: activations.add("d router logits", 1, count, dtype),
        choices: activations.add_rows("d choices of experts", 1, tokens, active, DType::F32),
    });
    let mut add = |name, parts, width, dtype| activations.add_rows(name, parts, tokens, width, dtype);
    let chosen = add("chosen experts", kept, active, DType::I32);
    let weights = add("weights of experts", kept, active, DType::F32);
    let positions = add("positions in expert order", kept, active, DType::I32);
    let exchanged = zero
        .shares_experts()
        .then_some([("tokens of all ranks", d.channels), ("router logits of all ranks", count)])
        .map(|buffers| buffers.map(|(name, width)| add(name, 1, width, dtype)));
    let mut add = |name, parts, width, dtype| activations.add_rows(name, parts, rows, width, dtype);
    let sources = add("sources in expert order", kept, 1, DType::I32);
    let dispatched = add("dispatched", recomputed, d.channels, dtype);
    let fc = add("fc", kept, d.fc_channels(), dtype);
    let activated = add("activated", recomputed, d.mlp_channels, dtype);
    let outputs = add("outputs of experts", 1, d.channels, dtype);
    let groups = activations.add_rows("groups of experts", kept, 1, router.layout_len(tokens), DType::I32);
    let layers = if training { d.layers } else { 1 };
    let shared = (shared_channels > 0).then(|| SharedExpert {
        fc: activations.add("shared fc", kept, 2 * shared_channels, dtype),
        activated: activations.add("shared activated", recomputed, shared_channels, dtype),
    });
    let kept_outputs = activations.kept_outputs;
    let residual3 = activations.add("residual3", kept_outputs, d.channels, dtype);
    move |layer| {
        let part = |tensor: Tensor| tensor.part(layer % kept, kept);
        let recomputed = |tensor: Tensor| tensor.part(layer % recomputed, recomputed);
        let (ln2, logits) = (ln2(layer), part(logits));
        let own = [ln2.out, logits];
        Arc::new(Mixture {
            layer,
            experts,
            router,
            exchange: exchanged.map(|[tokens, logits]| Exchange { shard: zero.shard(), tokens, logits, own }),
            ln2,
            logits,
            gradients,
            chosen: part(chosen),
            weights: part(weights),
            positions: part(positions),
            sources: part(sources),
            groups: part(groups),
            loads: loads.part(layer % layers, layers),
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

    fn route(&self, model: &Decoder) -> Route {
        let Self { router, chosen: experts, weights, positions, sources, groups, loads, .. } = *self;
        let (logits, trains) =
            (self.exchange.map_or(self.logits, |exchange| exchange.logits), self.gradients.is_some());
        let bias = model.optional(Param::RouterBias, self.layer);
        Route { logits, bias, experts, weights, positions, sources, groups, loads, router, trains }
    }

    /// Returns the copy to expert order of the values of all tokens: those that were gathered, or `own` (B, T, C).
    fn dispatch(&self, model: &Decoder, out: Tensor, own: Tensor, weights: Option<Tensor>) -> Dispatch {
        let (c, inp) = (model.descriptor.channels, self.exchange.map_or(own, |exchange| exchange.tokens));
        let (groups, active) = (self.router.groups(self.groups), self.router.active);
        Dispatch { out, inp, sources: self.sources, groups, weights, c, active, fp8: None }
    }

    /// Returns the sums of rows in expert order for each token.
    fn combine(&self, model: &Decoder, out: Tensor, residual: Option<Tensor>, weights: Option<Tensor>) -> Combine {
        let (c, active) = (model.descriptor.channels, self.router.active);
        Combine { out, residual, inp: self.outputs, weights, positions: self.positions, c, active }
    }

    /// Returns a linear layer with a matrix for each expert.
    fn of_experts(&self, model: &Decoder, weight: Param, tensors: [Tensor; 2], epilogue: Epilogue) -> MatmulForward {
        let groups = Some(self.router.groups(self.groups));
        MatmulForward { groups, ..linear(model, self.layer, weight, tensors, epilogue) }
    }

    /// Begins to gather the values of all tokens, if ranks share the experts. `own` are those of this rank.
    fn gather(&self, engine: &mut dyn Engine, hooks: &mut dyn LayerHooks, own: Tensor) -> Result<()> {
        let Some(Exchange { tokens: whole, .. }) = self.exchange else { return Ok(()) };
        hooks.gather_tokens(engine, self.layer, Sharded { whole, shard: own })
    }

    /// Waits for exchanged values, if ranks share the experts.
    fn wait(&self, engine: &mut dyn Engine, hooks: &mut dyn LayerHooks) -> Result<()> {
        if self.exchange.is_some() { hooks.wait_for_tokens(engine) } else { Ok(()) }
    }

    /// Computes the activations of the experts from the logits. In FP8, quantizes those that the second linear layer reads, if `quantizes`.
    fn activate(&self, engine: &mut dyn Engine, model: &Decoder, quantizes: bool) -> Result<()> {
        engine.run(self.route(model))?;
        let fp8 = self.in_expert_order(model.fp8_input(self.layer, Param::Fcw, self.dispatched));
        engine.run(Dispatch { fp8, ..self.dispatch(model, self.dispatched, self.ln2.out, None) })?;
        let epilogue = Epilogue::Activation(model.descriptor.activation, self.fc);
        let mut fc = self.of_experts(model, Param::Fcw, [self.activated, self.dispatched], epilogue);
        if let Some(fp8) = &mut fc.fp8 {
            let next = model.fp8_input(self.layer, Param::Fcprojw, self.activated).filter(|_| quantizes);
            fp8.out = self.in_expert_order(next);
        }
        engine.run(fc)
    }

    /// Returns a quantization of rows in expert order.
    fn in_expert_order(&self, quantize: Option<Quantize>) -> Option<Quantize> {
        let groups = Some(self.router.groups(self.groups));
        quantize.map(|quantize| Quantize { groups, ..quantize })
    }

    /// Computes the outputs of the experts from the activations.
    fn project(&self, engine: &mut dyn Engine, model: &Decoder) -> Result<()> {
        engine.run(self.of_experts(model, Param::Fcprojw, [self.outputs, self.activated], Epilogue::None))
    }

    /// Computes the output from the outputs of the experts and the activations of the MLP beside them.
    fn finish(
        &self,
        engine: &mut dyn Engine,
        model: &Decoder,
        hooks: &mut dyn LayerHooks,
        mut residual: Tensor,
    ) -> Result<()> {
        let Self { layer, residual3, weights, .. } = *self;
        // Ranks that share the experts add the sums to this. The outputs of the experts are no longer needed then.
        let beside = if self.exchange.is_some() { self.outputs.slice(0, residual3.len) } else { residual3 };
        if let Some(exchange) = self.exchange {
            let whole = exchange.tokens;
            engine.run(self.combine(model, whole, None, Some(weights)))?;
            let shard = exchange.part(whole, exchange.shard.rank);
            hooks.reduce_tokens(engine, layer, Sharded { whole, shard })?;
        }
        if let Some(shared) = &self.shared {
            engine.run(shared.fcproj(model, layer, [beside, residual]))?;
            residual = beside;
        }
        let Some(exchange) = self.exchange else {
            return engine.run(self.combine(model, residual3, Some(residual), Some(weights)));
        };
        hooks.wait_for_tokens(engine)?;
        let added = exchange.part(exchange.tokens, exchange.shard.rank).slice(0, residual3.len);
        engine.run(Mix { out: residual3, inp: residual, added, scale: None, added_scale: None, subtracts: false })
    }

    /// Computes the activations from the output of ln2, and the output unless it is not needed.
    ///
    /// If ranks share the experts, they exchange tokens while they compute the MLP beside the experts.
    fn compute(
        &self,
        engine: &mut dyn Engine,
        model: &Decoder,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
        output: bool,
    ) -> Result<()> {
        if let Some(Exchange { own: [normed, _], .. }) = self.exchange {
            self.gather(engine, hooks, normed)?;
        }
        engine.run(self.router(model))?;
        if let Some(Exchange { logits: whole, own: [_, shard], .. }) = self.exchange {
            hooks.gather_tokens(engine, self.layer, Sharded { whole, shard })?;
        }
        if let Some(shared) = &self.shared {
            model.quantized_input(self.layer, Param::SharedFcw, self.ln2.out).map_or(Ok(()), |inp| engine.run(inp))?;
            let mut fc = shared.fc(model, self.layer, self.ln2.out);
            if let Some(fp8) = &mut fc.fp8 {
                fp8.out = model.fp8_input(self.layer, Param::SharedFcprojw, shared.activated).filter(|_| output);
            }
            engine.run(fc)?;
        }
        self.wait(engine, hooks)?;
        self.activate(engine, model, output)?;
        if !output {
            return Ok(());
        }
        self.project(engine, model)?;
        self.finish(engine, model, hooks, residual)
    }

    /// Returns the backward pass of a linear layer with a matrix for each expert.
    fn experts_backward(&self, pass: &BackwardPass, weight: Param, grads: [Tensor; 2], inp: Tensor) -> MatmulBackward {
        let groups = Some(self.router.groups(self.groups));
        MatmulBackward { groups, ..pass.linear(self.layer, weight, grads, inp, None) }
    }

    /// Returns the input of a linear layer whose backward pass computes the gradient of an activation. `weight` and `inp` are those of the
    /// linear layer before the activation.
    fn activation_of(&self, pass: &BackwardPass, preactivation: Tensor, weight: Param, inp: Tensor) -> ActivationInput {
        let (model, activation) = (pass.model, pass.model.descriptor.activation);
        let shape = model.linear_shape(weight, inp);
        let forward = ActivationForward { inp, weight: model.param(weight, self.layer), bias: None, shape };
        ActivationInput { activation, preactivation, recompute: recomputes(pass).then_some(forward) }
    }

    /// Returns the gradient of the logits of this rank's tokens, and that of the bias.
    fn route_backward(&self, pass: &BackwardPass, gradients: RouterGradients) -> RouteBackward {
        let Self { router, logits, loads, .. } = *self;
        let own = |all: Tensor| self.exchange.map_or(all, |exchange| exchange.part(all, exchange.shard.rank));
        let tokens = self.chosen.len / router.active;
        let scale = pass.dloss / pass.model.descriptor.layers as f32;
        let [aux_loss, z_loss] = [self.experts.aux_loss, self.experts.z_loss].map(|coefficient| scale * coefficient);
        let RouterGradients { logits: dlogits, choices } = gradients;
        let (experts, weights, gradients) = (own(self.chosen), own(self.weights), own(choices));
        let dbias = pass.model.gradient(pass.grads, Param::RouterBias, self.layer);
        RouteBackward { dlogits, dbias, logits, experts, weights, gradients, loads, tokens, router, aux_loss, z_loss }
    }

    /// Computes the gradients of the MLP beside the experts, if there is one. The gradient of its input is `dchannels`, or is added to it.
    fn shared_backward(&self, engine: &mut dyn Engine, pass: &BackwardPass, adds_to_dinp: bool) -> Result<()> {
        let Some(SharedExpert { fc, activated }) = self.shared else { return Ok(()) };
        let (layer, inp, dfc) = (self.layer, self.ln2.out, pass.dwide.slice(0, fc.len));
        let mut fcproj = pass.linear(layer, Param::SharedFcprojw, [dfc, pass.dresidual], activated, None);
        if let Some(fp8) = &mut fcproj.fp8 {
            fp8.dinp = pass.model.fp8_output_gradient(layer, Param::SharedFcw, dfc, None);
        }
        let activation = Some(self.activation_of(pass, fc, Param::SharedFcw, inp));
        engine.run(MatmulBackward { activation, ..fcproj })?;
        pass.model.fp8_unkept_input(layer, Param::SharedFcw, inp).map_or(Ok(()), |inp| engine.run(inp))?;
        let fc = pass.linear(layer, Param::SharedFcw, [pass.dchannels, dfc], inp, None);
        engine.run(MatmulBackward { adds_to_dinp, ..fc })
    }

    /// Sums the gradients of the inputs of the experts for each token, and adds the sums over the ranks to `dchannels`.
    fn combine_gradients(
        &self,
        engine: &mut dyn Engine,
        pass: &BackwardPass,
        hooks: &mut dyn LayerHooks,
        exchange: &Exchange,
    ) -> Result<()> {
        let whole = exchange.tokens;
        for rank in 0..exchange.shard.ranks {
            let residual = (rank == exchange.shard.rank).then_some(pass.dchannels);
            let positions = exchange.part(self.positions, rank);
            let combine = self.combine(pass.model, exchange.part(whole, rank), residual, None);
            engine.run(Combine { positions, ..combine })?;
        }
        hooks.reduce_tokens(engine, self.layer, Sharded { whole, shard: pass.dchannels })?;
        hooks.wait_for_tokens(engine)
    }
}

/// Reports whether the backward pass recomputes the activations. A layer that was recomputed as a whole has all of them.
fn recomputes(pass: &BackwardPass) -> bool {
    matches!(pass.recompute, Recompute::Activation | Recompute::ActivationAndNorms)
}

impl SubLayer for Mixture {
    fn rows(&self, Rows { own: rows, common, .. }: Rows, d: &Descriptor) -> Arc<dyn SubLayer> {
        let router @ Router { count, active, .. } = self.router;
        let shared_channels = d.shared_channels();
        let of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        let tokens = self.exchange.map_or(rows, |exchange| exchange.shard.ranks * common);
        let of_all = |tensor: Tensor, width: usize| tensor.slice(0, tokens * width);
        let sorted = |tensor: Tensor, width: usize| tensor.slice(0, router.rows(tokens) * width);
        let exchange = |exchange: Exchange| Exchange {
            shard: exchange.shard,
            tokens: of_all(exchange.tokens, d.channels),
            logits: of_all(exchange.logits, count),
            own: [exchange.own[0].slice(0, common * d.channels), exchange.own[1].slice(0, common * count)],
        };
        Arc::new(Self {
            layer: self.layer,
            experts: self.experts,
            router,
            exchange: self.exchange.map(exchange),
            ln2: self.ln2.rows(rows, d.channels),
            logits: of(self.logits, count),
            gradients: self.gradients.map(|RouterGradients { logits, choices }| RouterGradients {
                logits: of(logits, count),
                choices: of_all(choices, active),
            }),
            chosen: of_all(self.chosen, active),
            weights: of_all(self.weights, active),
            positions: of_all(self.positions, active),
            sources: sorted(self.sources, 1),
            groups: self.groups.slice(0, router.layout_len(tokens)),
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
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        self.compute(engine, pass.model, hooks, residual, true)
    }

    fn recompute(
        &self,
        engine: &mut dyn Engine,
        pass: &ForwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
        last: bool,
    ) -> Result<()> {
        self.compute(engine, pass.model, hooks, residual, !last)
    }

    /// If ranks share the experts, they exchange tokens while they compute the gradients of the MLP beside the experts, and the gradients
    /// of the choices while they compute those of fc.
    fn backward(
        &self,
        engine: &mut dyn Engine,
        pass: &BackwardPass,
        hooks: &mut dyn LayerHooks,
        residual: Tensor,
    ) -> Result<()> {
        let Self { layer, ref ln2, fc, activated, outputs, dispatched, exchange, .. } = *self;
        let (model, alone) = (pass.model, exchange.is_none());
        let gradients = self.gradients.context("this model was planned for inference only")?;
        if pass.recompute == Recompute::ActivationAndNorms {
            model.recompute_norm(engine, ln2, residual)?;
        }
        if recomputes(pass) && model.fp8.is_none() {
            self.gather(engine, hooks, ln2.out)?;
            self.wait(engine, hooks)?;
            engine.run(self.dispatch(model, dispatched, ln2.out, None))?;
        }

        self.gather(engine, hooks, pass.dresidual)?;
        if !alone {
            self.shared_backward(engine, pass, false)?;
        }
        self.wait(engine, hooks)?;
        let fp8 = self.in_expert_order(model.fp8_output_gradient(layer, Param::Fcprojw, outputs, None));
        engine.run(Dispatch { fp8, ..self.dispatch(model, outputs, pass.dresidual, Some(self.weights)) })?;
        let dfc = pass.dwide.slice(0, fc.len);
        let mut fcproj = self.experts_backward(pass, Param::Fcprojw, [dfc, outputs], activated);
        if let Some(fp8) = &mut fcproj.fp8 {
            fp8.dout_is_quantized = true;
            fp8.dinp = self.in_expert_order(model.fp8_output_gradient(layer, Param::Fcw, dfc, None));
        }
        let activation = Some(self.activation_of(pass, fc, Param::Fcw, dispatched));
        engine.run(MatmulBackward { activation, ..fcproj })?;
        let (out, positions, channels) = (gradients.choices, self.positions, model.descriptor.mlp_channels);
        engine.run(ChoiceGradients { out, positions, preactivation: fc, dpreactivation: dfc, channels })?;
        if let Some(exchange) = exchange {
            let shard = exchange.part(out, exchange.shard.rank);
            hooks.reduce_tokens(engine, layer, Sharded { whole: out, shard })?;
        }
        if let Some(inp) = model.fp8_unkept_input(layer, Param::Fcw, dispatched) {
            let fp8 = self.in_expert_order(Some(inp));
            engine.run(Dispatch { fp8, ..self.dispatch(model, dispatched, ln2.out, None) })?;
        }
        engine.run(self.experts_backward(pass, Param::Fcw, [outputs, dfc], dispatched))?;
        if alone {
            engine.run(self.combine(model, pass.dchannels, None, None))?;
        }
        self.wait(engine, hooks)?;
        engine.run(self.route_backward(pass, gradients))?;
        let router = pass.linear(layer, Param::Router, [pass.dchannels, gradients.logits], ln2.out, None);
        engine.run(MatmulBackward { adds_to_dinp: alone || self.shared.is_some(), ..router })?;
        match &exchange {
            None => self.shared_backward(engine, pass, true),
            Some(exchange) => self.combine_gradients(engine, pass, hooks, exchange),
        }
    }

    fn decode(&self, engine: &mut dyn Engine, pass: &DecodePass, residual: Tensor) -> Result<()> {
        let (model, layer) = (pass.model, self.layer);
        let mut residual = residual;
        // The experts read the norm's output, which a kernel of both norm and matmul does not write.
        engine.run(model.norm_of(&self.ln2, residual, None))?;
        engine.run(model.decode_matmul(None, (Param::Router, layer), &self.router(model)))?;
        self.activate(engine, model, true)?;
        if let Some(shared) = &self.shared {
            let fc = shared.fc(model, layer, self.ln2.out);
            engine.run(model.decode_matmul(None, (Param::SharedFcw, layer), &fc))?;
            let fcproj = shared.fcproj(model, layer, [self.residual3, residual]);
            engine.run(model.decode_matmul(None, (Param::SharedFcprojw, layer), &fcproj))?;
            residual = self.residual3;
        }
        self.project(engine, model)?;
        engine.run(self.combine(model, self.residual3, Some(residual), Some(self.weights)))
    }
}
