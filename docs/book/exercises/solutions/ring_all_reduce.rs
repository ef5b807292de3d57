//! Exercise: ring all-reduce.
//!
//! Each rank is a vector. In one step, every rank sends one chunk to the next rank of the ring. `reduce_scatter` is given: afterwards
//! rank r has the complete sum in chunk r. Write `chunk` for any number of elements, and `all_gather`, which passes the complete chunks
//! around the ring. The chapter "Data parallelism" has the steps.

use std::ops::Range;

/// Returns the range of chunk `c` of `n` chunks of `len` elements. The chunks are in order, cover all elements once, and the first ones
/// have ceil(len / n) elements. The last ones may be shorter or empty.
pub fn chunk(len: usize, n: usize, c: usize) -> Range<usize> {
    let size = len.div_ceil(n);
    len.min(c * size)..len.min((c + 1) * size)
}

/// Sums the values of all ranks: rank r then has the complete sum of chunk r. Returns the number of elements that each rank has sent.
pub fn reduce_scatter(ranks: &mut [Vec<f32>]) -> Vec<usize> {
    let (n, len) = (ranks.len(), ranks[0].len());
    let mut sent = vec![0; n];
    for step in 0..n - 1 {
        let sends = |r: usize| chunk(len, n, (r + 2 * n - 1 - step) % n);
        let messages: Vec<Vec<f32>> = (0..n).map(|r| ranks[r][sends(r)].to_vec()).collect();
        for (from, message) in messages.iter().enumerate() {
            sent[from] += message.len();
            for (own, received) in ranks[(from + 1) % n][sends(from)].iter_mut().zip(message) {
                *own += received;
            }
        }
    }
    sent
}

/// Copies the complete chunk r of each rank r to all ranks, in n - 1 steps in which each rank sends one chunk to the next rank. Returns the
/// number of elements that each rank has sent.
pub fn all_gather(ranks: &mut [Vec<f32>]) -> Vec<usize> {
    let (n, len) = (ranks.len(), ranks[0].len());
    let mut sent = vec![0; n];
    for step in 0..n - 1 {
        let sends = |r: usize| chunk(len, n, (r + n - step) % n);
        let messages: Vec<Vec<f32>> = (0..n).map(|r| ranks[r][sends(r)].to_vec()).collect();
        for (from, message) in messages.iter().enumerate() {
            sent[from] += message.len();
            ranks[(from + 1) % n][sends(from)].copy_from_slice(message);
        }
    }
    sent
}

/// Leaves the sums of all ranks' values on all ranks. Returns the number of elements that each rank has sent.
pub fn all_reduce(ranks: &mut [Vec<f32>]) -> Vec<usize> {
    let mut sent = reduce_scatter(ranks);
    for (sent, more) in sent.iter_mut().zip(all_gather(ranks)) {
        *sent += more;
    }
    sent
}
