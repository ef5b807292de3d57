//! The gradients of a linear layer whose weight is stored the other way round.
//!
//! GPT-2's checkpoints store weights as (C, OC), so that out = inp · weight + bias. Derive the gradients of inp, weight and bias
//! by indices, as in the chapter, and compute them.
//!
//! Shapes, row-major: inp (rows, C), weight (C, OC), bias (OC), out (rows, OC). `shape` is `[rows, c, oc]`.

/// Overwrites dinp. Adds to dweight and dbias, which hold the sums of earlier micro-batches.
pub fn linear_backward(
    [dinp, dweight, dbias]: [&mut [f32]; 3],
    dout: &[f32],
    inp: &[f32],
    weight: &[f32],
    shape: [usize; 3],
) {
    unimplemented!("exercise linear_gradient")
}
