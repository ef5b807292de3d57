//! GELU in its tanh approximation: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016,
//! arXiv:1606.08415).

use super::{Activation, ActivationFunction};
use cuda_std::{device, math};

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// GELU in its tanh approximation.
pub struct Gelu;

/// Returns the gate (1 + tanh(u)) / 2, u = SCALE (x + CUBIC x³), from x and `square` = x².
///
/// Computed as 1 / (1 + e^(-2u)), which is accurate to a few ULP. 1 + tanh(u) would cancel for large negative x.
#[inline(always)]
fn gate(x: f32, square: f32) -> f32 {
    const LINEAR: f32 = -2.0 * SCALE * core::f32::consts::LOG2_E;
    math::recip(1.0 + math::exp2(x * math::fma(square, LINEAR * CUBIC, LINEAR)))
}

/// Returns gelu(x).
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    x * gate(x, x * x)
}

/// Returns gelu(x), with the bits of [`gelu`], and the derivative gelu'(x). Computes the gate only once.
#[inline(always)]
pub(super) fn gelu_and_slope(x: f32) -> [f32; 2] {
    // The bound keeps an overflowing square from giving infinity * 0 = NaN below. It does not affect the gate, which is
    // 0 or 1 there.
    let square = (x * x).min(1e6);
    let s = gate(x, square);
    let gate_slope = x * math::fma(-s, s, s);
    [x * s, math::fma(gate_slope, math::fma(square, 6.0 * SCALE * CUBIC, 2.0 * SCALE), s)]
}

/// Returns gelu(x) and gelu'(x) by the formula above.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn reference(x: f32) -> [f32; 2] {
    let tanh = (SCALE * (x + CUBIC * x * x * x)).tanh();
    let inner = SCALE * (1.0 + 3.0 * CUBIC * x * x);
    [0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner]
}

#[device]
impl ActivationFunction for Gelu {
    const ACTIVATION: Activation = Activation::Gelu;

    fn value([x, _]: [f32; 2]) -> f32 {
        gelu(x)
    }

    fn gradients(dout: f32, [x, _]: [f32; 2]) -> [f32; 2] {
        [dout * gelu_and_slope(x)[1], 0.0]
    }

    fn gradients_and_value(dout: f32, [x, _]: [f32; 2]) -> ([f32; 2], f32) {
        let [value, slope] = gelu_and_slope(x);
        ([dout * slope, 0.0], value)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_value([x, _]: [f32; 2]) -> f32 {
        reference(x)[0]
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_gradients(dout: f32, [x, _]: [f32; 2]) -> [f32; 2] {
        [dout * reference(x)[1], 0.0]
    }
}
