//! LayerNorm for the CPU in f64. The gradient of the input is computed twice: node by node along the computational graph, and
//! by the simplified formula.
//!
//! Shapes: inp, out and their gradients (rows, C), weight and bias (C), mean and rstd (rows).

/// Added to the variance, so that a constant row does not divide by zero.
pub const EPSILON: f64 = 1e-5;

/// Returns the mean of `x`.
fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// Returns mean and rstd of a row, where rstd = 1 / sqrt(variance + EPSILON).
pub fn statistics(x: &[f64]) -> (f64, f64) {
    let m = mean(x);
    let squares: Vec<f64> = x.iter().map(|x| (x - m) * (x - m)).collect();
    (m, 1.0 / (mean(&squares) + EPSILON).sqrt())
}

/// Computes out, and returns mean and rstd of each row.
pub fn forward(out: &mut [f64], inp: &[f64], weight: &[f64], bias: &[f64]) -> Vec<(f64, f64)> {
    let channels = weight.len();
    let mut of_rows = Vec::new();
    for (out, x) in out.chunks_mut(channels).zip(inp.chunks(channels)) {
        let (mean, rstd) = statistics(x);
        for c in 0..channels {
            out[c] = (x[c] - mean) * rstd * weight[c] + bias[c];
        }
        of_rows.push((mean, rstd));
    }
    of_rows
}

/// Returns the gradient of a row of inp, one node of the graph at a time, from the loss back to the input.
///
/// `dout` is the gradient of the row of out. A name with `d` in front is the gradient of the node with this name.
pub fn row_gradient_by_graph(dout: &[f64], x: &[f64], weight: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let (mean, rstd) = statistics(x);
    let centered: Vec<f64> = x.iter().map(|x| x - mean).collect();

    // out = xhat weight + bias
    let dxhat: Vec<f64> = dout.iter().zip(weight).map(|(dout, weight)| dout * weight).collect();
    // xhat = centered rstd: centered gets a part, and rstd gets a sum because all channels use it.
    let mut dcentered: Vec<f64> = dxhat.iter().map(|dxhat| dxhat * rstd).collect();
    let drstd: f64 = dxhat.iter().zip(&centered).map(|(dxhat, centered)| dxhat * centered).sum();
    // rstd = (variance + EPSILON)^(-1/2)
    let dvariance = drstd * -0.5 * rstd.powi(3);
    // variance = mean of centered²: the second use of centered.
    for (dcentered, centered) in dcentered.iter_mut().zip(&centered) {
        *dcentered += dvariance * 2.0 * centered / n;
    }
    // centered = x - mean
    let dmean: f64 = -dcentered.iter().sum::<f64>();
    // mean = sum of x / n: the second use of x.
    dcentered.iter().map(|dcentered| dcentered + dmean / n).collect()
}

/// Adds the gradient of a row of inp to `dinp`: rstd (g - mean of g - xhat (mean of g xhat)), where g = dout weight.
pub fn add_row_gradient(dinp: &mut [f64], dout: &[f64], x: &[f64], weight: &[f64], mean: f64, rstd: f64) {
    let n = x.len() as f64;
    let (mut mean_g, mut mean_gx) = (0.0, 0.0);
    for c in 0..x.len() {
        let (g, xhat) = (dout[c] * weight[c], (x[c] - mean) * rstd);
        mean_g += g / n;
        mean_gx += g * xhat / n;
    }
    for c in 0..x.len() {
        let (g, xhat) = (dout[c] * weight[c], (x[c] - mean) * rstd);
        dinp[c] += rstd * (g - mean_g - xhat * mean_gx);
    }
}

