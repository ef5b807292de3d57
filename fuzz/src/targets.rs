//! The fuzz targets and their seeds.
//!
//! A target reads its input as the program would, and uses what a reader accepts. It fails by a panic, an arithmetic overflow,
//! an endless loop or excessive memory use.

use anyhow::{Context, Result};
use checkpoint::directory::{done_name, model_name, sidecar_name, state_name};
use checkpoint::model_file::{self, ModelFile};
use checkpoint::resume::{self, Accepted};
use checkpoint::sidecar::{FileChecksum, Identity, Sidecar, format_checksum};
use checkpoint::state::{self, OptimizerState, Values};
use checkpoint::{Progress, RunState, fingerprint};
use data::conversations::{self, ChatOptions, Render, RenderError, Rendered};
use data::core_tasks::Bundle;
use data::documents::{self, Format, Reading, Sink};
use data::mixture::{self, Packing};
use data::multiple_choice::{self, Example, MultipleChoice};
use data::{Batches, Geometry, Loader, Mixture, Tokens, hellaswag, mask, mmlu, tinystories, tokens};
use engine::cpu::Cpu;
use engine::tensor::DType;
use engine::{Algorithms, Engine};
use host::cli::Cli;
use host::evaluate::exact_match;
use host::log::Log;
use host::sample::{self, Sampling};
use interchange::config::ModelConfig;
use interchange::peft::{self, AdapterFile};
use interchange::tokenizer::Vocabulary;
use interchange::{ModelSource, export};
use metrics::figure::{Figure, FigureOptions};
use metrics::run::RunLog;
use model::{Decoder, Descriptor, Params, PlanOptions, Shard, Unsharded};
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use system::progress;
use tempfile::NamedTempFile;
use tokenizer::Tokenizer;
use verify::llmc::Verification;
use xxhash_rust::xxh3::xxh3_64;

/// A reader to fuzz.
pub struct Target {
    /// Name, which is also the name of its directory of findings.
    pub name: &'static str,
    /// Reads a file; an error means that it was rejected.
    read: fn(&[u8]) -> Result<()>,
    seeds: fn() -> Vec<Vec<u8>>,
}

/// Every file format that the program reads.
pub static TARGETS: [Target; 31] = [
    // Token shards.
    Target { name: "tokens", read: read_tokens, seeds: token_files },
    // Model files.
    Target { name: "model", read: read_model, seeds: model_files },
    // State files of checkpoints.
    Target { name: "state", read: read_state, seeds: state_files },
    // Sidecars of checkpoints.
    Target { name: "sidecar", read: read_sidecar, seeds: sidecars },
    // Logs of a resumed run.
    Target { name: "log", read: read_log, seeds: logs },
    // llm.c's debug states.
    Target { name: "debug_state", read: read_debug_state, seeds: debug_states },
    // Configuration files.
    Target { name: "config", read: read_config, seeds: configs },
    // Multiple-choice evaluation files.
    Target { name: "evaluation", read: read_evaluation, seeds: evaluation_files },
    // HellaSwag in JSON lines.
    Target { name: "hellaswag", read: read_hellaswag, seeds: hellaswag_files },
    // MMLU's CSV files.
    Target { name: "mmlu", read: read_mmlu, seeds: mmlu_files },
    // TinyStories' JSON files.
    Target { name: "tinystories", read: read_stories, seeds: story_files },
    // Documents in JSON lines.
    Target { name: "jsonl", read: read_jsonl, seeds: jsonl_files },
    // Documents in CSV files.
    Target { name: "csv", read: read_csv, seeds: csv_files },
    // Documents in text files with a separator.
    Target { name: "text", read: read_text, seeds: text_files },
    // Parquet files with a column of text.
    Target { name: "parquet", read: read_parquet, seeds: parquet_files },
    // Text and tokens.
    Target { name: "tokenizer", read: encode_and_decode, seeds: texts },
    // Tokenizers in `tokenizer.json` or Llama 3's format, with which text is encoded.
    Target { name: "tokenizer_file", read: read_tokenizer_file, seeds: tokenizer_files },
    // `config.json` of Hugging Face directories.
    Target { name: "hf_config", read: read_hf_config, seeds: hf_configs },
    // `model.safetensors.index.json` of Hugging Face directories.
    Target { name: "hf_index", read: read_hf_index, seeds: hf_indexes },
    // `tokenizer.json` of Hugging Face directories.
    Target { name: "hf_tokenizer", read: read_hf_tokenizer, seeds: hf_tokenizers },
    // Safetensors files.
    Target { name: "safetensors", read: read_safetensors, seeds: safetensors_files },
    // Checkpoints of nanochat, and the shapes of their models.
    Target { name: "nanochat_model", read: read_nanochat_model, seeds: || vec![NANOCHAT_MODEL.to_vec()] },
    Target { name: "nanochat_meta", read: read_nanochat_meta, seeds: || vec![NANOCHAT_META.to_vec()] },
    // nanochat's tokenizers.
    Target { name: "tokenizer_pickle", read: read_tokenizer_pickle, seeds: || vec![TOKENIZER_PICKLE.to_vec()] },
    // Masks of token shards.
    Target { name: "mask", read: read_mask, seeds: mask_files },
    // Conversations in JSON lines.
    Target { name: "conversations", read: read_conversations, seeds: conversation_files },
    // The list of tasks of CORE.
    Target { name: "core", read: read_core, seeds: core_lists },
    // Questions of a task of CORE.
    Target { name: "core_questions", read: read_core_questions, seeds: core_question_files },
    // Questions with exact answers.
    Target { name: "questions", read: read_questions, seeds: question_files },
    // `adapter_config.json` of PEFT directories.
    Target { name: "adapter_config", read: read_adapter_config, seeds: adapter_configs },
    // `adapter_model.safetensors` of PEFT directories.
    Target { name: "adapters", read: read_adapters, seeds: adapter_files },
];

