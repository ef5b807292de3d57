//! A GPU: its modules, launches, times, and the ceilings of its roofline.

use crate::registry::{Kernel, Needs};
use crate::session::{Gemm, Session, Size, Verified, Work};
use anyhow::{Context, Result};
use cublaslt::{GemmOperands, Handle, Matmuls};
use cuda_driver::{DeviceMemory, Function, Gpu, LaunchConfig, Module, Stopwatch, Stream};
use cuda_std::bf16;
use gpu::launch::KernelLaunch;
use gpu::matmul::gemm::{self, Batching, GemmEpilogue, GemmLayout, GemmPrecision};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;

/// The output of the build script.
mod built {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// Returns the compiled kernels of this example, one module for each architecture; none if the program was built without them.
pub fn modules() -> &'static [cuda_builder::Module] {
    built::MODULES
}

/// Bytes of the copy that measures the bandwidth.
const COPY_BYTES: usize = 1 << 30;
/// Rows and columns of the GEMM that measures the arithmetic.
const GEMM_SIZE: usize = 8192;
/// Rounds of a measurement. The median counts.
const ROUNDS: usize = 5;
/// Milliseconds of a round, at least one run.
const ROUND_MILLISECONDS: f32 = 15.0;
/// A kernel that takes this many milliseconds is timed in one round.
const SLOW_MILLISECONDS: f32 = 150.0;

/// Seconds of one run of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Median of the rounds.
    pub median: f64,
    /// The fastest round.
    pub least: f64,
    /// The slowest round.
    pub most: f64,
}

/// The ceilings of the roofline, measured on this GPU.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Bytes per second, read and written, of a copy of 1 GiB.
    pub bytes: f64,
    /// FLOPs per second of cuBLASLt's fastest GEMM of 8192 x 8192 x 8192 in bf16. `None` without cuBLASLt.
    pub flops: Option<f64>,
}

/// The limit that the roofline sets to a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// `memory` or `compute`.
    pub bound: &'static str,
    /// Seconds that the kernel needs at least.
    pub seconds: f64,
}

impl Ceilings {
    /// Returns the limit of a kernel: the larger of bytes / bandwidth and FLOPs / throughput.
    pub fn limit(self, work: Work) -> Limit {
        let memory = work.bytes as f64 / self.bytes;
        let compute = self.flops.map_or(0.0, |flops| work.flops as f64 / flops);
        if compute > memory {
            Limit { bound: "compute", seconds: compute }
        } else {
            Limit { bound: "memory", seconds: memory }
        }
    }
}

/// The times of a kernel on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    /// Time of one run.
    pub time: Spread,
    /// The work of a run.
    pub work: Work,
    /// The limit of the roofline.
    pub limit: Limit,
    /// Seconds of the same GEMM by cuBLASLt.
    pub cublaslt: Option<f64>,
    /// The checks of the results, at both sizes.
    pub verified: Verified,
}

/// A GPU with the modules of this example and of training.
pub struct Device {
    gpu: Gpu,
    stream: Rc<Stream>,
    /// Each with its architecture and the names of its kernels.
    modules: Vec<(Module, &'static cuda_builder::Module)>,
    functions: HashMap<String, Function>,
    cublaslt: Result<Matmuls, String>,
    ceilings: Ceilings,
}

impl Device {
    /// Opens the first GPU and measures its ceilings.
    pub fn open() -> Result<Self> {
        let missing = || built::MODULES_MISSING.unwrap_or("this program was built without GPU kernels").to_owned();
        built::MODULES.first().with_context(missing).context("use --device cpu")?;
        let gpu = Gpu::open(0).context("use --device cpu, which needs no GPU")?;
        let stream = Rc::new(Stream::new(&gpu)?);
        let mut modules = Vec::new();
        for (name, embedded) in [("kernels", built::MODULES), ("gpu", engine::cuda::EMBEDDED.modules()?)] {
            let code = engine::cuda::select(embedded, gpu.info(), None)?;
            modules.push((Module::load(&gpu, name, code.image())?, code.module));
        }
        let cublaslt = Handle::new(&gpu).and_then(Matmuls::new).map_err(|error| error.to_string());
        let ceilings = Ceilings { bytes: f64::NAN, flops: None };
        let mut device = Self { gpu, stream, modules, functions: HashMap::new(), cublaslt, ceilings };
        device.ceilings = Ceilings { bytes: device.measure_copy()?, flops: device.measure_gemm()? };
        Ok(device)
    }

