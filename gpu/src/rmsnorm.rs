//! RMS normalization over C (Zhang and Sennrich, 2019, arXiv:1910.07467): out = inp * rstd * weight, where rstd = 1 /
//! sqrt(mean(inp²) + eps). The weight is optional: without it, out = inp * rstd.
//!
//! Shapes: inp, out and the gradients of both (rows, C), rstd (rows) f32, weight (C). C is a multiple of the packet.
//!
//! [`norm_rows`](crate::norm_rows) describes how rows are distributed over threads and read.
//!
//! The backward kernel adds to the gradient of inp, so that the gradient of a residual stream needs no further pass. The
//! gradient of the weight is a two-stage reduction: per-block column sums in `partials` (blocks, C) f32, which
//! [`rmsnorm_backward_reduce`] adds up. There are no atomics, and the result is deterministic for a given grid. Without
//! weight, no column sums are computed.
//!
//! Bytes that must be moved per row of bf16: 4 C + 4 in the forward kernel (inp, out, rstd) and 8 C + 4 in the backward
//! kernel (dout, inp, dinp twice, rstd).

use crate::column_sum;
use crate::norm_rows::{MAX_ROWS, RowOutput, RowPart, THREADS, backward_shared, forward_pipeline, scratch, stages};
use crate::quantize::{self, QuantizedOutput};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Fp8, Global, GlobalMut, Packet, async_copy, bf16, kernel, math, thread, warp};

#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;

/// Arguments of a forward kernel: `out` receives the normalized rows.
struct Forward<O> {
    out: O,
    rstd: GlobalMut<f32>,
    eps: f32,
    rows: u32,
}

impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> RowPart<T, PACKETS, WARPS, ROWS> {
    /// Returns a function from a column to the packet of `weight` there, or to ones if `weight` is null.
    #[inline(always)]
    fn weight(&self, weight: Global<T>) -> impl Fn(usize) -> Packet<T> {
        let load = move |column| if weight.is_null() { Packet::from_fn(|_| 1.0) } else { weight.packet(column) };
        let held = if PACKETS == 1 { self.column(0).map(load) } else { None };
        move |column| held.map_or_else(|| load(column), Packet::opaque)
    }

    /// Normalizes ROWS rows from `row` on. `x` holds their packets. Packets past the end of a row must be zero.
    ///
    /// Consecutive calls alternate `parity` between 0 and 1.
    #[inline(always)]
    fn normalize_by_rms(
        &self,
        x: &[[Packet<T>; PACKETS]; ROWS],
        row: usize,
        parity: usize,
        &mut Forward { ref mut out, rstd, eps, rows }: &mut Forward<impl RowOutput<T>>,
        weight: impl Fn(usize) -> Packet<T>,
    ) {
        let scale = math::recip(self.channels as f32);
        let mut squares = [[0.0]; ROWS];
        for r in 0..ROWS {
            for packet in &x[r] {
                for i in 0..T::PACKET {
                    squares[r][0] = math::fma(packet.get(i), packet.get(i), squares[r][0]);
                }
            }
        }
        // Scales before the reduction, because the unscaled sum of squares may overflow although their mean does not.
        let squares = squares.map(|[sum]| [sum * scale]);
        let rstds = self.sums(squares, parity).map(|[mean]| math::rsqrt(mean + eps));
        for r in 0..ROWS {
            let row = row + r;
            if ROWS > 1 && row >= rows as usize {
                return;
            }
            if self.first == 0 {
                rstd.set(row, rstds[r]);
            }
            for k in 0..PACKETS {
                if let Some(column) = self.column(k) {
                    let w = weight(column);
                    let y = Packet::from_fn(|i| x[r][k].get(i) * rstds[r] * w.get(i));
                    out.set_packet(row * self.channels + column, y);
                }
            }
        }
    }
}

