//! The file of `--config`: TOML whose keys are the flags of a command.
//!
//! The file is converted into arguments of the command, so that the same parser checks flags and file.

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::{Spanned, Value};

/// Flags that are no keys of a file.
const NOT_KEYS: [&str; 3] = ["config", "help", "version"];

/// A parsed configuration file.
pub struct ConfigFile {
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    /// Line number, from 1.
    line: usize,
    value: Value,
}

/// Keys that replace sizes of the model.
const SIZES: [&str; 6] = ["layers", "heads", "kv-heads", "head-size", "channels", "ffn"];

impl ConfigFile {
    /// Reads and parses a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = bounded_file::read_to_string(path, bounded_file::SETTINGS)
            .with_context(|| format!("--config {}", path.display()))?;
        let line = |span: Range<usize>| 1 + text[..span.start].matches('\n').count();
        let parsed = toml::from_str::<BTreeMap<Spanned<String>, Value>>(&text).map_err(|error| {
            let place = error.span().map(|span| format!(", line {}", line(span))).unwrap_or_default();
            anyhow!("{}{place}: {}", path.display(), error.message())
        })?;
        let entry = |(key, value): (Spanned<String>, Value)| {
            let line = line(key.span());
            (key.into_inner(), Entry { line, value })
        };
        Ok(Self { path: path.to_owned(), entries: parsed.into_iter().map(entry).collect() })
    }

    /// Returns the file as arguments of `command`.
    ///
    /// Keys that the command line also gives are left out: the command line wins. `--model` there also replaces the sizes in the file.
    pub fn arguments(&self, command: &Command, given: &ArgMatches) -> Result<Vec<OsString>> {
        let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
        let mut arguments = Vec::new();
        for (key, Entry { value, .. }) in &self.entries {
            let arg = self.flag(command, key)?;
            let argument = self.argument(key, value, arg)?;
            let replaced = SIZES.contains(&&**key) && is_given("model");
            if !is_given(arg.get_id().as_str()) && !replaced {
                arguments.extend(argument);
            }
        }
        Ok(arguments)
    }

    fn flag<'a>(&self, command: &'a Command, key: &str) -> Result<&'a Arg> {
        let flags = || command.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg)));
        let keys = || flags().filter(|(long, _)| !NOT_KEYS.contains(long));
        if let Some((_, arg)) = keys().find(|(long, _)| *long == key) {
            return Ok(arg);
        }
        let similarity = |long: &str| strsim::jaro_winkler(long, &key.replace('_', "-").to_lowercase());
        let nearest =
            keys().map(|(long, _)| long).max_by(|a, b| similarity(a).total_cmp(&similarity(b))).unwrap_or_default();
        bail!(
            "{}: unknown key: expected a flag of '{}' without its dashes; did you mean '{nearest}'?",
            self.at(key),
            command.get_name()
        )
    }

    fn argument(&self, key: &str, value: &Value, arg: &Arg) -> Result<Option<OsString>> {
        let Some(text) = text(value) else {
            bail!("{}: expected text, a number, true or false, found {}", self.at(key), value.type_str())
        };
        if arg.get_action().takes_values() {
            return Ok(Some(format!("--{key}={text}").into()));
        }
        ensure!(value.is_bool(), "{} = {value}: expected true or false", self.at(key));
        Ok((value.as_bool() == Some(true)).then(|| format!("--{key}").into()))
    }

    /// Rewrites an error about a value of the file to name its line. Returns any other error unchanged.
    pub fn explain(&self, error: clap::Error) -> Result<anyhow::Error, clap::Error> {
        let key = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(arg)) => {
                arg.trim_start_matches('-').split([' ', '=', '[']).next().unwrap_or_default()
            }
            _ => return Err(error),
        };
        let Some(Entry { value, .. }) = self.entries.get(key) else { return Err(error) };
        // The invalid value may come from the command line, which overrides the file.
        if let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidValue)
            && *wrong != text(value).unwrap_or_default()
        {
            return Err(error);
        }
        let reason = match (error.kind(), error.source(), error.get(ContextKind::ValidValue)) {
            (ErrorKind::InvalidValue, _, Some(ContextValue::Strings(valid))) => {
                format!("expected one of {}", valid.join(", "))
            }
            (_, Some(source), _) => source.to_string(),
            _ => error.to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned(),
        };
        Ok(anyhow!("{} = {value}: {reason}", self.at(key)))
    }

    fn at(&self, key: &str) -> String {
        let line = self.entries.get(key).map_or(0, |entry| entry.line);
        format!("{}, line {line}: {key}", self.path.display())
    }
}