    /// Returns the name of the GPU.
    pub fn name(&self) -> &str {
        &self.gpu.info().name
    }

    /// Returns the architecture of the loaded kernels of this example.
    pub fn architecture(&self) -> &'static str {
        self.modules[0].1.arch
    }

    /// Returns the ceilings.
    pub fn ceilings(&self) -> Ceilings {
        self.ceilings
    }

    /// Returns the reason why there is no cuBLASLt.
    pub fn without_cublaslt(&self) -> Option<&str> {
        self.cublaslt.as_ref().err().map(String::as_str)
    }

    /// Returns whether the GPU still accepts work. An error such as an illegal address ends a process's use of it.
    pub fn works(&self) -> bool {
        self.stream.synchronize().is_ok()
    }

    /// Returns whether the GPU and the loaded modules have a kernel.
    pub fn can_run(&self, kernel: &Kernel) -> bool {
        kernel.needs == Needs::Sm80 || cuda_builder::has_feature(self.architecture(), "wgmma")
    }

    /// Runs a kernel at both sizes, checks its results, and times it at full size.
    pub fn measure(&mut self, kernel: &Kernel) -> Result<Measurement> {
        let small = self.run(kernel, Size::Small, |_, _| Ok(()))?.1;
        let ((time, cublaslt, work), full) = self.run(kernel, Size::Full, |device, session| {
            let time = device.time(session.launches()[1])?;
            let cublaslt = session.gemm.map(|gemm| device.time_cublaslt(gemm)).transpose()?.flatten();
            Ok((time, cublaslt, session.work))
        })?;
        let verified = Verified { elements: small.elements + full.elements, worst: small.worst.max(full.worst) };
        Ok(Measurement { time, work, limit: self.ceilings.limit(work), cublaslt, verified })
    }

    /// Runs a kernel once, checks its results, and then calls `then`.
    fn run<R>(
        &mut self,
        kernel: &Kernel,
        size: Size,
        then: impl FnOnce(&mut Self, &Session) -> Result<R>,
    ) -> Result<(R, Verified)> {
        let (gpu, stream) = (self.gpu.clone(), Rc::clone(&self.stream));
        let mut session = Session::cuda(&gpu, &stream, size);
        (kernel.setup)(&mut session)?;
        let [preparations, launches] = session.launches();
        for launch in preparations.iter().chain(launches) {
            self.launch(launch)?;
        }
        self.stream.synchronize()?;
        let verified = session.verify()?;
        let result = then(self, &session)?;
        self.stream.synchronize()?;
        Ok((result, verified))
    }

