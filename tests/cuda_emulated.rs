//! The CUDA engine on the emulator against the CPU engine. Every kernel runs with the launch configuration of a GPU.

use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, MatmulBackend, Precision, emulated};
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AdamW, AdamWUpdate, AttentionBackward, AttentionForward,
    AttentionShape, EncoderForward, Epilogue, Master, MatmulBackward, MatmulForward, MatmulShape, RmsNormBackward,
    RmsNormForward, Sum, UpdateRange,
};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, GeluFusion, GraphKey, Workload};
use gpu::matmul::launch::MAX_CANDIDATE_CONFIGS;
use model::{
    Decoder, Descriptor, LayerHooks, MasterWeights, Moments, PlanOptions, Recompute, Shard, Store, TrainStep, Unit,
    Unsharded, Zero,
};
use std::ops::Range;
use verify::selftest::{Case, edge_cases, fp8};

fn assert_operations_match(precision: Precision, hopper: bool) {
    assert_cases_match("", emulated(EmulatedGpu::new(hopper), precision, None, true));
}

/// Checks the edge cases of all operations whose names contain `operation`.
fn assert_cases_match(operation: &str, engine: Box<dyn Engine>) {
    let fp8 = if engine.fp8_dtype().is_some() { fp8::edge_cases() } else { Vec::new() };
    let cases = edge_cases().into_iter().chain(fp8);
    assert_match(&cases.filter(|case| case.operation.contains(operation)).collect::<Vec<_>>(), engine);
}

