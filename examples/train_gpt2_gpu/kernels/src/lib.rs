//! The kernels of `train_gpt2_gpu`: everything in a training step of GPT-2 that is not a GEMM, in fp32.
//!
//! Letters in shapes: B sequences, T tokens of a sequence, C channels, NH heads of HS = C / NH channels, V tokens of the vocabulary,
//! Vp padded V. Every tensor is a row-major array that starts at a multiple of 16 bytes: (B, T, C) has C next to each other.
//!
//! Invariants:
//! - The kernels are correct for all sizes. Four neighboring elements are one access of 16 bytes if they are aligned.
//! - A sum has a fixed order, so a launch always computes the same bits. There are no atomics.
//! - Gradients of parameters are added (`+=`) to what is there. Gradients of activations are overwritten, except for that of the
//!   residual stream.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, block, device, kernel, math, thread, warp};

/// Threads per block of all kernels but [`classifier`].
pub const THREADS: usize = 256;
/// Warps of such a block. Kernels that work on rows give each warp a row.
pub const WARPS: usize = 8;
/// Rows that a block of [`column_sums`] and [`layernorm_backward_params`] sums.
pub const CHUNK: usize = 128;
/// Columns that such a block sums: one for each lane of a warp.
pub const COLUMNS: usize = 32;

// ---------------------------------------------------------------------------------------------------------------------------------
// Access to four neighboring elements

/// Reads elements `i` to `i` + 3. Elements from `end` on are not read; they are `missing`.
#[inline(always)]
#[track_caller]
fn load4_or(x: Global<f32>, i: usize, end: usize, missing: f32) -> [f32; 4] {
    if i.is_multiple_of(4) && i + 4 <= end {
        return x.four(i);
    }
    let mut four = [missing; 4];
    for k in 0..4 {
        if i + k < end {
            four[k] = x.at(i + k);
        }
    }
    four
}

/// Reads elements `i` to `i` + 3. Elements from `end` on are 0.
#[inline(always)]
#[track_caller]
fn load4(x: Global<f32>, i: usize, end: usize) -> [f32; 4] {
    load4_or(x, i, end, 0.0)
}

/// Writes those of the elements `i` to `i` + 3 that are below `end`.
#[inline(always)]
#[track_caller]
fn store4(x: GlobalMut<f32>, i: usize, end: usize, four: [f32; 4]) {
    if i.is_multiple_of(4) && i + 4 <= end {
        x.set_four(i, four);
        return;
    }
    for k in 0..4 {
        if i + k < end {
            x.set(i + k, four[k]);
        }
    }
}

/// Computes four elements from those of two vectors.
#[inline(always)]
fn map4(a: [f32; 4], b: [f32; 4], f: impl Fn(f32, f32) -> f32) -> [f32; 4] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

