//! The GPU kernels that the build script compiled into this program.

use engine::cuda::EmbeddedKernels;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// All modules, or the reason why the build has none.
pub const EMBEDDED: EmbeddedKernels = EmbeddedKernels { modules: MODULES, missing: MODULES_MISSING };
