//! Cases of operations in FP8.
//!
//! Both engines quantize the same numbers with the same scales, so their FP8 operands are equal, and the tolerances are those of
//! the same operations in bf16.

use super::MaskedAttention;
use super::{
    Case, DType, Engine, EpilogueKind, GELU, Init, Operand, Result, Tensor, Tolerance, Work, Workload, accumulated,
    case, f32, i32, input, linear_name, linear_workload, matmul_backward, matmul_forward, output, workload,
};
use super::{decode, decode_step, experts};
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AttentionForward, AttentionMask, AttentionShape, Classifier,
    Dequantize, Epilogue, Fp8Accumulation, Fp8Backward, Fp8Format, Fp8Forward, Fp8Logits, Fp8Scale, Fp8Scales,
    MatmulBackward, MatmulForward, MatmulShape, NormForward, Quantize, Scaling,
};

/// Returns every operation in FP8 at small shapes, which are multiples of 16.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = vec![delayed_scales(8, 16), delayed_scales(300, 1), dequantize(256), dequantize(256 * 77)];
    cases.extend(decode::edge_cases_in_fp8());
    cases.extend(decode_step::edge_cases_in_fp8());
    cases.extend(experts::edge_cases_in_fp8());
    for (rows, c, oc) in [(16, 64, 64), (48, 80, 240), (144, 208, 160)] {
        cases.extend(linear(MatmulShape { rows, c, oc }));
        cases.extend(mlp(MatmulShape { rows, c, oc }));
        cases.extend(norm(MatmulShape { rows, c, oc }));
    }
    cases.extend([
        head(MatmulShape { rows: 16, c: 64, oc: 128 }, 100, None),
        head(MatmulShape { rows: 48, c: 80, oc: 640 }, 640, Some(15.0)),
    ]);
    // Not all of these are in the kernels that quantize: head sizes 64 and 128.
    for (t, head_size, scaling) in [
        (48, 64, Scaling::Delayed),
        (144, 64, Scaling::Given),
        (272, 128, Scaling::Delayed),
        (48, 80, Scaling::Delayed),
    ] {
        let shape = AttentionShape { b: 1, t, heads: 4, kv_heads: 2, head_size };
        cases.push(quantized_attention(shape, scaling));
    }
    cases
}

/// Returns every operation in FP8 at the shapes of real models.
pub fn model_cases() -> Vec<Case> {
    let layers = [(2048, 768, 2304), (512, 1600, 6400)].map(|(rows, c, oc)| MatmulShape { rows, c, oc });
    let layers = layers.into_iter().flat_map(|shape| linear(shape).into_iter().chain(mlp(shape)).chain(norm(shape)));
    // Rows of these lengths are read by different kernels.
    let head = [
        head(MatmulShape { rows: 512, c: 768, oc: 50_304 }, 50_257, None),
        head(MatmulShape { rows: 512, c: 768, oc: 32_768 }, 32_768, Some(15.0)),
        head(MatmulShape { rows: 128, c: 512, oc: 128_256 }, 128_256, None),
    ];
    let decoding = decode::model_cases_in_fp8().into_iter().chain(decode_step::model_cases_in_fp8());
    let experts = experts::model_cases_in_fp8();
    layers.chain(head).chain([dequantize(1 << 24)]).chain(decoding).chain(experts).collect()
}

/// Returns the passes of a linear layer.
fn linear(shape: MatmulShape) -> Vec<Case> {
    let (fast, exact) = (Fp8Accumulation::Fast, Fp8Accumulation::Exact);
    let swiglu = EpilogueKind::Activation(Activation::SwiGlu);
    vec![
        forward(shape, true, EpilogueKind::None, Scaling::Current, fast),
        forward(shape, false, EpilogueKind::Residual, Scaling::Delayed, fast),
        forward(shape, true, EpilogueKind::Residual, Scaling::Current, exact),
        forward(shape, true, GELU, Scaling::Delayed, fast),
        forward(shape, true, GELU, Scaling::Current, exact),
        forward(shape, false, swiglu, Scaling::Calibrate, fast),
        backward(shape, true, None, Scaling::Current, fast),
        backward(shape, true, Some(Activation::Gelu), Scaling::Delayed, fast),
        backward(shape, true, Some(Activation::Gelu), Scaling::Calibrate, exact),
        backward(shape, false, Some(Activation::SwiGlu), Scaling::Delayed, fast),
        backward(shape, false, Some(Activation::ReluSquared), Scaling::Current, exact),
    ]
}

pub(super) fn fp8(name: &'static str, len: usize) -> Operand {
    Operand { name, len, dtype: Some(DType::Fp8), init: Init::None, checked: None }
}