fn assert_match(cases: &[Case], mut engine: Box<dyn Engine>) {
    let (mut failures, mut reference) = (Vec::new(), Cpu::new());
    for case in cases {
        let name = format!("{} {}", case.operation, case.shape);
        match case.check(&mut *engine, &mut reference) {
            Ok(outcome) => failures.extend(
                outcome.errors.iter().filter(|(_, error)| !error.ok()).map(|error| format!("{name}: {error:?}")),
            ),
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
    }
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn bf16_operations_match_cpu_engine() {
    assert_operations_match(Precision::Bf16, false);
}

#[test]
fn sm_90a_operations_match_cpu_engine() {
    assert_operations_match(Precision::Bf16, true);
}

/// Where kernels for sm_90a do not run, the library computes all GEMMs.
#[test]
fn fp8_operations_match_cpu_engine_without_kernels_for_sm_90a() {
    let gpu = EmulatedGpu { fp8: true, ..EmulatedGpu::new(false) };
    assert_match(&fp8::edge_cases(), emulated(gpu, Precision::Bf16, None, true));
}

#[test]
fn matmuls_match_cpu_engine_in_every_tile_configuration() {
    for config in 0..MAX_CANDIDATE_CONFIGS {
        let matmul = MatmulBackend::Rust;
        let gpu = EmulatedGpu { hopper: true, matmul, kernel_config: Some(config), ..EmulatedGpu::default() };
        assert_cases_match("matmul", emulated(gpu, Precision::Bf16, None, true));
    }
}

/// Symmetric outputs have two tile configurations, others six.
#[test]
fn orthogonalization_matches_cpu_engine_in_every_tile_configuration() {
    for config in 0..6 {
        let matmul = MatmulBackend::Rust;
        let gpu = EmulatedGpu { hopper: true, matmul, kernel_config: Some(config), ..EmulatedGpu::default() };
        assert_cases_match("orthogonalize", emulated(gpu, Precision::Bf16, None, true));
    }
}

#[test]
fn f32_operations_match_cpu_engine() {
    assert_operations_match(Precision::Fp32, false);
}

/// The blocks run in parallel and add to the same sums of dQ. They take the work tiles in another order in each run, and
/// wait for each other.
#[test]
fn attention_gradients_are_the_same_in_every_order_of_blocks() {
    let shape = AttentionShape { b: 1, t: 600, heads: 2, kv_heads: 1, head_size: 128 };
    let (rows, qkv_len) = (shape.t * shape.heads, shape.t * shape.packed_heads() * shape.head_size);
    let values = |len: usize| (0..len).map(|i| (i * i * 31 % 997) as f32 / 500.0 - 1.0).collect::<Vec<_>>();
    let gradients = |sm_count| {
        let gpu = EmulatedGpu { sm_count, hopper: true, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, Precision::Bf16, None, false);
        let mut plan = Plan::new();
        let mut add = |name: &str, len: usize, dtype| plan.add(Group::Activations, name, &[len], dtype);
        let n = rows * shape.head_size;
        let (qkv, dqkv) = (add("qkv", qkv_len, DType::Bf16), add("dqkv", qkv_len, DType::Bf16));
        let (out, dout) = (add("out", n, DType::Bf16), add("dout", n, DType::Bf16));
        let lse = add("lse", rows, DType::F32);
        let workload = Workload {
            attention: shape,
            channels: shape.heads * shape.head_size,
            fc_channels: 128,
            mlp_channels: 128,
            padded_vocab: 128,
            parameters: 0,
            norm_tensors: 1,
            update_ranges: 0,
            training: true,
        };
        engine.plan(&mut plan, &workload);
        engine.allocate(&plan).unwrap();
        engine.write(qkv, &values(qkv_len)).unwrap();
        engine.write(dout, &values(n)).unwrap();
        engine.run(AttentionForward { out, lse, qkv, shape }).unwrap();
        [0; 2].map(|_| {
            engine.run(AttentionBackward { dqkv, dout, qkv, out, lse, shape }).unwrap();
            engine.read(dqkv).unwrap()
        })
    };
    let [want, again] = gradients(1);
    assert!(want == again);
    for sm_count in [2, 3, 7] {
        assert!(gradients(sm_count).iter().all(|found| *found == want), "{sm_count} blocks");
    }
}

/// Loads a fixed batch of tokens below 50.
fn load_batch(model: &Decoder, engine: &mut dyn Engine, layout: BatchLayout, seed: u32) -> anyhow::Result<()> {
    let mut words = engine.host_buffer(layout.words())?;
    for (i, word) in words[..layout.targets().end].iter_mut().enumerate() {
        *word = (i * i % 50) as i32;
    }
    layout.sort(&mut words);
    layout.set_seed(&mut words, seed);
    engine.load_batch(model.batch, layout, words).map(drop)
}

/// Trains a small model for two steps and returns the losses and gradient norms.
fn train(engine: &mut dyn Engine, recompute: Recompute) -> Vec<f32> {
    let descriptor = Descriptor::gpt2(2, 2, 128, 24, 50).unwrap();
    let layout = BatchLayout { b: 3, t: 17 };
    let options = PlanOptions { recompute, ..PlanOptions::training(layout.b, 24) };
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    let (mut train_step, ranks) = (TrainStep::new(&model, layout, 1), &mut Ranks::default());
    let mut stats = Vec::new();
    for step in 1..3 {
        let (learning_rate, weight_decay, clip) = (1e-3, 0.1, 1.0);
        let adamw = AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step, clip, seed: step };
        let mut load = |engine: &mut dyn Engine| load_batch(&model, engine, layout, step);
        train_step.run(engine, ranks, &mut load, &mut |_, _| Ok(Some(adamw.into()))).unwrap();
        stats.extend(engine.read(model.training.unwrap().stats).unwrap());
    }
    stats
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
    let layout = BatchLayout { b: 2, t: 9 };
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
    for (precision, channels, in_layernorm, tolerance) in [
        (Precision::Fp32, 128, false, 1e-4),
        (Precision::Fp32, 576, true, 1e-4),
        (Precision::Bf16, 128, false, 3e-2),
        (Precision::Bf16, 1088, true, 3e-2),
    ] {
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

const UPDATE: AdamW =
    AdamW { learning_rate: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3, clip: 1.0, seed: 77 };

/// Returns a rank's shard of a small model. Parameters, gradients and moments are pseudorandom and equal on all ranks.
fn before_update(engine: &mut dyn Engine, zero: Zero) -> Decoder {
    let descriptor = Descriptor::gpt2(2, 2, 128, 24, 50).unwrap();
    let options = PlanOptions { zero, ..PlanOptions::training(1, 24) };
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    fill(&model, engine);
    model
}

/// Fills the parameters, gradients and optimizer state with pseudorandom values.
fn fill(model: &Decoder, engine: &mut dyn Engine) {
    let training = model.training.unwrap();
    engine.write(training.stats, &[7.0, 2.5]).unwrap();
    let grads = model.grad_store(&training);
    for (i, (param, layer)) in model.layout.file_order().enumerate() {
        for (k, store) in updated(model).into_iter().chain([grads]).enumerate() {
            let value = |j| gpu::noise::squirrel5(j, (5 * i + k) as u32) as f32 / u32::MAX as f32;
            let values: Vec<_> = (0..model.layout.range(param, layer).len() as u32).map(value).collect();
            store.write(engine, param, layer, &values).unwrap();
        }
    }
}

/// Returns the tensors that an update changes.
fn updated(model: &Decoder) -> Vec<Store<'_>> {
    let training = model.training.unwrap();
    let state = training.state().into_iter().map(|(_, kept)| model.state_store(kept));
    [model.param_store()].into_iter().chain(state).collect()
}

/// Returns, for each parameter tensor, the range of elements that this rank updates and their bits in all updated
/// tensors.
fn after_update(model: &Decoder, engine: &mut dyn Engine) -> Vec<(Range<usize>, Vec<Vec<u32>>)> {
    let mut all = Vec::new();
    for (param, layer) in model.layout.file_order() {
        let held: Vec<_> = updated(model).into_iter().filter_map(|store| store.held(param, layer)).collect();
        // A rank with unsharded parameters updates only part of them.
        let least = held.iter().map(|(elements, _)| elements.clone()).min_by_key(ExactSizeIterator::len);
        let Some(least) = least.filter(|_| held.len() == updated(model).len()) else {
            all.push((0..0, Vec::new()));
            continue;
        };
        let bits = held.into_iter().map(|(elements, tensor)| {
            let values = engine.read(tensor.slice(least.start - elements.start, least.len())).unwrap();
            values.into_iter().map(f32::to_bits).collect()
        });
        let bits = bits.collect();
        all.push((least, bits));
    }
    all
}

/// Stochastic rounding depends on the seed of a range and the index in it, so checkpoints of earlier versions stay
/// reproducible.
#[test]
fn fused_update_matches_updating_each_range() {
    for precision in [Precision::Bf16, Precision::Fp32] {
        let engine = &mut *emulated(EmulatedGpu::new(false), precision, None, true);
        let model = before_update(engine, Zero::NONE);
        model.apply_update(engine, &UPDATE.into(), &mut Unsharded).unwrap();
        let fused = after_update(&model, engine);
        fill(&model, engine);
        let training = model.training.unwrap();
        for range in model.layout.decay_ranges() {
            let slice = |tensor: Tensor| tensor.slice(range.elements.start, range.elements.len());
            let weight_decay = if range.decayed { UPDATE.weight_decay } else { 0.0 };
            let update = AdamWUpdate {
                params: slice(model.params),
                grads: slice(training.grads),
                m: slice(training.m),
                v: slice(training.v),
                master: training.master.map(slice),
                ranges: &[UpdateRange { elements: 0..range.elements.len(), decayed: true, seed: 0 }],
                stats: training.stats,
                settings: AdamW { weight_decay, seed: UPDATE.seed + range.unsharded_start as u32, ..UPDATE },
            };
            engine.run(update).unwrap();
        }
        assert!(after_update(&model, engine) == fused, "{precision:?}");
    }
}

/// The parameters and moments after one update with compact state are those of the CPU engine, up to one rounding of each.
#[test]
fn compact_updates_match_the_cpu_engine() {
    for master_weights in [MasterWeights::None, MasterWeights::F32, MasterWeights::Remainder] {
        for moments in [Moments::F32, Moments::Bf16] {
            let options = PlanOptions { master_weights, moments, ..PlanOptions::training(1, 24) };
            let got = after_one_update(&mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true), options);
            let want = after_one_update(&mut Cpu::new(), options);
            // Relative to a value, a step of bf16 is at most 2^-7. Rounding to nearest errs by half of it.
            let stochastic = 1.01 / 128.0;
            let weights = if master_weights == MasterWeights::Remainder { stochastic / 2.0 } else { stochastic };
            let rounding = if moments == Moments::Bf16 { stochastic } else { 1e-6 };
            for (k, tolerance) in [weights, rounding, rounding].into_iter().enumerate() {
                for (i, (got, want)) in got[k].iter().zip(&want[k]).enumerate() {
                    let error = (got - want).abs() / want.abs();
                    assert!(error <= tolerance, "{master_weights}, {moments:?}: tensor {k}[{i}]: {got}, not {want}");
                }
            }
        }
    }
}

/// Returns parameters, m and v after an update of pseudorandom values that bf16 represents.
fn after_one_update(engine: &mut dyn Engine, options: PlanOptions) -> [Vec<f32>; 3] {
    let descriptor = Descriptor::gpt2(1, 1, 64, 24, 50).unwrap();
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    let training = model.training.unwrap();
    engine.write(training.stats, &[7.0, 2.5]).unwrap();
    for (k, tensor) in [model.params, training.grads, training.m, training.v].into_iter().enumerate() {
        let value = |i| gpu::noise::squirrel5(i, k as u32) as f32 / u32::MAX as f32 + 0.5;
        let values = (0..tensor.len as u32).map(|i| half::bf16::from_f32(value(i)).to_f32());
        engine.write(tensor, &values.collect::<Vec<_>>()).unwrap();
    }
    if let Master::F32(masters) = training.master {
        engine.cast(masters, model.params).unwrap();
    }
    model.apply_update(engine, &UPDATE.into(), &mut Unsharded).unwrap();
    [model.params, training.m, training.v].map(|tensor| engine.read(tensor).unwrap())
}

#[test]
fn compact_updates_of_f32_parameters_are_refused() {
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Fp32, None, true);
    let model = before_update(engine, Zero::NONE);
    let training = model.training.unwrap();
    let mut run = |m: Tensor, v: Tensor, master| {
        let ranges = &[UpdateRange { elements: 0..8, decayed: true, seed: 0 }];
        let [params, grads] = [model.params, training.grads];
        let update = AdamWUpdate { params, grads, m, v, master, ranges, stats: training.stats, settings: UPDATE };
        engine.run(update).unwrap_err().to_string()
    };
    let bf16 = |tensor: Tensor| Tensor { dtype: DType::Bf16, ..tensor };
    let error = run(bf16(training.m), training.v, Master::None);
    assert_eq!(error, "adamw: expected m and v of one type, found bf16 and f32");
    let error = run(bf16(training.m), bf16(training.v), Master::None);
    assert!(error.contains("found f32 parameters, bf16 moments"), "{error}");
    let error = run(training.m, training.v, Master::Remainder(Tensor { dtype: DType::U16, ..training.v }));
    assert!(error.contains("found f32 parameters, f32 moments, Remainder("), "{error}");
}

