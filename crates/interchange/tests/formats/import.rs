//! Reading Hugging Face directories: values on every engine, and every kind of invalid directory.

use crate::common::{Tensor, Tensors, config, contents, directory, directory_of, expected, file, open, qwen2, tensors};
use engine::cpu::Cpu;
use engine::cuda::EmulatedGpu;
use engine::open::Precision;
use engine::tensor::DType;
use engine::{Engine, cuda};
use half::bf16;
use interchange::ModelSource;
use model::{Decoder, MasterWeights, Param, PlanOptions};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Returns the error of opening a path.
pub fn error(path: &Path) -> String {
    format!("{:#}", ModelSource::open(path).unwrap_err())
}

/// Asserts that an engine holds the values of a directory after loading it, and zeros in the rows that pad the vocabulary.
fn assert_loaded(path: &Path, tensors: &Tensors, engine: &mut dyn Engine, options: PlanOptions) {
    let source = open(path).unwrap();
    let (model, plan) = Decoder::plan(source.descriptor(), options, engine);
    engine.allocate(&plan).unwrap();
    source.load(&model, engine).unwrap();
    let master = model.training.and_then(|training| training.master.tensor());
    let copies = [Some((model.params, engine.dtype())), master.map(|master| (master, DType::F32))];
    for (block, dtype) in copies.into_iter().flatten() {
        for (param, layer) in model.layout.file_order() {
            let mut wanted = expected(tensors, param, layer);
            if dtype == DType::Bf16 {
                wanted = wanted.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect();
            }
            wanted.resize(param.len(&model.descriptor), 0.0);
            let values = engine.read(model.layout.of(block, param, layer)).unwrap();
            assert_eq!(values, wanted, "{} of layer {layer}, {}", param.name(), dtype.name());
        }
    }
    assert_eq!(master.is_some(), engine.dtype() == DType::Bf16 && options.master_weights == MasterWeights::F32);
}

#[test]
fn every_element_type_is_loaded_into_f32_and_bf16_engines() {
    for (dtype, storage) in [(Dtype::F32, DType::F32), (Dtype::BF16, DType::Bf16), (Dtype::F16, DType::F32)] {
        let tensors = tensors(dtype);
        let directory = directory(&tensors);
        assert_eq!(open(directory.path()).unwrap().dtype(), storage);
        assert_loaded(directory.path(), &tensors, &mut Cpu::new(), PlanOptions::inference(1, 8));
        let mut gpu = cuda::emulated(EmulatedGpu::new(false), Precision::Bf16, None, false);
        // Master weights receive the values before rounding.
        let options = PlanOptions { master_weights: MasterWeights::F32, ..PlanOptions::training(1, 8) };
        assert_loaded(directory.path(), &tensors, &mut *gpu, options);
    }
}

#[test]
fn types_may_differ_between_tensors_and_names_may_lack_the_prefix() {
    let mut mixed: Tensors = tensors(Dtype::BF16);
    mixed.get_mut("transformer.h.1.ln_1.weight").unwrap().dtype = Dtype::F32;
    let mut stored = mixed.clone();
    let bare = stored.remove("transformer.h.0.mlp.c_fc.weight").unwrap();
    stored.insert("h.0.mlp.c_fc.weight".into(), bare);
    // Buffers of old versions.
    stored.insert("h.1.attn.bias".into(), Tensor { shape: vec![1, 1, 4, 4], values: vec![1.0; 16], dtype: Dtype::U8 });
    stored.insert(
        "transformer.h.0.attn.masked_bias".into(),
        Tensor { shape: vec![], values: vec![-1e4], dtype: Dtype::F32 },
    );
    // A copy of the embedding, with a configuration that does not tie them.
    stored.insert("lm_head.weight".into(), stored["transformer.wte.weight"].clone());
    let directory = directory(&stored);
    let mut untied = config();
    untied["tie_word_embeddings"] = false.into();
    fs::write(directory.path().join("config.json"), untied.to_string()).unwrap();
    let source = open(directory.path()).unwrap();
    assert_eq!((source.dtype(), source.descriptor()), (DType::F32, crate::common::descriptor()));
    assert_loaded(directory.path(), &mixed, &mut Cpu::new(), PlanOptions::inference(1, 8));
}

