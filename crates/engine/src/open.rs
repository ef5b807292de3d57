//! From `--device` and `--precision` to an engine.

use super::cpu::Cpu;
use super::cuda::{Emulation, Options};
pub use super::cuda::{Precision, Products};
use super::{Engine, Result};
use crate::tensor::DType;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// A GPU if there is one this program can use, else the CPU
    #[default]
    Auto,
    Cpu,
    Cuda,
}

/// An engine, and why it is not the one that `auto` would rather have taken.
pub struct Opened {
    pub engine: Box<dyn Engine>,
    /// Not `Auto`.
    pub device: Device,
    /// Whether f32 is multiplied with 10 bits of mantissa.
    pub tf32: bool,
    /// A stand-in that can plan a run but not compute it: its free memory is not known.
    pub plans_only: bool,
    pub note: Option<String>,
}

impl Opened {
    pub fn precision(&self) -> Precision {
        match self.engine.float() {
            DType::Bf16 => Precision::Bf16,
            _ => Precision::Fp32,
        }
    }
}

/// The driver's number of the GPU that is used.
pub const GPU: usize = 0;

/// An H100 or H200.
const PLANNED_FOR: Emulation =
    Emulation { multiprocessors: 132, hopper: true, tf32: false, products: Products::Auto, tiling: None };

/// `precision` is what was asked for: by default a GPU computes as `gpu` says, the CPU in fp32, which is all it can.
pub fn open(device: Device, precision: Option<Precision>, gpu: &Options) -> Result<Opened> {
    let cuda = || -> Result<Opened> { Ok(on_cuda(super::cuda::open(gpu)?, gpu)) };
    let cpu = |note| Opened { engine: Box::new(Cpu::new()), device: Device::Cpu, tf32: false, plans_only: false, note };
    match device {
        Device::Cpu if precision == Some(Precision::Bf16) => {
            bail!("--precision bf16: the CPU engine computes in fp32; expected --precision fp32 or --device cuda")
        }
        Device::Cpu => Ok(cpu(None)),
        Device::Cuda => cuda().context("--device cuda"),
        Device::Auto => cuda().or_else(|why| match precision {
            Some(Precision::Bf16) => Err(why.context("--precision bf16 needs a GPU; use fp32 on the CPU")),
            _ => Ok(cpu(Some(format!("no GPU: {why:#}")))),
        }),
    }
}

fn on_cuda(engine: Box<dyn Engine>, gpu: &Options) -> Opened {
    let tf32 = gpu.tf32 && gpu.precision == Precision::Fp32;
    Opened { engine, device: Device::Cuda, tf32, plans_only: false, note: None }
}

/// As [`open`], to plan a run: `--device cuda` is to be had without a GPU, too.
pub fn open_to_plan(device: Device, precision: Option<Precision>, gpu: &Options) -> Result<Opened> {
    open(device, precision, gpu).or_else(|why| {
        if device != Device::Cuda {
            return Err(why);
        }
        let engine = super::cuda::emulated_as(PLANNED_FOR, gpu.precision, gpu.gelu_fusion);
        let note = format!(
            "{why:#}; planned for a GPU of {} multiprocessors, whose memory is not known",
            PLANNED_FOR.multiprocessors
        );
        Ok(Opened { plans_only: true, note: Some(note), ..on_cuda(engine, gpu) })
    })
}
