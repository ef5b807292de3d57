//! The forward kernels. [`rows`](super::rows) describes how rows are distributed over threads and read.

use super::rows::{MAX_ROWS, RowOutput, RowPart, RowShape, THREADS, forward_pipeline, scratch};
use super::{LayerNorm, Norm, NormKind, RmsNorm};
use crate::quantize::{self, QuantizedOutput, store_block_amax};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Fp8, Global, GlobalMut, Packet, async_copy, bf16, device, kernel, math, thread};

/// Added to LayerNorm's variance.
const LAYERNORM_EPS: f32 = 1e-5;

/// Outputs of a forward kernel: `out` receives the normalized rows.
struct Outputs<O> {
    out: O,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
}

/// Inputs of a forward kernel.
struct Inputs<T> {
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    /// Added to RMSNorm's mean square.
    eps: f32,
    rows: u32,
}

#[device]
impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> RowPart<T, PACKETS, WARPS, ROWS> {
    /// Returns a function from a column to the packet of `weight` there, or to ones if RMSNorm's `weight` is null.
    fn weight<N: Norm>(&self, weight: Global<T>) -> impl Fn(usize) -> Packet<T> {
        let load = move |column| {
            if !N::CENTERED && weight.is_null() { Packet::from_fn(|_| 1.0) } else { weight.packet(column) }
        };
        let held = if PACKETS == 1 { self.column(0).map(load) } else { None };
        move |column| held.map_or_else(|| load(column), Packet::opaque)
    }

    /// Normalizes ROWS rows from `row` on, whose packets are `x`, with the weights and biases of each column. Packets past the end of
    /// a row must be zero.
    ///
    /// Consecutive calls alternate `parity` between 0 and 1.
    fn normalize<N: Norm>(
        &self,
        x: &[[Packet<T>; PACKETS]; ROWS],
        row: usize,
        parity: usize,
        Outputs { out, mean, rstd }: &mut Outputs<impl RowOutput<T>>,
        &Inputs { eps, rows, .. }: &Inputs<T>,
        parameters: impl Fn(usize) -> [Packet<T>; 2],
    ) {
        let scale = math::recip(self.channels as f32);
        let mut means = [0.0; ROWS];
        if N::CENTERED {
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
            means = self.sums(sums, 0).map(|[sum]| {
                let m = sum * scale;
                math::fma(math::fma(-m, self.channels as f32, sum), scale, m)
            });
        }
        let mut squares = [[0.0]; ROWS];
        for r in 0..ROWS {
            for k in 0..PACKETS {
                // Zeros past the end of a row differ from the mean.
                if !N::CENTERED || self.column(k).is_some() {
                    for i in 0..T::PACKET {
                        let x = x[r][k].get(i);
                        let d = if N::CENTERED { x - means[r] } else { x };
                        squares[r][0] = math::fma(d, d, squares[r][0]);
                    }
                }
            }
        }
        let (parity, eps) = if N::CENTERED { (1, LAYERNORM_EPS) } else { (parity, eps) };
        // Scales before the reduction, because the unscaled sum of squares may overflow although their mean does not.
        let rstds = self.sums(squares.map(|[sum]| [sum * scale]), parity).map(|[mean]| math::rsqrt(mean + eps));
        for r in 0..ROWS {
            let row = row + r;
            if ROWS > 1 && row >= rows as usize {
                return;
            }
            if self.first == 0 {
                if N::CENTERED {
                    mean.set(row, means[r]);
                }
                rstd.set(row, rstds[r]);
            }
            for k in 0..PACKETS {
                if let Some(column) = self.column(k) {
                    let [w, b] = parameters(column);
                    let y = Packet::from_fn(|i| {
                        let x = x[r][k].get(i);
                        if N::CENTERED {
                            math::fma((x - means[r]) * rstds[r], w.get(i), b.get(i))
                        } else {
                            x * rstds[r] * w.get(i)
                        }
                    });
                    out.set_packet(row * self.channels + column, y);
                }
            }
        }
    }
}

