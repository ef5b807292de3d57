//! Muon against f64 references, and on several ranks.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, MatmulBackend, Precision, emulated};
use engine::ops::{Activation, AdamW, MuonAdditions, MuonCoefficients, Orthogonalize};
use engine::plan::{Group, Plan};
use engine::tensor::DType;
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine};
use model::{
    Decoder, Descriptor, GroupSettings, Muon, Optimizer, Param, ParamGroup, PlanOptions, Store, Unsharded, Update,
};
use model::{Shard, TrainStep, Zero};
use std::thread;
use std::time::Duration;

/// The published coefficients in double precision.
fn coefficients(kind: MuonCoefficients) -> ([[f64; 3]; 5], f64, f64) {
    let polar_express = [
        [8.156_554_524_902_461, -22.483_292_925_577_95, 15.878_769_915_207_462],
        [4.042_929_935_166_739, -2.808_917_465_908_714, 0.500_017_845_105_131_6],
        [3.891_667_802_292_660_7, -2.772_484_153_217_685, 0.506_064_817_850_339_3],
        [3.285_753_657_755_655, -2.368_129_493_342_537_6, 0.464_490_242_330_031_06],
        [2.346_541_325_859_637_7, -1.709_782_838_268_708_1, 0.423_235_511_693_053_23],
    ];
    match kind {
        MuonCoefficients::PolarExpress => (polar_express, 1.01, 1e-6),
        MuonCoefficients::Classic => ([[3.4445, -4.775, 2.0315]; 5], 1.0, 1e-7),
    }
}

/// A row-major matrix in double precision.
#[derive(Clone)]
struct Dense {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Dense {
    fn new(rows: usize, cols: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), rows * cols);
        Self { rows, cols, values: values.iter().map(|&x| f64::from(x)).collect() }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.cols + j]
    }

    fn times(&self, other: &Self) -> Self {
        let (rows, cols) = (self.rows, other.cols);
        let dot = |i, j| (0..self.cols).map(|k| self.at(i, k) * other.at(k, j)).sum();
        let values = (0..rows * cols).map(|at| dot(at / cols, at % cols)).collect();
        Self { rows, cols, values }
    }

    fn transposed(&self) -> Self {
        let (rows, cols) = (self.cols, self.rows);
        Self { rows, cols, values: (0..rows * cols).map(|at| self.at(at % cols, at / cols)).collect() }
    }

    /// Returns the Newton-Schulz iterations, always multiplied from the left.
    fn orthogonalized(&self, kind: MuonCoefficients, additions: MuonAdditions) -> Self {
        let (steps, factor, epsilon) = coefficients(kind);
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = self.clone();
        if additions.equilibrate {
            let target = norm(&x.values) / (x.rows as f64).sqrt();
            for row in x.values.chunks_mut(x.cols) {
                let scale = target / norm(row).max(1e-6);
                for value in row {
                    *value *= scale;
                }
            }
        }
        let norm_before = norm(&x.values);
        x.values.iter_mut().for_each(|value| *value /= norm_before * factor + epsilon);
        for [a, b, c] in steps {
            let gram = x.times(&x.transposed());
            let (once, twice) = (gram.times(&x), gram.times(&gram.times(&x)));
            let terms = once.values.iter().zip(&twice.values);
            x.values.iter_mut().zip(terms).for_each(|(x, (once, twice))| *x = a * *x + b * once + c * twice);
        }
        if additions.renormalize {
            let scale = (x.rows.min(x.cols) as f64).sqrt() / norm(&x.values).max(1e-6);
            x.values.iter_mut().for_each(|value| *value *= scale);
        }
        x
    }

    /// Returns the singular values, by one-sided Jacobi rotations of the rows of the wider orientation.
    fn singular_values(&self) -> Vec<f64> {
        let wide = if self.rows >= self.cols { self.transposed() } else { self.clone() };
        let mut rows: Vec<Vec<f64>> = wide.values.chunks(wide.cols).map(<[f64]>::to_vec).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for _ in 0..30 {
            for i in 0..rows.len() {
                for j in i + 1..rows.len() {
                    let (a, b, c) = (dot(&rows[i], &rows[i]), dot(&rows[j], &rows[j]), dot(&rows[i], &rows[j]));
                    if c.abs() < 1e-14 * (a * b).sqrt() {
                        continue;
                    }
                    let tau = (b - a) / (2.0 * c);
                    let t = tau.signum() / (tau.abs() + tau.hypot(1.0));
                    let cos = 1.0 / t.hypot(1.0);
                    for k in 0..rows[i].len() {
                        let (x, y) = (rows[i][k], rows[j][k]);
                        (rows[i][k], rows[j][k]) = (cos * (x - t * y), cos * (t * x + y));
                    }
                }
            }
        }
        rows.iter().map(|row| dot(row, row).sqrt()).collect()
    }
}

