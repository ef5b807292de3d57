//! Kernel launches on the host: the entry point and arguments that a `#[kernel]` function returns.

use crate::Scalar;
use crate::backend::{Grid, Memory, Report, Schedule};
use crate::slice::{GlobalSlice, GlobalSliceMut};
use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A kernel with its arguments, ready to run on a GPU ([`Launch::name`], [`Launch::with_arguments`]) or in the emulator
/// ([`Launch::emulate`]).
///
/// On the host, a `#[kernel]` function returns a `Launch`, so the compiler checks the types of its arguments:
/// ```compile_fail,E0308
/// # use cuda_std::{GlobalMut, kernel};
/// #[kernel(threads = 32)]
/// fn fill(out: GlobalMut<f32>, n: u64) {}
///
/// fill(GlobalMut::new(std::ptr::null_mut::<u32>()), 1);
/// ```
#[derive(Clone)]
pub struct Launch {
    name: &'static str,
    block: [u32; 3],
    arguments: Vec<Argument>,
    shared_bytes: usize,
    body: Option<Body>,
}

/// The kernel as a function that the emulator calls for each thread.
#[doc(hidden)]
pub type Body = Arc<dyn Fn() + Send + Sync>;

/// Whether launches carry the bodies of their kernels, so that they can be emulated: the feature `emulator` of this crate.
pub const HAS_EMULATOR: bool = cfg!(feature = "emulator");

/// Returns the body of a kernel for its [`Launch`].
#[doc(hidden)]
#[cfg(feature = "emulator")]
#[macro_export]
macro_rules! emulated_body {
    ($body:expr) => {
        ::core::option::Option::Some(::std::sync::Arc::new($body) as $crate::launch::Body)
    };
}

/// Discards the body of a kernel, so that the host compiler does not see it.
#[doc(hidden)]
#[cfg(not(feature = "emulator"))]
#[macro_export]
macro_rules! emulated_body {
    ($($body:tt)*) => {
        ::core::option::Option::None
    };
}

/// The bytes of a kernel argument, and its type.
#[derive(Clone)]
pub struct Argument {
    lines: Box<[Line]>,
    r#type: TypeId,
}

/// Part of an argument, with the alignment of a [`TensorMap`](crate::hopper::TensorMap).
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Argument {
    /// Size of the largest argument in bytes: that of all parameters of a kernel, in the PTX versions that drivers since CUDA 12.0
    /// accept.
    const LIMIT: usize = 4096;

    /// Copies `value`, which must be plain data without padding: a pointer view, a scalar, or a `#[repr(C)]` struct of
    /// scalars. The device receives a struct by value, with the layout it has on the host.
    #[doc(hidden)]
    #[inline(never)] // The launch functions of a device crate compile faster.
    pub fn new<T: Copy + 'static>(value: T) -> Self {
        const { assert!(size_of::<T>() <= Self::LIMIT && align_of::<T>() <= align_of::<Line>()) };
        let mut lines = vec![Line([0; 64]); size_of::<T>().div_ceil(size_of::<Line>())].into_boxed_slice();
        // SAFETY: `value` fits and is plain data.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), lines.as_mut_ptr().cast(), size_of::<T>());
        };
        Self { lines, r#type: TypeId::of::<T>() }
    }

    /// Returns the value.
    ///
    /// # Panics
    /// Panics if it has another type.
    #[doc(hidden)]
    #[inline]
    pub fn value<T: Copy + 'static>(&self) -> T {
        assert!(self.r#type == TypeId::of::<T>());
        // SAFETY: the lines hold a value of this type, and have at least its alignment.
        unsafe { self.lines.as_ptr().cast::<T>().read() }
    }
}

/// An instance of a generic kernel: its type as a key, its entry point, and the function that runs it for an emulated thread.
///
/// The table of a kernel contains all instances, so the crate of the kernel compiles each of them once, and crates that launch it do
/// not.
#[doc(hidden)]
pub struct Instance {
    pub key: TypeId,
    pub entry: &'static str,
    pub emulated: Option<fn(&[Argument])>,
}

/// Returns the function of an [`Instance`], which reads the arguments of a launch.
#[doc(hidden)]
#[cfg(feature = "emulator")]
#[macro_export]
macro_rules! emulated_instance {
    ($function:expr) => {
        ::core::option::Option::Some($function)
    };
}

/// Discards the function of an instance.
#[doc(hidden)]
#[cfg(not(feature = "emulator"))]
#[macro_export]
macro_rules! emulated_instance {
    ($($function:tt)*) => {
        ::core::option::Option::None
    };
}

/// Keeps the functions that emulate a kernel.
#[doc(hidden)]
#[cfg(feature = "emulator")]
#[macro_export]
macro_rules! emulated_items {
    ($($items:item)*) => {
        $($items)*
    };
}

