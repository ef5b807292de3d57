//! The resolved settings of a run: flags override the `--config` file, which overrides defaults.

use super::TrainOptions;
use anyhow::{Context, Result};
use checkpoint::config;
use engine::GeluFusion;
use engine::open::Precision;
use model::guards::Limits;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The settings of a run. Intervals (`*_every`) are in steps, and 0 means never. Settings that a run does not use are `None` and absent
/// from `config.toml`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Config {
    /// The flags. The serialized ones have their final values.
    #[serde(flatten)]
    pub flags: TrainOptions,

    // Final values of flags whose default depends on the model, the data or other flags.
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Tokens per optimizer step, over all ranks.
    pub total_batch: usize,
    /// Number of optimizer steps.
    pub steps: usize,
    /// Peak learning rate.
    pub lr: f32,
    /// Steps of linear warmup.
    pub warmup: usize,
    /// Final learning rate as a fraction of the peak.
    pub final_fraction: f32,
    /// Weight decay of matrices and embeddings.
    pub weight_decay: f32,
    /// Change of the biases of routers in each step. Present if the model has biases.
    pub router_bias_rate: Option<f32>,
    /// Interval of validation.
    pub val_every: usize,
    /// Batches per validation.
    pub val_batches: usize,
    /// Tokens per generated text.
    pub sample_length: usize,
    /// Minutes after which a checkpoint is written if there was none meanwhile; 0 disables it.
    pub checkpoint_minutes: f32,
    /// Interval of the counts of values that FP8 loses. Present if the precision is FP8.
    pub fp8_stats: Option<usize>,
    /// Precision of parameters and activations.
    pub precision: Precision,
    /// Which GELU kernels are fused into GEMM epilogues.
    pub gelu_fusion: GeluFusion,
}

/// The order of the keys in `config.toml`, which is that of earlier versions. Other keys follow.
const ORDER: &str = "train val tokenizer shuffle overfit-one-batch out model layers heads channels kv-heads head-size ffn seed batch \
    seq total-batch steps optimizer schedule warmdown lr embedding-lr head-lr muon-lr muon-momentum muon-momentum-warmup \
    muon-coefficients warmup final-fraction weight-decay skip-loss-z skip-norm-z max-bad-steps val-every val-batches hellaswag \
    hellaswag-examples core core-every core-max-per-task sample-every sample-length checkpoint-every checkpoint-minutes keep major-every fp8-stats gpu-info-every \
    check-ranks verify-every hash-every zero-stage shard-size recompute master-weights moments offload device precision fp8-recipe \
    fp8-gradients fp8-accumulation fp8-head tf32 gelu-fusion matmul kernels";

impl Config {
    /// Returns the gradient accumulation steps per optimizer step for a number of ranks.
    pub fn grad_accum(&self, world_size: usize) -> usize {
        self.total_batch / (self.batch * self.seq * world_size)
    }

    /// Returns the limits of the loss and gradient norm guards.
    pub fn limits(&self) -> Limits {
        let above_zero = |z: f32| (z > 0.0).then(|| f64::from(z));
        Limits {
            loss_z: above_zero(self.flags.skip_loss_z),
            norm_z: above_zero(self.flags.skip_norm_z),
            bad_steps: self.flags.max_bad_steps,
        }
    }

    /// Returns the settings by their keys.
    pub fn values(&self) -> Result<Map<String, Value>> {
        // The text has the fewest digits that identify an f32. A direct conversion would have those of its f64.
        let text = serde_json::to_string(self).context("cannot convert the configuration to JSON")?;
        let mut values: Map<String, Value> = serde_json::from_str(&text)?;
        values.retain(|_, value| !value.is_null());
        Ok(values)
    }

    /// Returns the settings as TOML.
    pub fn to_toml(&self) -> Result<String> {
        let mut values: Vec<_> = self.values()?.into_iter().collect();
        // Keys after a table would belong to it.
        let position = |key: &str| match key {
            "data" => usize::MAX,
            _ => ORDER.split(' ').position(|other| other == key).unwrap_or(usize::MAX - 1),
        };
        values.sort_by_key(|(key, _)| position(key));
        let line = |value: (String, Value)| {
            let blank = if value.0 == "data" { "\n" } else { "" };
            let line = toml::to_string(&BTreeMap::from([value])).context("cannot convert the configuration to TOML")?;
            Ok(blank.to_owned() + &line)
        };
        values.into_iter().map(line).collect()
    }

