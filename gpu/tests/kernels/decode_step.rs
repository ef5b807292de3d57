//! A step of generation in one launch against an f64 reference: GPT-2 and Llama, windows, several slots and steps.

use crate::common::{
    Tolerance, activation, assert_close, assert_same, for_all, fp8_weight, integers, noise, read, rounded, run, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};
use gpu::activation::Activation;
use gpu::decode::WORDS;
use gpu::decode::attention::{self, HALF_SPLIT, INTERLEAVED, NO_ROTATION};
use gpu::decode::launch::{AttentionOperands, Fp8Weight, InputNorm, MatvecOperands, MatvecSize};
use gpu::decode::step::launch::{EmbedOperands, Operation, Program, StepMemory, program, step};
use proptest::sample::select;
use std::collections::HashMap;

tests! {
    kernels of "decode/step";
    for both types: steps_of_gpt2_match_f64_reference, steps_of_llama_match_f64_reference, splits_match_f64_reference,
        wide_layers_match_f64_reference, linear_layers_of_integers_are_exact, activations_read_rounded_values,
        unsupported_operations_have_no_program;
    slow in f32: steps_of_any_shape_match_f64_reference;
    once: steps_with_weights_in_fp8_match_f64_reference, weights_of_integers_in_fp8_are_exact,
        weights_in_fp8_need_a_multiple_of_64_channels, the_ring_takes_the_shared_memory_that_is_left;
}

fn null<T>() -> Global<T> {
    Global::new(std::ptr::null())
}

const EPS: f32 = 0.01;
const QK_GAIN: f32 = 1.25;
const VOCAB: usize = 40;
const MAX_POSITIONS: usize = 2200;

/// The norm before a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    Layer,
    Rms,
    RmsWithoutWeight,
}

/// A model, and the state of its slots.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of the model")]
struct Model {
    /// Positions of the cache in each layer.
    capacities: Vec<usize>,
    channels: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    /// Columns of the MLP.
    hidden: usize,
    activation: Activation,
    norm: Norm,
    has_bias: bool,
    has_positions: bool,
    rotation: u32,
    /// Whether queries and keys are normalized, and whether with weights.
    qk_norm: (bool, bool),
    /// Whether the weights of linear layers are in FP8.
    in_fp8: bool,
    /// Whether the residual of the layer after attention is the output of attention.
    skips_residual: bool,
    /// Token and position of each slot. An idle slot has a negative position.
    slots: Vec<(i32, i32)>,
    blocks: usize,
    seed: u32,
}

/// The tensors of a model by name. A name that a model does not have has no values.
type Tensors = HashMap<String, Vec<f64>>;

impl Model {
    fn gpt2(slots: &[(i32, i32)], blocks: usize) -> Self {
        Self {
            capacities: vec![24, 24],
            channels: 64,
            heads: 2,
            kv_heads: 2,
            head_size: 32,
            hidden: 128,
            activation: Activation::Gelu,
            norm: Norm::Layer,
            has_bias: true,
            has_positions: true,
            rotation: NO_ROTATION,
            qk_norm: (false, false),
            in_fp8: false,
            skips_residual: false,
            slots: slots.to_vec(),
            blocks,
            seed: 1,
        }
    }

    fn llama(slots: &[(i32, i32)], blocks: usize) -> Self {
        Self {
            // A ring of five positions, and a cache of all.
            capacities: vec![5, 24],
            heads: 6,
            kv_heads: 3,
            head_size: 16,
            activation: Activation::SwiGlu,
            norm: Norm::Rms,
            has_bias: false,
            has_positions: false,
            rotation: HALF_SPLIT,
            ..Self::gpt2(slots, blocks)
        }
    }

    fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    fn attended(&self) -> usize {
        self.heads * self.head_size
    }

