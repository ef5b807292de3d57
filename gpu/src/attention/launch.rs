//! Host side: selects the kernel instance for a storage type and head size, with its grid and shared memory.

use super::dkdv::dkdv_shared_bytes;
use super::dot::DOT_ROWS;
use super::dq::dq_shared_bytes;
use super::forward::forward_shared_bytes;
use super::{attention_backward_dkdv, attention_backward_dot, attention_backward_dq, attention_forward};
use crate::launch::KernelLaunch;
use cuda_std::mma::TensorCore;
use cuda_std::{Global, GlobalMut};

/// Head sizes that the kernels are instantiated for.
pub const HEAD_SIZES: [usize; 4] = [64, 80, 96, 128];

/// The shape of an attention operation.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
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

impl Shape {
    /// Returns the number of query heads of a key-value head.
    pub(crate) fn group(self) -> usize {
        self.nh / self.kv
    }

    /// Returns the grid with one block per `rows` positions of each of `heads` heads.
    fn grid(self, rows: usize, heads: usize) -> [u32; 3] {
        [self.t.div_ceil(rows) as u32, heads as u32, self.b as u32]
    }
}

/// Selects the instance of `$kernel` for `T` and the head size of the shape, or `None` for other head sizes.
///
/// The table maps each head size to the tile sizes of bf16, then of f32: (rows that the block owns, rows of a tile that
/// it iterates over). They must match the instances in the `#[kernel]` attribute. A block owns rows of one of `$heads`
/// heads.
macro_rules! instance {
    ($kernel:ident $arguments:tt, $shared_bytes:ident, $shape:expr, $heads:expr;
     $($hs:literal => ($rows:literal, $columns:literal), ($rows_f32:literal, $columns_f32:literal);)*) => {
        match (size_of::<T>(), $shape.hs) {
            $(
                (2, $hs) => Some(KernelLaunch {
                    launch: $kernel::<T, $hs, $rows, $columns> $arguments,
                    grid: $shape.grid($rows, $heads),
                    shared_bytes: $shared_bytes::<T, $hs, $rows, $columns>(),
                }),
                (4, $hs) => Some(KernelLaunch {
                    launch: $kernel::<T, $hs, $rows_f32, $columns_f32> $arguments,
                    grid: $shape.grid($rows_f32, $heads),
                    shared_bytes: $shared_bytes::<T, $hs, $rows_f32, $columns_f32>(),
                }),
            )*
            _ => None,
        }
    };
}

/// Returns the forward kernel, which computes out (B,T,NH,HS) and lse (B,NH,T) from qkv (B,T,NH+2KV,HS).
///
/// `None` if the head size is not one of [`HEAD_SIZES`].
pub fn forward<T: TensorCore>(
    out: GlobalMut<T>,
    lse: GlobalMut<f32>,
    qkv: Global<T>,
    shape: Shape,
) -> Option<KernelLaunch> {
    let (t, kv, group) = (shape.t as u32, shape.kv as u32, shape.group() as u32);
    instance! {
        attention_forward(out, lse, qkv, t, kv, group), forward_shared_bytes, shape, shape.nh;
        64 => (128, 64), (64, 32);
        80 => (64, 32), (64, 32);
        96 => (64, 64), (64, 32);
        128 => (64, 32), (64, 32);
    }
}

/// Returns the kernel that computes d (B,NH,T) = rowsum(dout ∘ out) from dout and out (B,T,NH,HS).
pub fn backward_dot<T: TensorCore>(d: GlobalMut<f32>, dout: Global<T>, out: Global<T>, shape: Shape) -> KernelLaunch {
    KernelLaunch {
        launch: attention_backward_dot::<T>(d, dout, out, shape.t as u32, shape.nh as u32, shape.hs as u32),
        grid: shape.grid(DOT_ROWS, shape.nh),
        shared_bytes: 0,
    }
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
    shape: Shape,
) -> Option<[KernelLaunch; 3]> {
    let (t, kv, group) = (shape.t as u32, shape.kv as u32, shape.group() as u32);
    let dot = backward_dot(d, dout, out, shape);
    let d = d.reader();
    let dkdv = instance! {
        attention_backward_dkdv(dqkv, dout, qkv, lse, d, t, kv, group), dkdv_shared_bytes, shape, shape.kv;
        64 => (64, 32), (64, 32);
        80 => (64, 64), (64, 32);
        96 => (64, 64), (64, 16);
        128 => (64, 32), (64, 16);
    }?;
    let dq = instance! {
        attention_backward_dq(dqkv, dout, qkv, lse, d, t, kv, group), dq_shared_bytes, shape, shape.nh;
        64 => (64, 64), (64, 32);
        80 => (64, 64), (64, 32);
        96 => (64, 64), (64, 16);
        128 => (64, 32), (64, 16);
    }?;
    Some([dot, dkdv, dq])
}
