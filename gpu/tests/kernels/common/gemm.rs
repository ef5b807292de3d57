//! Runs GEMMs in the emulator, and compares them with an f64 reference.

use super::{
    Tolerance, activation, assert_close, assert_same, entries, integers, matrix_rows, multiples_of_8, noise, product,
    rounded, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::fp8::Fp8Format;
use cuda_std::hopper::TensorMap;
use cuda_std::{E4m3, E5m2, Element, Global, GlobalMut, bf16};
use gpu::activation::Activation;
use gpu::matmul::gemm::{Batching, Bias, Gemm, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision, Pass, Residual};
use gpu::matmul::launch::{self, KernelOperands, Map, ScaleFactors, StridedBatch, TileConfig, TileShape};
use gpu::matmul_mma::launch::{self as mma, Addresses};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;
use std::fmt;

/// out = residual + sum + bias
pub const BIAS_RESIDUAL: GemmEpilogue = GemmEpilogue { residual: Some(Residual::Add), ..GemmEpilogue::BIAS };

/// Shapes with edges before, at and after those of a tile.
pub const AROUND_A_TILE: [[usize; 3]; 6] =
    [[1, 200, 64], [63, 8, 72], [65, 64, 8], [127, 136, 56], [128, 192, 128], [129, 128, 200]];

/// Returns the cases of each GEMM with every third shape. Neighbors in the list have other shapes: the emulator is too slow for all
/// combinations, and the shapes test the tiles, which do not depend on the epilogue.
pub fn shared_out(gemms: &[Gemm], shapes: &[[usize; 3]]) -> Vec<Case> {
    let of = |(i, gemm): (usize, &Gemm)| {
        let shapes: Vec<_> = shapes.iter().skip(i % 3).step_by(3).copied().collect();
        cases(&[*gemm], &shapes, 1)
    };
    gemms.iter().enumerate().flat_map(of).collect()
}

/// Returns the GEMM in bf16 that is not batched, with this layout and epilogue. [`sized`] gives it a shape.
pub const fn in_bf16(layout: GemmLayout, epilogue: GemmEpilogue) -> Gemm {
    Gemm { m: 0, n: 0, k: 0, layout, precision: GemmPrecision::Bf16, batching: Batching::One, epilogue }
}

/// Returns the GEMMs of this type that have wgmma kernels.
pub fn all(precision: GemmPrecision, batching: Batching) -> Vec<Gemm> {
    all_of(precision, batching, launch::is_supported)
}

/// Returns the GEMMs of this type that are supported.
pub fn all_of(precision: GemmPrecision, batching: Batching, is_supported: impl Fn(&Gemm) -> bool) -> Vec<Gemm> {
    let activations = Activation::ALL.iter().flat_map(|&activation| {
        [Pass::Forward, Pass::Backward, Pass::BackwardAndValue].map(|pass| Some((activation, pass)))
    });
    let mut gemms = Vec::new();
    for activation in activations.chain([None]) {
        for bias in [None, Some(Bias::Add), Some(Bias::Gradient)] {
            for residual in [None, Some(Residual::Add), Some(Residual::Scaled)] {
                for output in [GemmOutput::Storage, GemmOutput::F32, GemmOutput::Fp8] {
                    for layout in [GemmLayout::Nt, GemmLayout::Nn, GemmLayout::Tn] {
                        let epilogue = GemmEpilogue { bias, residual, activation, output };
                        gemms.push(Gemm { precision, batching, ..in_bf16(layout, epilogue) });
                    }
                }
            }
        }
    }
    // Groups consist of blocks of 128 rows.
    let size = if batching.is_grouped() { 128 } else { 16 };
    gemms.retain(|gemm| is_supported(&sized(*gemm, [size; 3])));
    gemms
}

/// Returns the GEMM in about this shape. `n` are the columns of the activation if there is one.
///
/// A pipeline stage has twice as many columns of K in FP8 as in bf16, so K is doubled. TMA requires rows of multiples of 16 bytes.
pub fn sized(gemm: Gemm, [m, n, k]: [usize; 3]) -> Gemm {
    let n = if gemm.epilogue.output == GemmOutput::Fp8 { n.next_multiple_of(16) } else { n };
    let n = if gemm.epilogue.is_gated() && gemm.epilogue.writes_preactivation() { 2 * n } else { n };
    let m = match (gemm.batching, gemm.layout) {
        (Batching::Symmetric, _) => n,
        (_, GemmLayout::Tn) => m.next_multiple_of(8),
        _ if gemm.epilogue.output == GemmOutput::Fp8 => m.next_multiple_of(16),
        _ => m,
    };
    Gemm { m, n, k: if gemm.is_fp8() { 2 * k } else { k }, ..gemm }
}

/// Returns all supported configurations with split-K up to 3.
fn configs(gemm: &Gemm) -> Vec<TileConfig> {
    let all = TileShape::ALL.into_iter().flat_map(|tile| (1..=3).map(move |split_k| TileConfig { tile, split_k }));
    all.filter(|config| config.is_supported(gemm)).collect()
}

/// A storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Bf16,
    F32,
    E4m3,
    E5m2,
}

