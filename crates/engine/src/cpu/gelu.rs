//! The tanh approximation of GELU (Hendrycks and Gimpel, 2016), as GPT-2 uses it; fused into the matmuls.

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

pub(super) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SCALE * (x + CUBIC * x * x * x)).tanh())
}

pub(super) fn derivative(x: f32) -> f32 {
    let tanh = (SCALE * (x + CUBIC * x * x * x)).tanh();
    let inner = SCALE * (1.0 + 3.0 * CUBIC * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
}