impl Target {
    /// Reads `data` and reports whether it is valid.
    pub fn accepts(&self, data: &[u8]) -> bool {
        (self.read)(data).is_ok()
    }

    /// Returns small valid files, most of which the program's own writers have written.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        (self.seeds)()
    }
}

/// Calls `read` with a temporary file that contains `data`.
fn as_file<T>(data: &[u8], read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let mut file = NamedTempFile::new()?;
    file.write_all(data)?;
    read(file.path())
}

/// Returns the bytes that `write` writes to a path.
fn written(write: impl FnOnce(&Path) -> Result<()>) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("seed");
    write(&path).expect("the input is valid");
    fs::read(path).expect("the file exists")
}

fn read_tokens(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let mut loader = Loader::new(vec![Tokens::open(path)?], Geometry::single(1, 2), 50_257, Some(42))?;
        let mut words = vec![0; loader.layout().words()];
        for _ in 0..8 {
            loader.next(&mut words)?;
        }
        Ok(())
    })
}

fn token_files() -> Vec<Vec<u8>> {
    vec![
        written(|path| tokens::write(path, &[50_256u16, 1, 2, 3], tokens::Width::U16)),
        written(|path| tokens::write(path, &[7u16; 100], tokens::Width::U16)),
    ]
}

/// Number of tokens that a mask belongs to.
const MASKED_TOKENS: usize = 12;

fn read_mask(data: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("train_000000.bin");
    tokens::write(&path, &[7u16; MASKED_TOKENS], tokens::Width::U16)?;
    fs::write(mask::path(&path), data)?;
    let shards = vec![Tokens::open(&path)?];
    mask::check(&shards)?;
    let source = mixture::Source { name: "chat".to_owned(), shards, weight: 1.0, max_epochs: None };
    let (geometry, packing) = (Geometry::single(1, 4), Packing::Pad);
    let settings = mixture::Settings { geometry, vocab: 50_257, shuffle: None, packing, separator: None };
    let mut mixture = Mixture::new(vec![source], settings)?;
    let mut words = vec![0; mixture.layout().words()];
    (0..4).try_for_each(|_| mixture.next(&mut words))
}

fn mask_files() -> Vec<Vec<u8>> {
    let flags: Vec<u16> = (0..MASKED_TOKENS as u16).map(|i| [2, 0, 1, 1][i as usize % 4]).collect();
    vec![written(|path| tokens::write(path, &flags, tokens::Width::Flags))]
}

/// Plans a model for sequences of up to 8 tokens.
fn planned(descriptor: Descriptor) -> Result<(Decoder, Cpu)> {
    let mut engine = Cpu::new();
    let options = PlanOptions::inference(1, descriptor.max_seq_len.min(8));
    let (model, plan) = Decoder::plan(descriptor, options, &mut engine);
    engine.allocate(&plan)?;
    Ok((model, engine))
}

