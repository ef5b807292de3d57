//! Mixtures of experts: all operations of a sub-layer between its norm and its output, and their gradients.

use super::{Case, UNIT, accumulated, case, f32, fp8, i32, input, output, workload};
use crate::selftest::case::{Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AttentionShape, ChoiceGradients, Combine, Dispatch, Epilogue,
    ExpertRange, Fp8Accumulation, Fp8Backward, Fp8Format, Fp8Forward, Fp8Scale, Groups, MatmulBackward, MatmulForward,
    MatmulShape, Quantize, Route, RouteBackward, Router, RouterScores, Scaling,
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
        for (recomputes, biased) in [(false, false), (true, false), (false, true)] {
            cases.extend(mixture(Shape { rows, router, c, f, recomputes, biased, fp8: false }));
        }
    }
    cases
}

/// Returns the router of Qwen3-30B-A3B.
fn of_qwen3() -> Router {
    let local = ExpertRange { first: 0, count: 128 };
    Router { count: 128, active: 8, scores: RouterScores::Softmax, normalized: true, local }
}

/// Returns a layer of Qwen3-30B-A3B.
pub(super) fn model_cases() -> Vec<Case> {
    let router = of_qwen3();
    mixture(Shape { rows: 2048, router, c: 2048, f: 768, recomputes: false, biased: false, fp8: false })
}

/// Returns mixtures in FP8.
pub(super) fn edge_cases_in_fp8() -> Vec<Case> {
    let router = |count, active, normalized| Router {
        count,
        active,
        scores: RouterScores::Softmax,
        normalized,
        local: ExpertRange { first: 0, count },
    };
    let shapes =
        [(16, router(1, 1, false), 64, 64), (80, router(8, 2, true), 80, 48), (304, router(40, 3, true), 64, 144)];
    let shape =
        |(rows, router, c, f), recomputes| Shape { rows, router, c, f, recomputes, biased: recomputes, fp8: true };
    shapes.into_iter().flat_map(|it| [false, true].map(|recomputes| backward(shape(it, recomputes)))).collect()
}

/// Returns a layer of Qwen3-30B-A3B in FP8.
pub(super) fn model_cases_in_fp8() -> Vec<Case> {
    let router = of_qwen3();
    vec![backward(Shape { rows: 2048, router, c: 2048, f: 768, recomputes: false, biased: false, fp8: true })]
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
    /// Whether a bias changes the choice of experts.
    biased: bool,
    /// Whether the linear layers multiply in FP8.
    fp8: bool,
}

impl Shape {
    fn name(self) -> String {
        let Self { rows, router, c, f, recomputes, biased, fp8 } = self;
        let Router { count, active, scores, normalized, local } = router;
        let normalized = if normalized { " normalized" } else { "" };
        let recomputes = if recomputes { " recompute" } else { "" };
        let biased = if biased { " bias" } else { "" };
        let fp8 = if fp8 { " fp8" } else { "" };
        let ExpertRange { first, count: locals } = local;
        let local = if locals < count { format!(" local {first}+{locals}") } else { String::new() };
        format!("{rows}x{c} E{count} K{active} F{f} {scores:?}{normalized}{local}{biased}{recomputes}{fp8}")
            .to_lowercase()
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
    bias: Option<usize>,
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
    /// The first of the operands in FP8: both layouts of inputs, weights and gradients, and then their scales.
    fp8: usize,
}

/// A tensor in FP8.
#[derive(Clone, Copy)]
enum InFp8 {
    Dispatched,
    Activated,
    Fcw,
    Fcprojw,
    Dout,
    Dfc,
}

/// Names and formats of the tensors in FP8.
const IN_FP8: [([&str; 4], Fp8Format); 6] = [
    (
        ["dispatched in FP8", "dispatched in FP8, transposed", "scale of dispatched", "amax of dispatched"],
        Fp8Format::E4m3,
    ),
    (["activated in FP8", "activated in FP8, transposed", "scale of activated", "amax of activated"], Fp8Format::E4m3),
    (["fcw in FP8", "fcw in FP8, transposed", "scale of fcw", "amax of fcw"], Fp8Format::E4m3),
    (["fcprojw in FP8", "fcprojw in FP8, transposed", "scale of fcprojw", "amax of fcprojw"], Fp8Format::E4m3),
    (["dout in FP8", "dout in FP8, transposed", "scale of dout", "amax of dout"], Fp8Format::E5m2),
    (["dfc in FP8", "dfc in FP8, transposed", "scale of dfc", "amax of dfc"], Fp8Format::E5m2),
];

impl Mixture {
    /// Adds the tensors of the forward pass.
    fn new(shape: Shape, trains: bool, operands: &mut Vec<Operand>) -> Self {
        let Shape { rows, router, c, f, biased, .. } = shape;
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
            bias: biased.then(|| add(input("bias", count, Init::Uniform { mean: 0.0, spread: 0.5 }))),
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
            fp8: if shape.fp8 { Self::add_fp8(shape, operands) } else { 0 },
        }
    }