#[test]
fn updates_cannot_be_captured_in_a_cuda_graph() {
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let (model, key) = (before_update(engine, Zero::NONE), GraphKey::new());
    let mut update = || {
        engine
            .capture_or_replay(&key, &mut |engine| model.apply_update(engine, &UPDATE.into(), &mut Unsharded))
            .unwrap()
    };
    assert_eq!(update(), None);
    assert!(update().is_some_and(|reason| reason.contains("a table of update ranges cannot be captured")));
}

/// Hooks that record which units were updated.
#[derive(Default)]
struct UpdatedUnits(Vec<Unit>);

impl LayerHooks for UpdatedUnits {
    fn gather_parameters(&mut self, _: &mut dyn Engine, _: usize, _: Option<usize>) -> anyhow::Result<()> {
        Ok(())
    }

    fn begin_gradients(&mut self, _: &mut dyn Engine, _: usize) -> anyhow::Result<()> {
        Ok(())
    }

    fn gradients_ready(&mut self, _: &mut dyn Engine, _: Unit) -> anyhow::Result<()> {
        Ok(())
    }

    fn parameters_updated(&mut self, _: &mut dyn Engine, unit: Unit) -> anyhow::Result<()> {
        self.0.push(unit);
        Ok(())
    }
}

#[test]
fn sharded_updates_match_unsharded_update() {
    // The models are allocated on the engine one after the other.
    let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let model = before_update(engine, Zero::NONE);
    let mut hooks = UpdatedUnits::default();
    model.apply_update(engine, &UPDATE.into(), &mut hooks).unwrap();
    assert_eq!(hooks.0, model.layout.units().collect::<Vec<_>>());
    let whole = after_update(&model, engine);
    for (stage, ranks) in [(1, 2), (2, 3), (3, 5)] {
        let mut seen = 0;
        for rank in 0..ranks {
            let model = before_update(engine, Zero::new(stage, Shard { rank, ranks }));
            // The second update reuses the range tables of the first.
            model.apply_update(engine, &UPDATE.into(), &mut Unsharded).unwrap();
            fill(&model, engine);
            let mut hooks = UpdatedUnits::default();
            model.apply_update(engine, &UPDATE.into(), &mut hooks).unwrap();
            assert_eq!(hooks.0, model.layout.units().collect::<Vec<_>>());
            for ((elements, part), (_, whole)) in after_update(&model, engine).into_iter().zip(&whole) {
                seen += elements.len();
                for (part, whole) in part.iter().zip(whole) {
                    assert!(*part == whole[elements.clone()], "stage {stage}, rank {rank} of {ranks}: {elements:?}");
                }
            }
        }
        assert_eq!(seen, model.descriptor.parameters());
    }
}

