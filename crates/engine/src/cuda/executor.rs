//! The interface between the CUDA engine and the machine that runs its kernels: a GPU or the emulator.

use super::MatmulBackend;
use super::arena::Arena;
use super::cuda_graphs::GraphAction;
use super::tensor_maps::Extents;
use crate::cpu::memory;
use crate::gemm::{Gemm, GemmKey, GemmOperands};
use crate::plan::Plan;
use crate::tensor::DType;
use crate::{GeluFusion, GraphKey, HostBuffer, Interval, Peak, PendingRead, ReadResult, Result};
use cublaslt::Finalists;
use cublaslt::sys::MatmulAlgo;
use cuda_std::Global;
use cuda_std::hopper::TensorMap;
use gpu::launch::KernelLaunch;

/// The GPU that an emulator imitates.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of the GPU or of its kernels")]
pub struct EmulatedGpu {
    /// Number of SMs.
    pub sm_count: usize,
    /// Runs the kernels for sm_90a where they exist.
    pub hopper: bool,
    /// Has tensor cores for FP8 where kernels for sm_90a do not run. The library computes FP8 GEMMs that no kernel does.
    pub fp8: bool,
    /// Runs the kernels for FP8 GEMMs with mma.sync, as sm_89 does.
    pub mma_fp8: bool,
    /// Rounds the inputs of f32 GEMMs to TF32.
    pub tf32: bool,
    /// Which kernels compute GEMMs.
    pub matmul: MatmulBackend,
    /// See [`CudaOptions::kernel_config`](super::CudaOptions::kernel_config).
    pub kernel_config: Option<usize>,
}

impl EmulatedGpu {
    /// Returns the default GPU with kernels for sm_90a (`hopper`) or sm_80, without FP8.
    pub fn new(hopper: bool) -> Self {
        Self { hopper, ..Self::default() }
    }

    /// Reports whether GEMMs may have FP8 operands.
    pub(crate) fn multiplies_fp8(self) -> bool {
        self.hopper || self.fp8
    }
}

impl Default for EmulatedGpu {
    /// Returns a GPU with so few SMs that small tests fill more than one wave.
    fn default() -> Self {
        Self {
            sm_count: 4,
            hopper: false,
            fp8: false,
            mma_fp8: false,
            tf32: false,
            matmul: MatmulBackend::Auto,
            kernel_config: None,
        }
    }
}

/// A GPU or the emulator. Work runs in the order of the calls.
pub trait Executor {
    /// Describes the machine for the banner.
    fn describe(&self) -> String;

    /// Returns the bytes that [`allocate`](Self::allocate) could take in addition to what is allocated.
    fn free_memory(&self) -> Result<usize>;

    /// Returns the bytes of the host's memory that [`allocate`](Self::allocate) could take.
    fn free_host_memory(&self) -> usize {
        memory::free()
    }

    /// Returns the peak GEMM rate for a storage type.
    fn peak(&self, dtype: DType) -> Option<Peak>;

    /// Returns what the emulator must know to launch the same kernels with the same geometry.
    fn emulation(&self) -> EmulatedGpu;

    /// Returns the number of SMs.
    fn sm_count(&self) -> usize {
        self.emulation().sm_count
    }

    /// Reports whether the engine may use kernels in which blocks wait for other blocks. On a GPU, one block per SM is resident.
    fn runs_blocks_together(&self) -> bool {
        true
    }

    /// Returns the bytes of shared memory available to each block if `blocks` share an SM.
    fn shared_memory(&self, blocks: usize) -> usize;

    /// Returns the GELU fusion that is fastest for a storage type.
    fn best_gelu_fusion(&self, dtype: DType) -> GeluFusion;

