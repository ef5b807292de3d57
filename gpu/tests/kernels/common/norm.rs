//! Shapes, launches and f64 references of LayerNorm and RMSNorm.

use super::{Tolerance, assert_close, assert_same, noise, quantized, read, rounded, run, wide};
use cuda_std::emulate::Memory;
use cuda_std::{E4m3, Element, GlobalMut, bf16};
use gpu::norm::launch::{self, BackwardOperands, ForwardOperands, NormKind, Size, Weight};
use gpu::quantize::QuantizedOperands;

/// (rows, C). Covers one row, the channels of GPT-2, Llama and Qwen models, multiples of 80 that leave lanes idle, every
/// `RowShape` of both types, fewer rows than a block processes at a time, and several iterations per block.
const SHAPES: [(usize, usize); 15] = [
    (45, 1280),
    (1, 8),
    (37, 64),
    (63, 80),
    (13, 240),
    (9, 384),
    (17, 768),
    (17, 896),
    (10, 1024),
    (20, 1600),
    (9, 2048),
    (3, 3072),
    (2, 4096),
    (1, 4200),
    (2, 8192),
];

/// Returns `SHAPES`, and one row with the maximum number of channels.
pub fn shapes<T: Tolerance>() -> impl Iterator<Item = (usize, usize)> {
    SHAPES.into_iter().chain([(1, 64 * 32 * T::PACKET)])
}

/// Returns `rows` rows of noise around `offset`.
pub fn noise_around<T: Element>(offset: f64, rows: usize, channels: usize, seed: u32) -> Vec<T> {
    rounded(&noise(rows * channels, seed).iter().map(|x| x + offset).collect::<Vec<_>>())
}

/// Returns the sums of the columns of `terms` (rows, C) and of `before` (C), rounded to T. `terms` are in row-major order.
pub fn exact_sums<T: Tolerance>(before: &[f64], terms: &[f64]) -> Vec<f64> {
    let sum = |c: usize| before[c] + terms.iter().skip(c).step_by(before.len()).sum::<f64>();
    (0..before.len()).map(|c| f64::from(T::nearest(sum(c) as f32))).collect()
}

/// The outputs of a forward kernel. `mean` is empty for RMSNorm.
pub struct Forward {
    pub out: Vec<f64>,
    pub mean: Vec<f64>,
    pub rstd: Vec<f64>,
}

/// A norm with its parameters.
pub struct Norm<T> {
    kind: NormKind,
    channels: usize,
    pub weight: Option<Vec<T>>,
    bias: Option<Vec<T>>,
    /// Added to RMSNorm's mean square. The kernels of LayerNorm ignore it.
    eps: f32,
}

impl<T: Tolerance> Norm<T> {
    pub fn layernorm(weight: Vec<T>, bias: Vec<T>) -> Self {
        Self {
            kind: NormKind::LayerNorm,
            channels: weight.len(),
            weight: Some(weight),
            bias: Some(bias),
            eps: f32::NAN,
        }
    }

    pub fn rmsnorm(channels: usize, weight: Option<Vec<T>>, eps: f32) -> Self {
        Self { kind: NormKind::RmsNorm, channels, weight, bias: None, eps }
    }

    fn is_layernorm(&self) -> bool {
        self.kind == NormKind::LayerNorm
    }

    /// Normalizes in f64.
    pub fn reference(&self, x: &[T]) -> Forward {
        let mut want = Forward { out: vec![], mean: vec![], rstd: vec![] };
        let [weight, bias] = [&self.weight, &self.bias].map(|parameter| parameter.as_deref().map(wide));
        let eps = if self.is_layernorm() { 1e-5 } else { f64::from(self.eps) };
        for row in wide(x).chunks(self.channels) {
            let mean = if self.is_layernorm() { row.iter().sum::<f64>() / self.channels as f64 } else { 0.0 };
            let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / self.channels as f64;
            let rstd = 1.0 / (square + eps).sqrt();
            let parameter = |of: &Option<Vec<f64>>, c: usize, absent| of.as_ref().map_or(absent, |values| values[c]);
            let out = |(c, x)| (x - mean) * rstd * parameter(&weight, c, 1.0) + parameter(&bias, c, 0.0);
            want.out.extend(row.iter().enumerate().map(out));
            want.mean.extend(self.is_layernorm().then_some(mean));
            want.rstd.push(rstd);
        }
        want
    }

    fn size(&self, rows: usize, sm_count: usize) -> Size {
        Size { norm: self.kind, rows, channels: self.channels, sm_count }
    }

    fn operands(&self, memory: &mut Memory, x: &[T]) -> ForwardOperands<T> {
        let rows = x.len() / self.channels;
        ForwardOperands {
            mean: if self.is_layernorm() { memory.output("mean", rows) } else { GlobalMut::null() },
            rstd: memory.output("rstd", rows),
            inp: memory.input("inp", x),
            weight: self.weight.as_ref().map(|weight| memory.input("weight", weight)).unwrap_or_default(),
            bias: self.bias.as_ref().map(|bias| memory.input("bias", bias)).unwrap_or_default(),
            eps: self.eps,
        }
    }