    /// Queues a launch.
    fn launch(&mut self, launch: &KernelLaunch) -> Result<()> {
        let KernelLaunch { launch, grid, shared_bytes } = launch;
        let name = launch.name();
        let function = match self.functions.entry(name.to_owned()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let has = |module: &cuda_builder::Module| module.kernels.iter().any(|kernel| kernel.name == name);
                let module = self.modules.iter().find(|(_, module)| has(module));
                let (module, _) = module.with_context(|| format!("kernel {name}: not in the modules of this GPU"))?;
                entry.insert(module.function(name)?)
            }
        };
        let config = LaunchConfig { grid: *grid, block: launch.block(), shared_bytes: *shared_bytes as u32 };
        // SAFETY: `Launch` has the types of the kernel's parameters. Its views are arrays of a session, which outlives the work
        // on the stream. The emulator checks, with the same setup, that kernels stay within them.
        launch.with_arguments(|arguments| unsafe { function.launch(&self.stream, &config, arguments) })?;
        Ok(())
    }

    /// Times launches, which have run before.
    fn time(&mut self, launches: &[KernelLaunch]) -> Result<Spread> {
        let stream = Rc::clone(&self.stream);
        rounds(&stream, || launches.iter().try_for_each(|launch| self.launch(launch)))
    }

    /// Returns the bytes per second of a copy, read and written.
    fn measure_copy(&mut self) -> Result<f64> {
        let [from, to] = [(); 2].map(|()| DeviceMemory::new(&self.gpu, COPY_BYTES));
        let (from, to) = (from?, to?);
        // SAFETY: both allocations have this size, are distinct, and live until `rounds` has synchronized the stream.
        let time = rounds(&self.stream, || unsafe { Ok(self.stream.copy(to.address(), from.address(), COPY_BYTES)?) })?;
        Ok(2.0 * COPY_BYTES as f64 / time.median)
    }

    /// Returns the FLOPs per second of a large GEMM by cuBLASLt. `None` without cuBLASLt.
    fn measure_gemm(&mut self) -> Result<Option<f64>> {
        if self.cublaslt.is_err() {
            return Ok(None);
        }
        let (gpu, stream, n) = (self.gpu.clone(), Rc::clone(&self.stream), GEMM_SIZE);
        let mut session = Session::cuda(&gpu, &stream, Size::Full);
        // Random operands: a GPU multiplies zeros faster, because it needs less power.
        let (a, b) = (session.noise::<bf16>("a", n * n, 1.0)?, session.noise::<bf16>("b", n * n, 1.0)?);
        let out = session.output::<bf16>("out", n * n)?;
        let [a, b] = [a, b].map(|operand| operand.view.pointer().addr() as u64);
        let gemm = Gemm { a, b, out: out.pointer().addr() as u64, mnk: [n; 3] };
        let seconds = self.time_cublaslt(gemm)?;
        Ok(seconds.map(|seconds| 2.0 * (n as f64).powi(3) / seconds))
    }

    /// Returns the seconds of a GEMM by cuBLASLt's fastest algorithm. `None` without cuBLASLt.
    fn time_cublaslt(&mut self, Gemm { a, b, out, mnk: [m, n, k] }: Gemm) -> Result<Option<f64>> {
        let Ok(matmuls) = &mut self.cublaslt else { return Ok(None) };
        let gemm = gemm::Gemm {
            m,
            n,
            k,
            layout: GemmLayout::Nn,
            precision: GemmPrecision::Bf16,
            batching: Batching::One,
            epilogue: GemmEpilogue::NONE,
        };
        let operands = GemmOperands { a, b, out, ..GemmOperands::default() };
        if matmuls.algorithm(&(gemm, operands.alignments())).is_none() {
            // SAFETY: the addresses are arrays of a session with the sizes of the GEMM, which only this stream uses. The
            // session outlives the work on the stream.
            unsafe { matmuls.tune(&self.stream, &gemm, &operands) }?;
        }
        // SAFETY: as above.
        let time = rounds(&self.stream, || unsafe { Ok(matmuls.run(&self.stream, &gemm, &operands)?) })?;
        Ok(Some(time.median))
    }
}

/// Times work that `run` queues, in several rounds after one run that is not timed. Waits for the stream.
fn rounds(stream: &Stream, mut run: impl FnMut() -> Result<()>) -> Result<Spread> {
    let stopwatch = Stopwatch::new(stream)?;
    run()?;
    let once = stopwatch.time(stream, 1, &mut run)?;
    let runs = (ROUND_MILLISECONDS / once).clamp(1.0, 200.0) as u32;
    let count = if once > SLOW_MILLISECONDS { 1 } else { ROUNDS };
    let mut seconds = Vec::new();
    for _ in 0..count {
        seconds.push(f64::from(stopwatch.time(stream, runs, &mut run)?) / 1e3);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Spread { median: seconds[count / 2], least: seconds[0], most: seconds[count - 1] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_of_both_limits_counts() {
        let ceilings = Ceilings { bytes: 1e12, flops: Some(1e15) };
        let limit = |bytes, flops| ceilings.limit(Work { bytes, flops });
        let (memory, compute) = (limit(2_000_000_000, 0), limit(1_000_000, 4_000_000_000_000));
        assert_eq!(memory.bound, "memory");
        assert!((memory.seconds - 2e-3).abs() < 1e-12, "{memory:?}");
        assert_eq!(compute.bound, "compute");
        assert!((compute.seconds - 4e-3).abs() < 1e-12, "{compute:?}");
        let without = Ceilings { flops: None, ..ceilings }.limit(Work { bytes: 1_000_000, flops: usize::MAX });
        assert_eq!(without.bound, "memory");
    }
}
