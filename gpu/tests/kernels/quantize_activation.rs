//! Activations and their gradients in FP8: their bits are those of the activation's kernel in bf16, followed by quantization.

use crate::common::quantized::{self, check_column_sums, largest, reference, transposed};
use crate::common::{for_all, noise, rounded, run};
use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, bf16};
use gpu::quantize::{sum_rows, tile_and_maxima, transpose_grid};
use gpu::quantize_activation::{
    ActivationFunction, Gelu, ReluSquared, SwiGlu, quantize_activation, quantize_activation_gradient, tiles_and_maxima,
};
use gpu::{gelu, relu_squared, swiglu};
use proptest::strategy::Strategy;

tests! {
    kernels of "quantize_activation.rs";
    once: activations_have_the_bits_of_separate_quantization, gradients_have_the_bits_of_separate_quantization,
        gradients_are_summed, nan_and_infinity_stay_in_their_place;
}

/// The kernels in bf16.
trait Separate: ActivationFunction {
    /// out = activation(inp)
    fn forward(out: GlobalMut<bf16>, inp: Global<bf16>, n: usize, columns: usize) -> (Launch, u32);

    /// Computes dinp. dinp is dout before, for a function of one input.
    fn backward(
        dinp: GlobalMut<bf16>,
        dout: Global<bf16>,
        inp: Global<bf16>,
        n: usize,
        columns: usize,
    ) -> (Launch, u32);
}

impl Separate for Gelu {
    fn forward(out: GlobalMut<bf16>, inp: Global<bf16>, n: usize, _: usize) -> (Launch, u32) {
        (gelu::gelu_forward(out, inp, n as u64), gelu::grid::<bf16>(n))
    }

    fn backward(dinp: GlobalMut<bf16>, _: Global<bf16>, inp: Global<bf16>, n: usize, _: usize) -> (Launch, u32) {
        (gelu::gelu_backward(dinp, inp, n as u64), gelu::grid::<bf16>(n))
    }
}

impl Separate for ReluSquared {
    fn forward(out: GlobalMut<bf16>, inp: Global<bf16>, n: usize, _: usize) -> (Launch, u32) {
        (relu_squared::relu_squared_forward(out, inp, n as u64), relu_squared::grid::<bf16>(n))
    }

    fn backward(dinp: GlobalMut<bf16>, _: Global<bf16>, inp: Global<bf16>, n: usize, _: usize) -> (Launch, u32) {
        (relu_squared::relu_squared_backward(dinp, inp, n as u64), relu_squared::grid::<bf16>(n))
    }
}

impl Separate for SwiGlu {
    fn forward(out: GlobalMut<bf16>, inp: Global<bf16>, n: usize, columns: usize) -> (Launch, u32) {
        (swiglu::swiglu_forward(out, inp, n as u64, columns as u32), swiglu::grid::<bf16>(n))
    }

    fn backward(
        dinp: GlobalMut<bf16>,
        dout: Global<bf16>,
        inp: Global<bf16>,
        n: usize,
        columns: usize,
    ) -> (Launch, u32) {
        (swiglu::swiglu_backward(dinp, dout, inp, n as u64, columns as u32), swiglu::grid::<bf16>(n))
    }
}

fn shared_bytes<V>(layout_of: impl Fn(&mut Layout) -> V) -> usize {
    let mut layout = Layout::new();
    layout_of(&mut layout);
    layout.bytes()
}

/// The tensors of a test: preactivation and gradient of the output.
struct Case {
    inp: Vec<bf16>,
    dout: Vec<bf16>,
    rows: usize,
    columns: usize,
    scale: f32,
}

