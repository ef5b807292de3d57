//! Layer normalization over C (Ba et al., 2016, arXiv:1607.06450): normed = (x - mean) * rstd * weight + bias, where
//! rstd = 1 / sqrt(variance + 1e-5) with the biased variance.
//!
//! Shapes: x, normed and the gradients of both (rows, C), mean and rstd (rows) f32, weight and bias (C). C is a
//! multiple of the packet.
//!
//! [`norm_rows`](crate::norm_rows) describes how rows are distributed over threads and read.
//!
//! The gradients of weight and bias are a two-stage reduction: per-block column sums in `partials` (blocks, 2, C) f32,
//! weight first, which [`layernorm_backward_reduce`] adds up. There are no atomics, and the result is deterministic for
//! a given grid.
//!
//! Shapes with registers for a third sum ([`Shape::sums_columns`]) can also compute the column sums of the updated
//! dinp; `partials` then has shape (blocks, 3, C). If dinp is the gradient of a linear layer's output, its column sums
//! are that layer's bias gradient, and no separate kernel is needed. The values are summed before they are rounded to
//! T, which is more accurate than summing the stored values and saves their conversion.

use crate::column_sum;
use crate::norm_rows::{
    MAX_ROWS, RowOutput, RowPart, Shape, THREADS, backward_shared, forward_pipeline, scratch, stages,
};
use crate::quantize::{self, QuantizedOutput};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Fp8, Global, GlobalMut, Packet, async_copy, bf16, kernel, math, thread, warp};

const EPSILON: f32 = 1e-5;

#[cfg(not(target_arch = "nvptx64"))]
impl Shape {
    /// Returns whether [`layernorm_backward`] has an instance that computes the column sums of dinp. It has one if the
    /// registers hold a third sum per column.
    pub fn sums_columns<T: Element>(self) -> bool {
        let (packets, warps, rows) = self.arguments();
        layernorm_backward_exists::<T>((packets, warps, rows, true))
    }

    /// Returns the number of f32 elements of `partials` for [`layernorm_backward`].
    pub const fn backward_partials(self, rows: usize, channels: usize, sm_count: usize, column_sums: bool) -> usize {
        self.backward_grid(rows, sm_count) as usize * sums_per_column(column_sums) * channels
    }
}

/// Returns the number of sums per column that [`layernorm_backward`] computes.
const fn sums_per_column(column_sums: bool) -> usize {
    if column_sums { 3 } else { 2 }
}

impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> RowPart<T, PACKETS, WARPS, ROWS> {
    /// Normalizes ROWS rows from `row` on, whose packets are `x`.
    #[inline(always)]
    fn normalize(
        &self,
        x: &[[Packet<T>; PACKETS]; ROWS],
        row: usize,
        rows: usize,
        Outputs { normed, mean, rstd }: &mut Outputs<impl RowOutput<T>>,
        weight: impl Fn(usize) -> Packet<T>,
        bias: impl Fn(usize) -> Packet<T>,
    ) {
        let scale = math::recip(self.channels as f32);
        let mut sums = [[0.0]; ROWS];
        for r in 0..ROWS {
            for packet in &x[r] {
                for i in 0..T::PACKET {
                    sums[r][0] += packet.get(i);
                }
            }
        }
        // Refines the quotient to a correctly rounded one: in a constant row, whose variance is 0, rstd = 316 amplifies
        // any error of the mean.
        let means = self.sums(sums, 0).map(|[sum]| {
            let m = sum * scale;
            math::fma(math::fma(-m, self.channels as f32, sum), scale, m)
        });
        let mut squares = [[0.0]; ROWS];
        for r in 0..ROWS {
            for k in 0..PACKETS {
                if self.column(k).is_some() {
                    for i in 0..T::PACKET {
                        let d = x[r][k].get(i) - means[r];
                        squares[r][0] = math::fma(d, d, squares[r][0]);
                    }
                }
            }
        }
        // Scales before the reduction, because the unscaled sum of squares may overflow although the variance does not.
        let rstds = self.sums(squares.map(|[sum]| [sum * scale]), 1).map(|[variance]| math::rsqrt(variance + EPSILON));
        for r in 0..ROWS {
            let row = row + r;
            if ROWS > 1 && row >= rows {
                return;
            }
            if self.first == 0 {
                mean.set(row, means[r]);
                rstd.set(row, rstds[r]);
            }
            for k in 0..PACKETS {
                if let Some(column) = self.column(k) {
                    let (w, b) = (weight(column), bias(column));
                    let y = Packet::from_fn(|i| math::fma((x[r][k].get(i) - means[r]) * rstds[r], w.get(i), b.get(i)));
                    normed.set_packet(row * self.channels + column, y);
                }
            }
        }
    }
}

/// Outputs of a forward kernel: `normed` receives the normalized rows.
struct Outputs<O> {
    normed: O,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
}

/// Inputs of a forward kernel.
struct Inputs<T> {
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
}

