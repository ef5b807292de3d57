//! Tests of the exercise `linear_gradient`.

const SHAPE: [usize; 3] = [2, 2, 3];
const INP: [f32; 4] = [1.0, 2.0, 3.0, -1.0];
const WEIGHT: [f32; 6] = [1.0, 2.0, 0.0, 0.0, 1.0, -1.0];
const DOUT: [f32; 6] = [1.0, 0.0, 2.0, 0.0, 1.0, -1.0];

/// A function to test: `linear_backward`.
type Backward = fn([&mut [f32]; 3], &[f32], &[f32], &[f32], [usize; 3]);

/// Returns dinp, dweight and dbias, which are `initial` before the call.
fn gradients(backward: Backward, initial: f32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (mut dinp, mut dweight, mut dbias) = (vec![initial; 4], vec![initial; 6], vec![initial; 3]);
    backward([&mut dinp, &mut dweight, &mut dbias], &DOUT, &INP, &WEIGHT, SHAPE);
    (dinp, dweight, dbias)
}

exercises::tests! {
    linear_gradient: {
        /// The weight is the transpose of the chapter's, so dinp and dbias are the same, and dweight is transposed.
        fn gradients_are_those_of_the_chapter() {
            let (dinp, dweight, dbias) = gradients(solution::linear_backward, 0.0);
            assert_eq!(dinp, [1.0, -2.0, 2.0, 2.0]);
            assert_eq!(dweight, [1.0, 3.0, -1.0, 2.0, -1.0, 5.0]);
            assert_eq!(dbias, [1.0, 1.0, 1.0]);
        }

        /// Gradients of parameters are added to those of earlier micro-batches. The gradient of the input is not.
        fn gradients_of_parameters_accumulate() {
            let (dinp, dweight, dbias) = gradients(solution::linear_backward, 10.0);
            assert_eq!(dinp, [1.0, -2.0, 2.0, 2.0]);
            assert_eq!(dweight, [11.0, 13.0, 9.0, 12.0, 9.0, 15.0]);
            assert_eq!(dbias, [11.0, 11.0, 11.0]);
        }
    }
}
