//! Layer normalization, forward and backward, against an f64 reference.

use crate::common::norm::shapes;
use crate::common::{
    Tolerance, assert_close, assert_same, for_all, integers, noise, quantized, read, rounded, run, shared_bytes, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::{E4m3, Element, GlobalMut, bf16};
use gpu::column_sum;
use gpu::layernorm::{
    layernorm_backward_reduce, layernorm_backward_select, layernorm_forward_fp8_select, layernorm_forward_select,
    reduce_grid,
};
use gpu::norm_rows::Shape;
use proptest::prop_oneof;

tests! {
    kernels of "layernorm.rs";
    for both types: forward_matches_f64_reference, backward_matches_f64_reference, normed_has_mean_0_and_variance_1,
        shifting_rows_does_not_change_normed, constant_rows_normalize_to_the_bias, large_rows_do_not_overflow,
        nan_stays_in_its_row, dinp_is_orthogonal_to_ones_and_normed, dbias_of_integers_is_exact,
        column_sums_of_integers_are_exact, nan_gradients_stay_in_their_row_and_column, every_channel_count_has_a_shape;
    once: quantized_normed_has_the_bits_of_separate_quantization;
}

struct Forward {
    normed: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
}

fn reference(x: &[f64], weight: &[f64], bias: &[f64]) -> Forward {
    let channels = weight.len();
    let mut want = Forward { normed: vec![], mean: vec![], rstd: vec![] };
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

fn normalize<T: Tolerance>(x: &[T], weight: &[T], bias: &[T]) -> Forward {
    let (rows, channels) = (x.len() / weight.len(), weight.len());
    let shape = Shape::of::<T>(channels).unwrap();
    let mut memory = Memory::new();
    let (weight, bias) = (memory.input("weight", weight), memory.input("bias", bias));
    let inp = memory.input("inp", x);
    let normed = memory.output::<T>("normed", x.len());
    let (mean, rstd) = (memory.output::<f32>("mean", rows), memory.output::<f32>("rstd", rows));
    let (n, c) = (rows as u32, channels as u32);
    let launch = layernorm_forward_select::<T>(shape.arguments(), normed, mean, rstd, inp, weight, bias, n, c)
        .expect("an instance");
    // One SM, so that each block processes several rows.
    run(&mut memory, &launch, shape.forward_grid(rows, 1), shape.forward_shared_bytes::<T>());
    Forward { normed: read(&memory, normed), mean: read(&memory, mean), rstd: read(&memory, rstd) }
}

/// Quantizes the normalized rows in the kernel that computes them, and checks every output.
fn check_quantized(n: usize, channels: usize, scale: f32, bad: Option<f32>) {
    let mut x = rows::<bf16>(n, channels, 1);
    if let Some(bad) = bad {
        x[n * channels - 1] = bf16::from_f32(bad);
    }
    let (weight, bias) = (rounded::<bf16>(&noise(channels, 2)), rounded::<bf16>(&noise(channels, 3)));
    let want = normalize(&x, &weight, &bias);
    let shape = Shape::of::<bf16>(channels).unwrap();
    for amax_before in [None, Some(0.0f32), Some(1e9)] {
        let mut memory = Memory::new();
        let (weight, bias) = (memory.input("weight", &weight), memory.input("bias", &bias));
        let (inp, scale_) = (memory.input("inp", &x), memory.input("scale", &[scale]));
        let normed = memory.output::<E4m3>("normed", x.len());
        let (mean, rstd) = (memory.output::<f32>("mean", n), memory.output::<f32>("rstd", n));
        let amax = amax_before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let (r, c) = (n as u32, channels as u32);
        let launch = layernorm_forward_fp8_select::<E4m3>(
            shape.arguments(),
            normed,
            mean,
            rstd,
            amax,
            scale_,
            inp,
            weight,
            bias,
            r,
            c,
        )
        .expect("an instance");
        run(&mut memory, &launch, shape.forward_fp8_grid(n, 1), shape.forward_fp8_shared_bytes());
        quantized::check(&memory, normed, &want.normed, scale, amax_before.map(|before| (amax, before)));
        assert_same("mean", &read(&memory, mean), &want.mean);
        assert_same("rstd", &read(&memory, rstd), &want.rstd);
    }
}

fn quantized_normed_has_the_bits_of_separate_quantization() {
    for (i, (n, channels)) in shapes::<bf16>().enumerate() {
        // The smaller scales saturate.
        check_quantized(n, channels, [1.0 / 64.0, 1.0 / 300.0, 0.7][i % 3], None);
    }
    for channels in [80, 1024, 1600, 4096, 8192] {
        check_quantized(10, channels, 0.01, Some(f32::NAN));
        check_quantized(3, channels, 0.01, Some(f32::INFINITY));
    }
}

/// Normalizes with weight 1 and bias 0.
fn plain<T: Tolerance>(x: &[T], channels: usize) -> Forward {
    normalize(x, &vec![T::from_f32(1.0); channels], &vec![T::from_f32(0.0); channels])
}

/// Rows with an offset, for which computing the variance as a difference of squares would be inaccurate.
fn rows<T: Tolerance>(rows: usize, channels: usize, seed: u32) -> Vec<T> {
    rounded(&noise(rows * channels, seed).iter().map(|x| x + 3.0).collect::<Vec<_>>())
}

fn check_normed<T: Tolerance>(got: &Forward, want: &Forward) {
    assert_close("normed", &got.normed, &want.normed, T::ROUNDING, 1.0);
    assert_close("mean", &got.mean, &want.mean, 1e-6, 1e-3);
    assert_close("rstd", &got.rstd, &want.rstd, 2e-6, 1e-3);
}

fn forward_matches_f64_reference<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let x = rows::<T>(n, channels, 1);
        let (weight, bias) = (rounded::<T>(&noise(channels, 2)), rounded::<T>(&noise(channels, 3)));
        let want = reference(&wide(&x), &wide(&weight), &wide(&bias));
        check_normed::<T>(&normalize(&x, &weight, &bias), &want);
    }
}

