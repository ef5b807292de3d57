//! A whole training step of a small model: gradient accumulation, clipping and AdamW, in the order of `model::TrainStep`.

/// A linear model that predicts w · x + b, with its gradients and optimizer state.
pub struct Linear {
    /// w (C), then b (1).
    pub params: Vec<f64>,
    /// Gradients of the step's mean loss (C + 1).
    pub grads: Vec<f64>,
    /// First moments (C + 1).
    pub m: Vec<f64>,
    /// Second moments (C + 1).
    pub v: Vec<f64>,
    /// Number of updates so far.
    pub step: i32,
}

/// Hyperparameters of a step.
pub struct Settings {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moments.
    pub beta1: f64,
    /// Decay of the second moments.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest gradient norm.
    pub clip: f64,
}

/// Examples that are computed together.
pub struct MicroBatch {
    /// Inputs (B, C).
    pub inputs: Vec<f64>,
    /// Targets (B).
    pub targets: Vec<f64>,
}

impl Linear {
    /// Creates a model with these parameters, w (C) and then b (1).
    pub fn new(params: Vec<f64>) -> Self {
        let zero = vec![0.0; params.len()];
        Self { params, grads: zero.clone(), m: zero.clone(), v: zero, step: 0 }
    }

    /// Computes the forward and the backward pass of a micro-batch. Adds to the gradients, and returns the sum of the squared errors.
    /// `dloss` is the gradient of each example's loss: 1 / examples of the step.
    pub fn passes(&mut self, batch: &MicroBatch, dloss: f64) -> f64 {
        let c = self.params.len() - 1;
        let mut loss = 0.0;
        for (x, target) in batch.inputs.chunks(c).zip(&batch.targets) {
            let dot: f64 = x.iter().zip(&self.params).map(|(x, w)| x * w).sum();
            let error = dot + self.params[c] - target;
            loss += error * error;
            let derror = 2.0 * error * dloss;
            for (grad, x) in self.grads.iter_mut().zip(x) {
                *grad += derror * x;
            }
            self.grads[c] += derror;
        }
        loss
    }

    /// Runs one optimizer step over several micro-batches. Returns the mean loss and the gradient norm before clipping.
    pub fn train_step(&mut self, batches: &[MicroBatch], settings: &Settings) -> (f64, f64) {
        let examples: usize = batches.iter().map(|batch| batch.targets.len()).sum();
        let dloss = 1.0 / examples as f64;
        self.grads.fill(0.0);
        let loss: f64 = batches.iter().map(|batch| self.passes(batch, dloss)).sum();
        let norm = self.grads.iter().map(|grad| grad * grad).sum::<f64>().sqrt();
        self.update(norm, settings);
        (loss * dloss, norm)
    }

    /// Scales the gradients to a norm of at most `clip`, and applies AdamW.
    fn update(&mut self, norm: f64, s: &Settings) {
        self.step += 1;
        let scale = if norm > s.clip { s.clip / norm } else { 1.0 };
        let unbias1 = 1.0 / (1.0 - s.beta1.powi(self.step));
        let unbias2 = 1.0 / (1.0 - s.beta2.powi(self.step));
        for i in 0..self.params.len() {
            let grad = self.grads[i] * scale;
            self.m[i] = s.beta1 * self.m[i] + (1.0 - s.beta1) * grad;
            self.v[i] = s.beta2 * self.v[i] + (1.0 - s.beta2) * grad * grad;
            let update = self.m[i] * unbias1 / ((self.v[i] * unbias2).sqrt() + s.eps) + s.weight_decay * self.params[i];
            self.params[i] -= s.learning_rate * update;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings =
        Settings { learning_rate: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: 0.5 };

    fn batch(inputs: &[f64], targets: &[f64]) -> MicroBatch {
        MicroBatch { inputs: inputs.to_vec(), targets: targets.to_vec() }
    }

    fn micro_batches() -> [MicroBatch; 2] {
        [batch(&[1.0, 2.0, -1.0, 0.5], &[1.0, 0.0]), batch(&[0.0, 1.0, 2.0, -2.0], &[-1.0, 2.0])]
    }

    #[test]
    fn two_micro_batches_give_the_gradients_of_one_batch() {
        let [first, second] = micro_batches();
        let whole = batch(&[first.inputs.clone(), second.inputs.clone()].concat(), &[1.0, 0.0, -1.0, 2.0]);
        let (mut a, mut b) = (Linear::new(vec![0.5, -0.25, 0.1]), Linear::new(vec![0.5, -0.25, 0.1]));
        let losses = (a.train_step(&[first, second], &SETTINGS), b.train_step(&[whole], &SETTINGS));
        assert!((losses.0.0 - losses.1.0).abs() < 1e-12 && (losses.0.1 - losses.1.1).abs() < 1e-12);
        assert!(a.params.iter().zip(&b.params).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn gradients_match_finite_differences() {
        let [first, _] = micro_batches();
        let at = [0.5, -0.25, 0.1];
        let mut model = Linear::new(at.to_vec());
        model.passes(&first, 0.5);
        for i in 0..3 {
            let loss = |delta: f64| {
                let mut params = at.to_vec();
                params[i] += delta;
                Linear::new(params).passes(&first, 0.5) * 0.5
            };
            let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
            assert!((slope - model.grads[i]).abs() < 1e-8, "{i}: {slope} {}", model.grads[i]);
        }
    }

    /// Compares with the output of `pytorch/training_step.py`, whose first two steps are clipped: loss, norm and parameters after each step.
    #[test]
    fn steps_match_pytorch() {
        let mut model = Linear::new(vec![0.5, -0.25, 0.1]);
        for line in include_str!("../../pytorch/training_step.txt").lines() {
            let expected: Vec<f64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
            let (loss, norm) = model.train_step(&micro_batches(), &SETTINGS);
            let found = [vec![loss, norm], model.params.clone()].concat();
            assert_eq!(found.len(), expected.len());
            // PyTorch divides by norm + 1e-6.
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} {expected:?}");
        }
        assert_eq!(model.step, 3);
    }
}