    fn tensors<T: Tolerance>(&self) -> Tensors {
        let (c, mut seed) = (self.channels, 100 * self.seed);
        let mut tensors = Tensors::new();
        let mut add = |name: String, exists: bool, len: usize, scale: f64, offset: f64| {
            seed += 1;
            let values: Vec<_> = noise(if exists { len } else { 0 }, seed).iter().map(|x| x * scale + offset).collect();
            let fp8_scale = self.fp8_scale(&name);
            let values = fp8_scale.map_or(values.clone(), |scale| fp8_weight::rounded(&values, scale));
            tensors.insert(name, wide(&rounded::<T>(&values)));
        };
        add("wte".into(), true, VOCAB * c, 1.0, 0.0);
        add("wpe".into(), self.has_positions, MAX_POSITIONS * c, 0.5, 0.0);
        let has_weight = self.norm != Norm::RmsWithoutWeight;
        let norms = |l: usize| [format!("ln1.{l}"), format!("ln2.{l}")];
        let layers = 0..self.capacities.len();
        for name in layers.clone().flat_map(norms).chain(["lnf".to_owned()]) {
            add(name.clone() + "w", has_weight, c, 0.5, 1.0);
            add(name + "b", self.norm == Norm::Layer, c, 0.5, 0.0);
        }
        for l in layers {
            let fc = self.hidden * self.activation.inputs();
            let linear =
                [("qkv", self.packed(), c), ("proj", c, self.attended()), ("fc", fc, c), ("out", c, self.hidden)];
            for (name, outputs, channels) in linear {
                add(format!("{name}.{l}w"), true, outputs * channels, 2.0 / (channels as f64).sqrt(), 0.0);
                add(format!("{name}.{l}b"), self.has_bias, outputs, 0.5, 0.0);
            }
            let cache = self.slots.len() * self.kv_heads * MAX_POSITIONS * self.head_size;
            add(format!("keys.{l}"), true, cache, 1.0, 0.0);
            add(format!("values.{l}"), true, cache, 1.0, 0.0);
            for name in ["q", "k"] {
                add(format!("{name}.{l}"), self.qk_norm.1, self.head_size, 0.5, 1.0);
            }
        }
        add("head".into(), true, VOCAB * c, 2.0 / (c as f64).sqrt(), 0.0);
        tensors
    }

    /// Returns the scale of a weight that is in FP8.
    fn fp8_scale(&self, name: &str) -> Option<f32> {
        let is_linear =
            ["qkv.", "proj.", "fc.", "out."].iter().any(|layer| name.starts_with(layer)) && name.ends_with('w');
        (self.in_fp8 && (is_linear || name == "head")).then(|| fp8_weight::scale_of(name))
    }

    fn table(&self) -> Vec<f32> {
        let angle = |t: usize, i: usize| (t as f64 * 100f64.powf(-2.0 * i as f64 / self.head_size as f64)).sin_cos();
        let pairs = (0..MAX_POSITIONS).flat_map(|t| (0..self.head_size / 2).map(move |i| (t, i)));
        pairs.flat_map(|(t, i)| [angle(t, i).1 as f32, angle(t, i).0 as f32]).collect()
    }
}

/// The tensors of a model in the memory of a device, by name.
struct Inputs<T> {
    elements: HashMap<String, Global<T>>,
    in_fp8: HashMap<String, Fp8Weight>,
}

impl<T: Tolerance> Inputs<T> {
    fn new(model: &Model, tensors: &Tensors, memory: &mut Memory) -> Self {
        let mut inputs = Self { elements: HashMap::new(), in_fp8: HashMap::new() };
        for (name, values) in tensors {
            let fp8_scale = model.fp8_scale(name);
            if let Some(scale) = fp8_scale {
                inputs.in_fp8.insert(name.clone(), fp8_weight::input(memory, name, values, scale));
            }
            let is_null = values.is_empty() || fp8_scale.is_some();
            let input = if is_null { null() } else { memory.input(name, &rounded::<T>(values)) };
            inputs.elements.insert(name.clone(), input);
        }
        inputs
    }
}

/// A model in the memory of a device.
struct Device<T> {
    memory: Memory,
    program: Program<T>,
    step: StepMemory,
    slots: GlobalMut<i32>,
    logits: GlobalMut<T>,
    /// Keys and values of each layer.
    caches: Vec<[GlobalMut<T>; 2]>,
    /// Memory of values that are not stored.
    values: GlobalMut<T>,
}

