//! Causal self-attention for `sm_90a` and head sizes 64 and 128, forward and backward: TMA, wgmma, and warpgroups with roles.
//!
//! Every kernel here is persistent, one block per multiprocessor. Warpgroup 0 is the producer: it loads panels of 64 rows
//! by TMA into rings and keeps few registers. The others are consumers of 64 rows (queries or keys) each; what they own
//! stays in registers, as left operands and accumulators, and what streams by is the right operand in shared memory. So no
//! probability is ever written to shared memory.
//!
//! qkv (B,T,3,NH,HS) is read in place through a map over (B, T, 3 NH HS). Rows past the end of a sequence are read as
//! zeros: as keys they lie above the diagonal, as queries they are not stored or their probabilities are made zero. NaN
//! and infinity go as far as [`crate::attention`] says.

mod backward_keys;
mod backward_queries;
mod epilogue;
mod forward;
mod head;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod panel;
mod ring;
mod scheduler;
mod softmax;

pub use backward_keys::*;
pub use backward_queries::*;
pub use forward::*;
pub use head::{Head, Head64, Head128};

/// Rows of a consumer, and of a panel that streams by.
const ROWS: u32 = 64;
/// Box (rows, columns) of the tensor maps over qkv (B, T, 3 NH HS) and dout (B, T, NH HS).
pub const BOX: (u32, u32) = (ROWS, 64);
const WARPGROUP: u32 = 128;
