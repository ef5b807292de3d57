//! Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, OLMoE and nanochat on the CPU engine against transformers in double precision: logits, loss,
//! every gradient, and ten AdamW steps. The bf16 kernels, on the emulator, against transformers in bf16.
//! `scripts/transformers_reference.py` computes the references.

use crate::reference::{Reference, assert_close};
use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::AdamW;
use engine::{BatchLayout, Engine};
use interchange::ModelSource;
use interchange::architecture::{Architecture, exchange_halves};
use model::{Decoder, PlanOptions, Recompute, StepStats, TrainStep, Unsharded};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

const LAYOUT: BatchLayout = BatchLayout::new(2, 24);
/// The token that begins a document in the references with documents.
const SEPARATOR: i32 = 96;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/transformers").join(name)
}

fn reference(name: &str, file: &str) -> Reference {
    Reference::read(&folder(name).join(file))
}

/// A model on the CPU engine with the batch of its reference.
struct Bench {
    engine: Cpu,
    model: Decoder,
    architecture: &'static Architecture,
    reference: Reference,
    layout: BatchLayout,
}

impl Bench {
    fn new(name: &str, recompute: Recompute, documents: bool) -> Self {
        let source = ModelSource::open(&folder(name)).unwrap();
        let architecture = source.architecture().unwrap();
        let file = if documents { "documents.safetensors" } else { "reference.safetensors" };
        let layout = if documents { LAYOUT.with_documents() } else { LAYOUT };
        let (mut engine, reference) = (Cpu::new(), reference(name, file));
        let options = PlanOptions { recompute, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
        let (model, plan) = Decoder::plan(source.descriptor(), options, &mut engine);
        engine.allocate(&plan).unwrap();
        source.load(&model, &mut engine).unwrap();
        let mut words = engine.host_buffer(layout.words()).unwrap();
        words[LAYOUT.inputs()].copy_from_slice(&reference.ints("inputs"));
        words[LAYOUT.targets()].copy_from_slice(&reference.ints("targets"));
        layout.sort(&mut words);
        layout.find_documents(&mut words, SEPARATOR);
        engine.load_batch(model.batch, layout, words).unwrap();
        Self { engine, model, architecture, reference, layout }
    }

    fn logits(&mut self) {
        self.model.forward(&mut self.engine, self.layout, &mut Unsharded).unwrap();
        let (rows, vp) = (LAYOUT.b * LAYOUT.t, self.model.descriptor.padded_vocab());
        let logits = self.model.logits(&mut self.engine, 0..rows).unwrap();
        let values = self.engine.read(logits).unwrap();
        let descriptor = &self.model.descriptor;
        let row =
            |row: &[f32]| row[..descriptor.vocab].iter().map(|&logit| descriptor.softcapped(logit)).collect::<Vec<_>>();
        let found: Vec<f32> = values.chunks(vp).flat_map(row).collect();
        assert_close("logits", &found, &self.reference.floats("logits"));
    }

    /// Compares the gradients under their names in transformers.
    fn gradients(&mut self) {
        let (model, d) = (self.model.clone(), self.model.descriptor);
        let grads = model.training.unwrap().grads;
        for (_, names, instance) in self.architecture.all_tensors(&d) {
            let all = self.engine.read(model.layout.of(grads, names.param, instance.layer)).unwrap();
            let name = self.architecture.full_name(names, instance);
            let mut found = all[names.elements_of(&d, instance.expert)].to_vec();
            if self.architecture.reverses_rotation && names.is_rotated() {
                exchange_halves(&mut found, d.head_size * d.channels);
            }
            assert_close(&name, &found, &self.reference.floats(&name));
        }
    }
}

fn assert_agreement(name: &str, documents: bool) {
    for recompute in Recompute::ALL {
        let mut bench = Bench::new(name, recompute, documents);
        bench.logits();
        let (losses, norms) = (bench.reference.floats("losses"), bench.reference.floats("norms"));
        let (mut step, targets) = (TrainStep::new(&bench.model, bench.layout, 1), bench.layout.targets().len());
        for (i, (loss, norm)) in losses.into_iter().zip(norms).enumerate() {
            let ranks = &mut Ranks::default();
            step.gradients(&mut bench.engine, ranks, &mut |_| Ok(targets)).unwrap();
            step.measure(&mut bench.engine, ranks).unwrap();
            if i == 0 {
                bench.gradients();
            }
            let stats = bench.engine.read(bench.model.training.unwrap().stats).unwrap();
            let found = stats[0] / (LAYOUT.b * LAYOUT.t) as f32;
            assert!((found - loss).abs() <= 1e-5 * loss.max(1.0), "{name}: loss of step {i}: {found}, expected {loss}");
            // Short documents have small gradients of queries and keys. AdamW divides by their size, so that rounding grows.
            let allowed = if documents { 1e-3 } else { 1e-4 } * norm;
            assert!((stats[1] - norm).abs() <= allowed, "{name}: norm of step {i}: {}, expected {norm}", stats[1]);
            let settings = AdamW {
                learning_rate: 1e-2,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step: i as u32 + 1,
                clip: 1.0,
                seed: 0,
            };
            step.update(&mut bench.engine, ranks, &settings.into()).unwrap();
        }
    }
}

#[test]
fn llama_with_a_tied_head_and_scaled_rotary_positions() {
    assert_agreement("llama-tied", false);
}

#[test]
fn llama_with_an_untied_head_and_its_own_head_size() {
    assert_agreement("llama-untied", false);
}

#[test]
fn qwen2() {
    assert_agreement("qwen2", false);
}

#[test]
fn qwen2_with_yarn() {
    assert_agreement("qwen2-yarn", false);
}

#[test]
fn qwen3() {
    assert_agreement("qwen3", false);
}

#[test]
fn qwen3_moe_with_normalized_weights() {
    assert_agreement("qwen3-moe", false);
}

#[test]
fn olmoe_with_a_norm_of_all_heads() {
    assert_agreement("olmoe", false);
}

#[test]
fn nanochat() {
    assert_agreement("nanochat", false);
}

#[test]
fn windows_in_all_and_in_some_layers() {
    for name in ["mistral", "qwen3-windows"] {
        assert_agreement(name, false);
    }
}

#[test]
fn attention_within_documents() {
    for name in ["llama-tied", "qwen3", "nanochat", "mistral", "qwen3-windows"] {
        assert_agreement(name, true);
    }
}

/// The rows of the references with conversations.
const CONVERSATION_ROWS: usize = 8;

/// Ranks and micro-batches of a step.
#[derive(Clone, Copy, Debug)]
struct Split {
    ranks: usize,
    micro_batches: usize,
}

/// Runs ten steps on packed conversations as one rank, and compares loss, norm and all gradients.
fn train_on_conversations(name: &str, split: Split, group: TcpGroup) {
    let Split { ranks: world, micro_batches } = split;
    let reference = reference(name, "conversations.safetensors");
    let [inputs, targets, starts] = ["inputs", "targets", "starts"].map(|part| reference.ints(part));
    let layout = BatchLayout::new(CONVERSATION_ROWS / (world * micro_batches), LAYOUT.t).with_documents();
    let (source, mut engine, rank) = (ModelSource::open(&folder(name)).unwrap(), Cpu::new(), group.rank);
    let architecture = source.architecture().unwrap();
    let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::training(layout.b, layout.t), &mut engine);
    engine.allocate(&plan).unwrap();
    source.load(&model, &mut engine).unwrap();
    let mut ranks = if world == 1 { Ranks::Single } else { Ranks::Connected(group) };
    ranks.init_communicator(&engine, model.params, world).unwrap();
    let mut micro_batch = 0;
    let mut load = |engine: &mut dyn Engine| {
        let tokens = layout.b * layout.t;
        let rows = (micro_batch % micro_batches * world + rank) * tokens..;
        micro_batch += 1;
        let mut words = engine.host_buffer(layout.words())?;
        words[layout.inputs()].copy_from_slice(&inputs[rows.clone()][..tokens]);
        words[layout.targets()].copy_from_slice(&targets[rows.clone()][..tokens]);
        layout.sort(&mut words);
        let begins: Vec<bool> = starts[rows][..tokens].iter().map(|&start| start == 1).collect();
        layout.set_documents(&mut words, &begins);
        let count = layout.count_targets(&words);
        engine.load_batch(model.batch, layout, words)?;
        Ok(count)
    };
    let mut step = TrainStep::new(&model, layout, micro_batches).mask_targets(true);
    let (losses, norms) = (reference.floats("losses"), reference.floats("norms"));
    for (i, (expected, expected_norm)) in losses.into_iter().zip(norms).enumerate() {
        let settings = AdamW {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: i as u32 + 1,
            clip: 1.0,
            seed: 0,
        };
        let mut decide = |_: &mut dyn Engine, _: StepStats| Ok(Some(settings.into()));
        let (stats, _) = step.run(&mut engine, &mut ranks, &mut load, &mut decide).unwrap();
        let [loss, norm] = stats.loss_and_norm(&engine.read(stats.tensor).unwrap()).unwrap();
        let context = format!("{name}, {split:?}, step {i}");
        assert!((loss - expected).abs() <= 1e-5 * expected.max(1.0), "{context}: loss {loss}, expected {expected}");
        // Short conversations have small gradients of queries and keys, as short documents have.
        assert!(
            (norm - expected_norm).abs() <= 1e-3 * expected_norm,
            "{context}: norm {norm}, expected {expected_norm}"
        );
        if i == 0 {
            // The first moments are 1 - beta1 times the gradients that the update applies, which are clipped.
            let scale = (1.0 / expected_norm).min(1.0) * 0.1;
            for (_, names, instance) in architecture.all_tensors(&model.descriptor) {
                let moments = model.layout.of(model.training.unwrap().m, names.param, instance.layer);
                let all = engine.read(moments).unwrap();
                let full_name = architecture.full_name(names, instance);
                let elements = names.elements_of(&model.descriptor, instance.expert);
                let mut found: Vec<f32> = all[elements].iter().map(|x| x / scale).collect();
                if architecture.reverses_rotation && names.is_rotated() {
                    exchange_halves(&mut found, model.descriptor.head_size * model.descriptor.channels);
                }
                assert_close(&format!("{context}, {full_name}"), &found, &reference.floats(&full_name));
            }
        }
    }
}

