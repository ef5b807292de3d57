//! GPT-2/GPT-3 pretraining.
//!
//! * [`tensor`], [`plan`]: named regions of one memory arena, planned and printed before the first step.
//! * [`engine`]: the operations of training behind one trait, on the CPU (f32) and on CUDA (bf16 or f32).
//! * [`model`]: GPT-2 as a sequence of those operations; its parameters and their initialisation.
//! * [`rng`]: PyTorch's and llm.c's random numbers.

pub mod atomic;
pub mod commands;
pub mod data;
pub mod engine;
pub mod kernels;
pub mod log;
pub mod mfu;
pub mod model;
pub mod plan;
pub mod rng;
pub mod schedule;
pub mod selftest;
pub mod tensor;
pub mod tokenizer;
