//! Training steps with masked targets.

use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::ops::AdamW;
use engine::{BatchLayout, Engine, MASKED_TARGET};
use model::{Decoder, Descriptor, Muon, Optimizer, PlanOptions, Shard, StepStats, TrainStep, Update, Zero};
use rng::Mt19937;
use std::thread;
use std::time::Duration;

const T: usize = 8;
const VOCAB: usize = 40;
/// Sequences of a step.
const SEQUENCES: usize = 8;

/// Whether the target at a position of a sequence is masked.
type Mask = fn(usize, usize) -> bool;

/// The first half of the sequences is masked, so that all targets of a micro-batch or of a rank are. The others have 8, 1, 4 and 4
/// targets.
fn uneven(sequence: usize, t: usize) -> bool {
    match sequence {
        0..4 => true,
        4 => false,
        5 => t != 3,
        6 => t >= 4,
        _ => t % 3 == 1 || t == 0,
    }
}

/// How a step is computed.
#[derive(Clone, Copy, Debug)]
struct Setup {
    ranks: usize,
    grad_accum: usize,
    stage: u8,
    muon: bool,
    clip: f32,
}

const ONE: Setup = Setup { ranks: 1, grad_accum: 1, stage: 0, muon: false, clip: f32::INFINITY };

/// The results of a first step. The first moments are a fixed multiple of the gradients that the update applies.
#[derive(Debug)]
struct Stepped {
    loss: f32,
    norm: f32,
    targets: usize,
    moments: Vec<f32>,
    /// Those that the first rank has.
    params: Vec<f32>,
}

impl Setup {
    /// Runs a step over some sequences. Checks that all ranks agree.
    fn run(self, sequences: std::ops::Range<usize>, masked: Option<Mask>) -> Stepped {
        let groups = TcpGroup::in_process(self.ranks, Duration::from_mins(1)).unwrap();
        let mut results: Vec<Stepped> = thread::scope(|scope| {
            let rank = |group| {
                let sequences = sequences.clone();
                scope.spawn(move || self.run_rank(group, sequences, masked))
            };
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for result in &results[1..] {
            let stats = |result: &Stepped| (result.loss.to_bits(), result.norm.to_bits(), result.targets);
            assert_eq!(stats(result), stats(&results[0]), "{self:?}");
        }
        let mut first = results.swap_remove(0);
        if self.stage > 0 {
            // Each rank has the moments of its shard, and zeros elsewhere.
            for other in &results {
                first.moments.iter_mut().zip(&other.moments).for_each(|(to, from)| *to += from);
            }
        }
        first
    }

    fn run_rank(self, group: TcpGroup, sequences: std::ops::Range<usize>, masked: Option<Mask>) -> Stepped {
        let (mut engine, rank) = (Cpu::new(), group.rank);
        let layout = BatchLayout::new(sequences.len() / (self.ranks * self.grad_accum), T);
        let zero = Zero::new(self.stage, Shard { rank, ranks: self.ranks });
        let optimizer = if self.muon { Optimizer::Muon } else { Optimizer::AdamW };
        let options = PlanOptions { zero, optimizer, ..PlanOptions::training(layout.b, T) };
        let descriptor = Descriptor::gpt2(2, 2, 16, T, VOCAB).unwrap();
        let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
        engine.allocate(&plan).unwrap();
        model.initialize(&mut engine, 42).unwrap();
        let mut ranks = if self.ranks == 1 { Ranks::Single } else { Ranks::Connected(group) };
        ranks.init_communicator(&engine, model.params, self.ranks).unwrap();
        let mut next = sequences.start;
        let mut load = |engine: &mut dyn Engine| {
            let mut words = engine.host_buffer(layout.words())?;
            for row in 0..layout.b {
                let sequence = next + rank * layout.b + row;
                let mut rng = Mt19937::new(sequence as u32);
                let tokens: Vec<i32> = (0..=T).map(|_| rng.below(VOCAB as u32) as i32).collect();
                for t in 0..T {
                    let is_masked = masked.is_some_and(|masked| masked(sequence, t));
                    words[layout.inputs()][row * T + t] = tokens[t];
                    words[layout.targets()][row * T + t] = if is_masked { MASKED_TARGET } else { tokens[t + 1] };
                }
            }
            next += self.ranks * layout.b;
            layout.sort(&mut words);
            let targets = layout.count_targets(&words);
            engine.load_batch(model.batch, layout, words)?;
            Ok(targets)
        };
        let mut decide = |_: &mut dyn Engine, _: StepStats| Ok(Some(self.update()));
        let mut step = TrainStep::new(&model, layout, self.grad_accum).mask_targets(masked.is_some());
        let (stats, _) = step.run(&mut engine, &mut ranks, &mut load, &mut decide).unwrap();
        let [loss, norm] = stats.loss_and_norm(&engine.read(stats.tensor).unwrap()).unwrap();
        let training = model.training.unwrap();
        let mut read = |store: model::Store| {
            let mut all = Vec::new();
            for (param, layer) in model.layout.file_order() {
                let mut values = vec![0.0; param.len(&model.descriptor)];
                if let Some((range, tensor)) = store.held(param, layer) {
                    values[range].copy_from_slice(&engine.read(tensor).unwrap());
                }
                all.extend(values);
            }
            all
        };
        let (moments, params) = (read(model.state_store(training.m)), read(model.param_store()));
        Stepped { loss, norm, targets: stats.targets, moments, params }
    }

    fn update(self) -> Update {
        let (learning_rate, weight_decay, step, seed) = (1e-3, 0.1, 1, 0);
        let adamw =
            AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step, clip: self.clip, seed };
        let muon = Muon { learning_rate, momentum: 0.9, weight_decay, ..Muon::default() };
        Update { muon: self.muon.then_some(muon), ..adamw.into() }
    }
}

/// Checks that the Euclidean distance is small beside the norm of `want`.
#[track_caller]
fn assert_near(got: &[f32], want: &[f32], what: &str) {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(a - b)));
    let size = norm(&mut want.iter().map(|x| f64::from(*x)));
    assert!(size > 0.0 && distance <= 1e-6 * size, "{what}: distance {distance}, norm {size}");
}

