//! Text generation with a KV cache against f64 references: linear layers of few rows, and attention over the cache.

use crate::common::{
    Tolerance, activation, assert_close, assert_same, for_all, fp8_weight, integers, noise, read, rounded, run,
    shared_bytes, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::mma::TensorCore;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};
use gpu::activation::Activation;
use gpu::decode::attention::{self, HALF_SPLIT, INTERLEAVED, NO_ROTATION};
use gpu::decode::launch::{self, AttentionOperands, Fp8Weight, InputNorm, MatvecOperands, MatvecSize};
use gpu::decode::{WORDS, embed, matvec, sample};
use proptest::bool::ANY;
use proptest::sample::select;

tests! {
    kernels of "decode" where |entry| !entry.starts_with("decode_step") && !entry.starts_with("sample_tokens");
    for both types: embeddings_of_any_token_and_position, matmuls_match_f64_reference, normed_matmuls_match_f64_reference,
        unsupported_matmuls_have_no_kernel, attention_matches_f64_reference, attention_in_a_ring_matches_f64_reference,
        filled_caches_hold_keys_and_values, read_caches_give_back_keys_and_values, idle_slots_do_not_change;
    slow in f32: matmuls_of_integers_are_exact, large_and_small_rows_are_normalized,
        attention_of_random_shapes_matches_f64_reference, nan_and_infinity_stay_in_their_head;
    once: matmuls_of_integers_in_fp8_are_exact, matmuls_in_fp8_match_f64_reference, normed_matmuls_in_fp8_match_f64_reference,
        unsupported_matmuls_in_fp8_have_no_kernel;
}

fn null<T>() -> Global<T> {
    Global::new(std::ptr::null())
}

/// Returns slots with these tokens and positions.
fn slots(tokens: &[(i32, i32)]) -> Vec<i32> {
    tokens.iter().flat_map(|&(token, position)| [token, position, 0, 0, 0, 0, 0, 0]).collect()
}

fn embeddings_of_any_token_and_position<T: Tolerance>() {
    for_all(24, (1..5usize, 1..160usize, ANY, 0..9u32), |(b, packets, positions, seed)| {
        let (c, v, t) = (packets * T::PACKET, 13, 7);
        let (wte, wpe) = (rounded::<T>(&noise(v * c, seed)), rounded::<T>(&noise(t * c, seed + 1)));
        let state: Vec<_> = (0..b as i32).map(|i| ((i * 5 + 12) % 13, (i * 3 + 6) % 7)).collect();
        let mut memory = Memory::new();
        let out = memory.output::<T>("out", b * c);
        let slots = memory.input("slots", &slots(&state));
        let table = memory.input("wte", &wte);
        let places = if positions { memory.input("wpe", &wpe) } else { null() };
        run(&mut memory, &embed::decode_embed(out, slots, table, places, c as u32), embed::grid::<T>(c, b), 0);
        let want = state.iter().flat_map(|&(token, position)| {
            let (token, place) = (wide(&wte[token as usize * c..][..c]), wide(&wpe[position as usize * c..][..c]));
            token.into_iter().zip(place).map(|(a, b)| if positions { a + b } else { a }).collect::<Vec<_>>()
        });
        assert_same("out", &read(&memory, out), &wide(&rounded::<T>(&want.collect::<Vec<_>>())));
    });
}

/// A linear layer of few rows.
#[derive(Clone)]
struct Layer {
    inp: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    residual: Option<Vec<f64>>,
    /// Code, weight and bias of the norm.
    norm: (u32, Option<Vec<f64>>, Vec<f64>),
    eps: f32,
    /// Scale of the weight, if it is in FP8.
    fp8_scale: Option<f32>,
    activation: Option<Activation>,
    rows: usize,
    channels: usize,
    outputs: usize,
}

impl Layer {
    /// Returns a layer of random values of T, or of integers.
    fn new<T: Tolerance>(rows: usize, channels: usize, outputs: usize, seed: u32, exact: bool) -> Self {
        let values = |n: usize, seed: u32| if exact { integers(n, seed) } else { wide(&rounded::<T>(&noise(n, seed))) };
        Self {
            inp: values(rows * channels, seed),
            weight: values(outputs * channels, seed + 1),
            bias: Some(values(outputs, seed + 2)),
            residual: Some(values(rows * outputs, seed + 3)),
            norm: (matvec::PLAIN, None, Vec::new()),
            eps: 0.0,
            fp8_scale: None,
            activation: None,
            rows,
            channels,
            outputs,
        }
    }

    fn with_activation(self, activation: Activation) -> Self {
        Self { activation: Some(activation), residual: None, ..self }
    }

