//! The table of cases: the operands, tolerances and work of each operation.

mod adapters;
mod attention;
mod decode;
mod decode_step;
mod experts;
pub mod fp8;
mod stream;
mod update;

use super::case::{Case, Init, Operand, Part, Work};
use super::compare::Tolerance;
pub use attention::{DocumentLengths, MaskedAttention};
use attention::{attention_backward, attention_forward};
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AttentionShape, Classifier, EncoderBackward, EncoderForward,
    Epilogue, GlobalNorm, HeadNorm, MatmulBackward, MatmulForward, MatmulShape, MostLikely, NormBackward, NormForward,
    QkNormScope, RotaryBackward, RotaryForward, RotaryPairs, Rotation, Sum,
};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, MASKED_TARGET, Result, Workload};
use model::descriptor::{Biases, Normalization, Positions};
use model::{Descriptor, LOGIT_ROWS, MasterWeights, Moments, Params};

/// Returns every operation at small and odd shapes, which are multiples of the smallest factor that an operation
/// accepts.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (b, t, c) in [(1, 1, 64), (3, 7, 80), (2, 33, 200)] {
        for positions in [true, false] {
            cases.extend([encoder_forward(b, t, c, 37, positions), encoder_backward(b, t, c, 37, positions)]);
        }
        cases.push(layernorm_forward(b * t, c));
        cases.extend([false, true].map(|sums| layernorm_backward(b * t, c, sums)));
        cases.extend(rmsnorm(b * t, c));
    }
    // Rows so long that a whole block processes one, and tokens so frequent that many warps accumulate the gradient of
    // one.
    for (rows, c) in [(9, 1600), (3, 4200)] {
        cases.push(layernorm_forward(rows, c));
        cases.extend([false, true].map(|sums| layernorm_backward(rows, c, sums)));
        cases.extend(rmsnorm(rows, c));
    }
    cases.extend([(5, 896), (3, 2048)].into_iter().flat_map(|(rows, c)| rmsnorm(rows, c)));
    cases.extend([true, false].map(|positions| encoder_backward(4, 300, 80, 3, positions)));
    for (rows, c, oc) in [(1, 64, 64), (37, 80, 240), (130, 64, 136)] {
        let shape = MatmulShape { rows, c, oc };
        cases.extend([EpilogueKind::None, EpilogueKind::Residual, GELU].map(|kind| matmul_forward(shape, true, kind)));
        cases.extend([
            matmul_forward(shape, false, EpilogueKind::None),
            matmul_backward(shape, true, Some(Activation::Gelu)),
        ]);
        cases.extend([matmul_backward(shape, false, None), matmul_backward(shape, true, None)]);
        cases.extend([true, false].map(|bias| matmul_backward_recompute(shape, bias, Activation::Gelu)));
        cases.push(head_backward(shape));
    }
    // SwiGLU and ReLU². Their rows are not a multiple of the packets of a block.
    for (rows, c, oc) in [(1, 64, 16), (37, 80, 240), (130, 208, 80)] {
        let shape = MatmulShape { rows, c, oc };
        for activation in [Activation::SwiGlu, Activation::ReluSquared, Activation::GeGlu] {
            let kind = EpilogueKind::Activation(activation);
            cases.extend([true, false].map(|bias| matmul_forward(shape, bias, kind)));
            cases.extend([true, false].map(|bias| matmul_backward(shape, bias, Some(activation))));
            cases.push(matmul_backward_recompute(shape, false, activation));
        }
    }
    cases.extend([copy(8), copy(1001)]);
    for (b, t, heads) in [(1, 1, 1), (2, 17, 3), (1, 63, 2), (1, 64, 1), (2, 65, 2), (1, 130, 1), (3, 129, 1)] {
        for head_size in [64, 80, 96, 128] {
            let shape = AttentionShape { b, t, heads, kv_heads: heads, head_size };
            cases.extend(attention(&shape.into()));
        }
    }
    for (b, t, heads, kv_heads) in [(1, 1, 2, 1), (2, 65, 4, 2), (1, 130, 8, 1), (1, 129, 6, 3)] {
        for head_size in [64, 80, 96, 128] {
            cases.extend(attention(&AttentionShape { b, t, heads, kv_heads, head_size }.into()));
        }
    }
    cases.extend(attention::masked_edge_cases().iter().flat_map(attention));
    for head_size in [16, 64, 80, 96, 128, 256] {
        for (b, t, heads, kv_heads) in [(1, 1, 1, 1), (2, 9, 14, 2), (3, 5, 4, 4)] {
            let shape = AttentionShape { b, t, heads, kv_heads, head_size };
            for pairs in [RotaryPairs::HalfSplit, RotaryPairs::Interleaved] {
                cases.extend(rotary(RotaryShape { attention: shape, pairs }));
            }
        }
    }
    // Few tokens, so that some targets are the most likely ones.
    cases.extend([(64, 3, 8), (19, 257, 384)].map(|(rows, v, vp)| most_likely(rows, v, vp)));
    for (rows, v, vp) in [(1, 5, 128), (19, 257, 384), (3, 1000, 1024)] {
        for softcap in [None, Some(1.5)] {
            cases.extend([true, false].map(|gradient| classifier(rows, v, vp, gradient, softcap)));
            cases.extend([true, false].map(|gradient| masked(classifier(rows, v, vp, gradient, softcap))));
        }
    }
    for n in [8, 1000, 12_344] {
        cases.extend([global_norm(n), sum(n), digest(n), cast_to_float(n), cast_from_float(n)]);
    }
    cases.extend(adapters::edge_cases());
    cases.extend(stream::edge_cases());
    cases.extend(experts::edge_cases());
    cases.extend(update::edge_cases());
    cases.extend(decode::edge_cases());
    cases.extend(decode_step::edge_cases());
    cases
}

