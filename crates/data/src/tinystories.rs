//! TinyStories, with the stories, split and order of llm.c's `dev/data/tinystories.py`.

use crate::encode::{self, Push};
use crate::shard_set::{ShardSet, Written};
use crate::tokens::Width;
use crate::{local_files, python_random};
use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use indicatif::ProgressBar;
use serde::Deserialize;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use tar::Archive;
use tokenizer::Tokenizer;

/// Repository of the archive on the Hugging Face Hub.
pub const DATA_SET: &str = "roneneldan/TinyStories";
/// Name of the archive.
pub const ARCHIVE: &str = "TinyStories_all_data.tar.gz";

/// Seed of the order of the stories of the first file of a split.
const SEED: u32 = 1337;
const NAMES: [&str; 2] = ["TinyStories_val.bin", "TinyStories_train.bin"];

/// An object of a file. Other fields are ignored.
#[derive(Deserialize)]
struct Story {
    story: String,
}

/// Tokenizes the stories and writes `TinyStories_val.bin` and `TinyStories_train.bin` into `out`.
///
/// `from` is the archive `TinyStories_all_data.tar.gz` or a directory with its JSON files. The first file, by name, is the
/// validation split. The stories of each file are shuffled as in llm.c. The files follow one another by name; in llm.c, their
/// order varies from run to run.
pub fn write(from: &Path, out: &Path, tokenizer: &Tokenizer, progress: &ProgressBar) -> Result<[Written; 2]> {
    let is_directory = fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?.is_dir();
    let files = if is_directory { local_files::find(from, "json")? } else { Vec::new() };
    let mut set = ShardSet::create(out, Width::of_vocab(tokenizer.vocab()))?;
    let files = if is_directory { files } else { extract(from, set.temporary())? };
    ensure!(
        files.len() >= 2,
        "{}: expected at least 2 JSON files, because the first one is the validation split, found {}",
        from.display(),
        files.len()
    );
    let size = files.iter().filter_map(|file| fs::metadata(file).ok()).map(|found| found.len()).sum();
    progress.set_length(size);
    progress.set_position(0);
    for (name, files) in NAMES.into_iter().zip([&files[..1], &files[1..]]) {
        let mut shard = set.shard(name)?;
        let read = |push: &mut Push| {
            for (i, file) in files.iter().enumerate() {
                let mut stories = stories(file)?;
                python_random::shuffle(SEED + i as u32, &mut stories);
                stories.into_iter().try_for_each(&mut *push)?;
                progress.inc(fs::metadata(file).map_or(0, |found| found.len()));
            }
            Ok(())
        };
        encode::documents(tokenizer, read, |ids| shard.extend(ids))?;
        set.finish(shard)?;
    }
    let written = set.commit(&NAMES)?;
    Ok(written.try_into().expect("two files were written"))
}

/// Returns the stories of a JSON file: an array of objects with a field `story`. White space at their ends is removed.
pub fn stories(file: &Path) -> Result<Vec<String>> {
    let name = file.file_name().unwrap_or_default().display();
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let stories: Vec<Story> = serde_json::from_slice(&bytes)
        .with_context(|| format!("{name}: expected an array of objects with a field 'story', a string"))?;
    ensure!(!stories.is_empty(), "{name}: expected stories, found an empty array");
    Ok(stories.iter().map(|story| strip(&story.story).to_owned()).collect())
}

/// Removes white space at both ends, as Python's `str.strip` does.
fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c))
}

/// Extracts the JSON files of an archive into a directory. Returns their paths, sorted by name.
fn extract(archive: &Path, directory: &Path) -> Result<Vec<PathBuf>> {
    let name = archive.display();
    let file = File::open(archive).with_context(|| format!("cannot open {name}"))?;
    let damaged = || format!("{name}: expected a complete .tar.gz archive or a directory of JSON files");
    let mut entries = Archive::new(GzDecoder::new(BufReader::new(file)));
    let mut files = Vec::new();
    for entry in entries.entries().with_context(damaged)? {
        let mut entry = entry.with_context(damaged)?;
        let path = entry.path().with_context(damaged)?.into_owned();
        // Only the last part of the path is used, so no entry is written outside of the directory. Archives made on a Mac
        // contain hidden files that start with `._`.
        let Some(last) = path.file_name().filter(|last| !last.as_encoded_bytes().starts_with(b".")) else { continue };
        if !entry.header().entry_type().is_file() || path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let to = directory.join(last);
        let mut out = match File::create_new(&to) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                bail!("{name}: expected one file {}, found two", last.display())
            }
            created => created.with_context(|| format!("cannot write {}", to.display()))?,
        };
        io::copy(&mut entry, &mut out).with_context(damaged)?;
        files.push(to);
    }
    ensure!(!files.is_empty(), "{name}: expected JSON files, found none");
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests;