    /// Returns the layer with a weight in FP8.
    fn in_fp8(self, scale: f32) -> Self {
        Self { weight: fp8_weight::rounded(&self.weight, scale), fp8_scale: Some(scale), ..self }
    }

    fn columns(&self) -> usize {
        self.outputs / self.activation.map_or(1, Activation::inputs)
    }

    /// Runs the kernel as a GPU with `sm_count` SMs would.
    fn run<T: Tolerance + TensorCore>(&self, sm_count: usize) -> Vec<f64> {
        let mut memory = Memory::new();
        let out = memory.output::<T>("out", self.rows * self.columns());
        let fp8 = self.fp8_scale.map(|scale| fp8_weight::input(&mut memory, "weight in FP8", &self.weight, scale));
        let mut input =
            |name, values: Option<&Vec<f64>>| values.map(|values| memory.input(name, &rounded::<T>(values)));
        let (inp, weight) = (input("inp", Some(&self.inp)).unwrap(), input("weight", Some(&self.weight)).unwrap());
        let (bias, residual) = (input("bias", self.bias.as_ref()), input("residual", self.residual.as_ref()));
        let norm_weight = input("norm weight", self.norm.1.as_ref()).unwrap_or(null());
        let norm = match self.norm.0 {
            matvec::PLAIN => InputNorm::None,
            matvec::LAYERNORM => InputNorm::LayerNorm(norm_weight, input("norm bias", Some(&self.norm.2)).unwrap()),
            _ => InputNorm::RmsNorm(norm_weight, self.eps),
        };
        let (bias, residual) = (bias.unwrap_or(null()), residual.unwrap_or(null()));
        let weight = if fp8.is_some() { null() } else { weight };
        let operands = MatvecOperands { out, inp, weight, fp8, bias, residual, norm };
        let Self { rows, channels, outputs, activation, .. } = *self;
        let kernel = launch::matvec(operands, MatvecSize { rows, channels, outputs, activation, sm_count }).unwrap();
        run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        read(&memory, out)
    }

    fn normalized<T: Tolerance>(&self) -> Vec<f64> {
        let (code, weight, bias) = &self.norm;
        if *code == matvec::PLAIN {
            return self.inp.clone();
        }
        let mut out = Vec::new();
        for row in self.inp.chunks(self.channels) {
            let n = self.channels as f64;
            let mean = if *code == matvec::LAYERNORM { row.iter().sum::<f64>() / n } else { 0.0 };
            let eps = if *code == matvec::LAYERNORM { 1e-5 } else { f64::from(self.eps) };
            let rstd = (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + eps).sqrt().recip();
            out.extend(row.iter().enumerate().map(|(i, x)| {
                let scaled = (x - mean) * rstd * weight.as_ref().map_or(1.0, |weight| weight[i]);
                f64::from(T::nearest((scaled + bias.get(i).copied().unwrap_or(0.0)) as f32))
            }));
        }
        out
    }

    /// Returns the result and the sum of the magnitudes of all terms of the largest dot product.
    fn reference<T: Tolerance>(&self) -> (Vec<f64>, f64) {
        let (inp, mut out, mut largest) = (self.normalized::<T>(), Vec::new(), 1.0f64);
        for (r, row) in inp.chunks(self.channels).enumerate() {
            let sums: Vec<f64> = self
                .weight
                .chunks(self.channels)
                .enumerate()
                .map(|(o, weight)| {
                    let terms = row.iter().zip(weight).map(|(x, w)| x * w);
                    largest = largest.max(terms.clone().map(f64::abs).sum());
                    terms.sum::<f64>() + self.bias.as_ref().map_or(0.0, |bias| bias[o])
                })
                .collect();
            match self.activation {
                None => out.extend(sums.iter().enumerate().map(|(o, sum)| {
                    sum + self.residual.as_ref().map_or(0.0, |residual| residual[r * self.outputs + o])
                })),
                Some(activation) => {
                    let rounded: Vec<_> = sums.iter().map(|&x| f64::from(T::nearest(x as f32))).collect();
                    out.extend(activation::forward(activation, &rounded, self.columns()));
                }
            }
        }
        (out, largest)
    }

    fn check<T: Tolerance + TensorCore>(&self, sm_count: usize) {
        let (want, scale) = self.reference::<T>();
        // Two values near `scale` are multiplied by SwiGLU and ReLU².
        let squared = matches!(self.activation, Some(Activation::ReluSquared | Activation::SwiGlu | Activation::GeGlu));
        let scale = if squared { scale * scale } else { scale };
        assert_close("out", &self.run::<T>(sm_count), &want, T::ROUNDING, scale / 2.0);
    }
}