/// Returns every operation at the shapes of real models, with batches small enough for the reference.
pub fn model_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (b, t, c) in [(4, 1024, 768), (2, 512, 1600), (1, 256, 4096)] {
        cases.extend([encoder_forward(b, t, c, 50257, true), encoder_backward(b, t, c, 50257, true)]);
        cases.push(layernorm_forward(b * t, c));
        cases.extend([false, true].map(|sums| layernorm_backward(b * t, c, sums)));
        cases.extend(rmsnorm(b * t, c));
    }
    for (rows, c) in [(2048, 896), (1024, 1536), (1024, 2048), (1024, 3072)] {
        cases.extend(rmsnorm(rows, c));
    }
    cases.extend([encoder_forward(2, 512, 896, 151_936, false), encoder_backward(2, 512, 896, 151_936, false)]);
    for (rows, c, oc) in [(2048, 768, 2304), (1024, 768, 768), (512, 1600, 6400), (512, 768, 50304)] {
        let shape = MatmulShape { rows, c, oc };
        cases.extend([EpilogueKind::None, EpilogueKind::Residual, GELU].map(|kind| matmul_forward(shape, true, kind)));
        cases.extend([matmul_backward(shape, true, Some(Activation::Gelu)), matmul_backward(shape, false, None)]);
        cases.push(head_backward(shape));
    }
    for (rows, c) in [(2048, 768), (512, 1600)] {
        let shape = MatmulShape { rows, c: 4 * c, oc: c };
        cases.extend([true, false].map(|bias| matmul_backward_recompute(shape, bias, Activation::Gelu)));
    }
    for (activation, c, f) in [(Activation::SwiGlu, 896, 4864), (Activation::ReluSquared, 768, 3072)] {
        let (fc, proj) =
            (MatmulShape { rows: 512, c, oc: f * activation.inputs() }, MatmulShape { rows: 512, c: f, oc: c });
        cases.push(matmul_forward(fc, false, EpilogueKind::Activation(activation)));
        cases.push(matmul_backward(proj, false, Some(activation)));
        cases.push(matmul_backward_recompute(proj, false, activation));
    }
    for (b, t, heads, head_size) in
        [(1, 1024, 12, 64), (16, 1024, 12, 64), (1, 1000, 4, 80), (1, 777, 4, 96), (1, 2048, 4, 128), (3, 1000, 2, 128)]
    {
        cases.extend(attention(&AttentionShape { b, t, heads, kv_heads: heads, head_size }.into()));
    }
    for (b, t, heads, kv_heads, head_size) in [(4, 1024, 32, 8, 64), (2, 1000, 12, 2, 128), (1, 777, 8, 1, 96)] {
        cases.extend(attention(&AttentionShape { b, t, heads, kv_heads, head_size }.into()));
    }
    cases.extend(attention::masked_model_cases().iter().flat_map(attention));
    for (rows, v, vp, softcap) in [
        (256, 50257, 50304, None),
        (64, 128_256, 128_256, None),
        (64, 151_665, 151_936, None),
        (64, 50304, 50304, Some(15.0)),
    ] {
        cases.extend([true, false].map(|gradient| classifier(rows, v, vp, gradient, softcap)));
        cases.push(masked(classifier(rows, v, vp, true, softcap)));
    }
    cases.push(most_likely(256, 50257, 50304));
    for (b, t, heads, kv_heads, head_size) in [(2, 512, 32, 8, 64), (1, 1024, 32, 8, 128), (3, 333, 14, 2, 64)] {
        let attention = AttentionShape { b, t, heads, kv_heads, head_size };
        cases.extend(rotary(RotaryShape { attention, pairs: RotaryPairs::HalfSplit }));
    }
    for n in [1 << 20, 7_087_872] {
        cases.extend([global_norm(n), digest(n), cast_to_float(n), cast_from_float(n)]);
    }
    cases.push(sum(65_536));
    cases.extend(adapters::model_cases());
    cases.extend(stream::model_cases());
    cases.extend(experts::model_cases());
    cases.extend(update::model_cases());
    cases.extend(decode::model_cases());
    cases.extend(decode_step::model_cases());
    cases
}

