//! The table of cases: the operands, tolerances and work of each operation.

use super::case::{Case, Init, Operand, Part, Work};
use super::compare::Tolerance;
use engine::ops::{
    AdamW, AdamWUpdate, AttentionBackward, AttentionForward, AttentionShape, Classifier, EncoderBackward,
    EncoderForward, Epilogue, GeluForward, GeluInput, GlobalNorm, LayerNormBackward, LayerNormForward, MatmulBackward,
    MatmulForward, MatmulShape, Sum, UpdateRange,
};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Result, Workload};
use model::{Descriptor, LOGIT_ROWS, Params};

/// Returns every operation at small and odd shapes, which are multiples of the smallest factor that an operation
/// accepts.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (b, t, c) in [(1, 1, 64), (3, 7, 80), (2, 33, 200)] {
        cases.extend([encoder_forward(b, t, c, 37), encoder_backward(b, t, c, 37)]);
        cases.push(layernorm_forward(b * t, c));
        cases.extend([false, true].map(|sums| layernorm_backward(b * t, c, sums)));
    }
    // Rows so long that a whole block processes one, and tokens so frequent that many warps accumulate the gradient of
    // one.
    for (rows, c) in [(9, 1600), (3, 4200)] {
        cases.push(layernorm_forward(rows, c));
        cases.extend([false, true].map(|sums| layernorm_backward(rows, c, sums)));
    }
    cases.push(encoder_backward(4, 300, 80, 3));
    for (rows, c, oc) in [(1, 64, 64), (37, 80, 240), (130, 64, 136)] {
        let shape = MatmulShape { rows, c, oc };
        cases.extend(
            [EpilogueKind::None, EpilogueKind::Residual, EpilogueKind::Gelu]
                .map(|kind| matmul_forward(shape, true, kind)),
        );
        cases.extend([matmul_forward(shape, false, EpilogueKind::None), matmul_backward(shape, true, true)]);
        cases.extend([matmul_backward(shape, false, false), matmul_backward(shape, true, false)]);
        cases.extend([true, false].map(|bias| matmul_backward_recompute(shape, bias)));
        cases.push(head_backward(shape));
    }
    cases.extend([copy(8), copy(1001)]);
    for (b, t, heads) in [(1, 1, 1), (2, 17, 3), (1, 63, 2), (1, 64, 1), (2, 65, 2), (1, 130, 1), (3, 129, 1)] {
        for head_size in [64, 80, 96, 128] {
            let shape = AttentionShape { b, t, heads, head_size };
            cases.extend([attention_forward(shape), attention_backward(shape)]);
        }
    }
    for (rows, v, vp) in [(1, 5, 128), (19, 257, 384), (3, 1000, 1024)] {
        cases.extend([classifier(rows, v, vp, true), classifier(rows, v, vp, false)]);
    }
    for n in [8, 1000, 12_344] {
        cases.extend([global_norm(n), sum(n), adamw(update_ranges(n)), cast_to_float(n), cast_from_float(n)]);
    }
    cases
}

/// Returns every operation at the shapes of real models, with batches small enough for the reference.
pub fn model_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (b, t, c) in [(4, 1024, 768), (2, 512, 1600), (1, 256, 4096)] {
        cases.extend([encoder_forward(b, t, c, 50257), encoder_backward(b, t, c, 50257)]);
        cases.push(layernorm_forward(b * t, c));
        cases.extend([false, true].map(|sums| layernorm_backward(b * t, c, sums)));
    }
    for (rows, c, oc) in [(2048, 768, 2304), (1024, 768, 768), (512, 1600, 6400), (512, 768, 50304)] {
        let shape = MatmulShape { rows, c, oc };
        cases.extend(
            [EpilogueKind::None, EpilogueKind::Residual, EpilogueKind::Gelu]
                .map(|kind| matmul_forward(shape, true, kind)),
        );
        cases.extend([matmul_backward(shape, true, true), matmul_backward(shape, false, false)]);
        cases.push(head_backward(shape));
    }
    for (rows, c) in [(2048, 768), (512, 1600)] {
        let shape = MatmulShape { rows, c: 4 * c, oc: c };
        cases.extend([true, false].map(|bias| matmul_backward_recompute(shape, bias)));
    }
    for (b, t, heads, head_size) in
        [(1, 1024, 12, 64), (16, 1024, 12, 64), (1, 1000, 4, 80), (1, 777, 4, 96), (1, 2048, 4, 128), (3, 1000, 2, 128)]
    {
        let shape = AttentionShape { b, t, heads, head_size };
        cases.extend([attention_forward(shape), attention_backward(shape)]);
    }
    cases.extend([classifier(256, 50257, 50304, true), classifier(256, 50257, 50304, false)]);
    for n in [1 << 20, 7_087_872] {
        cases.extend([global_norm(n), adamw(update_ranges(n)), cast_to_float(n), cast_from_float(n)]);
    }
    cases.push(sum(65_536));
    cases
}

