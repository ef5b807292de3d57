//! The identity of a model's files, which shows whether they have been replaced.

use anyhow::{Context, Result};
use checkpoint::resume::newest_model_path;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Extensions of the files of a Hugging Face directory that belong to the model.
const EXTENSIONS: [&str; 5] = ["jinja", "json", "model", "safetensors", "txt"];

/// The files of a model. Two identities differ if a file has been replaced or changed, even if its path and size are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(Vec<(PathBuf, Stamp)>);

/// Device, inode, size, and times of the last change of the contents and of the inode.
type Stamp = [i64; 7];

impl Identity {
    /// Returns the identity of the model that a path names: a file, the newest checkpoint of a run, or a Hugging Face directory. No
    /// file is read.
    pub fn of(path: &Path) -> Result<Self> {
        let file = if is_run(path) { newest_model_path(path)? } else { None };
        let path = file.as_deref().unwrap_or(path);
        let metadata = |path: &Path| path.metadata().with_context(|| format!("cannot read {}", path.display()));
        let found = metadata(path)?;
        if !found.is_dir() {
            return Ok(Self(vec![(path.to_owned(), stamp(&found))]));
        }
        let mut files = Vec::new();
        for entry in fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known)) {
                files.push((path.clone(), stamp(&metadata(&path)?)));
            }
        }
        files.sort();
        Ok(Self(files))
    }
}

/// Returns whether a path is the directory of a run rather than a file or a Hugging Face directory.
pub fn is_run(path: &Path) -> bool {
    path.is_dir() && !path.join("config.json").exists()
}

fn stamp(of: &Metadata) -> Stamp {
    let [device, inode, size] = [of.dev(), of.ino(), of.size()].map(u64::cast_signed);
    [device, inode, size, of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_has_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let [file, other] = ["model.safetensors", "other"].map(|name| dir.path().join(name));
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        fs::write(&file, "abc").unwrap();
        let of = |path: &Path| Identity::of(path).unwrap();
        let before = [of(&file), of(dir.path())];
        assert_eq!([of(&file), of(dir.path())], before);
        // Files that are not the model's do not count.
        fs::write(&other, "abd").unwrap();
        assert_eq!([of(&file), of(dir.path())], before);
        // The same path, size and time of modification.
        let time = file.metadata().unwrap().modified().unwrap();
        fs::File::open(&other).unwrap().set_modified(time).unwrap();
        fs::rename(&other, &file).unwrap();
        assert!(of(&file) != before[0] && of(dir.path()) != before[1]);
        fs::remove_file(&file).unwrap();
        assert!(Identity::of(&file).is_err() && of(dir.path()) != before[1]);
    }
}
