//! The CUDA engine: which kernel, which grid, which matrix product; one file per operation, as in `gpu/`.
//!
//! Operations check their tensors against the shape they are given, and queue kernels on an [`executor::Executor`]: a
//! GPU, or the emulator, which runs the same kernels with the same launch geometry on the CPU.

mod adamw;
mod arena;
mod attention;
mod bias;
mod cast;
mod classifier;
mod device;
mod emulated;
mod encoder;
mod executor;
mod functions;
mod gelu;
mod gemm;
mod global_norm;
mod kernel_products;
mod layernorm;
mod matmul;
mod modules;
mod peak;
mod profile;
mod recordings;
mod tensor_maps;
mod tuning;

pub use modules::EmbeddedKernels;

use super::{
    AdamW, Algorithms, BatchLayout, Ending, Engine, GeluFusion, GeluInput, Heads, HostBuffer, Interval, LayerNorm,
    Linear, OnDevice, Optimized, Peak, Reading, Recurring, Result, Scope, Ticket, Tuning, UpdateRange,
};
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use arena::Arena;
use cuda_std::launch::Launch;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, bf16};
pub use executor::Emulation;
use executor::{Executor, Turn};
use kernel_products::Scratch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// Storage type of parameters, gradients and activations; optimizer state is f32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    Bf16,
    Fp32,
}

/// How to run on a GPU.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernels to choose from.
    pub embedded: EmbeddedKernels,
    /// The driver's number of the GPU, from 0.
    pub gpu: usize,
    pub precision: Precision,
    /// With `Fp32`: multiply with 10-bit mantissas, on tensor cores.
    pub tf32: bool,
    /// Architecture whose kernels run, `sm_80`, instead of the newest that the GPU can run.
    pub kernels: Option<String>,
    /// Instead of what is fastest on the GPU.
    pub gelu_fusion: Option<GeluFusion>,
    pub products: Products,
    /// Which of each product's tilings this program's kernels take, counted round, instead of the one that was found fastest:
    /// to check them all.
    pub tiling: Option<usize>,
}

/// What computes matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// For each shape the faster of the two
    #[default]
    Auto,
    Cublaslt,
    /// This program's kernels alone, for bf16 on Hopper; rows must be multiples of 8 wide, as training's are
    Rust,
}

/// The engine on a GPU. Errors say what is missing: driver, GPU, kernels in this program, cuBLASLt.
pub fn open(options: &Options) -> Result<Box<dyn Engine>> {
    let executor = Box::new(device::Device::open(options)?);
    Ok(over(executor, options.precision, options.gelu_fusion))
}

/// The engine on the emulator: every kernel on the CPU, slowly, matrix products aside. With `hopper`, the kernels for
/// sm_90a where there are some.
pub fn emulated(precision: Precision, hopper: bool) -> Box<dyn Engine> {
    emulated_as(Emulation { hopper, ..Emulation::default() }, precision, None)
}

/// As [`emulated`], for the GPU that `emulation` says.
pub fn emulated_as(emulation: Emulation, precision: Precision, gelu_fusion: Option<GeluFusion>) -> Box<dyn Engine> {
    over(Box::new(emulated::Emulated::new(emulation)), precision, gelu_fusion)
}

/// As [`emulated`], over memory in which each buffer of the plan has its own bounds, with every access of every kernel
/// watched: an operation fails at the first fault, see [`cuda_std::emulate`]. Several times slower.
pub fn emulated_checked(precision: Precision, hopper: bool) -> Box<dyn Engine> {
    emulated_checked_as(Emulation { hopper, ..Emulation::default() }, precision, None)
}

/// As [`emulated_checked`], for the GPU that `emulation` says.
pub fn emulated_checked_as(
    emulation: Emulation,
    precision: Precision,
    gelu_fusion: Option<GeluFusion>,
) -> Box<dyn Engine> {
    over(Box::new(emulated::Emulated::checked(emulation)), precision, gelu_fusion)
}

