//! The executor that is a GPU.

use super::arena::Arena;
use super::executor::{Emulation, Executor, Turn};
use super::functions::Functions;
use super::kernel_products::{KernelProduct, Scratch, by_library};
use super::profile::Profile;
use super::recordings::Recordings;
use super::tensor_maps::{Extents, Key, TensorMaps};
use super::tuning::{Cache, noise};
use super::{Options, Precision, Products, modules, peak};
use crate::engine::{
    Algorithms, Choice, GeluFusion, HostBuffer, Interval, KernelTiling, Peak, REST, Reading, Recurring, Result, Ticket,
    Timing, Tuning,
};
use crate::plan::Plan;
use crate::tensor::DType;
use anyhow::{Context, ensure};
use cublaslt::{Element, Handle, Matmuls, Operands, Problem};
use cuda_driver::{DeviceMemory, Event, Gpu, GraphExec, Module, PinnedBuffer, Stopwatch, Stream, TimedEvent};
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{Global, bf16};
use gpu::attention::launch::Prepared;
use std::collections::{HashMap, VecDeque};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Of noise made on the host; the rest is copies of it.
const NOISE_BYTES: usize = 8 << 20;

/// Batches on their way to the GPU; one more waits for the first. Two let the host fill one while the other is copied.
const BATCHES_UNDER_WAY: usize = 2;

pub struct Device {
    // Dropped in this order: what is queued first, the context (in each of them) last.
    stream: Stream,
    /// They name the memory, the tensor maps, the workspace of products and the kernels below.
    recordings: Recordings<GraphExec>,
    uploads: VecDeque<(HostBuffer, Event)>,
    downloads: HashMap<u64, Download>,
    idle_downloads: Vec<Download>,
    clock: Clock,
    next_ticket: u64,
    matmuls: Matmuls,
    functions: Functions,
    /// Where the module has kernels that use TMA.
    tensor_maps: Option<TensorMaps>,
    memory: Option<DeviceMemory>,
    /// Products noted in a tuning pass, in which nothing else is done.
    noted: Option<Vec<Noted>>,
    algorithms: Cache,
    products: Products,
    tiling: Option<usize>,
    scratch: Scratch,
    /// Of products that a kernel takes, by problem and alignments: the fastest, and whether it is faster than the library.
    kernels: HashMap<(Problem, [u32; 5]), (KernelTiling, bool)>,
    profile: Option<Profile>,
    /// `sm_90a cubin`
    code: String,
    tf32: bool,
    gpu: Gpu,
}

/// As [`Executor::matmul`] got it.
struct Noted {
    problem: Problem,
    operands: Operands,
    otherwise: Vec<Prepared>,
}

/// A read under way, or a place for one.
struct Download {
    buffer: PinnedBuffer<f32>,
    len: usize,
    done: TimedEvent,
}

/// GPU time, told from mark to mark: over long times a difference of two events would lose digits.
struct Clock {
    mark: TimedEvent,
    at: f64,
}

impl Clock {
    fn start(gpu: &Gpu, stream: &Stream) -> Result<Self> {
        let mark = TimedEvent::new(gpu)?;
        mark.record(stream)?;
        Ok(Self { mark, at: 0.0 })
    }

    /// When `event`, which has passed, did.
    fn tell(&mut self, event: &TimedEvent) -> Result<Duration> {
        self.at += f64::from(event.milliseconds_since(&self.mark)?) / 1e3;
        Ok(Duration::from_secs_f64(self.at.max(0.0)))
    }
}

