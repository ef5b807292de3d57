//! Kernels from naive to fast: each module is an operation, and each of its files is a version that adds one idea to the
//! previous one.
//!
//! Dimensions in the docs: batch size B, sequence length T, channels C, attention heads NH, head size HS, vocabulary size V,
//! and padded vocabulary size Vp. Arrays are row-major. Storage is bf16 unless a file says otherwise. Arithmetic is f32.
//!
//! Each file states the problem, the idea that it adds, and what limits the speed of this version. The last version of an
//! operation is the kernel in the crate `gpu`, which training uses. `faults` holds kernels with a planted fault.

// The device build has functions without docs: the entry points of kernels.
#![cfg_attr(not(target_arch = "nvptx64"), warn(missing_docs))]
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

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
