//! Parity with PyTorch and llm.c: initial weights, batch order, and the optimizer steps of the training loop.
//!
//! `scripts/parity_reference.py` computes the reference weights and batch order with PyTorch; compiled llm.c code gives
//! the same values. `scripts/compare_llmc` compares whole runs on a GPU.

use checkpoint::RunState;
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::cpu::Cpu;
use engine::{BatchLayout, Engine};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{CLIP, HardwareChecks, OptimizerSettings, Run, Settings, Validation};
use model::guards::Limits;
use model::init::{SEED, generate};
use model::schedule::{Schedule, ScheduleKind};
use model::{Decoder, Descriptor, Param, PlanOptions, TrainStep};
use rng::Mt19937;
use std::fs;

use Param::{Attprojw, Fcprojw, Fcw, Qkvw, Wpe, Wte};

/// Tensor, layer, CRC-32 of its values in fp32, CRC-32 of its values rounded to bf16.
type Checksum = (Param, usize, u32, u32);

const SMALL: [Checksum; 10] = [
    (Wte, 0, 0x8a2d06df, 0xf0f9fc9c),
    (Wpe, 0, 0x69a5fd74, 0xb9e6a083),
    (Qkvw, 0, 0x5629c774, 0x0a7576b7),
    (Attprojw, 0, 0x3191a309, 0x3c5852a0),
    (Fcw, 0, 0x05b5676b, 0x4d732b97),
    (Fcprojw, 0, 0xaad16851, 0x7604e384),
    (Qkvw, 1, 0x897c88cb, 0x642b9515),
    (Attprojw, 1, 0xdc50d2d7, 0x00095bb0),
    (Fcw, 1, 0x84e257d2, 0x31d31f71),
    (Fcprojw, 1, 0xa740eac0, 0x4dad7a8d),
];

const D12: [Checksum; 50] = [
    (Wte, 0, 0x882ff8cf, 0x4835b19c),
    (Wpe, 0, 0x77b02761, 0x8f07daaa),
    (Qkvw, 0, 0x80bfd960, 0xb78ff1a5),
    (Attprojw, 0, 0xb359eab4, 0x28b2773d),
    (Fcw, 0, 0xea4c5db9, 0x1e7f91fe),
    (Fcprojw, 0, 0x8678ac08, 0x5974d0af),
    (Qkvw, 1, 0xe0e37a4c, 0x4f6cc545),
    (Attprojw, 1, 0xc707975a, 0x98001b3c),
    (Fcw, 1, 0x63fe548a, 0x07ab5c1c),
    (Fcprojw, 1, 0xa183dd5c, 0x42b84c45),
    (Qkvw, 2, 0x7e9955ab, 0xde163830),
    (Attprojw, 2, 0x98df3e87, 0xf16a73df),
    (Fcw, 2, 0x4b9067e3, 0x25994286),
    (Fcprojw, 2, 0x217f1251, 0x8aaf0535),
    (Qkvw, 3, 0x614966c6, 0x09665b85),
    (Attprojw, 3, 0xbd9d3f14, 0x12c5dd65),
    (Fcw, 3, 0x9e622dcb, 0xb93560f2),
    (Fcprojw, 3, 0x8f9de22b, 0x5bd1b42e),
    (Qkvw, 4, 0x71d63f5a, 0x740676e5),
    (Attprojw, 4, 0xb8a55912, 0xb0c8bac2),
    (Fcw, 4, 0xd390dbff, 0xa4a7ead9),
    (Fcprojw, 4, 0x9726edbc, 0x33a405bc),
    (Qkvw, 5, 0xb1fdcdd8, 0x4b8f01ad),
    (Attprojw, 5, 0xce983d5a, 0x9ee0e908),
    (Fcw, 5, 0x7fbcb6fd, 0x4f65f420),
    (Fcprojw, 5, 0x336479c0, 0xdd641162),
    (Qkvw, 6, 0xa534b8f2, 0xdc256c08),
    (Attprojw, 6, 0x1ca9fc5d, 0x625336da),
    (Fcw, 6, 0xac9bc1f0, 0x358c0f19),
    (Fcprojw, 6, 0xd2355f30, 0x43a602f5),
    (Qkvw, 7, 0xbc7c975f, 0xa7382b18),
    (Attprojw, 7, 0x3c73082e, 0x4585b885),
    (Fcw, 7, 0x2ec0244d, 0xf1fd3f35),
    (Fcprojw, 7, 0x35927e0d, 0x2638843a),
    (Qkvw, 8, 0x80725a8f, 0x8638f9e6),
    (Attprojw, 8, 0x3c454b75, 0x495f7f44),
    (Fcw, 8, 0xb69fc35d, 0x1f41a240),
    (Fcprojw, 8, 0xe2ad5dab, 0x57160ffb),
    (Qkvw, 9, 0x12277392, 0x62bca864),
    (Attprojw, 9, 0x19149a93, 0x89cad0a5),
    (Fcw, 9, 0xef193c85, 0x04523202),
    (Fcprojw, 9, 0x4284e71a, 0x5059496f),
    (Qkvw, 10, 0x47948dcb, 0x4de3a367),
    (Attprojw, 10, 0x87a15556, 0x3716c1ca),
    (Fcw, 10, 0xc3b77466, 0x1bd2c944),
    (Fcprojw, 10, 0x57d39c11, 0x19a60f6b),
    (Qkvw, 11, 0xfd258302, 0xf75f5141),
    (Attprojw, 11, 0x0dbf6f06, 0x14cf87f5),
    (Fcw, 11, 0xe4100c41, 0x113e8cb0),
    (Fcprojw, 11, 0x021e495a, 0xb99f009d),
];

