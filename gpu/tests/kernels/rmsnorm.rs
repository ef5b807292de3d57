//! RMS normalization, forward and backward, against an f64 reference.

use crate::common::norm::{
    Backward, Norm, assert_orthogonal, check_gradients, check_quantization, exact_sums, noise_around, shapes,
};
use crate::common::{Tolerance, assert_close, assert_same, for_all, integers, noise, rounded, wide};
use gpu::norm::launch::{NormKind, Size, backward_partials};
use proptest::bool::ANY;

tests! {
    kernels of "norm" where |entry| !entry.contains("layernorm");
    for both types: forward_matches_f64_reference, out_has_mean_square_1, scaled_rows_normalize_to_the_same_bits,
        zero_rows_normalize_to_zero, large_rows_do_not_overflow, small_rows_do_not_underflow, nan_stays_in_its_row,
        backward_matches_f64_reference, gradients_of_large_and_small_rows_are_finite, dinp_is_orthogonal_to_inp,
        dweight_of_integers_is_exact, ones_as_weight_change_nothing, nan_gradients_stay_in_their_row_and_column,
        unsupported_channels_have_no_kernel;
    once: quantized_out_has_the_bits_of_separate_quantization;
}

const EPS: f32 = 1e-5;

/// Returns RMSNorm without weight.
fn plain<T: Tolerance>(channels: usize, eps: f32) -> Norm<T> {
    Norm::rmsnorm(channels, None, eps)
}

/// The offset of rows of noise.
const OFFSET: f64 = 0.3;

fn quantized_out_has_the_bits_of_separate_quantization() {
    let weight = |channels, weighted: bool| weighted.then(|| rounded(&noise(channels, 2)));
    check_quantization(OFFSET, |channels, weighted| Norm::rmsnorm(channels, weight(channels, weighted), EPS));
}

/// Checks the forward kernel with and without weight on rows of `noise`, multiplied by `scale`.
fn check_forward<T: Tolerance>((n, channels): (usize, usize), scale: f64, eps: f32) {
    let x: Vec<_> = noise(n * channels, 1).iter().map(|x| (x + OFFSET) * scale).collect();
    let x = rounded::<T>(&x);
    for weight in [None, Some(rounded(&noise(channels, 2)))] {
        let norm = Norm::rmsnorm(channels, weight, eps);
        let (got, want) = (norm.forward(&x), norm.reference(&x));
        let largest = want.out.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        assert_close("out", &got.out, &want.out, T::ROUNDING, largest / 4.0);
        assert_close("rstd", &got.rstd, &want.rstd, 2e-6, 0.0);
    }
}

fn forward_matches_f64_reference<T: Tolerance>() {
    for (i, shape) in shapes::<T>().enumerate() {
        check_forward::<T>(shape, 1.0, [1e-6, EPS, 0.5][i % 3]);
    }
}

/// The sum of squares would overflow, but their mean and rstd are finite.
fn large_rows_do_not_overflow<T: Tolerance>() {
    for shape in shapes::<T>() {
        check_forward::<T>(shape, 2e18, EPS);
    }
}

/// Squares that are not normal numbers vanish beside eps.
fn small_rows_do_not_underflow<T: Tolerance>() {
    for scale in [1e-3, 1e-12, 1e-21, 1e-34] {
        check_forward::<T>((5, 384), scale, EPS);
        check_forward::<T>((3, 80), scale, 1e-6);
    }
}

fn out_has_mean_square_1<T: Tolerance>() {
    for_all(48, (1..20usize, 2..200usize, -8..8i32, 0..99u32), |(n, packets, exponent, seed)| {
        let (channels, scale) = (packets * T::PACKET, f64::from(exponent).exp2());
        let x: Vec<_> = noise(n * channels, seed).iter().map(|x| (x + 0.5) * scale).collect();
        let got = plain(channels, EPS).forward(&rounded::<T>(&x));
        for (row, rstd) in got.out.chunks(channels).zip(&got.rstd) {
            let square = row.iter().map(|x| x * x).sum::<f64>() / channels as f64;
            // Epsilon reduces the mean square m to m / (m + eps).
            assert_close("mean square", &[square], &[1.0 - f64::from(EPS) * rstd * rstd], T::ROUNDING, 1.0);
        }
    });
}

