//! Chunked logits: losses and gradients do not depend on the number of rows per chunk.

use distributed::Ranks;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::plan::Plan;
use engine::{BatchLayout, Engine};
use model::{Decoder, Descriptor, LOGIT_ROWS, Param, PlanOptions, Recompute, TrainStep, Unsharded};

const LAYOUT: BatchLayout = BatchLayout::new(3, 17);
const ROWS: usize = LAYOUT.b * LAYOUT.t;
const VOCAB: usize = 300;

fn planned(engine: &mut dyn Engine, chunk: usize, training: bool) -> (Decoder, Plan) {
    let descriptor = Descriptor::gpt2(2, 1, 64, 24, VOCAB).unwrap();
    let recompute = Recompute::ActivationAndNorms;
    let options = PlanOptions { training, recompute, logit_rows: chunk, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    Decoder::plan(descriptor, options, engine)
}

fn loaded(engine: &mut dyn Engine, chunk: usize, training: bool) -> Decoder {
    let (model, plan) = planned(engine, chunk, training);
    assert_eq!(model.logit_rows(), chunk);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    for (i, word) in words[..LAYOUT.targets().end].iter_mut().enumerate() {
        *word = (i * i % VOCAB) as i32;
    }
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch, LAYOUT, words).unwrap();
    engine.zero(model.losses).unwrap();
    model
}

/// The results of a step with two gradient accumulation steps.
struct Trained {
    losses: Vec<f32>,
    grads: Vec<f32>,
    /// The head's gradient of wte in one forward pass.
    dwte: Vec<f32>,
}

fn trained(engine: &mut dyn Engine, chunk: usize) -> Trained {
    let model = loaded(engine, chunk, true);
    let grads = model.training.unwrap().grads;
    engine.zero(grads).unwrap();
    model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
    model.loss(engine, LAYOUT, Some(1.0 / ROWS as f32)).unwrap();
    let dwte = engine.read(model.layout.of(grads, Param::Wte, 0)).unwrap();
    let mut step = TrainStep::new(&model, LAYOUT, 2);
    step.gradients(engine, &mut Ranks::default(), &mut |_| Ok(ROWS)).unwrap();
    Trained { losses: engine.read(model.losses).unwrap(), grads: engine.read(grads).unwrap(), dwte }
}

/// Returns the Euclidean distance, relative to the norm of `b`.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let length = squares(&mut b.iter().map(|&b| f64::from(b)));
    assert!(length > 0.0);
    (squares(&mut a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b))) / length).sqrt()
}

/// Returns the fraction of elements with equal bits.
fn equal_fraction(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).filter(|(a, b)| a.to_bits() == b.to_bits()).count() as f64 / a.len() as f64
}

/// Chunk sizes: one that divides the rows, one with a remainder, and a single row.
const CHUNKS: [usize; 3] = [17, 20, 1];

#[test]
fn f32_losses_and_gradients_do_not_depend_on_the_chunk_size() {
    for engine in
        [|| Box::new(Cpu::new()) as Box<dyn Engine>, || emulated(EmulatedGpu::new(false), Precision::Fp32, None, false)]
    {
        let whole = trained(&mut *engine(), ROWS);
        for chunk in CHUNKS {
            let parts = trained(&mut *engine(), chunk);
            // Sums over rows have another order, and GEMMs of other shapes may sum in another order.
            for (parts, whole) in [(&parts.losses, &whole.losses), (&parts.grads, &whole.grads)] {
                assert!(distance(parts, whole) < 1e-6, "chunks of {chunk}: {:e}", distance(parts, whole));
            }
        }
    }
}

