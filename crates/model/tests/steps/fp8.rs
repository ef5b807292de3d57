//! Training steps in FP8, on the CPU and on the emulated GPU.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{AdamW, Fp8Accumulation, RouterScores};
use engine::trace::BitFlip;
use engine::{BatchLayout, Engine};
use model::descriptor::Experts;
use model::verification::{Difference, Verification};
use model::{
    Decoder, Descriptor, Fp8Options, Fp8Recipe, Fp8Settings, MasterWeights, PlanOptions, Recompute, Shard, TrainStep,
    Unsharded, Zero,
};
use std::thread;
use std::time::Duration;

const LAYOUT: BatchLayout = BatchLayout::new(2, 32);
const VOCAB: usize = 50;
const RECIPES: [Fp8Recipe; 2] = [Fp8Recipe::Current, Fp8Recipe::Delayed];

fn descriptor() -> Descriptor {
    Descriptor::gpt2(2, 1, 64, LAYOUT.t, VOCAB).unwrap()
}

/// The index of the model with experts in [`families`].
const EXPERTS: usize = 4;

/// Returns models with the norms and activations of GPT-2, Llama and nanochat, and with experts.
fn families() -> [Descriptor; 5] {
    let gpt2 = descriptor();
    let norm = model::descriptor::Normalization::RmsNorm { eps: 1e-5, weights: true };
    let llama = Descriptor {
        norm,
        activation: engine::ops::Activation::SwiGlu,
        biases: model::descriptor::Biases::None,
        ..gpt2
    };
    let with = |activation| Descriptor { activation, ..llama };
    let experts = Experts {
        count: 5,
        active: 2,
        scores: RouterScores::Softmax,
        normalized: true,
        shared_channels: 32,
        aux_loss: 0.01,
        z_loss: 0.001,
        bias: true,
    };
    let experts = Descriptor { experts: Some(experts), mlp_channels: 48, ..llama };
    [gpt2, llama, with(engine::ops::Activation::ReluSquared), with(engine::ops::Activation::GeGlu), experts]
}

/// Returns an emulated GPU with FP8 and without wgmma. Unless it has kernels with mma.sync, the library computes all GEMMs.
fn ada(mma_fp8: bool) -> EmulatedGpu {
    EmulatedGpu { fp8: true, mma_fp8, ..EmulatedGpu::new(false) }
}

/// Returns the families on an emulated Hopper GPU, GPT-2 without kernels for tensor cores, and GPT-2 and nanochat with mma.sync.
fn families_on_gpus() -> impl Iterator<Item = (Descriptor, EmulatedGpu)> {
    let [gpt2, _, relu_squared, ..] = families();
    let others = [(gpt2, ada(false)), (gpt2, ada(true)), (relu_squared, ada(true))];
    families().map(|descriptor| (descriptor, EmulatedGpu::new(true))).into_iter().chain(others)
}

/// A model in an engine, and its training.
struct Run {
    engine: Box<dyn Engine>,
    model: Decoder,
    step: TrainStep,
    ranks: Ranks,
    /// Completed steps.
    steps: u32,
    grad_accum: usize,
    /// The mean loss of each step on this rank.
    losses: Vec<f32>,
}

/// Settings of a [`Run`].
#[derive(Clone, Copy)]
struct Setup {
    recipe: Option<Fp8Recipe>,
    recompute: Recompute,
    zero: Zero,
    grad_accum: usize,
    accumulation: Fp8Accumulation,
    head: bool,
    keeps_weights: bool,
    descriptor: Descriptor,
}

impl Setup {
    fn new(recipe: impl Into<Option<Fp8Recipe>>) -> Self {
        Self {
            recipe: recipe.into(),
            recompute: Recompute::Nothing,
            zero: Zero::NONE,
            grad_accum: 1,
            accumulation: Fp8Accumulation::Fast,
            head: true,
            keeps_weights: true,
            descriptor: descriptor(),
        }
    }

    fn on_cpu(self) -> Run {
        self.on(Box::new(Cpu::new()), Ranks::Single)
    }

