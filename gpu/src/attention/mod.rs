//! Causal self-attention with `mma.sync` tensor core instructions, forward and backward, for sm_80 and later.
//!
//! The algorithm is FlashAttention-2 (Dao, 2023, arXiv:2307.08691): the T x T scores are never stored. The kernels read
//! qkv (B,T,3,NH,HS) in place and write out (B,T,NH,HS). Head sizes are 64, 80, 96 and 128; T is arbitrary. `lse`
//! (B,NH,T) is the natural log-sum-exp of each query's scaled scores. Rows past the end of a sequence are read as
//! zeros. As keys they are masked; as queries they are not stored, or their probabilities are set to zero.
//!
//! The backward pass is deterministic: there are no atomics, and each block accumulates its gradients in registers.
//! With P the probabilities, recomputed from lse, D = rowsum(dout ∘ out) and dS = P ∘ (dout Vᵀ - D): dV = Pᵀ dout, dK =
//! dSᵀ Q / sqrt(HS), dQ = dS K / sqrt(HS). Three kernels compute D, then dK and dV, then dQ.
//!
//! NaN and infinity do not spread to other heads or sequences. Masked positions do not affect the result, with one
//! exception. Since 0 times NaN is NaN, a NaN in V (for dQ also in K; for dK and dV in Q and dout) also spreads to
//! positions of its tile, at most 128, that do not attend to it. An infinite score may make its whole row NaN.
//!
//! Cost, with P = B NH T^2 / 2 pairs of a query and a key that it attends to:
//! * Forward: 4 HS P FLOP (two matmuls) and P exponentials. DRAM traffic is 4 B T C elements if K and V stay in L2. L2
//!   supplies them again for each tile of queries: P HS / ROWS elements for each of K and V.
//! * Backward: 14 HS P FLOP (four matmuls for dK and dV, three for dQ) and 2 P exponentials. 10 HS P FLOP count as
//!   useful; the others recompute the scores in the second kernel, which replaces non-deterministic atomics.
//! * Shared memory: a warp reads each right operand once for its R / 4 rows, 2 HS bytes (bf16) per key and matmul. With
//!   16 rows that is 1 byte per 8 multiply-adds, so 128 bytes per clock feed 1024 of them; with 32 rows, 2048.
//!
//! `tiles` copies and multiplies tiles. `mask` and `softmax` process scores. `forward`, `dot`, `dkdv` and `dq` hold the
//! kernels. `launch` (host only) selects the instance for a shape.

mod dkdv;
mod dot;
mod dq;
mod forward;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod softmax;
mod tiles;

pub use dkdv::attention_backward_dkdv;
pub use dot::attention_backward_dot;
pub use dq::attention_backward_dq;
pub use forward::attention_forward;

use cuda_std::thread;
use tiles::Rows;

/// Indices of Q, K and V in the third dimension of qkv (B,T,3,NH,HS).
const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;

/// The head that a block processes, with the shape that locates its rows in the tensors.
#[derive(Clone, Copy)]
struct Head {
    /// Index in the batch.
    b: usize,
    /// Index of the head.
    h: usize,
    t: usize,
    nh: usize,
    hs: usize,
}

impl Head {
    /// Returns head `block_idx_y` of sequence `block_idx_z`.
    #[inline(always)]
    fn of_block(t: u32, nh: u32, hs: usize) -> Self {
        let (b, h) = (thread::block_idx_z() as usize, thread::block_idx_y() as usize);
        Self { b, h, t: t as usize, nh: nh as usize, hs }
    }

    /// Returns the rows of Q, K or V in (B,T,3,NH,HS).
    #[inline(always)]
    fn packed(self, part: usize) -> Rows {
        let stride = 3 * self.nh * self.hs;
        let offset = self.b * self.t * stride + (part * self.nh + self.h) * self.hs;
        Rows { offset, stride, count: self.t }
    }

    /// Returns the rows in (B,T,NH,HS).
    #[inline(always)]
    fn plain(self) -> Rows {
        let stride = self.nh * self.hs;
        Rows { offset: self.b * self.t * stride + self.h * self.hs, stride, count: self.t }
    }

    /// Returns the index of the first element in (B,NH,T).
    #[inline(always)]
    fn statistics(self) -> usize {
        (self.b * self.nh + self.h) * self.t
    }
}