/// Multiplying x by a power of two and eps by its square multiplies every intermediate result by a power of two.
fn scaled_rows_normalize_to_the_same_bits<T: Tolerance>() {
    for_all(32, (1..10usize, 1..150usize, -10..10i32, 0..99u32), |(n, packets, exponent, seed)| {
        let (channels, scale) = (packets * T::PACKET, f64::from(exponent).exp2());
        let x = rounded::<T>(&noise(n * channels, seed));
        let scaled = rounded::<T>(&wide(&x).iter().map(|x| x * scale).collect::<Vec<_>>());
        let weight = rounded::<T>(&noise(channels, seed + 1));
        let norm = |eps| Norm::rmsnorm(channels, Some(weight.clone()), eps);
        let (unscaled, scaled) = (norm(0.25).forward(&x), norm(0.25 * (scale * scale) as f32).forward(&scaled));
        assert_same("out", &scaled.out, &unscaled.out);
        assert_same("rstd", &scaled.rstd, &unscaled.rstd.iter().map(|rstd| rstd / scale).collect::<Vec<_>>());
    });
}

/// rstd of a row of zeros is 1 / sqrt(eps).
fn zero_rows_normalize_to_zero<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        for eps in [1e-6, EPS, 1.0] {
            let got = plain(channels, eps).forward(&vec![T::from_f32(0.0); n * channels]);
            assert_same("out", &got.out, &vec![0.0; n * channels]);
            assert_close("rstd", &got.rstd, &vec![f64::from(eps).sqrt().recip(); n], 1e-6, 0.0);
        }
    }
}

/// A NaN makes its whole row NaN. An infinity has rstd 0, so its own place becomes NaN and the others 0. Other rows do
/// not change.
fn nan_stays_in_its_row<T: Tolerance>() {
    for (n, channels) in [(10, 80), (10, 1024), (3, 1600), (3, 4096), (2, 8192)] {
        let mut x = noise(n * channels, 1);
        let mut want = plain(channels, EPS).forward(&rounded::<T>(&x));
        let at = channels + channels / 3;
        for (bad, others, rstd) in [(f64::NAN, f64::NAN, f64::NAN), (f64::INFINITY, 0.0, 0.0)] {
            x[at] = bad;
            want.out[channels..2 * channels].fill(others);
            (want.out[at], want.rstd[1]) = (f64::NAN, rstd);
            let got = plain(channels, EPS).forward(&rounded::<T>(&x));
            assert_close("out", &got.out, &want.out, 0.0, 0.0);
            assert_close("rstd", &got.rstd, &want.rstd, 0.0, 0.0);
        }
    }
}

/// Returns operands of the backward kernels.
fn backward<T: Tolerance>(rows: usize, channels: usize, weighted: bool, seed: u32) -> Backward<T> {
    let norm = Norm::rmsnorm(channels, weighted.then(|| rounded(&noise(channels, seed + 2))), EPS);
    Backward::new(norm, noise_around(OFFSET, rows, channels, seed + 1), seed)
}

fn backward_matches_f64_reference<T: Tolerance>() {
    // With one or two SMs, each block processes several rows.
    let wide = [(77, 80), (69, 896), (11, 1600), (7, 4096), (5, 33 * 32 * T::PACKET)];
    for (n, channels) in shapes::<T>().chain(wide) {
        for weighted in [true, false] {
            let case = backward::<T>(n, channels, weighted, 0);
            check_gradients::<T>(&case.run(1 + n % 2), &case.reference(), 1.0);
        }
    }
}

/// rstd compensates the size of inp, so no intermediate result overflows.
fn gradients_of_large_and_small_rows_are_finite<T: Tolerance>() {
    for scale in [2e18, 1e-3, 1e-20, 1e-34] {
        for (n, channels) in [(5, 80), (5, 896), (3, 2048), (2, 4096), (1, 8192)] {
            for weighted in [true, false] {
                let mut case = backward::<T>(n, channels, weighted, 0);
                let inp: Vec<_> = wide(&case.inp).iter().map(|x| x * scale).collect();
                case = case.with_inp(rounded(&inp));
                case.dinp.fill(T::from_f32(0.0));
                check_gradients::<T>(&case.run(1), &case.reference(), f64::from(case.rstd[0]));
            }
        }
    }
    // The product of dout and inp would overflow.
    let mut case = backward::<T>(1, 2048, true, 0);
    case = case.with_inp(rounded(&[1.5e18; 2048]));
    case.dout.fill(T::from_f32(1e20));
    case.dinp.fill(T::from_f32(0.0));
    let (got, want) = (case.run(1), case.reference());
    assert_close("dinp", &got[0], &want[0], 8.0 * T::ROUNDING, 100.0);
    assert_close("dweight", &got[1], &want[1], T::ROUNDING, 1.0);
}

