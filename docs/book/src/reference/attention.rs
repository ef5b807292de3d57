//! Causal attention of one head, and its gradients.
//!
//! q, k, v, out and their gradients are (T, HS), row-major. lse is (T): the log-sum-exp of each query's scaled scores.

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Computes out, lse and the probabilities (T, T), row by row.
pub fn attention_forward(q: &[f64], k: &[f64], v: &[f64], hs: usize) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (t, scale) = (q.len() / hs, 1.0 / (hs as f64).sqrt());
    let (mut out, mut lse, mut p) = (vec![0.0; t * hs], vec![0.0; t], vec![0.0; t * t]);
    for i in 0..t {
        // The causal mask: query i attends to keys 0 to i.
        let row = &mut p[i * t..][..=i];
        for (j, score) in row.iter_mut().enumerate() {
            *score = scale * dot(&q[i * hs..][..hs], &k[j * hs..][..hs]);
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lse[i] = max + row.iter().map(|score| (score - max).exp()).sum::<f64>().ln();
        for (j, score) in row.iter_mut().enumerate() {
            *score = (*score - lse[i]).exp();
            for c in 0..hs {
                out[i * hs + c] += *score * v[j * hs + c];
            }
        }
    }
    (out, lse, p)
}

/// The attention of one query to the keys so far.
#[derive(Clone, Debug)]
pub struct OnlineSoftmax {
    /// The largest score.
    pub max: f64,
    /// The sum of e^(score - max).
    pub sum: f64,
    /// The sum of e^(score - max) times the value (HS).
    pub out: Vec<f64>,
}

impl OnlineSoftmax {
    /// Returns the state before the first key.
    pub fn new(hs: usize) -> Self {
        Self { max: f64::NEG_INFINITY, sum: 0.0, out: vec![0.0; hs] }
    }

    /// Adds a tile of keys, given by their scaled scores and their values (keys, HS).
    pub fn add_tile(&mut self, scores: &[f64], values: &[f64]) {
        let max = scores.iter().copied().fold(self.max, f64::max);
        let factor = (self.max - max).exp();
        self.max = max;
        self.sum *= factor;
        for out in &mut self.out {
            *out *= factor;
        }
        for (score, value) in scores.iter().zip(values.chunks(self.out.len())) {
            let weight = (score - max).exp();
            self.sum += weight;
            for (out, value) in self.out.iter_mut().zip(value) {
                *out += weight * value;
            }
        }
    }

    /// Returns out and lse of the query.
    pub fn finish(self) -> (Vec<f64>, f64) {
        (self.out.iter().map(|out| out / self.sum).collect(), self.max + self.sum.ln())
    }
}

/// Computes out and lse without the matrix of probabilities, with tiles of `tile` keys.
pub fn attention_online(q: &[f64], k: &[f64], v: &[f64], hs: usize, tile: usize) -> (Vec<f64>, Vec<f64>) {
    let (t, scale) = (q.len() / hs, 1.0 / (hs as f64).sqrt());
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for i in 0..t {
        let mut state = OnlineSoftmax::new(hs);
        for first in (0..=i).step_by(tile) {
            let end = (first + tile).min(i + 1);
            let score = |j: usize| scale * dot(&q[i * hs..][..hs], &k[j * hs..][..hs]);
            let scores: Vec<f64> = (first..end).map(score).collect();
            state.add_tile(&scores, &v[first * hs..end * hs]);
        }
        let (row, row_lse) = state.finish();
        out.extend(row);
        lse.push(row_lse);
    }
    (out, lse)
}

/// Computes `[dq, dk, dv]`. The probabilities are recomputed from lse.
pub fn attention_backward([q, k, v]: [&[f64]; 3], out: &[f64], lse: &[f64], dout: &[f64], hs: usize) -> [Vec<f64>; 3] {
    let (t, scale) = (q.len() / hs, 1.0 / (hs as f64).sqrt());
    let (mut dq, mut dk, mut dv) = (vec![0.0; t * hs], vec![0.0; t * hs], vec![0.0; t * hs]);
    for i in 0..t {
        let query = i * hs..(i + 1) * hs;
        // The row term D.
        let d = dot(&dout[query.clone()], &out[query.clone()]);
        for j in 0..=i {
            let key = j * hs..(j + 1) * hs;
            let p = (scale * dot(&q[query.clone()], &k[key.clone()]) - lse[i]).exp();
            let dp = dot(&dout[query.clone()], &v[key]);
            // The gradient of q · k: that of the scaled score, times the scale.
            let ds = p * (dp - d) * scale;
            for c in 0..hs {
                dq[i * hs + c] += ds * k[j * hs + c];
                dk[j * hs + c] += ds * q[i * hs + c];
                dv[j * hs + c] += p * dout[i * hs + c];
            }
        }
    }
    [dq, dk, dv]
}