#[test]
fn non_finite_values_are_errors_that_name_the_tensor() {
    for (dtype, value, found) in [
        (Dtype::F32, f32::NAN, "1 NaN"),
        (Dtype::BF16, f32::INFINITY, "1 infinite"),
        (Dtype::F16, f32::NEG_INFINITY, "1 infinite"),
        (Dtype::F16, f32::NAN, "1 NaN"),
    ] {
        let mut damaged = tensors(dtype);
        damaged.get_mut("transformer.h.1.attn.c_proj.weight").unwrap().values[7] = value;
        let directory = directory(&damaged);
        let source = open(directory.path()).unwrap();
        let mut cpu = Cpu::new();
        let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(1, 8), &mut cpu);
        cpu.allocate(&plan).unwrap();
        let read = source.read(Param::Attprojw, 1, DType::Bf16).unwrap_err();
        source.read(Param::Attprojw, 0, DType::Bf16).unwrap();
        let loaded = source.load(&model, &mut cpu).unwrap_err();
        let expected = format!("transformer.h.1.attn.c_proj.weight: expected finite values, found {found} values");
        for message in [read, loaded].map(|error| format!("{error:#}")) {
            assert!(message.contains(&expected) && message.contains(directory.path().to_str().unwrap()), "{message}");
        }
    }
}

/// Rounding to bf16 would make them infinite.
#[test]
fn numbers_above_the_largest_of_bf16_are_errors_when_they_are_rounded() {
    let mut large = tensors(Dtype::F32);
    large.get_mut("transformer.h.1.attn.c_proj.weight").unwrap().values[7] = f32::MAX;
    let directory = directory(&large);
    let source = open(directory.path()).unwrap();
    source.read(Param::Attprojw, 1, DType::F32).unwrap();
    let message = format!("{:#}", source.read(Param::Attprojw, 1, DType::Bf16).unwrap_err());
    assert!(message.contains("rounded to bf16; use fp32: ") && message.contains("found 1 infinite"), "{message}");
}

/// Several tensors of these files become one of the engine.
#[test]
fn a_part_of_a_tensor_that_is_not_finite_is_named() {
    for name in ["self_attn.k_proj.weight", "self_attn.v_proj.bias", "mlp.gate_proj.weight"] {
        let name = format!("model.layers.0.{name}");
        let (config, mut damaged) = crate::common::qwen2();
        damaged.get_mut(&name).unwrap().values[3] = f32::NAN;
        let directory = crate::common::directory_of(&config, &damaged);
        let source = open(directory.path()).unwrap();
        let mut cpu = Cpu::new();
        let (model, plan) = Decoder::plan(source.descriptor(), PlanOptions::inference(1, 8), &mut cpu);
        cpu.allocate(&plan).unwrap();
        let message = format!("{:#}", source.load(&model, &mut cpu).unwrap_err());
        assert!(message.contains(&format!("{name}: expected finite values, found 1 NaN values")), "{message}");
    }
}

#[test]
fn a_file_without_the_head_needs_tied_embeddings() {
    let directory = directory(&tensors(Dtype::F32));
    let mut untied = config();
    untied["tie_word_embeddings"] = false.into();
    fs::write(directory.path().join("config.json"), untied.to_string()).unwrap();
    let message = error(directory.path());
    let expected =
        "config.json: tie_word_embeddings: expected true, because the files have no lm_head.weight, found false";
    assert!(message.contains(expected), "{message}");
}

/// Splits tensors into two files with an index.
fn sharded(tensors: &Tensors) -> (tempfile::TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config().to_string()).unwrap();
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let mut parts: [Tensors; 2] = Default::default();
    let mut map = serde_json::Map::new();
    for (i, (name, tensor)) in tensors.iter().enumerate() {
        parts[i % 2].insert(name.clone(), tensor.clone());
        map.insert(name.clone(), names[i % 2].into());
    }
    for (part, name) in parts.iter().zip(names) {
        fs::write(dir.path().join(name), file(part)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    (dir, index)
}

#[test]
fn several_files_with_an_index_are_read() {
    let tensors = tensors(Dtype::F32);
    let (dir, _) = sharded(&tensors);
    assert_loaded(dir.path(), &tensors, &mut Cpu::new(), PlanOptions::inference(1, 8));
}

#[test]
fn invalid_indexes_name_the_file() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 6] = [
        (|index| *index = json!([]), "model.safetensors.index.json: not an index"),
        (|index| index["weight_map"] = json!({}), "expected at least one tensor in weight_map, found none"),
        (
            |index| index["weight_map"]["transformer.wte.weight"] = "../model.safetensors".into(),
            "expected file names in weight_map, found the path ../model.safetensors",
        ),
        (
            |index| index["weight_map"]["transformer.wte.weight"] = "other.safetensors".into(),
            "expected tensor transformer.wte.weight in model-00002-of-00002.safetensors, which contains it, found other.safetensors",
        ),
        (
            |index| drop(index["weight_map"].as_object_mut().unwrap().remove("transformer.wte.weight")),
            "expected tensor transformer.wte.weight in model-00002-of-00002.safetensors, which contains it, found none",
        ),
        (
            |index| index["weight_map"]["more"] = "model-00001-of-00002.safetensors".into(),
            "model-00001-of-00002.safetensors: expected tensor more, which model.safetensors.index.json lists, found none",
        ),
    ];
    let tensors = tensors(Dtype::F32);
    for (change, expected) in changes {
        let (dir, mut index) = sharded(&tensors);
        change(&mut index);
        fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        let message = error(dir.path());
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let (dir, _) = sharded(&tensors);
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert!(error(dir.path()).contains("model-00002-of-00002.safetensors: No such file"));
}

