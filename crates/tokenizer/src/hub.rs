//! Names of models on the Hugging Face Hub, which users pass in place of a path. This program does not download models.

use std::path::{Component, Path};

/// Extensions of files that users name.
const EXTENSIONS: [&str; 5] = ["bin", "gguf", "json", "model", "safetensors"];

/// Returns how to download the model if `path` looks like OWNER/MODEL rather than a path: neither the file nor the directory OWNER exists.
pub fn advice(path: &Path) -> Option<String> {
    let mut parts = path.components();
    let (Some(Component::Normal(owner)), Some(Component::Normal(model)), None) =
        (parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let is_name = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    let is_file = path.extension().is_some_and(|found| EXTENSIONS.iter().any(|extension| found == *extension));
    let (owner, model) = (owner.to_str()?, model.to_str()?);
    if is_file || !is_name(owner) || !is_name(model) || Path::new(owner).exists() {
        return None;
    }
    Some(format!(
        "if it is a model of the Hugging Face Hub, run `hf download {owner}/{model} --local-dir models/{model}` and pass models/{model}"
    ))
}