/// Returns every operation of a training step of a model with batches of `b` x `t` tokens, as `engine` executes them,
/// for timing.
pub fn training_step_cases(descriptor: &Descriptor, b: usize, t: usize, engine: &dyn Engine) -> Vec<Case> {
    let d = *descriptor;
    let (c, v, vp) = (d.channels, d.vocab, d.padded_vocab());
    let layout = Params::new(d);
    let (rows, n) = (b * t, layout.elements());
    let chunk = rows.min(LOGIT_ROWS);
    let shape = d.attention(b, t);
    let linear = |c, oc| MatmulShape { rows, c, oc };
    let head = MatmulShape { rows: chunk, c, oc: vp };
    let [qkv, attproj] = [linear(c, d.qkv_channels()), linear(d.attention_channels(), c)];
    let [fc, fcproj] = [linear(c, d.fc_channels()), linear(d.mlp_channels, c)];
    let (qkv_bias, biases) = (d.biases != Biases::None, d.biases == Biases::All);
    let norms_sum_columns = d.norm == Normalization::LayerNorm && biases && engine.fuses_column_sums(c);
    let residual_biases = biases && !norms_sum_columns;
    let learned = d.positions == Positions::Learned;
    let (norm_forward, norm_backward) = match d.norm {
        Normalization::LayerNorm => (layernorm_forward(rows, c), layernorm_backward(rows, c, norms_sum_columns)),
        Normalization::RmsNorm { weights, .. } => {
            (rmsnorm_forward(rows, c, weights), rmsnorm_backward(rows, c, weights))
        }
    };
    let update_ranges: Vec<_> = layout.group_ranges().iter().filter_map(|range| range.within(&(0..n))).collect();
    vec![
        encoder_forward(b, t, c, v, learned),
        norm_forward,
        matmul_forward(qkv, qkv_bias, EpilogueKind::None),
        attention_forward(&shape.into()),
        matmul_forward(attproj, biases, EpilogueKind::Residual),
        matmul_forward(fc, biases, EpilogueKind::Activation(d.activation)),
        matmul_forward(fcproj, biases, EpilogueKind::Residual),
        matmul_forward(head, false, EpilogueKind::None),
        classifier(chunk, v, vp, false, d.softcap),
        classifier(chunk, v, vp, true, d.softcap),
        head_backward(head),
        cast_from_float(vp * c),
        cast_to_float(vp * c),
        norm_backward,
        matmul_backward(fcproj, residual_biases, Some(d.activation)),
        matmul_backward_recompute(fcproj, residual_biases, d.activation),
        matmul_backward(fc, biases, None),
        matmul_backward(attproj, residual_biases, None),
        attention_backward(&shape.into()),
        matmul_backward(qkv, qkv_bias, None),
        encoder_backward(b, t, c, v, learned),
        sum(rows),
        global_norm(n),
        update::adamw(update_ranges.clone()),
        update::compact_adamw(update_ranges, MasterWeights::Remainder, Moments::Bf16),
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
    Workload {
        attention: AttentionShape { b, t, heads, kv_heads: heads, head_size: channels / heads },
        channels,
        linear_layers: [(3, 1), (1, 1), (4, 1), (1, 4)].map(|(oc, c)| (oc * channels, c * channels)).to_vec(),
        mlp_channels: 4 * channels,
        router: None,
        routed_tokens: b * t,
        qk_norm: None,
        padded_vocab,
        parameters,
        norm_tensors: 1,
        update_ranges: 0,
        training: true,
    }
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
    let (parts, repetitions) = (Vec::new(), 0);
    Case {
        operation,
        shape,
        work,
        parts,
        operands,
        workload,
        batch: None,
        exact: false,
        repetitions,
        before: None,
        run,
    }
}

fn exact(case: Case) -> Case {
    Case { exact: true, ..case }
}

/// Returns a number that is `n` if `present`, else 0.
const fn if_present(present: bool, n: usize) -> usize {
    if present { n } else { 0 }
}

fn encoder_name(b: usize, t: usize, c: usize, vocab: usize, positions: bool) -> String {
    format!("B{b} T{t} C{c} V{vocab}{}", if positions { "" } else { " tokens only" })
}

fn encoder_forward(b: usize, t: usize, c: usize, vocab: usize, positions: bool) -> Case {
    let layout = BatchLayout::new(b, t);
    let operands = vec![
        i32(input("batch", layout.words(), Init::Tokens { below: 1 })),
        input("wte", vocab * c, UNIT),
        input("wpe", t * c, UNIT),
        output("out", b * t * c, Tolerance::ELEMENTWISE),
    ];
    let work = Work { floats: 2 * b * t * c + if_present(positions, t * c), bytes: 4 * b * t, flops: 0 };
    let shape = encoder_name(b, t, c, vocab, positions);
    let case = case("encoder_forward", shape, workload(b, t, c, 1, vocab, 0), operands, work, move |e, x| {
        e.run(EncoderForward { out: x[3], batch: x[0], layout, wte: x[1], wpe: positions.then_some(x[2]), c })
    });
    Case { batch: Some((layout, vocab as i32)), exact: true, ..case }
}

fn encoder_backward(b: usize, t: usize, c: usize, vocab: usize, positions: bool) -> Case {
    let layout = BatchLayout::new(b, t);
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
        (Part::Kernel("encoder_backward_rest"), of(if_present(positions, rows), if_present(positions, t))),
    ];
    let work = of(rows + if_present(positions, rows), distinct + if_present(positions, t));
    let shape = encoder_name(b, t, c, vocab, positions);
    let case = case("encoder_backward", shape, workload(b, t, c, 1, vocab, 0), operands, work, move |e, x| {
        e.run(EncoderBackward { dwte: x[2], dwpe: positions.then_some(x[3]), dout: x[1], batch: x[0], layout, c })
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
        let (out, rstd, inp) = (x[0], x[2], x[5]);
        let [mean, weight, bias] = [x[1], x[3], x[4]].map(Some);
        e.run(NormForward { out, mean, rstd, inp, weight, bias, c, eps: 0.0, quantized: None })
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
        let [dweight, dbias, weight, mean] = [x[6], x[7], x[3], x[1]].map(Some);
        let (dinp, dout, inp, rstd) = (x[5], x[8], x[9], x[2]);
        let column_sums = column_sums.then_some(x[10]);
        e.run(NormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c })
    });
    Case { parts: vec![(Part::Kernel("norm_backward"), work)], ..case }
}

