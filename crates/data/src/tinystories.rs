//! TinyStories, with the stories, split and order of llm.c's `dev/data/tinystories.py`.

use crate::dataset::{Input, Replacement, Replaces, ShardNames};
use crate::text::{self, Encoder, Layout, Summary, Validation};
use crate::{archive, local_files, python_random};
use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use serde::Deserialize;
use std::fs::{self};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// Repository of the archive on the Hugging Face Hub.
pub const DATA_SET: &str = "roneneldan/TinyStories";
/// Name of the archive.
pub const ARCHIVE: &str = "TinyStories_all_data.tar.gz";

/// Seed of the order of the stories of the first file of a split.
const SEED: u32 = 1337;

/// The names of the files.
pub const NAMES: ShardNames = ShardNames::TINY_STORIES;

/// An object of a file. Other fields are ignored.
#[derive(Deserialize)]
struct Story {
    story: String,
}

/// Tokenizes the stories and writes `TinyStories_val.bin`, `TinyStories_train.bin` and `dataset.json` into `out`.
///
/// `from` is the archive `TinyStories_all_data.tar.gz` or a directory with its JSON files. The first file, by name, is the
/// validation split. The stories of each file are shuffled as in llm.c. The files follow one another by name; in llm.c, their
/// order varies from run to run.
pub fn write(from: &Path, out: &Path, tokenizer: &Tokenizer, program: &str) -> Result<Summary> {
    let is_directory = fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?.is_dir();
    let files = if is_directory { local_files::find(from, "json")? } else { Vec::new() };
    let replacement = Replacement::begin(out, Replaces::Same(NAMES))?;
    let files = if is_directory { files } else { extract(from, &replacement.directory().join("source"))? };
    ensure!(
        files.len() >= 2,
        "{}: expected at least 2 JSON files, because the first one is the validation split, found {}",
        from.display(),
        files.len()
    );
    let size = |file: &PathBuf| fs::metadata(file).map_or(0, |found| found.len());
    let progress = progress::start("tokenizing", Unit::Bytes, files.iter().map(size).sum());
    let validation = Validation::FirstDocuments(stories(&files[0])?.len());
    let layout = Layout { names: NAMES, shard_tokens: usize::MAX, validation };
    text::write_shards(replacement, &Encoder::of_llmc(tokenizer), layout, program, |sink| {
        for (i, file) in files.iter().enumerate() {
            let mut stories = stories(file)?;
            // In each split, the seeds count from SEED.
            python_random::shuffle(SEED + i.saturating_sub(1) as u32, &mut stories);
            for story in stories {
                sink.text(&story)?;
                sink.end()?;
            }
            progress.add(size(file));
        }
        Ok(Summary { input: Input { files: files.len(), ..Input::default() }, ..Summary::default() })
    })
}

/// Returns the stories of a JSON file: an array of objects with a field `story`. White space at their ends is removed.
pub fn stories(file: &Path) -> Result<Vec<String>> {
    let name = file.file_name().unwrap_or_default().display();
    let bytes =
        bounded_file::read(file, bounded_file::TEXT).with_context(|| format!("cannot read {}", file.display()))?;
    let stories: Vec<Story> = serde_json::from_slice(&bytes)
        .with_context(|| format!("{name}: expected an array of objects with a field 'story', a string"))?;
    ensure!(!stories.is_empty(), "{name}: expected stories, found an empty array");
    Ok(stories.iter().map(|story| strip(&story.story).to_owned()).collect())
}

/// Removes white space at both ends, as Python's `str.strip` does.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c))
}

/// Extracts the JSON files of an archive into a new directory. Returns their paths, sorted by name.
fn extract(archive: &Path, directory: &Path) -> Result<Vec<PathBuf>> {
    let name = archive.display().to_string();
    let file = bounded_file::open(archive).with_context(|| format!("cannot open {name}"))?;
    let expected = "a complete .tar.gz archive or a directory of JSON files";
    let is_json = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    let bytes = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
    let counted = progress::start("extracting", Unit::Bytes, bytes).count(file);
    archive::extract(GzDecoder::new(BufReader::new(counted)), &name, expected, directory, is_json)
}

#[cfg(test)]
mod tests;
