//! Softcap: z = cap · tanh(x / cap), which bounds a logit x by ±cap (Gemma Team, 2024, arXiv:2408.00118).
//!
//! tanh is accurate to a few ULP for all arguments. `math::tanh` and `tanh.approx` have a large relative error near 0.
//! Nothing overflows: the exponential is at most 1.

use cuda_std::{device, math};

/// |u| below which tanh(u) is a polynomial. Above, the exponential form loses at most one bit to cancellation.
const SMALL: f32 = 0.6;
/// Minimax coefficients of (tanh(u) / u - 1) / u² in powers of u², for |u| below [`SMALL`]. The relative error of tanh is
/// below 2^-28.
const COEFFICIENTS: [f32; 5] = [-0.333_333, 0.133_319_24, -0.053_783_827, 0.020_795_963, -0.005_895_149];

/// Returns tanh(u) and its derivative 1 - tanh²(u), both accurate to a few ULP.
#[inline(always)]
pub fn tanh_and_slope(u: f32) -> [f32; 2] {
    // With e = e^(-2 |u|): tanh |u| = (1 - e) / (1 + e), and the derivative is 4 e / (1 + e)², without cancellation.
    let e = math::exp2(u.abs() * (-2.0 * core::f32::consts::LOG2_E));
    let r = math::recip(1.0 + e);
    let large = ((1.0 - e) * r).copysign(u);
    let s = u * u;
    let mut p = COEFFICIENTS[4];
    for k in (0..4).rev() {
        p = math::fma(p, s, COEFFICIENTS[k]);
    }
    let small = math::fma(u * s, p, u);
    [if u.abs() < SMALL { small } else { large }, (4.0 * e * r) * r]
}

/// A bound of logits.
#[derive(Clone, Copy)]
pub struct Softcap {
    cap: f32,
    /// 1 / cap
    inverse: f32,
}

#[device]
impl Softcap {
    /// Creates a bound; `cap` is positive.
    pub fn new(cap: f32) -> Self {
        Self { cap, inverse: math::div_rn(1.0, cap) }
    }

    /// Returns z, the bounded logit x.
    pub fn value(self, x: f32) -> f32 {
        self.value_and_slope(x)[0]
    }

    /// Returns z and dz/dx.
    pub fn value_and_slope(self, x: f32) -> [f32; 2] {
        let [tanh, slope] = tanh_and_slope(x * self.inverse);
        [self.cap * tanh, slope]
    }
}
