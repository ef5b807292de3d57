//! Options that several commands share.

use crate::cli::{level, switch};
use crate::kernels::EMBEDDED;
use anyhow::Result;
use checkpoint::model_file::ModelFile;
use clap::ArgAction;
use engine::cuda::Options;
use engine::open::{self, Device, MatmulBackend, Opened, Precision};
use engine::{Engine, GeluFusion};
use model::fit;
use model::{Gpt2, PlanOptions};
use std::io::{Write, stderr};

/// Where to compute, and how precisely.
#[derive(Clone, Debug, clap::Args)]
pub struct Hardware {
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,

    /// Number format of weights and activations [default: bf16 on a GPU, fp32 on the CPU]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,

    /// With --precision fp32 on a GPU: multiply on tensor cores, with 10 bits of mantissa
    #[arg(short = 'f', long, value_name = "0|1", value_parser = switch, default_value = "0", num_args = 0..=1, default_missing_value = "1", action = ArgAction::Set)]
    pub tf32: bool,

    /// GELUs that are part of a matrix product on a GPU: 0 none, 1 the forward's, 2 the backward's too; also -ge [default:
    /// what is fastest there]
    #[arg(long, value_name = "0|1|2", value_parser = level::<GeluFusion>)]
    pub gelu_fusion: Option<GeluFusion>,

    /// What computes matrix products on a GPU
    #[arg(long, value_enum, default_value_t)]
    pub matmul: MatmulBackend,

    /// Run a GPU's kernels for this architecture, as sm_80 [default: the newest that it can run]
    #[arg(long, value_name = "ARCH")]
    pub kernels: Option<String>,

    #[arg(skip)]
    pub kernel_config: Option<usize>,
}

impl Hardware {
    pub fn open(&self) -> Result<Opened> {
        self.open_on(open::GPU)
    }

    /// As [`open`](Self::open), the GPU `gpu` if it is one.
    pub fn open_on(&self, gpu: usize) -> Result<Opened> {
        open::open(self.device, self.precision, &self.gpu(gpu))
    }

    /// As [`open_on`](Self::open_on), to plan a run, not to compute it.
    pub fn open_to_plan(&self, gpu: usize) -> Result<Opened> {
        open::open_to_plan(self.device, self.precision, &self.gpu(gpu))
    }

    fn gpu(&self, gpu: usize) -> Options {
        Options {
            embedded: EMBEDDED,
            gpu,
            precision: self.precision.unwrap_or(Precision::Bf16),
            tf32: self.tf32,
            kernels: self.kernels.clone(),
            gelu_fusion: self.gelu_fusion,
            matmul: self.matmul,
            kernel_config: self.kernel_config,
        }
    }

    /// As [`open`](Self::open), for commands whose standard output is their result.
    pub fn open_quietly(&self) -> Result<Box<dyn Engine>> {
        self.open_quietly_on(open::GPU)
    }

    /// As [`open_quietly`](Self::open_quietly), the GPU `gpu` if it is one.
    pub fn open_quietly_on(&self, gpu: usize) -> Result<Box<dyn Engine>> {
        let Opened { engine, note, .. } = self.open_on(gpu)?;
        if let Some(note) = note {
            writeln!(stderr(), "{note}")?;
        }
        writeln!(stderr(), "running on {}, {}", engine.describe(), engine.dtype().name())?;
        Ok(engine)
    }
}

/// Loads a model for its forward pass on batches of up to b x t tokens.
pub fn load(file: ModelFile, b: usize, t: usize, engine: &mut dyn Engine) -> Result<Gpt2> {
    let capacity = PlanOptions::inference(b, t);
    let (model, plan) = fit::plan(file.descriptor(), capacity, engine)?;
    engine.allocate(&plan)?;
    file.load(&model, engine)?;
    Ok(model)
}
