//! Adapters of a frozen model, against the gradients of a model whose weights contain their products.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::AdamW;
use engine::{BatchLayout, Engine};
use model::descriptor::{AdapterBase, AdapterTargets, Adapters, Overrides};
use model::{
    Decoder, Descriptor, Fp8Options, Fp8Recipe, Fp8Settings, Param, PlanOptions, Recompute, Shard, TrainStep,
    Unsharded, Update, Zero, init,
};
use rng::Mt19937;
use std::thread;
use std::time::Duration;

const LAYOUT: BatchLayout = BatchLayout::new(2, 12);
const LEVELS: [Recompute; 4] =
    [Recompute::Nothing, Recompute::Activation, Recompute::ActivationAndNorms, Recompute::Layers];

fn small(name: &str) -> Descriptor {
    let overrides = Overrides {
        layers: Some(2),
        heads: Some(4),
        kv_heads: (name != "d6").then_some(2),
        channels: Some(32),
        mlp_channels: (name != "d6").then_some(48),
        ..Overrides::default()
    };
    let known = Descriptor { vocab: 50, max_seq_len: LAYOUT.t, head_size: 8, ..name.parse().unwrap() };
    known.with(overrides).unwrap()
}

fn adapters(rank: usize, targets: &str) -> Adapters {
    Adapters { rank, alpha: 5.0, targets: targets.parse().unwrap(), base: AdapterBase::Bf16 }
}

fn planned(descriptor: Descriptor, recompute: Recompute) -> (Decoder, Cpu) {
    let mut engine = Cpu::new();
    let options = PlanOptions { recompute, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
    engine.allocate(&plan).unwrap();
    (model, engine)
}

fn load_batch(engine: &mut dyn Engine, model: &Decoder, seed: u32) -> usize {
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    let mut rng = Mt19937::new(seed);
    let tokens = LAYOUT.b * LAYOUT.t;
    words[..2 * tokens].iter_mut().for_each(|token| *token = rng.below(50) as i32);
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch.slice(0, LAYOUT.words()), LAYOUT, words).unwrap();
    tokens
}

/// Returns the losses and computes the gradients.
fn passes(engine: &mut dyn Engine, model: &Decoder) -> Vec<f32> {
    load_batch(engine, model, 3);
    engine.zero(model.losses).unwrap();
    engine.zero(model.training.unwrap().grads).unwrap();
    model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
    model.loss(engine, LAYOUT, Some(1.0)).unwrap();
    model.backward(engine, LAYOUT, 1.0, &mut Unsharded).unwrap();
    engine.read(model.losses).unwrap()
}

/// Writes the same weights to the model as to all others. Those of linear layers are larger than initial ones.
fn write_weights(engine: &mut dyn Engine, model: &Decoder) {
    let (store, mut rng) = (model.param_store(), Mt19937::new(5));
    init::generate(&model.descriptor, 7, |param, layer, values| {
        let mut values = values.to_vec();
        if param.kind().is_linear() {
            rng.normal(&mut values, 0.15);
        }
        store.write(engine, param, layer, &values)
    })
    .unwrap();
}

