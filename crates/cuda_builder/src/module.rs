//! Descriptions of modules and kernels. The build script generates them, and the program contains them as statics.

use std::borrow::Cow;

/// A device module in the program, as defined in `kernels.rs`.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// The architecture, such as `sm_90a`.
    pub arch: &'static str,
    /// The PTX.
    pub ptx: &'static str,
    /// The cubin, or `None` if the program was built without cubins.
    pub cubin: Option<&'static [u8]>,
    /// The kernels, sorted by name.
    pub kernels: &'static [Kernel],
    /// The most bytes of shared memory, static and dynamic, per block on `arch`. `None` if unknown.
    pub shared_limit: Option<u32>,
}

/// The modules of one device crate, as defined in `kernels.rs`. Their code is that of the crate.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    modules: &'static [Module],
    missing: Option<&'static str>,
}

impl Kernels {
    /// Creates the description of a device crate.
    ///
    /// # Safety
    /// The builder must have compiled each module from the crate whose kernels the program launches.
    #[doc(hidden)]
    pub const unsafe fn new(modules: &'static [Module], missing: Option<&'static str>) -> Self {
        Self { modules, missing }
    }

    /// Returns one module per architecture. Empty if the program was built without a device toolchain.
    pub const fn modules(&self) -> &'static [Module] {
        self.modules
    }

    /// Returns the reason why there are no modules.
    pub const fn missing(&self) -> Option<&'static str> {
        self.missing
    }
}

/// One entry point of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The name of the entry point.
    pub name: Cow<'static, str>,
    /// The launch bounds.
    pub bounds: LaunchBounds,
    /// The resources, or `None` if the program was built without cubins.
    pub resources: Option<Resources>,
    /// A hash of the source of a `#[kernel(checked)]`, or `None` for another kernel.
    pub signature: Option<u64>,
}

/// The launch bounds given in `#[kernel(…)]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchBounds {
    /// The most threads per block, in x, y, z (`.maxntid`).
    pub threads: Option<[u32; 3]>,
    /// The number of blocks that must fit on an SM (`.minnctapersm`).
    pub blocks_per_sm: Option<u32>,
    /// The most registers per thread (`.maxnreg`).
    pub registers: Option<u32>,
}

/// The resources of a kernel as reported by `ptxas -v`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread, including callees.
    pub stack: u32,
    /// Bytes of register spills stored to local memory per thread.
    pub spill_stores: u32,
    /// Bytes of register spills loaded from local memory per thread.
    pub spill_loads: u32,
    /// Bytes of static shared memory per block. A launch adds dynamic shared memory.
    pub static_shared: u32,
    /// Hardware barriers per block.
    pub barriers: u32,
}

/// Returns the most bytes of shared memory that a block can opt in to: those of an SM without the 1 KiB that the driver reserves (CUDA
/// programming guide, technical specifications; `cuda/__device/arch_traits.h` of CCCL for 8.8, 10.3 and 11.0).
pub(crate) fn shared_limit(arch: &str) -> Option<u32> {
    match arch_number(arch)? {
        80 | 87 => Some(163 * 1024),
        86 | 88 | 89 | 120 | 121 => Some(99 * 1024),
        90 | 100 | 103 | 110 => Some(227 * 1024),
        _ => None,
    }
}

/// The most bytes of static shared memory of a kernel, on every architecture.
pub(crate) const STATIC_SHARED_LIMIT: u64 = 48 * 1024;

/// The architectures that can be built, oldest first: those of LLVM 22 and CUDA 13 since Ampere.
pub const ARCHITECTURES: [&str; 22] = [
    "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103",
    "sm_103a", "sm_103f", "sm_110", "sm_110a", "sm_110f", "sm_120", "sm_120a", "sm_120f", "sm_121", "sm_121a",
    "sm_121f",
];

/// The names of instruction sets that `#[kernel(requires = "…")]` and `cfg(cuda_feature = "…")` accept.
pub(crate) const FEATURES: [&str; 4] = ["fp8", "tma", "setmaxnreg", "wgmma"];

/// Returns whether an architecture has a set of instructions: `fp8` (conversions to FP8, and `mma.sync` of it), `tma` (TMA and transactions of
/// mbarriers), `setmaxnreg`, or `wgmma`.
pub fn has_feature(arch: &str, feature: &str) -> bool {
    let Some(number) = arch_number(arch) else { return false };
    // The suffixes a and f select instructions that later architectures may lack.
    let specific = arch.ends_with(['a', 'f']);
    match feature {
        "fp8" => number >= 89,
        "tma" => number >= 90,
        "setmaxnreg" => number >= 90 && specific,
        "wgmma" => number == 90 && specific,
        _ => false,
    }
}

/// Returns 90 for `sm_90a`, and `None` for a name that is not an architecture.
pub(crate) fn arch_number(arch: &str) -> Option<u32> {
    arch.strip_prefix("sm_")?.trim_end_matches(char::is_alphabetic).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{ARCHITECTURES, FEATURES, has_feature, shared_limit};

    #[test]
    fn each_architecture_has_a_limit_of_shared_memory() {
        for arch in ARCHITECTURES {
            let expected = match &arch[..arch.len().min(6)] {
                "sm_80" | "sm_87" => 163,
                "sm_86" | "sm_88" | "sm_89" | "sm_120" | "sm_121" => 99,
                _ => 227,
            };
            assert_eq!(shared_limit(arch), Some(expected << 10), "{arch}");
        }
    }

    #[test]
    fn features_follow_the_capability() {
        let of = |arch| FEATURES.map(|feature| has_feature(arch, feature));
        assert_eq!(of("sm_80"), [false; 4]);
        assert_eq!(of("sm_89"), [true, false, false, false]);
        assert_eq!(of("sm_90"), [true, true, false, false]);
        assert_eq!(of("sm_90a"), [true; 4]);
        assert_eq!(of("sm_100a"), [true, true, true, false]);
        assert_eq!(of("sm_120"), [true, true, false, false]);
        assert!(!has_feature("sm_90a", "clusters") && !has_feature("hopper", "wgmma"));
    }
}
