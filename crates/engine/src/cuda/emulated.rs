//! The executor that runs on the CPU: kernels in the emulator, other GEMMs with the CPU reference.

use super::arena::Arena;
use super::cuda_graphs::{CudaGraphs, GraphAction};
use super::executor::{EmulatedGpu, Executor};
use super::tensor_maps::{Extents, TensorMapKey};
use crate::gemm::{Gemm, GemmOperands, reference};
use crate::plan::{Group, Plan};
use crate::tensor::DType;
use crate::{GeluFusion, GraphKey, HostBuffer, Peak, PendingRead, ReadResult, Result};
use anyhow::{Context, anyhow, ensure};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{E4m3, Global, GlobalMut, bf16};
use gpu::launch::KernelLaunch;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

/// An emulated GPU.
pub struct Emulated {
    gpu: EmulatedGpu,
    /// Checks every access of the kernels. Activations, gradients and workspaces must be written before they are read, as if
    /// device memory did not start zeroed.
    checked: bool,
    /// The buffers of the plan, each with its own bounds, and the tensor maps.
    memory: Memory,
    tensor_maps: HashMap<TensorMapKey, Global<TensorMap>>,
    uploading: Option<HostBuffer>,
    reads: HashMap<u64, ReadResult>,
    next_read: u64,
    start: Instant,
    graphs: CudaGraphs<Rc<[Command]>>,
    /// Commands of the capture in progress.
    captured: Vec<Command>,
    /// Copies that have begun. They run when they are awaited; until then, their destinations hold NaN.
    begun: Vec<Command>,
    /// Whether the library refuses every GEMM.
    #[cfg(test)]
    pub library_refuses: bool,
    /// Times for the autotuner.
    #[cfg(test)]
    pub times: Option<Times>,
}

/// Invented times of GEMMs.
#[cfg(test)]
#[derive(Default)]
pub struct Times {
    /// Milliseconds of each algorithm of the library.
    pub library: Vec<f32>,
    /// Milliseconds of each kernel launch.
    pub kernel: f32,
    /// The algorithms that are selected.
    pub selected: std::collections::HashMap<crate::gemm::GemmKey, cublaslt::sys::MatmulAlgo>,
}

/// Work that a graph can contain.
enum Command {
    Launch(KernelLaunch),
    Gemm { gemm: Gemm, operands: GemmOperands },
    Zero { to: *mut u8, bytes: usize },
    Copy { to: *mut u8, from: *const u8, bytes: usize },
}

impl Emulated {
    /// Creates the emulator of a GPU.
    pub fn new(gpu: EmulatedGpu, checked: bool) -> Self {
        Self {
            gpu,
            checked,
            memory: Memory::default(),
            tensor_maps: HashMap::new(),
            uploading: None,
            reads: HashMap::new(),
            next_read: 0,
            start: Instant::now(),
            graphs: CudaGraphs::default(),
            captured: Vec::new(),
            begun: Vec::new(),
            #[cfg(test)]
            library_refuses: false,
            #[cfg(test)]
            times: None,
        }
    }

    /// Runs a command, or captures it.
    ///
    /// # Safety
    /// The requirements are those of the [`Executor`] method that creates the command.
    unsafe fn submit(&mut self, command: Command) -> Result<()> {
        if self.graphs.is_capturing() {
            self.captured.push(command);
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.run(&command) }
    }