impl<T: Tolerance + cuda_std::mma::TensorCore> Device<T> {
    fn new(model: &Model, tensors: &Tensors) -> Self {
        let (mut memory, rows, c) = (Memory::new(), model.slots.len(), model.channels);
        let Inputs { elements: inputs, in_fp8 } = Inputs::<T>::new(model, tensors, &mut memory);
        let values = memory.output::<T>("values", 64);
        // Addresses of values, which are not stored. A residual has two of them in turn.
        let [even, odd, qkv, attended, hidden] = [0, 8, 16, 24, 32].map(|at| values.skip(at));
        let table = if model.rotation == NO_ROTATION { null() } else { memory.input("table", &model.table()) };
        let logits = memory.output::<T>("logits", rows * VOCAB);
        let wpe = inputs["wpe"];
        let embed = EmbedOperands { out: even, wte: inputs["wte"], wpe, channels: c };
        let mut operations = vec![Operation::Embed(embed)];
        let norm = |name: &str| match model.norm {
            Norm::Layer => InputNorm::LayerNorm(inputs[&format!("{name}w")], inputs[&format!("{name}b")]),
            _ => InputNorm::RmsNorm(inputs[&format!("{name}w")], EPS),
        };
        let size = |channels, outputs, activation| MatvecSize { rows, channels, outputs, activation, sm_count: 1 };
        let mut caches = Vec::new();
        for (l, &capacity) in model.capacities.iter().enumerate() {
            let linear = |name: &str, out: GlobalMut<T>, inp: GlobalMut<T>, residual: Option<GlobalMut<T>>, norm| {
                let [weight, bias] = ["w", "b"].map(|part| inputs[&format!("{name}.{l}{part}")]);
                let residual = residual.map_or(null(), GlobalMut::reader);
                let fp8 = in_fp8.get(&format!("{name}.{l}w")).copied();
                MatvecOperands { out, inp: inp.reader(), weight, fp8, bias, residual, norm }
            };
            let cache = ["keys", "values"].map(|name| {
                let name = format!("{name}.{l}");
                let cache = memory.output::<T>(&name, rows * model.kv_heads * capacity * model.head_size);
                for (row, values) in tensors[&name].chunks(MAX_POSITIONS * model.head_size).enumerate() {
                    let position = model.slots[row / model.kv_heads].1.max(0) as usize;
                    for (t, value) in values.chunks(model.head_size).take(position).enumerate() {
                        let at = cache.skip((row * capacity + t % capacity) * model.head_size);
                        memory.write(at, &rounded::<T>(value)).unwrap();
                    }
                }
                cache
            });
            caches.push(cache);
            let [heads, kv_heads, head_size, capacity] =
                [model.heads, model.kv_heads, model.head_size, capacity].map(|size| size as u32);
            let sizes = attention::Sizes {
                heads,
                kv_heads,
                head_size,
                capacity,
                splits: 1,
                rotation: model.rotation,
                qk_norm: model.qk_norm.0.into(),
                eps: EPS,
                gain: QK_GAIN,
            };
            let [keys, values] = cache;
            let operands = AttentionOperands {
                out: attended,
                partials: GlobalMut::null(),
                keys,
                values,
                qkv: qkv.reader(),
                slots: null(),
                table,
                q_weight: inputs[&format!("q.{l}")],
                k_weight: inputs[&format!("k.{l}")],
            };
            let fc = model.hidden * model.activation.inputs();
            let residual = if model.skips_residual { attended } else { even };
            operations.extend([
                Operation::Matvec(
                    linear("qkv", qkv, even, None, norm(&format!("ln1.{l}"))),
                    size(c, model.packed(), None),
                ),
                Operation::Attention(operands, sizes),
                Operation::Matvec(
                    linear("proj", odd, attended, Some(residual), InputNorm::None),
                    size(model.attended(), c, None),
                ),
                Operation::Matvec(
                    linear("fc", hidden, odd, None, norm(&format!("ln2.{l}"))),
                    size(c, fc, Some(model.activation)),
                ),
                Operation::Matvec(linear("out", even, hidden, Some(odd), InputNorm::None), size(model.hidden, c, None)),
            ]);
        }
        let head = MatvecOperands {
            out: logits,
            inp: even.reader(),
            weight: inputs["head"],
            fp8: in_fp8.get("head").copied(),
            bias: null(),
            residual: null(),
            norm: norm("lnf"),
        };
        operations.push(Operation::Matvec(head, size(c, VOCAB, None)));
        let program = program(&operations, rows, model.blocks).unwrap();
        let words: Vec<_> = model.slots.iter().flat_map(|&(token, position)| slot(token, position)).collect();
        let slots = memory.buffer("slots", &words);
        let step = StepMemory {
            table: memory.input("program", &program.table),
            scratch: memory.zeroed("scratch", program.scratch),
            slots: slots.reader(),
        };
        Self { memory, program, step, slots, logits, caches, values }
    }

    /// Runs a step, and returns the logits.
    fn step(&mut self) -> Vec<f64> {
        let kernel = step(&self.program, self.step);
        run(&mut self.memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        read(&self.memory, self.logits)
    }
}

fn slot(token: i32, position: i32) -> [i32; WORDS] {
    [token, position, 0, 0, 0, 0, 0, 0]
}

/// The f64 reference, whose values are rounded to T where kernels store them.
struct Reference<'a, T> {
    model: &'a Model,
    tensors: Tensors,
    table: Vec<f32>,
    element: std::marker::PhantomData<T>,
}

fn nearest<T: Tolerance>(x: f64) -> f64 {
    f64::from(T::nearest(x as f32))
}