fn normed_has_mean_0_and_variance_1<T: Tolerance>() {
    for_all(48, (1..20usize, 2..200usize, -8..8i32, 0..99u32), |(n, packets, exponent, seed)| {
        let (channels, scale) = (packets * T::PACKET, f64::from(exponent).exp2());
        let x: Vec<_> = noise(n * channels, seed).iter().map(|x| (x + 0.5) * scale).collect();
        let got = plain(&rounded::<T>(&x), channels);
        for (row, rstd) in got.normed.chunks(channels).zip(&got.rstd) {
            let mean = row.iter().sum::<f64>() / channels as f64;
            let variance = row.iter().map(|x| x * x).sum::<f64>() / channels as f64;
            // Epsilon reduces the variance to variance / (variance + 1e-5).
            assert_close("mean and variance", &[mean, variance], &[0.0, 1.0 - 1e-5 * rstd * rstd], T::ROUNDING, 1.0);
        }
    });
}

fn shifting_rows_does_not_change_normed<T: Tolerance>() {
    for_all(32, (1..10usize, 2..100usize, -64..64i32, 0..99u32), |(n, packets, shift, seed)| {
        let x = integers(n * packets * T::PACKET, seed);
        let shifted: Vec<_> = x.iter().map(|x| x + f64::from(shift)).collect();
        let (x, shifted) = (rounded::<T>(&x), rounded::<T>(&shifted));
        let (plain, shifted) = (plain(&x, packets * T::PACKET), plain(&shifted, packets * T::PACKET));
        assert_close("normed", &shifted.normed, &plain.normed, T::ROUNDING.max(2e-5), 1.0);
        assert_close("rstd", &shifted.rstd, &plain.rstd, 1e-5, 0.0);
        let means: Vec<_> = plain.mean.iter().map(|mean| mean + f64::from(shift)).collect();
        assert_close("mean", &shifted.mean, &means, 1e-6, 8.0);
    });
}

