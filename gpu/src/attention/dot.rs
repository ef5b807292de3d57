//! The first kernel of the backward pass: D = rowsum(dout ∘ out), which the gradient of the scores subtracts.

use super::Head;
use super::tiles::THREADS;
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Lanes that reduce one row of [`attention_backward_dot`].
const LANES_PER_ROW: usize = 8;
/// Rows of a block of [`attention_backward_dot`].
pub(super) const DOT_ROWS: usize = THREADS / LANES_PER_ROW;

/// Computes d (B,NH,T) = rowsum(dout ∘ out) from dout and out (B,T,NH,HS). Grid: (tiles of 16 rows, NH, B).
#[kernel(threads = 128, instances(bf16 = <bf16>, f32 = <f32>))]
pub fn attention_backward_dot<T: Element>(
    d: GlobalMut<f32>,
    dout: Global<T>,
    out: Global<T>,
    t: u32,
    nh: u32,
    hs: u32,
) {
    // out and dout have no key-value heads.
    let head = Head::of_block(t, nh, 1, hs as usize);
    let thread = thread::thread_idx_x() as usize;
    let row = thread::block_idx_x() as usize * DOT_ROWS + thread / LANES_PER_ROW;
    let mut sum = 0.0;
    if row < head.t {
        let first = head.plain().element(row);
        for col in (thread % LANES_PER_ROW * T::PACKET..head.hs).step_by(LANES_PER_ROW * T::PACKET) {
            let (a, b) = (dout.packet_streaming(first + col), out.packet_streaming(first + col));
            for i in 0..T::PACKET {
                sum = math::fma(a.get(i), b.get(i), sum);
            }
        }
    }
    for mask in [1, 2, 4] {
        sum += warp::shuffle_xor(sum, mask);
    }
    if row < head.t && thread.is_multiple_of(LANES_PER_ROW) {
        d.set(head.statistics() + row, sum);
    }
}