/// Integers cover every row, column, split and tail exactly.
fn matmuls_of_integers_are_exact<T: Tolerance + TensorCore>() {
    let check = |rows, packets: usize, outputs: usize, sm_count, bias: bool, residual: bool, seed| {
        // Tensor cores compute pairs of outputs.
        let on_tensor_cores = rows > launch::MAX_FMA_ROWS && T::PACKET == bf16::PACKET;
        let outputs = if on_tensor_cores { outputs.next_multiple_of(2) } else { outputs };
        let mut layer = Layer::new::<T>(rows, packets * T::PACKET, outputs, seed, true);
        // Sums stay below 2^8 so that bf16 represents them: the weights have at most three values that are not 0 in a row.
        for (i, weight) in layer.weight.iter_mut().enumerate() {
            let kept = [seed as usize * 7 + i / (packets * T::PACKET), 0, packets * T::PACKET - 1];
            if !kept.iter().any(|channel| channel % (packets * T::PACKET) == i % (packets * T::PACKET)) {
                *weight = 0.0;
            }
        }
        if !bias {
            layer.bias = None;
        }
        if !residual {
            layer.residual = None;
        }
        assert_same("out", &layer.run::<T>(sm_count), &layer.reference::<T>().0);
    };
    // Every number of rows, and every number of warps that share the channels.
    for rows in 1..=16 {
        check(rows, 40, 17, 1, true, true, 1);
    }
    for sm_count in [1, 2, 4, 8, 100] {
        check(1, 300, 33, sm_count, true, false, 2);
        check(5, 300, 33, sm_count, false, true, 3);
    }
    for_all(
        40,
        (1..17usize, 1..200usize, 1..40usize, 1..20usize, ANY, ANY, 0..9u32),
        |(r, p, o, s, bias, residual, seed)| {
            check(r, p, o, s, bias, residual, seed);
        },
    );
}

fn matmuls_match_f64_reference<T: Tolerance + TensorCore>() {
    for rows in [1, 2, 3, 7, 16] {
        for (packets, outputs) in [(1, 2), (33, 40), (96, 22)] {
            let layer = Layer::new::<T>(rows, packets * T::PACKET, outputs, 5, false);
            let activated = Activation::ALL.iter().map(|&activation| layer.clone().with_activation(activation));
            for layer in activated.chain([layer.clone()]) {
                layer.check::<T>(3);
                Layer { bias: None, ..layer }.check::<T>(3);
            }
        }
    }
}

/// Returns the layer with each norm.
fn norms<T: Tolerance>(layer: &Layer) -> Vec<Layer> {
    let values = |seed| wide(&rounded::<T>(&noise(layer.channels, seed)));
    let norm = |norm| Layer { norm, eps: 0.25, ..layer.clone() };
    vec![
        norm((matvec::LAYERNORM, Some(values(11)), values(12))),
        norm((matvec::RMSNORM, Some(values(13)), Vec::new())),
        norm((matvec::RMSNORM, None, Vec::new())),
    ]
}

fn normed_matmuls_match_f64_reference<T: Tolerance + TensorCore>() {
    for rows in [1, 2] {
        for (packets, outputs, sm_count) in [(1, 4, 1), (33, 18, 1), (150, 18, 40)] {
            let layer = Layer::new::<T>(rows, packets * T::PACKET, outputs, 21, false);
            for layer in norms::<T>(&layer) {
                layer.check::<T>(sm_count);
            }
            for activation in [Activation::SwiGlu, Activation::GeGlu] {
                for layer in norms::<T>(&layer.clone().with_activation(activation)) {
                    layer.check::<T>(sm_count);
                }
            }
        }
    }
}

/// The squares of large values overflow unless they are scaled before they are summed. The eps of small rows counts.
fn large_and_small_rows_are_normalized<T: Tolerance + TensorCore>() {
    for scale in [3e18, 1e-12] {
        let mut layer = Layer::new::<T>(2, 40 * T::PACKET, 6, 31, false);
        layer.inp.iter_mut().for_each(|x| *x = f64::from(T::nearest((*x * scale) as f32)));
        for layer in norms::<T>(&layer) {
            layer.check::<T>(1);
        }
    }
}

