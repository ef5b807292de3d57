//! The CUDA engine: selects the kernel and grid of each operation. One file per operation, as in `gpu/`.
//!
//! Operations check their tensors against the shape they are given, and launch kernels on an `Executor`: a GPU, or
//! the emulator, which runs the same kernels with the same launch geometry on the CPU.

mod activation;
mod adamw;
mod arena;
mod attention;
mod bias;
mod block_float;
mod cast;
mod classifier;
mod cuda_graphs;
mod decode;
mod decode_step;
mod device;
mod digest;
mod emulated;
mod encoder;
mod executor;
mod experts;
mod functions;
mod gate;
mod gemm_cache;
mod gemm_dispatch;
mod gemm_tuner;
mod global_norm;
mod kernel_gemm;
mod matmul;
mod matmul_fp8;
mod modules;
mod muon;
mod noise;
mod norm;
mod peak;
mod profile;
mod quantize;
mod rotary;
mod scale_blocks;
mod stream;
mod tensor_maps;
mod value_embedding;

pub use cuda_std::launch::HAS_EMULATOR;
pub use executor::EmulatedGpu;
pub use modules::{EMBEDDED, EmbeddedKernels, KernelCode, select};
pub use profile::Profile;

use crate::gemm::{Algorithms, Tuning};
use crate::ops::DecodeStepShape;
use crate::plan::{Constant, Group, Plan};
use crate::tensor::{DType, Tensor};
use crate::{
    BatchLayout, DeviceTensor, Engine, GeluFusion, GraphKey, HostBuffer, Interval, Operation, Peak, PendingRead,
    ReadResult, Result, Workload,
};
use anyhow::{bail, ensure};
use arena::Arena;
use cuda_graphs::GraphAction;
use cuda_std::launch::Launch;
use cuda_std::mma::TensorCore;
use cuda_std::{Element, Global, GlobalMut, bf16};
use executor::Executor;
use gemm_dispatch::GemmDispatch;
use gpu::launch::{KernelLaunch, shared_bytes};
use kernel_gemm::Scratch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// Storage type of parameters, gradients and activations. Optimizer state is f32 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// bf16 with f32 accumulation
    Bf16,
    /// f32
    Fp32,
    /// bf16, and FP8 in the matmuls of the layers' training steps
    Fp8,
}

/// Settings of an engine on a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The driver's index of the GPU.
    pub gpu: usize,
    /// Storage type.
    pub precision: Precision,
    /// Rounds the inputs of f32 GEMMs to TF32, on tensor cores.
    pub tf32: bool,
    /// Architecture of the kernels, for example `sm_80`; the newest that the GPU can run by default.
    pub kernels: Option<String>,
    /// GELU fusion; the fastest on the GPU by default.
    pub gelu_fusion: Option<GeluFusion>,
    /// Which kernels compute GEMMs.
    pub matmul: MatmulBackend,
    /// Index, modulo their number, of each wgmma GEMM's configuration, instead of the one that was timed as the fastest. Tests use it
    /// to check them all.
    pub kernel_config: Option<usize>,
}

/// Selects which kernels compute GEMMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MatmulBackend {
    /// The faster of the two for each shape
    #[default]
    Auto,
    /// cuBLASLt
    Cublaslt,
    /// This program's kernels: bf16 and FP8 on Hopper, FP8 with the kernels for sm_89, with rows that are multiples of 8 elements
    Rust,
}

/// Opens the engine on a GPU. Errors say what is missing: driver, GPU, kernels in this program, cuBLASLt.
pub fn open(options: &CudaOptions) -> Result<Box<dyn Engine>> {
    let device = device::CudaDevice::open(options)?;
    let cache = device.gemm_cache()?;
    let fusion = options.gelu_fusion;
    Ok(match options.precision {
        Precision::Bf16 | Precision::Fp8 => Box::new(Cuda::<bf16>::new(Box::new(device), Some(cache), fusion)),
        Precision::Fp32 => Box::new(Cuda::<f32>::new(Box::new(device), Some(cache), fusion)),
    })
}

