//! The executor that runs kernels on a GPU: it launches, copies and captures graphs.

use super::arena::Arena;
use super::cuda_graphs::{CudaGraphs, GraphAction};
use super::executor::{EmulatedGpu, Executor, GemmTimer};
use super::functions::Functions;
use super::gemm_cache::{GemmCache, digest};
use super::noise::noise;
use super::profile::Profile;
use super::tensor_maps::{Extents, TensorMapKey, TensorMaps};
use super::{CudaOptions, MatmulBackend, Precision, modules, peak};
use crate::gemm::{Gemm, GemmKey, GemmOperands};
use crate::plan::{HOST_OFFSET, Plan};
use crate::tensor::DType;
use crate::{GeluFusion, GraphKey, HostBuffer, Interval, Peak, PendingRead, ReadResult, Result};
use anyhow::{Context, ensure};
use cublaslt::sys::MatmulAlgo;
use cublaslt::{Finalists, Handle, Matmuls};
use cuda_driver::{
    DeviceInfo, DeviceMemory, Event, Gpu, GraphExec, Module, PinnedBuffer, Stopwatch, Stream, TimedEvent,
};
use cuda_std::Global;
use cuda_std::hopper::TensorMap;
use gpu::launch::KernelLaunch;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Bytes of noise that the host generates; the rest of the memory is filled with copies.
const NOISE_BYTES: usize = 8 << 20;

/// Batches in transfer to the GPU; a further one waits for the first. Two let the host fill one while the other is copied.
const UPLOADS_IN_FLIGHT: usize = 2;

/// A GPU.
pub struct CudaDevice {
    // Fields drop in this order: launched work first, the context (held by each of them) last.
    stream: Stream,
    /// Copies to the GPU and to the host, which run at the same time.
    copies: [Option<Copies>; 2],
    /// Graphs refer to the memory, the tensor maps, cuBLASLt's workspace and the kernels below.
    graphs: CudaGraphs<GraphExec>,
    uploads: VecDeque<(HostBuffer, Event)>,
    downloads: HashMap<u64, Download>,
    idle_downloads: Vec<Download>,
    clock: EventClock,
    next_read: u64,
    cublaslt: Matmuls,
    functions: Functions,
    /// Set if the module has kernels that use TMA.
    tensor_maps: Option<TensorMaps>,
    memory: Option<DeviceMemory>,
    host_memory: Option<PinnedBuffer<u8>>,
    profile: Option<Profile>,
    /// For example `sm_90a cubin`.
    code: String,
    architecture: &'static str,
    kernels_digest: u64,
    emulation: EmulatedGpu,
    gpu: Gpu,
}

/// Copies that run beside other work.
struct Copies {
    stream: Stream,
    /// Recorded in either stream, and then awaited by the other one at once.
    event: Event,
    /// Whether the other stream has to wait.
    begun: bool,
}

/// A copy to the host in progress, or a buffer for one.
struct Download {
    buffer: PinnedBuffer<f32>,
    len: usize,
    done: TimedEvent,
}

/// GPU time, accumulated from event to event: the difference of two distant events would lose precision.
struct EventClock {
    last: TimedEvent,
    seconds: f64,
}

impl EventClock {
    fn start(gpu: &Gpu, stream: &Stream) -> Result<Self> {
        let last = TimedEvent::new(gpu)?;
        last.record(stream)?;
        Ok(Self { last, seconds: 0.0 })
    }

    /// Returns the time of an event that has completed.
    fn time_of(&mut self, event: &TimedEvent) -> Result<Duration> {
        self.seconds += f64::from(event.milliseconds_since(&self.last)?) / 1e3;
        Ok(Duration::from_secs_f64(self.seconds.max(0.0)))
    }
}