/// A constant row has variance 0 and normalizes to the bias, exactly if its sum is exact.
fn constant_rows_normalize_to_the_bias<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        for value in [0.0, 1.0, -3.0, 1000.0, 1e-3, 1e30] {
            let x = vec![T::from_f32(T::nearest(value)); n * channels];
            let value = f64::from(x[0].to_f32());
            let bias = rounded::<T>(&noise(channels, 3));
            let got = normalize(&x, &rounded::<T>(&noise(channels, 2)), &bias);
            let exact = value.abs() < 1e4 && (value * channels as f64).fract() == 0.0;
            if exact {
                assert_same("mean", &got.mean, &vec![value; n]);
                assert_same(&format!("{value} in {channels} channels"), &got.normed, &wide(&bias).repeat(n));
                assert_close("rstd", &got.rstd, &vec![1e-5f64.sqrt().recip(); n], 1e-6, 0.0);
            } else {
                assert_close("mean", &got.mean, &vec![value; n], 1e-6, 0.0);
                assert!(got.normed.iter().all(|x| x.abs() < 4.0), "{value} in {channels} channels");
            }
        }
    }
}

/// The sum of squares would overflow, but the variance and normed values are finite.
fn large_rows_do_not_overflow<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let x: Vec<_> = noise(n * channels, 1).iter().map(|x| x * 2e18).collect();
        let x = rounded::<T>(&x);
        let (weight, bias) = (rounded::<T>(&noise(channels, 2)), rounded::<T>(&noise(channels, 3)));
        let want = reference(&wide(&x), &wide(&weight), &wide(&bias));
        let got = normalize(&x, &weight, &bias);
        assert_close("normed", &got.normed, &want.normed, T::ROUNDING, 1.0);
        assert_close("mean", &got.mean, &want.mean, 1e-6, 1e18);
        assert_close("rstd", &got.rstd, &want.rstd, 2e-6, 0.0);
    }
}

/// The whole row becomes NaN. Other rows do not change.
fn nan_stays_in_its_row<T: Tolerance>() {
    for (n, channels) in [(10, 80), (10, 1024), (3, 1600), (3, 4096), (2, 8192)] {
        let mut x = noise(n * channels, 1);
        let mut want = plain(&rounded::<T>(&x), channels);
        let at = channels + channels / 3;
        for bad in [f64::NAN, f64::INFINITY] {
            x[at] = bad;
            want.normed[channels..2 * channels].fill(f64::NAN);
            want.rstd[1] = f64::NAN;
            let got = plain(&rounded::<T>(&x), channels);
            assert!(!got.mean[1].is_finite());
            assert_close("normed", &got.normed, &want.normed, 0.0, 0.0);
            assert_close("rstd", &got.rstd, &want.rstd, 0.0, 0.0);
        }
    }
}

/// The inputs of the backward kernels, with their previous gradients.
struct Backward<T> {
    dinp: Vec<T>,
    dweight: Vec<T>,
    dbias: Vec<T>,
    /// `None` if the kernels do not compute column sums.
    column_sums: Option<Vec<T>>,
    dout: Vec<T>,
    inp: Vec<T>,
    weight: Vec<T>,
}

impl<T: Tolerance> Backward<T> {
    fn new(rows: usize, channels: usize, seed: u32) -> Self {
        let size = rows * channels;
        Self {
            dinp: rounded(&noise(size, seed + 6)),
            dweight: rounded(&noise(channels, seed + 7)),
            dbias: rounded(&noise(channels, seed + 8)),
            column_sums: None,
            dout: rounded(&noise(size, seed + 5)),
            inp: self::rows(rows, channels, seed + 1),
            weight: rounded(&noise(channels, seed + 2)),
        }
    }

    fn with_column_sums(self, seed: u32) -> Self {
        Self { column_sums: Some(rounded(&noise(self.weight.len(), seed))), ..self }
    }

