//! The flags of `train`, each of which is declared here.
//!
//! The serialized fields are settings of the run: `config.toml` has them by the names of their flags. A field with `#[serde(skip)]`
//! controls only this process, or its default depends on the model, the data or other flags. In the second case
//! [`Config`](super::Config) has its final value.

use super::sources::{SourceTable, source_table};
use crate::commands::resources::{Fp8Flags, Hardware, LoraFlags, MuonAdditionFlags, StructureFlags};
use crate::console::Verbosity;
use crate::train::{CLIP, GroupFlag};
use crate::values::{
    Count, Resume, count, count_or_all, fraction, fraction_f32, interval, level, momentum, non_negative, packing,
    resume, seed, switch, whole_number, zero_stage,
};
use checkpoint::config;
use checkpoint::resume::Accepted;
use clap::{Arg, ArgAction, Args, Command};
use data::mixture::Packing;
use distributed::rendezvous::Endpoint;
use engine::ops::{MuonCoefficients, RouterScores};
use model::schedule::{ScheduleKind, WeightDecaySchedule};
use model::{MasterWeights, Moments, Offload, Optimizer, Recompute};
use planner::quantity::bytes;
use serde::{Serialize, Serializer};
use std::env;
use std::path::{Path, PathBuf};

// Sections of the help text. The settings of the first four determine the weights, so a resumed run must not change them.
const DATA: &str = "Data";
const MODEL: &str = "Model";
const BATCH: &str = "Batch";
const OPTIMIZER: &str = "Optimizer";
const EVALUATION: &str = "Evaluation and reports";
const OUTPUT: &str = "Output and checkpoints";
const MEMORY: &str = "Memory";
const DISTRIBUTED: &str = "Distributed training";
const HARDWARE_CHECKS: &str = "Detection of faulty hardware";
/// Heading of the flags that fit nowhere else, such as `--help`.
pub const GENERAL: &str = "General";

const EXAMPLES: &str = "\
Examples:
  Train a small model on the built-in corpus:
    llm-rs train

  Tokenize text, then train GPT-2 124M on it, with checkpoints:
    llm-rs data text my-texts/ --out data --val-fraction 0.1
    llm-rs train --model gpt2 --train 'data/train_*.bin' --val 'data/val_*.bin' \\
      --batch 16 --total-batch 524288 --out runs/a --checkpoint-every 1000

  Fine-tune a Hugging Face model with a fresh schedule and optimizer:
    llm-rs train --model ./gpt2 --train 'data/train_*.bin' --lr 3e-5 --warmup 20 --steps 200 --out runs/b

  Resume that run from its newest checkpoint:
    llm-rs train --config runs/a/config.toml --resume

  Print the memory that a run needs on a GPU, without a GPU:
    llm-rs train --model gpt2-xl --batch 8 --device cuda --dry-run";

