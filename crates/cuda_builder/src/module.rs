//! What a build knows of its modules and kernels: made by the build script, baked into the program as statics.

use std::borrow::Cow;

/// One device module in the program, as `kernels.rs` defines it.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// As `sm_90a`.
    pub arch: &'static str,
    pub ptx: &'static str,
    /// None where no `ptxas` was found at build time.
    pub cubin: Option<&'static [u8]>,
    /// Sorted by name.
    pub kernels: &'static [Kernel],
    /// Bytes of shared memory, static and dynamic, that a block may have on `arch`; None where unknown.
    pub shared_limit: Option<u32>,
}

/// One entry point of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub name: Cow<'static, str>,
    pub bounds: LaunchBounds,
    /// None where no `ptxas` was found.
    pub resources: Option<Resources>,
}

/// What `#[kernel(…)]` promises of each launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchBounds {
    /// Most threads of a block, in x, y, z (`.maxntid`).
    pub threads: Option<[u32; 3]>,
    /// Blocks that must fit on a multiprocessor (`.minnctapersm`).
    pub blocks_per_sm: Option<u32>,
    /// Most registers of a thread (`.maxnreg`).
    pub registers: Option<u32>,
    /// Blocks of a cluster, in x, y, z (`.reqnctapercluster`, from `sm_90` on).
    pub cluster: Option<[u32; 3]>,
}

/// What `ptxas -v` says a kernel takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread, callees included.
    pub stack: u32,
    /// Bytes stored to local memory for want of registers.
    pub spill_stores: u32,
    /// Bytes loaded from local memory for want of registers.
    pub spill_loads: u32,
    /// Bytes of static shared memory per block; dynamic shared memory comes with the launch.
    pub static_shared: u32,
    /// Hardware barriers of a block.
    pub barriers: u32,
}

/// Bytes of shared memory that a block may have when it asks for it (CUDA programming guide, technical specifications).
pub(crate) fn shared_limit(arch: &str) -> Option<u32> {
    match arch_number(arch)? {
        80 | 87 => Some(163 * 1024),
        86 | 89 | 120 | 121 => Some(99 * 1024),
        90 | 100 | 103 | 110 => Some(227 * 1024),
        _ => None,
    }
}

/// 90 of `sm_90a`.
pub(crate) fn arch_number(arch: &str) -> Option<u32> {
    arch.strip_prefix("sm_")?.trim_end_matches(char::is_alphabetic).parse().ok()
}
