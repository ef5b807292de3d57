//! Value embeddings and their gates, against f64 references.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, read, rounded, run, shared_bytes, wide};
use cuda_std::Global;
use cuda_std::emulate::Memory;
use gpu::value_embedding::{self, Sizes};
use gpu::{bias, column_sum, gate};

tests! {
    kernels of "value_embedding.rs", "gate.rs";
    for both types: value_embeddings_match_f64_reference, random_value_embeddings_match_f64_reference,
        queries_and_keys_keep_their_bits, gradients_are_deterministic;
    once: partial_sums_have_a_bound;
}

const LARGEST: f32 = 3.0;
const VOCAB: usize = 5;

/// The shape of a value embedding.
#[derive(Clone, Copy, Debug)]
struct ValueCase {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    channels: usize,
    gate_channels: usize,
    token_stride: usize,
    has_norm_weight: bool,
    sm_count: usize,
}

/// The operands of both passes.
struct Operands<T> {
    qkv: Vec<T>,
    dqkv: Vec<T>,
    table: Vec<T>,
    tokens: Vec<i32>,
    inp: Vec<T>,
    rstd: Vec<f32>,
    norm_weight: Vec<T>,
    weight: Vec<T>,
    dinp: Vec<T>,
    dweight: Vec<T>,
}

/// The gradients of a backward pass.
struct Gradients {
    drows: Vec<f64>,
    dgates: Vec<f64>,
    dweight: Vec<f64>,
    dinp: Vec<f64>,
}

impl ValueCase {
    fn sizes(self) -> Sizes {
        let Self { rows, heads, kv_heads, head_size, channels, gate_channels, token_stride, .. } = self;
        let [rows, heads, kv_heads, head_size, channels, gate_channels, token_stride] =
            [rows, heads, kv_heads, head_size, channels, gate_channels, token_stride].map(|size| size as u32);
        Sizes { rows, heads, kv_heads, head_size, channels, gate_channels, token_stride, largest: LARGEST }
    }

