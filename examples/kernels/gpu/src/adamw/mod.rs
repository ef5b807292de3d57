//! The AdamW update of n parameters, with m and v in f32:
//! m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g², and
//! param -= learning_rate (correction1 m / (sqrt(correction2 v) + epsilon) + weight_decay param).

pub mod clip;
pub mod naive;
pub mod packets;
pub mod stochastic;

use cuda_std::math;

/// The constants of a step. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Constants {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// 1 / (1 - beta1^t), where t is the number of the step, from 1.
    pub correction1: f32,
    /// 1 / (1 - beta2^t).
    pub correction2: f32,
    /// Term that keeps the denominator above 0.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: f32,
}

impl Constants {
    /// Returns the new m, v and parameter.
    #[inline(always)]
    fn update(self, grad: f32, m: f32, v: f32, param: f32) -> [f32; 3] {
        let m = self.beta1 * m + (1.0 - self.beta1) * grad;
        let v = self.beta2 * v + (1.0 - self.beta2) * grad * grad;
        let step = self.correction1 * m / (math::sqrt(self.correction2 * v) + self.epsilon);
        [m, v, param - self.learning_rate * (step + self.weight_decay * param)]
    }
}
