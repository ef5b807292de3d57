//! Lists the files of a data set on the Hugging Face Hub, with their sizes and checksums.

use super::{Remote, TIMEOUT, agent, without_network};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::env;
use ureq::http::header;

/// A server with the interface of the Hub, as in `huggingface_hub`.
const ENDPOINT_VARIABLE: &str = "HF_ENDPOINT";
const ENDPOINT: &str = "https://huggingface.co";

/// An entry of a directory.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    size: u64,
    lfs: Option<Lfs>,
}

/// A file in large file storage.
#[derive(Deserialize)]
struct Lfs {
    /// SHA-256.
    oid: String,
}

/// Returns the files in a directory of a data set that end in `suffix`, sorted by name. An empty directory is the root.
///
/// The environment variable `HF_ENDPOINT` replaces the server.
pub fn files(data_set: &str, directory: &str, suffix: &str) -> Result<Vec<Remote>> {
    let endpoint = env::var(ENDPOINT_VARIABLE).unwrap_or_else(|_| ENDPOINT.to_owned());
    files_at(endpoint.trim_end_matches('/'), data_set, directory, suffix)
}

pub(super) fn files_at(endpoint: &str, data_set: &str, directory: &str, suffix: &str) -> Result<Vec<Remote>> {
    let separator = if directory.is_empty() { "" } else { "/" };
    let first = format!("{endpoint}/api/datasets/{data_set}/tree/main{separator}{directory}");
    let entries = list(&first).with_context(|| without_network(&first, "FILE|DIR"))?;
    let mut files: Vec<Entry> =
        entries.into_iter().filter(|entry| entry.kind == "file" && entry.path.ends_with(suffix)).collect();
    ensure!(!files.is_empty(), "{first}: expected files that end in {suffix}, found none");
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let remote = |Entry { path, size, lfs, .. }| Remote {
        url: format!("{endpoint}/datasets/{data_set}/resolve/main/{path}"),
        bytes: Some(size),
        sha256: lfs.map(|lfs| lfs.oid),
    };
    Ok(files.into_iter().map(remote).collect())
}

/// Returns the entries of a directory, from all pages of the answer.
fn list(first: &str) -> Result<Vec<Entry>> {
    let agent = agent(TIMEOUT);
    let mut next = Some(first.to_owned());
    let mut entries = Vec::new();
    while let Some(url) = next {
        let mut response = agent.get(&url).call()?;
        if !response.status().is_success() {
            bail!("expected status 200 (OK), found {}", response.status());
        }
        let link = response.headers().get(header::LINK).and_then(|value| value.to_str().ok());
        next = link.and_then(next_page);
        let text = response.body_mut().read_to_string()?;
        let page: Vec<Entry> = serde_json::from_str(&text).context("expected a list of files in JSON")?;
        entries.extend(page);
    }
    Ok(entries)
}

/// Returns the address in a header such as `<https://…>; rel="next"`.
fn next_page(link: &str) -> Option<String> {
    let of_next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    let (_, after) = of_next.split_once('<')?;
    after.split_once('>').map(|(url, _)| url.to_owned())
}
