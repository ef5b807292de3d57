//! Compares each operation with a plain double-precision implementation of its definition, at shapes that are not multiples of a tile.

mod experts;
mod norms;

use super::*;
use crate::MASKED_TARGET;
use crate::ops::{
    Activation, ActivationForward, ActivationInput, AdamW, AdamWUpdate, AttentionBackward, AttentionForward,
    AttentionMask, AttentionShape, Classifier, EncoderBackward, EncoderForward, Epilogue, GlobalNorm, Master,
    MatmulBackward, MatmulForward, MatmulShape, MostLikely, NormBackward, NormForward, Sum, UpdateRange,
};
use proptest::prelude::*;
use rng::Mt19937;

/// An engine that fills its tensors with normally distributed values by default.
struct Bench {
    engine: Cpu,
    plan: Plan,
    values: Vec<(Tensor, Vec<f32>)>,
    rng: Mt19937,
}

impl Bench {
    fn new() -> Self {
        Self { engine: Cpu::new(), plan: Plan::new(), values: Vec::new(), rng: Mt19937::new(11) }
    }

    fn with(&mut self, values: Vec<f32>) -> Tensor {
        let tensor = self.plan.add(Group::Activations, "", &[values.len()], DType::F32);
        self.values.push((tensor, values));
        tensor
    }

    fn normal(&mut self, n: usize) -> Tensor {
        let mut values = vec![0.0; n];
        self.rng.normal(&mut values, 1.0);
        self.with(values)
    }

    fn ints(&mut self, n: usize) -> Tensor {
        self.plan.add(Group::Batch, "", &[n], DType::I32)
    }

    fn dyn_engine(&mut self) -> &mut dyn Engine {
        &mut self.engine
    }

    fn ready(&mut self) {
        self.engine.allocate(&self.plan).unwrap();
        for (tensor, values) in &self.values {
            self.engine.write(*tensor, values).unwrap();
        }
    }

    /// Returns the values of a tensor before any operation.
    fn before(&self, tensor: Tensor) -> Vec<f64> {
        let (_, values) = self.values.iter().find(|(t, _)| *t == tensor).unwrap();
        values.iter().map(|&x| f64::from(x)).collect()
    }

    fn after(&mut self, tensor: Tensor) -> Vec<f64> {
        self.engine.read(tensor).unwrap().into_iter().map(f64::from).collect()
    }

    #[track_caller]
    fn assert(&mut self, name: &str, tensor: Tensor, expected: &[f64]) {
        self.assert_of(1e-3, name, tensor, expected);
    }

    /// Compares with a tolerance relative to the largest expected value, or to `least`.
    #[track_caller]
    fn assert_of(&mut self, least: f64, name: &str, tensor: Tensor, expected: &[f64]) {
        let found = self.after(tensor);
        assert_eq!(found.len(), expected.len(), "{name}");
        let scale = expected.iter().fold(least, |max: f64, x| max.max(x.abs()));
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() <= 2e-6 * scale, "{name}[{i}]: {found}, expected {expected} (of {scale})");
        }
    }
}