    fn on(self, mut engine: Box<dyn Engine>, mut ranks: Ranks) -> Run {
        let Self { recipe, recompute, zero, grad_accum, accumulation, head, keeps_weights, descriptor } = self;
        let shape = [LAYOUT.b, LAYOUT.t];
        let settings = |recipe| Fp8Settings { recipe, accumulation, head };
        let fp8 = recipe.map(|recipe| Fp8Options::new(settings(recipe), &descriptor, shape, &*engine).unwrap());
        let training = PlanOptions::training(LAYOUT.b, LAYOUT.t);
        let training = PlanOptions { keeps_fp8_weights: keeps_weights, ..training };
        let options = PlanOptions { recompute, zero, fp8, master_weights: MasterWeights::F32, ..training };
        let (model, plan) = Decoder::plan(descriptor, options, &mut *engine);
        engine.allocate(&plan).unwrap();
        model.initialize(&mut *engine, 42).unwrap();
        ranks.init_communicator(&*engine, model.params, model.zero.shard().ranks).unwrap();
        let step = TrainStep::new(&model, LAYOUT, grad_accum).capture_graphs();
        Run { engine, model, step, ranks, steps: 0, grad_accum, losses: Vec::new() }
    }
}

impl Run {
    /// Runs a step. Its tokens follow a pattern that the model can learn, and differ between steps, micro-batches and ranks.
    fn step(&mut self) {
        self.try_step().unwrap();
    }

    fn try_step(&mut self) -> engine::Result<()> {
        let (model, rank, step) = (&self.model, self.ranks.rank(), self.steps);
        let mut micro_batch = 0;
        let mut load = |engine: &mut dyn Engine| {
            let mut words = engine.host_buffer(LAYOUT.words())?;
            let start = 7 * step as usize + 3 * micro_batch + 13 * rank;
            for sequence in 0..LAYOUT.b {
                for t in 0..LAYOUT.t {
                    let token = |t: usize| ((start + 5 * sequence + 7 * t) % 31 + t % 2) as i32;
                    words[LAYOUT.inputs()][sequence * LAYOUT.t + t] = token(t);
                    words[LAYOUT.targets()][sequence * LAYOUT.t + t] = token(t + 1);
                }
            }
            micro_batch += 1;
            LAYOUT.sort(&mut words);
            LAYOUT.set_seed(&mut words, step);
            engine.load_batch(model.batch, LAYOUT, words)?;
            Ok(LAYOUT.targets().len())
        };
        let settings = AdamW {
            learning_rate: 3e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: step + 1,
            clip: f32::MAX,
            seed: step,
        };
        let mut decide = |_: &mut dyn Engine, _| Ok(Some(settings.into()));
        self.step.run(&mut *self.engine, &mut self.ranks, &mut load, &mut decide)?;
        let stats = self.engine.read(self.model.training.unwrap().stats).unwrap();
        self.losses.push(stats[0] / (LAYOUT.b * LAYOUT.t * self.grad_accum) as f32);
        self.steps += 1;
        Ok(())
    }

    fn steps(mut self, n: usize) -> Self {
        (0..n).for_each(|_| self.step());
        self
    }

    /// Returns the bits of all parameters in file order.
    fn bits(&mut self) -> Vec<u32> {
        let (layout, params) = (&self.model.layout, self.model.params);
        let mut read = |(param, layer)| self.engine.read(layout.of(params, param, layer)).unwrap();
        layout.file_order().flat_map(&mut read).map(f32::to_bits).collect()
    }

    /// Returns the statistics of FP8 and the optimizer's state.
    fn state(&mut self) -> Vec<Vec<f32>> {
        let training = self.model.training.unwrap();
        let fp8 = training.fp8.iter().flat_map(model::fp8::Fp8::state);
        let tensors: Vec<_> = [self.model.params, training.m, training.v].into_iter().chain(fp8).collect();
        tensors.into_iter().map(|tensor| self.engine.read(tensor).unwrap()).collect()
    }

    fn set_state(&mut self, values: &[Vec<f32>]) {
        let training = self.model.training.unwrap();
        let fp8 = training.fp8.iter().flat_map(model::fp8::Fp8::state);
        let tensors: Vec<_> = [self.model.params, training.m, training.v].into_iter().chain(fp8).collect();
        assert_eq!(tensors.len(), values.len());
        tensors.into_iter().zip(values).for_each(|(tensor, values)| self.engine.write(tensor, values).unwrap());
    }
}