fn unsupported_matmuls_have_no_kernel<T: Tolerance + TensorCore>() {
    let kernel = |rows, channels, outputs, activation, norm| {
        let out = GlobalMut::<T>::new(std::ptr::null_mut());
        let operands =
            MatvecOperands { out, inp: null(), weight: null(), fp8: None, bias: null(), residual: null(), norm };
        launch::matvec(operands, MatvecSize { rows, channels, outputs, activation, sm_count: 1 })
    };
    let packet = T::PACKET;
    assert!(
        kernel(16, packet, 4, None, InputNorm::None).is_some()
            && kernel(17, packet, 4, None, InputNorm::None).is_none()
    );
    assert!(
        kernel(0, packet, 3, None, InputNorm::None).is_none()
            && kernel(1, packet + 1, 3, None, InputNorm::None).is_none()
    );
    assert!(kernel(1, packet, 3, Some(Activation::SwiGlu), InputNorm::None).is_none());
    let most = launch::MAX_FMA_ROWS;
    assert!(kernel(most, packet, 3, None, InputNorm::None).is_some());
    assert_eq!(kernel(most + 1, packet, 3, None, InputNorm::None).is_some(), packet == f32::PACKET);
    assert!(kernel(2, packet, 3, None, InputNorm::RmsNorm(null(), 1.0)).is_some());
    assert!(kernel(3, packet, 3, None, InputNorm::RmsNorm(null(), 1.0)).is_none());
    assert!(kernel(3, packet, 3, None, InputNorm::LayerNorm(null(), null())).is_none());
}

/// Integers cover every row, column, split and tail exactly.
fn matmuls_of_integers_in_fp8_are_exact() {
    let check = |rows, packets: usize, outputs: usize, sm_count, (bias, residual): (bool, bool), seed| {
        let (channels, outputs) = (packets * E4m3::PACKET, 2 * outputs);
        let mut layer = Layer::new::<bf16>(rows, channels, outputs, seed, true).in_fp8(0.5);
        // At most three weights of a row are not 0, so that bf16 represents the sums.
        for (i, weight) in layer.weight.iter_mut().enumerate() {
            let kept = [seed as usize * 7 + i / channels, 0, channels - 1];
            if !kept.iter().any(|channel| channel % channels == i % channels) {
                *weight = 0.0;
            }
        }
        layer.bias = layer.bias.filter(|_| bias);
        layer.residual = layer.residual.filter(|_| residual);
        assert_same("out", &layer.run::<bf16>(sm_count), &layer.reference::<bf16>().0);
    };
    for rows in 1..=16 {
        check(rows, 20, 9, 1, (true, true), 1);
    }
    for sm_count in [1, 2, 4, 8, 100] {
        check(1, 150, 17, sm_count, (true, false), 2);
        check(5, 150, 17, sm_count, (false, true), 3);
    }
    for_all(20, (1..17usize, 1..100usize, 1..20usize, 1..20usize, ANY, ANY, 0..9u32), |(r, p, o, s, b, e, seed)| {
        check(r, p, o, s, (b, e), seed);
    });
}

fn matmuls_in_fp8_match_f64_reference() {
    for rows in [1, 3, 16] {
        for (packets, outputs) in [(1, 2), (17, 40), (48, 22)] {
            let layer = Layer::new::<bf16>(rows, packets * E4m3::PACKET, outputs, 5, false).in_fp8(2f32.powi(-7));
            for &activation in Activation::ALL {
                layer.clone().with_activation(activation).check::<bf16>(3);
            }
            layer.check::<bf16>(3);
        }
    }
}

fn normed_matmuls_in_fp8_match_f64_reference() {
    for rows in [1, 2] {
        for (packets, outputs, sm_count) in [(1, 4, 1), (17, 18, 1), (75, 18, 40)] {
            let layer = Layer::new::<bf16>(rows, packets * E4m3::PACKET, outputs, 21, false).in_fp8(2f32.powi(-8));
            let activated = layer.clone().with_activation(Activation::SwiGlu);
            for layer in [norms::<bf16>(&layer), norms::<bf16>(&activated)].concat() {
                layer.check::<bf16>(sm_count);
            }
        }
    }
}

fn unsupported_matmuls_in_fp8_have_no_kernel() {
    fn has_kernel<T: TensorCore>(rows: usize, channels: usize, outputs: usize) -> bool {
        let fp8 = Some(Fp8Weight { weight: null(), scale: null() });
        let (out, [inp, weight, bias, residual]) = (GlobalMut::<T>::new(std::ptr::null_mut()), [null(); 4]);
        let operands = MatvecOperands { out, inp, weight, fp8, bias, residual, norm: InputNorm::None };
        launch::matvec(operands, MatvecSize { rows, channels, outputs, activation: None, sm_count: 1 }).is_some()
    }
    assert!(has_kernel::<bf16>(16, 48, 2) && !has_kernel::<f32>(16, 48, 2));
    assert!(!has_kernel::<bf16>(17, 48, 2) && !has_kernel::<bf16>(16, 40, 2) && !has_kernel::<bf16>(16, 48, 3));
}