/// Returns a (m, k) · b (k, n) by the definition.
fn matmul_reference(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let element = |i, j| (0..k).map(|l| a(i, l) * b(l, j)).sum();
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Returns the activation of `x`: rows of `columns` outputs.
fn activate(activation: Activation, x: &[f64], columns: usize) -> Vec<f64> {
    match activation {
        Activation::Gelu => x.iter().map(|&x| gelu(x)).collect(),
        Activation::ReluSquared => x.iter().map(|x| x.max(0.0).powi(2)).collect(),
        Activation::SwiGlu | Activation::GeGlu => {
            let gate = if activation == Activation::SwiGlu { silu } else { gelu };
            let row = |x: &[f64]| (0..columns).map(|i| x[i] * gate(x[columns + i])).collect::<Vec<_>>();
            x.chunks(2 * columns).flat_map(row).collect()
        }
    }
}

/// Returns the gradient of Σ dout · activation(x), by central differences.
fn activation_gradient(activation: Activation, x: &[f64], dout: &[f64], columns: usize) -> Vec<f64> {
    let inputs = activation.inputs();
    let slope = |i: usize| {
        let (row, h) = (i / (inputs * columns), 1e-5);
        let at = |shift: f64| {
            let mut x = x[row * inputs * columns..][..inputs * columns].to_vec();
            x[i % (inputs * columns)] += shift;
            let out = activate(activation, &x, columns);
            out.iter().zip(&dout[row * columns..]).map(|(y, d)| y * d).sum::<f64>()
        };
        (at(h) - at(-h)) / (2.0 * h)
    };
    (0..x.len()).map(slope).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn matmul(
        rows in 1usize..70,
        c in 1usize..50,
        half_oc in 1usize..70,
        bias: bool,
        epilogue in 0..2 + Activation::ALL.len(),
        recompute: bool,
    ) {
        let mut bench = Bench::new();
        let oc = 2 * half_oc;
        let activation = epilogue.checked_sub(2).map(|i| Activation::ALL[i]);
        let inputs = activation.map_or(1, Activation::inputs);
        let (inp, weight) = (bench.normal(rows * c), bench.normal(oc * c));
        let (dinp, dweight) = (bench.normal(rows * c * inputs), bench.normal(oc * c));
        let (out, dout) = (bench.normal(rows * oc / inputs), bench.normal(rows * oc));
        let bias = bias.then(|| bench.normal(oc));
        let dbias = bias.map(|_| bench.normal(oc));
        let beside = bench.normal(rows * oc);
        let unfused = [Epilogue::None, Epilogue::Residual(beside)][epilogue % 2];
        let epilogue = activation.map_or(unfused, |activation| Epilogue::Activation(activation, beside));
        let preactivation = activation.map(|_| bench.normal(rows * c * inputs));
        bench.ready();
        let shape = MatmulShape { rows, c, oc };
        bench.dyn_engine().run(MatmulForward { bias, epilogue, ..MatmulForward::new([out, inp, weight], shape) }).unwrap();
        let (x, w) = (bench.before(inp), bench.before(weight));
        let b = bias.map(|bias| bench.before(bias));
        let mut expected = matmul_reference(rows, oc, c, |i, l| x[i * c + l], |l, j| w[j * c + l]);
        for (i, value) in expected.iter_mut().enumerate() {
            *value += b.as_ref().map_or(0.0, |b| b[i % oc]);
        }
        match epilogue {
            Epilogue::None => {}
            Epilogue::Residual(residual) => {
                expected.iter_mut().zip(bench.before(residual)).for_each(|(value, residual)| *value += residual);
            }
            Epilogue::Activation(activation, preactivation) => {
                bench.assert("preactivation", preactivation, &expected);
                expected = activate(activation, &expected, oc / inputs);
            }
        }
        bench.assert("out", out, &expected);

        // If the activation before the layer is recomputed, inp is overwritten by its output.
        let shape_before = MatmulShape { rows, c: oc, oc: inputs * c };
        let forward = ActivationForward { inp: dout, weight: dweight, bias: None, shape: shape_before };
        let input = activation.zip(preactivation).map(|(activation, preactivation)| ActivationInput {
            activation,
            preactivation,
            recompute: recompute.then_some(forward),
        });
        let backward = MatmulBackward { dbias, activation: input, ..MatmulBackward::new(dinp, Some(dweight), [dout, inp, weight], shape) };
        bench.dyn_engine().run(backward).unwrap();
        let d = bench.before(dout);
        let x = match activation.zip(preactivation) {
            Some((activation, pre)) if recompute => activate(activation, &bench.before(pre), c),
            _ => x,
        };
        if !activation.is_some_and(Activation::is_gated) {
            bench.assert("inp", inp, &x);
        }
        let mut expected = matmul_reference(rows, c, oc, |i, l| d[i * oc + l], |l, j| w[l * c + j]);
        if let Some((activation, pre)) = activation.zip(preactivation) {
            expected = activation_gradient(activation, &bench.before(pre), &expected, c);
        }
        bench.assert("dinp", dinp, &expected);
        let mut expected = matmul_reference(oc, c, rows, |i, l| d[l * oc + i], |l, j| x[l * c + j]);
        for (value, before) in expected.iter_mut().zip(bench.before(dweight)) {
            *value += before;
        }
        bench.assert("dweight", dweight, &expected);
        if let Some(dbias) = dbias {
            let mut expected = bench.before(dbias);
            for (i, d) in d.iter().enumerate() {
                expected[i % oc] += d;
            }
            bench.assert("dbias", dbias, &expected);
        }
    }

    #[test]
    fn layernorm(rows in 1usize..40, c in 2usize..90, summed: bool) {
        let mut bench = Bench::new();
        let inp = bench.normal(rows * c);
        let (weight, bias) = (bench.normal(c), bench.normal(c));
        let (mean, rstd, out) = (bench.normal(rows), bench.normal(rows), bench.normal(rows * c));
        let (dinp, dout) = (bench.normal(rows * c), bench.normal(rows * c));
        let (dweight, dbias, column_sums) = (bench.normal(c), bench.normal(c), bench.normal(c));
        bench.ready();
        let [given_mean, given_weight] = [mean, weight].map(Some);
        let forward = NormForward { out, mean: given_mean, rstd, inp, weight: given_weight, bias: Some(bias), c, eps: 0.0, quantized: None };
        bench.dyn_engine().run(forward).unwrap();
        let x = bench.before(inp);
        let (w, beta) = (bench.before(weight), bench.before(bias));
        let means: Vec<f64> = x.chunks(c).map(|row| row.iter().sum::<f64>() / c as f64).collect();
        let variance = |row: &[f64], mean: f64| row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64;
        let rstds: Vec<f64> =
            x.chunks(c).zip(&means).map(|(row, mean)| 1.0 / (variance(row, *mean) + 1e-5).sqrt()).collect();
        let normed: Vec<f64> = x.iter().enumerate().map(|(i, x)| (x - means[i / c]) * rstds[i / c]).collect();
        let expected: Vec<f64> = normed.iter().enumerate().map(|(i, n)| n * w[i % c] + beta[i % c]).collect();
        // Two columns of nearly equal values have a reciprocal deviation that amplifies the rounding of the sum.
        prop_assume!(rstds.iter().all(|rstd| *rstd < 4.0));
        // A sum near 0 of values of size 1 has their rounding error.
        bench.assert_of(0.1, "mean", mean, &means);
        bench.assert("rstd", rstd, &rstds);
        bench.assert("out", out, &expected);

        let summed = summed.then_some(column_sums);
        let gradients = [dweight, dbias].map(Some);
        let backward = NormBackward { dinp, dweight: gradients[0], dbias: gradients[1], column_sums: summed, dout, inp, weight: given_weight, mean: given_mean, rstd, c };
        bench.dyn_engine().run(backward).unwrap();
        let d = bench.before(dout);
        let (mut dw, mut db) = (bench.before(dweight), bench.before(dbias));
        let mut dx = bench.before(dinp);
        for row in 0..rows {
            let at = |j: usize| row * c + j;
            // The Jacobian, written out: d n_j / d x_i = rstd (δ_ij - 1/c - n_i n_j / c).
            for i in 0..c {
                for j in 0..c {
                    let same = if i == j { 1.0 } else { 0.0 };
                    let slope = rstds[row] * (same - (1.0 + normed[at(i)] * normed[at(j)]) / c as f64);
                    dx[at(i)] += d[at(j)] * w[j] * slope;
                }
                dw[i] += d[at(i)] * normed[at(i)];
                db[i] += d[at(i)];
            }
        }
        bench.assert("dinp", dinp, &dx);
        bench.assert("dweight", dweight, &dw);
        bench.assert("dbias", dbias, &db);
        let mut sums = bench.before(column_sums);
        if summed.is_some() {
            for (i, dx) in dx.iter().enumerate() {
                sums[i % c] += dx;
            }
        }
        bench.assert("column sums", column_sums, &sums);
    }

    #[test]
    fn attention(
        b in 1usize..3,
        t in 1usize..150,
        kv_heads in 1usize..4,
        group in 1usize..4,
        head_size in 1usize..20,
        // Mean length of documents, and window; none if 0.
        documents in 0i32..60,
        window in 0usize..80,
    ) {
        let heads = group * kv_heads;
        let (c, packed) = (heads * head_size, (heads + 2 * kv_heads) * head_size);
        let mut bench = Bench::new();
        let qkv = bench.normal(b * t * packed);
        let (out, dout, lse) = (bench.normal(b * t * c), bench.normal(b * t * c), bench.normal(b * heads * t));
        let dqkv = bench.normal(b * t * packed);
        let shape = AttentionShape { b, t, heads, kv_heads, head_size };
        let layout = BatchLayout::new(b, t).with_documents();
        let batch = bench.ints(layout.words());
        let window = Some(window).filter(|&window| window > 0);
        let documents_of = layout.documents_of(batch).filter(|_| documents > 0);
        let mask = AttentionMask { documents: documents_of, window };
        let workload = Workload {
            attention: shape,
            channels: c,
            linear_layers: vec![(packed, c), (c, c), (4 * c, c), (c, 4 * c)],
            mlp_channels: 4 * c,
            router: None,
            routed_tokens: 0,
            qk_norm: None,
            padded_vocab: 128,
            parameters: 0,
            norm_tensors: 1,
            update_ranges: 0,
            training: true,
        };
        bench.engine.plan(&mut bench.plan, &workload);
        bench.ready();
        let mut words: Vec<i32> = (0..layout.words()).map(|_| bench.rng.below(documents.max(1) as u32) as i32).collect();
        layout.find_documents(&mut words, 0);
        bench.engine.write_i32(batch, &words).unwrap();
        bench.dyn_engine().run(AttentionForward { out, lse, qkv, shape, first_query: 0, mask, quantized: None }).unwrap();
        bench.dyn_engine().run(AttentionBackward { dqkv, dout, qkv, out, lse, shape, mask }).unwrap();
        let first_key = |seq: usize, row: usize| {
            let document = (0..=row).rev().find(|&key| documents > 0 && words[seq * t + key] == 0).unwrap_or(0);
            window.map_or(document, |window| document.max((row + 1).saturating_sub(window)))
        };

        let (x, d) = (bench.before(qkv), bench.before(dout));
        let (mut y, mut l, mut dx) = (vec![0.0; b * t * c], vec![0.0; b * heads * t], vec![0.0; b * t * packed]);
        let scale = 1.0 / (head_size as f64).sqrt();
        for (seq, head) in (0..b).flat_map(|seq| (0..heads).map(move |head| (seq, head))) {
            let first = [head, heads + head / group, heads + kv_heads + head / group];
            let part = |part: usize, row: usize, i: usize| (seq * t + row) * packed + first[part] * head_size + i;
            let row_at = |row: usize, i: usize| (seq * t + row) * c + head * head_size + i;
            for row in 0..t {
                let dot = |key: usize| (0..head_size).map(|i| x[part(0, row, i)] * x[part(1, key, i)]).sum::<f64>();
                let first = first_key(seq, row);
                let scores: Vec<f64> = (first..=row).map(|key| scale * dot(key)).collect();
                let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                l[(seq * heads + head) * t + row] = sum.ln();
                let weights: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
                for i in 0..head_size {
                    y[row_at(row, i)] = (first..=row).map(|key| weights[key - first] * x[part(2, key, i)]).sum();
                }
                let dweight = |key: usize| (0..head_size).map(|i| d[row_at(row, i)] * x[part(2, key, i)]).sum::<f64>();
                let dweights: Vec<f64> = (first..=row).map(dweight).collect();
                let mean: f64 = weights.iter().zip(&dweights).map(|(w, d)| w * d).sum();
                for key in first..=row {
                    let weight = weights[key - first];
                    let dscore = scale * weight * (dweights[key - first] - mean);
                    for i in 0..head_size {
                        dx[part(0, row, i)] += dscore * x[part(1, key, i)];
                        dx[part(1, key, i)] += dscore * x[part(0, row, i)];
                        dx[part(2, key, i)] += weight * d[row_at(row, i)];
                    }
                }
            }
        }
        bench.assert("out", out, &y);
        bench.assert("lse", lse, &l);
        bench.assert("dqkv", dqkv, &dx);
    }

    #[test]
    fn classifier(rows in 1usize..9, v in 1usize..300, padding in 0usize..40, large in -90f32..90.0, cap in 0f32..40.0, first_masked in 0usize..9) {
        let vp = v + padding;
        let mut bench = Bench::new();
        let (logits, losses) = (bench.normal(rows * vp), bench.normal(rows));
        let targets = bench.ints(rows);
        let softcap = (cap > 10.0).then_some(cap);
        // A common offset cancels; without the maximum taken off, exp would overflow or vanish. A cap bounds the logits instead.
        for value in &mut bench.values[0].1 {
            *value = if softcap.is_some() { *value * 10.0 } else { *value + large };
        }
        bench.ready();
        let mut wanted: Vec<i32> = (0..rows).map(|_| bench.rng.below(v as u32) as i32).collect();
        wanted.iter_mut().skip(first_masked).step_by(3).for_each(|target| *target = MASKED_TARGET);
        bench.engine.write_i32(targets, &wanted).unwrap();
        let x = bench.before(logits);
        let before = x;
        let capped = |&x: &f64| softcap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
        let slope = |x: f64| softcap.map(f64::from).map_or(1.0, |cap| 1.0 - (x / cap).tanh().powi(2));
        let x: Vec<f64> = before.iter().map(capped).collect();
        let sums: Vec<f64> = x.chunks(vp).map(|row| row[..v].iter().map(|x| x.exp()).sum()).collect();
        let mut expected = bench.before(losses);
        for (row, loss) in expected.iter_mut().enumerate() {
            if wanted[row] != MASKED_TARGET {
                *loss += sums[row].ln() - x[row * vp + wanted[row] as usize];
            }
        }
        bench.dyn_engine().run(Classifier { logits, losses, targets, v, vp, dloss: None, softcap, fp8: None }).unwrap();
        // A loss near 0 is a difference of capped logits, each with its own rounding error.
        let rounding = 0.1 * softcap.map_or(0.0, f64::from);
        bench.assert_of(rounding.max(1e-3), "losses", losses, &expected);
        bench.assert("logits, which a loss alone leaves", logits, &before);

        bench.engine.zero(losses).unwrap();
        bench.dyn_engine().run(Classifier { logits, losses, targets, v, vp, dloss: Some(0.25), softcap, fp8: None }).unwrap();
        let only: Vec<f64> = expected.iter().zip(bench.before(losses)).map(|(loss, before)| loss - before).collect();
        bench.assert_of(rounding.max(1e-3), "losses from zero", losses, &only);
        let gradient = |at: usize| {
            let (row, column) = (at / vp, at % vp);
            let chosen = if column as i32 == wanted[row] { 1.0 } else { 0.0 };
            if column < v && wanted[row] != MASKED_TARGET { slope(before[at]) * 0.25 * (x[at].exp() / sums[row] - chosen) } else { 0.0 }
        };
        let expected: Vec<f64> = (0..rows * vp).map(gradient).collect();
        // p - 1 has the rounding error of p, which is large beside gradients of a target that is almost certain.
        bench.assert_of(0.25, "dlogits", logits, &expected);
        let of_row = bench.after(logits);
        let masked = of_row.chunks(vp).zip(&wanted).filter(|(_, target)| **target == MASKED_TARGET);
        prop_assert!(masked.flat_map(|(row, _)| row).all(|gradient| *gradient == 0.0));
    }

    #[test]
    fn most_likely(rows in 1usize..9, v in 1usize..30, padding in 0usize..9, levels in 1i32..20) {
        let vp = v + padding;
        let mut bench = Bench::new();
        let (logits, hits, targets) = (bench.normal(rows * vp), bench.normal(rows), bench.ints(rows));
        // Few levels give equal logits.
        for value in &mut bench.values[0].1 {
            *value = (*value * levels as f32).round();
        }
        bench.ready();
        let x = bench.before(logits);
        let best: Vec<i32> = x.chunks(vp).map(|row| {
            (0..v).fold(0, |best, token| if row[token] > row[best] { token } else { best }) as i32
        }).collect();
        let wanted: Vec<i32> = best.iter().map(|&best| if bench.rng.below(2) == 0 { best } else { bench.rng.below(v as u32) as i32 }).collect();
        bench.engine.write_i32(targets, &wanted).unwrap();
        bench.dyn_engine().run(MostLikely { hits, logits, targets, v, vp }).unwrap();
        let expected: Vec<f64> = best.iter().zip(&wanted).map(|(best, wanted)| f64::from(u8::from(best == wanted))).collect();
        bench.assert("hits", hits, &expected);
    }

    #[test]
    fn encoder(b in 1usize..5, t in 1usize..20, c in 1usize..40, v in 1usize..30, spare in 0usize..3, learned: bool) {
        let layout = BatchLayout::new(b, t);
        let mut bench = Bench::new();
        let (wte, wpe, out) = (bench.normal(v * c), bench.normal((t + spare) * c), bench.normal(b * t * c));
        let (dwte, dwpe, dout) = (bench.normal(v * c), bench.normal((t + spare) * c), bench.normal(b * t * c));
        let batch = bench.ints(layout.words());
        bench.ready();
        let mut words = bench.engine.host_buffer(layout.words()).unwrap();
        let tokens: Vec<usize> = (0..b * t).map(|_| bench.rng.below(v as u32) as usize).collect();
        for (word, token) in words.iter_mut().zip(&tokens) {
            *word = *token as i32;
        }
        layout.sort(&mut words);
        prop_assert!(bench.engine.load_batch(batch, layout, words).unwrap().is_some());
        bench.dyn_engine().run(EncoderForward { out, batch, layout, wte, wpe: learned.then_some(wpe), c }).unwrap();
        bench.dyn_engine().run(EncoderBackward { dwte, dwpe: learned.then_some(dwpe), dout, batch, layout, c }).unwrap();
        let (te, pe, d) = (bench.before(wte), bench.before(wpe), bench.before(dout));
        let (mut y, mut dte, mut dpe) = (vec![0.0; b * t * c], bench.before(dwte), bench.before(dwpe));
        for (at, token) in tokens.iter().enumerate() {
            for i in 0..c {
                let position = f64::from(u8::from(learned));
                y[at * c + i] = te[token * c + i] + position * pe[at % t * c + i];
                dte[token * c + i] += d[at * c + i];
                dpe[at % t * c + i] += position * d[at * c + i];
            }
        }
        bench.assert("out", out, &y);
        bench.assert("dwte", dwte, &dte);
        bench.assert("dwpe", dwpe, &dpe);
    }
}

/// Large enough for every thread to get a part of each product.
#[test]
fn products_and_norms_do_not_depend_on_the_number_of_threads() {
    let (rows, c, oc) = (190, 2100, 530);
    let shape = MatmulShape { rows, c, oc };
    let bits = |threads| {
        let mut bench = Bench::new();
        let (inp, weight) = (bench.normal(rows * c), bench.normal(oc * c));
        let (dinp, dweight) = (bench.normal(rows * c), bench.normal(oc * c));
        let (out, dout) = (bench.normal(rows * oc), bench.normal(rows * oc));
        let norm = bench.with(vec![0.0]);
        bench.ready();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            bench.dyn_engine().run(MatmulForward::new([out, inp, weight], shape)).unwrap();
            bench.dyn_engine().run(MatmulBackward::new(dinp, Some(dweight), [dout, inp, weight], shape)).unwrap();
            bench.dyn_engine().run(GlobalNorm { norm, grads: dweight }).unwrap();
        });
        [out, dinp, dweight, norm].map(|tensor| bench.after(tensor))
    };
    let one = bits(1);
    for threads in [2, 3, 7] {
        assert!(bits(threads) == one, "{threads} threads give other bits than one");
    }
}

