//! Training steps and gradients of a small model against the CPU engine.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{AdamW, MuonAdditions, MuonCoefficients};
use engine::{BatchLayout, Engine};
use model::{
    Decoder, Descriptor, MasterWeights, Moments, Muon, Offload, Optimizer, PlanOptions, Recompute, StopRequest,
    TrainStep, Update,
};
use std::thread;
use std::time::Duration;

/// Loads a fixed batch of tokens below 50.
fn load_batch(model: &Decoder, engine: &mut dyn Engine, layout: BatchLayout, seed: u32) -> anyhow::Result<usize> {
    let mut words = engine.host_buffer(layout.words())?;
    for (i, word) in words[..layout.targets().end].iter_mut().enumerate() {
        *word = (i * i % 50) as i32;
    }
    layout.sort(&mut words);
    layout.set_seed(&mut words, seed);
    engine.load_batch(model.batch, layout, words)?;
    Ok(layout.targets().len())
}

const MUON: Muon = Muon {
    learning_rate: 0.02,
    momentum: 0.9,
    weight_decay: 0.1,
    coefficients: MuonCoefficients::PolarExpress,
    additions: MuonAdditions { equilibrate: false, renormalize: false, variance: false, cautious_decay: false },
};

/// Trains a small model for two steps and returns the losses and gradient norms.
fn train(engine: &mut dyn Engine, recompute: Recompute) -> Vec<f32> {
    let options = PlanOptions { recompute, ..PlanOptions::training(3, 24) };
    train_with(engine, &mut Ranks::Single, 2, 1, options).1
}

/// Trains a small model for two steps of some micro-batches. Returns the model, the losses and gradient norms, and logits of evaluations.
fn train_with(
    engine: &mut dyn Engine,
    ranks: &mut Ranks,
    layers: usize,
    grad_accum: usize,
    options: PlanOptions,
) -> (Decoder, Vec<f32>, Vec<f32>) {
    let descriptor = Descriptor::gpt2(layers, 2, 128, 24, 50).unwrap();
    let layout = BatchLayout::new(3, 17);
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    ranks.init_communicator(engine, model.params, model.zero.shard().ranks).unwrap();
    let mut train_step = TrainStep::new(&model, layout, grad_accum);
    let (mut stats, mut logits) = (Vec::new(), Vec::new());
    for step in 1..3 {
        let (learning_rate, weight_decay, clip) = (1e-3, 0.1, 1.0);
        let adamw = AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step, clip, seed: step };
        let mut load = |engine: &mut dyn Engine| load_batch(&model, engine, layout, step);
        let muon = (options.optimizer == Optimizer::Muon).then_some(MUON);
        let mut decide = |_: &mut dyn Engine, _| Ok(Some(Update { muon, ..adamw.into() }));
        train_step.run(engine, ranks, &mut load, &mut decide).unwrap();
        stats.extend(engine.read(model.training.unwrap().stats).unwrap());
        // Passes of an evaluation, of the batch that is still loaded.
        for _ in 0..2 {
            model.forward(engine, layout, &mut train_step.hooks(ranks, StopRequest::Never)).unwrap();
        }
        let of_step = model.logits(engine, 0..4).unwrap();
        logits.extend(engine.read(of_step).unwrap());
    }
    (model, stats, logits)
}

/// Trains a small model for two steps with `options` and `offload`, and returns the bits of its statistics and logits, and digests of its state.
fn offloaded(ranks: &mut Ranks, layers: usize, options: PlanOptions, offload: &str) -> (Vec<u32>, Vec<u64>) {
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let options = PlanOptions { offload: offload.parse().unwrap(), ..options };
    let (model, stats, logits) = train_with(engine, ranks, layers, 2, options);
    let state = model.training.unwrap().state().into_iter().map(|(_, tensor)| tensor);
    let digests = [model.params].into_iter().chain(state).map(|tensor| engine.digest(tensor, 0).unwrap()).collect();
    (stats.into_iter().chain(logits).map(f32::to_bits).collect(), digests)
}

#[test]
fn offloaded_state_has_the_same_bits() {
    for (optimizer, master_weights, moments) in [
        (Optimizer::AdamW, MasterWeights::F32, Moments::F32),
        (Optimizer::AdamW, MasterWeights::Remainder, Moments::Bf16),
        (Optimizer::AdamW, MasterWeights::Remainder, Moments::EightBit),
        (Optimizer::Muon, MasterWeights::Remainder, Moments::F32),
    ] {
        let options = PlanOptions { optimizer, master_weights, moments, ..PlanOptions::training(3, 24) };
        let run = |offload| offloaded(&mut Ranks::Single, 2, options, offload);
        let expected = run("none");
        for offload in ["moments", "master,params", "master,moments,params"] {
            assert!(run(offload) == expected, "{optimizer:?} {master_weights:?} {moments:?} --offload {offload}");
        }
    }
}

#[test]
fn offloaded_activations_have_the_same_bits() {
    let options = PlanOptions { recompute: Recompute::Layers, ..PlanOptions::training(3, 24) };
    for layers in [1, 3, 4] {
        let run = |offload| offloaded(&mut Ranks::Single, layers, options, offload);
        let expected = run("none");
        for offload in ["activations", "params,activations"] {
            assert!(run(offload) == expected, "{layers} layers, --offload {offload}");
        }
    }
}