/// Checks the tensors that are drawn at random, in the order of the generator's stream.
fn assert_initial_weights(descriptor: &Descriptor, expected: &[Checksum]) {
    let mut remaining = expected.iter();
    generate(descriptor, SEED, |param, layer, values| {
        let drawn = match param {
            Wte => &values[..descriptor.vocab * descriptor.channels],
            _ => values,
        };
        if drawn.iter().all(|x| x.to_bits() == drawn[0].to_bits()) {
            return Ok(());
        }
        let rounded: Vec<half::bf16> = drawn.iter().map(|x| half::bf16::from_f32(*x)).collect();
        let crcs = (crc32fast::hash(bytemuck::cast_slice(drawn)), crc32fast::hash(bytemuck::cast_slice(&rounded)));
        let &(expected_param, expected_layer, fp32, bf16) =
            remaining.next().expect("the reference has no more tensors");
        assert_eq!((param, layer, crcs), (expected_param, expected_layer, (fp32, bf16)));
        Ok(())
    })
    .unwrap();
    assert_eq!(remaining.len(), 0);
}

#[test]
fn initial_weights_of_gpt2_124m_match_pytorch() {
    assert_initial_weights(&"d12".parse().unwrap(), &D12);
}

#[test]
fn initial_weights_of_a_small_model_match_pytorch() {
    assert_initial_weights(&Descriptor::gpt2(2, 3, 48, 20, 97).unwrap(), &SMALL);
}

/// Returns the first token of each batch. Token `i`, counted over all shards, is `i`.
fn first_tokens(geometry: Geometry, batches: usize) -> Vec<i32> {
    let mut next = 0;
    let shards = [200, 137, 90, 260, 33].map(|n| {
        let ids = (next..next + n).collect();
        next += n;
        Tokens::in_memory(format!("shard of {n}"), ids)
    });
    let mut loader = Loader::new(shards.into(), geometry, 1000, Some(SEED)).unwrap();
    let mut words = vec![0; loader.layout().words()];
    let mut first = || {
        loader.next(&mut words).unwrap();
        words[0]
    };
    (0..batches).map(|_| first()).collect()
}

