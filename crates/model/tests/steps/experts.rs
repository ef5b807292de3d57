//! Mixtures of experts in training steps. `tests/transformers_models.rs` compares Qwen3-MoE and OLMoE with transformers.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::ops::{AdamW, RouterScores};
use engine::{BatchLayout, Engine};
use model::descriptor::{Experts, Overrides};
use model::{
    Decoder, Descriptor, Muon, Optimizer, Param, Params, PlanOptions, Recompute, Shard, TrainStep, Unsharded, Update,
    Zero, init,
};
use rng::Mt19937;
use std::thread;
use std::time::Duration;

const T: usize = 12;
const VOCAB: usize = 50;

fn small(scores: RouterScores, normalized: bool, shared_channels: u32) -> Descriptor {
    let overrides = Overrides {
        layers: Some(2),
        heads: Some(4),
        kv_heads: Some(2),
        channels: Some(32),
        mlp_channels: Some(12),
        ..Overrides::default()
    };
    let known = Descriptor { vocab: VOCAB, max_seq_len: T, head_size: 8, .."qwen3:30b-a3b".parse().unwrap() };
    let (bias, aux_loss, z_loss) = (false, 0.0, 0.0);
    let experts = Experts { count: 5, active: 2, scores, normalized, bias, shared_channels, aux_loss, z_loss };
    Descriptor { experts: Some(experts), ..known }.with(overrides).unwrap()
}

/// Returns a model with larger weights than initial ones, so that the scores of its experts differ.
fn planned(descriptor: Descriptor, options: PlanOptions) -> (Decoder, Cpu) {
    let mut engine = Cpu::new();
    let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
    engine.allocate(&plan).unwrap();
    let (store, mut rng) = (model.param_store(), Mt19937::new(5));
    init::generate(&model.descriptor, 7, |param, layer, values| {
        let mut values = values.to_vec();
        if param.is_matrix() {
            rng.normal(&mut values, 0.15);
        }
        store.write(&mut engine, param, layer, &values)
    })
    .unwrap();
    (model, engine)
}

/// Loads the sequences from `first` on.
fn load(engine: &mut dyn Engine, model: &Decoder, layout: BatchLayout, first: usize) {
    let mut words = engine.host_buffer(layout.words()).unwrap();
    let mut rng = Mt19937::new(9);
    let all: Vec<i32> = (0..2 * 8 * T).map(|_| rng.below(VOCAB as u32) as i32).collect();
    let tokens = layout.b * layout.t;
    words[layout.inputs()].copy_from_slice(&all[first * T..][..tokens]);
    words[layout.targets()].copy_from_slice(&all[(8 + first) * T..][..tokens]);
    layout.sort(&mut words);
    engine.load_batch(model.batch.slice(0, layout.words()), layout, words).unwrap();
}

fn gradients(engine: &mut dyn Engine, model: &Decoder, layout: BatchLayout, dloss: f32) {
    model.forward(engine, layout, &mut Unsharded).unwrap();
    model.loss(engine, layout, Some(dloss)).unwrap();
    model.backward(engine, layout, dloss, &mut Unsharded).unwrap();
}