#[test]
fn invalid_tensors_are_named_with_their_file() {
    type Change = fn(&mut Tensors);
    let changes: [(Change, &str); 9] = [
        (
            |t| drop(t.remove("transformer.h.1.ln_2.bias")),
            "model.safetensors: tensor transformer.h.1.ln_2.bias: expected [6], found none; check that config.json belongs",
        ),
        (
            |t| t.get_mut("transformer.wpe.weight").unwrap().shape = vec![6, 10],
            "model.safetensors: tensor transformer.wpe.weight: expected F32, BF16 or F16 [10, 6], found F32 [6, 10]; check that config.json",
        ),
        (
            // The transposed shape, as PyTorch's Linear stores it.
            |t| t.get_mut("transformer.h.0.mlp.c_fc.weight").unwrap().shape = vec![24, 6],
            "tensor transformer.h.0.mlp.c_fc.weight: expected F32, BF16 or F16 [6, 24], found F32 [24, 6]",
        ),
        (
            |t| t.get_mut("transformer.ln_f.bias").unwrap().shape = vec![1, 6],
            "tensor transformer.ln_f.bias: expected F32, BF16 or F16 [6], found F32 [1, 6]",
        ),
        (
            |t| t.get_mut("transformer.ln_f.bias").unwrap().dtype = Dtype::U8,
            "tensor transformer.ln_f.bias: expected F32, BF16 or F16 [6], found U8 [6]; llm-rs reads no other type",
        ),
        (
            |t| drop(t.insert("transformer.h.2.ln_1.weight".into(), t["transformer.h.1.ln_1.weight"].clone())),
            "model.safetensors: tensor transformer.h.2.ln_1.weight: expected only the tensors of GPT2LMHeadModel with 2 layers",
        ),
        (
            |t| drop(t.insert("wpe.weight".into(), t["transformer.wpe.weight"].clone())),
            "expected one tensor wpe.weight, found wpe.weight and, in ",
        ),
        (
            |t| drop(t.insert("lm_head.weight".into(), t["transformer.wpe.weight"].clone())),
            "tensor lm_head.weight: expected F32 [33, 6] as transformer.wte.weight, found F32 [10, 6]; llm-rs supports only tied",
        ),
        (
            |t| {
                let mut head = t["transformer.wte.weight"].clone();
                *head.values.last_mut().unwrap() += 1.0;
                t.insert("lm_head.weight".into(), head);
            },
            "tensor lm_head.weight: expected the values of transformer.wte.weight, found others; llm-rs supports only tied",
        ),
    ];
    for (change, expected) in changes {
        let mut tensors = tensors(Dtype::F32);
        change(&mut tensors);
        let message = error(directory(&tensors).path());
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

type DecoderChange = fn(&mut Value, &mut Tensors);

fn renamed(tensors: &mut Tensors, from: &str, to: &str) {
    let tensor = tensors.remove(from).unwrap();
    tensors.insert(to.into(), tensor);
}

/// A configuration and weights that do not belong together, or that llm-rs does not support: what is changed, and the error.
const UNREADABLE: [(DecoderChange, &str); 25] = [
    (
        |c, _| c["num_hidden_layers"] = 2.into(),
        "model.safetensors: tensor model.layers.1.input_layernorm.weight: expected [32], found none; check that config.json",
    ),
    (
        |c, _| c["hidden_size"] = 64.into(),
        "tensor model.embed_tokens.weight: expected F32, BF16 or F16 [97, 64], found F32 [97, 32]; check that config.json",
    ),
    (
        |c, _| c["num_key_value_heads"] = 4.into(),
        "self_attn.k_proj.weight: expected F32, BF16 or F16 [32, 32], found F32 [16, 32]",
    ),
    (
        |c, _| c["num_key_value_heads"] = 3.into(),
        "config.json: not a supported shape: key-value heads: expected a divisor of the 4",
    ),
    (
        |c, _| c["head_dim"] = 16.into(),
        "self_attn.q_proj.weight: expected F32, BF16 or F16 [64, 32], found F32 [32, 32]",
    ),
    (
        |c, _| c["intermediate_size"] = 48.into(),
        "mlp.up_proj.weight: expected F32, BF16 or F16 [48, 32], found F32 [40, 32]",
    ),
    (
        |c, _| c["vocab_size"] = 96.into(),
        "model.embed_tokens.weight: expected F32, BF16 or F16 [96, 32], found F32 [97, 32]",
    ),
    (
        |c, _| c["tie_word_embeddings"] = false.into(),
        "tensor lm_head.weight: expected [97, 32], found none; check that config.json belongs to these weights, and whether tie",
    ),
    // Llama has no biases, Qwen3 has norms of queries and keys.
    (
        |c, _| c["model_type"] = "llama".into(),
        "tensor model.layers.0.self_attn.k_proj.bias: expected only the tensors of LlamaForCausalLM with 1 layers",
    ),
    (
        |c, _| (c["model_type"], c["head_dim"]) = ("qwen3".into(), 8.into()),
        "tensor model.layers.0.self_attn.q_norm.weight: expected [8], found none",
    ),
    (
        |c, _| c["model_type"] = "qwen2_moe".into(),
        "model_type: expected gpt2 or llama or mistral or ministral or qwen2 or qwen3 or qwen3_moe or olmoe or nanochat or nanochat_full, found qwen2_moe",
    ),
    (|c, _| c["model_type"] = "mixtral".into(), "found mixtral; llm-rs supports no other architecture"),
    (
        |c, _| c["layer_types"] = json!(["sliding_attention"]),
        "sliding_window: expected the size of the windows in layer_types, found null; add it, with use_sliding_window",
    ),
    (
        |c, _| c["layer_types"] = json!(["linear_attention"]),
        r#"layer_types: expected full_attention or sliding_attention, found "linear_attention""#,
    ),
    (
        |c, _| c["layer_types"] = json!(["full_attention", "full_attention"]),
        "layer_types: expected one for each of the 1 layers, found 2",
    ),
    (
        |c, _| c["rope_scaling"] = json!({"type": "dynamic", "factor": 4.0}),
        "rope_scaling: rope_type: expected default, llama3, yarn or linear, found dynamic",
    ),
    (
        |c, _| c["rope_scaling"] = json!({"type": "mrope", "mrope_section": [2, 1, 1]}),
        "rope_scaling: mrope_section: expected none, found [2,1,1]",
    ),
    (
        |c, _| c["hidden_act"] = "gelu".into(),
        "hidden_act: expected silu or swish or gelu_pytorch_tanh or gelu_new, found gelu",
    ),
    (|c, _| c["quantization_config"] = json!({"bits": 4}), "quantization_config: expected null"),
    (
        |_, t| renamed(t, "model.norm.weight", "model.final_norm.weight"),
        "model.safetensors: tensor model.norm.weight: expected [32], found none",
    ),
    (
        |_, t| drop(t.insert("model.layers.0.mlp.router.weight".into(), t["model.norm.weight"].clone())),
        "tensor model.layers.0.mlp.router.weight: expected only the tensors of Qwen2ForCausalLM with 1 layers",
    ),
    (
        |_, t| t.get_mut("model.layers.0.self_attn.k_proj.bias").unwrap().dtype = Dtype::U8,
        "tensor model.layers.0.self_attn.k_proj.bias: expected F32, BF16 or F16 [16], found U8 [16]; llm-rs reads no other",
    ),
    (
        // The transposed matrix of GPT-2's Conv1D.
        |_, t| t.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().shape = vec![40, 32],
        "tensor model.layers.0.mlp.down_proj.weight: expected F32, BF16 or F16 [32, 40], found F32 [40, 32]",
    ),
    (
        |_, t| drop(t.insert("lm_head.weight".into(), t["model.layers.0.mlp.up_proj.weight"].clone())),
        "tensor lm_head.weight: expected F32 [97, 32] as model.embed_tokens.weight, found F32 [40, 32]; if the head is not tied",
    ),
    (|c, _| drop(c.as_object_mut().unwrap().remove("hidden_size")), "hidden_size: expected a whole number, found none"),
];

#[test]
fn decoders_that_cannot_be_read_are_refused_with_a_reason() {
    for (change, expected) in UNREADABLE {
        let (mut config, mut tensors) = qwen2();
        change(&mut config, &mut tensors);
        let directory = directory_of(&config, &tensors);
        let message = error(directory.path());
        assert!(message.contains(expected), "{expected}: {message}");
        assert!(message.contains("config.json") || message.contains("model.safetensors"), "{message}");
    }
    let (config, tensors) = qwen2();
    open(directory_of(&config, &tensors).path()).unwrap();
}

#[test]
fn errors_for_other_paths_say_what_is_expected() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    assert!(error(dir.path()).contains("expected config.json (a Hugging Face directory) or a complete checkpoint"));
    fs::write(path("config.json"), config().to_string()).unwrap();
    assert!(error(dir.path()).contains("expected model.safetensors or model.safetensors.index.json, found neither"));
    fs::write(path("pytorch_model.bin"), "").unwrap();
    assert!(error(dir.path()).contains("found only pytorch_model.bin; load it with transformers"));
    fs::write(path("model.safetensors"), "").unwrap();
    assert!(error(dir.path()).contains("model.safetensors: not a safetensors file"));
    assert!(error(&path("model.safetensors")).contains("model.safetensors: not a safetensors file"));
    fs::write(path("model.gguf"), "").unwrap();
    assert!(error(&path("model.gguf")).contains("found a GGUF file, which llm-rs only writes"));
    assert!(error(&path("missing.bin")).contains("cannot open model file"));
    assert!(error(&path("missing")).contains("cannot open model file"));
    for name in ["gpt2", "d12", "gpt3:c768"] {
        let message = error(Path::new(name));
        assert!(message.contains(&format!("{name}: expected a model file (.bin) or a directory")), "{message}");
    }
    fs::write(path("other.bin"), "x").unwrap();
    assert!(error(&path("other.bin")).contains("is not a model file"));
}

#[test]
fn the_links_of_a_hugging_face_cache_are_followed() {
    let tensors = tensors(Dtype::BF16);
    let source = directory(&tensors);
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/1a2b"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(&blobs).unwrap();
    for (i, name) in ["config.json", "model.safetensors"].iter().enumerate() {
        fs::copy(source.path().join(name), blobs.join(i.to_string())).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), snapshot.join(name)).unwrap();
    }
    assert_loaded(&snapshot, &tensors, &mut Cpu::new(), PlanOptions::inference(1, 8));
    assert!(error(cache.path()).ends_with("found neither; pass one of the directories in snapshots/"));
    // An incomplete download has links without a file.
    fs::remove_file(blobs.join("1")).unwrap();
    assert!(error(&snapshot).contains("expected model.safetensors or model.safetensors.index.json, found neither"));
}

