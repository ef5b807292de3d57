//! One run of a kernel: its memory, its launches, and the results that it must compute.
//!
//! A kernel's `setup` fills a [`Session`]. The same setup serves the emulator and a GPU: views of memory are addresses on either.

use crate::values::Values;
use anyhow::{Context, Result, bail, ensure};
use bytemuck::Pod;
use cuda_driver::{DeviceMemory, ElementType, Gpu, L2Promotion, Stream, Swizzle};
use cuda_std::emulate::Memory;
use cuda_std::hopper::{Extents, TensorMap};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::launch::KernelLaunch;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

/// The size of a kernel's problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// A few blocks, with tails, for the emulator. Every element of the result is checked.
    Small,
    /// A size of training that exceeds the caches, for timing on a GPU. A sample of the result is checked.
    Full,
}

/// The work of a kernel, whatever its implementation.
#[derive(Clone, Copy, Default, Debug)]
pub struct Work {
    /// Bytes of the arguments, each read or written once.
    pub bytes: usize,
    /// Multiplications and additions of matmuls. 0 for operations without any.
    pub flops: usize,
}

/// A GEMM out (M, N) = a (M, K) · b (K, N) that cuBLASLt can compute.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// The address of a.
    pub a: u64,
    /// The address of b.
    pub b: u64,
    /// The address of out.
    pub out: u64,
    /// M, N and K.
    pub mnk: [usize; 3],
}

/// The allowed error of an element: `rms` times the root mean square of all expected elements, plus `relative` times the element.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Factor of the root mean square.
    pub rms: f64,
    /// Factor of the element.
    pub relative: f64,
}

impl Tolerance {
    /// For results in bf16: twice the rounding error of the storage type.
    pub const BF16: Self = Self { rms: 1e-3, relative: 0.008 };
    /// For results in f32 that are sums of many terms.
    pub const F32: Self = Self { rms: 1e-4, relative: 1e-4 };
    /// For results in bf16 whose intermediate results are rounded to bf16 as well.
    pub const ROUNDED_TWICE: Self = Self { rms: 0.03, relative: 0.02 };
}

/// Reads an array of any storage type.
type Read = Box<dyn Fn(&Backing) -> Result<Vec<f32>>>;

/// A result to check.
struct Expectation {
    name: &'static str,
    len: usize,
    tolerance: Tolerance,
    samples: usize,
    read: Read,
    reference: Box<dyn Fn(usize) -> f64 + Send + Sync>,
}

/// The outcome of the checks of a run whose results are correct.
#[derive(Clone, Copy, Default, Debug)]
pub struct Verified {
    /// Number of elements that were checked.
    pub elements: usize,
    /// The largest error, as a fraction of the allowed one.
    pub worst: f64,
}

/// The memory with the arrays of a session.
enum Backing<'a> {
    Emulated(Memory),
    Cuda { gpu: &'a Gpu, stream: &'a Stream, allocations: Vec<DeviceMemory> },
}

/// One run of a kernel. See the module.
pub struct Session<'a> {
    backing: Backing<'a>,
    size: Size,
    preparations: Vec<KernelLaunch>,
    launches: Vec<KernelLaunch>,
    expectations: Vec<Expectation>,
    /// The work of the launches.
    pub work: Work,
    /// The same GEMM for cuBLASLt, if the kernel computes one.
    pub gemm: Option<Gemm>,
}

/// Number of SMs that persistent kernels assume in the emulator: few, so that a block gets several work tiles.
const EMULATED_SMS: usize = 2;

impl Session<'static> {
    /// Creates a session in the emulator, of size [`Size::Small`].
    pub fn emulated() -> Self {
        Self::new(Backing::Emulated(Memory::new()), Size::Small)
    }
}

impl<'a> Session<'a> {
    /// Creates a session on a GPU.
    pub fn cuda(gpu: &'a Gpu, stream: &'a Stream, size: Size) -> Self {
        Self::new(Backing::Cuda { gpu, stream, allocations: Vec::new() }, size)
    }

    fn new(backing: Backing<'a>, size: Size) -> Self {
        Self {
            backing,
            size,
            preparations: Vec::new(),
            launches: Vec::new(),
            expectations: Vec::new(),
            work: Work::default(),
            gemm: None,
        }
    }

    /// Returns the value for the size of this session.
    pub fn pick<T>(&self, small: T, full: T) -> T {
        match self.size {
            Size::Small => small,
            Size::Full => full,
        }
    }

    /// Returns the number of SMs.
    pub fn sm_count(&self) -> usize {
        match &self.backing {
            Backing::Emulated(_) => EMULATED_SMS,
            Backing::Cuda { gpu, .. } => gpu.info().sm_count as usize,
        }
    }

    /// Adds an array that kernels only read.
    pub fn input<T: Pod>(&mut self, name: &str, values: &[T]) -> Result<Global<T>> {
        match &mut self.backing {
            Backing::Emulated(memory) => Ok(memory.input(name, values)),
            Backing::Cuda { .. } => Ok(self.buffer(name, values)?.reader()),
        }
    }

