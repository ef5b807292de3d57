//! Host side: selects the kernel instance for a storage type and head size, with its grid and shared memory.

use super::attention_backward_dot;
use super::dkdv::{attention_backward_dkdv_select, attention_backward_dkdv_values};
use super::dot::DOT_ROWS;
use super::dq::{attention_backward_dq_select, attention_backward_dq_values};
use super::forward::{attention_forward_select, attention_forward_values};
use crate::launch::KernelLaunch;
use cuda_std::launch::Launch;
use cuda_std::mma::TensorCore;
use cuda_std::{Global, GlobalMut};

/// Head sizes that the kernels are instantiated for.
pub const HEAD_SIZES: [usize; 4] = [64, 80, 96, 128];

/// The shape of an attention operation.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSizes {
    /// B, the batch size.
    pub b: usize,
    /// T, the sequence length.
    pub t: usize,
    /// NH, the number of query heads.
    pub nh: usize,
    /// KV, the number of key-value heads, a divisor of NH.
    pub kv: usize,
    /// HS, the head size, one of [`HEAD_SIZES`].
    pub hs: usize,
}

/// What hides keys from queries, besides the causal mask. The default hides nothing.
#[derive(Clone, Copy, Default)]
pub struct Mask {
    /// A query attends only to keys of its own document.
    pub documents: Option<Documents>,
    /// Number of keys that a query attends to at most, including its own position.
    pub window: Option<u32>,
}

/// The documents of a batch.
#[derive(Clone, Copy)]
pub struct Documents {
    /// The first position of the document at each position (B, T).
    pub first_keys: Global<u32>,
    /// The last position of the document at each position (B, T).
    pub last_queries: Global<u32>,
    /// The order in which the `sm_90a` kernels process the tiles of [`TILE`](crate::attention_wgmma::TILE) queries of each sequence
    /// (B, ceil(T / TILE)): those with the most keys first. It does not change results.
    pub query_tiles: Global<u32>,
    /// The same for tiles of keys: those with the most queries first.
    pub key_tiles: Global<u32>,
}

impl Mask {
    /// Returns true if nothing is hidden besides the causal mask.
    pub(crate) fn is_causal(self) -> bool {
        self.documents.is_none() && self.window.is_none()
    }

    /// Returns the arrays of the documents, which are null if there are none.
    pub(crate) fn documents(self) -> Documents {
        let null = Global::null();
        let none = Documents { first_keys: null, last_queries: null, query_tiles: null, key_tiles: null };
        self.documents.unwrap_or(none)
    }

    /// Returns the kernels' argument `window`.
    pub(crate) fn window(self) -> u32 {
        self.window.unwrap_or(u32::MAX)
    }
}

impl AttentionSizes {
    /// Returns the kernels' arguments B, T, KV, and the number of query heads of a key-value head.
    pub(crate) fn arguments(self) -> [u32; 4] {
        [self.b, self.t, self.kv, self.nh / self.kv].map(|size| size as u32)
    }

    /// Returns the grid with one block per `rows` positions of each of `heads` heads.
    fn grid(self, rows: usize, heads: usize) -> [u32; 3] {
        [self.t.div_ceil(rows) as u32, heads as u32, self.b as u32]
    }

    /// Returns the launch of a kernel instance over `heads` heads, given its rows and shared memory.
    fn launch(
        self,
        launch: Option<Launch>,
        values: Option<(usize, fn() -> usize)>,
        heads: usize,
    ) -> Option<KernelLaunch> {
        let (rows, shared_bytes) = values?;
        Some(KernelLaunch { launch: launch?, grid: self.grid(rows, heads), shared_bytes: shared_bytes() })
    }
}

/// Returns the forward kernel, which computes out (B,T,NH,HS) and lse (B,NH,T) from qkv (B,T,NH+2KV,HS).
///
/// `None` if the head size is not one of [`HEAD_SIZES`].
pub fn forward<T: TensorCore>(
    out: GlobalMut<T>,
    lse: GlobalMut<f32>,
    qkv: Global<T>,
    shape: AttentionSizes,
    mask: Mask,
) -> Option<KernelLaunch> {
    let ([_, t, kv, group], first_keys) = (shape.arguments(), mask.documents().first_keys);
    let launch = attention_forward_select::<T>((shape.hs,), out, lse, qkv, t, kv, group, first_keys, mask.window());
    shape.launch(launch, attention_forward_values::<T>((shape.hs,)), shape.nh)
}

/// Returns the kernel that computes d (B,NH,T) = rowsum(dout ∘ out) from dout and out (B,T,NH,HS).
pub fn backward_dot<T: TensorCore>(
    d: GlobalMut<f32>,
    dout: Global<T>,
    out: Global<T>,
    shape: AttentionSizes,
) -> KernelLaunch {
    let launch = attention_backward_dot::<T>(d, dout, out, shape.t as u32, shape.nh as u32, shape.hs as u32);
    KernelLaunch { launch, grid: shape.grid(DOT_ROWS, shape.nh), shared_bytes: 0 }
}

/// Returns the three backward kernels in the order in which they must run.
///
/// They compute dqkv (B,T,NH+2KV,HS) from dout and out (B,T,NH,HS), qkv (B,T,NH+2KV,HS) and lse (B,NH,T); `d` (B,NH,T) is
/// scratch. `None` if the head size is not one of [`HEAD_SIZES`].
pub fn backward<T: TensorCore>(
    dqkv: GlobalMut<T>,
    d: GlobalMut<f32>,
    dout: Global<T>,
    qkv: Global<T>,
    out: Global<T>,
    lse: Global<f32>,
    (shape, mask): (AttentionSizes, Mask),
) -> Option<[KernelLaunch; 3]> {
    let ([_, t, kv, group], window) = (shape.arguments(), mask.window());
    let Documents { first_keys, last_queries, .. } = mask.documents();
    let dot = backward_dot(d, dout, out, shape);
    let d = d.reader();
    let key = (shape.hs,);
    let dkdv = attention_backward_dkdv_select::<T>(key, dqkv, dout, qkv, lse, d, t, kv, group, last_queries, window);
    let dkdv = shape.launch(dkdv, attention_backward_dkdv_values::<T>(key), shape.kv)?;
    let dq = attention_backward_dq_select::<T>((shape.hs,), dqkv, dout, qkv, lse, d, t, kv, group, first_keys, window);
    Some([dot, dkdv, shape.launch(dq, attention_backward_dq_values::<T>((shape.hs,)), shape.nh)?])
}