/// The adapter of one matrix: its first row in the weight (rows, C), A (R, C) and B (rows, R).
struct Adapter {
    weight: Param,
    layer: usize,
    number: usize,
    first_row: usize,
    rows: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// Returns random adapters of all targets.
fn random_adapters(d: &Descriptor) -> Vec<Adapter> {
    let Adapters { rank, targets, .. } = d.adapters.unwrap();
    let mut rng = Mt19937::new(11);
    let mut all = Vec::new();
    for layer in 0..d.layers {
        for weight in Param::linear(d) {
            let c = weight.shape(d).1;
            let mut first_row = 0;
            for (number, (target, rows)) in d.targets(weight).into_iter().zip(d.target_rows(weight)).enumerate() {
                if targets.contains(target) {
                    let [mut a, mut b] = [vec![0.0; rank * c], vec![0.0; rows * rank]];
                    rng.normal(&mut a, 0.1);
                    rng.normal(&mut b, 0.1);
                    all.push(Adapter { weight, layer, number, first_row, rows, a, b });
                }
                first_row += rows;
            }
        }
    }
    all
}

/// Calls `visit` with the places of an adapter in the tensors of its layer: those of the elements of A and B.
fn places(d: &Descriptor, adapter: &Adapter) -> [Vec<usize>; 2] {
    let Adapters { rank, .. } = d.adapters.unwrap();
    let (padded, c) = (d.adapters.unwrap().padded_rank(), adapter.weight.shape(d).1);
    let [_, b] = adapter.weight.adapters().unwrap();
    let width = b.shape(d).1;
    let a = (0..rank * c).map(|i| adapter.number * padded * c + i).collect();
    let of_b = |i: usize| (adapter.first_row + i / rank) * width + adapter.number * padded + i % rank;
    [a, (0..adapter.rows * rank).map(of_b).collect()]
}

fn write_adapters(engine: &mut dyn Engine, model: &Decoder, adapters: &[Adapter]) {
    let d = &model.descriptor;
    for (param, layer) in model.layout.file_order() {
        let mut values = vec![0.0; param.len(d)];
        for adapter in adapters.iter().filter(|adapter| adapter.layer == layer) {
            let params = adapter.weight.adapters().unwrap();
            for (i, part) in [&adapter.a, &adapter.b].into_iter().enumerate().filter(|(i, _)| params[*i] == param) {
                places(d, adapter)[i].iter().zip(part).for_each(|(&at, value)| values[at] = *value);
            }
        }
        model.param_store().write(engine, param, layer, &values).unwrap();
    }
}

#[track_caller]
fn assert_near(got: &[f32], want: &[f64], what: &str) {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - b));
    let size = norm(&mut want.iter().copied());
    assert!(size > 0.0 && distance <= 1e-5 * size, "{what}: distance {distance}, norm {size}");
}

fn check(name: &str, targets: &str, rank: usize) {
    let base = small(name);
    let d = Descriptor { adapters: Some(adapters(rank, targets)), ..base }.checked().unwrap();
    let scale = d.adapters.unwrap().scale();
    let all = random_adapters(&d);

    // The same function, with the products in the weights.
    let (merged, mut merged_engine) = planned(base, Recompute::Nothing);
    write_weights(&mut merged_engine, &merged);
    for Adapter { weight, layer, first_row, rows, a, b, .. } in &all {
        let (tensor, c) = (merged.layout.of(merged.params, *weight, *layer), weight.shape(&d).1);
        let mut values = merged_engine.read(tensor).unwrap();
        for row in 0..*rows {
            for column in 0..c {
                let product: f32 = (0..rank).map(|r| b[row * rank + r] * a[r * c + column]).sum();
                values[(first_row + row) * c + column] += scale * product;
            }
        }
        merged_engine.write(tensor, &values).unwrap();
    }
    let expected = passes(&mut merged_engine, &merged);
    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();

    let mut gradients = Vec::new();
    for recompute in LEVELS {
        let what = format!("{name}, {targets}, {recompute:?}");
        let (model, mut engine) = planned(d, recompute);
        write_weights(&mut engine, &model.frozen_model().unwrap());
        write_adapters(&mut engine, &model, &all);
        let losses = passes(&mut engine, &model);
        assert_near(&losses, &expected, &format!("losses, {what}"));
        let grads = engine.read(model.training.unwrap().grads).unwrap();
        let mut used = vec![false; grads.len()];
        for adapter in &all {
            let Adapter { weight, layer, first_row, rows, ref a, ref b, .. } = *adapter;
            let c = weight.shape(&d).1;
            let dweight = merged.layout.of(merged.training.unwrap().grads, weight, layer);
            let dweight = merged_engine.read(dweight.slice(first_row * c, rows * c)).unwrap();
            let sum = |terms: &mut dyn Iterator<Item = f32>| f64::from(scale) * terms.map(f64::from).sum::<f64>();
            // s Bᵀ dW and s dW Aᵀ
            let da = (0..rank * c)
                .map(|i| sum(&mut (0..rows).map(|row| b[row * rank + i / c] * dweight[row * c + i % c])))
                .collect::<Vec<_>>();
            let db = (0..rows * rank)
                .map(|i| sum(&mut (0..c).map(|j| dweight[i / rank * c + j] * a[i % rank * c + j])))
                .collect::<Vec<_>>();
            for ((param, places), want) in weight.adapters().unwrap().into_iter().zip(places(&d, adapter)).zip([da, db])
            {
                let start = model.layout.range(param, layer).start;
                let got: Vec<f32> = places.iter().map(|at| grads[start + at]).collect();
                for at in places {
                    used[start + at] = true;
                }
                assert_near(&got, &want, &format!("{} of layer {layer}, {what}", param.name()));
            }
        }
        let unused = grads.iter().zip(&used).filter(|(_, used)| !**used);
        assert!(
            unused.map(|(gradient, _)| *gradient).all(|gradient| gradient == 0.0),
            "{what}: outside of the adapters"
        );
        gradients.push(grads);
    }
    assert!(gradients.iter().all(|grads| *grads == gradients[0]), "{name}: recomputation changes bits");
}

