//! The files of a Hugging Face directory besides the weights: configuration, generation settings, tokenizer and chat templates.
//!
//! The checkpoints of a run have no place for them. A run that starts from such a directory keeps its files in a directory of its own,
//! so that they do not depend on the original.

use crate::{config, tokenizer};
use ::tokenizer::{Tokenizer, stored};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
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
        let mut file = File::create(target)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
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
