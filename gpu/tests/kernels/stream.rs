//! Scaled sums and the smear, against f64 references.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, read, rounded, run, shared_bytes, wide};
use cuda_std::emulate::Memory;
use cuda_std::{Global, GlobalMut};
use gpu::stream::{self, SmearSizes};
use gpu::{bias, column_sum, gate};

tests! {
    kernels of "stream.rs";
    for both types: mixes_match_f64_reference, gradients_of_mixes_match_f64_reference, smears_match_f64_reference,
        smears_of_random_shapes_match_f64_reference, nan_stays_in_its_document, sums_are_deterministic;
}

/// Numbers of elements: less than, exactly, and more than one or several tiles.
const LENGTHS: [usize; 6] = [8, 2048, 2056, 4096, 6200, 40_008];

/// Which operands of a mix exist.
#[derive(Clone, Copy, Debug)]
struct MixCase {
    n: usize,
    has_scale: bool,
    has_added_scale: bool,
    /// Whether added is inp.
    adds_inp: bool,
    sign: f32,
    /// Whether the gradients of scale and `added_scale` are computed.
    gradients: [bool; 2],
    sm_count: usize,
}

impl MixCase {
    fn new(n: usize, bits: usize) -> Self {
        let bit = |i: usize| bits >> i & 1 == 1;
        Self {
            n,
            has_scale: bit(0),
            has_added_scale: bit(1),
            adds_inp: bit(2),
            sign: if bit(3) { -1.0 } else { 1.0 },
            gradients: [bit(4), bit(5)],
            sm_count: 1 + bits % 3,
        }
    }

    /// Returns inp, added, scale and `added_scale`. The first three are random, and the last is 1 if it is absent.
    fn operands<T: Tolerance>(self) -> ([Vec<T>; 2], [T; 2]) {
        let [inp, added] = [1, 2].map(|seed| rounded::<T>(&noise(self.n, seed)));
        let scale = if self.has_scale { 0.7 } else { 1.0 };
        let added_scale = if self.has_added_scale { -1.3 } else { 1.0 };
        let added = if self.adds_inp { inp.clone() } else { added };
        ([inp, added], [scale, added_scale].map(T::from_f32))
    }
}

/// Returns a view of a scalar, or null if it does not exist.
fn scalar<T: Tolerance>(memory: &mut Memory, name: &'static str, value: T, exists: bool) -> Global<T> {
    if exists { memory.input(name, &[value]) } else { Global::null() }
}

/// Returns views of inp and added, which may be the same.
fn terms<T: Tolerance>(memory: &mut Memory, [inp, added]: [&[T]; 2], same: bool) -> [Global<T>; 2] {
    let inp = memory.input("inp", inp);
    [inp, if same { inp } else { memory.input("added", added) }]
}

fn mixes_match_f64_reference<T: Tolerance>() {
    for (n, bits) in LENGTHS.into_iter().flat_map(|n| (0..16).map(move |bits| (n, bits))) {
        let case = MixCase::new(n, bits);
        let ([inp, added], [scale, added_scale]) = case.operands::<T>();
        let mut memory = Memory::new();
        let out = memory.output::<T>("out", n);
        let [x, y] = terms(&mut memory, [&inp, &added], case.adds_inp);
        let of_inp = scalar(&mut memory, "scale", scale, case.has_scale);
        let of_added = scalar(&mut memory, "added_scale", added_scale, case.has_added_scale);
        let launch = stream::mix(out, x, y, of_inp, of_added, case.sign, n as u64);
        run(&mut memory, &launch, stream::mix_grid::<T>(n), 0);
        let [a, b] = wide(&[scale, added_scale])[..] else { unreachable!() };
        let b = b * f64::from(case.sign);
        let want: Vec<_> = wide(&inp).iter().zip(wide(&added)).map(|(x, y)| a * x + b * y).collect();
        assert_close(&format!("{case:?}"), &read(&memory, out), &want, T::ROUNDING, 0.1);
    }
}