impl CudaDevice {
    /// Opens the GPU and loads the newest kernels that it can run.
    pub fn open(options: &CudaOptions) -> Result<Self> {
        let gpu = Gpu::open(options.gpu)?;
        let code = modules::select(modules::EMBEDDED.modules()?, gpu.info(), options.kernels.as_deref())?;
        let module = Module::load(&gpu, &code.to_string(), code.image())?;
        ensure!(
            options.matmul != MatmulBackend::Rust
                || ((code.is_hopper() || code.has_mma_fp8()) && options.precision != Precision::Fp32),
            "--matmul rust: expected bf16 or fp8 with kernels for sm_90a or sm_89, found {} with {code} kernels; use --matmul auto",
            if options.precision == Precision::Fp32 { "fp32" } else { "bf16" }
        );
        ensure!(
            options.precision != Precision::Fp8 || has_fp8(gpu.info()),
            "--precision fp8: expected a GPU of compute capability 8.9 or later, found {}; use --precision bf16",
            gpu.info().name
        );
        let tensor_maps = code.is_hopper().then(|| TensorMaps::new(&gpu)).transpose()?;
        let cublaslt = Matmuls::new(Handle::new(&gpu)?)?;
        let stream = Stream::new(&gpu)?;
        let clock = EventClock::start(&gpu, &stream)?;
        let emulation = EmulatedGpu {
            sm_count: gpu.info().sm_count as usize,
            hopper: code.is_hopper(),
            fp8: has_fp8(gpu.info()),
            mma_fp8: code.has_mma_fp8() && has_fp8(gpu.info()),
            tf32: options.tf32 && options.precision == Precision::Fp32,
            matmul: options.matmul,
            kernel_config: options.kernel_config,
        };
        Ok(Self {
            stream,
            copies: [const { None }; 2],
            graphs: CudaGraphs::default(),
            uploads: VecDeque::new(),
            downloads: HashMap::new(),
            idle_downloads: Vec::new(),
            clock,
            next_read: 0,
            cublaslt,
            functions: Functions::new(module),
            tensor_maps,
            memory: None,
            host_memory: None,
            profile: None,
            code: code.to_string(),
            architecture: code.module.arch,
            kernels_digest: digest(code.image()),
            emulation,
            gpu,
        })
    }

    /// Returns the cache of the autotuner's choices for this GPU.
    pub fn gemm_cache(&self) -> Result<GemmCache> {
        GemmCache::new(&self.gpu, self.architecture, self.kernels_digest)
    }
}

/// Reports whether a GPU has tensor cores for FP8.
fn has_fp8(info: &DeviceInfo) -> bool {
    info.compute_capability >= (8, 9)
}

/// Launches work, between two events if there is a profile.
fn profiled(
    profile: &mut Option<Profile>,
    stream: &Stream,
    name: impl FnOnce() -> String,
    launch: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(profile) = profile else { return launch() };
    let begin = profile.begin(stream)?;
    launch()?;
    profile.end(name(), begin, stream)
}

/// Returns a device address as the driver represents it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