/// Returns an RMSNorm and its gradient, with and without weight.
fn rmsnorm(rows: usize, c: usize) -> [Case; 4] {
    [
        rmsnorm_forward(rows, c, true),
        rmsnorm_forward(rows, c, false),
        rmsnorm_backward(rows, c, true),
        rmsnorm_backward(rows, c, false),
    ]
}

fn rmsnorm_shape(rows: usize, c: usize, weighted: bool) -> String {
    format!("{rows}x{c}{}", if weighted { "" } else { " without weight" })
}

fn rmsnorm_forward(rows: usize, c: usize, weighted: bool) -> Case {
    let operands = vec![
        output("out", rows * c, Tolerance::REDUCTION),
        f32(output("rstd", rows, Tolerance::REDUCTION)),
        input("inp", rows * c, Init::Uniform { mean: 0.3, spread: 2.0 }),
        input("weight", c, Init::Uniform { mean: 1.0, spread: 0.5 }),
    ];
    let work = Work { floats: 2 * rows * c, bytes: 4 * rows, flops: 0 };
    let (shape, workload) = (rmsnorm_shape(rows, c, weighted), workload(1, rows, c, 1, 128, 0));
    case("rmsnorm_forward", shape, workload, operands, work, move |e, x| {
        let weight = weighted.then_some(x[3]);
        // A large eps, so that an ignored one shows.
        let (out, rstd, inp) = (x[0], x[1], x[2]);
        e.run(NormForward { out, mean: None, rstd, inp, weight, bias: None, c, eps: 0.25, quantized: None })
    })
}

