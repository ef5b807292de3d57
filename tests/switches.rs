//! What each switch of `train` does to a run: by its effect, on the CPU and on the emulated GPU.

use host::engine::cpu::Cpu;
use host::engine::cuda::{Emulation, Precision, emulated_as};
use host::engine::{AdamW, BatchLayout, Engine, GeluFusion};
use host::model::{Capacity, Descriptor, Gpt2, Recompute};
use host::plan::Plan;
use host::tensor::DType;
use host::train::initialise;

const LAYOUT: BatchLayout = BatchLayout { b: 2, t: 16 };
const LAYERS: usize = 3;
const CHANNELS: usize = 64;

fn planned(engine: &mut dyn Engine, recompute: Recompute, master_weights: bool) -> (Gpt2, Plan) {
    let descriptor = Descriptor::new(LAYERS, 1, CHANNELS, LAYOUT.t, 100).unwrap();
    let capacity = Capacity { b: LAYOUT.b, t: LAYOUT.t, training: true, master_weights, recompute };
    Gpt2::plan(descriptor, capacity, engine)
}

/// What two steps leave.
#[derive(Debug, PartialEq)]
struct Trained {
    grads: Vec<f32>,
    params: Vec<f32>,
    /// In f32, where they were kept.
    master: Option<Vec<f32>>,
}

fn trained(engine: &mut dyn Engine, recompute: Recompute, master_weights: bool, learning_rate: f32) -> Trained {
    let (model, plan) = planned(engine, recompute, master_weights);
    engine.allocate(&plan).unwrap();
    initialise(&model, engine, 42).unwrap();
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    for (i, word) in words[..LAYOUT.targets().end].iter_mut().enumerate() {
        *word = (i * i % 97) as i32;
    }
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch, LAYOUT, words).unwrap();
    let training = model.training.unwrap();
    for step in 1..=2 {
        engine.zero(model.losses).unwrap();
        engine.zero(training.grads).unwrap();
        model.forward(engine, LAYOUT).unwrap();
        model.loss(engine, LAYOUT, Some(1.0 / 32.0)).unwrap();
        model.backward(engine, LAYOUT, step).unwrap();
        let settings = AdamW {
            learning_rate,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            clip: 1.0,
            seed: 100 * step,
        };
        model.update(engine, &settings).unwrap();
    }
    Trained {
        grads: engine.read(training.grads).unwrap(),
        params: engine.read(model.params).unwrap(),
        master: training.master.map(|master| engine.read(master).unwrap()),
    }
}

fn gpu(precision: Precision, gelu_fusion: Option<GeluFusion>) -> Box<dyn Engine> {
    emulated_as(Emulation::default(), precision, gelu_fusion)
}

/// Same bits, NaN included.
fn assert_same(got: &Trained, expected: &Trained, what: &str) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(expected.grads.iter().any(|grad| *grad != 0.0));
    assert_eq!(bits(&got.grads), bits(&expected.grads), "gradients, {what}");
    assert_eq!(bits(&got.params), bits(&expected.params), "parameters, {what}");
}

fn recomputes_to_the_same_bits(mut engine: impl FnMut() -> Box<dyn Engine>, what: &str) {
    let mut of = |recompute| trained(&mut *engine(), recompute, true, 1e-2);
    let kept = of(Recompute::Nothing);
    for recompute in [Recompute::Gelu, Recompute::GeluAndNorms] {
        assert_same(&of(recompute), &kept, &format!("{what}, {recompute:?}"));
    }
}

#[test]
fn recomputed_gradients_are_the_kept_ones_on_the_cpu() {
    recomputes_to_the_same_bits(|| Box::new(Cpu::new()), "CPU");
}

#[test]
fn recomputed_gradients_are_the_kept_ones_in_f32() {
    recomputes_to_the_same_bits(|| gpu(Precision::Fp32, None), "f32");
}

#[test]
fn recomputed_gradients_are_the_kept_ones_in_bf16() {
    for fusion in GeluFusion::ALL {
        recomputes_to_the_same_bits(|| gpu(Precision::Bf16, Some(fusion)), &format!("bf16, {fusion:?}"));
    }
}

