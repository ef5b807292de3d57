//! Causal self-attention that never stores T x T, on the tensor cores (`mma.sync`), forward and backward.

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