    /// Adds the operands in FP8. Returns the index of the first.
    fn add_fp8(Shape { rows, router, c, f, .. }: Shape, operands: &mut Vec<Operand>) -> usize {
        let (first, p, count) = (operands.len(), router.rows(rows), router.count);
        let lens = [p * c, p * f, count * 2 * f * c, count * c * f, p * c, p * 2 * f];
        for (([out, transposed, ..], _), len) in IN_FP8.into_iter().zip(lens) {
            operands.extend([out, transposed].map(|name| fp8::fp8(name, len)));
        }
        for ([.., scale, amax], format) in IN_FP8 {
            // Rounding of the engines differs before the amax.
            operands.extend(fp8::scale([scale, amax], format).map(|operand| Operand { checked: None, ..operand }));
        }
        first
    }

    /// Returns both layouts of a tensor in FP8.
    fn layouts(&self, x: &[Tensor], of: InFp8) -> [Tensor; 2] {
        [0, 1].map(|layout| x[self.fp8 + 2 * of as usize + layout])
    }

    fn scale(&self, x: &[Tensor], of: InFp8) -> Fp8Scale {
        let [scale, amax] = [0, 1].map(|i| x[self.fp8 + 2 * (IN_FP8.len() + of as usize) + i]);
        Fp8Scale { scale, amax, counts: None }
    }

    /// Returns the quantization of `inp` (·, `columns`) in expert order, if the layer is in FP8.
    fn quantized(&self, x: &[Tensor], of: InFp8, inp: Tensor, columns: usize) -> Option<Quantize> {
        let quantize = || {
            let [out, transposed] = self.layouts(x, of).map(Some);
            let (shape, (_, format)) = ([inp.len / columns, columns], IN_FP8[of as usize]);
            let groups = Some(self.groups(x));
            let quantize = Quantize::new(inp, shape, format, self.scale(x, of), Scaling::Delayed);
            Quantize { out, transposed, groups, ..quantize }
        };
        self.shape.fp8.then(quantize)
    }

    /// Quantizes the weights of the experts.
    fn quantize_weights(&self, e: &mut dyn Engine, x: &[Tensor]) -> Result<()> {
        let Shape { c, f, router, .. } = self.shape;
        for (of, weight, shape) in [(InFp8::Fcw, self.fcw, [2 * f, c]), (InFp8::Fcprojw, self.fcprojw, [c, f])] {
            let [out, transposed] = self.layouts(x, of).map(Some);
            let quantize = Quantize::new(x[weight], shape, Fp8Format::E4m3, self.scale(x, of), Scaling::Current);
            e.run(Quantize { out, transposed, matrices: router.count, ..quantize })?;
        }
        Ok(())
    }

    /// Returns the operands in FP8 of the forward pass of the linear layer of `weight` with the input `inp`.
    fn fp8_forward(&self, x: &[Tensor], [inp, weight]: [InFp8; 2], out: Option<Quantize>) -> Option<Fp8Forward> {
        let forward = || Fp8Forward {
            inp: self.layouts(x, inp)[0],
            inp_scale: self.scale(x, inp).scale,
            out,
            weight: self.layouts(x, weight)[0],
            weight_scale: self.scale(x, weight).scale,
            accumulation: Fp8Accumulation::ExactGradients,
        };
        self.shape.fp8.then(forward)
    }

    /// Returns the operands in FP8 of the backward pass of a linear layer.
    fn fp8_backward(
        &self,
        x: &[Tensor],
        [dout, inp, weight]: [InFp8; 3],
        dinp: Option<Quantize>,
    ) -> Option<Fp8Backward> {
        let backward = || Fp8Backward {
            dout: self.layouts(x, dout),
            dout_is_quantized: true,
            dout_scale: self.scale(x, dout),
            dout_is_of_logits: false,
            scaling: Scaling::Delayed,
            inp_transposed: self.layouts(x, inp)[1],
            inp_is_quantized: !(self.shape.recomputes && matches!(inp, InFp8::Activated)),
            inp_scale: self.scale(x, inp),
            weight_transposed: self.layouts(x, weight)[1],
            weight_scale: self.scale(x, weight).scale,
            accumulation: Fp8Accumulation::ExactGradients,
            dinp,
        };
        self.shape.fp8.then(backward)
    }

    fn groups(&self, x: &[Tensor]) -> Groups {
        self.shape.router.groups(x[self.groups])
    }

    fn dispatch(&self, x: &[Tensor], out: usize, inp: usize, weights: Option<Tensor>) -> Dispatch {
        let Shape { router, c, .. } = self.shape;
        let (sources, groups) = (x[self.sources], self.groups(x));
        Dispatch { out: x[out], inp: x[inp], sources, groups, weights, c, active: router.active, fp8: None }
    }

    fn linear(&self, [c, oc]: [usize; 2]) -> MatmulShape {
        MatmulShape { rows: self.shape.router.rows(self.shape.rows), c, oc }
    }