/// Evaluates `$call` with a [`Type`] as `$name`.
macro_rules! with_type {
    ($kind:expr, $name:ident => $call:expr) => {
        match $kind {
            Type::Bf16 => with_type!(@bf16, $name => $call),
            Type::F32 => with_type!(@f32, $name => $call),
            Type::E4m3 => with_type!(@E4m3, $name => $call),
            Type::E5m2 => with_type!(@E5m2, $name => $call),
        }
    };
    (@$type:ident, $name:ident => $call:expr) => {{
        type $name = $type;
        $call
    }};
}

/// A GEMM, its tile configuration, and the number of thread blocks.
#[derive(Clone, Copy)]
pub struct Case {
    pub gemm: Gemm,
    pub config: TileConfig,
    pub blocks: usize,
    /// Matrices of a batch, or 1.
    pub count: usize,
    /// The factors of a scaled residual.
    pub factors: ScaleFactors,
    /// Whether the kernel with mma.sync computes the GEMM.
    pub mma: bool,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gemm, config: TileConfig { tile, split_k }, blocks, count, factors, mma } = self;
        let kernel = if *mma { "mma.sync" } else { "wgmma" };
        write!(f, "{gemm}, {kernel}, {tile:?}, split-K {split_k}, {blocks} blocks, {count} matrices, {factors:?}")
    }
}

/// Elements between the end of a matrix of a batch and the start of the next.
const GAP: usize = 8;

impl Case {
    /// Returns a case with two matrices in a batch, and factors that are powers of two.
    pub fn new(gemm: Gemm, config: TileConfig, blocks: usize) -> Self {
        let count = if gemm.batching == Batching::One { 1 } else { 2 };
        Self { gemm, config, blocks, count, factors: ScaleFactors { alpha: 0.5, beta: -2.0 }, mma: false }
    }

    /// Returns the case with a tile shape, without split-K.
    pub fn with_tile(gemm: Gemm, tile: TileShape, blocks: usize) -> Self {
        Self::new(gemm, TileConfig { tile, split_k: 1 }, blocks)
    }

    /// Returns the offset of element (`i`, `l`) of a (M, K).
    fn offset_in_a(self, i: usize, l: usize) -> usize {
        if self.gemm.layout == GemmLayout::Tn { l * self.gemm.m + i } else { i * self.gemm.k + l }
    }

    /// Returns the offset of element (`l`, `j`) of b (K, N).
    fn offset_in_b(self, l: usize, j: usize) -> usize {
        if self.gemm.layout == GemmLayout::Nt { j * self.gemm.k + l } else { l * self.gemm.n + j }
    }

    /// Returns true if the residual is out.
    fn accumulates(self) -> bool {
        let Gemm { layout, batching, epilogue, .. } = self.gemm;
        let mma_gradient = self.mma && self.types()[0] == Type::E5m2 && epilogue.residual.is_some();
        let weight_gradient = layout == GemmLayout::Tn && batching == Batching::One || mma_gradient;
        weight_gradient || epilogue.output == GemmOutput::F32 || self.config.split_k > 1
    }

    fn reads_aux(self) -> bool {
        let Gemm { epilogue: GemmEpilogue { residual, activation, .. }, .. } = self.gemm;
        residual.is_some() || matches!(activation, Some((_, Pass::Backward | Pass::BackwardAndValue)))
    }

    fn has_second(self) -> bool {
        matches!(self.gemm.epilogue.activation, Some((_, Pass::Forward | Pass::BackwardAndValue)))
    }

