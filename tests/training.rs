//! Training, evaluation and generation with the library, on the CPU engine and on the emulated CUDA engine. One test program for
//! all: each would take seconds to compile and link.

mod chunked_logits;
mod cpu_training;
mod generation;
mod gradient_accumulation;
mod guards;
mod hellaswag;
mod llmc_checkpoints;
mod nanochat;
mod parity;
mod peft_adapters;
mod reference;
mod resume_emulated;
mod switches;
mod transformers_models;