fn read_model(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let file = ModelFile::open(path)?;
        let (model, mut engine) = planned(file.descriptor())?;
        file.load(&model, &mut engine)?;
        let sampling = Sampling { top_k: 3, temperature: 1.0, seed: 1 };
        sample::generate(&model, &mut engine, &mut Unsharded, &[0], 2, sampling, |_| Ok(()))
    })
}

fn model_file(descriptor: Descriptor, dtype: DType) -> Vec<u8> {
    let layout = Params::new(descriptor);
    let params = vec![0x3d; layout.elements() * dtype.bytes()];
    let mut file = Vec::new();
    model_file::write(&mut file, descriptor, &layout, &params, dtype).expect("writing to memory succeeds");
    file
}

fn model_files() -> Vec<Vec<u8>> {
    let smallest = Descriptor::gpt2(1, 1, 1, 1, 1).expect("the shape is valid");
    vec![model_file(smallest, DType::F32), model_file(small(), DType::Bf16), model_file(small(), DType::F32)]
}

fn small() -> Descriptor {
    Descriptor::gpt2(2, 2, 2, 3, 5).expect("the shape is valid")
}

/// Loads the Hugging Face directory with these files and generates text.
fn load_directory(files: &[(&str, &[u8])]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes)?;
    }
    let source = ModelSource::open(directory.path())?;
    let (model, mut engine) = planned(source.descriptor())?;
    source.load(&model, &mut engine)?;
    let sampling = Sampling { top_k: 3, temperature: 1.0, seed: 1 };
    sample::generate(&model, &mut engine, &mut Unsharded, &[0], 2, sampling, |_| Ok(()))
}

/// Returns `config.json` and `model.safetensors` of a small model.
fn hf_files(dtype: DType) -> [Vec<u8>; 2] {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (bin, out) = (directory.path().join("model.bin"), directory.path().join("hf"));
    fs::write(&bin, model_file(small(), dtype)).expect("the directory is writable");
    let source = ModelSource::open(&bin).expect("the file is valid");
    export::hugging_face(&source, None, &out, dtype, false).expect("the directory is writable");
    ["config.json", "model.safetensors"].map(|name| fs::read(out.join(name)).expect("the export is complete"))
}

static HF_FILES: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| hf_files(DType::F32));

fn read_hf_config(data: &[u8]) -> Result<()> {
    load_directory(&[("config.json", data), ("model.safetensors", &HF_FILES[1])])
}

fn hf_configs() -> Vec<Vec<u8>> {
    let short =
        br#"{"model_type":"gpt2","n_embd":2,"n_head":2,"n_layer":2,"n_positions":3,"vocab_size":5,"n_inner":8}"#;
    vec![HF_FILES[0].clone(), short.to_vec()]
}

fn read_safetensors(data: &[u8]) -> Result<()> {
    load_directory(&[("config.json", &HF_FILES[0]), ("model.safetensors", data)])
}

fn safetensors_files() -> Vec<Vec<u8>> {
    [DType::F32, DType::Bf16].map(|dtype| hf_files(dtype)[1].clone()).into()
}

fn read_hf_index(data: &[u8]) -> Result<()> {
    let [config, weights] = &*HF_FILES;
    load_directory(&[("config.json", config), ("a.safetensors", weights), ("model.safetensors.index.json", data)])
}

