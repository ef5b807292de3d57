//! Export: bits survive every format, directories are complete, and nothing is lost on errors.

use crate::common::{
    Tensors, config, contents, descriptor, directory, directory_of, expected, file, open, qwen2, tensors,
};
use checkpoint::model_file::ModelFile;
use engine::tensor::DType;
use half::bf16;
use interchange::ModelSource;
use interchange::export::{self, WrittenTokenizer};
use model::{Descriptor, Params};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn exported(source: &ModelSource, dtype: DType) -> (TempDir, WrittenTokenizer) {
    let dir = tempfile::tempdir().unwrap();
    // An empty directory counts as new.
    let tokenizer = export::hugging_face(source, None, dir.path(), dtype, false).unwrap();
    (dir, tokenizer)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn import_then_export_reproduces_the_file() {
    for (dtype, storage) in [(Dtype::F32, DType::F32), (Dtype::BF16, DType::Bf16)] {
        let tensors = tensors(dtype);
        let source = directory(&tensors);
        let (out, tokenizer) = exported(&open(source.path()).unwrap(), storage);
        assert_eq!(fs::read(out.path().join("model.safetensors")).unwrap(), file(&tensors));
        assert_eq!(tokenizer, WrittenTokenizer::None);
        // The bits also survive llm.c's format.
        let bin = out.path().join("model.bin");
        export::llmc(&open(source.path()).unwrap(), &bin, storage, false).unwrap();
        let (again, _) = exported(&open(&bin).unwrap(), storage);
        assert_eq!(fs::read(again.path().join("model.safetensors")).unwrap(), file(&tensors));
        // Keys of the source are kept.
        let kept = json(&out.path().join("config.json"));
        assert_eq!((&kept["transformers_version"], &kept["bos_token_id"]), (&json!("5.0.0"), &json!(3)));
        let generated = json(&out.path().join("generation_config.json"));
        assert_eq!((&generated["bos_token_id"], &generated["eos_token_id"]), (&json!(3), &json!(4)));
    }
}

#[test]
fn other_types_are_widened_or_rounded_to_nearest() {
    for (from, to, dtype) in [
        (Dtype::F32, Dtype::BF16, DType::Bf16),
        (Dtype::BF16, Dtype::F32, DType::F32),
        (Dtype::F16, Dtype::F32, DType::F32),
        (Dtype::F16, Dtype::BF16, DType::Bf16),
    ] {
        let before = tensors(from);
        let (out, _) = exported(&open(directory(&before).path()).unwrap(), dtype);
        let bytes = fs::read(out.path().join("model.safetensors")).unwrap();
        let written = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(written.len(), before.len());
        for (name, tensor) in &before {
            let view = written.tensor(name).unwrap();
            assert_eq!((view.dtype(), view.shape()), (to, &tensor.shape[..]), "{name}");
            let rounded = |value: &f32| match from {
                Dtype::BF16 => bf16::from_f32(*value).to_f32(),
                Dtype::F16 => half::f16::from_f32(*value).to_f32(),
                _ => *value,
            };
            let wanted = crate::common::Tensor {
                values: tensor.values.iter().map(rounded).collect(),
                dtype: to,
                ..tensor.clone()
            };
            assert_eq!(view.data(), wanted.bytes(), "{name}");
        }
        let config = json(&out.path().join("config.json"));
        let name = if to == Dtype::F32 { "float32" } else { "bfloat16" };
        assert_eq!((&config["dtype"], &config["torch_dtype"]), (&json!(name), &json!(name)));
    }
}

#[test]
fn model_files_have_llm_cs_layout_with_a_padded_vocabulary() {
    let tensors = tensors(Dtype::F32);
    let source = open(directory(&tensors).path()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/model.bin");
    export::llmc(&source, &path, DType::F32, false).unwrap();
    let opened = ModelFile::open(&path).unwrap();
    assert_eq!((opened.descriptor(), opened.padded_vocab(), opened.dtype()), (descriptor(), 128, DType::F32));
    let bytes = fs::read(&path).unwrap();
    let mut at = 1024;
    for (param, layer) in Params::new(descriptor()).file_order() {
        let mut values = expected(&tensors, param, layer);
        values.resize(param.len(&descriptor()), 0.0);
        for value in values {
            assert_eq!(bytes[at..at + 4], value.to_le_bytes(), "{} of layer {layer}", param.name());
            at += 4;
        }
    }
    assert_eq!(at, bytes.len());
}

/// Writes a model file with arbitrary values and a vocabulary of bytes or of GPT-2.
fn model_file(vocab: usize) -> (TempDir, ModelSource) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.bin");
    let descriptor = Descriptor::gpt2(1, 2, 4, 8, vocab).unwrap();
    let layout = Params::new(descriptor);
    let params: Vec<u8> = (0..layout.elements()).flat_map(|i| (i as f32 * 1e-5).to_le_bytes()).collect();
    let mut out = fs::File::create(&path).unwrap();
    checkpoint::model_file::write(&mut out, descriptor, &layout, &params, DType::F32).unwrap();
    let source = open(&path).unwrap();
    (dir, source)
}

#[test]
fn directories_of_trained_models_are_complete() {
    let complete = [
        ".llm-rs-export",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ];
    for (vocab, bos, eos) in [(50257, json!(50256), json!(50256)), (256, json!(10), Value::Null)] {
        let (_dir, source) = model_file(vocab);
        let (out, tokenizer) = exported(&source, DType::F32);
        assert_eq!(tokenizer, WrittenTokenizer::BuiltIn(vocab));
        assert_eq!(contents(out.path()).keys().collect::<Vec<_>>(), complete);
        let config = json(&out.path().join("config.json"));
        assert_eq!(
            (&config["vocab_size"], &config["n_layer"], &config["n_head"]),
            (&json!(vocab), &json!(1), &json!(2))
        );
        assert_eq!((&config["n_embd"], &config["n_positions"]), (&json!(4), &json!(8)));
        assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&bos, &eos));
        assert_eq!((&config["model_type"], &config["tie_word_embeddings"]), (&json!("gpt2"), &json!(true)));
        let generation = json(&out.path().join("generation_config.json"));
        assert_eq!((&generation["bos_token_id"], &generation["eos_token_id"]), (&bos, &eos));
        // The exported directory has the values of the file, and is exported again without changes.
        let again = open(out.path()).unwrap();
        assert_eq!((again.descriptor(), again.dtype()), (source.descriptor(), DType::F32));
        for (param, layer) in Params::new(source.descriptor()).file_order() {
            let [a, b] = [&source, &again].map(|source| source.read(param, layer, DType::F32).unwrap());
            assert_eq!(a, b, "{}", param.name());
        }
        let (third, tokenizer) = exported(&again, DType::F32);
        assert_eq!((contents(third.path()), tokenizer), (contents(out.path()), WrittenTokenizer::Copied));
    }
}