#[test]
fn losses_and_gradients_are_those_of_merged_weights() {
    for name in ["d6", "llama3:1b", "qwen2.5:0.5b", "qwen3:0.6b", "modern:d2", "nanochat:d2"] {
        check(name, "all", 3);
    }
    check("llama3:1b", "q,v", 8);
    check("qwen3:0.6b", "k,gate", 9);
    check("d6", "fcproj", 1);
    check("modern:d2", "attproj,up", 32);
}

#[test]
fn only_adapters_change() {
    let d = Descriptor { adapters: Some(adapters(4, "q,v,mlp")), ..small("llama3:1b") };
    let (model, mut engine) = planned(d, Recompute::Nothing);
    let frozen = model.frozen_model().unwrap();
    write_weights(&mut engine, &frozen);
    model.initialize(&mut engine, 42).unwrap();
    let before = engine.read(frozen.params).unwrap();
    let first = engine.read(model.params).unwrap();
    let (mut losses, mut seed) = (Vec::new(), 0);
    let mut step = TrainStep::new(&model, LAYOUT, 2);
    for number in 1..=8 {
        let mut load = |engine: &mut dyn Engine| {
            seed = (seed + 1) % 2;
            Ok(load_batch(engine, &model, seed))
        };
        let adamw = AdamW {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: number,
            clip: 1.0,
            seed: 0,
        };
        let mut decide = |_: &mut dyn Engine, _| Ok(Some(Update::from(adamw)));
        let (stats, _) = step.run(&mut engine, &mut Ranks::Single, &mut load, &mut decide).unwrap();
        losses.push(stats.loss_and_norm(&engine.read(stats.tensor).unwrap()).unwrap()[0]);
    }
    assert!(losses[7] < losses[0] - 0.05, "{losses:?}");
    assert_eq!(engine.read(frozen.params).unwrap(), before);
    let last = engine.read(model.params).unwrap();
    assert!(first != last);
    // The rank is padded with zeros, and so are the blocks of keys.
    let range = model.layout.range(Param::QkvB, 1);
    let (rows, width) = Param::QkvB.shape(&d);
    let heads = |n: usize| n * d.head_size;
    for (at, value) in last[range].iter().enumerate() {
        let (row, column) = (at / width, at % width);
        let block = usize::from(row >= heads(d.heads)) + usize::from(row >= heads(d.heads + d.kv_heads));
        let is_used = block != 1 && (8 * block..8 * block + 4).contains(&column);
        assert_eq!(*value != 0.0, is_used, "row {row} of {rows}, column {column}");
    }
}

