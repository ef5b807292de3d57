//! Layer normalization, forward and backward, against an f64 reference.

use crate::common::norm::{
    Backward, Norm, assert_orthogonal, check_gradients, check_quantization, exact_sums, noise_around, shapes,
};
use crate::common::{Tolerance, assert_close, assert_same, for_all, integers, noise, rounded, wide};
use gpu::norm::launch::{RowShape, sums_columns};
use proptest::prop_oneof;

tests! {
    kernels of "norm" where |entry| !entry.contains("rmsnorm");
    for both types: forward_matches_f64_reference, backward_matches_f64_reference, normed_has_mean_0_and_variance_1,
        shifting_rows_does_not_change_normed, constant_rows_normalize_to_the_bias, large_rows_do_not_overflow,
        nan_stays_in_its_row, dinp_is_orthogonal_to_ones_and_normed, dbias_of_integers_is_exact,
        column_sums_of_integers_are_exact, nan_gradients_stay_in_their_row_and_column, every_channel_count_has_a_shape;
    once: quantized_normed_has_the_bits_of_separate_quantization;
}

/// Returns LayerNorm with parameters of noise.
fn layernorm<T: Tolerance>(channels: usize) -> Norm<T> {
    Norm::layernorm(rounded(&noise(channels, 2)), rounded(&noise(channels, 3)))
}

/// Returns LayerNorm with weight 1 and bias 0.
fn plain<T: Tolerance>(channels: usize) -> Norm<T> {
    Norm::layernorm(vec![T::from_f32(1.0); channels], vec![T::from_f32(0.0); channels])
}

/// An offset of rows with which computing the variance as a difference of squares would be inaccurate.
const OFFSET: f64 = 3.0;

fn quantized_normed_has_the_bits_of_separate_quantization() {
    check_quantization(OFFSET, |channels, _| layernorm(channels));
}

fn forward_matches_f64_reference<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let x = noise_around::<T>(OFFSET, n, channels, 1);
        let (got, want) = (layernorm(channels).forward(&x), layernorm(channels).reference(&x));
        assert_close("normed", &got.out, &want.out, T::ROUNDING, 1.0);
        assert_close("mean", &got.mean, &want.mean, 1e-6, 1e-3);
        assert_close("rstd", &got.rstd, &want.rstd, 2e-6, 1e-3);
    }
}

fn normed_has_mean_0_and_variance_1<T: Tolerance>() {
    for_all(48, (1..20usize, 2..200usize, -8..8i32, 0..99u32), |(n, packets, exponent, seed)| {
        let (channels, scale) = (packets * T::PACKET, f64::from(exponent).exp2());
        let x: Vec<_> = noise(n * channels, seed).iter().map(|x| (x + 0.5) * scale).collect();
        let got = plain(channels).forward(&rounded::<T>(&x));
        for (row, rstd) in got.out.chunks(channels).zip(&got.rstd) {
            let mean = row.iter().sum::<f64>() / channels as f64;
            let variance = row.iter().map(|x| x * x).sum::<f64>() / channels as f64;
            // Epsilon reduces the variance to variance / (variance + 1e-5).
            assert_close("mean and variance", &[mean, variance], &[0.0, 1.0 - 1e-5 * rstd * rstd], T::ROUNDING, 1.0);
        }
    });
}

fn shifting_rows_does_not_change_normed<T: Tolerance>() {
    for_all(32, (1..10usize, 2..100usize, -64..64i32, 0..99u32), |(n, packets, shift, seed)| {
        let channels = packets * T::PACKET;
        let x = integers(n * channels, seed);
        let shifted: Vec<_> = x.iter().map(|x| x + f64::from(shift)).collect();
        let [unshifted, shifted] = [x, shifted].map(|x| plain(channels).forward(&rounded::<T>(&x)));
        assert_close("normed", &shifted.out, &unshifted.out, T::ROUNDING.max(2e-5), 1.0);
        assert_close("rstd", &shifted.rstd, &unshifted.rstd, 1e-5, 0.0);
        let means: Vec<_> = unshifted.mean.iter().map(|mean| mean + f64::from(shift)).collect();
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
            let got = Norm::layernorm(rounded(&noise(channels, 2)), bias.clone()).forward(&x);
            let exact = value.abs() < 1e4 && (value * channels as f64).fract() == 0.0;
            if exact {
                assert_same("mean", &got.mean, &vec![value; n]);
                assert_same(&format!("{value} in {channels} channels"), &got.out, &wide(&bias).repeat(n));
                assert_close("rstd", &got.rstd, &vec![1e-5f64.sqrt().recip(); n], 1e-6, 0.0);
            } else {
                assert_close("mean", &got.mean, &vec![value; n], 1e-6, 0.0);
                assert!(got.out.iter().all(|x| x.abs() < 4.0), "{value} in {channels} channels");
            }
        }
    }
}

/// The sum of squares would overflow, but the variance and normed values are finite.
fn large_rows_do_not_overflow<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let x: Vec<_> = noise(n * channels, 1).iter().map(|x| x * 2e18).collect();
        let x = rounded::<T>(&x);
        let (got, want) = (layernorm(channels).forward(&x), layernorm(channels).reference(&x));
        assert_close("normed", &got.out, &want.out, T::ROUNDING, 1.0);
        assert_close("mean", &got.mean, &want.mean, 1e-6, 1e18);
        assert_close("rstd", &got.rstd, &want.rstd, 2e-6, 0.0);
    }
}

