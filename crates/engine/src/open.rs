//! Selects an engine from `--device` and `--precision`.

use super::cpu::Cpu;
use super::cuda::{CudaOptions, EmulatedGpu};
pub use super::cuda::{MatmulBackend, Precision};
use super::{Engine, Result};
use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// Value of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// A GPU if this program can use one, otherwise the CPU
    #[default]
    Auto,
    /// CPU
    Cpu,
    /// GPU
    Cuda,
}

/// An engine with the settings that were chosen for it.
pub struct Opened {
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// The device in use, never `Auto`.
    pub device: Device,
    /// The precision in use.
    pub precision: Precision,
    /// Whether f32 GEMMs round their inputs to TF32.
    pub tf32: bool,
    /// Whether this engine can plan a run but not compute it. Its free memory is unknown.
    pub plans_only: bool,
    /// The reason why `auto` did not select a GPU.
    pub note: Option<String>,
}

/// The driver's index of the GPU that is used.
pub const GPU: usize = 0;

/// An H100 or H200.
const PLANNED_FOR: EmulatedGpu = EmulatedGpu {
    sm_count: 132,
    hopper: true,
    fp8: false,
    mma_fp8: false,
    tf32: false,
    matmul: MatmulBackend::Auto,
    kernel_config: None,
};

/// Opens an engine. `precision` is the value of the flag; without it a GPU uses `gpu.precision` and the CPU uses fp32.
pub fn open(device: Device, precision: Option<Precision>, gpu: &CudaOptions) -> Result<Opened> {
    let cuda = || -> Result<Opened> { Ok(on_cuda(super::cuda::open(gpu)?, gpu)) };
    // The CPU engine rounds exactly as a GPU does in FP8, and stores everything else as f32.
    let on_cpu = precision.unwrap_or(Precision::Fp32);
    let cpu = |note| Opened {
        engine: Box::new(Cpu::new()),
        device: Device::Cpu,
        precision: on_cpu,
        tf32: false,
        plans_only: false,
        note,
    };
    match device {
        Device::Cpu if precision == Some(Precision::Bf16) => {
            bail!("--precision: expected fp32 with --device cpu, found bf16; use --precision fp32 or --device cuda")
        }
        Device::Cpu => {
            start_threads()?;
            Ok(cpu(None))
        }
        Device::Cuda => cuda().context("--device cuda"),
        Device::Auto => cuda().or_else(|why| {
            if precision == Some(Precision::Bf16) {
                return Err(why.context("--precision bf16: expected a GPU, found none; use --precision fp32"));
            }
            if precision == Some(Precision::Fp8) {
                return Err(why.context(
                    "--precision fp8: expected a GPU, found none; use --precision fp32, or --device cpu to emulate FP8",
                ));
            }
            start_threads()?;
            Ok(cpu(Some(format!("no GPU: {why:#}"))))
        }),
    }
}

/// Starts the threads of the CPU engine. At its first use rayon would panic if it cannot, as under a limit of memory or processes.
///
/// The main thread is one of them: a small operation takes less time than handing it to another thread. Another thread could end before
/// the others. With one thread, no other thread may use rayon while the main thread waits for it.
fn start_threads() -> Result<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let start = || {
        let threads = rayon::ThreadPoolBuilder::new();
        let is_main = std::thread::current().name() == Some("main");
        match if is_main { threads.use_current_thread() } else { threads }.build_global() {
            Err(error) if !error.to_string().contains("already been initialized") => Err(error.to_string()),
            _ => Ok(()),
        }
    };
    STARTED.get_or_init(start).clone().map_err(|error| {
        anyhow!(
            "threads: cannot start those of the CPU engine: {error}; raise the limits of the process (ulimit -u, ulimit -v), or \
             set RAYON_NUM_THREADS to a smaller number"
        )
    })
}

fn on_cuda(engine: Box<dyn Engine>, gpu: &CudaOptions) -> Opened {
    let tf32 = gpu.tf32 && gpu.precision == Precision::Fp32;
    let precision = gpu.precision;
    Opened { engine, device: Device::Cuda, precision, tf32, plans_only: false, note: None }
}

/// Creates an engine that can plan a run on an H100 or H200, whatever this machine has. It has no limit of memory.
pub fn planning_engine(precision: Precision) -> Box<dyn Engine> {
    let fp8 = precision == Precision::Fp8;
    super::cuda::emulated(EmulatedGpu { fp8, ..PLANNED_FOR }, precision, None, false)
}

/// Opens an engine to plan a run. Unlike [`open`], `--device cuda` works without a GPU.
pub fn open_to_plan(device: Device, precision: Option<Precision>, gpu: &CudaOptions) -> Result<Opened> {
    open(device, precision, gpu).or_else(|why| {
        if device != Device::Cuda {
            return Err(why);
        }
        let engine = super::cuda::emulated(PLANNED_FOR, gpu.precision, gpu.gelu_fusion, false);
        let note = format!("{why:#}; planned for a GPU with {} SMs and unknown memory", PLANNED_FOR.sm_count);
        Ok(Opened { plans_only: true, note: Some(note), ..on_cuda(engine, gpu) })
    })
}