/// Along the gradient of each tensor, the loss changes by its length. The losses of the router are not part of that loss.
#[test]
fn gradients_are_slopes_of_the_loss() {
    let layout = BatchLayout::new(2, T);
    for (scores, normalized, shared_channels) in [
        (RouterScores::Softmax, true, 0),
        (RouterScores::Softmax, false, 20),
        (RouterScores::Sigmoid, true, 20),
        (RouterScores::Sigmoid, false, 0),
    ] {
        let d = small(scores, normalized, shared_channels);
        let (model, mut engine) = planned(d, PlanOptions::training(layout.b, layout.t));
        load(&mut engine, &model, layout, 0);
        gradients(&mut engine, &model, layout, 1.0);
        let loss = |engine: &mut Cpu| {
            engine.zero(model.losses).unwrap();
            model.forward(engine, layout, &mut Unsharded).unwrap();
            model.loss(engine, layout, None).unwrap();
            engine.read(model.losses).unwrap().into_iter().map(f64::from).sum::<f64>()
        };
        for (param, layer) in model.layout.file_order() {
            let weight = model.layout.of(model.params, param, layer);
            let gradient = engine.read(model.layout.of(model.training.unwrap().grads, param, layer)).unwrap();
            let values = engine.read(weight).unwrap();
            let length = gradient.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            assert!(length > 0.0, "{}", param.name());
            let mut at = |step: f64| {
                let along = values.iter().zip(&gradient);
                let moved: Vec<f32> = along.map(|(x, d)| x + (step * f64::from(*d) / length) as f32).collect();
                engine.write(weight, &moved).unwrap();
                loss(&mut engine)
            };
            let h = 2e-3;
            let slope = (at(h) - at(-h)) / (2.0 * h);
            engine.write(weight, &values).unwrap();
            let what = format!("{} of layer {layer}, {scores:?}, normalized {normalized}", param.name());
            assert!((slope - length).abs() < 0.02 * length + 2e-3, "{what}: slope {slope}, gradient {length}");
        }
    }
}

fn with_router_losses(d: Descriptor) -> Descriptor {
    Descriptor { experts: d.experts.map(|experts| Experts { aux_loss: 0.1, z_loss: 0.05, ..experts }), ..d }
}

/// A batch in two equal micro-batches has the gradients of one of them, with the losses of the router and at each recomputation level.
#[test]
fn losses_of_the_router_do_not_depend_on_micro_batches_or_recomputation() {
    let layout = BatchLayout::new(1, T);
    let d = with_router_losses(small(RouterScores::Softmax, true, 20));
    let run = |d: Descriptor, recompute, micro_batches: u8| {
        let options = PlanOptions { recompute, ..PlanOptions::training(layout.b, layout.t) };
        let (model, mut engine) = planned(d, options);
        for _ in 0..micro_batches {
            load(&mut engine, &model, layout, 3);
            gradients(&mut engine, &model, layout, 1.0 / f32::from(micro_batches));
        }
        engine.read(model.training.unwrap().grads).unwrap()
    };
    let one = run(d, Recompute::Nothing, 1);
    let two = run(d, Recompute::Nothing, 2);
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let scale = one.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    assert!(distance(&one, &two) <= 1e-6 * scale, "{} of {scale}", distance(&one, &two));
    // Without these losses, the gradient of the router differs.
    let router = Params::new(d).range(Param::Router, 0);
    let without = run(small(RouterScores::Softmax, true, 20), Recompute::Nothing, 1);
    assert!(distance(&one[router.clone()], &without[router]) > 1e-3 * scale);
    for recompute in Recompute::ALL {
        assert!(run(d, recompute, 2) == two, "{recompute:?}");
    }
}

fn with_bias(d: Descriptor) -> Descriptor {
    Descriptor { experts: d.experts.map(|experts| Experts { bias: true, ..experts }), ..d }
}

const RATE: f32 = 0.0625;

const ADAMW: AdamW =
    AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, clip: 1.0, seed: 0 };