#[test]
fn a_file_of_a_directory_stands_for_it() {
    let tensors = tensors(Dtype::BF16);
    let directory = directory(&tensors);
    let file = directory.path().join("model.safetensors");
    assert_loaded(&file, &tensors, &mut Cpu::new(), PlanOptions::inference(1, 8));
    let other = directory.path().join("other.safetensors");
    fs::copy(&file, &other).unwrap();
    assert!(error(&other).contains("found a file that it does not use; pass the directory"));
}

#[test]
fn the_directory_of_a_run_means_its_newest_complete_checkpoint() {
    let directory = directory(&tensors(Dtype::F32));
    let run = tempfile::tempdir().unwrap();
    let file = |step: usize| run.path().join(checkpoint::directory::model_name(step));
    let source = open(directory.path()).unwrap();
    for step in [2, 5, 9] {
        interchange::export::llmc(&source, &file(step), DType::F32, false).unwrap();
    }
    for step in [2, 5] {
        fs::write(run.path().join(checkpoint::directory::done_name(step)), "").unwrap();
    }
    let newest = open(run.path()).unwrap();
    assert_eq!(newest.path(), file(5));
    let wte = newest.read(Param::Wte, 0, DType::F32).unwrap();
    assert_eq!(wte, source.read(Param::Wte, 0, DType::F32).unwrap());
    assert_eq!(contents(&file(5)), contents(&file(9)));
    // A sidecar without the file's checksum is damaged, and so is a file with another one.
    fs::write(run.path().join(checkpoint::directory::sidecar_name(5)), "{}").unwrap();
    assert!(error(run.path()).contains("run_00000005.json is damaged"));
}