/// Name, dimensions, type and data of a tensor.
type GgufTensor<'a> = (String, Vec<usize>, u32, &'a [u8]);

/// A reader of GGUF files.
struct Gguf<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Gguf<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        self.at += N;
        self.bytes[self.at - N..self.at].try_into().unwrap()
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> usize {
        u64::from_le_bytes(self.take()) as usize
    }

    fn text(&mut self) -> String {
        let len = self.u64();
        self.at += len;
        String::from_utf8(self.bytes[self.at - len..self.at].to_vec()).unwrap()
    }

    fn value(&mut self, code: u32) -> Value {
        match code {
            4 => self.u32().into(),
            5 => (self.u32() as i32).into(),
            6 => f64::from(f32::from_le_bytes(self.take())).into(),
            7 => (self.take::<1>()[0] == 1).into(),
            8 => self.text().into(),
            9 => {
                let (code, len) = (self.u32(), self.u64());
                (0..len).map(|_| self.value(code)).collect()
            }
            other => panic!("type {other}"),
        }
    }

    /// Returns the metadata and all tensors.
    fn read(bytes: &[u8]) -> (serde_json::Map<String, Value>, Vec<GgufTensor<'_>>) {
        let mut file = Gguf { bytes, at: 0 };
        assert_eq!((file.take(), file.u32()), (*b"GGUF", 3));
        let (tensors, keys) = (file.u64(), file.u64());
        let metadata = (0..keys).map(|_| {
            let (key, code) = (file.text(), file.u32());
            (key, file.value(code))
        });
        let metadata = metadata.collect();
        let infos: Vec<(String, Vec<usize>, u32, usize)> = (0..tensors)
            .map(|_| {
                let (name, dimensions) = (file.text(), file.u32());
                let shape = (0..dimensions).map(|_| file.u64()).collect();
                (name, shape, file.u32(), file.u64())
            })
            .collect();
        let data = &bytes[file.at.next_multiple_of(32)..];
        let size = |shape: &[usize], code| shape.iter().product::<usize>() * if code == 0 { 4 } else { 2 };
        let end = infos.last().map(|(_, shape, code, at)| (at + size(shape, *code)).next_multiple_of(32));
        assert_eq!(end, Some(data.len()));
        let with_data = infos.into_iter().map(|(name, shape, code, at)| {
            assert!(at % 32 == 0);
            let bytes = &data[at..at + size(&shape, code)];
            (name, shape, code, bytes)
        });
        (metadata, with_data.collect())
    }
}

