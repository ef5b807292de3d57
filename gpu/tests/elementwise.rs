//! Conversions between storage types, and GELU against f64.

mod common;

use common::{Tolerance, assert_close, assert_same, for_all, noise, read, rounded, run, wide};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use gpu::{cast, gelu};
use proptest::collection::vec;
use proptest::prelude::any;
use std::f64::consts::PI;

tests! {
    kernels of "cast.rs", "gelu.rs";
    for both types: casts_round_to_nearest, casts_handle_every_bit_pattern, gelu_matches_f64_reference,
        gelu_satisfies_its_symmetry, gelu_of_large_values_does_not_overflow, gelu_propagates_nan_and_infinity;
    once: every_bf16_survives_the_round_trip;
}

/// All lengths up to two packets, all remainders around one block's tile, and several blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=17).chain(1017..=1025).chain(2041..=2049).chain([5003])
}

/// Lengths for kernels that require whole packets.
fn packets<T: Tolerance>() -> impl Iterator<Item = usize> {
    [1, 2, 63, 511, 512, 513, 1030].into_iter().map(|packets| packets * T::PACKET)
}

fn from_f32<T: Tolerance>(values: &[f32]) -> Vec<f64> {
    let mut memory = Memory::new();
    let (n, out, inp) = (values.len(), memory.output::<T>("out", values.len()), memory.input("inp", values));
    run(&mut memory, &cast::cast_from_f32(out, inp, n as u64), cast::grid::<T>(n), 0);
    read(&memory, out)
}

fn to_f32<T: Tolerance>(values: &[T]) -> Vec<f32> {
    let mut memory = Memory::new();
    let (n, out, inp) = (values.len(), memory.output::<f32>("out", values.len()), memory.input("inp", values));
    run(&mut memory, &cast::cast_to_f32(out, inp, n as u64), cast::grid::<T>(n), 0);
    memory.read(out)
}

fn check_casts<T: Tolerance>(values: &[f32]) {
    let narrow = from_f32::<T>(values);
    let want: Vec<_> = values.iter().map(|&x| f64::from(T::nearest(x))).collect();
    assert_same("cast_from_f32", &narrow, &want);
    let stored: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
    assert_same("cast_to_f32", &wide(&to_f32(&stored)), &wide(&stored));
}

fn casts_round_to_nearest<T: Tolerance>() {
    for n in lengths() {
        check_casts::<T>(&rounded(&noise(n, 1)));
    }
}

/// Includes subnormals, NaN, infinities, values that round to infinity, and ties between two bf16 values.
fn casts_handle_every_bit_pattern<T: Tolerance>() {
    let special =
        [0, 1, 0x8000, 0x8001, 0x1_8000, 0x7f_ffff, 0x7f7f_7fff, 0x7f7f_8000, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0001];
    let both_signs = special.into_iter().flat_map(|bits: u32| [bits, bits | 1 << 31]).map(f32::from_bits);
    check_casts::<T>(&both_signs.collect::<Vec<_>>());
    for_all(200, vec(any::<u32>(), 1..80), |bits| {
        check_casts::<T>(&bits.into_iter().map(f32::from_bits).collect::<Vec<_>>());
    });
    for_all(50, vec(any::<u16>(), 1..80), |bits| {
        let ties = bits.into_iter().map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000));
        check_casts::<T>(&ties.collect::<Vec<_>>());
    });
}

fn every_bf16_survives_the_round_trip() {
    let all: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let widened = to_f32(&all);
    assert!(widened.iter().zip(&all).all(|(x, b)| x.to_bits() == u32::from(b.to_bits()) << 16));
    assert_same("bf16", &from_f32::<bf16>(&widened), &wide(&widened));
}

fn gelu_forward<T: Tolerance>(x: &[T]) -> Vec<f64> {
    let mut memory = Memory::new();
    let (n, out, inp) = (x.len(), memory.output::<T>("out", x.len()), memory.input("inp", x));
    run(&mut memory, &gelu::gelu_forward(out, inp, n as u64), gelu::grid::<T>(n), 0);
    read(&memory, out)
}