impl<T: Tolerance> Reference<'_, T> {
    fn normalized(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let is_layer = self.model.norm == Norm::Layer;
        let mean = if is_layer { x.iter().sum::<f64>() / n } else { 0.0 };
        let eps = if is_layer { 1e-5 } else { f64::from(EPS) };
        let rstd = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + eps).sqrt().recip();
        let at = |part: &str, i: usize, other| self.tensors[&format!("{name}{part}")].get(i).copied().unwrap_or(other);
        x.iter().enumerate().map(|(i, x)| nearest::<T>((x - mean) * rstd * at("w", i, 1.0) + at("b", i, 0.0))).collect()
    }

    /// Returns the sums of a linear layer, which are not rounded.
    fn linear(&self, weight: &str, bias: Option<&str>, x: &[f64]) -> Vec<f64> {
        let sums = self.tensors[weight].chunks(x.len()).enumerate();
        sums.map(|(o, weight)| {
            let bias = bias.and_then(|bias| self.tensors[bias].get(o).copied()).unwrap_or(0.0);
            weight.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + bias
        })
        .collect()
    }

    fn prepared(&self, head: &[f64], name: &str, position: usize) -> Vec<f64> {
        let (mut x, hs) = (head.to_vec(), self.model.head_size);
        if self.model.qk_norm.0 {
            let square = x.iter().map(|x| x * x).sum::<f64>() / hs as f64;
            let scale = (square + f64::from(EPS)).sqrt().recip() * f64::from(QK_GAIN);
            let weight = |i: usize| self.tensors[name].get(i).copied().unwrap_or(1.0);
            x.iter_mut().enumerate().for_each(|(i, x)| *x *= scale * weight(i));
        }
        for i in 0..hs / 2 {
            let (a, b) = match self.model.rotation {
                NO_ROTATION => break,
                HALF_SPLIT => (i, i + hs / 2),
                _ => (2 * i, 2 * i + 1),
            };
            let angle = &self.table[position * hs + 2 * i..];
            let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
            (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
        x.iter().map(|&x| nearest::<T>(x)).collect()
    }

    fn attention(&mut self, l: usize, slot: usize, position: usize, qkv: &[f64]) -> Vec<f64> {
        let Model { heads, kv_heads, head_size: hs, .. } = *self.model;
        let head = |h: usize| &qkv[h * hs..][..hs];
        let mut out = Vec::new();
        for kv in 0..kv_heads {
            let at = ((slot * kv_heads + kv) * MAX_POSITIONS + position) * hs;
            let key = self.prepared(head(heads + kv), &format!("k.{l}"), position);
            self.tensors.get_mut(&format!("keys.{l}")).unwrap()[at..at + hs].copy_from_slice(&key);
            let value = head(heads + kv_heads + kv);
            self.tensors.get_mut(&format!("values.{l}")).unwrap()[at..at + hs].copy_from_slice(value);
        }
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let query = self.prepared(head(h), &format!("q.{l}"), position);
            let first = (position + 1).saturating_sub(self.model.capacities[l]);
            let visible = |name: &str| {
                let cache = &self.tensors[&format!("{name}.{l}")][(slot * kv_heads + kv) * MAX_POSITIONS * hs..];
                cache.chunks(hs).take(position + 1).skip(first).map(<[f64]>::to_vec).collect::<Vec<_>>()
            };
            let dot = |key: &Vec<f64>| key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>() / (hs as f64).sqrt();
            let scores: Vec<_> = visible("keys").iter().map(dot).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<_> = scores.iter().map(|score| (score - most).exp()).collect();
            let mut sums = vec![0.0; hs];
            for (weight, value) in weights.iter().zip(visible("values")) {
                sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
            }
            out.extend(sums.iter().map(|sum| nearest::<T>(sum / weights.iter().sum::<f64>())));
        }
        out
    }

    /// Returns the logits of a slot.
    fn step(&mut self, slot: usize, (token, position): (i32, i32)) -> Vec<f64> {
        let (model, c) = (self.model, self.model.channels);
        let embedded = |name: &str, row: i32, i: usize| {
            self.tensors[name].get(row.max(0) as usize * c + i).copied().unwrap_or(0.0)
        };
        let mut x: Vec<_> =
            (0..c).map(|i| nearest::<T>(embedded("wte", token, i) + embedded("wpe", position, i))).collect();
        let add = |sums: Vec<f64>, x: &[f64]| sums.iter().zip(x).map(|(sum, x)| nearest::<T>(sum + x)).collect();
        let round = |sums: Vec<f64>| sums.into_iter().map(nearest::<T>).collect::<Vec<_>>();
        for l in 0..model.capacities.len() {
            let linear = |this: &Self, name: &str, x: &[f64]| {
                this.linear(&format!("{name}.{l}w"), Some(&format!("{name}.{l}b")), x)
            };
            let qkv = round(linear(self, "qkv", &self.normalized(&format!("ln1.{l}"), &x)));
            let attended = match usize::try_from(position) {
                Ok(position) => self.attention(l, slot, position, &qkv),
                Err(_) => vec![0.0; model.attended()],
            };
            let residual = if model.skips_residual { &attended } else { &x };
            x = add(linear(self, "proj", &attended), residual);
            let fc = round(linear(self, "fc", &self.normalized(&format!("ln2.{l}"), &x)));
            let hidden = round(activation::forward(model.activation, &fc, model.hidden));
            x = add(linear(self, "out", &hidden), &x);
        }
        round(self.linear("head", None, &self.normalized("lnf", &x)))
    }
}

