//! Export of models to Hugging Face directories, llm.c's `.bin` files and GGUF files.
//!
//! Tensors are converted one at a time, so a model of any size needs memory for its largest tensor only.

use crate::ModelSource;
use crate::architecture::{ARCHITECTURES, Architecture, Instance, LLAMA, TensorNames};
use crate::companions::{self, GENERATION};
use crate::config::{self, ModelConfig};
use crate::element::{Element, NewTensor, transpose};
use crate::gguf::{self, Value};
use crate::hugging_face::WEIGHTS;
use crate::peft;
use crate::safetensors_file;
use crate::tokenizer::{self, Vocabulary, pretty};
use ::tokenizer::{Pattern, Tokenizer};
use anyhow::{Context, Result, bail, ensure};
use atomic_file::write_directory;
use checkpoint::model_file;
use checkpoint::tensors::{FileShape, Order, Slot};
use engine::ops::{Activation, RotaryPairs};
use engine::tensor::DType;
use model::descriptor::{Positions, Rotary, RotaryScaling, YarnScaling};
use model::{Descriptor, Param, Params};
use serde_json::json;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use system::progress::{self, Progress, Unit};

/// Names of the files that contain the vocabulary of a tokenizer.
const VOCABULARY_FILES: [&str; 3] = ["tokenizer.json", "vocab.json", "tokenizer.model"];

/// The file that marks a directory as an export. The other files do not tell which program wrote them.
pub const MARKER: &str = ".llm-rs-export";

/// Names of all files that an export may write to a directory, besides those of the tokenizer and the code of a class.
const DIRECTORY_FILES: [&str; 6] = [config::FILE, GENERATION, WEIGHTS, MARKER, peft::CONFIG, peft::WEIGHTS];

/// The tokenizer of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenTokenizer {
    /// The tokenizer files of the source, or the file that the user named, were copied.
    Copied,
    /// Written for the built-in tokenizer of this vocabulary size.
    BuiltIn(usize),
    /// There is no tokenizer for the vocabulary.
    None,
}

impl From<&Tokenizer> for WrittenTokenizer {
    fn from(tokenizer: &Tokenizer) -> Self {
        if tokenizer.file().is_some() { Self::Copied } else { Self::BuiltIn(tokenizer.vocab()) }
    }
}

/// Writes a directory that transformers loads: `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer.
/// The tokenizer is the one `named` with `--tokenizer`, or that of the source.
pub fn hugging_face(
    source: &ModelSource,
    named: Option<&str>,
    out: &Path,
    dtype: DType,
    overwrite: bool,
) -> Result<WrittenTokenizer> {
    check_directory(out, overwrite)?;
    let descriptor = source.descriptor();
    let companions = source.companions();
    let copied = if named.is_none() { tokenizer_files(companions.as_deref())? } else { Vec::new() };
    // Files are copied even if llm-rs cannot read them.
    let tokenizer = if copied.iter().any(|file| is_vocabulary(file)) { None } else { source.tokenizer(named)? };
    let special = tokenizer.as_ref().map_or([None; 2], tokenizer::bos_eos);
    let mut config = match source.config()? {
        Some(config) => config,
        None => ModelConfig::new(source.architecture()?, descriptor, special),
    };
    if named.is_some() {
        config.set_bos_eos(special);
    }
    write_directory(out, |directory| {
        let write = |name: &str, bytes: &[u8]| fs::write(directory.join(name), bytes);
        write(MARKER, b"llm-rs export has written this directory, and may replace it.\n")?;
        write(config::FILE, &pretty(&config.exported(dtype))?)?;
        write(GENERATION, &generation_config(source, &config, named.is_none())?)?;
        if let Some(code) = &config.architecture.code {
            write(&code.file(), code.text.as_bytes())?;
        }
        let mut file = BufWriter::new(File::create(directory.join(WEIGHTS))?);
        write_safetensors(&mut file, source, dtype)?;
        file.flush()?;
        let written = if copied.iter().any(|file| is_vocabulary(file)) {
            WrittenTokenizer::Copied
        } else {
            let files =
                tokenizer.as_ref().map(|tokenizer| tokenizer::files(tokenizer, descriptor.max_seq_len)).transpose()?;
            for (name, bytes) in files.into_iter().flatten() {
                write(name, &bytes)?;
            }
            tokenizer.as_ref().map_or(WrittenTokenizer::None, WrittenTokenizer::from)
        };
        if let Some(companions) = companions {
            companions::copy(copied, &companions, directory)?;
        }
        if let Some(template) = source.template_of_run().filter(|_| named.is_none()) {
            let run = atomic_file::parent(&template);
            companions::copy([PathBuf::from(companions::TEMPLATE)], run, directory)?;
        }
        Ok(written)
    })
}