    /// Returns the elements of a row of qkv.
    fn packed(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Returns the elements of the values of a row.
    fn width(self) -> usize {
        self.kv_heads * self.head_size
    }

    fn operands<T: Tolerance>(self, seed: u32) -> Operands<T> {
        let values = |len: usize, i: u32| rounded::<T>(&noise(len, 20 * seed + i));
        // Words between the tokens are not tokens.
        let mut tokens = vec![i32::MAX; (self.rows - 1) * self.token_stride + 1];
        for (row, token) in tokens.iter_mut().step_by(self.token_stride).enumerate() {
            *token = (gpu::noise::squirrel5(row as u32, seed) % VOCAB as u32) as i32;
        }
        let around_1 = |len: usize, i: u32| noise(len, 20 * seed + i).iter().map(|x| 1.0 + 0.5 * x).collect::<Vec<_>>();
        Operands {
            qkv: values(self.rows * self.packed(), 0),
            dqkv: values(self.rows * self.packed(), 1),
            table: values(VOCAB * self.width(), 2),
            tokens,
            inp: values(self.rows * self.channels, 3),
            rstd: rounded(&around_1(self.rows, 4)),
            norm_weight: rounded(&around_1(self.channels, 5)),
            weight: values(self.kv_heads * self.gate_channels, 6),
            dinp: values(self.rows * self.channels, 7),
            dweight: values(self.kv_heads * self.gate_channels, 8),
        }
    }

    fn norm_weight<T: Tolerance>(self, memory: &mut Memory, operands: &Operands<T>) -> Global<T> {
        if self.has_norm_weight { memory.input("norm_weight", &operands.norm_weight) } else { Global::null() }
    }

    /// Returns qkv.
    fn forward<T: Tolerance>(self, operands: &Operands<T>) -> Vec<f64> {
        let mut memory = Memory::new();
        let qkv = memory.buffer("qkv", &operands.qkv);
        let (table, tokens) = (memory.input("table", &operands.table), memory.input("tokens", &operands.tokens));
        let (inp, rstd) = (memory.input("inp", &operands.inp), memory.input("rstd", &operands.rstd));
        let norm_weight = self.norm_weight(&mut memory, operands);
        let weight = memory.input("weight", &operands.weight);
        let launch = value_embedding::value_embed(qkv, table, tokens, inp, rstd, norm_weight, weight, self.sizes());
        run(&mut memory, &launch, value_embedding::grid(self.rows), 0);
        read(&memory, qkv)
    }

    fn backward<T: Tolerance>(self, operands: &Operands<T>) -> Gradients {
        let mut memory = Memory::new();
        let drows = memory.output("drows", self.rows * self.width());
        let dgates = memory.output("dgates", self.rows * self.kv_heads);
        let dqkv = memory.input("dqkv", &operands.dqkv);
        let (table, tokens) = (memory.input("table", &operands.table), memory.input("tokens", &operands.tokens));
        let (inp, rstd) = (memory.input("inp", &operands.inp), memory.input("rstd", &operands.rstd));
        let norm_weight = self.norm_weight(&mut memory, operands);
        let weight = memory.input("weight", &operands.weight);
        let launch = value_embedding::value_embed_backward(
            drows,
            dgates,
            dqkv,
            table,
            tokens,
            inp,
            rstd,
            norm_weight,
            weight,
            self.sizes(),
        );
        run(&mut memory, &launch, value_embedding::grid(self.rows), 0);

        let (rows, weights) = (self.rows, operands.weight.len());
        let sizes = gate::Sizes {
            rows: rows as u32,
            heads: self.kv_heads as u32,
            channels: self.channels as u32,
            gate_channels: self.gate_channels as u32,
        };
        assert_eq!(sizes.weights(), weights);
        let chunk = gate::chunk_rows(rows, weights, self.sm_count);
        let (chunks, columns) = (rows.div_ceil(chunk) as u32, column_sum::grid(weights));
        assert_eq!(gate::partials(rows, weights, self.sm_count), chunks as usize * weights);
        let partials = memory.output("partials", chunks as usize * weights);
        let launch = gate::gate_weight_backward(partials, dgates.reader(), inp, rstd, norm_weight, sizes, chunk as u32);
        let shared = shared_bytes(column_sum::shared);
        run(&mut memory, &launch, [columns, chunks, 1], shared);
        let dweight = memory.buffer("dweight", &operands.dweight);
        let launch = bias::bias_backward_reduce(dweight, partials.reader(), chunks, weights as u32);
        run(&mut memory, &launch, columns, shared);

        let dinp = memory.buffer("dinp", &operands.dinp);
        let launch = gate::gate_input_backward(dinp, dgates.reader(), weight, sizes);
        run(&mut memory, &launch, gate::input_grid(rows, self.gate_channels), 0);
        let [drows, dweight, dinp] = [drows, dweight, dinp].map(|view| read(&memory, view));
        Gradients { drows, dgates: read(&memory, dgates), dweight, dinp }
    }

    fn check<T: Tolerance>(self, seed: u32) {
        let operands = self.operands::<T>(seed);
        let Self { rows, kv_heads, head_size: hs, channels, gate_channels, .. } = self;
        let (table, inp, weight) = (wide(&operands.table), wide(&operands.inp), wide(&operands.weight));
        let norm_weight = if self.has_norm_weight { wide(&operands.norm_weight) } else { vec![1.0; channels] };
        let x = |row: usize, channel: usize| {
            inp[row * channels + channel] * f64::from(operands.rstd[row]) * norm_weight[channel]
        };
        let sigmoid = |row: usize, head: usize| {
            let sum: f64 = (0..gate_channels).map(|j| weight[head * gate_channels + j] * x(row, j)).sum();
            1.0 / (1.0 + (-sum).exp())
        };
        let token = |row: usize| operands.tokens[row * self.token_stride] as usize;
        let largest = f64::from(LARGEST);

        let (mut qkv, dqkv) = (wide(&operands.qkv), wide(&operands.dqkv));
        let mut want = Gradients {
            drows: vec![0.0; rows * self.width()],
            dgates: vec![0.0; rows * kv_heads],
            dweight: wide(&operands.dweight),
            dinp: wide(&operands.dinp),
        };
        for (row, head) in (0..rows).flat_map(|row| (0..kv_heads).map(move |head| (row, head))) {
            let (value, s) = (row * self.packed() + (self.heads + kv_heads + head) * hs, sigmoid(row, head));
            let embedding = token(row) * self.width() + head * hs;
            let mut product = 0.0;
            for i in 0..hs {
                qkv[value + i] += largest * s * table[embedding + i];
                want.drows[row * self.width() + head * hs + i] = largest * s * dqkv[value + i];
                product += dqkv[value + i] * table[embedding + i];
            }
            let dgate = largest * s * (1.0 - s) * product;
            want.dgates[row * kv_heads + head] = dgate;
            for j in 0..gate_channels {
                want.dweight[head * gate_channels + j] += dgate * x(row, j);
                want.dinp[row * channels + j] += dgate * weight[head * gate_channels + j];
            }
        }
        assert_close(&format!("qkv {self:?}"), &self.forward(&operands), &qkv, T::ROUNDING, 1.0);
        let got = self.backward(&operands);
        assert_close(&format!("drows {self:?}"), &got.drows, &want.drows, T::ROUNDING, 1.0);
        assert_close(&format!("dgates {self:?}"), &got.dgates, &want.dgates, f32::ROUNDING, 4.0);
        assert_close(&format!("dweight {self:?}"), &got.dweight, &want.dweight, T::ROUNDING, (rows as f64).sqrt());
        assert_close(&format!("dinp {self:?}"), &got.dinp, &want.dinp, T::ROUNDING, 2.0);
    }
}

/// Fewer, as many and more heads than a warp processes at a time, and more than its lanes.
fn value_embeddings_match_f64_reference<T: Tolerance>() {
    for (i, (rows, heads, kv_heads, head_size, channels, gate_channels)) in [
        (1, 1, 1, 16, 8, 1),
        (5, 2, 2, 48, 24, 12),
        (9, 12, 12, 128, 64, 12),
        (20, 2, 1, 80, 40, 40),
        (10, 4, 4, 256, 32, 24),
        (3, 40, 40, 16, 72, 70),
        (11, 64, 64, 32, 16, 5),
        (300, 6, 3, 64, 48, 33),
        (517, 2, 1, 16, 8, 7),
    ]
    .into_iter()
    .enumerate()
    {
        for has_norm_weight in [false, true] {
            let token_stride = if has_norm_weight { 1 } else { 8 };
            let sm_count = 1 + i % 3;
            ValueCase {
                rows,
                heads,
                kv_heads,
                head_size,
                channels,
                gate_channels,
                token_stride,
                has_norm_weight,
                sm_count,
            }
            .check::<T>(i as u32);
        }
    }
}

fn random_value_embeddings_match_f64_reference<T: Tolerance>() {
    let sizes = (1..60usize, 1..3usize, 1..10usize, 1..17usize);
    let gates = (1..10usize, 1..80usize, 1..9usize, proptest::bool::ANY);
    for_all(24, (sizes, gates), |((rows, group, kv_heads, sixteens), (packets, gate_channels, stride, norm))| {
        let case = ValueCase {
            rows,
            heads: group * kv_heads,
            kv_heads,
            head_size: 16 * sixteens,
            channels: 8 * packets,
            gate_channels: gate_channels.min(8 * packets),
            token_stride: stride,
            has_norm_weight: norm,
            sm_count: 1 + rows % 3,
        };
        case.check::<T>(rows as u32);
    });
}

const SMALL: ValueCase = ValueCase {
    rows: 150,
    heads: 6,
    kv_heads: 3,
    head_size: 80,
    channels: 24,
    gate_channels: 13,
    token_stride: 1,
    has_norm_weight: true,
    sm_count: 2,
};

/// The kernel writes only values, and the gradient of a row depends on no other row.
fn queries_and_keys_keep_their_bits<T: Tolerance>() {
    let mut operands = SMALL.operands::<T>(3);
    let (packed, before) = (SMALL.packed(), (SMALL.heads + SMALL.kv_heads) * SMALL.head_size);
    for row in operands.qkv.chunks_mut(packed) {
        row[..before].fill(T::from_f32(f32::NAN));
    }
    for (row, old) in SMALL.forward(&operands).chunks(packed).zip(operands.qkv.chunks(packed)) {
        assert!(row[..before].iter().all(|x| x.is_nan()) && row[before..].iter().all(|x| x.is_finite()));
        assert!(row[before..].iter().zip(wide(&old[before..])).any(|(new, old)| (new - old).abs() > 0.1));
    }
    operands.dqkv[7 * packed + before] = T::from_f32(f32::NAN);
    let Gradients { drows, dgates, dinp, .. } = SMALL.backward(&operands);
    let bad = |values: &[f64]| values.iter().filter(|x| x.is_nan()).count();
    assert_eq!([bad(&drows), bad(&dgates), bad(&dinp)], [1, 1, SMALL.gate_channels]);
    assert!(drows[7 * SMALL.width()].is_nan() && dgates[7 * SMALL.kv_heads].is_nan());
}

fn gradients_are_deterministic<T: Tolerance>() {
    let operands = SMALL.operands::<T>(4);
    let [first, second] = [(); 2].map(|()| SMALL.backward(&operands));
    assert_same("dweight", &first.dweight, &second.dweight);
    assert_same("dgates", &first.dgates, &second.dgates);
}

fn partial_sums_have_a_bound() {
    for weights in [1, 24, 144, 1536, 18_432] {
        for (rows, sm_count) in [(1, 132), (100, 1), (32_768, 132), (1_000_000, 8)] {
            let partials = gate::partials(rows, weights, sm_count);
            assert!((1..=gate::max_partials(weights, sm_count)).contains(&partials), "{rows} {weights} {sm_count}");
        }
    }
}
