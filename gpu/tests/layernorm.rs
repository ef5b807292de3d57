//! Layer normalisation, forward, with the residual, and backward, against f64.

mod common;

use common::{Buffer, Tolerance, assert_close, emulate, noise, shared_bytes};
use gpu::column_sum;
use gpu::layernorm::{Shape, dispatch, forward_shared, layernorm_backward_reduce};

for_both_types!(forward, residual_forward, backward, every_width_has_a_shape);

/// (rows, C): one row; C = 80 leaves lanes idle; each shape of both types; rows that fill no block.
const SHAPES: [(usize, usize); 8] =
    [(1, 8), (13, 80), (9, 384), (17, 768), (10, 1024), (3, 1600), (2, 4096), (2, 8192)];

struct Reference {
    normed: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
}

fn reference(x: &[f64], weight: &[f64], bias: &[f64]) -> Reference {
    let channels = weight.len();
    let mut want = Reference { normed: vec![], mean: vec![], rstd: vec![] };
    for row in x.chunks(channels) {
        let mean = row.iter().sum::<f64>() / channels as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / channels as f64;
        let rstd = 1.0 / (variance + 1e-5).sqrt();
        want.normed.extend(row.iter().enumerate().map(|(c, x)| (x - mean) * rstd * weight[c] + bias[c]));
        want.mean.push(mean);
        want.rstd.push(rstd);
    }
    want
}

/// Rows with an offset, so that a variance computed as a difference of squares would show.
fn rows<T: Tolerance>(rows: usize, channels: usize, seed: u32) -> Buffer<T> {
    Buffer::of(&noise(rows * channels, seed).iter().map(|x| x + 3.0).collect::<Vec<_>>())
}

fn forward<T: Tolerance>() {
    for (n, channels) in SHAPES {
        let shape = Shape::of::<T>(channels).unwrap();
        let x = rows::<T>(n, channels, 1);
        let (weight, bias) = (Buffer::<T>::of(&noise(channels, 2)), Buffer::<T>::of(&noise(channels, 3)));
        let mut normed = Buffer::<T>::filled(n * channels, f32::NAN);
        let (mut mean, mut rstd) = (Buffer::<f32>::filled(n, f32::NAN), Buffer::<f32>::filled(n, f32::NAN));
        let launch = dispatch!(
            shape,
            layernorm_forward::<T>(
                normed.view_mut(),
                mean.view_mut(),
                rstd.view_mut(),
                x.view(),
                weight.view(),
                bias.view(),
                n as u32,
                channels as u32
            )
        );
        emulate(&launch, shape.forward_grid(n), shared_bytes(forward_shared));
        let want = reference(&x.to_f64(), &weight.to_f64(), &bias.to_f64());
        assert_close("normed", &normed.to_f64(), &want.normed, T::ROUNDING, 1.0);
        assert_close("mean", &mean.to_f64(), &want.mean, 1e-5, 1e-3);
        assert_close("rstd", &rstd.to_f64(), &want.rstd, 1e-5, 1e-3);
    }
}

fn residual_forward<T: Tolerance>() {
    for (n, channels) in SHAPES {
        let shape = Shape::of::<T>(channels).unwrap();
        let (a, b) = (rows::<T>(n, channels, 1), rows::<T>(n, channels, 4));
        let (weight, bias) = (Buffer::<T>::of(&noise(channels, 2)), Buffer::<T>::of(&noise(channels, 3)));
        let mut residual = Buffer::<T>::filled(n * channels, f32::NAN);
        let mut normed = Buffer::<T>::filled(n * channels, f32::NAN);
        let (mut mean, mut rstd) = (Buffer::<f32>::filled(n, f32::NAN), Buffer::<f32>::filled(n, f32::NAN));
        let launch = dispatch!(
            shape,
            residual_layernorm_forward::<T>(
                residual.view_mut(),
                normed.view_mut(),
                mean.view_mut(),
                rstd.view_mut(),
                a.view(),
                b.view(),
                weight.view(),
                bias.view(),
                n as u32,
                channels as u32
            )
        );
        emulate(&launch, shape.forward_grid(n), shared_bytes(forward_shared));
        let sum: Vec<_> = a.to_f64().iter().zip(b.to_f64()).map(|(a, b)| a + b).collect();
        // Rounded to T as the kernel must: exactly.
        let sum = Buffer::<T>::of(&sum).to_f64();
        assert_eq!(residual.to_f64(), sum);
        let want = reference(&sum, &weight.to_f64(), &bias.to_f64());
        assert_close("normed", &normed.to_f64(), &want.normed, T::ROUNDING, 1.0);
        assert_close("mean", &mean.to_f64(), &want.mean, 1e-5, 1e-3);
        assert_close("rstd", &rstd.to_f64(), &want.rstd, 1e-5, 1e-3);
    }
}