    /// Returns true if second is the transpose of an activation in E4M3.
    fn quantizes_second(self) -> bool {
        let GemmEpilogue { activation, output, .. } = self.gemm.epilogue;
        output == GemmOutput::Fp8 && matches!(activation, Some((_, Pass::BackwardAndValue)))
    }

    /// Returns the elements of the bias, or of its gradient.
    fn bias_len(self) -> usize {
        if self.gemm.epilogue.bias == Some(Bias::Gradient) { self.gemm.m } else { self.gemm.n }
    }

    fn is_symmetric(self) -> bool {
        self.gemm.batching == Batching::Symmetric
    }

    /// Returns the types of a, b and out.
    pub fn types(self) -> [Type; 3] {
        let (a, b) = match self.gemm.precision {
            GemmPrecision::Fp8 { a: Fp8Format::E4m3, .. } => (Type::E4m3, Type::E4m3),
            GemmPrecision::Fp8 { a: Fp8Format::E5m2, .. } => (Type::E5m2, Type::E4m3),
            _ => (Type::Bf16, Type::Bf16),
        };
        let out = match self.gemm.epilogue.output {
            GemmOutput::Storage => Type::Bf16,
            GemmOutput::F32 => Type::F32,
            GemmOutput::Fp8 => a,
        };
        [a, b, out]
    }

    /// Returns the elements of each matrix a, b and out. aux has those of out.
    fn lengths(self) -> [usize; 3] {
        let Gemm { m, n, k, .. } = self.gemm;
        [m * k, k * n, self.gemm.output_shape().iter().product()]
    }

    fn batch(self) -> StridedBatch {
        if self.gemm.batching == Batching::One {
            let [a, b, out] = self.lengths();
            return StridedBatch { count: 1, a, b, out };
        }
        let [a, b, out] = self.lengths().map(|len| len.next_multiple_of(8) + GAP);
        StridedBatch { count: self.count, a, b: if self.is_symmetric() { a } else { b }, out }
    }
}

/// Returns the cases of all supported configurations.
pub fn cases(gemms: &[Gemm], sizes: &[[usize; 3]], blocks: usize) -> Vec<Case> {
    let sized = sizes.iter().flat_map(|&size| gemms.iter().map(move |&gemm| sized(gemm, size)));
    let of_gemm = |gemm| {
        let configs = configs(&gemm);
        assert!(!configs.is_empty(), "{gemm}: no kernel");
        configs.into_iter().map(move |config| Case::new(gemm, config, blocks))
    };
    sized.flat_map(of_gemm).collect()
}

/// Returns the cases of the kernel with mma.sync.
pub fn mma_cases(gemms: &[Gemm], sizes: &[[usize; 3]]) -> Vec<Case> {
    let sized = sizes.iter().flat_map(|&size| gemms.iter().map(move |&gemm| sized(gemm, size)));
    sized.map(mma_case).collect()
}

/// Returns the case of the kernel with mma.sync.
pub fn mma_case(gemm: Gemm) -> Case {
    assert!(mma::is_supported(&gemm), "{gemm}: no kernel");
    Case { mma: true, ..Case::new(gemm, mma::CONFIG, 1) }
}

/// Returns the cases of all tile shapes with this number of slices of K.
pub fn split_k_cases(gemm: Gemm, size: [usize; 3], split_k: usize, blocks: usize) -> Vec<Case> {
    let gemm = sized(gemm, size);
    let configs = TileShape::ALL.into_iter().map(|tile| TileConfig { tile, split_k });
    let configs: Vec<_> = configs.filter(|config| config.is_supported(&gemm)).collect();
    assert!(!configs.is_empty(), "{gemm}: no kernel");
    configs.into_iter().map(|config| Case::new(gemm, config, blocks)).collect()
}

/// Returns a strategy for cases with at most `most_n` columns and `most_k` terms of a sum.
pub fn any_case(gemms: Vec<Gemm>, most_n: usize, most_k: usize) -> impl Strategy<Value = Case> {
    let numbers = (1..9usize, 1..5usize, any::<Index>());
    let sizes = (matrix_rows(), multiples_of_8(most_n), multiples_of_8(most_k), select(gemms), numbers);
    sizes.prop_map(|(m, n, k, gemm, (blocks, count, which))| {
        let gemm = sized(gemm, [m, n, k]);
        let case = Case::new(gemm, *which.get(&configs(&gemm)), blocks);
        let count = if gemm.batching == Batching::One { 1 } else { count };
        Case { count, factors: ScaleFactors { alpha: 0.3, beta: 1.7 }, ..case }
    })
}

