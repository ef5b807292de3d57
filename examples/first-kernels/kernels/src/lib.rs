//! Eight small kernels, one in each file. Each file states the problem, the idea, and what the tests check.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

pub mod histogram;
pub mod matmul;
pub mod reduction;
pub mod saxpy;
pub mod scan;
pub mod silu;
pub mod softmax;
pub mod transpose;
