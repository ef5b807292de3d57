//! The flags of `train`.

use crate::cli::{count, level, non_negative, switch};
use crate::commands::resources::Hardware;
use clap::ArgAction;
use distributed::rendezvous::Endpoint;
use model::Recompute;
use model::schedule::Kind;
use std::path::PathBuf;

/// Trains a model
///
/// With no argument: a small model on a text that comes with the program, in less than a minute.
#[derive(Clone, Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub struct Options {
    /// Settings that the flags do not give: TOML, flag = value a line. A run leaves its own in OUT/config.toml
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub config: Option<PathBuf>,

    /// Token files (.bin) to train on; quote the pattern [default: a text that comes with the program, as bytes]
    #[arg(short = 'i', long, value_name = "GLOB", help_heading = "Data")]
    pub train: Option<String>,

    /// Token files (.bin) to measure progress on
    #[arg(short = 'j', long, value_name = "GLOB", requires = "train", help_heading = "Data")]
    pub val: Option<String>,

    /// 1: shards, and the samples in each, in an order that is drawn anew each epoch, by each rank its own; 0: in their order, and
    /// each step has the same tokens for any number of ranks and any --batch (the tokens at the end of a shard that fill no
    /// whole --total-batch are left out)
    #[arg(long, value_name = "0|1", value_parser = switch, default_value = "1", action = ArgAction::Set, help_heading = "Data")]
    pub shuffle: bool,

    /// Train on one batch over and over, the first of --val, or of --train without --val: the loss must go to nearly 0
    #[arg(short = 'a', long, value_name = "0|1", value_parser = switch, default_value = "0", num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, help_heading = "Data")]
    pub overfit_one_batch: bool,

    /// Directory for main.log, main.jsonl, config.toml and checkpoints [default: nothing is kept]
    #[arg(short, long, value_name = "DIR", help_heading = "Data")]
    pub out: Option<PathBuf>,

    /// d6, d12 (GPT-2 124M), d24, d36, d48, gpt3:c768 …, or a model file (.bin) to begin from [default: d12; a small model
    /// for the text that comes with the program]
    #[arg(short = 'e', long, value_name = "NAME|FILE", help_heading = "Model")]
    pub model: Option<String>,

    /// In place of --model, with --heads and --channels: a free shape
    #[arg(long, value_name = "N", value_parser = count, requires = "heads", requires = "channels", conflicts_with = "model", help_heading = "Model")]
    pub layers: Option<usize>,

    /// Attention heads
    #[arg(long, value_name = "N", value_parser = count, requires = "layers", conflicts_with = "model", help_heading = "Model")]
    pub heads: Option<usize>,

    /// Width; a multiple of --heads (GPUs take heads of 64, 80, 96 or 128 channels)
    #[arg(long, value_name = "N", value_parser = count, requires = "layers", conflicts_with = "model", help_heading = "Model")]
    pub channels: Option<usize>,

    /// Seed of the initial weights and of the order of the data
    #[arg(long, default_value = "42", help_heading = "Model")]
    pub seed: u32,

    /// Sequences that are computed at once [default: 4]
    #[arg(short, long, value_name = "B", value_parser = count, help_heading = "Batch")]
    pub batch: Option<usize>,

    /// Tokens in a sequence [default: 1024, or fewer if the model takes fewer]
    #[arg(short = 't', long, value_name = "T", value_parser = count, help_heading = "Batch")]
    pub seq: Option<usize>,

    /// Tokens of an optimizer step, a multiple of batch x seq: gradients are accumulated [default: batch x seq]
    #[arg(short = 'd', long, value_name = "N", value_parser = count, help_heading = "Batch")]
    pub total_batch: Option<usize>,

    /// Optimizer steps; -1: as many as go once through the data [default: -1]
    #[arg(short = 'x', long, value_name = "N", value_parser = count_or_all, allow_hyphen_values = true, help_heading = "Optimizer")]
    pub steps: Option<Count>,

    /// How the learning rate changes
    #[arg(short = 'k', long, value_enum, default_value = "cosine", help_heading = "Optimizer")]
    pub schedule: Kind,

    /// Highest learning rate [default: 3e-4]
    #[arg(short, long, value_parser = non_negative, help_heading = "Optimizer")]
    pub lr: Option<f32>,

    /// Steps over which the learning rate rises [default: 0]
    #[arg(short = 'u', long, value_name = "N", help_heading = "Optimizer")]
    pub warmup: Option<usize>,

    /// Last learning rate, as a fraction of the highest [default: 1]
    #[arg(short = 'q', long, value_parser = non_negative, help_heading = "Optimizer")]
    pub final_fraction: Option<f32>,

    /// Weight decay of matrices and embeddings [default: 0]
    #[arg(short = 'c', long, value_parser = non_negative, help_heading = "Optimizer")]
    pub weight_decay: Option<f32>,

    /// Skip the update of a step whose loss has a z-score above Z among the last 128; 0: never; also -sl
    #[arg(long, value_name = "Z", default_value = "0", value_parser = non_negative, help_heading = "Optimizer")]
    pub skip_loss_z: f32,

    /// The same for the norm of its gradients; also -sg. What is not finite is always skipped
    #[arg(long, value_name = "Z", default_value = "0", value_parser = non_negative, help_heading = "Optimizer")]
    pub skip_norm_z: f32,

    /// End the run after N steps in a row whose loss or gradients were not finite
    #[arg(long, value_name = "N", default_value = "10", value_parser = count, help_heading = "Optimizer")]
    pub max_bad_steps: usize,

    /// Measure the validation loss every N steps, before the first and at the end; 0: never [default: 20]
    #[arg(short, long, value_name = "N", value_parser = every, allow_hyphen_values = true, help_heading = "While it runs")]
    pub val_every: Option<usize>,

    /// Batches of a validation; -1: all there are [default: 20]
    #[arg(short = 'm', long, value_name = "N", value_parser = count_or_all, allow_hyphen_values = true, help_heading = "While it runs")]
    pub val_batches: Option<Count>,

    /// Evaluation file (.bin), as `data hellaswag` makes it: how often the model finds the right ending, measured every
    /// --val-every steps and at the end
    #[arg(long, value_name = "FILE", help_heading = "While it runs")]
    pub hellaswag: Option<PathBuf>,

    /// Examples of --hellaswag to take, the first ones [default: all there are]
    #[arg(long, value_name = "N", value_parser = count, requires = "hellaswag", help_heading = "While it runs")]
    pub hellaswag_examples: Option<usize>,

    /// Write some text every N steps and at the end; 0: never [default: 20]
    #[arg(short, long, value_name = "N", value_parser = every, allow_hyphen_values = true, help_heading = "While it runs")]
    pub sample_every: Option<usize>,

    /// Tokens of such a text [default: 64]
    #[arg(short = 'g', long, value_name = "N", value_parser = count, help_heading = "While it runs")]
    pub sample_length: Option<usize>,

    /// With --out: write a checkpoint every N steps and at the end; 0: only when asked to stop [default: at the end]
    #[arg(short = 'n', long, value_name = "N", value_parser = every, allow_hyphen_values = true, requires = "out", help_heading = "CheckpointWriter")]
    pub checkpoint_every: Option<usize>,

    /// Keep the newest N checkpoints; 0: all
    #[arg(long, value_name = "N", default_value = "0", requires = "out", help_heading = "CheckpointWriter")]
    pub keep: usize,

    /// With --keep: keep those of every N-th step besides; 0: none
    #[arg(long, value_name = "N", default_value = "0", requires = "out", help_heading = "CheckpointWriter")]
    pub major_every: usize,

    /// Go on from the newest whole checkpoint in --out, if there is one; other settings are as before
    #[arg(short = 'y', long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_value = "0", default_missing_value = "1", requires = "out", help_heading = "CheckpointWriter")]
    pub resume: bool,

    /// Go on although settings or data are not those of the checkpoint
    #[arg(long, requires = "resume", help_heading = "CheckpointWriter")]
    pub force_resume: bool,

    /// Activations that the backward pass computes again, so that larger batches fit: 0 none, 1 the GELUs, 2 the LayerNorms too
    #[arg(short, long, value_name = "0|1|2", default_value = "0", value_parser = level::<Recompute>, help_heading = "Memory")]
    pub recompute: Recompute,

    /// In bf16: keep the weights in f32 besides; without, updates are rounded stochastically into bf16
    #[arg(short = 'w', long, value_name = "0|1", default_value = "1", value_parser = switch, action = ArgAction::Set, help_heading = "Memory")]
    pub master_weights: bool,

    /// Tell of the GPU's load, clock, power and temperature every N steps, through NVML; 0 or -1: never; also -lg
    #[arg(long, value_name = "N", default_value = "0", value_parser = every, allow_hyphen_values = true, help_heading = "While it runs")]
    pub gpu_info_every: usize,

    /// What ranks divide among them: 0 nothing, 1 the optimizer's state, 2 the layers' gradients too, 3 the layers' parameters too
    #[arg(short = 'z', long, value_name = "0|1|2|3", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3), help_heading = "Several processes")]
    pub zero_stage: u8,

    /// Compare parameters and optimizer over the ranks every N steps; 0: never
    #[arg(long, value_name = "N", default_value = "0", value_parser = every, allow_hyphen_values = true, help_heading = "Several processes")]
    pub check_ranks: usize,

    #[command(flatten)]
    pub launch: Launch,

    /// Plan the memory and open the data, tell of both, and stop. With --device cuda this needs no GPU
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub hardware: Hardware,
}