#[test]
fn sums_and_norms_match_double_precision() {
    for n in [1, 15, 16, 17, CHUNK - 1, 3 * CHUNK + 5] {
        let mut bench = Bench::new();
        let (values, out) = (bench.normal(n), bench.with(vec![9.0]));
        bench.ready();
        let x = bench.before(values);
        bench.dyn_engine().run(Sum { out, values }).unwrap();
        bench.assert("sum", out, &[x.iter().sum()]);
        bench.dyn_engine().run(GlobalNorm { norm: out, grads: values }).unwrap();
        bench.assert("norm", out, &[x.iter().map(|x| x * x).sum::<f64>().sqrt()]);
    }
}

fn adamw_settings(step: u32) -> AdamW {
    AdamW { learning_rate: 0.03, beta1: 0.9, beta2: 0.95, eps: 1e-4, weight_decay: 0.1, step, clip: 1.0, seed: 5 }
}

#[test]
fn adamw_matches_its_formula() {
    for (n, norm_value, grad_factor) in [(1, 0.5, 1.0), (CHUNK + 3, 4.0, 1.0), (9, 0.5, 1.5), (9, 0.5, 4.0)] {
        let mut bench = Bench::new();
        let (params, grads) = (bench.normal(n), bench.normal(n));
        let (m, v) = (bench.with(vec![0.0; n]), bench.with(vec![0.0; n]));
        let stats = bench.with(vec![7.0, norm_value]);
        bench.ready();
        let cut = n / 24 * 8;
        // Only one range decays, and elements in no range stay unchanged.
        let ranges = [(0..cut.saturating_sub(3), false), (cut..n, true)].map(|(elements, decayed)| UpdateRange {
            elements,
            decayed,
            seed: 0,
        });
        let (mut p, g) = (bench.before(params), bench.before(grads));
        let scale = f64::from(grad_factor) / f64::from(norm_value * grad_factor).max(1.0);
        let (mut m1, mut m2) = (vec![0.0; n], vec![0.0; n]);
        for step in 1..=3 {
            let (master, settings) = (Master::None, adamw_settings(step));
            bench
                .dyn_engine()
                .run(AdamWUpdate { params, grads, m, v, master, ranges: &ranges, stats, grad_factor, settings })
                .unwrap();
            for (i, decay) in ranges
                .iter()
                .flat_map(|range| range.elements.clone().map(|i| (i, if range.decayed { 0.1 } else { 0.0 })))
            {
                let g = scale * g[i];
                m1[i] = 0.9 * m1[i] + 0.1 * g;
                m2[i] = 0.95 * m2[i] + 0.05 * g * g;
                let (first, second) =
                    (m1[i] / (1.0 - 0.9f64.powi(step as i32)), m2[i] / (1.0 - 0.95f64.powi(step as i32)));
                p[i] -= 0.03 * (first / (second.sqrt() + 1e-4) + decay * p[i]);
            }
        }
        bench.assert("params", params, &p);
        bench.assert("m", m, &m1);
        bench.assert("v", v, &m2);
    }
}