/// An f32 that both engines compute with the same bits.
fn exact_f32(name: &'static str, value: f32) -> Operand {
    f32(Operand {
        name,
        len: 1,
        dtype: None,
        init: Init::Values(vec![value]),
        checked: Some(Tolerance { f32: 0.0, bf16: 0.0 }),
    })
}

/// Returns the operands of one tensor in FP8: scale and amax. The scale, if given, fits values of up to 1.
pub(super) fn scale(names: [&'static str; 2], format: Fp8Format) -> [Operand; 2] {
    [exact_f32(names[0], 1.3 / format.max()), exact_f32(names[1], 0.01)]
}

fn name(shape: MatmulShape, bias: bool, what: &str, scaling: Scaling, accumulation: Fp8Accumulation) -> String {
    format!("{}{what} fp8 {scaling:?} {accumulation:?}", linear_name(shape, bias)).to_lowercase()
}

fn of(scale: Tensor, amax: Tensor) -> Fp8Scale {
    Fp8Scale { scale, amax, counts: None }
}

/// Allows the errors of FP8 accumulators, which keep about 14 bits on Hopper: up to 0.7 % of the result's root mean square at K = 3072.
fn widen_tolerances(operands: &mut [Operand]) {
    for tolerance in operands.iter_mut().filter_map(|operand| operand.checked.as_mut()) {
        tolerance.bf16 = tolerance.bf16.max(Tolerance::CHAIN.bf16);
    }
}

/// Quantizes a weight (OC, C) with a scale that is given.
pub(super) fn quantize_by(engine: &mut dyn Engine, inp: Tensor, out: Tensor, scale: Tensor, oc: usize) -> Result<()> {
    let scales = Fp8Scale { scale, amax: scale, counts: None };
    quantize(engine, inp, [Some(out), None], scales, Scaling::Given, [oc, inp.len / oc])
}

/// Returns the conversion of `n` numbers.
fn dequantize(n: usize) -> Case {
    let operands = vec![
        output("out", n, Tolerance { f32: 0.0, bf16: 0.0 }),
        fp8("inp", n),
        f32(input("scale", 1, Init::Values(vec![2f32.powi(-7)]))),
        input("values", n, super::UNIT),
    ];
    let work = Work { floats: n, bytes: n, flops: 0 };
    let run = |e: &mut dyn Engine, x: &[Tensor]| e.run(Dequantize { out: x[0], inp: x[1], scale: x[2] });
    let case = case("dequantize", format!("{n}"), workload(1, 1, 8, 1, 128, 0), operands, work, run);
    Case { before: Some(Box::new(|e, x| quantize_by(e, x[3], x[1], x[2], 16))), ..case }
}

/// Quantizes `inp` to E4M3.
fn quantize(
    engine: &mut dyn Engine,
    inp: Tensor,
    [out, transposed]: [Option<Tensor>; 2],
    scale: Fp8Scale,
    scaling: Scaling,
    shape: [usize; 2],
) -> Result<()> {
    engine.run(Quantize { out, transposed, ..Quantize::new(inp, shape, Fp8Format::E4m3, scale, scaling) })
}

/// Quantizes a weight (OC, C).
fn quantize_weight(
    engine: &mut dyn Engine,
    inp: Tensor,
    to: [Option<Tensor>; 2],
    scale: Fp8Scale,
    shape: MatmulShape,
) -> Result<()> {
    quantize(engine, inp, to, scale, Scaling::Current, [shape.oc, shape.c])
}

fn forward(
    shape: MatmulShape,
    bias: bool,
    kind: EpilogueKind,
    scaling: Scaling,
    accumulation: Fp8Accumulation,
) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let plain = matmul_forward(shape, bias, kind);
    let what = plain.shape[linear_name(shape, bias).len()..].to_owned();
    let mut operands = plain.operands;
    widen_tolerances(&mut operands);
    let first = operands.len();
    operands.extend([fp8("inp in FP8", rows * c), fp8("weight in FP8", oc * c)]);
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    let weight_scale = move |x: &[Tensor]| of(x[first + 4], x[first + 5]);
    let name = name(shape, bias, &what, scaling, accumulation);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let epilogue = match kind {
            EpilogueKind::None => Epilogue::None,
            EpilogueKind::Residual => Epilogue::Residual(x[4]),
            EpilogueKind::Activation(activation) => Epilogue::Activation(activation, x[4]),
        };
        let inp_scale = of(x[first + 2], x[first + 3]);
        quantize(e, x[1], [Some(x[first]), None], inp_scale, scaling, [rows, c])?;
        let fp8 = Fp8Forward {
            inp: x[first],
            inp_scale: inp_scale.scale,
            out: None,
            weight: x[first + 1],
            weight_scale: x[first + 4],
            accumulation,
        };
        let (bias, fp8) = (bias.then_some(x[3]), Some(fp8));
        e.run(MatmulForward { bias, epilogue, fp8, ..MatmulForward::new([x[0], x[1], x[2]], shape) })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        quantize_weight(e, x[2], [Some(x[first + 1]), None], weight_scale(x), shape)
    };
    let case = case("matmul_forward", name, linear_workload(shape), operands, plain.work, run);
    Case { before: Some(Box::new(before)), parts: plain.parts, ..case }
}

