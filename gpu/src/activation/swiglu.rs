//! SwiGLU: y = up · silu(gate), silu(x) = x / (1 + e^(-x)) (Shazeer, 2020, arXiv:2002.05202).

use super::{Activation, ActivationFunction};
use cuda_std::{device, math};

/// SwiGLU.
pub struct SwiGlu;

/// Returns the logistic function 1 / (1 + e^(-x)), accurate to a few ULP. It is 0 or 1 if e^(-x) overflows or vanishes.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    math::recip(1.0 + math::exp2(x * -core::f32::consts::LOG2_E))
}

#[device]
impl ActivationFunction for SwiGlu {
    const ACTIVATION: Activation = Activation::SwiGlu;
    const INPUTS: usize = 2;

    fn value([up, gate]: [f32; 2]) -> f32 {
        up * (gate * sigmoid(gate))
    }

    fn gradients(dout: f32, [up, gate]: [f32; 2]) -> [f32; 2] {
        let s = sigmoid(gate);
        // s - s² is s (1 - s), without the rounding error of 1 - s.
        let slope = math::fma(gate, math::fma(-s, s, s), s);
        [dout * (gate * s), dout * (up * slope)]
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_value([up, gate]: [f32; 2]) -> f32 {
        up * (gate * (1.0 / (1.0 + (-gate).exp())))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_gradients(dout: f32, [up, gate]: [f32; 2]) -> [f32; 2] {
        let sigmoid = 1.0 / (1.0 + (-gate).exp());
        let silu = gate * sigmoid;
        [dout * silu, dout * up * (sigmoid + silu * (1.0 - sigmoid))]
    }
}