/// Returns dout and dadded, and the gradients of the scales, which are those before the pass if they are not computed.
fn mix_gradients<T: Tolerance>(case: MixCase, dout: &[T], dadded: &[T], before: [T; 2]) -> [Vec<f64>; 3] {
    let (n, mut memory) = (case.n, Memory::new());
    let ([inp, added], [scale, added_scale]) = case.operands::<T>();
    let (dout, dadded) = (memory.buffer("dout", dout), memory.buffer("dadded", dadded));
    let dscales = before.map(|before| memory.buffer("dscale", &[before]));
    let scale = scalar(&mut memory, "scale", scale, case.has_scale);
    let added_scale = scalar(&mut memory, "added_scale", added_scale, case.has_added_scale);
    let (grid, sums) = (stream::mix_backward_grid::<T>(n, case.sm_count), case.gradients.contains(&true));
    if sums {
        let partials = memory.output("partials", stream::mix_backward_partials::<T>(n, case.sm_count));
        let [x, y] = terms(&mut memory, [&inp, &added], case.adds_inp);
        let launch =
            stream::mix_backward::<T, true>(dout, dadded, partials, x, y, scale, added_scale, case.sign, n as u64);
        run(&mut memory, &launch, grid, shared_bytes(stream::mix_backward_shared));
        let [of_inp, of_added] = [0, 1].map(|i| if case.gradients[i] { dscales[i] } else { GlobalMut::null() });
        let launch = stream::mix_backward_reduce(of_inp, of_added, partials.reader(), case.sign, grid);
        run(&mut memory, &launch, 1, shared_bytes(column_sum::shared));
    } else {
        let (partials, terms) = (GlobalMut::null(), Global::null());
        let launch = stream::mix_backward::<T, false>(
            dout,
            dadded,
            partials,
            terms,
            terms,
            scale,
            added_scale,
            case.sign,
            n as u64,
        );
        run(&mut memory, &launch, grid, 0);
    }
    let dscales = dscales.map(|dscale| read(&memory, dscale)[0]);
    [read(&memory, dout), read(&memory, dadded), dscales.to_vec()]
}

fn gradients_of_mixes_match_f64_reference<T: Tolerance>() {
    for (n, bits) in LENGTHS.into_iter().flat_map(|n| (0..64).map(move |bits| (n, bits))) {
        // Each combination of operands with some lengths.
        if (n / 8 + bits) % 3 != 0 {
            continue;
        }
        let case = MixCase::new(n, bits);
        let ([inp, added], scales) = case.operands::<T>();
        let [dout, dadded] = [3, 4].map(|seed| rounded::<T>(&noise(n, seed)));
        let before = [0.5, -2.0].map(T::from_f32);
        let got = mix_gradients(case, &dout, &dadded, before);
        let (d, sign) = (wide(&dout), f64::from(case.sign));
        let [scale, added_scale] = scales.map(|scale| f64::from(scale.to_f32()));
        let dot = |x: &[T]| d.iter().zip(wide(x)).map(|(d, x)| d * x).sum::<f64>();
        let mut dscales = wide(&before);
        for (i, sum) in [dot(&inp), sign * dot(&added)].into_iter().enumerate() {
            dscales[i] += if case.gradients[i] { sum } else { 0.0 };
        }
        let scaled: Vec<_> = d.iter().map(|d| scale * d).collect();
        let sums: Vec<_> = wide(&dadded).iter().zip(&d).map(|(da, d)| da + sign * added_scale * d).collect();
        assert_close(&format!("dout {case:?}"), &got[0], &scaled, T::ROUNDING, 0.01);
        assert_close(&format!("dadded {case:?}"), &got[1], &sums, T::ROUNDING, 0.1);
        assert_close(&format!("dscales {case:?}"), &got[2], &dscales, T::ROUNDING, (n as f64).sqrt() / 8.0);
    }
}

