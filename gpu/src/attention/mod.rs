//! Causal self-attention with `mma.sync` tensor core instructions, forward and backward, for sm_80 and later.
//!
//! The algorithm is FlashAttention-2 (Dao, 2023, arXiv:2307.08691): the T x T scores are never stored. The kernels read
//! qkv (B,T,NH+2KV,HS) in place and write out (B,T,NH,HS). Head sizes are 64, 80, 96 and 128; T is arbitrary. `lse`
//! (B,NH,T) is the natural log-sum-exp of each query's scaled scores. Rows past the end of a sequence are read as
//! zeros. As keys they are masked; as queries they are not stored, or their probabilities are set to zero.
//!
//! # Grouped-query attention
//!
//! A row of qkv has NH query heads, KV key heads and KV value heads. Query head h reads key-value head h / group, with
//! group = NH / KV; nothing is replicated. With KV = NH, qkv is (B,T,3,NH,HS) and each group is one head.
//! ```text
//! kernel       a block owns                       and iterates over
//! forward      queries of head h                  keys and values of head h / group
//! dq           queries and dout of head h         keys and values of head h / group
//! dkdv         keys and values of head kv         query heads kv group .. kv group + group: queries and dout of each
//! ```
//! So dK and dV of a key-value head are summed over its group in the registers of one block, in the order of the heads.
//!
//! # Backward pass
//!
//! The backward pass is deterministic: there are no atomics, and each block accumulates its gradients in registers.
//! With P the probabilities, recomputed from lse, D = rowsum(dout ∘ out) and dS = P ∘ (dout Vᵀ - D): dV = Pᵀ dout, dK =
//! dSᵀ Q / sqrt(HS), dQ = dS K / sqrt(HS). Three kernels compute D, then dK and dV, then dQ.
//!
//! NaN and infinity do not spread to other groups of heads or sequences, nor from one query head to another. Masked positions do not affect the result, with one
//! exception. Since 0 times NaN is NaN, a NaN in V (for dQ also in K; for dK and dV in Q and dout) also spreads to
//! positions of its tile, at most 128, that do not attend to it. An infinite score may make its whole row NaN.
//!
//! Cost, with P = B NH T^2 / 2 pairs of a query and a key that it attends to:
//! * Forward: 4 HS P FLOP (two matmuls) and P exponentials. DRAM traffic is 4 B T C elements if K and V stay in L2. L2
//!   supplies them again for each tile of queries: P HS / ROWS elements for each of K and V.
//! * Backward: 14 HS P FLOP (four matmuls for dK and dV, three for dQ) and 2 P exponentials. 10 HS P FLOP count as
//!   useful; the others recompute the scores in the second kernel, which replaces non-deterministic atomics.
//! * Shared memory: a warp reads each right operand once for its R / 4 rows, 2 HS bytes (bf16) per key and matmul. With
//!   16 rows that is 1 byte per 8 multiply-adds, so 128 bytes per clock feed 1024 of them; with 32 rows, 2048. A left operand that is not
//!   kept in registers is read for each tile, too.
//!
//! `tiles` copies and multiplies tiles. `visibility` has the bounds of documents and windows. `mask` and `softmax` process scores. `forward`, `dot`, `dkdv` and `dq`
//! hold the kernels. `launch` (host only) selects the instance for a shape.

mod dkdv;
mod dot;
mod dq;
mod forward;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod softmax;
mod tiles;
pub mod visibility;

pub use dkdv::attention_backward_dkdv;
pub use dot::attention_backward_dot;
pub use dq::attention_backward_dq;
pub use forward::attention_forward;

use cuda_std::{device, thread};
use tiles::Rows;

/// The query head that a block processes, with the sizes that locate its rows in the tensors.
#[derive(Clone, Copy)]
struct Head {
    /// Index in the batch.
    b: usize,
    /// Index of the query head.
    h: usize,
    /// Index of the key-value head that the query head reads.
    kv_index: usize,
    t: usize,
    nh: usize,
    kv: usize,
    hs: usize,
}

#[device]
impl Head {
    /// Returns query head `block_idx_y` of sequence `block_idx_z`. Each of the `kv` key-value heads has `group` query
    /// heads.
    fn of_block(t: u32, kv: u32, group: u32, hs: usize) -> Self {
        let (b, h) = (thread::block_idx_z(), thread::block_idx_y());
        Self::new([b, h, h / group], [t, kv, group], hs)
    }

    /// Returns query head `member` of the group of key-value head `block_idx_y` of sequence `block_idx_z`.
    ///
    /// The indices are opaque. Otherwise the compiler computes addresses for all members at once, which then occupy
    /// registers in the loop over the tiles.
    fn of_group(member: u32, t: u32, kv: u32, group: u32, hs: usize) -> Self {
        let (b, kv_index) = (thread::opaque(thread::block_idx_z()), thread::opaque(thread::block_idx_y()));
        Self::new([b, kv_index * group + member, kv_index], [t, kv, group], hs)
    }

    fn new([b, h, kv_index]: [u32; 3], [t, kv, group]: [u32; 3], hs: usize) -> Self {
        let (b, h, kv_index) = (b as usize, h as usize, kv_index as usize);
        Self { b, h, kv_index, t: t as usize, nh: (kv * group) as usize, kv: kv as usize, hs }
    }

    /// Returns the rows of Q.
    fn query(self) -> Rows {
        self.packed(self.h)
    }

    /// Returns the rows of K.
    fn key(self) -> Rows {
        self.packed(self.nh + self.kv_index)
    }

    /// Returns the rows of V.
    fn value(self) -> Rows {
        self.packed(self.nh + self.kv + self.kv_index)
    }

    /// Returns the rows of head `index` of the NH + 2 KV heads of qkv (B,T,NH+2KV,HS).
    fn packed(self, index: usize) -> Rows {
        let stride = (self.nh + 2 * self.kv) * self.hs;
        Rows { offset: self.b * self.t * stride + index * self.hs, stride, count: self.t }
    }

    /// Returns the rows in (B,T,NH,HS).
    fn plain(self) -> Rows {
        let stride = self.nh * self.hs;
        Rows { offset: self.b * self.t * stride + self.h * self.hs, stride, count: self.t }
    }

    /// Returns the index of the first element in (B,NH,T).
    fn statistics(self) -> usize {
        (self.b * self.nh + self.h) * self.t
    }
}
