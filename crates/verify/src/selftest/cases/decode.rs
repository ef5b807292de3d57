//! Operations of text generation with a KV cache.

use super::{UNIT, case, exact, f32, fp8, i32, if_present, input, output, workload};
use crate::selftest::case::{Case, Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    Activation, AttentionShape, CacheFill, CacheRead, DecodeAttention, DecodeEmbed, DecodeMatmul, Epilogue, HeadNorm,
    MatmulForward, MatmulShape, NormForward, QkNormScope, RotaryPairs, Rotation, SampleTokens, Slot, SlotSampling,
    decode_splits,
};
use engine::tensor::Tensor;

/// A norm before a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DecodeNorm {
    None,
    Layer,
    Rms,
}

/// The epilogue of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    Nothing,
    Residual,
    Activation(Activation),
}

/// Returns every operation at small and odd shapes.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = vec![embed(1, 8, 37, true), embed(5, 200, 37, true), embed(3, 1096, 37, false)];
    // Each instance for few rows, and more rows than it takes.
    for rows in [1, 2, 3, 4, 7, 16, 17] {
        for (c, oc) in [(64, 48), (520, 80), (3072, 40)] {
            let shape = MatmulShape { rows, c, oc };
            cases.push(matmul(shape, DecodeNorm::None, true, After::Residual));
            for norm in [DecodeNorm::Layer, DecodeNorm::Rms] {
                cases.push(matmul(shape, norm, true, After::Nothing));
            }
        }
        let shape = MatmulShape { rows, c: 520, oc: 80 };
        for &activation in Activation::ALL {
            cases.push(matmul(shape, DecodeNorm::Layer, true, After::Activation(activation)));
            cases.push(matmul(shape, DecodeNorm::None, false, After::Activation(activation)));
        }
    }
    for (heads, kv_heads) in [(1, 1), (3, 3), (4, 2), (7, 1), (12, 3)] {
        for head_size in [16, 64, 80, 96, 128] {
            for (b, t) in [(1, 1), (3, 70), (2, 300)] {
                let shape = AttentionShape { b, t, heads, kv_heads, head_size };
                let norm = Some(QkNormScope::Head);
                cases.extend([attention(shape, None, None), attention(shape, Some(RotaryPairs::HalfSplit), norm)]);
            }
        }
    }
    let shape = AttentionShape { b: 2, t: 40, heads: 4, kv_heads: 2, head_size: 64 };
    cases.push(attention(shape, Some(RotaryPairs::Interleaved), None));
    for (heads, kv_heads, head_size) in [(1, 1, 64), (3, 3, 80), (7, 1, 16), (12, 3, 128)] {
        let shape = AttentionShape { b: 3, t: 70, heads, kv_heads, head_size };
        cases.push(attention(shape, Some(RotaryPairs::HalfSplit), Some(QkNormScope::AllHeads)));
    }
    // Rings that are not full, full, and past several rounds.
    for (t, positions) in [(1, 5), (33, 40), (64, 500), (300, 301)] {
        let norm = Some(QkNormScope::Head);
        cases.push(attention_in_ring(AttentionShape { t, ..shape }, positions, Some(RotaryPairs::HalfSplit), norm));
        cases.push(attention_in_ring(AttentionShape { b: 3, t, ..shape }, positions, None, None));
    }
    cases.extend([fill(shape, 1), fill(shape, 17), fill(shape, 39)]);
    let few = AttentionShape { t: 7, heads: 3, kv_heads: 1, ..shape };
    cases.extend([
        fill(shape, 40),
        fill(few, 9),
        fill_from(few, 3, 9),
        fill_from(few, 25, 9),
        fill_from(shape, 100, 17),
    ]);
    cases.extend([read(shape, 1), read(shape, 17), read(shape, 40), read(few, 9)]);
    for (b, v, vp) in [(1, 5, 128), (3, 257, 384), (5, 1000, 1024)] {
        cases.extend([sample(b, v, vp, None), sample(b, v, vp, Some(1.5))]);
    }
    cases
}