/// Computes normed (rows, C), mean (rows) and rstd (rows) from inp (rows, C), weight (C) and bias (C).
///
/// Grid: [`Shape::forward_grid`]. Shared memory: [`Shape::forward_shared_bytes`].
#[kernel(
    threads = 256,
    axes(shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>]),
    instances([bf16 = bf16, f32 = f32] * shape),
    select(PACKETS: usize, WARPS: usize, ROWS: usize)
)]
pub fn layernorm_forward<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    normed: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    rows: u32,
    channels: u32,
) {
    let (mut outputs, inputs) = (Outputs { normed, mean, rstd }, Inputs { inp, weight, bias });
    normalize_rows::<T, _, PACKETS, WARPS, ROWS>(&mut Layout::new(), &mut outputs, inputs, rows, channels);
}

/// Does what [`layernorm_forward`] does in bf16, and quantizes normed with a given scale (1) instead of storing it: its bits are
/// those of [`quantize`](crate::quantize::quantize) for an output in bf16, as are those of `amax` (1), which may be null.
///
/// Grid: [`Shape::forward_fp8_grid`]. Shared memory: [`Shape::forward_fp8_shared_bytes`].
#[kernel(
    threads = 256,
    axes(shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>]),
    instances([e4m3 = E4m3] * shape),
    select(PACKETS: usize, WARPS: usize, ROWS: usize)
)]
pub fn layernorm_forward_fp8<F: Fp8, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    normed: GlobalMut<F>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    amax: GlobalMut<u32>,
    scale: Global<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    bias: Global<bf16>,
    rows: u32,
    channels: u32,
) {
    let mut layout = Layout::new();
    let maxima = quantize::maxima(&mut layout);
    let mut outputs = Outputs { normed: QuantizedOutput::new(normed, scale), mean, rstd };
    let inputs = Inputs { inp, weight, bias };
    normalize_rows::<bf16, _, PACKETS, WARPS, ROWS>(&mut layout, &mut outputs, inputs, rows, channels);
    outputs.normed.store_amax(amax, maxima);
}

/// Normalizes the block's rows.
#[inline(always)]
fn normalize_rows<T: Element, O: RowOutput<T>, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    layout: &mut Layout,
    outputs: &mut Outputs<O>,
    Inputs { inp, weight, bias }: Inputs<T>,
    rows: u32,
    channels: u32,
) {
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch(layout, MAX_ROWS));
    let (mut row, rows) = (part.row(), rows as usize);
    let (weight, bias) = (part.parameter(weight), part.parameter(bias));
    if PACKETS > 1 {
        if row < rows {
            part.normalize(&part.load(inp, row, rows), row, rows, outputs, weight, bias);
        }
        return;
    }
    // No barrier is needed: each thread reads only the data it copied.
    let pipeline = forward_pipeline::<T>(layout, ROWS);
    let slot =
        |stage: usize, r: usize| ((stage * ROWS + r) * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET;
    let fetch = |stage: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows
                && let Some(column) = part.column(0)
            {
                pipeline.copy_packet_async(slot(stage, r), inp, (row + r) * part.channels + column, true);
            }
        }
        async_copy::commit();
    };
    let step = thread::grid_dim_x() as usize * RowPart::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    let mut stage = 0;
    fetch(stage, row);
    while row < rows {
        fetch(1 - stage, row + step);
        async_copy::wait::<1>();
        let mut x = [[Packet::zero(); PACKETS]; ROWS];
        for r in 0..ROWS {
            if row + r < rows && part.column(0).is_some() {
                x[r][0] = pipeline.packet(slot(stage, r));
            }
        }
        part.normalize(&x, row, rows, outputs, &weight, &bias);
        row += step;
        stage = 1 - stage;
    }
}

/// Adds the gradient of inp to dinp (rows, C), given dout (rows, C), the gradient of normed.
///
/// With xhat = (inp - mean) * rstd and g = dout * weight, the gradient is rstd * (g - mean over C of g - xhat * (mean
/// over C of g * xhat)). The kernel also writes the block's sums of dweight and dbias and, with COLUMN_SUMS, of the
/// columns of the updated dinp to `partials` ([`Shape::backward_partials`] elements, which may be uninitialized).
/// [`layernorm_backward_reduce`] must follow. Grid: [`Shape::backward_grid`]. Shared memory:
/// [`Shape::backward_shared_bytes`].
#[kernel(
    threads = 256,
    axes(
        element = [bf16 = bf16, f32 = f32],
        shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>],
        summing_shape = [p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>]
    ),
    instances(element * shape * [_ = false], element * summing_shape * [sums = true]),
    select(PACKETS: usize, WARPS: usize, ROWS: usize, COLUMN_SUMS: bool)
)]
pub fn layernorm_backward<
    T: Element,
    const PACKETS: usize,
    const WARPS: usize,
    const ROWS: usize,
    const COLUMN_SUMS: bool,
