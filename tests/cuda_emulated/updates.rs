//! Updates: fused, compact and sharded ones.

use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{AdamW, AdamWUpdate, Master, UpdateRange};
use engine::tensor::{DType, Tensor};
use engine::{Engine, GraphKey};
use model::{
    Decoder, Descriptor, LayerHooks, MasterWeights, Moments, PlanOptions, Shard, Store, Unit, Unsharded, Zero,
};
use std::ops::Range;

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
        for range in model.layout.group_ranges() {
            let slice = |tensor: Tensor| tensor.slice(range.elements.start, range.elements.len());
            let weight_decay = if range.group.decayed() { UPDATE.weight_decay } else { 0.0 };
            let update = AdamWUpdate {
                params: slice(model.params),
                grads: slice(training.grads),
                m: slice(training.m),
                v: slice(training.v),
                master: training.master.map(slice),
                ranges: &[UpdateRange { elements: 0..range.elements.len(), decayed: true, seed: 0 }],
                stats: training.stats,
                grad_factor: 1.0,
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
        for moments in [Moments::F32, Moments::Bf16, Moments::EightBit] {
            let options = PlanOptions { master_weights, moments, ..PlanOptions::training(1, 24) };
            let got = after_one_update(&mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, true), options);
            let want = after_one_update(&mut Cpu::new(), options);
            // Relative to a value, a step of bf16 is at most 2^-7. Rounding to nearest errs by half of it.
            let stochastic = 1.01 / 128.0;
            let weights = if master_weights == MasterWeights::Remainder { stochastic / 2.0 } else { stochastic };
            let rounding = match moments {
                Moments::F32 => 1e-6,
                Moments::Bf16 => stochastic,
                // Blocks have four bits less than bf16.
                Moments::EightBit => 16.0 * stochastic,
            };
            for (k, tolerance) in [weights, rounding, rounding].into_iter().enumerate() {
                for (i, (got, want)) in got[k].iter().zip(&want[k]).enumerate() {
                    let error = (got - want).abs() / want.abs();
                    assert!(error <= tolerance, "{master_weights}, {moments:?}: tensor {k}[{i}]: {got}, not {want}");
                }
            }
        }
    }
}

/// Returns parameters, m and v after an update of pseudorandom values that bf16 represents, and blocks of m and v as well.
fn after_one_update(engine: &mut dyn Engine, options: PlanOptions) -> [Vec<f32>; 3] {
    let descriptor = Descriptor::gpt2(1, 1, 64, 24, 50).unwrap();
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    let training = model.training.unwrap();
    engine.write(training.stats, &[7.0, 2.5]).unwrap();
    for (k, tensor) in [model.params, training.grads, training.m, training.v].into_iter().enumerate() {
        let value = |i| gpu::noise::squirrel5(i, k as u32) as f32 / u32::MAX as f32 + 0.5;
        let rounded = |value: f32| f32::from_bits(value.to_bits() >> 20 << 20);
        let values = (0..tensor.len as u32).map(|i| rounded(value(i)));
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
        let update = AdamWUpdate {
            params,
            grads,
            m,
            v,
            master,
            ranges,
            stats: training.stats,
            grad_factor: 1.0,
            settings: UPDATE,
        };
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