/// Returns linear layers with weights in FP8.
pub fn edge_cases_in_fp8() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [1, 2, 3, 9, 16, 17, 40] {
        for (c, oc) in [(16, 16), (528, 80), (3072, 48)] {
            let shape = MatmulShape { rows, c, oc };
            cases.push(matmul_in_fp8(shape, DecodeNorm::None, true, After::Residual));
            for norm in [DecodeNorm::Layer, DecodeNorm::Rms] {
                cases.push(matmul_in_fp8(shape, norm, true, After::Activation(Activation::Gelu)));
                cases.push(matmul_in_fp8(shape, norm, false, After::Activation(Activation::SwiGlu)));
            }
        }
    }
    cases
}

/// Returns linear layers of real models with weights in FP8.
pub fn model_cases_in_fp8() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [1, 4, 16, 64] {
        for (c, oc, norm, epilogue) in [
            (768, 3072, DecodeNorm::Layer, After::Activation(Activation::Gelu)),
            (3072, 768, DecodeNorm::None, After::Residual),
            (4096, 28672, DecodeNorm::Rms, After::Activation(Activation::SwiGlu)),
            (14336, 4096, DecodeNorm::None, After::Residual),
            (4096, 128_256, DecodeNorm::Rms, After::Nothing),
        ] {
            cases.push(matmul_in_fp8(MatmulShape { rows, c, oc }, norm, norm == DecodeNorm::Layer, epilogue));
        }
    }
    cases
}

/// Returns every operation at the shapes of real models.
pub fn model_cases() -> Vec<Case> {
    let mut cases = vec![embed(64, 768, 50257, true), embed(1, 2048, 128_256, false)];
    for rows in [1, 4, 16, 64] {
        for (c, oc, norm, epilogue) in [
            (768, 2304, DecodeNorm::Layer, After::Nothing),
            (768, 768, DecodeNorm::None, After::Residual),
            (768, 3072, DecodeNorm::Layer, After::Activation(Activation::Gelu)),
            (3072, 768, DecodeNorm::None, After::Residual),
            (768, 50304, DecodeNorm::Layer, After::Nothing),
            (2048, 16384, DecodeNorm::Rms, After::Activation(Activation::SwiGlu)),
            (8192, 2048, DecodeNorm::None, After::Residual),
        ] {
            cases.push(matmul(MatmulShape { rows, c, oc }, norm, norm != DecodeNorm::Rms, epilogue));
        }
    }
    for (b, t, heads, kv_heads, head_size) in [
        (1, 1024, 12, 12, 64),
        (64, 1024, 12, 12, 64),
        (1, 8192, 32, 8, 64),
        (8, 2048, 32, 8, 128),
        (4, 1000, 14, 2, 64),
    ] {
        let shape = AttentionShape { b, t, heads, kv_heads, head_size };
        let pairs = (kv_heads < heads).then_some(RotaryPairs::HalfSplit);
        cases.push(attention(shape, pairs, None));
    }
    let shape = AttentionShape { b: 1, t: 1024, heads: 32, kv_heads: 8, head_size: 64 };
    cases.extend([fill(shape, 1024), read(shape, 1024)]);
    cases.extend([sample(1, 50257, 50304, None), sample(64, 50257, 50304, None), sample(4, 128_256, 128_256, None)]);
    cases
}

/// Returns the words of slots at the last positions of a cache of `t` positions. If there are more than two, the second one is idle.
fn slots(b: usize, t: usize, vocab: usize, sampling: impl Fn(usize) -> SlotSampling) -> Operand {
    let slot = |i: usize| Slot {
        token: (i * 31 % vocab) as i32,
        position: if is_idle(i, b) { -1 } else { (t - 1 - (i * 13) % t) as i32 },
        seed: i as u32 + 5,
        sampling: sampling(i),
    };
    let words = (0..b).flat_map(|i| slot(i).words()).collect();
    i32(input("slots", b * Slot::WORDS, Init::Words(words)))
}

fn is_idle(slot: usize, b: usize) -> bool {
    b > 2 && slot == 1
}

fn greedy(_: usize) -> SlotSampling {
    SlotSampling::GREEDY
}

