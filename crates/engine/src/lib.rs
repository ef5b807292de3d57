//! The operations of training, and the two engines that execute them.
//!
//! * [`tensor`], [`plan`]: named regions of one memory arena, planned before anything is allocated.
//! * [`ops`]: the operations, one argument struct for each. [`gemm`]: the matrix multiplications behind linear layers.
//! * [`batch`], [`graph`]: the layout of a batch, and keys of CUDA graphs.
//! * [`cpu`]: the engine on the CPU in f32, the reference of every test. [`cuda`]: the engine on a GPU or its emulator, in bf16 or f32.
//! * [`digest`], [`trace`]: hashes of tensors, and of all that operations write.
//! * [`step_recorder`]: the operations of a generation step as one operation.
//! * [`open`]: selection of an engine from command-line settings.
//!
//! Models, communication between ranks, and file formats belong to other crates.

#![warn(missing_docs)]

#[macro_use]
mod delegate;

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod digest;
pub mod gemm;
pub mod graph;
pub mod open;
pub mod ops;
pub mod plan;
pub mod step_recorder;
pub mod tensor;
pub mod trace;

pub use batch::{BatchLayout, HostBuffer, MASKED_TARGET};
pub use gemm::{Algorithms, StepKind, Tuning};
pub use graph::GraphKey;
pub use ops::Operation;
pub use step_recorder::StepRecorder;

use crate::ops::AttentionShape;
use crate::plan::Plan;
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Pause before each timing that is compared with others, so that none inherits the clock rate that the previous one caused.
pub const COOLDOWN: Duration = Duration::from_millis(100);

/// Result of an engine's method.
pub type Result<T, E = anyhow::Error> = std::result::Result<T, E>;

/// The peak arithmetic rate of a GPU, for the model FLOPs utilization (MFU).
#[derive(Clone, Debug)]
pub struct Peak {
    /// TFLOP/s in the engine's storage type on tensor cores.
    pub tflops: f64,
    /// Derived from the number of SMs and the clock instead of a data sheet.
    pub estimated: bool,
}

/// Selects the GELUs that are part of a GEMM instead of kernels of their own. The numbers are llm.c's (`-ge`).
///
/// cuBLASLt applies GELU before it rounds, a GELU kernel after: in bf16 the results differ by one rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum GeluFusion {
    /// No fusion.
    None,
    /// In the forward pass.
    Forward,
    /// In both passes.
    Both,
}

impl GeluFusion {
    /// All levels in order.
    pub const ALL: [Self; 3] = [Self::None, Self::Forward, Self::Both];
}

impl From<GeluFusion> for u8 {
    fn from(fusion: GeluFusion) -> Self {
        fusion as Self
    }
}

impl TryFrom<u8> for GeluFusion {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        Self::ALL.get(usize::from(number)).copied().ok_or("expected 0, 1 or 2")
    }
}

/// Sizes from which an engine plans its own scratch memory.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Sizes of attention, which include those of the batch.
    pub attention: AttentionShape,
    /// Channels (C).
    pub channels: usize,
    /// (OC, C) of the linear layers of a transformer layer.
    pub linear_layers: Vec<(usize, usize)>,
    /// Input channels of the MLP's second layer (F).
    pub mlp_channels: usize,
    /// Set if the MLP has experts.
    pub router: Option<ops::Router>,
    /// Tokens that the router sees at a time.
    pub routed_tokens: usize,
    /// The norm of queries and keys, if there is one.
    pub qk_norm: Option<ops::QkNormScope>,
    /// Padded vocabulary (Vp).
    pub padded_vocab: usize,
    /// Elements of the parameter block.
    pub parameters: usize,
    /// Maximum number of tensors in one [`ops::SquaredSum`].
    pub norm_tensors: usize,
    /// Maximum number of ranges that AdamW updates in a step.
    pub update_ranges: usize,
    /// Runs backward passes and updates.
    pub training: bool,
}

impl Workload {
    /// Returns the tokens of a batch, B·T.
    pub fn rows(&self) -> usize {
        self.attention.b * self.attention.t
    }
}

/// A kernel, GEMM, copy or collective in a profile; on a CPU, an operation. Times are in seconds from the start of the profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Name of the work.
    pub name: String,
    /// Start.
    pub begin: f64,
    /// End.
    pub end: f64,
}