fn over(executor: Box<dyn Executor>, precision: Precision, gelu_fusion: Option<GeluFusion>) -> Box<dyn Engine> {
    match precision {
        Precision::Bf16 => Box::new(Cuda::<bf16>::new(executor, gelu_fusion)),
        Precision::Fp32 => Box::new(Cuda::<f32>::new(executor, gelu_fusion)),
    }
}

/// What an arena can hold.
trait Stored: bytemuck::Pod + Send {
    const DTYPE: DType;
}

impl Stored for f32 {
    const DTYPE: DType = DType::F32;
}
impl Stored for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Stored for i32 {
    const DTYPE: DType = DType::I32;
}

/// An engine's float.
trait Float: Stored + TensorCore {}
impl Float for f32 {}
impl Float for bf16 {}

/// Values that are converted before they go to the device: so many that threads have work, and few enough for a cache.
const WRITTEN_AT_ONCE: usize = 1 << 21;

struct Cuda<T> {
    executor: Box<dyn Executor>,
    arena: Arena,
    /// f32: partial sums of one operation at a time.
    scratch: Option<Tensor>,
    update_ranges: adamw::Tables,
    gelu_fusion: GeluFusion,
    /// What is queued is recorded, and runs later.
    recording: bool,
    element: PhantomData<T>,
}

/// Bytes of dynamic shared memory that a kernel's layout takes.
fn shared_bytes<R>(layout: impl FnOnce(&mut Layout) -> R) -> usize {
    let mut measure = Layout::new();
    layout(&mut measure);
    measure.bytes()
}

impl<T: Float> Cuda<T> {
    fn new(executor: Box<dyn Executor>, gelu_fusion: Option<GeluFusion>) -> Self {
        let gelu_fusion = gelu_fusion.unwrap_or_else(|| executor.best_gelu_fusion(T::DTYPE));
        Self {
            executor,
            arena: Arena::default(),
            scratch: None,
            update_ranges: adamw::Tables::default(),
            gelu_fusion,
            recording: false,
            element: PhantomData,
        }
    }

    /// Records what `work` queues.
    fn record(&mut self, recurring: &Recurring, work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<()> {
        let started = self.executor.start_recording(recurring);
        self.recording = true;
        let queued = started.and_then(|()| work(self));
        self.recording = false;
        let finished = self.executor.finish_recording(queued.is_ok());
        queued.and(finished)
    }

    /// For what a recording cannot hold: it would be done now, not in its turn, or again from memory that is gone.
    fn not_recorded(&self, what: &str) -> Result<()> {
        ensure!(!self.recording, "{what} cannot be recorded: only operations on tensors can");
        Ok(())
    }

    /// What a kernel may read: `tensor`, which must hold at least `len` elements of `E`.
    fn input<E: Stored>(&self, name: &str, tensor: Tensor, len: usize) -> Result<Global<E>> {
        Ok(Global::new(self.arena.address::<E>(name, tensor, len)?))
    }

    /// What a kernel may write: `tensor`, which must hold at least `len` elements of `E`.
    fn output<E: Stored>(&self, name: &str, tensor: Tensor, len: usize) -> Result<GlobalMut<E>> {
        Ok(GlobalMut::new(self.arena.address(name, tensor, len)?))
    }

    /// The scratch buffer, of at least `len` f32.
    fn scratch(&self, len: usize) -> Result<Tensor> {
        match self.scratch {
            Some(tensor) if tensor.len >= len => Ok(tensor),
            found => bail!(
                "an operation needs {len} f32 of scratch, {} were planned: the plan was made for other shapes",
                found.map_or(0, |tensor| tensor.len)
            ),
        }
    }

    fn launch(&mut self, launch: &Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: pointer arguments come from `input` and `output`, which hold them to the lengths that the operation's
        // shape implies, and each operation passes the grid and the shared memory that the kernel's own functions state.
        unsafe { self.executor.launch(launch, grid, shared_bytes) }
    }
}

impl<T: Float> Engine for Cuda<T> {
    fn describe(&self) -> String {
        self.executor.describe()
    }