fn hf_indexes() -> Vec<Vec<u8>> {
    let [_, weights] = &*HF_FILES;
    let header = u64::from_le_bytes(weights[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&weights[8..8 + header]).expect("the header is JSON");
    let names = header.keys().filter(|name| *name != "__metadata__");
    let map: serde_json::Map<_, _> = names.map(|name| (name.clone(), "a.safetensors".into())).collect();
    vec![serde_json::json!({ "weight_map": map }).to_string().into_bytes()]
}

// PyTorch and tiktoken have written these files.
const NANOCHAT_MODEL: &[u8] = include_bytes!("../../tests/data/nanochat/small/model_000000.pt");
const NANOCHAT_META: &[u8] = include_bytes!("../../tests/data/nanochat/small/meta_000000.json");
const TOKENIZER_PICKLE: &[u8] = include_bytes!("../../tests/data/nanochat/tokenizer/tokenizer.pkl");

fn read_nanochat_model(data: &[u8]) -> Result<()> {
    load_directory(&[("model_000000.pt", data), ("meta_000000.json", NANOCHAT_META)])
}

fn read_nanochat_meta(data: &[u8]) -> Result<()> {
    load_directory(&[("model_000000.pt", NANOCHAT_MODEL), ("meta_000000.json", data)])
}

fn read_tokenizer_pickle(data: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    fs::write(directory.path().join("tokenizer.pkl"), data)?;
    let tokenizer = Tokenizer::open(directory.path())?;
    tokenizer.decode(&tokenizer.encode("aba b \u{e9}\n")?);
    Ok(())
}

/// Loads the small model with adapters.
fn load_adapters(config: &[u8], weights: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let [base, adapters] = ["base", "adapters"].map(|name| directory.path().join(name));
    let files = [("config.json", &HF_FILES[0][..]), ("model.safetensors", &HF_FILES[1])];
    let of_adapters = [(peft::CONFIG, config), (peft::WEIGHTS, weights)];
    for (to, files) in [(&base, files), (&adapters, of_adapters)] {
        fs::create_dir(to)?;
        files.iter().try_for_each(|(name, bytes)| fs::write(to.join(name), bytes))?;
    }
    let (file, source) = (AdapterFile::open(&adapters)?, ModelSource::open(&base)?);
    let mut engine = Cpu::new();
    let (model, plan) = Decoder::plan(file.descriptor(&source)?, PlanOptions::training(1, 2), &mut engine);
    engine.allocate(&plan)?;
    file.load(&source, &model, &mut engine)
}

const ADAPTER_CONFIG: &[u8] =
    br#"{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["c_fc"], "bias": "none"}"#;

/// Returns the tensors of adapters of `c_fc` in the small model.
fn adapter_weights() -> Vec<u8> {
    let names = |layer: usize| {
        let name = format!("base_model.model.transformer.h.{layer}.mlp.c_fc.lora");
        [(format!("{name}_A.weight"), [1, 2]), (format!("{name}_B.weight"), [8, 1])]
    };
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in (0..2).flat_map(names) {
        let start = end;
        end += 4 * shape[0] * shape[1];
        header.insert(name, serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
    }
    let header = serde_json::Value::Object(header).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; end]].concat()
}

fn read_adapter_config(data: &[u8]) -> Result<()> {
    load_adapters(data, &adapter_weights())
}

fn adapter_configs() -> Vec<Vec<u8>> {
    vec![ADAPTER_CONFIG.to_vec()]
}

fn read_adapters(data: &[u8]) -> Result<()> {
    load_adapters(ADAPTER_CONFIG, data)
}

fn adapter_files() -> Vec<Vec<u8>> {
    vec![adapter_weights()]
}

fn read_hf_tokenizer(data: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    fs::write(directory.path().join("tokenizer.json"), data)?;
    Vocabulary::read(directory.path(), &ModelConfig::parse(&HF_FILES[0])?).map(drop)
}

fn hf_tokenizers() -> Vec<Vec<u8>> {
    let file = br#"{"pre_tokenizer":{"type":"ByteLevel"},"added_tokens":[{"id":4,"content":"<s>","special":true}],
        "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"aba":3},"merges":["a b",["ab","a"]]}}"#;
    vec![file.to_vec()]
}

fn read_tokenizer_file(data: &[u8]) -> Result<()> {
    let tokenizer = as_file(data, Tokenizer::open)?;
    for text in ["", "aba b<s> \u{e9}\n", "<|endoftext|>"] {
        let ids = tokenizer.encode_with_special(text)?;
        tokenizer.decode(&ids);
        tokenizer.decode(&tokenizer.encode(text)?);
    }
    tokenizer.decode(&[0, 4, u32::MAX]);
    Ok(())
}

fn tokenizer_files() -> Vec<Vec<u8>> {
    let json = br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":4,"content":"<s>",
        "single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
        "post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
        "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"vocab":{"a":0,"b":1,"ab":2,"aba":3},"merges":["a b","ab a"]}}"#;
    // A token for each byte, in base64.
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |i: usize| char::from(digits[i]);
    let lines = (0..256).map(|byte| format!("{}{}== {byte}\n", digit(byte >> 2), digit((byte & 3) << 4)));
    vec![json.to_vec(), lines.collect::<String>().into_bytes()]
}

/// The model file of the checkpoints.
static SMALL_MODEL: LazyLock<Vec<u8>> = LazyLock::new(|| model_file(small(), DType::F32));
const STEP: usize = 7;

fn small_loader() -> Result<Loader> {
    Loader::new(vec![Tokens::in_memory("tokens", vec![1; 20])], Geometry::single(1, 3), 5, Some(42))
}

