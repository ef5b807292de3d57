//! Flags and functions that several commands share.

use crate::terminal;
use crate::values::{count, level, positive, switch};
use anyhow::{Context, Result, ensure};
use clap::ArgAction;
use engine::cuda::CudaOptions;
use engine::open::{self, Device, MatmulBackend, Opened, Precision};
use engine::ops::{Fp8Accumulation, MuonAdditions};
use engine::tensor::DType;
use engine::{Engine, GeluFusion};
use interchange::ModelSource;
use interchange::peft::AdapterFile;
use model::descriptor::{AdapterBase, AdapterTargets, Adapters, Additions, Overrides, WindowPattern};
use model::fit;
use model::{Decoder, Descriptor, Fp8Recipe, Fp8Settings, PlanOptions, WeightFormat};
use serde::Serialize;
use std::path::{Path, PathBuf};

const DEVICE: &str = "Device and precision";
const MODEL: &str = "Model";
const OPTIMIZER: &str = "Optimizer";

/// The device to compute on, and the precision.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hardware {
    /// Device to compute on
    #[arg(long, value_enum, default_value_t, help_heading = DEVICE)]
    pub device: Device,

    /// Number format of weights and activations. fp8: bf16, and FP8 in matmuls while training, or FP8 weights while evaluating and
    /// generating [default: bf16 on a GPU, fp32 on the CPU]
    #[arg(long, value_enum, help_heading = DEVICE)]
    #[serde(skip)]
    pub precision: Option<Precision>,

    /// With --precision fp32 on a GPU: compute matmuls in TF32 on tensor cores
    #[arg(short = 'f', long, value_name = "0|1", value_parser = switch, default_value = "0", num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set, help_heading = DEVICE)]
    pub tf32: bool,

    /// Fuse GELU into matmuls on a GPU. 0: never, 1: in the forward pass, 2: in both passes [default: the fastest]. Also -ge
    #[arg(long, value_name = "0|1|2", value_parser = level::<GeluFusion>, help_heading = DEVICE)]
    #[serde(skip)]
    pub gelu_fusion: Option<GeluFusion>,

    /// Kernels that compute matmuls on a GPU
    #[arg(long, value_enum, default_value_t, help_heading = DEVICE)]
    pub matmul: MatmulBackend,

    /// Architecture of the GPU kernels, such as sm_80 [default: the newest that the GPU supports]
    #[arg(long, value_name = "ARCH", value_parser = ["sm_80", "sm_89", "sm_90a"], help_heading = DEVICE)]
    pub kernels: Option<String>,

    /// Index of the tile configuration that each GEMM uses instead of the fastest one. `selftest` sets it.
    #[arg(skip)]
    #[serde(skip)]
    pub kernel_config: Option<usize>,
}

/// The model of a command.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelPath {
    /// Directory of a run (its newest checkpoint), model file (.bin or .safetensors) or Hugging Face directory
    #[arg(value_name = "RUN|MODEL", required_unless_present = "model", conflicts_with = "model")]
    path: Option<PathBuf>,

    /// The same argument as a flag
    #[arg(short = 'e', long, value_name = "RUN|MODEL")]
    model: Option<PathBuf>,

    /// Add low-rank adapters to the model: a directory of PEFT, or a run with --lora-rank
    #[arg(long, value_name = "DIR")]
    pub lora: Option<PathBuf>,
}

impl ModelPath {
    /// Returns the path.
    pub fn get(&self) -> &Path {
        self.path.as_deref().or(self.model.as_deref()).unwrap_or(Path::new(""))
    }

    /// Opens the model, with the adapters of --lora.
    pub fn open(&self) -> Result<ModelSource> {
        open_with_adapters(self.get(), self.lora.as_deref())
    }
}