/// Returns every operation of a training step of a model with batches of `b` x `t` tokens, as `engine` executes them,
/// for timing.
pub fn training_step_cases(descriptor: &Descriptor, b: usize, t: usize, engine: &dyn Engine) -> Vec<Case> {
    let Descriptor { channels: c, heads, vocab: v, .. } = *descriptor;
    let layout = Params::new(*descriptor);
    let (rows, vp, n) = (b * t, descriptor.padded_vocab(), layout.elements());
    let chunk = rows.min(LOGIT_ROWS);
    let shape = AttentionShape { b, t, heads, head_size: descriptor.head_size() };
    let linear = |c, oc| MatmulShape { rows, c, oc };
    let head = MatmulShape { rows: chunk, c, oc: vp };
    let norms_sum_columns = engine.fuses_column_sums(c);
    vec![
        encoder_forward(b, t, c, v),
        layernorm_forward(rows, c),
        matmul_forward(linear(c, 3 * c), true, EpilogueKind::None),
        attention_forward(shape),
        matmul_forward(linear(c, c), true, EpilogueKind::Residual),
        matmul_forward(linear(c, 4 * c), true, EpilogueKind::Gelu),
        matmul_forward(linear(4 * c, c), true, EpilogueKind::Residual),
        matmul_forward(head, false, EpilogueKind::None),
        classifier(chunk, v, vp, false),
        classifier(chunk, v, vp, true),
        head_backward(head),
        cast_from_float(vp * c),
        cast_to_float(vp * c),
        layernorm_backward(rows, c, norms_sum_columns),
        matmul_backward(linear(4 * c, c), !norms_sum_columns, true),
        matmul_backward_recompute(linear(4 * c, c), !norms_sum_columns),
        matmul_backward(linear(c, 4 * c), true, false),
        matmul_backward(linear(c, c), !norms_sum_columns, false),
        attention_backward(shape),
        matmul_backward(linear(c, 3 * c), true, false),
        encoder_backward(b, t, c, v),
        sum(rows),
        global_norm(n),
        adamw(layout.decay_ranges().iter().filter_map(|range| range.within(&(0..n))).collect()),
    ]
}

/// Returns a copy of `n` floats.
pub fn copy(n: usize) -> Case {
    let operands = vec![output("to", n, Tolerance::ELEMENTWISE), input("from", n, UNIT)];
    let work = Work { floats: 2 * n, bytes: 0, flops: 0 };
    exact(case("copy", format!("{n}"), workload(1, 1, 8, 1, 128, 0), operands, work, |e, x| e.copy(x[0], x[1])))
}

/// Returns a GEMM of square matrices with `n` rows.
pub fn square_matmul(n: usize) -> Case {
    matmul_forward(MatmulShape { rows: n, c: n, oc: n }, false, EpilogueKind::None)
}

const UNIT: Init = Init::Uniform { mean: 0.0, spread: 1.0 };

fn input(name: &'static str, len: usize, init: Init) -> Operand {
    Operand { name, len, dtype: None, init, checked: None }
}

