//! Activations and their gradients in FP8: their bits are those of the activation's kernel in bf16, followed by quantization.

use crate::common::activation::{run_backward, run_forward};
use crate::common::quantized::{self, check_column_sums, largest, reference, transposed};
use crate::common::{for_all, noise, rounded, run, shared_bytes};
use cuda_std::emulate::Memory;
use cuda_std::{E4m3, E5m2, Element, Global, GlobalMut, bf16};
use gpu::activation::Activation;
use gpu::quantize::{sum_rows, tile_and_maxima, transpose_grid};
use gpu::quantize_activation::{quantize_activation_gradient_select, quantize_activation_select, tiles_and_maxima};
use proptest::strategy::Strategy;

tests! {
    kernels of "quantize_activation.rs";
    once: activations_have_the_bits_of_separate_quantization, gradients_have_the_bits_of_separate_quantization,
        gradients_are_summed, nan_and_infinity_stay_in_their_place, rows_after_the_last_are_ignored;
}

/// Reads of rows after the last would fail, because the emulator knows that nothing has written them.
fn rows_after_the_last_are_ignored() {
    for (rows, end, columns) in [(256, 128, 48), (384, 384, 144)] {
        let case = Case::new(Activation::SwiGlu, [end, columns], 5);
        let (mut memory, n) = (Memory::new(), rows * columns);
        let written = memory.output::<bf16>("inp", 2 * n);
        memory.write(written, &case.inp).unwrap();
        let (scale, end_) = (memory.input("scale", &[case.scale]), memory.input("end", &[end as u32]));
        let (out, columnwise) = (memory.output::<E4m3>("out", n), memory.output::<E4m3>("transposed", n));
        let amax = memory.buffer("amax", &[7]);
        let (inp, r, c) = (written.reader(), rows as u32, columns as u32);
        let key = (Activation::SwiGlu, true, true);
        let launch = quantize_activation_select(key, out, columnwise, amax, inp, scale, r, c, end_).unwrap();
        run(&mut memory, &launch, transpose_grid(rows, columns), shared_bytes(tile_and_maxima));
        let want = run_forward(Activation::SwiGlu, &case.inp, columns);
        let bits = quantized::bits(memory.slice(out.reader(), end * columns).unwrap());
        assert_eq!(bits, reference::<E4m3>(&want, case.scale));
        assert!((end * columns..n).all(|i| memory.slice(out.reader().skip(i), 1).is_err()));
        assert!((0..n).all(|i| memory.slice(columnwise.reader().skip(i), 1).is_ok() == (i % rows < end)));
        assert_eq!(memory.read(amax)[0], largest(&want, f32::from_bits(7)));
    }
}

/// The tensors of a test: preactivation and gradient of the output.
struct Case {
    activation: Activation,
    inp: Vec<bf16>,
    dout: Vec<bf16>,
    rows: usize,
    columns: usize,
    scale: f32,
}

