//! AdamW, version 2: four parameters for each thread.
//!
//! Problem: as in version 1. n is a multiple of 4.
//! Idea: 16-byte accesses. All four loads are issued before the first store: the compiler must assume that a store changes what
//! a later load reads, so it does not move loads above stores.
//! Limit: memory bandwidth, which the four loads of version 1 almost reach. The parameters and their gradients could be smaller.

use super::Constants;
use cuda_std::{Global, GlobalMut, kernel, thread};

/// Updates n parameters. Grid: n / 1024, rounded up.
#[kernel(threads = 256)]
pub fn adamw_packets(
    params: GlobalMut<f32>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<f32>,
    constants: Constants,
    n: u64,
) {
    let i = 4 * thread::index_1d();
    if i >= n as usize {
        return;
    }
    let (grad, old_m, old_v, old) = (grads.four(i), m.four(i), v.four(i), params.four(i));
    let (mut new_m, mut new_v, mut new) = ([0.0; 4], [0.0; 4], [0.0; 4]);
    for k in 0..4 {
        [new_m[k], new_v[k], new[k]] = constants.update(grad[k], old_m[k], old_v[k], old[k]);
    }
    m.set_four(i, new_m);
    v.set_four(i, new_v);
    params.set_four(i, new);
}
