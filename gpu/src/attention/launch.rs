//! Host side: the instance of each kernel that a storage type and head size take, with its grid and shared memory.

use super::backward::{DOT_ROWS, keys_shared_bytes, queries_shared_bytes};
use super::forward::forward_shared_bytes;
use super::{attention_backward_dot, attention_backward_keys, attention_backward_queries, attention_forward};
use crate::launch::KernelLaunch;
use cuda_std::mma::TensorCore;
use cuda_std::{Global, GlobalMut};

/// Head sizes that the kernels are instantiated for.
pub const HEAD_SIZES: [usize; 4] = [64, 80, 96, 128];

/// Batch rows B, sequence length T, heads NH, and channels of a head HS (one of [`HEAD_SIZES`]).
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub b: usize,
    pub t: usize,
    pub nh: usize,
    pub hs: usize,
}

impl Shape {
    /// One block per `rows` positions of each head.
    fn grid(self, rows: usize) -> [u32; 3] {
        [self.t.div_ceil(rows) as u32, self.nh as u32, self.b as u32]
    }
}

/// The instance of `$kernel` for `T` and the shape's head size, by the tile sizes (own rows, other side's rows) that
/// `#[kernel]` lists for it: head size => bf16's, f32's. `None` for other head sizes.
macro_rules! instance {
    ($kernel:ident $arguments:tt, $shared_bytes:ident, $shape:expr;
     $($hs:literal => ($rows:literal, $columns:literal), ($rows_f32:literal, $columns_f32:literal);)*) => {
        match (size_of::<T>(), $shape.hs) {
            $(
                (2, $hs) => Some(KernelLaunch {
                    launch: $kernel::<T, $hs, $rows, $columns> $arguments,
                    grid: $shape.grid($rows),
                    shared_bytes: $shared_bytes::<T, $hs, $rows, $columns>(),
                }),
                (4, $hs) => Some(KernelLaunch {
                    launch: $kernel::<T, $hs, $rows_f32, $columns_f32> $arguments,
                    grid: $shape.grid($rows_f32),
                    shared_bytes: $shared_bytes::<T, $hs, $rows_f32, $columns_f32>(),
                }),
            )*
            _ => None,
        }
    };
}

/// out (B,T,NH,HS) and lse (B,NH,T) from qkv (B,T,3,NH,HS). `None` if the head size is not one of [`HEAD_SIZES`].
pub fn forward<T: TensorCore>(
    out: GlobalMut<T>,
    lse: GlobalMut<f32>,
    qkv: Global<T>,
    shape: Shape,
) -> Option<KernelLaunch> {
    let (t, nh) = (shape.t as u32, shape.nh as u32);
    instance! {
        attention_forward(out, lse, qkv, t, nh), forward_shared_bytes, shape;
        64 => (128, 64), (64, 32);
        80 => (64, 32), (64, 32);
        96 => (64, 64), (64, 32);
        128 => (64, 32), (64, 32);
    }
}

/// d (B,NH,T) = rowsum(dout ∘ out), of (B,T,NH,HS).
pub fn backward_dot<T: TensorCore>(d: GlobalMut<f32>, dout: Global<T>, out: Global<T>, shape: Shape) -> KernelLaunch {
    KernelLaunch {
        launch: attention_backward_dot::<T>(d, dout, out, shape.t as u32, shape.nh as u32, shape.hs as u32),
        grid: shape.grid(DOT_ROWS),
        shared_bytes: 0,
    }
}

/// dqkv (B,T,3,NH,HS) from dout and out (B,T,NH,HS), qkv (B,T,3,NH,HS) and lse (B,NH,T); `d` (B,NH,T) is scratch.
/// Three kernels, to run in this order. `None` if the head size is not one of [`HEAD_SIZES`].
pub fn backward<T: TensorCore>(
    dqkv: GlobalMut<T>,
    d: GlobalMut<f32>,
    dout: Global<T>,
    qkv: Global<T>,
    out: Global<T>,
    lse: Global<f32>,
    shape: Shape,
) -> Option<[KernelLaunch; 3]> {
    let (t, nh) = (shape.t as u32, shape.nh as u32);
    let dot = backward_dot(d, dout, out, shape);
    let d = d.reader();
    let keys = instance! {
        attention_backward_keys(dqkv, dout, qkv, lse, d, t, nh), keys_shared_bytes, shape;
        64 => (64, 32), (64, 32);
        80 => (64, 64), (64, 32);
        96 => (64, 64), (64, 16);
        128 => (64, 32), (64, 16);
    }?;
    let queries = instance! {
        attention_backward_queries(dqkv, dout, qkv, lse, d, t, nh), queries_shared_bytes, shape;
        64 => (64, 64), (64, 32);
        80 => (64, 64), (64, 32);
        96 => (64, 64), (64, 16);
        128 => (64, 32), (64, 16);
    }?;
    Some([dot, keys, queries])
}
