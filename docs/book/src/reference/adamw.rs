//! The AdamW update of one parameter, in f64.

/// The settings of AdamW.
#[derive(Clone, Copy)]
pub struct Settings {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Keeps the denominator above zero.
    pub epsilon: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// A parameter and its moments. m and v are zero before step 1.
#[derive(Clone, Copy, Default)]
pub struct Parameter {
    /// The value.
    pub value: f64,
    /// First moment: running mean of gradients.
    pub m: f64,
    /// Second moment: running mean of squared gradients.
    pub v: f64,
}

impl Settings {
    /// Applies step number `t`, counted from 1, with the clipped gradient.
    pub fn update(&self, parameter: &mut Parameter, grad: f64, t: i32) {
        let Parameter { value, m, v } = parameter;
        *m = self.beta1 * *m + (1.0 - self.beta1) * grad;
        *v = self.beta2 * *v + (1.0 - self.beta2) * grad * grad;
        let unbiased_m = *m / (1.0 - self.beta1.powi(t));
        let unbiased_v = *v / (1.0 - self.beta2.powi(t));
        let step = unbiased_m / (unbiased_v.sqrt() + self.epsilon);
        *value -= self.learning_rate * (step + self.weight_decay * *value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings =
        Settings { learning_rate: 0.1, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

    /// Returns the lines of PyTorch's output with this name.
    fn pytorch(name: &str) -> Vec<Vec<f64>> {
        let numbers = |line: &str| line.split_whitespace().skip(1).map(|word| word.parse().unwrap()).collect();
        include_str!("../../pytorch/adamw.txt").lines().filter(|line| line.starts_with(name)).map(numbers).collect()
    }

    #[test]
    fn three_steps_are_those_of_pytorch() {
        let mut params = [1.0, -2.0, 0.5].map(|value| Parameter { value, ..Parameter::default() });
        let steps = [[3.0, 0.0, 4.0], [0.1, 0.2, -0.2], [-0.3, 0.0, 1e-9]];
        for (i, (grads, expected)) in steps.iter().zip(pytorch("params")).enumerate() {
            let norm = grads.iter().map(|grad| grad * grad).sum::<f64>().sqrt();
            assert!((norm - pytorch("norm")[i][0]).abs() < 1e-8);
            let scale = if norm > 1.0 { 1.0 / norm } else { 1.0 };
            for ((param, grad), expected) in params.iter_mut().zip(grads).zip(expected) {
                SETTINGS.update(param, scale * grad, i as i32 + 1);
                // PyTorch divides by the norm plus 1e-6.
                assert!((param.value - expected).abs() < 1e-6, "expected {expected}, found {}", param.value);
            }
        }
    }

    #[test]
    fn the_first_step_has_the_size_of_the_learning_rate() {
        for grad in [1e-4, 1.0, 1e4] {
            let mut parameter = Parameter::default();
            SETTINGS.update(&mut parameter, grad, 1);
            assert!((parameter.value + 0.1).abs() < 2e-5, "{}", parameter.value);
        }
    }

    #[test]
    fn weight_decay_shrinks_a_parameter_without_gradient() {
        let mut parameter = Parameter { value: -2.0, ..Parameter::default() };
        SETTINGS.update(&mut parameter, 0.0, 1);
        assert!((parameter.value + 1.98).abs() < 1e-12, "{}", parameter.value);
    }
}