/// Adds the gradients of weight and bias to `dweight` and `dbias`. `of_rows` holds mean and rstd of each row.
pub fn add_parameter_gradients(
    dweight: &mut [f64],
    dbias: &mut [f64],
    dout: &[f64],
    inp: &[f64],
    of_rows: &[(f64, f64)],
) {
    let channels = dweight.len();
    for ((dout, x), (mean, rstd)) in dout.chunks(channels).zip(inp.chunks(channels)).zip(of_rows) {
        for c in 0..channels {
            dweight[c] += dout[c] * (x[c] - mean) * rstd;
            dbias[c] += dout[c];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHT: [f64; 4] = [1.0, 1.0, 2.0, -1.0];
    const BIAS: [f64; 4] = [0.0, 0.0, 0.0, 1.0];
    const INP: [f64; 8] = [1.0, 1.0, 5.0, 5.0, 1.0, 2.0, 3.0, 6.0];
    const DOUT: [f64; 8] = [1.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.5, 2.0];

    /// Returns a line of PyTorch's output.
    fn pytorch(name: &str) -> Vec<f64> {
        let lines = include_str!("../../pytorch/layernorm.txt").lines();
        let mut words =
            lines.map(str::split_whitespace).find_map(|mut words| (words.next() == Some(name)).then_some(words));
        words.as_mut().unwrap().map(|word| word.parse().unwrap()).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64], allowed: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= allowed, "expected {expected}, found {found}");
        }
    }

    #[test]
    fn all_results_are_those_of_pytorch() {
        let (mut out, mut dinp, mut dweight, mut dbias) = ([0.0; 8], [0.0; 8], [0.0; 4], [0.0; 4]);
        let of_rows = forward(&mut out, &INP, &WEIGHT, &BIAS);
        for (row, (mean, rstd)) in of_rows.iter().enumerate() {
            let part = row * 4..row * 4 + 4;
            add_row_gradient(&mut dinp[part.clone()], &DOUT[part.clone()], &INP[part], &WEIGHT, *mean, *rstd);
        }
        add_parameter_gradients(&mut dweight, &mut dbias, &DOUT, &INP, &of_rows);
        assert_close(&out, &pytorch("out"), 1e-8);
        assert_close(&dinp, &pytorch("dinp"), 1e-8);
        assert_close(&dweight, &pytorch("dweight"), 1e-8);
        assert_close(&dbias, &pytorch("dbias"), 1e-8);
    }

    #[test]
    fn example_by_hand() {
        let (mean, rstd) = statistics(&INP[..4]);
        assert_close(&[mean, rstd], &[3.0, 0.5], 1e-6);
        let mut dinp = [0.0; 4];
        add_row_gradient(&mut dinp, &DOUT[..4], &INP[..4], &WEIGHT, mean, rstd);
        assert_close(&dinp, &[0.25, -0.25, 0.0, 0.0], 1e-5);
    }

    #[test]
    fn graph_and_formula_agree() {
        for row in 0..2 {
            let (x, dout) = (&INP[row * 4..][..4], &DOUT[row * 4..][..4]);
            let (mean, rstd) = statistics(x);
            let mut dinp = [0.0; 4];
            add_row_gradient(&mut dinp, dout, x, &WEIGHT, mean, rstd);
            assert_close(&dinp, &row_gradient_by_graph(dout, x, &WEIGHT), 1e-14);
        }
    }

    /// The loss is the sum of out dout, whose gradient with respect to out is dout.
    fn loss(x: &[f64], weight: &[f64], bias: &[f64], dout: &[f64]) -> f64 {
        let mut out = vec![0.0; x.len()];
        forward(&mut out, x, weight, bias);
        out.iter().zip(dout).map(|(out, dout)| out * dout).sum()
    }

    #[test]
    fn gradient_is_that_of_finite_differences() {
        let step = 1e-4;
        let (x, dout) = (&INP[4..], &DOUT[4..]);
        let expected: Vec<f64> = (0..4)
            .map(|c| {
                let (mut above, mut below) = (x.to_vec(), x.to_vec());
                above[c] += step;
                below[c] -= step;
                (loss(&above, &WEIGHT, &BIAS, dout) - loss(&below, &WEIGHT, &BIAS, dout)) / (2.0 * step)
            })
            .collect();
        assert_close(&row_gradient_by_graph(dout, x, &WEIGHT), &expected, 1e-7);
    }

    #[test]
    fn gradient_is_orthogonal_to_ones_and_nearly_to_the_centered_row() {
        let (x, dout) = (&INP[4..], &DOUT[4..]);
        let (mean, _) = statistics(x);
        let dinp = row_gradient_by_graph(dout, x, &WEIGHT);
        assert!(dinp.iter().sum::<f64>().abs() < 1e-14);
        let along: f64 = dinp.iter().zip(x).map(|(dinp, x)| dinp * (x - mean)).sum();
        assert!(along.abs() < 1e-4, "{along}");
    }
}