/// An operand that the operation overwrites completely.
fn output(name: &'static str, len: usize, tolerance: Tolerance) -> Operand {
    Operand { name, len, dtype: None, init: Init::Poison, checked: Some(tolerance) }
}

/// An operand that the operation accumulates into.
fn accumulated(name: &'static str, len: usize, tolerance: Tolerance) -> Operand {
    Operand { name, len, dtype: None, init: UNIT, checked: Some(tolerance) }
}

/// Changes an operand to f32 on every engine.
fn f32(operand: Operand) -> Operand {
    Operand { dtype: Some(DType::F32), ..operand }
}

fn i32(operand: Operand) -> Operand {
    Operand { dtype: Some(DType::I32), ..operand }
}

fn workload(b: usize, t: usize, channels: usize, heads: usize, padded_vocab: usize, parameters: usize) -> Workload {
    Workload { b, t, channels, heads, padded_vocab, parameters, norm_tensors: 1, update_ranges: 0, training: true }
}

fn case(
    operation: &'static str,
    shape: String,
    workload: Workload,
    operands: Vec<Operand>,
    work: Work,
    run: impl Fn(&mut dyn Engine, &[Tensor]) -> Result<()> + 'static,
) -> Case {
    let run = Box::new(run);
    Case { operation, shape, work, parts: Vec::new(), operands, workload, batch: None, exact: false, before: None, run }
}

fn exact(case: Case) -> Case {
    Case { exact: true, ..case }
}

fn encoder_forward(b: usize, t: usize, c: usize, vocab: usize) -> Case {
    let layout = BatchLayout { b, t };
    let operands = vec![
        i32(input("batch", layout.words(), Init::Tokens { below: 1 })),
        input("wte", vocab * c, UNIT),
        input("wpe", t * c, UNIT),
        output("out", b * t * c, Tolerance::ELEMENTWISE),
    ];
    let work = Work { floats: 2 * b * t * c + t * c, bytes: 4 * b * t, flops: 0 };
    let shape = format!("B{b} T{t} C{c} V{vocab}");
    let case = case("encoder_forward", shape, workload(b, t, c, 1, vocab, 0), operands, work, move |e, x| {
        e.run(EncoderForward { out: x[3], batch: x[0], layout, wte: x[1], wpe: x[2], c })
    });
    Case { batch: Some((layout, vocab as i32)), exact: true, ..case }
}

fn encoder_backward(b: usize, t: usize, c: usize, vocab: usize) -> Case {
    let layout = BatchLayout { b, t };
    let operands = vec![
        i32(input("batch", layout.words(), Init::Tokens { below: 1 })),
        input("dout", b * t * c, UNIT),
        accumulated("dwte", vocab * c, Tolerance::STOCHASTIC),
        accumulated("dwpe", t * c, Tolerance::STOCHASTIC),
    ];
    // dout is read once per kernel; accumulated rows are read and written. `Case::fill` draws half of the tokens
    // uniformly, which gives the expected number of distinct tokens.
    let (rows, uniform) = (b * t, b * t / 2);
    let distinct = (vocab as f64 * -(-(uniform as f64) / vocab as f64).exp_m1()) as usize;
    let of = |rows: usize, accumulated: usize| Work { floats: (rows + 2 * accumulated) * c, bytes: 0, flops: 0 };
    let parts = vec![
        (Part::Kernel("encoder_backward_wte"), of(rows, distinct)),
        (Part::Kernel("encoder_backward_rest"), of(rows, t)),
    ];
    let work = of(2 * rows, distinct + t);
    let shape = format!("B{b} T{t} C{c} V{vocab}");
    let case = case("encoder_backward", shape, workload(b, t, c, 1, vocab, 0), operands, work, move |e, x| {
        e.run(EncoderBackward { dwte: x[2], dwpe: x[3], dout: x[1], batch: x[0], layout, c })
    });
    Case { parts, batch: Some((layout, vocab as i32)), exact: true, ..case }
}

