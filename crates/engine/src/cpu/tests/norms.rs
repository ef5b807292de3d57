//! RMSNorm and rotary embeddings.

use super::*;
use crate::ops::{
    HeadNorm, NormBackward, NormForward, QkNormScope, RotaryBackward, RotaryForward, RotaryPairs, Rotation,
};

/// Returns the gradient of Σ dout · f(x) with respect to each x, by central differences.
fn gradient(x: &[f64], dout: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let sum = |x: &[f64]| f(x).iter().zip(dout).map(|(y, d)| y * d).sum::<f64>();
    let h = 1e-5;
    let shifted = |i: usize, shift: f64| {
        let mut x = x.to_vec();
        x[i] += shift;
        sum(&x)
    };
    (0..x.len()).map(|i| (shifted(i, h) - shifted(i, -h)) / (2.0 * h)).collect()
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (square + eps).sqrt() * w).collect()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn rmsnorm(rows in 1usize..20, c in 1usize..70, weighted: bool, eps in 1e-6f32..1e-2) {
        let mut bench = Bench::new();
        let (inp, weight, dweight) = (bench.normal(rows * c), bench.normal(c), bench.normal(c));
        let (rstd, out) = (bench.normal(rows), bench.normal(rows * c));
        let (dinp, dout) = (bench.normal(rows * c), bench.normal(rows * c));
        bench.ready();
        let of = |tensor| weighted.then_some(tensor);
        let weights = of(weight);
        let forward = NormForward { out, mean: None, rstd, inp, weight: weights, bias: None, c, eps, quantized: None };
        bench.dyn_engine().run(forward).unwrap();
        let (dweight_of, dbias, column_sums) = (of(dweight), None, None);
        let backward = NormBackward { dinp, dweight: dweight_of, dbias, column_sums, dout, inp, weight: weights, mean: None, rstd, c };
        bench.dyn_engine().run(backward).unwrap();

        let (x, d, eps) = (bench.before(inp), bench.before(dout), f64::from(eps));
        let w = if weighted { bench.before(weight) } else { vec![1.0; c] };
        let all = |x: &[f64], w: &[f64]| x.chunks(c).flat_map(|row| rms_norm(row, w, eps)).collect::<Vec<_>>();
        bench.assert("out", out, &all(&x, &w));
        let dx: Vec<f64> = (0..rows)
            .flat_map(|row| {
                let part = row * c..(row + 1) * c;
                gradient(&x[part.clone()], &d[part], |x| rms_norm(x, &w, eps))
            })
            .collect();
        // A single value has no gradient except through eps, far below the values that cancel.
        bench.assert_of(1.0, "dinp", dinp, &add(&bench.before(dinp), &dx));
        let dw = if weighted { gradient(&w, &d, |w| all(&x, w)) } else { vec![0.0; c] };
        bench.assert_of(1.0, "dweight", dweight, &add(&bench.before(dweight), &dw));
    }

    #[test]
    fn rotary(
        b in 1usize..3,
        t in 1usize..6,
        kv_heads in 1usize..3,
        group in 1usize..3,
        half in 1usize..9,
        interleaved: bool,
        norm in 0usize..3,
        all_heads: bool,
    ) {
        let (heads, hs) = (group * kv_heads, 2 * half);
        let shape = AttentionShape { b, t, heads, kv_heads, head_size: hs };
        let pairs = if interleaved { RotaryPairs::Interleaved } else { RotaryPairs::HalfSplit };
        let (rotated, packed) = (heads + kv_heads, shape.packed_heads());
        let mut bench = Bench::new();
        let (qkv, dqkv) = (bench.normal(b * t * packed * hs), bench.normal(b * t * packed * hs));
        let saved = bench.normal(b * t * rotated * hs);
        let scope = if all_heads { QkNormScope::AllHeads } else { QkNormScope::Head };
        let widths = scope.widths(heads, kv_heads, hs);
        let (weights, dweights) = (widths.map(|n| bench.normal(n)), widths.map(|n| bench.normal(n)));
        // One position more than a sequence has.
        let angle = |t: usize, i: usize| 0.7 * t as f64 / (i + 1) as f64;
        let angles = (0..=t).flat_map(|t| (0..half).map(move |i| angle(t, i)));
        let table = bench.with(angles.flat_map(|a| [a.cos() as f32, a.sin() as f32]).collect());
        bench.ready();
        let (eps, gain) = (1e-3, 1.25);
        let qk_norm = (norm > 0).then_some(HeadNorm { weights: (norm > 1).then_some(weights), eps, gain, scope });
        let (rotation, saved) = (Rotation { table, pairs, qk_norm }, (norm > 0).then_some(saved));
        bench.dyn_engine().run(RotaryForward { qkv, saved, rotation, shape }).unwrap();
        let given = (norm > 1).then_some(dweights);
        bench.dyn_engine().run(RotaryBackward { dqkv, saved, dweights: given, rotation, shape }).unwrap();

        let [q_weight, k_weight] = weights.map(|w| if norm > 1 { bench.before(w) } else { vec![1.0; w.len] });
        let rotate = |position: usize, x: &[f64], w: &[f64]| {
            let x = match norm {
                0 => x.to_vec(),
                _ => rms_norm(x, w, f64::from(eps)).iter().map(|x| x * f64::from(gain)).collect(),
            };
            let mut y = x.clone();
            for (x, y) in x.chunks(hs).zip(y.chunks_mut(hs)) {
                for i in 0..half {
                    let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    let (sin, cos) = angle(position, i).sin_cos();
                    (y[a], y[b]) = (x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos);
                }
            }
            y
        };
        let (x, d) = (bench.before(qkv), bench.before(dqkv));
        let (mut y, mut dx) = (x.clone(), d.clone());
        let mut dw = dweights.map(|dw| bench.before(dw));
        // The values that are normalized together, of each row: their first channel, and whether they are keys.
        let ends = [heads * hs, rotated * hs];
        let parts = (0..2).flat_map(|of_key| (of_key * ends[0]..ends[of_key]).step_by(widths[of_key]).map(move |at| (at, of_key)));
        let parts: Vec<_> = parts.collect();
        for (row, (at, of_key)) in (0..b * t).flat_map(|row| parts.iter().map(move |&part| (row, part))) {
            let at = row * packed * hs + at;
            let part = at..at + widths[of_key];
            let (x, d) = (&x[part.clone()], &d[part.clone()]);
            let w = [&q_weight, &k_weight][of_key];
            y[part.clone()].copy_from_slice(&rotate(row % t, x, w));
            dx[part].copy_from_slice(&gradient(x, d, |x| rotate(row % t, x, w)));
            if norm > 1 {
                dw[of_key] = add(&dw[of_key], &gradient(w, d, |w| rotate(row % t, x, w)));
            }
        }
        bench.assert_of(1.0, "qkv", qkv, &y);
        bench.assert_of(1.0, "dqkv", dqkv, &dx);
        bench.assert_of(1.0, "dq weight", dweights[0], &dw[0]);
        bench.assert_of(1.0, "dk weight", dweights[1], &dw[1]);
    }
}