#[test]
fn gguf_files_have_all_tensors_and_the_tokenizer() {
    for (vocab, dtype) in [(256, DType::Bf16), (50257, DType::F32)] {
        let (dir, source) = model_file(vocab);
        let path = dir.path().join("a name.gguf");
        assert_eq!(export::gguf(&source, None, &path, dtype, false).unwrap(), WrittenTokenizer::BuiltIn(vocab));
        let bytes = fs::read(&path).unwrap();
        let (metadata, tensors) = Gguf::read(&bytes);
        for (key, value) in [
            ("general.architecture", json!("gpt2")),
            ("general.name", json!("a name")),
            ("general.file_type", json!(if dtype == DType::Bf16 { 32 } else { 0 })),
            ("gpt2.block_count", json!(1)),
            ("gpt2.context_length", json!(8)),
            ("gpt2.embedding_length", json!(4)),
            ("gpt2.feed_forward_length", json!(16)),
            ("gpt2.attention.head_count", json!(2)),
            ("tokenizer.ggml.model", json!("gpt2")),
            ("tokenizer.ggml.pre", json!("gpt-2")),
            ("tokenizer.ggml.bos_token_id", json!(if vocab == 256 { 10 } else { 50256 })),
            ("tokenizer.ggml.eos_token_id", json!(if vocab == 256 { 0 } else { 50256 })),
        ] {
            assert_eq!(metadata[key], value, "{key}");
        }
        assert_eq!(metadata["gpt2.attention.layer_norm_epsilon"], json!(f64::from(1e-5f32)));
        let len = |key: &str| metadata[key].as_array().unwrap().len();
        assert_eq!((len("tokenizer.ggml.tokens"), len("tokenizer.ggml.token_type")), (vocab, vocab));
        assert_eq!(len("tokenizer.ggml.merges"), vocab.saturating_sub(257));
        let control = metadata["tokenizer.ggml.token_type"].as_array().unwrap().iter().position(|kind| kind == 3);
        assert_eq!(control, (vocab == 50257).then_some(50256));

        assert_eq!(tensors.len(), 16);
        let matrix = if dtype == DType::Bf16 { 30 } else { 0 };
        for (name, param, shape, code) in [
            ("token_embd.weight", model::Param::Wte, vec![4, vocab], matrix),
            ("position_embd.weight", model::Param::Wpe, vec![4, 8], 0),
            ("blk.0.attn_qkv.weight", model::Param::Qkvw, vec![4, 12], matrix),
            ("blk.0.attn_qkv.bias", model::Param::Qkvb, vec![12], 0),
            ("blk.0.ffn_down.weight", model::Param::Fcprojw, vec![16, 4], matrix),
            ("output_norm.weight", model::Param::Lnfw, vec![4], 0),
        ] {
            let (_, found, kind, data) = tensors.iter().find(|(found, ..)| found == name).unwrap();
            assert_eq!((found, *kind), (&shape, code), "{name}");
            let stored = if code == 0 { DType::F32 } else { DType::Bf16 };
            assert_eq!(*data, source.read(param, 0, stored).unwrap(), "{name}");
        }
    }
}