/// Returns the parameters after three steps, from each rank's parts.
fn trained(ranks: usize, stage: u8, optimizer: Optimizer) -> Vec<f32> {
    let d = with_bias(with_router_losses(small(RouterScores::Softmax, true, 20)));
    let layout = BatchLayout::new(2, T);
    let rank = |group: TcpGroup| {
        let rank = group.rank;
        let zero = Zero::new(stage, Shard { rank, ranks });
        let options = PlanOptions { zero, optimizer, ..PlanOptions::training(layout.b, layout.t) };
        let (model, mut engine) = planned(d, options);
        let mut connected = if ranks == 1 { Ranks::Single } else { Ranks::Connected(group) };
        connected.init_communicator(&engine, model.params, if stage > 0 { ranks } else { 1 }).unwrap();
        let mut step = TrainStep::new(&model, layout, 2 / ranks);
        let mut next = rank;
        for number in 1..=3 {
            let mut load = |engine: &mut dyn Engine| {
                load(engine, &model, layout, 2 * (next % 4));
                next += ranks;
                Ok(layout.targets().len())
            };
            let muon = (optimizer == Optimizer::Muon).then(Muon::default);
            let update = Update { muon, ..AdamW { step: number, ..ADAMW }.into() }.with_router_bias_rate(RATE);
            let mut decide = |_: &mut dyn Engine, _| Ok(Some(update));
            step.run(&mut engine, &mut connected, &mut load, &mut decide).unwrap();
        }
        let mut parts = Vec::new();
        for (param, layer) in model.layout.file_order() {
            if let Some((elements, tensor)) = model.param_store().held(param, layer) {
                parts.push((param, layer, elements.start, engine.read(tensor).unwrap()));
            }
        }
        connected.close().unwrap();
        parts
    };
    let groups = TcpGroup::in_process(ranks, Duration::from_mins(1)).unwrap();
    let parts: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let layout = Params::new(d);
    let mut whole = vec![0.0; layout.elements()];
    for (param, layer, first, values) in parts {
        let start = layout.range(param, layer).start + first;
        whole[start..start + values.len()].copy_from_slice(&values);
    }
    whole
}

#[test]
fn two_ranks_train_like_one_in_every_zero_stage() {
    let params = Params::new(with_bias(small(RouterScores::Softmax, true, 20)));
    for optimizer in [Optimizer::AdamW, Optimizer::Muon] {
        let one = trained(1, 0, optimizer);
        let biases = |all: &[f32]| [0, 1].map(|layer| all[params.range(Param::RouterBias, layer)].to_vec());
        // Each of the three steps adds the rate or subtracts it, unless a load is the mean.
        let of_one = biases(&one).concat();
        assert!(of_one.iter().all(|x| (x / RATE).fract() == 0.0 && x.abs() <= 3.0 * RATE), "{of_one:?}");
        assert!(of_one.iter().any(|x| x.abs() > RATE), "{of_one:?}");
        let scale = one.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let stages: Vec<Vec<f32>> = (0..=3).map(|stage| trained(2, stage, optimizer)).collect();
        for (stage, two) in stages.iter().enumerate() {
            let error = one.iter().zip(two).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error <= 1e-5 * scale, "{optimizer:?}, stage {stage}: {error} of {scale}");
            assert_eq!(biases(two), biases(&one), "{optimizer:?}, stage {stage}");
        }
        assert!(stages[2] == stages[3], "{optimizer:?}");
    }
}

#[test]
fn muon_orthogonalizes_each_matrix_of_each_expert() {
    let d = small(RouterScores::Softmax, true, 20);
    assert_eq!(Param::Fcw.matrices(&d), [12; 10]);
    assert_eq!((Param::Fcprojw.matrices(&d), Param::Router.matrices(&d)), (vec![32; 5], vec![5]));
    assert_eq!((Param::SharedFcw.matrices(&d), Param::SharedFcprojw.matrices(&d)), (vec![20; 2], vec![32]));
    assert_eq!(d.parameters() - d.active_parameters(), 2 * 3 * 3 * 12 * 32);
}

/// Returns the number of rows of each expert in each layer, from the choices of the last forward pass.
fn loads(model: &Decoder, engine: &mut Cpu) -> Vec<Vec<u32>> {
    let read = model.read_groups(engine).unwrap().unwrap();
    model.expert_loads(&engine.wait(read).unwrap().values)
}