    /// Runs the forward kernel.
    pub fn forward(&self, x: &[T]) -> Forward {
        self.forward_to(x, false)
    }

    /// Runs the forward kernel whose bits another one quantizes, if `quantizes`.
    fn forward_to(&self, x: &[T], quantizes: bool) -> Forward {
        let mut memory = Memory::new();
        let operands = self.operands(&mut memory, x);
        let out = memory.output::<T>("out", x.len());
        // One SM, so that each block processes several rows.
        let kernel = launch::forward(out, operands, self.size(x.len() / self.channels, 1), quantizes).unwrap();
        run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        Forward {
            out: read(&memory, out),
            mean: if operands.mean.is_null() { vec![] } else { read(&memory, operands.mean) },
            rstd: read(&memory, operands.rstd),
        }
    }
}

impl Norm<bf16> {
    /// Quantizes the normalized rows in the kernel that computes them, and checks every output.
    fn check_quantized(&self, x: &[bf16], scale: f32) {
        let (want, of_other_shape) = (self.forward_to(x, true), self.forward(x));
        assert_close("out of both shapes", &want.out, &of_other_shape.out, bf16::ROUNDING, 1.0);
        assert_close("rstd of both shapes", &want.rstd, &of_other_shape.rstd, 2e-6, 1e-3);
        for amax_before in [None, Some(0.0f32), Some(1e9)] {
            let mut memory = Memory::new();
            let operands = self.operands(&mut memory, x);
            let out = memory.output::<E4m3>("out", x.len());
            let amax = amax_before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
            let quantized = QuantizedOperands { out, amax, scale: memory.input("scale", &[scale]) };
            let kernel = launch::forward_fp8(quantized, operands, self.size(x.len() / self.channels, 1)).unwrap();
            run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
            quantized::check(&memory, out, &want.out, scale, amax_before.map(|before| (amax, before)));
            assert_same(
                "mean",
                &if operands.mean.is_null() { vec![] } else { read(&memory, operands.mean) },
                &want.mean,
            );
            assert_same("rstd", &read(&memory, operands.rstd), &want.rstd);
        }
    }
}

/// Checks the kernels that quantize their output, on rows of noise around `offset`.
///
/// `norm` returns a norm with that many channels, with or without weight if both exist.
pub fn check_quantization(offset: f64, norm: impl Fn(usize, bool) -> Norm<bf16>) {
    for (i, (rows, channels)) in shapes::<bf16>().enumerate() {
        // The smaller scales saturate.
        let scale = [1.0 / 64.0, 1.0 / 300.0, 0.7][i % 3];
        norm(channels, i % 2 == 0).check_quantized(&noise_around(offset, rows, channels, 1), scale);
    }
    for channels in [80, 1024, 1600, 4096, 8192] {
        for (rows, bad, weighted) in [(10, f32::NAN, true), (3, f32::INFINITY, false)] {
            let mut x = noise_around(offset, rows, channels, 1);
            x[rows * channels - 1] = bf16::from_f32(bad);
            norm(channels, weighted).check_quantized(&x, 0.01);
        }
    }
}

/// The operands of the backward kernels, with the previous gradients. Those of parameters are absent if the norm lacks them.
pub struct Backward<T> {
    pub norm: Norm<T>,
    pub dinp: Vec<T>,
    pub dweight: Option<Vec<T>>,
    pub dbias: Option<Vec<T>>,
    /// `None` if the kernels do not compute column sums.
    pub column_sums: Option<Vec<T>>,
    pub dout: Vec<T>,
    pub inp: Vec<T>,
    mean: Vec<f32>,
    pub rstd: Vec<f32>,
}

impl<T: Tolerance> Backward<T> {
    pub fn new(norm: Norm<T>, inp: Vec<T>, seed: u32) -> Self {
        let gradient = |of: &Option<Vec<T>>, seed| of.as_ref().map(|of| rounded(&noise(of.len(), seed)));
        let case = Self {
            dinp: rounded(&noise(inp.len(), seed + 6)),
            dweight: gradient(&norm.weight, seed + 7),
            dbias: gradient(&norm.bias, seed + 8),
            column_sums: None,
            dout: rounded(&noise(inp.len(), seed + 5)),
            inp: vec![],
            mean: vec![],
            rstd: vec![],
            norm,
        };
        case.with_inp(inp)
    }

    /// Replaces inp, and the statistics by those of inp.
    pub fn with_inp(self, inp: Vec<T>) -> Self {
        let Forward { mean, rstd, .. } = self.norm.reference(&inp);
        Self { inp, mean: rounded(&mean), rstd: rounded(&rstd), ..self }
    }