/// Train a model
///
/// Without flags, trains a small model on a built-in text in less than a minute. Many short flags are llm.c's.
#[derive(Clone, Debug, Args, Serialize)]
#[command(after_help = EXAMPLES)]
#[serde(rename_all = "kebab-case")]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct TrainOptions {
    /// Token files (.bin) to train on; quote the pattern. Repeat the flag to mix several sources. =WEIGHT sets the share of a source; without
    /// weights, the shares are those of the tokens [default: a built-in text, as bytes]
    #[arg(short = 'i', long, value_name = "GLOB[=WEIGHT]", action = ArgAction::Append, help_heading = DATA)]
    #[serde(serialize_with = "only", skip_serializing_if = "<[_]>::is_empty")]
    pub train: Vec<String>,

    /// Token files (.bin) for validation. Repeat the flag for a separate loss of each source
    #[arg(short = 'j', long, value_name = "GLOB", action = ArgAction::Append, requires = "train", help_heading = DATA)]
    #[serde(serialize_with = "only", skip_serializing_if = "<[_]>::is_empty")]
    pub val: Vec<String>,

    /// The `[[data]]` tables of the file of --config, each written inline
    #[arg(long, value_name = "TABLE", action = ArgAction::Append, value_parser = source_table, conflicts_with_all = ["train", "val"], hide = true, help_heading = DATA)]
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub data: Vec<SourceTable>,

    /// How tokens become sequences. stream: windows, which may begin inside a document. best-fit: each sequence begins with a document and
    /// contains the largest documents that fit; its last one is cropped. pad: the same, but documents are not cropped; the rest of the
    /// sequence is padding, which has no loss [default: stream, or pad for conversations]
    #[arg(long, value_name = "stream|best-fit|pad", value_parser = packing, help_heading = DATA)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<Packing>,

    /// Tokenizer of the token files: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer of the model, or the one
    /// in dataset.json next to the token files, or the built-in one with the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE", help_heading = DATA)]
    pub tokenizer: Option<String>,

    /// 1: shuffle the shards and the sequences of each shard, differently each epoch and on each rank. 0: read them in order, so that
    /// a step has the same tokens for any number of ranks and any --batch; tokens at the end of a shard that do not fill a
    /// --total-batch are skipped. With several sources or --packing, a step always has the same tokens for any number of ranks
    #[arg(long, value_name = "0|1", value_parser = switch, default_value = "1", action = ArgAction::Set, help_heading = DATA)]
    pub shuffle: bool,

    /// 1: attend only within documents, so that a token does not see other documents of its sequence. A document begins at each document
    /// token of the tokenizer; a conversation is a document [default: 0, or 1 for conversations]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, help_heading = DATA)]
    pub document_mask: Option<bool>,

    /// Train on a single batch, the first of --val (of --train without --val). The loss should approach 0
    #[arg(short = 'a', long, value_name = "0|1", value_parser = switch, default_value = "0", num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, help_heading = DATA)]
    pub overfit_one_batch: bool,

    /// Shape: gpt2 (d12), gpt2-medium (d24), gpt2-large (d36), gpt2-xl (d48), d6, d60, d72, d84; gpt3:cN with N channels (384,
    /// 768, 1024, 1536, 2048, 2560, 4096, 12288); llama3:1b, 3b or 8b; qwen2.5:0.5b, 1.5b, 3b, 7b or 14b; qwen3:0.6b, 1.7b or
    /// 30b-a3b; olmoe:1b-7b; modern:dN with N layers, nanochat's shape, or modern-moe:dN with experts. Or a model to start from: a
    /// model file (.bin), the directory of a run or a Hugging Face directory, such as ./gpt2 [default: d12; a small model for the
    /// built-in text]
    #[arg(short = 'e', long, value_name = "NAME|FILE|DIR", help_heading = MODEL)]
    pub model: Option<String>,

    /// Number of layers, instead of that of --model. Without --model, --layers, --heads and --channels define a GPT-2
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub layers: Option<usize>,

    /// Number of attention heads
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub heads: Option<usize>,

    /// Number of key-value heads, a divisor of --heads [default: from --model]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub kv_heads: Option<usize>,

    /// Channels per head. A GPU needs 64, 80, 96 or 128 [default: channels / heads]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub head_size: Option<usize>,

    /// Number of channels
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub channels: Option<usize>,

    /// Channels between the two linear layers of the MLP [default: from --model; with --channels C: 4 C, or 8 C / 3 rounded up to a
    /// multiple of 256 if the activation is gated]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub ffn: Option<usize>,

    /// Number of experts of each layer, which replace the MLP. With a dense model to start from, each expert starts as a copy of its MLP
    /// [default: from --model]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,

    /// Number of experts that compute each token [default: from --model]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_experts: Option<usize>,

    /// Scores by which routers choose and weight experts [default: from --model]
    #[arg(long, value_enum, value_name = "SCORES", help_heading = MODEL)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_scores: Option<RouterScores>,

    /// Windows of attention.
    #[command(flatten)]
    #[serde(flatten)]
    pub structure: StructureFlags,

    /// Low-rank adapters.
    #[command(flatten)]
    #[serde(flatten)]
    pub lora_flags: LoraFlags,

    /// Continue to train low-rank adapters: a directory of PEFT, or a run with --lora-rank. Their rank and targets are kept
    #[arg(long, value_name = "DIR", conflicts_with = "lora_rank", help_heading = MODEL)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<PathBuf>,

    /// Seed of the initial weights and of the data order
    #[arg(long, value_name = "N", value_parser = seed, default_value = "42", help_heading = MODEL)]
    pub seed: u32,

    /// Sequences in a micro-batch [default: 4]
    #[arg(short, long, value_name = "B", value_parser = count, help_heading = BATCH)]
    #[serde(skip)]
    pub batch: Option<usize>,

    /// Tokens in a sequence [default: 1024, or the model's maximum if that is smaller]
    #[arg(short = 't', long, value_name = "T", value_parser = count, help_heading = BATCH)]
    #[serde(skip)]
    pub seq: Option<usize>,

    /// Tokens in an optimizer step, a multiple of batch x seq x ranks. Gradients are accumulated [default: batch x seq x ranks]
    #[arg(short = 'd', long, value_name = "N", value_parser = count, help_heading = BATCH)]
    #[serde(skip)]
    pub total_batch: Option<usize>,

    /// Optimizer steps; -1: one epoch [default: -1]
    #[arg(short = 'x', long, value_name = "N", value_parser = count_or_all, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub steps: Option<Count>,

    /// Tokens of the run for each parameter of the layers and the head, if --steps is not given, with --model nanochat:dN, for which
    /// nanochat's formulas set all flags of the optimizer, the batch and the schedule that are not given [default: 12]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_parameter: Option<f32>,

    /// Optimizer of the layers' matrices [default: adamw]
    #[arg(long, value_enum, help_heading = OPTIMIZER)]
    pub optimizer: Option<Optimizer>,

    /// Schedule of the learning rate [default: cosine]
    #[arg(short = 'k', long, value_enum, help_heading = OPTIMIZER)]
    pub schedule: Option<ScheduleKind>,

    /// With --schedule trapezoidal: fraction of the steps, at the end of the run, over which the learning rate decays [default: 0.4]
    #[arg(long, value_name = "FRACTION", value_parser = fraction, help_heading = OPTIMIZER)]
    pub warmdown: Option<f64>,

    /// Peak learning rate [default: 3e-4]
    #[arg(short, long, value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub lr: Option<f32>,

    /// Peak learning rate of the embeddings [default: --lr]
    #[arg(long, value_name = "LR", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub embedding_lr: Option<f32>,

    /// Peak learning rate of the head, if it is not tied to the token embedding [default: --lr]
    #[arg(long, value_name = "LR", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub head_lr: Option<f32>,

    /// AdamW's hyperparameters of a group of parameters: embeddings, head, value-embeddings, smear, matrices, vectors, residual-scales or
    /// embedding-scales. Keys are lr (peak), beta1, beta2, eps and decay. Repeat the flag for other groups
    #[arg(long, value_name = "GROUP:KEY=VALUE,...", help_heading = OPTIMIZER)]
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub group: Vec<GroupFlag>,

    /// Coefficient of the load-balancing loss of routers [default: from --model; 0 if --router-bias-rate adds biases]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f32>,

    /// Coefficient of the z-loss of routers [default: from --model]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_z_loss: Option<f32>,

    /// Change of the biases of routers in each step, which balance experts without a loss. They are added to a model without biases, unless
    /// X is 0 [default: 0.001 if the model has biases]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub router_bias_rate: Option<f32>,

    /// Maximum norm of the gradient, to which larger gradients are scaled; 0: none [default: 1]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub clip: Option<f32>,

    /// Peak learning rate of Muon [default: 0.02]
    #[arg(long, value_name = "LR", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub muon_lr: Option<f32>,

    /// Momentum of Muon [default: 0.95]
    #[arg(long, value_name = "X", value_parser = momentum, help_heading = OPTIMIZER)]
    pub muon_momentum: Option<f32>,

    /// Steps over which Muon's momentum increases from 0.85 to --muon-momentum [default: 300]
    #[arg(long, value_name = "STEPS", value_parser = whole_number, help_heading = OPTIMIZER)]
    pub muon_momentum_warmup: Option<usize>,

    /// With --schedule trapezoidal: Muon's momentum at the end of the run, to which it changes over --warmdown [default: --muon-momentum]
    #[arg(long, value_name = "X", value_parser = momentum, help_heading = OPTIMIZER)]
    pub muon_momentum_final: Option<f32>,

    /// Coefficients of Muon's Newton-Schulz iterations [default: polar-express]
    #[arg(long, value_enum, value_name = "NAME", help_heading = OPTIMIZER)]
    pub muon_coefficients: Option<MuonCoefficients>,

    #[command(flatten)]
    #[serde(flatten)]
    pub muon_additions: MuonAdditionFlags,

    /// Steps of linear warmup [default: 0]
    #[arg(short = 'u', long, value_name = "N", value_parser = whole_number, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub warmup: Option<usize>,

    /// Final learning rate as a fraction of the peak [default: 0.1; 0 with --schedule trapezoidal; 1, as in llm.c, if short flags are used
    /// but not --lr, --warmup or --schedule; a resumed run keeps its own]
    #[arg(short = 'q', long, value_name = "X", value_parser = fraction_f32, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub final_fraction: Option<f32>,

    /// Weight decay of matrices and embeddings [default: 0]
    #[arg(short = 'c', long, value_name = "X", value_parser = non_negative, help_heading = OPTIMIZER)]
    #[serde(skip)]
    pub weight_decay: Option<f32>,

    /// Schedule of the weight decay of Muon's matrices [default: constant]
    #[arg(long, value_enum, value_name = "NAME", help_heading = OPTIMIZER)]
    pub weight_decay_schedule: Option<WeightDecaySchedule>,

    /// Skip the update of a step whose loss has a z-score above Z among the last 128 losses; 0: never. Also -sl
    #[arg(long, value_name = "Z", default_value = "0", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub skip_loss_z: f32,

    /// Skip the update of a step whose gradient norm has a z-score above Z; 0: never. Non-finite values are always skipped.
    /// Also -sg
    #[arg(long, value_name = "Z", default_value = "0", value_parser = non_negative, help_heading = OPTIMIZER)]
    pub skip_norm_z: f32,

    /// Stop the run after N consecutive steps with a non-finite loss or gradient norm
    #[arg(long, value_name = "N", default_value = "10", value_parser = count, help_heading = OPTIMIZER)]
    pub max_bad_steps: usize,

    /// Device and precision.
    #[command(flatten)]
    #[serde(flatten)]
    pub hardware: Hardware,

    /// Settings of FP8.
    #[command(flatten)]
    #[serde(flatten)]
    pub fp8: Fp8Flags,

    /// Activation checkpointing: recompute activations in the backward pass to save memory. 0: none, 1: activation
    /// function, 2: activation function and norms, 3: whole layers
    #[arg(short, long, value_name = "0|1|2|3", default_value = "0", value_parser = level::<Recompute>, help_heading = MEMORY)]
    pub recompute: Recompute,

    /// With bf16: f32 master weights. 0 (none): updates are rounded stochastically to bf16, 1 (f32): a copy in f32, 2 (remainder): as exact
    /// as 1, but 2 bytes smaller per weight
    #[arg(short = 'w', long, value_name = "0|1|2", default_value = "1", help_heading = MEMORY)]
    pub master_weights: MasterWeights,

    /// With bf16: type of the optimizer's moments. bf16 saves 4 bytes per weight and 8bit saves 6; both round stochastically
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32", help_heading = MEMORY)]
    #[serde(skip_serializing_if = "Moments::is_default")]
    pub moments: Moments,

    /// On a GPU: tensors in page-locked memory of the host, a list of master, moments and params. Slower; the bits of the run are the same
    #[arg(long, value_name = "LIST", default_value = "none", help_heading = MEMORY)]
    #[serde(skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,

    /// Memory of the device that the run may take, such as 24GiB, without about 0.5 GiB for CUDA itself [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = bytes, help_heading = MEMORY)]
    #[serde(skip)]
    pub memory_limit: Option<usize>,

    /// Compute the validation loss before the first step, every N steps and at the end; 0: never [default: 20]
    #[arg(short, long, value_name = "N", value_parser = interval, help_heading = EVALUATION)]
    #[serde(skip)]
    pub val_every: Option<usize>,

    /// Batches per validation; -1: the whole validation set [default: 20]
    #[arg(short = 'm', long, value_name = "N", value_parser = count_or_all, help_heading = EVALUATION)]
    #[serde(skip)]
    pub val_batches: Option<Count>,

    /// Evaluation file (.bin) of `llm-rs data hellaswag`. Its accuracy is computed every --val-every steps and at the end
    #[arg(long, value_name = "FILE", help_heading = EVALUATION)]
    pub hellaswag: Option<PathBuf>,

    /// Use only the first N examples of --hellaswag [default: all]
    #[arg(long, value_name = "N", value_parser = count, requires = "hellaswag", help_heading = EVALUATION)]
    pub hellaswag_examples: Option<usize>,

    /// Directory of the tasks of CORE, as `llm-rs data core` writes it. CORE is computed every --core-every steps and at the end. Prompts are
    /// truncated to --seq tokens
    #[arg(long, value_name = "DIR", help_heading = EVALUATION)]
    pub core: Option<PathBuf>,

    /// Compute CORE every N steps and at the end [default: at the end]
    #[arg(long, value_name = "N", value_parser = count, requires = "core", help_heading = EVALUATION)]
    pub core_every: Option<usize>,

    /// Use at most N questions of each task of CORE [default: 500]
    #[arg(long, value_name = "N", value_parser = count, requires = "core", help_heading = EVALUATION)]
    pub core_max_per_task: Option<usize>,

    /// Generate text every N steps and at the end; 0: never [default: 20]
    #[arg(short, long, value_name = "N", value_parser = interval, help_heading = EVALUATION)]
    pub sample_every: Option<usize>,

    /// Tokens per generated text [default: 64]
    #[arg(short = 'g', long, value_name = "N", value_parser = count, help_heading = EVALUATION)]
    #[serde(skip)]
    pub sample_length: Option<usize>,

    /// Print the GPU's utilization, clock, power and temperature every N steps, through NVML; 0 or -1: never. Also -lg
    #[arg(long, value_name = "N", default_value = "0", value_parser = interval, help_heading = EVALUATION)]
    pub gpu_info_every: usize,

    /// With --precision fp8: print how many values saturate or become 0, every N steps; 0: never
    #[arg(long, value_name = "N", default_value = "0", value_parser = interval, help_heading = EVALUATION)]
    #[serde(skip)]
    pub fp8_stats: usize,

    /// Directory for main.log, main.jsonl, config.toml and checkpoints. It must be new, empty or the directory of an earlier run. none:
    /// save nothing [default: runs/MODEL-N, where N is the next free number]
    #[arg(short, long, value_name = "DIR", help_heading = OUTPUT)]
    pub out: Option<PathBuf>,

    /// Write a checkpoint every N steps and at the end; 0: only after a signal to stop [default: at the end]
    #[arg(short = 'n', long, value_name = "N", value_parser = interval, help_heading = OUTPUT)]
    pub checkpoint_every: Option<usize>,

    /// Write a checkpoint when the last one is M minutes old; the newest two of these are kept until the run ends. 0: never
    /// [default: 15, with --checkpoint-every 0: 0]
    #[arg(long, value_name = "M", value_parser = non_negative, help_heading = OUTPUT)]
    #[serde(skip)]
    pub checkpoint_minutes: Option<f32>,

    /// Keep only the newest N checkpoints; 0: keep all. Also -nk
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_number, help_heading = OUTPUT)]
    pub keep: usize,

    /// With --keep, also keep the checkpoint of every N-th step; 0: none. Also -nm
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_number, help_heading = OUTPUT)]
    pub major_every: usize,

    /// Resume from the newest complete checkpoint in --out, which must exist. Other settings must be unchanged. auto, or 1 as in
    /// llm.c: start a new run if there is no checkpoint
    #[arg(short = 'y', long, value_name = "required|auto|0|1", value_parser = resume, num_args = 0..=1, default_value = "0", default_missing_value = "required", action = ArgAction::Set, requires = "out", help_heading = OUTPUT)]
    #[serde(skip)]
    pub resume: Resume,

    /// Resume with other training data, other weights of the sources, or another --packing or --seed than those of the checkpoint. Sources
    /// of the same name continue where they were
    #[arg(long, requires = "resume", help_heading = OUTPUT)]
    #[serde(skip)]
    pub resume_data: bool,

    /// Resume even if settings or data differ from those of the checkpoint
    #[arg(long, requires = "resume", help_heading = OUTPUT)]
    #[serde(skip)]
    pub force_resume: bool,

    /// Also write event files for TensorBoard into --out. A resumed run continues them
    #[arg(long, help_heading = OUTPUT)]
    #[serde(skip)]
    pub tensorboard: bool,

    /// Read flags from a TOML file of `flag = value` lines, such as DIR/config.toml of an earlier run. Flags on the command
    /// line override the file
    #[arg(long, value_name = "FILE", help_heading = GENERAL)]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Open the data, plan the memory, print both, and exit. With --device cuda this needs no GPU, and with --model no data
    #[arg(long, help_heading = GENERAL)]
    #[serde(skip)]
    pub dry_run: bool,

    /// Print the memory table with every buffer
    #[arg(long, help_heading = GENERAL)]
    #[serde(skip)]
    pub verbose: bool,

    /// Print every N-th step, the first, the last and those before an evaluation. A terminal shows a progress bar instead, and main.log has
    /// every step [default: chosen so that a run prints about 100 lines]
    #[arg(long, value_name = "N", value_parser = count, help_heading = GENERAL)]
    #[serde(skip)]
    pub log_every: Option<usize>,

    /// Print only warnings and the final values
    #[arg(long, help_heading = GENERAL, conflicts_with_all = ["verbose", "dry_run", "json"])]
    #[serde(skip)]
    pub quiet: bool,

    /// Print the lines of main.jsonl to standard output, and everything else to standard error
    #[arg(long, help_heading = GENERAL)]
    #[serde(skip)]
    pub json: bool,

    /// ZeRO stage. 0: nothing is sharded, 1: optimizer state, 2: also gradients of layers, 3: also parameters of layers
    #[arg(short = 'z', long, value_name = "0|1|2|3", default_value = "0", value_parser = zero_stage, help_heading = DISTRIBUTED)]
    pub zero_stage: u8,

    /// With --zero-stage: number of consecutive ranks that shard together, a divisor of the number of ranks. Each such group holds a
    /// complete copy (hybrid sharding) [default: all ranks]
    #[arg(long, value_name = "N", value_parser = count, help_heading = DISTRIBUTED)]
    pub shard_size: Option<usize>,

    /// With --zero-stage 1 to 3, for models with experts: the ranks of a shard group share the experts of each layer, and exchange tokens
    /// instead of weights (expert parallelism)
    #[arg(long, value_name = "0|1", value_parser = switch, default_value = "0", num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, help_heading = DISTRIBUTED)]
    pub expert_parallel: bool,

    /// Start and restart with fewer ranks, but at least N, if some do not join within --rendezvous-timeout. The total batch of a step stays
    /// the same. Ranks that arrive later join at the next restart. Implies --resume=auto; all ranks must share --out [default: all ranks]
    #[arg(long, value_name = "N", value_parser = count, requires_all = ["out", "batch", "seq", "total_batch", "steps"], help_heading = DISTRIBUTED)]
    #[serde(skip)]
    pub min_ranks: Option<usize>,

    /// Compare parameters and optimizer state between the ranks every N steps; 0: never
    #[arg(long, value_name = "N", default_value = "0", value_parser = interval, help_heading = DISTRIBUTED)]
    pub check_ranks: usize,

    /// Flags of distributed training.
    #[command(flatten)]
    #[serde(skip)]
    pub launch: Launch,

    /// Every N steps, compute a micro-batch twice: on the same GPU, or in turn on the GPUs of other ranks. Stop the run if a bit differs,
    /// because the hardware is then faulty. 0: never
    #[arg(long, value_name = "N", default_value = "0", value_parser = interval, help_heading = HARDWARE_CHECKS)]
    pub verify_every: usize,

    /// Log hashes of parameters and optimizer state every N steps; 0: only in checkpoints
    #[arg(long, value_name = "N", default_value = "0", value_parser = interval, help_heading = HARDWARE_CHECKS)]
    pub hash_every: usize,

    /// Whether the flags are spelled as for llm.c. If so, the default of --final-fraction is llm.c's.
    #[arg(skip)]
    #[serde(skip)]
    pub spelled_for_llm_c: bool,
}