    /// Computes the activations.
    fn forward(&self, e: &mut dyn Engine, x: &[Tensor]) -> Result<()> {
        let Shape { router, c, f, .. } = self.shape;
        e.run(Route {
            logits: x[self.logits],
            bias: self.bias.map(|bias| x[bias]),
            experts: x[self.chosen],
            weights: x[self.weights],
            positions: x[self.positions],
            sources: x[self.sources],
            groups: x[self.groups],
            loads: x[self.loads],
            router,
            trains: self.trains,
        })?;
        let fp8 = self.quantized(x, InFp8::Dispatched, x[self.dispatched], c);
        e.run(Dispatch { fp8, ..self.dispatch(x, self.dispatched, self.inp, None) })?;
        let next = self.quantized(x, InFp8::Activated, x[self.activated], f);
        let (dispatched, activated, groups) = (x[self.dispatched], x[self.activated], Some(self.groups(x)));
        e.run(MatmulForward {
            epilogue: Epilogue::Activation(Activation::SwiGlu, x[self.fc]),
            fp8: self.fp8_forward(x, [InFp8::Dispatched, InFp8::Fcw], next),
            groups,
            ..MatmulForward::new([activated, dispatched, x[self.fcw]], self.linear([c, 2 * f]))
        })?;
        e.run(MatmulForward {
            fp8: self.fp8_forward(x, [InFp8::Activated, InFp8::Fcprojw], None),
            groups,
            ..MatmulForward::new([x[self.outputs], activated, x[self.fcprojw]], self.linear([f, c]))
        })
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
    let Shape { rows, router, c, f, recomputes, .. } = shape;
    let Router { active, count, .. } = router;
    let p = router.rows(rows);
    let [of_dinp, of_dlogits, of_dweights] = if shape.fp8 {
        [fp8::CHAINED_NEIGHBORS; 3]
    } else {
        [Tolerance::SQUARED_CHAIN, Tolerance::ROUTER, Tolerance::CHAIN]
    };
    let mut operands = vec![
        output("dinp", rows * c, of_dinp),
        output("dlogits", rows * count, of_dlogits),
        accumulated("dfcw", router.local.count * 2 * f * c, of_dweights),
        accumulated("dfcprojw", router.local.count * c * f, of_dweights),
        input("dout", rows * c, UNIT),
        Operand { checked: None, ..output("dfc", p * 2 * f, Tolerance::CHAIN) },
        f32(Operand { checked: None, ..output("gradients", rows * active, Tolerance::ROUTER) }),
        Operand { init: Init::Zero, ..output("dbias", count, Tolerance::ACCUMULATED) },
    ];
    let mixture = Arc::new(Mixture::new(shape, true, &mut operands));
    let before = mixture.clone();
    let floats = 2 * count * 3 * c * f + rows * (2 * c + count) + 2 * rows * active * (3 * c + 5 * f);
    let work = Work { floats, bytes: 0, flops: 6 * shape.flops() };
    let case = case("experts_backward", shape.name(), shape.workload(), operands, work, move |e, x| {
        let m = &*mixture;
        let fp8 = m.quantized(x, InFp8::Dout, x[m.outputs], c);
        e.run(Dispatch { fp8, ..m.dispatch(x, m.outputs, 4, Some(x[m.weights])) })?;
        let shape = m.linear([c, 2 * f]);
        let recompute = ActivationForward { inp: x[m.dispatched], weight: x[m.fcw], bias: None, shape };
        let recompute = recomputes.then_some(recompute);
        let fcproj = MatmulBackward {
            activation: Some(ActivationInput { activation: Activation::SwiGlu, preactivation: x[m.fc], recompute }),
            groups: Some(m.groups(x)),
            fp8: m.fp8_backward(
                x,
                [InFp8::Dout, InFp8::Activated, InFp8::Fcprojw],
                m.quantized(x, InFp8::Dfc, x[5], 2 * f),
            ),
            ..MatmulBackward::new(x[5], Some(x[3]), [x[m.outputs], x[m.activated], x[m.fcprojw]], m.linear([f, c]))
        };
        e.run(fcproj)?;
        let (positions, preactivation, dpreactivation) = (x[m.positions], x[m.fc], x[5]);
        e.run(ChoiceGradients { out: x[6], positions, preactivation, dpreactivation, channels: f })?;
        e.run(RouteBackward {
            dlogits: x[1],
            dbias: m.bias.map(|_| x[7]),
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
        let fp8 = m.fp8_backward(x, [InFp8::Dfc, InFp8::Dispatched, InFp8::Fcw], None);
        e.run(MatmulBackward { dinp, dweight, dout, inp, weight, activation: None, shape, fp8, ..fcproj })?;
        let inp = x[m.outputs];
        e.run(Combine { out: x[0], residual: None, inp, weights: None, positions, c, active })
    });
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        if shape.fp8 {
            before.quantize_weights(e, x)?;
        }
        before.forward(e, x)
    };
    Case { before: Some(Box::new(before)), ..case }
}
