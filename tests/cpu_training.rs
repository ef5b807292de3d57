//! Training on the CPU engine against PyTorch in double precision (`scripts/pytorch_reference.py`), against finite
//! differences, and against itself with other numbers of threads.

use distributed::Ranks;
use engine::cpu::Cpu;
use engine::ops::AdamW;
use engine::{BatchLayout, Engine};
use model::{Decoder, Descriptor, Param, Params, PlanOptions, TrainStep, Unsharded, Update, init};
use rng::Mt19937;

const MODEL: &[u8] = include_bytes!("data/tiny.bin");
const DEBUG_STATE: &[u8] = include_bytes!("data/tiny_debug_state.bin");
const LOSSES: &str = include_str!("data/tiny_losses.json");

/// Largest error allowed, relative to the largest value of the tensor.
const TOLERANCE: f64 = 1e-4;

/// Reads the words of a file that starts with a header of 256 integers.
struct Words {
    header: Vec<i32>,
    body: std::vec::IntoIter<[u8; 4]>,
}

impl Words {
    fn new(bytes: &[u8]) -> Self {
        let mut body = bytes.as_chunks::<4>().0.to_vec().into_iter();
        Self { header: body.by_ref().take(256).map(i32::from_le_bytes).collect(), body }
    }

    fn ints(&mut self, n: usize) -> Vec<i32> {
        self.body.by_ref().take(n).map(i32::from_le_bytes).collect()
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        self.body.by_ref().take(n).map(f32::from_le_bytes).collect()
    }

    fn assert_at_end(&mut self) {
        assert_eq!(self.body.next(), None, "the file has trailing words");
    }
}

struct TokenBatch {
    layout: BatchLayout,
    inputs: Vec<i32>,
    targets: Vec<i32>,
}

struct Run {
    engine: Cpu,
    model: Decoder,
    layout: BatchLayout,
}

impl Run {
    fn new(descriptor: Descriptor, batch: &TokenBatch, parameter: impl Fn(Param, usize) -> Vec<f32>) -> Self {
        let layout = batch.layout;
        let mut engine = Cpu::new();
        let options = PlanOptions::training(layout.b, layout.t);
        let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
        engine.allocate(&plan).unwrap();
        for (param, layer) in model.layout.file_order() {
            engine.write(model.layout.of(model.params, param, layer), &parameter(param, layer)).unwrap();
        }
        let mut words = engine.host_buffer(layout.words()).unwrap();
        words[layout.inputs()].copy_from_slice(&batch.inputs);
        words[layout.targets()].copy_from_slice(&batch.targets);
        layout.sort(&mut words);
        engine.load_batch(model.batch, layout, words).unwrap();
        Self { engine, model, layout }
    }

    fn tokens(&self) -> f32 {
        (self.layout.b * self.layout.t) as f32
    }

    /// Returns the mean loss, summed over the tokens in double precision.
    fn loss(&mut self) -> f64 {
        self.engine.zero(self.model.losses).unwrap();
        self.model.forward(&mut self.engine, self.layout, &mut Unsharded).unwrap();
        self.model.loss(&mut self.engine, self.layout, None).unwrap();
        let losses = self.engine.read(self.model.losses).unwrap();
        losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64
    }

    /// Computes the gradients of the batch.
    fn gradients(&mut self) {
        let mut step = TrainStep::new(&self.model, self.layout, 1);
        let targets = self.layout.targets().len();
        step.gradients(&mut self.engine, &mut Ranks::default(), &mut |_| Ok(targets)).unwrap();
    }

    /// Runs an optimizer step and returns its mean loss and gradient norm.
    fn step(&mut self, settings: &AdamW) -> [f64; 2] {
        let mut step = TrainStep::new(&self.model, self.layout, 1);
        let (settings, targets) = (Some(Update::from(*settings)), self.layout.targets().len());
        step.run(&mut self.engine, &mut Ranks::default(), &mut |_| Ok(targets), &mut |_, _| Ok(settings)).unwrap();
        let stats = self.engine.read_async(self.model.training.unwrap().stats).unwrap();
        let stats = self.engine.wait(stats).unwrap().values;
        [f64::from(stats[0] / self.tokens()), f64::from(stats[1])]
    }

    fn gradient(&mut self, param: Param, layer: usize) -> Vec<f32> {
        self.engine.read(self.model.layout.of(self.model.training.unwrap().grads, param, layer)).unwrap()
    }
}

struct Reference {
    descriptor: Descriptor,
    batch: TokenBatch,
    /// In file order.
    parameters: Vec<((Param, usize), Vec<f32>)>,
    logits: Vec<f32>,
    loss: f32,
    gradients: Vec<((Param, usize), Vec<f32>)>,
}

