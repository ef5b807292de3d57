//! The linear layer: out = inp · weightᵀ + bias, and its gradients.
//!
//! Shapes, row-major: inp (rows, C), weight (OC, C), bias (OC), out (rows, OC). `shape` is `[rows, c, oc]`.

/// Computes out.
pub fn linear_forward(out: &mut [f64], inp: &[f64], weight: &[f64], bias: &[f64], shape: [usize; 3]) {
    let [rows, c, oc] = shape;
    for i in 0..rows {
        for o in 0..oc {
            let mut sum = bias[o];
            for l in 0..c {
                sum += inp[i * c + l] * weight[o * c + l];
            }
            out[i * oc + o] = sum;
        }
    }
}

/// Overwrites dinp, and adds to dweight and dbias.
pub fn linear_backward(
    [dinp, dweight, dbias]: [&mut [f64]; 3],
    dout: &[f64],
    inp: &[f64],
    weight: &[f64],
    shape: [usize; 3],
) {
    let [rows, c, oc] = shape;
    dinp.fill(0.0);
    for i in 0..rows {
        for o in 0..oc {
            let d = dout[i * oc + o];
            dbias[o] += d;
            for l in 0..c {
                dinp[i * c + l] += d * weight[o * c + l];
                dweight[o * c + l] += d * inp[i * c + l];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{linear_backward, linear_forward};

    const SHAPE: [usize; 3] = [2, 2, 3];
    const INP: [f64; 4] = [1.0, 2.0, 3.0, -1.0];
    const WEIGHT: [f64; 6] = [1.0, 0.0, 2.0, 1.0, 0.0, -1.0];
    const BIAS: [f64; 3] = [0.0, 1.0, 0.0];
    const DOUT: [f64; 6] = [1.0, 0.0, 2.0, 0.0, 1.0, -1.0];

    /// Returns an array of PyTorch's recorded output.
    fn recorded(name: &str) -> Vec<f64> {
        let mut lines = include_str!("../../pytorch/linear.txt").lines();
        let values = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap();
        values.split(' ').map(|value| value.parse().unwrap()).collect()
    }

    /// Returns the scalar of which dout is the gradient.
    fn loss(inp: &[f64], weight: &[f64], bias: &[f64]) -> f64 {
        let mut out = [0.0; 6];
        linear_forward(&mut out, inp, weight, bias, SHAPE);
        out.iter().zip(DOUT).map(|(x, d)| x * d).sum()
    }

    /// Returns dinp, dweight and dbias, the latter two added to `initial`.
    fn gradients(initial: f64) -> ([f64; 4], [f64; 6], [f64; 3]) {
        let (mut dinp, mut dweight, mut dbias) = ([f64::NAN; 4], [initial; 6], [initial; 3]);
        linear_backward([&mut dinp, &mut dweight, &mut dbias], &DOUT, &INP, &WEIGHT, SHAPE);
        (dinp, dweight, dbias)
    }

    #[test]
    fn results_are_those_of_pytorch() {
        let mut out = [f64::NAN; 6];
        linear_forward(&mut out, &INP, &WEIGHT, &BIAS, SHAPE);
        let (dinp, dweight, dbias) = gradients(0.0);
        assert_eq!(out.to_vec(), recorded("out"));
        assert_eq!(dinp.to_vec(), recorded("dinp"));
        assert_eq!(dweight.to_vec(), recorded("dweight"));
        assert_eq!(dbias.to_vec(), recorded("dbias"));
    }

    #[test]
    fn gradients_are_finite_differences() {
        let (dinp, dweight, dbias) = gradients(0.0);
        let expected = [dinp.as_slice(), &dweight, &dbias];
        for (which, gradient) in expected.iter().enumerate() {
            for (i, expected) in gradient.iter().enumerate() {
                let loss_at = |step: f64| {
                    let (mut inp, mut weight, mut bias) = (INP, WEIGHT, BIAS);
                    [inp.as_mut_slice(), &mut weight, &mut bias][which][i] += step;
                    loss(&inp, &weight, &bias)
                };
                let difference = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3;
                assert!((difference - expected).abs() < 1e-9, "{which} {i}: {difference} {expected}");
            }
        }
    }

    #[test]
    fn gradients_of_parameters_accumulate() {
        let (dinp, dweight, dbias) = gradients(10.0);
        let plus_ten = |name| recorded(name).iter().map(|value| value + 10.0).collect::<Vec<_>>();
        assert_eq!(dinp.to_vec(), recorded("dinp"));
        assert_eq!(dweight.to_vec(), plus_ten("dweight"));
        assert_eq!(dbias.to_vec(), plus_ten("dbias"));
    }
}