/// Returns the operands out, mean, rstd, weight and bias.
fn norm_operands(rows: usize, c: usize) -> [Operand; 5] {
    [
        output("out", rows * c, Tolerance::CHAIN),
        f32(output("mean", rows, Tolerance::CHAIN)),
        f32(output("rstd", rows, Tolerance::CHAIN)),
        input("weight", c, Init::Uniform { mean: 1.0, spread: 0.5 }),
        input("bias", c, UNIT),
    ]
}

fn layernorm_forward(rows: usize, c: usize) -> Case {
    let mut operands = norm_operands(rows, c).to_vec();
    operands.push(input("inp", rows * c, Init::Uniform { mean: 0.3, spread: 2.0 }));
    let work = Work { floats: 2 * rows * c, bytes: 8 * rows, flops: 0 };
    case("layernorm_forward", format!("{rows}x{c}"), workload(1, rows, c, 1, 128, 0), operands, work, move |e, x| {
        e.run(LayerNormForward { out: x[0], mean: x[1], rstd: x[2], weight: x[3], bias: x[4], inp: x[5], c })
    })
}

fn layernorm_backward(rows: usize, c: usize, column_sums: bool) -> Case {
    let mut operands = norm_operands(rows, c).to_vec();
    for operand in &mut operands[..3] {
        operand.checked = None;
    }
    operands[1].init = Init::Uniform { mean: 0.0, spread: 0.1 };
    operands[2].init = Init::Uniform { mean: 1.0, spread: 0.1 };
    operands.push(accumulated("dinp", rows * c, Tolerance::REDUCTION));
    operands.push(accumulated("dweight", c, Tolerance::REDUCTION));
    operands.push(accumulated("dbias", c, Tolerance::REDUCTION));
    operands.push(input("dout", rows * c, UNIT));
    operands.push(input("inp", rows * c, UNIT));
    // Some engines sum the columns of the rounded dinp in a separate kernel.
    operands.push(accumulated("column_sums", c, Tolerance::ACCUMULATED));
    let work = Work { floats: 4 * rows * c, bytes: 8 * rows, flops: 0 };
    let shape = format!("{rows}x{c}{}", if column_sums { " column sums" } else { "" });
    let case = case("layernorm_backward", shape, workload(1, rows, c, 1, 128, 0), operands, work, move |e, x| {
        e.run(LayerNormBackward {
            dinp: x[5],
            dweight: x[6],
            dbias: x[7],
            column_sums: column_sums.then_some(x[10]),
            dout: x[8],
            inp: x[9],
            weight: x[3],
            mean: x[1],
            rstd: x[2],
            c,
        })
    });
    Case { parts: vec![(Part::Kernel("layernorm_backward"), work)], ..case }
}

fn linear_workload(shape: MatmulShape) -> Workload {
    workload(1, shape.rows, shape.c.max(shape.oc / 4), 1, shape.oc.max(shape.c), 0)
}

/// The epilogue of a forward matmul, without its tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EpilogueKind {
    None,
    Residual,
    Gelu,
}

fn linear_name(shape: MatmulShape, bias: bool) -> String {
    let MatmulShape { rows, c, oc } = shape;
    format!("{rows}x{oc}x{c}{}", if bias { " bias" } else { "" })
}

fn matmul_forward(shape: MatmulShape, bias: bool, kind: EpilogueKind) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let mut operands = vec![
        output("out", rows * oc, Tolerance::CHAIN),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
        input("bias", oc, UNIT),
    ];
    let (name, matrices) = match kind {
        EpilogueKind::None => ("", 1),
        EpilogueKind::Residual => {
            operands[0].checked = Some(Tolerance::ACCUMULATED);
            operands.push(input("residual", rows * oc, UNIT));
            (" residual", 2)
        }
        EpilogueKind::Gelu => {
            operands.push(output("pre_gelu", rows * oc, Tolerance::REDUCTION));
            (" gelu", 2)
        }
    };
    let work = Work { floats: rows * c + oc * c + rows * oc * matrices, bytes: 0, flops: 2 * rows * c * oc };
    let name = linear_name(shape, bias) + name;
    let case = case("matmul_forward", name, linear_workload(shape), operands, work, move |e, x| {
        let kind = match kind {
            EpilogueKind::None => Epilogue::None,
            EpilogueKind::Residual => Epilogue::Residual(x[4]),
            EpilogueKind::Gelu => Epilogue::Gelu(x[4]),
        };
        e.run(MatmulForward { out: x[0], inp: x[1], weight: x[2], bias: bias.then_some(x[3]), epilogue: kind, shape })
    });
    let pass = Work { floats: 2 * rows * oc, ..Work::default() };
    Case { parts: vec![(Part::Kernel("gelu_forward"), pass), (Part::Gemm, Work { floats: 0, ..work })], ..case }
}

