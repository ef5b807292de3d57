//! From `--device` and `--precision` to an engine.

use super::cpu::Cpu;
use super::cuda::Options;
pub use super::cuda::Precision;
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

/// `precision` is what was asked for: by default a GPU computes as `gpu` says, the CPU in fp32, which is all it can.
pub fn open(device: Device, precision: Option<Precision>, gpu: &Options) -> Result<Opened> {
    let cuda = || -> Result<Opened> {
        let engine = super::cuda::open(gpu)?;
        Ok(Opened { engine, device: Device::Cuda, tf32: gpu.tf32 && gpu.precision == Precision::Fp32, note: None })
    };
    let cpu = |note| Opened { engine: Box::new(Cpu::new()), device: Device::Cpu, tf32: false, note };
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