    pub fn with_column_sums(self, seed: u32) -> Self {
        Self { column_sums: Some(rounded(&noise(self.norm.channels, seed))), ..self }
    }

    /// Returns the previous gradients that exist: dinp, dweight, dbias and column sums.
    fn gradients(&self) -> impl Iterator<Item = &Vec<T>> {
        let of_parameters = [&self.dweight, &self.dbias, &self.column_sums];
        [&self.dinp].into_iter().chain(of_parameters.into_iter().flatten())
    }

    /// Returns the new gradients, in the order of `gradients`.
    pub fn run(&self, sm_count: usize) -> Vec<Vec<f64>> {
        let size = self.norm.size(self.rstd.len(), sm_count);
        let partials = launch::backward_partials::<T>(size, self.gradients().count() - 1).unwrap();
        let mut memory = Memory::new();
        let weight = self.norm.weight.as_ref().zip(self.dweight.as_ref()).map(|(weight, dweight)| Weight {
            weight: memory.input("weight", weight),
            dweight: memory.buffer("dweight", dweight),
            dbias: self.dbias.as_ref().map(|dbias| memory.buffer("dbias", dbias)),
            column_sums: self.column_sums.as_ref().map(|sums| memory.buffer("column_sums", sums)),
            partials: memory.output("partials", partials),
        });
        let operands = BackwardOperands {
            dinp: memory.buffer("dinp", &self.dinp),
            dout: memory.input("dout", &self.dout),
            inp: memory.input("inp", &self.inp),
            mean: self.norm.is_layernorm().then(|| memory.input("mean", &self.mean)),
            rstd: memory.input("rstd", &self.rstd),
            weight,
        };
        let kernels = launch::backward(operands, size).unwrap();
        assert_eq!(kernels.len(), if weight.is_some() { 2 } else { 1 });
        for kernel in kernels {
            run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        }
        let of_parameters = weight.map(|of| [Some(of.dweight), of.dbias, of.column_sums]);
        let views = [operands.dinp].into_iter().chain(of_parameters.into_iter().flatten().flatten());
        views.map(|view| read(&memory, view)).collect()
    }

    /// Returns what `run` returns, computed in f64.
    pub fn reference(&self) -> Vec<Vec<f64>> {
        let channels = self.norm.channels;
        let mut want: Vec<_> = self.gradients().map(|values| wide(values)).collect();
        let (xs, dys) = (wide(&self.inp), wide(&self.dout));
        let ws = self.norm.weight.as_deref().map_or(vec![1.0; channels], wide);
        for (row, rstd) in wide(&self.rstd).into_iter().enumerate() {
            let mean = self.mean.get(row).map_or(0.0, |&mean| f64::from(mean));
            let at = |c: usize| row * channels + c;
            let normed = |c: usize| (xs[at(c)] - mean) * rstd;
            let g = |c: usize| dys[at(c)] * ws[c];
            let mean_of_g = (0..channels).map(g).sum::<f64>() / channels as f64;
            let mean_of_g = if self.norm.is_layernorm() { mean_of_g } else { 0.0 };
            let projection = (0..channels).map(|c| g(c) * normed(c)).sum::<f64>() / channels as f64;
            for c in 0..channels {
                want[0][at(c)] += (g(c) - mean_of_g - normed(c) * projection) * rstd;
                let terms = [dys[at(c)] * normed(c), dys[at(c)], want[0][at(c)]];
                want[1..].iter_mut().zip(terms).for_each(|(sums, term)| sums[c] += term);
            }
        }
        want
    }
}

/// Checks gradients in the order of [`Backward::run`]. `scale` is that of dinp.
#[track_caller]
pub fn check_gradients<T: Tolerance>(got: &[Vec<f64>], want: &[Vec<f64>], scale: f64) {
    assert_eq!(got.len(), want.len());
    let scales = [scale, 1.0, 1.0, 1.0];
    for (i, what) in ["dinp", "dweight", "dbias", "column sums"].into_iter().enumerate().take(want.len()) {
        assert_close(what, &got[i], &want[i], T::ROUNDING, scales[i]);
    }
}

/// Fails unless each row of `dinp`, computed without a previous gradient, is orthogonal to that of `direction`.
#[track_caller]
pub fn assert_orthogonal<T: Tolerance>(dinp: &[f64], direction: &[f64], channels: usize) {
    for (dinp, direction) in dinp.chunks(channels).zip(direction.chunks(channels)) {
        let size = dinp.iter().map(|x| x.abs()).sum::<f64>().max(1e-3);
        let product: f64 = dinp.iter().zip(direction).map(|(d, x)| d * x).sum();
        // Epsilon breaks the invariance under scaling slightly.
        assert_close("product", &[product / size], &[0.0], T::ROUNDING.max(1e-3), 1.0);
    }
}