fn matmul_backward(shape: MatmulShape, bias: bool, gelu: bool) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let mut operands = vec![
        output("dinp", rows * c, Tolerance::CHAIN),
        accumulated("dweight", oc * c, Tolerance::ACCUMULATED),
        accumulated("dbias", oc, Tolerance::REDUCTION),
        input("dout", rows * oc, UNIT),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
    ];
    if gelu {
        operands.push(input("pre_gelu", rows * c, UNIT));
    }
    let floats = 2 * rows * oc + 2 * oc * c + rows * c * if gelu { 3 } else { 2 };
    let work = Work { floats, bytes: 0, flops: 4 * rows * c * oc };
    let name = linear_name(shape, bias) + if gelu { " gelu" } else { "" };
    let case = case("matmul_backward", name, linear_workload(shape), operands, work, move |e, x| {
        let gelu = gelu.then(|| GeluInput { pre_gelu: x[6], recompute: None });
        e.run(matmul_backward_operation(x, gelu, bias, shape))
    });
    let sums = Work { floats: rows * oc, ..Work::default() };
    let gelu_backward = Work { floats: 3 * rows * c, ..Work::default() };
    let gemm = Work { flops: 2 * rows * c * oc, ..Work::default() };
    let parts =
        vec![(Part::Kernel("bias_backward"), sums), (Part::Kernel("gelu_backward"), gelu_backward), (Part::Gemm, gemm)];
    Case { parts, ..case }
}

/// Returns the operation on the operands of [`matmul_backward`].
fn matmul_backward_operation(x: &[Tensor], gelu: Option<GeluInput>, bias: bool, shape: MatmulShape) -> MatmulBackward {
    MatmulBackward {
        dinp: x[0],
        dweight: x[1],
        dbias: bias.then_some(x[2]),
        dout: x[3],
        inp: x[4],
        weight: x[5],
        gelu,
        shape,
    }
}

/// Returns a matmul backward with activation checkpointing: its `inp`, the GELU of another matmul, is recomputed.
fn matmul_backward_recompute(shape: MatmulShape, bias: bool) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let before = MatmulShape { rows, c: oc, oc: c };
    let mut case = matmul_backward(shape, bias, true);
    // dweight is a GEMM with the recomputed, rounded inp.
    case.operands[1].checked = Some(Tolerance::CHAIN);
    case.operands[4] = output("inp", rows * c, Tolerance::CHAIN);
    case.operands[6] = output("pre_gelu", rows * c, Tolerance::REDUCTION);
    case.operands.extend([
        input("inp before", rows * oc, UNIT),
        // This spread keeps the input of GELU near 1 for any length of the sums. Otherwise gelu' would amplify rounding
        // errors.
        input("weight before", oc * c, Init::Uniform { mean: 0.0, spread: 3.0 / (oc as f32).sqrt() }),
        input("bias before", c, UNIT),
        Operand { checked: None, ..output("gelu", rows * c, Tolerance::CHAIN) },
    ]);
    case.shape += " again";
    case.work.floats += rows * c;
    case.parts.push((Part::Kernel("gelu_forward"), Work { floats: 2 * rows * c, ..Work::default() }));
    let forward = move |e: &mut dyn Engine, x: &[Tensor]| {
        e.run(MatmulForward {
            out: x[10],
            inp: x[7],
            weight: x[8],
            bias: Some(x[9]),
            epilogue: Epilogue::Gelu(x[6]),
            shape: before,
        })
    };
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let again = GeluForward { inp: x[7], weight: x[8], bias: Some(x[9]), shape: before };
        let gelu = GeluInput { pre_gelu: x[6], recompute: Some(again) };
        e.run(matmul_backward_operation(x, Some(gelu), bias, shape))
    };
    Case { before: Some(Box::new(forward)), run: Box::new(run), ..case }
}