/// A model without a bias has the same loss and norm: the gradients of biases are too small for it. Clipping, the schedule of the learning
/// rate and weight decay do not change the steps of a bias, and nothing changes after a loss that is not finite.
#[test]
fn biases_move_by_the_rate_whatever_the_gradients_are() {
    let layout = BatchLayout::new(2, T);
    let run_with = |d: Descriptor, adamw: AdamW, poison: bool, recompute| {
        let options = PlanOptions { recompute, ..PlanOptions::training(layout.b, layout.t) };
        let (model, mut engine) = planned(d, options);
        let mut step = TrainStep::new(&model, layout, 2);
        let mut load = |engine: &mut dyn Engine| {
            load(engine, &model, layout, 0);
            Ok(layout.targets().len())
        };
        let mut stats = Vec::new();
        let mut decide = |engine: &mut dyn Engine, found: model::StepStats| {
            stats = engine.read(found.tensor)?;
            if poison {
                engine.write(found.tensor, &[f32::INFINITY, stats[1]])?;
            }
            Ok(Some(Update::from(adamw).with_router_bias_rate(RATE)))
        };
        step.run(&mut engine, &mut Ranks::Single, &mut load, &mut decide).unwrap();
        let biases: Vec<Vec<f32>> = if d.has(Param::RouterBias) {
            let read = |layer| engine.read(model.layout.of(model.params, Param::RouterBias, layer)).unwrap();
            [0, 1].map(read).to_vec()
        } else {
            Vec::new()
        };
        (stats, biases, loads(&model, &mut engine))
    };
    let run = |d, adamw, poison| run_with(d, adamw, poison, Recompute::Nothing);
    for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
        let d = small(scores, true, 0);
        let (stats, biases, loads) = run(with_bias(d), ADAMW, false);
        // The loads of all layers are kept, also if layers are recomputed.
        for recompute in Recompute::ALL {
            assert_eq!(run_with(with_bias(d), ADAMW, false, recompute).2, loads, "{recompute:?}");
        }
        // Scores and logits have the same order, so biases of 0 change nothing.
        assert_eq!(run(d, ADAMW, false), (stats, Vec::new(), loads.clone()));
        let mean = (2 * layout.targets().len()) as f32 / 5.0;
        let expected = |load: &u32| if *load as f32 > mean { -RATE } else { RATE };
        let expected: Vec<Vec<f32>> = loads.iter().map(|loads| loads.iter().map(expected).collect()).collect();
        assert_eq!(biases, expected, "{loads:?}");
        let clipped = AdamW { learning_rate: 0.0, weight_decay: 10.0, step: 7, clip: 1e-25, ..ADAMW };
        assert_eq!(run(with_bias(d), clipped, false).1, expected);
        assert_eq!(run(with_bias(d), ADAMW, true).1, vec![vec![0.0; 5]; 2]);
    }
}

/// Most tokens choose the same experts at first. Biases divide the tokens evenly among all experts, and the router alone does not.
#[test]
fn biases_even_out_the_loads() {
    let layout = BatchLayout::new(8, T);
    let largest = |d: Descriptor| {
        let (model, mut engine) = planned(d, PlanOptions::training(layout.b, layout.t));
        let mut step = TrainStep::new(&model, layout, 1);
        let mut largest = Vec::new();
        for number in 1..=60 {
            let mut load = |engine: &mut dyn Engine| {
                load(engine, &model, layout, 0);
                Ok(layout.targets().len())
            };
            let adamw = AdamW { learning_rate: 1e-4, step: number, ..ADAMW };
            let mut decide = |_: &mut dyn Engine, _| Ok(Some(Update::from(adamw).with_router_bias_rate(0.01)));
            step.run(&mut engine, &mut Ranks::Single, &mut load, &mut decide).unwrap();
            let loads = loads(&model, &mut engine);
            let mean = (2 * layout.targets().len()) as f64 / 5.0;
            largest.push(loads.iter().flatten().map(|&load| f64::from(load) / mean).fold(0.0, f64::max));
        }
        (largest[0], largest[50..].iter().sum::<f64>() / 10.0)
    };
    for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
        let d = small(scores, true, 0);
        let ([first, without], [first_with, with]) = (largest(d).into(), largest(with_bias(d)).into());
        println!("{scores:?}: largest load {first} at first, {without} without a bias, {with} with one");
        assert_eq!(first.to_bits(), first_with.to_bits());
        assert!(without > 1.4 && with < 1.15, "{scores:?}: {without} without a bias, {with} with one");
    }
}