fn assert_same_step(got: &Stepped, want: &Stepped, what: &str) {
    assert_eq!(got.targets, want.targets, "{what}");
    assert_near(&[got.loss], &[want.loss], &format!("loss, {what}"));
    assert_near(&[got.norm], &[want.norm], &format!("norm, {what}"));
    assert_near(&got.moments, &want.moments, &format!("moments, {what}"));
}

#[test]
fn losses_and_gradients_do_not_depend_on_the_places_of_masked_targets() {
    for muon in [false, true] {
        // The norm is above the second threshold only with the factor of the gradients.
        let unclipped = Setup { muon, ..ONE }.run(0..SEQUENCES, Some(uneven));
        for clip in [f32::INFINITY, 0.9 * unclipped.norm] {
            let one = Setup { muon, clip, ..ONE }.run(0..SEQUENCES, Some(uneven));
            assert_eq!(one.targets, 8 + 1 + 4 + 4);
            for (ranks, grad_accum) in [(1, 4), (1, 8), (2, 1), (2, 2), (2, 4)] {
                for stage in if ranks == 1 { 0..1 } else { 0..4 } {
                    let setup = Setup { ranks, grad_accum, stage, muon, clip };
                    assert_same_step(&setup.run(0..SEQUENCES, Some(uneven)), &one, &format!("{setup:?}"));
                }
            }
        }
    }
}

/// All targets of one sequence among eight, against a step with only this sequence and without masks.
#[test]
fn masked_sequences_have_no_effect() {
    for muon in [false, true] {
        let norm = Setup { muon, ..ONE }.run(4..5, None).norm;
        for (ranks, clip) in [(2, f32::INFINITY), (1, norm / 2.0)] {
            let want = Setup { muon, clip, ..ONE }.run(4..5, None);
            let setup = Setup { ranks, grad_accum: 2, stage: 0, muon, clip };
            assert_same_step(&setup.run(0..SEQUENCES, Some(|sequence, _| sequence != 4)), &want, &format!("{setup:?}"));
        }
    }
}

#[test]
fn a_step_keeps_its_bits_if_no_target_is_masked() {
    let setup = Setup { ranks: 2, grad_accum: 2, stage: 1, clip: 0.1, ..ONE };
    let [got, want] = [Some((|_, _| false) as Mask), None].map(|masked| setup.run(0..SEQUENCES, masked));
    assert_eq!((got.loss.to_bits(), got.norm.to_bits()), (want.loss.to_bits(), want.norm.to_bits()));
    assert!(got.moments == want.moments && got.params == want.params);
}

#[test]
fn a_step_without_targets_has_no_loss_and_no_gradient() {
    for (ranks, stage, muon) in [(1, 0, false), (1, 0, true), (2, 0, false), (2, 2, true)] {
        let got = Setup { ranks, grad_accum: 2, stage, muon, clip: 1.0 }.run(0..SEQUENCES, Some(|_, _| true));
        assert_eq!((got.loss, got.norm, got.targets), (0.0, 0.0, 0), "{ranks} ranks, stage {stage}");
        assert!(got.moments.iter().all(|moment| *moment == 0.0) && got.params.iter().all(|param| param.is_finite()));
    }
}