/// Returns a checked engine and tensors with these names, lengths and types. The first 8 elements of each tensor are
/// initialized.
fn checked(tensors: &[(&str, usize, DType)]) -> (Box<dyn Engine>, Vec<Tensor>) {
    let mut engine = emulated(EmulatedGpu::new(false), Precision::Fp32, None, true);
    let mut plan = Plan::new();
    let mut add = |&(name, len, dtype)| plan.add(Group::Activations, name, &[len], dtype);
    let tensors: Vec<_> = tensors.iter().map(&mut add).collect();
    engine.allocate(&plan).unwrap();
    for tensor in &tensors {
        match tensor.dtype {
            DType::I32 => engine.write_i32(tensor.slice(0, 8), &[37; 8]).unwrap(),
            _ => engine.write(tensor.slice(0, 8), &[1.0; 8]).unwrap(),
        }
    }
    (engine, tensors)
}

#[test]
fn memory_errors_name_the_tensor() {
    let f32 = DType::F32;
    let (mut engine, x) = checked(&[("out", 16, f32), ("a", 16, f32), ("b", 8, f32)]);
    let text = engine.run(Sum { out: x[2].slice(0, 1), values: x[1] }).unwrap_err().to_string();
    assert!(text.contains("uninitialized read: read of 4 bytes at a + 32"), "{text}");
    let text = engine.read(x[0]).unwrap_err().to_string();
    assert_eq!(text, "out + 32 was never written");

    // A token outside the vocabulary reads beyond wte, even though another tensor is allocated there.
    let layout = BatchLayout { b: 1, t: 8 };
    let (mut engine, x) = checked(&[("batch", layout.words(), DType::I32), ("wte", 8, f32), ("wpe", 64, f32)]);
    engine.write(x[2], &[0.0; 64]).unwrap();
    let text = engine
        .run(EncoderForward { out: x[2], batch: x[0], layout, wte: x[1], wpe: Some(x[2]), c: 8 })
        .unwrap_err()
        .to_string();
    assert!(text.contains("out-of-bounds access") && text.contains("wte + 1184, which has 32 bytes"), "{text}");

    let (mut engine, x) = checked(&[("out", 16, f32), ("inp", 16, f32), ("weight", 16, f32)]);
    let shape = MatmulShape { rows: 4, c: 4, oc: 4 };
    let text = format!(
        "{:#}",
        engine
            .run(MatmulForward {
                out: x[0],
                inp: x[1],
                weight: x[2],
                bias: None,
                epilogue: Epilogue::None,
                shape,
                fp8: None
            })
            .unwrap_err()
    );
    assert!(text.starts_with("GEMM 4x4x4 NT f32") && text.ends_with("a: inp + 32 was never written"), "{text}");
}

/// The backend that computes a matmul reports that an operand was never written, which identifies it.
#[test]
fn matmuls_use_the_selected_backend() {
    let backend = |matmul, hopper, shape: MatmulShape| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, Precision::Bf16, None, true);
        let mut plan = Plan::new();
        let mut add = |name: &str, len| plan.add(Group::Activations, name, &[len], DType::Bf16);
        let MatmulShape { rows, c, oc } = shape;
        let (out, inp, weight) = (add("out", rows * oc), add("inp", rows * c), add("weight", oc * c));
        engine.allocate(&plan).unwrap();
        let text = format!(
            "{:#}",
            engine
                .run(MatmulForward { out, inp, weight, bias: None, epilogue: Epilogue::None, shape, fp8: None })
                .unwrap_err()
        );
        let found = ["kernel matmul_wgmma", "GEMM", "no kernel computes"].map(|part| text.contains(part));
        found.iter().position(|found| *found).unwrap_or_else(|| panic!("{text}"))
    };
    let (rust_kernel, cublaslt, none) = (0, 1, 2);
    let shape = MatmulShape { rows: 5, c: 16, oc: 24 };
    for matmul in [MatmulBackend::Rust, MatmulBackend::Auto] {
        assert_eq!(backend(matmul, true, shape), rust_kernel);
    }
    assert_eq!(backend(MatmulBackend::Cublaslt, true, shape), cublaslt);
    assert_eq!(backend(MatmulBackend::Auto, false, shape), cublaslt);
    // TMA requires row sizes that are multiples of 16 bytes.
    for shape in [MatmulShape { c: 12, ..shape }, MatmulShape { oc: 12, ..shape }] {
        assert_eq!(backend(MatmulBackend::Auto, true, shape), cublaslt);
        assert_eq!(backend(MatmulBackend::Rust, true, shape), none);
    }
}