/// Resumes from a checkpoint with these files. With a sidecar, compares its settings with an identity.
fn resume(state: &[u8], sidecar: Option<(&[u8], &Identity)>) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let write = |name: String, bytes: &[u8]| fs::write(directory.path().join(name), bytes);
    write(model_name(STEP), &SMALL_MODEL)?;
    write(state_name(STEP, 0), state)?;
    write(done_name(STEP), &[])?;
    if let Some((sidecar, _)) = sidecar {
        write(sidecar_name(STEP), sidecar)?;
    }
    let found = resume::find_newest(directory.path())?;
    let checkpoint = found.checkpoint.context("expected a checkpoint, found none")?;
    if let Some((_, identity)) = sidecar {
        checkpoint.check_settings(identity, small(), |_| false, Accepted::Nothing)?;
    }
    let mut engine = Cpu::new();
    let (model, plan) = Decoder::plan(small(), PlanOptions::training(1, 3), &mut engine);
    engine.allocate(&plan)?;
    let mut loader = Batches::from(small_loader()?);
    checkpoint.adopt_algorithms(&mut engine);
    checkpoint.load(&model, &mut engine, &mut loader, 3, false, &mut Vec::new())?;
    let mut words = vec![0; loader.layout().words()];
    for _ in 0..8 {
        loader.next(&mut words)?;
    }
    Ok(())
}

fn state_file(masters: bool) -> Result<Vec<u8>> {
    let layout = Params::new(small());
    let block = vec![0x3d; 4 * layout.elements()];
    let block = Values::F32(&block);
    let state = RunState { step: STEP, ..RunState::fresh(small_loader()?.position()) };
    let moments = OptimizerState { m: block, v: block, master: masters.then_some(block) };
    let mut file = Vec::new();
    state::write(&mut file, Shard::UNSHARDED, &state, &layout, moments)?;
    Ok(file)
}

fn read_state(data: &[u8]) -> Result<()> {
    resume(data, None)
}

fn state_files() -> Vec<Vec<u8>> {
    [false, true].map(|masters| state_file(masters).expect("writing to memory succeeds")).into()
}

static STATE_FILE: LazyLock<Vec<u8>> = LazyLock::new(|| state_file(true).expect("writing to memory succeeds"));

fn good_sidecar() -> Sidecar {
    let sum =
        |name, bytes: &[u8]| FileChecksum { name, bytes: bytes.len() as u64, xxh3: format_checksum(xxh3_64(bytes)) };
    let settings = r#"{"lr": 0.1, "schedule": "cosine", "device": "cpu", "shuffle": true, "optimizer": "adamw", "train": "data/*.bin"}"#;
    let identity = Identity {
        program: "llm-rs 0.1.0".to_owned(),
        engine: "CPU, 1 thread".to_owned(),
        config: serde_json::from_str(settings).expect("the settings are JSON"),
        train: fingerprint::of_shards(small_loader().expect("the tokens suffice").shards())
            .expect("the tokens are in memory"),
        val: None,
        ranks: 1,
    };
    let gemm = r#"{"problem": {"m": 64, "n": 32, "k": 16, "transpose_a": true, "transpose_b": false, "element": "Bf16",
        "epilogue": "Bias", "accumulate": false, "batch": 1}, "alignments": [256, 16, 256, 64, 0],
        "algo": [1, 2, 3, 4, 5, 6, 7, 18446744073709551615]}"#;
    let gemm = serde_json::from_str(gemm).expect("the choice is valid JSON");
    Sidecar {
        step: STEP,
        identity,
        progress: Progress { first_val_loss: Some(1.5), ..Progress::default() },
        mixture: None,
        algorithms: Some(Algorithms { machine: "none".to_owned(), choices: vec![gemm] }),
        files: vec![sum(model_name(STEP), &SMALL_MODEL), sum(state_name(STEP, 0), &STATE_FILE)],
    }
}