/// Operands, laid out as the GEMM requires: those of each matrix of a batch, without gaps. All values are exact in their types. b is
/// empty if the GEMM is symmetric, and aux is symmetric.
#[derive(Clone)]
pub struct Inputs {
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub bias: Vec<f64>,
    pub aux: Vec<f64>,
    /// The factors that restore a and b, of FP8 operands only.
    pub scales: [f32; 2],
}

impl Inputs {
    /// Returns operands whose sums are exact in f32.
    pub fn integers(case: Case) -> Self {
        // The sums of gated functions are smaller, where these are curved.
        let factor = if case.gemm.epilogue.is_gated() { 0.25 } else { 1.0 };
        Self::new(case, integers, 1, factor, [0.5, 0.25])
    }

    /// Returns operands whose sums are near 1, where activation functions are most curved.
    pub fn fractions(case: Case, seed: u32) -> Self {
        let factor = 2.0 / (case.gemm.k as f64).powf(0.25);
        if case.gemm.is_fp8() {
            Self::new(case, noise, seed, 100.0, [(factor / 100.0) as f32; 2])
        } else {
            Self::new(case, noise, seed, factor, [1.0; 2])
        }
    }

    fn new(case: Case, values: fn(usize, u32) -> Vec<f64>, seed: u32, factor: f64, scales: [f32; 2]) -> Self {
        let ([a, b, out], [a_type, b_type, _]) = (case.lengths().map(|len| len * case.count), case.types());
        let scaled = |values: Vec<f64>, factor| values.iter().map(|x| factor * x).collect::<Vec<_>>();
        let operand = |len, seed, kind| stored(&scaled(values(len, seed), factor), kind);
        let aux = scaled(noise(out, seed ^ 3), if case.gemm.epilogue.is_gated() { 6.0 } else { 4.0 });
        let symmetric = case.is_symmetric();
        let aux = if symmetric { mirrored(&aux, case.gemm.n) } else { aux };
        Self {
            a: operand(a, seed, a_type),
            b: if symmetric { Vec::new() } else { operand(b, seed ^ 1, b_type) },
            bias: stored(&values(case.bias_len(), seed ^ 2), Type::Bf16),
            aux: stored(&aux, Type::Bf16),
            scales,
        }
    }
}

/// Writes `values` in a type, and returns their address.
pub fn write(memory: &mut Memory, name: &str, values: &[f64], kind: Type) -> u64 {
    with_type!(kind, T => memory.buffer(name, &rounded::<T>(values)).pointer().addr() as u64)
}

/// Allocates `len` elements of a type, and returns their address.
pub fn allocate(memory: &mut Memory, name: &str, len: usize, kind: Type) -> u64 {
    with_type!(kind, T => memory.output::<T>(name, len).pointer().addr() as u64)
}

/// Returns the elements at an address. Those that were not written are NaN.
pub fn read_written(memory: &Memory, address: u64, len: usize, kind: Type) -> Vec<f64> {
    with_type!(kind, T => {
        let at = |i| memory.slice(Global::<T>::from_address(address).skip(i), 1);
        (0..len).map(|i| at(i).map_or(f64::NAN, |value| wide(value)[0])).collect()
    })
}

/// Returns `values` rounded to a type.
pub fn stored(values: &[f64], kind: Type) -> Vec<f64> {
    with_type!(kind, T => wide(&rounded::<T>(values)))
}

/// Returns the symmetric matrices (n, n) with the same elements on and above the diagonal.
pub fn mirrored(matrices: &[f64], n: usize) -> Vec<f64> {
    let above = |at: usize| (at / n).min(at % n) * n + (at / n).max(at % n);
    matrices.chunks(n * n).flat_map(|matrix| (0..n * n).map(move |at| matrix[above(at)])).collect()
}

/// The factor that restores an FP8 output.
pub const OUT_SCALE: f32 = 0.75;
/// The factor that restores an activation in FP8.
pub const ACTIVATION_SCALE: f32 = 0.3;

