//! Tests of every kernel, in one program: each file would take seconds to compile and link.
//!
//! The name of a file selects its tests: `cargo test --release -p gpu layernorm::`.

#[macro_use]
mod common;

mod adamw;
mod all_heads_norm;
mod attention;
mod attention_wgmma;
mod bias;
mod classifier;
mod decode;
mod decode_sample;
mod decode_step;
mod digest;
mod elementwise;
mod encoder;
mod experts;
mod global_norm;
mod layernorm;
mod matmul;
mod matmul_batched;
mod matmul_fp8;
mod matmul_gated;
mod matmul_grouped;
mod matmul_mma;
mod most_likely;
mod muon;
mod mutations;
mod quantize;
mod quantize_activation;
mod rmsnorm;
mod rotary;
mod scale_blocks;
mod stream;
mod value_embedding;
