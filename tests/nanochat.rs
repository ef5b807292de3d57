//! The model of nanochat at 92d63d4 on the CPU engine against nanochat's own modules in double precision: logits, loss, every gradient, and
//! ten steps of its optimizer.
//! `scripts/nanochat_reference.py` computes the reference.

use crate::reference::{Reference, assert_close};
use distributed::Ranks;
use engine::cpu::Cpu;
use engine::ops::{AdamW, MuonAdditions};
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use interchange::architecture::{NANOCHAT_FULL, TensorNames, exchange_halves, of_layer};
use interchange::{ModelSource, export};
use model::descriptor::{WindowPattern, Windows};
use model::{
    Decoder, Descriptor, GroupSettings, Muon, Optimizer, Param, ParamGroup, Params, PlanOptions, Recompute, TrainStep,
    Unsharded, Update,
};
use std::fs;
use std::path::{Path, PathBuf};

const LAYOUT: BatchLayout = BatchLayout::new(2, 140);
const VOCAB: usize = 97;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/nanochat")
}

/// Returns a parameter of this program from nanochat's tensors, whose names begin with `prefix`. nanochat rotates in the other direction,
/// and has one vector for the factors of all layers.
fn expected(reference: &Reference, prefix: &str, d: &Descriptor, param: Param, layer: usize) -> Vec<f32> {
    let of_part = |(_, names): (usize, &TensorNames)| match param {
        Param::ResidualScale => vec![reference.floats(&format!("{prefix}resid_lambdas"))[layer]],
        Param::EmbeddingScale => vec![reference.floats(&format!("{prefix}x0_lambdas"))[layer]],
        _ => {
            let mut values = reference.floats(&format!("{prefix}{}", of_layer(names.hugging_face, layer)));
            if names.is_rotated() {
                exchange_halves(&mut values, d.head_size * d.channels);
            }
            values
        }
    };
    NANOCHAT_FULL.parts_of(param).flat_map(of_part).collect()
}

/// Opens the checkpoint, as nanochat saves it.
fn checkpoint() -> ModelSource {
    ModelSource::open(&folder().join("model_000000.pt")).unwrap()
}

#[test]
fn the_shape_of_a_checkpoint_is_that_of_its_description() {
    let d4: Descriptor = "nanochat:d4".parse().unwrap();
    let windows = Some(Windows { size: 129, pattern: "SSSL".parse::<WindowPattern>().unwrap() });
    let d = Descriptor { heads: 2, kv_heads: 1, head_size: 24, channels: 48, mlp_channels: 192, windows, ..d4 };
    assert_eq!(checkpoint().descriptor(), Descriptor { max_seq_len: LAYOUT.t, vocab: VOCAB, ..d });
}

#[test]
fn an_exported_checkpoint_is_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let [out, again] = ["out", "again"].map(|name| directory.path().join(name));
    export::hugging_face(&checkpoint(), None, &out, DType::F32, false).unwrap();
    let exported = ModelSource::open(&out).unwrap();
    assert_eq!(exported.descriptor(), checkpoint().descriptor());
    for (param, layer) in Params::new(exported.descriptor()).file_order() {
        assert!(
            exported.read(param, layer, DType::F32).unwrap() == checkpoint().read(param, layer, DType::F32).unwrap()
        );
    }
    assert!(out.join("modeling_nanochat_full.py").is_file());
    // An export may be replaced, and one of an export has the same bytes.
    export::hugging_face(&exported, None, &again, DType::F32, false).unwrap();
    export::hugging_face(&exported, None, &again, DType::F32, true).unwrap();
    let weights = |out: &Path| fs::read(out.join("model.safetensors")).unwrap();
    assert!(weights(&out) == weights(&again));
    let message = format!("{:#}", export::hugging_face(&exported, None, &out, DType::F32, false).unwrap_err());
    assert!(message.contains("found an export; add --overwrite"), "{message}");
}

/// The model on an engine, with the batch of the reference.
struct Bench {
    engine: Cpu,
    model: Decoder,
    reference: Reference,
}

impl Bench {
    fn new(options: PlanOptions) -> Self {
        let (mut engine, reference, source) =
            (Cpu::new(), Reference::read(&folder().join("reference.safetensors")), checkpoint());
        let (model, plan) = Decoder::plan(source.descriptor(), options, &mut engine);
        engine.allocate(&plan).unwrap();
        source.load(&model, &mut engine).unwrap();
        let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
        words[LAYOUT.inputs()].copy_from_slice(&reference.ints("inputs"));
        words[LAYOUT.targets()].copy_from_slice(&reference.ints("targets"));
        LAYOUT.sort(&mut words);
        engine.load_batch(model.batch, LAYOUT, words).unwrap();
        Self { engine, model, reference }
    }

