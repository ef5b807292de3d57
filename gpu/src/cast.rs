//! Conversions between f32 and the storage type, for n elements. Any n is allowed. Both arrays are 16-byte aligned.

use crate::float4::Float4Tile;
pub use crate::float4::grid;
use cuda_std::{Element, Global, GlobalMut, kernel};

/// Converts inp (n) to out (n), exactly. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_to_f32<T: Element>(out: GlobalMut<f32>, inp: Global<T>, n: u64) {
    let (tile, n) = (Float4Tile::<T>::of_thread(), n as usize);
    if tile.is_full(n) {
        let mut x = [[0.0; 4]; 2];
        for k in 0..Float4Tile::<T>::VECTORS {
            x[k] = inp.four(tile.vector(k));
        }
        for k in 0..Float4Tile::<T>::VECTORS {
            out.set_four(tile.vector(k), x[k]);
        }
    } else {
        for i in tile.tail(n) {
            out.set(i, inp.at(i).to_f32());
        }
    }
}

/// Converts inp (n) to out (n), rounded to nearest even. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_from_f32<T: Element>(out: GlobalMut<T>, inp: Global<f32>, n: u64) {
    let (tile, n) = (Float4Tile::<T>::of_thread(), n as usize);
    if tile.is_full(n) {
        let mut x = [[0.0; 4]; 2];
        for k in 0..Float4Tile::<T>::VECTORS {
            x[k] = inp.four(tile.vector(k));
        }
        for k in 0..Float4Tile::<T>::VECTORS {
            out.set_four(tile.vector(k), x[k]);
        }
    } else {
        for i in tile.tail(n) {
            out.set(i, T::from_f32(inp.at(i)));
        }
    }
}
