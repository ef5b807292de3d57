//! The executor that is the CPU: kernels through the emulator, matrix products through a CPU GEMM.

use super::executor::{Emulation, Executor};
use super::gemm;
use super::tensor_maps::Key;
use crate::engine::{HostBuffer, Peak, Reading, Result, Ticket};
use crate::tensor::DType;
use anyhow::Context;
use cublaslt::{Operands, Problem};
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, bf16};
use std::collections::HashMap;
use std::time::Instant;

/// A unit of memory as aligned as a device allocation.
#[derive(Clone, Copy)]
#[repr(C, align(1024))]
struct Page([u8; 1024]);

#[derive(Default)]
pub struct Emulated {
    memory: Vec<Page>,
    reads: HashMap<u64, Reading>,
    start: Option<Instant>,
    next_ticket: u64,
    emulation: Emulation,
    uploading: Option<HostBuffer>,
    /// Boxed: kernels have their addresses.
    tensor_maps: HashMap<Key, Box<TensorMap>>,
}

impl Emulated {
    pub fn new(emulation: Emulation) -> Self {
        Self { emulation, ..Self::default() }
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

    fn fuses_gelu(&self, float: DType) -> bool {
        // As on Hopper: so both ways are tested.
        float == DType::Bf16
    }

    fn tensor_map(
        &mut self,
        tensor: Global<bf16>,
        rows: usize,
        columns: usize,
        (box_rows, box_columns): (u32, u32),
    ) -> Result<Option<Global<TensorMap>>> {
        if !self.emulation.hopper {
            return Ok(None);
        }
        let row_bytes = columns * size_of::<bf16>();
        let key = Key { tensor: tensor.pointer().addr() as u64, rows, columns, tile: (box_rows, box_columns) };
        let map = self
            .tensor_maps
            .entry(key)
            .or_insert_with(|| Box::new(TensorMap::emulated(tensor, rows, columns, row_bytes, box_rows, box_columns)));
        Ok(Some(Global::new(&raw const **map)))
    }

    fn tf32(&self) -> bool {
        false
    }

    fn allocate(&mut self, bytes: usize) -> Result<*mut u8> {
        self.tensor_maps.clear();
        self.memory = Vec::new();
        self.memory = vec![Page([0; 1024]); bytes.div_ceil(size_of::<Page>())];
        Ok(self.memory.as_mut_ptr().cast())
    }

    unsafe fn launch(&mut self, launch: &Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise; the arena is host memory here.
        unsafe { launch.emulate(grid, shared_bytes) }?;
        Ok(())
    }

    unsafe fn matmul(&mut self, problem: &Problem, operands: &Operands) -> Result<()> {
        // The library would refuse the same operands.
        operands.validate(problem)?;
        // SAFETY: the caller's promise; the arena is host memory here.
        unsafe { gemm::run(problem, operands, self.memory.as_mut_ptr().cast()) };
        Ok(())
    }

    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise; the source is the host's own.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()> {
        // SAFETY: the caller's promise; the destination is the host's own.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { to.write_bytes(0, bytes) };
        Ok(())
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(vec![0; len]))
    }

    unsafe fn upload_later(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>> {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(buffer.as_ptr(), len) };
        // A GPU is still copying the last one when the next one comes.
        Ok(self.uploading.replace(buffer))
    }

    unsafe fn download_later(&mut self, from: *const f32, len: usize) -> Result<Ticket> {
        // SAFETY: the caller's promise.
        let values = unsafe { std::slice::from_raw_parts(from, len) }.to_vec();
        self.next_ticket += 1;
        let at = self.start.get_or_insert_with(Instant::now).elapsed();
        self.reads.insert(self.next_ticket, Reading { values, at });
        Ok(Ticket(self.next_ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Reading> {
        self.reads.remove(&ticket.0).with_context(|| format!("read {} is not under way", ticket.0))
    }
}
