//! The model of nanochat at 92d63d4 on the CPU engine against nanochat's own modules in double precision: logits, loss, every gradient, and
//! ten steps of its optimizer.
//! `scripts/nanochat_reference.py` computes the reference.

use distributed::Ranks;
use engine::cpu::Cpu;
use engine::ops::{AdamW, MuonAdditions};
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use interchange::architecture::exchange_halves;
use interchange::{ModelSource, export};
use model::descriptor::{WindowPattern, Windows};
use model::{
    Decoder, Descriptor, GroupSettings, Muon, Optimizer, Param, ParamGroup, Params, PlanOptions, Recompute, TrainStep,
    Unsharded, Update,
};
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;

const LAYOUT: BatchLayout = BatchLayout::new(2, 140);
const VOCAB: usize = 97;

/// A safetensors file.
struct File(Vec<u8>);

impl File {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/nanochat");
        Self(fs::read(folder.join(name)).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")).data().to_vec();
        data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        self.floats(name).into_iter().map(|bits| bits.to_bits().cast_signed()).collect()
    }

    /// Returns a parameter of this program from nanochat's tensors, whose names begin with `prefix`. nanochat rotates in the other
    /// direction, and has one vector for the factors of all layers.
    fn param(&self, prefix: &str, d: &Descriptor, param: Param, layer: usize) -> Vec<f32> {
        let of = |name: &str| self.floats(&format!("{prefix}{name}"));
        let in_layer = |name: &str| of(&format!("transformer.h.{layer}.{name}.weight"));
        let rotated = |name: &str| {
            let mut rows = in_layer(name);
            exchange_halves(&mut rows, d.head_size * d.channels);
            rows
        };
        match param {
            Param::Wte => of("transformer.wte.weight"),
            Param::LmHead => of("lm_head.weight"),
            Param::Qkvw => [rotated("attn.c_q"), rotated("attn.c_k"), in_layer("attn.c_v")].concat(),
            Param::Attprojw => in_layer("attn.c_proj"),
            Param::Fcw => in_layer("mlp.c_fc"),
            Param::Fcprojw => in_layer("mlp.c_proj"),
            Param::ValueTable => of(&format!("value_embeds.{layer}.weight")),
            Param::ValueGate => in_layer("attn.ve_gate"),
            Param::SmearGate => of("smear_gate.weight"),
            Param::SmearScale => of("smear_lambda"),
            Param::BackoutScale => of("backout_lambda"),
            Param::ResidualScale => vec![of("resid_lambdas")[layer]],
            Param::EmbeddingScale => vec![of("x0_lambdas")[layer]],
            other => panic!("nanochat has no {}", other.name()),
        }
    }
}

/// Opens the checkpoint, as nanochat saves it.
fn checkpoint() -> ModelSource {
    ModelSource::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/nanochat/model_000000.pt")).unwrap()
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

/// Asserts that values agree within 1e-5 of the largest expected value.
#[track_caller]
fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-5 * scale, "{name}: largest difference {worst}, largest value {scale}");
}

/// The model on an engine, with the batch of the reference.
struct Bench {
    engine: Cpu,
    model: Decoder,
    reference: File,
}

impl Bench {
    fn new(options: PlanOptions) -> Self {
        let (mut engine, reference, source) = (Cpu::new(), File::read("reference.safetensors"), checkpoint());
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
            let expected = reference.param("", &model.descriptor, param, layer);
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
        let expected = reference.param("final.", d, param, layer);
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
