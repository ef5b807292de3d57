//! ClimbMix in the shuffled shards of nanochat, with nanochat's split: the last shard is the validation data.

use crate::dataset::ShardNames;
use crate::download::{self, Remote};
use crate::text::{self, Layout, Summary, Validation};
use crate::web_pages;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// Repository of the parquet files on the Hugging Face Hub.
pub const DATA_SET: &str = "karpathy/climbmix-400b-shuffle";
/// Number of parquet files of the training split. The one after them is the validation split.
pub const TRAINING_FILES: usize = 6542;
/// The names of the shards of tokens.
pub const NAMES: ShardNames = ShardNames::CLIMBMIX;

/// Returns the first `training` parquet files of the training split and that of the validation split, on the Hugging Face Hub.
pub fn remote_files(training: usize) -> Result<Vec<Remote>> {
    select(&download::huggingface_files(DATA_SET, "", ".parquet")?, training)
}

fn select(listed: &[Remote], training: usize) -> Result<Vec<Remote>> {
    let by_name: BTreeMap<&str, &Remote> = listed.iter().map(|remote| (remote.name(), remote)).collect();
    let numbers = (0..training).chain([TRAINING_FILES]);
    let find = |number: usize| {
        let name = format!("shard_{number:05}.parquet");
        let found = by_name.get(name.as_str()).copied().cloned();
        found.with_context(|| {
            format!(
                "{DATA_SET}: expected {name} in the list of files, found {} files without it; use a smaller --shards, or another server \
                 (HF_ENDPOINT)",
                listed.len()
            )
        })
    };
    numbers.map(find).collect()
}

/// Returns the parquet files in a directory, sorted by name. The last one is the validation split.
pub fn files(from: &Path) -> Result<Vec<PathBuf>> {
    crate::local_files::find(from, "parquet")
}

/// Tokenizes the column `text` of parquet files and writes `climbmix_train_NNNNNN.bin`, `climbmix_val_NNNNNN.bin` and `dataset.json` into
/// `out`. The last file is the validation split.
pub fn write(
    files: &[PathBuf],
    out: &Path,
    shard_tokens: usize,
    tokenizer: &Tokenizer,
    program: &str,
) -> Result<Summary> {
    text::check_shard_tokens(shard_tokens)?;
    let Some((validation_file, training_files)) = files.split_last().filter(|(_, others)| !others.is_empty()) else {
        bail!(
            "expected at least 2 parquet files, because the last one is the validation split, found {}; pass a directory with more \
             files with --from",
            files.len()
        );
    };
    let rows = web_pages::count_rows(files)?;
    let (validation_rows, training_rows) = (rows[files.len() - 1], rows[..files.len() - 1].iter().sum::<usize>());
    for (split, rows) in [("validation", validation_rows), ("training", training_rows)] {
        ensure!(
            rows > 0,
            "{split} split: expected parquet files with documents, found no rows; download the files again"
        );
    }
    let layout = Layout { names: NAMES, shard_tokens, validation: Validation::FirstDocuments(validation_rows) };
    let files = [std::slice::from_ref(validation_file), training_files].concat();
    web_pages::write(&files, out, layout, tokenizer, program)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(number: usize) -> Remote {
        Remote { url: format!("http://host/main/shard_{number:05}.parquet"), bytes: Some(7), sha256: None }
    }

    #[test]
    fn the_validation_file_follows_the_first_training_files() {
        let listed: Vec<Remote> = [0, 1, 2, 10, TRAINING_FILES].into_iter().map(remote).collect();
        assert_eq!(select(&listed, 2).unwrap(), [0, 1, TRAINING_FILES].map(remote));
        let message = select(&listed, 4).unwrap_err().to_string();
        assert!(message.contains("expected shard_00003.parquet in the list of files, found 5 files"), "{message}");
        let message = select(&listed[..4], 2).unwrap_err().to_string();
        assert!(message.contains("expected shard_06542.parquet"), "{message}");
    }

    #[test]
    fn one_file_has_no_validation_split() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("shard_00000.parquet");
        let message = write(&[file], &dir.path().join("out"), 100, &Tokenizer::bytes(), "test").unwrap_err();
        assert!(message.to_string().contains("expected at least 2 parquet files"), "{message}");
    }
}
