//! RMS normalization, forward and backward, against an f64 reference.

use crate::common::norm::shapes;
use crate::common::{
    Tolerance, assert_close, assert_same, for_all, integers, noise, quantized, read, rounded, run, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::{E4m3, Element, GlobalMut, bf16};
use gpu::quantize::QuantizedOperands;
use gpu::rmsnorm::launch::{
    BackwardOperands, ForwardOperands, Fp8ForwardOperands, Size, Weight, backward, backward_partials,
    forward as forward_kernel, forward_fp8,
};
use proptest::bool::ANY;

tests! {
    kernels of "rmsnorm.rs";
    for both types: forward_matches_f64_reference, out_has_mean_square_1, scaled_rows_normalize_to_the_same_bits,
        zero_rows_normalize_to_zero, large_rows_do_not_overflow, small_rows_do_not_underflow, nan_stays_in_its_row,
        backward_matches_f64_reference, gradients_of_large_and_small_rows_are_finite, dinp_is_orthogonal_to_inp,
        dweight_of_integers_is_exact, ones_as_weight_change_nothing, nan_gradients_stay_in_their_row_and_column,
        unsupported_channels_have_no_kernel;
    once: quantized_out_has_the_bits_of_separate_quantization;
}

const EPS: f32 = 1e-5;

struct Forward {
    out: Vec<f64>,
    rstd: Vec<f64>,
}

/// Normalizes in f64. No `weight` means ones.
fn reference(x: &[f64], channels: usize, weight: Option<&[f64]>, eps: f32) -> Forward {
    let mut want = Forward { out: vec![], rstd: vec![] };
    for row in x.chunks(channels) {
        let rstd = (row.iter().map(|x| x * x).sum::<f64>() / channels as f64 + f64::from(eps)).sqrt().recip();
        want.out.extend(row.iter().enumerate().map(|(c, x)| x * rstd * weight.map_or(1.0, |weight| weight[c])));
        want.rstd.push(rstd);
    }
    want
}

fn normalize<T: Tolerance>(x: &[T], channels: usize, weight: Option<&[T]>, eps: f32) -> Forward {
    let rows = x.len() / channels;
    let mut memory = Memory::new();
    let weight = weight.map(|weight| memory.input("weight", weight));
    let inp = memory.input("inp", x);
    let (out, rstd) = (memory.output::<T>("out", x.len()), memory.output::<f32>("rstd", rows));
    // One SM, so that each block processes several rows.
    let size = Size { rows, channels, sm_count: 1 };
    let kernel = forward_kernel(ForwardOperands { out, rstd, inp, weight, eps }, size).unwrap();
    run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
    Forward { out: read(&memory, out), rstd: read(&memory, rstd) }
}

/// Quantizes the normalized rows in the kernel that computes them, and checks every output.
fn check_quantized(rows: usize, channels: usize, scale: f32, bad: Option<f32>, weighted: bool) {
    let mut x = rounded::<bf16>(&noise(rows * channels, 1).iter().map(|x| x + 0.3).collect::<Vec<_>>());
    if let Some(bad) = bad {
        x[rows * channels - 1] = bf16::from_f32(bad);
    }
    let weight = weighted.then(|| rounded::<bf16>(&noise(channels, 2)));
    let want = normalize(&x, channels, weight.as_deref(), EPS);
    for amax_before in [None, Some(0.0f32), Some(1e9)] {
        let mut memory = Memory::new();
        let weight = weight.as_ref().map(|weight| memory.input("weight", weight));
        let (inp, scale_) = (memory.input("inp", &x), memory.input("scale", &[scale]));
        let out = memory.output::<E4m3>("out", x.len());
        let rstd = memory.output::<f32>("rstd", rows);
        let amax = amax_before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let quantized = QuantizedOperands { out, amax, scale: scale_ };
        let size = Size { rows, channels, sm_count: 1 };
        let kernel = forward_fp8(Fp8ForwardOperands { quantized, rstd, inp, weight, eps: EPS }, size).unwrap();
        run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        quantized::check(&memory, out, &want.out, scale, amax_before.map(|before| (amax, before)));
        assert_same("rstd", &read(&memory, rstd), &want.rstd);
    }
}

fn quantized_out_has_the_bits_of_separate_quantization() {
    for (i, (rows, channels)) in shapes::<bf16>().enumerate() {
        // The smaller scales saturate.
        check_quantized(rows, channels, [1.0 / 64.0, 1.0 / 300.0, 0.7][i % 3], None, i % 2 == 0);
    }
    for channels in [80, 1024, 1600, 4096, 8192] {
        check_quantized(10, channels, 0.01, Some(f32::NAN), true);
        check_quantized(3, channels, 0.01, Some(f32::INFINITY), false);
    }
}

/// Checks the forward kernel with and without weight on rows of `noise`, multiplied by `scale`.
fn check_forward<T: Tolerance>((n, channels): (usize, usize), scale: f64, eps: f32) {
    let x: Vec<_> = noise(n * channels, 1).iter().map(|x| (x + 0.3) * scale).collect();
    let (x, weight) = (rounded::<T>(&x), rounded::<T>(&noise(channels, 2)));
    for weight in [None, Some(&weight)] {
        let want = reference(&wide(&x), channels, weight.map(|weight| wide(weight)).as_deref(), eps);
        let got = normalize(&x, channels, weight.map(Vec::as_slice), eps);
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
        let got = normalize(&rounded::<T>(&x), channels, None, EPS);
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
        let plain = normalize(&x, channels, Some(&weight), 0.25);
        let scaled = normalize(&scaled, channels, Some(&weight), 0.25 * (scale * scale) as f32);
        assert_same("out", &scaled.out, &plain.out);
        assert_same("rstd", &scaled.rstd, &plain.rstd.iter().map(|rstd| rstd / scale).collect::<Vec<_>>());
    });
}