#[test]
fn loss_on_packed_conversations() {
    for name in ["llama-tied", "llama-untied", "qwen3", "nanochat", "mistral"] {
        for (ranks, micro_batches) in [(1, 1), (1, 4), (2, 1), (2, 4)] {
            let split = Split { ranks, micro_batches };
            let groups = TcpGroup::in_process(ranks, Duration::from_mins(1)).unwrap();
            thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || train_on_conversations(name, split, group));
                }
            });
        }
    }
}

/// Returns the logits (B, T, V) of a model on `engine` for the inputs of its reference.
fn logits_on(engine: &mut dyn Engine, name: &str, reference: &Reference) -> Vec<f32> {
    let source = ModelSource::open(&folder(name)).unwrap();
    let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(LAYOUT.b, LAYOUT.t), engine);
    engine.allocate(&plan).unwrap();
    source.load(&model, engine).unwrap();
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    words.fill(0);
    words[LAYOUT.inputs()].copy_from_slice(&reference.ints("inputs"));
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch, LAYOUT, words).unwrap();
    model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
    let (v, vp) = (model.descriptor.vocab, model.descriptor.padded_vocab());
    let logits = model.logits(engine, 0..LAYOUT.b * LAYOUT.t).unwrap();
    engine.read(logits).unwrap().chunks(vp).flat_map(|row| &row[..v]).copied().collect()
}