/// Attention of slots at `positions`.
#[derive(Clone)]
struct Attention {
    positions: Vec<usize>,
    heads: usize,
    kv_heads: usize,
    hs: usize,
    /// Positions in `keys`, `values` and the table of angles.
    capacity: usize,
    /// Positions in the cache of the kernel.
    ring: usize,
    splits: usize,
    rotation: u32,
    /// Whether there is a norm, and whether it has weights.
    norm: (bool, bool),
    qkv: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
}

const QK_EPS: f32 = 0.125;
const QK_GAIN: f32 = 1.25;

impl Attention {
    fn new<T: Tolerance>(positions: &[usize], [heads, kv_heads, hs, splits]: [usize; 4], seed: u32) -> Self {
        let capacity = positions.iter().max().unwrap() + 3;
        let values = |n: usize, seed: u32| wide(&rounded::<T>(&noise(n, seed)));
        let (b, cache) = (positions.len(), positions.len() * kv_heads * capacity * hs);
        Self {
            positions: positions.to_vec(),
            heads,
            kv_heads,
            hs,
            capacity,
            ring: capacity,
            splits,
            rotation: NO_ROTATION,
            norm: (false, false),
            qkv: values(b * (heads + 2 * kv_heads) * hs, seed).iter().map(|x| 2.0 * x).collect(),
            keys: values(cache, seed + 1),
            values: values(cache, seed + 2),
        }
    }

    fn table(&self) -> Vec<f32> {
        let angle = |t: usize, i: usize| (t as f64 * 100f64.powf(-2.0 * i as f64 / self.hs as f64)).sin_cos();
        let pairs = (0..self.capacity).flat_map(|t| (0..self.hs / 2).map(move |i| (t, i)));
        pairs.flat_map(|(t, i)| [angle(t, i).1 as f32, angle(t, i).0 as f32]).collect()
    }

    fn weights<T: Tolerance>(&self) -> [Vec<f64>; 2] {
        [41, 42].map(|seed| wide(&rounded::<T>(&noise(self.hs, seed))))
    }

    /// Returns out (B, NH, HS), and the new keys and values (B, KV, 2, HS).
    fn run<T: Tolerance + TensorCore>(&self) -> (Vec<f64>, Vec<f64>) {
        let Self { heads, kv_heads, hs, capacity, ring, splits, .. } = *self;
        let b = self.positions.len();
        let mut memory = Memory::new();
        // Positions that the cache does not hold yet are uninitialized, and those that left the ring are overwritten.
        let mut cache = |name, values: &[f64]| {
            let cache = memory.output::<T>(name, b * kv_heads * ring * hs);
            for (row, values) in values.chunks(capacity * hs).enumerate() {
                for (position, value) in values.chunks(hs).take(self.positions[row / kv_heads]).enumerate() {
                    let at = cache.skip((row * ring + position % ring) * hs);
                    memory.write(at, &rounded::<T>(value)).unwrap();
                }
            }
            cache
        };
        let (keys, values) = (cache("keys", &self.keys), cache("values", &self.values));
        let out = memory.output::<T>("out", b * heads * hs);
        let partials = memory.output::<f32>("partials", b * heads * splits * (hs + 2));
        let state: Vec<_> = self.positions.iter().map(|&position| (0, position as i32)).collect();
        let [q_weight, k_weight] = self.weights::<T>().map(|weight| rounded::<T>(&weight));
        let operands = AttentionOperands {
            out,
            partials,
            keys,
            values,
            qkv: memory.input("qkv", &rounded::<T>(&self.qkv)),
            slots: memory.input("slots", &slots(&state)),
            table: if self.rotation == NO_ROTATION { null() } else { memory.input("table", &self.table()) },
            q_weight: if self.norm.1 { memory.input("q weight", &q_weight) } else { null() },
            k_weight: if self.norm.1 { memory.input("k weight", &k_weight) } else { null() },
        };
        let [heads, kv, head_size, cap, splits] = [heads, kv_heads, hs, ring, splits].map(|size| size as u32);
        let sizes = attention::Sizes {
            heads,
            kv_heads: kv,
            head_size,
            capacity: cap,
            splits,
            rotation: self.rotation,
            qk_norm: self.norm.0.into(),
            eps: QK_EPS,
            gain: QK_GAIN,
        };
        for kernel in launch::attention(operands, sizes, b).unwrap() {
            run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        }
        let mut new = Vec::new();
        for row in 0..b * kv_heads {
            let (position, before) = (self.positions[row / kv_heads], row * ring * hs);
            let at = before + position % ring * hs;
            for (cache, values) in [(keys, &self.keys), (values, &self.values)] {
                new.extend(wide(memory.slice(cache.reader().skip(at), hs).unwrap()));
                // Nothing else was written.
                if position + 1 < ring {
                    assert!(memory.slice(cache.reader().skip(at + hs), 1).is_err());
                }
                for other in (position + 1).saturating_sub(ring)..position {
                    let found = wide(memory.slice(cache.reader().skip(before + other % ring * hs), hs).unwrap());
                    assert_same("other positions", &found, &values[(row * capacity + other) * hs..][..hs]);
                }
            }
        }
        (read(&memory, out), new)
    }