fn backward(
    shape: MatmulShape,
    bias: bool,
    activation: Option<Activation>,
    scaling: Scaling,
    accumulation: Fp8Accumulation,
) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let plain = matmul_backward(shape, bias, activation);
    let what = &plain.shape[linear_name(shape, bias).len()..];
    let mut operands = plain.operands;
    widen_tolerances(&mut operands);
    if activation.is_none() {
        operands.push(input("preactivation", 16, Init::Zero));
    }
    let first = operands.len();
    operands.extend([
        fp8("dout in FP8", rows * oc),
        fp8("dout in FP8, transposed", rows * oc),
        fp8("inp in FP8, transposed", rows * c),
        fp8("weight in FP8, transposed", oc * c),
    ]);
    operands.extend(scale(["scale of dout", "amax of dout"], Fp8Format::E5m2));
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    let name = name(shape, bias, what, scaling, accumulation);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let input = activation.map(|activation| ActivationInput { activation, preactivation: x[6], recompute: None });
        let fp8 = Fp8Backward {
            dout: [x[first], x[first + 1]],
            dout_is_quantized: false,
            dout_scale: of(x[first + 4], x[first + 5]),
            dout_is_of_logits: false,
            scaling,
            inp_transposed: x[first + 2],
            inp_is_quantized: false,
            inp_scale: of(x[first + 6], x[first + 7]),
            weight_transposed: x[first + 3],
            weight_scale: x[first + 8],
            accumulation,
            dinp: None,
        };
        e.run(MatmulBackward { fp8: Some(fp8), ..super::matmul_backward_operation(x, input, bias, shape) })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        let scale = of(x[first + 8], x[first + 9]);
        quantize_weight(e, x[5], [None, Some(x[first + 3])], scale, shape)
    };
    let case = case("matmul_backward", name, linear_workload(shape), operands, plain.work, run);
    Case { before: Some(Box::new(before)), parts: plain.parts, ..case }
}

/// The classifier writes the gradient of the logits (rows, OC) in FP8. Columns from `v` on are padding. The backward pass of the head reads
/// the gradient and accumulates that of the weight in f32. The transposed gradient overwrites the logits.
fn head(shape: MatmulShape, v: usize, softcap: Option<f32>) -> Case {
    let MatmulShape { rows, c, oc: vp } = shape;
    let mut operands = vec![
        output("dinp", rows * c, NEIGHBORS),
        f32(accumulated("dweight", vp * c, NEIGHBORS)),
        f32(accumulated("losses", rows, Tolerance::REDUCTION)),
        input("logits", rows * vp, Init::Uniform { mean: 0.0, spread: 4.0 }),
        i32(input("targets", rows, Init::Tokens { below: v as i32 })),
        input("inp", rows * c, super::UNIT),
        input("weight", vp * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
    ];
    let n = operands.len();
    operands.extend([
        fp8("dlogits in FP8", rows * vp),
        fp8("inp in FP8, transposed", rows * c),
        fp8("weight in FP8, transposed", vp * c),
    ]);
    operands.extend(scale(["scale of dlogits", "amax of dlogits"], Fp8Format::E5m2));
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    let scale_of = move |x: &[Tensor], i: usize| of(x[n + 3 + 2 * i], x[n + 4 + 2 * i]);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let [logits, out] = [x[3], x[n]];
        let transposed = logits.reinterpret(rows * vp, out.dtype);
        let fp8 = Fp8Logits { out, transposed, scale: scale_of(x, 0).scale };
        let dloss = Some(0.25);
        e.run(Classifier { logits, losses: x[2], targets: x[4], v, vp, dloss, softcap, fp8: Some(fp8) })?;
        let fp8 = Fp8Backward {
            dout: [out, transposed],
            dout_is_quantized: true,
            dout_scale: scale_of(x, 0),
            dout_is_of_logits: true,
            scaling: Scaling::Given,
            inp_transposed: x[n + 1],
            inp_is_quantized: true,
            inp_scale: scale_of(x, 1),
            weight_transposed: x[n + 2],
            weight_scale: scale_of(x, 2).scale,
            accumulation: Fp8Accumulation::ExactGradients,
            dinp: None,
        };
        e.run(MatmulBackward { fp8: Some(fp8), ..MatmulBackward::new(x[0], Some(x[1]), [logits, x[5], x[6]], shape) })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        quantize(e, x[5], [None, Some(x[n + 1])], scale_of(x, 1), Scaling::Current, [rows, c])?;
        quantize_weight(e, x[6], [None, Some(x[n + 2])], scale_of(x, 2), shape)
    };
    let work = Work { floats: rows * (vp + 2 * c), bytes: 4 * rows * vp + 8 * vp * c, flops: 4 * rows * c * vp };
    let bound = softcap.map_or(String::new(), |softcap| format!(" softcap {softcap}"));
    let name = format!("{rows}x{v}/{vp}x{c}{bound} fp8 head").to_lowercase();
    let case = case("classifier", name, workload(1, rows, c, 1, vp, 0), operands, work, run);
    Case { before: Some(Box::new(before)), ..case }
}