/// rstd of a row of zeros is 1 / sqrt(eps).
fn zero_rows_normalize_to_zero<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        for eps in [1e-6, EPS, 1.0] {
            let got = normalize(&vec![T::from_f32(0.0); n * channels], channels, None, eps);
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
        let mut want = normalize(&rounded::<T>(&x), channels, None, EPS);
        let at = channels + channels / 3;
        for (bad, others, rstd) in [(f64::NAN, f64::NAN, f64::NAN), (f64::INFINITY, 0.0, 0.0)] {
            x[at] = bad;
            want.out[channels..2 * channels].fill(others);
            (want.out[at], want.rstd[1]) = (f64::NAN, rstd);
            let got = normalize(&rounded::<T>(&x), channels, None, EPS);
            assert_close("out", &got.out, &want.out, 0.0, 0.0);
            assert_close("rstd", &got.rstd, &want.rstd, 0.0, 0.0);
        }
    }
}

/// The inputs of the backward kernels, with their previous gradients.
struct Backward<T> {
    dinp: Vec<T>,
    dout: Vec<T>,
    inp: Vec<T>,
    rstd: Vec<f32>,
    channels: usize,
    /// weight and dweight
    weight: Option<[Vec<T>; 2]>,
}

impl<T: Tolerance> Backward<T> {
    fn new(rows: usize, channels: usize, weighted: bool, seed: u32) -> Self {
        let size = rows * channels;
        let inp: Vec<_> = noise(size, seed + 1).iter().map(|x| x + 0.3).collect();
        let weight = [noise(channels, seed + 2), noise(channels, seed + 7)].map(|x| rounded(&x));
        let case = Self {
            dinp: rounded(&noise(size, seed + 6)),
            dout: rounded(&noise(size, seed + 5)),
            inp: vec![],
            rstd: vec![],
            channels,
            weight: weighted.then_some(weight),
        };
        case.with_inp(&inp)
    }

    /// Replaces inp, and rstd by that of inp.
    fn with_inp(self, inp: &[f64]) -> Self {
        let inp = rounded::<T>(inp);
        let rstd = rounded(&reference(&wide(&inp), self.channels, None, EPS).rstd);
        Self { inp, rstd, ..self }
    }

    /// Returns the new dinp and, with weight, dweight.
    fn run(&self, sm_count: usize) -> Vec<Vec<f64>> {
        let size = Size { rows: self.rstd.len(), channels: self.channels, sm_count };
        let mut memory = Memory::new();
        let (dout, inp) = (memory.input("dout", &self.dout), memory.input("inp", &self.inp));
        let (rstd, dinp) = (memory.input("rstd", &self.rstd), memory.buffer("dinp", &self.dinp));
        let weight = self.weight.as_ref().map(|[weight, dweight]| Weight {
            weight: memory.input("weight", weight),
            dweight: memory.buffer("dweight", dweight),
            partials: memory.output::<f32>("partials", backward_partials::<T>(size).unwrap()),
        });
        let kernels = backward(BackwardOperands { dinp, dout, inp, rstd, weight }, size).unwrap();
        assert_eq!(kernels.len(), if weight.is_some() { 2 } else { 1 });
        for kernel in kernels {
            run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        }
        [dinp].into_iter().chain(weight.map(|weight| weight.dweight)).map(|view| read(&memory, view)).collect()
    }

    fn reference(&self) -> Vec<Vec<f64>> {
        let channels = self.channels;
        let mut want: Vec<_> =
            [&self.dinp].into_iter().chain(self.weight.as_ref().map(|w| &w[1])).map(|x| wide(x)).collect();
        let (xs, dys) = (wide(&self.inp), wide(&self.dout));
        let ws = self.weight.as_ref().map_or(vec![1.0; channels], |w| wide(&w[0]));
        for (row, rstd) in self.rstd.iter().map(|&rstd| f64::from(rstd)).enumerate() {
            let at = |c: usize| row * channels + c;
            let normed = |c: usize| xs[at(c)] * rstd;
            let projection = (0..channels).map(|c| dys[at(c)] * ws[c] * normed(c)).sum::<f64>() / channels as f64;
            for c in 0..channels {
                want[0][at(c)] += (dys[at(c)] * ws[c] - normed(c) * projection) * rstd;
                if let Some(dweight) = want.get_mut(1) {
                    dweight[c] += dys[at(c)] * normed(c);
                }
            }
        }
        want
    }
}

