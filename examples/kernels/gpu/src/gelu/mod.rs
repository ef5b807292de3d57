//! GELU in its tanh approximation, elementwise: gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))).

pub mod backward_naive;
pub mod bf16;
pub mod naive;
pub mod packets;

use cuda_std::math;

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// Returns gelu(x).
#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + math::tanh(SCALE * (x + CUBIC * x * x * x)))
}