/// Returns the passes of MLPs. The kernels that compute the tensors between the two linear layers also quantize them.
fn mlp(shape: MatmulShape) -> [Case; 9] {
    let (fast, exact) = (Fp8Accumulation::Fast, Fp8Accumulation::Exact);
    let (gelu, swiglu, relu_squared) = (Activation::Gelu, Activation::SwiGlu, Activation::ReluSquared);
    [
        mlp_forward(shape, gelu, fast),
        mlp_forward(shape, swiglu, fast),
        mlp_forward(shape, relu_squared, fast),
        mlp_backward(shape, gelu, fast, false),
        mlp_backward(shape, gelu, fast, true),
        mlp_backward(shape, gelu, exact, false),
        mlp_backward(shape, swiglu, fast, false),
        mlp_backward(shape, relu_squared, fast, false),
        mlp_backward(shape, relu_squared, exact, true),
    ]
}

/// Tolerance of sums of products of a tensor that both engines round to FP8 from slightly different values: a few percent of the
/// values round to neighbors, which differ by up to 2^-3, or 2^-2 for E5M2. The emulator's largest error is 0.13. Tests of the
/// kernels compare bits; these cases find gross errors on a GPU.
const NEIGHBORS: Tolerance = Tolerance { f32: 0.25, bf16: 0.25 };

/// The same if the values before the rounding are results of operations in FP8. The largest error on an H200 is 0.29.
pub(super) const CHAINED_NEIGHBORS: Tolerance = Tolerance { f32: 0.5, bf16: 0.5 };

/// Returns the operands of [`mlp_forward`].
fn mlp_forward_operands(MatmulShape { rows, c, oc }: MatmulShape, activation: Activation) -> Vec<Operand> {
    let weight = Init::Uniform { mean: 0.0, spread: 0.2 };
    let width = oc * activation.inputs();
    let mut operands = vec![
        output("proj", rows * c, NEIGHBORS),
        accumulated("dweight", c * oc, NEIGHBORS),
        input("inp", rows * c, super::UNIT),
        input("fc", width * c, weight.clone()),
        input("bias", width, super::UNIT),
        input("fcproj", c * oc, weight),
        output("preactivation", rows * width, Tolerance::CHAIN),
        Operand { checked: None, ..output("out", rows * oc, NEIGHBORS) },
        input("dout", rows * c, super::UNIT),
        Operand { checked: None, ..output("dinp", rows * oc, NEIGHBORS) },
    ];
    operands.extend([
        fp8("inp in FP8", rows * c),
        fp8("fc in FP8", width * c),
        fp8("out in FP8", rows * oc),
        fp8("out in FP8, transposed", rows * oc),
        fp8("fcproj in FP8", oc * c),
        fp8("fcproj in FP8, transposed", oc * c),
        fp8("dout in FP8", rows * c),
        fp8("dout in FP8, transposed", rows * c),
    ]);
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of fc", "amax of fc"], Fp8Format::E4m3));
    let mut of_out = scale(["scale of out", "amax of out"], Fp8Format::E4m3);
    // A sum over C is a few times larger than its terms. SwiGLU multiplies two sums, and ReLU² squares one.
    of_out[0].init = Init::Values(vec![if activation == Activation::Gelu { 1.0 / 16.0 } else { 1.0 }]);
    of_out[1].checked = Some(Tolerance { f32: 1e-2, bf16: 1e-2 });
    operands.extend(of_out);
    operands.extend(scale(["scale of fcproj", "amax of fcproj"], Fp8Format::E4m3));
    operands.extend(scale(["scale of dout", "amax of dout"], Fp8Format::E5m2));
    operands
}

