//! The GPU kernels of GPT-2 training. Each module holds one operation, with its forward and backward kernels.
//!
//! The crate is compiled twice from the same source. `cuda_builder` compiles it to PTX. The host build turns each
//! kernel into a typed launch function, whose result can also run in the emulator.
//!
//! Dimensions in the docs: batch size B, sequence length T, channels C, attention heads NH, head size HS = C / NH,
//! vocabulary size V, and padded vocabulary size Vp. Arrays are row-major. Kernels with a type parameter T are
//! instantiated for storage in f32 and bf16, and compute in f32.
//!
//! Most kernels access memory in packets: vectorized 16-byte loads and stores of `T::PACKET` elements (8 bf16 or 4
//! f32). Arrays of packets are 16-byte aligned and the length of a row is a multiple of the packet.
//!
//! Host code that chooses a kernel or runs one does not belong here. The grid and shared memory size of each kernel do.

// The device build has functions without docs: the instances of kernels.
#![cfg_attr(not(target_arch = "nvptx64"), warn(missing_docs))]
// Without the emulator, the host build has only the launches of kernels, not their bodies.
#![cfg_attr(
    not(any(feature = "emulator", target_arch = "nvptx64")),
    allow(dead_code, unused_imports, reason = "only the bodies of kernels use these items")
)]
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

pub mod activation;
pub mod adamw;
pub mod all_heads_norm;
pub mod attention;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod attention_wgmma;
pub mod bias;
pub mod block_float;
pub mod cast;
pub mod classifier;
pub mod column_sum;
pub mod decode;
pub mod digest;
pub mod encoder;
pub mod experts;
mod float4;
pub mod gate;
pub mod global_norm;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "fp8"))]
pub mod matmul;
#[cfg(any(not(target_arch = "nvptx64"), all(cuda_feature = "fp8", not(cuda_feature = "wgmma"))))]
pub mod matmul_mma;
pub mod most_likely;
pub mod muon;
pub mod noise;
pub mod norm;
pub mod quantize;
pub mod quantize_activation;
pub mod remainder;
pub mod rotary;
pub mod scale_blocks;
pub mod softcap;
pub mod stream;
pub mod value_embedding;
pub mod weights;