>(
    dinp: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    inp: Global<T>,
    weight: Global<T>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (scratch, stage) = backward_shared::<T>(&mut Layout::new(), PACKETS, ROWS);
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch);
    let (rows, channels) = (rows as usize, part.channels);
    let scale = math::recip(channels as f32);
    let step = thread::grid_dim_x() as usize * RowPart::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    // No barrier is needed: each thread reads only the data it copied.
    let slot = |buffer: usize, array: usize, r: usize, k: usize| {
        let packet = ((buffer * 3 + array) * ROWS + r) * PACKETS + k;
        (packet * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET
    };
    let fetch = |buffer: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows {
                for k in 0..PACKETS {
                    if let Some(column) = part.column(k) {
                        let i = (row + r) * channels + column;
                        stage.copy_packet_async(slot(buffer, 0, r, k), dout, i, true);
                        stage.copy_packet_async(slot(buffer, 1, r, k), inp, i, true);
                        stage.copy_packet_async(slot(buffer, 2, r, k), dinp.reader(), i, true);
                    }
                }
            }
        }
        async_copy::commit();
    };
    let statistics = |row: usize| {
        let mut stats = [(0.0, 0.0); ROWS];
        for r in 0..ROWS {
            if row + r < rows {
                stats[r] = (mean.at(row + r), rstd.at(row + r));
            }
        }
        stats
    };
    let weight = part.parameter(weight);
    let mut dweight = [[0.0; 8]; PACKETS];
    let mut dbias = [[0.0; 8]; PACKETS];
    let mut columns = [[0.0; 8]; PACKETS];

    let mut row = part.row();
    let (mut buffer, mut parity) = (0, 0);
    fetch(buffer, row);
    let mut stats = statistics(row);
    while row < rows {
        let next = statistics(row + step);
        if stages(PACKETS) == 2 {
            fetch(1 - buffer, row + step);
            async_copy::wait::<1>();
        } else {
            async_copy::wait::<0>();
        }

        let mut sums = [[0.0; 2]; ROWS];
        for r in 0..ROWS {
            let (m, rstd) = stats[r];
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (stage.packet(slot(buffer, 0, r, k)), stage.packet(slot(buffer, 1, r, k)));
                    let w = weight(column);
                    for i in 0..T::PACKET {
                        let (g, normed) = (dy.get(i), (x.get(i) - m) * rstd);
                        let dnormed = g * w.get(i);
                        sums[r][0] += dnormed;
                        sums[r][1] = math::fma(dnormed, normed, sums[r][1]);
                        dbias[k][i] += g;
                        dweight[k][i] = math::fma(g, normed, dweight[k][i]);
                    }
                }
            }
        }
        let sums = part.sums(sums, parity).map(|of_row| of_row.map(|sum| sum * scale));
        // The memory ordering makes the compiler reload the row from shared memory instead of spilling registers.
        warp::sync();
        for r in 0..ROWS {
            let ((m, rstd), [sum, projection]) = (stats[r], sums[r]);
            let slope = rstd * projection;
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (stage.packet(slot(buffer, 0, r, k)), stage.packet(slot(buffer, 1, r, k)));
                    let (dx, w) = (stage.packet(slot(buffer, 2, r, k)), weight(column));
                    let new = Packet::from_fn(|i| {
                        // dnormed - sum - normed * projection, in the fewest instructions.
                        let rest = math::fma(m - x.get(i), slope, -sum);
                        let value = math::fma(math::fma(dy.get(i), w.get(i), rest), rstd, dx.get(i));
                        if COLUMN_SUMS {
                            columns[k][i] += value;
                        }
                        value
                    });
                    dinp.set_packet((row + r) * channels + column, new);
                }
            }
        }
        stats = next;
        row += step;
        parity = 1 - parity;
        if stages(PACKETS) == 2 {
            buffer = 1 - buffer;
        } else {
            fetch(buffer, row);
        }
    }

    let len = sums_per_column(COLUMN_SUMS) * channels;
    let partials = partials.skip(thread::block_idx_x() as usize * len);
    if COLUMN_SUMS {
        part.write_sums(partials, [&dweight, &dbias, &columns]);
    } else {
        part.write_sums(partials, [&dweight, &dbias]);
    }
}

/// Adds the sums over blocks of `partials` to dweight (C), dbias (C) and column_sums (C), rounded to nearest even.
///
/// `column_sums` may be null. `partials` has shape (blocks, 2, C), or (blocks, 3, C) with column sums, where `blocks`
/// is the grid size of [`layernorm_backward`]. Grid: [`reduce_grid`]. Shared memory: [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn layernorm_backward_reduce<T: Element>(
    dweight: GlobalMut<T>,
    dbias: GlobalMut<T>,
    column_sums: GlobalMut<T>,
    partials: Global<f32>,
    blocks: u32,
    channels: u32,
) {
    let channels = channels as usize;
    let sums = sums_per_column(!column_sums.is_null());
    if let Some((column, sum)) = column_sum::column_sum(partials, blocks as usize, sums * channels) {
        let (to, column) = if column < channels {
            (dweight, column)
        } else if column < 2 * channels {
            (dbias, column - channels)
        } else {
            (column_sums, column - 2 * channels)
        };
        to.set(column, T::from_f32(to.at(column).to_f32() + sum));
    }
}

/// Returns the grid size of [`layernorm_backward_reduce`].
pub const fn reduce_grid(channels: usize, column_sums: bool) -> u32 {
    column_sum::grid(sums_per_column(column_sums) * channels)
}