/// Creates the engine on the emulator, which runs every kernel on the CPU. GEMMs that no kernel computes use the CPU reference.
///
/// If `checked`, each buffer of the plan has its own bounds, and every access of every kernel is checked: an operation fails at
/// its first error, see [`cuda_std::emulate`]. That is several times slower.
pub fn emulated(
    gpu: EmulatedGpu,
    precision: Precision,
    gelu_fusion: Option<GeluFusion>,
    checked: bool,
) -> Box<dyn Engine> {
    let executor = Box::new(emulated::Emulated::new(gpu, checked));
    match precision {
        Precision::Bf16 | Precision::Fp8 => Box::new(Cuda::<bf16>::new(executor, None, gelu_fusion)),
        Precision::Fp32 => Box::new(Cuda::<f32>::new(executor, None, gelu_fusion)),
    }
}

/// A type that an arena can store.
trait StorageType: bytemuck::Pod + Send {
    const DTYPE: DType;
}

impl StorageType for f32 {
    const DTYPE: DType = DType::F32;
}
impl StorageType for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl StorageType for i32 {
    const DTYPE: DType = DType::I32;
}
impl StorageType for u16 {
    const DTYPE: DType = DType::U16;
}

/// A block of eight values ([`gpu::block_float`]), signed or not.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Zeroable)]
struct Block8<const SIGNED: bool>(u64);
// SAFETY: a transparent wrapper of an integer.
unsafe impl<const SIGNED: bool> bytemuck::Pod for Block8<SIGNED> {}
impl<const SIGNED: bool> StorageType for Block8<SIGNED> {
    const DTYPE: DType = DType::Block8 { signed: SIGNED };
}

/// An FP8 number of any format.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Fp8Bits(u8);
impl StorageType for Fp8Bits {
    const DTYPE: DType = DType::Fp8;
}

/// An engine's storage type.
trait Float: StorageType + TensorCore {}
impl Float for f32 {}
impl Float for bf16 {}

/// Values that are converted at a time before they are copied to the device: enough for all threads, few enough for the cache.
const WRITE_CHUNK: usize = 1 << 21;

struct Cuda<T> {
    executor: Box<dyn Executor>,
    gemms: GemmDispatch,
    arena: Arena,
    /// f32: partial sums of one operation at a time.
    scratch: Option<Tensor>,
    /// i32: counters of the fused attention backward pass, zero between operations.
    attention_counters: Option<Tensor>,
    update_ranges: adamw::Tables,
    steps: decode_step::Steps<T>,
    gelu_fusion: GeluFusion,
    /// Constants of the plan, which the autotuner overwrites.
    constants: Vec<Constant>,
    /// Whether launches are captured into a graph instead of run.
    capturing: bool,
    element: PhantomData<T>,
}

impl<T: Float> Cuda<T> {
    fn new(
        mut executor: Box<dyn Executor>,
        cache: Option<gemm_cache::GemmCache>,
        gelu_fusion: Option<GeluFusion>,
    ) -> Self {
        let gelu_fusion = gelu_fusion.unwrap_or_else(|| executor.best_gelu_fusion(T::DTYPE));
        let gemms = GemmDispatch::new(executor.emulation(), cache, &mut *executor);
        Self {
            executor,
            gemms,
            arena: Arena::default(),
            scratch: None,
            attention_counters: None,
            update_ranges: adamw::Tables::default(),
            steps: decode_step::Steps::default(),
            gelu_fusion,
            constants: Vec::new(),
            capturing: false,
            element: PhantomData,
        }
    }

    fn write_constants(&mut self) -> Result<()> {
        self.constants.clone().iter().try_for_each(|constant| self.write(constant.tensor, constant.values()))
    }

