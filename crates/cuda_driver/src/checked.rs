//! Launches of checked kernels, which need no `unsafe`.

use crate::error::Result;
use crate::{Error, Function, Gpu, LaunchConfig, Module, Stream};
use cuda_builder::{Kernels, ModuleChoice};
use cuda_std::launch::CheckedLaunch;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The kernels of a device crate, loaded on a GPU.
///
/// ```no_run
/// # mod kernels { pub static KERNELS: cuda_builder::Kernels = unsafe { cuda_builder::Kernels::new(&[], None) }; }
/// use cuda_driver::{Buffer, CheckedModule, Gpu, Stream};
/// use cuda_std::{GlobalSlice, GlobalSliceMut, kernel, thread};
///
/// #[kernel(threads = 256, checked)]
/// fn scale(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, a: f32) {
///     if let Some(x) = x.get(thread::index_1d()) {
///         y.set(thread::index_1d(), a * x);
///     }
/// }
///
/// let gpu = Gpu::open(0)?;
/// let stream = Stream::new(&gpu)?;
/// let module = CheckedModule::load(&gpu, &kernels::KERNELS)?;
/// let x = Buffer::from_slice(&stream, &[1.0; 1000])?;
/// let mut y = Buffer::zeroed(&stream, 1000)?;
/// module.launch(&stream, [4, 1, 1], &scale(y.slice_mut(), x.slice(), 2.0))?;
/// assert_eq!(y.read()?, [2.0; 1000]);
/// # Ok::<(), cuda_driver::Error>(())
/// ```
///
/// A launch borrows its buffers:
/// ```compile_fail,E0505
/// # use cuda_driver::{Buffer, CheckedModule, Result, Stream};
/// # use cuda_std::{GlobalSliceMut, kernel};
/// #[kernel(threads = 256, checked)]
/// fn fill(y: GlobalSliceMut<f32>) {}
///
/// fn launch_after_release(module: &CheckedModule, stream: &Stream, mut y: Buffer<f32>) -> Result<()> {
///     let launch = fill(y.slice_mut());
///     drop(y);
///     module.launch(stream, [1, 1, 1], &launch)
/// }
/// ```
///
/// A checked kernel has no views without a length:
/// ```compile_fail,E0277
/// # use cuda_std::{GlobalMut, kernel};
/// #[kernel(threads = 256, checked)]
/// fn fill(y: GlobalMut<f32>) {}
/// ```
pub struct CheckedModule {
    module: Module,
    architecture: &'static str,
    signatures: BTreeMap<&'static str, Option<u64>>,
    functions: Mutex<BTreeMap<&'static str, Function>>,
}

impl CheckedModule {
    /// Loads the code of `kernels` that fits the GPU best.
    pub fn load(gpu: &Gpu, kernels: &Kernels) -> Result<Self> {
        let (modules, capability) = (kernels.modules(), gpu.info().compute_capability);
        let choice = ModuleChoice::newest(modules, capability, None).ok_or_else(|| Error::NoCode {
            gpu: gpu.info().name.clone(),
            capability,
            found: match kernels.missing() {
                Some(missing) => missing.to_owned(),
                None => modules.iter().map(|module| module.arch).collect::<Vec<_>>().join(", "),
            },
        })?;
        let module = choice.module();
        let signatures = module.kernels.iter().map(|kernel| (kernel_name(kernel), kernel.signature)).collect();
        Ok(Self {
            module: Module::load(gpu, module.arch, choice.image())?,
            architecture: module.arch,
            signatures,
            functions: Mutex::default(),
        })
    }

    /// Returns the architecture of the loaded code.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// Queues a kernel with `grid` blocks on `stream`, with the block size and the shared memory of its declaration.
    ///
    /// # Errors
    /// If the program and its kernels are from different sources, if a buffer belongs to another stream, if a CUDA graph is being
    /// captured, or if the driver rejects the launch. An access beyond the end of a buffer stops the kernel; the stream reports that
    /// error at its next synchronization.
    pub fn launch(&self, stream: &Stream, grid: [u32; 3], launch: &CheckedLaunch<'_>) -> Result<()> {
        let unchecked = launch.unchecked();
        let name = unchecked.name();
        let kernel = || name.to_owned();
        if self.signatures.get(name).copied().flatten() != Some(launch.signature()) {
            return Err(Error::OtherSource { kernel: kernel() });
        }
        let owners = launch.owners();
        if let Some(argument) = owners.iter().position(|&owner| owner != stream.identity()) {
            return Err(Error::OtherStream { kernel: kernel(), buffer: argument + 1, buffers: owners.len() });
        }
        if stream.gpu().info().index != self.module.gpu().info().index {
            return Err(Error::OtherGpu {
                kernel: kernel(),
                module: self.module.gpu().info().index,
                stream: stream.gpu().info().index,
            });
        }
        stream.gpu().make_current()?;
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if !functions.contains_key(name) {
            functions.insert(name, self.module.function(name)?);
        }
        let function = &functions[name];
        let shared_bytes = u32::try_from(unchecked.shared_bytes()).unwrap_or(u32::MAX);
        let config = LaunchConfig { grid, block: unchecked.block(), shared_bytes };
        stream.in_order(|| {
            // SAFETY: the module was built from the declaration of the kernel, so the arguments match. It accesses memory only through
            // views that check their bounds. The buffers of these views live until the stream has completed the kernel, because they
            // belong to this stream, and no other work uses them at the same time.
            unchecked.with_arguments(|arguments| unsafe { function.launch(stream, &config, arguments) })
        })
    }
}

/// Returns the name of a kernel of a static module.
fn kernel_name(kernel: &'static cuda_builder::Kernel) -> &'static str {
    &kernel.name
}