/// Returns the sum of four elements.
#[inline(always)]
fn sum4([a, b, c, d]: [f32; 4]) -> f32 {
    (a + b) + (c + d)
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Encoder

/// Computes out (B, T, C): `out[b, t] = wte[token[b, t]] + wpe[t]`, with wte (Vp, C) and wpe (maxT, C).
///
/// Each thread computes 4 channels. Threads: B T ceil(C / 4).
#[kernel(threads = 256)]
pub fn encoder_forward(
    out: GlobalMut<f32>,
    tokens: Global<u16>,
    wte: Global<f32>,
    wpe: Global<f32>,
    bt: u32,
    t: u32,
    c: u32,
) {
    let (i, fours) = (thread::index_1d() as u32, c.div_ceil(4));
    let (position, column) = (i / fours, (i % fours * 4) as usize);
    if position < bt {
        let c = c as usize;
        let (row, of_wpe) = (position as usize * c, (position % t) as usize * c);
        let of_wte = tokens.at(position as usize) as usize * c;
        let (a, b) = (load4(wte, of_wte + column, of_wte + c), load4(wpe, of_wpe + column, of_wpe + c));
        store4(out, row + column, row + c, map4(a, b, |a, b| a + b));
    }
}

/// Adds the gradient of wte: `dwte[token]` += the sum of `dout[b, t]` over the positions (b, t) of the token.
///
/// `order` (B T) contains all positions, sorted by token. `starts` contains the index in `order` of the first position of each distinct
/// token, and B T at the end. Each block adds 256 channels of one token. Grid: number of distinct tokens, ceil(C / 256).
#[kernel(threads = 256)]
pub fn wte_backward(
    dwte: GlobalMut<f32>,
    dout: Global<f32>,
    tokens: Global<u16>,
    order: Global<u32>,
    starts: Global<u32>,
    c: u32,
) {
    let (block, c) = (thread::block_idx_x() as usize, c as usize);
    let column = thread::block_idx_y() as usize * THREADS + thread::thread_idx_x() as usize;
    if column < c {
        let (first, end) = (starts.at(block) as usize, starts.at(block + 1) as usize);
        let mut sum = 0.0;
        for i in first..end {
            sum += dout.at(order.at(i) as usize * c + column);
        }
        let element = tokens.at(order.at(first) as usize) as usize * c + column;
        dwte.set(element, dwte.at(element) + sum);
    }
}

/// Adds the gradient of wpe: `dwpe[t]` += the sum of `dout[b, t]` over b. Each thread adds 4 of the T C elements.
#[kernel(threads = 256)]
pub fn wpe_backward(dwpe: GlobalMut<f32>, dout: Global<f32>, b: u32, t: u32, c: u32) {
    let (i, tc) = (thread::index_1d() * 4, t as usize * c as usize);
    if i < tc {
        let mut sum = [0.0; 4];
        for b in 0..b as usize {
            sum = map4(sum, load4(dout, b * tc + i, (b + 1) * tc), |a, b| a + b);
        }
        store4(dwpe, i, tc, map4(load4(dwpe.reader(), i, tc), sum, |a, b| a + b));
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// LayerNorm

/// Returns the row of this thread's warp.
#[inline(always)]
#[track_caller]
fn row_of_warp() -> u32 {
    thread::block_idx_x() * WARPS as u32 + warp::index()
}

/// Computes out = (x - mean) rstd weight + bias for each row x of inp (rows, C), with rstd = 1 / sqrt(variance + 1e-5).
///
/// Also stores mean (rows) and rstd (rows). Each warp computes a row. Grid: ceil(rows / 8).
#[kernel(threads = 256)]
pub fn layernorm_forward(
    out: GlobalMut<f32>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<f32>,
    weight: Global<f32>,
    bias: Global<f32>,
    rows: u32,
    c: u32,
) {
    let (row, lane, c) = (row_of_warp(), warp::lane() as usize, c as usize);
    if row >= rows {
        return;
    }
    let (start, end) = (row as usize * c, (row as usize + 1) * c);
    let mut sum = 0.0;
    let mut i = lane * 4;
    while i < c {
        sum += sum4(load4(inp, start + i, end));
        i += 128;
    }
    let m = warp::sum(sum) / c as f32;
    let mut sum = 0.0;
    let mut i = lane * 4;
    while i < c {
        let x = load4_or(inp, start + i, end, m);
        sum += sum4(map4(x, x, |x, _| (x - m) * (x - m)));
        i += 128;
    }
    let s = math::rsqrt(warp::sum(sum) / c as f32 + 1e-5);
    let mut i = lane * 4;
    while i < c {
        let n = map4(load4(inp, start + i, end), load4(weight, i, c), |x, weight| (x - m) * s * weight);
        store4(out, start + i, end, map4(n, load4(bias, i, c), |n, bias| n + bias));
        i += 128;
    }
    if lane == 0 {
        mean.set(row as usize, m);
        rstd.set(row as usize, s);
    }
}

/// Adds the gradient of the input: dinp += (dn - mean(dn) - n mean(dn n)) rstd, with n = (x - mean) rstd and dn = dout weight.
///
/// Each warp computes a row. Grid: ceil(rows / 8).
#[kernel(threads = 256)]
pub fn layernorm_backward_input(
    dinp: GlobalMut<f32>,
    dout: Global<f32>,
    inp: Global<f32>,
    weight: Global<f32>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    c: u32,
) {
    let (row, lane, c) = (row_of_warp(), warp::lane() as usize, c as usize);
    if row >= rows {
        return;
    }
    let (start, end) = (row as usize * c, (row as usize + 1) * c);
    let (m, s) = (mean.at(row as usize), rstd.at(row as usize));
    let (mut sum_dn, mut sum_dn_n) = (0.0, 0.0);
    let mut i = lane * 4;
    while i < c {
        let dn = map4(load4(dout, start + i, end), load4(weight, i, c), |dout, weight| dout * weight);
        let x = load4(inp, start + i, end);
        sum_dn += sum4(dn);
        sum_dn_n += sum4(map4(dn, x, |dn, x| dn * (x - m) * s));
        i += 128;
    }
    let (mean_dn, mean_dn_n) = (warp::sum(sum_dn) / c as f32, warp::sum(sum_dn_n) / c as f32);
    let mut i = lane * 4;
    while i < c {
        let dn = map4(load4(dout, start + i, end), load4(weight, i, c), |dout, weight| dout * weight);
        let x = load4(inp, start + i, end);
        let dx = map4(dn, x, |dn, x| (dn - mean_dn - (x - m) * s * mean_dn_n) * s);
        store4(dinp, start + i, end, map4(load4(dinp.reader(), start + i, end), dx, |a, b| a + b));
        i += 128;
    }
}

/// The shared memory of a block that sums columns: a sum of each warp for each column.
pub fn column_scratch(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(WARPS * COLUMNS)
}

/// Returns the sum of `term(row)` over the rows of this block's chunk, in all threads of the first warp.
///
/// Each warp sums every eighth row. Lane l sums column l of the block's 32 columns. `scratch` must not be in use.
#[inline(always)]
#[track_caller]
fn sum_of_chunk(rows: u32, scratch: SharedArray<f32>, term: impl Fn(usize) -> f32) -> f32 {
    let (warp, lane) = (warp::index() as usize, warp::lane() as usize);
    let first = thread::block_idx_y() as usize * CHUNK;
    let end = (first + CHUNK).min(rows as usize);
    let mut sum = 0.0;
    let mut row = first + warp;
    while row < end {
        sum += term(row);
        row += WARPS;
    }
    scratch.set(warp * COLUMNS + lane, sum);
    thread::sync_threads();
    let mut all = 0.0;
    if warp == 0 {
        for warp in 0..WARPS {
            all += scratch.at(warp * COLUMNS + lane);
        }
    }
    thread::sync_threads();
    all
}

/// Computes partial sums of the gradients of weight and bias, over chunks of 128 rows: dweight += dout n, dbias += dout, with
/// n = (x - mean) rstd.
///
/// partials (2, chunks, C) has those of dweight, then those of dbias. [`add_partials`] adds them up.
/// Grid: ceil(C / 32), chunks.
#[kernel(threads = 256, shared = column_scratch)]
pub fn layernorm_backward_params(
    partials: GlobalMut<f32>,
    dout: Global<f32>,
    inp: Global<f32>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    c: u32,
) {
    let (scratch, c) = (column_scratch(&mut Layout::new()), c as usize);
    let column = thread::block_idx_x() as usize * COLUMNS + warp::lane() as usize;
    let normalized = |row: usize| (inp.at(row * c + column) - mean.at(row)) * rstd.at(row);
    let dweight =
        sum_of_chunk(rows, scratch, |row| if column < c { dout.at(row * c + column) * normalized(row) } else { 0.0 });
    let dbias = sum_of_chunk(rows, scratch, |row| if column < c { dout.at(row * c + column) } else { 0.0 });
    if thread::thread_idx_x() < warp::LANES && column < c {
        let (chunk, chunks) = (thread::block_idx_y() as usize, thread::grid_dim_y() as usize);
        partials.set(chunk * c + column, dweight);
        partials.set((chunks + chunk) * c + column, dbias);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Bias gradients

/// Computes partial column sums of inp (rows, columns), over chunks of 128 rows: partials (chunks, columns).
///
/// The column sums of dout (B T, OC) are the gradient of a bias. [`add_partials`] adds the chunks up. Grid: ceil(columns / 32), chunks.
#[kernel(threads = 256, shared = column_scratch)]
pub fn column_sums(partials: GlobalMut<f32>, inp: Global<f32>, rows: u32, columns: u32) {
    let (scratch, columns) = (column_scratch(&mut Layout::new()), columns as usize);
    let column = thread::block_idx_x() as usize * COLUMNS + warp::lane() as usize;
    let sum = sum_of_chunk(rows, scratch, |row| if column < columns { inp.at(row * columns + column) } else { 0.0 });
    if thread::thread_idx_x() < warp::LANES && column < columns {
        partials.set(thread::block_idx_y() as usize * columns + column, sum);
    }
}

/// Adds the sum of partials (chunks, columns) over the chunks to out (columns). Each thread adds to one column.
#[kernel(threads = 256)]
pub fn add_partials(out: GlobalMut<f32>, partials: Global<f32>, chunks: u32, columns: u32) {
    let (column, columns) = (thread::index_1d(), columns as usize);
    if column < columns {
        let mut sum = 0.0;
        for chunk in 0..chunks as usize {
            sum += partials.at(chunk * columns + column);
        }
        out.set(column, out.at(column) + sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Attention

/// The two layouts of heads: (B, T, P, NH, HS), as in the output of the qkv GEMM with P = 3, and (P, B, NH, T, HS), in which the
/// matrix (T, HS) of a head is contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Heads {
    /// Sequences.
    pub b: u32,
    /// Tokens of a sequence.
    pub t: u32,
    /// P: 3 for queries, keys and values, 1 for the output of attention.
    pub parts: u32,
    /// Heads.
    pub nh: u32,
    /// Channels of a head.
    pub hs: u32,
    /// Elements from the start of a head's matrix to that of the next, at least T HS.
    pub stride: u32,
}

#[device]
impl Heads {
    /// Returns the indices in both layouts of 4 channels of a head, and their number, which is less than 4 at the end of a head.
    fn locate(self, i: u32) -> Option<(usize, usize, usize)> {
        let Self { b, t, parts, nh, hs, stride } = self;
        let fours = hs.div_ceil(4);
        let (channel, i) = (i % fours * 4, i / fours);
        let (head, i) = (i % nh, i / nh);
        let (part, position) = (i % parts, i / parts);
        if position >= b * t {
            return None;
        }
        let (sequence, token) = (position / t, position % t);
        let row = (position as usize * parts as usize + part as usize) * nh as usize + head as usize;
        let matrix = ((part * b + sequence) * nh + head) as usize;
        let permuted = matrix * stride as usize + token as usize * hs as usize + channel as usize;
        Some((row * hs as usize + channel as usize, permuted, (hs - channel).min(4) as usize))
    }
}

/// Copies inp (B, T, P, NH, HS) to out (P, B, NH, T, HS). Each thread copies 4 channels. Threads: B T P NH ceil(HS / 4).
#[kernel(threads = 256)]
pub fn permute(out: GlobalMut<f32>, inp: Global<f32>, heads: Heads) {
    if let Some((row, permuted, count)) = heads.locate(thread::index_1d() as u32) {
        store4(out, permuted, permuted + count, load4(inp, row, row + count));
    }
}

/// Copies inp (P, B, NH, T, HS) to out (B, T, P, NH, HS). The inverse of [`permute`], with the same number of threads.
#[kernel(threads = 256)]
pub fn unpermute(out: GlobalMut<f32>, inp: Global<f32>, heads: Heads) {
    if let Some((row, permuted, count)) = heads.locate(thread::index_1d() as u32) {
        store4(out, row, row + count, load4(inp, permuted, permuted + count));
    }
}

/// Computes `att[t, t2]` = softmax over t2 <= t of `preatt[t, t2] scale`, in each matrix (T, T) of (B NH). The matrices are `stride`
/// elements apart.
///
/// Elements with t2 > t are neither read nor written. Each warp computes a row. Grid: ceil(rows / 8), with rows = B NH T.
#[kernel(threads = 256)]
pub fn softmax_forward(att: GlobalMut<f32>, preatt: Global<f32>, scale: f32, rows: u32, t: u32, stride: u32) {
    let (row, lane) = (row_of_warp(), warp::lane() as usize);
    if row >= rows {
        return;
    }
    let query = (row % t) as usize;
    let start = (row / t) as usize * stride as usize + query * t as usize;
    let end = start + query + 1;
    // The sum is that of exp(scale (x - max)) with the maximum so far. Subtracting it prevents overflow.
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
    let mut i = start + lane * 4;
    while i < end {
        let x = load4_or(preatt, i, end, f32::NEG_INFINITY);
        let new = math::max(max, math::max(math::max(x[0], x[1]), math::max(x[2], x[3])));
        sum = sum * math::exp(scale * (max - new)) + sum4(map4(x, x, |x, _| math::exp(scale * (x - new))));
        max = new;
        i += 128;
    }
    let row_max = warp::max(max);
    let norm = math::recip(warp::sum(sum * math::exp(scale * (max - row_max))));
    let mut i = start + lane * 4;
    while i < end {
        let x = load4(preatt, i, end);
        store4(att, i, end, map4(x, x, |x, _| math::exp(scale * (x - row_max)) * norm));
        i += 128;
    }
}

/// Computes `dpreatt[t, t2] = att[t, t2] (datt[t, t2] - sum over t3 <= t of att[t, t3] datt[t, t3]) scale` for t2 <= t.
///
/// Shapes, grid and untouched elements are those of [`softmax_forward`].
#[kernel(threads = 256)]
pub fn softmax_backward(
    dpreatt: GlobalMut<f32>,
    datt: Global<f32>,
    att: Global<f32>,
    scale: f32,
    rows: u32,
    t: u32,
    stride: u32,
) {
    let (row, lane) = (row_of_warp(), warp::lane() as usize);
    if row >= rows {
        return;
    }
    let query = (row % t) as usize;
    let start = (row / t) as usize * stride as usize + query * t as usize;
    let end = start + query + 1;
    let mut sum = 0.0;
    let mut i = start + lane * 4;
    while i < end {
        sum += sum4(map4(load4(att, i, end), load4(datt, i, end), |att, datt| att * datt));
        i += 128;
    }
    let sum = warp::sum(sum);
    let mut i = start + lane * 4;
    while i < end {
        let (att, datt) = (load4(att, i, end), load4(datt, i, end));
        store4(dpreatt, i, end, map4(att, datt, |att, datt| att * (datt - sum) * scale));
        i += 128;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Elementwise kernels. Each thread computes 4 of n elements.

/// Computes out = a + b.
#[kernel(threads = 256)]
pub fn residual_forward(out: GlobalMut<f32>, a: Global<f32>, b: Global<f32>, n: u64) {
    let (i, n) = (thread::index_1d() * 4, n as usize);
    if i < n {
        store4(out, i, n, map4(load4(a, i, n), load4(b, i, n), |a, b| a + b));
    }
}

/// sqrt(2 / pi)
const GELU_SCALE: f32 = 0.797_884_6;

/// Computes out = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
#[kernel(threads = 256)]
pub fn gelu_forward(out: GlobalMut<f32>, inp: Global<f32>, n: u64) {
    let (i, n) = (thread::index_1d() * 4, n as usize);
    if i < n {
        let x = load4(inp, i, n);
        let gelu = |x: f32| 0.5 * x * (1.0 + math::tanh(GELU_SCALE * (x + 0.044_715 * x * x * x)));
        store4(out, i, n, map4(x, x, |x, _| gelu(x)));
    }
}

/// Computes dinp = dout times the derivative of GELU at inp.
#[kernel(threads = 256)]
pub fn gelu_backward(dinp: GlobalMut<f32>, inp: Global<f32>, dout: Global<f32>, n: u64) {
    let (i, n) = (thread::index_1d() * 4, n as usize);
    if i < n {
        let derivative = |x: f32| {
            let tanh = math::tanh(GELU_SCALE * (x + 0.044_715 * x * x * x));
            let slope = GELU_SCALE * (1.0 + 3.0 * 0.044_715 * x * x);
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
        };
        store4(dinp, i, n, map4(load4(inp, i, n), load4(dout, i, n), |x, dout| dout * derivative(x)));
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Classifier

/// The shared memory of [`classifier`]: the scratch of block-wide reductions.
pub fn classifier_scratch(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes losses (B T) = `-ln(p[target])`, with p = softmax of the first V logits of a row. Replaces the logits (B T, Vp) by the
/// gradient of the mean loss: (p - 1 for the target) / (B T), and 0 in the padding.
///
/// Each block computes a row. Grid: B T.
#[kernel(threads = 1024, shared = classifier_scratch)]
pub fn classifier(logits: GlobalMut<f32>, losses: GlobalMut<f32>, targets: Global<u16>, v: u32, vp: u32) {
    let scratch = classifier_scratch(&mut Layout::new());
    let (row, thread) = (thread::block_idx_x() as usize, thread::thread_idx_x() as usize);
    let (start, target) = (row * vp as usize, targets.at(row) as usize);
    let (end, padded_end) = (start + v as usize, start + vp as usize);
    let target_logit = logits.at(start + target);
    // See softmax_forward.
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
    let mut i = start + thread * 4;
    while i < end {
        let x = load4_or(logits.reader(), i, end, f32::NEG_INFINITY);
        let new = math::max(max, math::max(math::max(x[0], x[1]), math::max(x[2], x[3])));
        sum = sum * math::exp(max - new) + sum4(map4(x, x, |x, _| math::exp(x - new)));
        max = new;
        i += 4096;
    }
    let row_max = block::max(max, scratch);
    let sum = block::sum(sum * math::exp(max - row_max), scratch);
    if thread == 0 {
        losses.set(row, math::ln(sum) - (target_logit - row_max));
    }
    let (scale, norm) = (1.0 / thread::grid_dim_x() as f32, math::recip(sum));
    let mut i = start + thread * 4;
    while i < padded_end {
        let x = load4(logits.reader(), i, padded_end);
        let mut d = map4(x, x, |x, _| math::exp(x - row_max) * norm * scale);
        for k in 0..4 {
            d[k] = if i + k >= end { 0.0 } else { d[k] - if i + k == start + target { scale } else { 0.0 } };
        }
        store4(logits, i, padded_end, d);
        i += 4096;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// AdamW

/// The settings of [`adamw`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AdamW {
    /// lr
    pub learning_rate: f32,
    /// Decay rate of m.
    pub beta1: f32,
    /// Decay rate of v.
    pub beta2: f32,
    /// 1 - beta1^step
    pub correction1: f32,
    /// 1 - beta2^step
    pub correction2: f32,
    /// Term that keeps the denominator from being 0.
    pub eps: f32,
    /// Weight decay.
    pub decay: f32,
}

/// Computes m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  p -= lr (m' / (sqrt(v') + eps) + decay p),
/// with m' = m / (1 - beta1^step) and v' = v / (1 - beta2^step). Each thread updates 4 of n parameters.
#[kernel(threads = 256)]
pub fn adamw(p: GlobalMut<f32>, g: Global<f32>, m: GlobalMut<f32>, v: GlobalMut<f32>, settings: AdamW, n: u64) {
    let AdamW { learning_rate, beta1, beta2, correction1, correction2, eps, decay } = settings;
    let (i, n) = (thread::index_1d() * 4, n as usize);
    if i < n {
        let (old, grad) = (load4(p.reader(), i, n), load4(g, i, n));
        let new_m = map4(load4(m.reader(), i, n), grad, |m, g| beta1 * m + (1.0 - beta1) * g);
        let new_v = map4(load4(v.reader(), i, n), grad, |v, g| beta2 * v + (1.0 - beta2) * g * g);
        let update = map4(new_m, new_v, |m, v| (m / correction1) / (math::sqrt_rn(v / correction2) + eps));
        store4(m, i, n, new_m);
        store4(v, i, n, new_v);
        store4(p, i, n, map4(old, update, |p, update| p - learning_rate * (update + decay * p)));
    }
}
