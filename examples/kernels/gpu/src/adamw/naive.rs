//! AdamW, version 1: one thread for each parameter.
//!
//! Problem: update params, m and v (n), given grads (n), all f32.
//! Idea: the update is elementwise, and one kernel does all of it. In a framework with one kernel per arithmetic operation,
//! each intermediate result would pass through memory.
//! Limit: memory bandwidth: 16 bytes read and 12 bytes written for each parameter.

use super::Constants;
use cuda_std::{Global, GlobalMut, kernel, thread};

/// Updates n parameters. Grid: n / 256, rounded up.
#[kernel(threads = 256)]
pub fn adamw_naive(
    params: GlobalMut<f32>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Global<f32>,
    constants: Constants,
    n: u64,
) {
    let i = thread::index_1d();
    if i < n as usize {
        let [new_m, new_v, param] = constants.update(grads.at(i), m.at(i), v.at(i), params.at(i));
        m.set(i, new_m);
        v.set(i, new_v);
        params.set(i, param);
    }
}
