//! Mixtures of experts in training steps. `tests/transformers_models.rs` compares Qwen3-MoE and OLMoE with transformers.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::ops::{AdamW, MuonAdditions, RouterScores};
use engine::{BatchLayout, Engine};
use model::descriptor::{Experts, Overrides};
use model::{
    Decoder, Descriptor, LayerHooks, Muon, Optimizer, Param, Params, PlanOptions, Recompute, Shard, StepStats,
    StopRequest, TrainStep, Unsharded, Update, Zero, init,
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

/// Loads the sequences from `first` on; if there are none, sequences of one token.
fn load(engine: &mut dyn Engine, model: &Decoder, layout: BatchLayout, first: usize) {
    let mut words = engine.host_buffer(layout.words()).unwrap();
    let mut rng = Mt19937::new(9);
    let all: Vec<i32> = (0..2 * 8 * T).map(|_| rng.below(VOCAB as u32) as i32).collect();
    let tokens = layout.b * layout.t;
    if first < 8 {
        words[layout.inputs()].copy_from_slice(&all[first * T..][..tokens]);
        words[layout.targets()].copy_from_slice(&all[(8 + first) * T..][..tokens]);
    } else {
        words[..layout.targets().end].fill(7);
    }
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

/// A part of a tensor in a layer that a rank keeps: the index of its first value, and the values.
type Part = (Param, usize, usize, Vec<f32>);

/// Three steps of eight sequences.
#[derive(Clone, Copy)]
struct Steps {
    descriptor: Descriptor,
    ranks: usize,
    /// Number of ranks that shard together.
    shard_size: usize,
    stage: u8,
    expert_parallel: bool,
    optimizer: Optimizer,
    recompute: Recompute,
    /// Sequences of a micro-batch of a rank.
    b: usize,
    /// Makes all tokens equal, so that they choose the same experts.
    equal_tokens: bool,
    /// Added to the denominator of AdamW.
    eps: f32,
}

impl Steps {
    fn new(ranks: usize, stage: u8, optimizer: Optimizer) -> Self {
        let descriptor = with_bias(with_router_losses(small(RouterScores::Softmax, true, 20)));
        let shard_size = if stage > 0 { ranks } else { 1 };
        let (recompute, expert_parallel) = (Recompute::Nothing, false);
        let (b, equal_tokens, eps) = (2, false, 1e-8);
        Self { descriptor, ranks, shard_size, stage, expert_parallel, optimizer, recompute, b, equal_tokens, eps }
    }

    /// Returns the losses and the parameters after the steps, from each rank's parts.
    fn run(self) -> (Vec<f32>, Vec<f32>) {
        let groups = TcpGroup::in_process(self.ranks, Duration::from_mins(1)).unwrap();
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || self.run_rank(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let layout = Params::new(self.descriptor);
        let mut whole = vec![f32::NAN; layout.elements()];
        for (param, layer, first, values) in results.iter().flat_map(|(_, parts)| parts) {
            let start = layout.range(*param, *layer).start + first;
            for (to, value) in whole[start..].iter_mut().zip(values) {
                assert!(to.is_nan() || to.to_bits() == value.to_bits(), "{} differs between ranks", param.name());
                *to = *value;
            }
        }
        assert_eq!(whole.iter().filter(|value| !value.is_nan()).count(), self.descriptor.parameters());
        whole.iter_mut().filter(|value| value.is_nan()).for_each(|padding| *padding = 0.0);
        (results[0].0.clone(), whole)
    }

    fn run_rank(self, group: TcpGroup) -> (Vec<f32>, Vec<Part>) {
        let Self { ranks, shard_size, stage, expert_parallel, optimizer, recompute, b, .. } = self;
        let (rank, layout) = (group.rank, BatchLayout::new(b, T));
        let shard = Shard { rank: rank % shard_size, ranks: shard_size };
        let zero = Zero::new(stage, shard).share_experts(expert_parallel);
        zero.check(&self.descriptor).unwrap();
        let options = PlanOptions { zero, optimizer, recompute, ..PlanOptions::training(b, T) };
        let (model, mut engine) = planned(self.descriptor, options);
        let mut connected = if ranks == 1 { Ranks::Single } else { Ranks::Connected(group) };
        connected.init_communicator(&engine, model.params, shard_size).unwrap();
        let accum = 8 / (ranks * b);
        let mut step = TrainStep::new(&model, layout, accum);
        let (mut next, mut losses) = (0, Vec::new());
        for number in 1..=3 {
            let mut load = |engine: &mut dyn Engine| {
                let first = (next % accum * ranks + rank) * b;
                load(engine, &model, layout, if self.equal_tokens { 8 } else { first });
                next += 1;
                Ok(layout.targets().len())
            };
            let adamw = AdamW { eps: self.eps, step: number, ..ADAMW };
            let additions = MuonAdditions { variance: true, cautious_decay: true, ..MuonAdditions::default() };
            let muon = Muon { learning_rate: 1e-3, momentum: 0.9, weight_decay: 0.1, additions, ..Muon::default() };
            let muon = (optimizer == Optimizer::Muon).then_some(muon);
            let mut decide = |engine: &mut dyn Engine, stats: StepStats| {
                losses.extend(stats.loss_and_norm(&engine.read(stats.tensor)?)?);
                let update = Update { muon, ..adamw.into() };
                Ok(Some(update.with_router_bias_rate(RATE)))
            };
            step.run(&mut engine, &mut connected, &mut load, &mut decide).unwrap();
        }
        let mut parts = Vec::new();
        for (param, layer) in model.layout.file_order() {
            if let Some((elements, tensor)) = model.param_store().held(param, layer) {
                parts.push((param, layer, elements.start, engine.read(tensor).unwrap()));
            }
        }
        connected.close().unwrap();
        (losses, parts)
    }
}

/// Checks that losses, norms and parameters agree up to rounding.
fn assert_close((losses, params): &(Vec<f32>, Vec<f32>), expected: &(Vec<f32>, Vec<f32>), what: &str) {
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let scale = expected.1.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let errors = [distance(losses, &expected.0), distance(params, &expected.1)];
    assert!(errors[0] <= 1e-5 * expected.0[0] && errors[1] <= 1e-5 * scale, "{what}: {errors:?}, {scale}");
}

#[test]
fn two_ranks_train_like_one_in_every_zero_stage() {
    let params = Params::new(with_bias(small(RouterScores::Softmax, true, 20)));
    for optimizer in [Optimizer::AdamW, Optimizer::Muon] {
        let one = Steps::new(1, 0, optimizer).run();
        let biases = |all: &[f32]| [0, 1].map(|layer| all[params.range(Param::RouterBias, layer)].to_vec());
        // Each of the three steps adds the rate or subtracts it, unless a load is the mean.
        let of_one = biases(&one.1).concat();
        assert!(of_one.iter().all(|x| (x / RATE).fract() == 0.0 && x.abs() <= 3.0 * RATE), "{of_one:?}");
        assert!(of_one.iter().any(|x| *x != 0.0), "{of_one:?}");
        let stages: Vec<_> = (0..=3).map(|stage| Steps::new(2, stage, optimizer).run()).collect();
        for (stage, two) in stages.iter().enumerate() {
            assert_close(two, &one, &format!("{optimizer:?}, stage {stage}"));
            assert_eq!(biases(&two.1), biases(&one.1), "{optimizer:?}, stage {stage}");
        }
        assert!(stages[2] == stages[3], "{optimizer:?}");
    }
}

/// Returns a model with another number of experts.
fn with_experts(d: Descriptor, count: u32, active: u32) -> Descriptor {
    Descriptor { experts: d.experts.map(|experts| Experts { count, active, ..experts }), ..d }
}

/// The load-balancing loss counts the tokens of all ranks that share the experts, so one rank needs their micro-batch as its own.
#[test]
fn ranks_that_share_experts_train_like_one() {
    for (shared_channels, optimizer) in [(0, Optimizer::AdamW), (20, Optimizer::AdamW), (20, Optimizer::Muon)] {
        let descriptor = with_experts(small(RouterScores::Softmax, true, shared_channels), 8, 3);
        let descriptor = with_router_losses(descriptor);
        for (ranks, shard_size, b) in [(2, 2, 2), (4, 4, 1), (4, 2, 1)] {
            let one = Steps { descriptor, b: b * shard_size, ..Steps::new(1, 0, optimizer) }.run();
            for stage in 1..=3 {
                let shared =
                    Steps { descriptor, shard_size, b, expert_parallel: true, ..Steps::new(ranks, stage, optimizer) };
                let what =
                    format!("{ranks} ranks in groups of {shard_size}, stage {stage}, {shared_channels}, {optimizer:?}");
                let first = shared.run();
                assert_close(&first, &one, &what);
                assert!(first == shared.run(), "{what}: two runs differ");
            }
        }
    }
}

#[test]
fn recomputation_does_not_change_what_shared_experts_compute() {
    let descriptor = with_router_losses(with_experts(small(RouterScores::Sigmoid, false, 20), 4, 2));
    for stage in 1..=3 {
        let base = Steps { descriptor, expert_parallel: true, ..Steps::new(2, stage, Optimizer::AdamW) };
        let runs = Recompute::ALL.map(|recompute| Steps { recompute, ..base }.run());
        assert!(runs.iter().all(|run| *run == runs[0]), "stage {stage}");
    }
}

/// One expert of one rank gets all tokens, and the other ranks none.
#[test]
fn all_tokens_may_choose_the_experts_of_one_rank() {
    let descriptor = with_experts(small(RouterScores::Sigmoid, false, 0), 4, 1);
    // Some gradients are 0 up to rounding, which a small eps would amplify.
    let one = Steps { descriptor, b: 8, equal_tokens: true, eps: 1e-2, ..Steps::new(1, 0, Optimizer::AdamW) };
    let (losses, params) = one.run();
    // Experts without a token keep their weights, apart from weight decay. The first values of one expert differ from that.
    let layout = Params::new(descriptor);
    let fcw = layout.range(Param::Fcw, 0);
    let (initial, mut engine) = planned(descriptor, PlanOptions::inference(1, T));
    let initial = engine.read(initial.layout.of(initial.params, Param::Fcw, 0)).unwrap();
    let decayed = initial.iter().map(|x| x * (1.0f32 - 1e-4).powi(3));
    let moved: Vec<bool> = params[fcw.clone()].iter().zip(decayed).map(|(x, kept)| (x - kept).abs() > 1e-6).collect();
    let of_experts: Vec<_> = moved.chunks(fcw.len() / 4).map(|of_expert| of_expert.contains(&true)).collect();
    assert_eq!(of_experts.iter().filter(|moves| **moves).count(), 1, "{of_experts:?}");
    for ranks in [2, 4] {
        let shared = Steps { b: 8 / ranks, ranks, shard_size: ranks, stage: 1, expert_parallel: true, ..one };
        assert_close(&shared.run(), &(losses.clone(), params.clone()), &format!("{ranks} ranks"));
    }
}

/// Returns the losses of the tokens of a batch.
fn losses(engine: &mut Cpu, model: &Decoder, layout: BatchLayout, hooks: &mut dyn LayerHooks) -> Vec<f32> {
    engine.zero(model.losses).unwrap();
    model.forward(engine, layout, hooks).unwrap();
    model.loss(engine, layout, None).unwrap();
    engine.read(model.losses.slice(0, layout.b * layout.t)).unwrap()
}

/// In evaluations, ranks have batches of different sizes.
#[test]
fn ranks_that_share_experts_evaluate_batches_of_any_size() {
    let descriptor = with_experts(small(RouterScores::Softmax, true, 20), 8, 3);
    let layouts = [BatchLayout::new(2, T), BatchLayout::new(1, 5), BatchLayout::new(1, T), BatchLayout::new(3, 7)];
    let rank = |group: TcpGroup| {
        let rank = group.rank;
        let zero = Zero::new(1, Shard { rank, ranks: 4 }).share_experts(true);
        let (model, mut engine) = planned(descriptor, PlanOptions { zero, ..PlanOptions::training(2, T) });
        let mut ranks = Ranks::Connected(group);
        ranks.init_communicator(&engine, model.params, 4).unwrap();
        let mut step = TrainStep::new(&model, layouts[0], 1);
        let mut all = Vec::new();
        for turn in 0..4 {
            let layout = layouts[(rank + turn) % 4];
            load(&mut engine, &model, layout, 0);
            let mut hooks = step.hooks(&mut ranks, StopRequest::OfAnyRank(&|| false));
            all.push((layout, losses(&mut engine, &model, layout, &mut hooks)));
        }
        ranks.close().unwrap();
        all
    };
    let (alone, mut engine) = planned(descriptor, PlanOptions::inference(2, T));
    let groups = TcpGroup::in_process(4, Duration::from_mins(1)).unwrap();
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    for (layout, found) in all {
        load(&mut engine, &alone, layout, 0);
        let expected = losses(&mut engine, &alone, layout, &mut Unsharded);
        let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(found.len() == expected.len() && error < 1e-4, "{layout:?}: {error}");
    }
}

#[test]
fn experts_that_ranks_cannot_share_are_refused() {
    let shared = |ranks| Zero::new(1, Shard { rank: 0, ranks }).share_experts(true);
    let error = |zero: Zero, d: &Descriptor| zero.check(d).unwrap_err().to_string();
    let experts = with_experts(small(RouterScores::Softmax, true, 0), 6, 2);
    assert!(shared(3).check(&experts).is_ok() && shared(1).check(&experts).is_ok());
    assert!(
        error(shared(4), &experts)
            .contains("expected a number of experts that the 4 ranks of a shard group divide, found 6")
    );
    let dense = Descriptor::gpt2(2, 2, 32, T, VOCAB).unwrap();
    assert!(error(shared(2), &dense).contains("expected a model with experts, found one with a dense MLP"));
    assert!(Zero::new(1, Shard { rank: 0, ranks: 4 }).check(&experts).is_ok());
    let narrow = Overrides { mlp_channels: Some(1), ..Overrides::default() };
    let narrow = experts.with(narrow).unwrap();
    assert!(
        error(shared(6), &narrow).contains("expected a multiple of 64 elements of fcprojw"),
        "{}",
        error(shared(6), &narrow)
    );
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
    let read = model.read_loads(engine).unwrap().unwrap();
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