/// Writes a directory that PEFT loads: the adapters of the source, without its other weights, and the tokenizer.
pub fn adapters(source: &ModelSource, out: &Path, dtype: DType, overwrite: bool) -> Result<WrittenTokenizer> {
    check_directory(out, overwrite)?;
    let (adapter, descriptor) = source.adapters().context("internal error: no adapters; please report it")?;
    let architecture = source.architecture()?;
    let companions = source.companions();
    let copied = tokenizer_files(companions.as_deref())?;
    write_directory(out, |directory| {
        let write = |name: &str, bytes: &[u8]| fs::write(directory.join(name), bytes);
        write(MARKER, b"llm-rs export has written this directory, and may replace it.\n")?;
        write(peft::CONFIG, &peft::config_of(descriptor, architecture, adapter.base())?)?;
        let mut file = BufWriter::new(File::create(directory.join(peft::WEIGHTS))?);
        peft::write_tensors(&mut file, adapter, descriptor, architecture, dtype)?;
        file.flush()?;
        let Some(companions) = companions.filter(|_| !copied.is_empty()) else { return Ok(WrittenTokenizer::None) };
        companions::copy(copied, &companions, directory)?;
        Ok(WrittenTokenizer::Copied)
    })
}

/// Writes llm.c's model file.
pub fn llmc(source: &ModelSource, out: &Path, dtype: DType, overwrite: bool) -> Result<()> {
    check_file(out, overwrite)?;
    let descriptor = source.descriptor();
    if !descriptor.is_gpt2() {
        return llmc_llama(source, out, dtype);
    }
    let padding = (descriptor.padded_vocab() - descriptor.vocab) * descriptor.channels * dtype.bytes();
    atomic_file::write(out, |file| {
        let progress = exporting(descriptor.parameters() as u64 * dtype.bytes() as u64);
        model_file::write_header(file, descriptor, dtype)?;
        for (param, layer) in Params::new(descriptor).file_order() {
            let bytes = source.read(param, layer, dtype)?;
            file.write_all(&bytes)?;
            progress.add(bytes.len() as u64);
            if param == Param::Wte {
                file.write_all(&vec![0; padding])?;
            }
        }
        Ok(())
    })
}