/// Reads a sidecar. Input that is not a valid sidecar is wrapped in one with the right checksum, which a fuzzer cannot guess.
fn read_sidecar(data: &[u8]) -> Result<()> {
    static NOW: LazyLock<Identity> = LazyLock::new(|| good_sidecar().identity);
    let sealed;
    let file = if Sidecar::parse(data).is_ok() {
        data
    } else {
        let run = data.trim_ascii();
        let head = format!(r#"{{"version": 1, "xxh3": "{}", "run": "#, format_checksum(xxh3_64(run)));
        sealed = [head.as_bytes(), run, b"}"].concat();
        &sealed
    };
    resume(&STATE_FILE, Some((file, &NOW)))
}

fn sidecars() -> Vec<Vec<u8>> {
    let mut file = Vec::new();
    good_sidecar().write(&mut file).expect("writing to memory succeeds");
    vec![file, serde_json::to_vec(&good_sidecar()).expect("writing to memory succeeds")]
}

/// Draws a log, and resumes both logs at a step in their middle.
fn read_log(data: &[u8]) -> Result<()> {
    let run = RunLog::parse(data)?;
    if let Ok(figure) = Figure::new(std::slice::from_ref(&run), &FigureOptions::default()) {
        assert!(figure.to_svg(true).ends_with("</svg>\n"));
    }
    let directory = tempfile::tempdir()?;
    for name in ["main.log", "main.jsonl"] {
        fs::write(directory.path().join(name), data)?;
    }
    Log::resume(directory.path(), 5, true).map(drop)
}

fn logs() -> Vec<Vec<u8>> {
    let main = "s:4 trl:5.2700 lr:0.000300 norm:12.35\ns:5 tel:5.2\ns:5 trl:5.1 lr:0.0003 norm:1.5\ns:6";
    let jsonl =
        "{\"step\":4,\"loss\":5.27,\"lr\":0.0003}\n{\"step\":5,\"val_loss\":5.2}\n{\"step\":5,\"loss\":null}\n{";
    vec![main.into(), jsonl.into()]
}

fn read_config(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let command_line = ["llm-rs", "train", "--steps", "3", "--config"].map(OsString::from);
        Cli::from_arguments(command_line.into_iter().chain([path.into()])).map(drop)
    })
}

fn configs() -> Vec<Vec<u8>> {
    let all_types = "# a value of each type\nsteps = 7\nlr = 6e-4\nmodel = 'd12'\nval-batches = -1\nschedule = \"wsd\"\ntf32 = true\n";
    vec![all_types.into(), "layers = 2\nheads = 2\nchannels = 64\nrecompute = 2\nmaster-weights = 0\n".into()]
}

/// Compares debug states with a model whose weights are all equal.
fn read_debug_state(data: &[u8]) -> Result<()> {
    as_file(&SMALL_MODEL, |model| {
        as_file(data, |state| {
            let mut engine = Cpu::new();
            Verification::open(model, state, &mut engine, false)?.gradients().map(drop)
        })
    })
}

/// Returns files with arbitrary contents; the program has no writer for debug states.
fn debug_states() -> Vec<Vec<u8>> {
    let state = |b: usize, t: usize| {
        let header = [20_240_327, 2, b as i32, t as i32].into_iter().chain([0; 252]);
        let tokens = (0..2 * b * t).map(|i| i as i32 % 5);
        let floats = vec![0; b * t * 5 + 1 + small().parameters()];
        header.chain(tokens).chain(floats).flat_map(i32::to_le_bytes).collect()
    };
    vec![state(1, 1), state(2, 3)]
}

fn read_evaluation(data: &[u8]) -> Result<()> {
    MultipleChoice::read("set.bin".to_owned(), data)?.check(50_257, 1024)
}

fn evaluation_files() -> Vec<Vec<u8>> {
    let example = |context: &[u32], lengths: [usize; 4], label| Example {
        context: context.to_vec(),
        completions: lengths.map(|n| vec![3; n]),
        label,
    };
    let one = [example(&[1], [1; 4], 0)];
    let three = [example(&[5, 6, 7], [1, 2, 3, 4], 3), example(&[8], [2; 4], 1), example(&[9; 9], [5, 1, 1, 1], 2)];
    vec![written(|path| multiple_choice::write(path, &one)), written(|path| multiple_choice::write(path, &three))]
}

fn read_hellaswag(data: &[u8]) -> Result<()> {
    as_file(data, hellaswag::read).map(drop)
}

fn hellaswag_files() -> Vec<Vec<u8>> {
    let line = r#"{"ind": 1, "ctx": "He", "label": 2, "endings": ["eats.", "sl\u0065eps \ud83d\ude42", "", "né"]}"#;
    vec![line.into(), format!("{line}\n\n{line}\r\n").into()]
}

/// Reads the questions twice: as they are, and with shortened contexts.
fn read_mmlu(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let files = [path.to_owned()];
        let longest = mmlu::read(&files, usize::MAX)?.examples.iter().map(Example::longest).max().unwrap_or(0);
        let short = mmlu::read(&files, longest - 1)?;
        assert!(short.shortened > 0 && short.examples.iter().all(|example| example.longest() < longest));
        Ok(())
    })
}