/// Runs `steps` steps with the same scratch memory, and compares logits and caches with the reference.
fn check<T: Tolerance + cuda_std::mma::TensorCore>(model: &Model, steps: i32) {
    let tensors = model.tensors::<T>();
    let mut device = Device::<T>::new(model, &tensors);
    let mut reference = Reference::<T> { model, tensors, table: model.table(), element: std::marker::PhantomData };
    // Roundings of intermediate values may differ, and add up.
    let tolerance = if T::PACKET == 4 { 8.0 } else { 10.0 } * T::ROUNDING;
    for i in 0..steps {
        let slots: Vec<_> = model
            .slots
            .iter()
            .map(|&(token, position)| {
                ((token + 7 * i) % VOCAB as i32, if position < 0 { position } else { position + i })
            })
            .collect();
        let words: Vec<_> = slots.iter().flat_map(|&(token, position)| slot(token, position)).collect();
        device.memory.write(device.slots, &words).unwrap();
        let got = device.step();
        let want: Vec<_> = slots.iter().enumerate().flat_map(|(row, &slot)| reference.step(row, slot)).collect();
        let scale = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert_close(&format!("logits of step {i}"), &got, &want, tolerance, scale);
    }
    assert!(device.memory.slice(device.values.reader(), 1).is_err(), "values are not stored");
    let (hs, kv_heads) = (model.head_size, model.kv_heads);
    for (l, (caches, &capacity)) in device.caches.iter().zip(&model.capacities).enumerate() {
        for (cache, name) in caches.iter().zip(["keys", "values"]) {
            for row in 0..model.slots.len() * kv_heads {
                let next = model.slots[row / kv_heads].1;
                let next = if next < 0 { 0 } else { (next + steps) as usize };
                for place in 0..capacity {
                    let found = device.memory.slice(cache.reader().skip((row * capacity + place) * hs), hs);
                    // The newest position at this place.
                    match (0..next).rev().find(|position| position % capacity == place) {
                        Some(position) => {
                            let want =
                                &reference.tensors[&format!("{name}.{l}")][(row * MAX_POSITIONS + position) * hs..];
                            assert_close(name, &wide(found.unwrap()), &want[..hs], tolerance, 4.0);
                        }
                        None => assert!(found.is_err(), "{name} of layer {l}, place {place}"),
                    }
                }
            }
        }
    }
}

fn steps_of_gpt2_match_f64_reference<T: Tolerance + cuda_std::mma::TensorCore>() {
    check::<T>(&Model::gpt2(&[(3, 0)], 1), 3);
    check::<T>(&Model::gpt2(&[(3, 9)], 3), 2);
    check::<T>(&Model::gpt2(&[(3, 9), (5, -1), (8, 0)], 2), 1);
    // The residual comes from another block.
    check::<T>(&Model { skips_residual: true, capacities: vec![24], ..Model::gpt2(&[(3, 9)], 3) }, 1);
}

fn steps_of_llama_match_f64_reference<T: Tolerance + cuda_std::mma::TensorCore>() {
    check::<T>(&Model::llama(&[(1, 3), (3, 4)], 3), 2);
    let normed = Model { qk_norm: (true, true), rotation: INTERLEAVED, ..Model::llama(&[(1, 12)], 2) };
    check::<T>(&normed, 1);
    check::<T>(&Model { qk_norm: (true, false), norm: Norm::RmsWithoutWeight, ..normed }, 1);
}

/// Long caches are split between blocks, also with more query heads than a task has.
fn splits_match_f64_reference<T: Tolerance + cuda_std::mma::TensorCore>() {
    let one = Model { capacities: vec![2180], head_size: 64, kv_heads: 1, ..Model::gpt2(&[(3, 2150)], 5) };
    check::<T>(&one, 1);
    // A warp takes several turns.
    check::<T>(&Model { blocks: 1, capacities: vec![500], ..one.clone() }, 1);
    check::<T>(&Model { heads: 10, capacities: vec![2100], head_size: 16, ..one.clone() }, 1);
    // A thread combines all splits.
    check::<T>(&Model { heads: 4, head_size: 128, seed: 2, ..one.clone() }, 1);
    check::<T>(&Model { slots: vec![(2, 2170), (4, -1), (1, 40)], blocks: 9, ..one }, 1);
}

/// Rows of weight in several stages, more tiles than one barrier serves, and sixteen slots.
fn wide_layers_match_f64_reference<T: Tolerance + cuda_std::mma::TensorCore>() {
    let slots: Vec<_> = (0..16).map(|i| (i, if i % 5 == 4 { -1 } else { i })).collect();
    let model = Model { capacities: vec![24], hidden: 240 * T::PACKET, ..Model::gpt2(&slots[..1], 2) };
    check::<T>(&model, 1);
    let model = Model { capacities: vec![24], slots, blocks: 2, ..Model::llama(&[], 1) };
    check::<T>(&model, 1);
    check::<T>(&Model { slots: model.slots[..8].to_vec(), blocks: 1, ..model }, 1);
}

