//! Replaces the data set in a directory when the new one is complete.
//!
//! New shards are written into the directory `.unfinished-dataset` inside the output directory. The file `COMPLETE` in it lists
//! them when all are synced. Only then are they moved to their names, and old shards that remain are removed. A replacement that
//! was interrupted before that point is discarded by the next one; later, the next one completes it first.

use super::{CHAT_FILES, Dataset, FILE_NAME, ShardNames, is_mask, is_tokenizer};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Lists the new files.
const COMPLETE: &str = "COMPLETE";

/// The shards in the output directory that a new data set may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaces {
    /// None.
    Nothing,
    /// Those of the data set with the same name.
    Same(ShardNames),
    /// Those of any data set.
    Everything,
}

/// A data set that is being written. Dropping it removes the unfinished files, and the directories that were created for them.
#[derive(Debug)]
pub struct Replacement {
    out: PathBuf,
    staging: PathBuf,
    /// The directories that were created for this data set, the innermost first.
    created: Vec<PathBuf>,
    /// Whether `COMPLETE` may exist. The new files must then be kept until they have replaced the old ones.
    is_complete: bool,
    /// Holds the lock of the directory.
    _lock: File,
}

impl Replacement {
    /// Starts to write a data set into `out`. Fails if `out` contains shards or a tokenizer that it may not replace: a directory
    /// holds one data set.
    pub fn begin(out: &Path, replaces: Replaces) -> Result<Self> {
        let is_new = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let created = out.ancestors().take_while(is_new).map(Path::to_owned).collect();
        atomic_file::create_directory(out)?;
        let lock = File::open(out).with_context(|| format!("cannot open {}", out.display()))?;
        // File systems without locks report other errors.
        if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
            bail!(
                "{}: expected no other process that writes into this directory, found one; wait for it",
                out.display()
            );
        }
        complete(out)?;
        let staging = staging(out);
        match fs::remove_dir_all(&staging) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => removed.with_context(|| format!("cannot remove {}", staging.display()))?,
        }
        for old in names(out)? {
            check_old(out, &old, replaces)?;
        }
        if replaces != Replaces::Everything {
            // Another program's file with this name is not replaced.
            Dataset::read(out)?;
        }
        atomic_file::create_directory(&staging)?;
        Ok(Self { out: out.to_owned(), staging, created, is_complete: false, _lock: lock })
    }

    /// Returns the directory for the new shards. Directories in it are temporary.
    pub fn directory(&self) -> &Path {
        &self.staging
    }

    /// Fails if the directory has a file with the name of one of [`CHAT_FILES`] that is not that of an old data set.
    pub fn check_chat_files(&self) -> Result<()> {
        let is_old = Dataset::read(&self.out)?.is_some_and(|old| old.has_masks());
        for path in CHAT_FILES.map(|name| self.out.join(name)) {
            ensure!(
                is_old || !path.try_exists().with_context(|| format!("cannot read {}", path.display()))?,
                "{}: expected a directory without this file, found one that no data set has written; use another --out directory",
                path.display()
            );
        }
        Ok(())
    }

    /// Writes the description, the tokenizer's file and other files, and replaces the old data set. The shards must be synced to disk.
    pub fn commit(
        mut self,
        dataset: &Dataset,
        tokenizer: Option<&tokenizer::File>,
        others: &[(&str, Vec<u8>)],
    ) -> Result<()> {
        for (name, bytes) in others {
            atomic_file::write(&self.staging.join(name), |out| Ok(out.write_all(bytes)?))?;
        }
        if let Some(file) = tokenizer {
            atomic_file::write(&self.staging.join(file.name), |out| Ok(out.write_all(&file.bytes)?))?;
        }
        atomic_file::write(&self.staging.join(FILE_NAME), |file| {
            serde_json::to_writer_pretty(&mut *file, dataset)?;
            Ok(file.write_all(b"\n")?)
        })?;
        let mut new = Vec::new();
        for name in names(&self.staging)? {
            let path = self.staging.join(&name);
            if fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?.is_file() {
                new.push(name);
            }
        }
        self.is_complete = true;
        atomic_file::write(&self.staging.join(COMPLETE), |file| Ok(file.write_all(new.join("\n").as_bytes())?))?;
        complete(&self.out)
    }

    /// Fails if a complete data set in `out` has not replaced the old one yet.
    pub(super) fn check_finished(out: &Path) -> Result<()> {
        let list = staging(out).join(COMPLETE);
        ensure!(
            !list.try_exists().with_context(|| format!("cannot read {}", list.display()))?,
            "{}: expected one data set, found an old one that is partly replaced, because the program was interrupted; run \
             the `data` command with this --out directory again, which completes the replacement first",
            out.display()
        );
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.is_complete {
            // After an error, which is reported; the next run tries again.
            let _ = fs::remove_dir_all(&self.staging);
            // Only empty directories are removed.
            let _ = self.created.iter().try_for_each(fs::remove_dir);
        }
    }
}

