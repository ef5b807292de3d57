//! The files of a Hugging Face directory besides the weights: configuration, generation settings, tokenizer and chat templates.
//!
//! The checkpoints of a run have no place for them. A run that starts from such a directory keeps its files in a directory of its own,
//! so that they do not depend on the original.

use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::{config, tokenizer};
use ::tokenizer::{Tokenizer, stored};
use anyhow::{Context, Result, ensure};
use engine::tensor::DType;
use model::Descriptor;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Name of the directory of a run with the files.
pub const DIRECTORY: &str = "hugging_face";

/// Name of the file with the defaults of text generation.
pub const GENERATION: &str = "generation_config.json";

/// Names of the files with the default chat template: the newer one is only that.
pub const TEMPLATE: &str = "chat_template.jinja";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Name of the directory with chat templates besides the default one.
pub const TEMPLATES: &str = "additional_chat_templates";

/// Replaces the files that the directory `run` keeps by those in `model`, the directory of the model from which the run starts. A run
/// from another model, or with another tokenizer than the model's, keeps none.
pub fn keep(model: Option<&Path>, tokenizer: Option<&Tokenizer>, run: &Path) -> Result<()> {
    let kept = run.join(DIRECTORY);
    let exists = system::fs::exists(&kept).with_context(|| format!("cannot read {}", kept.display()))?;
    if exists {
        check_only(&kept, |name| name == config::FILE || name == GENERATION || is_tokenizer_file(name))?;
    }
    let is_same = |directory: &&Path| match (tokenizer, stored::in_directory(directory)) {
        (Some(tokenizer), Ok(Some(own))) => own == *tokenizer,
        _ => true,
    };
    match model.filter(is_same) {
        Some(model) => atomic_file::write_directory(&kept, |to| {
            let names =
                [config::FILE, GENERATION].map(PathBuf::from).into_iter().filter(|name| model.join(name).is_file());
            copy(names.chain(tokenizer_files(model)?), model, to)
        }),
        None if exists => {
            system::fs::remove_dir_all(&kept).with_context(|| format!("cannot remove {}", kept.display()))
        }
        None => Ok(()),
    }
}

/// Replaces the files that the directory `run` keeps, for a run on conversations: its tokenizer, the template and the tokenizer settings
/// in `data`, and the configuration and the generation settings in `model`, the directory of the model from which the run starts. They
/// get the size of the vocabulary and the end token of the tokenizer settings. A model without a configuration gets a new one.
pub fn keep_of_conversations(
    model: Option<&Path>,
    data: &Path,
    tokenizer: &Tokenizer,
    descriptor: &Descriptor,
    run: &Path,
) -> Result<()> {
    let kept = run.join(DIRECTORY);
    if system::fs::exists(&kept).with_context(|| format!("cannot read {}", kept.display()))? {
        check_only(&kept, |name| name == config::FILE || name == GENERATION || is_tokenizer_file(name))?;
    }
    let settings = tokenizer_config(data)?;
    let eos = settings["eos_token"].as_str().or_else(|| settings["eos_token"]["content"].as_str());
    let eos = tokenizer.special().iter().find(|token| Some(token.text.as_str()) == eos).map(|token| token.id);
    let of_model = |name: &str| -> Result<Option<Value>> {
        let Some(path) = model.map(|model| model.join(name)).filter(|path| path.is_file()) else { return Ok(None) };
        let text = bounded_file::read_to_string(&path, bounded_file::DESCRIPTION)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).map(Some).with_context(|| format!("{}: not valid JSON", path.display()))
    };
    let [bos, document] = tokenizer::bos_eos(tokenizer);
    let mut configuration = match (of_model(config::FILE)?, Architecture::of(descriptor)) {
        (Some(configuration), _) => Some(configuration),
        (None, Ok(architecture)) => {
            let new = ModelConfig::new(architecture, *descriptor, [bos, document]);
            Some(Value::Object(new.exported(DType::F32)))
        }
        // There is no export of this model.
        (None, Err(_)) => None,
    };
    if let Some(configuration) = &mut configuration {
        configuration["vocab_size"] = descriptor.vocab.into();
        if let Some(eos) = eos {
            configuration["eos_token_id"] = eos.into();
        }
    }
    let generation = with_end(of_model(GENERATION)?, eos);
    atomic_file::write_directory(&kept, |to| {
        for (name, value) in [(config::FILE, configuration.as_ref()), (GENERATION, Some(&generation))] {
            if let Some(value) = value {
                write_synced(&to.join(name), &tokenizer::pretty(value)?)?;
            }
        }
        if let Some(file) = tokenizer.file() {
            write_synced(&to.join(file.name), &file.bytes)?;
        }
        copy(
            [TEMPLATE, TOKENIZER_CONFIG].map(PathBuf::from).into_iter().filter(|name| data.join(name).is_file()),
            data,
            to,
        )
    })
}