fn gelu_backward<T: Tolerance>(grad: &[T], x: &[T]) -> Vec<f64> {
    let mut memory = Memory::new();
    let (n, grad, inp) = (x.len(), memory.buffer("grad", grad), memory.input("inp", x));
    run(&mut memory, &gelu::gelu_backward(grad, inp, n as u64), gelu::grid::<T>(n), 0);
    read(&memory, grad)
}

fn check_gelu<T: Tolerance>(x: &[T], grad: &[T]) {
    let inner = |x: f64| (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3));
    let slope = |x: f64| {
        let (tanh, inner_slope) = (inner(x).tanh(), (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x));
        0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope
    };
    let want: Vec<_> = wide(x).iter().map(|&x| 0.5 * x * (1.0 + inner(x).tanh())).collect();
    assert_close("y", &gelu_forward(x), &want, T::ROUNDING, 1.0);
    let want: Vec<_> = wide(x).iter().zip(wide(grad)).map(|(&x, g)| g * slope(x)).collect();
    assert_close("grad", &gelu_backward(grad, x), &want, T::ROUNDING, 1.0);
}

fn gelu_matches_f64_reference<T: Tolerance>() {
    for n in packets::<T>() {
        let x: Vec<_> = noise(n, 1).iter().map(|x| x * 6.0).collect();
        check_gelu::<T>(&rounded(&x), &rounded(&noise(n, 2)));
    }
}

/// gelu(x) - gelu(-x) = x, and therefore gelu'(x) + gelu'(-x) = 1.
fn gelu_satisfies_its_symmetry<T: Tolerance>() {
    for_all(50, vec(-1e3..1e3f64, T::PACKET), |x| {
        // Most values are near zero.
        let x = rounded::<T>(&x.iter().map(|x| x * x * x * 1e-6).collect::<Vec<_>>());
        let negative: Vec<_> = x.iter().map(|x| T::from_f32(-x.to_f32())).collect();
        let odd: Vec<_> = gelu_forward(&x).iter().zip(gelu_forward(&negative)).map(|(a, b)| a - b).collect();
        assert_close("gelu(x) - gelu(-x)", &odd, &wide(&x), T::ROUNDING, 1.0);
        let ones = vec![T::from_f32(1.0); x.len()];
        let even: Vec<_> =
            gelu_backward(&ones, &x).iter().zip(gelu_backward(&ones, &negative)).map(|(a, b)| a + b).collect();
        assert_close("gelu'(x) + gelu'(-x)", &even, &vec![1.0; x.len()], T::ROUNDING, 1.0);
    });
}

/// If x^2 or x^3 overflows, gelu(x) is x or 0 and its derivative is 1 or 0.
fn gelu_of_large_values_does_not_overflow<T: Tolerance>() {
    let x = rounded::<T>(&[20.0, 1e4, 1e13, 1e18, 2e19, 1e25, 1e38, 3e38].map(|x| [x, -x]).concat());
    let grad = vec![T::from_f32(3.0); x.len()];
    let positive =
        |value: &dyn Fn(f64) -> f64| wide(&x).iter().map(|&x| if x > 0.0 { value(x) } else { 0.0 }).collect::<Vec<_>>();
    assert_close("y", &gelu_forward(&x), &positive(&|x| x), 0.0, 0.0);
    assert_close("grad", &gelu_backward(&grad, &x), &positive(&|_| 3.0), 0.0, 0.0);
}

fn gelu_propagates_nan_and_infinity<T: Tolerance>() {
    let n = 2 * T::PACKET;
    let mut x = noise(n, 1);
    let grad = rounded::<T>(&noise(n, 2));
    let (mut forward, mut backward) = (gelu_forward(&rounded::<T>(&x)), gelu_backward(&grad, &rounded::<T>(&x)));
    (x[1], forward[1], backward[1]) = (f64::NAN, f64::NAN, f64::NAN);
    assert_close("y", &gelu_forward(&rounded::<T>(&x)), &forward, 0.0, 0.0);
    assert_close("grad", &gelu_backward(&grad, &rounded::<T>(&x)), &backward, 0.0, 0.0);
    (x[3], forward[3]) = (f64::INFINITY, f64::INFINITY);
    assert_close("y", &gelu_forward(&rounded::<T>(&x)), &forward, 0.0, 0.0);
}