fn rmsnorm_backward(rows: usize, c: usize, weighted: bool) -> Case {
    let operands = vec![
        accumulated("dinp", rows * c, Tolerance::REDUCTION),
        accumulated("dweight", c, Tolerance::REDUCTION),
        input("dout", rows * c, UNIT),
        input("inp", rows * c, UNIT),
        f32(input("rstd", rows, Init::Uniform { mean: 1.0, spread: 0.1 })),
        input("weight", c, Init::Uniform { mean: 1.0, spread: 0.5 }),
    ];
    let work = Work { floats: 4 * rows * c, bytes: 4 * rows, flops: 0 };
    let (shape, workload) = (rmsnorm_shape(rows, c, weighted), workload(1, rows, c, 1, 128, 0));
    let case = case("rmsnorm_backward", shape, workload, operands, work, move |e, x| {
        let [dweight, weight] = [x[1], x[5]].map(|tensor| weighted.then_some(tensor));
        let (dinp, dout, inp, rstd) = (x[0], x[2], x[3], x[4]);
        let (dbias, column_sums, mean) = (None, None, None);
        e.run(NormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c })
    });
    Case { parts: vec![(Part::Kernel("norm_backward"), work)], ..case }
}

fn linear_workload(shape: MatmulShape) -> Workload {
    workload(1, shape.rows, shape.c.max(shape.oc / 4), 1, shape.oc.max(shape.c), 0)
}

/// The kernels of an activation's passes, if no GEMM computes them.
const ACTIVATION_FORWARD: Part = Part::Kernel("activation_forward");
const ACTIVATION_BACKWARD: Part = Part::Kernel("activation_backward");

/// The epilogue of a forward matmul, without its tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EpilogueKind {
    None,
    Residual,
    Activation(Activation),
}

const GELU: EpilogueKind = EpilogueKind::Activation(Activation::Gelu);

fn linear_name(shape: MatmulShape, bias: bool) -> String {
    let MatmulShape { rows, c, oc } = shape;
    format!("{rows}x{oc}x{c}{}", if bias { " bias" } else { "" })
}

fn matmul_forward(shape: MatmulShape, bias: bool, kind: EpilogueKind) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let out = if let EpilogueKind::Activation(activation) = kind { oc / activation.inputs() } else { oc };
    let mut operands = vec![
        output("out", rows * out, Tolerance::CHAIN),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
        input("bias", oc, UNIT),
    ];
    let (name, columns) = match kind {
        EpilogueKind::None => (String::new(), oc),
        EpilogueKind::Residual => {
            operands[0].checked = Some(Tolerance::ACCUMULATED);
            operands.push(input("residual", rows * oc, UNIT));
            (" residual".to_owned(), 2 * oc)
        }
        EpilogueKind::Activation(activation) => {
            operands.push(output("preactivation", rows * oc, Tolerance::REDUCTION));
            (format!(" {}", activation.name().to_lowercase()), oc + out)
        }
    };
    let work = Work { floats: rows * c + oc * c + rows * columns, bytes: 0, flops: 2 * rows * c * oc };
    let name = linear_name(shape, bias) + &name;
    let case = case("matmul_forward", name, linear_workload(shape), operands, work, move |e, x| {
        let kind = match kind {
            EpilogueKind::None => Epilogue::None,
            EpilogueKind::Residual => Epilogue::Residual(x[4]),
            EpilogueKind::Activation(activation) => Epilogue::Activation(activation, x[4]),
        };
        e.run(MatmulForward {
            bias: bias.then_some(x[3]),
            epilogue: kind,
            ..MatmulForward::new([x[0], x[1], x[2]], shape)
        })
    });
    let mut parts = vec![(Part::Gemm, Work { floats: 0, ..work })];
    if let EpilogueKind::Activation(_) = kind {
        let pass = Work { floats: rows * (oc + out), ..Work::default() };
        parts.push((ACTIVATION_FORWARD, pass));
    }
    Case { parts, ..case }
}

