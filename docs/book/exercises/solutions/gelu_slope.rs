//! Exercise: a derivative of GELU that is finite everywhere.
//!
//! gelu(x) = x s with the gate s = 1 / (1 + e^(-2u)) and u = sqrt(2/pi) (x + 0.044715 x³). Differentiate it, and compute the derivative
//! in f32. An activation of 10³⁰ is wrong, but a NaN would hide where it came from: the result must be finite for all finite x.

/// Returns gelu'(x).
pub fn gelu_slope(x: f32) -> f32 {
    const SCALE: f32 = 0.797_884_6;
    const CUBIC: f32 = 0.044_715;
    // s (1 - s) is 0 long before |x| = 100, and 0 times an infinite square would be NaN.
    let x = x.clamp(-100.0, 100.0);
    let s = 1.0 / (1.0 + (-2.0 * SCALE * (x + CUBIC * x * x * x)).exp());
    s + 2.0 * x * s * (1.0 - s) * SCALE * (1.0 + 3.0 * CUBIC * x * x)
}
