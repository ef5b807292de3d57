//! Conversions between f32 and the storage type, for n elements. Any n is allowed. Both arrays are 16-byte aligned.

use crate::float4::Float4Tile;
pub use crate::float4::grid;
use cuda_std::{Element, Global, GlobalMut, kernel};

/// Converts inp (n) to out (n), exactly. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_to_f32<T: Element>(out: GlobalMut<f32>, inp: Global<T>, n: u64) {
    let store_four = |i, [x]: [_; 1]| out.set_four(i, x);
    Float4Tile::<T>::of_thread().process(n as usize, |i| [inp.four(i)], store_four, |i| out.set(i, inp.at(i).to_f32()));
}

/// Converts inp (n) to out (n), rounded to nearest even. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_from_f32<T: Element>(out: GlobalMut<T>, inp: Global<f32>, n: u64) {
    let store_four = |i, [x]: [_; 1]| out.set_four(i, x);
    Float4Tile::<T>::of_thread().process(
        n as usize,
        |i| [inp.four(i)],
        store_four,
        |i| out.set(i, T::from_f32(inp.at(i))),
    );
}