/// Returns the losses and norms of three steps of a rank.
fn train_rank(group: TcpGroup, stage: u8, grad_accum: usize, fp8: Option<AdapterBase>) -> Vec<f32> {
    let of_run = Adapters { base: fp8.unwrap_or_default(), ..adapters(4, "q,v,mlp") };
    let d = Descriptor { adapters: Some(of_run), ..small("llama3:1b") };
    let (rank, world) = (group.rank, group.world_size);
    let mut engine = Cpu::new();
    let layout = BatchLayout::new(8 / world / grad_accum, LAYOUT.t);
    let zero = Zero::new(stage, Shard { rank, ranks: world });
    let settings = Fp8Settings { recipe: Fp8Recipe::Current, ..Fp8Settings::default() };
    let fp8 = fp8.map(|_| Fp8Options::new(settings, &d, [layout.b, layout.t], &engine).unwrap());
    let options = PlanOptions { zero, fp8, ..PlanOptions::training(layout.b, layout.t) };
    let (model, plan) = Decoder::plan(d, options, &mut engine);
    engine.allocate(&plan).unwrap();
    let (whole, mut source) = planned(d.base(), Recompute::Nothing);
    write_weights(&mut source, &whole);
    let read = |param, layer| Ok(source.read(whole.layout.of(whole.params, param, layer)).unwrap());
    model.load_frozen(&mut engine, read).unwrap();
    model.initialize(&mut engine, 42).unwrap();
    let mut ranks = if world == 1 { Ranks::Single } else { Ranks::Connected(group) };
    ranks.init_communicator(&engine, model.params, if stage > 0 { 2 } else { 1 }).unwrap();
    let mut next = 0;
    let mut load = |engine: &mut dyn Engine| {
        let mut words = engine.host_buffer(layout.words())?;
        let tokens = layout.b * layout.t;
        let mut rng = Mt19937::new(9);
        let all: Vec<i32> = (0..2 * 8 * LAYOUT.t).map(|_| rng.below(50) as i32).collect();
        let first = (next + rank * layout.b) * layout.t;
        words[layout.inputs()].copy_from_slice(&all[first..first + tokens]);
        words[layout.targets()].copy_from_slice(&all[8 * LAYOUT.t + first..][..tokens]);
        next = (next + world * layout.b) % 8;
        layout.sort(&mut words);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        Ok(tokens)
    };
    let mut step = TrainStep::new(&model, layout, grad_accum);
    let mut stats = Vec::new();
    for number in 1..=3 {
        let (learning_rate, weight_decay, clip, seed) = (1e-2, 0.1, 1.0, 0);
        let adamw = AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step: number, clip, seed };
        let mut decide = |_: &mut dyn Engine, _| Ok(Some(Update::from(adamw)));
        let (found, _) = step.run(&mut engine, &mut ranks, &mut load, &mut decide).unwrap();
        stats.extend(found.loss_and_norm(&engine.read(found.tensor).unwrap()).unwrap());
        // Evaluation changes no statistics.
        model.forward(&mut engine, layout, &mut Unsharded).unwrap();
    }
    if world == 1 {
        engine.zero(model.losses).unwrap();
        model.loss(&mut engine, layout, None).unwrap();
        stats.push(engine.read(model.losses).unwrap().iter().sum());
    }
    stats
}

fn train_ranks(ranks: usize, stage: u8, grad_accum: usize, fp8: Option<AdapterBase>) -> Vec<f32> {
    let groups = TcpGroup::in_process(ranks, Duration::from_mins(1)).unwrap();
    let results: Vec<Vec<f32>> = thread::scope(|scope| {
        let rank = |group| scope.spawn(move || train_rank(group, stage, grad_accum, fp8));
        let threads: Vec<_> = groups.into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| *result == results[0]), "{ranks} ranks, stage {stage}");
    results[0].clone()
}

#[test]
fn ranks_and_micro_batches_train_the_same_adapters() {
    let expected: Vec<f64> = train_ranks(1, 0, 1, None)[..6].iter().copied().map(f64::from).collect();
    for (ranks, stage, grad_accum) in [(1, 0, 4), (2, 0, 1), (2, 1, 2), (2, 2, 2), (2, 3, 1)] {
        let got = train_ranks(ranks, stage, grad_accum, None);
        assert_near(&got[..6], &expected, &format!("{ranks} ranks, stage {stage}, {grad_accum} micro-batches"));
    }
}

/// FP8 quantizes the frozen layers only, so losses stay near. Without the weights in f32, training has the same bits, and only evaluation
/// differs.
#[test]
fn frozen_layers_compute_in_fp8() {
    let near = |got: &[f32], want: &[f32]| {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() < 0.05 * want, "{i}: {got}, expected {want}");
        }
    };
    let expected = train_ranks(1, 0, 1, None);
    let got = train_ranks(1, 0, 1, Some(AdapterBase::Bf16));
    assert_ne!(got, expected);
    near(&got, &expected);
    near(&train_ranks(2, 2, 1, Some(AdapterBase::Bf16)), &got);
    let in_fp8 = train_ranks(1, 0, 1, Some(AdapterBase::Fp8));
    let steps = got.len() - 1;
    assert_eq!(in_fp8[..steps], got[..steps]);
    assert_ne!(in_fp8[steps..], got[steps..]);
    near(&in_fp8, &got);
}

