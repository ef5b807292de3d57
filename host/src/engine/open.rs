//! From `--device` and `--precision` to an engine.

use super::cpu::Cpu;
use super::cuda::Options;
pub use super::cuda::Precision;
use super::{Engine, Result};
use anyhow::{Context, bail};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
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
    pub note: Option<String>,
}

/// `precision` defaults to bf16 on a GPU; the CPU computes in fp32 only. `tf32` and `kernels` are a GPU's, see [`Options`].
pub fn open(device: Device, precision: Option<Precision>, tf32: bool, kernels: Option<&str>) -> Result<Opened> {
    let options =
        Options { gpu: 0, precision: precision.unwrap_or(Precision::Bf16), tf32, kernels: kernels.map(str::to_owned) };
    let cuda = || super::cuda::open(&options);
    let cpu = || -> Box<dyn Engine> { Box::new(Cpu::new()) };
    match device {
        Device::Cpu if precision == Some(Precision::Bf16) => {
            bail!("--precision bf16: the CPU engine computes in fp32; expected --precision fp32 or --device cuda")
        }
        Device::Cpu => Ok(Opened { engine: cpu(), note: None }),
        Device::Cuda => Ok(Opened { engine: cuda().context("--device cuda")?, note: None }),
        Device::Auto => match cuda() {
            Ok(engine) => Ok(Opened { engine, note: None }),
            Err(why) if precision == Some(Precision::Bf16) => {
                Err(why.context("--precision bf16 needs a GPU; use fp32 on the CPU"))
            }
            Err(why) => Ok(Opened { engine: cpu(), note: Some(format!("no GPU: {why:#}")) }),
        },
    }
}
