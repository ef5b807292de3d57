//! Causal self-attention: out (B, T, NH, HS) = softmax(Q Kᵀ / sqrt(HS) + causal mask) V, with HS = 64.
//!
//! Q, K and V are the parts of qkv (B, T, 3, NH, HS). The forward pass also computes lse (B, NH, T) f32, the natural log-sum-exp of
//! the scaled scores of each query, from which the backward pass recomputes the probabilities.

pub mod mma;
pub mod online;
pub mod shared;
pub mod unfused;

/// HS, the head size.
pub const HS: usize = 64;

/// 1 / sqrt(HS).
pub const SCALE: f32 = 0.125;

/// The sizes of the problem. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// B.
    pub batch: u32,
    /// T.
    pub sequence: u32,
    /// NH.
    pub heads: u32,
}

/// A head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Head {
    b: usize,
    h: usize,
    pub t: usize,
    heads: usize,
}

impl Head {
    /// Returns head `index` of the B NH heads of all sequences.
    #[inline(always)]
    pub fn new(index: usize, sizes: Sizes) -> Self {
        let (t, heads) = (sizes.sequence as usize, sizes.heads as usize);
        Self { b: index / heads, h: index % heads, t, heads }
    }

    /// Returns the index of the first element of row `t` of Q (`part` 0), K (1) or V (2) in qkv.
    #[inline(always)]
    pub fn qkv(self, part: usize, t: usize) -> usize {
        (((self.b * self.t + t) * 3 + part) * self.heads + self.h) * HS
    }

    /// Returns the index of the first element of row `t` in (B, T, NH, HS).
    #[inline(always)]
    pub fn out(self, t: usize) -> usize {
        ((self.b * self.t + t) * self.heads + self.h) * HS
    }

    /// Returns the index of position `t` in (B, NH, T).
    #[inline(always)]
    pub fn statistics(self, t: usize) -> usize {
        (self.b * self.heads + self.h) * self.t + t
    }
}