/// Which process of a run this one is, where there are several: one for each GPU. What mpirun, srun and torchrun set in the
/// environment is understood.
#[derive(Clone, Debug, clap::Args)]
pub struct Launch {
    /// Number of this process among those of the run, from 0 [default: as the launcher says]
    #[arg(long, value_name = "N", requires = "world_size", help_heading = "Several processes")]
    pub rank: Option<usize>,

    /// Processes of the run [default: as the launcher says, or 1]
    #[arg(long, value_name = "N", value_parser = count, requires = "rank", help_heading = "Several processes")]
    pub world_size: Option<usize>,

    /// Number of this process on its host, and of its GPU [default: as the launcher says, or by rank]
    #[arg(long, value_name = "N", help_heading = "Several processes")]
    pub local_rank: Option<usize>,

    /// Where the processes meet: tcp://HOST:PORT of rank 0, or file:///DIR of a directory that all see [default: a port of
    /// this host]
    #[arg(long, value_name = "PLACE", help_heading = "Several processes")]
    pub rendezvous: Option<Endpoint>,

    /// Seconds that they may take to meet
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "60", help_heading = "Several processes")]
    pub rendezvous_timeout: usize,

    /// Seconds without progress, between meeting and the first step, after which a rank is given up
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "600", help_heading = "Several processes")]
    pub start_timeout: usize,

    /// Seconds without progress, from the first step on, after which a rank is given up. Rank 0 alone writes checkpoints and texts while others wait
    #[arg(long, value_name = "SECONDS", value_parser = count, default_value = "1800", help_heading = "Several processes")]
    pub step_timeout: usize,
}

/// A number, or all there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    All,
    Some(usize),
}

fn count_or_all(text: &str) -> Result<Count, String> {
    if text == "-1" {
        return Ok(Count::All);
    }
    count(text).map(Count::Some).map_err(|e| e + ", or -1 for all")
}

/// How often, in steps; 0 is never, and so is -1, llm.c's way to say it.
fn every(text: &str) -> Result<usize, String> {
    if text == "-1" {
        return Ok(0);
    }
    text.parse().map_err(|_| "expected a whole number, 0 for never".to_owned())
}