    /// Returns the new dinp, dweight, dbias and, if requested, column sums.
    fn run(&self, sm_count: usize) -> Vec<Vec<f64>> {
        let channels = self.weight.len();
        let rows = self.inp.len() / channels;
        let shape = Shape::of::<T>(channels).unwrap();
        let stats = reference(&wide(&self.inp), &wide(&self.weight), &wide(&self.weight));
        let mut memory = Memory::new();
        let (dout, inp) = (memory.input("dout", &self.dout), memory.input("inp", &self.inp));
        let weight = memory.input("weight", &self.weight);
        let mean = memory.input("mean", &rounded::<f32>(&stats.mean));
        let rstd = memory.input("rstd", &rounded::<f32>(&stats.rstd));
        let dinp = memory.buffer("dinp", &self.dinp);
        let (dweight, dbias) = (memory.buffer("dweight", &self.dweight), memory.buffer("dbias", &self.dbias));
        let column_sums = self.column_sums.as_ref().map(|sums| memory.buffer("column_sums", sums));
        let (grid, summed) = (shape.backward_grid(rows, sm_count), column_sums.is_some());
        let partials = shape.backward_partials(rows, channels, sm_count, summed);
        let partials = memory.output::<f32>("partials", partials);
        let (n, c) = (rows as u32, channels as u32);
        let (packets, warps, group_rows) = shape.arguments();
        let key = (packets, warps, group_rows, summed);
        let launch = layernorm_backward_select::<T>(key, dinp, partials, dout, inp, weight, mean, rstd, n, c)
            .expect("an instance");
        run(&mut memory, &launch, grid, shape.backward_shared_bytes::<T>());
        let none = GlobalMut::new(std::ptr::null_mut());
        let launch = layernorm_backward_reduce(dweight, dbias, column_sums.unwrap_or(none), partials.reader(), grid, c);
        run(&mut memory, &launch, reduce_grid(channels, summed), shared_bytes(column_sum::shared));
        [dinp, dweight, dbias].into_iter().chain(column_sums).map(|view| read(&memory, view)).collect()
    }

    fn reference(&self) -> Vec<Vec<f64>> {
        let channels = self.weight.len();
        let before = [&self.dinp, &self.dweight, &self.dbias].into_iter().chain(&self.column_sums);
        let mut want: Vec<_> = before.map(|values| wide(values)).collect();
        let (xs, dys, ws) = (wide(&self.inp), wide(&self.dout), wide(&self.weight));
        let stats = reference(&xs, &ws, &ws);
        for (row, (mean, rstd)) in stats.mean.iter().zip(&stats.rstd).enumerate() {
            let at = |c: usize| row * channels + c;
            let normed = |c: usize| (xs[at(c)] - mean) * rstd;
            let dnormed = |c: usize| dys[at(c)] * ws[c];
            let mean = (0..channels).map(dnormed).sum::<f64>() / channels as f64;
            let projection = (0..channels).map(|c| dnormed(c) * normed(c)).sum::<f64>() / channels as f64;
            for c in 0..channels {
                want[0][at(c)] += (dnormed(c) - mean - normed(c) * projection) * rstd;
                want[1][c] += dys[at(c)] * normed(c);
                want[2][c] += dys[at(c)];
                let dinp = want[0][at(c)];
                if let Some(column_sums) = want.get_mut(3) {
                    column_sums[c] += dinp;
                }
            }
        }
        want
    }
}

fn check_gradients<T: Tolerance>(got: &[Vec<f64>], want: &[Vec<f64>]) {
    assert_eq!(got.len(), want.len());
    for (what, (got, want)) in ["dinp", "dweight", "dbias", "column sums"].into_iter().zip(got.iter().zip(want)) {
        assert_close(what, got, want, T::ROUNDING, 1.0);
    }
}

fn backward_matches_f64_reference<T: Tolerance>() {
    // With one or two SMs, each block processes several rows.
    let wide = [(77, 80), (69, 768), (11, 1600), (7, 4096), (5, 33 * 32 * T::PACKET)];
    for (n, channels) in shapes::<T>().chain(wide) {
        let case = Backward::<T>::new(n, channels, 0);
        let (got, want) = (case.run(1 + n % 2), case.reference());
        check_gradients::<T>(&got, &want);
        if Shape::of::<T>(channels).is_some_and(Shape::sums_columns::<T>) {
            let case = case.with_column_sums(9);
            let (with_sums, want) = (case.run(1 + n % 2), case.reference());
            check_gradients::<T>(&with_sums, &want);
            assert!(with_sums[..3] == got, "{n} x {channels}: requesting column sums changes other gradients");
        }
    }
}