    /// Adds an array with values that kernels may overwrite.
    pub fn buffer<T: Pod>(&mut self, name: &str, values: &[T]) -> Result<GlobalMut<T>> {
        match &mut self.backing {
            Backing::Emulated(memory) => Ok(memory.buffer(name, values)),
            Backing::Cuda { gpu, stream, allocations } => {
                let memory =
                    DeviceMemory::new(gpu, size_of_val(values)).with_context(|| format!("allocating {name}"))?;
                let address = memory.address();
                allocations.push(memory);
                // SAFETY: the allocation has the size of `values`, and nothing else uses it yet. The driver has read pageable
                // memory when the call returns.
                unsafe { stream.upload(address, values) }?;
                Ok(GlobalMut::from_address(address))
            }
        }
    }

    /// Adds an uninitialized array of `len` elements.
    pub fn output<T: Pod>(&mut self, name: &str, len: usize) -> Result<GlobalMut<T>> {
        match &mut self.backing {
            Backing::Emulated(memory) => Ok(memory.output(name, len)),
            Backing::Cuda { .. } => self.filled(name, len, 0xff),
        }
    }

    /// Adds an array of `len` zeros.
    pub fn zeroed<T: Pod>(&mut self, name: &str, len: usize) -> Result<GlobalMut<T>> {
        match &mut self.backing {
            Backing::Emulated(memory) => Ok(memory.zeroed(name, len)),
            Backing::Cuda { .. } => self.filled(name, len, 0),
        }
    }

    /// Adds an array on the GPU, each byte of which is `byte`. With 0xff, floats are NaN.
    fn filled<T: Pod>(&mut self, name: &str, len: usize, byte: u8) -> Result<GlobalMut<T>> {
        let Backing::Cuda { gpu, stream, allocations } = &mut self.backing else { bail!("{name}: expected a GPU") };
        let bytes = len * size_of::<T>();
        let memory = DeviceMemory::new(gpu, bytes).with_context(|| format!("allocating {name}"))?;
        let address = memory.address();
        allocations.push(memory);
        // SAFETY: the allocation has this size, and nothing else uses it yet.
        unsafe { stream.fill(address, byte, bytes) }?;
        Ok(GlobalMut::from_address(address))
    }

    /// Adds a tensor map of a bf16 tensor, for boxes of `tile` rows and columns.
    pub fn tensor_map(
        &mut self,
        tensor: Global<bf16>,
        extents: Extents,
        tile: (u32, u32),
    ) -> Result<Global<TensorMap>> {
        let map = match &self.backing {
            Backing::Emulated(_) => TensorMap::emulated_tensor(tensor, extents, tile),
            Backing::Cuda { .. } => encode(tensor.pointer().addr() as u64, extents, tile)?,
        };
        self.input("tensor map", &[map])
    }

    /// Adds a launch that runs before those that are timed.
    pub fn prepare(&mut self, launch: KernelLaunch) {
        self.preparations.push(launch);
    }

    /// Adds a launch.
    pub fn launch(&mut self, launch: Launch, grid: [u32; 3], shared_bytes: usize) {
        self.launches.push(KernelLaunch { launch, grid, shared_bytes });
    }

    /// Adds launches.
    pub fn launch_all(&mut self, launches: impl IntoIterator<Item = KernelLaunch>) {
        self.launches.extend(launches);
    }

    /// Expects element i of an array of `len` elements to be `reference(i)`. At full size, checks `samples` elements.
    pub fn expect_samples<T: Element + Pod>(
        &mut self,
        name: &'static str,
        view: GlobalMut<T>,
        len: usize,
        tolerance: Tolerance,
        samples: usize,
        reference: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) {
        let read = move |backing: &Backing| Ok(backing.read(view, len)?.iter().map(|x| x.to_f32()).collect());
        self.expectations.push(Expectation {
            name,
            len,
            tolerance,
            samples,
            read: Box::new(read),
            reference: Box::new(reference),
        });
    }

    /// Expects element i of an array of `len` elements to be `reference(i)`. At full size, checks a thousand elements.
    pub fn expect<T: Element + Pod>(
        &mut self,
        name: &'static str,
        view: GlobalMut<T>,
        len: usize,
        tolerance: Tolerance,
        reference: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) {
        self.expect_samples(name, view, len, tolerance, 1000, reference);
    }

    /// Runs all launches once in the emulator, which checks every memory access.
    pub fn emulate(&mut self) -> Result<()> {
        let Backing::Emulated(memory) = &mut self.backing else { bail!("session: expected the emulator, found a GPU") };
        for KernelLaunch { launch, grid, shared_bytes } in self.preparations.iter().chain(&self.launches) {
            launch.emulate_checked(memory, *grid, *shared_bytes)?;
        }
        Ok(())
    }

