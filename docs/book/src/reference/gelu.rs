//! GELU in its tanh approximation, written with tanh and with a gate.

/// sqrt(2 / pi)
const SCALE: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// Returns u = SCALE (x + CUBIC x³), the argument of tanh.
fn argument(x: f64) -> f64 {
    SCALE * (x + CUBIC * x * x * x)
}

/// Returns the gate s = 1 / (1 + e^(-2u)), which equals (1 + tanh u) / 2.
pub fn gate(x: f64) -> f64 {
    1.0 / (1.0 + (-2.0 * argument(x)).exp())
}

/// Returns gelu(x) = x s.
pub fn gelu(x: f64) -> f64 {
    x * gate(x)
}

/// Returns gelu'(x) = s + x s', with s' = 2 s (1 - s) u'.
pub fn slope(x: f64) -> f64 {
    let (s, inner) = (gate(x), SCALE * (1.0 + 3.0 * CUBIC * x * x));
    s + x * 2.0 * s * (1.0 - s) * inner
}

/// Returns gelu(x) in f32 from 1 + tanh u, which cancels for negative x.
pub fn gelu_with_tanh(x: f32) -> f32 {
    let u = SCALE as f32 * (x + CUBIC as f32 * x * x * x);
    0.5 * x * (1.0 + u.tanh())
}

/// Returns gelu(x) in f32 from the gate.
pub fn gelu_with_gate(x: f32) -> f32 {
    let u = SCALE as f32 * (x + CUBIC as f32 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a line of PyTorch's output.
    fn pytorch(name: &str) -> Vec<f64> {
        let lines = include_str!("../../pytorch/gelu.txt").lines();
        let mut words =
            lines.map(str::split_whitespace).find_map(|mut words| (words.next() == Some(name)).then_some(words));
        words.as_mut().unwrap().map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn values_and_slopes_are_those_of_pytorch() {
        for ((x, value), expected) in pytorch("x").iter().zip(pytorch("gelu")).zip(pytorch("slope")) {
            assert!((gelu(*x) - value).abs() < 1e-9, "gelu({x}): expected {value}, found {}", gelu(*x));
            assert!((slope(*x) - expected).abs() < 1e-9, "gelu'({x}): expected {expected}, found {}", slope(*x));
        }
    }

    #[test]
    fn slope_is_that_of_finite_differences() {
        for x in (-40..=40).map(|i| f64::from(i) / 8.0) {
            let expected = (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
            assert!((slope(x) - expected).abs() < 1e-9, "x = {x}: expected {expected}, found {}", slope(x));
        }
    }

    #[test]
    fn tanh_cancels_and_the_gate_does_not() {
        let (x, expected) = (-5.0f32, gelu(-5.0));
        let error = |value: f32| (f64::from(value) / expected - 1.0).abs();
        assert!(error(gelu_with_tanh(x)) > 0.2, "{}", gelu_with_tanh(x));
        assert!(error(gelu_with_gate(x)) < 1e-5, "{}", gelu_with_gate(x));
    }
}
