//! Causal self-attention for `sm_90a`, head sizes 64 and 128, forward and backward: TMA, wgmma and warp-specialized
//! persistent kernels, as in FlashAttention-3.
//!
//! One thread block per SM. Warpgroup 0 is the producer: it loads panels of 64 rows into pipelines of shared-memory
//! stages by TMA. Warpgroups 1 and 2 are consumers, of 64 rows (queries or keys) each. A consumer keeps its own rows in
//! registers, as A fragments and accumulators, or reads them from shared memory if registers do not suffice. The
//! streamed panels are the B operands, in shared memory. Scores and probabilities stay in registers.
//!
//! The kernels read qkv (B, T, 3, NH, HS) in place through a tensor map over (B, T, 3 NH HS). Rows past the end of a
//! sequence are read as zeros. As keys they lie above the diagonal. As queries they are not stored, or their
//! probabilities are set to zero. [`crate::attention`] describes how far NaN and infinity spread.
//!
//! Modules:
//! * `head`: types that depend on the head size
//! * `panel`: 64 rows of a head in shared memory
//! * `pipeline`: barriers of the shared-memory stages
//! * `scheduler`: work tiles, and their addresses in global memory
//! * `mask`, `softmax`, `epilogue`: operations on accumulators
//! * `warp_specialized`: setup and roles of all kernels
//! * `forward`; `backward` with `dkdv` and `dq`: the kernels
//! * `launch` (host): the kernel launches for a shape

mod backward;
mod dkdv;
mod dq;
mod epilogue;
mod forward;
mod head;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod panel;
mod pipeline;
mod scheduler;
mod softmax;
mod warp_specialized;

pub use dkdv::attention_backward_dkdv_wgmma;
pub use dq::attention_backward_dq_wgmma;
pub use forward::attention_forward_wgmma;
pub use head::{Head, Head64, Head128};

/// Rows of a consumer, and of a streamed panel.
const ROWS: u32 = 64;
/// Rows and columns of the TMA box of the tensor maps over qkv (B, T, 3 NH HS) and dout (B, T, NH HS).
pub const BOX: (u32, u32) = (ROWS, 64);
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Consumer warpgroups of a block.
const CONSUMERS: u32 = 2;
/// Rows of a work tile.
const TILE: u32 = CONSUMERS * ROWS;