    /// Returns the launches before those that are timed, and these.
    pub fn launches(&self) -> [&[KernelLaunch]; 2] {
        [&self.preparations, &self.launches]
    }

    /// Compares the results of one run with the reference.
    pub fn verify(&self) -> Result<Verified> {
        ensure!(!self.expectations.is_empty(), "the kernel states no results to check");
        let mut verified = Verified::default();
        for expectation in &self.expectations {
            let all = (expectation.read)(&self.backing)?;
            let sampled = self.size == Size::Full && expectation.len > expectation.samples;
            let count = if sampled { expectation.samples } else { expectation.len };
            // Evenly distributed over the array, with the first and the last element, and not all in one column.
            let indices: Vec<usize> = (0..count).map(|i| i * (expectation.len - 1) / (count - 1).max(1)).collect();
            let reference = &expectation.reference;
            let expected: Vec<f64> = indices.par_iter().map(|&i| reference(i)).collect();
            let rms = (expected.iter().map(|x| x * x).sum::<f64>() / count as f64).sqrt();
            for (&i, &want) in indices.iter().zip(&expected) {
                let got = f64::from(all[i]);
                let allowed = expectation.tolerance.rms * rms + expectation.tolerance.relative * want.abs();
                let error = (got - want).abs() / allowed.max(f64::MIN_POSITIVE);
                // A NaN compares as false.
                ensure!(
                    error <= 1.0,
                    "{}[{i}]: expected {want:.6e} +- {allowed:.1e}, found {got:.6e}; the kernel is wrong",
                    expectation.name
                );
                verified.worst = verified.worst.max(error);
            }
            verified.elements += count;
        }
        Ok(verified)
    }
}

impl Backing<'_> {
    fn read<T: Pod>(&self, view: GlobalMut<T>, len: usize) -> Result<Vec<T>> {
        match self {
            Self::Emulated(memory) => Ok(memory.slice(view.reader(), len)?.to_vec()),
            Self::Cuda { stream, .. } => {
                let mut values = vec![T::zeroed(); len];
                // SAFETY: the view begins at one of the session's allocations, which has `len` elements. `values` lives until the
                // stream has been synchronized.
                unsafe { stream.download(&mut values, view.pointer().addr() as u64) }?;
                stream.synchronize()?;
                Ok(values)
            }
        }
    }
}

/// Encodes a tensor map for the GPU.
fn encode(address: u64, extents: Extents, (box_rows, box_columns): (u32, u32)) -> Result<TensorMap> {
    let (element, swizzle, l2) = (ElementType::Bf16, Swizzle::B128, L2Promotion::B256);
    let bytes = |elements: usize| (elements * size_of::<bf16>()) as u64;
    let map = match extents {
        Extents::Matrix([rows, columns]) => {
            let extents = [columns, rows].map(|extent| extent as u64);
            cuda_driver::TensorMap::tiled(
                element,
                address,
                extents,
                &[bytes(columns)],
                [box_columns, box_rows],
                swizzle,
                l2,
            )
        }
        Extents::Matrices([matrices, rows, columns]) => {
            let extents = [columns, rows, matrices].map(|extent| extent as u64);
            let (strides, tile) = ([bytes(columns), bytes(rows * columns)], [box_columns, box_rows, 1]);
            cuda_driver::TensorMap::tiled(element, address, extents, &strides, tile, swizzle, l2)
        }
        other => bail!("tensor map: expected one or several matrices, found {other:?}"),
    };
    Ok(TensorMap(*map?.as_words()))
}

/// Returns a one-dimensional grid of blocks that cover `n` elements, `per_block` each.
pub fn blocks(n: usize, per_block: usize) -> [u32; 3] {
    [n.div_ceil(per_block) as u32, 1, 1]
}

/// Returns the shared memory of a layout in bytes.
pub fn shared_bytes<V>(define: impl FnOnce(&mut Layout) -> V) -> usize {
    let mut layout = Layout::new();
    define(&mut layout);
    layout.bytes()
}

/// An array of a session with its initial values.
#[derive(Clone)]
pub struct Input<T: 'static> {
    /// The view for kernels.
    pub view: Global<T>,
    /// The values.
    pub values: Values<T>,
}

impl Session<'_> {
    /// Adds an array of random numbers in ±`range` that kernels only read.
    pub fn noise<T: Element + Pod>(&mut self, name: &str, len: usize, range: f32) -> Result<Input<T>> {
        let values = Values::noise(name, len, range);
        Ok(Input { view: self.input(name, values.as_slice())?, values })
    }

    /// Adds an array of random numbers in ±`range` that kernels may overwrite.
    pub fn noisy_buffer<T: Element + Pod>(
        &mut self,
        name: &str,
        len: usize,
        range: f32,
    ) -> Result<(GlobalMut<T>, Values<T>)> {
        let values = Values::noise(name, len, range);
        Ok((self.buffer(name, values.as_slice())?, values))
    }
}