/// Covers two and a half epochs over shards of different lengths.
#[test]
fn batch_order_matches_llm_c() {
    #[rustfmt::skip]
    let expected = [
        703, 687, 112, 160, 80, 32, 96, 128, 0, 16, 144, 64, 48, 176, 200, 280, 232, 264, 216, 312, 296, 248,
        635, 491, 459, 523, 619, 443, 667, 427, 587, 603, 475, 571, 555, 507, 651, 539, 353, 337, 385, 401, 369,
        401, 353, 337, 369, 385, 80, 48, 160, 32, 112, 16, 64, 176, 144, 0, 128, 96, 703, 687, 507, 555, 459,
        427, 603, 523, 651, 635, 539, 443, 667, 475, 571, 619, 587, 491, 200, 216,
    ];
    assert_eq!(first_tokens(Geometry::single(2, 8), expected.len()), expected);
    #[rustfmt::skip]
    let expected_rank_1 = [
        703, 312, 216, 280, 248, 353, 385, 80, 16, 176, 112, 144, 48, 507, 603, 443, 539, 475, 571, 667, 635,
        703, 112, 48, 16, 176, 80, 144, 385, 353, 312, 248, 280, 216, 507, 539, 603, 443, 635, 667, 475, 571,
        603, 507, 539, 475, 443, 635, 667, 571,
    ];
    assert_eq!(first_tokens(Geometry { b: 2, t: 8, ranks: 2, rank: 1 }, expected_rank_1.len()), expected_rank_1);
}

const LAYOUT: BatchLayout = BatchLayout::new(2, 8);
const ACCUM: usize = 3;
const DECAY: f32 = 0.1;
/// Learning rates: two warmup steps to 0.02, then linear decay to 0.002 at step ten.
const RATES: [f64; 4] = [0.01, 0.02, 0.02, 0.01775];

fn loader(tokens: &Tokens) -> Loader {
    Loader::new(vec![tokens.clone()], Geometry::single(LAYOUT.b, LAYOUT.t), 50, Some(SEED)).unwrap()
}

fn planned(engine: &mut Cpu) -> Decoder {
    let descriptor = Descriptor::gpt2(2, 2, 16, LAYOUT.t, 50).unwrap();
    let BatchLayout { b, t, .. } = LAYOUT;
    let options = PlanOptions::training(b, t);
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, SEED).unwrap();
    model
}

/// Runs the training loop. Returns the final parameters, and the logged loss, norm and learning rate of each step.
fn trained(tokens: &Tokens, steps: usize) -> (Vec<f32>, Vec<[f64; 3]>) {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Cpu::new();
    let model = planned(&mut engine);
    let settings = Settings {
        steps,
        grad_accum: ACCUM,
        schedule: Schedule {
            kind: ScheduleKind::Linear,
            peak: 0.02,
            warmup: 2,
            steps: 10,
            final_fraction: 0.1,
            warmdown: 0.0,
        },
        optimizer: OptimizerSettings::default(),
        weight_decay: DECAY,
        clip: CLIP,
        limits: Limits { loss_z: None, norm_z: None, bad_steps: 10 },
        val_every: None,
        core_every: None,
        sample_every: None,
        sample_tokens: 0,
        checkpoint_every: None,
        fp8_stats_every: None,
        checkpoint_after: None,
        check_ranks_every: None,
        hardware: HardwareChecks::default(),
    };
    let loader = loader(tokens);
    let mut run = Run {
        settings: &settings,
        model: &model,
        tokenizer: None,
        state: RunState::fresh(loader.position()),
        train: Prefetch::start(loader, &engine).unwrap(),
        engine: &mut engine,
        val: Validation::default(),
        hellaswag: None,
        core: None,
        console: Console::new(steps, None),
        log: Log::create(Some(dir.path())).unwrap(),
        checkpoints: None,
        stop: Stop::default(),
        ranks: &mut Ranks::default(),
    };
    run.train().unwrap();
    let records = fs::read_to_string(dir.path().join("main.jsonl")).unwrap();
    let logged = records.lines().map(|line| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        ["loss", "norm", "lr"].map(|key| record[key].as_f64().unwrap())
    });
    let logged = logged.collect();
    (engine.read(model.params).unwrap(), logged)
}

