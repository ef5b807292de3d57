//! Conversions between storage types, and activations against f64.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, read, rounded, run, wide};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use gpu::{cast, gelu, relu_squared, swiglu};
use proptest::collection::vec;
use proptest::prelude::any;
use std::f64::consts::PI;

tests! {
    kernels of "cast.rs", "gelu.rs", "relu_squared.rs", "swiglu.rs";
    for both types: casts_round_to_nearest, casts_handle_every_bit_pattern, gelu_matches_f64_reference,
        gelu_satisfies_its_symmetry, gelu_of_large_values_does_not_overflow, gelu_propagates_nan_and_infinity,
        swiglu_matches_f64_reference, swiglu_of_random_shapes_matches_f64_reference,
        swiglu_of_large_values_does_not_overflow, swiglu_propagates_nan_and_infinity,
        relu_squared_matches_f64_reference, relu_squared_propagates_nan_and_infinity;
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

/// Returns out (rows, F) of the preactivation (rows, 2 F).
fn swiglu_forward<T: Tolerance>(x: &[T], columns: usize) -> Vec<f64> {
    let mut memory = Memory::new();
    let n = x.len() / 2;
    let (out, inp) = (memory.output::<T>("out", n), memory.input("inp", x));
    run(&mut memory, &swiglu::swiglu_forward(out, inp, n as u64, columns as u32), swiglu::grid::<T>(n), 0);
    read(&memory, out)
}

/// Returns dinp (rows, 2 F) from dout (rows, F).
fn swiglu_backward<T: Tolerance>(dout: &[T], x: &[T], columns: usize) -> Vec<f64> {
    let mut memory = Memory::new();
    let n = dout.len();
    let (dinp, dout, inp) = (memory.output::<T>("dinp", x.len()), memory.input("dout", dout), memory.input("inp", x));
    run(&mut memory, &swiglu::swiglu_backward(dinp, dout, inp, n as u64, columns as u32), swiglu::grid::<T>(n), 0);
    read(&memory, dinp)
}

/// Returns up · silu(gate), and its derivatives with respect to up and gate, in f64.
fn swiglu_reference(up: f64, gate: f64) -> [f64; 3] {
    let half = (gate / 2.0).tanh();
    let sigmoid = 0.5 + 0.5 * half;
    // The derivative of the logistic function is (1 - tanh²(x/2)) / 4.
    [up * gate * sigmoid, gate * sigmoid, up * (sigmoid + gate * 0.25 * (1.0 - half * half))]
}

fn check_swiglu<T: Tolerance>(x: &[T], dout: &[T], columns: usize) {
    let (mut out, mut dinp) = (Vec::new(), Vec::new());
    for (x, dout) in wide(x).chunks(2 * columns).zip(wide(dout).chunks(columns)) {
        let (up, gate) = x.split_at(columns);
        let values: Vec<_> = up.iter().zip(gate).map(|(&up, &gate)| swiglu_reference(up, gate)).collect();
        out.extend(values.iter().map(|value| value[0]));
        for of_gate in [false, true] {
            dinp.extend(values.iter().zip(dout).map(|(value, d)| d * value[1 + usize::from(of_gate)]));
        }
    }
    assert_close("out", &swiglu_forward(x, columns), &out, T::ROUNDING, 1.0);
    assert_close("dinp", &swiglu_backward(dout, x, columns), &dinp, T::ROUNDING, 1.0);
}

fn check_random_swiglu<T: Tolerance>(rows: usize, columns: usize, seed: u32) {
    let x: Vec<_> = noise(2 * rows * columns, seed).iter().map(|x| x * 6.0).collect();
    check_swiglu::<T>(&rounded(&x), &rounded(&noise(rows * columns, seed + 1)), columns);
}

/// Rows of one packet, rows that end within a block, and rows of several blocks.
fn swiglu_matches_f64_reference<T: Tolerance>() {
    for (rows, packets) in [(1, 1), (63, 1), (7, 80), (3, 511), (2, 512), (1, 513), (2, 1030)] {
        check_random_swiglu::<T>(rows, packets * T::PACKET, 1);
    }
}

fn swiglu_of_random_shapes_matches_f64_reference<T: Tolerance>() {
    for_all(40, (1..40usize, 1..90usize, 0..99u32), |(rows, packets, seed)| {
        check_random_swiglu::<T>(rows, packets * T::PACKET, seed);
    });
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
    assert_close("out", &swiglu_forward(&x, columns), &positive(&|x| x / 2.0), 0.0, 0.0);
    let want = [positive(&|x| x), positive(&|_| 0.5)].concat();
    assert_close("dinp", &swiglu_backward(&vec![T::from_f32(1.0); columns], &x, columns), &want, 0.0, 0.0);
}

fn swiglu_propagates_nan_and_infinity<T: Tolerance>() {
    let columns = 2 * T::PACKET;
    let mut x = noise(2 * columns, 1);
    let dout = rounded::<T>(&vec![1.0; columns]);
    let (mut out, mut dinp) =
        (swiglu_forward(&rounded::<T>(&x), columns), swiglu_backward(&dout, &rounded::<T>(&x), columns));
    // A bad up does not affect its own derivative, silu(gate).
    (x[1], out[1], dinp[columns + 1]) = (f64::NAN, f64::NAN, f64::NAN);
    (x[columns + 2], out[2], dinp[2], dinp[columns + 2]) = (f64::NAN, f64::NAN, f64::NAN, f64::NAN);
    (x[3], x[columns + 3]) = (f64::INFINITY, 2.0);
    (out[3], dinp[3], dinp[columns + 3]) = (f64::INFINITY, 2.0 * swiglu_reference(1.0, 2.0)[0] / 2.0, f64::INFINITY);
    let x = rounded::<T>(&x);
    assert_close("out", &swiglu_forward(&x, columns), &out, T::ROUNDING, 0.0);
    assert_close("dinp", &swiglu_backward(&dout, &x, columns), &dinp, T::ROUNDING, 0.0);
    // silu(infinity) is infinity.
    let mut x = vec![T::from_f32(1.0); 2 * columns];
    x[columns] = T::from_f32(f32::INFINITY);
    let out = swiglu_forward(&x, columns);
    assert!(out[0].total_cmp(&f64::INFINITY).is_eq() && out[1].is_finite(), "{out:?}");
}

fn relu_squared_forward<T: Tolerance>(x: &[T]) -> Vec<f64> {
    let mut memory = Memory::new();
    let (n, out, inp) = (x.len(), memory.output::<T>("out", x.len()), memory.input("inp", x));
    run(&mut memory, &relu_squared::relu_squared_forward(out, inp, n as u64), relu_squared::grid::<T>(n), 0);
    read(&memory, out)
}

fn relu_squared_backward<T: Tolerance>(grad: &[T], x: &[T]) -> Vec<f64> {
    let mut memory = Memory::new();
    let (n, grad, inp) = (x.len(), memory.buffer("grad", grad), memory.input("inp", x));
    run(&mut memory, &relu_squared::relu_squared_backward(grad, inp, n as u64), relu_squared::grid::<T>(n), 0);
    read(&memory, grad)
}

fn relu_squared_matches_f64_reference<T: Tolerance>() {
    for n in packets::<T>() {
        let x = rounded::<T>(&noise(n, 1).iter().map(|x| x * 6.0).collect::<Vec<_>>());
        let grad = rounded::<T>(&noise(n, 2));
        let want: Vec<_> = wide(&x).iter().map(|&x| if x > 0.0 { x.powi(2) } else { 0.0 }).collect();
        assert_close("y", &relu_squared_forward(&x), &want, T::ROUNDING, 0.0);
        let slopes = wide(&x).into_iter().map(|x| if x > 0.0 { x + x } else { 0.0 });
        let want: Vec<_> = slopes.zip(wide(&grad)).map(|(slope, g)| g * slope).collect();
        assert_close("grad", &relu_squared_backward(&grad, &x), &want, T::ROUNDING, 0.0);
    }
}

/// Also checks values near the largest. Their square is infinite.
fn relu_squared_propagates_nan_and_infinity<T: Tolerance>() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let x = rounded::<T>(&[nan, inf, -inf, 3e38, -3e38, 0.0, -0.0, 1.0]);
    assert_close("y", &relu_squared_forward(&x), &[nan, inf, 0.0, inf, 0.0, 0.0, 0.0, 1.0], 0.0, 0.0);
    let grad = vec![T::from_f32(2.0); 8];
    assert_close("grad", &relu_squared_backward(&grad, &x), &[nan, inf, 0.0, inf, 0.0, 0.0, 0.0, 4.0], 0.0, 0.0);
}