/// Discards the functions that emulate a kernel, so that the host compiler does not see them.
#[doc(hidden)]
#[cfg(not(feature = "emulator"))]
#[macro_export]
macro_rules! emulated_items {
    ($($items:tt)*) => {};
}

/// Returns the instance with the type `key`, which is also given by name.
#[doc(hidden)]
pub fn instance_of(kernel: &str, (key, name): (TypeId, &str), instances: &'static [Instance]) -> &'static Instance {
    let Some(instance) = instances.iter().find(|instance| instance.key == key) else {
        let have: Vec<_> = instances.iter().map(|instance| instance.entry).collect();
        panic!(
            "kernel {kernel}: expected one of the instances {}, found {name}; add it to instances(…) in #[kernel]",
            have.join(", ")
        )
    };
    instance
}

impl Launch {
    #[doc(hidden)]
    #[inline(never)]
    pub fn new(name: &'static str, block: [u32; 3], arguments: Vec<Argument>, body: Option<Body>) -> Self {
        Self { name, block, arguments, shared_bytes: 0, body }
    }

    #[doc(hidden)]
    #[inline(never)]
    pub fn of_instance(instance: &'static Instance, block: [u32; 3], arguments: Vec<Argument>) -> Self {
        let body = instance.emulated.map(|emulated| {
            let arguments = arguments.clone();
            Arc::new(move || emulated(&arguments)) as Body
        });
        Self::new(instance.entry, block, arguments, body)
    }

    /// Returns the name of the entry point in the PTX.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the number of threads in a block, given by `#[kernel(threads = …)]`.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Returns the number of threads of a block in x, y and z.
    pub fn block(&self) -> [u32; 3] {
        self.block
    }

    #[doc(hidden)]
    #[inline(never)]
    #[must_use]
    pub fn with_shared_bytes(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    /// Returns the bytes of dynamic shared memory of a block, given by `#[kernel(shared = …)]`, or 0.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Calls `f` with the addresses of the arguments, in the format of `cuLaunchKernel`.
    pub fn with_arguments<R>(&self, f: impl FnOnce(&mut [*mut std::ffi::c_void]) -> R) -> R {
        let mut addresses: Vec<_> = self.arguments.iter().map(|a| a.lines.as_ptr().cast_mut().cast()).collect();
        f(&mut addresses)
    }

    /// Runs the kernel on the CPU over `grid` blocks with `shared_bytes` of dynamic shared memory each.
    ///
    /// # Safety
    /// The pointer arguments must be 16-byte aligned host memory that contains every index the kernel computes.
    ///
    /// # Errors
    /// If the kernel does not run to completion: a deadlock, warp divergence or a panic, for example. The report names
    /// the kernel, block, threads and source lines.
    pub unsafe fn emulate(&self, grid: [u32; 3], shared_bytes: usize) -> Result<(), Report> {
        crate::backend::run(&self.grid(grid, shared_bytes)?)
    }

    /// Runs the kernel on the CPU over the buffers of `memory` and checks every memory access.
    ///
    /// Detects out-of-bounds and misaligned accesses, uninitialized reads of buffers and shared memory, data races
    /// between threads and between blocks, asynchronous copies and wgmma results used before their wait, deadlocks and livelocks.
    ///
    /// The blocks run in order. If threads exchange values through atomics, the launch is repeated from the same memory in the other
    /// schedules of [`Schedule::DEFAULT_SEEDS`]. If the results of one of them differ, they are what `memory` contains afterwards, so that
    /// a test that compares them with expected values sees them. Every run finds the same fault.
    ///
    /// # Errors
    /// At the first fault. The report names the kernel, block, thread, buffer, source lines and the seed of the schedule.
    pub fn emulate_checked(&self, memory: &mut Memory, grid: [u32; 3], shared_bytes: usize) -> Result<(), Report> {
        crate::backend::run_seeds(&self.grid(grid, shared_bytes)?, memory, seeds())
    }

    /// Runs the kernel in the schedule of each of `seeds`, from the same memory, and calls `check` with the seed and the results: a test
    /// of a kernel whose blocks communicate compares all of them. Otherwise like [`emulate_checked`](Self::emulate_checked).
    ///
    /// # Errors
    /// At the first fault.
    pub fn emulate_each(
        &self,
        memory: &mut Memory,
        grid: [u32; 3],
        shared_bytes: usize,
        seeds: impl IntoIterator<Item = u64>,
        check: impl FnMut(u64, &Memory),
    ) -> Result<(), Report> {
        crate::backend::run_each(&self.grid(grid, shared_bytes)?, memory, seeds, check)
    }

    /// Runs the kernel once in the order of `schedule`. Otherwise like [`emulate_checked`](Self::emulate_checked).
    ///
    /// # Errors
    /// At the first fault.
    pub fn emulate_scheduled(
        &self,
        memory: &mut Memory,
        grid: [u32; 3],
        shared_bytes: usize,
        schedule: Schedule,
    ) -> Result<(), Report> {
        crate::backend::run_checked(&self.grid(grid, shared_bytes)?, memory, schedule).map(|_| ())
    }

    fn grid(&self, size: [u32; 3], shared_bytes: usize) -> Result<Grid<'_>, Report> {
        let body = self.body.as_deref().ok_or_else(|| Report::without_emulator(self.name))?;
        Ok(Grid { kernel: self.name, body, size, threads: self.threads(), block: self.block, shared_bytes })
    }
}

/// Returns the seeds of the schedules of a checked launch: those below the environment variable `CUDA_STD_SEEDS`, if it is set.
fn seeds() -> std::ops::Range<u64> {
    static SEEDS: std::sync::OnceLock<std::ops::Range<u64>> = std::sync::OnceLock::new();
    let given = || std::env::var("CUDA_STD_SEEDS").ok()?.parse().ok();
    SEEDS.get_or_init(|| given().map_or(Schedule::DEFAULT_SEEDS, |end| 0..end)).clone()
}

/// A launch of a `#[kernel(checked)]`, with its arguments. It borrows the buffers of its arguments.
///
/// `cuda_driver::CheckedModule` launches it on a GPU, without `unsafe`.
#[derive(Clone, Debug)]
pub struct CheckedLaunch<'a> {
    launch: Launch,
    signature: u64,
    owners: Vec<usize>,
    lifetime: PhantomData<&'a ()>,
}