#[cfg(test)]
mod tests {
    use super::{OnlineSoftmax, attention_backward, attention_forward, attention_online};

    const HS: usize = 2;
    const Q: [f64; 8] = [1.0, 0.5, -1.0, 2.0, 0.25, 1.5, 2.0, -0.5];
    const K: [f64; 8] = [0.5, 1.0, 1.5, -1.0, -0.5, 0.75, 1.0, 2.0];
    const V: [f64; 8] = [1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 0.0, 1.0];
    const DOUT: [f64; 8] = [1.0, -1.0, 0.5, 2.0, -0.25, 1.0, 1.5, 0.0];

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64], error: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < error, "{found} {expected}");
        }
    }

    /// Returns an array of PyTorch's recorded output.
    fn recorded(name: &str) -> Vec<f64> {
        let mut lines = include_str!("../../pytorch/attention.txt").lines();
        let values = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap();
        values.split(' ').map(|value| value.parse().unwrap()).collect()
    }

    fn gradients() -> [Vec<f64>; 3] {
        let (out, lse, _) = attention_forward(&Q, &K, &V, HS);
        attention_backward([&Q, &K, &V], &out, &lse, &DOUT, HS)
    }

    #[test]
    fn results_are_those_of_pytorch() {
        let (out, lse, _) = attention_forward(&Q, &K, &V, HS);
        let [dq, dk, dv] = gradients();
        for (name, values) in [("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)] {
            assert_close(&values, &recorded(name), 1e-9);
        }
    }

    #[test]
    fn probabilities_of_a_row_sum_to_one() {
        let (_, _, p) = attention_forward(&Q, &K, &V, HS);
        for (i, row) in p.chunks(4).enumerate() {
            assert_close(&[row.iter().sum()], &[1.0], 1e-12);
            assert!(row[i + 1..].iter().all(|&p| p == 0.0));
        }
    }

    #[test]
    fn online_softmax_has_the_result_of_the_formula_for_any_tile() {
        let (out, lse, _) = attention_forward(&Q, &K, &V, HS);
        for tile in 1..=5 {
            let (online, online_lse) = attention_online(&Q, &K, &V, HS, tile);
            assert_close(&online, &out, 1e-12);
            assert_close(&online_lse, &lse, 1e-12);
        }
    }

    #[test]
    fn example_of_the_chapter() {
        let mut state = OnlineSoftmax::new(1);
        state.add_tile(&[0.0, 2.0f64.ln()], &[10.0, 20.0]);
        assert_close(&[state.max, state.sum, state.out[0]], &[2.0f64.ln(), 1.5, 25.0], 1e-12);
        state.add_tile(&[8.0f64.ln(), 4.0f64.ln()], &[30.0, 40.0]);
        assert_close(&[state.max, state.sum, state.out[0]], &[8.0f64.ln(), 1.875, 56.25], 1e-12);
        let (out, lse) = state.finish();
        assert_close(&[out[0], lse], &[30.0, 15.0f64.ln()], 1e-12);
    }

    #[test]
    fn gradients_are_finite_differences() {
        let loss = |q: &[f64], k: &[f64], v: &[f64]| {
            let (out, _, _) = attention_forward(q, k, v, HS);
            out.iter().zip(DOUT).map(|(x, d)| x * d).sum::<f64>()
        };
        for (which, gradient) in gradients().iter().enumerate() {
            for (i, expected) in gradient.iter().enumerate() {
                let loss_at = |step: f64| {
                    let mut inputs = [Q, K, V];
                    inputs[which][i] += step;
                    let [q, k, v] = inputs;
                    loss(&q, &k, &v)
                };
                assert_close(&[(loss_at(1e-5) - loss_at(-1e-5)) / 2e-5], &[*expected], 1e-8);
            }
        }
    }
}
