//! Low-rank adapters on the CPU engine against PEFT in double precision: losses and gradient norm of ten AdamW steps; and PEFT's files.
//! `scripts/peft_reference.py` makes the files and prints the numbers.

use distributed::Ranks;
use engine::cpu::Cpu;
use engine::ops::AdamW;
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use interchange::ModelSource;
use interchange::export;
use interchange::peft::AdapterFile;
use model::{Decoder, PlanOptions, Recompute, TrainStep, Unsharded};
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};

const LAYOUT: BatchLayout = BatchLayout::new(2, 24);
const NAMES: [&str; 2] = ["llama", "gpt2"];

/// The first and the last loss of ten steps, and the first gradient norm, of the Llama.
const FIRST_LOSS: f32 = 4.763_277;
const LAST_LOSS: f32 = 3.228_79;
const FIRST_NORM: f32 = 1.029_051_4;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/peft").join(name)
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    let data = SafeTensors::deserialize(file).unwrap().tensor(name).unwrap().data().to_vec();
    data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Copies the batch of all references to a model.
fn load_batch(model: &Decoder, engine: &mut Cpu) {
    let reference = fs::read(folder("../transformers/llama-tied/reference.safetensors")).unwrap();
    let mut words = engine.host_buffer(LAYOUT.words()).unwrap();
    let ints = |name| floats(&reference, name).into_iter().map(|bits| bits.to_bits().cast_signed()).collect::<Vec<_>>();
    words[LAYOUT.inputs()].copy_from_slice(&ints("inputs"));
    words[LAYOUT.targets()].copy_from_slice(&ints("targets"));
    LAYOUT.sort(&mut words);
    engine.load_batch(model.batch.slice(0, LAYOUT.words()), LAYOUT, words).unwrap();
}

#[track_caller]
fn assert_near(name: &str, found: f32, expected: f32, tolerance: f32) {
    assert!((found - expected).abs() <= tolerance * expected, "{name}: {found}, expected {expected}");
}

#[test]
fn losses_are_those_of_peft() {
    let adapter = AdapterFile::open(&folder("llama")).unwrap();
    for recompute in Recompute::ALL {
        let source = adapter.open_base().unwrap();
        let mut engine = Cpu::new();
        let options = PlanOptions { recompute, ..PlanOptions::training(LAYOUT.b, LAYOUT.t) };
        let (model, plan) = Decoder::plan(adapter.descriptor(&source).unwrap(), options, &mut engine);
        engine.allocate(&plan).unwrap();
        adapter.load(&source, &model, &mut engine).unwrap();
        source.load(&model.frozen_model().unwrap(), &mut engine).unwrap();
        load_batch(&model, &mut engine);
        let (mut step, ranks) = (TrainStep::new(&model, LAYOUT, 1), &mut Ranks::default());
        let mut stats = Vec::new();
        for number in 1..=10 {
            step.gradients(&mut engine, ranks, &mut |_| Ok(LAYOUT.targets().len())).unwrap();
            step.measure(&mut engine, ranks).unwrap();
            stats.push(engine.read(model.training.unwrap().stats).unwrap());
            let (learning_rate, weight_decay, clip, seed) = (1e-2, 0.1, 1.0, 0);
            let adamw =
                AdamW { learning_rate, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step: number, clip, seed };
            step.update(&mut engine, ranks, &adamw.into()).unwrap();
        }
        let tokens = LAYOUT.targets().len() as f32;
        assert_near("first loss", stats[0][0] / tokens, FIRST_LOSS, 1e-6);
        assert_near("norm", stats[0][1], FIRST_NORM, 1e-5);
        assert_near("last loss", stats[9][0] / tokens, LAST_LOSS, 1e-5);
    }
}

#[test]
fn the_loss_of_a_merged_model_is_that_of_peft() {
    let source = ModelSource::open(&folder("llama")).unwrap();
    let mut engine = Cpu::new();
    let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(LAYOUT.b, LAYOUT.t), &mut engine);
    engine.allocate(&plan).unwrap();
    source.load(&model, &mut engine).unwrap();
    load_batch(&model, &mut engine);
    engine.zero(model.losses).unwrap();
    model.forward(&mut engine, LAYOUT, &mut Unsharded).unwrap();
    model.loss(&mut engine, LAYOUT, None).unwrap();
    let losses = engine.read(model.losses).unwrap();
    assert_near("loss", losses.iter().sum::<f32>() / losses.len() as f32, FIRST_LOSS, 1e-6);
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