fn mmlu_files() -> Vec<Vec<u8>> {
    let rows = "What is 2 + 2?,3,4,5,22,B\n\"Which, \"\"if\"\" any?\nné\",nan,,\" c, d \",9,D\r\n";
    vec!["Q,1,2,3,4,A".into(), rows.into()]
}

fn read_stories(data: &[u8]) -> Result<()> {
    as_file(data, tinystories::stories).map(drop)
}

fn story_files() -> Vec<Vec<u8>> {
    vec![br#"[{"story": "\n Once \u00e9\ud83d\ude42 ", "words": ["a"]}, {"source": "GPT-4", "story": ""}]"#.to_vec()]
}

/// Counts the bytes of documents.
#[derive(Default)]
struct DocumentBytes(usize);

impl Sink for DocumentBytes {
    fn text(&mut self, text: &str) -> Result<()> {
        self.0 += text.len();
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Reads the documents of a file. Returns the bytes of their text.
fn read_documents(data: &[u8], format: Format, field: &str) -> Result<usize> {
    let reading = Reading { format: Some(format), field: field.into(), separator: Some("<|end|>".into()) };
    let mut bytes = DocumentBytes::default();
    as_file(data, |path| documents::read(path, &reading, &progress::Progress::default(), &mut bytes))?;
    Ok(bytes.0)
}

/// Each byte becomes at most one character of three bytes, U+FFFD.
fn read_limited(data: &[u8], format: Format, field: &str) -> Result<()> {
    assert!(read_documents(data, format, field)? <= 3 * data.len());
    Ok(())
}

fn read_jsonl(data: &[u8]) -> Result<()> {
    read_limited(data, Format::Jsonl, "a.text")
}

fn jsonl_files() -> Vec<Vec<u8>> {
    let lines =
        "{\"id\": [1, {\"x\": null}], \"a\": {\"text\": \"One \\u00e9\\ud83d\\ude42\\n\"}}\r\n\n{\"a.text\": \"\"}";
    vec![lines.into(), "\u{feff}{\"a\": {\"text\": null}}\n".into()]
}

/// Writes roles and contents without a template.
struct Plain;

impl Render for Plain {
    fn render(&self, values: &str) -> Result<Rendered, RenderError> {
        let values: serde_json::Value = serde_json::from_str(values).expect("the values are JSON");
        let mut rendered = Rendered::default();
        for message in values["messages"].as_array().expect("there are messages") {
            let start = rendered.text.len();
            rendered.text.extend(["role", "content"].map(|key| message[key].as_str().unwrap_or_default()));
            if message["role"] == "assistant" {
                rendered.turns.push(start..rendered.text.len());
            }
        }
        Ok(rendered)
    }
}

fn read_conversations(data: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (file, out) = (directory.path().join("chat.jsonl"), directory.path().join("out"));
    fs::write(&file, data)?;
    let options = ChatOptions {
        tokenizer: Tokenizer::bytes(),
        allow_special: false,
        format: Some(Format::Jsonl),
        val_fraction: 0.5,
        shard_tokens: 20,
        overwrite: false,
        program: String::new(),
    };
    let found = documents::find(&[file], &[], None)?;
    conversations::write(&found, &out, &options, &Plain, |_| Ok(Vec::new())).map(drop)
}

fn conversation_files() -> Vec<Vec<u8>> {
    let messages = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a\u00e9"}]}, {"role": "assistant", "content": "b"}]}"#;
    let turns = r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "\n"}]}"#;
    let pair = r#"{"prompt": "a", "completion": "b", "id": 1e99}"#;
    vec![format!("{messages}\n{turns}\n\n{pair}\r\n").into()]
}

/// Encodes all questions of a bundle.
fn encode_bundle(list: &[u8], questions: &[u8]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let tasks = directory.path().join("eval_data");
    fs::create_dir(&tasks)?;
    fs::write(tasks.join("a.jsonl"), questions)?;
    fs::write(directory.path().join("core.yaml"), list)?;
    fs::write(directory.path().join("eval_meta_data.csv"), "Eval Task,Random baseline\na,25\nb,0\nc,50\n")?;
    for task in Bundle::open(directory.path(), None)?.tasks {
        let questions = task.questions(Some(5))?;
        (0..questions.len()).try_for_each(|index| questions.encode(index, &Tokenizer::bytes(), 64).map(drop))?;
    }
    Ok(())
}