/// The shape and the operands of a smear.
#[derive(Clone, Debug)]
struct SmearCase {
    batch: usize,
    sequence: usize,
    channels: usize,
    gate_channels: usize,
    /// Lengths of the documents, repeated; empty if there are none.
    documents: Vec<usize>,
    has_before: bool,
    sm_count: usize,
}

/// The operands of a smear.
struct SmearOperands<T> {
    inp: Vec<T>,
    before: Vec<T>,
    weight: Vec<T>,
    scale: T,
    dout: Vec<T>,
}

impl SmearCase {
    fn rows(&self) -> usize {
        self.batch * self.sequence
    }

    fn sizes(&self) -> SmearSizes {
        let [rows, sequence, channels, gate_channels] =
            [self.rows(), self.sequence, self.channels, self.gate_channels].map(|size| size as u32);
        SmearSizes { rows, sequence, channels, gate_channels }
    }

    /// Returns the first position of each token's document.
    fn first_keys(&self) -> Vec<i32> {
        let (mut first_keys, mut lengths) = (Vec::new(), self.documents.iter().cycle());
        for _ in 0..self.batch {
            let mut first = 0;
            while first < self.sequence {
                let length = lengths.next().map_or(self.sequence, |&length| length.min(self.sequence - first));
                first_keys.resize(first_keys.len() + length, first as i32);
                first += length;
            }
        }
        first_keys
    }

    /// Returns whether each row has a row before it in its document.
    fn has_previous(&self) -> Vec<bool> {
        self.first_keys().iter().enumerate().map(|(row, &first)| first as usize != row % self.sequence).collect()
    }

    fn operands<T: Tolerance>(&self, seed: u32) -> SmearOperands<T> {
        let values = |len: usize, i: u32| rounded::<T>(&noise(len, 10 * seed + i));
        SmearOperands {
            inp: values(self.rows() * self.channels, 0),
            before: values(self.batch * self.channels, 1),
            weight: values(self.gate_channels, 2),
            scale: T::from_f32(0.8),
            dout: values(self.rows() * self.channels, 3),
        }
    }

    /// Returns a view of the first positions; null if there are no documents.
    fn documents(&self, memory: &mut Memory) -> Global<i32> {
        if self.documents.is_empty() { Global::null() } else { memory.input("first keys", &self.first_keys()) }
    }

    /// Returns out and the gates.
    fn forward<T: Tolerance>(&self, operands: &SmearOperands<T>) -> [Vec<f64>; 2] {
        let mut memory = Memory::new();
        let (out, gates) = (memory.output("out", operands.inp.len()), memory.output("gates", self.rows()));
        let inp = memory.input("inp", &operands.inp);
        let before = if self.has_before { memory.input("before", &operands.before) } else { Global::null() };
        let weight = memory.input("weight", &operands.weight);
        let scale = memory.input("scale", &[operands.scale]);
        let first_keys = self.documents(&mut memory);
        let launch = stream::smear::<T>(out, gates, inp, before, weight, scale, first_keys, self.sizes());
        run(&mut memory, &launch, stream::smear_grid(self.rows()), 0);
        [read(&memory, out), read(&memory, gates)]
    }

