//! The shape of the model, from `--model` and the flags that replace its sizes.

use super::options::TrainOptions;
use crate::commands::resources::StructureFlags;
use anyhow::{Context, Result, ensure};
use engine::open::Precision;
use interchange::ModelSource;
use interchange::peft::AdapterFile;
use model::descriptor::{AdapterBase, Adapters, GPT2_VOCAB, Overrides, RouterOverrides};
use model::{Descriptor, Optimizer};
use std::path::Path;
use tokenizer::BYTE_VOCAB;

/// Layers, heads and channels of the default model for the built-in corpus. GPUs support its head size.
const SMALL: (usize, usize, usize) = (2, 2, 128);

/// The settings from which the shape of the model follows.
pub struct ModelFlags {
    model: Option<String>,
    overrides: Overrides,
}

impl ModelFlags {
    /// Writes the settings to the flags of the run.
    pub fn save(self, flags: &mut TrainOptions) {
        let Overrides { layers, heads, kv_heads, head_size, channels, mlp_channels, window, window_pattern, .. } =
            self.overrides;
        let Overrides { additions, experts, active_experts, .. } = self.overrides;
        flags.model = self.model;
        (flags.layers, flags.heads, flags.channels) = (layers, heads, channels);
        (flags.kv_heads, flags.head_size, flags.ffn) = (kv_heads, head_size, mlp_channels);
        (flags.experts, flags.active_experts) = (experts, active_experts);
        flags.structure = StructureFlags { window, window_pattern, additions };
    }
}

/// Returns the shape of the model and, for a path, the opened model.
///
/// `vocab` is the vocabulary size of the tokenizer, if it is known. Otherwise it is that of the named shape, of GPT-2 for files
/// and of bytes for the built-in text. `seq` is the length of sequences. `from_files` is false for the built-in text. The model of a
/// resumed run is `resumed`.
pub fn resolve(
    options: &TrainOptions,
    vocab: Option<usize>,
    seq: usize,
    from_files: bool,
    resumed: Option<Descriptor>,
) -> Result<(ModelFlags, Descriptor, Option<ModelSource>)> {
    let TrainOptions { layers, heads, kv_heads, head_size, channels, ffn: mlp_channels, .. } = *options;
    let TrainOptions {
        experts, active_experts, structure: StructureFlags { window, window_pattern, additions }, ..
    } = *options;
    let experts = Overrides { experts, active_experts, ..Overrides::default() };
    let windows = Overrides { window, window_pattern, additions, ..experts };
    let overrides = Overrides { layers, heads, kv_heads, head_size, channels, mlp_channels, ..windows };
    // Earlier versions of the program trained models of 50,257 ids on the data of any tokenizer.
    let vocab = resumed.map(|descriptor| descriptor.vocab).or(vocab);
    let default = (from_files && !overrides.has_sizes()).then(|| "d12".to_owned());
    let Some(name) = options.model.clone().or(default) else {
        let (shape, descriptor) =
            custom(overrides, vocab.unwrap_or(if from_files { GPT2_VOCAB } else { BYTE_VOCAB }), seq)?;
        return Ok((shape, descriptor.with_router(router(options))?, None));
    };
    let shape = ModelFlags { model: Some(name.clone()), overrides };
    // A known name is always a shape, even if there is a file or directory of that name.
    match (name.parse::<Descriptor>(), resumed) {
        (Ok(known), _) => {
            let of_shape = if from_files { known.vocab } else { BYTE_VOCAB };
            let known = Descriptor { vocab: vocab.unwrap_or(of_shape), ..known };
            let descriptor = known.with(overrides).context("the shape of the model")?;
            Ok((shape, descriptor.with_router(router(options))?, None))
        }
        (Err(error), None) if !is_path(&name) => Err(error).context("--model"),
        (Err(_), resumed) => {
            ensure!(
                overrides == experts,
                "--model {name}: expected no other sizes for a model with weights, found --layers, --heads, --kv-heads, \
                 --head-size, --channels, --ffn or --window; name a shape such as llama3:1b instead"
            );
            if let Some(descriptor) = resumed {
                return Ok((shape, descriptor, None));
            }
            let mut source = ModelSource::open(Path::new(&name)).context("--model")?;
            if !experts.is_empty() {
                source = source.with_experts(experts).context("--experts")?;
            }
            let source = source.with_router(router(options))?;
            Ok((shape, source.descriptor(), Some(source)))
        }
    }
}