#[test]
fn recomputation_frees_what_it_says() {
    for mut engine in [Box::new(Cpu::new()) as Box<dyn Engine>, gpu(Precision::Bf16, None)] {
        let float = engine.float().bytes();
        let mut bytes = |recompute| planned(&mut *engine, recompute, true).1.bytes();
        let [nothing, gelu, norms] = Recompute::ALL.map(&mut bytes);
        let btc = LAYOUT.b * LAYOUT.t * CHANNELS * float;
        // One (B, T, 4C) for all layers instead of one for each; no ln1 and ln2 of any layer.
        assert_eq!(nothing - gelu, (LAYERS - 1) * 4 * btc);
        assert_eq!(gelu - norms, 2 * LAYERS * btc);
    }
}

#[test]
fn each_fused_gelu_spares_a_rounding() {
    let of = |fusion| trained(&mut *gpu(Precision::Bf16, Some(fusion)), Recompute::Nothing, true, 0.0).grads;
    let [none, forward, both] = GeluFusion::ALL.map(of);
    assert!(none != forward && forward != both && none != both);
    let distance = |a: &[f32], b: &[f32]| {
        let (sum, squares) = a
            .iter()
            .zip(b)
            .fold((0.0, 0.0), |(d, s), (a, b)| (d + f64::from(a - b).powi(2), s + f64::from(*b).powi(2)));
        (sum / squares).sqrt()
    };
    assert!(distance(&none, &both) < 2e-2 && distance(&forward, &both) < 2e-2);
    // What is fastest on Hopper is the default; the levels are llm.c's numbers.
    assert_eq!(gpu(Precision::Bf16, None).gelu_fusion(), GeluFusion::Both);
    assert_eq!(gpu(Precision::Fp32, None).gelu_fusion(), GeluFusion::None);
    assert_eq!(GeluFusion::ALL.map(u8::from), [0, 1, 2]);
    // In f32 nothing is rounded in between.
    let of = |fusion| trained(&mut *gpu(Precision::Fp32, Some(fusion)), Recompute::Nothing, true, 0.0).grads;
    assert!(distance(&of(GeluFusion::None), &of(GeluFusion::Both)) < 1e-5);
}

#[test]
fn tf32_rounds_the_factors_of_products() {
    let of = |tf32, precision| {
        let engine = &mut *emulated_as(Emulation { tf32, ..Emulation::default() }, precision, None);
        trained(engine, Recompute::Nothing, true, 0.0).grads
    };
    let (exact, rounded) = (of(false, Precision::Fp32), of(true, Precision::Fp32));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let error = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
    // 2^-11 for each factor.
    assert!((1e-5..2e-3).contains(&error), "{error}");
    assert_eq!(of(false, Precision::Bf16), of(true, Precision::Bf16));
}

/// Updates far below a step of bf16: masters take each of them, and without masters the rounding takes them on average.
#[test]
fn without_master_weights_updates_are_rounded_stochastically() {
    let learning_rate = 1e-5;
    let with = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, true, learning_rate);
    let without = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, false, learning_rate);
    assert_eq!((with.master.is_some(), without.master), (true, None));
    let start = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, true, 0.0).params;
    let master = with.master.unwrap();
    // Every master moves; only some of the bf16 weights, or the rounding would not be in proportion.
    let moved = |values: &[f32], i: usize| values[i].to_bits() != start[i].to_bits();
    let large: Vec<usize> = (0..start.len()).filter(|&i| start[i].abs() > 0.01 && moved(&master, i)).collect();
    let rounded = large.iter().filter(|&&i| moved(&without.params, i)).count();
    assert!(large.len() > 10_000 && rounded > large.len() / 100 && rounded < large.len() / 2, "{rounded}");
    // The mean update in its own direction is the masters'.
    let mean = |params: &[f32]| {
        let along = large.iter().map(|&i| f64::from(params[i] - start[i]) * f64::from((master[i] - start[i]).signum()));
        along.sum::<f64>() / large.len() as f64
    };
    let (expected, got) = (mean(&master), mean(&without.params));
    assert!((got / expected - 1.0).abs() < 0.15, "{got:e}, expected {expected:e}");
    // Where parameters are f32 there is nothing to keep besides.
    let (model, _) = planned(&mut *gpu(Precision::Fp32, None), Recompute::Nothing, true);
    assert!(model.training.unwrap().master.is_none());
    assert_eq!(model.params.dtype, DType::F32);
}