/// Returns pseudorandom values in ±1.
fn random(len: usize, seed: u32) -> Vec<f32> {
    (0..len as u32).map(|i| gpu::noise::squirrel5(i, seed) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

/// Orthogonalizes matrices as one batch.
fn orthogonalized_together(
    engine: &mut dyn Engine,
    (rows, cols): (usize, usize),
    values: &[Vec<f32>],
    coefficients: MuonCoefficients,
    additions: MuonAdditions,
) -> Vec<Vec<f32>> {
    let mut plan = Plan::new();
    let (dtype, side, count) = (engine.dtype(), rows.min(cols), values.len());
    let mut add = |name, len, dtype| plan.add(Group::Activations, name, &[len], dtype);
    // Two matrices at equal distances, then others.
    let places = [0, 1, 2, 5, 6].map(|i| i * (rows * cols + 8));
    let all = add("matrices", places[4] + rows * cols, dtype);
    let matrices: Vec<Tensor> = places[..count].iter().map(|&start| all.slice(start, rows * cols)).collect();
    let [out, next] = ["out", "next"].map(|name| add(name, count * Orthogonalize::stride(rows * cols), dtype));
    let square = count * Orthogonalize::stride(side * side);
    let [gram, polynomial] = ["gram", "polynomial"].map(|name| add(name, square, dtype));
    let partials = add("partials", count * Orthogonalize::partials(rows), DType::F32);
    let attention = Descriptor::gpt2(1, 1, 8, 8, 8).unwrap().attention(1, 8);
    let workload = engine::Workload {
        attention,
        channels: 8,
        linear_layers: vec![(8, 8)],
        mlp_channels: 8,
        router: None,
        routed_tokens: 0,
        qk_norm: None,
        padded_vocab: 128,
        parameters: rows * cols,
        norm_tensors: 1,
        update_ranges: 0,
        training: true,
    };
    engine.plan(&mut plan, &workload);
    engine.allocate(&plan).unwrap();
    for (matrix, values) in matrices.iter().zip(values) {
        engine.write(*matrix, values).unwrap();
    }
    let op = Orthogonalize {
        matrices: &matrices,
        out,
        next,
        gram,
        polynomial,
        partials,
        rows,
        cols,
        coefficients,
        additions,
    };
    engine.run(op).unwrap();
    for (matrix, values) in matrices.iter().zip(values) {
        assert!(dtype != DType::F32 || engine.read(*matrix).unwrap() == *values, "the input is only read");
    }
    (0..count).map(|i| engine.read(op.result(i)).unwrap()).collect()
}

fn orthogonalized(
    engine: &mut dyn Engine,
    shape: (usize, usize),
    values: &[f32],
    coefficients: MuonCoefficients,
    additions: MuonAdditions,
) -> Vec<f32> {
    orthogonalized_together(engine, shape, &[values.to_vec()], coefficients, additions).remove(0)
}

const SHAPES: [(usize, usize); 11] =
    [(1, 8), (1, 72), (16, 16), (24, 40), (40, 24), (64, 16), (32, 96), (1, 12), (2, 12), (12, 12), (32, 12)];
const BOTH: [MuonCoefficients; 2] = [MuonCoefficients::PolarExpress, MuonCoefficients::Classic];
const NONE: MuonAdditions =
    MuonAdditions { equilibrate: false, renormalize: false, variance: false, cautious_decay: false };
const ALL: MuonAdditions = MuonAdditions { equilibrate: true, renormalize: true, variance: true, cautious_decay: true };
const ADDITIONS: [MuonAdditions; 4] =
    [NONE, MuonAdditions { equilibrate: true, ..NONE }, MuonAdditions { renormalize: true, ..NONE }, ALL];

/// Returns the largest difference between an engine's and the reference's orthogonalization, of all shapes and coefficients.
fn largest_error(engine: &mut dyn Engine, shapes: &[(usize, usize)]) -> f64 {
    let mut largest = 0.0f64;
    for (i, &(rows, cols)) in shapes.iter().enumerate() {
        let values = random(rows * cols, 7 + i as u32);
        // Rows with norms of different sizes.
        let values: Vec<f32> = values.iter().enumerate().map(|(i, x)| x * (1 + i / cols % 3) as f32).collect();
        for (kind, additions) in BOTH.into_iter().flat_map(|kind| ADDITIONS.map(|additions| (kind, additions))) {
            let got = orthogonalized(engine, (rows, cols), &values, kind, additions);
            let want = Dense::new(rows, cols, &values).orthogonalized(kind, additions);
            for (got, want) in got.iter().zip(&want.values) {
                let error = (f64::from(*got) - want).abs();
                assert!(error.is_finite(), "{rows}x{cols} {kind:?} {additions:?}: {got}");
                largest = largest.max(error);
            }
        }
    }
    largest
}

#[test]
fn newton_schulz_matches_f64_reference() {
    let error = largest_error(&mut Cpu::new(), &SHAPES);
    assert!(error < 1e-3, "CPU: {error}");
    let error = largest_error(&mut *emulated(EmulatedGpu::new(false), Precision::Fp32, None, true), &SHAPES);
    assert!(error < 1e-3, "f32: {error}");
    // Rounding errors of bf16 grow in directions of small singular values, which only nearly square matrices have.
    let wide = [(1, 8), (1, 72), (16, 64), (64, 16), (32, 96), (1, 12), (2, 12), (32, 12), (12, 33)];
    let error = largest_error(&mut *emulated(EmulatedGpu::new(true), Precision::Bf16, None, true), &wide);
    assert!(error < 5e-2, "bf16: {error}");
}

/// Returns an emulated GPU in bf16 with cuBLASLt's or this program's GEMMs. The latter choose configuration `config`.
fn bf16(matmul: MatmulBackend, config: Option<usize>) -> Box<dyn Engine> {
    let gpu = EmulatedGpu { hopper: true, matmul, kernel_config: config, ..EmulatedGpu::default() };
    emulated(gpu, Precision::Bf16, None, true)
}

/// This program's GEMMs sum in another order than the reference that stands for cuBLASLt. With all tile shapes they have the same
/// bits, so a matrix has the same bits however it is batched.
#[test]
fn kernels_of_all_tile_shapes_agree() {
    for (rows, cols) in [(16, 64), (136, 72)] {
        let values = random(rows * cols, 3);
        let kind = MuonCoefficients::PolarExpress;
        let of = |matmul, config| orthogonalized(&mut *bf16(matmul, config), (rows, cols), &values, kind, ALL);
        let library = of(MatmulBackend::Cublaslt, None);
        let kernels = of(MatmulBackend::Rust, None);
        for (got, want) in kernels.iter().zip(&library) {
            assert!((got - want).abs() < 5e-2, "{rows}x{cols}: {got}, {want}");
        }
        for config in 0..6 {
            assert!(of(MatmulBackend::Rust, Some(config)) == kernels, "{rows}x{cols}, configuration {config}");
        }
    }
}

#[test]
fn results_do_not_depend_on_the_rest_of_the_batch() {
    let kind = MuonCoefficients::Classic;
    let engines: [fn() -> Box<dyn Engine>; 4] = [
        || Box::new(Cpu::new()),
        || emulated(EmulatedGpu::new(false), Precision::Fp32, None, true),
        || bf16(MatmulBackend::Cublaslt, None),
        || bf16(MatmulBackend::Rust, None),
    ];
    for engine in engines {
        let shapes = [(24, 40), (136, 72), (2, 12)];
        for (shape, additions) in shapes.into_iter().flat_map(|shape| [NONE, ALL].map(|additions| (shape, additions))) {
            // Norms differ by orders of magnitude.
            let matrix = |i: u32| random(shape.0 * shape.1, i).iter().map(|x| x * 100f32.powi(i as i32)).collect();
            let values: Vec<Vec<f32>> = (0..5).map(matrix).collect();
            let together = orthogonalized_together(&mut *engine(), shape, &values, kind, additions);
            for (i, (values, got)) in values.iter().zip(&together).enumerate() {
                let alone = orthogonalized(&mut *engine(), shape, values, kind, additions);
                assert!(*got == alone, "{shape:?}, matrix {i}");
            }
            let pair = [values[4].clone(), values[1].clone()];
            let pair = orthogonalized_together(&mut *engine(), shape, &pair, kind, additions);
            assert!(pair[0] == together[4] && pair[1] == together[1], "{shape:?}");
        }
    }
}

#[test]
fn singular_values_approach_one() {
    for (i, (rows, cols)) in SHAPES.into_iter().enumerate() {
        for scale in [1e-4, 1.0, 1e4] {
            let values: Vec<f32> = random(rows * cols, 7 + i as u32).iter().map(|x| x * scale).collect();
            for kind in BOTH {
                let got = orthogonalized(&mut Cpu::new(), (rows, cols), &values, kind, NONE);
                let singular_values = Dense::new(rows, cols, &got).singular_values();
                assert_eq!(singular_values.len(), rows.min(cols));
                for sigma in singular_values {
                    assert!((0.6..1.3).contains(&sigma), "{rows}x{cols} {kind:?} x {scale}: {sigma}");
                }
            }
        }
    }
}

#[test]
fn a_zero_matrix_stays_zero() {
    for additions in ADDITIONS {
        let kind = MuonCoefficients::PolarExpress;
        assert_eq!(orthogonalized(&mut Cpu::new(), (3, 8), &[0.0; 24], kind, additions), [0.0; 24]);
    }
}

const ADAMW: AdamW =
    AdamW { learning_rate: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3, clip: 1.0, seed: 77 };
const MUON: Muon = Muon {
    learning_rate: 0.02,
    momentum: 0.9,
    weight_decay: 0.15,
    coefficients: MuonCoefficients::PolarExpress,
    additions: ALL,
};
/// Gradient norm, above the threshold of clipping.
const NORM: f32 = 2.5;

/// Two query heads share a key-value head, and the MLP is gated.
fn descriptor() -> Descriptor {
    let gpt2 = Descriptor::gpt2(2, 2, 16, 24, 50).unwrap();
    Descriptor { kv_heads: 1, activation: Activation::SwiGlu, mlp_channels: 24, tied: false, ..gpt2 }
}

/// Plans and allocates a model, and fills its parameters, gradients and moments with pseudorandom numbers.
fn filled(engine: &mut dyn Engine, optimizer: Optimizer) -> Decoder {
    let options = PlanOptions { optimizer, ..PlanOptions::training(1, 24) };
    let (model, plan) = Decoder::plan(descriptor(), options, engine);
    engine.allocate(&plan).unwrap();
    let training = model.training.unwrap();
    engine.write(training.stats, &[7.0, NORM]).unwrap();
    for (i, (param, layer)) in model.layout.file_order().enumerate() {
        for (k, store) in stores(&model).into_iter().enumerate() {
            let values = random(param.len(&model.descriptor), (4 * i + k) as u32);
            // Second moments are positive.
            let values: Vec<f32> = values.iter().map(|x| if k == 2 { x.abs() } else { *x }).collect();
            store.write(engine, param, layer, &values).unwrap();
        }
    }
    model
}

/// Returns parameters, m, v and gradients.
fn stores(model: &Decoder) -> [Store<'_>; 4] {
    let training = model.training.as_ref().unwrap();
    let [m, v] = [training.m, training.v].map(|kept| model.state_store(kept));
    [model.param_store(), m, v, model.grad_store(training)]
}

fn values(engine: &mut dyn Engine, model: &Decoder, param: Param, layer: usize) -> [Vec<f32>; 4] {
    stores(model).map(|store| engine.read(store.held(param, layer).unwrap().1).unwrap())
}

/// Returns the rows of each matrix that Muon updates in a tensor, or `None` if AdamW updates it.
fn matrices(param: Param) -> Option<Vec<usize>> {
    match param {
        Param::Qkvw => Some(vec![16, 8, 8]),
        Param::Attprojw | Param::Fcprojw => Some(vec![16]),
        Param::Fcw => Some(vec![24, 24]),
        _ => None,
    }
}

/// Scales x by the running means of the squares of its rows or columns, as in nanochat, and updates the means.
fn reference_variance(x: &mut Dense, second: &mut [f64]) {
    let Dense { rows, cols, .. } = *x;
    let side = |i: usize| if rows >= cols { i / cols } else { i % cols };
    let count = rows.min(cols) as f64;
    let mut means = vec![0.0; second.len()];
    x.values.iter().enumerate().for_each(|(i, x)| means[side(i)] += x * x / count);
    second.iter_mut().zip(&means).for_each(|(second, mean)| *second += (1.0 - 0.9) * (mean - *second));
    let steps: Vec<f64> = second.iter().map(|second| 1.0 / second.max(1e-10).sqrt()).collect();
    let before = means.iter().map(|mean| mean * count).sum::<f64>().sqrt();
    let after = means.iter().zip(&steps).map(|(mean, step)| mean * count * step * step).sum::<f64>().sqrt();
    x.values.iter_mut().enumerate().for_each(|(i, x)| *x *= steps[side(i)] * before / after);
}

/// Returns one matrix, its momentum and its second moments after a step, in double precision. With variance, the second moments begin with
/// the running means.
fn reference_step(cols: usize, [param, m, v, grads]: [&[f32]; 4], additions: MuonAdditions) -> [Vec<f64>; 3] {
    let rows = param.len() / cols;
    let mu = f64::from(MUON.momentum);
    let wide = |values: &[f32]| Dense::new(rows, cols, values).values;
    let grads: Vec<f64> = wide(grads).iter().map(|g| g / f64::from(NORM)).collect();
    let m: Vec<f64> = wide(m).iter().zip(&grads).map(|(m, g)| m + (1.0 - mu) * (g - m)).collect();
    let nesterov = m.iter().zip(&grads).map(|(m, g)| g + mu * (m - g)).collect();
    let mut x = Dense { rows, cols, values: nesterov }.orthogonalized(MUON.coefficients, additions);
    let mut v = wide(v);
    if additions.variance {
        reference_variance(&mut x, &mut v[..rows.max(cols)]);
    }
    let scale = (rows as f64 / cols as f64).max(1.0).sqrt();
    let (rate, decay) = (f64::from(MUON.learning_rate), f64::from(MUON.weight_decay));
    let step = |(w, x): (&f64, &f64)| {
        let decay = match additions.cautious_decay {
            true if x * w < 0.0 => 0.0,
            true => scale * decay,
            false => decay,
        };
        w - rate * (scale * x + decay * w)
    };
    let new = wide(param).iter().zip(&x.values).map(step).collect();
    [new, m, v]
}

#[test]
fn a_step_matches_f64_reference_and_adamw_updates_the_rest() {
    ADDITIONS.into_iter().for_each(assert_step);
}

fn assert_step(additions: MuonAdditions) {
    let (engine, plain) = (&mut Cpu::new(), &mut Cpu::new());
    let model = filled(engine, Optimizer::Muon);
    let before: Vec<_> = model.layout.file_order().map(|(param, l)| values(engine, &model, param, l)).collect();
    let muon = Some(Muon { additions, ..MUON });
    model.apply_update(engine, &Update { muon, ..ADAMW.into() }, &mut Unsharded).unwrap();
    let alone = filled(plain, Optimizer::AdamW);
    alone.apply_update(plain, &ADAMW.into(), &mut Unsharded).unwrap();
    let mut compared = 0;
    for ((param, layer), before) in model.layout.file_order().zip(before) {
        let got = values(engine, &model, param, layer);
        let Some(parts) = matrices(param) else {
            assert!(got == values(plain, &alone, param, layer), "{} of layer {layer}", param.name());
            continue;
        };
        assert!(additions.variance || got[2] == before[2], "v of {}", param.name());
        let (cols, mut start) = (param.shape(&model.descriptor).1, 0);
        for rows in parts {
            let part = |values: &[Vec<f32>; 4], k: usize| values[k][start..start + rows * cols].to_vec();
            let want = reference_step(cols, [0, 1, 2, 3].map(|k| &before[k][start..start + rows * cols]), additions);
            for (k, want) in want.iter().enumerate() {
                for (got, want) in part(&got, k).into_iter().zip(want) {
                    let what = ["weights", "momentum", "second moments"][k];
                    assert!((f64::from(got) - want).abs() < 1e-5, "{what} of {}: {got}, {want}", param.name());
                }
            }
            start += rows * cols;
            compared += 1;
        }
        assert_eq!(start, got[0].len());
    }
    assert_eq!(compared, 2 * 7);
}

#[test]
fn non_finite_stats_skip_the_step() {
    for stats in [[f32::NAN, 1.0], [7.0, f32::INFINITY]] {
        for engine in
            [&mut Cpu::new() as &mut dyn Engine, &mut *emulated(EmulatedGpu::new(false), Precision::Fp32, None, false)]
        {
            let model = filled(engine, Optimizer::Muon);
            engine.write(model.training.unwrap().stats, &stats).unwrap();
            let all = |engine: &mut dyn Engine| {
                model.layout.file_order().map(|(param, l)| values(engine, &model, param, l)).collect::<Vec<_>>()
            };
            let before = all(engine);
            model.apply_update(engine, &Update { muon: Some(MUON), ..ADAMW.into() }, &mut Unsharded).unwrap();
            assert!(all(engine) == before, "{stats:?}");
        }
    }
}

#[test]
fn groups_have_their_own_learning_rates() {
    let engine = &mut Cpu::new();
    let after = |engine: &mut Cpu, update: Update| {
        let model = filled(engine, Optimizer::AdamW);
        model.apply_update(engine, &update, &mut Unsharded).unwrap();
        [Param::Wte, Param::Wpe, Param::LmHead, Param::Fcw, Param::Lnfw].map(|param| values(engine, &model, param, 0))
    };
    let mut at = |rate| after(engine, AdamW { learning_rate: rate, ..ADAMW }.into());
    let [base, slow, fast] = [0.01, 0.001, 0.1].map(&mut at);
    let AdamW { beta1, beta2, eps, weight_decay, .. } = ADAMW;
    let mut rates = Update::from(ADAMW);
    for (group, learning_rate) in [(ParamGroup::Embeddings, 0.1), (ParamGroup::Head, 0.001)] {
        let settings = GroupSettings { learning_rate, beta1, beta2, eps, weight_decay };
        rates.groups[group as usize] = Some(settings);
    }
    let got = after(engine, rates);
    assert!(got[0] == fast[0] && got[1] == fast[1] && got[2] == slow[2] && got[3] == base[3] && got[4] == base[4]);
}

/// A model planned for AdamW has no memory for Muon.
#[test]
fn muon_needs_its_memory() {
    let engine = &mut Cpu::new();
    let model = filled(engine, Optimizer::AdamW);
    let update = Update { muon: Some(MUON), ..ADAMW.into() };
    let text = model.apply_update(engine, &update, &mut Unsharded).unwrap_err().to_string();
    assert!(text.contains("planned for AdamW only"), "{text}");
}

/// Collects the GEMMs of an update without computing anything; the emulator has none to time.
#[test]
fn autotuning_includes_the_update() {
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, false);
    let options = PlanOptions { optimizer: Optimizer::Muon, ..PlanOptions::training(1, 16) };
    let (model, plan) = Decoder::plan(Descriptor::gpt2(1, 1, 64, 16, 50).unwrap(), options, engine);
    engine.allocate(&plan).unwrap();
    assert_eq!(model.tune(engine, BatchLayout::new(1, 16)).unwrap(), None);
}

const LAYOUT: BatchLayout = BatchLayout::new(1, 16);

type NewEngine = fn() -> Box<dyn Engine>;

/// The elements of a tensor that a rank keeps: parameters (0), m (1) or v (2), the tensor, its layer, the first element, bits.
type Part = (usize, Param, usize, usize, Vec<u32>);

/// Returns this rank's parts of the parameters, m and v after two steps: tensor, layer, first element and bits.
fn trained(group: TcpGroup, engine: &mut dyn Engine, stage: u8) -> Vec<Part> {
    let (rank, ranks) = (group.rank, group.world_size);
    let zero = Zero::new(stage, Shard { rank, ranks });
    let options = PlanOptions { optimizer: Optimizer::Muon, zero, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    let (model, plan) = Decoder::plan(Descriptor::gpt2(3, 1, 64, LAYOUT.t, 60).unwrap(), options, engine);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    let mut ranks = Ranks::Connected(group);
    ranks.init_communicator(engine, model.params, model.zero.shard().ranks).unwrap();
    let mut step = TrainStep::new(&model, LAYOUT, 1);
    for number in 1..=2 {
        let mut load = |engine: &mut dyn Engine| {
            let mut words = engine.host_buffer(LAYOUT.words())?;
            for (i, word) in words[..LAYOUT.targets().end].iter_mut().enumerate() {
                *word = ((7 * rank + i * (i + number as usize)) % 57) as i32;
            }
            LAYOUT.sort(&mut words);
            LAYOUT.set_seed(&mut words, 9 * number + rank as u32);
            engine.load_batch(model.batch, LAYOUT, words)?;
            Ok(LAYOUT.targets().len())
        };
        // The order of the norm's sum depends on the stage, so nothing is clipped.
        let adamw = AdamW { step: number, clip: f32::INFINITY, seed: number, ..ADAMW };
        let mut decide = |_: &mut dyn Engine, _| Ok(Some(Update { muon: Some(MUON), ..adamw.into() }));
        step.run(engine, &mut ranks, &mut load, &mut decide).unwrap();
    }
    let training = model.training.unwrap();
    let mut parts = Vec::new();
    let [m, v] = [training.m, training.v].map(|kept| model.state_store(kept));
    for (kind, store) in [model.param_store(), m, v].into_iter().enumerate() {
        for (param, layer) in model.layout.file_order() {
            if let Some((elements, tensor)) = store.held(param, layer) {
                let bits = engine.read(tensor).unwrap().into_iter().map(f32::to_bits).collect();
                parts.push((kind, param, layer, elements.start, bits));
            }
        }
    }
    ranks.close().unwrap();
    parts
}

/// Trains on `ranks` threads. Returns the parts of all ranks.
fn trained_together(ranks: usize, stage: u8, engine: NewEngine) -> Vec<Part> {
    let groups = TcpGroup::in_process(ranks, Duration::from_mins(1)).unwrap();
    thread::scope(|scope| {
        let run = |group| scope.spawn(move || trained(group, &mut *engine(), stage));
        let threads: Vec<_> = groups.into_iter().map(run).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// The result does not depend on which rank orthogonalizes a matrix, nor on the boundaries of the shards.
#[test]
fn every_zero_stage_gives_the_same_bits() {
    let kernels = || {
        let gpu = EmulatedGpu { hopper: true, matmul: MatmulBackend::Rust, ..EmulatedGpu::default() };
        emulated(gpu, Precision::Bf16, None, false)
    };
    // The division by a power of two ranks is exact; that by three is not, but stage 1 divides like stage 0.
    let all = [(2, 1..=3), (3, 1..=1)];
    // The emulator is slow. Stage 3 shards what the other stages do.
    let largest = [(2, 3..=3)];
    let engines: [(&str, NewEngine, &[_]); 2] =
        [("CPU", || Box::new(Cpu::new()), &all), ("bf16 with this program's GEMMs", kernels, &largest)];
    for (name, engine, cases) in engines {
        for (ranks, stages) in cases.iter().cloned() {
            let whole = trained_together(ranks, 0, engine);
            for stage in stages {
                let parts = trained_together(ranks, stage, engine);
                let mut elements = 0;
                for (kind, param, layer, first, bits) in parts {
                    let of = whole.iter().find(|of| (of.0, of.1, of.2) == (kind, param, layer)).unwrap();
                    let expected = &of.4[first..first + bits.len()];
                    let what = format!("{name}, {ranks} ranks, stage {stage}, {} of layer {layer}", param.name());
                    assert!(bits == expected, "{what}, store {kind}, from element {first}");
                    elements += bits.len();
                }
                // Each element at least once: some are stored by all ranks.
                assert!(elements >= whole.iter().map(|of| of.4.len()).sum::<usize>() / ranks);
            }
        }
    }
}