/// Returns the backward pass of the model's head: no bias, and a weight gradient in f32 for every engine type.
fn head_backward(shape: MatmulShape) -> Case {
    let mut case = matmul_backward(shape, false, false);
    case.operands[1].dtype = Some(DType::F32);
    case.shape += " to f32";
    case
}

fn attention_workload(shape: AttentionShape) -> Workload {
    workload(shape.b, shape.t, shape.heads * shape.head_size, shape.heads, 128, 0)
}

fn heads_name(shape: AttentionShape) -> String {
    let AttentionShape { b, t, heads, head_size } = shape;
    format!("B{b} T{t} NH{heads} HS{head_size}")
}

/// Returns the forward and the backward pass of attention.
pub fn attention(shape: AttentionShape) -> [Case; 2] {
    [attention_forward(shape), attention_backward(shape)]
}

fn attention_forward(shape: AttentionShape) -> Case {
    let rows = shape.b * shape.t;
    let c = shape.heads * shape.head_size;
    let operands = vec![
        output("out", rows * c, Tolerance::ATTENTION),
        f32(output("lse", rows * shape.heads, Tolerance::CHAIN)),
        input("qkv", rows * 3 * c, UNIT),
    ];
    // Half of T x T is masked. The scores and the values take a multiplication and an addition per unmasked element.
    let flops = 2 * shape.b * shape.heads * shape.t * shape.t * shape.head_size;
    let work = Work { floats: 4 * rows * c, bytes: 4 * rows * shape.heads, flops };
    case("attention_forward", heads_name(shape), attention_workload(shape), operands, work, move |e, x| {
        e.run(AttentionForward { out: x[0], lse: x[1], qkv: x[2], shape })
    })
}

fn attention_backward(shape: AttentionShape) -> Case {
    let rows = shape.b * shape.t;
    let c = shape.heads * shape.head_size;
    let operands = vec![
        output("dqkv", rows * 3 * c, Tolerance::ATTENTION_BACKWARD),
        input("dout", rows * c, UNIT),
        input("qkv", rows * 3 * c, UNIT),
        input("out", rows * c, Init::Zero),
        f32(input("lse", rows * shape.heads, Init::Zero)),
    ];
    let flops = 5 * shape.b * shape.heads * shape.t * shape.t * shape.head_size;
    let work = Work { floats: 8 * rows * c, bytes: 4 * rows * shape.heads, flops };
    let case = case("attention_backward", heads_name(shape), attention_workload(shape), operands, work, move |e, x| {
        e.run(AttentionBackward { dqkv: x[0], dout: x[1], qkv: x[2], out: x[3], lse: x[4], shape })
    });
    // The backward pass reads the output of the engine's own forward pass.
    Case {
        before: Some(Box::new(move |e, x| e.run(AttentionForward { out: x[3], lse: x[4], qkv: x[2], shape }))),
        ..case
    }
}

fn classifier(rows: usize, v: usize, vp: usize, gradient: bool) -> Case {
    let logits = Operand {
        checked: Some(Tolerance::CHAIN),
        ..input("logits", rows * vp, Init::Uniform { mean: 0.0, spread: 4.0 })
    };
    let operands = vec![
        logits,
        f32(accumulated("losses", rows, Tolerance::REDUCTION)),
        i32(input("targets", rows, Init::Tokens { below: v as i32 })),
    ];
    let dloss = gradient.then_some(0.25);
    let work = Work { floats: rows * vp * if gradient { 2 } else { 1 }, bytes: 12 * rows, flops: 0 };
    let name = format!("{rows}x{v}/{vp}{}", if gradient { " gradient" } else { "" });
    case("classifier", name, workload(1, rows, 64, 1, vp, 0), operands, work, move |e, x| {
        e.run(Classifier { logits: x[0], losses: x[1], targets: x[2], v, vp, dloss })
    })
}