impl Case {
    fn new(activation: Activation, [rows, columns]: [usize; 2], seed: u32) -> Self {
        let n = rows * columns;
        let values = |len, seed| rounded(&noise(len, seed).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
        let scale = [1.0 / 64.0, 1.0 / 448.0, 0.3][seed as usize % 3];
        let (inp, dout) = (values(activation.inputs() * n, seed), values(n, seed ^ 1));
        Self { activation, inp, dout, rows, columns, scale }
    }

    /// Checks the forward kernel, which writes the activation, its transpose, or both.
    fn check_forward(&self, [is_out, is_transposed]: [bool; 2], want: &[f64], before: Option<f32>) {
        let (mut memory, n) = (Memory::new(), self.rows * self.columns);
        let (inp, scale) = (memory.input("inp", &self.inp), memory.input("scale", &[self.scale]));
        let out = if is_out { memory.output("out", n) } else { GlobalMut::null() };
        let columnwise = if is_transposed { memory.output("transposed", n) } else { GlobalMut::null() };
        let amax = before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let (r, c) = (self.rows as u32, self.columns as u32);
        let key = (self.activation, is_out, is_transposed);
        let launch = quantize_activation_select(key, out, columnwise, amax, inp, scale, r, c, Global::null()).unwrap();
        run(&mut memory, &launch, transpose_grid(self.rows, self.columns), shared_bytes(tile_and_maxima));
        if is_out {
            quantized::check(&memory, out, want, self.scale, before.map(|before| (amax, before)));
        }
        if is_transposed {
            let bits = transposed(&reference::<E4m3>(want, self.scale), self.columns);
            assert!(quantized::bits(&memory.read(columnwise)) == bits, "{} x {}", self.rows, self.columns);
        }
        if let Some(before) = before {
            assert_eq!(memory.read(amax)[0], largest(want, before));
        }
    }

    fn check_backward(&self, is_summed: bool, want: &[f64], before: Option<f32>) {
        let columns = self.activation.inputs() * self.columns;
        let (mut memory, n) = (Memory::new(), self.rows * columns);
        let (inp, dout) = (memory.input("inp", &self.inp), memory.input("dout", &self.dout));
        let scale = memory.input("scale", &[self.scale]);
        let (out, columnwise) = (memory.output::<E5m2>("out", n), memory.output::<E5m2>("transposed", n));
        let amax = before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let partials = sum_rows(self.rows) * columns;
        let sums = if is_summed { memory.output("sums", partials) } else { GlobalMut::null() };
        let (key, r, c) = ((self.activation, is_summed), self.rows as u32, self.columns as u32);
        let launch =
            quantize_activation_gradient_select(key, out, columnwise, amax, sums, dout, inp, scale, r, c).unwrap();
        run(&mut memory, &launch, transpose_grid(self.rows, self.columns), shared_bytes(tiles_and_maxima));
        quantized::check(&memory, out, want, self.scale, before.map(|before| (amax, before)));
        let bits = reference::<E5m2>(want, self.scale);
        assert!(quantized::bits(&memory.read(columnwise)) == transposed(&bits, columns), "{} x {columns}", self.rows);
        if is_summed {
            check_column_sums::<E5m2>(&memory.read(sums), &bits, columns, self.scale);
        }
    }

    fn check_activation(&self) {
        let want = run_forward(self.activation, &self.inp, self.columns);
        self.check_forward([true, false], &want, Some(0.0));
        self.check_forward([false, true], &want, None);
        self.check_forward([true, true], &want, Some(1e9));
        self.check_forward([true, true], &want, Some(0.0));
    }

    fn check_gradient(&self, is_summed: bool) {
        let want = run_backward(self.activation, &self.dout, &self.inp, self.columns);
        self.check_backward(is_summed, &want, None);
        self.check_backward(is_summed, &want, Some(0.0));
        self.check_backward(is_summed, &want, Some(1e9));
    }
}

/// Runs `test` on random shapes of each activation.
fn for_all_shapes(cases: u32, test: impl Fn(Case)) {
    let shapes = (1..20usize, 1..20usize).prop_map(|(rows, columns)| [16 * rows, 16 * columns]);
    for_all(cases, (shapes, 0..u32::MAX), |(shape, seed)| {
        for &activation in Activation::ALL {
            test(Case::new(activation, shape, seed));
        }
    });
}

fn activations_have_the_bits_of_separate_quantization() {
    for_all_shapes(8, |case| case.check_activation());
}

fn gradients_have_the_bits_of_separate_quantization() {
    for_all_shapes(8, |case| case.check_gradient(false));
}

fn gradients_are_summed() {
    for_all_shapes(6, |case| case.check_gradient(true));
}

fn nan_and_infinity_stay_in_their_place() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new(Activation::SwiGlu, [144, 208], 7);
        // An up in the last row, and gradients in the first and in the last column.
        case.inp[143 * 416 + 5] = bf16::from_f32(bad);
        for at in [0, 144 * 208 - 1] {
            case.dout[at] = bf16::from_f32(bad);
        }
        case.check_activation();
        case.check_gradient(true);
    }
}