fn matmul_backward(shape: MatmulShape, bias: bool, activation: Option<Activation>) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let inputs = activation.map_or(1, Activation::inputs);
    let mut operands = vec![
        output("dinp", rows * c * inputs, Tolerance::CHAIN),
        accumulated("dweight", oc * c, Tolerance::ACCUMULATED),
        accumulated("dbias", oc, Tolerance::REDUCTION),
        input("dout", rows * oc, UNIT),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, Init::Uniform { mean: 0.0, spread: 0.2 }),
    ];
    let mut floats = 2 * rows * oc + 2 * oc * c + rows * c * (1 + inputs);
    let mut name = linear_name(shape, bias);
    let sums = Work { floats: rows * oc, ..Work::default() };
    let gemm = Work { flops: 2 * rows * c * oc, ..Work::default() };
    let mut parts = vec![(Part::Kernel("bias_backward"), sums), (Part::Gemm, gemm)];
    if let Some(activation) = activation {
        operands.push(input("preactivation", rows * c * inputs, UNIT));
        floats += rows * c * inputs;
        let of_case = activation.name().to_lowercase();
        name = format!("{name} {of_case}");
        parts.push((ACTIVATION_BACKWARD, Work { floats: rows * c * (1 + 2 * inputs), ..Work::default() }));
    }
    let work = Work { floats, bytes: 0, flops: 4 * rows * c * oc };
    let case = case("matmul_backward", name, linear_workload(shape), operands, work, move |e, x| {
        let input = activation.map(|activation| ActivationInput { activation, preactivation: x[6], recompute: None });
        e.run(matmul_backward_operation(x, input, bias, shape))
    });
    Case { parts, ..case }
}

/// Returns the operation on the operands of [`matmul_backward`].
fn matmul_backward_operation(
    x: &[Tensor],
    activation: Option<ActivationInput>,
    bias: bool,
    shape: MatmulShape,
) -> MatmulBackward {
    MatmulBackward {
        dbias: bias.then_some(x[2]),
        activation,
        ..MatmulBackward::new(x[0], Some(x[1]), [x[3], x[4], x[5]], shape)
    }
}

/// Returns a matmul backward with activation checkpointing: its `inp`, the activation of another matmul, is recomputed.
fn matmul_backward_recompute(shape: MatmulShape, bias: bool, activation: Activation) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let sums = c * activation.inputs();
    let before = MatmulShape { rows, c: oc, oc: sums };
    let mut case = matmul_backward(shape, bias, Some(activation));
    // dweight is a GEMM with the recomputed, rounded inp.
    case.operands[1].checked = Some(match activation {
        Activation::ReluSquared | Activation::SwiGlu | Activation::GeGlu => Tolerance::SQUARED_CHAIN,
        Activation::Gelu => Tolerance::CHAIN,
    });
    case.operands[4] = output("inp", rows * c, Tolerance::CHAIN);
    if activation.is_gated() {
        case.operands[4].checked = None;
    }
    case.operands[6] = output("preactivation", rows * sums, Tolerance::REDUCTION);
    case.operands.extend([
        input("inp before", rows * oc, UNIT),
        // This spread keeps the input of the activation near 1 for any length of the sums. Otherwise its derivative would
        // amplify rounding errors.
        input("weight before", oc * sums, Init::Uniform { mean: 0.0, spread: 3.0 / (oc as f32).sqrt() }),
        input("bias before", sums, UNIT),
        Operand { checked: None, ..output("activation", rows * c, Tolerance::CHAIN) },
    ]);
    case.shape += " again";
    case.work.floats += rows * c;
    let pass = Work { floats: rows * (c + sums), ..Work::default() };
    case.parts.push((ACTIVATION_FORWARD, pass));
    let forward = move |e: &mut dyn Engine, x: &[Tensor]| {
        e.run(MatmulForward {
            bias: Some(x[9]),
            epilogue: Epilogue::Activation(activation, x[6]),
            ..MatmulForward::new([x[10], x[7], x[8]], before)
        })
    };
    let run = move |e: &mut dyn Engine, x: &[Tensor]| {
        let again = ActivationForward { inp: x[7], weight: x[8], bias: Some(x[9]), shape: before };
        let input = ActivationInput { activation, preactivation: x[6], recompute: Some(again) };
        e.run(matmul_backward_operation(x, Some(input), bias, shape))
    };
    Case { before: Some(Box::new(forward)), run: Box::new(run), ..case }
}