/// Adds an end token to generation settings. The first one is that of a turn.
fn with_end(generation: Option<Value>, eos: Option<u32>) -> Value {
    let mut generation = generation.filter(Value::is_object).unwrap_or_else(|| json!({}));
    if let Some(eos) = eos {
        let old = match generation["eos_token_id"].take() {
            Value::Array(ids) => ids,
            Value::Null => Vec::new(),
            id => vec![id],
        };
        let ids: Vec<Value> = [eos.into()].into_iter().chain(old.into_iter().filter(|id| *id != eos)).collect();
        generation["eos_token_id"] = if ids.len() == 1 { ids[0].clone() } else { ids.into() };
    }
    generation
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

/// Returns the names of the tokenizer files and chat templates in a directory, relative to it.
pub fn tokenizer_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = tokenizer::FILES.map(PathBuf::from).into();
    names.retain(|name| directory.join(name).is_file());
    if directory.join(TEMPLATES).is_dir() {
        names.extend(entries(directory, TEMPLATES)?.into_iter().map(PathBuf::from).filter(|name| is_template(name)));
    }
    Ok(names)
}

/// Copies files with these relative names, and syncs those in subdirectories.
pub fn copy(names: impl IntoIterator<Item = PathBuf>, from: &Path, to: &Path) -> Result<()> {
    for name in names {
        let (source, target) = (from.join(&name), to.join(&name));
        let bytes = bounded_file::read(&source, bounded_file::TEXT)
            .with_context(|| format!("cannot read {}", source.display()))?;
        if let Some(directory) = name.parent() {
            fs::create_dir_all(to.join(directory))?;
        }
        write_synced(&target, &bytes)?;
    }
    Ok(())
}

/// Returns the contents of `tokenizer_config.json`, or null without such a file.
pub fn tokenizer_config(directory: &Path) -> Result<Value> {
    let path = directory.join(TOKENIZER_CONFIG);
    match bounded_file::read_to_string(&path, bounded_file::DESCRIPTION) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", path.display())),
        Err(_) => Ok(Value::Null),
    }
}

/// Returns the default chat template in a directory with this `tokenizer_config.json`, and the path of its file.
pub fn chat_template(directory: &Path, config: &Value) -> Result<Option<(PathBuf, String)>> {
    let file = directory.join(TEMPLATE);
    if file.exists() {
        let source = bounded_file::read_to_string(&file, bounded_file::SETTINGS)
            .with_context(|| format!("cannot read {}", file.display()))?;
        return Ok(Some((file, source)));
    }
    let source = match &config["chat_template"] {
        // A list of named templates.
        Value::Array(named) => {
            named.iter().find(|template| template["name"] == "default").map_or(&Value::Null, |found| &found["template"])
        }
        source => source,
    };
    Ok(source.as_str().map(|source| (directory.join(TOKENIZER_CONFIG), source.to_owned())))
}