fn backward<T: Tolerance>() {
    // Two multiprocessors: the grid is smaller than the rows ask for, and blocks take several rows.
    let multiprocessors = 2;
    for (n, channels) in
        SHAPES.into_iter().chain([(77, 80), (69, 768), (11, 1600), (7, 4096), (5, 33 * 32 * T::PACKET)])
    {
        let shape = Shape::of::<T>(channels).unwrap();
        let (x, dout) = (rows::<T>(n, channels, 1), Buffer::<T>::of(&noise(n * channels, 5)));
        let weight = Buffer::<T>::of(&noise(channels, 2));
        let stats = reference(&x.to_f64(), &weight.to_f64(), &weight.to_f64());
        let (mean, rstd) = (Buffer::<f32>::of(&stats.mean), Buffer::<f32>::of(&stats.rstd));
        let mut dinp = Buffer::<T>::of(&noise(n * channels, 6));
        let (mut dweight, mut dbias) = (Buffer::<T>::of(&noise(channels, 7)), Buffer::<T>::of(&noise(channels, 8)));

        let mut want = [dinp.to_f64(), dweight.to_f64(), dbias.to_f64()];
        let (xs, dys, ws) = (x.to_f64(), dout.to_f64(), weight.to_f64());
        for row in 0..n {
            let at = |c: usize| row * channels + c;
            let normed = |c: usize| (xs[at(c)] - stats.mean[row]) * stats.rstd[row];
            let dnormed = |c: usize| dys[at(c)] * ws[c];
            let mean = (0..channels).map(dnormed).sum::<f64>() / channels as f64;
            let projection = (0..channels).map(|c| dnormed(c) * normed(c)).sum::<f64>() / channels as f64;
            for c in 0..channels {
                want[0][at(c)] += (dnormed(c) - mean - normed(c) * projection) * stats.rstd[row];
                want[1][c] += dys[at(c)] * normed(c);
                want[2][c] += dys[at(c)];
            }
        }

        let grid = shape.backward_grid(n, multiprocessors);
        let size = shape.backward_partials(n, channels, multiprocessors);
        let mut partials = Buffer::<f32>::filled(size, f32::NAN);
        let launch = dispatch!(
            shape,
            layernorm_backward::<T>(
                dinp.view_mut(),
                partials.view_mut(),
                dout.view(),
                x.view(),
                weight.view(),
                mean.view(),
                rstd.view(),
                n as u32,
                channels as u32
            )
        );
        emulate(&launch, grid, shape.backward_shared_bytes::<T>());
        let launch =
            layernorm_backward_reduce(dweight.view_mut(), dbias.view_mut(), partials.view(), grid, channels as u32);
        emulate(&launch, column_sum::grid(2 * channels), shared_bytes(column_sum::shared));
        assert_close("dinp", &dinp.to_f64(), &want[0], T::ROUNDING, 1.0);
        assert_close("dweight", &dweight.to_f64(), &want[1], T::ROUNDING, 1.0);
        assert_close("dbias", &dbias.to_f64(), &want[2], T::ROUNDING, 1.0);
    }
}

fn every_width_has_a_shape<T: Tolerance>() {
    assert!((T::PACKET..=8192).step_by(T::PACKET).all(|channels| Shape::of::<T>(channels).is_some()));
    assert_eq!(Shape::of::<T>(T::PACKET + 1), None);
    assert_eq!(Shape::of::<T>(64 * 32 * T::PACKET + T::PACKET), None);
}