/// Returns the backward pass of the model's head: no bias, and a weight gradient in f32 for every engine type.
fn head_backward(shape: MatmulShape) -> Case {
    let mut case = matmul_backward(shape, false, None);
    case.operands[1].dtype = Some(DType::F32);
    case.shape += " to f32";
    case
}

/// Returns the forward and the backward pass of attention.
pub fn attention(attention: &MaskedAttention) -> [Case; 2] {
    [attention_forward(attention), attention_backward(attention)]
}

/// The sizes of a rotation.
#[derive(Clone, Copy)]
struct RotaryShape {
    attention: AttentionShape,
    pairs: RotaryPairs,
}

/// The norm before a rotation.
#[derive(Clone, Copy)]
struct RotaryNorm {
    weighted: bool,
    scope: QkNormScope,
}

/// Returns the forward and the backward pass without a norm, and with norms with and without weights.
fn rotary(shape: RotaryShape) -> Vec<Case> {
    let scopes = [QkNormScope::Head, QkNormScope::AllHeads];
    let norms = scopes.into_iter().flat_map(|scope| [false, true].map(|weighted| Some(RotaryNorm { weighted, scope })));
    let norms = [None].into_iter().chain(norms);
    norms.flat_map(|norm| [rotary_forward(shape, norm), rotary_backward(shape, norm)]).collect()
}

/// Returns the name of a case, and the number of rotated elements.
fn rotary_name(shape: RotaryShape, norm: Option<RotaryNorm>) -> (String, usize) {
    let AttentionShape { b, t, heads, kv_heads, head_size } = shape.attention;
    let norm = norm.map_or(String::new(), |RotaryNorm { weighted, scope }| {
        let of = if scope == QkNormScope::AllHeads { " of all heads" } else { "" };
        format!("{} norm{of}", if weighted { " weighted" } else { "" })
    });
    let pairs = if shape.pairs == RotaryPairs::Interleaved { " interleaved" } else { "" };
    (format!("B{b} T{t} NH{heads} KV{kv_heads} HS{head_size}{pairs}{norm}"), b * t * (heads + kv_heads) * head_size)
}

/// Returns the lengths of the weights of queries and keys.
fn rotary_weights(shape: RotaryShape, norm: Option<RotaryNorm>) -> [usize; 2] {
    let AttentionShape { heads, kv_heads, head_size, .. } = shape.attention;
    norm.map_or(QkNormScope::Head, |norm| norm.scope).widths(heads, kv_heads, head_size)
}

/// Returns the tolerance of the results. A GPU rounds values between the norm of all heads and the rotation.
fn rotary_tolerance(norm: Option<RotaryNorm>) -> Tolerance {
    let is_of_all_heads = norm.is_some_and(|norm| norm.scope == QkNormScope::AllHeads);
    if is_of_all_heads { Tolerance::CHAIN } else { Tolerance::REDUCTION }
}

/// Returns the operands qkv (or its gradient), table, saved, and the weights of queries and keys.
fn rotary_operands(shape: RotaryShape, norm: Option<RotaryNorm>, rotated: usize, name: &'static str) -> Vec<Operand> {
    let AttentionShape { b, t, head_size, .. } = shape.attention;
    let weight = |name, len| input(name, len, Init::Uniform { mean: 1.0, spread: 0.5 });
    let [queries, keys] = rotary_weights(shape, norm);
    vec![
        accumulated(name, b * t * shape.attention.packed_heads() * head_size, rotary_tolerance(norm)),
        f32(input("table", t * head_size, UNIT)),
        input("saved", rotated, UNIT),
        weight("q weight", queries),
        weight("k weight", keys),
    ]
}

fn rotary_workload(shape: RotaryShape, norm: Option<RotaryNorm>) -> Workload {
    let attention = shape.attention;
    let channels = attention.heads * attention.head_size;
    let qk_norm = norm.map(|norm| norm.scope);
    Workload { attention, qk_norm, ..workload(attention.b, attention.t, channels, attention.heads, 128, 0) }
}

/// Returns the rotation of a case with the operands of [`rotary_operands`], and the queries and keys before its norm.
fn rotation(x: &[Tensor], pairs: RotaryPairs, norm: Option<RotaryNorm>) -> (Rotation, Option<Tensor>) {
    let norm_of = |RotaryNorm { weighted, scope }| {
        let weights = weighted.then_some([x[3], x[4]]);
        HeadNorm { weights, eps: 1e-5, gain: 1.25, scope }
    };
    (Rotation { table: x[1], pairs, qk_norm: norm.map(norm_of) }, norm.map(|_| x[2]))
}