#[test]
fn gguf_takes_the_tokenizer_of_the_directory() {
    let tensors = tensors(Dtype::F32);
    let source = directory(&tensors);
    let out = source.path().join("model.gguf");
    let write = || export::gguf(&open(source.path()).unwrap(), None, &out, DType::F32, true);
    let message = write().unwrap_err().to_string();
    assert!(message.contains("expected a vocabulary of 50257 (GPT-2) or 256 (bytes) or a tokenizer.json"), "{message}");
    assert!(message.contains("found a vocabulary of 33") && !out.exists(), "{message}");
    // vocab.json and merges.txt suffice.
    let mut vocab: serde_json::Map<String, Value> = (0..32).map(|id| (format!("t{id}"), id.into())).collect();
    vocab.insert("<|endoftext|>".into(), 32.into());
    let vocab_file = source.path().join("vocab.json");
    fs::write(&vocab_file, json!(vocab).to_string()).unwrap();
    fs::write(source.path().join("merges.txt"), "#version: 0.2\n").unwrap();
    assert_eq!(write().unwrap(), WrittenTokenizer::Copied);
    let bytes = fs::read(&out).unwrap();
    let (metadata, _) = Gguf::read(&bytes);
    assert_eq!(metadata["tokenizer.ggml.tokens"][31], "t31");
    assert_eq!(metadata["tokenizer.ggml.token_type"][32], 3);
    assert_eq!(metadata["tokenizer.ggml.bos_token_id"], 32);

    let vocab: serde_json::Map<String, Value> = (0..33).map(|id| (format!("t{id}"), id.into())).collect();
    let tokenizer = json!({"pre_tokenizer": {"type": "ByteLevel"},
        "added_tokens": [{"id": 3, "content": "t3", "special": true}, {"id": 5, "content": "t5", "special": false}],
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    fs::write(source.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    assert_eq!(write().unwrap(), WrittenTokenizer::Copied);
    let bytes = fs::read(&out).unwrap();
    let (metadata, _) = Gguf::read(&bytes);
    assert_eq!(metadata["tokenizer.ggml.tokens"][32], "t32");
    let types = &metadata["tokenizer.ggml.token_type"];
    assert_eq!([&types[3], &types[4], &types[5]].map(Value::as_u64), [Some(3), Some(1), Some(4)]);
    assert_eq!(
        (&metadata["tokenizer.ggml.bos_token_id"], &metadata["tokenizer.ggml.eos_token_id"]),
        (&json!(3), &json!(4))
    );
    // A directory export copies the files.
    let (copy, written) = exported(&open(source.path()).unwrap(), DType::F32);
    assert_eq!(written, WrittenTokenizer::Copied);
    assert_eq!(json(&copy.path().join("tokenizer.json")), tokenizer);
}

#[test]
fn existing_files_are_replaced_only_on_request() {
    let source_directory = directory(&tensors(Dtype::F32));
    let source = open(source_directory.path()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let error = |result: anyhow::Result<WrittenTokenizer>| format!("{:#}", result.unwrap_err());
    let directory_of = |name, overwrite| export::hugging_face(&source, None, &at(name), DType::F32, overwrite);
    directory_of("model", false).unwrap();
    let before = contents(&at("model"));
    let message = error(directory_of("model", false));
    assert!(
        message.contains("expected a new or empty directory, found ") && message.contains("add --overwrite"),
        "{message}"
    );
    export::hugging_face(&source, None, &at("model"), DType::Bf16, true).unwrap();
    assert_ne!(contents(&at("model")), before);
    directory_of("model", true).unwrap();
    assert_eq!(contents(&at("model")), before);
    // Files of the user are never deleted.
    fs::write(at("model/notes.txt"), "mine").unwrap();
    let message = error(directory_of("model", true));
    assert!(message.contains("expected only files of an export, found notes.txt"), "{message}");
    assert_eq!(contents(&at("model")).len(), before.len() + 1);
    // The names of the files do not tell which program wrote them.
    let before = contents(source_directory.path());
    for overwrite in [false, true] {
        let result = export::hugging_face(&source, None, source_directory.path(), DType::F32, overwrite);
        let message = error(result);
        assert!(
            message.contains("or an export with .llm-rs-export, found ") && !message.contains("--overwrite"),
            "{message}"
        );
    }
    assert_eq!(contents(source_directory.path()), before);
    fs::write(at("file"), "mine").unwrap();
    assert!(error(directory_of("file", true)).contains("expected a directory or a new name, found a file"));

    let llmc =
        |name, overwrite| export::llmc(&source, &at(name), DType::F32, overwrite).map(|()| WrittenTokenizer::None);
    assert!(error(llmc("file", false)).contains("expected a new file, found an existing one; add --overwrite"));
    assert!(error(llmc("model", true)).contains("expected the name of a file, found a directory"));
    assert_eq!(fs::read(at("file")).unwrap(), b"mine");
    llmc("file", true).unwrap();
    assert!(ModelFile::open(&at("file")).is_ok());
    let gguf = |name, overwrite| export::gguf(&source, None, &at(name), DType::F32, overwrite);
    assert!(error(gguf("file", false)).contains("expected a new file"));
    assert!(error(gguf("model", true)).contains("found a directory"));
    // Nothing but the results is left.
    let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["file", "model"]);
}

#[test]
fn a_failed_export_leaves_the_earlier_one() {
    let source_directory = directory(&tensors(Dtype::F32));
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let open_source = || open(source_directory.path()).unwrap();
    export::hugging_face(&open_source(), None, &at("model"), DType::F32, false).unwrap();
    export::llmc(&open_source(), &at("model.bin"), DType::F32, false).unwrap();
    let before = [contents(&at("model")), contents(&at("model.bin"))];
    // The file is truncated after it was opened.
    let source = open_source();
    let weights = source_directory.path().join("model.safetensors");
    let len = fs::metadata(&weights).unwrap().len();
    fs::File::options().write(true).open(&weights).unwrap().set_len(len - 100).unwrap();
    for result in [
        export::hugging_face(&source, None, &at("model"), DType::F32, true).map(drop),
        export::llmc(&source, &at("model.bin"), DType::F32, true),
    ] {
        let message = format!("{:#}", result.unwrap_err());
        assert!(message.contains("cannot write ") && message.contains("model.safetensors"), "{message}");
    }
    assert_eq!([contents(&at("model")), contents(&at("model.bin"))], before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn the_configuration_of_an_untied_source_becomes_tied() {
    let mut with_head: Tensors = tensors(Dtype::F32);
    with_head.insert("lm_head.weight".into(), with_head["transformer.wte.weight"].clone());
    let source = directory(&with_head);
    let mut untied = config();
    untied["tie_word_embeddings"] = false.into();
    untied["architectures"] = json!(["GPT2Model"]);
    fs::write(source.path().join("config.json"), untied.to_string()).unwrap();
    let (out, _) = exported(&open(source.path()).unwrap(), DType::F32);
    let config = json(&out.path().join("config.json"));
    assert_eq!((&config["tie_word_embeddings"], &config["architectures"]), (&json!(true), &json!(["GPT2LMHeadModel"])));
    assert_eq!(fs::read(out.path().join("model.safetensors")).unwrap(), file(&tensors(Dtype::F32)));
}

/// Returns a byte-level tokenizer.json with 258 ids, in which `<|endoftext|>` has id 257.
fn tokenizer_json() -> String {
    let mut vocab: serde_json::Map<String, Value> =
        (0..=255).map(|byte| (tokenizer::byte_level::character(byte).to_string(), byte.into())).collect();
    vocab.insert("th".to_owned(), 256.into());
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let special = json!({"id": 257, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": ["t h"]},
    })
    .to_string()
}

#[test]
fn the_tokenizer_beside_a_model_file_is_exported() {
    let (dir, source) = model_file(258);
    let (out, written) = exported(&source, DType::F32);
    assert_eq!(written, WrittenTokenizer::None);
    assert!(!out.path().join("tokenizer.json").exists());
    let text = tokenizer_json();
    fs::write(dir.path().join("tokenizer.json"), &text).unwrap();
    let (out, written) = exported(&source, DType::F32);
    assert_eq!(written, WrittenTokenizer::Copied);
    assert_eq!(fs::read_to_string(out.path().join("tokenizer.json")).unwrap(), text);
    let settings = json(&out.path().join("tokenizer_config.json"));
    for (key, value) in [
        ("tokenizer_class", json!("PreTrainedTokenizerFast")),
        ("bos_token", json!("<|endoftext|>")),
        ("eos_token", json!("<|endoftext|>")),
        ("model_max_length", json!(8)),
    ] {
        assert_eq!(settings[key], value, "{key}");
    }
    for name in ["config.json", "generation_config.json"] {
        let file = json(&out.path().join(name));
        assert_eq!((&file["bos_token_id"], &file["eos_token_id"]), (&json!(257), &json!(257)), "{name}");
    }
    let gguf = dir.path().join("model.gguf");
    assert_eq!(export::gguf(&source, None, &gguf, DType::F32, false).unwrap(), WrittenTokenizer::Copied);
    let bytes = fs::read(&gguf).unwrap();
    let (metadata, _) = Gguf::read(&bytes);
    let tokens = &metadata["tokenizer.ggml.tokens"];
    assert_eq!(
        (&tokens[256], &tokens[257], tokens.as_array().unwrap().len()),
        (&json!("th"), &json!("<|endoftext|>"), 258)
    );
    assert_eq!(metadata["tokenizer.ggml.merges"], json!(["t h"]));
    assert_eq!(metadata["tokenizer.ggml.bos_token_id"], 257);
}

#[test]
fn a_named_tokenizer_replaces_that_of_the_source() {
    let (dir, source) = model_file(258);
    let file = dir.path().join("mine.json");
    fs::write(&file, tokenizer_json()).unwrap();
    let at = |name: &str| dir.path().join(name);
    let hf = |source: &ModelSource, named: &str, name: &str| {
        export::hugging_face(source, Some(named), &at(name), DType::F32, false)
    };
    assert_eq!(hf(&source, "bytes", "bytes").unwrap(), WrittenTokenizer::BuiltIn(256));
    let of_bytes = open(&at("bytes")).unwrap();
    assert_eq!(json(&at("bytes/config.json"))["bos_token_id"], 10);
    // The directory has a tokenizer of its own, which is not copied.
    assert_eq!(hf(&of_bytes, file.to_str().unwrap(), "named").unwrap(), WrittenTokenizer::Copied);
    assert_eq!(fs::read_to_string(at("named/tokenizer.json")).unwrap(), tokenizer_json());
    assert!(!at("named/vocab.json").exists());
    for name in ["config.json", "generation_config.json"] {
        let file = json(&at("named").join(name));
        assert_eq!((&file["bos_token_id"], &file["eos_token_id"]), (&json!(257), &json!(257)), "{name}");
    }
    let message = format!("{:#}", hf(&source, "gpt2", "large").unwrap_err());
    assert!(message.contains("--tokenizer: expected a tokenizer with at most 258 ids"), "{message}");
    let message = format!("{:#}", hf(&source, "/nowhere/t.json", "large").unwrap_err());
    assert!(message.contains("--tokenizer: cannot read the tokenizer /nowhere/t.json"), "{message}");
    assert!(!at("large").exists());
}

#[test]
fn gguf_holds_the_tokenizer_of_llama_3() {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    // Llama 3's format: base64 of each token, and its rank. 256 special tokens follow.
    let digit = |bits: usize| char::from(DIGITS[bits & 63]);
    let line = |byte: usize| format!("{}{}== {byte}\n", digit(byte >> 2), digit(byte << 4));
    // The tokens "ab", "abc" and "xyz". No merges lead to the last one.
    let lines = (0..256).map(line).collect::<Vec<_>>().concat() + "YWI= 256\nYWJj 257\neHl6 258\n";
    let (dir, source) = model_file(520);
    fs::write(dir.path().join("tokenizer.model"), &lines).unwrap();
    let gguf = dir.path().join("model.gguf");
    export::gguf(&source, None, &gguf, DType::F32, false).unwrap();
    let (metadata, _) = Gguf::read(&fs::read(&gguf).unwrap());
    assert_eq!(metadata["tokenizer.ggml.pre"], "llama-bpe");
    assert_eq!(metadata["tokenizer.ggml.merges"], json!(["a b", "ab c"]));
    let tokens = metadata["tokenizer.ggml.tokens"].as_array().unwrap();
    let found: Vec<_> = [32, 256, 257, 258, 259, 260, 514, 515].map(|id: usize| tokens[id].as_str().unwrap()).into();
    let special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_250|>"];
    assert_eq!(found[..4], ["Ġ", "ab", "abc", "xyz"]);
    assert_eq!((&found[4..7], found[7]), (&special[..], "[PAD515]"));
    assert_eq!(
        (&metadata["tokenizer.ggml.bos_token_id"], &metadata["tokenizer.ggml.add_bos_token"]),
        (&json!(259), &json!(true))
    );
    // A Hugging Face directory holds the file, which llm-rs reads.
    let (out, written) = exported(&source, DType::F32);
    assert_eq!(written, WrittenTokenizer::Copied);
    assert_eq!(fs::read_to_string(out.path().join("tokenizer.model")).unwrap(), lines);
    assert_eq!(open(out.path()).unwrap().tokenizer(None).unwrap().unwrap().document(), 259);
    fs::write(dir.path().join("tokenizer.model"), "?").unwrap();
    let message = format!("{:#}", exported_error(&source));
    assert!(message.contains("tokenizer.model:1: expected") && message.contains("pass another one with"), "{message}");
}

fn exported_error(source: &ModelSource) -> anyhow::Error {
    let dir = tempfile::tempdir().unwrap();
    export::hugging_face(source, None, dir.path(), DType::F32, false).unwrap_err()
}

/// The split patterns of Llama 3 and Qwen 2 in their `tokenizer.json`.
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_SPLIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns a `tokenizer.json` of 90 ids with this split pattern. Id 89 is special.
fn split_tokenizer(split: &str, normalizer: &Value, post_processor: &Value) -> Value {
    let vocab: serde_json::Map<String, Value> = (0..89).map(|id| (format!("t{id}"), id.into())).collect();
    json!({
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": post_processor,
        "added_tokens": [{"id": 89, "content": "<|begin_of_text|>", "special": true}],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "1"]], "ignore_merges": true},
    })
}

fn gguf_of(source: &Path) -> Vec<u8> {
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("model.gguf");
    export::gguf(&open(source).unwrap(), None, &out, DType::F32, false).unwrap();
    fs::read(&out).unwrap()
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = json(path);
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// The model of `tests/data/llama.bin` has V = 97, C = 48, NH = 4, KV = 2 and the scaling of Llama 3.1.
#[test]
fn gguf_of_llama_has_interleaved_pairs_and_scaled_frequencies() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/llama.bin");
    let from_file = open(&file).unwrap();
    let (hf, _) = exported(&from_file, DType::F32);
    let begin = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}},
    ]});
    let tokenizer = split_tokenizer(LLAMA3_SPLIT, &Value::Null, &begin);
    fs::write(hf.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    change_json(&hf.path().join("config.json"), |config| config["bos_token_id"] = 89.into());
    let bytes = gguf_of(hf.path());
    let (metadata, tensors) = Gguf::read(&bytes);
    for (key, value) in [
        ("general.architecture", json!("llama")),
        ("llama.block_count", json!(2)),
        ("llama.context_length", json!(20)),
        ("llama.embedding_length", json!(48)),
        ("llama.feed_forward_length", json!(64)),
        ("llama.attention.head_count", json!(4)),
        ("llama.attention.head_count_kv", json!(2)),
        ("llama.attention.key_length", json!(12)),
        ("llama.rope.dimension_count", json!(12)),
        ("llama.rope.freq_base", json!(500_000.0)),
        ("llama.attention.layer_norm_rms_epsilon", json!(f64::from(1e-5f32))),
        ("llama.vocab_size", json!(97)),
        ("tokenizer.ggml.pre", json!("llama-bpe")),
        ("tokenizer.ggml.add_bos_token", json!(true)),
        ("tokenizer.ggml.bos_token_id", json!(89)),
    ] {
        assert_eq!(metadata[key], value, "{key}");
    }
    let types = &metadata["tokenizer.ggml.token_type"];
    assert_eq!([&types[88], &types[89], &types[90]].map(Value::as_u64), [Some(1), Some(3), Some(5)]);
    let data = |name: &str| tensors.iter().find(|(found, ..)| found == name).unwrap();
    // llm.c's file and llama.cpp both have interleaved pairs; the directory in between has half-split ones.
    let whole = from_file.read(model::Param::Qkvw, 1, DType::F32).unwrap();
    let row = 4 * 48;
    assert_eq!(data("blk.1.attn_q.weight").3, &whole[..48 * row]);
    assert_eq!(data("blk.1.attn_k.weight").3, &whole[48 * row..72 * row]);
    assert_eq!(data("blk.1.attn_v.weight").3, &whole[72 * row..]);
    assert_eq!(data("output.weight").1, [48, 97]);
    // Computed by hand: waves of 2 pi 500000^(2i / 12) tokens are 8 times longer if they are longer than 8192 tokens.
    let (_, shape, code, factors) = data("rope_freqs.weight");
    let factors: Vec<f32> = factors.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let lengths: Vec<f64> = (0..6).map(|i| 2.0 * std::f64::consts::PI * 500_000f64.powf(f64::from(i) / 6.0)).collect();
    assert!(lengths[2] < 2048.0 && lengths[3] > 2048.0 && lengths[3] < 8192.0 && lengths[4] > 8192.0);
    let smooth = (8192.0 / lengths[3] - 1.0) / 3.0;
    let expected = [1.0, 1.0, 1.0, 1.0 / ((1.0 - smooth) / 8.0 + smooth), 8.0, 8.0];
    assert_eq!((&shape[..], *code, tensors.last().unwrap().0.as_str()), (&[6][..], 0, "rope_freqs.weight"));
    for (found, expected) in factors.iter().zip(expected) {
        assert!((f64::from(*found) / expected - 1.0).abs() < 1e-6, "{factors:?}");
    }
    // A tied head is not written, and without scaling there are no factors.
    change_json(&hf.path().join("config.json"), |config| {
        config["tie_word_embeddings"] = true.into();
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0});
        (config["rope_theta"], config["rope_scaling"]) = (Value::Null, Value::Null);
    });
    let bytes = gguf_of(hf.path());
    let (_, tensors) = Gguf::read(&bytes);
    assert!(tensors.iter().all(|(name, ..)| name != "output.weight" && name != "rope_freqs.weight"));
}