    /// Zeros the counters of attention. Each operation leaves them at zero.
    fn zero_counters(&mut self) -> Result<()> {
        self.attention_counters.map_or(Ok(()), |counters| self.zero(counters))
    }

    /// Captures what `work` launches into a graph.
    fn capture(&mut self, key: &GraphKey, work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<()> {
        let begun = self.executor.begin_capture(key);
        self.capturing = true;
        let launched = begun.and_then(|()| work(self));
        self.capturing = false;
        let ended = self.executor.end_capture(launched.is_ok());
        launched.and(ended)
    }

    /// Refuses work that a graph cannot contain: it would run now instead of in order, or repeat a copy from memory that is gone.
    fn ensure_not_capturing(&self, what: &str) -> Result<()> {
        ensure!(!self.capturing, "{what} cannot be captured in a CUDA graph: only operations on tensors can");
        Ok(())
    }

    /// Returns the addresses of a copy, or `None` if nothing is to be launched.
    fn copied(&self, to: Tensor, from: Tensor) -> Result<Option<[*mut u8; 2]>> {
        ensure!(
            (to.dtype, to.len) == (from.dtype, from.len),
            "copy: expected {} {}, found {} {}",
            to.len,
            to.dtype.name(),
            from.len,
            from.dtype.name()
        );
        let addresses = [self.arena.bytes_of("to", to)?, self.arena.bytes_of("from", from)?];
        Ok((!self.gemms.is_collecting()).then_some(addresses))
    }

    /// Returns the address of a kernel's input: `tensor`, which must hold at least `len` elements of `E`.
    fn input<E: StorageType>(&self, name: &str, tensor: Tensor, len: usize) -> Result<Global<E>> {
        Ok(Global::new(self.arena.address::<E>(name, tensor, len)?))
    }

    /// Returns the address of a kernel's output: `tensor`, which must hold at least `len` elements of `E`.
    fn output<E: StorageType>(&self, name: &str, tensor: Tensor, len: usize) -> Result<GlobalMut<E>> {
        Ok(GlobalMut::new(self.arena.address(name, tensor, len)?))
    }

    /// Like [`input`](Self::input); null if there is no tensor.
    fn optional_input<E: StorageType>(&self, name: &str, tensor: Option<Tensor>, len: usize) -> Result<Global<E>> {
        tensor.map_or(Ok(Global::null()), |tensor| self.input(name, tensor, len))
    }

    /// Like [`output`](Self::output); null if there is no tensor.
    fn optional_output<E: StorageType>(&self, name: &str, tensor: Option<Tensor>, len: usize) -> Result<GlobalMut<E>> {
        tensor.map_or(Ok(GlobalMut::null()), |tensor| self.output(name, tensor, len))
    }

    /// Returns the scratch buffer, which must hold at least `len` f32.
    fn scratch(&self, len: usize) -> Result<Tensor> {
        match self.scratch {
            Some(tensor) if tensor.len >= len => Ok(tensor),
            found => bail!(
                "scratch memory: expected {len} f32, found {}; plan the engine for this shape",
                found.map_or(0, |tensor| tensor.len)
            ),
        }
    }

    fn launch(&mut self, launch: Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()> {
        self.launch_kernel(&KernelLaunch { launch, grid, shared_bytes })
    }

    fn launch_kernel(&mut self, kernel: &KernelLaunch) -> Result<()> {
        if kernel.grid.contains(&0) || self.gemms.is_collecting() {
            return Ok(());
        }
        // SAFETY: pointer arguments come from `input` and `output`, which check them against the lengths that the operation's
        // shape implies, and each operation passes the grid and the shared memory that the kernel's own functions state.
        unsafe { self.executor.launch(kernel) }
    }

    fn launch_all(&mut self, kernels: &[KernelLaunch]) -> Result<()> {
        kernels.iter().try_for_each(|kernel| self.launch_kernel(kernel))
    }
}

impl<T: Float> Engine for Cuda<T> {
    fn describe(&self) -> String {
        self.executor.describe()
    }

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn fp8_dtype(&self) -> Option<DType> {
        (T::DTYPE == DType::Bf16 && self.executor.emulation().multiplies_fp8()).then_some(DType::Fp8)
    }

    fn gelu_fusion(&self) -> GeluFusion {
        self.gelu_fusion
    }

    fn fuses_column_sums(&self, c: usize) -> bool {
        norm::fuses_column_sums::<T>(c)
    }

    fn execute(&mut self, operation: Operation) -> Result<()> {
        match operation {
            Operation::EncoderForward(op) => encoder::forward(self, op),
            Operation::EncoderBackward(op) => encoder::backward(self, op),
            Operation::NormForward(op) => norm::forward(self, &op),
            Operation::NormBackward(op) => norm::backward(self, op),
            Operation::RotaryForward(op) => rotary::forward(self, op),
            Operation::RotaryBackward(op) => rotary::backward(self, op),
            Operation::MatmulForward(op) => matmul::forward(self, &op),
            Operation::MatmulBackward(op) => matmul::backward(self, &op),
            Operation::Activate(op) => activation::activate(self, op),
            Operation::ActivateBackward(op) => activation::activate_backward(self, op),
            Operation::ScaleBlocks(op) => scale_blocks::scale_blocks(self, op),
            Operation::Mix(op) => stream::mix(self, op),
            Operation::MixBackward(op) => stream::mix_backward(self, op),
            Operation::Smear(op) => stream::smear(self, op),
            Operation::SmearBackward(op) => stream::smear_backward(self, &op),
            Operation::ValueEmbed(op) => value_embedding::forward(self, op),
            Operation::ValueEmbedBackward(op) => value_embedding::backward(self, &op),
            Operation::GateInputBackward(op) => value_embedding::input_backward(self, op),
            Operation::Route(op) => experts::route(self, op),
            Operation::ChoiceGradients(op) => experts::choice_gradients(self, op),
            Operation::RouteBackward(op) => experts::route_backward(self, &op),
            Operation::Dispatch(op) => experts::dispatch(self, &op),
            Operation::Combine(op) => experts::combine(self, op),
            Operation::AttentionForward(op) => attention::forward(self, &op),
            Operation::AttentionBackward(op) => attention::backward(self, &op),
            Operation::Classifier(op) => classifier::classifier(self, op),
            Operation::MostLikely(op) => classifier::most_likely(self, op),
            Operation::Sum(op) => global_norm::sum(self, op),
            Operation::GlobalNorm(op) => global_norm::global_norm(self, op),
            Operation::SquaredSum(op) => global_norm::squared_sum(self, op),
            Operation::SquareRoot(op) => global_norm::square_root(self, op),
            Operation::AdamWUpdate(op) => adamw::adamw(self, op),
            Operation::MuonMomentum(op) => muon::momentum(self, op),
            Operation::Orthogonalize(op) => muon::orthogonalize(self, op),
            Operation::MuonVariance(op) => muon::variance(self, op),
            Operation::MuonApply(op) => muon::apply(self, op),
            Operation::Quantize(op) => quantize::quantize(self, op),
            Operation::Dequantize(op) => quantize::dequantize(self, op),
            Operation::Fp8Scales(op) => quantize::scales(self, op),
            Operation::DecodeEmbed(op) => decode::embed(self, op),
            Operation::DecodeMatmul(op) => decode::matmul(self, &op),
            Operation::DecodeAttention(op) => decode::attention(self, &op),
            Operation::DecodeStep(op) => decode_step::step(self, op),
            Operation::CacheFill(op) => decode::cache_fill(self, op),
            Operation::CacheRead(op) => decode::cache_read(self, op),
            Operation::SampleTokens(op) => decode::sample(self, op),
        }
    }

    /// Launches the work individually if its capture fails: no part of it has run yet. An error in the work itself occurs again
    /// then.
    fn capture_or_replay(
        &mut self,
        key: &GraphKey,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>> {
        // Within a capture the work is part of the outer graph.
        let individually = self.capturing || self.gemms.is_collecting();
        let action = if individually { GraphAction::Launch } else { self.executor.graph_action(key) };
        let captured = match action {
            GraphAction::Launch => return work(self).map(|()| None),
            GraphAction::Capture => self.capture(key, work),
            GraphAction::Replay => Ok(()),
        };
        match captured {
            Ok(()) => self.executor.replay(key).map(|()| None),
            Err(error) => work(self).map(|()| Some(format!("{error:#}"))),
        }
    }

    fn tune(&mut self, retune: bool, pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Tuning> {
        self.ensure_not_capturing("autotuning")?;
        self.gemms.begin_tuning();
        let passed = pass(self);
        // Timing overwrites the memory.
        self.update_ranges.invalidate();
        let mut tuning = self.gemms.finish_tuning(retune, &mut *self.executor)?;
        passed?;
        decode_step::choose(self, pass, &mut tuning)?;
        self.write_constants()?;
        self.zero_counters()?;
        Ok(tuning)
    }

    fn start_profile(&mut self) -> Result<()> {
        self.ensure_not_capturing("a profile")?;
        self.executor.start_profile()
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.executor.profile()
    }

    fn algorithms(&self) -> Option<Algorithms> {
        self.gemms.algorithms()
    }

    fn adopt_algorithms(&mut self, algorithms: &Algorithms) -> bool {
        self.gemms.adopt(algorithms, &mut *self.executor)
    }

    fn device_tensor(&self, tensor: Tensor) -> Result<Option<DeviceTensor<'_>>> {
        self.ensure_not_capturing("work of another library")?;
        let Some(stream) = self.executor.stream() else { return Ok(None) };
        let address = self.arena.bytes_of("the tensor", tensor)?.addr() as u64;
        Ok(Some(DeviceTensor { stream, address }))
    }

    fn wait_for_event(&mut self, event: &cuda_driver::Event) -> Result<()> {
        self.ensure_not_capturing("a wait for another stream")?;
        match self.executor.stream() {
            Some(stream) => Ok(stream.wait(event)?),
            None => bail!("{} has no stream that could wait for an event", self.describe()),
        }
    }

    fn emulated(&self) -> Option<Box<dyn Engine>> {
        let executor = Box::new(emulated::Emulated::new(self.executor.emulation(), false));
        Some(Box::new(Self::new(executor, None, Some(self.gelu_fusion))))
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.executor.free_memory()? + self.arena.bytes())
    }

    fn free_host_memory(&self) -> Option<usize> {
        Some(self.executor.free_host_memory() + self.arena.host_bytes())
    }

    fn reserved_memory(&self, communicators: usize) -> usize {
        /// CUDA graphs, code that is loaded when a kernel is first launched, and local memory of kernels.
        const SINGLE: usize = 128 << 20;
        /// NCCL's channels of a communicator: buffers of each pair of neighbors for each protocol.
        const NCCL: usize = 1 << 30;
        SINGLE + communicators * NCCL
    }

    fn peak(&self) -> Option<Peak> {
        self.executor.peak(T::DTYPE)
    }

    fn decode_step_memory(&self, shape: &DecodeStepShape) -> [usize; 2] {
        decode_step::memory(self, shape)
    }

    fn check(&self, workload: &Workload) -> Result<()> {
        experts::check::<T>(workload, self.executor.emulation())?;
        attention::check::<T>(workload)?;
        rotary::check::<T>(workload)?;
        norm::check::<T>(workload)?;
        activation::check::<T>(workload)
    }

    fn plan(&mut self, plan: &mut Plan, workload: &Workload) {
        let sm_count = self.executor.sm_count();
        let needs = [
            encoder::scratch::<T>(workload, sm_count),
            norm::scratch::<T>(workload, sm_count),
            stream::scratch::<T>(workload, sm_count),
            value_embedding::scratch(workload, sm_count),
            rotary::scratch::<T>(workload, sm_count),
            bias::scratch::<T>(workload, sm_count),
            if self.fp8_dtype().is_some() { quantize::scratch(workload) } else { 0 },
            attention::scratch::<T>(workload, &*self.executor),
            global_norm::scratch::<T>(workload, sm_count),
            matmul::scratch::<T>(workload, self.executor.emulation()),
        ];
        let of_training = if workload.training { needs.into_iter().max().unwrap_or(0) } else { 0 };
        let len = of_training.max(experts::scratch(workload));
        self.scratch = (len > 0).then(|| plan.add(Group::Workspace, "scratch", &[len], DType::F32));
        let counters = attention::counters::<T>(workload, &*self.executor);
        let add = |plan: &mut Plan| plan.add(Group::Workspace, "attention counters", &[counters], DType::I32);
        self.attention_counters = (counters > 0).then(|| add(plan));
        self.update_ranges.plan(plan, workload);
    }

    fn allocate(&mut self, plan: &Plan) -> Result<()> {
        self.ensure_not_capturing("an allocation")?;
        let gib = |bytes: usize| bytes as f64 / (1 << 30) as f64;
        let (needed, free) = (plan.bytes(), self.free_memory()?);
        if needed > free {
            bail!(
                "GPU memory: expected {:.2} GiB free, found {:.2} GiB on {}; use a smaller batch or model",
                gib(needed),
                gib(free),
                self.describe()
            );
        }
        let (needed, free) = (plan.host_bytes(), self.free_host_memory().unwrap_or(0));
        if needed > free {
            bail!(
                "--offload: expected {:.2} GiB of free memory of the host, found {:.2} GiB; offload less",
                gib(needed),
                gib(free)
            );
        }
        self.update_ranges.invalidate();
        self.steps.invalidate();
        self.arena = Arena::default();
        self.arena = self.executor.allocate(plan)?;
        let scratch = match self.scratch {
            Some(scratch) => Scratch { partials: self.output("scratch", scratch, scratch.len)?, len: scratch.len },
            None => Scratch::NONE,
        };
        self.gemms.set_scratch(scratch);
        self.constants = plan.constants().to_vec();
        self.write_constants()?;
        self.zero_counters()
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        fn send<E: StorageType>(
            executor: &mut dyn Executor,
            arena: &Arena,
            to: Tensor,
            values: &[f32],
            convert: impl Fn(f32) -> E + Sync,
        ) -> Result<()> {
            ensure!(values.len() == to.len, "write: expected {} values, found {}", to.len, values.len());
            let address = arena.address::<E>("the tensor written to", to, values.len())?;
            let mut converted = Vec::new();
            for (i, chunk) in values.chunks(WRITE_CHUNK).enumerate() {
                chunk.par_iter().with_min_len(1 << 14).map(|&value| convert(value)).collect_into_vec(&mut converted);
                let at = address.wrapping_add(i * WRITE_CHUNK);
                // SAFETY: `address` covers all elements in the arena; the driver reads pageable memory before the call
                // returns.
                unsafe { executor.upload(at.cast(), bytemuck::cast_slice(&converted)) }?;
            }
            Ok(())
        }
        self.ensure_not_capturing("a copy from the host")?;
        let (executor, arena) = (&mut *self.executor, &self.arena);
        match to.dtype {
            DType::F32 => send::<f32>(executor, arena, to, values, |value| value),
            DType::Bf16 => send::<bf16>(executor, arena, to, values, bf16::from_f32),
            DType::Block8 { signed: true } => block_float::write::<T, true>(self, to, values),
            DType::Block8 { signed: false } => block_float::write::<T, false>(self, to, values),
            DType::I32 | DType::U16 | DType::Fp8 => bail!("write: expected a float tensor, found {}", to.dtype.name()),
        }
    }

    fn read(&mut self, from: Tensor) -> Result<Vec<f32>> {
        fn fetch<E: StorageType>(
            executor: &mut dyn Executor,
            arena: &Arena,
            from: Tensor,
            convert: impl Fn(E) -> f32,
        ) -> Result<Vec<f32>> {
            let address = arena.address::<E>("the tensor read", from, from.len)?;
            let mut values = vec![E::zeroed(); from.len];
            // SAFETY: `address` covers that many elements of the arena.
            unsafe { executor.download(bytemuck::cast_slice_mut(&mut values), address.cast())? };
            Ok(values.into_iter().map(convert).collect())
        }
        self.ensure_not_capturing("a copy to the host")?;
        let (executor, arena) = (&mut *self.executor, &self.arena);
        match from.dtype {
            DType::F32 => fetch::<f32>(executor, arena, from, |value| value),
            DType::Bf16 => fetch::<bf16>(executor, arena, from, bf16::to_f32),
            DType::Block8 { signed: true } => block_float::read::<T, true>(self, from),
            DType::Block8 { signed: false } => block_float::read::<T, false>(self, from),
            DType::I32 | DType::U16 | DType::Fp8 => bail!("read: expected a float tensor, found {}", from.dtype.name()),
        }
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.ensure_not_capturing("a copy to the host")?;
        ensure!(to.len() == from.bytes(), "read: expected {} bytes, found {}", from.bytes(), to.len());
        let address = self.arena.bytes_of("the tensor read", from)?;
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.download(to, address) }
    }

    fn digest(&mut self, tensor: Tensor, first: u64) -> Result<u64> {
        digest::of_tensor(self, tensor, first)
    }

    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()> {
        self.ensure_not_capturing("a copy from the host")?;
        ensure!(bytes.len() == to.bytes(), "write: expected {} bytes, found {}", to.bytes(), bytes.len());
        let address = self.arena.bytes_of("the tensor written to", to)?;
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.upload(address, bytes) }
    }