    /// Returns dinp, and the gradients of weight and scale, added to 0.25.
    fn backward<T: Tolerance>(&self, operands: &SmearOperands<T>, gates: &[f64]) -> [Vec<f64>; 3] {
        let (mut memory, rows, weights) = (Memory::new(), self.rows(), self.gate_channels);
        let dinp = memory.output("dinp", operands.inp.len());
        let (grid, chunk) =
            (stream::smear_backward_grid(rows, self.sm_count), gate::chunk_rows(rows, weights, self.sm_count));
        let (dsums, partials) = (memory.output("dsums", rows), memory.output("partials", grid as usize));
        let (dout, inp) = (memory.input("dout", &operands.dout), memory.input("inp", &operands.inp));
        let gates = memory.input("gates", &rounded::<f32>(gates));
        let weight = memory.input("weight", &operands.weight);
        let scale = memory.input("scale", &[operands.scale]);
        let first_keys = self.documents(&mut memory);
        let launch = stream::smear_backward::<T>(
            dinp,
            dsums,
            partials,
            dout,
            gates,
            inp,
            weight,
            scale,
            first_keys,
            self.sizes(),
        );
        run(&mut memory, &launch, grid, shared_bytes(stream::smear_backward_shared));
        let dscale = memory.buffer("dscale", &[T::from_f32(0.25)]);
        let shared = shared_bytes(column_sum::shared);
        run(&mut memory, &bias::bias_backward_reduce(dscale, partials.reader(), grid, 1), 1, shared);
        let dweight = memory.buffer("dweight", &vec![T::from_f32(0.25); weights]);
        let (chunks, columns) = (rows.div_ceil(chunk) as u32, column_sum::grid(weights));
        assert_eq!(gate::partials(rows, weights, self.sm_count), chunks as usize * weights);
        let partials = memory.output("weight partials", chunks as usize * weights);
        let sizes =
            gate::Sizes { rows: rows as u32, heads: 1, channels: self.channels as u32, gate_channels: weights as u32 };
        let (rstd, norm_weight) = (Global::null(), Global::null());
        let launch =
            gate::gate_weight_backward::<T>(partials, dsums.reader(), inp, rstd, norm_weight, sizes, chunk as u32);
        run(&mut memory, &launch, [columns, chunks, 1], shared);
        let launch = bias::bias_backward_reduce(dweight, partials.reader(), chunks, weights as u32);
        run(&mut memory, &launch, columns, shared);
        [read(&memory, dinp), read(&memory, dweight), read(&memory, dscale)]
    }

    fn check<T: Tolerance>(&self, seed: u32) {
        let operands = self.operands::<T>(seed);
        let (inp, dout, weight) = (wide(&operands.inp), wide(&operands.dout), wide(&operands.weight));
        let (c, scale, before) = (self.channels, f64::from(operands.scale.to_f32()), wide(&operands.before));
        let row = |values: &[f64], i: usize| values[i * c..][..c].to_vec();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gates: Vec<_> = (0..self.rows()).map(|i| sigmoid(dot(&row(&inp, i), &weight))).collect();
        let has_previous = self.has_previous();
        let mut out = inp.clone();
        for (i, out) in out.chunks_mut(c).enumerate() {
            let previous = match i % self.sequence {
                0 if self.has_before => row(&before, i / self.sequence),
                _ if has_previous[i] => row(&inp, i - 1),
                _ => continue,
            };
            out.iter_mut().zip(previous).for_each(|(out, x)| *out += scale * gates[i] * x);
        }
        let [got, found_gates] = self.forward(&operands);
        assert_close(&format!("gates {self:?}"), &found_gates, &gates, f32::ROUNDING, 1.0);
        assert_close(&format!("out {self:?}"), &got, &out, T::ROUNDING, 0.1);

        // The backward pass has no row before a sequence.
        let (mut dinp, mut dweight, mut dscale) = (dout.clone(), vec![0.25; self.gate_channels], 0.25);
        for i in (0..self.rows()).filter(|&i| has_previous[i]) {
            let (d, previous) = (row(&dout, i), row(&inp, i - 1));
            let dgate = dot(&d, &previous);
            dscale += dgate * gates[i];
            let dsum = dgate * scale * gates[i] * (1.0 - gates[i]);
            for j in 0..self.gate_channels {
                dinp[i * c + j] += dsum * weight[j];
                dweight[j] += dsum * inp[i * c + j];
            }
            for j in 0..c {
                dinp[(i - 1) * c + j] += scale * gates[i] * d[j];
            }
        }
        let got = self.backward(&operands, &gates);
        let size = (self.rows() as f64).sqrt() * (c as f64).sqrt() / 8.0;
        assert_close(&format!("dinp {self:?}"), &got[0], &dinp, T::ROUNDING, 1.0);
        assert_close(&format!("dweight {self:?}"), &got[1], &dweight, T::ROUNDING, size);
        assert_close(&format!("dscale {self:?}"), &got[2], &[dscale], T::ROUNDING, size);
    }
}

