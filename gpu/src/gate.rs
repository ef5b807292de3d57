//! The backward pass of gates, `gate[row, h] = σ(weight[h] · x[row, ..G])`: sigmoids of linear functions of the first G channels of
//! each row.
//!
//! The kernels of an operation with gates compute dgates (rows, H) f32, the gradients of the sums before the sigmoid. From them, the
//! kernels here compute the gradients of weight (H, G) and of x, for any G up to the number of channels (C).

use crate::column_sum;
use cuda_std::{Element, Global, GlobalMut, kernel, math, thread};

/// Threads of a block.
const THREADS: usize = 256;
/// Blocks of [`gate_weight_backward`] per SM.
const BLOCKS_PER_SM: usize = 4;
/// Minimum rows of a chunk: those that a block loads at a time.
const MIN_CHUNK: usize = 64;

/// The sizes of the gates. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// Rows.
    pub rows: u32,
    /// H.
    pub heads: u32,
    /// C.
    pub channels: u32,
    /// G.
    pub gate_channels: u32,
}

impl Sizes {
    /// Returns the number of weights.
    pub const fn weights(self) -> usize {
        self.heads as usize * self.gate_channels as usize
    }
}

/// Returns the maximum number of chunks, which is lower for many weights.
fn max_chunks(weights: usize, sm_count: usize) -> usize {
    (sm_count * BLOCKS_PER_SM / column_sum::grid(weights).max(1) as usize).max(1)
}

/// Returns the number of rows of a chunk. Each block of [`gate_weight_backward`] sums the rows of one chunk.
pub fn chunk_rows(rows: usize, weights: usize, sm_count: usize) -> usize {
    rows.div_ceil(max_chunks(weights, sm_count)).max(MIN_CHUNK)
}

/// Returns the number of f32 elements of the partial sums of [`gate_weight_backward`].
pub fn partials(rows: usize, weights: usize, sm_count: usize) -> usize {
    rows.div_ceil(chunk_rows(rows, weights, sm_count)) * weights
}

/// Returns an upper bound of [`partials`] for any number of rows and at most `max_weights` weights.
pub fn max_partials(max_weights: usize, sm_count: usize) -> usize {
    max_weights.max(sm_count * BLOCKS_PER_SM * 32)
}

/// Computes partials (chunks, H, G) f32: the gradient of the weight from each chunk of rows.
///
/// x is inp (rows, C) · rstd (rows) · `norm_weight` (C), where the last two may be null, which means ones. `chunk_rows` is that of
/// [`chunk_rows`]. [`bias_backward_reduce`](crate::bias::bias_backward_reduce) sums the chunks. Grid: ([`column_sum::grid`] of H · G,
/// chunks). Shared memory: [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gate_weight_backward<T: Element>(
    partials: GlobalMut<f32>,
    dgates: Global<f32>,
    inp: Global<T>,
    rstd: Global<f32>,
    norm_weight: Global<T>,
    sizes: Sizes,
    chunk_rows: u32,
) {
    let (heads, channels) = (sizes.heads as usize, sizes.channels as usize);
    let gate_channels = (sizes.gate_channels as usize).max(1);
    let chunk = thread::block_idx_y();
    let begin = chunk * chunk_rows;
    let rows = (sizes.rows - begin).min(chunk_rows);
    let products = |column: usize| {
        // In 32 bits, and once per thread, because a division takes many instructions.
        let (head, channel) = (column as u32 / gate_channels as u32, column as u32 % gate_channels as u32);
        let (dgates, inp) = (dgates.skip(head as usize), inp.skip(channel as usize));
        move |row: usize| {
            let row = begin as usize + row;
            let rstd = if rstd.is_null() { 1.0 } else { rstd.at(row) };
            dgates.at(row * heads) * (inp.at(row * channels).to_f32() * rstd)
        }
    };
    let weights = heads * gate_channels;
    if let Some((column, sum)) = column_sum::sum_rows(rows as usize, weights, products) {
        let factor = if norm_weight.is_null() { 1.0 } else { norm_weight.at(column % gate_channels).to_f32() };
        partials.set(chunk as usize * weights + column, sum * factor);
    }
}

/// Returns the grid size of [`gate_input_backward`], one thread per row and gate channel.
pub const fn input_grid(rows: usize, gate_channels: usize) -> u32 {
    (rows * gate_channels).div_ceil(THREADS) as u32
}

/// Adds the gradient of x to the first G channels of dinp (rows, C): the sum of dgates (rows, H) · weight (H, G) over H.
///
/// rows · G is below 2^32. Grid: [`input_grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gate_input_backward<T: Element>(dinp: GlobalMut<T>, dgates: Global<f32>, weight: Global<T>, sizes: Sizes) {
    let (heads, gate_channels) = (sizes.heads as usize, sizes.gate_channels.max(1));
    let index = thread::index_1d() as u32;
    let (row, channel) = ((index / gate_channels) as usize, (index % gate_channels) as usize);
    let gate_channels = gate_channels as usize;
    if row >= sizes.rows as usize {
        return;
    }
    let at = row * sizes.channels as usize + channel;
    let dgates = dgates.skip(row * heads);
    let mut sum = 0.0;
    let mut head = 0;
    while head < heads {
        sum = math::fma(dgates.at(head), weight.at(head * gate_channels + channel).to_f32(), sum);
        head += 1;
    }
    dinp.set(at, T::from_f32(dinp.at(at).to_f32() + sum));
}