/// The kernel that recomputes `inp` is the first to report that its operands were never written, which identifies it.
#[test]
fn gelu_is_recomputed_by_the_kernel_that_computed_it() {
    let first_error = |matmul, hopper, precision, gelu_fusion| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, precision, Some(gelu_fusion), true);
        let shape = MatmulShape { rows: 5, c: 32, oc: 8 };
        let MatmulShape { rows, c, oc } = shape;
        let (mut plan, float) = (Plan::new(), engine.dtype());
        let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
        let (dinp, inp, pre_gelu) = (add("dinp", rows * c), add("inp", rows * c), add("pre_gelu", rows * c));
        let (weight, dweight, dout) = (add("weight", oc * c), add("dweight", oc * c), add("dout", rows * oc));
        let (inp_before, weight_before) = (add("inp before", rows * oc), add("weight before", oc * c));
        let bias = add("bias before", c);
        engine.allocate(&plan).unwrap();
        engine.write(weight, &vec![1.0; oc * c]).unwrap();
        engine.write(dout, &vec![1.0; rows * oc]).unwrap();
        let forward = ActivationForward {
            inp: inp_before,
            weight: weight_before,
            bias: Some(bias),
            shape: MatmulShape { rows, c: oc, oc: c },
        };
        let activation =
            Some(ActivationInput { activation: Activation::Gelu, preactivation: pre_gelu, recompute: Some(forward) });
        format!(
            "{:#}",
            engine
                .run(MatmulBackward { dinp, dweight, dbias: None, dout, inp, weight, activation, shape, fp8: None })
                .unwrap_err()
        )
    };
    let (auto, rust, cublaslt) = (MatmulBackend::Auto, MatmulBackend::Rust, MatmulBackend::Cublaslt);
    for (matmul, hopper, precision, fusion, expected) in [
        (auto, true, Precision::Bf16, GeluFusion::Both, "kernel matmul_wgmma_ab_gelu_backward_and_gelu_"),
        (rust, true, Precision::Bf16, GeluFusion::Both, "kernel matmul_wgmma_ab_gelu_backward_and_gelu_"),
        (rust, true, Precision::Bf16, GeluFusion::Forward, "kernel gelu_forward_bf16"),
        (rust, true, Precision::Bf16, GeluFusion::None, "kernel gelu_forward_bf16"),
        (cublaslt, true, Precision::Bf16, GeluFusion::Both, "GEMM 5x32x8 NT bf16 bias+gelu"),
        (cublaslt, true, Precision::Bf16, GeluFusion::None, "kernel gelu_forward_bf16"),
        (auto, false, Precision::Bf16, GeluFusion::Both, "GEMM 5x32x8 NT bf16 bias+gelu"),
        (auto, false, Precision::Fp32, GeluFusion::None, "kernel gelu_forward_f32"),
    ] {
        let found = first_error(matmul, hopper, precision, fusion);
        assert!(found.starts_with(expected), "{matmul:?} {hopper} {fusion:?}: {found}, expected {expected}");
    }
}

/// The first kernel of each pass reports that its operands were never written, which identifies it.
#[test]
fn activations_are_fused_where_a_kernel_computes_the_gemm() {
    let first_errors = |matmul, hopper, precision, activation: Activation| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, precision, None, true);
        let shape = MatmulShape { rows: 5, c: 32, oc: 8 };
        let MatmulShape { rows, c, oc } = shape;
        let before = MatmulShape { rows, c: oc, oc: c * activation.inputs() };
        let (mut plan, float) = (Plan::new(), engine.dtype());
        let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
        let (dinp, inp, preactivation) =
            (add("dinp", rows * before.oc), add("inp", rows * c), add("preactivation", rows * before.oc));
        let (weight, dweight, dout) = (add("weight", oc * c), add("dweight", oc * c), add("dout", rows * oc));
        let (inp_before, weight_before) = (add("inp before", rows * oc), add("weight before", before.oc * oc));
        engine.allocate(&plan).unwrap();
        engine.write(weight, &vec![1.0; oc * c]).unwrap();
        engine.write(dout, &vec![1.0; rows * oc]).unwrap();
        let forward = ActivationForward { inp: inp_before, weight: weight_before, bias: None, shape: before };
        let epilogue = Epilogue::Activation(activation, preactivation);
        let first = MatmulForward {
            out: inp,
            inp: inp_before,
            weight: weight_before,
            bias: None,
            epilogue,
            shape: before,
            fp8: None,
        };
        let first = format!("{:#}", engine.run(first).unwrap_err());
        let second = [None, Some(forward)].map(|recompute| {
            let activation = Some(ActivationInput { activation, preactivation, recompute });
            let backward =
                MatmulBackward { dinp, dweight, dbias: None, dout, inp, weight, activation, shape, fp8: None };
            format!("{:#}", engine.run(backward).unwrap_err())
        });
        [first].into_iter().chain(second).collect::<Vec<_>>()
    };
    let (auto, rust, cublaslt) = (MatmulBackend::Auto, MatmulBackend::Rust, MatmulBackend::Cublaslt);
    let (relu, swiglu) = (Activation::ReluSquared, Activation::SwiGlu);
    let (bf16, fp32) = (Precision::Bf16, Precision::Fp32);
    let fused_relu = [
        "kernel matmul_wgmma_abt_relu_squared_",
        "kernel matmul_wgmma_ab_relu_squared_backward_1",
        "kernel matmul_wgmma_ab_relu_squared_backward_and_relu_squared_",
    ];
    let fused_swiglu = [
        "kernel matmul_swiglu_forward_",
        "kernel matmul_swiglu_backward_tile_",
        "kernel matmul_swiglu_backward_activation_",
    ];
    // Without fusion, the weight gradient of a SwiGLU's layer comes before the gradient of its input.
    let unfused_relu = ["GEMM 5x32x8 NT bf16", "kernel relu_squared_backward_bf16", "kernel relu_squared_forward_bf16"];
    let unfused_swiglu = ["GEMM 5x64x8 NT bf16", "GEMM 8x32x5 TN bf16 accumulate", "kernel swiglu_forward_bf16"];
    let f32_swiglu = ["GEMM 5x64x8 NT f32", "GEMM 8x32x5 TN f32 accumulate", "kernel swiglu_forward_f32"];
    for (matmul, hopper, precision, activation, expected) in [
        (auto, true, bf16, relu, fused_relu),
        (rust, true, bf16, relu, fused_relu),
        (cublaslt, true, bf16, relu, unfused_relu),
        (auto, false, bf16, relu, unfused_relu),
        (auto, true, bf16, swiglu, fused_swiglu),
        (rust, true, bf16, swiglu, fused_swiglu),
        (cublaslt, true, bf16, swiglu, unfused_swiglu),
        (auto, false, bf16, swiglu, unfused_swiglu),
        (auto, true, fp32, swiglu, f32_swiglu),
    ] {
        let found = first_errors(matmul, hopper, precision, activation);
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{matmul:?} {hopper} {activation:?}: {found}, expected {expected}");
        }
    }
}