/// Returns the root mean square of the differences between `found` and `expected`.
fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares: f64 = found.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (squares / found.len() as f64).sqrt()
}

#[test]
fn the_bf16_kernels_are_not_less_accurate_than_transformers_in_bf16() {
    for name in ["llama-bf16", "qwen2-bf16", "qwen3-bf16"] {
        let reference = reference(name, "reference.safetensors");
        let expected = reference.floats("logits");
        let of_transformers = error(&reference.floats("bf16_logits"), &expected);
        let in_f32 = error(&logits_on(&mut Cpu::new(), name, &reference), &expected);
        assert!(
            in_f32 < 1e-2 * of_transformers,
            "{name} in f32: error {in_f32}, of transformers in bf16 {of_transformers}"
        );
        for hopper in [false, true] {
            let mut engine = emulated(EmulatedGpu::new(hopper), Precision::Bf16, None, true);
            let found = error(&logits_on(&mut *engine, name, &reference), &expected);
            println!("{name}, sm_90a {hopper}: {found:.6}, of transformers {of_transformers:.6}");
            assert!(found <= of_transformers, "{name}, sm_90a {hopper}: {found}, of transformers {of_transformers}");
        }
    }
}

#[test]
fn new_ids_have_the_mean_of_the_rows_of_all_others() {
    let llm_c = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny.bin");
    for path in [folder("llama-tied"), folder("llama-untied"), llm_c] {
        let load = |added: usize| {
            let source = ModelSource::open(&path).unwrap();
            let vocab = source.descriptor().vocab + added;
            let (source, mut engine) = (source.with_vocab(vocab), Cpu::new());
            assert_eq!(source.descriptor().vocab, vocab);
            let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(1, 4), &mut engine);
            engine.allocate(&plan).unwrap();
            source.load(&model, &mut engine).unwrap();
            (model, engine)
        };
        let ((old, mut old_engine), (new, mut new_engine)) = (load(0), load(3));
        let (vocab, channels) = (old.descriptor.vocab, old.descriptor.channels);
        let mut grown = 0;
        for (param, layer) in old.layout.file_order() {
            let before = old_engine.read(old.layout.of(old.params, param, layer)).unwrap();
            let after = new_engine.read(new.layout.of(new.params, param, layer)).unwrap();
            if !param.has_vocab_rows() {
                assert_eq!(before, after, "{}", param.name());
                continue;
            }
            grown += 1;
            assert_eq!(before[..vocab * channels], after[..vocab * channels], "{}", param.name());
            let mean = |column: usize| {
                let sum: f64 =
                    before[..vocab * channels].iter().skip(column).step_by(channels).map(|&x| f64::from(x)).sum();
                (sum / vocab as f64) as f32
            };
            let mean: Vec<f32> = (0..channels).map(mean).collect();
            for row in after[vocab * channels..][..3 * channels].chunks(channels) {
                assert_eq!(row, mean, "{}", param.name());
            }
            assert!(after[(vocab + 3) * channels..].iter().all(|&padding| padding == 0.0), "{}", param.name());
        }
        assert_eq!(grown, if old.descriptor.tied { 1 } else { 2 });
        // A smaller vocabulary changes nothing.
        assert_eq!(ModelSource::open(&path).unwrap().with_vocab(5).descriptor(), old.descriptor);
    }
}