/// Serializes the pattern of a single source. Several are serialized as [`TrainOptions::data`].
fn only<S: Serializer>(patterns: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(patterns.first().map_or("", String::as_str))
}

impl TrainOptions {
    /// Value of `--out` with which a run saves nothing.
    const NO_OUT: &str = "none";

    /// Returns the optimizer of the layers' matrices.
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer.unwrap_or_default()
    }

    /// Returns the schedule of the learning rate.
    pub fn schedule(&self) -> ScheduleKind {
        self.schedule.unwrap_or(ScheduleKind::Cosine)
    }

    /// Returns the maximum norm of the gradient.
    pub fn clip(&self) -> f32 {
        match self.clip {
            Some(0.0) => f32::INFINITY,
            clip => clip.unwrap_or(CLIP),
        }
    }

    /// Returns whether a resumed run may have another value of a setting than its checkpoint. The section of the flag decides.
    pub fn may_change(key: &str) -> bool {
        let command = Self::augment_args(Command::new("train"));
        let section = command.get_arguments().find(|arg| arg.get_long() == Some(key)).and_then(Arg::get_help_heading);
        // This flag of the optimizer only decides when a failing run ends.
        key == "max-bad-steps" || section.is_some_and(|section| ![DATA, MODEL, BATCH, OPTIMIZER].contains(&section))
    }

    /// Returns whether the run reads token files instead of the built-in text.
    pub fn reads_files(&self) -> bool {
        !self.train.is_empty() || !self.data.is_empty()
    }

    /// Returns the patterns of a split: those of the flag, or those that `of_table` selects from the tables.
    pub fn patterns<'a>(
        &'a self,
        of_table: impl Fn(&'a SourceTable) -> Option<&'a str>,
        flag: &'a [String],
    ) -> Vec<&'a str> {
        flag.iter().map(String::as_str).chain(self.data.iter().filter_map(of_table)).collect()
    }

    /// Returns whether a validation set is named.
    pub fn names_validation(&self) -> bool {
        !self.val.is_empty() || self.data.iter().any(|table| table.val.is_some())
    }

    /// Returns the changes that a resumed run accepts.
    pub const fn accepted(&self) -> Accepted {
        match (self.force_resume, self.resume_data) {
            (true, _) => Accepted::Everything,
            (false, true) => Accepted::Data,
            (false, false) => Accepted::Nothing,
        }
    }

    /// Returns the directory that `--out` names.
    pub fn out(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| !self.saves_nothing())
    }

    /// Returns the end of an error for a path that does not exist. The paths in the settings of a run may be relative to a directory other
    /// than the current one.
    pub fn relative_paths(&self) -> String {
        let origin = || {
            let config = self.config.as_ref()?.canonicalize().ok()?;
            let run = config.parent()?;
            let out = PathBuf::from(config::saved(run, "out")?.as_str()?);
            let origin = run.ancestors().nth(out.components().count())?;
            let is_elsewhere = out.is_relative() && run.ends_with(&out) && origin != env::current_dir().ok()?;
            is_elsewhere.then(|| origin.display().to_string())
        };
        origin().map_or_else(String::new, |origin| {
            format!("; the paths in the file of --config are relative to {origin}: run the command in that directory")
        })
    }

    /// Returns whether the run has no directory.
    pub fn saves_nothing(&self) -> bool {
        self.out.as_deref().is_some_and(|out| out == Path::new(Self::NO_OUT))
    }

    /// Returns what the run prints.
    pub const fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.json) {
            (_, true) => Verbosity::Json,
            (true, _) => Verbosity::Quiet,
            _ => Verbosity::Normal,
        }
    }
}