    fn float(&self) -> DType {
        T::DTYPE
    }

    fn gelu_fusion(&self) -> GeluFusion {
        self.gelu_fusion
    }

    /// Work that cannot be recorded has done nothing yet, so it can be queued all the same; what is wrong with the work itself
    /// goes wrong again then.
    fn repeat(
        &mut self,
        recurring: &Recurring,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>> {
        // Within a recording it is part of that.
        let turn = if self.recording { Turn::Queue } else { self.executor.turn(recurring) };
        let recorded = match turn {
            Turn::Queue => return work(self).map(|()| None),
            Turn::Record => self.record(recurring, work),
            Turn::Replay => Ok(()),
        };
        match recorded {
            Ok(()) => self.executor.replay(recurring).map(|()| None),
            Err(error) => work(self).map(|()| Some(format!("{error:#}"))),
        }
    }

    fn tune(&mut self, anew: bool, pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Tuning> {
        self.not_recorded("tuning")?;
        self.executor.note_products();
        let passed = pass(self);
        // It leaves other things in the memory.
        self.update_ranges.forget();
        let tuning = self.executor.tune(anew)?;
        passed.map(|()| tuning)
    }

    fn start_profile(&mut self) -> Result<()> {
        self.not_recorded("a profile")?;
        self.executor.start_profile()
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.executor.profile()
    }

    fn algorithms(&self) -> Option<Algorithms> {
        self.executor.algorithms()
    }

    fn adopt(&mut self, algorithms: &Algorithms) -> bool {
        self.executor.adopt(algorithms)
    }

    fn on_device(&self, tensor: Tensor) -> Result<Option<OnDevice<'_>>> {
        self.not_recorded("what others queue")?;
        let Some(stream) = self.executor.stream() else { return Ok(None) };
        let address = self.arena.bytes_of("the tensor", tensor)?.addr() as u64;
        Ok(Some(OnDevice { stream, address }))
    }

    fn wait_for(&mut self, event: &cuda_driver::Event) -> Result<()> {
        self.not_recorded("a wait for others")?;
        match self.executor.stream() {
            Some(stream) => Ok(stream.wait(event)?),
            None => bail!("{} has no stream that could wait for another", self.describe()),
        }
    }

    fn emulated(&self) -> Option<Box<dyn Engine>> {
        let executor = emulated::Emulated::new(self.executor.emulation());
        Some(Box::new(Self::new(Box::new(executor), Some(self.gelu_fusion))))
    }

    fn memory_free(&self) -> Result<usize> {
        Ok(self.executor.memory_free()? + self.arena.bytes())
    }

    fn peak(&self) -> Option<Peak> {
        self.executor.peak(T::DTYPE)
    }

    fn plan(&mut self, plan: &mut Plan, scope: &Scope) {
        let needs = [
            encoder::scratch::<T>(scope, self.executor.multiprocessors()),
            layernorm::scratch::<T>(scope, self.executor.multiprocessors()),
            bias::scratch::<T>(scope, self.executor.multiprocessors()),
            attention::scratch(scope),
            global_norm::scratch::<T>(scope, self.executor.multiprocessors()),
            matmul::scratch::<T>(scope, self.executor.emulation()),
        ];
        let len = if scope.training { needs.into_iter().max().unwrap_or(0) } else { 0 };
        self.scratch = (len > 0).then(|| plan.add(Group::Workspace, "scratch", &[len], DType::F32));
        self.update_ranges.plan(plan, scope);
    }

    fn allocate(&mut self, plan: &Plan) -> Result<()> {
        self.not_recorded("an allocation")?;
        let (needed, free) = (plan.bytes(), self.memory_free()?);
        if needed > free {
            let gib = |bytes: usize| bytes as f64 / (1 << 30) as f64;
            bail!(
                "the model needs {:.2} GiB, {} has {:.2} GiB free: {:.2} GiB too little; take a smaller batch or model",
                gib(needed),
                self.describe(),
                gib(free),
                gib(needed - free)
            );
        }
        self.update_ranges.forget();
        self.arena = Arena::default();
        self.arena = self.executor.allocate(plan)?;
        let scratch = match self.scratch {
            Some(scratch) => Scratch { parts: self.output("scratch", scratch, scratch.len)?, room: scratch.len },
            None => Scratch::NONE,
        };
        self.executor.use_scratch(scratch);
        Ok(())
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        fn send<E: Stored>(
            executor: &mut dyn Executor,
            arena: &Arena,
            to: Tensor,
            values: &[f32],
            convert: impl Fn(f32) -> E + Sync,
        ) -> Result<()> {
            ensure!(values.len() == to.len, "writing {} values to a tensor of {}", values.len(), to.len);
            let address = arena.address::<E>("the tensor written to", to, values.len())?;
            let mut converted = Vec::new();
            for (i, piece) in values.chunks(WRITTEN_AT_ONCE).enumerate() {
                piece.par_iter().with_min_len(1 << 14).map(|&value| convert(value)).collect_into_vec(&mut converted);
                let at = address.wrapping_add(i * WRITTEN_AT_ONCE);
                // SAFETY: `address` covers all elements in the arena; the memory is not page-locked, so read before the call
                // returns.
                unsafe { executor.upload(at.cast(), bytemuck::cast_slice(&converted)) }?;
            }
            Ok(())
        }
        self.not_recorded("a copy from the host")?;
        let (executor, arena) = (&mut *self.executor, &self.arena);
        match to.dtype {
            DType::F32 => send::<f32>(executor, arena, to, values, |value| value),
            DType::Bf16 => send::<bf16>(executor, arena, to, values, bf16::from_f32),
            DType::I32 => bail!("write takes floats, the tensor is i32"),
        }
    }

    fn read(&mut self, from: Tensor) -> Result<Vec<f32>> {
        fn fetch<E: Stored>(
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
        self.not_recorded("a copy to the host")?;
        let (executor, arena) = (&mut *self.executor, &self.arena);
        match from.dtype {
            DType::F32 => fetch::<f32>(executor, arena, from, |value| value),
            DType::Bf16 => fetch::<bf16>(executor, arena, from, bf16::to_f32),
            DType::I32 => bail!("read gives floats, the tensor is i32"),
        }
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        self.not_recorded("a copy to the host")?;
        ensure!(to.len() == from.bytes(), "reading {} bytes of a tensor of {}", to.len(), from.bytes());
        let address = self.arena.bytes_of("the tensor read", from)?;
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.download(to, address) }
    }

    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()> {
        self.not_recorded("a copy from the host")?;
        ensure!(bytes.len() == to.bytes(), "writing {} bytes to a tensor of {}", bytes.len(), to.bytes());
        let address = self.arena.bytes_of("the tensor written to", to)?;
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.upload(address, bytes) }
    }

