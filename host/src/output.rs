//! Files that commands write where a user says. An existing file is replaced only if the same command could have written it: a typing
//! error must not cost a model, a data set or a text.

use anyhow::{Context, Result, ensure};
use interchange::safetensors_file;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes at the start of a file that are searched for a mark.
const SEARCHED: u64 = 1 << 16;

/// A kind of file.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The name in messages.
    pub name: &'static str,
    /// The properties that all its files share.
    pub mark: Mark,
}

/// The contents by which files of a kind are recognized.
#[derive(Clone, Copy, Debug)]
pub enum Mark {
    /// The file begins with one of these.
    Start(&'static [&'static [u8]]),
    /// The beginning of the file contains this.
    Contains(&'static str),
    /// A JSON object with these keys.
    Keys(&'static [&'static str]),
    /// A safetensors file of these tensors, in alphabetical order.
    Tensors(&'static [&'static str]),
}

/// Fails if `path` cannot become a file of this kind, or if it exists and is not one. Commands call it before they compute.
pub fn check(path: &Path, kind: Kind) -> Result<()> {
    let directory = atomic_file::parent(path);
    let (shown, at) = (path.display(), directory.display());
    ensure!(directory.is_dir(), "cannot write {shown}: expected the directory {at}, found none; create it");
    check_existing(path, kind)
}

/// Fails if `path` exists and is not a file of this kind. Empty files are replaced.
pub fn check_existing(path: &Path, kind: Kind) -> Result<()> {
    let shown = path.display();
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        metadata => metadata.with_context(|| format!("cannot write {shown}"))?,
    };
    ensure!(!metadata.is_dir(), "cannot write {shown}: expected the name of a file, found a directory");
    ensure!(metadata.is_file(), "cannot write {shown}: expected the name of a file, found a device or a pipe");
    let is_ours = metadata.len() == 0 || kind.mark.is_in(path).with_context(|| format!("cannot read {shown}"))?;
    ensure!(
        is_ours,
        "cannot write {shown}: expected a new file or {} to replace, found another file; choose another name, or remove it",
        kind.name
    );
    Ok(())
}

/// Returns whether both paths name the same existing file or directory.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    id(one).is_some() && id(one) == id(other)
}

/// Fails if the output `path` is the input `input` of the command, perhaps by another name.
pub fn check_input(path: &Path, input: &Path) -> Result<()> {
    ensure!(
        !is_same(path, input),
        "cannot write {}: expected a file other than the input {}, found the same file; choose another name",
        path.display(),
        input.display()
    );
    Ok(())
}

/// Fails if two outputs of a command have the same path.
pub fn check_distinct(one: Option<&Path>, other: Option<&Path>) -> Result<()> {
    let (Some(one), Some(other)) = (one, other) else { return Ok(()) };
    ensure!(
        std::path::absolute(one)? != std::path::absolute(other)?,
        "cannot write {}: expected different files, found it twice; choose another name for one of them",
        one.display()
    );
    check_input(one, other)
}

impl Mark {
    fn is_in(self, path: &Path) -> std::io::Result<bool> {
        let start = || {
            let mut bytes = Vec::new();
            File::open(path)?.take(SEARCHED).read_to_end(&mut bytes)?;
            std::io::Result::Ok(bytes)
        };
        Ok(match self {
            Self::Start(starts) => {
                let found = start()?;
                starts.iter().any(|expected| found.starts_with(expected))
            }
            Self::Contains(text) => start()?.windows(text.len()).any(|found| found == text.as_bytes()),
            Self::Keys(keys) => {
                let object: serde_json::Result<HashMap<String, serde_json::Value>> =
                    serde_json::from_reader(BufReader::new(File::open(path)?));
                object.is_ok_and(|object| keys.iter().all(|key| object.contains_key(*key)))
            }
            Self::Tensors(names) => {
                safetensors_file::open(path).is_ok_and(|file| file.tensors().keys().eq(names.iter().copied()))
            }
        })
    }
}
