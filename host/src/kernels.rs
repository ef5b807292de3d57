//! The GPU kernels that the build script compiled into this program.
#![expect(missing_docs, reason = "the build script generates the items")]

use engine::cuda::EmbeddedKernels;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// All embedded modules, or the reason why there are none.
pub static EMBEDDED: EmbeddedKernels = EmbeddedKernels { modules: MODULES, missing: MODULES_MISSING };