/// Shifting or scaling a row does not change normed, so dinp is orthogonal to ones and to normed.
fn dinp_is_orthogonal_to_ones_and_normed<T: Tolerance>() {
    for_all(32, (1..20usize, 1..160usize, 0..99u32), |(n, packets, seed)| {
        let channels = packets * T::PACKET;
        let mut case = Backward::<T>::new(n, channels, seed);
        case.dinp.fill(T::from_f32(0.0));
        let stats = reference(&wide(&case.inp), &vec![1.0; channels], &vec![0.0; channels]);
        let got = case.run(1);
        for (dinp, normed) in got[0].chunks(channels).zip(stats.normed.chunks(channels)) {
            let size = dinp.iter().map(|x| x.abs()).sum::<f64>().max(1e-3);
            let stretch: f64 = dinp.iter().zip(normed).map(|(d, x)| d * x).sum();
            // Epsilon breaks the invariance under scaling slightly.
            let found = [dinp.iter().sum::<f64>() / size, stretch / size];
            assert_close("shift and stretch", &found, &[0.0, 0.0], T::ROUNDING.max(1e-3), 1.0);
        }
    });
}

/// Sums of integers are exact, for any distribution of rows over blocks.
fn dbias_of_integers_is_exact<T: Tolerance>() {
    for_all(32, (1..120usize, 1..60usize, 1..4usize, 0..9u32), |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dout, dbias) = (integers(n * channels, seed), integers(channels, seed + 1));
        let mut case = Backward::<T>::new(n, channels, seed);
        (case.dout, case.dbias) = (rounded(&dout), rounded(&dbias));
        let sum = |c: usize| dbias[c] + dout.iter().skip(c).step_by(channels).sum::<f64>();
        let want: Vec<_> = (0..channels).map(|c| f64::from(T::nearest(sum(c) as f32))).collect();
        assert_same("dbias", &case.run(sm_count)[2], &want);
    });
}

/// With dout = 0 the column sums of an integer dinp are exact, in every shape that supports them.
fn column_sums_of_integers_are_exact<T: Tolerance>() {
    let shapes = (1..30usize, prop_oneof![129..257usize, 257..300usize], 1..4usize, 0..9u32);
    for_all(24, shapes, |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dinp, before) = (integers(n * channels, seed), integers(channels, seed + 1));
        let mut case = Backward::<T>::new(n, channels, seed);
        case.dout.fill(T::from_f32(0.0));
        (case.dinp, case.column_sums) = (rounded(&dinp), Some(rounded(&before)));
        let sum = |c: usize| before[c] + dinp.iter().skip(c).step_by(channels).sum::<f64>();
        let want: Vec<_> = (0..channels).map(|c| f64::from(T::nearest(sum(c) as f32))).collect();
        let got = case.run(sm_count);
        assert_same("dinp", &got[0], &dinp);
        assert_same("column sums", &got[3], &want);
    });
}

/// A NaN in dout spreads to its row of dinp and its column of dweight and dbias. A NaN in inp spreads to its row of
/// dinp and to all of dweight, because the reference statistics of the row become NaN.
fn nan_gradients_stay_in_their_row_and_column<T: Tolerance>() {
    for channels in [80, 1024, 1600, 4096] {
        let mut case = Backward::<T>::new(5, channels, 0);
        let summed = Shape::of::<T>(channels).is_some_and(Shape::sums_columns::<T>);
        case = if summed { case.with_column_sums(9) } else { case };
        let mut want = case.run(1);
        case.dout[2 * channels + 9] = T::from_f32(f32::NAN);
        want[0][2 * channels..3 * channels].fill(f64::NAN);
        (want[1][9], want[2][9]) = (f64::NAN, f64::NAN);
        if summed {
            want[3].fill(f64::NAN);
        }
        for (got, want) in case.run(1).iter().zip(&want) {
            assert_close("gradient", got, want, 0.0, 0.0);
        }
        case.inp[4 * channels + 70] = T::from_f32(f32::NAN);
        want[0][4 * channels..].fill(f64::NAN);
        want[1].fill(f64::NAN);
        for (got, want) in case.run(1).iter().zip(&want) {
            assert_close("gradient", got, want, 0.0, 0.0);
        }
    }
}

fn every_channel_count_has_a_shape<T: Tolerance>() {
    assert!((T::PACKET..=64 * 32 * T::PACKET).step_by(T::PACKET).all(|channels| Shape::of::<T>(channels).is_some()));
    assert_eq!(Shape::of::<T>(T::PACKET + 1), None);
    assert_eq!(Shape::of::<T>(64 * 32 * T::PACKET + T::PACKET), None);
}