/// The rank of this process in a run. Each GPU has one process. Unset flags are read from the environment that mpirun, srun or torchrun
/// sets.
#[derive(Clone, Debug, Args)]
pub struct Launch {
    /// Rank of this process, from 0 [default: from the launcher]
    #[arg(long, value_name = "N", value_parser = whole_number, requires = "world_size", help_heading = DISTRIBUTED)]
    pub rank: Option<usize>,

    /// Number of ranks in the run [default: from the launcher, or 1]
    #[arg(long, value_name = "N", value_parser = count, requires = "rank", help_heading = DISTRIBUTED)]
    pub world_size: Option<usize>,

    /// Rank of this process on its host. It selects the GPU [default: from the launcher, or from --rank]
    #[arg(long, value_name = "N", value_parser = whole_number, help_heading = DISTRIBUTED)]
    pub local_rank: Option<usize>,

    /// Address of the rendezvous: tcp://HOST:PORT on the host of rank 0, or file:///DIR in a shared directory [default: a
    /// port of this host]
    #[arg(long, value_name = "PLACE", help_heading = DISTRIBUTED)]
    pub rendezvous: Option<Endpoint>,

    /// File with the secret by which the ranks authenticate each other. Only its owner may be able to read it [default: the environment
    /// variable LLM_RS_SECRET; with --rendezvous file:///DIR rank 0 creates one]
    #[arg(long, value_name = "FILE", help_heading = DISTRIBUTED)]
    pub rendezvous_secret: Option<PathBuf>,

    /// Seconds to wait for all ranks to meet. With --min-ranks, the run then starts without the missing ranks
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "60", help_heading = DISTRIBUTED)]
    pub rendezvous_timeout: usize,

    /// Seconds without progress before the first step after which a rank counts as failed
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "600", help_heading = DISTRIBUTED)]
    pub start_timeout: usize,

    /// Seconds without progress after the first step after which a rank counts as failed. Must exceed the time that rank 0 takes
    /// to write a checkpoint or to generate text
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "1800", help_heading = DISTRIBUTED)]
    pub step_timeout: usize,
}
