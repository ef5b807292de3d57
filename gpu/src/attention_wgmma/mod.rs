//! Causal self-attention for `sm_90a`, head sizes 64 and 128, forward and backward: TMA, wgmma and warp-specialized
//! persistent kernels, as in FlashAttention-3.
//!
//! One thread block per SM. Warpgroup 0 is the producer: it loads panels of 64 rows into pipelines of shared-memory
//! stages by TMA. Warpgroups 1 and 2 are consumers, of 64 rows (queries or keys) each. A consumer keeps its own rows in
//! registers, as A fragments and accumulators, or reads them from shared memory if registers do not suffice. The
//! streamed panels are the B operands, in shared memory. Scores and probabilities stay in registers.
//!
//! The kernels read qkv (B, T, NH + 2 KV, HS) in place through a tensor map over (B, T, (NH + 2 KV) HS). Rows past the end of a
//! sequence are read as zeros. As keys they lie above the diagonal. As queries they are not stored, or their
//! probabilities are set to zero. [`crate::attention`] describes how far NaN and infinity spread.
//!
//! # Data flow
//!
//! A row of qkv has NH query heads, KV key heads and KV value heads. Query head h reads key-value head h / group, with
//! group = NH / KV (grouped-query attention; KV = NH is multi-head attention). K and V are never replicated. A work tile
//! is 128 rows of one head of one sequence:
//! ```text
//! kernel       work tile    resident               streamed, in this order
//! forward      (b, h, i)    Q of h                 K, V of h / group: from the diagonal down to key 0
//! dq           (b, h, i)    Q, dout of h           K, V of h / group: from key 0 up to the diagonal
//! dkdv         (b, kv, i)   K, V of kv             for h in kv group .. (kv + 1) group:
//!                                                    Q, dout, lse, D of h: from the diagonal up to the last query
//! fused        (b, kv, i)   K, V of kv             Q, dout, lse, D: from the last query down to the diagonal,
//!                                                    for each 64 queries: h in kv group .. (kv + 1) group
//! ```
//! The backward pass is dkdv and dq for HS = 64, and fused, which computes all gradients, for HS = 128. In dkdv and fused, dK
//! and dV stay in the accumulators for the whole group: their sums over its heads have a fixed order and need neither
//! atomics nor memory. In forward and dq, the heads of a group are neighbours in the order of the work tiles, so
//! K and V come from L2. The producer computes h / group once per work tile.
//!
//! Modules:
//! * `head`: types that depend on the head size
//! * `panel`: 64 rows of a head in shared memory
//! * `scheduler`: work tiles
//! * `sizes`: sizes of the operation, and addresses of heads in global memory
//! * `mask`, `softmax`, `epilogue`: operations on accumulators
//! * `warp_specialized`: setup and roles of all kernels
//! * `forward`; `backward` with `dkdv` and `dq` (HS = 64); `fused` (HS = 128): the kernels
//! * `launch` (host): the kernel launches for a shape

#![expect(
    clippy::large_types_passed_by_value,
    reason = "the views of a kernel are large on the host only; on the GPU they are registers and constants"
)]

mod backward;
mod dkdv;
mod dq;
mod epilogue;
mod forward;
mod fused;
mod head;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod panel;
mod scheduler;
mod sizes;
mod softmax;
mod warp_specialized;

pub use backward::attention_backward;
pub use forward::attention_forward_wgmma;
pub use fused::{attention_backward_convert_dq, attention_backward_fused_wgmma};
pub use head::{Head, Head64, Head128};

use cuda_std::hopper::WARPGROUP;

/// Rows of a consumer, and of a streamed panel.
const ROWS: u32 = 64;
/// Rows and columns of the TMA box of the tensor maps over qkv (B, T, (NH + 2 KV) HS) and dout (B, T, NH HS).
pub const BOX: (u32, u32) = (ROWS, 64);
/// Consumer warpgroups of a block.
const CONSUMERS: u32 = 2;
/// Threads of all consumers.
const CONSUMER_THREADS: u32 = CONSUMERS * WARPGROUP;
/// Rows of a work tile.
pub const TILE: u32 = CONSUMERS * ROWS;