impl Reference {
    fn load() -> Self {
        let mut model = Words::new(MODEL);
        let sizes: Vec<usize> = model.header[..8].iter().map(|&size| size as usize).collect();
        assert_eq!(sizes[..2], [20_240_326, 3]);
        let descriptor = Descriptor::gpt2(sizes[4], sizes[5], sizes[6], sizes[2], sizes[3]).unwrap();
        assert_eq!(sizes[7], descriptor.padded_vocab());
        let tensors = |words: &mut Words| {
            let order = Params::new(descriptor).file_order().collect::<Vec<_>>().into_iter();
            order.map(|key| (key, words.floats(key.0.len(&descriptor)))).collect::<Vec<_>>()
        };
        let parameters = tensors(&mut model);
        model.assert_at_end();

        let mut state = Words::new(DEBUG_STATE);
        assert_eq!(state.header[..2], [20_240_327, 2]);
        let layout = BatchLayout::new(state.header[2] as usize, state.header[3] as usize);
        let tokens = layout.b * layout.t;
        let batch = TokenBatch { layout, inputs: state.ints(tokens), targets: state.ints(tokens) };
        let logits = state.floats(tokens * descriptor.vocab);
        let loss = state.floats(1)[0];
        let gradients = tensors(&mut state);
        state.assert_at_end();
        Self { descriptor, batch, parameters, logits, loss, gradients }
    }

    fn parameter(&self, param: Param, layer: usize) -> Vec<f32> {
        self.parameters.iter().find(|(key, _)| *key == (param, layer)).unwrap().1.clone()
    }

    fn run(&self) -> Run {
        Run::new(self.descriptor, &self.batch, |param, layer| self.parameter(param, layer))
    }
}

fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0f64, |max, &x| max.max(f64::from(x).abs()));
    assert!(largest > 0.0, "{name}: the reference is all zero");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - f64::from(expected)).abs() / largest;
        assert!(error < TOLERANCE, "{name}[{i}]: {found}, expected {expected}, relative error {error:.1e}");
    }
}

#[test]
fn logits_loss_and_gradients_match_pytorch() {
    let reference = Reference::load();
    let mut run = reference.run();
    let loss = run.loss();
    assert_close("loss", &[loss as f32], &[reference.loss]);
    let logits = run.model.logits(&mut run.engine, 0..run.layout.b * run.layout.t).unwrap();
    let logits = run.engine.read(logits).unwrap();
    let (v, vp) = (reference.descriptor.vocab, reference.descriptor.padded_vocab());
    let logits: Vec<f32> = logits.chunks(vp).flat_map(|row| row[..v].to_vec()).collect();
    assert_close("logits", &logits, &reference.logits);

    run.gradients();
    for ((param, layer), expected) in &reference.gradients {
        assert_close(&format!("d{} of layer {layer}", param.name()), &run.gradient(*param, *layer), expected);
    }
}

#[test]
fn gradients_of_micro_batches_accumulate() {
    let reference = Reference::load();
    let mut run = reference.run();
    run.gradients();
    let dloss = 1.0 / run.tokens();
    run.model.forward(&mut run.engine, run.layout, &mut Unsharded).unwrap();
    run.model.loss(&mut run.engine, run.layout, Some(dloss)).unwrap();
    run.model.backward(&mut run.engine, run.layout, dloss, &mut Unsharded).unwrap();
    for ((param, layer), expected) in &reference.gradients {
        let twice: Vec<f32> = expected.iter().map(|x| 2.0 * x).collect();
        assert_close(&format!("d{} of layer {layer}, twice", param.name()), &run.gradient(*param, *layer), &twice);
    }
    let losses = run.engine.read(run.model.losses).unwrap();
    assert_close("losses", &[losses.iter().sum::<f32>() / run.tokens()], &[2.0 * reference.loss]);
}

#[test]
fn ten_adamw_steps_match_pytorch() {
    let reference = Reference::load();
    let runs: serde_json::Value = serde_json::from_str(LOSSES).unwrap();
    for expected in runs.as_array().unwrap() {
        let mut run = reference.run();
        let setting = |name: &str| expected[name].as_f64().unwrap() as f32;
        for step in 0..10 {
            let settings = AdamW {
                learning_rate: setting("learning_rate"),
                beta1: setting("beta1"),
                beta2: setting("beta2"),
                eps: setting("eps"),
                weight_decay: setting("weight_decay"),
                step: step as u32 + 1,
                clip: setting("clip"),
                seed: 0,
            };
            let found = run.step(&settings);
            for (name, found) in ["losses", "norms"].into_iter().zip(found) {
                let expected = expected[name][step].as_f64().unwrap();
                let error = (found / expected - 1.0).abs();
                assert!(error < TOLERANCE, "{name}[{step}]: {found}, expected {expected}, with {settings:?}");
            }
        }
    }
}

#[test]
fn reference_weights_are_four_times_the_initial_weights() {
    let reference = Reference::load();
    init::generate(&reference.descriptor, init::SEED, |param, layer, values| {
        if param.shape(&reference.descriptor).0 > 1 {
            let expected: Vec<f32> = values.iter().map(|x| 4.0 * x).collect();
            assert!(reference.parameter(param, layer) == expected, "{} of layer {layer}", param.name());
        }
        Ok(())
    })
    .unwrap();
}

