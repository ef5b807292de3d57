//! The gradient norm and the sum of the losses, for lengths that are not multiples of the vector size.

use crate::common::{Tolerance, assert_close, for_all, integers, noise, read, rounded, run, shared_bytes, wide};
use cuda_std::emulate::Memory;
use gpu::global_norm::{norm, shared, squared_sum, squared_sum_grid, sum};

tests! {
    kernels of "global_norm.rs";
    for both types: norm_matches_f64_reference, norm_of_integers_is_exact, norm_scales_with_its_input,
        norm_covers_all_ranges, norm_of_non_finite_values_is_not_finite, norm_overflows_to_infinity;
    once: sum_matches_f64_reference, sum_of_integers_is_exact, sum_propagates_nan_and_infinity;
}

/// Returns the norm over several ranges, computed on a GPU with `sm_count` SMs.
fn norm_of<T: Tolerance>(ranges: &[&[T]], sm_count: usize) -> f64 {
    let mut memory = Memory::new();
    let grid = |range: &[T]| squared_sum_grid::<T>(range.len(), sm_count);
    let total: u32 = ranges.iter().map(|range| grid(range)).sum();
    let partials = memory.output::<f32>("partials", total as usize);
    let mut at = 0;
    for (i, range) in ranges.iter().enumerate() {
        let values = memory.input(&format!("range {i}"), range);
        let launch = squared_sum(partials.skip(at), values, range.len() as u64);
        run(&mut memory, &launch, grid(range), shared_bytes(shared));
        at += grid(range) as usize;
    }
    let out = memory.output::<f32>("norm", 1);
    run(&mut memory, &norm(out, partials.reader(), u64::from(total)), 1, shared_bytes(shared));
    read(&memory, out)[0]
}

fn sum_of(values: &[f32]) -> f64 {
    let mut memory = Memory::new();
    let (out, inp) = (memory.output::<f32>("out", 1), memory.input("values", values));
    run(&mut memory, &sum(out, inp, values.len() as u64), 1, shared_bytes(shared));
    read(&memory, out)[0]
}

fn norm_matches_f64_reference<T: Tolerance>() {
    for n in [1, 7, 8, 2051, 5000, 40_003] {
        let values = rounded::<T>(&noise(n, 3));
        let squares: f64 = wide(&values).iter().map(|x| x * x).sum();
        assert_close("norm", &[norm_of(&[&values], 1)], &[squares.sqrt()], 1e-6, 1e-3);
    }
}

/// The sum of squares of integers is exact. Some lengths give a thread several packets, others none.
fn norm_of_integers_is_exact<T: Tolerance>() {
    let check = |n: usize, sm_count: usize, seed: u32| {
        let values = integers(n, seed);
        let squares: f64 = values.iter().map(|x| x * x).sum();
        let got = norm_of(&[&rounded::<T>(&values)], sm_count);
        assert_close(&format!("norm of {n}"), &[got], &[f64::from((squares as f32).sqrt())], 0.0, 0.0);
    };
    (1..=33).for_each(|n| check(n, 1, 1));
    for_all(48, (1..40_000usize, 1..4usize, 0..9u32), |(n, sm_count, seed)| check(n, sm_count, seed));
}

/// Scaling by a power of two is exact.
fn norm_scales_with_its_input<T: Tolerance>() {
    for_all(24, (1..3000usize, -40..40i32, 0..9u32), |(n, exponent, seed)| {
        let values = wide(&rounded::<T>(&noise(n, seed)));
        let scale = f64::from(exponent).exp2();
        let scaled: Vec<_> = values.iter().map(|x| x * scale).collect();
        let (plain, scaled) = (norm_of(&[&rounded::<T>(&values)], 1), norm_of(&[&rounded::<T>(&scaled)], 1));
        assert_close("norm", &[scaled], &[plain * scale], 0.0, 0.0);
    });
}

fn norm_covers_all_ranges<T: Tolerance>() {
    let ranges = [3, 5001, 1, 2048].map(|n| rounded::<T>(&integers(n, n as u32)));
    let squares: f64 = ranges.iter().flat_map(|range| wide(range)).map(|x| x * x).sum();
    let got = norm_of(&ranges.each_ref().map(Vec::as_slice), 1);
    assert_close("norm", &[got], &[f64::from((squares as f32).sqrt())], 0.0, 0.0);
}

/// A single NaN or infinity at any index shows in the norm, which then skips the step.
fn norm_of_non_finite_values_is_not_finite<T: Tolerance>() {
    for_all(48, (1..10_000usize, 0..10_000usize), |(n, at)| {
        let mut values = noise(n, 1);
        for (bad, want) in [(f64::INFINITY, f64::INFINITY), (-f64::INFINITY, f64::INFINITY), (f64::NAN, f64::NAN)] {
            values[at % n] = bad;
            assert_close("norm", &[norm_of(&[&rounded::<T>(&values)], 1)], &[want], 0.0, 0.0);
        }
    });
}

/// The norm is infinite if a square overflows, and correct if the square just fits.
fn norm_overflows_to_infinity<T: Tolerance>() {
    for n in [1, 9, 3000] {
        let mut values = vec![T::from_f32(0.0); n];
        values[n - 1] = T::from_f32(1e20);
        assert_close("norm", &[norm_of(&[&values], 1)], &[f64::INFINITY], 0.0, 0.0);
        values[n - 1] = T::from_f32(1e19);
        assert_close("norm", &[norm_of(&[&values], 1)], &[f64::from(values[n - 1].to_f32())], 1e-6, 0.0);
    }
}

fn sum_matches_f64_reference() {
    for n in [1, 1024, 20_011] {
        let values: Vec<f32> = rounded(&noise(n, 3).iter().map(|x| x + 2.0).collect::<Vec<_>>());
        assert_close("sum", &[sum_of(&values)], &[wide(&values).iter().sum()], 1e-6, 1.0);
    }
}

fn sum_of_integers_is_exact() {
    for_all(48, (1..20_000usize, 0..9u32), |(n, seed)| {
        let values = integers(n, seed);
        assert_close("sum", &[sum_of(&rounded(&values))], &[values.iter().sum()], 0.0, 0.0);
    });
}

fn sum_propagates_nan_and_infinity() {
    let losses = |bad: &[(usize, f32)]| {
        let mut losses = vec![1.0; 1025];
        for &(i, x) in bad {
            losses[i] = x;
        }
        sum_of(&losses)
    };
    assert!(losses(&[(1024, f32::NAN)]).is_nan());
    assert!(losses(&[(0, f32::INFINITY), (1024, f32::NEG_INFINITY)]).is_nan());
    assert_close("sum", &[losses(&[(31, f32::INFINITY)])], &[f64::INFINITY], 0.0, 0.0);
}