#[test]
fn gguf_of_qwen_has_half_split_pairs_and_its_tokenizer() {
    let (config, tensors) = qwen2();
    let directory = directory_of(&config, &tensors);
    let nfc = json!({"type": "NFC"});
    let write_tokenizer = |split, normalizer: &Value| {
        let text = split_tokenizer(split, normalizer, &json!({"type": "ByteLevel"})).to_string();
        fs::write(directory.path().join("tokenizer.json"), text).unwrap();
    };
    write_tokenizer(QWEN2_SPLIT, &nfc);
    let bytes = gguf_of(directory.path());
    let (metadata, found) = Gguf::read(&bytes);
    for (key, value) in [
        ("general.architecture", json!("qwen2")),
        ("qwen2.attention.head_count_kv", json!(2)),
        ("qwen2.rope.freq_base", json!(1e6)),
        ("tokenizer.ggml.pre", json!("qwen2")),
        ("tokenizer.ggml.add_bos_token", json!(false)),
    ] {
        assert_eq!(metadata[key], value, "{key}");
    }
    for (name, original) in [
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ] {
        let (.., data) = found.iter().find(|(found, ..)| found == name).unwrap();
        assert_eq!(*data, tensors[original].bytes(), "{name}");
    }
    assert_eq!(found.len(), tensors.len());

    let out = directory.path().join("model.gguf");
    let error = || {
        let result = export::gguf(&open(directory.path()).unwrap(), None, &out, DType::F32, false);
        format!("{:#}", result.unwrap_err())
    };
    // llama.cpp normalizes nothing, and Llama's tokenizer does not either.
    write_tokenizer(LLAMA3_SPLIT, &nfc);
    assert!(error().contains("expected the byte-level BPE tokenizer of GPT-2, Llama 3 or Qwen 2"), "{}", error());
    write_tokenizer(QWEN2_SPLIT, &nfc);
    change_json(&directory.path().join("config.json"), |config| {
        config["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
    });
    assert!(error().contains("gguf: expected rotary embeddings without scaling for qwen2, found"), "{}", error());
}