/// GPT-2 and Llama, and rows of weight in several stages.
fn steps_with_weights_in_fp8_match_f64_reference() {
    let in_fp8 = true;
    check::<bf16>(&Model { in_fp8, ..Model::gpt2(&[(3, 9)], 3) }, 2);
    let llama = |slots: &[(i32, i32)], blocks| Model { in_fp8, heads: 8, kv_heads: 4, ..Model::llama(slots, blocks) };
    check::<bf16>(&llama(&[(1, 3), (3, 4)], 3), 2);
    check::<bf16>(&Model { kv_heads: 8, ..llama(&[(1, 3)], 2) }, 1);
    check::<bf16>(&Model { in_fp8, capacities: vec![24], hidden: 240 * 8, ..Model::gpt2(&[(3, 0)], 2) }, 1);
    let slots: Vec<_> = (0..16).map(|i| (i, i)).collect();
    check::<bf16>(&Model { capacities: vec![24], hidden: 192, ..llama(&slots, 2) }, 1);
}

fn steps_of_any_shape_match_f64_reference<T: Tolerance + cuda_std::mma::TensorCore>() {
    let shape = (1..5usize, 1..3usize, 1..6usize, select(vec![16, 32, 64, 80, 128]), 1..4usize);
    let kind = (0..3usize, 0..3usize, select(Activation::ALL.to_vec()), 1..40usize, 1..40i32, 0..99u32);
    for_all(2, (shape, kind), |((rows, kv, group, hs, blocks), (norm, rotation, activation, ring, longest, seed))| {
        // Linear layers need a multiple of 32 channels.
        let kv = if hs % 32 == 0 { kv } else { 2 };
        let slots: Vec<_> = (0..rows as i32).map(|i| (i, longest * (i + 1) / rows as i32 - 1)).collect();
        let model = Model {
            capacities: vec![ring],
            channels: 32 * (1 + seed as usize % 5),
            heads: kv * group,
            kv_heads: kv,
            head_size: hs,
            hidden: 32 * (1 + seed as usize % 7),
            activation,
            norm: [Norm::Layer, Norm::Rms, Norm::RmsWithoutWeight][norm],
            rotation: [NO_ROTATION, HALF_SPLIT, INTERLEAVED][rotation],
            qk_norm: (seed % 3 > 0, seed % 3 > 1),
            seed,
            ..Model::gpt2(&slots, blocks)
        };
        check::<T>(&model, 2);
    });
}

/// Two linear layers of integers: every row, column, tile, piece and block exactly.
fn linear_layers_of_integers_are_exact<T: Tolerance + cuda_std::mma::TensorCore>() {
    check_integers::<T>(T::PACKET, None);
}

fn weights_of_integers_in_fp8_are_exact() {
    check_integers::<bf16>(E4m3::PACKET, Some([0.5, 2.0]));
}