impl CheckedLaunch<'_> {
    #[doc(hidden)]
    pub fn new(launch: Launch, signature: u64, arguments: CheckedArguments) -> Self {
        Self { launch, signature, owners: arguments.owners, lifetime: PhantomData }
    }

    /// Returns the launch without the checks.
    pub fn unchecked(&self) -> &Launch {
        &self.launch
    }

    /// Returns a hash of the kernel's source.
    pub fn signature(&self) -> u64 {
        self.signature
    }

    /// Returns the owner of each buffer, in the order of the parameters: the stream, or 0 for the emulator.
    pub fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// Runs the kernel on the CPU with `grid` blocks and the shared memory of its declaration. See [`Launch::emulate_checked`].
    ///
    /// # Errors
    /// At the first fault.
    pub fn emulate(&self, memory: &mut Memory, grid: [u32; 3]) -> Result<(), Report> {
        self.launch.emulate_checked(memory, grid, self.launch.shared_bytes)
    }

    /// Runs the kernel on the CPU in the schedule of each of `seeds`, and calls `check` with the results. See [`Launch::emulate_each`].
    ///
    /// # Errors
    /// At the first fault.
    pub fn emulate_each(
        &self,
        memory: &mut Memory,
        grid: [u32; 3],
        seeds: impl IntoIterator<Item = u64>,
        check: impl FnMut(u64, &Memory),
    ) -> Result<(), Report> {
        self.launch.emulate_each(memory, grid, self.launch.shared_bytes, seeds, check)
    }

    /// Runs the kernel on the CPU once in the order of `schedule`. See [`Launch::emulate_scheduled`].
    ///
    /// # Errors
    /// At the first fault.
    pub fn emulate_scheduled(&self, memory: &mut Memory, grid: [u32; 3], schedule: Schedule) -> Result<(), Report> {
        self.launch.emulate_scheduled(memory, grid, self.launch.shared_bytes, schedule)
    }
}

/// The arguments of a checked launch.
#[doc(hidden)]
#[derive(Default)]
pub struct CheckedArguments {
    values: Vec<Argument>,
    owners: Vec<usize>,
}

impl CheckedArguments {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn scalar<T: Scalar>(&mut self, value: T) -> T {
        self.values.push(Argument::new(value));
        value
    }

    pub fn view<V: View>(&mut self, view: V) -> V::Kept {
        view.push(self)
    }

    pub fn values(&mut self) -> Vec<Argument> {
        std::mem::take(&mut self.values)
    }
}

/// A view that a checked kernel takes.
#[doc(hidden)]
pub trait View {
    /// The view without its lifetime.
    type Kept: Copy + Send + Sync + 'static;

    fn push(self, arguments: &mut CheckedArguments) -> Self::Kept;
}

macro_rules! views {
    ($($slice:ident)*) => {$(
        impl<T: Copy + Send + Sync + 'static> View for $slice<'_, T> {
            type Kept = $slice<'static, T>;

            fn push(self, arguments: &mut CheckedArguments) -> Self::Kept {
                arguments.values.extend([Argument::new(self.view()), Argument::new(self.len() as u64)]);
                arguments.owners.push(self.owner());
                self.without_lifetime()
            }
        }
    )*};
}

views! { GlobalSlice GlobalSliceMut }

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({} arguments, {} threads)", self.name, self.arguments.len(), self.threads())
    }
}