fn embed(b: usize, c: usize, vocab: usize, positions: bool) -> Case {
    let t = 40;
    let operands = vec![
        slots(b, t, vocab, greedy),
        input("wte", vocab * c, UNIT),
        input("wpe", t * c, UNIT),
        output("out", b * c, Tolerance::ELEMENTWISE),
    ];
    let work = Work { floats: b * c * if positions { 3 } else { 2 }, bytes: 0, flops: 0 };
    let name = format!("B{b} C{c} V{vocab}{}", if positions { "" } else { " tokens only" });
    exact(case("decode_embed", name, workload(b, 1, c, 1, vocab, 0), operands, work, move |e, x| {
        e.run(DecodeEmbed { out: x[3], slots: x[0], wte: x[1], wpe: positions.then_some(x[2]), c })
    }))
}

/// Returns a linear layer with a weight in FP8.
fn matmul_in_fp8(shape: MatmulShape, norm: DecodeNorm, biased: bool, epilogue: After) -> Case {
    let mut case = matmul(shape, norm, biased, epilogue);
    let first = case.operands.len();
    case.operands.push(fp8::fp8("weight in FP8", shape.oc * shape.c));
    case.operands.push(f32(input("scale", 1, Init::Values(vec![2f32.powi(-7)]))));
    case.shape += " FP8";
    case.work.floats -= shape.oc * shape.c;
    case.work.bytes += shape.oc * shape.c;
    let run = decode_matmul(shape, norm, biased, epilogue);
    case.run = Box::new(move |e, x| {
        let op = run(x);
        let matmul = MatmulForward { weight: x[first], ..op.matmul };
        e.run(DecodeMatmul { matmul, weight_scale: Some(x[first + 1]), ..op })
    });
    case.before = Some(Box::new(move |e, x| fp8::quantize_by(e, x[2], x[first], x[first + 1], shape.oc)));
    case
}

/// Returns the operation of a linear layer.
fn decode_matmul(
    shape: MatmulShape,
    norm: DecodeNorm,
    biased: bool,
    epilogue: After,
) -> impl Fn(&[Tensor]) -> DecodeMatmul {
    let c = shape.c;
    move |x| {
        let (out, inp) = (x[6], x[1]);
        let [mean, bias] = [x[7], x[10]].map(|tensor| (norm == DecodeNorm::Layer).then_some(tensor));
        let (rstd, weight) = (x[8], Some(x[9]));
        let normed = NormForward { out, mean, rstd, inp, weight, bias, c, eps: 1e-5, quantized: None };
        let normed = (norm != DecodeNorm::None).then_some(normed);
        let epilogue = match epilogue {
            After::Nothing => Epilogue::None,
            After::Residual => Epilogue::Residual(x[4]),
            After::Activation(activation) => Epilogue::Activation(activation, x[5]),
        };
        let inp = if normed.is_some() { x[6] } else { inp };
        let matmul =
            MatmulForward { bias: biased.then_some(x[3]), epilogue, ..MatmulForward::new([x[0], inp, x[2]], shape) };
        DecodeMatmul { norm: normed, matmul, weight_scale: None }
    }
}

/// Returns a linear layer.
fn matmul(shape: MatmulShape, norm: DecodeNorm, biased: bool, epilogue: After) -> Case {
    let MatmulShape { rows, c, oc } = shape;
    let activation = if let After::Activation(activation) = epilogue { Some(activation) } else { None };
    let columns = oc / activation.map_or(1, Activation::inputs);
    let tolerance = match activation {
        None if norm == DecodeNorm::None => Tolerance::REDUCTION,
        Some(Activation::ReluSquared | Activation::SwiGlu | Activation::GeGlu) => Tolerance::SQUARED_CHAIN,
        _ => Tolerance::CHAIN,
    };
    // Outputs of norm and preactivation are undefined, so they are not compared.
    let undefined = |name, len| Operand { checked: None, ..output(name, len, tolerance) };
    let operands = vec![
        output("out", rows * columns, tolerance),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, UNIT),
        input("bias", oc, UNIT),
        input("residual", rows * oc, UNIT),
        undefined("preactivation", rows * oc),
        undefined("normed", rows * c),
        f32(undefined("mean", rows)),
        f32(undefined("rstd", rows)),
        input("norm weight", c, Init::Uniform { mean: 1.0, spread: 0.5 }),
        input("norm bias", c, UNIT),
    ];
    let added = if_present(epilogue == After::Residual, rows * oc);
    let work = Work { floats: rows * (c + columns) + oc * c + added, bytes: 0, flops: 2 * rows * c * oc };
    let run = decode_matmul(shape, norm, biased, epilogue);
    let kind = match (activation, epilogue) {
        (Some(activation), _) => format!("{activation:?}"),
        (None, After::Residual) => "residual".to_owned(),
        _ => String::new(),
    };
    let norm_name = if norm == DecodeNorm::None { String::new() } else { format!("{norm:?} ") };
    let bias_name = if biased { "bias " } else { "" };
    let name = format!("{rows}x{oc}x{c} {norm_name}{bias_name}{kind}").trim_end().to_owned();
    case("decode_matmul", name, workload(1, rows, c, 1, 128, 0), operands, work, move |e, x| e.run(run(x)))
}

