//! Conversions between storage types, and activations against f64.

use crate::common::activation::{backward, forward, run_backward, run_forward, value_and_slopes};
use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, read, rounded, run, wide};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use gpu::activation::Activation::{self, Gelu, ReluSquared, SwiGlu};
use gpu::cast;
use proptest::collection::vec;
use proptest::prelude::any;

tests! {
    kernels of "cast.rs", "activation";
    for both types: casts_round_to_nearest, casts_handle_every_bit_pattern, activations_match_f64_reference,
        activations_of_random_shapes_match_f64_reference, gelu_satisfies_its_symmetry,
        gelu_of_large_values_does_not_overflow, gelu_propagates_nan_and_infinity,
        swiglu_of_large_values_does_not_overflow, swiglu_propagates_nan_and_infinity,
        relu_squared_propagates_nan_and_infinity;
    once: every_bf16_survives_the_round_trip;
}

/// All lengths up to two packets, all remainders around one block's tile, and several blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=17).chain(1017..=1025).chain(2041..=2049).chain([5003])
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

fn check_activation<T: Tolerance>(activation: Activation, rows: usize, columns: usize, seed: u32) {
    let x: Vec<_> = noise(rows * columns * activation.inputs(), seed).iter().map(|x| x * 6.0).collect();
    let (x, dout) = (rounded::<T>(&x), rounded::<T>(&noise(rows * columns, seed + 1)));
    let scale = if activation == ReluSquared { 0.0 } else { 1.0 };
    let (want, name) = (forward(activation, &wide(&x), columns), activation.name());
    assert_close(name, &run_forward(activation, &x, columns), &want, T::ROUNDING, scale);
    let want = backward(activation, &wide(&dout), &wide(&x), columns);
    assert_close(name, &run_backward(activation, &dout, &x, columns), &want, T::ROUNDING, scale);
}

/// All remainders around one block's packets, rows of one packet, rows that end within a block, and rows of several blocks.
fn activations_match_f64_reference<T: Tolerance>() {
    for &activation in Activation::ALL {
        for packets in [1, 2, 63, 511, 512, 513, 1030] {
            check_activation::<T>(activation, 1, packets * T::PACKET, 1);
        }
        for (rows, packets) in [(63, 1), (7, 80), (3, 511), (2, 512), (2, 1030)] {
            check_activation::<T>(activation, rows, packets * T::PACKET, 1);
        }
    }
}

fn activations_of_random_shapes_match_f64_reference<T: Tolerance>() {
    for_all(40, (1..40usize, 1..90usize, 0..99u32), |(rows, packets, seed)| {
        for &activation in Activation::ALL {
            check_activation::<T>(activation, rows, packets * T::PACKET, seed);
        }
    });
}

/// Returns a function of one input.
fn value<T: Tolerance>(activation: Activation, x: &[T]) -> Vec<f64> {
    run_forward(activation, x, x.len())
}

/// Returns `dout` times the derivative of a function of one input.
fn gradient<T: Tolerance>(activation: Activation, dout: &[T], x: &[T]) -> Vec<f64> {
    run_backward(activation, dout, x, x.len())
}

/// gelu(x) - gelu(-x) = x, and therefore gelu'(x) + gelu'(-x) = 1.
fn gelu_satisfies_its_symmetry<T: Tolerance>() {
    for_all(50, vec(-1e3..1e3f64, T::PACKET), |x| {
        // Most values are near zero.
        let x = rounded::<T>(&x.iter().map(|x| x * x * x * 1e-6).collect::<Vec<_>>());
        let negative: Vec<_> = x.iter().map(|x| T::from_f32(-x.to_f32())).collect();
        let odd: Vec<_> = value(Gelu, &x).iter().zip(value(Gelu, &negative)).map(|(a, b)| a - b).collect();
        assert_close("gelu(x) - gelu(-x)", &odd, &wide(&x), T::ROUNDING, 1.0);
        let slope = |x| gradient(Gelu, &vec![T::from_f32(1.0); T::PACKET], x);
        let even: Vec<_> = slope(&x).iter().zip(slope(&negative)).map(|(a, b)| a + b).collect();
        assert_close("gelu'(x) + gelu'(-x)", &even, &vec![1.0; x.len()], T::ROUNDING, 1.0);
    });
}

/// If x^2 or x^3 overflows, gelu(x) is x or 0 and its derivative is 1 or 0.
fn gelu_of_large_values_does_not_overflow<T: Tolerance>() {
    let x = rounded::<T>(&[20.0, 1e4, 1e13, 1e18, 2e19, 1e25, 1e38, 3e38].map(|x| [x, -x]).concat());
    let dout = vec![T::from_f32(3.0); x.len()];
    let positive =
        |value: &dyn Fn(f64) -> f64| wide(&x).iter().map(|&x| if x > 0.0 { value(x) } else { 0.0 }).collect::<Vec<_>>();
    assert_close("y", &value(Gelu, &x), &positive(&|x| x), 0.0, 0.0);
    assert_close("gradient", &gradient(Gelu, &dout, &x), &positive(&|_| 3.0), 0.0, 0.0);
}