/// Returns a model and a batch with odd shapes, which are multiples of no block size.
fn odd_run() -> Run {
    let descriptor = Descriptor::gpt2(2, 3, 27, 13, 61).unwrap();
    let layout = BatchLayout::new(3, 11);
    let mut rng = Mt19937::new(7);
    let mut tokens = || (0..33).map(|_| rng.below(61) as i32).collect();
    let batch = TokenBatch { layout, inputs: tokens(), targets: tokens() };
    Run::new(descriptor, &batch, |param, layer| {
        let mut values = vec![0.0; param.len(&descriptor)];
        Mt19937::new(layer as u32 * 16 + param as u32).normal(&mut values, 0.15);
        values
    })
}

#[test]
fn gradients_match_finite_differences() {
    let mut run = odd_run();
    run.gradients();
    let mut rng = Mt19937::new(1);
    for (param, layer) in run.model.layout.clone().file_order() {
        let name = format!("{} of layer {layer}", param.name());
        let gradient = run.gradient(param, layer);
        let tensor = run.model.layout.of(run.model.params, param, layer);
        let values = run.engine.read(tensor).unwrap();
        let norm = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{name} has no gradient");

        // Returns the derivative along a direction of length 1, to fourth order.
        let mut derivative = |direction: &dyn Fn(usize) -> f64| {
            let h = 0.02;
            let mut loss_at = |distance: f64| {
                let moved = values.iter().enumerate();
                let moved: Vec<f32> = moved.map(|(i, &x)| (f64::from(x) + distance * direction(i)) as f32).collect();
                run.engine.write(tensor, &moved).unwrap();
                run.loss()
            };
            let (near, far) = (loss_at(h) - loss_at(-h), loss_at(2.0 * h) - loss_at(-2.0 * h));
            (8.0 * near - far) / (12.0 * h)
        };
        let along = derivative(&|i| f64::from(gradient[i]) / norm);
        assert!((along / norm - 1.0).abs() < 1e-3, "{name}: derivative {along} along a gradient of norm {norm}");
        for _ in 0..6 {
            let at = rng.below(gradient.len() as u32) as usize;
            let (found, expected) = (f64::from(gradient[at]), derivative(&|i| f64::from(i == at)));
            let allowed = 2e-5 + 1e-3 * norm;
            assert!((found - expected).abs() < allowed, "d{name}[{at}]: {found}, finite differences give {expected}");
        }
        run.engine.write(tensor, &values).unwrap();
    }
}

#[test]
fn training_does_not_depend_on_the_number_of_threads() {
    let trained = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut bits = Vec::new();
            for mut run in [odd_run(), Reference::load().run()] {
                for step in 1..=3 {
                    let settings = AdamW {
                        learning_rate: 1e-3,
                        beta1: 0.9,
                        beta2: 0.95,
                        eps: 1e-8,
                        weight_decay: 0.1,
                        step,
                        clip: 1.0,
                        seed: 0,
                    };
                    run.step(&settings);
                }
                bits.extend(run.engine.read(run.model.params).unwrap().into_iter().map(f32::to_bits));
            }
            bits
        })
    };
    let one = trained(1);
    for threads in [2, 3, 7] {
        assert!(trained(threads) == one, "{threads} threads give different parameters than one thread");
    }
}

#[test]
fn inference_model_gives_the_same_logits() {
    let reference = Reference::load();
    let layout = reference.batch.layout;
    let mut engine = Cpu::new();
    let options = PlanOptions::inference(layout.b + 1, layout.t + 2);
    let (model, plan) = Decoder::plan(reference.descriptor, options, &mut engine);
    engine.allocate(&plan).unwrap();
    for ((param, layer), values) in &reference.parameters {
        engine.write(model.layout.of(model.params, *param, *layer), values).unwrap();
    }
    let mut words = engine.host_buffer(layout.words()).unwrap();
    words[layout.inputs()].copy_from_slice(&reference.batch.inputs);
    engine.load_batch(model.batch, layout, words).unwrap();
    model.forward(&mut engine, layout, &mut Unsharded).unwrap();
    let vp = reference.descriptor.padded_vocab();
    let found = model.logits(&mut engine, 0..layout.b * layout.t).unwrap();
    let found = engine.read(found).unwrap();
    let found: Vec<f32> = found.chunks(vp).flat_map(|row| row[..reference.descriptor.vocab].to_vec()).collect();
    assert_close("logits", &found, &reference.logits);
}

#[test]
fn tokens_outside_the_vocabulary_are_rejected() {
    let reference = Reference::load();
    let mut run = reference.run();
    let layout = run.layout;
    for (bad, part, limit) in [
        (-1, layout.inputs(), 128),
        (128, layout.inputs(), 128),
        (97, layout.targets(), 97),
        (-2, layout.targets(), 97),
    ] {
        let mut words = run.engine.host_buffer(layout.words()).unwrap();
        words[part.start + 5] = bad;
        layout.sort(&mut words);
        run.engine.load_batch(run.model.batch, layout, words).unwrap();
        let forward = run.model.forward(&mut run.engine, layout, &mut Unsharded);
        let result = forward.and_then(|()| run.model.loss(&mut run.engine, layout, None));
        let message = result.unwrap_err().to_string();
        let expected = format!("at position 5 of the batch: expected an id below {limit}, found {bad};");
        assert!(message.contains(&expected), "{message}");
    }
}