    /// # Safety
    /// The requirements are those of [`submit`](Self::submit).
    unsafe fn run(&mut self, command: &Command) -> Result<()> {
        match *command {
            Command::Launch(KernelLaunch { ref launch, grid, shared_bytes }) if self.checked => {
                Ok(launch.emulate_checked(&mut self.memory, grid, shared_bytes)?)
            }
            // SAFETY: the caller's promise; device memory is host memory here.
            Command::Launch(KernelLaunch { ref launch, grid, shared_bytes }) => {
                Ok(unsafe { launch.emulate(grid, shared_bytes) }?)
            }
            Command::Gemm { ref gemm, ref operands } => reference::run(gemm, operands, &mut self.memory),
            Command::Zero { to, bytes } => Ok(self.memory.write(GlobalMut::new(to), &vec![0u8; bytes])?),
            Command::Copy { to, from, bytes } => {
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

    fn free_memory(&self) -> Result<usize> {
        // The emulator serves tests and plans; if the host runs out of memory, the host reports it.
        Ok(isize::MAX as usize / 2)
    }

    fn free_host_memory(&self) -> usize {
        isize::MAX as usize / 2
    }

    fn peak(&self, _: DType) -> Option<Peak> {
        None
    }

    fn emulation(&self) -> EmulatedGpu {
        self.gpu
    }

    fn runs_blocks_together(&self) -> bool {
        // More blocks than that take long, and without checks too many threads.
        self.gpu.sm_count <= 16
    }

    fn shared_memory(&self, blocks: usize) -> usize {
        // Hopper has 228 KiB per SM, of which a block may use 227.
        (228 << 10) / blocks - 1024
    }

    fn best_gelu_fusion(&self, dtype: DType) -> GeluFusion {
        // The emulated device has the defaults of Hopper.
        if dtype == DType::Bf16 { GeluFusion::Both } else { GeluFusion::None }
    }

    fn tensor_map(
        &mut self,
        tensor: u64,
        dtype: DType,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>> {
        if !self.gpu.hopper {
            return Ok(None);
        }
        let key = TensorMapKey { tensor, dtype, extents, tile };
        // A GPU has the same limitation.
        let exists = self.tensor_maps.contains_key(&key);
        ensure!(
            !self.graphs.is_capturing() || exists,
            "{key:?} has no tensor map, and none can be created during graph capture"
        );
        let map = self.tensor_maps.entry(key).or_insert_with(|| {
            let map = if dtype == DType::Fp8 {
                TensorMap::emulated_tensor(Global::<E4m3>::from_address(tensor), extents, tile)
            } else {
                TensorMap::emulated_tensor(Global::<bf16>::from_address(tensor), extents, tile)
            };
            self.memory.input(&format!("tensor map of {extents:?}"), &[map])
        });
        Ok(Some(*map))
    }

    fn allocate(&mut self, plan: &Plan) -> Result<Arena> {
        self.graphs.invalidate();
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

    fn graph_action(&mut self, key: &GraphKey) -> GraphAction {
        self.graphs.next_action(key)
    }

    fn begin_capture(&mut self, key: &GraphKey) -> Result<()> {
        self.graphs.begin_capture(key);
        Ok(())
    }

    fn end_capture(&mut self, complete: bool) -> Result<()> {
        let captured = std::mem::take(&mut self.captured);
        self.graphs.end_capture(if complete { Ok(captured.into()) } else { Err(anyhow!("the capture is incomplete")) })
    }

    fn replay(&mut self, key: &GraphKey) -> Result<()> {
        let graph = Rc::clone(self.graphs.get(key)?);
        // SAFETY: each operation checked its tensors against the memory when the graph was captured, and graphs are invalidated
        // before that memory is released.
        graph.iter().try_for_each(|command| unsafe { self.run(command) })
    }

    fn invalidate_graphs(&mut self) {
        self.graphs.invalidate();
    }

    unsafe fn launch_group(&mut self, _: &dyn Fn() -> String, kernels: &[KernelLaunch]) -> Result<()> {
        // SAFETY: the caller's promise.
        kernels.iter().try_for_each(|kernel| unsafe { self.submit(Command::Launch(kernel.clone())) })
    }

    #[cfg(test)]
    fn gemm_timer(&mut self) -> Option<&mut dyn super::executor::GemmTimer> {
        self.times.is_some().then_some(self)
    }

    unsafe fn library_gemm(&mut self, gemm: &Gemm, operands: &GemmOperands) -> Result<()> {
        #[cfg(test)]
        if self.library_refuses {
            return Err(cublaslt::Error::NoAlgorithm { gemm: *gemm }.into());
        }
        // SAFETY: the caller's promise.
        unsafe { self.submit(Command::Gemm { gemm: *gemm, operands: *operands }) }
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
        unsafe { self.submit(Command::Zero { to, bytes }) }
    }

    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.submit(Command::Copy { to, from, bytes }) }
    }

    unsafe fn copy_ahead(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        self.memory.write(GlobalMut::new(to), &vec![0xffu8; bytes])?;
        self.begun.push(Command::Copy { to, from, bytes });
        Ok(())
    }

    fn wait_for_copies(&mut self) -> Result<()> {
        for copy in std::mem::take(&mut self.begun) {
            // SAFETY: the promise of the caller of `copy_ahead`.
            unsafe { self.run(&copy) }?;
        }
        Ok(())
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(vec![0; len]))
    }

    unsafe fn upload_async(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>> {
        self.memory.write(GlobalMut::new(to), &buffer[..len])?;
        // A GPU is still copying the previous batch when the next one arrives.
        Ok(self.uploading.replace(buffer))
    }

    unsafe fn download_async(&mut self, from: *const f32, len: usize) -> Result<PendingRead> {
        let values = self.memory.slice(Global::new(from), len)?.to_vec();
        self.next_read += 1;
        self.reads.insert(self.next_read, ReadResult { values, completed_at: self.start.elapsed() });
        Ok(PendingRead(self.next_read))
    }

    fn wait(&mut self, read: PendingRead) -> Result<ReadResult> {
        self.reads.remove(&read.0).with_context(|| format!("read {} is not pending", read.0))
    }
}

#[cfg(test)]
mod timer {
    use super::*;
    use crate::cuda::executor::GemmTimer;
    use crate::gemm::GemmKey;
    use cublaslt::Finalists;
    use cublaslt::sys::MatmulAlgo;

    /// The first number of an algorithm is its index.
    impl GemmTimer for Emulated {
        fn fill_with_noise(&mut self, _gemm: &Gemm) -> Result<()> {
            Ok(())
        }

        fn zero_memory(&mut self) -> Result<()> {
            Ok(())
        }

        unsafe fn library_finalists(&mut self, gemm: &Gemm, _operands: &GemmOperands) -> Result<Finalists> {
            if self.library_refuses {
                return Err(cublaslt::Error::NoAlgorithm { gemm: *gemm }.into());
            }
            let algos: Vec<_> = (0..self.times().library.len()).map(|i| MatmulAlgo([i as u64; 8])).collect();
            Ok(Finalists { candidates: algos.len(), algos })
        }

        unsafe fn time_library(
            &mut self,
            _gemm: &Gemm,
            _operands: &GemmOperands,
            algo: MatmulAlgo,
            _runs: u32,
        ) -> Result<f32> {
            Ok(self.times().library[algo.0[0] as usize])
        }

        unsafe fn time_kernels(&mut self, kernels: &[KernelLaunch], _runs: u32) -> Result<f32> {
            Ok(self.times().kernel * kernels.len() as f32)
        }

        fn library_algorithm(&self, key: &GemmKey) -> Option<MatmulAlgo> {
            self.times.as_ref()?.selected.get(key).copied()
        }

        fn set_library_algorithm(&mut self, key: &GemmKey, algo: MatmulAlgo) {
            if let Some(times) = &mut self.times {
                times.selected.insert(*key, algo);
            }
        }
    }

    impl Emulated {
        fn times(&self) -> &Times {
            self.times.as_ref().expect("the tuner asks for times only if there are some")
        }
    }
}
