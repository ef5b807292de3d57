//! Steps of text generation: a model of two layers, which a GPU may compute in one launch.

use super::{UNIT, case, f32, fp8, i32, input, output, workload};
use crate::selftest::case::{Case, Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    Activation, AttentionShape, DecodeAttention, DecodeEmbed, DecodeMatmul, DecodeOperation, DecodeStep, Epilogue,
    MatmulForward, MatmulShape, NormForward, RotaryPairs, Rotation, Slot, SlotSampling, decode_splits,
};
use engine::tensor::Tensor;
use engine::{Engine, Result};
use std::sync::Arc;

/// A model of GPT-2's or Llama's kind.
#[derive(Clone, Copy, Debug)]
struct Model {
    /// R slots, and T positions of the cache.
    shape: AttentionShape,
    /// Hidden channels of the MLP.
    hidden: usize,
    /// V, an even number.
    vocab: usize,
    /// RMSNorm, rotary positions and SwiGLU without biases. Otherwise LayerNorm, learned positions and GELU with biases.
    is_llama: bool,
    /// Whether the weights of linear layers are in FP8.
    in_fp8: bool,
}

const LAYERS: usize = 2;
/// Repetitions of the steps of real models that must give the same bits on a GPU.
const REPETITIONS: usize = 1000;
/// Those of small models, which must end under compute-sanitizer.
const FEW_REPETITIONS: usize = 10;
/// i32 values of an operation in the table.
const ENTRY_WORDS: usize = 64;
/// Maximum number of splits of a slot's positions.
const MAX_SPLITS: usize = 32;
const TOLERANCE: Tolerance = Tolerance::SQUARED_CHAIN;

/// Returns steps of small models.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, t) in [(1, 1), (1, 70), (3, 300), (16, 40)] {
        for (heads, kv_heads, head_size) in [(2, 2, 64), (4, 1, 16), (3, 1, 80), (2, 2, 128)] {
            for is_llama in [false, true] {
                let shape = AttentionShape { b: rows, t, heads, kv_heads, head_size };
                cases.push(step(Model { shape, hidden: 320, vocab: 514, is_llama, in_fp8: false }, FEW_REPETITIONS));
            }
        }
    }
    cases
}

/// Returns steps of small models with weights in FP8.
pub fn edge_cases_in_fp8() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, t) in [(1, 1), (3, 300), (16, 40)] {
        for is_llama in [false, true] {
            let shape = AttentionShape { b: rows, t, heads: 3, kv_heads: 1, head_size: 80 };
            cases.push(step(Model { shape, hidden: 336, vocab: 528, is_llama, in_fp8: true }, FEW_REPETITIONS));
        }
    }
    cases
}

/// Returns steps with the layers of real models.
pub fn model_cases() -> Vec<Case> {
    steps_of_models(false)
}

/// Returns the same steps with weights in FP8.
pub fn model_cases_in_fp8() -> Vec<Case> {
    steps_of_models(true)
}

fn steps_of_models(in_fp8: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [1, 2, 8, 16] {
        let shape = AttentionShape { b: rows, t: 1024, heads: 12, kv_heads: 12, head_size: 64 };
        cases.push(step(Model { shape, hidden: 3072, vocab: 50304, is_llama: false, in_fp8 }, REPETITIONS));
        let shape = AttentionShape { b: rows, t: 2048, heads: 32, kv_heads: 8, head_size: 64 };
        cases.push(step(Model { shape, hidden: 8192, vocab: 128_256, is_llama: true, in_fp8 }, REPETITIONS));
    }
    cases
}

/// The operands of a case, in order.
#[derive(Default)]
struct Operands(Vec<Operand>);

impl Operands {
    fn add(&mut self, operand: Operand) -> usize {
        self.0.push(operand);
        self.0.len() - 1
    }

    fn input(&mut self, name: &'static str, len: usize, spread: f32) -> usize {
        self.add(input(name, len, Init::Uniform { mean: 0.0, spread }))
    }

    /// Adds a tensor between operations. One launch leaves it undefined.
    fn value(&mut self, name: &'static str, len: usize) -> usize {
        self.add(Operand { checked: None, ..output(name, len, Tolerance::CHAIN) })
    }

    fn norm(&mut self, channels: usize) -> [usize; 2] {
        [
            self.add(input("norm weight", channels, Init::Uniform { mean: 1.0, spread: 0.5 })),
            self.input("norm bias", channels, 0.5),
        ]
    }

    /// Adds a weight (OC, C) that keeps the variance, and a bias.
    fn linear(&mut self, [channels, outputs]: [usize; 2], in_fp8: bool) -> Linear {
        Linear {
            weight: self.input("weight", outputs * channels, (3.0 / channels as f32).sqrt()),
            bias: self.input("bias", outputs, 0.5),
            fp8: in_fp8.then(|| {
                let scale = f32(input("scale", 1, Init::Values(vec![2f32.powi(-9)])));
                [fp8::fp8("weight in FP8", outputs * channels), scale].map(|operand| self.add(operand))
            }),
        }
    }
}