#[test]
fn adamw_changes_nothing_unless_loss_and_norm_are_finite() {
    let (nan, infinite) = (f32::NAN, f32::INFINITY);
    let bad = [[7.0, nan], [7.0, infinite], [nan, 2.0], [infinite, 2.0], [-infinite, 2.0]];
    for (stats, grad_factor) in bad.map(|stats| (stats, 1.0)).into_iter().chain([([7.0, f32::MAX], 2.0)]) {
        let mut bench = Bench::new();
        let [params, grads, m, v] = [(); 4].map(|()| bench.normal(40));
        let stats = bench.with(stats.to_vec());
        bench.ready();
        let (master, ranges) = (Master::None, &[UpdateRange { elements: 0..40, decayed: true, seed: 0 }]);
        let settings = adamw_settings(1);
        bench
            .dyn_engine()
            .run(AdamWUpdate { params, grads, m, v, master, ranges, stats, grad_factor, settings })
            .unwrap();
        for tensor in [params, m, v] {
            assert_eq!(bench.after(tensor), bench.before(tensor));
        }
    }
}

#[test]
fn written_values_are_read_back_and_asynchronous_reads_keep_their_values() {
    let mut bench = Bench::new();
    let (a, b) = (bench.normal(70), bench.normal(70));
    bench.ready();
    bench.engine.cast(b, a).unwrap();
    assert_eq!(bench.after(b), bench.before(a));
    let (first, second) = (bench.engine.read_async(a.slice(3, 2)).unwrap(), bench.engine.read_async(b).unwrap());
    bench.engine.zero(a.slice(1, 68)).unwrap();
    assert_eq!(bench.engine.wait(second).unwrap().values, bench.values[0].1);
    assert_eq!(bench.engine.wait(first).unwrap().values, bench.values[0].1[3..5]);
    let left = bench.after(a);
    assert!(left[1..69].iter().all(|x| *x == 0.0) && left[0] != 0.0 && left[69] != 0.0);
    assert!(bench.engine.wait(PendingRead(1)).unwrap_err().to_string().contains("read 1 is not pending"));
}