/// Returns the settings of the routers that the flags replace.
fn router(options: &TrainOptions) -> RouterOverrides {
    let TrainOptions { router_scores: scores, router_aux_loss: aux_loss, router_z_loss: z_loss, .. } = *options;
    RouterOverrides { scores, aux_loss, z_loss, bias: options.router_bias_rate.is_some_and(|rate| rate > 0.0) }
}

/// The frozen model of a run that trains adapters.
pub struct Frozen {
    /// The model.
    pub source: ModelSource,
    /// The adapters with which the run starts; `None` initializes them from the seed.
    pub adapters: Option<AdapterFile>,
}

/// Returns the shape with the adapters that the flags ask for, and the model that is frozen.
pub fn with_adapters(
    options: &TrainOptions,
    descriptor: Descriptor,
    weights: &mut Option<ModelSource>,
    resumed: Option<Descriptor>,
) -> Result<(Descriptor, Option<Frozen>)> {
    let wanted = options.lora_flags.adapters();
    if wanted.is_none() && options.lora.is_none() {
        ensure!(
            options.lora_flags.lora_base.is_none(),
            "--lora-base: expected --lora-rank or --lora, found neither; add one of them or omit this flag"
        );
        ensure!(
            resumed.is_none_or(|resumed| resumed.adapters.is_none()),
            "--resume: expected --lora-rank, because the run trains adapters, found none; add the --lora flags of the run"
        );
        return Ok((descriptor, None));
    }
    ensure!(
        options.lora_flags.lora_base.unwrap_or_default() == AdapterBase::Bf16
            || options.hardware.precision == Some(Precision::Fp8),
        "--lora-base fp8: expected --precision fp8, found another precision; add it or omit this flag"
    );
    let (flag, name) = (if wanted.is_some() { "--lora-rank" } else { "--lora" }, options.model.as_deref());
    ensure!(
        options.optimizer() == Optimizer::AdamW,
        "{flag}: expected --optimizer adamw, found muon, which orthogonalizes whole matrices; use adamw"
    );
    ensure!(
        router(options) == RouterOverrides::default(),
        "{flag}: expected no --router flags, because routers are frozen, found some; omit them"
    );
    let name = name.filter(|name| is_path(name)).with_context(|| {
        format!("{flag}: expected a --model with weights, found {}; pass the path of a model", name.unwrap_or("none"))
    })?;
    let source = match weights.take() {
        Some(source) => source,
        None => ModelSource::open(Path::new(name)).context("--model")?,
    };
    let file =
        options.lora.as_deref().filter(|_| resumed.is_none()).map(AdapterFile::open).transpose().context("--lora")?;
    let with = match (resumed, &file) {
        (Some(resumed), _) => {
            ensure!(
                resumed.base() == source.descriptor(),
                "--model {name}: expected the model of the run that is resumed ({}), found another one ({})",
                resumed.base(),
                source.descriptor()
            );
            resumed
        }
        (None, Some(file)) => {
            let with = file.descriptor(&source).context("--lora")?;
            let base = options.lora_flags.lora_base.unwrap_or_default();
            Descriptor { adapters: with.adapters.map(|adapters| Adapters { base, ..adapters }), ..with }
        }
        (None, None) => options.lora_flags.apply(source.descriptor())?,
    };
    Ok((with, Some(Frozen { source, adapters: file })))
}

/// Returns a GPT-2 of the given sizes, or the default model of the built-in text.
fn custom(overrides: Overrides, vocab: usize, seq: usize) -> Result<(ModelFlags, Descriptor)> {
    let small = Overrides { layers: Some(SMALL.0), heads: Some(SMALL.1), channels: Some(SMALL.2), ..overrides };
    let overrides = if overrides.has_sizes() { overrides } else { small };
    let (Some(layers), Some(heads), Some(channels)) = (overrides.layers, overrides.heads, overrides.channels) else {
        anyhow::bail!(
            "--layers, --heads, --channels: expected all three without --model, found some of them; name a shape with --model to \
             replace only some of its sizes"
        );
    };
    let gpt2 = Descriptor::gpt2(layers, heads, channels, seq, vocab).context("--layers, --heads, --channels")?;
    let descriptor = gpt2.with(overrides).context("the shape of the model")?;
    Ok((ModelFlags { model: None, overrides }, descriptor))
}

/// Returns whether a value of `--model` is a path. The files may have been deleted when a run is resumed.
fn is_path(name: &str) -> bool {
    let path = Path::new(name);
    let has_extension = || path.extension().is_some_and(|extension| extension == "bin" || extension == "safetensors");
    path.exists() || path.components().count() > 1 || has_extension()
}
