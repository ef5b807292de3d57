//! Low-rank adapters on the CPU engine against PEFT in double precision: logits, every gradient, and losses and gradient norms of ten AdamW
//! steps; and PEFT's files. `scripts/peft_reference.py` computes the references.

use distributed::Ranks;
use engine::cpu::Cpu;
use engine::ops::AdamW;
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use interchange::ModelSource;
use interchange::architecture::Architecture;
use interchange::export;
use interchange::peft::AdapterFile;
use model::{Decoder, PlanOptions, Recompute, TrainStep, Unsharded};
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};

const LAYOUT: BatchLayout = BatchLayout::new(2, 24);
const NAMES: [&str; 4] = ["llama", "qwen3", "nanochat", "gpt2"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/peft").join(name)
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    let data = SafeTensors::deserialize(file).unwrap().tensor(name).unwrap().data().to_vec();
    data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn reference(name: &str) -> Vec<u8> {
    fs::read(folder(name).join("reference.safetensors")).unwrap()
}

/// Copies the batch of a reference to a model.
fn load_batch(model: &Decoder, engine: &mut Cpu, reference: &[u8]) {
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    let ints = |name| floats(reference, name).into_iter().map(|bits| bits.to_bits().cast_signed()).collect::<Vec<_>>();
    words[LAYOUT.inputs()].copy_from_slice(&ints("inputs"));
    words[LAYOUT.targets()].copy_from_slice(&ints("targets"));
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch.slice(0, LAYOUT.words()), LAYOUT, words).unwrap();
}

/// Asserts that values agree within 1e-5 of the largest expected value.
#[track_caller]
fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-5 * scale && scale > 0.0, "{name}: largest difference {worst}, largest value {scale}");
}

fn assert_logits(name: &str, model: &Decoder, engine: &mut Cpu, reference: &[u8]) {
    model.forward(engine, LAYOUT, &mut Unsharded).unwrap();
    let (d, logits) = (&model.descriptor, model.logits(engine, 0..LAYOUT.targets().len()).unwrap());
    let values = engine.read(logits).unwrap();
    let rows = values.chunks(d.padded_vocab()).flat_map(|row| &row[..d.vocab]);
    let found: Vec<f32> = rows.map(|&logit| d.softcapped(logit)).collect();
    assert_close(&format!("logits of {name}"), &found, &floats(reference, "logits"));
}

/// Writes the gradients of a reference as the adapters of a PEFT directory, so that [`AdapterFile::read`] converts them to our layout.
fn gradients_of(name: &str, reference: &[u8]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::copy(folder(name).join("adapter_config.json"), directory.path().join("adapter_config.json")).unwrap();
    let file = SafeTensors::deserialize(reference).unwrap();
    let gradients = file.iter().filter(|(name, _)| name.contains(".lora_"));
    safetensors::serialize_to_file(gradients, None, &directory.path().join("adapter_model.safetensors")).unwrap();
    directory
}

fn assert_gradients(name: &str, model: &Decoder, engine: &mut Cpu, architecture: &Architecture, reference: &[u8]) {
    let directory = gradients_of(name, reference);
    let expected = AdapterFile::open(directory.path()).unwrap();
    let (d, grads) = (&model.descriptor, model.training.unwrap().grads);
    for (param, layer) in model.layout.file_order() {
        let found = engine.read(model.layout.of(grads, param, layer)).unwrap();
        let expected = expected.read(d, architecture, param, layer).unwrap();
        assert_close(&format!("gradient of {} in layer {layer} of {name}", param.name()), &found, &expected);
    }
}