/// Checks that a directory contains only files for which `is_known` returns true, and chat templates.
pub fn check_only(directory: &Path, is_known: impl Fn(&str) -> bool) -> Result<()> {
    let mut names = entries(directory, "")?;
    if let Some(at) = names.iter().position(|name| name == TEMPLATES).filter(|_| directory.join(TEMPLATES).is_dir()) {
        names.remove(at);
        names.extend(entries(directory, TEMPLATES)?);
    }
    let unknown = names.iter().find(|name| !is_known(name) && !is_template(Path::new(name)));
    ensure!(
        unknown.is_none(),
        "{}: expected only files of an export, found {}; it would be deleted, so remove it or choose another directory",
        directory.display(),
        unknown.map_or("", String::as_str)
    );
    Ok(())
}

/// Returns whether `name` is that of a tokenizer file.
pub fn is_tokenizer_file(name: &str) -> bool {
    tokenizer::FILES.contains(&name)
}

/// Returns whether a relative name is that of a chat template in [`TEMPLATES`].
fn is_template(name: &Path) -> bool {
    name.parent().is_some_and(|parent| parent == Path::new(TEMPLATES))
        && name.extension().is_some_and(|extension| extension == "jinja")
}

/// Returns the sorted relative names of the entries of a subdirectory.
fn entries(directory: &Path, subdirectory: &str) -> Result<Vec<String>> {
    let path = directory.join(subdirectory);
    let cannot = || format!("cannot list {}", path.display());
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = PathBuf::from(entry.with_context(cannot)?.file_name());
        anyhow::Ok(Path::new(subdirectory).join(name).display().to_string())
    };
    let mut names: Vec<String> = fs::read_dir(&path).with_context(cannot)?.map(name).collect::<Result<_>>()?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_token_of_a_turn_is_added() {
        let with = |old: Value| with_end(Some(old), Some(7))["eos_token_id"].clone();
        assert_eq!(with(json!({})), 7);
        assert_eq!(with(json!({"eos_token_id": 7})), 7);
        assert_eq!(with(json!({"eos_token_id": 5})), json!([7, 5]));
        assert_eq!(with(json!({"eos_token_id": [5, 7, 6]})), json!([7, 5, 6]));
        assert_eq!(with_end(None, Some(7)), json!({"eos_token_id": 7}));
        assert_eq!(with_end(Some(json!({"top_p": 1})), None), json!({"top_p": 1}));
    }

    #[test]
    fn a_run_on_conversations_keeps_the_template_of_its_data() {
        let directory = tempfile::tempdir().unwrap();
        let [model, data, run] = ["model", "data", "run"].map(|name| directory.path().join(name));
        for path in [&model, &data, &run] {
            fs::create_dir(path).unwrap();
        }
        let extended = tokenizer::with_special(&Tokenizer::gpt2(), &["<|im_end|>"], "a").unwrap();
        fs::write(model.join("config.json"), r#"{"model_type": "gpt2", "vocab_size": 50257}"#).unwrap();
        fs::write(model.join("chat_template.jinja"), "old").unwrap();
        fs::write(data.join("chat_template.jinja"), "new").unwrap();
        fs::write(data.join("tokenizer_config.json"), r#"{"eos_token": "<|im_end|>"}"#).unwrap();
        for model in [Some(model.as_path()), None] {
            let descriptor = Descriptor::gpt2(1, 1, 8, 64, 50258).unwrap();
            keep_of_conversations(model, &data, &extended, &descriptor, &run).unwrap();
            let read = |name: &str| fs::read_to_string(run.join(DIRECTORY).join(name));
            assert_eq!(read("chat_template.jinja").unwrap(), "new");
            assert!(read("generation_config.json").unwrap().contains("\"eos_token_id\": 50257"));
            assert!(read("tokenizer.json").is_ok() && read("tokenizer_config.json").is_ok());
            let config: Value = serde_json::from_str(&read("config.json").unwrap()).unwrap();
            assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(50258), &json!(50257)));
            assert_eq!(config["n_embd"], if model.is_some() { Value::Null } else { 8.into() });
        }
    }
}
