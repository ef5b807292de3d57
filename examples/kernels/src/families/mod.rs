//! The problem of each family, and the launches of its kernels.

pub mod adamw;
pub mod attention;
pub mod attention_backward;
pub mod classifier;
pub mod encoder;
pub mod faults;
pub mod gelu;
pub mod gemm;
pub mod layernorm;
pub mod layernorm_backward;
pub mod norm;
pub mod softmax;

/// Returns the path of a file in the device crate of this example, relative to the root of the repository.
macro_rules! file {
    ($path:literal) => {
        concat!("examples/kernels/gpu/src/", $path)
    };
}
use file;
