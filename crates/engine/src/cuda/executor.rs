//! What the engine's operations are queued on.

use super::Products;
use super::arena::Arena;
use super::kernel_products::Scratch;
use super::tensor_maps::Extents;
use crate::plan::Plan;
use crate::tensor::DType;
use crate::{Algorithms, GeluFusion, HostBuffer, Interval, Peak, Reading, Recurring, Result, Ticket, Tuning};
use cublaslt::{Operands, Problem};
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, bf16};
use gpu::launch::KernelLaunch;

/// The GPU that an emulator stands for.
#[derive(Clone, Copy, Debug)]
pub struct Emulation {
    pub multiprocessors: usize,
    /// Runs the kernels for sm_90a where there are some.
    pub hopper: bool,
    /// Multiplies f32 with 10-bit mantissas.
    pub tf32: bool,
    pub products: Products,
    /// As [`Options::tiling`](super::Options::tiling).
    pub tiling: Option<usize>,
}

impl Default for Emulation {
    /// A small one: so few multiprocessors that small tests fill more than one wave.
    fn default() -> Self {
        Self { multiprocessors: 4, hopper: false, tf32: false, products: Products::Auto, tiling: None }
    }
}

/// What an executor wants of work that comes again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// To be given it.
    Queue,
    /// To record it, and to replay it then.
    Record,
    /// To replay it.
    Replay,
}

/// A GPU or the emulator. Work is done in the order of the calls.
pub trait Executor {
    fn describe(&self) -> String;

    /// Bytes that [`allocate`](Self::allocate) could take besides what it has.
    fn memory_free(&self) -> Result<usize>;

    /// Peak rate in products of this storage type.
    fn peak(&self, float: DType) -> Option<Peak>;

    /// What the emulator must know to launch the same kernels with the same geometry.
    fn emulation(&self) -> Emulation;

    fn multiprocessors(&self) -> usize {
        self.emulation().multiprocessors
    }

    /// Bytes of shared memory for each block where `blocks` share a multiprocessor.
    fn shared_memory(&self, blocks: usize) -> usize;

    /// Which GELUs are faster as part of a matrix product, for this storage type.
    fn best_gelu_fusion(&self, float: DType) -> GeluFusion;

    /// A map of a tensor of bf16 for TMA copies of boxes of `tile` rows and columns; `None` where the kernels that use TMA
    /// do not run. Valid until the next allocation.
    fn tensor_map(
        &mut self,
        tensor: Global<bf16>,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>>;

    /// Where kernels that multiply in parts may keep them, in the allocated memory.
    fn use_scratch(&mut self, scratch: Scratch);

    /// What [`use_scratch`](Self::use_scratch) said.
    fn scratch(&self) -> Scratch;

    fn tf32(&self) -> bool {
        self.emulation().tf32
    }

    /// The stream that work is queued on, where there is one.
    fn stream(&self) -> Option<&cuda_driver::Stream> {
        None
    }

    /// Zeroed memory for the plan's buffers, in place of what was allocated before.
    fn allocate(&mut self, plan: &Plan) -> Result<Arena>;

    /// What to do about work that comes again and again.
    fn turn(&mut self, work: &Recurring) -> Turn;

    /// From here on work is recorded and not done. Until [`finish_recording`](Self::finish_recording), which follows in any
    /// case, nothing is copied from or to the host.
    fn start_recording(&mut self, work: &Recurring) -> Result<()>;

    /// Ends the recording and keeps it if it is `whole`; else, or after an error, that work is never to be recorded again.
    fn finish_recording(&mut self, whole: bool) -> Result<()>;

    /// Does what was recorded.
    fn replay(&mut self, work: &Recurring) -> Result<()>;

    /// # Safety
    /// The memory that the pointer arguments cover holds every index that the kernel forms in this grid, and
    /// `shared_bytes` is what its layout takes.
    unsafe fn launch(&mut self, launch: &Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()>;

    /// A product. The library cannot compute two kinds: one that accumulates with
    /// [`Epilogue::BiasGradB`](cublaslt::Epilogue::BiasGradB), which adds to the bias too, and
    /// [`Epilogue::DGeluAndGelu`](cublaslt::Epilogue::DGeluAndGelu). Where no kernel computes all of it, `otherwise` is
    /// launched, which adds to the bias or writes the GELU, before a product without.
    ///
    /// # Safety
    /// The operands are in the allocated memory, of the sizes that the problem implies, and outputs overlap nothing. For
    /// `otherwise` as in [`launch`](Self::launch).
    unsafe fn matmul(&mut self, problem: &Problem, operands: &Operands, otherwise: Vec<KernelLaunch>) -> Result<()>;

    /// Whether a kernel of this program computes a product, not the library.
    fn is_by_kernel(&self, problem: &Problem, operands: &Operands) -> Result<bool>;

    /// Until [`tune`](Self::tune), work is not done; products are noted.
    fn note_products(&mut self) {}

    /// Whether products are noted.
    fn notes_products(&self) -> bool {
        false
    }

    /// Times the algorithms for the products noted, or those of them that nothing is known of, on the allocated memory,
    /// which is zeroed then.
    fn tune(&mut self, _anew: bool) -> Result<Tuning> {
        Ok(Tuning::default())
    }

    /// As [`Engine::start_profile`](crate::Engine::start_profile).
    fn start_profile(&mut self) -> Result<()> {
        anyhow::bail!("{} has no clock of its own: use --device cuda", self.describe())
    }

    /// As [`Engine::profile`](crate::Engine::profile).
    fn profile(&mut self) -> Result<Vec<Interval>> {
        Ok(Vec::new())
    }

    /// See [`Engine::algorithms`](crate::Engine::algorithms).
    fn algorithms(&self) -> Option<Algorithms> {
        None
    }

    /// See [`Engine::adopt`](crate::Engine::adopt).
    fn adopt(&mut self, _algorithms: &Algorithms) -> bool {
        false
    }

    /// # Safety
    /// `to` covers the bytes in the allocated memory.
    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()>;

    /// Copies once everything before has run.
    ///
    /// # Safety
    /// `from` covers the bytes in the allocated memory.
    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()>;

    /// # Safety
    /// `to` covers the bytes in the allocated memory.
    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()>;

    /// # Safety
    /// `to` and `from` cover the bytes in the allocated memory and do not overlap.
    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()>;

    fn host_buffer(&self, len: usize) -> Result<HostBuffer>;

    /// Copies the first `len` words and keeps the buffer until that is done; gives back one that is.
    ///
    /// # Safety
    /// `to` covers `len` words of the allocated memory; `buffer` holds as many.
    unsafe fn upload_later(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>>;

    /// # Safety
    /// `from` covers `len` values of the allocated memory.
    unsafe fn download_later(&mut self, from: *const f32, len: usize) -> Result<Ticket>;

    fn wait(&mut self, ticket: Ticket) -> Result<Reading>;
}
