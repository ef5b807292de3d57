//! Kernels and their launches.

use crate::error::{Result, check_with};
use crate::{Error, Module, Stream, sys};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a kernel uses, as compiled for the device at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory (stack and spills) of a thread; not 0 means slow.
    pub local_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub static_shared_bytes: u32,
    /// The largest block that registers and launch bounds allow.
    pub max_threads: u32,
}

/// The shape of a launch: blocks in the grid, threads in a block, bytes of dynamic shared memory of a block, and blocks
/// in a cluster along x (1: no cluster; more needs compute capability 9.0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub cluster: u32,
}

/// One kernel of a [`Module`].
pub struct Function {
    raw: sys::CUfunction,
    name: String,
    resources: Resources,
    /// How much dynamic shared memory launches may ask for now.
    dynamic_limit: AtomicU32,
    module: Module,
}

// SAFETY: the driver's function calls are thread-safe, and nothing here is bound to a thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Dynamic shared memory that a kernel gets without opting in.
const WITHOUT_OPT_IN: u32 = 48 << 10;

impl Function {
    pub(crate) fn new(raw: sys::CUfunction, name: &str, module: &Module) -> Result<Self> {
        let attribute = |id: c_int| {
            let mut value = 0;
            // SAFETY: the handle is live; writes one integer.
            let code = unsafe { sys::cuFuncGetAttribute(&raw mut value, id, raw) };
            check_with(code, || format!("cuFuncGetAttribute({name}, {id})")).map(|()| value as u32)
        };
        let resources = Resources {
            registers: attribute(sys::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(sys::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes: attribute(sys::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: attribute(sys::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        let dynamic_limit = AtomicU32::new(WITHOUT_OPT_IN.saturating_sub(resources.static_shared_bytes));
        Ok(Self { raw, name: name.into(), resources, dynamic_limit, module: module.clone() })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// How many blocks of this shape a multiprocessor holds at once.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        self.opt_in(shared_bytes)?;
        let mut blocks = 0;
        // SAFETY: the handle is live; writes one integer.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.raw,
                threads as c_int,
                shared_bytes as usize,
            )
        };
        check_with(code, || format!("cuOccupancyMaxActiveBlocksPerMultiprocessor({})", self.name))?;
        Ok(blocks as u32)
    }

    /// Lets launches ask for `shared_bytes` of dynamic shared memory. [`Function::launch`] does so by itself.
    pub fn opt_in(&self, shared_bytes: u32) -> Result<()> {
        if shared_bytes <= self.dynamic_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let limit = self.module.gpu().info().shared_per_block - self.resources.static_shared_bytes;
        if shared_bytes > limit {
            return Err(Error::SharedMemory { kernel: self.name.clone(), asked: shared_bytes, limit });
        }
        self.set(sys::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)?;
        self.dynamic_limit.fetch_max(shared_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Allows clusters of more than eight blocks, which not every GPU can run.
    pub fn allow_non_portable_cluster(&self) -> Result<()> {
        self.set(sys::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    }

    fn set(&self, attribute: c_int, value: u32) -> Result<()> {
        // SAFETY: the handle is live.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, value as c_int) };
        check_with(code, || format!("cuFuncSetAttribute({}, {attribute}, {value})", self.name))
    }

    /// Queues the kernel on `stream`. `arguments` are the addresses of the kernel's arguments, in order; they are read
    /// before the call returns.
    ///
    /// # Safety
    /// The arguments are those of the kernel in number, type and order, and the memory that they point to covers what
    /// the kernel touches in this launch shape, until it has run.
    pub unsafe fn launch(&self, stream: &Stream, config: &LaunchConfig, arguments: &mut [*mut c_void]) -> Result<()> {
        self.opt_in(config.shared_bytes)?;
        let mut cluster =
            sys::CUlaunchAttribute { id: sys::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, pad: 0, value: [0; 16] };
        cluster.value[..3].copy_from_slice(&[config.cluster, 1, 1]);
        let raw = sys::CUlaunchConfig {
            grid: config.grid,
            block: config.block,
            shared_bytes: config.shared_bytes,
            stream: stream.as_raw(),
            attributes: &raw const cluster,
            attribute_count: u32::from(config.cluster > 1),
        };
        // SAFETY: the handles are live, the attribute list has the length it says; the rest is the caller's promise.
        let code =
            unsafe { sys::cuLaunchKernelEx(&raw const raw, self.raw, arguments.as_mut_ptr(), std::ptr::null_mut()) };
        check_with(code, || format!("launching {} as {config:?}", self.name))
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} {:?}", self.name, self.resources)
    }
}