fn attention(shape: AttentionShape, pairs: Option<RotaryPairs>, norm: Option<QkNormScope>) -> Case {
    attention_in_ring(shape, shape.t, pairs, norm)
}

/// Returns the attention of slots at the last of `positions` positions over a ring of `shape.t`.
fn attention_in_ring(
    shape: AttentionShape,
    positions: usize,
    pairs: Option<RotaryPairs>,
    norm: Option<QkNormScope>,
) -> Case {
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    let cache = b * kv_heads * t * hs;
    let cached = |name| Operand { checked: Some(Tolerance::CHAIN), ..input(name, cache, UNIT) };
    let splits = decode_splits(b, kv_heads, t);
    let [q_len, k_len] = norm.unwrap_or_default().widths(heads, kv_heads, hs);
    let operands = vec![
        output("out", b * heads * hs, Tolerance::ATTENTION),
        input("qkv", b * shape.packed_heads() * hs, UNIT),
        cached("keys"),
        cached("values"),
        slots(b, positions, 100, greedy),
        Operand { checked: None, ..f32(output("partials", b * heads * splits * (hs + 2), Tolerance::CHAIN)) },
        f32(input("table", positions * hs, UNIT)),
        input("q weight", q_len, Init::Uniform { mean: 1.0, spread: 0.5 }),
        input("k weight", k_len, Init::Uniform { mean: 1.0, spread: 0.5 }),
    ];
    let read: usize = (0..b).filter(|&i| !is_idle(i, b)).map(|i| t.min(positions - (i * 13) % positions)).sum();
    let work = Work { floats: 2 * read * kv_heads * hs, bytes: 0, flops: 4 * read * heads * hs };
    let kind = match (pairs, norm) {
        (None, _) => "",
        (Some(_), None) => " rotary",
        (Some(_), Some(QkNormScope::Head)) => " rotary QK-norm",
        (Some(_), Some(QkNormScope::AllHeads)) => " rotary QK-norm of all heads",
    };
    let ring = if positions == t { String::new() } else { format!("/{positions}") };
    let name = format!("B{b} T{t}{ring} NH{heads} KV{kv_heads} HS{hs}{kind}");
    case("decode_attention", name, workload(b, 1, heads * hs, heads, 128, 0), operands, work, move |e, x| {
        let weights = Some([x[7], x[8]]);
        let qk_norm = norm.map(|scope| HeadNorm { weights, eps: 1e-5, gain: 1.2, scope });
        let rotation = pairs.map(|pairs| Rotation { table: x[6], pairs, qk_norm });
        let [out, qkv, keys, values, slots, partials] = [0, 1, 2, 3, 4, 5].map(|i| x[i]);
        e.run(DecodeAttention { out, qkv, keys, values, slots, partials, rotation, shape })
    })
}

/// Returns the copy of a prompt of `shape.t` tokens to a cache.
fn fill(shape: AttentionShape, capacity: usize) -> Case {
    fill_from(shape, 0, capacity)
}