fn assert_agreement(name: &str, recompute: Recompute) {
    let (adapter, reference) = (AdapterFile::open(&folder(name)).unwrap(), reference(name));
    let (source, mut engine) = (adapter.open_base().unwrap(), Cpu::new());
    let architecture = source.architecture().unwrap();
    let options = PlanOptions { recompute, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
    let (model, plan) = Decoder::plan(adapter.descriptor(&source).unwrap(), options, &mut engine);
    engine.allocate(&plan).unwrap();
    adapter.load(&source, &model, &mut engine).unwrap();
    source.load(&model.frozen_model().unwrap(), &mut engine).unwrap();
    load_batch(&model, &mut engine, &reference);
    assert_logits(name, &model, &mut engine, &reference);
    let (mut step, ranks) = (TrainStep::new(&model, LAYOUT, 1), &mut Ranks::default());
    let (losses, norms) = (floats(&reference, "losses"), floats(&reference, "norms"));
    for (i, (loss, norm)) in losses.into_iter().zip(norms).enumerate() {
        step.gradients(&mut engine, ranks, &mut |_| Ok(LAYOUT.targets().len())).unwrap();
        step.measure(&mut engine, ranks).unwrap();
        if i == 0 {
            assert_gradients(name, &model, &mut engine, architecture, &reference);
        }
        let stats = engine.read(model.training.unwrap().stats).unwrap();
        let found = [stats[0] / LAYOUT.targets().len() as f32, stats[1]];
        assert!((found[0] - loss).abs() <= 1e-5 * loss, "{name}: loss of step {i}: {}, expected {loss}", found[0]);
        assert!((found[1] - norm).abs() <= 1e-4 * norm, "{name}: norm of step {i}: {}, expected {norm}", found[1]);
        let (learning_rate, weight_decay, clip, seed) = (1e-2, 0.1, 1.0, 0);
        let number = i as u32 + 1;
        let adamw = AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step: number, clip, seed };
        step.update(&mut engine, ranks, &adamw.into()).unwrap();
    }
}

#[test]
fn logits_gradients_and_losses_are_those_of_peft() {
    for name in NAMES {
        for recompute in Recompute::ALL {
            assert_agreement(name, recompute);
        }
    }
}

#[test]
fn logits_of_merged_models_are_those_of_peft() {
    for name in NAMES {
        let source = ModelSource::open(&folder(name)).unwrap();
        let mut engine = Cpu::new();
        let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(LAYOUT.b, LAYOUT.t), &mut engine);
        engine.allocate(&plan).unwrap();
        source.load(&model, &mut engine).unwrap();
        let reference = reference(name);
        load_batch(&model, &mut engine, &reference);
        assert_logits(name, &model, &mut engine, &reference);
    }
}

#[test]
fn directories_of_peft_survive() {
    let directory = tempfile::tempdir().unwrap();
    for name in NAMES {
        let out = directory.path().join(name);
        export::adapters(&ModelSource::open(&folder(name)).unwrap(), &out, DType::F32, false).unwrap();
        let [found, expected] = [&out, &folder(name)].map(|at| fs::read(at.join("adapter_model.safetensors")).unwrap());
        assert!(found == expected, "{name}");
        let again = AdapterFile::open(&out).unwrap();
        let base = AdapterFile::open(&folder(name)).unwrap().open_base().unwrap();
        assert_eq!(
            again.descriptor(&base).unwrap(),
            AdapterFile::open(&folder(name)).unwrap().descriptor(&base).unwrap()
        );
    }
}

#[test]
fn unsuitable_directories_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    let llama = folder("llama");
    let refusal = |edit: &dyn Fn(&Path)| {
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir(&copy).unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(llama.join(name), copy.join(name)).unwrap();
        }
        edit(&copy);
        let base = AdapterFile::open(&llama).unwrap().open_base().unwrap();
        let opened = AdapterFile::open(&copy).and_then(|file| file.descriptor(&base));
        format!("{:#}", opened.unwrap_err())
    };
    let set = |key: &'static str, value: serde_json::Value| {
        move |copy: &Path| {
            let path = copy.join("adapter_config.json");
            let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            json[key] = value.clone();
            fs::write(path, json.to_string()).unwrap();
        }
    };
    for (edit, expected) in [
        (set("peft_type", "IA3".into()), "peft_type: expected LORA, found IA3"),
        (set("use_dora", true.into()), "use_dora: expected false, found true"),
        (set("bias", "all".into()), "bias: expected \"none\" or null, found \"all\""),
        (
            set("modules_to_save", serde_json::json!(["lm_head"])),
            "modules_to_save: expected null or [], found [\"lm_head\"]",
        ),
        (set("r", 0.into()), "r: expected at least 1, found 0"),
        (set("r", 4.into()), "lora_A.weight: expected F32, BF16 or F16 [4, 48], found F32 [3, 48]"),
        (set("r", 4000.into()), "LoRA rank: expected at most"),
    ] {
        let message = refusal(&edit);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let message = refusal(&|copy| fs::write(copy.join("adapter_model.safetensors"), [0; 3]).unwrap());
    assert!(message.contains("not a safetensors file"), "{message}");
    let other = ModelSource::open(&folder("../transformers/qwen3")).unwrap();
    let message = format!("{:#}", AdapterFile::open(&llama).unwrap().descriptor(&other).unwrap_err());
    assert!(message.contains("the adapters belong to another model"), "{message}");
}