/// Formats a value as a command-line argument.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        // Debug formatting keeps a decimal point or an exponent, so that flags for whole numbers reject the value.
        Value::Float(number) => Some(format!("{number:?}")),
        Value::Boolean(on) => Some(on.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::parser;
    use checkpoint::config::Config;
    use engine::GeluFusion;
    use engine::open::{Device, MatmulBackend, Precision};
    use engine::ops::{Fp8Accumulation, MuonCoefficients};
    use model::schedule::Kind;
    use model::{Fp8Gradients, Fp8Recipe, MasterWeights, Moments, Optimizer, Recompute};
    use std::collections::BTreeSet;

    /// Flags that control one process and are not settings of the run.
    const ACTIONS: [&str; 19] = [
        "json",
        "log-every",
        "quiet",
        "tensorboard",
        "config",
        "dry-run",
        "help",
        "verbose",
        "resume",
        "force-resume",
        "rank",
        "world-size",
        "local-rank",
        "rendezvous",
        "rendezvous-secret",
        "min-ranks",
        "rendezvous-timeout",
        "start-timeout",
        "step-timeout",
    ];

    fn config() -> Config {
        Config {
            train: Some("data/train_*.bin".into()),
            val: Some("data/val_*.bin".into()),
            tokenizer: Some("tokenizer.json".into()),
            shuffle: false,
            overfit_one_batch: false,
            out: Some("run".into()),
            model: Some("d12".into()),
            layers: Some(2),
            heads: Some(4),
            channels: Some(64),
            kv_heads: Some(2),
            head_size: Some(32),
            ffn: Some(192),
            seed: 42,
            batch: 4,
            seq: 64,
            total_batch: 524_288,
            steps: 18_865,
            optimizer: Optimizer::Muon,
            schedule: Kind::Wsd,
            warmdown: Some(0.65),
            lr: 6e-4,
            embedding_lr: Some(0.3),
            head_lr: Some(0.008),
            muon_lr: Some(0.02),
            muon_momentum: Some(0.95),
            muon_momentum_warmup: Some(300),
            muon_coefficients: Some(MuonCoefficients::Classic),
            warmup: 700,
            final_fraction: 0.1,
            weight_decay: 0.1,
            skip_loss_z: 7.5,
            skip_norm_z: 0.0,
            max_bad_steps: 10,
            val_every: 250,
            val_batches: 20,
            hellaswag: Some("hellaswag_val.bin".into()),
            hellaswag_examples: Some(1000),
            sample_every: Some(0),
            sample_length: 64,
            checkpoint_every: Some(5000),
            fp8_stats: Some(100),
            checkpoint_minutes: 2.5,
            gpu_info_every: 0,
            zero_stage: 2,
            shard_size: Some(4),
            check_ranks: 100,
            verify_every: 1000,
            hash_every: 500,
            recompute: Recompute::Activation,
            master_weights: MasterWeights::Remainder,
            moments: Moments::Bf16,
            keep: 3,
            major_every: 50_000,
            device: Device::Cuda,
            precision: Precision::Fp8,
            fp8_recipe: Some(Fp8Recipe::Delayed),
            fp8_gradients: Some(Fp8Gradients::E4m3),
            fp8_accumulation: Some(Fp8Accumulation::Exact),
            tf32: false,
            gelu_fusion: GeluFusion::Both,
            matmul: MatmulBackend::Rust,
            kernels: Some("sm_80".into()),
        }
    }

    #[test]
    fn keys_of_a_saved_file_are_the_flags_of_train() {
        let command = parser();
        let train = command.find_subcommand("train").unwrap();
        let flags: BTreeSet<_> = train.get_arguments().filter_map(|a| a.get_long().map(str::to_owned)).collect();
        let keys: BTreeSet<_> =
            config().to_toml().unwrap().parse::<toml::Table>().unwrap().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, flags.into_iter().filter(|flag| !ACTIONS.contains(&&**flag)).collect());
    }

    /// Earlier versions had a switch for master weights, and no type of the moments.
    #[test]
    fn default_storage_is_saved_as_in_earlier_versions() {
        for (master_weights, saved) in [(MasterWeights::F32, "true"), (MasterWeights::None, "false")] {
            let config = Config { master_weights, moments: Moments::F32, ..config() };
            let text = config.to_toml().unwrap();
            assert!(text.contains(&format!("\nmaster-weights = {saved}\n")) && !text.contains("moments"), "{text}");
            assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
        }
    }

    #[test]
    fn a_saved_file_round_trips_with_short_numbers() {
        let dir = tempfile::tempdir().unwrap();
        config().save(dir.path()).unwrap();
        let text = std::fs::read_to_string(dir.path().join(Config::FILE)).unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config());
        assert!(text.contains("\nlr = 0.0006\n") && text.contains("\nschedule = \"wsd\"\n"), "{text}");
        assert!(text.contains("\noptimizer = \"muon\"\n") && text.contains("\nmuon-lr = 0.02\n"), "{text}");
    }
}
