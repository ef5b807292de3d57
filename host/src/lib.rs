//! GPT-2/GPT-3 pretraining.
//!
//! * [`tensor`], [`plan`], [`fit`]: named regions of one memory arena, planned and printed before the first step.
//! * [`engine`]: the operations of training behind one trait, on the CPU (f32) and on CUDA (bf16 or f32).
//! * [`model`]: GPT-2 as a sequence of those operations; its parameters and their initialisation.
//! * [`data`], [`tokenizer`]: text to token files, and from those to batches.
//! * [`config`], [`config_file`]: a run's settings, as they are kept with it and read again.
//! * [`train`], [`evaluate`], [`sample`], [`schedule`]: what is done with a model; [`guards`]: which steps may change it;
//!   [`checkpoint`]: what is kept of it.
//! * [`selftest`], [`verify`]: whether an engine computes what another one, or another program, does.
//! * [`signals`]: how it is asked to stop.
//! * [`log`], [`console`], [`gpu_info`], [`mfu`]: what is told of a run.
//! * [`cli`], [`commands`]: the program.
//! * [`rng`]: random numbers as `PyTorch` and llm.c draw them.

pub mod cli;
pub mod clock;
pub mod commands;
pub mod config_file;
pub mod console;
pub mod corpus;
pub mod evaluate;
pub mod gpu_info;
pub mod kernels;
pub mod log;
pub mod mfu;
pub mod sample;
pub mod signals;
pub mod train;