/// The weights have rows of packets of `packet` numbers, in FP8 if they have scales.
fn check_integers<T: Tolerance + cuda_std::mma::TensorCore>(packet: usize, scales: Option<[f32; 2]>) {
    let check = |rows: usize, packets: usize, hidden: usize, blocks: usize, seed: u32| {
        // Half of the steps begin with values in memory instead of an embedding.
        let from_memory = seed.is_multiple_of(2);
        let (c, hidden) = (packets * packet, hidden * packet);
        // Sums stay below 2^8, so that bf16 represents them: rows of the weights have three and one values that are not 0.
        let sparse = |outputs: usize, channels: usize, count: usize, most: f64, seed: u32| {
            let mut weight = vec![0.0; outputs * channels];
            for (o, row) in weight.chunks_mut(channels).enumerate() {
                for place in [o * 7 + seed as usize, channels - 1, o / 3].iter().take(count) {
                    row[place % channels] = integers(1, seed + o as u32)[0].clamp(-most, most);
                }
            }
            weight
        };
        let (wte, first) = (integers(VOCAB * c, seed), sparse(hidden, c, 3, 8.0, seed + 1));
        let (second, bias) = (sparse(c, hidden, 1, 1.0, seed + 2), integers(hidden, seed + 3));
        let mut memory = Memory::new();
        let values = if from_memory {
            let rows: Vec<_> = (0..rows).flat_map(|row| wte[row * 3 % VOCAB * c..][..c].to_vec()).collect();
            GlobalMut::from_address(memory.input("values", &rounded::<T>(&rows)).pointer().addr() as u64)
        } else {
            memory.output::<T>("values", 16)
        };
        let inner = memory.output::<T>("inner", 8);
        let out = memory.output::<T>("out", rows * c);
        let mut input = |name: &str, values: &[f64]| memory.input(name, &rounded::<T>(values));
        let size = |channels, outputs| MatvecSize { rows, channels, outputs, activation: None, sm_count: 1 };
        let layer = |(weight, fp8), inp, out, bias, residual| MatvecOperands {
            out,
            inp,
            weight,
            fp8,
            bias,
            residual,
            norm: InputNorm::None,
        };
        let embedded = EmbedOperands { out: values, wte: input("wte", &wte), wpe: null(), channels: c };
        let (start, bias_input) = (values.reader(), input("bias", &bias));
        let mut weight = |i: usize, values: &[f64]| {
            let name = format!("weight {i}");
            match scales {
                None => (memory.input(&name, &rounded::<T>(values)), None),
                Some(scales) => (null(), Some(fp8_weight::input(&mut memory, &name, values, scales[i]))),
            }
        };
        let operations = [
            Operation::Embed(embedded),
            Operation::Matvec(layer(weight(0, &first), start, inner, bias_input, null()), size(c, hidden)),
            Operation::Matvec(layer(weight(1, &second), inner.reader(), out, null(), start), size(hidden, c)),
        ];
        let program = program(&operations[usize::from(from_memory)..], rows, blocks).unwrap();
        let words: Vec<_> = (0..rows as i32).flat_map(|row| slot(row * 3 % VOCAB as i32, row)).collect();
        let step_memory = StepMemory {
            table: memory.input("program", &program.table),
            scratch: memory.zeroed("scratch", program.scratch),
            slots: memory.input("slots", &words),
        };
        let kernel = step(&program, step_memory);
        run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        let product = |weight: &[f64], x: &[f64], o: usize| -> f64 {
            weight[o * x.len()..][..x.len()].iter().zip(x).map(|(w, x)| w * x).sum()
        };
        let want = (0..rows).flat_map(|row| {
            let x = &wte[row * 3 % VOCAB * c..][..c];
            let inner: Vec<_> = (0..hidden).map(|o| product(&first, x, o) + bias[o]).collect();
            (0..c).map(|o| product(&second, &inner, o) + x[o]).collect::<Vec<_>>()
        });
        assert_same("out", &read(&memory, out), &want.collect::<Vec<_>>());
    };
    for (i, rows) in [1, 2, 7, 8, 9, 16].into_iter().enumerate() {
        check(rows, 4 * (2 + i), 4, 1 + i, 1);
    }
    // Pieces of one, two and three stages, and two passes of tiles.
    check(1, 96, 4, 2, 2);
    check(2, 100, 4, 3, 3);
    check(3, 200, 4, 2, 4);
    check(2, 4, 12, 1, 5);
    // Blocks without a column end before others start.
    check(1, 4, 4, 19, 6);
}

/// The inputs of an activation are rounded to T: in bf16, 257 is 256.
fn activations_read_rounded_values<T: Tolerance + cuda_std::mma::TensorCore>() {
    let c = 4 * T::PACKET;
    let mut memory = Memory::new();
    let (values, out) = (memory.output::<T>("values", c), memory.output::<T>("out", 2));
    let mut input = |name: &str, values: &[f64]| memory.input(name, &rounded::<T>(values));
    let weight: Vec<_> = (0..2 * c).map(|i| if i % c == 0 { 2.0 } else { 0.0 }).collect();
    let operands = MatvecOperands {
        out,
        inp: values.reader(),
        weight: input("weight", &weight),
        fp8: None,
        bias: input("bias", &[1.0, -1000.0]),
        residual: null(),
        norm: InputNorm::None,
    };
    let activation = Some(Activation::ReluSquared);
    let operations = [
        Operation::Embed(EmbedOperands { out: values, wte: input("wte", &vec![128.0; c]), wpe: null(), channels: c }),
        Operation::Matvec(operands, MatvecSize { rows: 1, channels: c, outputs: 2, activation, sm_count: 1 }),
    ];
    let program = program(&operations, 1, 1).unwrap();
    let step_memory = StepMemory {
        table: memory.input("program", &program.table),
        scratch: memory.zeroed("scratch", program.scratch),
        slots: memory.input("slots", &slot(0, 0)),
    };
    let kernel = step(&program, step_memory);
    run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
    let want = f64::from(T::nearest(257.0)).powi(2);
    assert_same("out", &read(&memory, out), &[want, 0.0]);
}

