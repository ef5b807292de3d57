//! The resolved settings of a run: flags override the `--config` file, which overrides defaults.
//!
//! Each key is a flag of `train`, so the `config.toml` of a run can be passed to `--config`.

use anyhow::{Context, Result};
use engine::GeluFusion;
use engine::open::{Device, MatmulBackend, Precision};
use engine::ops::{Fp8Accumulation, MuonCoefficients};
use model::guards::Limits;
use model::schedule::Kind;
use model::{Fp8Gradients, Fp8Recipe, MasterWeights, Moments, Optimizer, Recompute};
use serde::{Deserialize, Serialize, Serializer};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The settings of a run. Intervals (`*_every`) are in steps, and 0 means never. Settings that a run does not use are `None`
/// and absent from the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// File patterns of the training data. If absent, the built-in text is used.
    pub train: Option<String>,
    /// File patterns of the validation data.
    pub val: Option<String>,
    /// Name or file of the tokenizer. If absent, it is that of the model or of the data.
    pub tokenizer: Option<String>,
    /// Whether the training data is read in a random order.
    pub shuffle: bool,
    /// Whether every step trains on the first batch.
    pub overfit_one_batch: bool,
    /// Directory of logs and checkpoints.
    pub out: Option<PathBuf>,

    /// Name or file of the model. If absent, the next three settings define its shape; otherwise the next six replace its sizes.
    pub model: Option<String>,
    /// Number of transformer layers.
    pub layers: Option<usize>,
    /// Number of attention heads.
    pub heads: Option<usize>,
    /// Width of the residual stream.
    pub channels: Option<usize>,
    /// Number of key-value heads.
    pub kv_heads: Option<usize>,
    /// Channels of a head.
    pub head_size: Option<usize>,
    /// Channels between the two linear layers of the MLP.
    pub ffn: Option<usize>,
    /// Seed of the initial weights and of shuffling.
    pub seed: u32,

    /// Sequences per micro-batch.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Tokens per optimizer step, over all ranks.
    pub total_batch: usize,

    /// Number of optimizer steps.
    pub steps: usize,
    /// Optimizer of the layers' matrices.
    pub optimizer: Optimizer,
    /// Learning rate schedule.
    pub schedule: Kind,
    /// Fraction of the steps in which a trapezoidal schedule decays.
    pub warmdown: Option<f64>,
    /// Peak learning rate.
    #[serde(serialize_with = "shortest")]
    pub lr: f32,
    /// Peak learning rate of the embeddings. If absent, `lr`.
    #[serde(serialize_with = "shortest_if_present")]
    pub embedding_lr: Option<f32>,
    /// Peak learning rate of a head of its own. If absent, `lr`.
    #[serde(serialize_with = "shortest_if_present")]
    pub head_lr: Option<f32>,
    /// Peak learning rate of Muon. Present if Muon is the optimizer, as are the next three.
    #[serde(serialize_with = "shortest_if_present")]
    pub muon_lr: Option<f32>,
    /// Momentum of Muon.
    #[serde(serialize_with = "shortest_if_present")]
    pub muon_momentum: Option<f32>,
    /// Steps in which the momentum increases to its value.
    pub muon_momentum_warmup: Option<usize>,
    /// Coefficients of the Newton-Schulz iterations.
    pub muon_coefficients: Option<MuonCoefficients>,
    /// Steps of linear warmup.
    pub warmup: usize,
    /// Final learning rate as a fraction of the peak.
    #[serde(serialize_with = "shortest")]
    pub final_fraction: f32,
    /// Weight decay of matrices and embeddings.
    #[serde(serialize_with = "shortest")]
    pub weight_decay: f32,
    /// An update is skipped if the z-score of its loss is above this value; 0 disables the check.
    #[serde(serialize_with = "shortest")]
    pub skip_loss_z: f32,
    /// An update is skipped if the z-score of its gradient norm is above this value; 0 disables the check.
    #[serde(serialize_with = "shortest")]
    pub skip_norm_z: f32,
    /// Number of consecutive steps with a non-finite loss or norm that ends the run.
    pub max_bad_steps: usize,

    /// Interval of validation.
    pub val_every: usize,
    /// Batches per validation.
    pub val_batches: usize,
    /// HellaSwag data set.
    pub hellaswag: Option<PathBuf>,
    /// Number of HellaSwag examples to evaluate. If absent, all.
    pub hellaswag_examples: Option<usize>,
    /// Interval of text generation. If absent, only at the end.
    pub sample_every: Option<usize>,
    /// Tokens per generated text.
    pub sample_length: usize,
    /// Interval of checkpoints. If absent, only at the end.
    pub checkpoint_every: Option<usize>,
    /// Minutes after which a checkpoint is written if there was none meanwhile; 0 disables it. Files of earlier versions lack it.
    #[serde(default, serialize_with = "shortest")]
    pub checkpoint_minutes: f32,
    /// Number of newest checkpoints to keep; 0 keeps all.
    pub keep: usize,
    /// Checkpoints of steps that are multiples of this value are never deleted.
    pub major_every: usize,

    /// Interval of the counts of values that FP8 loses. Present if the precision is FP8.
    pub fp8_stats: Option<usize>,
    /// Interval of GPU telemetry.
    pub gpu_info_every: usize,
    /// Interval of the comparison of replicated tensors between ranks.
    pub check_ranks: usize,
    /// Interval at which a micro-batch is computed twice. Files of earlier versions lack it, and the next one.
    #[serde(default)]
    pub verify_every: usize,
    /// Interval at which hashes of parameters and optimizer state are logged.
    #[serde(default)]
    pub hash_every: usize,
    /// ZeRO stage: 0 replicates all tensors, 1 shards the optimizer state, 2 also the gradients of the layers, 3 also their
    /// parameters.
    pub zero_stage: u8,
    /// Number of ranks that shard together. If absent, all.
    pub shard_size: Option<usize>,

    /// Which activations are recomputed in the backward pass.
    pub recompute: Recompute,
    /// Storage of the f32 master weights of bf16 parameters.
    pub master_weights: MasterWeights,
    /// Type of the optimizer's moments beside bf16 parameters. Files of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Moments::is_default")]
    pub moments: Moments,

    /// The device in use, never `auto`.
    pub device: Device,
    /// Precision of parameters and activations.
    pub precision: Precision,
    /// Scaling of FP8. Present if that is the precision, as are the next two.
    pub fp8_recipe: Option<Fp8Recipe>,
    /// Format of gradients in FP8.
    pub fp8_gradients: Option<Fp8Gradients>,
    /// Accumulation of FP8 products.
    pub fp8_accumulation: Option<Fp8Accumulation>,
    /// Whether fp32 GEMMs use TF32 tensor cores.
    pub tf32: bool,
    /// Which GELU kernels are fused into GEMM epilogues.
    pub gelu_fusion: GeluFusion,
    /// Which GEMM implementation is used.
    pub matmul: MatmulBackend,
    /// Architecture of the GPU kernels, if one was requested.
    pub kernels: Option<String>,
}