/// out (rows, OC) = activation(inp (rows, C) · fcᵀ + bias), with fc (I · OC, C), is quantized with a given scale. I is the number
/// of the activation's inputs. proj = out · fcprojᵀ, with fcproj (C, OC), reads only the quantized output. Its transposed copy is
/// multiplied, too.
fn mlp_forward(shape: MatmulShape, activation: Activation, accumulation: Fp8Accumulation) -> Case {
    let operands = mlp_forward_operands(shape, activation);
    let MatmulShape { rows, c, oc } = shape;
    let next = MatmulShape { rows, c: oc, oc: c };
    let shape = MatmulShape { oc: oc * activation.inputs(), ..shape };
    // The first operand in FP8.
    let n = 10;
    let scale_of = move |x: &[Tensor], i: usize| of(x[n + 8 + 2 * i], x[n + 9 + 2 * i]);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let quantized = Quantize {
            out: Some(x[n + 2]),
            transposed: Some(x[n + 3]),
            ..Quantize::new(x[7], [rows, oc], Fp8Format::E4m3, scale_of(x, 2), Scaling::Delayed)
        };
        quantize(e, x[2], [Some(x[n]), None], scale_of(x, 0), Scaling::Current, [rows, shape.c])?;
        let fp8 = Fp8Forward {
            inp: x[n],
            inp_scale: scale_of(x, 0).scale,
            out: Some(quantized),
            weight: x[n + 1],
            weight_scale: scale_of(x, 1).scale,
            accumulation,
        };
        let epilogue = Epilogue::Activation(activation, x[6]);
        let [out, inp, weight, bias] = [x[7], x[2], x[3], x[4]];
        // Kernels that apply ReLU² to FP8 have no bias, as in nanochat.
        let bias = (activation != Activation::ReluSquared).then_some(bias);
        e.run(MatmulForward { bias, epilogue, fp8: Some(fp8), ..MatmulForward::new([out, inp, weight], shape) })?;
        let fp8 = Fp8Forward {
            inp: x[n + 2],
            inp_scale: scale_of(x, 2).scale,
            out: None,
            weight: x[n + 4],
            weight_scale: scale_of(x, 3).scale,
            ..fp8
        };
        let [out, inp, weight] = [x[0], x[7], x[5]];
        e.run(MatmulForward { fp8: Some(fp8), ..MatmulForward::new([out, inp, weight], next) })?;
        let fp8 = Fp8Backward {
            dout: [x[n + 6], x[n + 7]],
            dout_is_quantized: false,
            dout_scale: scale_of(x, 4),
            dout_is_of_logits: false,
            scaling: Scaling::Current,
            inp_transposed: x[n + 3],
            inp_is_quantized: true,
            inp_scale: scale_of(x, 2),
            weight_transposed: x[n + 5],
            weight_scale: scale_of(x, 3).scale,
            accumulation,
            dinp: None,
        };
        e.run(MatmulBackward { fp8: Some(fp8), ..MatmulBackward::new(x[9], Some(x[1]), [x[8], x[7], x[5]], next) })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        quantize_weight(e, x[3], [Some(x[n + 1]), None], scale_of(x, 1), shape)?;
        quantize_weight(e, x[5], [Some(x[n + 4]), Some(x[n + 5])], scale_of(x, 3), next)
    };
    let work = Work { floats: rows * (3 * c + oc), bytes: 4 * rows * oc, flops: 8 * rows * c * oc };
    let name = format!("{} fp8 {activation:?} mlp {accumulation:?}", linear_name(shape, true)).to_lowercase();
    let case = case("matmul_forward", name, linear_workload(shape), operands, work, run);
    Case { before: Some(Box::new(before)), ..case }
}