fn sum(n: usize) -> Case {
    let operands = vec![
        f32(output("out", 1, Tolerance::REDUCTION)),
        f32(input("values", n, Init::Uniform { mean: 1.0, spread: 1.0 })),
    ];
    let work = Work { floats: 0, bytes: 4 * n, flops: 0 };
    case("sum", format!("{n}"), workload(1, 1, 8, 1, 128, n), operands, work, |e, x| {
        e.run(Sum { out: x[0], values: x[1] })
    })
}

fn global_norm(n: usize) -> Case {
    let operands = vec![f32(output("norm", 1, Tolerance::REDUCTION)), input("grads", n, UNIT)];
    let work = Work { floats: n, bytes: 0, flops: 0 };
    case("global_norm", format!("{n}"), workload(1, 1, 8, 1, 128, n), operands, work, |e, x| {
        e.run(GlobalNorm { norm: x[0], grads: x[1] })
    })
}

/// Partitions `n` elements into ranges of 8, 24, 72, ... elements, with weight decay for every other range.
fn update_ranges(n: usize) -> Vec<UpdateRange> {
    let (mut ranges, mut start, mut len) = (Vec::new(), 0, 8);
    while start < n {
        let elements = start..n.min(start + len);
        (start, len) = (elements.end, 3 * len);
        ranges.push(UpdateRange { elements, decayed: ranges.len() % 2 == 0, seed: 5 * start as u32 });
    }
    ranges
}

/// Returns an AdamW update of all elements of the ranges.
fn adamw(ranges: Vec<UpdateRange>) -> Case {
    let n = ranges.iter().map(|range| range.elements.len()).sum();
    let operands = vec![
        Operand { checked: Some(Tolerance::STOCHASTIC), ..input("params", n, UNIT) },
        input("grads", n, UNIT),
        f32(accumulated("m", n, Tolerance::REDUCTION)),
        f32(Operand { init: Init::Uniform { mean: 1.0, spread: 0.9 }, ..accumulated("v", n, Tolerance::REDUCTION) }),
        f32(accumulated("master", n, Tolerance::REDUCTION)),
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let settings = AdamW {
        learning_rate: 0.05,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 3,
        clip: 1.0,
        seed: 77,
    };
    let work = Work { floats: 2 * n, bytes: 24 * n, flops: 0 };
    let workload = Workload { update_ranges: ranges.len(), ..workload(1, 1, 8, 1, 128, n) };
    exact(case("adamw", format!("{n}"), workload, operands, work, move |e, x| {
        // An f32 engine has no master weights. Copying keeps the values of both engines equal.
        if e.dtype() == DType::F32 {
            e.cast(x[0], x[4])?;
        }
        let master = (e.dtype() != DType::F32).then_some(x[4]);
        let [params, grads, m, v, stats] = [x[0], x[1], x[2], x[3], x[5]];
        e.run(AdamWUpdate { params, grads, m, v, master, ranges: &ranges, stats, settings })?;
        if e.dtype() == DType::F32 {
            e.cast(x[4], x[0])?;
        }
        Ok(())
    }))
}

fn cast_to_float(n: usize) -> Case {
    let operands = vec![output("to", n, Tolerance::ELEMENTWISE), f32(input("from", n, UNIT))];
    let work = Work { floats: n, bytes: 4 * n, flops: 0 };
    let name = format!("{n} from f32");
    exact(case("cast", name, workload(1, 1, 8, 1, 128, n), operands, work, |e, x| e.cast(x[0], x[1])))
}

fn cast_from_float(n: usize) -> Case {
    let operands = vec![f32(output("to", n, Tolerance::ELEMENTWISE)), input("from", n, UNIT)];
    let work = Work { floats: n, bytes: 4 * n, flops: 0 };
    let name = format!("{n} to f32");
    exact(case("cast", name, workload(1, 1, 8, 1, 128, n), operands, work, |e, x| e.cast(x[0], x[1])))
}