fn check_gradients<T: Tolerance>(got: &[Vec<f64>], want: &[Vec<f64>], scale: f64) {
    assert_eq!(got.len(), want.len());
    assert_close("dinp", &got[0], &want[0], T::ROUNDING, scale);
    if want.len() > 1 {
        assert_close("dweight", &got[1], &want[1], T::ROUNDING, 1.0);
    }
}

fn backward_matches_f64_reference<T: Tolerance>() {
    // With one or two SMs, each block processes several rows.
    let wide = [(77, 80), (69, 896), (11, 1600), (7, 4096), (5, 33 * 32 * T::PACKET)];
    for (n, channels) in shapes::<T>().chain(wide) {
        for weighted in [true, false] {
            let case = Backward::<T>::new(n, channels, weighted, 0);
            check_gradients::<T>(&case.run(1 + n % 2), &case.reference(), 1.0);
        }
    }
}

/// rstd compensates the size of inp, so no intermediate result overflows.
fn gradients_of_large_and_small_rows_are_finite<T: Tolerance>() {
    for scale in [2e18, 1e-3, 1e-20, 1e-34] {
        for (n, channels) in [(5, 80), (5, 896), (3, 2048), (2, 4096), (1, 8192)] {
            for weighted in [true, false] {
                let mut case = Backward::<T>::new(n, channels, weighted, 0);
                let inp: Vec<_> = wide(&case.inp).iter().map(|x| x * scale).collect();
                case = case.with_inp(&inp);
                case.dinp.fill(T::from_f32(0.0));
                check_gradients::<T>(&case.run(1), &case.reference(), f64::from(case.rstd[0]));
            }
        }
    }
    // The product of dout and inp would overflow.
    let mut case = Backward::<T>::new(1, 2048, true, 0);
    case = case.with_inp(&[1.5e18; 2048]);
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
        let mut case = Backward::<T>::new(n, channels, weighted, seed);
        case.dinp.fill(T::from_f32(0.0));
        let got = case.run(1);
        for (dinp, inp) in got[0].chunks(channels).zip(wide(&case.inp).chunks(channels)) {
            let size = dinp.iter().map(|x| x.abs()).sum::<f64>().max(1e-3);
            let stretch: f64 = dinp.iter().zip(inp).map(|(d, x)| d * x).sum();
            // Epsilon breaks the invariance slightly.
            assert_close("stretch", &[stretch / size], &[0.0], T::ROUNDING.max(1e-3), 1.0);
        }
    });
}

/// With integers and powers of two as rstd, the sums are exact for any distribution of rows over blocks.
fn dweight_of_integers_is_exact<T: Tolerance>() {
    for_all(32, (1..120usize, 1..60usize, 1..4usize, 0..9u32), |(n, packets, sm_count, seed)| {
        let channels = packets * T::PACKET;
        let (dout, inp) = (integers(n * channels, seed), integers(n * channels, seed + 1));
        let before = integers(channels, seed + 2);
        let mut case = Backward::<T>::new(n, channels, true, seed).with_inp(&inp);
        case.dout = rounded(&dout);
        case.rstd = (0..n).map(|row| [0.5, 1.0, 2.0][row % 3]).collect();
        case.weight.as_mut().unwrap()[1] = rounded(&before);
        let term = |i: usize| dout[i] * inp[i] * f64::from(case.rstd[i / channels]);
        let sum = |c: usize| before[c] + (c..n * channels).step_by(channels).map(term).sum::<f64>();
        let want: Vec<_> = (0..channels).map(|c| f64::from(T::nearest(sum(c) as f32))).collect();
        assert_same("dweight", &case.run(sm_count)[1], &want);
    });
}

fn ones_as_weight_change_nothing<T: Tolerance>() {
    for (n, channels) in shapes::<T>() {
        let ones = vec![T::from_f32(1.0); channels];
        let mut case = Backward::<T>::new(n, channels, false, 3);
        let plain = normalize(&case.inp, channels, None, EPS);
        let weighted = normalize(&case.inp, channels, Some(&ones), EPS);
        assert_same("out", &weighted.out, &plain.out);
        assert_same("rstd", &weighted.rstd, &plain.rstd);
        let plain = case.run(1);
        case.weight = Some([ones.clone(), ones]);
        assert_close("dinp", &case.run(1)[0], &plain[0], T::ROUNDING, 1.0);
    }
}

/// A NaN in dout spreads to its row of dinp and its column of dweight. A NaN in inp does the same, because rstd is an
/// operand.
fn nan_gradients_stay_in_their_row_and_column<T: Tolerance>() {
    for channels in [80, 1024, 1600, 4096, 8192] {
        for weighted in [true, false] {
            let mut case = Backward::<T>::new(5, channels, weighted, 0);
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
    let partials = |channels| backward_partials::<T>(Size { rows: 1, channels, sm_count: 1 });
    assert!((T::PACKET..=64 * 32 * T::PACKET).step_by(T::PACKET).all(|channels| partials(channels) == Some(channels)));
    assert_eq!(partials(T::PACKET + 1), None);
    assert_eq!(partials(64 * 32 * T::PACKET + T::PACKET), None);
}
