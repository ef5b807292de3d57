//! Gradient accumulation: a step of several micro-batches equals a step of one large batch.

use checkpoint::RunState;
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::Engine;
use engine::cpu::Cpu;
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{HardwareChecks, OptimizerSettings, Run, Settings, Validation};
use model::guards::Limits;
use model::schedule::{Schedule, ScheduleKind};
use model::{Decoder, Descriptor, PlanOptions};
use rng::Mt19937;
use std::fs;

/// Returns the training losses and gradient norms of 6 steps of 8 x 16 tokens, in micro-batches of `b` sequences.
fn trained(b: usize) -> Vec<(f64, f64)> {
    let dir = tempfile::tempdir().unwrap();
    let descriptor = Descriptor::gpt2(2, 2, 16, 16, 60).unwrap();
    let mut engine = Cpu::new();
    let options = PlanOptions::training(b, 16);
    let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
    engine.allocate(&plan).unwrap();
    model.initialize(&mut engine, 42).unwrap();
    let mut rng = Mt19937::new(1);
    let tokens = (0..4000).map(|_| rng.below(60).min(rng.below(60))).collect();
    let loader = Loader::new(vec![Tokens::in_memory("tokens", tokens)], Geometry::single(b, 16), 60, None).unwrap();
    let settings = Settings {
        steps: 6,
        grad_accum: 8 / b,
        schedule: Schedule {
            kind: ScheduleKind::Linear,
            peak: 1e-2,
            warmup: 2,
            steps: 6,
            final_fraction: 0.0,
            warmdown: 0.0,
        },
        optimizer: OptimizerSettings::default(),
        weight_decay: 0.1,
        clip: 1.0,
        limits: Limits { loss_z: None, norm_z: None, bad_steps: 10 },
        val_every: Some(1),
        core_every: None,
        sample_every: None,
        sample_tokens: 0,
        checkpoint_every: None,
        fp8_stats_every: None,
        checkpoint_after: None,
        check_ranks_every: None,
        hardware: HardwareChecks::default(),
    };
    let state = RunState::fresh(loader.position());
    let train = Prefetch::start(loader, &engine).unwrap();
    let mut run = Run {
        settings: &settings,
        engine: &mut engine,
        model: &model,
        tokenizer: None,
        train,
        val: Validation::default(),
        hellaswag: None,
        core: None,
        console: Console::new(6, None),
        log: Log::create(Some(dir.path())).unwrap(),
        state,
        checkpoints: None,
        stop: Stop::default(),
        ranks: &mut Ranks::default(),
    };
    let outcome = run.train().unwrap();
    assert_eq!(outcome.tokens, 6 * 8 * 16);
    let jsonl = fs::read_to_string(dir.path().join("main.jsonl")).unwrap();
    let number = |record: &serde_json::Value, key: &str| record[key].as_f64().unwrap();
    jsonl
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .map(|record| (number(&record, "loss"), number(&record, "norm")))
        .collect()
}

#[test]
fn accumulated_micro_batches_match_one_large_batch() {
    let whole = trained(8);
    assert_eq!(whole.len(), 6);
    for b in [1, 4] {
        for (step, (got, expected)) in trained(b).iter().zip(&whole).enumerate() {
            let near = |a: f64, b: f64| (a - b).abs() < 2e-4 * b.abs();
            assert!(near(got.0, expected.0) && near(got.1, expected.1), "step {step}, B={b}: {got:?}, {expected:?}");
        }
    }
    assert!(whole[5].0 < whole[0].0);
}