/// The sum over chunks is rounded to bf16 once. With a rounding per chunk, hardly any element would be equal after 51
/// chunks.
#[test]
fn bf16_gradients_are_rounded_once_for_any_chunk_size() {
    let exact = trained(&mut Cpu::new(), ROWS);
    for hopper in [false, true] {
        let whole = trained(&mut *emulated(EmulatedGpu::new(hopper), Precision::Bf16, None, false), ROWS);
        for chunk in CHUNKS {
            let parts = trained(&mut *emulated(EmulatedGpu::new(hopper), Precision::Bf16, None, false), chunk);
            let what = format!("chunks of {chunk}, hopper {hopper}");
            assert!(equal_fraction(&parts.losses, &whole.losses) > 0.9, "{what}");
            assert!(distance(&parts.losses, &whole.losses) < 1e-5, "{what}");
            let (same, error) = (equal_fraction(&parts.dwte, &whole.dwte), distance(&parts.dwte, &exact.dwte));
            assert!(same > 0.98, "{what}: a fraction of {same} of dwte is equal");
            assert!(error < 1.02 * distance(&whole.dwte, &exact.dwte), "{what}: {error}");
            assert!(distance(&parts.grads, &whole.grads) < 4e-3, "{what}: {}", distance(&parts.grads, &whole.grads));
        }
    }
}

/// The checked emulator validates every memory access of every kernel, in a workspace that phases share.
#[test]
fn chunked_training_has_no_memory_errors() {
    let expected = trained(&mut Cpu::new(), ROWS);
    let got = trained(&mut *emulated(EmulatedGpu::new(true), Precision::Bf16, None, true), 20);
    assert!(distance(&got.grads, &expected.grads) < 2e-2, "{}", distance(&got.grads, &expected.grads));
}

#[test]
fn inference_model_has_the_same_losses_and_logits() {
    let run = |training, chunk| {
        let engine = &mut Cpu::new();
        let model = loaded(engine, chunk, training);
        model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
        let (mut logits, vp) = (Vec::new(), model.descriptor.padded_vocab());
        for first in (0..ROWS).step_by(chunk) {
            let rows = model.logits(engine, first..ROWS.min(first + chunk)).unwrap();
            logits.extend(engine.read(rows).unwrap());
        }
        model.loss(engine, LAYOUT, None).unwrap();
        let losses = engine.read(model.losses).unwrap();
        for (row, &loss) in losses.iter().enumerate() {
            let logits = &logits[row * vp..][..VOCAB];
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let target = (row + ROWS).pow(2) % VOCAB;
            assert!((sum.ln() - f64::from(logits[target]) - f64::from(loss)).abs() < 1e-4, "row {row}");
        }
        losses
    };
    let whole = run(true, ROWS);
    assert!(distance(&run(false, ROWS), &whole) < 1e-6);
    for chunk in CHUNKS {
        assert!(distance(&run(false, chunk), &whole) < 1e-6);
    }
    let engine = &mut Cpu::new();
    let model = loaded(engine, 20, false);
    model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
    let text = model.loss(engine, LAYOUT, Some(1.0)).unwrap_err().to_string();
    assert_eq!(text, "this model was planned for inference only");
}

/// Uses GPT-2 124M with B = 64 and T = 1024. Its unchunked logits would take 6.1 GiB.
#[test]
fn memory_plan_contains_one_chunk_of_logits() {
    let mut engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, false);
    let descriptor: Descriptor = "d12".parse().unwrap();
    let mut plan = |b, training| {
        let options = PlanOptions { training, ..PlanOptions::training(b, 1024) };
        let (model, plan) = Decoder::plan(descriptor, options, &mut *engine);
        (model.logit_rows(), plan.bytes())
    };
    let (chunk, bytes) = plan(64, true);
    assert_eq!(chunk, LOGIT_ROWS);
    assert!(bytes < 24_000_000_000, "{bytes}");
    assert_eq!([3, 11, 12].map(|b| plan(b, true).0), [3072, LOGIT_ROWS, LOGIT_ROWS]);
    let without = plan(64, false);
    assert_eq!(without.0, LOGIT_ROWS);
    // Doubling the batch does not double the logits.
    assert!(2 * without.1 - plan(128, false).1 > LOGIT_ROWS * 50304 * 2);
}