    fn write_i32(&mut self, to: Tensor, values: &[i32]) -> Result<()> {
        self.not_recorded("a copy from the host")?;
        ensure!(values.len() == to.len, "writing {} values to a tensor of {}", values.len(), to.len);
        let address = self.arena.address::<i32>("the tensor written to", to, values.len())?;
        // SAFETY: `address` covers that many elements of the arena.
        unsafe { self.executor.upload(address.cast(), bytemuck::cast_slice(values)) }
    }

    fn read_later(&mut self, from: Tensor) -> Result<Ticket> {
        self.not_recorded("a copy to the host")?;
        let address = self.arena.address::<f32>("the tensor read", from, from.len)?;
        // SAFETY: `address` covers that many elements of the arena.
        unsafe { self.executor.download_later(address, from.len) }
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Reading> {
        self.not_recorded("a wait for a copy")?;
        self.executor.wait(ticket)
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        self.executor.host_buffer(len)
    }

    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>> {
        self.not_recorded("a copy from the host")?;
        let len = layout.words();
        ensure!(words.len() >= len, "a batch of {} words where {layout:?} has {len}", words.len());
        let address = self.arena.address::<i32>("the batch", to, len)?;
        // SAFETY: `address` covers the words of the arena.
        unsafe { self.executor.upload_later(address, words, len) }
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        let address = self.arena.bytes_of("the tensor zeroed", tensor)?;
        // SAFETY: `address` covers the tensor's bytes of the arena.
        unsafe { self.executor.zero(address, tensor.bytes()) }
    }

    fn encoder_forward(
        &mut self,
        out: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        wte: Tensor,
        wpe: Tensor,
        c: usize,
    ) -> Result<()> {
        encoder::forward(self, out, batch, layout, wte, wpe, c)
    }

    fn encoder_backward(
        &mut self,
        dwte: Tensor,
        dwpe: Tensor,
        dout: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        c: usize,
    ) -> Result<()> {
        encoder::backward(self, dwte, dwpe, dout, batch, layout, c)
    }

    fn layernorm_forward(&mut self, op: LayerNorm, inp: Tensor) -> Result<()> {
        layernorm::forward(self, op, inp)
    }

    fn norm_sums_columns(&self, c: usize) -> bool {
        layernorm::sums_columns::<T>(c)
    }

    fn layernorm_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Tensor,
        column_sums: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        op: LayerNorm,
    ) -> Result<()> {
        layernorm::backward(self, dinp, dweight, dbias, column_sums, dout, inp, op)
    }