    /// Returns a tensor map for TMA copies of boxes of `tile` rows and columns of a tensor in bf16 or FP8, or `None` where the
    /// kernels that use TMA do not run. An FP8 tensor is one matrix. The map is valid until the next allocation.
    fn tensor_map(
        &mut self,
        tensor: u64,
        dtype: DType,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>>;

    /// Reports whether GEMMs in f32 round their inputs to TF32.
    fn tf32(&self) -> bool {
        self.emulation().tf32
    }

    /// Returns the stream that work is launched on, if there is one.
    fn stream(&self) -> Option<&cuda_driver::Stream> {
        None
    }

    /// Allocates zeroed memory for the plan's buffers and frees the previous allocation.
    fn allocate(&mut self, plan: &Plan) -> Result<Arena>;

    /// Returns how repeating work runs now.
    fn graph_action(&mut self, key: &GraphKey) -> GraphAction;

    /// Begins to capture launches instead of running them. [`end_capture`](Self::end_capture) must follow. Until then nothing may be
    /// copied from or to the host.
    fn begin_capture(&mut self, key: &GraphKey) -> Result<()>;

    /// Ends the capture. Keeps the graph if it is `complete`; otherwise, or after an error, the work is never captured again.
    fn end_capture(&mut self, complete: bool) -> Result<()>;

    /// Launches a captured graph.
    fn replay(&mut self, key: &GraphKey) -> Result<()>;

    /// Drops all captured graphs.
    fn invalidate_graphs(&mut self);

    /// Launches a kernel.
    ///
    /// # Safety
    /// The pointer arguments cover every index that the kernel forms in its grid, and `shared_bytes` is the size of its
    /// shared-memory layout.
    unsafe fn launch(&mut self, kernel: &KernelLaunch) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_group(&|| kernel.launch.name().to_owned(), std::slice::from_ref(kernel)) }
    }

    /// Launches kernels that a profile shows as one interval.
    ///
    /// # Safety
    /// Same as [`launch`](Self::launch), for each kernel.
    unsafe fn launch_group(&mut self, name: &dyn Fn() -> String, kernels: &[KernelLaunch]) -> Result<()>;

    /// Runs the [library part](Gemm::library_part) of a GEMM: with cuBLASLt on a GPU, with the CPU reference in the emulator.
    ///
    /// # Safety
    /// The operands lie in the allocated memory, have the sizes that the GEMM implies, and outputs overlap nothing else.
    unsafe fn library_gemm(&mut self, gemm: &Gemm, operands: &GemmOperands) -> Result<()>;

    /// Returns the timer of GEMMs, if this machine can time them.
    fn gemm_timer(&mut self) -> Option<&mut dyn GemmTimer> {
        None
    }

    /// See [`Engine::start_profile`](crate::Engine::start_profile).
    fn start_profile(&mut self) -> Result<()> {
        anyhow::bail!("profile: expected a GPU, found {}; use --device cuda", self.describe())
    }

    /// See [`Engine::profile`](crate::Engine::profile).
    fn profile(&mut self) -> Result<Vec<Interval>> {
        Ok(Vec::new())
    }

    /// Copies bytes to the device.
    ///
    /// # Safety
    /// `to` covers the bytes in the allocated memory.
    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()>;

    /// Copies bytes to the host after all previous work has run.
    ///
    /// # Safety
    /// `from` covers the bytes in the allocated memory.
    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()>;

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// `to` covers the bytes in the allocated memory.
    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()>;

    /// Copies device memory.
    ///
    /// # Safety
    /// `to` and `from` cover the bytes in the allocated memory and do not overlap.
    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()>;

    /// Begins a copy after all work so far. Only work after [`wait_for_copies`](Self::wait_for_copies) may write `from` or use `to`.
    ///
    /// # Safety
    /// Same as [`copy`](Self::copy).
    unsafe fn copy_ahead(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()>;

    /// Orders all later work after the copies that have begun.
    fn wait_for_copies(&mut self) -> Result<()>;

    /// Returns a host buffer of `len` words for batches.
    fn host_buffer(&self, len: usize) -> Result<HostBuffer>;

    /// Starts a copy of the first `len` words and keeps the buffer until the copy is complete. Returns the buffer of a complete copy.
    ///
    /// # Safety
    /// `to` covers `len` words of the allocated memory; `buffer` holds as many.
    unsafe fn upload_async(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>>;

    /// Begins to copy `len` values to the host.
    ///
    /// # Safety
    /// `from` covers `len` values of the allocated memory.
    unsafe fn download_async(&mut self, from: *const f32, len: usize) -> Result<PendingRead>;

    /// Waits for a copy to the host.
    fn wait(&mut self, read: PendingRead) -> Result<ReadResult>;
}

/// Times GEMMs on the GPU. The autotuner is its only user.
pub trait GemmTimer {
    /// Fills the allocated memory with noise: a GPU multiplies zeros faster than real data, because it draws less power.
    fn fill_with_noise(&mut self, gemm: &Gemm) -> Result<()>;

    /// Fills the allocated memory with zeros.
    fn zero_memory(&mut self) -> Result<()>;

    /// Returns cuBLASLt's first choice for a GEMM and its fastest other algorithms.
    ///
    /// # Safety
    /// Same as [`Executor::library_gemm`]. The outputs are undefined afterwards.
    unsafe fn library_finalists(&mut self, gemm: &Gemm, operands: &GemmOperands) -> Result<Finalists>;

    /// Returns the mean time of `runs` GEMMs with an algorithm of cuBLASLt, in milliseconds.
    ///
    /// # Safety
    /// Same as [`Executor::library_gemm`]. The outputs are undefined afterwards.
    unsafe fn time_library(&mut self, gemm: &Gemm, operands: &GemmOperands, algo: MatmulAlgo, runs: u32)
    -> Result<f32>;

    /// Returns the mean time of launching the kernels `runs` times, in milliseconds.
    ///
    /// # Safety
    /// Same as [`Executor::launch`], for each kernel. The outputs are undefined afterwards.
    unsafe fn time_kernels(&mut self, kernels: &[KernelLaunch], runs: u32) -> Result<f32>;

    /// Returns the algorithm that cuBLASLt uses for a GEMM, if one was selected.
    fn library_algorithm(&self, key: &GemmKey) -> Option<MatmulAlgo>;

    /// Selects the algorithm that cuBLASLt uses for a GEMM.
    fn set_library_algorithm(&mut self, key: &GemmKey, algo: MatmulAlgo);
}