#[test]
fn ranks_with_offloaded_tensors_have_the_same_bits() {
    let options = PlanOptions { recompute: Recompute::Layers, ..PlanOptions::training(3, 24) };
    let run = |offload| {
        let ranks = TcpGroup::in_process(2, Duration::from_mins(1)).unwrap();
        thread::scope(|scope| {
            let train = |group| offloaded(&mut Ranks::Connected(group), 3, options, offload);
            let threads: Vec<_> = ranks.into_iter().map(|group| scope.spawn(move || train(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let expected = run("none");
    assert!(expected[0] == expected[1] && run("master,moments,params,activations") == expected);
}

#[test]
fn offloaded_state_takes_no_memory_of_the_gpu() {
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let descriptor: Descriptor = "d12".parse().unwrap();
    let elements = descriptor.parameters();
    let mut plan = |offload: &str| {
        let offload: Offload = offload.parse().unwrap();
        Decoder::plan(descriptor, PlanOptions { offload, ..PlanOptions::training(1, 64) }, engine).1
    };
    let whole = plan("none");
    for (offload, bytes) in [("moments", 8), ("master", 4), ("master,moments", 12), ("params", 2)] {
        let plan = plan(offload);
        assert!(plan.host_bytes().abs_diff(bytes * elements) < 1 << 20, "{offload}: {}", plan.host_bytes());
        // Passes read copies of parameters: those of two of twelve layers, and the embeddings.
        let copies = if offload == "params" { 2 * (2 * elements / 12 + 50304 * 768) } else { 0 };
        let expected = whole.bytes() + copies - plan.host_bytes();
        assert!(plan.bytes().abs_diff(expected) < 16 << 20, "{offload}: {} {expected}", plan.bytes());
        assert!(plan.summary().contains("\n  on the host "), "{}", plan.summary());
    }
    // On a CPU, there is no other memory.
    let options = PlanOptions { offload: "moments".parse().unwrap(), ..PlanOptions::training(1, 64) };
    assert_eq!(Decoder::plan(descriptor, options, &mut Cpu::new()).1.host_bytes(), 0);
}

#[test]
fn training_steps_match_cpu_engine_without_memory_errors() {
    let (stored, recomputed) = (Recompute::Nothing, Recompute::ActivationAndNorms);
    let expected = train(&mut Cpu::new(), stored);
    let mut sm_90a_stats = Vec::new();
    for (precision, hopper, recompute, tolerance) in [
        (Precision::Fp32, false, recomputed, 1e-4),
        (Precision::Bf16, false, recomputed, 2e-2),
        (Precision::Bf16, true, stored, 2e-2),
        (Precision::Bf16, true, recomputed, 2e-2),
    ] {
        let got = train(&mut *emulated(EmulatedGpu::new(hopper), precision, None, true), recompute);
        if hopper {
            sm_90a_stats.push(got.clone());
        }
        for (got, expected) in got.iter().zip(&expected) {
            assert!((got - expected).abs() < tolerance * expected.abs(), "{precision:?}: {got}, expected {expected}");
        }
    }
    // The recomputed GELU has the same bits as the GELU of the forward epilogue.
    assert_eq!(sm_90a_stats[0], sm_90a_stats[1]);
}

/// Returns the name and gradient of each parameter tensor after one micro-batch, for a model of two layers.
fn gradients(engine: &mut dyn Engine, channels: usize) -> Vec<(String, Vec<f32>)> {
    let descriptor = Descriptor::gpt2(2, channels / 64, channels, 16, 50).unwrap();
    let layout = BatchLayout::new(2, 9);
    let recompute = Recompute::ActivationAndNorms;
    let options =
        PlanOptions { master_weights: MasterWeights::None, recompute, ..PlanOptions::training(layout.b, layout.t) };
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    let mut load = |engine: &mut dyn Engine| load_batch(&model, engine, layout, 1);
    TrainStep::new(&model, layout, 1).gradients(engine, &mut Ranks::default(), &mut load).unwrap();
    let training = model.training.unwrap();
    let read = |(param, layer)| {
        let values = engine.read(model.grad_store(&training).tensor(param, layer)).unwrap();
        (format!("{param:?} of layer {layer}"), values)
    };
    model.layout.file_order().map(read).collect()
}

/// Bias gradients are column sums, which either the LayerNorm or the matmul backward computes. The CPU engine always
/// uses the former. The CUDA engine uses it only if a whole block processes a row.
#[test]
fn bias_gradients_match_from_layernorm_or_matmul_backward() {
    for (precision, channels, in_layernorm, tolerance) in
        [(Precision::Fp32, 128, false, 1e-4), (Precision::Bf16, 1088, true, 3e-2)]
    {
        let (engine, reference) = (&mut *emulated(EmulatedGpu::new(false), precision, None, true), &mut Cpu::new());
        assert_eq!((engine.fuses_column_sums(channels), reference.fuses_column_sums(channels)), (in_layernorm, true));
        for ((name, got), (_, want)) in gradients(engine, channels).iter().zip(&gradients(reference, channels)) {
            let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let error = (got - want).abs();
                let element = format!("{precision:?}, C = {channels}: {name}[{i}]");
                assert!(error <= tolerance * largest, "{element}: {got}, expected {want}, largest {largest}");
            }
        }
    }
}