/// A profile of work that is complete when its call returns, by the clock of the host.
#[derive(Clone, Debug)]
pub struct HostProfile {
    start: Instant,
    intervals: Vec<Interval>,
}

impl HostProfile {
    /// Starts a profile.
    pub fn start() -> Self {
        Self { start: Instant::now(), intervals: Vec::new() }
    }

    /// Records work that began at `begin` and has just ended.
    pub fn record(&mut self, name: &str, begin: Instant) {
        let [begin, end] = [begin, Instant::now()].map(|at| at.duration_since(self.start).as_secs_f64());
        self.intervals.push(Interval { name: name.to_owned(), begin, end });
    }

    /// Returns the intervals in order.
    pub fn finish(self) -> Vec<Interval> {
        self.intervals
    }
}

/// An asynchronous read, see [`Engine::read_async`].
#[derive(Debug)]
pub struct PendingRead(pub(crate) u64);

/// The result of an asynchronous read.
#[derive(Clone, Debug)]
pub struct ReadResult {
    /// The values.
    pub values: Vec<f32>,
    /// Time at which all work launched before the read was complete, on the engine's own clock.
    pub completed_at: Duration,
}

/// A tensor in GPU memory.
pub struct DeviceTensor<'a> {
    /// The stream on which the engine launches its work.
    pub stream: &'a cuda_driver::Stream,
    /// Device address.
    pub address: u64,
}

/// Executes operations on tensors in one arena.
///
/// An engine may run asynchronously: an operation returns once it is launched. Only [`read`](Self::read),
/// [`read_bytes`](Self::read_bytes) and [`wait`](Self::wait) wait for results.
pub trait Engine {
    /// Describes the engine for the banner: `CPU, 2 threads` or `NVIDIA H200, sm_90a cubin`.
    fn describe(&self) -> String;

    /// Returns the storage type of parameters, gradients and activations ("float" in [`ops`]).
    fn dtype(&self) -> DType;

    /// Returns the type in which the engine stores FP8 numbers, or `None` if it cannot compute in FP8. The CPU engine stores them as
    /// f32.
    fn fp8_dtype(&self) -> Option<DType> {
        None
    }

    /// Returns the bytes that [`allocate`](Self::allocate) could take.
    fn free_memory(&self) -> Result<usize>;

    /// Returns the bytes that buffers in the host's memory could take, or `None` if the engine's memory is that of the host.
    fn free_host_memory(&self) -> Option<usize> {
        None
    }

    /// Returns an upper estimate of the bytes of device memory that a run with a number of NCCL communicators takes outside the arena
    /// after its allocation.
    fn reserved_memory(&self, _communicators: usize) -> usize {
        0
    }

    /// Returns the peak rate, or `None` where MFU is meaningless (a CPU).
    fn peak(&self) -> Option<Peak>;

    /// Returns the GELU fusion in use.
    fn gelu_fusion(&self) -> GeluFusion {
        GeluFusion::None
    }

    /// Reports whether [`ops::NormBackward`] over `c` channels computes column sums at a lower cost than
    /// [`ops::MatmulBackward`], which would read the tensor again.
    fn fuses_column_sums(&self, c: usize) -> bool;

    /// Returns the lengths of the i32 tensors for a [`ops::DecodeStep`]; 0 if the engine computes the operations one by one.
    fn decode_step_memory(&self, _shape: &ops::DecodeStepShape) -> [usize; 2] {
        [0; 2]
    }

    /// Checks that the engine has kernels for these sizes.
    ///
    /// # Errors
    /// Names the operation, the expected sizes, the size found, and flags that change it.
    fn check(&self, _workload: &Workload) -> Result<()> {
        Ok(())
    }

    /// Adds the engine's scratch buffers to the plan.
    fn plan(&mut self, plan: &mut Plan, workload: &Workload);

    /// Allocates the arena, zeroed except for the constants of the plan, and frees the previous one.
    fn allocate(&mut self, plan: &Plan) -> Result<()>;

    /// Launches an operation. The method `run` of `dyn Engine` is the convenient form.
    fn execute(&mut self, operation: Operation) -> Result<()>;

    /// Copies values into a tensor of the same length, rounded to its type.
    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()>;

    /// Returns the values of a tensor, widened, after all previous work is complete.
    fn read(&mut self, from: Tensor) -> Result<Vec<f32>>;

    /// Copies a tensor in its storage format after all previous work is complete. `to` has its size.
    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()>;