impl Executor for CudaDevice {
    fn describe(&self) -> String {
        format!("{}, {}", self.gpu.info().name, self.code)
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.gpu.memory()?.free)
    }

    fn peak(&self, dtype: DType) -> Option<Peak> {
        peak::peak(self.gpu.info(), dtype)
    }

    fn emulation(&self) -> EmulatedGpu {
        self.emulation
    }

    fn shared_memory(&self, blocks: usize) -> usize {
        let info = self.gpu.info();
        // Each resident block takes 1 KiB of the SM's shared memory in addition to its own.
        let share = (info.shared_per_sm as usize / blocks).saturating_sub(1024);
        share.min(info.shared_per_block as usize)
    }

    fn best_gelu_fusion(&self, dtype: DType) -> GeluFusion {
        // Before Hopper, cuBLASLt's GELU epilogues are slower than a GEMM followed by a GELU kernel.
        let fuses = dtype == DType::Bf16 && self.gpu.info().compute_capability >= (9, 0);
        if fuses { GeluFusion::Both } else { GeluFusion::None }
    }

    fn tensor_map(
        &mut self,
        tensor: u64,
        dtype: DType,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>> {
        let Some(maps) = &mut self.tensor_maps else { return Ok(None) };
        let key = TensorMapKey { tensor, dtype, extents, tile };
        if let Some(map) = maps.get(&key) {
            return Ok(Some(map));
        }
        // A graph would repeat the copy of the map from host memory that no longer exists.
        ensure!(!self.graphs.is_capturing(), "{key:?} has no tensor map, and none can be created during graph capture");
        if maps.is_full() {
            self.stream.synchronize()?;
            maps.clear();
            self.graphs.invalidate();
        }
        maps.add(&self.stream, key).map(Some)
    }

    fn stream(&self) -> Option<&Stream> {
        Some(&self.stream)
    }

    fn allocate(&mut self, plan: &Plan) -> Result<Arena> {
        self.stream.synchronize()?;
        self.graphs.invalidate();
        if let Some(maps) = &mut self.tensor_maps {
            maps.clear();
        }
        self.memory = None;
        self.host_memory = None;
        let bytes = plan.bytes();
        let memory = DeviceMemory::new(&self.gpu, bytes)?;
        // SAFETY: the allocation has that many bytes.
        unsafe { self.stream.fill(memory.address(), 0, bytes)? };
        let mut arena = Arena::default();
        arena.add(0, bytes, std::ptr::without_provenance_mut(memory.address() as usize));
        self.memory = Some(memory);
        if plan.host_bytes() > 0 {
            let memory = PinnedBuffer::new(&self.gpu, plan.host_bytes()).context("--offload")?;
            // Page-locked memory has the same address on the GPU.
            arena.add(HOST_OFFSET, plan.host_bytes(), memory.pointer());
            self.host_memory = Some(memory);
        }
        Ok(arena)
    }

    fn graph_action(&mut self, key: &GraphKey) -> GraphAction {
        // A profile records events between individual launches.
        if self.profile.is_some() { GraphAction::Launch } else { self.graphs.next_action(key) }
    }

    fn begin_capture(&mut self, key: &GraphKey) -> Result<()> {
        self.graphs.begin_capture(key);
        Ok(self.stream.begin_capture()?)
    }

    fn end_capture(&mut self, complete: bool) -> Result<()> {
        let instantiate = || -> Result<GraphExec> {
            let graph = self.stream.end_capture()?;
            ensure!(complete, "the capture is incomplete");
            let mut graph = graph.instantiate()?;
            graph.upload(&self.stream)?;
            Ok(graph)
        };
        self.graphs.end_capture(instantiate())
    }

    fn replay(&mut self, key: &GraphKey) -> Result<()> {
        let graph = self.graphs.get(key)?;
        // SAFETY: each operation checked its tensors against the allocated memory when the graph was captured, and the launches
        // have the same arguments. Everything that a graph refers to still exists: graphs are invalidated before memory or tensor
        // maps are released, and kernels and cuBLASLt's workspace live as long as this object. A graph copies nothing from or
        // to the host. All work is on one stream, so it runs in the same order as individual launches.
        Ok(unsafe { graph.launch(&self.stream) }?)
    }

    fn invalidate_graphs(&mut self) {
        self.graphs.invalidate();
    }

    unsafe fn launch_group(&mut self, name: &dyn Fn() -> String, kernels: &[KernelLaunch]) -> Result<()> {
        let (functions, stream) = (&mut self.functions, &self.stream);
        // SAFETY: the caller's promise.
        let mut launch = |kernel: &KernelLaunch| unsafe { functions.launch(stream, kernel) };
        profiled(&mut self.profile, stream, name, || kernels.iter().try_for_each(&mut launch))
    }

    unsafe fn library_gemm(&mut self, gemm: &Gemm, operands: &GemmOperands) -> Result<()> {
        // SAFETY: the caller's promise; all GEMMs run on the one stream.
        let run = || Ok(unsafe { self.cublaslt.run(&self.stream, gemm, operands) }?);
        profiled(&mut self.profile, &self.stream, || format!("{gemm} cuBLASLt"), run)
    }

    fn gemm_timer(&mut self) -> Option<&mut dyn GemmTimer> {
        Some(self)
    }

    fn start_profile(&mut self) -> Result<()> {
        self.profile = Some(Profile::start(&self.gpu, &self.stream)?);
        Ok(())
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.profile.take().map_or(Ok(Vec::new()), |profile| profile.finish(&self.stream))
    }

    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise. The driver reads pageable memory before the call returns.
        Ok(unsafe { self.stream.upload(address(to), bytes) }?)
    }

    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()> {
        // SAFETY: the caller's promise; `bytes` is borrowed until the stream has completed the copy.
        unsafe { self.stream.download(bytes, address(from)) }?;
        Ok(self.stream.synchronize()?)
    }

    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let fill = || Ok(unsafe { self.stream.fill(address(to), 0, bytes) }?);
        profiled(&mut self.profile, &self.stream, || "zero".to_owned(), fill)
    }

    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let copy = || Ok(unsafe { self.stream.copy(address(to), address(from), bytes) }?);
        profiled(&mut self.profile, &self.stream, || "copy".to_owned(), copy)
    }

    unsafe fn copy_ahead(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        let memory =
            self.host_memory.as_ref().map(|memory| memory.pointer().addr()..memory.pointer().addr() + memory.len());
        let is_to_host = memory.is_some_and(|memory| memory.contains(&to.addr()));
        let copies = match &mut self.copies[usize::from(is_to_host)] {
            Some(copies) => copies,
            none => {
                none.insert(Copies { stream: Stream::new(&self.gpu)?, event: Event::new(&self.gpu)?, begun: false })
            }
        };
        copies.event.record(&self.stream)?;
        copies.stream.wait(&copies.event)?;
        copies.begun = true;
        // SAFETY: the caller's promise.
        Ok(unsafe { copies.stream.copy(address(to), address(from), bytes) }?)
    }

    fn wait_for_copies(&mut self) -> Result<()> {
        for copies in self.copies.iter_mut().flatten().filter(|copies| copies.begun) {
            copies.begun = false;
            copies.event.record(&copies.stream)?;
            self.stream.wait(&copies.event)?;
        }
        Ok(())
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(PinnedBuffer::<i32>::new(&self.gpu, len)?))
    }

    unsafe fn upload_async(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>> {
        let done = Event::new(&self.gpu)?;
        // SAFETY: the caller's promise for `to`; the buffer is kept below until its event has completed.
        unsafe { self.stream.upload(address(to), &buffer[..len]) }?;
        done.record(&self.stream)?;
        self.uploads.push_back((buffer, done));
        let Some((_, oldest)) = self.uploads.front() else { return Ok(None) };
        if self.uploads.len() > UPLOADS_IN_FLIGHT {
            oldest.synchronize()?;
        } else if !oldest.is_done()? {
            return Ok(None);
        }
        Ok(self.uploads.pop_front().map(|(buffer, _)| buffer))
    }

    unsafe fn download_async(&mut self, from: *const f32, len: usize) -> Result<PendingRead> {
        let mut download = match self.idle_downloads.iter().position(|idle| idle.buffer.len() >= len) {
            Some(i) => self.idle_downloads.swap_remove(i),
            None => Download { buffer: PinnedBuffer::new(&self.gpu, len)?, len, done: TimedEvent::new(&self.gpu)? },
        };
        download.len = len;
        // SAFETY: the caller's promise for `from`; the buffer is kept until `wait` has seen its event.
        unsafe { self.stream.download(&mut download.buffer[..len], address(from)) }?;
        download.done.record(&self.stream)?;
        self.next_read += 1;
        self.downloads.insert(self.next_read, download);
        Ok(PendingRead(self.next_read))
    }

    fn wait(&mut self, read: PendingRead) -> Result<ReadResult> {
        let download = self.downloads.remove(&read.0);
        let mut download = download.with_context(|| format!("read {} is not pending", read.0))?;
        download.done.synchronize()?;
        let values = download.buffer[..download.len].to_vec();
        let completed_at = self.clock.time_of(&download.done)?;
        // The clock continues from this event, so its previous event is free.
        std::mem::swap(&mut self.clock.last, &mut download.done);
        self.idle_downloads.push(download);
        Ok(ReadResult { values, completed_at })
    }
}