const CORE_LIST: &str = "icl_tasks:\n- label: a\n  dataset_uri: a.jsonl\n  num_fewshot: [1]\n  icl_task_type: ";
const CORE_QUESTIONS: [&str; 3] = [
    r#"{"query": "Which?", "choices": ["this", "th\u0061t"], "gold": 1}"#,
    r#"{"context_options": ["He", "She"], "continuation": "runs.", "gold": 0}"#,
    r#"{"context": "One, two,", "continuation": "three"}"#,
];

fn read_core(data: &[u8]) -> Result<()> {
    encode_bundle(data, CORE_QUESTIONS[0].repeat(3).replace("}{", "}\n{").as_bytes())
}

fn core_lists() -> Vec<Vec<u8>> {
    vec![format!("{CORE_LIST}multiple_choice\n  continuation_delimiter: \"\\n\"\n").into()]
}

fn read_core_questions(data: &[u8]) -> Result<()> {
    let kinds = ["multiple_choice", "schema", "language_modeling"];
    let read = kinds.map(|kind| encode_bundle(format!("{CORE_LIST}{kind}\n").as_bytes(), data));
    read.into_iter().reduce(Result::or).expect("there are kinds")
}

fn core_question_files() -> Vec<Vec<u8>> {
    CORE_QUESTIONS.map(|line| format!("{line}\n\n{line}\r\n").into()).into()
}

fn read_questions(data: &[u8]) -> Result<()> {
    for question in as_file(data, exact_match::read)? {
        question.accepts(question.extract("#### 1,000.0").as_deref());
    }
    Ok(())
}

fn question_files() -> Vec<Vec<u8>> {
    let question = r#"{"question": "6 * 3?", "answer": "6 * 3 = <<6*3=18>>18\n#### 18"}"#;
    let messages = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    vec![format!("{question}\n{messages}\n").into(), r#"{"prompt": "a", "answer": "-1.5"}"#.into()]
}

fn read_csv(data: &[u8]) -> Result<()> {
    read_limited(data, Format::Csv, "text")
}

fn csv_files() -> Vec<Vec<u8>> {
    vec!["id,text\n1,\"One, \"\"two\"\"\nthree\"\r\n2,né\n".into(), "\u{feff}text\n\nplain".into()]
}

fn read_text(data: &[u8]) -> Result<()> {
    read_limited(data, Format::Text, "text")
}

fn text_files() -> Vec<Vec<u8>> {
    vec!["One<|end|>\r\ntwo né 日本 \u{1f642}<|end|><|en".into()]
}

fn read_parquet(data: &[u8]) -> Result<()> {
    read_documents(data, Format::Parquet, "text").map(drop)
}

/// Returns files with two row groups, one for each compression.
fn parquet_files() -> Vec<Vec<u8>> {
    let schema = "message schema { OPTIONAL BYTE_ARRAY text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).expect("the schema is valid"));
    let file = |compression| {
        let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
        let mut file = SerializedFileWriter::new(Vec::new(), schema.clone(), properties).expect("the schema is valid");
        for text in ["Once upon a time", "The end"] {
            let mut group = file.next_row_group().expect("the group before is closed");
            let mut column = group.next_column().expect("writing to memory succeeds").expect("there is a column");
            let values = [ByteArray::from(text), ByteArray::from("again")];
            let written = column.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 1]), None);
            written.expect("writing to memory succeeds");
            column.close().expect("writing to memory succeeds");
            group.close().expect("writing to memory succeeds");
        }
        file.into_inner().expect("writing to memory succeeds")
    };
    [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default())].map(file).to_vec()
}

fn encode_and_decode(data: &[u8]) -> Result<()> {
    let ids: Vec<u32> = data.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect();
    let tokenizers = [Tokenizer::gpt2(), Tokenizer::bytes()];
    for tokenizer in &tokenizers {
        tokenizer.decode(&ids);
    }
    let text = str::from_utf8(data)?;
    for tokenizer in &tokenizers {
        for encoded in [tokenizer.encode(text)?, tokenizer.encode_with_special(text)?] {
            assert!(encoded.iter().all(|&id| (id as usize) < tokenizer.vocab()));
            assert_eq!(tokenizer.text(&encoded), text);
        }
    }
    Ok(())
}

fn texts() -> Vec<Vec<u8>> {
    let texts = ["It's 7 o'clock, they'll say: <|endoftext|>", "né 日本 \u{1f642}\n\n\t  x", "\u{a0}\u{2028} \r\n"];
    texts.map(|text| text.as_bytes().to_vec()).into()
}