/// Writes the model file of llm.c's branch `llama3`. A tied head is written twice, because the format has no tied head.
fn llmc_llama(source: &ModelSource, out: &Path, dtype: DType) -> Result<()> {
    let descriptor = source.descriptor();
    let shape = FileShape { descriptor, padded_vocab: descriptor.vocab, order: Order::LlmCLlama };
    atomic_file::write(out, |file| {
        model_file::llama::write_header(file, &descriptor, dtype)?;
        let of_slot = |Slot { param, elements, layers }| layers.into_iter().map(move |layer| (param, elements, layer));
        let progress = exporting(shape.elements() as u64 * dtype.bytes() as u64);
        for (param, elements, layer) in shape.slots().into_iter().flat_map(of_slot) {
            progress.add((elements * dtype.bytes()) as u64);
            match param {
                None => file.write_all(&vec![0; elements * dtype.bytes()])?,
                Some(Param::LmHead) if descriptor.tied => file.write_all(&source.read(Param::Wte, 0, dtype)?)?,
                Some(param) => {
                    for (_, names) in LLAMA.parts_of(param) {
                        file.write_all(&source.read_part(
                            names,
                            Instance { layer, expert: 0 },
                            dtype,
                            RotaryPairs::Interleaved,
                        )?)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// Writes a GGUF file for llama.cpp, tokenizer included: the one `named` with `--tokenizer`, or that of the source.
///
/// Vectors and position embeddings are always f32, because llama.cpp has no operations for others. The metadata contains the name
/// of the file.
pub fn gguf(
    source: &ModelSource,
    named: Option<&str>,
    out: &Path,
    dtype: DType,
    overwrite: bool,
) -> Result<WrittenTokenizer> {
    check_file(out, overwrite)?;
    let descriptor = source.descriptor();
    // A Mistral without a window is a Llama.
    let architecture = Architecture::of(&descriptor)?;
    ensure!(
        descriptor.experts.is_none(),
        "{}: expected a model without experts for GGUF, found {descriptor}; export with --format hf",
        source.path().display()
    );
    let pairs = architecture.gguf_pairs.with_context(|| {
        format!(
            "{}: expected an architecture that llama.cpp supports, found {}; export with --format hf",
            source.path().display(),
            architecture.model_type
        )
    })?;
    ensure!(
        descriptor.windows.is_none(),
        "{}: expected attention to all earlier tokens, which llama.cpp computes for every {}, found windows; export with --format hf",
        source.path().display(),
        architecture.model_type
    );
    ensure!(
        descriptor.activation != Activation::GeGlu,
        "{}: expected SwiGLU, which llama.cpp computes for every {}, found GEGLU; export with --format hf",
        source.path().display(),
        architecture.model_type
    );
    check_yarn(&descriptor)?;
    let (vocabulary, written) = gguf_vocabulary(source, named)?;
    let name = out.file_stem().map(|stem| stem.to_string_lossy()).unwrap_or_default();
    let all: Vec<_> = architecture.all_tensors(&descriptor).collect();
    let tensor = |&(_, names, instance): &(usize, &TensorNames, Instance)| NewTensor {
        name: instance.name(names.gguf),
        shape: names.shape(&descriptor),
        element: Element::from(gguf_dtype(names, dtype)),
    };
    let mut tensors: Vec<NewTensor> = all.iter().map(tensor).collect();
    let factors = rope_factors(architecture, &descriptor)?;
    tensors.extend(factors.as_ref().map(|factors| NewTensor {
        name: "rope_freqs.weight".to_owned(),
        shape: vec![factors.len()],
        element: Element::F32,
    }));
    let mut metadata = gguf_metadata(source, &name, dtype, vocabulary)?;
    let template = if named.is_none() { source.chat_template()? } else { None };
    metadata.extend(template.map(|template| ("tokenizer.chat_template".to_owned(), Value::Text(template))));
    atomic_file::write(out, |file| {
        gguf::write_header(file, &metadata, &tensors)?;
        let progress = exporting(tensors.iter().map(NewTensor::bytes).sum());
        for ((_, names, instance), tensor) in all.iter().zip(&tensors) {
            progress.add(tensor.bytes());
            file.write_all(&source.read_part(names, *instance, gguf_dtype(names, dtype), pairs)?)?;
            file.write_all(&gguf::padding(tensor))?;
        }
        if let (Some(factors), Some(tensor)) = (factors, tensors.last()) {
            file.write_all(&factors.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
            file.write_all(&gguf::padding(tensor))?;
        }
        Ok(())
    })?;
    Ok(written)
}

/// Begins to write `bytes` bytes of tensors.
fn exporting(bytes: u64) -> Progress {
    progress::start("exporting", Unit::Bytes, bytes)
}

/// Checks that llama.cpp, which has fixed numbers for YaRN besides its factor, rotates as the model does.
fn check_yarn(descriptor: &Descriptor) -> Result<()> {
    let Positions::Rotary(Rotary { scaling: Some(RotaryScaling::Yarn(yarn)), .. }) = descriptor.positions else {
        return Ok(());
    };
    let common = YarnScaling::common(yarn.factor, yarn.original_max_seq_len);
    ensure!(
        yarn == common,
        "gguf: expected the numbers of YaRN that llama.cpp has, {common:?}, found {yarn:?}; export with --format hf"
    );
    Ok(())
}

/// Returns the divisors of llama.cpp's rotary frequencies, one for each pair of a head, or `None` without scaling.
fn rope_factors(architecture: &Architecture, descriptor: &Descriptor) -> Result<Option<Vec<f32>>> {
    let Positions::Rotary(rotary @ Rotary { scaling: Some(RotaryScaling::Llama3(scaling)), .. }) = descriptor.positions
    else {
        return Ok(None);
    };
    ensure!(
        architecture.model_type == LLAMA.model_type,
        "gguf: expected rotary embeddings without scaling for {}, found {scaling:?}; llama.cpp supports this scaling only for \
         Llama, so export with --format hf",
        architecture.model_type
    );
    let frequencies = |rotary: Rotary| rotary.frequencies(descriptor.head_size);
    let pairs = frequencies(Rotary { scaling: None, ..rotary }).into_iter().zip(frequencies(rotary));
    Ok(Some(pairs.map(|(plain, scaled)| plain / scaled).collect()))
}

/// Checks that `out` does not exist, is empty, or holds nothing but an earlier export that may be replaced.
fn check_directory(out: &Path, overwrite: bool) -> Result<()> {
    let name = out.display();
    let cannot = || format!("cannot list {name}");
    match fs::metadata(out) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {name}")),
        Ok(metadata) => ensure!(metadata.is_dir(), "{name}: expected a directory or a new name, found a file"),
    }
    let first = fs::read_dir(out).with_context(cannot)?.next().transpose().with_context(cannot)?;
    let Some(first) = first else { return Ok(()) };
    ensure!(
        out.join(MARKER).is_file(),
        "{name}: expected a new or empty directory, or an export with {MARKER}, found {} without it: files of another program, or an \
         export of an earlier version; choose another directory, or remove this one",
        first.file_name().display()
    );
    let is_code = |file: &str| ARCHITECTURES.iter().any(|it| it.code.as_ref().is_some_and(|code| code.file() == file));
    companions::check_only(out, |file| {
        DIRECTORY_FILES.contains(&file) || is_code(file) || companions::is_tokenizer_file(file)
    })?;
    ensure!(overwrite, "{name}: expected a new or empty directory, found an export; add --overwrite to replace it");
    Ok(())
}

/// Checks that the file `out` does not exist or may be replaced.
fn check_file(out: &Path, overwrite: bool) -> Result<()> {
    let name = out.display();
    ensure!(!out.is_dir(), "{name}: expected the name of a file, found a directory");
    ensure!(
        overwrite || !out.try_exists().with_context(|| format!("cannot read {name}"))?,
        "{name}: expected a new file, found an existing one; add --overwrite to replace it"
    );
    atomic_file::create_directory(atomic_file::parent(out))
}

fn write_safetensors(out: &mut impl Write, source: &ModelSource, dtype: DType) -> Result<()> {
    let (architecture, descriptor) = (source.architecture()?, source.descriptor());
    let described = |(_, names, instance): (usize, &'static TensorNames, Instance)| {
        let name = architecture.full_name(names, instance);
        (NewTensor { name, shape: names.hugging_face_shape(&descriptor), element: dtype.into() }, names, instance)
    };
    let mut all: Vec<_> = architecture.all_tensors(&descriptor).map(described).collect();
    all.sort_by(|(a, ..), (b, ..)| a.name.cmp(&b.name));
    let header: Vec<NewTensor> = all.iter().map(|(tensor, ..)| tensor.clone()).collect();
    safetensors_file::write_header(out, &header)?;
    let progress = exporting(header.iter().map(NewTensor::bytes).sum());
    for (tensor, names, instance) in all {
        progress.add(tensor.bytes());
        let mut bytes = source.read_part(names, instance, dtype, RotaryPairs::HalfSplit)?;
        architecture.convert_rotation(names, &descriptor, dtype.bytes(), &mut bytes);
        if names.transposed {
            out.write_all(&transpose(&bytes, names.shape(&descriptor)[0], dtype.bytes()))?;
        } else {
            out.write_all(&bytes)?;
        }
    }
    Ok(())
}

/// Returns the generation settings: those of the source if `keep` is set and it has them.
fn generation_config(source: &ModelSource, config: &ModelConfig, keep: bool) -> Result<Vec<u8>> {
    let of_source = source.companions().map(|directory| directory.join(GENERATION));
    if let Some(path) = of_source.filter(|path| keep && path.exists()) {
        return bounded_file::read(&path, bounded_file::DESCRIPTION)
            .with_context(|| format!("cannot read {}", path.display()));
    }
    let [bos, eos] = config.bos_eos();
    pretty(&json!({"_from_model_config": true, "bos_token_id": bos, "eos_token_id": eos}))
}

/// Returns the names of the tokenizer files and chat templates in a directory. If none of them contains a vocabulary, only templates remain:
/// the other files describe a tokenizer that is not there.
fn tokenizer_files(directory: Option<&Path>) -> Result<Vec<PathBuf>> {
    let mut files = directory.map(companions::tokenizer_files).transpose()?.unwrap_or_default();
    if !files.iter().any(|file| is_vocabulary(file)) {
        files.retain(|file| file.extension().is_some_and(|extension| extension == "jinja"));
    }
    Ok(files)
}

fn is_vocabulary(file: &Path) -> bool {
    VOCABULARY_FILES.iter().any(|name| file.as_os_str() == *name)
}

fn gguf_vocabulary(source: &ModelSource, named: Option<&str>) -> Result<(Vocabulary, WrittenTokenizer)> {
    let in_directory = source.companions().filter(|directory| directory.join(tokenizer::FILES[0]).exists());
    if let (Some(directory), Some(config), None) = (in_directory, source.config()?, named) {
        return Ok((Vocabulary::read(&directory, &config)?, WrittenTokenizer::Copied));
    }
    let size = source.descriptor().vocab;
    match source.tokenizer(named)? {
        Some(tokenizer) => Ok((Vocabulary::of(&tokenizer, size)?, WrittenTokenizer::from(&tokenizer))),
        None => bail!(
            "{}: expected a vocabulary of 50257 (GPT-2) or 256 (bytes) or a tokenizer.json or tokenizer.model, found a vocabulary of {size}; a GGUF \
             file needs its tokenizer: pass it with --tokenizer FILE",
            source.path().display()
        ),
    }
}

/// Returns the storage type of a tensor. llama.cpp adds vectors and position embeddings to f32 activations.
fn gguf_dtype(names: &TensorNames, dtype: DType) -> DType {
    if names.param.is_matrix() && names.param != Param::Wpe { dtype } else { DType::F32 }
}

/// Returns the metadata. `llama_model` of llama.cpp lists the keys of each architecture.
fn gguf_metadata(
    source: &ModelSource,
    name: &str,
    dtype: DType,
    vocabulary: Vocabulary,
) -> Result<Vec<(String, Value)>> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const USER_DEFINED: i32 = 4;
    const UNUSED: i32 = 5;
    let descriptor = source.descriptor();
    let kind = Architecture::of(&descriptor)?.model_type;
    // llama.cpp's names of the types: ALL_F32, MOSTLY_BF16.
    let file_type = if dtype == DType::Bf16 { 32 } else { 0 };
    ensure!(
        u32::try_from(descriptor.max_seq_len).is_ok(),
        "max_position_embeddings: expected at most {}, which the format can hold, found {}; reduce it in config.json",
        u32::MAX,
        descriptor.max_seq_len
    );
    let size = |n: usize| Value::U32(n as u32);
    let text = |text: &str| Value::Text(text.to_owned());
    let mut types = vec![NORMAL; vocabulary.tokens.len()];
    vocabulary.special.iter().for_each(|&id| types[id as usize] = CONTROL);
    vocabulary.added.iter().for_each(|&id| types[id as usize] = USER_DEFINED);
    vocabulary.unused.iter().for_each(|&id| types[id as usize] = UNUSED);
    // llama.cpp's names of the split patterns.
    let splitter = match vocabulary.pattern {
        Pattern::Gpt2 => "gpt-2",
        Pattern::Llama3 => "llama-bpe",
        Pattern::Qwen2 => "qwen2",
        Pattern::Nanochat => bail!(
            "tokenizer: expected the split pattern of GPT-2, Llama 3 or Qwen 2, found nanochat's, which llama.cpp does not have; \
             export with --format hf"
        ),
    };
    let merges = vocabulary.merge_lines();
    let [bos, eos] = [vocabulary.bos, vocabulary.eos];
    let mut metadata = vec![
        ("general.architecture".to_owned(), text(kind)),
        ("general.name".to_owned(), text(name)),
        ("general.file_type".to_owned(), Value::U32(file_type)),
        (format!("{kind}.block_count"), size(descriptor.layers)),
        (format!("{kind}.context_length"), size(descriptor.max_seq_len)),
        (format!("{kind}.embedding_length"), size(descriptor.channels)),
        (format!("{kind}.feed_forward_length"), size(descriptor.mlp_channels)),
        (format!("{kind}.attention.head_count"), size(descriptor.heads)),
        ("tokenizer.ggml.model".to_owned(), text("gpt2")),
        ("tokenizer.ggml.pre".to_owned(), text(splitter)),
        ("tokenizer.ggml.tokens".to_owned(), Value::Texts(vocabulary.tokens)),
        ("tokenizer.ggml.token_type".to_owned(), Value::I32s(types)),
        ("tokenizer.ggml.merges".to_owned(), Value::Texts(merges)),
        ("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(vocabulary.adds_bos)),
        ("tokenizer.ggml.add_space_prefix".to_owned(), Value::Bool(false)),
    ];
    // llama.cpp would use id 11 for both. Id 0 of the byte vocabulary never occurs in text.
    metadata.push(("tokenizer.ggml.bos_token_id".to_owned(), Value::U32(bos.or(eos).unwrap_or(0))));
    metadata.push(("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(eos.unwrap_or(0))));
    metadata.push(match descriptor.norm.eps() {
        None => (format!("{kind}.attention.layer_norm_epsilon"), Value::F32(1e-5)),
        Some(eps) => (format!("{kind}.attention.layer_norm_rms_epsilon"), Value::F32(eps)),
    });
    if let Positions::Rotary(rotary) = descriptor.positions {
        metadata.extend([
            (format!("{kind}.attention.head_count_kv"), size(descriptor.kv_heads)),
            (format!("{kind}.attention.key_length"), size(descriptor.head_size)),
            (format!("{kind}.attention.value_length"), size(descriptor.head_size)),
            (format!("{kind}.rope.dimension_count"), size(descriptor.head_size)),
            (format!("{kind}.rope.freq_base"), Value::F32(rotary.theta)),
            (format!("{kind}.vocab_size"), size(descriptor.vocab)),
        ]);
        let scaling = match rotary.scaling {
            Some(RotaryScaling::Yarn(yarn)) => Some(("yarn", yarn.factor, Some(yarn.original_max_seq_len))),
            Some(RotaryScaling::Linear { factor }) => Some(("linear", factor, None)),
            Some(RotaryScaling::Llama3(_)) | None => None,
        };
        if let Some((name, factor, original)) = scaling {
            let key = |key: &str| format!("{kind}.rope.scaling.{key}");
            metadata.extend([(key("type"), text(name)), (key("factor"), Value::F32(factor))]);
            metadata.extend(original.map(|original| (key("original_context_length"), size(original))));
        }
    }
    Ok(metadata)
}
