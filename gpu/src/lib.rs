//! The GPU kernels of GPT-2 training, one operation per file, forward and backward side by side.
//!
//! Compiled twice from the same source: to PTX by `cuda_builder`, and as a host library whose kernels are typed launches
//! that also run emulated. Shapes: B batch, T sequence, C channels, NH heads, HS = C / NH head size, V vocabulary, Vp
//! padded vocabulary. Every kernel is generic over the storage type (f32 or bf16) and computes in f32.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

pub mod adamw;
pub mod attention;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod attention_wgmma;
pub mod bias;
pub mod cast;
pub mod classifier;
pub mod column_sum;
pub mod encoder;
mod fours;
pub mod gelu;
pub mod global_norm;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod layernorm;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod matmul;
pub mod noise;