fn rotary_forward(shape: RotaryShape, norm: Option<RotaryNorm>) -> Case {
    let (name, rotated) = rotary_name(shape, norm);
    let mut operands = rotary_operands(shape, norm, rotated, "qkv");
    if norm.is_some() {
        operands[2] = output("saved", rotated, Tolerance::ELEMENTWISE);
    }
    let work = Work { floats: rotated * if norm.is_some() { 3 } else { 2 }, bytes: 0, flops: 0 };
    let case = case("rotary_forward", name, rotary_workload(shape, norm), operands, work, move |e, x| {
        let (rotation, saved) = rotation(x, shape.pairs, norm);
        e.run(RotaryForward { qkv: x[0], saved, rotation, shape: shape.attention })
    });
    Case { exact: norm.is_none(), ..case }
}

fn rotary_backward(shape: RotaryShape, norm: Option<RotaryNorm>) -> Case {
    let (name, rotated) = rotary_name(shape, norm);
    let mut operands = rotary_operands(shape, norm, rotated, "dqkv");
    for (name, len) in ["dq weight", "dk weight"].into_iter().zip(rotary_weights(shape, norm)) {
        operands.push(accumulated(name, len, rotary_tolerance(norm)));
    }
    let work = Work { floats: rotated * if norm.is_some() { 3 } else { 2 }, bytes: 0, flops: 0 };
    let case = case("rotary_backward", name, rotary_workload(shape, norm), operands, work, move |e, x| {
        let (rotation, saved) = rotation(x, shape.pairs, norm);
        let dweights = norm.is_some_and(|norm| norm.weighted).then(|| [x[5], x[6]]);
        e.run(RotaryBackward { dqkv: x[0], saved, dweights, rotation, shape: shape.attention })
    });
    Case { exact: norm.is_none(), ..case }
}

fn classifier(rows: usize, v: usize, vp: usize, gradient: bool, softcap: Option<f32>) -> Case {
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
    let bound = softcap.map_or(String::new(), |softcap| format!(" softcap {softcap}"));
    let name = format!("{rows}x{v}/{vp}{}{bound}", if gradient { " gradient" } else { "" });
    case("classifier", name, workload(1, rows, 64, 1, vp, 0), operands, work, move |e, x| {
        e.run(Classifier { logits: x[0], losses: x[1], targets: x[2], v, vp, dloss, softcap, fp8: None })
    })
}

/// Returns a case of the classifier in which every third row is masked, the first one among them.
fn masked(mut case: Case) -> Case {
    let targets = &mut case.operands[2];
    let target = |row: usize| if row.is_multiple_of(3) { MASKED_TARGET } else { row as i32 % 5 };
    targets.init = Init::Words((0..targets.len).map(target).collect());
    case.shape.push_str(" masked");
    case
}

fn most_likely(rows: usize, v: usize, vp: usize) -> Case {
    let operands = vec![
        input("logits", rows * vp, Init::Uniform { mean: 0.0, spread: 4.0 }),
        f32(output("hits", rows, Tolerance::ELEMENTWISE)),
        i32(input("targets", rows, Init::Tokens { below: v as i32 })),
    ];
    let work = Work { floats: rows * vp, bytes: 8 * rows, flops: 0 };
    case("most_likely", format!("{rows}x{v}/{vp}"), workload(1, rows, 64, 1, vp, 0), operands, work, move |e, x| {
        e.run(MostLikely { logits: x[0], hits: x[1], targets: x[2], v, vp })
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

/// The digest of integers, in four f32 with 16 bits each. Other types have different bits on different engines.
fn digest(n: usize) -> Case {
    let operands = vec![
        f32(output("digest", 4, Tolerance::ELEMENTWISE)),
        i32(input("values", n, Init::Tokens { below: i32::MAX })),
    ];
    let work = Work { floats: 0, bytes: 4 * n, flops: 0 };
    exact(case("digest", format!("{n}"), workload(1, 1, 8, 1, 128, n), operands, work, move |e, x| {
        // The first values are not aligned to a packet.
        let digest = e.digest(x[1].slice(1, n - 1), 5)?;
        let parts = [0, 16, 32, 48].map(|shift| (digest >> shift & 0xffff) as f32);
        e.write(x[0], &parts)
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
