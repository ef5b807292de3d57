//! The backward kernels. [`rows`](super::rows) describes how rows are distributed over threads and read.

use super::rows::{RowPart, RowShape, THREADS, backward_shared, stages};
use super::{LayerNorm, Norm, NormKind, RmsNorm};
use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, async_copy, bf16, kernel, math, thread, warp};

/// Adds the gradient of inp to dinp (rows, C), given dout (rows, C), the gradient of out.
///
/// With normed the normalized row before weight and bias, and g = dout * weight, the gradient is rstd * (g - normed * (mean
/// over C of g * normed)), and LayerNorm also subtracts the mean over C of g within the parentheses. With SUMS > 0, the kernel
/// also writes the block's column sums to `partials` (blocks, SUMS, C), which may be uninitialized, and
/// [`norm_backward_reduce`] must follow: of dweight, dbias, and the columns of the updated dinp. Otherwise g = dout, and weight
/// and partials may be null. RMSNorm does not use mean.
/// Grid: [`RowShape::backward_grid`]. Shared memory: [`RowShape::backward_shared_bytes`].
#[kernel(
    threads = 256,
    axes(
        element = [bf16 = bf16, f32 = f32],
        shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>],
        // Those with registers for a third sum.
        summing_shape = [p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>]
    ),
    instances(
        element * [layernorm = LayerNorm] * shape * [_ = 2],
        element * [layernorm = LayerNorm] * summing_shape * [sums = 3],
        element * [rmsnorm = RmsNorm] * shape * [_ = 1, plain = 0]
    ),
    select(N::KIND: NormKind, RowShape(PACKETS, WARPS, ROWS): RowShape, SUMS: usize)
)]
pub fn norm_backward<
    T: Element,
    N: Norm,
    const PACKETS: usize,
    const WARPS: usize,
    const ROWS: usize,
    const SUMS: usize,
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
        let mut stats = [(0.0, 0.0); ROWS];
        for r in 0..ROWS {
            if row + r < rows {
                stats[r] = (if N::CENTERED { mean.at(row + r) } else { 0.0 }, rstd.at(row + r));
            }
        }
        stats
    };
    let weight = if SUMS > 0 { Some(part.parameter(weight)) } else { None };
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

        // Of g, and of g * normed.
        let mut sums = [[0.0; 2]; ROWS];
        for r in 0..ROWS {
            let (m, rstd) = stats[r];
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (pipeline.packet(slot(buffer, 0, r, k)), pipeline.packet(slot(buffer, 1, r, k)));
                    let w = weight.as_ref().map(|weight| weight(column));
                    for i in 0..T::PACKET {
                        let normed = if N::CENTERED { (x.get(i) - m) * rstd } else { x.get(i) * rstd };
                        let g = w.map_or(dy.get(i), |w| dy.get(i) * w.get(i));
                        if N::CENTERED {
                            sums[r][0] += g;
                            dbias[k][i] += dy.get(i);
                        }
                        sums[r][1] = math::fma(g, normed, sums[r][1]);
                        if SUMS > 0 {
                            dweight[k][i] = math::fma(dy.get(i), normed, dweight[k][i]);
                        }
                    }
                }
            }
        }
        let means = if N::CENTERED {
            part.sums(sums, parity).map(|of_row| of_row.map(|sum| sum * scale))
        } else {
            part.sums(sums.map(|[_, sum]| [sum]), parity).map(|[sum]| [0.0, sum * scale])
        };
        // The memory ordering makes the compiler reload the row from shared memory instead of spilling registers.
        warp::sync();
        for r in 0..ROWS {
            let ((m, rstd), [mean_of_g, projection]) = (stats[r], means[r]);
            let slope = rstd * projection;
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (pipeline.packet(slot(buffer, 0, r, k)), pipeline.packet(slot(buffer, 1, r, k)));
                    let dx = pipeline.packet(slot(buffer, 2, r, k));
                    let w = weight.as_ref().map(|weight| weight(column));
                    let new = Packet::from_fn(|i| {
                        // g - mean of g - normed * projection, in the fewest instructions.
                        let gradient = if N::CENTERED {
                            let rest = math::fma(m - x.get(i), slope, -mean_of_g);
                            w.map_or(rest, |w| math::fma(dy.get(i), w.get(i), rest))
                        } else {
                            let g = w.map_or(dy.get(i), |w| dy.get(i) * w.get(i));
                            math::fma(-x.get(i), slope, g)
                        };
                        let value = math::fma(gradient, rstd, dx.get(i));
                        if SUMS > 2 {
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

    let partials = partials.skip(thread::block_idx_x() as usize * SUMS * channels);
    match SUMS {
        0 => {}
        1 => part.write_sums(partials, [&dweight]),
        2 => part.write_sums(partials, [&dweight, &dbias]),
        _ => part.write_sums(partials, [&dweight, &dbias, &columns]),
    }
}

/// Adds the sums over blocks of `partials` (blocks, SUMS, C) to dweight (C), dbias (C) and column_sums (C), rounded to nearest
/// even. SUMS is the number of outputs: `column_sums` may be null, and so may both it and `dbias`.
///
/// `blocks` is the grid size of [`norm_backward`]. Grid: [`column_sum::grid`] of SUMS · C. Shared memory:
/// [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = bf16, f32 = f32))]
pub fn norm_backward_reduce<T: Element>(
    dweight: GlobalMut<T>,
    dbias: GlobalMut<T>,
    column_sums: GlobalMut<T>,
    partials: Global<f32>,
    blocks: u32,
    channels: u32,
) {
    let channels = channels as usize;
    let sums = 1 + usize::from(!dbias.is_null()) + usize::from(!column_sums.is_null());
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