fn unsupported_operations_have_no_program<T: Tolerance + cuda_std::mma::TensorCore>() {
    let view = |address: usize| GlobalMut::<T>::from_address(address as u64);
    let embed = |channels| Operation::Embed(EmbedOperands { out: view(16), wte: null(), wpe: null(), channels });
    let matvec = |inp: usize, rows, channels, outputs, activation| {
        let operands = MatvecOperands {
            out: view(32),
            inp: view(inp).reader(),
            weight: null(),
            fp8: None,
            bias: null(),
            residual: null(),
            norm: InputNorm::None,
        };
        Operation::Matvec(operands, MatvecSize { rows, channels, outputs, activation, sm_count: 1 })
    };
    let c = 4 * T::PACKET;
    let reason = |operations: &[Operation<T>], rows| program(operations, rows, 4).err();
    assert_eq!(reason(&[embed(c), matvec(16, 16, c, 6, None)], 16), None);
    assert!(reason(&[embed(c), matvec(16, 17, c, 6, None)], 17).is_some());
    assert!(reason(&[embed(c), matvec(16, 2, c, 6, None)], 3).is_some());
    // Values in memory, which the step overwrites or not.
    assert_eq!(reason(&[embed(c), matvec(48, 1, c, 6, None)], 1), None);
    assert!(reason(&[embed(c), matvec(32, 1, c, 6, None)], 1).is_some());
    assert!(reason(&[embed(c), matvec(16, 1, 2 * c, 6, None)], 1).is_some());
    assert!(reason(&[embed(c), matvec(16, 1, c, 7, None)], 1).is_some());
    assert!(reason(&[embed(c), matvec(16, 1, c, 6, Some(Activation::SwiGlu))], 1).is_some());
    assert!(reason(&[embed(c + 2), matvec(16, 1, c + 2, 6, None)], 1).is_some());
    let wide = 2048 * T::PACKET;
    assert_eq!(reason(&[embed(wide), matvec(16, 4, wide, 6, None)], 4), None);
    assert!(reason(&[embed(wide), matvec(16, 16, wide, 6, None)], 16).is_some());
    assert!(reason(&[], 1).is_some());
}

fn weights_in_fp8_need_a_multiple_of_64_channels() {
    fn reason<T: cuda_std::mma::TensorCore>(channels: usize, in_fp8: [bool; 2]) -> Option<String> {
        let view = |address: usize| GlobalMut::<T>::from_address(address as u64);
        let weight = Fp8Weight { weight: null(), scale: null() };
        let matvec = |[inp, out]: [usize; 2], in_fp8: bool| {
            let (out, inp, fp8) = (view(16 * out), view(16 * inp).reader(), in_fp8.then_some(weight));
            let [weight, bias, residual] = [null(); 3];
            let operands = MatvecOperands { out, inp, weight, fp8, bias, residual, norm: InputNorm::None };
            Operation::Matvec(
                operands,
                MatvecSize { rows: 1, channels, outputs: channels, activation: None, sm_count: 1 },
            )
        };
        let embed = Operation::Embed(EmbedOperands { out: view(16), wte: null(), wpe: null(), channels });
        program(&[embed, matvec([1, 2], in_fp8[0]), matvec([2, 3], in_fp8[1])], 1, 4).err()
    }
    assert_eq!(reason::<bf16>(64, [true; 2]), None);
    assert_eq!(reason::<bf16>(32, [false; 2]), None);
    assert!(reason::<bf16>(32, [true; 2]).is_some() && reason::<bf16>(48, [false; 2]).is_some());
    assert!(reason::<bf16>(64, [true, false]).is_some() && reason::<bf16>(64, [false, true]).is_some());
    assert!(reason::<f32>(64, [true; 2]).is_some());
}

/// The numbers of stages in docs/internals/generation.md.
fn the_ring_takes_the_shared_memory_that_is_left() {
    let view = |address: usize| GlobalMut::<bf16>::from_address(address as u64);
    let stages = |rows| {
        let matvec = |[inp, out]: [usize; 2], channels, outputs, norm| {
            let (out, inp) = (view(16 * out), view(16 * inp).reader());
            let operands = MatvecOperands { out, inp, weight: null(), fp8: None, bias: null(), residual: null(), norm };
            Operation::Matvec(operands, MatvecSize { rows, channels, outputs, activation: None, sm_count: 1 })
        };
        let attention = AttentionOperands {
            out: view(48),
            partials: GlobalMut::null(),
            keys: view(0),
            values: view(0),
            qkv: view(32).reader(),
            slots: null(),
            table: null(),
            q_weight: null(),
            k_weight: null(),
        };
        let sizes = attention::Sizes {
            heads: 12,
            kv_heads: 12,
            head_size: 64,
            capacity: 1024,
            splits: 1,
            rotation: NO_ROTATION,
            qk_norm: 0,
            eps: EPS,
            gain: 1.0,
        };
        let norm = InputNorm::LayerNorm(null(), null());
        let operations = [
            Operation::Embed(EmbedOperands { out: view(16), wte: null(), wpe: null(), channels: 768 }),
            matvec([1, 2], 768, 2304, norm),
            Operation::Attention(attention, sizes),
            matvec([3, 4], 768, 768, InputNorm::None),
            matvec([4, 5], 768, 3072, norm),
            matvec([5, 6], 3072, 768, InputNorm::None),
        ];
        program(&operations, rows, 132).unwrap().stages()
    };
    assert_eq!((stages(1), stages(8)), (24, 16));
}
