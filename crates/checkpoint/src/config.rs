//! A run's settings as they were settled: flags over the `--config` file over defaults. Each key is a flag of `train`, so
//! that the file a run leaves, `config.toml`, is one for `--config`.

use anyhow::{Context, Result};
use engine::GeluFusion;
use engine::open::{Device, MatmulBackend, Precision};
use model::Recompute;
use model::guards::Limits;
use model::schedule::Kind;
use serde::{Deserialize, Serialize, Serializer};
use std::io::Write;
use std::path::{Path, PathBuf};

/// "Every" counts steps, 0 is never. What a run does not have is `None`, and absent from the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub struct Config {
    /// Patterns of token files; without the first, the text that comes with the program.
    pub train: Option<String>,
    pub val: Option<String>,
    /// Whether `train` is read in an order that is drawn, or in its own.
    pub shuffle: bool,
    pub overfit_one_batch: bool,
    pub out: Option<PathBuf>,

    /// A name or a file; without one, the shape in the next three.
    pub model: Option<String>,
    pub layers: Option<usize>,
    pub heads: Option<usize>,
    pub channels: Option<usize>,
    pub seed: u32,

    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Tokens of an optimizer step.
    pub total_batch: usize,

    pub steps: usize,
    pub schedule: Kind,
    #[serde(serialize_with = "shortest")]
    pub lr: f32,
    pub warmup: usize,
    #[serde(serialize_with = "shortest")]
    pub final_fraction: f32,
    #[serde(serialize_with = "shortest")]
    pub weight_decay: f32,
    /// z-scores above which an update is skipped; 0: none.
    #[serde(serialize_with = "shortest")]
    pub skip_loss_z: f32,
    #[serde(serialize_with = "shortest")]
    pub skip_norm_z: f32,
    /// Steps in a row, not finite, that end the run.
    pub max_bad_steps: usize,

    pub val_every: usize,
    pub val_batches: usize,
    pub hellaswag: Option<PathBuf>,
    pub hellaswag_examples: Option<usize>,
    pub sample_every: usize,
    pub sample_length: usize,
    pub checkpoint_every: usize,
    /// Of the newest checkpoints; 0: all.
    pub keep: usize,
    pub major_every: usize,

    pub gpu_info_every: usize,
    pub check_ranks: usize,
    /// What ranks divide among them.
    pub zero_stage: u8,

    pub recompute: Recompute,
    pub master_weights: bool,

    /// The one that was opened, not `auto`.
    pub device: Device,
    pub precision: Precision,
    pub tf32: bool,
    pub gelu_fusion: GeluFusion,
    pub matmul: MatmulBackend,
    /// Architecture, if one was asked for.
    pub kernels: Option<String>,
}

/// In the digits a person would write, which read back as the same f32.
fn shortest<S: Serializer>(value: &impl ToString, serializer: S) -> Result<S::Ok, S::Error> {
    let digits = value.to_string();
    serializer.serialize_f64(digits.parse().map_err(serde::ser::Error::custom)?)
}

impl Config {
    /// Norm that gradients are clipped to; llm.c's.
    pub const CLIP: f32 = 1.0;

    /// The file's name in a run's directory.
    pub const FILE: &str = "config.toml";

    /// Micro-batches of an optimizer step, on each of `ranks`.
    pub fn grad_accum(&self, ranks: usize) -> usize {
        self.total_batch / (self.batch * self.seq * ranks)
    }

    pub fn limits(&self) -> Limits {
        let above_zero = |z: f32| (z > 0.0).then(|| f64::from(z));
        Limits {
            loss_z: above_zero(self.skip_loss_z),
            norm_z: above_zero(self.skip_norm_z),
            bad_steps: self.max_bad_steps,
        }
    }

    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).context("the configuration cannot be written as TOML")
    }

    /// Writes `config.toml` into a run's directory.
    pub fn save(&self, directory: &Path) -> Result<()> {
        let text = self.to_toml()?;
        atomic_file::write(&directory.join(Self::FILE), |file| {
            writeln!(file, "# The settings of this run. `train --config` takes them again; its flags win over them.")?;
            Ok(file.write_all(text.as_bytes())?)
        })
    }
}