    /// Writes `config.toml` into the directory of a run.
    pub fn save(&self, directory: &Path) -> Result<()> {
        config::save(directory, &self.to_toml()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::values::Count;

    /// A file of an earlier version, with every key that it knew.
    const SAVED: &str = "\
train = \"data/train_*.bin\"
val = \"data/val_*.bin\"
tokenizer = \"tokenizer.json\"
shuffle = false
overfit-one-batch = false
out = \"run\"
model = \"d12\"
layers = 2
heads = 4
channels = 64
kv-heads = 2
head-size = 32
ffn = 192
seed = 42
batch = 4
seq = 64
total-batch = 524288
steps = 18865
optimizer = \"muon\"
schedule = \"wsd\"
warmdown = 0.65
lr = 0.0006
embedding-lr = 0.3
head-lr = 0.008
muon-lr = 0.02
muon-momentum = 0.95
muon-momentum-warmup = 300
muon-coefficients = \"classic\"
warmup = 700
final-fraction = 0.1
weight-decay = 0.1
skip-loss-z = 7.5
skip-norm-z = 0.0
max-bad-steps = 10
val-every = 250
val-batches = 20
hellaswag = \"hellaswag_val.bin\"
hellaswag-examples = 1000
sample-every = 0
sample-length = 64
checkpoint-every = 5000
checkpoint-minutes = 2.5
keep = 3
major-every = 50000
fp8-stats = 100
gpu-info-every = 0
check-ranks = 100
verify-every = 1000
hash-every = 500
zero-stage = 2
shard-size = 4
recompute = 1
master-weights = \"remainder\"
moments = \"bf16\"
device = \"cuda\"
precision = \"fp8\"
fp8-recipe = \"delayed\"
fp8-gradients = \"e5m2\"
fp8-accumulation = \"exact\"
fp8-head = true
tf32 = false
gelu-fusion = 2
matmul = \"rust\"
kernels = \"sm_80\"
";

    /// Returns the settings in a file that has all keys, after saving them.
    fn saved_again(text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(config::FILE);
        std::fs::write(&file, text).unwrap();
        let arguments = ["llm-rs", "train", "--config", file.to_str().unwrap()].map(Into::into);
        let flags = Cli::from_arguments(arguments).unwrap().into_train().unwrap();
        let count = |count| if let Some(Count::Some(n)) = count { n } else { 0 };
        let config = Config {
            batch: flags.batch.unwrap(),
            seq: flags.seq.unwrap(),
            total_batch: flags.total_batch.unwrap(),
            steps: count(flags.steps),
            lr: flags.lr.unwrap(),
            warmup: flags.warmup.unwrap(),
            final_fraction: flags.final_fraction.unwrap(),
            weight_decay: flags.weight_decay.unwrap(),
            router_bias_rate: flags.router_bias_rate,
            val_every: flags.val_every.unwrap(),
            val_batches: count(flags.val_batches),
            sample_length: flags.sample_length.unwrap(),
            checkpoint_minutes: flags.checkpoint_minutes.unwrap(),
            fp8_stats: Some(flags.fp8_stats),
            precision: flags.hardware.precision.unwrap(),
            gelu_fusion: flags.hardware.gelu_fusion.unwrap(),
            flags,
        };
        config.save(dir.path()).unwrap();
        std::fs::read_to_string(file).unwrap()
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read_and_written_without_changes() {
        let text = saved_again(SAVED);
        // Keys of newer flags follow.
        assert!(text.split_once('\n').unwrap().1.starts_with(SAVED), "{text}");
    }

    /// Earlier versions had a switch for master weights, and no type of the moments.
    #[test]
    fn default_storage_is_saved_as_in_earlier_versions() {
        for switch in ["true", "false"] {
            let weights = format!("master-weights = {switch}\n");
            let saved = SAVED.replace("master-weights = \"remainder\"\nmoments = \"bf16\"\n", &weights);
            let text = saved_again(&saved);
            assert!(text.split_once('\n').unwrap().1.starts_with(&saved), "{text}");
        }
    }

    #[test]
    fn settings_that_determine_the_weights_may_not_change_at_resume() {
        let (fixed, other) = ORDER.split_once("max-bad-steps").unwrap();
        let (output, fixed): (Vec<_>, Vec<_>) = fixed.split_whitespace().partition(|key| *key == "out");
        assert!(!fixed.into_iter().any(TrainOptions::may_change));
        let mut free = other.split_whitespace().chain(output).chain(["max-bad-steps"]);
        assert!(free.all(TrainOptions::may_change));
    }
}
