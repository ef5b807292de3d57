//! The fused classifier against a softmax in f64.

use crate::common::quantized::bits;
use crate::common::{
    Tolerance, assert_close, assert_same, for_all, integers, noise, read, rounded, run, shared_bytes, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::{E5m2, Element, Fp8, bf16};
use gpu::classifier::{MASKED, Scalars, classifier, classifier_fp8, shared, staged, wide};
use gpu::quantize::{scale_of, scaled};
use gpu::softcap::tanh_and_slope;
use proptest::prelude::any;
use std::slice;

tests! {
    kernels of "classifier.rs", "classifier";
    for both types: losses_and_gradients_match_f64_reference, losses_without_gradients_match_f64_reference,
        softcap_matches_f64_reference, large_vocabularies_match_f64_reference, masked_rows_have_no_loss_and_no_gradient;
    slow in f32: random_shapes_match_f64_reference, staging_does_not_change_the_result,
        shifting_logits_does_not_change_the_result, large_logits_match_f64_reference, infinite_logits_match_f64_reference,
        nan_stays_in_its_row, softcap_of_random_shapes_matches_f64_reference, softcap_bounds_infinite_logits;
    once: tanh_and_its_slope_are_accurate_to_a_few_ulp, wide_kernel_gets_the_bits_of_the_other, wide_kernel_holds_whole_rows,
        gradients_in_fp8_are_quantized;
}

const DLOSS: f64 = 0.125;

/// The input of one launch: logits (rows, Vp) with V valid columns.
struct Case<T> {
    logits: Vec<T>,
    targets: Vec<i32>,
    vocabulary: usize,
    padded: usize,
    softcap: Option<f64>,
}

struct Got {
    losses: Vec<f64>,
    /// The unchanged logits if the launch did not compute gradients.
    gradients: Vec<f64>,
}

impl<T: Tolerance> Case<T> {
    /// `logits` has shape (rows, V). The padding columns contain NaN, which would propagate if a kernel used it.
    fn new(logits: &[f64], targets: Vec<i32>, padded: usize) -> Self {
        let vocabulary = logits.len() / targets.len();
        let padding = vec![f64::NAN; padded - vocabulary];
        let logits: Vec<_> = logits.chunks(vocabulary).flat_map(|row| [row, &padding].concat()).collect();
        Self { logits: rounded(&logits), targets, vocabulary, padded, softcap: None }
    }

    fn with_softcap(self, softcap: f64) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    fn random(rows: usize, vocabulary: usize, padded: usize, scale: f64, seed: u32) -> Self {
        let logits: Vec<_> = noise(rows * vocabulary, seed).iter().map(|x| x * scale).collect();
        let target = |row: usize| ((row * 7919 + seed as usize) % vocabulary) as i32;
        Self::new(&logits, (0..rows).map(target).collect(), padded)
    }

    /// Runs the kernel with as many staged columns as fit in `capacity` bytes. Losses start at 0.5.
    fn run(&self, capacity: usize, gradients: bool) -> Got {
        let staged = staged::<T>(self.padded, capacity);
        let mut memory = Memory::new();
        let logits = memory.buffer("logits", &self.logits);
        let losses = memory.buffer("losses", &vec![0.5f32; self.targets.len()]);
        let scalars = Scalars {
            dloss: DLOSS as f32,
            vocabulary: self.vocabulary as u32,
            padded: self.padded as u32,
            staged: staged as u32,
        };
        let gradients = u32::from(gradients);
        let targets = memory.input("targets", &self.targets);
        let launch = match self.softcap {
            None => classifier::<false, _>(logits, losses, targets, scalars, gradients, 0.0),
            Some(softcap) => classifier::<true, _>(logits, losses, targets, scalars, gradients, softcap as f32),
        };
        run(&mut memory, &launch, self.targets.len() as u32, shared_bytes(|layout| shared::<T>(layout, staged)));
        Got { losses: read(&memory, losses), gradients: read(&memory, logits) }
    }

    /// Returns the expected losses and gradients.
    fn reference(&self) -> Got {
        let mut want = Got { losses: vec![], gradients: vec![] };
        for (row, &target) in wide(&self.logits).chunks(self.padded).zip(&self.targets) {
            let logits = &row[..self.vocabulary];
            let row: Vec<_> = logits.iter().map(|x| self.softcap.map_or(*x, |cap| cap * (x / cap).tanh())).collect();
            let slope = |c: usize| self.softcap.map_or(1.0, |cap| (logits[c] / cap).cosh().powi(-2));
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
            want.losses.push(0.5 + sum.ln() + (max - row[target as usize]));
            let gradient = |c: usize| ((row[c] - max).exp() / sum - f64::from(c == target as usize)) * DLOSS * slope(c);
            want.gradients.extend((0..self.padded).map(|c| if c < row.len() { gradient(c) } else { 0.0 }));
        }
        want
    }

    /// The gradient of the target is a difference from 1, so its error is relative to 1. All others have a small
    /// relative error, except for subnormal numbers.
    fn assert_near(&self, mut got: Got, mut want: Got) {
        assert_close("losses", &got.losses, &want.losses, 2e-6, self.loss_scale());
        for (row, &target) in self.targets.iter().enumerate() {
            let i = row * self.padded + target as usize;
            let (of_target, wanted) = (&mut got.gradients[i], &mut want.gradients[i]);
            assert_close("target's gradient", slice::from_ref(of_target), slice::from_ref(wanted), T::ROUNDING, DLOSS);
            (*of_target, *wanted) = (0.0, 0.0);
        }
        // Allows for the smallest normal number, and for the relative error of exp2 of an argument with 8 integer bits. 16-bit gradients of
        // bounded logits are rounded to f16 first.
        let in_f16 = self.softcap.is_some() && T::PACKET == 8;
        let rounding = if in_f16 { 1.25 * T::ROUNDING } else { T::ROUNDING.max(2e-5) };
        let smallest = if in_f16 { DLOSS * 2f64.powi(-39) / rounding } else { 1e-33 };
        assert_close("gradients", &got.gradients, &want.gradients, rounding, smallest);
    }

    /// Returns the size of the values whose rounding errors are visible in a loss.
    fn loss_scale(&self) -> f64 {
        self.softcap.unwrap_or(1.0).max(1.0)
    }

    fn check(&self, capacity: usize) {
        self.assert_near(self.run(capacity, true), self.reference());
        let alone = self.run(capacity, false);
        assert_close("losses without gradients", &alone.losses, &self.reference().losses, 2e-6, self.loss_scale());
        assert_close("logits", &alone.gradients, &wide(&self.logits), 0.0, 0.0);
    }
}

fn losses_and_gradients_match_f64_reference<T: Tolerance>() {
    // Covers one row, V with and without padding, V below a packet, and rows that fit in shared memory only in part.
    for (rows, vocabulary, padded, capacity) in [
        (1, 1, 8, 1 << 20),
        (63, 3, 8, 1 << 20),
        (5, 64, 64, 1 << 20),
        (3, 517, 520, 1 << 20),
        (3, 8191, 8192, 1 << 20),
        (3, 9001, 9088, 1 << 20),
        (3, 9001, 9088, 9000),
        (3, 9001, 9088, 36_000),
        (3, 517, 520, 0),
    ] {
        Case::<T>::random(rows, vocabulary, padded, 20.0, 1).check(capacity);
    }
}

fn losses_without_gradients_match_f64_reference<T: Tolerance>() {
    // Lengths around one packet per thread of the block.
    for vocabulary in [1024 * T::PACKET - 1, 1024 * T::PACKET, 1024 * T::PACKET + 1] {
        Case::<T>::random(2, vocabulary, vocabulary.next_multiple_of(T::PACKET), 20.0, 2).check(0);
    }
}

/// Also checks that losses are at least 0 and that the gradients of a row sum to 0.
fn random_shapes_match_f64_reference<T: Tolerance>() {
    for_all(
        64,
        (1..4usize, 1..400usize, any::<usize>(), 0..8000usize, 0.0..60f64),
        |(rows, packets, v, capacity, scale)| {
            let padded = packets * T::PACKET;
            let case = Case::<T>::random(rows, 1 + v % padded, padded, scale, packets as u32);
            case.check(capacity);
            let got = case.run(capacity, true);
            assert!(got.losses.iter().all(|&loss| loss >= 0.5 - 1e-6), "a loss below 0: {:?}", got.losses);
            for row in got.gradients.chunks(padded) {
                let size = row.iter().map(|x| x.abs()).sum::<f64>();
                assert!(
                    row.iter().sum::<f64>().abs() <= (T::ROUNDING * size).max(1e-6 * DLOSS),
                    "a row sums to {}",
                    row.iter().sum::<f64>()
                );
            }
        },
    );
}

/// The number of staged columns does not change any bit of the result.
fn staging_does_not_change_the_result<T: Tolerance>() {
    for softcap in [None, Some(15.0)] {
        let case = Case::<T> { softcap, ..Case::random(2, 9001, 9088, 20.0, 3) };
        let all = case.run(1 << 20, true);
        for capacity in [0, 144, 4096, 16_384, 16_512, 20_000] {
            let got = case.run(capacity, true);
            assert_same(&format!("losses with {capacity} bytes"), &got.losses, &all.losses);
            assert_same(&format!("gradients with {capacity} bytes"), &got.gradients, &all.gradients);
        }
    }
}

fn shifting_logits_does_not_change_the_result<T: Tolerance>() {
    for_all(32, (1..300usize, -100..100i32, 0..99u32), |(vocabulary, shift, seed)| {
        let padded = vocabulary.next_multiple_of(T::PACKET);
        let logits = integers(vocabulary, seed);
        let shifted: Vec<_> = logits.iter().map(|x| x + f64::from(shift)).collect();
        let targets = vec![(seed as usize % vocabulary) as i32];
        let plain = Case::<T>::new(&logits, targets.clone(), padded).run(1 << 20, true);
        let shifted = Case::<T>::new(&shifted, targets, padded).run(1 << 20, true);
        assert_close("losses", &shifted.losses, &plain.losses, 1e-6, 1.0);
        assert_close("gradients", &shifted.gradients, &plain.gradients, T::ROUNDING, 1e-9);
    });
}

/// Up to the largest finite logits. Equal maxima share the probability; a single maximum has all of it.
fn large_logits_match_f64_reference<T: Tolerance>() {
    let largest = f64::from(T::nearest(3.38e38));
    for scale in [1e4, 1e10, 1e30, largest] {
        let v = 517;
        let random: Vec<_> = noise(v, 1).iter().map(|x| x * scale).collect();
        let two_of = |others: f64| (0..v).map(|c| if c == 3 || c == 400 { scale } else { others }).collect::<Vec<_>>();
        for row in [random, two_of(-scale), two_of(0.0), vec![scale; v], vec![-scale; v]] {
            // The most likely target, whose loss is small, and another one.
            for target in [3, 516] {
                let logits = [vec![0.0; v], row.clone(), vec![1.0; v]].concat();
                let case = Case::<T>::new(&logits, vec![5, target, 6], 520);
                let mut want = case.reference();
                // The expected loss may exceed the range of f32.
                want.losses.iter_mut().for_each(|loss| *loss = f64::from(*loss as f32));
                case.assert_near(case.run(1 << 20, true), want);
            }
        }
    }
}

/// Logits of -inf have probability 0, even if a thread has no others. A target logit of -inf has an infinite loss.
fn infinite_logits_match_f64_reference<T: Tolerance>() {
    let mut logits = noise(2 * 517, 1);
    logits[100..200].fill(f64::NEG_INFINITY);
    for target in [7, 150] {
        Case::<T>::new(&logits, vec![target, 8], 520).check(1 << 20);
    }
    logits[..517].fill(f64::NEG_INFINITY);
    logits[33] = -3.0;
    Case::<T>::new(&logits, vec![33, 8], 520).check(1 << 20);
}

/// A row of NaN also results if all logits are -inf or one is +inf. Other rows do not change. With a softcap, only NaN has
/// this effect.
fn nan_stays_in_its_row<T: Tolerance>() {
    let (v, padded) = (517, 520);
    let clean = noise(3 * v, 1);
    let case = |logits: &[f64], softcap| Case::<T> { softcap, ..Case::new(logits, vec![1, 2, 3], padded) };
    let bad_rows = [
        (0..v).map(|c| if c == 516 { f64::NAN } else { clean[v + c] }).collect::<Vec<_>>(),
        (0..v).map(|c| if c == 0 { f64::INFINITY } else { clean[v + c] }).collect(),
        vec![f64::NEG_INFINITY; v],
    ];
    for (bad, softcap) in bad_rows.iter().map(|bad| (bad, None)).chain([(&bad_rows[0], Some(15.0))]) {
        let logits = [&clean[..v], bad, &clean[2 * v..]].concat();
        let got = case(&logits, softcap).run(1 << 20, true);
        let mut want = case(&clean, softcap).run(1 << 20, true);
        want.losses[1] = f64::NAN;
        want.gradients[padded..padded + v].fill(f64::NAN);
        assert_close("losses", &got.losses, &want.losses, 0.0, 0.0);
        assert_close("gradients", &got.gradients, &want.gradients, 0.0, 0.0);
    }
}

/// All other rows keep their bits. The logits of masked rows need not be finite.
fn masked_rows_have_no_loss_and_no_gradient<T: Tolerance>() {
    for (vocabulary, padded, capacity) in [(3, 8, 1 << 20), (517, 520, 1 << 20), (9001, 9088, 9000), (9001, 9088, 0)] {
        for softcap in [None, Some(15.0)] {
            let mut case = Case::<T> { softcap, ..Case::random(4, vocabulary, padded, 20.0, 7) };
            case.logits[padded..][..vocabulary].fill(T::from_f32(f32::NAN));
            case.logits[2 * padded] = T::from_f32(f32::INFINITY);
            let mut want = [false, true].map(|gradients| case.run(capacity, gradients));
            for row in [1, 2] {
                case.targets[row] = MASKED;
                for want in &mut want {
                    want.losses[row] = 0.5;
                }
                want[1].gradients[row * padded..][..padded].fill(0.0);
            }
            for (want, gradients) in want.iter().zip([false, true]) {
                let got = case.run(capacity, gradients);
                assert_same("losses", &got.losses, &want.losses);
                assert_same("gradients", &got.gradients, &want.gradients);
            }
        }
    }
}

/// Logits far below, near and far above the bound, with all, some and none of the columns staged.
fn softcap_matches_f64_reference<T: Tolerance>() {
    for (rows, vocabulary, padded, capacity) in [
        (1, 1, 8, 1 << 20),
        (63, 3, 8, 1 << 20),
        (3, 517, 520, 0),
        (2, 8192, 8192, 1 << 20),
        (3, 9001, 9088, 9000),
        (3, 9001, 9088, 36_000),
    ] {
        for (softcap, scale) in [(15.0, 0.01), (15.0, 20.0), (30.0, 200.0), (0.5, 3.0)] {
            Case::<T>::random(rows, vocabulary, padded, scale, 4).with_softcap(softcap).check(capacity);
        }
    }
}

fn softcap_of_random_shapes_matches_f64_reference<T: Tolerance>() {
    let shape = (1..4usize, 1..400usize, any::<usize>(), 0..8000usize);
    for_all(48, (shape, 0.0..60f64, 1.0..50f64), |((rows, packets, v, capacity), scale, softcap)| {
        let padded = packets * T::PACKET;
        let case = Case::<T>::random(rows, 1 + v % padded, padded, scale, packets as u32);
        case.with_softcap(softcap).check(capacity);
    });
}

/// An infinite or huge logit becomes ±softcap, with a gradient of 0.
fn softcap_bounds_infinite_logits<T: Tolerance>() {
    let mut logits = noise(2 * 517, 1);
    logits[100..200].fill(f64::NEG_INFINITY);
    logits[250] = f64::INFINITY;
    logits[300] = f64::from(T::nearest(3.38e38));
    logits[301] = -logits[300];
    for target in [7, 150, 250, 300, 301] {
        Case::<T>::new(&logits, vec![target, 8], 520).with_softcap(15.0).check(1 << 20);
    }
    for all in [f64::INFINITY, f64::NEG_INFINITY] {
        Case::<T>::new(&[all; 517], vec![3], 520).with_softcap(15.0).check(1 << 20);
    }
}

/// Runs [`classifier_wide`] with `staged` packets of each thread in shared memory.
fn run_wide(case: &Case<bf16>, staged: u32, grid: u32) -> Got {
    let mut memory = Memory::new();
    let logits = memory.buffer("logits", &case.logits);
    let losses = memory.buffer("losses", &vec![0.5f32; case.targets.len()]);
    let targets = memory.input("targets", &case.targets);
    let scalars =
        Scalars { dloss: DLOSS as f32, vocabulary: case.vocabulary as u32, padded: case.padded as u32, staged };
    let launch = wide::classifier_wide(logits, losses, targets, scalars, case.targets.len() as u32);
    run(&mut memory, &launch, grid, shared_bytes(|layout| wide::shared(layout, staged)));
    Got { losses: read(&memory, losses), gradients: read(&memory, logits) }
}

/// Any number of rows per block, from no packet to all packets of a row in shared memory, and vocabularies that end anywhere.
fn wide_kernel_gets_the_bits_of_the_other() {
    let check = |case: &Case<bf16>, staged, grid| {
        let (got, want) = (run_wide(case, staged, grid), case.run(40_000, true));
        let what = format!("{} of {} columns, {staged} staged, grid {grid}", case.vocabulary, case.padded);
        assert_same(&format!("losses, {what}"), &got.losses, &want.losses);
        assert_same(&format!("gradients, {what}"), &got.gradients, &want.gradients);
    };
    for_all(40, (1..6usize, 1..6000usize, any::<usize>(), 0..9u32, 1..5u32), |(rows, packets, v, extra, grid)| {
        let padded = packets * bf16::PACKET;
        // Padding has at most one packet of each thread in most cases.
        let vocabulary = if v % 4 == 0 { 1 + v % padded } else { padded - v % padded.min(8192) };
        let mut case = Case::<bf16>::random(rows, vocabulary, padded, 20.0, packets as u32);
        if extra % 2 == 0 {
            case.targets[extra as usize % rows] = MASKED;
        }
        let least = (padded as u32).div_ceil(8192).saturating_sub(5);
        check(&case, least + extra, grid);
    });
    // NaN and infinities stay in their rows, and have no effect in masked rows.
    let mut case = Case::<bf16>::random(4, 9001, 9008, 20.0, 1);
    case.logits[9008 + 17] = bf16::from_f32(f32::NAN);
    case.logits[2 * 9008..][..9001].fill(bf16::from_f32(f32::NEG_INFINITY));
    for masked in [0..0, 1..2, 1..4] {
        case.targets[masked].fill(MASKED);
        for staged in [0, 1, 2] {
            check(&case, staged, 2);
        }
    }
}

/// Runs the kernel that writes gradients in FP8, with as many staged columns as fit in `capacity` bytes or, if `capacity` is None, the
/// kernel for wide rows. Returns the losses, the bits of the gradients, and their scale.
fn run_fp8(case: &Case<bf16>, capacity: Option<usize>) -> (Vec<f64>, Vec<u8>, f32) {
    let rows = case.targets.len();
    let mut memory = Memory::new();
    let (logits, targets) = (memory.input("logits", &case.logits), memory.input("targets", &case.targets));
    let losses = memory.buffer("losses", &vec![0.5f32; rows]);
    let (out, scale) = (memory.output::<E5m2>("out", rows * case.padded), memory.output("scale", 1));
    let staged = capacity.map_or(1, |capacity| staged::<bf16>(case.padded, capacity) as u32);
    let scalars =
        Scalars { dloss: DLOSS as f32, vocabulary: case.vocabulary as u32, padded: case.padded as u32, staged };
    if capacity.is_none() {
        let launch = wide::classifier_wide_fp8(out, scale, logits, losses, targets, scalars, rows as u32);
        run(&mut memory, &launch, rows.min(2) as u32, shared_bytes(|layout| wide::shared(layout, staged)));
    } else {
        let launch = match case.softcap {
            None => classifier_fp8::<false>(out, scale, logits, losses, targets, scalars, 0.0),
            Some(cap) => classifier_fp8::<true>(out, scale, logits, losses, targets, scalars, cap as f32),
        };
        run(&mut memory, &launch, rows as u32, shared_bytes(|layout| shared::<bf16>(layout, staged as usize)));
    }
    (read(&memory, losses), bits(&memory.read(out)), memory.read(scale)[0])
}

/// The losses are those of the other kernels. Gradients are those of the other kernels before their rounding to bf16, divided by the scale.
/// Those of masked rows are 0, and a NaN stays in its row. The scale is stored even if the first row is masked.
fn gradients_in_fp8_are_quantized() {
    fn check(case: &Case<bf16>, capacity: Option<usize>) {
        let want = case.run(40_000, true);
        let scale = scale_of(DLOSS as f32, E5m2::FORMAT.max());
        let (losses, gradients, got_scale) = run_fp8(case, capacity);
        assert_same("losses", &losses, &want.losses);
        for (i, (bits, want)) in gradients.iter().zip(&want.gradients).enumerate() {
            let quantized = |x: f64| E5m2::from_f32(scaled(x as f32, 1.0 / scale)).to_f32();
            let (got, margin) = (E5m2::from_bits(*bits).to_f32(), want.abs() * bf16::ROUNDING);
            let range = quantized(want - margin)..=quantized(want + margin);
            let near = range.contains(&got) || got.is_nan() && want.is_nan();
            assert!(near, "{} of {} columns, {capacity:?}, {i}: {range:?}, found {got}", case.vocabulary, case.padded);
        }
        assert_eq!(got_scale.to_bits(), scale.to_bits());
    }
    for (rows, vocabulary, padded) in [(1, 3, 16), (5, 3, 16), (5, 517, 528), (5, 9001, 9088)] {
        let mut case = Case::<bf16>::random(rows, vocabulary, padded, 20.0, 8);
        case.targets.iter_mut().step_by(2).take(2).for_each(|target| *target = MASKED);
        if rows > 1 {
            case.logits[padded + 1] = bf16::from_f32(f32::NAN);
        }
        for capacity in [None, Some(0), Some(9000), Some(1 << 20)] {
            for softcap in [None, Some(15.0)] {
                let case = Case { softcap, logits: case.logits.clone(), targets: case.targets.clone(), ..case };
                if softcap.is_none() || capacity.is_some() {
                    check(&case, capacity);
                }
            }
        }
    }
}

/// The vocabularies of Llama 3 and Qwen fit on an SM of an H100.
fn wide_kernel_holds_whole_rows() {
    for (vocabulary, padded) in [(128_256, 128_256), (151_665, 151_936)] {
        let staged = wide::staged(padded, 227 << 10).unwrap();
        assert!(shared_bytes(|layout| wide::shared(layout, staged)) <= 227 << 10);
        let case = Case::<bf16>::random(3, vocabulary, padded, 20.0, 5);
        case.assert_near(run_wide(&case, staged, 2), case.reference());
    }
    assert_eq!(wide::staged(8192, 1 << 20), Some(1));
    assert_eq!([155_648, 155_656].map(|padded| wide::staged(padded, 227 << 10)), [Some(14), None]);
    assert_eq!([40_960, 40_968].map(|padded| wide::staged(padded, 0)), [Some(0), None]);
}

/// The vocabularies of Llama 3 and Qwen, with the shared memory of one of two blocks on an H100.
fn large_vocabularies_match_f64_reference<T: Tolerance>() {
    let capacity = (228 << 10) / 2 - 1024;
    for vocabulary in [128_256, 151_936] {
        assert!((1..vocabulary).contains(&staged::<T>(vocabulary, capacity)));
        Case::<T>::random(1, vocabulary, vocabulary, 20.0, 5).check(capacity);
        Case::<T>::random(1, vocabulary - 5, vocabulary, 20.0, 6).with_softcap(15.0).check(capacity);
    }
}

fn tanh_and_its_slope_are_accurate_to_a_few_ulp() {
    let ulp = f64::from(f32::EPSILON);
    for exponent in -40..6 {
        for (i, m) in noise(300, (exponent + 40) as u32).into_iter().enumerate() {
            let u = (f64::from(exponent).exp2() * (1.5 + m / 2.0) * if i % 2 == 0 { 1.0 } else { -1.0 }) as f32;
            let [tanh, slope] = tanh_and_slope(u).map(f64::from);
            let u = f64::from(u);
            assert!((tanh / u.tanh() - 1.0).abs() <= 3.0 * ulp, "tanh({u}): {tanh}, expected {}", u.tanh());
            // The rounding error of the exponent of e^(-2 |u|) grows with u.
            let exact = u.cosh().powi(-2);
            let bound = (3.0 + 2.0 * u.abs()) * ulp * exact + 1e-37;
            assert!((slope - exact).abs() <= bound, "slope at {u}: {slope}, expected {exact}");
        }
    }
    for (u, want) in [(0.0, [0.0, 1.0]), (f32::INFINITY, [1.0, 0.0]), (f32::MIN, [-1.0, 0.0])] {
        assert_same("tanh and slope", &tanh_and_slope(u).map(f64::from), &want);
    }
    assert!(tanh_and_slope(f32::NAN).iter().all(|x| x.is_nan()));
}