impl Device {
    pub fn open(options: &Options) -> Result<Self> {
        let gpu = Gpu::open(options.gpu)?;
        let choice = modules::select(modules::embedded()?, gpu.info(), options.kernels.as_deref())?;
        let module = Module::load(&gpu, &choice.to_string(), choice.image())?;
        ensure!(
            options.products != Products::Rust || (choice.is_hopper() && options.precision == Precision::Bf16),
            "--matmul rust: the kernels are for bf16 on compute capability 9.0, found {choice} in {}; expected --matmul auto",
            if options.precision == Precision::Bf16 { "bf16" } else { "fp32" }
        );
        let tensor_maps = choice.is_hopper().then(|| TensorMaps::new(&gpu)).transpose()?;
        let algorithms = Cache::of(&gpu, choice.architecture())?;
        let matmuls = Matmuls::new(Handle::new(&gpu)?)?;
        let stream = Stream::new(&gpu)?;
        let clock = Clock::start(&gpu, &stream)?;
        let known = algorithms.load();
        let mut device = Self {
            stream,
            recordings: Recordings::default(),
            uploads: VecDeque::new(),
            downloads: HashMap::new(),
            idle_downloads: Vec::new(),
            clock,
            next_ticket: 0,
            matmuls,
            functions: Functions::new(module),
            tensor_maps,
            memory: None,
            noted: None,
            algorithms,
            products: options.products,
            tiling: options.tiling,
            scratch: Scratch::NONE,
            kernels: HashMap::new(),
            profile: None,
            code: choice.to_string(),
            tf32: options.tf32 && options.precision == Precision::Fp32,
            gpu,
        };
        device.take(&known);
        Ok(device)
    }

    /// Decides as was decided before.
    fn take(&mut self, choices: &[Choice]) {
        self.recordings.forget();
        // What a choice says of another product yields to that product's own.
        for choice in choices {
            self.decide(choice.library);
        }
        for choice in choices {
            self.matmuls.adopt(&[choice.library]);
            let key = (choice.library.problem, choice.library.alignments);
            match choice.kernel {
                Some(tiling) => self.kernels.insert(key, (tiling, choice.kernel_wins)),
                None => self.kernels.remove(&key),
            };
        }
    }

    /// Of a product and of what the library computes of it.
    fn decide(&mut self, choice: cublaslt::Choice) {
        let (problem, _) = by_library(&choice.problem, &Operands::default());
        let mut alignments = choice.alignments;
        if problem != choice.problem {
            // Without the bias.
            alignments[3] = 0;
        }
        self.matmuls.adopt(&[choice, cublaslt::Choice { problem, alignments, ..choice }]);
    }

    fn choices(&self) -> Vec<Choice> {
        let choice = |library: cublaslt::Choice| {
            let kernel = self.kernels.get(&(library.problem, library.alignments)).copied();
            Choice {
                library,
                kernel: kernel.map(|(tiling, _)| tiling),
                kernel_wins: kernel.is_some_and(|(_, wins)| wins),
            }
        };
        self.matmuls.choices().into_iter().map(choice).collect()
    }

    /// The kernel that computes a product; `None` where the library does.
    fn kernel_for(&self, problem: &Problem, operands: &Operands) -> Result<Option<(KernelProduct, KernelTiling)>> {
        let known = self.kernels.get(&(*problem, operands.alignments())).copied().filter(|_| self.tiling.is_none());
        let wanted = match self.products {
            Products::Auto => known.is_some_and(|(_, wins)| wins),
            Products::Cublaslt => false,
            Products::Rust => true,
        };
        // What was decided on with the kernels for sm_90a is known to a run with those for sm_80 as well.
        if !wanted || self.tensor_maps.is_none() {
            return Ok(None);
        }
        let product = KernelProduct::required(problem, operands)?;
        let kept = known.map(|(tiling, _)| tiling).filter(|tiling| product.can_be(*tiling, self));
        Ok(match (kept, self.products) {
            (Some(tiling), _) => Some((product, tiling)),
            (None, Products::Rust) => Some((product, product.nth_tiling(self.tiling.unwrap_or(0), self))),
            (None, _) => None,
        })
    }