/// The operands of a linear layer, as indices.
#[derive(Clone, Copy)]
struct Linear {
    weight: usize,
    bias: usize,
    /// The weight in FP8, and its scale.
    fp8: Option<[usize; 2]>,
}

/// The operands of a layer, as indices.
struct Layer {
    norms: [[usize; 2]; 2],
    linears: [Linear; 4],
    keys: usize,
    values: usize,
    /// The residual stream after attention and after the MLP.
    residuals: [usize; 2],
}

/// The operands of a step, as indices.
struct Step {
    model: Model,
    logits: usize,
    slots: usize,
    wte: usize,
    wpe: usize,
    rotations: usize,
    layers: [Layer; LAYERS],
    norm: [usize; 2],
    head: Linear,
    encoded: usize,
    normed: usize,
    mean: usize,
    rstd: usize,
    qkv: usize,
    partials: usize,
    attended: usize,
    preactivation: usize,
    activated: usize,
    memory: [usize; 2],
}

impl Model {
    const fn channels(self) -> usize {
        self.shape.heads * self.shape.head_size
    }

    /// Returns the columns of qkv.
    const fn packed(self) -> usize {
        self.shape.packed_heads() * self.shape.head_size
    }

    const fn activation(self) -> Activation {
        if self.is_llama { Activation::SwiGlu } else { Activation::Gelu }
    }

    /// Returns the rows of the weight before the activation.
    fn up(self) -> usize {
        self.hidden * self.activation().inputs()
    }

    /// Returns the position of a slot.
    const fn position(self, slot: usize) -> usize {
        self.shape.t - 1 - slot * 13 % self.shape.t
    }

    fn slots(self) -> Vec<i32> {
        let words = |i: usize| {
            let (token, position) = ((i * 31 % self.vocab) as i32, self.position(i) as i32);
            Slot { token, position, seed: 0, sampling: SlotSampling::GREEDY }.words()
        };
        (0..self.shape.b).flat_map(words).collect()
    }

    fn work(self) -> Work {
        let (c, AttentionShape { b, kv_heads, head_size, .. }) = (self.channels(), self.shape);
        let weights = self.vocab * c + LAYERS * (c * (self.packed() + c + self.up()) + self.hidden * c);
        let positions: usize = (0..b).map(|slot| self.position(slot) + 1).sum();
        let floats = weights + LAYERS * 2 * positions * kv_heads * head_size;
        let in_fp8 = if self.in_fp8 { weights } else { 0 };
        Work { floats: floats - in_fp8, bytes: in_fp8, flops: 2 * b * weights + LAYERS * 4 * positions * c }
    }
}

impl Step {
    fn new(model: Model, all: &mut Operands) -> Self {
        let (c, packed, up, Model { shape, hidden, vocab, .. }) = (model.channels(), model.packed(), model.up(), model);
        let AttentionShape { b: rows, t, heads, kv_heads, head_size } = shape;
        let undefined = |operand: Operand| Operand { checked: None, ..operand };
        let logits = all.add(output("logits", rows * vocab, TOLERANCE));
        let slots = all.add(i32(input("slots", rows * Slot::WORDS, Init::Words(model.slots()))));
        let layers = [(); LAYERS].map(|()| {
            let norms = [(); 2].map(|()| all.norm(c));
            let linears = [[c, packed], [c, c], [c, up], [hidden, c]].map(|size| all.linear(size, model.in_fp8));
            let cache = rows * kv_heads * t * head_size;
            let cached =
                ["keys", "values"].map(|name| Operand { checked: Some(TOLERANCE), ..input(name, cache, UNIT) });
            let [keys, values] = cached.map(|operand| all.add(operand));
            Layer { norms, linears, keys, values, residuals: [(); 2].map(|()| all.value("residual", rows * c)) }
        });
        let partials = rows * heads * decode_splits(rows, kv_heads, t) * (head_size + 2);
        // At least as long as for any GPU.
        let values = c + LAYERS * (packed + 3 * c + hidden + heads * MAX_SPLITS * (head_size + 2)) + vocab;
        let memory = [("table", (2 + 5 * LAYERS) * ENTRY_WORDS), ("scratch", 2 * (rows * values + 1024))];
        Self {
            model,
            logits,
            slots,
            wte: all.add(input("wte", vocab * c, UNIT)),
            wpe: all.add(input("wpe", t * c, UNIT)),
            rotations: all.add(f32(input("rotations", t * head_size, UNIT))),
            layers,
            norm: all.norm(c),
            head: all.linear([c, vocab], model.in_fp8),
            encoded: all.value("encoded", rows * c),
            normed: all.value("normed", rows * c),
            mean: all.add(undefined(f32(output("mean", rows, TOLERANCE)))),
            rstd: all.add(undefined(f32(output("rstd", rows, TOLERANCE)))),
            qkv: all.value("qkv", rows * packed),
            partials: all.add(undefined(f32(output("partials", partials, TOLERANCE)))),
            attended: all.value("attended", rows * c),
            preactivation: all.value("preactivation", rows * up),
            activated: all.value("activated", rows * hidden),
            memory: memory.map(|(name, len)| all.add(i32(input(name, len, Init::None)))),
        }
    }

