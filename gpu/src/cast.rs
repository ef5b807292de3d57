//! Conversions between f32 and the storage type, n elements, any n. Both arrays are 16-byte aligned.

use crate::fours::Fours;
pub use crate::fours::grid;
use cuda_std::{Element, Global, GlobalMut, kernel};

/// out (n) = inp (n), exactly. Grid [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_to_f32<T: Element>(out: GlobalMut<f32>, inp: Global<T>, n: u64) {
    let (block, n) = (Fours::<T>::of_thread(), n as usize);
    if block.is_whole(n) {
        let mut x = [[0.0; 4]; 2];
        for part in 0..Fours::<T>::PARTS {
            x[part] = inp.four(block.first(part));
        }
        for part in 0..Fours::<T>::PARTS {
            out.set_four(block.first(part), x[part]);
        }
    } else {
        for i in block.rest(n) {
            out.set(i, inp.at(i).to_f32());
        }
    }
}

/// out (n) = inp (n), rounded to nearest. Grid [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_from_f32<T: Element>(out: GlobalMut<T>, inp: Global<f32>, n: u64) {
    let (block, n) = (Fours::<T>::of_thread(), n as usize);
    if block.is_whole(n) {
        let mut x = [[0.0; 4]; 2];
        for part in 0..Fours::<T>::PARTS {
            x[part] = inp.four(block.first(part));
        }
        for part in 0..Fours::<T>::PARTS {
            out.set_four(block.first(part), x[part]);
        }
    } else {
        for i in block.rest(n) {
            out.set(i, T::from_f32(inp.at(i)));
        }
    }
}