    /// Times the library's algorithms for a product, what else is to be done where it computes it added, and decides.
    ///
    /// # Safety
    /// As [`Executor::matmul`].
    unsafe fn time_library(
        &mut self,
        problem: &Problem,
        operands: &Operands,
        otherwise: &[Prepared],
    ) -> Result<cublaslt::Timing> {
        let (its_problem, its_operands) = by_library(problem, operands);
        let key = (its_problem, its_operands.alignments());
        let find = |device: &Self| {
            device.matmuls.choices().into_iter().find(|choice| (choice.problem, choice.alignments) == key)
        };
        let before = find(self).filter(|_| its_problem != *problem);
        // SAFETY: the caller's promise.
        let timing = unsafe { self.matmuls.tune(&self.stream, &its_problem, &its_operands) }?;
        if let Some(before) = before {
            // Decided on as a product of its own.
            self.matmuls.adopt(&[before]);
        }
        let found = find(self).with_context(|| format!("no algorithm was decided on for {its_problem}"))?;
        self.decide(cublaslt::Choice { problem: *problem, alignments: operands.alignments(), ..found });
        let mut added = 0.0;
        if !otherwise.is_empty() {
            let (functions, stream) = (&mut self.functions, &self.stream);
            // SAFETY: the caller's promise.
            let mut run = || otherwise.iter().try_for_each(|kernel| unsafe { functions.launch(stream, kernel) });
            run()?;
            added = Stopwatch::new(stream)?.time(stream, cublaslt::FINAL_RUNS, run)?;
        }
        Ok(cublaslt::Timing { problem: *problem, first: timing.first + added, best: timing.best + added, ..timing })
    }

    /// Milliseconds, after a rest, of `otherwise` and of a kernel for what is left of a product, where one is faster for that
    /// than the library.
    ///
    /// # Safety
    /// As [`Executor::matmul`].
    unsafe fn time_apart(
        &mut self,
        problem: &Problem,
        operands: &Operands,
        otherwise: &[Prepared],
        rest: impl FnOnce(),
    ) -> Result<Option<f32>> {
        let (left, its_operands) = by_library(problem, operands);
        if left == *problem {
            return Ok(None);
        }
        let Some((product, tiling)) = self.kernel_for(&left, &its_operands)? else { return Ok(None) };
        let kernels = product.prepare(tiling, self)?;
        rest();
        let (functions, stream) = (&mut self.functions, &self.stream);
        // SAFETY: the caller's promise.
        let mut run =
            || otherwise.iter().chain(&kernels).try_for_each(|kernel| unsafe { functions.launch(stream, kernel) });
        run()?;
        Ok(Some(Stopwatch::new(stream)?.time(stream, cublaslt::FINAL_RUNS, run)?))
    }

    /// The fastest kernel for a product, and its milliseconds.
    ///
    /// # Safety
    /// As [`Executor::matmul`].
    unsafe fn time_kernels(&mut self, problem: &Problem, operands: &Operands) -> Result<Option<(KernelTiling, f32)>> {
        let Some(product) = KernelProduct::of(problem, operands) else { return Ok(None) };
        let mut best: Option<(KernelTiling, f32)> = None;
        for tiling in product.tilings(self) {
            let kernels = product.prepare(tiling, self)?;
            if kernels.is_empty() {
                return Ok(None);
            }
            let (functions, stream) = (&mut self.functions, &self.stream);
            // SAFETY: the caller's promise.
            let mut run = || kernels.iter().try_for_each(|kernel| unsafe { functions.launch(stream, kernel) });
            run()?;
            let milliseconds = Stopwatch::new(stream)?.time(stream, cublaslt::FINAL_RUNS, run)?;
            if best.is_none_or(|(_, least)| milliseconds < least) {
                best = Some((tiling, milliseconds));
            }
        }
        Ok(best)
    }
}

/// Queues work, between two marks if there is a profile.
fn profiled(
    profile: &mut Option<Profile>,
    stream: &Stream,
    name: impl FnOnce() -> String,
    queue: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(profile) = profile else { return queue() };
    let begin = profile.begin(stream)?;
    queue()?;
    profile.end(name(), begin, stream)
}

/// Fills memory with numbers in ±1: a GPU multiplies zeros faster than real data, because it draws less power.
fn fill_with_noise(stream: &Stream, memory: &DeviceMemory, element: Element) -> Result<()> {
    let noise = noise(element, memory.bytes().min(NOISE_BYTES));
    // SAFETY: within the allocation, and not page-locked: it is read before the call returns.
    unsafe { stream.upload(memory.address(), &noise) }?;
    let mut filled = noise.len();
    while filled < memory.bytes() {
        let bytes = filled.min(memory.bytes() - filled);
        // SAFETY: within the allocation; source and target do not overlap, because `bytes` is at most what is filled.
        unsafe { stream.copy(memory.address() + filled as u64, memory.address(), bytes) }?;
        filled += bytes;
    }
    Ok(())
}