/// Returns an engine with one tensor of `len` elements.
fn with_tensor(precision: Precision, len: usize, dtype: DType) -> (Box<dyn Engine>, Tensor) {
    let mut engine = emulated(EmulatedGpu::new(false), precision, None, false);
    let mut plan = Plan::new();
    let tensor = plan.add(Group::Activations, "x", &[len], dtype);
    engine.allocate(&plan).unwrap();
    (engine, tensor)
}

/// Elements before the first and after the last packet are hashed by the host.
#[test]
fn digests_are_those_of_the_bytes() {
    let mut engine = emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let mut plan = Plan::new();
    let dtypes = [DType::F32, DType::Bf16, DType::I32, DType::Fp8];
    let tensors = dtypes.map(|dtype| plan.add(Group::Activations, dtype.name(), &[5003], dtype));
    let attention = AttentionShape { b: 1, t: 64, heads: 1, kv_heads: 1, head_size: 64 };
    let workload = Workload {
        attention,
        channels: 64,
        fc_channels: 128,
        mlp_channels: 128,
        padded_vocab: 128,
        parameters: 5003,
        norm_tensors: 1,
        update_ranges: 0,
        training: true,
    };
    engine.plan(&mut plan, &workload);
    engine.allocate(&plan).unwrap();
    for tensor in tensors {
        let size = tensor.dtype.bytes();
        let bytes: Vec<u8> = (0..tensor.bytes()).map(|i| (i * i % 251 + i % 5) as u8).collect();
        engine.write_bytes(tensor, &bytes).unwrap();
        for (start, len) in [(0, 5003), (1, 5001), (16 / size - 1, 3), (3, 1), (7, 4000), (16, 0)] {
            let found = engine.digest(tensor.slice(start, len), 11).unwrap();
            let expected = engine::digest::of_bytes(&bytes[start * size..][..len * size], size, 11);
            assert_eq!(found, expected, "{} {start} {len}", tensor.dtype.name());
        }
    }
}

#[test]
fn memory_is_zero_initialized_and_bf16_rounds_to_nearest_even() {
    let (mut engine, tensor) = with_tensor(Precision::Bf16, 4, DType::Bf16);
    assert_eq!(engine.read(tensor).unwrap(), [0.0; 4]);
    // 1 + 2^-8 and 1 + 3 * 2^-8 are halfway between two bf16 values.
    engine.write(tensor, &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5, 1e-3]).unwrap();
    assert_eq!(engine.read(tensor).unwrap(), [1.0, 1.015625, -2.5, half::bf16::from_f32(1e-3).to_f32()]);
    engine.zero(tensor.slice(1, 2)).unwrap();
    assert_eq!(engine.read(tensor).unwrap()[1..3], [0.0, 0.0]);
}

#[test]
fn asynchronous_read_returns_the_values_at_the_time_of_the_call() {
    let (mut engine, tensor) = with_tensor(Precision::Fp32, 2, DType::F32);
    engine.write(tensor, &[1.0, 2.0]).unwrap();
    let first = engine.read_async(tensor).unwrap();
    engine.write(tensor, &[3.0, 4.0]).unwrap();
    let second = engine.read_async(tensor).unwrap();
    assert_eq!(engine.wait(second).unwrap().values, [3.0, 4.0]);
    assert_eq!(engine.wait(first).unwrap().values, [1.0, 2.0]);
    let (mut other, tensor) = with_tensor(Precision::Fp32, 2, DType::F32);
    let read = other.read_async(tensor).unwrap();
    assert_eq!(engine.wait(read).unwrap_err().to_string(), "read 1 is not pending");
}

