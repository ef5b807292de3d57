//! The executor that is the CPU: kernels through the emulator, matrix products through a CPU GEMM.

use super::Products;
use super::arena::Arena;
use super::executor::{Emulation, Executor, Turn};
use super::gemm;
use super::kernel_products::{KernelProduct, Scratch, by_library};
use super::recordings::Recordings;
use super::tensor_maps::{Extents, Key};
use crate::plan::{Group, Plan};
use crate::tensor::DType;
use crate::{GeluFusion, HostBuffer, Peak, Reading, Recurring, Result, Ticket};
use anyhow::{Context, anyhow, ensure};
use cublaslt::{Operands, Problem};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::launch::KernelLaunch;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

#[derive(Default)]
pub struct Emulated {
    /// The buffers of the plan, each by itself, and the tensor maps.
    memory: Memory,
    /// Watches every access of the kernels. Activations, gradients and workspaces must be written before they are read, as
    /// if device memory did not begin zeroed.
    checked: bool,
    reads: HashMap<u64, Reading>,
    start: Option<Instant>,
    next_ticket: u64,
    emulation: Emulation,
    uploading: Option<HostBuffer>,
    tensor_maps: HashMap<Key, Global<TensorMap>>,
    scratch: Option<Scratch>,
    recordings: Recordings<Rc<[Piece]>>,
    /// Of the recording under way.
    recorded: Vec<Piece>,
}

/// A piece of work.
enum Piece {
    Launch { launch: Launch, grid: [u32; 3], shared_bytes: usize },
    Product { problem: Problem, operands: Operands },
    Zero { to: *mut u8, bytes: usize },
    Copy { to: *mut u8, from: *const u8, bytes: usize },
}

impl Emulated {
    pub fn new(emulation: Emulation) -> Self {
        Self { emulation, ..Self::default() }
    }

    pub fn checked(emulation: Emulation) -> Self {
        Self { emulation, checked: true, ..Self::default() }
    }

    /// Kernels compute what they can.
    fn kernel_for(&self, problem: &Problem, operands: &Operands) -> Result<Option<KernelProduct>> {
        match self.emulation.products {
            Products::Cublaslt => Ok(None),
            _ if !self.emulation.hopper => Ok(None),
            Products::Auto => Ok(KernelProduct::of(problem, operands)),
            Products::Rust => KernelProduct::required(problem, operands).map(Some),
        }
    }

    /// Records a piece or does it.
    ///
    /// # Safety
    /// As the operation of [`Executor`] that it is of.
    unsafe fn queue(&mut self, piece: Piece) -> Result<()> {
        if self.recordings.is_under_way() {
            self.recorded.push(piece);
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.run(&piece) }
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn run(&mut self, piece: &Piece) -> Result<()> {
        match *piece {
            Piece::Launch { ref launch, grid, shared_bytes } if self.checked => {
                Ok(launch.emulate_checked(&mut self.memory, grid, shared_bytes)?)
            }
            // SAFETY: the caller's promise; device memory is host memory here.
            Piece::Launch { ref launch, grid, shared_bytes } => Ok(unsafe { launch.emulate(grid, shared_bytes) }?),
            Piece::Product { ref problem, ref operands } => gemm::run(problem, operands, &mut self.memory),
            Piece::Zero { to, bytes } => Ok(self.memory.write(GlobalMut::new(to), &vec![0u8; bytes])?),
            Piece::Copy { to, from, bytes } => {
                let values = self.memory.slice(Global::new(from), bytes)?.to_vec();
                Ok(self.memory.write(GlobalMut::new(to), &values)?)
            }
        }
    }
}

impl Executor for Emulated {
    fn describe(&self) -> String {
        "emulated GPU".into()
    }

    fn memory_free(&self) -> Result<usize> {
        // The emulator serves tests; what the host cannot hold is the host's error.
        Ok(isize::MAX as usize / 2)
    }

    fn peak(&self, _: DType) -> Option<Peak> {
        None
    }

    fn emulation(&self) -> Emulation {
        self.emulation
    }

    fn shared_memory(&self, blocks: usize) -> usize {
        // Hopper's 228 KiB, of which a block may have 227.
        (228 << 10) / blocks - 1024
    }

    fn best_gelu_fusion(&self, float: DType) -> GeluFusion {
        // As on Hopper.
        if float == DType::Bf16 { GeluFusion::Both } else { GeluFusion::None }
    }