#[test]
fn invalid_operands_are_errors_that_name_the_tensor() {
    let mut bench = Bench::new();
    let (a, b) = (bench.normal(64), bench.normal(64));
    bench.ready();
    let mut message = |op: &dyn Fn(&mut dyn Engine) -> Result<()>| op(&mut bench.engine).unwrap_err().to_string();
    let shape = MatmulShape { rows: 8, c: 8, oc: 8 };
    let beside = Tensor { offset: a.offset + 4 * 20, ..a };
    let overlap = message(&|engine| engine.run(MatmulForward::new([a, beside, b], shape)));
    assert!(overlap.contains("overlap"), "{overlap}");
    let short = message(&|engine| engine.run(MatmulForward::new([a, b.slice(0, 63), b], shape)));
    assert!(short.contains("tensor inp: expected 64 elements, found 63"), "{short}");
    let bf16 = message(&|engine| engine.zero(Tensor { dtype: DType::Bf16, ..a }));
    assert!(bf16.contains("bf16"), "{bf16}");
    let outside = message(&|engine| engine.zero(Tensor { offset: 1 << 20, ..a }));
    assert!(outside.contains("does not lie in the CPU engine's arena"), "{outside}");
    let unplanned = message(&|engine| {
        engine.run(AttentionForward {
            out: a,
            lse: b,
            qkv: b,
            shape: AttentionShape { b: 1, t: 64, heads: 1, kv_heads: 1, head_size: 1 },
            first_query: 0,
            mask: AttentionMask::default(),
            quantized: None,
        })
    });
    assert!(unplanned.contains("expected 64 elements of scratch memory, found 0"), "{unplanned}");
    for (ranges, expected) in [
        (vec![0..8, 16..65], "range 16..65 after 8, of 64 parameters"),
        (vec![0..17, 16..64], "range 16..64 after 17, of 64 parameters"),
        (vec![0..8, 12..64], "range 12..64 does not begin at a multiple of 8"),
    ] {
        let range = |elements| UpdateRange { elements, decayed: true, seed: 0 };
        let ranges: Vec<_> = ranges.into_iter().map(range).collect();
        let (master, settings) = (Master::None, adamw_settings(1));
        let update = AdamWUpdate {
            params: a,
            grads: b,
            m: a,
            v: b,
            master,
            ranges: &ranges,
            stats: a,
            grad_factor: 1.0,
            settings,
        };
        let text = message(&|engine| engine.run(update));
        assert!(text.contains(expected), "{text}");
    }
    let values = message(&|engine| engine.write(a, &[0.0; 3]));
    assert!(values.contains("expected 64 values, found 3"), "{values}");
}