/// Opens a model, with adapters.
pub fn open_with_adapters(model: &Path, lora: Option<&Path>) -> Result<ModelSource> {
    let source = ModelSource::open(model)?;
    match lora {
        Some(lora) => source.with_adapters(AdapterFile::open(lora).context("--lora")?).context("--lora"),
        None => Ok(source),
    }
}

/// Low-rank adapters that are trained instead of the weights.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(clippy::struct_field_names, reason = "the names of the flags derive from those of the fields")]
pub struct LoraFlags {
    /// Train low-rank adapters (LoRA) of rank R. The weights of the model are frozen
    #[arg(long, value_name = "R", value_parser = count, help_heading = MODEL)]
    pub lora_rank: Option<usize>,

    /// Factor of the adapters, which is divided by the rank [default: 2 R]
    #[arg(long, value_name = "A", value_parser = positive, requires = "lora_rank", help_heading = MODEL)]
    pub lora_alpha: Option<f32>,

    /// Matrices with adapters: a list of all, qkv, attproj, mlp, q, k, v, up, gate and fcproj [default: all]
    #[arg(long, value_name = "LIST", requires = "lora_rank", help_heading = MODEL)]
    pub lora_targets: Option<AdapterTargets>,

    /// Storage of the frozen weights of the layers. fp8 needs the precision fp8, and saves 2 of 4 bytes for each weight [default: bf16]
    #[arg(long, value_enum, value_name = "bf16|fp8", hide_possible_values = true, help_heading = MODEL)]
    pub lora_base: Option<AdapterBase>,
}

impl LoraFlags {
    /// Returns the adapters, if the flags ask for some.
    pub fn adapters(&self) -> Option<Adapters> {
        let rank = self.lora_rank?;
        let alpha = self.lora_alpha.unwrap_or(2.0 * rank as f32);
        let targets = self.lora_targets.unwrap_or(AdapterTargets::ALL);
        Some(Adapters { rank, alpha, targets, base: self.lora_base.unwrap_or_default() })
    }

    /// Returns a model with the adapters.
    pub fn apply(&self, descriptor: Descriptor) -> Result<Descriptor> {
        let with = Descriptor { adapters: self.adapters(), ..descriptor };
        with.checked().context("--lora-rank")
    }
}

/// Additions to Muon.
#[derive(Clone, Copy, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(clippy::struct_field_names, reason = "the names of the flags derive from those of the fields")]
pub struct MuonAdditionFlags {
    /// Give the rows of each matrix equal norms before Muon's iterations (MuonEq) [default: 0]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", help_heading = OPTIMIZER)]
    pub muon_equilibrate: Option<bool>,

    /// Give each update of Muon the norm of a semi-orthogonal matrix (Muon+) [default: 0]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", help_heading = OPTIMIZER)]
    pub muon_renormalize: Option<bool>,

    /// Scale rows or columns of Muon's updates by a running mean of their squares (NorMuon) [default: 0]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", help_heading = OPTIMIZER)]
    pub muon_variance: Option<bool>,

    /// Decay only those weights that Muon's update moves to 0, too [default: 0]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", help_heading = OPTIMIZER)]
    pub muon_cautious_decay: Option<bool>,
}

impl MuonAdditionFlags {
    /// Returns the additions.
    pub fn additions(self) -> MuonAdditions {
        let Self { muon_equilibrate, muon_renormalize, muon_variance, muon_cautious_decay } = self;
        MuonAdditions {
            equilibrate: muon_equilibrate.unwrap_or(false),
            renormalize: muon_renormalize.unwrap_or(false),
            variance: muon_variance.unwrap_or(false),
            cautious_decay: muon_cautious_decay.unwrap_or(false),
        }
    }

    /// Adds those that no flag sets.
    pub fn add_all(&mut self) {
        let Self { muon_equilibrate, muon_renormalize, muon_variance, muon_cautious_decay } = self;
        for addition in [muon_equilibrate, muon_renormalize, muon_variance, muon_cautious_decay] {
            addition.get_or_insert(true);
        }
    }