/// Computes out (rows, C) and rstd (rows) from inp (rows, C) and weight (C), which may be null.
///
/// Grid: [`Shape::forward_grid`]. Shared memory: [`Shape::forward_shared_bytes`].
///
/// [`Shape::forward_grid`]: crate::norm_rows::Shape::forward_grid
/// [`Shape::forward_shared_bytes`]: crate::norm_rows::Shape::forward_shared_bytes
#[kernel(
    threads = 256,
    axes(shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>]),
    instances([bf16 = bf16, f32 = f32] * shape),
    select(PACKETS: usize, WARPS: usize, ROWS: usize)
)]
pub fn rmsnorm_forward<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    out: GlobalMut<T>,
    rstd: GlobalMut<f32>,
    inp: Global<T>,
    weight: Global<T>,
    eps: f32,
    rows: u32,
    channels: u32,
) {
    let mut forward = Forward { out, rstd, eps, rows };
    normalize_rows::<T, _, PACKETS, WARPS, ROWS>(&mut Layout::new(), &mut forward, inp, weight, channels);
}

/// Does what [`rmsnorm_forward`] does in bf16, and quantizes out with a given scale (1) instead of storing it: its bits are those
/// of [`quantize`](crate::quantize::quantize) for an output in bf16, as are those of `amax` (1), which may be null.
///
/// Grid: [`Shape::forward_fp8_grid`]. Shared memory: [`Shape::forward_fp8_shared_bytes`].
///
/// [`Shape::forward_fp8_grid`]: crate::norm_rows::Shape::forward_fp8_grid
/// [`Shape::forward_fp8_shared_bytes`]: crate::norm_rows::Shape::forward_fp8_shared_bytes
#[kernel(
    threads = 256,
    axes(shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>]),
    instances([e4m3 = E4m3] * shape),
    select(PACKETS: usize, WARPS: usize, ROWS: usize)
)]
pub fn rmsnorm_forward_fp8<F: Fp8, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    out: GlobalMut<F>,
    rstd: GlobalMut<f32>,
    amax: GlobalMut<u32>,
    scale: Global<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    eps: f32,
    rows: u32,
    channels: u32,
) {
    let mut layout = Layout::new();
    let maxima = quantize::maxima(&mut layout);
    let mut forward = Forward { out: QuantizedOutput::new(out, scale), rstd, eps, rows };
    normalize_rows::<bf16, _, PACKETS, WARPS, ROWS>(&mut layout, &mut forward, inp, weight, channels);
    forward.out.store_amax(amax, maxima);
}

/// Normalizes the block's rows.
#[inline(always)]
fn normalize_rows<T: Element, O: RowOutput<T>, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    layout: &mut Layout,
    forward: &mut Forward<O>,
    inp: Global<T>,
    weight: Global<T>,
    channels: u32,
) {
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch(layout, MAX_ROWS));
    let (mut row, rows) = (part.row(), forward.rows as usize);
    let weight = part.weight(weight);
    if PACKETS > 1 {
        if row < rows {
            part.normalize_by_rms(&part.load(inp, row, rows), row, 0, forward, weight);
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
        part.normalize_by_rms(&x, row, stage, forward, &weight);
        row += step;
        stage = 1 - stage;
    }
}

/// Adds the gradient of inp to dinp (rows, C), given dout (rows, C), the gradient of out.
///
/// With normed = inp * rstd and g = dout * weight, the gradient is rstd * (g - normed * (mean over C of g * normed)).
/// With WEIGHTS, the kernel also writes the block's sums of dweight to `partials` (blocks, C), which may be
/// uninitialized, and [`rmsnorm_backward_reduce`] must follow. Otherwise g = dout, and weight and partials may be null.
/// Grid: [`Shape::backward_grid`]. Shared memory: [`Shape::backward_shared_bytes`].
///
/// [`Shape::backward_grid`]: crate::norm_rows::Shape::backward_grid
/// [`Shape::backward_shared_bytes`]: crate::norm_rows::Shape::backward_shared_bytes
#[kernel(
    threads = 256,
    axes(shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>]),
    instances([bf16 = bf16, f32 = f32] * shape * [_ = true, plain = false]),
    select(PACKETS: usize, WARPS: usize, ROWS: usize, WEIGHTS: bool)
)]
pub fn rmsnorm_backward<
    T: Element,
    const PACKETS: usize,
    const WARPS: usize,
    const ROWS: usize,
    const WEIGHTS: bool,
