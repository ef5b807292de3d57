//! Causal self-attention that never stores T x T, on the tensor cores (`mma.sync`), forward and backward.
//!
//! From qkv (B,T,3,NH,HS), read in place, to out (B,T,NH,HS) and back; head sizes 64, 80, 96, 128, any T. `lse` (B,NH,T)
//! is the natural log-sum-exp of a query's scaled scores. Rows past the end of a sequence are read as zeros: as keys they
//! lie above the diagonal, as queries they are not stored, or their probabilities are made zero.
//!
//! NaN and infinity stay in their head and sequence, and what the mask hides has no influence, with one exception: as 0
//! times NaN is NaN, such a V (for dQ also K; for dK and dV, Q and dout) spoils positions that it is hidden from if they
//! are in its tile, of 128 positions at most. A position that sees it is spoilt in any case. An infinite score may make its
//! row NaN even where other keys would leave it finite.
//!
//! With P = B NH T^2 / 2 pairs of a query and a key it sees:
//! * forward: 4 HS P FLOP (two products), P exponentials; memory 4 B T C elements if K and V stay in L2, which gives
//!   them again to each tile of queries: P HS / ROWS elements for K and as many for V.
//! * backward: 14 HS P FLOP (four products by keys, three by queries; 10 HS P are counted as useful, the rest makes the
//!   scores a second time instead of adding to memory in an order that varies), 2 P exponentials.
//! * shared memory: a warp reads each right operand once for its R / 4 rows, 2 HS bytes a key (bf16) and product: with 16
//!   rows 1 byte for 8 multiply-adds, so that 128 bytes a clock feed 1024 of them; with 32 rows twice that.
//!
//! Roles: `tiles` moves tiles and multiplies them, `mask` and `softmax` treat scores, `forward` and `backward` are the
//! kernels, `launch` (host) says which instance takes which shape.

mod backward;
mod forward;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mask;
mod softmax;
mod tiles;

pub use backward::{attention_backward_dot, attention_backward_keys, attention_backward_queries};
pub use forward::attention_forward;

use cuda_std::thread;
use tiles::Rows;

/// Places of Q, K and V in qkv (B,T,3,NH,HS).
const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;

/// The head a block works on, and where its rows lie.
#[derive(Clone, Copy)]
struct Head {
    b: usize,
    h: usize,
    t: usize,
    nh: usize,
    hs: usize,
}

impl Head {
    /// Head `block_idx_y` of batch row `block_idx_z`.
    #[inline(always)]
    fn of_block(t: u32, nh: u32, hs: usize) -> Self {
        let (b, h) = (thread::block_idx_z() as usize, thread::block_idx_y() as usize);
        Self { b, h, t: t as usize, nh: nh as usize, hs }
    }

    /// Its rows of Q, K or V in (B,T,3,NH,HS).
    #[inline(always)]
    fn packed(self, part: usize) -> Rows {
        let stride = 3 * self.nh * self.hs;
        let offset = self.b * self.t * stride + (part * self.nh + self.h) * self.hs;
        Rows { offset, stride, count: self.t }
    }

    /// Its rows in (B,T,NH,HS).
    #[inline(always)]
    fn plain(self) -> Rows {
        let stride = self.nh * self.hs;
        Rows { offset: self.b * self.t * stride + self.h * self.hs, stride, count: self.t }
    }

    /// Its first element in (B,NH,T).
    #[inline(always)]
    fn statistics(self) -> usize {
        (self.b * self.nh + self.h) * self.t
    }
}
