//! The GPU: its memory, launches, checks of large results, and times.

use cuda_builder::ModuleChoice;
use cuda_driver::{DeviceMemory, Function, Gpu, LaunchConfig, Module, Stopwatch, Stream, TimedEvent};
use cuda_std::{Global, GlobalMut};
use scan_and_sort::{KERNELS, ScanArrays, SortArrays, Step};
use std::collections::HashMap;
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// An operation that is checked and timed.
#[derive(Clone, Copy, PartialEq)]
pub enum Operation {
    Scan,
    Sort,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 2] = [Self::Scan, Self::Sort];

    /// Returns the name of the main kernel.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scan => "scan",
            Self::Sort => "sort",
        }
    }

    /// Returns the bytes of counters for `n` elements: tickets and counts of digits, then states.
    fn counter_bytes(self, n: usize) -> usize {
        FIXED_BYTES
            + match self {
                Self::Scan => 8 * ScanArrays::states(n),
                Self::Sort => 4 * SortArrays::states(n),
            }
    }
}

/// Bytes before the states: four tickets, then the counts of digits.
const FIXED_BYTES: usize = (COUNTS_AT + 4 * SortArrays::COUNTS).next_multiple_of(256);
/// The offset of the counts of digits, in bytes.
const COUNTS_AT: usize = 256;

/// A GPU with arrays for a number of elements.
pub struct Device {
    gpu: Gpu,
    stream: Stream,
    architecture: &'static str,
    functions: HashMap<&'static str, Function>,
    stopwatch: Stopwatch,
    largest: usize,
    inp: DeviceMemory,
    out: DeviceMemory,
    other: DeviceMemory,
    counters: DeviceMemory,
}

impl Device {
    /// Opens the first GPU and allocates arrays of `largest` elements.
    pub fn open(largest: usize) -> Result<Self> {
        let gpu = Gpu::open(0)?;
        let choice = ModuleChoice::newest(KERNELS.modules(), gpu.info().compute_capability, None)
            .ok_or(KERNELS.missing().unwrap_or("no kernels for this GPU"))?;
        let architecture = choice.module().arch;
        let module = Module::load(&gpu, architecture, choice.image())?;
        let stream = Stream::new(&gpu)?;
        let array = || DeviceMemory::new(&gpu, 4 * largest);
        let load = |name| Ok((name, module.function(name)?));
        let counter_bytes = Operation::Scan.counter_bytes(largest).max(Operation::Sort.counter_bytes(largest));
        Ok(Self {
            architecture,
            functions: ["scan", "histogram", "sort"].into_iter().map(load).collect::<Result<_>>()?,
            stopwatch: Stopwatch::new(&stream)?,
            largest,
            inp: array()?,
            out: array()?,
            other: array()?,
            counters: DeviceMemory::new(&gpu, counter_bytes)?,
            stream,
            gpu,
        })
    }

    /// Returns the name of the GPU.
    pub fn name(&self) -> &str {
        &self.gpu.info().name
    }

    /// Returns the architecture of the kernels.
    pub fn architecture(&self) -> &str {
        self.architecture
    }

    /// Returns the name and the resources of the main kernel of an operation.
    pub fn describe(&self, operation: Operation) -> String {
        let resources = self.functions[operation.name()].resources();
        let (registers, local) = (resources.registers, resources.local_bytes);
        format!("{}: {registers} registers, {local} bytes of local memory", operation.name())
    }