    fn read_async(&mut self, from: Tensor) -> Result<PendingRead> {
        self.ensure_not_capturing("a copy to the host")?;
        let address = self.arena.address::<f32>("the tensor read", from, from.len)?;
        // SAFETY: `address` covers that many elements of the arena.
        unsafe { self.executor.download_async(address, from.len) }
    }

    fn wait(&mut self, read: PendingRead) -> Result<ReadResult> {
        self.ensure_not_capturing("a wait for a copy")?;
        self.executor.wait(read)
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        self.executor.host_buffer(len)
    }

    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>> {
        self.ensure_not_capturing("a copy from the host")?;
        let len = layout.words();
        ensure!(words.len() >= len, "load_batch: expected {len} words for {layout:?}, found {}", words.len());
        let address = self.arena.address::<i32>("the batch", to, len)?;
        // SAFETY: `address` covers the words of the arena.
        unsafe { self.executor.upload_async(address, words, len) }
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        let address = self.arena.bytes_of("the tensor zeroed", tensor)?;
        if self.gemms.is_collecting() {
            return Ok(());
        }
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.zero(address, tensor.bytes()) }
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        let Some([to, source]) = self.copied(to, from)? else { return Ok(()) };
        // SAFETY: both cover the tensors' bytes of the arena.
        unsafe { self.executor.copy(to, source, from.bytes()) }
    }

    fn copy_ahead(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.ensure_not_capturing("a copy on another stream")?;
        let Some([to, source]) = self.copied(to, from)? else { return Ok(()) };
        // SAFETY: both cover the tensors' bytes of the arena.
        unsafe { self.executor.copy_ahead(to, source, from.bytes()) }
    }

    fn wait_for_copies(&mut self) -> Result<()> {
        self.executor.wait_for_copies()
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        cast::cast(self, to, from)
    }
}