/// Fails if a file in the output directory is a shard or a tokenizer that may not be replaced.
fn check_old(out: &Path, old: &str, replaces: Replaces) -> Result<()> {
    let path = out.join(old);
    if is_tokenizer(old) {
        ensure!(
            out.join(FILE_NAME)
                .try_exists()
                .with_context(|| format!("cannot read {}", out.join(FILE_NAME).display()))?,
            "{}: expected a directory for a data set, found a tokenizer without {FILE_NAME}, perhaps that of a model; use another \
             --out directory",
            path.display()
        );
        ensure!(
            replaces != Replaces::Nothing,
            "{} already exists: expected a directory without a data set; use another --out directory, or --overwrite",
            path.display()
        );
    }
    if is_mask(old) {
        ensure!(
            replaces == Replaces::Everything,
            "{} already exists: expected a directory without masks; use another --out directory{}",
            path.display(),
            if replaces == Replaces::Nothing { ", or --overwrite" } else { "" }
        );
    }
    let Some(found) = ShardNames::of_shard(old) else { return Ok(()) };
    ensure!(
        !path.is_dir(),
        "{}: expected a token file, found a directory; use another --out directory",
        path.display()
    );
    match replaces {
        Replaces::Nothing => bail!(
            "{} already exists: expected a directory without shards; use another --out directory, or --overwrite",
            path.display()
        ),
        Replaces::Same(names) => ensure!(
            found == names,
            "{}: expected no shards but those of {}, found {old}; use another --out directory",
            out.display(),
            names.data_set
        ),
        Replaces::Everything => {}
    }
    Ok(())
}

fn staging(out: &Path) -> PathBuf {
    out.join(format!("{}dataset", atomic_file::TEMPORARY_PREFIX))
}

/// Returns the names of the files in a directory, sorted.
fn names(directory: &Path) -> Result<Vec<String>> {
    let context = || format!("cannot list {}", directory.display());
    let entries =
        fs::read_dir(directory).with_context(context)?.collect::<Result<Vec<_>, _>>().with_context(context)?;
    let mut names: Vec<String> = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

/// Moves the files of a complete data set to their names, and removes the old files that remain. Does nothing if there is no
/// complete data set.
fn complete(out: &Path) -> Result<()> {
    let staging = staging(out);
    let list = match bounded_file::read_to_string(&staging.join(COMPLETE), bounded_file::DESCRIPTION) {
        Ok(list) => list,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", staging.join(COMPLETE).display())),
    };
    let new: Vec<&str> = list.lines().collect();
    for name in &new {
        let to = out.join(name);
        let moved = match fs::rename(staging.join(name), &to) {
            // An interrupted replacement has moved some files already.
            Err(error) if error.kind() == ErrorKind::NotFound => fs::metadata(&to).map(drop),
            moved => moved,
        };
        moved.with_context(|| format!("cannot write {}", to.display()))?;
    }
    atomic_file::sync_directory(out)?;
    let mut old = names(out)?;
    old.retain(|name| !new.contains(&name.as_str()));
    let has_masks = old.iter().any(|name| is_mask(name));
    let is_content = |name: &str| {
        ShardNames::of_shard(name).is_some()
            || is_tokenizer(name)
            || name == FILE_NAME
            || is_mask(name)
            || has_masks && CHAT_FILES.contains(&name)
    };
    old.retain(|name| is_content(name));
    // The masks, which show that the other files belong to a data set, are removed last.
    old.sort_by_key(|name| is_mask(name));
    for name in old {
        fs::remove_file(out.join(&name)).with_context(|| format!("cannot remove {}", out.join(&name).display()))?;
    }
    fs::remove_dir_all(&staging).with_context(|| format!("cannot remove {}", staging.display()))?;
    atomic_file::sync_directory(out)
}