/// Returns the operands of [`mlp_backward`].
fn mlp_backward_operands(MatmulShape { rows, c, oc }: MatmulShape, activation: Activation) -> Vec<Operand> {
    let weight = Init::Uniform { mean: 0.0, spread: 0.2 };
    let width = oc * activation.inputs();
    let mut operands = vec![
        output("dinp", rows * c, NEIGHBORS),
        accumulated("dfcproj", c * oc, NEIGHBORS),
        accumulated("dfcw", width * c, NEIGHBORS),
        accumulated("dfcb", width, NEIGHBORS),
        input("dout", rows * c, super::UNIT),
        input("inp", rows * c, super::UNIT),
        input("activated", rows * oc, super::UNIT),
        input("preactivation", rows * width, super::UNIT),
        input("fc", width * c, weight.clone()),
        input("fcproj", c * oc, weight),
        Operand { checked: None, ..output("dfc", rows * width, NEIGHBORS) },
    ];
    operands.extend([
        fp8("dout in FP8", rows * c),
        fp8("dout in FP8, transposed", rows * c),
        fp8("dfc in FP8", rows * width),
        fp8("dfc in FP8, transposed", rows * width),
        fp8("inp in FP8, transposed", rows * c),
        fp8("activated in FP8, transposed", rows * oc),
        fp8("fc in FP8, transposed", width * c),
        fp8("fcproj in FP8, transposed", oc * c),
    ]);
    operands.extend(scale(["scale of dout", "amax of dout"], Fp8Format::E5m2));
    let mut of_dfc = scale(["scale of dfc", "amax of dfc"], Fp8Format::E5m2);
    of_dfc[0].init = Init::Values(vec![16.0 / Fp8Format::E5m2.max()]);
    of_dfc[1].checked = Some(Tolerance { f32: 1e-2, bf16: 1e-2 });
    operands.extend(of_dfc);
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of activated", "amax of activated"], Fp8Format::E4m3));
    operands.extend(scale(["scale of fc", "amax of fc"], Fp8Format::E4m3));
    operands.extend(scale(["scale of fcproj", "amax of fcproj"], Fp8Format::E4m3));
    operands
}

/// dfc (rows, I · OC), the gradient of the preactivation given dout (rows, C) · fcproj (C, OC), is quantized with a given scale, and
/// its columns are summed, unless fc has no bias. I is the number of the activation's inputs. dinp (rows, C) = dfc · fc (I · OC, C) and
/// the gradient of fc read only the quantized gradient. If `recomputes`, the activation has not been kept for the gradient of fcproj.
fn mlp_backward(shape: MatmulShape, activation: Activation, accumulation: Fp8Accumulation, recomputes: bool) -> Case {
    let operands = mlp_backward_operands(shape, activation);
    let MatmulShape { rows, c, oc } = shape;
    let next = MatmulShape { rows, c: oc, oc: c };
    let shape = MatmulShape { oc: oc * activation.inputs(), ..shape };
    let has_bias = activation == Activation::Gelu || !recomputes;
    // The first operand in FP8.
    let n = 11;
    let scale_of = move |x: &[Tensor], i: usize| of(x[n + 8 + 2 * i], x[n + 9 + 2 * i]);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let quantized = Quantize {
            out: Some(x[n + 2]),
            transposed: Some(x[n + 3]),
            column_sums: has_bias.then_some(x[3]),
            ..Quantize::new(x[10], [rows, shape.oc], Fp8Format::E5m2, scale_of(x, 1), Scaling::Delayed)
        };
        let forward = ActivationForward { inp: x[5], weight: x[8], bias: None, shape };
        let recompute = recomputes.then_some(forward);
        let fp8 = Fp8Backward {
            dout: [x[n], x[n + 1]],
            dout_is_quantized: false,
            dout_scale: scale_of(x, 0),
            dout_is_of_logits: false,
            scaling: Scaling::Delayed,
            inp_transposed: x[n + 5],
            inp_is_quantized: false,
            inp_scale: scale_of(x, 3),
            weight_transposed: x[n + 7],
            weight_scale: scale_of(x, 5).scale,
            accumulation,
            dinp: Some(quantized),
        };
        e.run(MatmulBackward {
            activation: Some(ActivationInput { activation, preactivation: x[7], recompute }),
            fp8: Some(fp8),
            ..MatmulBackward::new(x[10], Some(x[1]), [x[4], x[6], x[9]], next)
        })?;
        let fp8 = Fp8Backward {
            dout: [x[n + 2], x[n + 3]],
            dout_is_quantized: true,
            dout_scale: scale_of(x, 1),
            inp_transposed: x[n + 4],
            inp_scale: scale_of(x, 2),
            weight_transposed: x[n + 6],
            weight_scale: scale_of(x, 4).scale,
            dinp: None,
            ..fp8
        };
        e.run(MatmulBackward { fp8: Some(fp8), ..MatmulBackward::new(x[0], Some(x[2]), [x[10], x[5], x[8]], shape) })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        quantize_weight(e, x[8], [None, Some(x[n + 6])], scale_of(x, 4), shape)?;
        quantize_weight(e, x[9], [None, Some(x[n + 7])], scale_of(x, 5), next)
    };
    let work = Work { floats: rows * (3 * c + 2 * oc), bytes: 4 * rows * oc, flops: 8 * rows * c * oc };
    let again = if recomputes { " recomputed" } else { "" };
    let what = format!("{activation:?}{again} fp8 mlp {accumulation:?}");
    let name = format!("{} {what}", linear_name(shape, true)).to_lowercase();
    let case = case("matmul_backward", name, linear_workload(shape), operands, work, run);
    Case { before: Some(Box::new(before)), ..case }
}

