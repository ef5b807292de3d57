//! A kernel launch, as `#[kernel]` makes it on the host: which entry point, with which arguments.

use crate::backend::{Grid, Memory, Report};
use std::any::{TypeId, type_name};
use std::fmt;
use std::sync::Arc;

/// One kernel with its arguments, ready for a GPU ([`Launch::name`], [`Launch::with_arguments`]) or for
/// [`Launch::emulate`]. Made by calling the function that `#[kernel]` leaves on the host, so arguments are typed:
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
    threads: u32,
    arguments: Vec<Argument>,
    body: Arc<dyn Fn() + Send + Sync>,
}

/// A kernel argument's bytes, aligned for any scalar.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Argument([u8; 16]);

impl Argument {
    /// `value` must be a pointer view or a scalar: at most 16 bytes without padding.
    #[doc(hidden)]
    pub fn new<T: Copy + 'static>(value: T) -> Self {
        const { assert!(size_of::<T>() <= 16 && align_of::<T>() <= 16) };
        let mut bytes = [0; 16];
        // SAFETY: `value` fits, as asserted, and is plain data.
        unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), bytes.as_mut_ptr(), size_of::<T>()) };
        Self(bytes)
    }
}

/// The entry point of the instance whose generic arguments are those of `K`.
#[doc(hidden)]
pub fn entry_of<K: 'static>(kernel: &str, entries: &[(TypeId, &'static str)]) -> &'static str {
    let Some((_, entry)) = entries.iter().find(|(key, _)| *key == TypeId::of::<K>()) else {
        let have: Vec<_> = entries.iter().map(|(_, entry)| *entry).collect();
        panic!("kernel {kernel} has no instance for {}; there are: {}", type_name::<K>(), have.join(", "))
    };
    entry
}

impl Launch {
    #[doc(hidden)]
    pub fn new(
        name: &'static str,
        threads: u32,
        arguments: Vec<Argument>,
        body: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self { name, threads, arguments, body: Arc::new(body) }
    }

    /// The entry point's name in the PTX.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Threads of a block, fixed by `#[kernel(threads = …)]`.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Calls `f` with the addresses of the arguments, as `cuLaunchKernel` wants them.
    pub fn with_arguments<R>(&self, f: impl FnOnce(&mut [*mut std::ffi::c_void]) -> R) -> R {
        let mut addresses: Vec<_> = self.arguments.iter().map(|a| (&raw const a.0).cast_mut().cast()).collect();
        f(&mut addresses)
    }

    /// Runs the kernel on the CPU over `grid` blocks with `shared_bytes` of dynamic shared memory each.
    ///
    /// # Safety
    /// The pointer arguments must be host memory that covers every index the kernel forms, 16-byte aligned.
    ///
    /// # Errors
    /// When the kernel cannot run to its end: a deadlock, lanes that diverge, a panic. The text names the kernel, block,
    /// threads and source lines.
    pub unsafe fn emulate(&self, grid: [u32; 3], shared_bytes: usize) -> Result<(), Report> {
        crate::backend::run(&self.grid(grid, shared_bytes, 1))
    }

    /// As [`emulate`](Self::emulate) over buffers of `memory` and nothing else, watching every access: one outside the
    /// buffers, or misaligned; a read of what was never written, in the buffers or in shared memory; two threads at one
    /// place without a barrier in between, or two blocks without fences; an asynchronous copy or a product used before its
    /// wait; polling. Blocks run one after the other, so the same fault is found on every run.
    ///
    /// # Errors
    /// At the first fault, with kernel, block, thread, buffer and both source lines.
    pub fn emulate_checked(&self, memory: &mut Memory, grid: [u32; 3], shared_bytes: usize) -> Result<(), Report> {
        crate::backend::run_checked(&self.grid(grid, shared_bytes, 1), memory)
    }

    /// As [`emulate`](Self::emulate) with clusters of `cluster` blocks along x.
    ///
    /// # Safety
    /// As [`emulate`](Self::emulate).
    ///
    /// # Errors
    /// As [`emulate`](Self::emulate).
    pub unsafe fn emulate_cluster(&self, grid: [u32; 3], shared_bytes: usize, cluster: u32) -> Result<(), Report> {
        crate::backend::run(&self.grid(grid, shared_bytes, cluster))
    }

    /// As [`emulate_checked`](Self::emulate_checked) with clusters of `cluster` blocks along x, of 1024 threads at most.
    ///
    /// # Errors
    /// As [`emulate_checked`](Self::emulate_checked).
    pub fn emulate_cluster_checked(
        &self,
        memory: &mut Memory,
        grid: [u32; 3],
        shared_bytes: usize,
        cluster: u32,
    ) -> Result<(), Report> {
        crate::backend::run_checked(&self.grid(grid, shared_bytes, cluster), memory)
    }

    fn grid(&self, size: [u32; 3], shared_bytes: usize, cluster: u32) -> Grid<'_> {
        Grid { kernel: self.name, body: &*self.body, size, threads: self.threads, shared_bytes, cluster }
    }
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({} arguments, {} threads)", self.name, self.arguments.len(), self.threads)
    }
}
