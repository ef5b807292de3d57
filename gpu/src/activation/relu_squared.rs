//! ReLU²: y = max(x, 0)² (So et al., 2021, arXiv:2109.08668).

use super::{Activation, ActivationFunction};
use cuda_std::device;

/// ReLU².
pub struct ReluSquared;

/// Returns max(x, 0), and NaN for NaN. `math::max` and `f32::max` would return 0 for NaN.
#[inline(always)]
fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

#[device]
impl ActivationFunction for ReluSquared {
    const ACTIVATION: Activation = Activation::ReluSquared;

    fn value([x, _]: [f32; 2]) -> f32 {
        let positive = relu(x);
        positive * positive
    }

    fn gradients(dout: f32, [x, _]: [f32; 2]) -> [f32; 2] {
        [dout * (2.0 * relu(x)), 0.0]
    }
}