fn smears_match_f64_reference<T: Tolerance>() {
    for (batch, sequence, channels, gate_channels) in
        [(1, 1, 8, 1), (2, 5, 24, 12), (3, 37, 520, 24), (2, 9, 1032, 40), (1, 300, 64, 64)]
    {
        for (i, documents) in [vec![], vec![1], vec![3, 1, 7], vec![1000]].into_iter().enumerate() {
            for has_before in [false, true] {
                let sm_count = 1 + i % 2;
                let documents = documents.clone();
                SmearCase { batch, sequence, channels, gate_channels, documents, has_before, sm_count }
                    .check::<T>(i as u32);
            }
        }
    }
}

fn smears_of_random_shapes_match_f64_reference<T: Tolerance>() {
    let sizes = (1..4usize, 1..40usize, 1..80usize, 1..30usize);
    let options = (proptest::bool::ANY, proptest::bool::ANY, 1..9usize, 1..9usize);
    for_all(24, (sizes, options), |((batch, sequence, packets, gate_channels), (has_before, whole, a, b))| {
        let (channels, documents) = (8 * packets, if whole { vec![] } else { vec![a, b] });
        let gate_channels = gate_channels.min(channels);
        let sm_count = 1 + a % 2;
        SmearCase { batch, sequence, channels, gate_channels, documents, has_before, sm_count }.check::<T>(b as u32);
    });
}

/// A NaN in a document changes no row of another document, neither forward nor backward.
fn nan_stays_in_its_document<T: Tolerance>() {
    let documents = vec![4, 5];
    let case =
        SmearCase { batch: 2, sequence: 9, channels: 40, gate_channels: 11, documents, has_before: false, sm_count: 1 };
    let whole = SmearCase { documents: vec![], ..case.clone() };
    // The last row of a document and the first of the next; the last of a sequence.
    for (case, rows, document) in
        [(&case, [3, 3], 0..4), (&case, [4, 4], 4..9), (&whole, [8, 8], 0..9), (&whole, [9, 9], 9..18)]
    {
        let clean = case.operands::<T>(7);
        let mut bad = case.operands::<T>(7);
        for row in rows {
            bad.inp[row * 40] = T::from_f32(f32::NAN);
            bad.dout[row * 40 + 39] = T::from_f32(f32::INFINITY);
        }
        let ([want, gates], [got, _]) = (case.forward(&clean), case.forward(&bad));
        let ([want_dinp, ..], [dinp, ..]) = (case.backward(&clean, &gates), case.backward(&bad, &gates));
        let outside = |values: &[f64]| [&values[..document.start * 40], &values[document.end * 40..]].concat();
        assert_same("out", &outside(&got), &outside(&want));
        assert_same("dinp", &outside(&dinp), &outside(&want_dinp));
        assert!(got[rows[0] * 40].is_nan() && dinp[rows[0] * 40 + 39].is_infinite());
    }
}

fn sums_are_deterministic<T: Tolerance>() {
    let case = MixCase { sm_count: 2, ..MixCase::new(40_008, 0b11_0011) };
    let [dout, dadded] = [3, 4].map(|seed| rounded::<T>(&noise(case.n, seed)));
    let before = [T::from_f32(0.0); 2];
    let [first, second] = [(); 2].map(|()| mix_gradients(case, &dout, &dadded, before));
    assert_same("dscales", &first[2], &second[2]);
    let documents = vec![3, 1, 7];
    let case = SmearCase {
        batch: 2,
        sequence: 61,
        channels: 64,
        gate_channels: 24,
        documents,
        has_before: false,
        sm_count: 2,
    };
    let operands = case.operands::<T>(5);
    let gates = vec![0.5; case.rows()];
    let [first, second] = [(); 2].map(|()| case.backward(&operands, &gates));
    for (first, second) in first.iter().zip(&second) {
        assert_same("gradients", first, second);
    }
}