    /// Returns the names of all flags, and whether they are given.
    pub fn given(self) -> [(&'static str, bool); 4] {
        [
            ("--muon-equilibrate", self.muon_equilibrate.is_some()),
            ("--muon-renormalize", self.muon_renormalize.is_some()),
            ("--muon-variance", self.muon_variance.is_some()),
            ("--muon-cautious-decay", self.muon_cautious_decay.is_some()),
        ]
    }
}

/// Windows of attention, and additions to the model.
#[derive(Clone, Copy, Debug, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct StructureFlags {
    /// Window of attention: a token attends to itself and the N - 1 tokens before it [default: all tokens before it]
    #[arg(long, value_name = "N", value_parser = count, help_heading = MODEL)]
    pub window: Option<usize>,

    /// Layers with the window: a letter for each, S for those with it and L for those without, repeated for all layers, such as SSSL
    /// [default: S]
    #[arg(long, value_name = "PATTERN", help_heading = MODEL)]
    pub window_pattern: Option<WindowPattern>,

    /// Additions of nanochat: a list of residual-scales, value-embeddings, smear and backout, or none or all [default: from --model]
    #[arg(long, value_name = "LIST", help_heading = MODEL)]
    pub additions: Option<Additions>,
}

impl StructureFlags {
    /// Returns the model with these windows and additions.
    pub fn apply(self, descriptor: Descriptor) -> Result<Descriptor> {
        let Self { window, window_pattern, additions } = self;
        let overrides = Overrides { window, window_pattern, additions, ..Overrides::default() };
        descriptor.with(overrides).context("--window")
    }
}

/// The FP8 format of gradients. E4M3 was removed: gradients were noisier, and those of unlikely tokens became 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Gradients {
    /// 5 exponent bits and 2 mantissa bits
    E5m2,
}

/// Settings of FP8.
#[derive(Clone, Copy, Debug, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(clippy::struct_field_names, reason = "the names of the flags derive from those of the fields")]
pub struct Fp8Flags {
    /// With --precision fp8: scales of inputs and gradients [default: delayed]
    #[arg(long, value_enum, help_heading = DEVICE)]
    pub fp8_recipe: Option<Fp8Recipe>,

    /// The format of gradients, which the files of earlier versions name
    #[arg(long, value_enum, hide = true, help_heading = DEVICE)]
    pub fp8_gradients: Option<Fp8Gradients>,

    /// With --precision fp8: how tensor cores accumulate [default: exact-gradients]
    #[arg(long, value_enum, value_name = "MODE", help_heading = DEVICE)]
    pub fp8_accumulation: Option<Fp8Accumulation>,

    /// With --precision fp8: also compute the logits and their gradients in FP8. Low-rank adapters keep them in bf16 [default: 1]
    #[arg(long, value_name = "0|1", value_parser = switch, num_args = 0..=1, default_missing_value = "1", help_heading = DEVICE)]
    pub fp8_head: Option<bool>,
}

impl Fp8Flags {
    /// Returns the settings if the precision is FP8.
    pub fn resolve(self, precision: Precision) -> Result<Option<Fp8Settings>> {
        let Self { fp8_recipe, fp8_gradients, fp8_accumulation, fp8_head } = self;
        for (flag, given) in [
            ("--fp8-recipe", fp8_recipe.is_some()),
            ("--fp8-gradients", fp8_gradients.is_some()),
            ("--fp8-accumulation", fp8_accumulation.is_some()),
            ("--fp8-head", fp8_head.is_some()),
        ] {
            ensure!(
                precision == Precision::Fp8 || !given,
                "{flag}: expected --precision fp8, found another precision; add it or omit this flag"
            );
        }
        let settings = Fp8Settings {
            recipe: fp8_recipe.unwrap_or_default(),
            accumulation: fp8_accumulation.unwrap_or_default(),
            head: fp8_head.unwrap_or(Fp8Settings::default().head),
        };
        Ok((precision == Precision::Fp8).then_some(settings))
    }
}