/// The whole row becomes NaN. Other rows do not change.
fn nan_stays_in_its_row<T: Tolerance>() {
    for (n, channels) in [(10, 80), (10, 1024), (3, 1600), (3, 4096), (2, 8192)] {
        let mut x = noise(n * channels, 1);
        let mut want = plain(channels).forward(&rounded::<T>(&x));
        let at = channels + channels / 3;
        for bad in [f64::NAN, f64::INFINITY] {
            x[at] = bad;
            want.out[channels..2 * channels].fill(f64::NAN);
            want.rstd[1] = f64::NAN;
            let got = plain(channels).forward(&rounded::<T>(&x));
            assert!(!got.mean[1].is_finite());
            assert_close("normed", &got.out, &want.out, 0.0, 0.0);
            assert_close("rstd", &got.rstd, &want.rstd, 0.0, 0.0);
        }
    }
}

/// Returns operands of the backward kernels.
fn backward<T: Tolerance>(rows: usize, channels: usize, seed: u32) -> Backward<T> {
    let norm = Norm::layernorm(rounded(&noise(channels, seed + 2)), vec![T::from_f32(0.0); channels]);
    Backward::new(norm, noise_around(OFFSET, rows, channels, seed + 1), seed)
}

fn backward_matches_f64_reference<T: Tolerance>() {
    // With one or two SMs, each block processes several rows.
    let wide = [(77, 80), (69, 768), (11, 1600), (7, 4096), (5, 33 * 32 * T::PACKET)];
    for (n, channels) in shapes::<T>().chain(wide) {
        let case = backward::<T>(n, channels, 0);
        let got = case.run(1 + n % 2);
        check_gradients::<T>(&got, &case.reference(), 1.0);
        if sums_columns::<T>(channels) {
            let case = case.with_column_sums(9);
            let with_sums = case.run(1 + n % 2);
            check_gradients::<T>(&with_sums, &case.reference(), 1.0);
            assert!(with_sums[..3] == got, "{n} x {channels}: requesting column sums changes other gradients");
        }
    }
}

/// Shifting or scaling a row does not change normed, so dinp is orthogonal to ones and to normed.
fn dinp_is_orthogonal_to_ones_and_normed<T: Tolerance>() {
    for_all(32, (1..20usize, 1..160usize, 0..99u32), |(n, packets, seed)| {
        let channels = packets * T::PACKET;
        let mut case = backward::<T>(n, channels, seed);
        case.dinp.fill(T::from_f32(0.0));
        let dinp = &case.run(1)[0];
        assert_orthogonal::<T>(dinp, &vec![1.0; n * channels], channels);
        assert_orthogonal::<T>(dinp, &plain(channels).reference(&case.inp).out, channels);
    });
}

/// Sums of integers are exact, for any distribution of rows over blocks.
fn dbias_of_integers_is_exact<T: Tolerance>() {
    for_all(32, (1..120usize, 1..60usize, 1..4usize, 0..9u32), |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dout, dbias) = (integers(n * channels, seed), integers(channels, seed + 1));
        let mut case = backward::<T>(n, channels, seed);
        (case.dout, case.dbias) = (rounded(&dout), Some(rounded(&dbias)));
        assert_same("dbias", &case.run(sm_count)[2], &exact_sums::<T>(&dbias, &dout));
    });
}

/// With dout = 0 the column sums of an integer dinp are exact, in every shape that supports them.
fn column_sums_of_integers_are_exact<T: Tolerance>() {
    let shapes = (1..30usize, prop_oneof![129..257usize, 257..300usize], 1..4usize, 0..9u32);
    for_all(24, shapes, |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dinp, before) = (integers(n * channels, seed), integers(channels, seed + 1));
        let mut case = backward::<T>(n, channels, seed);
        case.dout.fill(T::from_f32(0.0));
        (case.dinp, case.column_sums) = (rounded(&dinp), Some(rounded(&before)));
        let got = case.run(sm_count);
        assert_same("dinp", &got[0], &dinp);
        assert_same("column sums", &got[3], &exact_sums::<T>(&before, &dinp));
    });
}

/// A NaN in dout spreads to its row of dinp and its column of dweight and dbias. A NaN in inp spreads to its row of
/// dinp and to all of dweight, because the reference statistics of the row become NaN.
fn nan_gradients_stay_in_their_row_and_column<T: Tolerance>() {
    for channels in [80, 1024, 1600, 4096] {
        let mut case = backward::<T>(5, channels, 0);
        let summed = sums_columns::<T>(channels);
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
        let mut inp = case.inp.clone();
        inp[4 * channels + 70] = T::from_f32(f32::NAN);
        case = case.with_inp(inp);
        want[0][4 * channels..].fill(f64::NAN);
        want[1].fill(f64::NAN);
        for (got, want) in case.run(1).iter().zip(&want) {
            assert_close("gradient", got, want, 0.0, 0.0);
        }
    }
}

fn every_channel_count_has_a_shape<T: Tolerance>() {
    assert!((T::PACKET..=64 * 32 * T::PACKET).step_by(T::PACKET).all(|channels| RowShape::of::<T>(channels).is_some()));
    assert_eq!(RowShape::of::<T>(T::PACKET + 1), None);
    assert_eq!(RowShape::of::<T>(64 * 32 * T::PACKET + T::PACKET), None);
}