    fn tensor_map(
        &mut self,
        tensor: Global<bf16>,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>> {
        if !self.emulation.hopper {
            return Ok(None);
        }
        let key = Key { tensor: tensor.pointer().addr() as u64, extents, tile };
        // As on a GPU.
        let under_way = self.recordings.is_under_way();
        ensure!(!under_way || self.tensor_maps.contains_key(&key), "{key:?} cannot be made in a recording");
        let map = self.tensor_maps.entry(key).or_insert_with(|| {
            let map = match extents {
                Extents::Matrix([rows, columns]) => {
                    TensorMap::emulated(tensor, rows, columns, 2 * columns, tile.0, tile.1)
                }
                Extents::Matrices(extents) => TensorMap::emulated_3d(tensor, extents, tile),
            };
            self.memory.input(&format!("tensor map of {extents:?}"), &[map])
        });
        Ok(Some(*map))
    }

    fn use_scratch(&mut self, scratch: Scratch) {
        self.scratch = Some(scratch);
    }

    fn scratch(&self) -> Scratch {
        self.scratch.unwrap_or(Scratch::NONE)
    }

    fn allocate(&mut self, plan: &Plan) -> Result<Arena> {
        self.recordings.forget();
        self.tensor_maps.clear();
        self.memory = Memory::new();
        let mut arena = Arena::default();
        for block in plan.blocks() {
            let (name, bytes) = (block.name(), block.bytes);
            let zeroed = !self.checked || matches!(block.group, Group::Parameters | Group::Optimizer);
            let view: GlobalMut<u8> =
                if zeroed { self.memory.zeroed(&name, bytes) } else { self.memory.output(&name, bytes) };
            arena.add(block.offset, bytes, view.pointer());
        }
        Ok(arena)
    }

    fn turn(&mut self, work: &Recurring) -> Turn {
        self.recordings.turn(work)
    }

    fn start_recording(&mut self, work: &Recurring) -> Result<()> {
        self.recordings.start(work);
        Ok(())
    }

    fn finish_recording(&mut self, whole: bool) -> Result<()> {
        let recorded = std::mem::take(&mut self.recorded);
        let recording = if whole { Ok(recorded.into()) } else { Err(anyhow!("not all of it was queued")) };
        self.recordings.finish(recording)
    }

    fn replay(&mut self, work: &Recurring) -> Result<()> {
        let recording = Rc::clone(self.recordings.get(work)?);
        // SAFETY: when it was recorded, each operation held its tensors to the memory at hand, and recordings are forgotten
        // before that is given up.
        recording.iter().try_for_each(|piece| unsafe { self.run(piece) })
    }

    unsafe fn launch(&mut self, launch: &Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue(Piece::Launch { launch: launch.clone(), grid, shared_bytes }) }
    }

    unsafe fn matmul(&mut self, problem: &Problem, operands: &Operands, otherwise: Vec<KernelLaunch>) -> Result<()> {
        // The library would refuse the same operands.
        operands.validate(problem)?;
        if let Some(product) = self.kernel_for(problem, operands)? {
            // Nothing is timed here.
            let tiling = product.nth_tiling(self.emulation.tiling.unwrap_or(0), self);
            for kernel in product.prepare(tiling, self)? {
                // SAFETY: the caller's promise.
                unsafe { self.launch(&kernel.launch, kernel.grid, kernel.shared_bytes) }?;
            }
            return Ok(());
        }
        for kernel in otherwise {
            // SAFETY: the caller's promise.
            unsafe { self.launch(&kernel.launch, kernel.grid, kernel.shared_bytes) }?;
        }
        let (problem, operands) = by_library(problem, operands);
        // SAFETY: the caller's promise.
        unsafe { self.queue(Piece::Product { problem, operands }) }
    }

    fn is_by_kernel(&self, problem: &Problem, operands: &Operands) -> Result<bool> {
        Ok(self.kernel_for(problem, operands)?.is_some())
    }

    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()> {
        Ok(self.memory.write(GlobalMut::new(to), bytes)?)
    }

    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()> {
        bytes.copy_from_slice(self.memory.slice(Global::new(from), bytes.len())?);
        Ok(())
    }

    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue(Piece::Zero { to, bytes }) }
    }

    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue(Piece::Copy { to, from, bytes }) }
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(vec![0; len]))
    }

    unsafe fn upload_later(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>> {
        self.memory.write(GlobalMut::new(to), &buffer[..len])?;
        // A GPU is still copying the last one when the next one comes.
        Ok(self.uploading.replace(buffer))
    }

    unsafe fn download_later(&mut self, from: *const f32, len: usize) -> Result<Ticket> {
        let values = self.memory.slice(Global::new(from), len)?.to_vec();
        self.next_ticket += 1;
        let at = self.start.get_or_insert_with(Instant::now).elapsed();
        self.reads.insert(self.next_ticket, Reading { values, at });
        Ok(Ticket(self.next_ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Reading> {
        self.reads.remove(&ticket.0).with_context(|| format!("read {} is not under way", ticket.0))
    }
}
