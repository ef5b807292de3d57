//! The kernels of the module that a GPU runs.

use crate::Result;
use cuda_driver::{Function, LaunchConfig, Module, Stream};
use gpu::launch::KernelLaunch;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Kernels by name, loaded at first use.
pub struct Functions {
    loaded: HashMap<&'static str, Function>,
    module: Module,
}

impl Functions {
    /// Wraps a module.
    pub fn new(module: Module) -> Self {
        Self { loaded: HashMap::new(), module }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// Same as [`Executor::launch`](super::executor::Executor::launch).
    pub unsafe fn launch(&mut self, stream: &Stream, kernel: &KernelLaunch) -> Result<()> {
        let KernelLaunch { launch, grid, shared_bytes } = kernel;
        let function = match self.loaded.entry(launch.name()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.module.function(launch.name())?),
        };
        let config = LaunchConfig { grid: *grid, block: launch.block(), shared_bytes: u32::try_from(*shared_bytes)? };
        // SAFETY: a `Launch` has the kernel's arguments by construction; the rest is the caller's promise.
        Ok(launch.with_arguments(|arguments| unsafe { function.launch(stream, &config, arguments) })?)
    }
}
