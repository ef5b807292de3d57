//! GEGLU: y = up · gelu(gate), with the tanh approximation of GELU, as in Gemma (Shazeer, 2020, arXiv:2002.05202).

use super::gelu::{gelu, gelu_and_slope};
use super::{Activation, ActivationFunction};
use cuda_std::device;

/// GEGLU.
pub struct GeGlu;

#[device]
impl ActivationFunction for GeGlu {
    const ACTIVATION: Activation = Activation::GeGlu;
    const INPUTS: usize = 2;

    fn value([up, gate]: [f32; 2]) -> f32 {
        up * gelu(gate)
    }

    fn gradients(dout: f32, [up, gate]: [f32; 2]) -> [f32; 2] {
        let [value, slope] = gelu_and_slope(gate);
        [dout * value, dout * (up * slope)]
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_value([up, gate]: [f32; 2]) -> f32 {
        up * super::gelu::reference(gate)[0]
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_gradients(dout: f32, [up, gate]: [f32; 2]) -> [f32; 2] {
        let [value, slope] = super::gelu::reference(gate);
        [dout * value, dout * up * slope]
    }
}
