//! Kernels and their launches.

use crate::error::{CustResultExt, Result, call_error, from_cust};
use crate::{Error, Module, Stream, beyond_cust};
use cust::error::CudaError;
use cust::function::{BlockSize, FunctionAttribute, GridSize};
use std::ffi::c_void;
use std::fmt;
use std::mem::transmute;
use std::sync::atomic::{AtomicU32, Ordering};

/// The resources that a kernel uses, as compiled for the current device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory (stack and spills) per thread. Any at all slows a kernel down.
    pub local_bytes: u32,
    /// Bytes of static shared memory per block.
    pub static_shared_bytes: u32,
    /// The most threads per block that registers and launch bounds allow.
    pub max_threads: u32,
}

/// The shape of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in the grid.
    pub grid: [u32; 3],
    /// Threads in a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
}

/// One kernel of a [`Module`].
pub struct Function {
    /// Borrows from `module`: see [`Function::new`].
    handle: cust::function::Function<'static>,
    name: String,
    resources: Resources,
    /// The dynamic shared memory, in bytes, that a launch may use without another opt-in.
    dynamic_limit: AtomicU32,
    module: Module,
}

/// Bytes of shared memory that a kernel may use without opting in to more.
const SHARED_BYTES_WITHOUT_OPT_IN: u32 = 48 << 10;

impl Function {
    pub(crate) fn new(function: cust::function::Function<'_>, name: &str, module: &Module) -> Result<Self> {
        // SAFETY: the two types differ in their lifetime only. The module outlives the function, because `self` keeps a
        // clone of it.
        let handle: cust::function::Function<'static> = unsafe { transmute(function) };
        let attribute = |attribute: FunctionAttribute| {
            let value = handle.get_attribute(attribute);
            value.map(|value| value as u32).in_call(|| format!("cuFuncGetAttribute({name}, {attribute:?})"))
        };
        let resources = Resources {
            registers: attribute(FunctionAttribute::NumRegisters)?,
            local_bytes: attribute(FunctionAttribute::LocalSizeBytes)?,
            static_shared_bytes: attribute(FunctionAttribute::SharedMemorySizeBytes)?,
            max_threads: attribute(FunctionAttribute::MaxThreadsPerBlock)?,
        };
        let dynamic_limit = SHARED_BYTES_WITHOUT_OPT_IN.saturating_sub(resources.static_shared_bytes);
        Ok(Self {
            handle,
            name: name.into(),
            resources,
            dynamic_limit: AtomicU32::new(dynamic_limit),
            module: module.clone(),
        })
    }

    /// Returns the name of the entry point.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the resources that the kernel uses.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// Raises the kernel's limit of dynamic shared memory to `shared_bytes` if it is lower.
    fn opt_in(&self, shared_bytes: u32) -> Result<()> {
        if shared_bytes <= self.dynamic_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let limit = self.module.gpu().info().shared_per_block.saturating_sub(self.resources.static_shared_bytes);
        if shared_bytes > limit {
            return Err(Error::SharedMemory { kernel: self.name.clone(), asked: shared_bytes, limit });
        }
        beyond_cust::kernel::set_max_dynamic_shared(&self.handle, &self.name, shared_bytes)?;
        self.dynamic_limit.fetch_max(shared_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Queues the kernel on `stream`. `arguments` holds the address of each kernel argument, in order. The driver reads the
    /// arguments before this returns.
    ///
    /// # Safety
    /// The arguments must match those of the kernel in number, type and order. The device memory that they point to must
    /// cover all that the kernel accesses in this launch shape, until the kernel has completed.
    pub unsafe fn launch(&self, stream: &Stream, config: &LaunchConfig, arguments: &mut [*mut c_void]) -> Result<()> {
        self.opt_in(config.shared_bytes)?;
        let ([x, y, z], [block_x, block_y, block_z]) = (config.grid, config.block);
        let (grid, block) = (GridSize::xyz(x, y, z), BlockSize::xyz(block_x, block_y, block_z));
        // SAFETY: the arguments are the caller's promise.
        match unsafe { stream.as_cust().launch(&self.handle, grid, block, config.shared_bytes, arguments) } {
            Ok(()) => Ok(()),
            // A code that cust does not know, such as those of stream capture. Nothing was queued: launching again returns
            // the exact code.
            Err(CudaError::UnknownError) => {
                // SAFETY: the arguments are the caller's promise.
                let launched = unsafe { beyond_cust::kernel::launch(&self.handle, stream, config, arguments) };
                launched.map_err(|code| call_error(code, self.describe_launch(config)))
            }
            Err(error) => Err(from_cust(error, self.describe_launch(config))),
        }
    }

    fn describe_launch(&self, config: &LaunchConfig) -> String {
        format!("launching {} as {config:?}", self.name)
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} {:?}", self.name, self.resources)
    }
}