/// Returns the mean of the last ten losses.
fn final_loss(losses: &[f32]) -> f32 {
    losses[losses.len() - 10..].iter().sum::<f32>() / 10.0
}

#[test]
fn a_hundred_steps_are_deterministic_and_learn_as_well_as_f32() {
    let exact = Setup::new(None).on_cpu().steps(100);
    let (first, last) = (exact.losses[0], final_loss(&exact.losses));
    assert!(last < 0.4 * first, "{first} to {last}");
    for recipe in RECIPES {
        let train = || Setup::new(recipe).on_cpu().steps(100);
        let (mut run, mut again) = (train(), train());
        assert!(run.bits() == again.bits() && run.losses == again.losses, "{recipe:?}");
        let got = final_loss(&run.losses);
        assert!(run.losses != exact.losses && (got - last).abs() < 0.01, "{recipe:?}: {got}, f32 {last}");
    }
}

#[test]
fn recomputation_is_exact() {
    let [gpt2, .., experts] = families();
    for (descriptor, recipe) in [gpt2, experts].into_iter().flat_map(|descriptor| RECIPES.map(|it| (descriptor, it))) {
        let train = |recompute, keeps_weights| {
            let setup = Setup { recompute, keeps_weights, grad_accum: 2, descriptor, ..Setup::new(recipe) };
            setup.on_cpu().steps(4).bits()
        };
        let stored = train(Recompute::Nothing, true);
        for recompute in Recompute::ALL {
            for keeps_weights in [false, true] {
                let what = format!("{descriptor}, {recipe:?}, {recompute:?}, {keeps_weights}");
                assert!(train(recompute, keeps_weights) == stored, "{what}");
            }
        }
    }
}

/// Parameters, statistics of FP8 and losses of a rank.
type RankState = (Vec<u32>, Vec<Vec<f32>>, Vec<f32>);

/// Trains on ranks in threads and returns their final states.
fn on_ranks(ranks: usize, stage: u8, recipe: Fp8Recipe, steps: usize) -> Vec<RankState> {
    in_shard_groups([ranks, ranks], stage, recipe, steps)
}