/// The outputs of a kernel or of the reference.
pub struct Outputs {
    /// The values of an FP8 out are those of its numbers, not multiplied by the scale.
    pub out: Vec<f64>,
    /// Empty if the GEMM has no second output. The values of an activation in FP8 are those of its numbers, in the order of rows.
    pub second: Vec<f64>,
    pub bias: Vec<f64>,
    /// 0 if out is not FP8.
    pub amax: f64,
    /// The transpose of an FP8 out.
    pub transposed: Vec<f64>,
}

/// Runs the kernels in the emulator.
pub fn run(case: Case, inputs: &Inputs) -> Outputs {
    let Case { gemm, config, count, .. } = case;
    let mut memory = Memory::new();
    let (batch, [a_type, b_type, out_type]) = (case.batch(), case.types());
    let mut input = |name: &str, values: &[f64], stride: usize, kind: Type| {
        // Values between the matrices of a batch must not matter.
        let mut all = vec![f64::NAN; count * stride];
        for (to, from) in all.chunks_mut(stride).zip(values.chunks(values.len() / count)) {
            to[..from.len()].copy_from_slice(from);
        }
        with_type!(kind, T => memory.input(name, &rounded::<T>(&all)).pointer().addr() as u64)
    };
    let a = input("a", &inputs.a, batch.a, a_type);
    let b = if case.is_symmetric() { a } else { input("b", &inputs.b, batch.b, b_type) };
    let aux = input("aux", &inputs.aux, batch.out, Type::Bf16);
    let bias = memory.buffer("bias", &rounded::<bf16>(&inputs.bias));
    let out = with_type!(out_type, T => {
        let out = if case.accumulates() {
            memory.buffer("out", &rounded::<T>(&inputs.aux))
        } else {
            memory.output("out", count * batch.out)
        };
        out.pointer().addr() as u64
    });
    let second = memory.output::<bf16>("second", gemm.m * gemm.n);
    let scratch_len = config.scratch_len(&gemm);
    let scratch = if scratch_len > 0 { memory.output("scratch", scratch_len) } else { GlobalMut::null() };
    let amax = memory.zeroed("amax", 1);
    let transposes = gemm.epilogue.output == GemmOutput::Fp8;
    let [m, n] = gemm.output_shape();
    let transposed = if transposes { memory.output("transposed", m * n) } else { GlobalMut::null() };
    let scales = inputs.scales.map(|scale| memory.input("scale", &[scale]));
    let scale_out = memory.input("scale of out", &[OUT_SCALE]);
    let activation = if case.quantizes_second() { memory.output("activation", m * n) } else { GlobalMut::null() };
    let scale_activation = memory.input("scale of the activation", &[ACTIVATION_SCALE]);
    let maps = launch::maps(&gemm, batch, config.tile);
    let mut map = |name: &str, address: u64, map: Map, used: bool| {
        if used { memory.input(name, &[tensor_map(address, map)]) } else { Global::null() }
    };
    let is_f32 = out_type == Type::F32;
    let operands = KernelOperands {
        a: map("map of a", a, maps.a, true),
        b: map("map of b", b, maps.b, true),
        out: map("map of out", out, maps.out, !is_f32),
        aux: map("map of aux", if case.accumulates() { out } else { aux }, maps.aux, case.reads_aux() && !is_f32),
        second: map(
            "map of second",
            second.pointer().addr() as u64,
            maps.second,
            case.has_second() && !case.quantizes_second(),
        ),
        bias,
        scales,
        scale_out,
        amax,
        transposed,
        activation,
        scale_activation,
        out_address: out,
        scratch,
        factors: case.factors,
        count,
        groups: Global::null(),
    };
    let kernels = if case.mma {
        let aux = if case.accumulates() { out } else { aux };
        let addresses = Addresses { a, b, aux, second: second.pointer().addr() as u64 };
        vec![mma::launch(&gemm, addresses, operands)]
    } else {
        launch::launches(&gemm, config, operands, case.blocks)
    };
    for kernel in kernels {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let [.., len] = case.lengths();
    let out = with_type!(out_type, T => {
        let matrix = |i: usize| {
            let matrix = Global::<T>::from_address(out).skip(i * batch.out);
            let written = |at| memory.slice(matrix.skip(at), 1).is_ok();
            assert!(!(len..batch.out).any(written), "{case:?} writes behind a matrix");
            wide(memory.slice(matrix, len).unwrap_or_else(|fault| panic!("{case:?}: {fault}")))
        };
        (0..count).flat_map(matrix).collect()
    });
    let second = if case.quantizes_second() {
        transpose(&wide(&memory.read(activation)), [n, m])
    } else if case.has_second() {
        wide(&memory.read(second))
    } else {
        Vec::new()
    };
    let amax = f64::from(f32::from_bits(memory.read(amax)[0]));
    let transposed = if transposes {
        let address = transposed.pointer().addr() as u64;
        with_type!(out_type, T => wide(memory.slice(Global::<T>::from_address(address), m * n).expect("written")))
    } else {
        Vec::new()
    };
    Outputs { out, second, bias: wide(&memory.read(bias)), amax, transposed }
}

/// Returns the transpose of `matrix` (rows, columns).
pub fn transpose(matrix: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    (0..columns).flat_map(|j| (0..rows).map(move |i| matrix[i * columns + j])).collect()
}

/// Returns the tensor map of the matrix at an address.
pub fn tensor_map(address: u64, Map { extents, tile, fp8 }: Map) -> TensorMap {
    if fp8 {
        TensorMap::emulated_tensor(Global::<E4m3>::from_address(address), extents, tile)
    } else {
        TensorMap::emulated_tensor(Global::<bf16>::from_address(address), extents, tile)
    }
}

/// Computes unrounded outputs. In a forward pass, out is the activation of `second`, the kernel's rounded second output.
pub fn reference(case: Case, inputs: &Inputs, second: &[f64]) -> Outputs {
    let Gemm { m, n, k, epilogue, .. } = case.gemm;
    let b = if case.is_symmetric() { &inputs.a } else { &inputs.b };
    let mut sums = Vec::new();
    for (a, b) in inputs.a.chunks(m * k).zip(b.chunks(k * n)) {
        sums.extend(product([m, n, k], |i, l| a[case.offset_in_a(i, l)], |l, j| b[case.offset_in_b(l, j)]));
    }
    let [scale_a, scale_b] = if case.gemm.is_fp8() { inputs.scales.map(f64::from) } else { [1.0; 2] };
    let [alpha, beta] = [case.factors.alpha, case.factors.beta].map(f64::from);
    for (at, sum) in sums.iter_mut().enumerate() {
        *sum *= scale_a * scale_b;
        if epilogue.bias == Some(Bias::Add) {
            *sum += inputs.bias[at % n];
        }
        match epilogue.residual {
            Some(Residual::Add) => *sum += inputs.aux[at],
            Some(Residual::Scaled) => *sum = beta * inputs.aux[at] + alpha * *sum,
            None => {}
        }
    }
    let mut bias = inputs.bias.clone();
    if epilogue.bias == Some(Bias::Gradient) {
        let column_sum = |i: usize| (0..k).map(|l| inputs.a[case.offset_in_a(i, l)]).sum::<f64>();
        bias.iter_mut().enumerate().for_each(|(i, bias)| *bias += column_sum(i));
    }
    let (out, second) = match epilogue.activation {
        None => (sums, Vec::new()),
        Some((function, Pass::Forward)) => (activation::forward(function, second, n / function.inputs()), sums),
        Some((function, pass)) => {
            let value = match pass {
                Pass::BackwardAndValue => activation::forward(function, &inputs.aux, n),
                _ => Vec::new(),
            };
            (activation::backward(function, &sums, &inputs.aux, n), value)
        }
    };
    // A NaN is the largest magnitude.
    let largest = || out.iter().map(|x| x.abs()).max_by(f64::total_cmp);
    let amax = if epilogue.output == GemmOutput::Fp8 { largest().unwrap_or_default() } else { 0.0 };
    Outputs { out, second, bias, amax, transposed: Vec::new() }
}

/// Checks an FP8 output against the unrounded one: the number is that of a value within `tolerance` of it.
fn assert_quantized(case: Case, got: &Outputs, want: &Outputs, tolerance: f64) {
    let [.., out_type] = case.types();
    // These epilogues also round the sum.
    let rounds_twice = matches!(case.gemm.epilogue.activation, Some((activation, pass))
        if pass != Pass::Forward && (case.mma || activation == Activation::ReluSquared));
    let tolerance = tolerance + if rounds_twice { bf16::ROUNDING } else { 0.0 };
    assert_numbers(case, (&got.out, out_type, OUT_SCALE), &want.out, tolerance);
    assert_close(&format!("{case:?}, amax"), &[got.amax], &[want.amax], tolerance, 0.0);
    let transpose = transpose(&got.out, case.gemm.output_shape());
    assert_close(&format!("{case:?}, transpose"), &got.transposed, &transpose, 0.0, 0.0);
}

/// Checks that each of the FP8 numbers of a type is that of a value within `tolerance` of the unrounded one, divided by the scale.
fn assert_numbers(case: Case, (got, kind, scale): (&[f64], Type, f32), want: &[f64], tolerance: f64) {
    let quantized = |value: f64| stored(&[f64::from(value as f32 / scale)], kind)[0];
    let [_, n] = case.gemm.output_shape();
    assert_eq!(got.len(), want.len(), "{case:?}");
    // Results that are not finite make those NaN that the same thread has in the same 16 columns.
    let with_nan = |at: usize| {
        let (row, column) = (at / n / 16 * 16 + at / n % 8, at % n / 16 * 16 + at % n % 8 / 2 * 2);
        let is_nan = |row: usize, column: usize| want.get(row * n + column).is_some_and(|x| !x.is_finite());
        [row, row + 8].iter().any(|&row| [0, 1, 8, 9].iter().any(|offset| is_nan(row, column + offset)))
    };
    for (i, (&got, &value)) in got.iter().zip(want).enumerate() {
        let margin = tolerance * value.abs() + 1e-30;
        let range = quantized(value - margin)..=quantized(value + margin);
        let is_right = if got.is_nan() { with_nan(i) } else { range.contains(&got) && !with_nan(i) };
        assert!(is_right, "{case:?}, scale {scale}, {i}: expected {range:?} for {value}, found {got}");
    }
}

/// Checks integer operands.
pub fn check(case: Case) {
    check_exact(case, &Inputs::integers(case));
}

/// Checks operands whose sums are exact in f32. Without an activation, the result must match bit for bit.
pub fn check_exact(case: Case, inputs: &Inputs) {
    let got = run(case, inputs);
    let want = reference(case, inputs, &got.second);
    let [.., out_type] = case.types();
    let nearest = |x: f64| f64::from(if out_type == Type::F32 { x as f32 } else { bf16::nearest(x as f32) });
    let compare = |name: &str, got: &[f64], want: &[f64], exact: bool| {
        let what = format!("{case:?}, {name}");
        if exact {
            assert_close(&what, got, &want.iter().map(|&x| nearest(x)).collect::<Vec<_>>(), 0.0, 0.0);
        } else {
            assert_close(&what, got, want, bf16::ROUNDING, 1e-30);
        }
    };
    let (exact_out, exact_second) = match case.gemm.epilogue.activation {
        None | Some((Activation::ReluSquared, Pass::Forward)) => (true, true),
        Some((_, pass)) => (false, pass == Pass::Forward),
    };
    if case.gemm.epilogue.output == GemmOutput::Fp8 {
        assert_quantized(case, &got, &want, bf16::ROUNDING);
    } else {
        compare("out", &got.out, &want.out, exact_out);
    }
    if case.quantizes_second() {
        assert_numbers(case, (&got.second, Type::E4m3, ACTIVATION_SCALE), &want.second, bf16::ROUNDING);
    } else {
        compare("second", &got.second, &want.second, exact_second);
    }
    assert_close(&format!("{case:?}, bias"), &got.bias, &stored(&want.bias, Type::Bf16), 0.0, 0.0);
}

/// Checks operands that are not integers, within the rounding of the output.
pub fn check_fractions(case: Case, seed: u32) {
    let inputs = Inputs::fractions(case, seed);
    let got = run(case, &inputs);
    let want = reference(case, &inputs, &got.second);
    let (rounding, scale) = match case.types() {
        [.., Type::F32] => (f32::ROUNDING, 1.0),
        _ if case.gemm.epilogue.is_gated() => (bf16::ROUNDING, 1e-2),
        _ => (bf16::ROUNDING, 1e-3),
    };
    if case.gemm.epilogue.output == GemmOutput::Fp8 {
        assert_quantized(case, &got, &want, 1e-3 + bf16::ROUNDING);
    } else {
        assert_close(&format!("{case:?}, out"), &got.out, &want.out, rounding, scale);
    }
    if case.quantizes_second() {
        assert_numbers(case, (&got.second, Type::E4m3, ACTIVATION_SCALE), &want.second, 1e-3 + bf16::ROUNDING);
    } else {
        assert_close(&format!("{case:?}, second"), &got.second, &want.second, rounding, scale);
    }
    assert_close(&format!("{case:?}, bias"), &got.bias, &want.bias, bf16::ROUNDING, 1e-2);
}

/// Checks that reversing the rows of a and of aux reverses the rows of the outputs bit for bit.
pub fn check_independence_of_rows(case: Case, seed: u32) {
    let Gemm { m, k, .. } = case.gemm;
    let straight = Inputs::fractions(case, seed);
    let rows = |values: &[f64]| values.rchunks((values.len() / m).max(1)).flatten().copied().collect::<Vec<_>>();
    let mut reversed = Inputs { aux: rows(&straight.aux), ..straight.clone() };
    for i in 0..m {
        for l in 0..k {
            reversed.a[case.offset_in_a(i, l)] = straight.a[case.offset_in_a(m - 1 - i, l)];
        }
    }
    let (want, got) = (run(case, &straight), run(case, &reversed));
    assert_same(&format!("{case:?}, out"), &got.out, &rows(&want.out));
    assert_same(&format!("{case:?}, second"), &got.second, &rows(&want.second));
}

/// Checks that NaN and infinity affect only the row of a, the column of b or of bias, or the element of aux that they are in.
pub fn check_non_finite_elements(case: Case) {
    let Gemm { m, n, k, .. } = case.gemm;
    let mut inputs = Inputs::integers(case);
    inputs.a[case.offset_in_a(5, k - 1)] = f64::NAN;
    inputs.b[case.offset_in_b(k - 8, n - 1)] = f64::NAN;
    // E4M3 has no infinity, and an infinite up is NaN where the activation of gate underflows.
    let epilogue = case.gemm.epilogue;
    let only_nan = case.gemm.is_fp8() || epilogue.is_gated() && epilogue.writes_preactivation();
    if !only_nan {
        inputs.a[case.offset_in_a(130, 0)] = f64::INFINITY;
        inputs.b[case.offset_in_b(1, 63)] = f64::NEG_INFINITY;
    }
    inputs.bias[100] = f64::NAN;
    let columns = inputs.aux.len() / m;
    inputs.aux[7 * columns + 9] = f64::NAN;
    inputs.aux[8 * columns - 6] = f64::NAN;
    check_exact(case, &inputs);
}

/// Checks that the activations of a forward pass, and those that a backward pass recomputes, have the bits of the elementwise
/// kernel.
///
/// The backward pass reads all bf16 values of x or gate. Its gradients must not depend on whether it recomputes the activation.
pub fn check_bits_of_fused_activations(gemms: [Gemm; 2]) {
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for case in cases(&gemms, &[[128, 512, 72]], 2) {
        let Some((function, pass)) = case.gemm.epilogue.activation else { panic!("expected an activation: {case:?}") };
        let columns = 512;
        let unfused = |x: &[f64]| bits(&activation::run_forward(function, &rounded::<bf16>(x), columns));
        let mut inputs = Inputs::fractions(case, 7);
        if pass == Pass::Forward {
            let Outputs { out, second, .. } = run(case, &inputs);
            assert_eq!(bits(&out), unfused(&second), "{case:?}");
            continue;
        }
        let width = columns * function.inputs();
        for (i, row) in inputs.aux.chunks_mut(width).enumerate() {
            for (j, x) in row[width - columns..].iter_mut().enumerate() {
                *x = f64::from(bf16::from_bits((i * columns + j) as u16).to_f32());
            }
        }
        let both = run(case, &inputs);
        assert_eq!(bits(&both.second), unfused(&inputs.aux), "{case:?}");
        let epilogue = GemmEpilogue { activation: Some((function, Pass::Backward)), ..case.gemm.epilogue };
        let alone = run(Case { gemm: Gemm { epilogue, ..case.gemm }, ..case }, &inputs);
        assert_eq!(bits(&both.out), bits(&alone.out), "{case:?}");
    }
}