#[test]
fn initial_adapters_change_nothing_and_have_the_rank() {
    let d = Descriptor { adapters: Some(adapters(3, "all")), ..small("qwen3:0.6b") };
    let (with, mut engine) = planned(d, Recompute::Nothing);
    write_weights(&mut engine, &with.frozen_model().unwrap());
    with.initialize(&mut engine, 42).unwrap();
    let (without, mut other) = planned(d.base(), Recompute::Nothing);
    write_weights(&mut other, &without);
    assert_eq!(passes(&mut engine, &with), passes(&mut other, &without));
    let bound = 1.0 / 32f32.sqrt();
    let a = engine.read(with.layout.of(with.params, Param::QkvA, 1)).unwrap();
    for (i, row) in a.chunks(32).enumerate() {
        let largest = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        assert!(
            if i % 8 < 3 { largest > 0.8 * bound && largest < bound } else { largest == 0.0 },
            "row {i}: {largest}"
        );
    }
}

#[test]
fn impossible_ranks_are_refused() {
    let with = |rank, alpha, targets: &str| {
        let adapters =
            Adapters { rank, alpha, targets: targets.parse::<AdapterTargets>().unwrap(), base: AdapterBase::Bf16 };
        let error = Descriptor { adapters: Some(adapters), ..small("llama3:1b") }.checked().err();
        error.map_or_else(String::new, |error| error.to_string())
    };
    assert_eq!(with(0, 1.0, "all"), "LoRA rank: expected at least 1, found 0");
    assert_eq!(with(17, 1.0, "all"), "LoRA rank: expected at most 16, found 17");
    assert_eq!(with(17, 1.0, "q,up"), "");
    assert_eq!(with(4, f32::NAN, "q"), "LoRA alpha: expected a positive number, found NaN");
}

/// Returns losses and gradients on an engine.
fn on_engine(mut engine: Box<dyn Engine>, d: Descriptor) -> Vec<Vec<f32>> {
    let options = PlanOptions { recompute: Recompute::ActivationAndNorms, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    let (model, plan) = Decoder::plan(d, options, &mut *engine);
    engine.allocate(&plan).unwrap();
    write_weights(&mut *engine, &model.frozen_model().unwrap());
    write_adapters(&mut *engine, &model, &random_adapters(&d));
    let losses = passes(&mut *engine, &model);
    let grads = model.training.unwrap().grads;
    let gradient = |(param, layer)| {
        let range = model.layout.range(param, layer);
        engine.read(grads.slice(range.start, range.len())).unwrap()
    };
    [losses].into_iter().chain(model.layout.file_order().map(gradient)).collect()
}

#[test]
fn kernels_compute_the_gradients_of_the_cpu_engine() {
    for (name, targets) in [("d6", "all"), ("llama3:1b", "all"), ("qwen3:0.6b", "v,gate,attproj")] {
        let overrides = Overrides {
            layers: Some(2),
            heads: Some(2),
            kv_heads: (name != "d6").then_some(1),
            channels: Some(128),
            mlp_channels: (name != "d6").then_some(192),
            ..Overrides::default()
        };
        let known = Descriptor { vocab: 50, max_seq_len: LAYOUT.t, head_size: 64, ..name.parse().unwrap() };
        let adapters = Adapters { alpha: 7.0, ..adapters(5, targets) };
        let d = Descriptor { adapters: Some(adapters), ..known.with(overrides).unwrap() }.checked().unwrap();
        let expected = on_engine(Box::new(Cpu::new()), d);
        for (precision, hopper, tolerance) in
            [(Precision::Fp32, false, 1e-4), (Precision::Bf16, false, 5e-2), (Precision::Bf16, true, 5e-2)]
        {
            let got = on_engine(emulated(EmulatedGpu::new(hopper), precision, None, true), d);
            for (i, (got, want)) in got.iter().zip(&expected).enumerate() {
                let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
                let distance = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
                let size = norm(&mut want.iter().copied());
                assert!(
                    distance <= tolerance * size,
                    "{name}, {precision:?}, tensor {i}: distance {distance}, norm {size}"
                );
            }
        }
    }
}