>(
    dinp: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    inp: Global<T>,
    weight: Global<T>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (scratch, pipeline) = backward_shared::<T>(&mut Layout::new(), PACKETS, ROWS);
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
                        pipeline.copy_packet_async(slot(buffer, 0, r, k), dout, i, true);
                        pipeline.copy_packet_async(slot(buffer, 1, r, k), inp, i, true);
                        pipeline.copy_packet_async(slot(buffer, 2, r, k), dinp.reader(), i, true);
                    }
                }
            }
        }
        async_copy::commit();
    };
    let statistics = |row: usize| {
        let mut rstds = [0.0; ROWS];
        for r in 0..ROWS {
            if row + r < rows {
                rstds[r] = rstd.at(row + r);
            }
        }
        rstds
    };
    let weight = if WEIGHTS { Some(part.parameter(weight)) } else { None };
    let mut dweight = [[0.0; 8]; PACKETS];

    let mut row = part.row();
    let (mut buffer, mut parity) = (0, 0);
    fetch(buffer, row);
    let mut rstds = statistics(row);
    while row < rows {
        let next = statistics(row + step);
        if stages(PACKETS) == 2 {
            fetch(1 - buffer, row + step);
            async_copy::wait::<1>();
        } else {
            async_copy::wait::<0>();
        }

        let mut sums = [[0.0]; ROWS];
        for r in 0..ROWS {
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (pipeline.packet(slot(buffer, 0, r, k)), pipeline.packet(slot(buffer, 1, r, k)));
                    let w = weight.as_ref().map(|weight| weight(column));
                    for i in 0..T::PACKET {
                        let normed = x.get(i) * rstds[r];
                        let g = w.map_or(dy.get(i), |w| dy.get(i) * w.get(i));
                        sums[r][0] = math::fma(g, normed, sums[r][0]);
                        if WEIGHTS {
                            dweight[k][i] = math::fma(dy.get(i), normed, dweight[k][i]);
                        }
                    }
                }
            }
        }
        let projections = part.sums(sums, parity).map(|[sum]| sum * scale);
        // The memory ordering makes the compiler reload the row from shared memory instead of spilling registers.
        warp::sync();
        for r in 0..ROWS {
            let rstd = rstds[r];
            let slope = rstd * projections[r];
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (pipeline.packet(slot(buffer, 0, r, k)), pipeline.packet(slot(buffer, 1, r, k)));
                    let dx = pipeline.packet(slot(buffer, 2, r, k));
                    let w = weight.as_ref().map(|weight| weight(column));
                    let new = Packet::from_fn(|i| {
                        let g = w.map_or(dy.get(i), |w| dy.get(i) * w.get(i));
                        math::fma(math::fma(-x.get(i), slope, g), rstd, dx.get(i))
                    });
                    dinp.set_packet((row + r) * channels + column, new);
                }
            }
        }
        rstds = next;
        row += step;
        parity = 1 - parity;
        if stages(PACKETS) == 2 {
            buffer = 1 - buffer;
        } else {
            fetch(buffer, row);
        }
    }

    if WEIGHTS {
        part.write_sums(partials.skip(thread::block_idx_x() as usize * channels), [&dweight]);
    }
}

/// Adds the sums over blocks of `partials` (blocks, C) to dweight (C), rounded to nearest even.
///
/// `blocks` is the grid size of [`rmsnorm_backward`]. Grid: [`column_sum::grid`] of C. Shared memory:
/// [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn rmsnorm_backward_reduce<T: Element>(dweight: GlobalMut<T>, partials: Global<f32>, blocks: u32, channels: u32) {
    if let Some((column, sum)) = column_sum::column_sum(partials, blocks as usize, channels as usize) {
        dweight.set(column, T::from_f32(dweight.at(column).to_f32() + sum));
    }
}
