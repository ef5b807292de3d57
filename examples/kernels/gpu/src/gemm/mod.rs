//! GEMM: out (M, N) = a (M, K) · b (K, N), bf16 with f32 accumulation.
//!
//! 2 M N K FLOPs on M K + K N + M N elements. Each version moves fewer bytes for each FLOP than the one before, or keeps the units
//! of the SM busier, except for `wgmma`: it needs the copy of `tma`. The versions up to `vectorized` use the ordinary arithmetic
//! units, the later ones the tensor cores. N and K are multiples of 8 from `vectorized` on.

pub mod coalesced;
pub mod cp_async;
pub mod mma;
pub mod naive;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod persistent;
pub mod registers;
pub mod registers_2d;
pub mod shared;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod tma;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod tma_pipeline;
pub mod vectorized;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod warp_specialized;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod wgmma;