    /// Copies `values` to the input.
    pub fn upload(&self, values: &[u32]) -> Result<()> {
        assert!(values.len() <= self.largest, "more values than the arrays have elements");
        if !values.is_empty() {
            // SAFETY: the array has that many elements, and the copy has completed when this returns.
            unsafe { self.stream.upload(self.inp.address(), values) }?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Runs an operation on the first elements of the input, and replaces `result` by the result.
    pub fn run(&self, operation: Operation, result: &mut [u32]) -> Result<()> {
        let n = result.len();
        let steps = self.prepare(operation, n);
        // The previous result would hide that elements are not written.
        // SAFETY: the array has that many elements, and only this stream uses it.
        unsafe { self.stream.fill(self.out.address(), 0x5a, 4 * n.max(1)) }?;
        self.queue(operation, n, &steps)?;
        if n > 0 {
            // SAFETY: the array has that many elements, and the slice is not used before the copy has completed.
            unsafe { self.stream.download(result, self.out.address()) }?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// Returns the mean seconds of `runs` runs, after one that is not timed.
    pub fn time(&self, operation: Operation, n: usize, runs: u32) -> Result<f64> {
        let prepared = self.prepare(operation, n);
        self.queue(operation, n, &prepared)?;
        let mean = self.stopwatch.time(&self.stream, runs, || self.queue(operation, n, &prepared))?;
        Ok(f64::from(mean) / 1e3)
    }

    /// Returns the seconds of each part of one run: of the zeros for the counters, and of each launch.
    pub fn time_parts(&self, operation: Operation, n: usize) -> Result<Vec<f64>> {
        let steps = self.prepare(operation, n);
        let events: Vec<_> =
            (0..steps.len() + 2).map(|_| TimedEvent::new(&self.gpu)).collect::<std::result::Result<_, _>>()?;
        events[0].record(&self.stream)?;
        self.zero_counters(operation, n)?;
        events[1].record(&self.stream)?;
        for (step, event) in steps.iter().zip(&events[2..]) {
            self.launch(step)?;
            event.record(&self.stream)?;
        }
        self.stream.synchronize()?;
        let seconds = |pair: &[TimedEvent]| Ok(f64::from(pair[1].milliseconds_since(&pair[0])?) / 1e3);
        events.windows(2).map(seconds).collect()
    }

    /// Returns the bytes per second, read and written, of a copy of the largest array: the median of five.
    pub fn copy_bandwidth(&self) -> Result<f64> {
        let bytes = 4 * self.largest;
        // SAFETY: both arrays have these bytes, and only this stream uses them.
        let copy = || -> Result<()> { Ok(unsafe { self.stream.copy(self.out.address(), self.inp.address(), bytes) }?) };
        copy()?;
        let mut times = Vec::new();
        for _ in 0..5 {
            times.push(self.stopwatch.time(&self.stream, 10, copy)?);
        }
        times.sort_by(f32::total_cmp);
        Ok(2e3 * bytes as f64 / f64::from(times[2]))
    }

    fn steps(&self, operation: Operation, n: usize) -> Vec<Step> {
        let [inp, out, other] = [&self.inp, &self.out, &self.other].map(DeviceMemory::address);
        let (tickets, states) = (self.counters.address(), self.counters.address() + FIXED_BYTES as u64);
        let (inp, out, tickets) =
            (Global::from_address(inp), GlobalMut::from_address(out), GlobalMut::from_address(tickets));
        match operation {
            Operation::Scan => ScanArrays { out, inp, states: GlobalMut::from_address(states), tickets }.steps(n),
            Operation::Sort => {
                let counts = GlobalMut::from_address(self.counters.address() + COUNTS_AT as u64);
                let (other, states) = (GlobalMut::from_address(other), GlobalMut::from_address(states));
                SortArrays { out, inp, other, states, counts, tickets }.steps(n, self.gpu.info().sm_count as usize)
            }
        }
    }

    /// Returns the launches of an operation on `n` elements, for which the arrays and counters suffice.
    fn prepare(&self, operation: Operation, n: usize) -> Vec<Step> {
        assert!(n <= self.largest && operation.counter_bytes(n) <= self.counters.bytes(), "too many elements");
        self.steps(operation, n)
    }

    /// Queues a run of an operation.
    fn queue(&self, operation: Operation, n: usize, steps: &[Step]) -> Result<()> {
        self.zero_counters(operation, n)?;
        steps.iter().try_for_each(|step| self.launch(step))
    }

    fn zero_counters(&self, operation: Operation, n: usize) -> Result<()> {
        // SAFETY: `prepare` has compared the size. Only this stream uses the memory.
        Ok(unsafe { self.stream.fill(self.counters.address(), 0, operation.counter_bytes(n)) }?)
    }

    /// Queues a launch that [`prepare`](Self::prepare) has returned.
    fn launch(&self, Step { launch, grid }: &Step) -> Result<()> {
        let config = LaunchConfig { grid: *grid, block: launch.block(), shared_bytes: launch.shared_bytes() as u32 };
        let function = &self.functions[launch.name()];
        // SAFETY: the launch has the types of the kernel's parameters. The arrays have at least as many elements as it accesses and the
        // counters those of the operation, as `prepare` has checked; they outlive the work on the stream. The emulator checks, for the same
        // launches, that kernels stay within them.
        Ok(launch.with_arguments(|arguments| unsafe { function.launch(&self.stream, &config, arguments) })?)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The arrays must outlive the work that uses them. After an error, nothing runs any more.
        let _ = self.stream.synchronize();
    }
}