/// Returns LayerNorm and RMSNorm whose outputs are quantized with a given scale, in the forward pass and when they are recomputed.
fn norm(shape: MatmulShape) -> [Case; 3] {
    [
        quantized_norm(shape, true, Scaling::Delayed),
        quantized_norm(shape, true, Scaling::Given),
        quantized_norm(shape, false, Scaling::Delayed),
    ]
}

/// Returns the operands of [`quantized_norm`], and the index of the first in FP8.
fn quantized_norm_operands(MatmulShape { rows, c, oc }: MatmulShape, scaling: Scaling) -> (usize, Vec<Operand>) {
    let mut operands = vec![
        output("out", rows * oc, NEIGHBORS),
        accumulated("dweight", oc * c, NEIGHBORS),
        f32(Operand { checked: None, ..output("mean", rows, NEIGHBORS) }),
        f32(output("rstd", rows, Tolerance::CHAIN)),
        input("inp", rows * c, Init::Uniform { mean: 0.3, spread: 2.0 }),
        input("norm weight", c, Init::Uniform { mean: 1.0, spread: 0.5 }),
        input("norm bias", c, super::UNIT),
        Operand { checked: None, ..output("normed", rows * c, NEIGHBORS) },
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
        input("dout", rows * oc, super::UNIT),
        Operand { checked: None, ..output("dinp", rows * c, NEIGHBORS) },
    ];
    let n = operands.len();
    operands.extend([
        fp8("normed in FP8", rows * c),
        fp8("normed in FP8, transposed", rows * c),
        fp8("weight in FP8", oc * c),
        fp8("weight in FP8, transposed", oc * c),
        fp8("dout in FP8", rows * oc),
        fp8("dout in FP8, transposed", rows * oc),
    ]);
    let mut of_normed = scale(["scale of normed", "amax of normed"], Fp8Format::E4m3);
    of_normed[0].init = Init::Values(vec![1.0 / 64.0]);
    if scaling == Scaling::Delayed {
        of_normed[1].checked = Some(Tolerance { f32: 1e-2, bf16: 1e-2 });
    }
    operands.extend(of_normed);
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    operands.extend(scale(["scale of dout", "amax of dout"], Fp8Format::E5m2));
    (n, operands)
}

/// normed (rows, C), the output of LayerNorm or RMSNorm, is quantized. out (rows, OC) = normed · weightᵀ, and the gradient of
/// the weight, read only its quantized copies.
fn quantized_norm(shape: MatmulShape, is_layernorm: bool, scaling: Scaling) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let (n, operands) = quantized_norm_operands(shape, scaling);
    let scale_of = move |x: &[Tensor], i: usize| of(x[n + 6 + 2 * i], x[n + 7 + 2 * i]);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let (normed, mean, rstd, inp, weight, bias) = (x[7], x[2], x[3], x[4], x[5], x[6]);
        let quantized = Some(Quantize {
            out: Some(x[n]),
            transposed: Some(x[n + 1]),
            ..Quantize::new(normed, [rows, c], Fp8Format::E4m3, scale_of(x, 0), scaling)
        });
        let [mean, bias] = [mean, bias].map(|tensor| is_layernorm.then_some(tensor));
        let weight = Some(weight);
        e.run(NormForward { out: normed, mean, rstd, inp, weight, bias, c, eps: 1e-5, quantized })?;
        let accumulation = Fp8Accumulation::Fast;
        let forward = Fp8Forward {
            inp: x[n],
            inp_scale: scale_of(x, 0).scale,
            out: None,
            weight: x[n + 2],
            weight_scale: scale_of(x, 1).scale,
            accumulation,
        };
        let (out, weight, epilogue) = (x[0], x[8], Epilogue::None);
        e.run(MatmulForward { epilogue, fp8: Some(forward), ..MatmulForward::new([out, normed, weight], shape) })?;
        let backward = Fp8Backward {
            dout: [x[n + 4], x[n + 5]],
            dout_is_quantized: false,
            dout_scale: scale_of(x, 2),
            dout_is_of_logits: false,
            scaling: Scaling::Current,
            inp_transposed: x[n + 1],
            inp_is_quantized: true,
            inp_scale: scale_of(x, 0),
            weight_transposed: x[n + 3],
            weight_scale: scale_of(x, 1).scale,
            accumulation,
            dinp: None,
        };
        let (dinp, dweight, dout) = (x[10], x[1], x[9]);
        let (inp, activation, fp8) = (normed, None, Some(backward));
        e.run(MatmulBackward {
            activation,
            fp8,
            ..MatmulBackward::new(dinp, Some(dweight), [dout, inp, weight], shape)
        })
    };
    let before = move |e: &mut dyn Engine, x: &[Tensor]| {
        quantize_weight(e, x[8], [2, 3].map(|i| Some(x[n + i])), scale_of(x, 1), shape)
    };
    let work = Work { floats: rows * (2 * c + 2 * oc), bytes: 4 * rows * c, flops: 6 * rows * c * oc };
    let name = format!("{} fp8 {scaling:?}", linear_name(shape, false)).to_lowercase();
    let operation = if is_layernorm { "layernorm_forward" } else { "rmsnorm_forward" };
    let case = case(operation, name, linear_workload(shape), operands, work, run);
    Case { before: Some(Box::new(before)), ..case }
}