/// Trains on ranks in threads, in groups of `shard_size`, and returns their final states.
fn in_shard_groups([ranks, shard_size]: [usize; 2], stage: u8, recipe: Fp8Recipe, steps: usize) -> Vec<RankState> {
    let groups = TcpGroup::in_process(ranks, Duration::from_mins(1)).unwrap();
    thread::scope(|scope| {
        let run = |group: TcpGroup| {
            let zero = Zero::new(stage, Shard { rank: group.rank % shard_size, ranks: shard_size });
            let setup = Setup { zero, ..Setup::new(recipe) };
            let mut run = setup.on(Box::new(Cpu::new()), Ranks::Connected(group)).steps(steps);
            let fp8 = run.model.training.unwrap().fp8.unwrap();
            let state: Vec<_> = fp8.state().into_iter().map(|tensor| run.engine.read(tensor).unwrap()).collect();
            // Of sharded parameters, this rank has a part.
            let bits = if stage < 3 { run.bits() } else { Vec::new() };
            (bits, state, run.losses)
        };
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The sum of two gradients does not depend on their order, and factors of 1/2 are exact.
#[test]
fn two_ranks_agree_and_every_zero_stage_has_the_same_bits() {
    for recipe in RECIPES {
        let [of_stage_0, other] = on_ranks(2, 0, recipe, 5).try_into().unwrap();
        assert!(of_stage_0 == other, "{recipe:?}");
        for stage in 1..=3 {
            let [one, other] = on_ranks(2, stage, recipe, 5).try_into().unwrap();
            assert!(one == other, "{recipe:?}, stage {stage}");
            assert_eq!(one.2, of_stage_0.2, "{recipe:?}, stage {stage}");
            // Gradients that are summed over the ranks, not averaged, have half the magnitude before.
            let factors = [1.0, if stage < 2 { 1.0 } else { 0.5 }];
            let scaled = |(values, factor): (&Vec<f32>, f32)| values.iter().map(|x| x * factor).collect::<Vec<_>>();
            let want: Vec<_> = of_stage_0.1.iter().zip(factors).map(scaled).collect();
            assert!(one.1 == want, "{recipe:?}, stage {stage}");
            assert!(stage == 3 || one.0 == of_stage_0.0, "{recipe:?}, stage {stage}");
        }
    }
}

/// All ranks use the largest magnitudes of all ranks, not of their shard group.
#[test]
fn ranks_of_different_shard_groups_agree() {
    for recipe in RECIPES {
        let unsharded = on_ranks(4, 0, recipe, 3);
        for stage in 1..=3 {
            let ranks = in_shard_groups([4, 2], stage, recipe, 3);
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{recipe:?}, stage {stage}");
            assert_eq!(ranks[0].2[..1], unsharded[0].2[..1], "{recipe:?}, stage {stage}");
            for (got, expected) in ranks[0].2.iter().zip(&unsharded[0].2) {
                assert!((got / expected - 1.0).abs() < 1e-3, "{recipe:?}, stage {stage}: {got}, {expected}");
            }
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_an_undisturbed_one() {
    for recipe in RECIPES {
        let mut whole = Setup::new(recipe).on_cpu().steps(9);
        let mut half = Setup::new(recipe).on_cpu().steps(5);
        let state = half.state();
        assert_eq!(state.len(), if recipe == Fp8Recipe::Delayed { 5 } else { 3 });
        let mut resumed = Setup::new(recipe).on_cpu();
        resumed.set_state(&state);
        resumed.steps = 5;
        let mut resumed = resumed.steps(4);
        assert_eq!(resumed.losses, whole.losses[5..], "{recipe:?}");
        assert!(resumed.state() == whole.state(), "{recipe:?}");
        // Delayed scaling needs its statistics: without them the step calibrates.
        if recipe == Fp8Recipe::Delayed {
            let mut without = Setup::new(recipe).on_cpu();
            without.set_state(&[&state[..3], &[vec![0.0; state[3].len()], vec![0.0; state[4].len()]]].concat());
            without.steps = 5;
            assert_ne!(without.steps(4).losses, whole.losses[5..]);
        }
    }
}

#[test]
fn a_nan_skips_the_step_and_does_not_stay_in_the_statistics() {
    for recipe in RECIPES {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut run = Setup::new(recipe).on_cpu().steps(3);
            let before = run.bits();
            let weight = run.model.layout.of(run.model.params, model::Param::Fcw, 1).slice(3, 1);
            let good = run.engine.read(weight).unwrap();
            run.engine.write(weight, &[bad]).unwrap();
            let broken = run.bits();
            run.step();
            assert!(!run.losses[3].is_finite(), "{recipe:?}, {bad}");
            assert!(run.bits() == broken, "{recipe:?}, {bad}: the weights changed");
            run.engine.write(weight, &good).unwrap();
            assert!(run.bits() == before);
            run.step();
            assert!(run.losses[4].is_finite() && run.bits() != before, "{recipe:?}, {bad}");
        }
    }
}

/// Passes outside of training steps read the parameters themselves.
#[test]
fn evaluation_does_not_use_fp8() {
    let loss = |recipe: Option<Fp8Recipe>| {
        let mut run = Setup::new(recipe).on_cpu();
        run.step();
        // The parameters of the first step, and its batch.
        run.model.initialize(&mut *run.engine, 42).unwrap();
        run.engine.zero(run.model.losses).unwrap();
        run.model.forward(&mut *run.engine, LAYOUT, &mut Unsharded).unwrap();
        run.model.loss(&mut *run.engine, LAYOUT, None).unwrap();
        (run.losses, run.engine.read(run.model.losses).unwrap())
    };
    let (in_f32, evaluated) = loss(None);
    let (in_fp8, evaluated_fp8) = loss(Some(Fp8Recipe::Current));
    assert_ne!(in_f32, in_fp8);
    assert!(evaluated == evaluated_fp8);
}

/// Each family of models with one of the settings. The emulator is slow.
#[test]
fn kernels_compute_the_gradients_of_the_cpu_engine() {
    assert_gradients(|family, setting| family % 4 == setting || (family, setting) == (EXPERTS, 2));
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn kernels_compute_the_gradients_of_the_cpu_engine_with_all_settings() {
    assert_gradients(|_, _| true);
}

/// Runs kernels with all checks, with the activations of each family of models. Both engines quantize almost equal numbers.
fn assert_gradients(selects: impl Fn(usize, usize) -> bool) {
    let settings = [
        (Fp8Recipe::Current, Fp8Accumulation::Fast),
        (Fp8Recipe::Delayed, Fp8Accumulation::Exact),
        (Fp8Recipe::Delayed, Fp8Accumulation::ExactGradients),
    ];
    for (family, (descriptor, gpu)) in families_on_gpus().enumerate() {
        let settings = settings.into_iter().enumerate().filter(|(setting, _)| selects(family, *setting));
        for (setting, (recipe, accumulation)) in settings {
            let head = setting != 1;
            let setup = Setup { accumulation, head, descriptor, ..Setup::new(recipe) };
            let gradients = |mut run: Run| {
                run.step();
                let grads = run.model.training.unwrap().grads;
                (run.losses[0], run.engine.read(grads).unwrap())
            };
            let gpu = emulated(gpu, Precision::Bf16, None, true);
            let (loss, got) = gradients(setup.on(gpu, Ranks::Single));
            let (want_loss, want) = gradients(setup.on_cpu());
            let (exact_loss, exact) = gradients(Setup { recipe: None, ..setup }.on_cpu());
            let distance = |a: &[f32], b: &[f32]| {
                let square = |x: f32| f64::from(x).powi(2);
                let (d, s) = a.iter().zip(b).fold((0.0, 0.0), |(d, s), (a, b)| (d + square(a - b), s + square(*b)));
                (d / s).sqrt()
            };
            let (error, rounding) = (distance(&got, &want), distance(&want, &exact));
            println!(
                "{:?} {recipe:?}: {loss} {want_loss} {exact_loss}, {error}, rounding {rounding}",
                descriptor.activation
            );
            assert!((loss - want_loss).abs() < 0.01, "{loss}, expected {want_loss}");
            // Almost equal gradients may round to neighbors in FP8, which differ by up to a quarter.
            assert!(error < 0.07, "{error}");
        }
    }
}

/// An error in a step, before its update, leaves the state of the step before.
#[test]
fn statistics_are_restored_after_an_error() {
    let mut whole = Setup::new(Fp8Recipe::Delayed).on_cpu().steps(4);
    let mut run = Setup::new(Fp8Recipe::Delayed).on_cpu().steps(3);
    let before = run.state();
    // Restoring after a step that has ended changes nothing.
    run.step.restore_statistics(&mut *run.engine).unwrap();
    assert!(run.state() == before);
    let mut fail = |_: &mut dyn Engine| anyhow::bail!("no batch");
    let mut decide = |_: &mut dyn Engine, _| Ok(None);
    run.step.run(&mut *run.engine, &mut run.ranks, &mut fail, &mut decide).unwrap_err();
    assert!(run.state() != before);
    run.step.restore_statistics(&mut *run.engine).unwrap();
    assert!(run.state() == before);
    run.step();
    assert!(run.state() == whole.state() && run.losses == whole.losses);
}

/// The emulator checks all accesses, also those of digests.
#[test]
fn verification_changes_no_bit_and_finds_a_flipped_one() {
    let engines: [fn() -> Box<dyn Engine>; 2] =
        [|| Box::new(Cpu::new()), || emulated(EmulatedGpu::new(true), Precision::Bf16, None, true)];
    let recipes = [Some(Fp8Recipe::Delayed), None, Some(Fp8Recipe::Current)];
    // The emulator is slow, and delayed scaling has the most state.
    for ((engine, places), recipes) in engines.into_iter().zip([10, 1]).zip([&recipes[..], &recipes[..1]]) {
        for &recipe in recipes {
            let start = || Setup::new(recipe).on(engine(), Ranks::Single);
            let (mut plain, mut run) = (start().steps(2), start());
            for number in 0..2 {
                run.step.verify_next(Verification { number, flip: None });
                run.step();
            }
            assert!(run.state() == plain.state() && run.losses == plain.losses, "{recipe:?}");
            let before = run.state();
            for i in 0..places {
                let flip = BitFlip { step: 2, rank: 0, output: 2 + 5 * i * 10 / places, element: 37 * i, bit: 3 * i };
                run.step.verify_next(Verification { number: 2, flip: Some(flip) });
                let found = run.try_step().unwrap_err().downcast::<Difference>().unwrap();
                assert_eq!((found.output.0, &found.replays[..]), (flip.output, &[false; 2][..]), "{recipe:?}: {found}");
                run.step.restore_statistics(&mut *run.engine).unwrap();
                assert!(run.state() == before);
            }
        }
    }
}

/// Each family of models with one level of recomputation, and GPT-2 also with its activation recomputed. The emulator is slow.
#[test]
fn fused_quantization_has_the_bits_of_separate_quantization() {
    assert_fused_quantization(|family, level| {
        let family = family % Recompute::ALL.len();
        family == level || (family, level) == (0, Recompute::Activation as usize)
    });
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn fused_quantization_has_the_bits_of_separate_quantization_with_any_recomputation() {
    assert_fused_quantization(|_, _| true);
}

/// A step that counts losses quantizes each tensor separately, from bf16, after the kernel that computes it. Recomputation
/// quantizes by other kernels, too.
fn assert_fused_quantization(selects: impl Fn(usize, usize) -> bool) {
    for (family, (descriptor, gpu)) in families_on_gpus().enumerate() {
        let train = |recompute, counts: bool| {
            let gpu = emulated(gpu, Precision::Bf16, None, true);
            let setup = Setup { recompute, descriptor, ..Setup::new(Fp8Recipe::Delayed) };
            let mut run = setup.on(gpu, Ranks::Single);
            // The first step calibrates the scales, and the second uses them.
            for _ in 0..2 {
                if counts {
                    run.step.count_fp8();
                }
                run.step();
            }
            (run.bits(), run.state(), run.losses)
        };
        let separate = train(Recompute::Nothing, true);
        let levels = Recompute::ALL.into_iter().enumerate().filter(|(level, _)| selects(family, *level));
        for (_, recompute) in levels {
            assert!(train(recompute, false) == separate, "{:?}, {recompute:?}", descriptor.activation);
        }
    }
}

/// Recomputation must not count losses again.
#[test]
fn losses_are_counted_once() {
    let counts = |recompute, keeps_weights| {
        let mut run = Setup { recompute, keeps_weights, ..Setup::new(Fp8Recipe::Delayed) }.on_cpu().steps(2);
        run.step.count_fp8();
        run.step();
        run.step.fp8_counts(&mut *run.engine).unwrap()
    };
    let stored = counts(Recompute::Nothing, true);
    assert!(stored.iter().any(|of_tensor| of_tensor.saturated + of_tensor.zeroed > 0));
    for recompute in Recompute::ALL {
        for keeps_weights in [false, true] {
            assert_eq!(counts(recompute, keeps_weights), stored, "{recompute:?}, {keeps_weights}");
        }
    }
}

#[test]
fn what_fp8_cannot_do_is_an_error() {
    let refusal = |engine: &dyn Engine, descriptor: Descriptor, shape| {
        let options = Fp8Options::new(Fp8Settings::default(), &descriptor, shape, engine);
        options.unwrap_err().to_string()
    };
    let old = emulated(EmulatedGpu::new(false), Precision::Bf16, None, false);
    let error = refusal(&*old, descriptor(), [2, 32]);
    assert!(error.contains("--precision fp8: expected a GPU of compute capability 8.9 or later"), "{error}");
    let error = refusal(&Cpu::new(), descriptor(), [3, 10]);
    assert!(error.contains("batch x seq: expected a multiple of 16, found 30; change --batch or --seq"), "{error}");
    let narrow = Descriptor::gpt2(1, 1, 24, 32, VOCAB).unwrap();
    let error = refusal(&Cpu::new(), narrow, [2, 32]);
    assert!(error.contains("channels: expected a multiple of 16, found 24"), "{error}");
}