/// Returns the copy of `shape.t` tokens from position `first` on to a cache.
fn fill_from(shape: AttentionShape, first: usize, capacity: usize) -> Case {
    let shape = AttentionShape { b: 1, ..shape };
    let AttentionShape { t, kv_heads, head_size, .. } = shape;
    let cache = kv_heads * capacity * head_size;
    let cached = |name| Operand { checked: Some(Tolerance::ELEMENTWISE), ..input(name, cache, UNIT) };
    let operands = vec![cached("keys"), cached("values"), input("qkv", t * shape.packed_heads() * head_size, UNIT)];
    let work = Work { floats: 4 * t * kv_heads * head_size, bytes: 0, flops: 0 };
    let start = if first == 0 { String::new() } else { format!("{first}+") };
    let name = format!("T{start}{t}/{capacity} NH{} KV{kv_heads} HS{head_size}", shape.heads);
    let channels = shape.heads * head_size;
    exact(case("cache_fill", name, workload(1, t, channels, shape.heads, 128, 0), operands, work, move |e, x| {
        e.run(CacheFill { keys: x[0], values: x[1], qkv: x[2], shape, first, capacity })
    }))
}

/// Returns the copy of `shape.t` tokens from a cache.
fn read(shape: AttentionShape, capacity: usize) -> Case {
    let shape = AttentionShape { b: 1, ..shape };
    let AttentionShape { t, heads, kv_heads, head_size, .. } = shape;
    let (cache, packed) = (kv_heads * capacity * head_size, t * shape.packed_heads() * head_size);
    let operands =
        vec![output("qkv", packed, Tolerance::ELEMENTWISE), input("keys", cache, UNIT), input("values", cache, UNIT)];
    let work = Work { floats: packed + 2 * t.min(capacity) * kv_heads * head_size, bytes: 0, flops: 0 };
    let name = format!("T{t}/{capacity} NH{heads} KV{kv_heads} HS{head_size}");
    exact(case("cache_read", name, workload(1, t, heads * head_size, heads, 128, 0), operands, work, move |e, x| {
        e.run(CacheRead { qkv: x[0], keys: x[1], values: x[2], shape, capacity })
    }))
}

/// Returns the choice of greedy tokens. Sampled ones may differ between engines where two scores are nearly equal, so random
/// settings are compared in tests of the kernel.
fn sample(b: usize, v: usize, vp: usize, softcap: Option<f32>) -> Case {
    let (capacity, exchange) = (40, SampleTokens::exchange_len(b, vp));
    let penalized =
        |i: usize| SlotSampling { repetition_penalty: if i.is_multiple_of(2) { 1.0 } else { 1.5 }, ..greedy(i) };
    // Distinct logits that bf16 represents: the most likely token is not a tie.
    let logit = |i: usize| {
        ((i % vp * 37 + i / vp * 11) % 251) as f32 * 0.25 - if (i % vp * 7 + i / vp) % v == 3 { -90.0 } else { 0.0 }
    };
    let operands = vec![
        f32(output("sampled", b, Tolerance::ELEMENTWISE)),
        slots(b, capacity, v, penalized),
        i32(input("seen", b * vp, Init::Words((0..b * vp).map(|i| i32::from(i % 5 == 0)).collect()))),
        Operand { checked: None, ..f32(output("scratch", b * vp, Tolerance::ELEMENTWISE)) },
        Operand { checked: None, ..i32(input("exchange", exchange, Init::Words(vec![0; exchange]))) },
        input("logits", b * vp, Init::Values((0..b * vp).map(logit).collect())),
    ];
    let work = Work { floats: b * vp, bytes: 8 * b * vp, flops: 0 };
    let name = format!("{b}x{v}/{vp}{}", softcap.map_or(String::new(), |cap| format!(" softcap {cap}")));
    case("sample_tokens", name, workload(1, b, 64, 1, vp, 0), operands, work, move |e, x| {
        let [sampled, slots, seen, scratch, exchange, logits] = [0, 1, 2, 3, 4, 5].map(|i| x[i]);
        // A softcap far above the logits keeps their order.
        let softcap = softcap.map(|cap| cap * 200.0);
        e.run(SampleTokens { sampled, slots, seen, scratch, exchange, logits, v, vp, capacity, softcap })
    })
}