/// Serializes an f32 with the fewest digits that round-trip.
fn shortest<S: Serializer>(value: &impl ToString, serializer: S) -> Result<S::Ok, S::Error> {
    let digits = value.to_string();
    serializer.serialize_f64(digits.parse().map_err(serde::ser::Error::custom)?)
}

/// Serializes an optional f32 like [`shortest`].
#[expect(clippy::ref_option, reason = "the signature that serde calls")]
fn shortest_if_present<S: Serializer>(value: &Option<impl ToString>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => shortest(value, serializer),
        None => serializer.serialize_none(),
    }
}

impl Config {
    /// Maximum gradient norm, as in llm.c.
    pub const CLIP: f32 = 1.0;

    /// Name of the file in the directory of a run.
    pub const FILE: &str = "config.toml";

    /// First line of the file.
    const HEADER: &str = "# The settings of this run, for `train --config`. Flags override them.\n";

    /// Returns the gradient accumulation steps per optimizer step for a number of ranks.
    pub fn grad_accum(&self, world_size: usize) -> usize {
        self.total_batch / (self.batch * self.seq * world_size)
    }

    /// Returns the limits of the loss and gradient norm guards.
    pub fn limits(&self) -> Limits {
        let above_zero = |z: f32| (z > 0.0).then(|| f64::from(z));
        Limits {
            loss_z: above_zero(self.skip_loss_z),
            norm_z: above_zero(self.skip_norm_z),
            bad_steps: self.max_bad_steps,
        }
    }

    /// Returns the settings as TOML.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).context("cannot convert the configuration to TOML")
    }

    /// Writes `config.toml` into the directory of a run.
    pub fn save(&self, directory: &Path) -> Result<()> {
        let text = self.to_toml()?;
        atomic_file::write(&directory.join(Self::FILE), |file| {
            file.write_all(Self::HEADER.as_bytes())?;
            Ok(file.write_all(text.as_bytes())?)
        })
    }

    /// Returns whether the `config.toml` of a directory begins like one that a run has saved.
    pub fn is_saved(directory: &Path) -> bool {
        let mut start = [0; Self::HEADER.len()];
        let read =
            bounded_file::open_of_run(&directory.join(Self::FILE)).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && start == *Self::HEADER.as_bytes()
    }

    /// Returns a setting of the run in a directory. `None` if it is not set, or if no run has saved its settings there.
    pub fn saved(directory: &Path, key: &str) -> Option<toml::Value> {
        let path = directory.join(Self::FILE);
        let text =
            bounded_file::read_to_string(&path, bounded_file::SETTINGS).ok().filter(|_| Self::is_saved(directory))?;
        toml::from_str::<toml::Table>(&text).ok()?.remove(key)
    }
}