#[test]
fn an_unsorted_batch_is_refused() {
    let layout = BatchLayout::new(2, 3);
    let mut bench = Bench::new();
    let [dwte, dwpe, dout] = [20, 6, 12].map(|n| bench.normal(n));
    let batch = bench.ints(layout.words());
    bench.ready();
    let backward = |bench: &mut Bench, words: &[i32]| {
        let mut buffer = bench.engine.host_buffer(layout.words()).unwrap();
        buffer.copy_from_slice(words);
        bench.engine.load_batch(batch, layout, buffer).unwrap();
        bench.dyn_engine().run(EncoderBackward { dwte, dwpe: Some(dwpe), dout, batch, layout, c: 2 })
    };
    let mut words = vec![0; layout.words()];
    words[layout.inputs()].copy_from_slice(&[4, 1, 4, 0, 9, 1]);
    assert!(backward(&mut bench, &words).is_err());
    layout.sort(&mut words);
    backward(&mut bench, &words).unwrap();
    // Replaces each word in turn, as memory corruption could.
    for at in layout.order().start..layout.words() {
        for wrong in (-1..7).chain([i32::MAX, i32::MIN]) {
            let mut changed = words.clone();
            changed[at] = wrong;
            let harmless = changed == words || layout.seed().contains(&at);
            assert_eq!(backward(&mut bench, &changed).is_ok(), harmless, "word {at} became {wrong}");
        }
    }
    // The order matches the tokens but does not ascend.
    for at in 1..layout.order().len() {
        let mut changed = words.clone();
        for part in [layout.order(), layout.sorted()] {
            changed[part].swap(0, at);
        }
        assert!(backward(&mut bench, &changed).is_err(), "places 0 and {at} swapped");
    }
}