    fn matmul_forward(
        &mut self,
        out: Tensor,
        inp: Tensor,
        weight: Tensor,
        bias: Option<Tensor>,
        ending: Ending,
        shape: Linear,
    ) -> Result<()> {
        matmul::forward(self, out, inp, weight, bias, ending, shape)
    }

    fn matmul_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        weight: Tensor,
        gelu: Option<GeluInput>,
        shape: Linear,
    ) -> Result<()> {
        matmul::backward(self, dinp, dweight, dbias, dout, inp, weight, gelu, shape)
    }

    fn attention_forward(&mut self, out: Tensor, lse: Tensor, qkv: Tensor, shape: Heads) -> Result<()> {
        attention::forward(self, out, lse, qkv, shape)
    }

    fn attention_backward(
        &mut self,
        dqkv: Tensor,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Heads,
    ) -> Result<()> {
        attention::backward(self, dqkv, dout, qkv, out, lse, shape)
    }

    fn classifier(
        &mut self,
        logits: Tensor,
        losses: Tensor,
        targets: Tensor,
        v: usize,
        vp: usize,
        dloss: Option<f32>,
    ) -> Result<()> {
        classifier::classifier(self, logits, losses, targets, v, vp, dloss)
    }

    fn sum(&mut self, out: Tensor, values: Tensor) -> Result<()> {
        global_norm::sum(self, out, values)
    }

    fn global_norm(&mut self, norm: Tensor, grads: Tensor) -> Result<()> {
        global_norm::global_norm(self, norm, grads)
    }

    fn squared_sum(&mut self, out: Tensor, values: &[Tensor]) -> Result<()> {
        global_norm::squared_sum(self, out, values)
    }

    fn square_root(&mut self, out: Tensor, value: Tensor) -> Result<()> {
        global_norm::root(self, out, value)
    }

    fn adamw(&mut self, of: Optimized, ranges: &[UpdateRange], stats: Tensor, settings: &AdamW) -> Result<()> {
        adamw::adamw(self, of, ranges, stats, settings)
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        ensure!(
            (to.dtype, to.len) == (from.dtype, from.len),
            "copy of {} {} to {} {}",
            from.len,
            from.dtype.name(),
            to.len,
            to.dtype.name()
        );
        let (to, source) = (self.arena.bytes_of("to", to)?, self.arena.bytes_of("from", from)?);
        // SAFETY: both cover the tensors' bytes of the arena.
        unsafe { self.executor.copy(to, source, from.bytes()) }
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        cast::cast(self, to, from)
    }
}
