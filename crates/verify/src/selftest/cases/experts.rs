//! Mixtures of experts: all operations of a sub-layer between its norm and its output, and their gradients.

use super::{Case, UNIT, accumulated, case, f32, i32, input, output, workload};
use crate::selftest::case::{Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AttentionShape, ChoiceGradients, Combine, Dispatch, Epilogue,
    ExpertRange, Groups, MatmulBackward, MatmulForward, MatmulShape, Route, RouteBackward, Router, RouterScores,
};
use engine::tensor::Tensor;
use engine::{Engine, Result, Workload};
use std::sync::Arc;

/// Returns mixtures of few experts, some of them without a token, and of one.
pub(super) fn edge_cases() -> Vec<Case> {
    let router = |count, active, scores, normalized| Router {
        count,
        active,
        scores,
        normalized,
        local: ExpertRange { first: 0, count },
    };
    let of = |first, count, router| Router { local: ExpertRange { first, count }, ..router };
    let mut cases = Vec::new();
    for (rows, router, c, f) in [
        (1, router(1, 1, RouterScores::Softmax, false), 64, 64),
        (70, router(8, 2, RouterScores::Softmax, true), 72, 40),
        (300, router(40, 3, RouterScores::Sigmoid, true), 64, 136),
        (33, router(200, 8, RouterScores::Softmax, false), 136, 64),
        (150, of(3, 2, router(8, 3, RouterScores::Softmax, true)), 72, 40),
        (40, of(60, 40, router(100, 6, RouterScores::Sigmoid, false)), 64, 72),
    ] {
        for recomputes in [false, true] {
            cases.extend(mixture(Shape { rows, router, c, f, recomputes }));
        }
    }
    cases
}

/// Returns a layer of Qwen3-30B-A3B.
pub(super) fn model_cases() -> Vec<Case> {
    let local = ExpertRange { first: 0, count: 128 };
    let router = Router { count: 128, active: 8, scores: RouterScores::Softmax, normalized: true, local };
    mixture(Shape { rows: 2048, router, c: 2048, f: 768, recomputes: false })
}

#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    router: Router,
    c: usize,
    /// Channels of an expert.
    f: usize,
    /// Whether the backward pass recomputes the activation.
    recomputes: bool,
}

impl Shape {
    fn name(self) -> String {
        let Self { rows, router: Router { count, active, scores, normalized, local }, c, f, recomputes } = self;
        let normalized = if normalized { " normalized" } else { "" };
        let recomputes = if recomputes { " recompute" } else { "" };
        let ExpertRange { first, count: locals } = local;
        let local = if locals < count { format!(" local {first}+{locals}") } else { String::new() };
        format!("{rows}x{c} E{count} K{active} F{f} {scores:?}{normalized}{local}{recomputes}").to_lowercase()
    }

    fn workload(self) -> Workload {
        let workload = workload(1, self.rows, self.c, 1, 128, 0);
        let attention = AttentionShape { head_size: 64, ..workload.attention };
        Workload { attention, router: Some(self.router), mlp_channels: self.f, ..workload }
    }

    /// Returns the FLOPs of a GEMM of all experts.
    fn flops(self) -> usize {
        2 * self.rows * self.router.active * self.c * self.f
    }
}

/// The tensors of a mixture.
struct Mixture {
    shape: Shape,
    trains: bool,
    logits: usize,
    inp: usize,
    fcw: usize,
    fcprojw: usize,
    chosen: usize,
    weights: usize,
    positions: usize,
    sources: usize,
    groups: usize,
    loads: usize,
    dispatched: usize,
    fc: usize,
    activated: usize,
    outputs: usize,
}

impl Mixture {
    /// Adds the tensors of the forward pass.
    fn new(shape: Shape, trains: bool, operands: &mut Vec<Operand>) -> Self {
        let Shape { rows, router, c, f, .. } = shape;
        let (count, active, p, local) = (router.count, router.active, router.rows(rows), router.local.count);
        let mut add = |operand| {
            operands.push(operand);
            operands.len() - 1
        };
        let unchecked = |name, len| Operand { checked: None, ..output(name, len, Tolerance::CHAIN) };
        let words = |name, len| i32(input(name, len, Init::None));
        let scaled = |channels: usize| Init::Uniform { mean: 0.0, spread: (3.0 / channels as f32).sqrt() };
        Self {
            shape,
            trains,
            logits: add(input("logits", rows * count, Init::Uniform { mean: 0.0, spread: 3.0 })),
            inp: add(input("inp", rows * c, UNIT)),
            fcw: add(input("fcw", local * 2 * f * c, scaled(c))),
            fcprojw: add(input("fcprojw", local * c * f, scaled(f))),
            chosen: add(words("chosen", rows * active)),
            weights: add(f32(output("weights", rows * active, Tolerance::CHAIN))),
            positions: add(words("positions", rows * active)),
            sources: add(words("sources", p)),
            groups: add(words("groups", router.layout_len(rows))),
            loads: add(words("loads", count)),
            dispatched: add(unchecked("dispatched", p * c)),
            fc: add(unchecked("fc", p * 2 * f)),
            activated: add(unchecked("activated", p * f)),
            outputs: add(unchecked("outputs", p * c)),
        }
    }

    fn groups(&self, x: &[Tensor]) -> Groups {
        self.shape.router.groups(x[self.groups])
    }

    fn dispatch(&self, x: &[Tensor], out: usize, inp: usize, weights: Option<Tensor>) -> Dispatch {
        let Shape { router, c, .. } = self.shape;
        let (sources, groups) = (x[self.sources], self.groups(x));
        Dispatch { out: x[out], inp: x[inp], sources, groups, weights, c, active: router.active }
    }