/// Scaling a row does not change out, so dinp is orthogonal to inp.
fn dinp_is_orthogonal_to_inp<T: Tolerance>() {
    for_all(32, (1..20usize, 1..160usize, ANY, 0..99u32), |(n, packets, weighted, seed)| {
        let channels = packets * T::PACKET;
        let mut case = backward::<T>(n, channels, weighted, seed);
        case.dinp.fill(T::from_f32(0.0));
        assert_orthogonal::<T>(&case.run(1)[0], &wide(&case.inp), channels);
    });
}

/// With integers and powers of two as rstd, the sums are exact for any distribution of rows over blocks.
fn dweight_of_integers_is_exact<T: Tolerance>() {
    for_all(32, (1..120usize, 1..60usize, 1..4usize, 0..9u32), |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dout, inp) = (integers(n * channels, seed), integers(n * channels, seed + 1));
        let before = integers(channels, seed + 2);
        let mut case = backward::<T>(n, channels, true, seed).with_inp(rounded(&inp));
        (case.dout, case.dweight) = (rounded(&dout), Some(rounded(&before)));
        case.rstd = (0..n).map(|row| [0.5, 1.0, 2.0][row % 3]).collect();
        let term = |i: usize| dout[i] * inp[i] * f64::from(case.rstd[i / channels]);
        let terms: Vec<_> = (0..n * channels).map(term).collect();
        assert_same("dweight", &case.run(sm_count)[1], &exact_sums::<T>(&before, &terms));
    });
}

fn ones_as_weight_change_nothing<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let ones = vec![T::from_f32(1.0); channels];
        let mut case = backward::<T>(n, channels, false, 3);
        let weighted = Norm::rmsnorm(channels, Some(ones.clone()), EPS);
        let (got, want) = (weighted.forward(&case.inp), case.norm.forward(&case.inp));
        assert_same("out", &got.out, &want.out);
        assert_same("rstd", &got.rstd, &want.rstd);
        let want = case.run(1);
        (case.norm, case.dweight) = (weighted, Some(ones));
        assert_close("dinp", &case.run(1)[0], &want[0], T::ROUNDING, 1.0);
    }
}

/// A NaN in dout spreads to its row of dinp and its column of dweight. A NaN in inp does the same, because rstd is an
/// operand.
fn nan_gradients_stay_in_their_row_and_column<T: Tolerance>() {
    for channels in [80, 1024, 1600, 4096, 8192] {
        for weighted in [true, false] {
            let mut case = backward::<T>(5, channels, weighted, 0);
            let mut want = case.run(1);
            let mut check = |case: &Backward<T>, row: usize, column: usize| {
                want[0][row * channels..(row + 1) * channels].fill(f64::NAN);
                if weighted {
                    want[1][column] = f64::NAN;
                }
                for (got, want) in case.run(1).iter().zip(&want) {
                    assert_close("gradient", got, want, 0.0, 0.0);
                }
            };
            case.dout[2 * channels + 9] = T::from_f32(f32::NAN);
            check(&case, 2, 9);
            case.inp[4 * channels + 70] = T::from_f32(f32::NAN);
            check(&case, 4, 70);
        }
    }
}

fn unsupported_channels_have_no_kernel<T: Tolerance>() {
    let size = |channels| Size { norm: NormKind::RmsNorm, rows: 1, channels, sm_count: 1 };
    let partials = |channels| backward_partials::<T>(size(channels), 1);
    assert!((T::PACKET..=64 * 32 * T::PACKET).step_by(T::PACKET).all(|channels| partials(channels) == Some(channels)));
    assert_eq!(partials(T::PACKET + 1), None);
    assert_eq!(partials(64 * 32 * T::PACKET + T::PACKET), None);
}