/// Compares the training loop with AdamW in double precision, and returns the gradient norms.
///
/// The reference uses:
///
/// - beta1 = 0.9, beta2 = 0.95, eps = 1e-8, and bias correction with t = 1 in the first step;
/// - the mean gradient of all micro-batches, clipped to a norm of 1;
/// - the learning rate of a step counted from 0;
/// - weight decay for matrices and embeddings only.
///
/// Gradients are computed at the loop's own parameters, so rounding errors do not accumulate.
fn assert_steps_match_reference_adamw(tokens: &Tokens) -> Vec<f64> {
    let mut engine = Cpu::new();
    let model = planned(&mut engine);
    let mut loader = loader(tokens);
    let n = model.layout.elements();
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    let training = model.training.unwrap();
    let mut norms = Vec::new();
    for (step, rate) in RATES.into_iter().enumerate() {
        let before = engine.read(model.params).unwrap();
        let mut load = |engine: &mut dyn Engine| {
            let mut words = engine.host_buffer(LAYOUT.words())?;
            loader.next(&mut words)?;
            LAYOUT.sort(&mut words);
            engine.load_batch(model.batch, LAYOUT, words)?;
            Ok(LAYOUT.targets().len())
        };
        TrainStep::new(&model, LAYOUT, ACCUM).gradients(&mut engine, &mut Ranks::default(), &mut load).unwrap();
        let losses = engine.read(model.losses).unwrap();
        let loss = losses.iter().map(|x| f64::from(*x)).sum::<f64>() / (16 * ACCUM) as f64;
        let grads = engine.read(training.grads).unwrap();
        let norm = grads.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        norms.push(norm);

        let (after, logged) = trained(tokens, step + 1);
        let [logged_loss, logged_norm, logged_rate] = logged[step];
        assert!((logged_loss / loss - 1.0).abs() < 1e-6, "step {step}: loss {logged_loss}, expected {loss}");
        assert!((logged_norm / norm - 1.0).abs() < 1e-6, "step {step}: norm {logged_norm}, expected {norm}");
        assert!((logged_rate / rate - 1.0).abs() < 1e-6, "step {step}: rate {logged_rate}, expected {rate}");

        let scale = if norm > 1.0 { 1.0 / norm } else { 1.0 };
        let t = step as i32 + 1;
        let decayed = [Wte, Wpe, Qkvw, Attprojw, Fcw, Fcprojw];
        for (param, layer) in model.layout.file_order() {
            let decay = if decayed.contains(&param) { f64::from(DECAY) } else { 0.0 };
            for i in model.layout.range(param, layer) {
                let grad = scale * f64::from(grads[i]);
                m[i] = 0.9 * m[i] + 0.1 * grad;
                v[i] = 0.95 * v[i] + 0.05 * grad * grad;
                let (m, v) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.95f64.powi(t)));
                let old = f64::from(before[i]);
                let expected = old - rate * (m / (v.sqrt() + 1e-8) + decay * old);
                let error = (f64::from(after[i]) - expected).abs();
                assert!(
                    error < 2e-7 + 1e-5 * (expected - old).abs(),
                    "step {step}, {} of layer {layer}, element {i}: {}, expected {expected}",
                    param.name(),
                    after[i]
                );
            }
        }
        engine.write(model.params, &after).unwrap();
    }
    norms
}

#[test]
fn unclipped_steps_match_reference_adamw() {
    let mut rng = Mt19937::new(1);
    let tokens = (0..500).map(|_| rng.below(50)).collect();
    let norms = assert_steps_match_reference_adamw(&Tokens::in_memory("uniform tokens", tokens));
    assert!(norms.iter().all(|norm| *norm < 1.0), "{norms:?}");
}

#[test]
fn clipped_steps_match_reference_adamw() {
    let tokens = (0..500).map(|i| if i % 5 == 0 { i % 49 } else { 7 }).collect();
    let norms = assert_steps_match_reference_adamw(&Tokens::in_memory("mostly one token", tokens));
    assert!(norms.iter().all(|norm| *norm > 1.0), "{norms:?}");
}