fn gelu_propagates_nan_and_infinity<T: Tolerance>() {
    let n = 2 * T::PACKET;
    let mut x = noise(n, 1);
    let dout = rounded::<T>(&noise(n, 2));
    let (mut y, mut dx) = (value(Gelu, &rounded::<T>(&x)), gradient(Gelu, &dout, &rounded::<T>(&x)));
    (x[1], y[1], dx[1]) = (f64::NAN, f64::NAN, f64::NAN);
    assert_close("y", &value(Gelu, &rounded::<T>(&x)), &y, 0.0, 0.0);
    assert_close("gradient", &gradient(Gelu, &dout, &rounded::<T>(&x)), &dx, 0.0, 0.0);
    (x[3], y[3]) = (f64::INFINITY, f64::INFINITY);
    assert_close("y", &value(Gelu, &rounded::<T>(&x)), &y, 0.0, 0.0);
}

/// If e^(-gate) overflows or vanishes, silu(gate) is 0 or gate and its derivative is 0 or 1.
fn swiglu_of_large_values_does_not_overflow<T: Tolerance>() {
    let gates = [200.0, 1e4, 1e13, 1e19, 1e25, 1e38, 3e38].map(|x| [x, -x]).concat();
    let columns = gates.len().next_multiple_of(T::PACKET);
    let gates: Vec<_> = rounded::<T>(&gates).into_iter().cycle().take(columns).collect();
    let x = [vec![T::from_f32(0.5); columns], gates.clone()].concat();
    let positive = |value: &dyn Fn(f64) -> f64| -> Vec<f64> {
        wide(&gates).iter().map(|&x| if x > 0.0 { value(x) } else { 0.0 }).collect()
    };
    assert_close("out", &run_forward(SwiGlu, &x, columns), &positive(&|x| x / 2.0), 0.0, 0.0);
    let want = [positive(&|x| x), positive(&|_| 0.5)].concat();
    let dout = vec![T::from_f32(1.0); columns];
    assert_close("dinp", &run_backward(SwiGlu, &dout, &x, columns), &want, 0.0, 0.0);
}

fn swiglu_propagates_nan_and_infinity<T: Tolerance>() {
    let columns = 2 * T::PACKET;
    let mut x = noise(2 * columns, 1);
    let dout = rounded::<T>(&vec![1.0; columns]);
    let run = |x: &[f64]| {
        let x = rounded::<T>(x);
        (run_forward(SwiGlu, &x, columns), run_backward(SwiGlu, &dout, &x, columns))
    };
    let (mut out, mut dinp) = run(&x);
    // A bad up does not affect its own derivative, silu(gate).
    (x[1], out[1], dinp[columns + 1]) = (f64::NAN, f64::NAN, f64::NAN);
    (x[columns + 2], out[2], dinp[2], dinp[columns + 2]) = (f64::NAN, f64::NAN, f64::NAN, f64::NAN);
    (x[3], x[columns + 3]) = (f64::INFINITY, 2.0);
    let (silu, _) = value_and_slopes(SwiGlu, [1.0, 2.0]);
    (out[3], dinp[3], dinp[columns + 3]) = (f64::INFINITY, silu, f64::INFINITY);
    let (got_out, got_dinp) = run(&x);
    assert_close("out", &got_out, &out, T::ROUNDING, 0.0);
    assert_close("dinp", &got_dinp, &dinp, T::ROUNDING, 0.0);
    // silu(infinity) is infinity.
    let mut x = vec![1.0; 2 * columns];
    x[columns] = f64::INFINITY;
    let (out, _) = run(&x);
    assert!(out[0].total_cmp(&f64::INFINITY).is_eq() && out[1].is_finite(), "{out:?}");
}

/// Also checks values near the largest. Their square is infinite.
fn relu_squared_propagates_nan_and_infinity<T: Tolerance>() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let x = rounded::<T>(&[nan, inf, -inf, 3e38, -3e38, 0.0, -0.0, 1.0]);
    assert_close("y", &value(ReluSquared, &x), &[nan, inf, 0.0, inf, 0.0, 0.0, 0.0, 1.0], 0.0, 0.0);
    let dout = vec![T::from_f32(2.0); 8];
    assert_close("gradient", &gradient(ReluSquared, &dout, &x), &[nan, inf, 0.0, inf, 0.0, 0.0, 0.0, 4.0], 0.0, 0.0);
}