/// A device address as the driver has it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

impl Executor for Device {
    fn describe(&self) -> String {
        format!("{}, {}", self.gpu.info().name, self.code)
    }

    fn memory_free(&self) -> Result<usize> {
        Ok(self.gpu.memory()?.free)
    }

    fn peak(&self, float: DType) -> Option<Peak> {
        peak::peak(self.gpu.info(), float)
    }

    fn emulation(&self) -> Emulation {
        Emulation {
            multiprocessors: self.gpu.info().sm_count as usize,
            hopper: self.tensor_maps.is_some(),
            tf32: self.tf32,
            products: self.products,
            tiling: self.tiling,
        }
    }

    fn shared_memory(&self, blocks: usize) -> usize {
        let info = self.gpu.info();
        // Each resident block costs the multiprocessor 1 KiB more than it asks for.
        let share = (info.shared_per_sm as usize / blocks).saturating_sub(1024);
        share.min(info.shared_per_block as usize)
    }

    fn best_gelu_fusion(&self, float: DType) -> GeluFusion {
        // Before Hopper the fused epilogues are slower than the product and a pass of its own.
        let fuses = float == DType::Bf16 && self.gpu.info().compute_capability >= (9, 0);
        if fuses { GeluFusion::Both } else { GeluFusion::None }
    }