    fn norm(&self, x: &[Tensor], inp: Tensor, [weight, bias]: [usize; 2]) -> NormForward {
        let is_llama = self.model.is_llama;
        let (mean, bias) = if is_llama { (None, None) } else { (Some(x[self.mean]), Some(x[bias])) };
        let (out, rstd, weight, c) = (x[self.normed], x[self.rstd], Some(x[weight]), self.model.channels());
        NormForward { out, mean, rstd, inp, weight, bias, c, eps: 1e-5, quantized: None }
    }

    /// Returns the linear layer of `[inp, out]`.
    fn linear(
        &self,
        x: &[Tensor],
        norm: Option<&NormForward>,
        [inp, out]: [usize; 2],
        linear: Linear,
        epilogue: Epilogue,
    ) -> DecodeOperation {
        let rows = self.model.shape.b;
        let (c, oc) = (x[inp].len / rows, x[linear.bias].len);
        let shape = MatmulShape { rows, c, oc };
        let bias = (!self.model.is_llama).then_some(x[linear.bias]);
        let (weight, weight_scale) = match linear.fp8 {
            Some([weight, scale]) => (x[weight], Some(x[scale])),
            None => (x[linear.weight], None),
        };
        let matmul = MatmulForward { bias, epilogue, ..MatmulForward::new([x[out], x[inp], weight], shape) };
        DecodeOperation::Matmul(DecodeMatmul { norm: norm.copied(), matmul, weight_scale })
    }

    /// Quantizes the weights in FP8.
    fn quantize(&self, engine: &mut dyn Engine, x: &[Tensor]) -> Result<()> {
        for linear in self.layers.iter().flat_map(|layer| layer.linears).chain([self.head]) {
            let Some([weight, scale]) = linear.fp8 else { continue };
            fp8::quantize_by(engine, x[linear.weight], x[weight], x[scale], x[linear.bias].len)?;
        }
        Ok(())
    }

    fn attention(&self, x: &[Tensor], layer: &Layer) -> DecodeAttention {
        let Model { shape, is_llama, .. } = self.model;
        let rotation = Rotation { table: x[self.rotations], pairs: RotaryPairs::HalfSplit, qk_norm: None };
        let [out, qkv, keys, values, slots, partials] =
            [self.attended, self.qkv, layer.keys, layer.values, self.slots, self.partials].map(|i| x[i]);
        DecodeAttention { out, qkv, keys, values, slots, partials, rotation: is_llama.then_some(rotation), shape }
    }

    fn operations(&self, x: &[Tensor]) -> Vec<DecodeOperation> {
        let (wte, wpe, c) = (x[self.wte], (!self.model.is_llama).then_some(x[self.wpe]), self.model.channels());
        let out = x[self.encoded];
        let mut operations = vec![DecodeOperation::Embed(DecodeEmbed { out, slots: x[self.slots], wte, wpe, c })];
        let mut residual = out;
        for layer in &self.layers {
            let [qkv, attention, up, down] = layer.linears;
            let [attended, updated] = layer.residuals;
            let activation = Epilogue::Activation(self.model.activation(), x[self.preactivation]);
            let norms = [residual, x[attended]];
            let norm = [0, 1].map(|i| self.norm(x, norms[i], layer.norms[i]));
            let [first, second] = norms.map(Epilogue::Residual);
            operations.extend([
                self.linear(x, Some(&norm[0]), [self.normed, self.qkv], qkv, Epilogue::None),
                DecodeOperation::Attention(self.attention(x, layer)),
                self.linear(x, None, [self.attended, attended], attention, first),
                self.linear(x, Some(&norm[1]), [self.normed, self.activated], up, activation),
                self.linear(x, None, [self.activated, updated], down, second),
            ]);
            residual = x[updated];
        }
        let norm = self.norm(x, residual, self.norm);
        operations.push(self.linear(x, Some(&norm), [self.normed, self.logits], self.head, Epilogue::None));
        operations
    }
}

fn step(model: Model, repetitions: usize) -> Case {
    let Model { shape: AttentionShape { b: rows, t, heads, kv_heads, .. }, hidden, vocab, is_llama, .. } = model;
    let (c, mut operands) = (model.channels(), Operands::default());
    let step = Step::new(model, &mut operands);
    let kind = if is_llama { "rotary SwiGLU" } else { "GELU" };
    let format = if model.in_fp8 { " FP8" } else { "" };
    let name = format!("B{rows} T{t} C{c} NH{heads} KV{kv_heads} {hidden} {kind}{format}");
    let workload = workload(1, rows, c, heads, vocab, 0);
    let step = Arc::new(step);
    let quantized = step.clone();
    let case = case("decode_step", name, workload, operands.0, model.work(), move |e, x| {
        e.run(DecodeStep { operations: &step.operations(x), memory: step.memory.map(|i| x[i]) })
    });
    Case { repetitions, before: Some(Box::new(move |e, x| quantized.quantize(e, x))), ..case }
}