/// Computes out (rows, C), mean (rows) and rstd (rows) from inp (rows, C), weight (C) and bias (C). RMSNorm uses neither mean
/// nor bias, its weight may be null, and it adds `eps` to the mean square.
///
/// Grid: [`RowShape::forward_grid`]. Shared memory: [`RowShape::forward_shared_bytes`].
#[kernel(
    threads = 256,
    axes(
        shape = [p2 = <2, 1, 1>, p1x4 = <1, 4, 2>, p1x8 = <1, 8, 2>, p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>],
        warp = [p3 = <3, 1, 1>, p4 = <4, 1, 1>, p6 = <6, 1, 1>, p8 = <8, 1, 1>]
    ),
    instances(
        [bf16 = bf16, f32 = f32] * [layernorm = LayerNorm, rmsnorm = RmsNorm] * shape,
        [bf16 = bf16] * [layernorm = LayerNorm, rmsnorm = RmsNorm] * warp
    ),
    select(N::KIND: NormKind, RowShape(PACKETS, WARPS, ROWS): RowShape)
)]
pub fn norm_forward<T: Element, N: Norm, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    out: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    eps: f32,
    rows: u32,
    channels: u32,
) {
    let (mut outputs, inputs) = (Outputs { out, mean, rstd }, Inputs { inp, weight, bias, eps, rows });
    normalize_rows::<T, N, _, PACKETS, WARPS, ROWS>(&mut Layout::new(), &mut outputs, &inputs, channels);
}

/// Does what [`norm_forward`] does in bf16, and quantizes out with a given scale (1) instead of storing it: its bits are those of
/// [`quantize`](crate::quantize::quantize) for an output in bf16 of a kernel of the same shape, as are those of `amax` (1), which may be
/// null.
///
/// Grid: [`RowShape::forward_grid`]. Shared memory: [`RowShape::forward_shared_bytes`].
#[kernel(
    threads = 256,
    axes(
        shape = [
            p2 = <2, 1, 1>, p3 = <3, 1, 1>, p4 = <4, 1, 1>, p6 = <6, 1, 1>, p8 = <8, 1, 1>,
            p4x8 = <4, 8, 1>, p8x8 = <8, 8, 1>
        ]
    ),
    instances([e4m3 = E4m3] * [layernorm = LayerNorm, rmsnorm = RmsNorm] * shape),
    select(N::KIND: NormKind, RowShape(PACKETS, WARPS, ROWS): RowShape)
)]
pub fn norm_forward_fp8<F: Fp8, N: Norm, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    out: GlobalMut<F>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    amax: GlobalMut<u32>,
    scale: Global<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    bias: Global<bf16>,
    eps: f32,
    rows: u32,
    channels: u32,
) {
    let mut layout = Layout::new();
    let maxima = quantize::maxima(&mut layout);
    let mut outputs = Outputs { out: QuantizedOutput::new(out, scale), mean, rstd };
    let inputs = Inputs { inp, weight, bias, eps, rows };
    normalize_rows::<bf16, N, _, PACKETS, WARPS, ROWS>(&mut layout, &mut outputs, &inputs, channels);
    if !amax.is_null() {
        store_block_amax(amax, maxima, outputs.out.magnitudes);
    }
}

/// Normalizes the block's rows.
#[inline(always)]
fn normalize_rows<T: Element, N: Norm, O: RowOutput<T>, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    layout: &mut Layout,
    outputs: &mut Outputs<O>,
    inputs: &Inputs<T>,
    channels: u32,
) {
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch(layout, MAX_ROWS));
    let (mut row, rows, inp) = (part.row(), inputs.rows as usize, inputs.inp);
    let weight = part.weight::<N>(inputs.weight);
    let bias = if N::CENTERED { Some(part.parameter(inputs.bias)) } else { None };
    let parameters = |column| [weight(column), bias.as_ref().map_or(Packet::zero(), |bias| bias(column))];
    if PACKETS > 1 {
        if row < rows {
            part.normalize::<N>(&part.load(inp, row, rows), row, 0, outputs, inputs, parameters);
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
        part.normalize::<N>(&x, row, stage, outputs, inputs, &parameters);
        row += step;
        stage = 1 - stage;
    }
}