#[test]
fn operations_reject_tensors_of_the_wrong_shape_or_type() {
    let (mut engine, tensor) = with_tensor(Precision::Bf16, 64, DType::Bf16);
    let shape = MatmulShape { rows: 8, c: 8, oc: 8 };
    let short = engine.run(MatmulForward {
        out: tensor,
        inp: tensor.slice(0, 32),
        weight: tensor,
        bias: None,
        epilogue: Epilogue::None,
        shape,
        fp8: None,
    });
    assert_eq!(short.unwrap_err().to_string(), "inp: expected at least 64 elements, found 32");
    let text = engine.read_async(tensor).unwrap_err().to_string();
    assert_eq!(text, "the tensor read: expected f32, found bf16");
    let text = engine.cast(tensor, tensor).unwrap_err().to_string();
    assert_eq!(text, "cast: expected bf16 or f32, found bf16 to bf16");

    let mut elsewhere = tensor;
    elsewhere.offset = 1 << 20;
    let text = engine.zero(elsewhere).unwrap_err().to_string();
    assert!(text.contains("does not lie in the engine's memory of 128 bytes"), "{text}");

    let layout = BatchLayout { b: 1, t: 8 };
    let words = engine.host_buffer(3).unwrap();
    let text = engine.load_batch(tensor, layout, words).map(drop).unwrap_err().to_string();
    assert!(text.starts_with("load_batch: expected ") && text.ends_with(", found 3"), "{text}");
}

#[test]
fn rmsnorm_rejects_unsupported_channels_and_incomplete_weights() {
    for (precision, dtype, c, expected) in [
        (Precision::Bf16, DType::Bf16, 12, "RMSNorm in bf16: expected a multiple of 8 channels up to 16384, found 12"),
        (Precision::Fp32, DType::F32, 8196, "RMSNorm in f32: expected a multiple of 4 channels up to 8192, found 8196"),
    ] {
        let mut engine = emulated(EmulatedGpu::new(false), precision, None, false);
        let mut plan = Plan::new();
        let x = plan.add(Group::Activations, "x", &[c], dtype);
        let rstd = plan.add(Group::Activations, "rstd", &[1], DType::F32);
        engine.allocate(&plan).unwrap();
        let forward = RmsNormForward { out: x, rstd, inp: x, weight: None, c, eps: 1e-5, quantized: None };
        assert_eq!(engine.run(forward).unwrap_err().to_string(), expected);
        let backward = RmsNormBackward { dinp: x, dweight: None, dout: x, inp: x, weight: None, rstd, c };
        assert_eq!(engine.run(backward).unwrap_err().to_string(), expected);
        let dweight = Some(x.slice(0, 8));
        let text = engine.run(RmsNormBackward { c: 8, dweight, ..backward }).unwrap_err().to_string();
        assert_eq!(text, "rmsnorm_backward: expected both weight and dweight or neither, found one");
    }
}

#[test]
fn out_of_memory_error_states_the_required_and_the_free_memory() {
    let mut plan = Plan::new();
    plan.add(Group::Activations, "huge", &[1 << 61], DType::F32);
    let text = emulated(EmulatedGpu::new(false), Precision::Fp32, None, false).allocate(&plan).unwrap_err().to_string();
    assert!(text.starts_with("GPU memory: expected 8589934592.00 GiB free, found "), "{text}");
}

/// Sampling between training steps loads smaller batches, whose buffers may be returned to the prefetcher.
#[test]
fn prefetch_continues_after_smaller_batches() {
    let tokens: Vec<u16> = (0..200).map(|i| i % 50).collect();
    let loader = Loader::new(vec![Tokens::in_memory("tokens", tokens)], Geometry::single(2, 16), 50, None).unwrap();
    let layout = loader.layout();
    let (mut engine, batch) = with_tensor(Precision::Fp32, layout.words(), DType::I32);
    let mut data = Prefetch::start(loader, &*engine).unwrap();
    for _ in 0..3 {
        data.load_next(&mut *engine, batch, 0).unwrap();
        for t in [1, 5, 9] {
            let small = BatchLayout { b: 1, t };
            let words = engine.host_buffer(small.words()).unwrap();
            engine.load_batch(batch.slice(0, small.words()), small, words).unwrap();
        }
    }
    for seed in [0, 1, 7, u32::MAX, 1 << 31, 5, 6, 7] {
        data.load_next(&mut *engine, batch, seed).unwrap();
        let mut bytes = [0; 4];
        engine.read_bytes(layout.tensor(batch, layout.seed()), &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), seed);
    }
}

/// An engine with the kernels for sm_90a, and work to capture: casts, a copy, a memset and a matmul.
struct GraphTest {
    engine: Box<dyn Engine>,
    plan: Plan,
    tensors: [Tensor; 5],
}

const SIDE: usize = 16;

