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
    let [rows, c, oc] = shape;
    for i in 0..rows {
        let dout = &dout[i * oc..][..oc];
        for (dbias, d) in dbias.iter_mut().zip(dout) {
            *dbias += d;
        }
        for l in 0..c {
            let mut sum = 0.0;
            for o in 0..oc {
                sum += dout[o] * weight[l * oc + o];
                dweight[l * oc + o] += inp[i * c + l] * dout[o];
            }
            dinp[i * c + l] = sum;
        }
    }
}