    fn logits(&mut self) {
        let Self { engine, model, reference } = self;
        model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
        let (rows, vp) = (LAYOUT.b * LAYOUT.t, model.descriptor.padded_vocab());
        let logits = model.logits(engine, 0..rows).unwrap();
        let values = engine.read(logits).unwrap();
        let found = values.chunks(vp).flat_map(|row| row[..VOCAB].iter().map(|&x| model.descriptor.softcapped(x)));
        assert_close("logits", &found.collect::<Vec<_>>(), &reference.floats("logits"));
    }

    fn gradients(&mut self) {
        let Self { engine, model, reference } = self;
        let grads = model.training.unwrap().grads;
        for (param, layer) in model.layout.file_order() {
            let found = engine.read(model.layout.of(grads, param, layer)).unwrap();
            let expected = expected(reference, "", &model.descriptor, param, layer);
            assert_close(&format!("gradient of {} in layer {layer}", param.name()), &found, &expected);
        }
    }
}

#[test]
fn logits_loss_and_gradients() {
    for recompute in Recompute::ALL {
        let mut bench = Bench::new(PlanOptions { recompute, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) });
        bench.logits();
        let (mut step, targets) = (TrainStep::new(&bench.model, LAYOUT, 1), LAYOUT.targets().len());
        let ranks = &mut Ranks::default();
        step.gradients(&mut bench.engine, ranks, &mut |_| Ok(targets)).unwrap();
        step.measure(&mut bench.engine, ranks).unwrap();
        bench.gradients();
        let stats = bench.engine.read(bench.model.training.unwrap().stats).unwrap();
        let (found, expected) = (stats[0] / targets as f32, bench.reference.floats("losses")[0]);
        assert!((found - expected).abs() <= 1e-5, "{recompute:?}: loss {found}, expected {expected}");
    }
}

/// The settings of a step of the reference, from the factor of the learning rates, Muon's momentum and its weight decay.
fn update(step: u32, [rate, momentum, weight_decay]: [f32; 3]) -> Update {
    // nanochat's rates are those of 768 channels.
    let of_channels = (48f32 / 768.0).powf(-0.5);
    let (learning_rate, beta1, beta2, eps) = (0.0, 0.9, 0.95, 1e-8);
    let adamw = AdamW { learning_rate, beta1, beta2, eps, weight_decay, step, clip: f32::INFINITY, seed: 0 };
    let mut update = Update::from(adamw);
    for (group, lr, [beta1, beta2], weight_decay) in [
        (ParamGroup::Head, 0.004 * of_channels, [0.8, 0.96], 0.01),
        (ParamGroup::Embeddings, 0.1 * of_channels, [0.8, 0.995], 0.001),
        (ParamGroup::ValueEmbeddings, 0.1 * of_channels * 0.5, [0.8, 0.995], 0.01),
        (ParamGroup::ResidualScales, 0.1 * 0.01, [0.8, 0.95], 0.05),
        (ParamGroup::EmbeddingScales, 0.1, [0.96, 0.95], 0.0),
        (ParamGroup::Smear, 0.2, [0.8, 0.95], 0.0),
    ] {
        let settings = GroupSettings { learning_rate: rate * lr, beta1, beta2, eps: 1e-10, weight_decay };
        update.groups[group as usize] = Some(settings);
    }
    let additions = MuonAdditions { equilibrate: true, renormalize: true, variance: true, cautious_decay: true };
    update.muon = Some(Muon { learning_rate: rate * 0.02, momentum, weight_decay, additions, ..Muon::default() });
    update
}

#[test]
fn ten_steps_of_the_optimizer() {
    let options = PlanOptions { optimizer: Optimizer::Muon, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    let Bench { mut engine, model, reference } = Bench::new(options);
    let (mut step, targets) = (TrainStep::new(&model, LAYOUT, 1), LAYOUT.targets().len());
    let schedules = reference.floats("schedules");
    for (i, expected) in reference.floats("losses").into_iter().enumerate() {
        let ranks = &mut Ranks::default();
        step.gradients(&mut engine, ranks, &mut |_| Ok(targets)).unwrap();
        step.measure(&mut engine, ranks).unwrap();
        let found = engine.read(model.training.unwrap().stats).unwrap()[0] / targets as f32;
        assert!((found - expected).abs() <= 1e-5, "step {i}: loss {found}, expected {expected}");
        let settings = update(i as u32 + 1, schedules[3 * i..][..3].try_into().unwrap());
        step.update(&mut engine, ranks, &settings).unwrap();
    }
    let d = &model.descriptor;
    for (param, layer) in model.layout.file_order() {
        let found = engine.read(model.layout.of(model.params, param, layer)).unwrap();
        let expected = expected(&reference, "final.", d, param, layer);
        let used = if param.has_vocab_rows() { VOCAB * param.shape(d).1 } else { found.len() };
        let differences = found[..used].iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let squares = expected[..used].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let error = (differences / squares).sqrt();
        // Muon amplifies rounding errors of small singular values up to a thousand times.
        assert!(error <= 2e-5, "{} in layer {layer}: relative error {error}", param.name());
    }
}

#[test]
fn logits_without_the_activations_of_training() {
    Bench::new(PlanOptions::inference(LAYOUT.b, LAYOUT.t)).logits();
}