impl Case {
    fn new<A: Separate>([rows, columns]: [usize; 2], seed: u32) -> Self {
        let n = rows * columns;
        let values = |len, seed| rounded(&noise(len, seed).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
        let scale = [1.0 / 64.0, 1.0 / 448.0, 0.3][seed as usize % 3];
        Self { inp: values(A::INPUTS * n, seed), dout: values(n, seed ^ 1), rows, columns, scale }
    }

    /// Returns the activation in bf16.
    fn activated<A: Separate>(&self) -> Vec<f64> {
        let mut memory = Memory::new();
        let n = self.rows * self.columns;
        let (inp, out) = (memory.input("inp", &self.inp), memory.output::<bf16>("out", n));
        let (launch, grid) = A::forward(out, inp, n, self.columns);
        run(&mut memory, &launch, grid, 0);
        crate::common::read(&memory, out)
    }

    /// Returns the gradient in bf16.
    fn gradient<A: Separate>(&self) -> Vec<f64> {
        let mut memory = Memory::new();
        let n = self.rows * self.columns;
        let (inp, dout) = (memory.input("inp", &self.inp), memory.input("dout", &self.dout));
        let dinp = if A::INPUTS == 1 { memory.buffer("dinp", &self.dout) } else { memory.output("dinp", 2 * n) };
        let (launch, grid) = A::backward(dinp, dout, inp, n, self.columns);
        run(&mut memory, &launch, grid, 0);
        crate::common::read(&memory, dinp)
    }

    fn check_forward<A: Separate, const OUT: bool, const TRANSPOSED: bool>(&self, want: &[f64], before: Option<f32>) {
        let (mut memory, n) = (Memory::new(), self.rows * self.columns);
        let (inp, scale) = (memory.input("inp", &self.inp), memory.input("scale", &[self.scale]));
        let out = if OUT { memory.output("out", n) } else { GlobalMut::null() };
        let columnwise = if TRANSPOSED { memory.output("transposed", n) } else { GlobalMut::null() };
        let amax = before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let (r, c) = (self.rows as u32, self.columns as u32);
        let launch = quantize_activation::<A, OUT, TRANSPOSED>(out, columnwise, amax, inp, scale, r, c);
        run(&mut memory, &launch, transpose_grid(self.rows, self.columns), shared_bytes(tile_and_maxima));
        if OUT {
            quantized::check(&memory, out, want, self.scale, before.map(|before| (amax, before)));
        }
        if TRANSPOSED {
            let bits = transposed(&reference::<E4m3>(want, self.scale), self.columns);
            assert!(quantized::bits(&memory.read(columnwise)) == bits, "{} x {}", self.rows, self.columns);
        }
        if let Some(before) = before {
            assert_eq!(memory.read(amax)[0], largest(want, before));
        }
    }

    fn check_backward<A: Separate, T: Fp8 + Pod, const SUMS: bool>(&self, want: &[f64], before: Option<f32>) {
        let (mut memory, n) = (Memory::new(), A::INPUTS * self.rows * self.columns);
        let columns = A::INPUTS * self.columns;
        let (inp, dout) = (memory.input("inp", &self.inp), memory.input("dout", &self.dout));
        let scale = memory.input("scale", &[self.scale]);
        let (out, columnwise) = (memory.output::<T>("out", n), memory.output::<T>("transposed", n));
        let amax = before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
        let partials = sum_rows(self.rows) * columns;
        let sums = if SUMS { memory.output("sums", partials) } else { GlobalMut::null() };
        let (r, c) = (self.rows as u32, self.columns as u32);
        let launch = quantize_activation_gradient::<A, T, SUMS>(out, columnwise, amax, sums, dout, inp, scale, r, c);
        run(&mut memory, &launch, transpose_grid(self.rows, self.columns), shared_bytes(tiles_and_maxima));
        quantized::check(&memory, out, want, self.scale, before.map(|before| (amax, before)));
        let bits = reference::<T>(want, self.scale);
        assert!(quantized::bits(&memory.read(columnwise)) == transposed(&bits, columns), "{} x {columns}", self.rows);
        if SUMS {
            check_column_sums::<T>(&memory.read(sums), &bits, columns, self.scale);
        }
    }
}

fn shapes() -> impl Strategy<Value = [usize; 2]> {
    (1..20usize, 1..20usize).prop_map(|(rows, columns)| [16 * rows, 16 * columns])
}

fn check_activation<A: Separate>(case: &Case) {
    let want = case.activated::<A>();
    case.check_forward::<A, true, false>(&want, Some(0.0));
    case.check_forward::<A, false, true>(&want, None);
    case.check_forward::<A, true, true>(&want, Some(1e9));
    case.check_forward::<A, true, true>(&want, Some(0.0));
}

fn activations_have_the_bits_of_separate_quantization() {
    for_all(8, (shapes(), 0..u32::MAX), |(shape, seed)| {
        check_activation::<Gelu>(&Case::new::<Gelu>(shape, seed));
        check_activation::<ReluSquared>(&Case::new::<ReluSquared>(shape, seed));
        check_activation::<SwiGlu>(&Case::new::<SwiGlu>(shape, seed));
    });
}

fn check_gradient<A: Separate, const SUMS: bool>(case: &Case) {
    let want = case.gradient::<A>();
    case.check_backward::<A, E4m3, SUMS>(&want, None);
    case.check_backward::<A, E5m2, SUMS>(&want, Some(0.0));
    case.check_backward::<A, E5m2, SUMS>(&want, Some(1e9));
}

fn gradients_have_the_bits_of_separate_quantization() {
    for_all(8, (shapes(), 0..u32::MAX), |(shape, seed)| {
        check_gradient::<Gelu, false>(&Case::new::<Gelu>(shape, seed));
        check_gradient::<ReluSquared, false>(&Case::new::<ReluSquared>(shape, seed));
        check_gradient::<SwiGlu, false>(&Case::new::<SwiGlu>(shape, seed));
    });
}

fn gradients_are_summed() {
    for_all(6, (shapes(), 0..u32::MAX), |(shape, seed)| {
        check_gradient::<Gelu, true>(&Case::new::<Gelu>(shape, seed));
        check_gradient::<ReluSquared, true>(&Case::new::<ReluSquared>(shape, seed));
        check_gradient::<SwiGlu, true>(&Case::new::<SwiGlu>(shape, seed));
    });
}

fn nan_and_infinity_stay_in_their_place() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new::<SwiGlu>([144, 208], 7);
        // An up in the last row, and gradients in the first and in the last column.
        case.inp[143 * 416 + 5] = bf16::from_f32(bad);
        for at in [0, 144 * 208 - 1] {
            case.dout[at] = bf16::from_f32(bad);
        }
        check_activation::<SwiGlu>(&case);
        check_gradient::<SwiGlu, true>(&case);
    }
}