impl Hardware {
    /// Returns the format of the weights of linear layers, for commands that do not train.
    pub fn weights(&self) -> WeightFormat {
        if self.precision == Some(Precision::Fp8) { WeightFormat::Fp8 } else { WeightFormat::Float }
    }

    /// Returns the name of the format of weights, for commands that do not train.
    pub fn weight_format(&self, engine: &dyn Engine) -> &'static str {
        match self.weights() {
            WeightFormat::Fp8 => DType::Fp8.name(),
            WeightFormat::Float => engine.dtype().name(),
        }
    }

    /// Opens the engine, on the first GPU if it runs on a GPU.
    pub fn open(&self) -> Result<Opened> {
        self.open_on(open::GPU)
    }

    /// Opens the engine, on GPU `gpu` if it runs on a GPU.
    pub fn open_on(&self, gpu: usize) -> Result<Opened> {
        open::open(self.device, self.precision, &self.gpu(gpu))
    }

    /// Opens an engine that can plan memory, even for a GPU that this machine does not have.
    pub fn open_to_plan(&self, gpu: usize) -> Result<Opened> {
        open::open_to_plan(self.device, self.precision, &self.gpu(gpu))
    }

    /// Returns the settings of an engine on GPU `gpu`.
    pub fn gpu(&self, gpu: usize) -> CudaOptions {
        CudaOptions {
            gpu,
            precision: self.precision.unwrap_or(Precision::Bf16),
            tf32: self.tf32,
            kernels: self.kernels.clone(),
            gelu_fusion: self.gelu_fusion,
            matmul: self.matmul,
            kernel_config: self.kernel_config,
        }
    }

    /// Opens the engine for a command whose standard output is its result; prints the device to standard error.
    pub fn open_quietly(&self) -> Result<Box<dyn Engine>> {
        self.open_quietly_on(open::GPU)
    }

    /// Opens the engine as [`open_quietly`](Self::open_quietly) does, on GPU `gpu` if it runs on a GPU.
    pub fn open_quietly_on(&self, gpu: usize) -> Result<Box<dyn Engine>> {
        self.open_and_print(gpu, "")
    }

    /// Opens the engine as [`open_quietly`](Self::open_quietly) does, for a command that does not train.
    pub fn open_for_inference(&self) -> Result<Box<dyn Engine>> {
        let weights = if self.weights() == WeightFormat::Fp8 { ", weights in FP8" } else { "" };
        self.open_and_print(open::GPU, weights)
    }

    fn open_and_print(&self, gpu: usize, note: &str) -> Result<Box<dyn Engine>> {
        let opened = self.open_on(gpu)?;
        terminal::note(&format!("device: {}, {}{note}", describe(&opened), opened.engine.dtype().name()))?;
        Ok(opened.engine)
    }
}

/// Returns the name of the device and, if `--device auto` has fallen back to the CPU, the reason in a few words.
pub fn describe(opened: &Opened) -> String {
    let device = opened.engine.describe();
    if opened.note.is_none() || opened.device != Device::Cpu {
        return device;
    }
    match cuda_driver::device_count() {
        Ok(1..) => format!("{device} (the GPU cannot be used; see llm-rs doctor)"),
        _ => format!("{device} (no NVIDIA GPU found; see llm-rs doctor)"),
    }
}

/// Loads a model for forward passes on batches of up to b x t tokens.
pub fn load(
    source: ModelSource,
    [b, t]: [usize; 2],
    weights: WeightFormat,
    engine: &mut dyn Engine,
) -> Result<Decoder> {
    let capacity = PlanOptions::inference(b, t).with_weights(weights, &source.descriptor(), engine)?;
    let (model, plan) = fit::plan(source.descriptor(), capacity, engine)?;
    engine.allocate(&plan)?;
    source.load(&model, engine)?;
    Ok(model)
}
