//! Decoders (GPT-2, Llama 3, Qwen, nanochat's shape): their parameters, and their training step as a sequence of engine
//! operations.
//!
//! * [`descriptor`], [`params`], [`init`]: sizes, layout of the parameters, initial weights.
//! * [`memory_plan`], [`recompute`], [`fit`]: every buffer of a run, and whether they fit into memory.
//! * [`forward`], [`loss`], [`backward`]: the passes of every [`decoder`]. [`update`], [`muon`]: gradient norm, AdamW and Muon.
//! * `adapters`: low-rank adapters of a frozen model.
//! * `sublayers`, `activations`: attention and the MLP in each pass, and the memory of their activations.
//! * [`generator`]: text generation with a KV cache.
//! * [`sharding`], [`data_parallel`]: ZeRO, and its overlap with the passes.
//! * [`fp8`], [`fp8_layers`], [`fp8_head`]: FP8 in training. [`fp8_weights`]: weights in FP8.
//! * [`storage`]: types of the optimizer state. [`muon_buffers`]: Muon's memory.
//! * [`verification`], [`digests`]: detection of faulty hardware, and hashes of parameters and optimizer state.
//! * [`scoring`]: scores of some tokens, for evaluations. [`expert_loads`]: loads of experts, for the log.
//! * [`train_step`]: one optimizer step. [`guards`], [`schedule`]: which steps may change the model, and the learning rate.
//!
//! Kernels and operations belong to the engine; files and the command line belong to other crates.

#![warn(missing_docs)]

mod activations;
mod adapters;
pub mod backward;
pub mod data_parallel;
pub mod decoder;
pub mod descriptor;
pub mod digests;
pub mod expert_loads;
pub mod fit;
pub mod forward;
pub mod fp8;
pub mod fp8_head;
pub mod fp8_layers;
pub mod fp8_weights;
pub mod generator;
pub mod guards;
pub mod init;
pub mod loss;
pub mod memory_plan;
pub mod muon;
pub mod muon_buffers;
mod nvtx;
pub mod offload;
pub mod params;
pub mod recompute;
pub mod schedule;
pub mod scoring;
pub mod sharding;
pub mod storage;
mod stream;
mod sublayers;
pub mod train_step;
mod tune;
pub mod update;
pub mod verification;

pub use data_parallel::{DataParallel, LayerBuffers, StopRequest};
pub use decoder::{Decoder, Training};
pub use descriptor::Descriptor;
pub use fp8::{Fp8Options, Fp8Recipe, Fp8Settings};
pub use fp8_weights::WeightFormat;
pub use generator::{Generator, Held};
pub use memory_plan::{LOGIT_ROWS, PlanOptions};
pub use offload::{Offload, Offloadable};
pub use params::{Param, ParamGroup, ParamKind, Params, Shard, Unit};
pub use recompute::Recompute;
pub use scoring::TokenScore;
pub use sharding::{Interrupted, LayerHooks, Store, Unsharded, Zero};
pub use storage::{MasterWeights, Moments, WeightStore};
pub use train_step::{StepStats, TrainStep};
pub use update::{GroupSettings, Muon, Optimizer, Update};