    fn linear(&self, [c, oc]: [usize; 2]) -> MatmulShape {
        MatmulShape { rows: self.shape.router.rows(self.shape.rows), c, oc }
    }

    /// Computes the activations.
    fn forward(&self, e: &mut dyn Engine, x: &[Tensor]) -> Result<()> {
        let Shape { router, c, f, .. } = self.shape;
        e.run(Route {
            logits: x[self.logits],
            experts: x[self.chosen],
            weights: x[self.weights],
            positions: x[self.positions],
            sources: x[self.sources],
            groups: x[self.groups],
            loads: x[self.loads],
            router,
            trains: self.trains,
        })?;
        e.run(self.dispatch(x, self.dispatched, self.inp, None))?;
        let fc = MatmulForward {
            out: x[self.activated],
            inp: x[self.dispatched],
            weight: x[self.fcw],
            bias: None,
            epilogue: Epilogue::Activation(Activation::SwiGlu, x[self.fc]),
            shape: self.linear([c, 2 * f]),
            fp8: None,
            groups: Some(self.groups(x)),
        };
        e.run(fc)?;
        let (out, inp, weight) = (x[self.outputs], x[self.activated], x[self.fcprojw]);
        e.run(MatmulForward { out, inp, weight, epilogue: Epilogue::None, shape: self.linear([f, c]), ..fc })
    }
}

/// Returns the forward pass and the gradients.
fn mixture(shape: Shape) -> Vec<Case> {
    let mut cases = vec![backward(shape)];
    if !shape.recomputes {
        cases.push(forward(shape));
    }
    cases
}

fn forward(shape: Shape) -> Case {
    let Shape { rows, router: Router { active, count, .. }, c, f, .. } = shape;
    let mut operands = vec![output("out", rows * c, Tolerance::CHAIN), input("residual", rows * c, UNIT)];
    let mixture = Mixture::new(shape, false, &mut operands);
    let floats = count * 3 * c * f + rows * (2 * c + count) + 2 * rows * active * (2 * c + 3 * f);
    let work = Work { floats, bytes: 0, flops: 3 * shape.flops() };
    case("experts", shape.name(), shape.workload(), operands, work, move |e, x| {
        mixture.forward(e, x)?;
        let (weights, positions) = (Some(x[mixture.weights]), x[mixture.positions]);
        e.run(Combine { out: x[0], residual: Some(x[1]), inp: x[mixture.outputs], weights, positions, c, active })
    })
}

fn backward(shape: Shape) -> Case {
    let Shape { rows, router, c, f, recomputes } = shape;
    let Router { active, count, .. } = router;
    let p = router.rows(rows);
    let mut operands = vec![
        output("dinp", rows * c, Tolerance::SQUARED_CHAIN),
        output("dlogits", rows * count, Tolerance::ROUTER),
        accumulated("dfcw", router.local.count * 2 * f * c, Tolerance::CHAIN),
        accumulated("dfcprojw", router.local.count * c * f, Tolerance::CHAIN),
        input("dout", rows * c, UNIT),
        Operand { checked: None, ..output("dfc", p * 2 * f, Tolerance::CHAIN) },
        f32(Operand { checked: None, ..output("gradients", rows * active, Tolerance::ROUTER) }),
    ];
    let mixture = Arc::new(Mixture::new(shape, true, &mut operands));
    let before = mixture.clone();
    let floats = 2 * count * 3 * c * f + rows * (2 * c + count) + 2 * rows * active * (3 * c + 5 * f);
    let work = Work { floats, bytes: 0, flops: 6 * shape.flops() };
    let case = case("experts_backward", shape.name(), shape.workload(), operands, work, move |e, x| {
        let m = &*mixture;
        e.run(m.dispatch(x, m.outputs, 4, Some(x[m.weights])))?;
        let shape = m.linear([c, 2 * f]);
        let recompute = ActivationForward { inp: x[m.dispatched], weight: x[m.fcw], bias: None, shape };
        let recompute = recomputes.then_some(recompute);
        let fcproj = MatmulBackward {
            activation: Some(ActivationInput { activation: Activation::SwiGlu, preactivation: x[m.fc], recompute }),
            groups: Some(m.groups(x)),
            ..MatmulBackward::new(x[5], Some(x[3]), [x[m.outputs], x[m.activated], x[m.fcprojw]], m.linear([f, c]))
        };
        e.run(fcproj)?;
        let (positions, preactivation, dpreactivation) = (x[m.positions], x[m.fc], x[5]);
        e.run(ChoiceGradients { out: x[6], positions, preactivation, dpreactivation, channels: f })?;
        e.run(RouteBackward {
            dlogits: x[1],
            logits: x[m.logits],
            experts: x[m.chosen],
            weights: x[m.weights],
            gradients: x[6],
            loads: x[m.loads],
            tokens: rows,
            router,
            aux_loss: 0.1,
            z_loss: 0.01,
        })?;
        let (dinp, dweight, dout, inp, weight) = (x[m.outputs], Some(x[2]), x[5], x[m.dispatched], x[m.fcw]);
        e.run(MatmulBackward { dinp, dweight, dout, inp, weight, activation: None, shape, ..fcproj })?;
        let inp = x[m.outputs];
        e.run(Combine { out: x[0], residual: None, inp, weights: None, positions, c, active })
    });
    Case { before: Some(Box::new(move |e, x| before.forward(e, x))), ..case }
}