    /// Returns the digest of a tensor (see [`mod@digest`]) after all previous work is complete. `first` is the position of its first
    /// element.
    fn digest(&mut self, tensor: Tensor, first: u64) -> Result<u64> {
        digest::through_host(self, tensor, first)
    }

    /// Copies bytes in storage format into a tensor. `bytes` has its size and is pageable memory, which is read before the call
    /// returns.
    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()>;

    /// Copies 32-bit integers into a tensor of the same length.
    fn write_i32(&mut self, to: Tensor, values: &[i32]) -> Result<()> {
        anyhow::ensure!(to.dtype == DType::I32, "write_i32: expected an i32 tensor, found {}", to.dtype.name());
        self.write_bytes(to, bytemuck::cast_slice(values))
    }

    /// Begins to copy an f32 tensor to the host.
    fn read_async(&mut self, from: Tensor) -> Result<PendingRead>;

    /// Waits for an asynchronous read.
    fn wait(&mut self, read: PendingRead) -> Result<ReadResult>;

    /// Returns a buffer of `len` words for [`load_batch`](Self::load_batch).
    fn host_buffer(&self, len: usize) -> Result<HostBuffer>;

    /// Begins to copy a batch into `to` and keeps the buffer until the copy is complete. Returns a buffer that is free again.
    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>>;

    /// Fills a tensor with zeros.
    fn zero(&mut self, tensor: Tensor) -> Result<()>;

    /// Copies a tensor to another one of the same type and length, which it does not overlap.
    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()>;

    /// Begins to copy a tensor to another one, which it does not overlap, after all work so far. Later work can run at the same time: only
    /// that after [`wait_for_copies`](Self::wait_for_copies) may write `from` or use `to`.
    fn copy_ahead(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.copy(to, from)
    }

    /// Orders all later work after the copies that have begun.
    fn wait_for_copies(&mut self) -> Result<()> {
        Ok(())
    }

    /// Copies a tensor to another one of the same length and converts between float and f32.
    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()>;

    /// Runs `work`, which must launch the same operations with the same tensors, shapes and numbers whenever it comes with the same
    /// key, and must neither copy from or to the host nor wait.
    ///
    /// The CUDA engine launches the work individually the first time, captures a CUDA graph the second time, and replays the
    /// graph from then on without calling `work`. Graphs are dropped when memory is allocated or GEMM algorithms change.
    /// If a capture fails, the work is launched individually and the reason is returned, once.
    fn capture_or_replay(
        &mut self,
        key: &GraphKey,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>>;

    /// Chooses the fastest implementation of each GEMM that `pass` launches. During the pass nothing is computed; afterwards the arena
    /// is zero except for the constants of the plan. GEMMs that an earlier run on this machine tuned are timed again only if `retune`.
    fn tune(&mut self, _retune: bool, _pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Tuning> {
        Ok(Tuning::default())
    }

    /// Returns the GEMM algorithms in use, or `None` where there is no choice.
    fn algorithms(&self) -> Option<Algorithms> {
        None
    }

    /// Uses these GEMM algorithms from now on, so that results have the same bits. Returns false and changes nothing if they are of
    /// another machine.
    fn adopt_algorithms(&mut self, _algorithms: &Algorithms) -> bool {
        false
    }

    /// Begins to record the start and end of each kernel, GEMM and copy; on a CPU, of each operation.
    fn start_profile(&mut self) -> Result<()>;

    /// Waits for the engine, ends the profile and returns its intervals in order.
    fn profile(&mut self) -> Result<Vec<Interval>>;

    /// Returns a tensor's place in GPU memory for other libraries, or `None` on the CPU.
    fn device_tensor(&self, _tensor: Tensor) -> Result<Option<DeviceTensor<'_>>> {
        Ok(None)
    }

    /// Orders all work launched from now on after `event`, which was recorded on another stream of the same GPU.
    fn wait_for_event(&mut self, _event: &cuda_driver::Event) -> Result<()> {
        anyhow::bail!("{} has no stream that could wait for an event", self.describe())
    }

    /// Returns an engine that runs the same kernels with the same grids in the emulator, or `None` if this engine has no kernels.
    fn emulated(&self) -> Option<Box<dyn Engine>> {
        None
    }
}

impl dyn Engine + '_ {
    /// Launches an operation, given its argument struct.
    pub fn run<'a>(&mut self, operation: impl Into<Operation<'a>>) -> Result<()> {
        self.execute(operation.into())
    }
}