    fn tensor_map(
        &mut self,
        tensor: Global<bf16>,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Option<Global<TensorMap>>> {
        let Some(maps) = &mut self.tensor_maps else { return Ok(None) };
        let key = Key { tensor: address(tensor.pointer()), extents, tile };
        if let Some(map) = maps.get(&key) {
            return Ok(Some(map));
        }
        // A recording would copy the map again each time, from where it is no more.
        ensure!(!self.recordings.is_under_way(), "{key:?} has no tensor map yet, and none can be made in a recording");
        if maps.is_full() {
            self.stream.synchronize()?;
            maps.clear();
            self.recordings.forget();
        }
        maps.add(&self.stream, key).map(Some)
    }

    fn stream(&self) -> Option<&Stream> {
        Some(&self.stream)
    }

    fn use_scratch(&mut self, scratch: Scratch) {
        self.scratch = scratch;
    }

    fn scratch(&self) -> Scratch {
        self.scratch
    }

    fn allocate(&mut self, plan: &Plan) -> Result<Arena> {
        self.stream.synchronize()?;
        self.recordings.forget();
        if let Some(maps) = &mut self.tensor_maps {
            maps.clear();
        }
        self.memory = None;
        let bytes = plan.bytes();
        let memory = DeviceMemory::new(&self.gpu, bytes)?;
        // SAFETY: the allocation has that many bytes.
        unsafe { self.stream.fill(memory.address(), 0, bytes)? };
        let mut arena = Arena::default();
        arena.add(0, bytes, std::ptr::without_provenance_mut(memory.address() as usize));
        self.memory = Some(memory);
        Ok(arena)
    }

    fn turn(&mut self, work: &Recurring) -> Turn {
        // Marks belong between single pieces of work, and products are only noted when they are queued.
        if self.profile.is_some() || self.noted.is_some() { Turn::Queue } else { self.recordings.turn(work) }
    }

    fn start_recording(&mut self, work: &Recurring) -> Result<()> {
        self.recordings.start(work);
        Ok(self.stream.begin_capture()?)
    }

    fn finish_recording(&mut self, whole: bool) -> Result<()> {
        let record = || -> Result<GraphExec> {
            let graph = self.stream.end_capture()?;
            ensure!(whole, "not all of it was queued");
            let mut recording = graph.instantiate()?;
            recording.upload(&self.stream)?;
            Ok(recording)
        };
        self.recordings.finish(record())
    }

    fn replay(&mut self, work: &Recurring) -> Result<()> {
        let recording = self.recordings.get(work)?;
        // SAFETY: when it was recorded, each operation held its tensors to the memory at hand, for launches of the same
        // arguments. What recordings name still is what it was: they are forgotten before memory or tensor maps are given up,
        // kernels and the workspace of products last as long as this object, and nothing was copied from or to the host.
        // All work is on the one stream, so between the same neighbours as if it were queued piece by piece.
        Ok(unsafe { recording.launch(&self.stream) }?)
    }

    unsafe fn launch(&mut self, launch: &Launch, grid: [u32; 3], shared_bytes: usize) -> Result<()> {
        if self.noted.is_some() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let queue = || unsafe { self.functions.launch_as(&self.stream, launch, grid, shared_bytes) };
        profiled(&mut self.profile, &self.stream, || launch.name().to_owned(), queue)
    }

    unsafe fn matmul(&mut self, problem: &Problem, operands: &Operands, otherwise: Vec<Prepared>) -> Result<()> {
        if let Some(noted) = &mut self.noted {
            noted.push(Noted { problem: *problem, operands: *operands, otherwise });
            return Ok(());
        }
        if let Some((product, tiling)) = self.kernel_for(problem, operands)? {
            let kernels = product.prepare(tiling, self)?;
            let (functions, stream) = (&mut self.functions, &self.stream);
            // SAFETY: the caller's promise.
            let queue = || kernels.iter().try_for_each(|kernel| unsafe { functions.launch(stream, kernel) });
            return profiled(&mut self.profile, stream, || format!("{problem}, Rust, {tiling}"), queue);
        }
        for kernel in &otherwise {
            // SAFETY: the caller's promise.
            unsafe { self.launch(&kernel.launch, kernel.grid, kernel.shared_bytes) }?;
        }
        let (left, its_operands) = by_library(problem, operands);
        if left != *problem {
            // SAFETY: the caller's promise.
            return unsafe { self.matmul(&left, &its_operands, Vec::new()) };
        }
        // SAFETY: the caller's promise; all products go to the one stream.
        let queue = || Ok(unsafe { self.matmuls.run(&self.stream, problem, operands) }?);
        profiled(&mut self.profile, &self.stream, || problem.to_string(), queue)
    }

    fn is_by_kernel(&self, problem: &Problem, operands: &Operands) -> Result<bool> {
        Ok(self.kernel_for(problem, operands)?.is_some())
    }

    fn start_profile(&mut self) -> Result<()> {
        self.profile = Some(Profile::start(&self.gpu, &self.stream)?);
        Ok(())
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.profile.take().map_or(Ok(Vec::new()), |profile| profile.finish(&self.stream))
    }

    fn note_products(&mut self) {
        self.noted = Some(Vec::new());
    }

    fn notes_products(&self) -> bool {
        self.noted.is_some()
    }

    fn tune(&mut self, anew: bool) -> Result<Tuning> {
        let start = Instant::now();
        self.recordings.forget();
        let mut undecided: Vec<Noted> = Vec::new();
        for noted in self.noted.take().unwrap_or_default() {
            let Noted { problem, operands, .. } = &noted;
            let key = (problem, operands.alignments());
            let listed = undecided.iter().any(|other| (&other.problem, other.operands.alignments()) == key);
            if !listed && (anew || !self.matmuls.is_selected(problem, operands)) {
                undecided.push(noted);
            }
        }
        let (Some(memory), false) = (&self.memory, undecided.is_empty()) else { return Ok(Tuning::default()) };
        fill_with_noise(&self.stream, memory, undecided[0].problem.element)?;
        let mut timings = Vec::new();
        for Noted { problem, operands, otherwise } in &undecided {
            // What is to be compared must begin with the same clock; where it is only to be chosen, time is dearer.
            let rest = || {
                if anew {
                    sleep(REST);
                }
            };
            rest();
            // SAFETY: the operations have held the operands to the arena; nothing else is queued.
            let library = unsafe { self.time_library(problem, operands, otherwise) }?;
            rest();
            // SAFETY: as above.
            let kernel = unsafe { self.time_kernels(problem, operands) }?;
            // SAFETY: as above.
            let apart = unsafe { self.time_apart(problem, operands, otherwise, rest) }?;
            let timing = Timing { library, kernel, apart };
            if let Some((tiling, _)) = kernel {
                self.kernels.insert((*problem, operands.alignments()), (tiling, timing.kernel_wins()));
            }
            timings.push(timing);
        }
        if let Some(memory) = &self.memory {
            // SAFETY: the allocation has that many bytes.
            unsafe { self.stream.fill(memory.address(), 0, memory.bytes()) }?;
        }
        let not_kept = self.algorithms.save(&self.choices()).err().map(|error| format!("{error:#}"));
        Ok(Tuning { timings, seconds: start.elapsed().as_secs_f64(), not_kept })
    }

    fn algorithms(&self) -> Option<Algorithms> {
        Some(Algorithms { machine: self.algorithms.machine().to_owned(), choices: self.choices() })
    }

    fn adopt(&mut self, algorithms: &Algorithms) -> bool {
        let valid = algorithms.machine == self.algorithms.machine();
        if valid {
            self.take(&algorithms.choices);
        }
        valid
    }

    unsafe fn upload(&mut self, to: *mut u8, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise. Memory that is not page-locked is read before the call returns.
        Ok(unsafe { self.stream.upload(address(to), bytes) }?)
    }

    unsafe fn download(&mut self, bytes: &mut [u8], from: *const u8) -> Result<()> {
        // SAFETY: the caller's promise; `bytes` is borrowed until the stream has passed the copy.
        unsafe { self.stream.download(bytes, address(from)) }?;
        Ok(self.stream.synchronize()?)
    }

    unsafe fn zero(&mut self, to: *mut u8, bytes: usize) -> Result<()> {
        if self.noted.is_some() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let queue = || Ok(unsafe { self.stream.fill(address(to), 0, bytes) }?);
        profiled(&mut self.profile, &self.stream, || "zero".to_owned(), queue)
    }

    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        if self.noted.is_some() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let queue = || Ok(unsafe { self.stream.copy(address(to), address(from), bytes) }?);
        profiled(&mut self.profile, &self.stream, || "copy".to_owned(), queue)
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(PinnedBuffer::<i32>::new(&self.gpu, len)?))
    }

    unsafe fn upload_later(&mut self, to: *mut i32, buffer: HostBuffer, len: usize) -> Result<Option<HostBuffer>> {
        let done = Event::new(&self.gpu)?;
        // SAFETY: the caller's promise for `to`; the buffer is kept below until its event has passed.
        unsafe { self.stream.upload(address(to), &buffer[..len]) }?;
        done.record(&self.stream)?;
        self.uploads.push_back((buffer, done));
        let Some((_, oldest)) = self.uploads.front() else { return Ok(None) };
        if self.uploads.len() > BATCHES_UNDER_WAY {
            oldest.synchronize()?;
        } else if !oldest.is_done()? {
            return Ok(None);
        }
        Ok(self.uploads.pop_front().map(|(buffer, _)| buffer))
    }

    unsafe fn download_later(&mut self, from: *const f32, len: usize) -> Result<Ticket> {
        let mut download = match self.idle_downloads.iter().position(|idle| idle.buffer.len() >= len) {
            Some(i) => self.idle_downloads.swap_remove(i),
            None => Download { buffer: PinnedBuffer::new(&self.gpu, len)?, len, done: TimedEvent::new(&self.gpu)? },
        };
        download.len = len;
        // SAFETY: the caller's promise for `from`; the buffer is kept until `wait` has seen its event.
        unsafe { self.stream.download(&mut download.buffer[..len], address(from)) }?;
        download.done.record(&self.stream)?;
        self.next_ticket += 1;
        self.downloads.insert(self.next_ticket, download);
        Ok(Ticket(self.next_ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Reading> {
        let download = self.downloads.remove(&ticket.0);
        let mut download = download.with_context(|| format!("read {} is not under way", ticket.0))?;
        download.done.synchronize()?;
        let values = download.buffer[..download.len].to_vec();
        let at = self.clock.tell(&download.done)?;
        // The clock counts from this mark on, so the mark it counted from is free.
        std::mem::swap(&mut self.clock.mark, &mut download.done);
        self.idle_downloads.push(download);
        Ok(Reading { values, at })
    }
}

impl Drop for Device {
    /// Buffers of copies under way must outlive them.
    fn drop(&mut self) {
        // A failure has been, or will be, reported by the call that meets it first; nothing is left to copy then.
        let _ = self.stream.synchronize();
    }
}
