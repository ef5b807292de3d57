//! Cases of operations in FP8.
//!
//! Both engines quantize the same numbers with the same scales, so their FP8 operands are equal, and the tolerances are those of
//! the same operations in bf16.

use super::{
    Case, DType, Engine, EpilogueKind, GELU, Init, Operand, Result, Tensor, Tolerance, Work, accumulated, case, f32,
    input, linear_name, linear_workload, matmul_backward, matmul_forward, output,
};
use engine::ops::{
    Activation, ActivationInput, Epilogue, Fp8Accumulation, Fp8Backward, Fp8Format, Fp8Forward, Fp8Scale, Fp8Scales,
    MatmulBackward, MatmulForward, MatmulShape, Quantize, Scaling,
};

/// Returns every operation in FP8 at small shapes, which are multiples of 16.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = vec![delayed_scales(8, 16), delayed_scales(300, 1)];
    for (rows, c, oc) in [(16, 64, 64), (48, 80, 240), (144, 208, 160)] {
        cases.extend(linear(MatmulShape { rows, c, oc }));
    }
    cases
}

/// Returns every operation in FP8 at the shapes of real models.
pub fn model_cases() -> Vec<Case> {
    [(2048, 768, 2304), (512, 1600, 6400)]
        .into_iter()
        .flat_map(|(rows, c, oc)| linear(MatmulShape { rows, c, oc }))
        .collect()
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
        backward(shape, true, None, Fp8Format::E5m2, Scaling::Current, fast),
        backward(shape, true, Some(Activation::Gelu), Fp8Format::E4m3, Scaling::Delayed, fast),
        backward(shape, true, Some(Activation::Gelu), Fp8Format::E5m2, Scaling::Calibrate, exact),
        backward(shape, false, Some(Activation::SwiGlu), Fp8Format::E5m2, Scaling::Delayed, fast),
        backward(shape, false, Some(Activation::ReluSquared), Fp8Format::E5m2, Scaling::Current, exact),
    ]
}

fn fp8(name: &'static str, len: usize) -> Operand {
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
fn scale(names: [&'static str; 2], format: Fp8Format) -> [Operand; 2] {
    [exact_f32(names[0], 1.3 / format.max()), exact_f32(names[1], 0.01)]
}

fn name(shape: MatmulShape, bias: bool, what: &str, scaling: Scaling, accumulation: Fp8Accumulation) -> String {
    format!("{}{what} fp8 {scaling:?} {accumulation:?}", linear_name(shape, bias)).to_lowercase()
}

fn of(scale: Tensor, amax: Tensor) -> Fp8Scale {
    Fp8Scale { scale, amax, counts: None }
}

/// Allows the errors of Hopper's FP8 accumulators, which keep about 14 bits: up to 0.7 % of the result's root mean square at K = 3072.
fn widen_tolerances(operands: &mut [Operand], accumulation: Fp8Accumulation) {
    for tolerance in operands.iter_mut().filter_map(|operand| operand.checked.as_mut()) {
        if accumulation == Fp8Accumulation::Fast {
            tolerance.bf16 = tolerance.bf16.max(Tolerance::CHAIN.bf16);
        }
    }
}

/// Quantizes a weight (OC, C).
fn quantize_weight(
    engine: &mut dyn Engine,
    inp: Tensor,
    [out, transposed]: [Option<Tensor>; 2],
    scale: Fp8Scale,
    shape: MatmulShape,
) -> Result<()> {
    let (scaling, format, shape) = (Scaling::Current, Fp8Format::E4m3, [shape.oc, shape.c]);
    engine.run(Quantize { out, transposed, inp, scale, scaling, format, shape, column_sums: None })
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
    widen_tolerances(&mut operands, accumulation);
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
        let fp8 = Fp8Forward {
            inp: x[first],
            inp_transposed: None,
            inp_is_quantized: false,
            inp_scale: of(x[first + 2], x[first + 3]),
            scaling,
            out: None,
            weight: x[first + 1],
            weight_scale: x[first + 4],
            accumulation,
        };
        let (bias, fp8) = (bias.then_some(x[3]), Some(fp8));
        e.run(MatmulForward { out: x[0], inp: x[1], weight: x[2], bias, epilogue, shape, fp8 })
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
    format: Fp8Format,
    scaling: Scaling,
    accumulation: Fp8Accumulation,
) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let plain = matmul_backward(shape, bias, activation);
    let what = format!("{} {format:?}", &plain.shape[linear_name(shape, bias).len()..]);
    let mut operands = plain.operands;
    widen_tolerances(&mut operands, accumulation);
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
    operands.extend(scale(["scale of dout", "amax of dout"], format));
    operands.extend(scale(["scale of inp", "amax of inp"], Fp8Format::E4m3));
    operands.extend(scale(["scale of weight", "amax of weight"], Fp8Format::E4m3));
    let name = name(shape, bias, &what, scaling, accumulation);
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let input = activation.map(|activation| ActivationInput { activation, preactivation: x[6], recompute: None });
        let fp8 = Fp8Backward {
            dout: [x[first], x[first + 1]],
            dout_is_quantized: false,
            dout_scale: of(x[first + 4], x[first + 5]),
            scaling,
            format,
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