impl GemmTimer for CudaDevice {
    fn fill_with_noise(&mut self, gemm: &Gemm) -> Result<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let noise = noise(gemm.precision, memory.bytes().min(NOISE_BYTES));
        // SAFETY: within the allocation; the driver reads pageable memory before the call returns.
        unsafe { self.stream.upload(memory.address(), &noise) }?;
        let mut filled = noise.len();
        while filled < memory.bytes() {
            let bytes = filled.min(memory.bytes() - filled);
            // SAFETY: within the allocation; source and target do not overlap, because at most `filled` bytes are copied.
            unsafe { self.stream.copy(memory.address() + filled as u64, memory.address(), bytes) }?;
            filled += bytes;
        }
        Ok(())
    }

    fn zero_memory(&mut self) -> Result<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        // SAFETY: the allocation has that many bytes.
        Ok(unsafe { self.stream.fill(memory.address(), 0, memory.bytes()) }?)
    }

    unsafe fn library_finalists(&mut self, gemm: &Gemm, operands: &GemmOperands) -> Result<Finalists> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.cublaslt.finalists(&self.stream, gemm, operands) }?)
    }

    unsafe fn time_library(
        &mut self,
        gemm: &Gemm,
        operands: &GemmOperands,
        algo: MatmulAlgo,
        runs: u32,
    ) -> Result<f32> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.cublaslt.time(&self.stream, gemm, operands, algo, runs) }?)
    }

    unsafe fn time_kernels(&mut self, kernels: &[KernelLaunch], runs: u32) -> Result<f32> {
        let (functions, stream) = (&mut self.functions, &self.stream);
        // SAFETY: the caller's promise.
        let mut launch = |kernel: &KernelLaunch| unsafe { functions.launch(stream, kernel) };
        let mut run = || kernels.iter().try_for_each(&mut launch);
        run()?;
        Stopwatch::new(stream)?.time(stream, runs, run)
    }

    fn library_algorithm(&self, key: &GemmKey) -> Option<MatmulAlgo> {
        self.cublaslt.algorithm(key)
    }

    fn set_library_algorithm(&mut self, key: &GemmKey, algo: MatmulAlgo) {
        self.cublaslt.select(*key, algo);
    }
}

impl Drop for CudaDevice {
    /// Waits for the stream, because buffers must outlive the copies that use them.
    fn drop(&mut self) {
        // A failure was or will be reported by the call that encounters it first; nothing is left to copy then.
        let _ = self.stream.synchronize();
    }
}