impl GraphTest {
    fn new() -> Self {
        let mut plan = Plan::new();
        let tensors = ["a", "b", "wide", "copy", "out"].map(|name| {
            let dtype = if name == "wide" { DType::F32 } else { DType::Bf16 };
            plan.add(Group::Parameters, name, &[SIDE, SIDE], dtype)
        });
        let mut engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, true);
        engine.allocate(&plan).unwrap();
        Self { engine, plan, tensors }
    }

    /// Returns the work `out = b + a @ copy.T`, where `copy` is `a`, cast to f32 and back, with its second half zeroed.
    fn work(&self) -> impl Fn(&mut dyn Engine) -> anyhow::Result<()> + use<> {
        let [a, b, wide, copy, out] = self.tensors;
        let half = SIDE * SIDE / 2;
        move |engine| {
            engine.cast(wide, a)?;
            engine.cast(copy, wide)?;
            engine.copy(copy.slice(0, half), a.slice(0, half))?;
            engine.zero(copy.slice(half, half))?;
            let shape = MatmulShape { rows: SIDE, c: SIDE, oc: SIDE };
            let epilogue = Epilogue::Residual(b);
            engine.run(MatmulForward { out, inp: a, weight: copy, bias: None, epilogue, shape, fp8: None })
        }
    }

    /// Writes the operands of round `i` and returns the expected output.
    fn fill(&mut self, i: usize) -> Vec<f32> {
        let values = |shift| (0..SIDE * SIDE).map(move |k| ((k * 7 + i * shift) % 5) as f32 - 2.0).collect::<Vec<_>>();
        let (a, b) = (values(1), values(3));
        self.engine.write(self.tensors[0], &a).unwrap();
        self.engine.write(self.tensors[1], &b).unwrap();
        self.engine.write(self.tensors[4], &[9.0; SIDE * SIDE]).unwrap();
        let at = |row: usize, column: usize| {
            let part = |k| if column < SIDE / 2 { a[column * SIDE + k] } else { 0.0 };
            b[row * SIDE + column] + (0..SIDE).map(|k| a[row * SIDE + k] * part(k)).sum::<f32>()
        };
        (0..SIDE * SIDE).map(|i| at(i / SIDE, i % SIDE)).collect()
    }

    /// Returns the output of the work.
    fn output(&mut self) -> Vec<f32> {
        self.engine.read(self.tensors[4]).unwrap()
    }
}

#[test]
fn captured_work_is_replayed_on_current_memory() {
    let mut test = GraphTest::new();
    let (work, key, mut calls) = (test.work(), GraphKey::new(), Vec::new());
    for i in 0..8 {
        if i == 5 {
            test.engine.allocate(&test.plan).unwrap();
        }
        let expected = test.fill(i);
        let mut called = 0;
        let reason = test.engine.capture_or_replay(&key, &mut |engine| {
            called += 1;
            work(engine)
        });
        assert_eq!(reason.unwrap(), None);
        assert_eq!(test.output(), expected, "round {i}");
        calls.push(called);
    }
    // The first call runs the work, the second captures it, and later calls replay it. An allocation invalidates the
    // graph.
    assert_eq!(calls, [1, 1, 0, 0, 0, 1, 1, 0]);

    // Another key identifies other work.
    let expected = test.fill(8);
    let out = test.tensors[4];
    test.engine.capture_or_replay(&GraphKey::new(), &mut |engine| engine.zero(out)).unwrap();
    assert_eq!(test.output(), [0.0; SIDE * SIDE]);
    test.engine.capture_or_replay(&key, &mut |_| panic!("the graph exists")).unwrap();
    assert_eq!(test.output(), expected);
}

#[test]
fn work_that_cannot_be_captured_runs_and_the_reason_is_returned_once() {
    type Work = Box<dyn Fn(&mut dyn Engine, usize) -> anyhow::Result<()>>;
    let mut test = GraphTest::new();
    let [a, b, _, _, out] = test.tensors;
    let reads: Work = Box::new(move |engine, _| engine.read(a).map(drop));
    let writes: Work = Box::new(move |engine, _| engine.write(a.slice(0, 0), &[]));
    let loads: Work = Box::new(move |engine, _| engine.write_bytes(a.slice(0, 0), &[]));
    let exports: Work = Box::new(move |engine, _| engine.device_tensor(a).map(drop));
    // Each call uses a new shape, for which there are no tensor maps yet.
    let varies: Work = Box::new(move |engine, i| {
        let shape = MatmulShape { rows: 8 + i, c: SIDE, oc: SIDE };
        let out = out.slice(0, shape.rows * SIDE);
        engine.run(MatmulForward { out, inp: b, weight: a, bias: None, epilogue: Epilogue::None, shape, fp8: None })
    });
    for (before, reason) in [
        (reads, "a copy to the host cannot be captured"),
        (writes, "a copy from the host cannot be captured"),
        (loads, "a copy from the host cannot be captured"),
        (exports, "work of another library cannot be captured"),
        (varies, "none can be created during graph capture"),
    ] {
        let (work, key) = (test.work(), GraphKey::new());
        let mut reasons = Vec::new();
        for i in 0..4 {
            let expected = test.fill(i);
            let outcome = test.engine.capture_or_replay(&key, &mut |engine| {
                before(engine, i)?;
                work(engine)
            });
            assert_eq!(test.output(), expected, "{reason}, round {i}");
            reasons.push(outcome.unwrap());
        }
        assert!(reasons[1].as_ref().is_some_and(|found| found.contains(reason)), "{reasons:?}");
        assert!([0, 2, 3].iter().all(|&i| reasons[i].is_none()), "{reasons:?}");
    }
}

#[test]
fn errors_in_captured_work_are_returned() {
    let mut test = GraphTest::new();
    let [a, .., out] = test.tensors;
    let key = GraphKey::new();
    for _ in 0..3 {
        let shape = MatmulShape { rows: SIDE, c: SIDE, oc: SIDE };
        let mut work = |engine: &mut dyn Engine| {
            let inp = a.slice(0, 8);
            engine.run(MatmulForward { out, inp, weight: a, bias: None, epilogue: Epilogue::None, shape, fp8: None })
        };
        let text = test.engine.capture_or_replay(&key, &mut work).unwrap_err().to_string();
        assert_eq!(text, "inp: expected at least 256 elements, found 8");
    }
}