    /// Normalizes and rotates a head.
    fn prepared<T: Tolerance>(&self, head: &[f64], weight: &[f64], position: usize) -> Vec<f64> {
        let mut x = head.to_vec();
        if self.norm.0 {
            let square = x.iter().map(|x| x * x).sum::<f64>() / self.hs as f64;
            let scale = (square + f64::from(QK_EPS)).sqrt().recip() * f64::from(QK_GAIN);
            x.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * if self.norm.1 { *w } else { 1.0 });
        }
        let table = self.table();
        for i in 0..self.hs / 2 {
            let (a, b) = match self.rotation {
                NO_ROTATION => break,
                HALF_SPLIT => (i, i + self.hs / 2),
                _ => (2 * i, 2 * i + 1),
            };
            let angle = &table[position * self.hs + 2 * i..];
            let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
            (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
        x.iter().map(|&x| f64::from(T::nearest(x as f32))).collect()
    }

    fn reference<T: Tolerance>(&self) -> (Vec<f64>, Vec<f64>) {
        let Self { heads, kv_heads, hs, capacity, ring, .. } = *self;
        let [q_weight, k_weight] = self.weights::<T>();
        let (mut out, mut new) = (Vec::new(), Vec::new());
        for (b, &position) in self.positions.iter().enumerate() {
            let head = |h: usize| &self.qkv[(b * (heads + 2 * kv_heads) + h) * hs..][..hs];
            let key = |kv: usize| self.prepared::<T>(head(heads + kv), &k_weight, position);
            for kv in 0..kv_heads {
                new.extend(key(kv));
                new.extend_from_slice(head(heads + kv_heads + kv));
            }
            for h in 0..heads {
                let kv = h / (heads / kv_heads);
                let query = self.prepared::<T>(head(h), &q_weight, position);
                let held = (b * kv_heads + kv) * capacity * hs;
                let visible =
                    |cache| <[f64]>::chunks(cache, hs).take(position).skip((position + 1).saturating_sub(ring));
                let keys = visible(&self.keys[held..]).map(<[f64]>::to_vec).chain([key(kv)]);
                let values = visible(&self.values[held..]).chain([head(heads + kv_heads + kv)]);
                let dot = |key: Vec<f64>| key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>() / (hs as f64).sqrt();
                let scores: Vec<f64> = keys.map(dot).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let mut sums = vec![0.0; hs];
                for (weight, value) in weights.iter().zip(values) {
                    sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
                }
                out.extend(sums.iter().map(|sum| sum / weights.iter().sum::<f64>()));
            }
        }
        (out, new)
    }

    fn check<T: Tolerance + TensorCore>(&self) {
        let ((out, new), (want, want_new)) = (self.run::<T>(), self.reference::<T>());
        // In bf16, the weights are rounded as well.
        assert_close("out", &out, &want, 1.5 * T::ROUNDING, 1.0);
        assert_close("new keys and values", &new, &want_new, T::ROUNDING, 1.0);
    }
}

fn attention_matches_f64_reference<T: Tolerance + TensorCore>() {
    // Groups of every instance, also such that do not fill it, and lengths around the positions that a block takes at a time.
    for (heads, kv_heads) in [(1, 1), (3, 3), (4, 2), (3, 1), (8, 2), (7, 1), (10, 1)] {
        for hs in [64, 80] {
            Attention::new::<T>(&[0, 70, 16], [heads, kv_heads, hs, 1], 1).check::<T>();
            Attention::new::<T>(&[0, 130], [heads, kv_heads, hs, 3], 2).check::<T>();
        }
    }
    for hs in [16, 96, 112, 128] {
        for len in [15, 16, 31, 32, 33, 63, 64, 65, 128] {
            Attention::new::<T>(&[len], [2, 1, hs, 1], 3).check::<T>();
        }
        Attention::new::<T>(&[300, 1], [2, 2, hs, 4], 4).check::<T>();
    }
}

/// A ring of one position, rings that are not full, just full, and of any fill, with one and several splits.
fn attention_in_a_ring_matches_f64_reference<T: Tolerance + TensorCore>() {
    for (ring, splits) in [(1, 1), (1, 2), (16, 1), (33, 1), (70, 3), (100, 2)] {
        for positions in [[0, ring - 1], [ring, ring + 1], [2 * ring - 1, 2 * ring], [150, 3 * ring + 7]] {
            let case = Attention::new::<T>(&positions, [4, 2, 64, splits], 5);
            Attention { ring, rotation: HALF_SPLIT, ..case }.check::<T>();
        }
    }
}

fn attention_of_random_shapes_matches_f64_reference<T: Tolerance + TensorCore>() {
    let shape = (1..4usize, 1..4usize, 1..6usize, select(vec![16, 64, 80, 128]), 1..6usize);
    let kind = (select(vec![NO_ROTATION, HALF_SPLIT, INTERLEAVED]), ANY, ANY, 0..200usize, 0..99u32);
    for_all(32, (shape, kind), |((b, kv, group, hs, splits), (rotation, norm, weights, longest, seed))| {
        let positions: Vec<_> = (0..b).map(|i| longest * (i + 1) / b).collect();
        let case = Attention::new::<T>(&positions, [kv * group, kv, hs, splits], seed);
        Attention { rotation, norm: (norm, weights), ..case }.check::<T>();
    });
}

/// A NaN in a key makes the heads that read it NaN. An infinite value makes its channel infinite, or NaN if a weight is 0.
fn nan_and_infinity_stay_in_their_head<T: Tolerance + TensorCore>() {
    for (splits, hs) in [(1, 64), (3, 48)] {
        let clean = Attention::new::<T>(&[100], [4, 2, hs, splits], 7);
        let (want, _) = clean.run::<T>();
        let mut case = clean.clone();
        case.qkv[hs] = f64::NAN;
        let (got, _) = case.run::<T>();
        assert_same(
            "heads of other queries",
            &[&got[..hs], &got[2 * hs..]].concat(),
            &[&want[..hs], &want[2 * hs..]].concat(),
        );
        assert!(got[hs..2 * hs].iter().all(|x| x.is_nan()), "heads of {hs} channels");
        for position in [0, 40, 99] {
            let mut case = clean.clone();
            case.keys[(case.capacity + position) * hs] = f64::NAN;
            let (got, _) = case.run::<T>();
            assert_same("heads of the other key", &got[..2 * hs], &want[..2 * hs]);
            assert!(got[2 * hs..].iter().all(|x| x.is_nan()), "{splits} splits, position {position}");
            let mut case = clean.clone();
            case.values[position * hs + 5] = f64::INFINITY;
            let (mut got, _) = case.run::<T>();
            for i in [5, hs + 5] {
                assert!(!got[i].is_finite(), "{splits} splits, position {position}: {}", got[i]);
                got[i] = want[i];
            }
            assert_same("an infinite value", &got, &want);
        }
    }
}

fn filled_caches_hold_keys_and_values<T: Tolerance>() {
    let shape = (1..40usize, 1..5usize, 1..4usize, select(vec![16, 64, 80]), 1..50usize, 0..99usize, 0..9u32);
    for_all(24, shape, |(t, kv, group, hs, capacity, first_position, seed)| {
        let heads = kv * group;
        let qkv = rounded::<T>(&noise(t * (heads + 2 * kv) * hs, seed));
        let mut memory = Memory::new();
        let (keys, values) =
            (memory.output::<T>("keys", kv * capacity * hs), memory.output::<T>("values", kv * capacity * hs));
        let inp = memory.input("qkv", &qkv);
        let sizes = cache_sizes(t, first_position, [heads, kv, hs], capacity);
        run(&mut memory, &attention::cache_fill::<T>(keys, values, inp, sizes), sizes.fill_grid::<T>(), 0);
        let rows: Vec<_> = qkv.chunks((heads + 2 * kv) * hs).collect();
        for (first, cache) in [(heads, keys), (heads + kv, values)] {
            for (head, place) in (0..kv).flat_map(|head| (0..capacity).map(move |place| (head, place))) {
                let got = memory.slice(cache.reader().skip((head * capacity + place) * hs), hs);
                match (0..t).rev().find(|token| (first_position + token) % capacity == place) {
                    Some(token) => {
                        let want = &rows[token][(first + head) * hs..][..hs];
                        assert_same("cache", &wide(got.unwrap()), &wide(want));
                    }
                    None => assert!(got.is_err()),
                }
            }
        }
    });
}

fn cache_sizes(t: usize, first: usize, [heads, kv_heads, hs]: [usize; 3], capacity: usize) -> attention::CacheSizes {
    let [tokens, first, heads, kv_heads, head_size, capacity] =
        [t, first, heads, kv_heads, hs, capacity].map(|size| size as u32);
    attention::CacheSizes { tokens, first, heads, kv_heads, head_size, capacity }
}

fn read_caches_give_back_keys_and_values<T: Tolerance>() {
    let shape = (1..40usize, 1..5usize, 1..4usize, select(vec![16, 64, 80]), 1..50usize, 0..9u32);
    for_all(24, shape, |(t, kv, group, hs, capacity, seed)| {
        let heads = kv * group;
        let caches = [seed, seed + 1].map(|seed| rounded::<T>(&noise(kv * capacity * hs, seed)));
        let mut memory = Memory::new();
        let [keys, values] = [("keys", 0), ("values", 1)].map(|(name, i)| memory.input(name, &caches[i]));
        let qkv = memory.output::<T>("qkv", t * (heads + 2 * kv) * hs);
        let sizes = cache_sizes(t, 0, [heads, kv, hs], capacity);
        run(&mut memory, &attention::cache_read::<T>(qkv, keys, values, sizes), sizes.read_grid::<T>(), 0);
        let want = (0..t).flat_map(|token| (0..heads + 2 * kv).map(move |head| (token, head)));
        let want = want.flat_map(|(token, head)| match head.checked_sub(heads) {
            Some(head) if t - token <= capacity => {
                wide(&caches[head / kv][(head % kv * capacity + token % capacity) * hs..][..hs])
            }
            _ => vec![0.0; hs],
        });
        assert_same("qkv", &read(&memory, qkv), &want.collect::<Vec<_>>());
    });
}

/// The attention of an idle slot is 0, its token is 0, and neither its cache nor its state changes. Other slots do not notice it.
fn idle_slots_do_not_change<T: Tolerance + TensorCore>() {
    let (heads, kv, hs, capacity, vp) = (6, 2, 64, 40, 128);
    for (splits, positions) in [(1, [-1, 5]), (3, [39, -1]), (2, [-1, -1])] {
        let mut memory = Memory::new();
        let cache = rounded::<T>(&noise(2 * kv * capacity * hs, 3));
        let (keys, values) = (memory.buffer("keys", &cache), memory.buffer("values", &cache));
        let out = memory.output::<T>("out", 2 * heads * hs);
        let state = slots(&positions.map(|position| (7, position)));
        let words = memory.buffer("slots", &state);
        let operands = AttentionOperands {
            out,
            partials: memory.output::<f32>("partials", 2 * heads * splits * (hs + 2)),
            keys,
            values,
            qkv: memory.input("qkv", &rounded::<T>(&noise(2 * (heads + 2 * kv) * hs, 4))),
            slots: words.reader(),
            table: null(),
            q_weight: null(),
            k_weight: null(),
        };
        let sizes = attention::Sizes {
            heads: heads as u32,
            kv_heads: kv as u32,
            head_size: hs as u32,
            capacity: capacity as u32,
            splits: splits as u32,
            rotation: NO_ROTATION,
            qk_norm: 0,
            eps: QK_EPS,
            gain: QK_GAIN,
        };
        for kernel in launch::attention(operands, sizes, 2).unwrap() {
            run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        }
        let (seen, sampled) = (memory.buffer("seen", &vec![0; 2 * vp]), memory.output::<f32>("sampled", 2));
        let scores = memory.output::<f32>("scores", 2 * vp);
        let (results, arrived) =
            (memory.output::<u64>("results", 2 * 2 * sample::groups(vp)), memory.buffer("arrived", &[0, 0]));
        let logits = memory.input("logits", &rounded::<T>(&noise(2 * vp, 5)));
        let sizes = sample::Sizes { vocab: 100, padded_vocab: vp as u32, capacity: capacity as u32, softcap: 0.0 };
        let launch = sample::sample_tokens::<T>(sampled, words, seen, scores, results, arrived, logits, sizes);
        run(&mut memory, &launch, [2, 2, 1], shared_bytes(sample::shared));
        let (out, tokens, new_state) = (read(&memory, out), memory.read(sampled), memory.read(words));
        for (slot, position) in positions.into_iter().enumerate() {
            let idle = position < 0;
            let own = |values: &[f64]| {
                let n = values.len() / 2;
                values[slot * n..][..n].to_vec()
            };
            assert_eq!(own(&out).iter().all(|x| *x == 0.0), idle, "attention of slot {slot}");
            assert_eq!(own(&read(&memory, keys)) == own(&wide(&cache)), idle, "keys of slot {slot}");
            assert_eq!(own(&read(&memory, values)) == own(&wide(&cache)), idle, "values of slot {slot}");
            let words = slot * WORDS..(slot + 1) * WORDS;
            assert_eq!(new_state[words.clone()] == state[words], idle, "state of slot {slot}");
            let marked = memory.read(seen)[slot * vp..][..vp].iter().sum::<i32>();
            assert_eq!(marked, i32::from(!idle), "seen tokens of slot {slot}");
            assert!(!idle || tokens[slot] == 0.0, "token of slot {slot}");
        }
    }
}