/// attended (B, T, NH, HS) is also quantized. out (rows, OC) = attended · weightᵀ reads the quantized copy.
fn quantized_attention(attention: AttentionShape, scaling: Scaling) -> Case {
    let (rows, oc) = (attention.b * attention.t, 64);
    let (c, packed) = (attention.heads * attention.head_size, attention.packed_heads() * attention.head_size);
    let shape = MatmulShape { rows, c, oc };
    let mut operands = vec![
        output("out", rows * oc, NEIGHBORS),
        output("attended", rows * c, Tolerance::ATTENTION),
        f32(output("lse", rows * attention.heads, Tolerance::CHAIN)),
        input("qkv", rows * packed, super::UNIT),
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
        fp8("attended in FP8", rows * c),
        fp8("weight in FP8", oc * c),
    ];
    let mut of_attended = scale(["scale of attended", "amax of attended"], Fp8Format::E4m3);
    if scaling == Scaling::Delayed {
        of_attended[1].checked = Some(Tolerance { f32: 1e-2, bf16: 1e-2 });
    }
    operands.extend(of_attended);
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let quantized =
            Quantize { out: Some(x[5]), ..Quantize::new(x[1], [rows, c], Fp8Format::E4m3, of(x[7], x[8]), scaling) };
        e.run(AttentionForward {
            out: x[1],
            lse: x[2],
            qkv: x[3],
            shape: attention,
            first_query: 0,
            mask: AttentionMask::default(),
            quantized: Some(quantized),
        })?;
        let fp8 = Fp8Forward {
            inp: x[5],
            inp_scale: x[7],
            out: None,
            weight: x[6],
            weight_scale: x[9],
            accumulation: Fp8Accumulation::Fast,
        };
        let [out, inp, weight] = [x[0], x[1], x[4]];
        e.run(MatmulForward { fp8: Some(fp8), ..MatmulForward::new([out, inp, weight], shape) })
    };
    let before =
        move |e: &mut dyn Engine, x: &[Tensor]| quantize_weight(e, x[4], [Some(x[6]), None], of(x[9], x[10]), shape);
    let work = Work { floats: rows * (2 * c + packed), bytes: 4 * rows * attention.heads, flops: 2 * rows * c * oc };
    let workload = Workload { attention, ..linear_workload(shape) };
    let name = format!("{} fp8 {scaling:?}", MaskedAttention::from(attention).name()).to_lowercase();
    let case = case("attention_forward", name, workload, operands, work, run);
    Case { before: Some(Box::new(before)), ..case }
}

fn delayed_scales(n: usize, steps: usize) -> Case {
    let exact = Tolerance { f32: 0.0, bf16: 0.0 };
    let mut amaxes = f32(accumulated("amaxes", steps * n, exact));
    amaxes.init = Init::Uniform { mean: 1.0, spread: 1.0 };
    let operands = vec![f32(output("scales", n, exact)), amaxes];
    let work = Work { bytes: (2 * steps + 1) * n * 4, ..Work::default() };
    case("fp8_scales", format!("{n} x {steps}"), super::workload(1, 1, 8, 1, 128, 0), operands, work, |e, x| {
        e.run(Fp8Scales { scales: x[0], amaxes: x[1], largest: Fp8Format::E4m3.max() })
    })
}
