//! The directory of a run: file names, the marker, the lock against concurrent runs, and deletion of old checkpoints.

use crate::config;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::fs::{self, File, TryLockError};
use system::{thread, time};

/// Returns the name of the model file of a step of a GPT-2 model.
pub fn model_name(step: usize) -> String {
    format!("model_{step:08}.bin")
}

/// Returns the name of the model file of a step of another model.
pub fn decoder_name(step: usize) -> String {
    format!("model_{step:08}.safetensors")
}

/// Returns the name of the model file of a step in a directory. If there is none, returns that of a GPT-2 model.
pub(crate) fn existing_model_name(directory: &Path, step: usize) -> Result<String> {
    let name = decoder_name(step);
    let path = directory.join(&name);
    let exists = fs::exists(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(if exists { name } else { model_name(step) })
}

/// Returns the name of the state file of a rank.
pub fn state_name(step: usize, rank: usize) -> String {
    format!("state_{step:08}_{rank:05}.bin")
}

/// Returns the name of the sidecar file of a step.
pub fn sidecar_name(step: usize) -> String {
    format!("run_{step:08}.json")
}

/// Returns the name of the empty file that marks the checkpoint of a step as complete.
pub fn done_name(step: usize) -> String {
    format!("DONE_{step:08}")
}

/// The file that marks a directory as that of a run. A run writes it before any other file.
pub const MARKER: &str = ".llm-rs-run";

/// Returns whether a directory with files of these names is that of a run: it has the marker or a complete checkpoint. The first
/// versions of this program wrote no marker, but settings and two log files before the first step.
pub fn is_run(directory: &Path, names: &[String]) -> bool {
    let has = |name: &str| names.iter().any(|found| found == name);
    has(MARKER)
        || done_in(names).into_iter().any(|step| has(&sidecar_name(step)))
        || has("main.log") && has("main.jsonl") && has(config::FILE) && config::is_saved(directory)
}

/// Returns whether a file name is that of a checkpoint file.
pub fn is_checkpoint_file(name: &str) -> bool {
    step_of(name).is_some()
}

/// Returns the step of a checkpoint file, and whether it is the DONE file.
fn step_of(name: &str) -> Option<(usize, bool)> {
    let number = |digits: &str| {
        let plain = digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse().ok()).flatten()
    };
    if let Some(digits) = name.strip_prefix("DONE_") {
        return Some((number(digits)?, true));
    }
    let file = |prefix, suffix| name.strip_prefix(prefix).and_then(|rest: &str| rest.strip_suffix(suffix));
    let of_rank = |rest: &str| rest.split_once('_').and_then(|(step, rank)| rank.parse::<u32>().ok().and(number(step)));
    let step = file("model_", ".bin").or_else(|| file("model_", ".safetensors")).and_then(number);
    let step = step.or_else(|| file("run_", ".json").and_then(number));
    Some((step.or_else(|| file("state_", ".bin").and_then(of_rank))?, false))
}

fn names(directory: &Path) -> Result<Vec<String>> {
    fs::names(directory).with_context(|| format!("cannot list {}", directory.display()))
}

/// Returns the steps of complete checkpoints in ascending order. A directory that does not exist has none.
pub fn done_steps(directory: &Path) -> Result<Vec<usize>> {
    match fs::names(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        names => Ok(done_in(&names.with_context(|| format!("cannot list {}", directory.display()))?)),
    }
}

/// Returns the steps of the DONE files among names, in ascending order.
fn done_in(names: &[String]) -> Vec<usize> {
    let steps: BTreeSet<usize> =
        names.iter().filter_map(|name| step_of(name)).filter_map(|(step, done)| done.then_some(step)).collect();
    steps.into_iter().collect()
}

/// Which checkpoints are kept. A value of 0 disables a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest checkpoints to keep. If 0, all are kept.
    pub keep: usize,
    /// Checkpoints of steps that are multiples of this value are kept regardless of `keep`.
    pub major_every: usize,
}

impl Retention {
    /// Deletes old checkpoints after the checkpoint of step `newest` is complete.
    ///
    /// DONE files are deleted first, so that an incomplete checkpoint is never marked as complete. Files without a DONE file
    /// are left over from a killed run and are deleted too. Checkpoints after `newest` are kept. Checkpoints of the steps
    /// `replaced` are deleted even if `keep` is 0.
    pub fn apply(self, directory: &Path, newest: usize, replaced: &[usize]) -> Result<()> {
        self.apply_except(directory, newest, replaced, None)
    }

    /// Deletes old checkpoints like [`apply`](Self::apply), but keeps the newest one up to step `verified`, at which the hardware was
    /// found to be correct.
    pub fn apply_except(
        self,
        directory: &Path,
        newest: usize,
        replaced: &[usize],
        verified: Option<usize>,
    ) -> Result<()> {
        let Self { keep, major_every } = self;
        if keep == 0 && replaced.is_empty() {
            return Ok(());
        }
        let names = names(directory)?;
        let done = done_in(&names);
        ensure!(
            done.contains(&newest),
            "{}: expected {}, found none; no older checkpoint is deleted",
            directory.display(),
            done_name(newest)
        );
        let verified = verified.and_then(|step| done.iter().copied().rfind(|&done| done <= step));
        let is_major = |step: usize| major_every > 0 && step.is_multiple_of(major_every) || Some(step) == verified;
        let is_replaced = |step: usize| replaced.contains(&step) && step != newest && !is_major(step);
        let recent = done.iter().rev().filter(|&&step| step <= newest && !is_replaced(step)).take(keep);
        let mut kept: BTreeSet<usize> = recent.copied().collect();
        kept.extend(done.iter().filter(|&&step| step > newest || is_major(step)));
        let is_deleted = |step: usize| if keep == 0 { is_replaced(step) } else { !kept.contains(&step) };
        let mut deleted: Vec<(bool, String)> = names
            .into_iter()
            .filter_map(|name| step_of(&name).filter(|(step, _)| is_deleted(*step)).map(|(_, done)| (!done, name)))
            .collect();
        deleted.sort();
        let done_files = deleted.partition_point(|(file, _)| !file);
        for (i, (_, name)) in deleted.iter().enumerate() {
            if i == done_files {
                atomic_file::sync_directory(directory)?;
            }
            remove_file(&directory.join(name))?;
        }
        Ok(())
    }
}

/// Removes a file if it exists.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot delete {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Prefix of the names of directories for the files of an incomplete checkpoint.
const STAGING_PREFIX: &str = ".unfinished-checkpoint-";

/// Returns the name of a directory for the files of the checkpoint of a step until it is complete.
pub(crate) fn staging_name(step: usize, random: u64) -> String {
    format!("{STAGING_PREFIX}{step:08}-{random:016x}")
}

/// Returns the step of the checkpoint whose files a staging directory is for.
fn staged_step(name: &str) -> Option<usize> {
    name.strip_prefix(STAGING_PREFIX)?.split_once('-')?.0.parse().ok()
}

/// Removes temporary files and directories of killed runs, with the files of incomplete checkpoints that they have published. Returns
/// the number of entries. The caller must have the lock of the directory, and no checkpoint may be in progress.
pub fn remove_temporary_files(directory: &Path) -> Result<usize> {
    remove_all(directory, atomic_file::TEMPORARY_PREFIX)
}

/// Removes temporary files and directories while a checkpoint may be in progress, which then fails. Directories of checkpoints that
/// have published files are kept for [`remove_temporary_files`].
pub fn remove_unpublished_files(directory: &Path) -> Result<()> {
    for name in names(directory)?.iter().filter(|name| name.starts_with(atomic_file::TEMPORARY_PREFIX)) {
        let path = directory.join(name);
        let Some(step) = staged_step(name) else {
            remove_entry(&path)?;
            continue;
        };
        // The writer cannot publish files after its directory has been renamed.
        let stopped = directory.join(format!("{name}-stopped"));
        match fs::rename(&path, &stopped) {
            // The checkpoint is complete.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            renamed => renamed.with_context(|| format!("cannot rename {}", path.display()))?,
        }
        if !names(directory)?.iter().any(|name| step_of(name) == Some((step, false))) {
            remove_entry(&stopped)?;
        }
    }
    Ok(())
}

/// Removes the incomplete checkpoints in the directory of a run. The lock excludes other attempts, and each attempt removes those of
/// earlier ones.
pub(crate) fn remove_incomplete_checkpoints(run: &DirectoryLock) -> Result<usize> {
    remove_all(run.path(), STAGING_PREFIX)
}

/// Removes the files and directories whose names begin with `prefix`. Returns their number.
fn remove_all(directory: &Path, prefix: &str) -> Result<usize> {
    let temporary: Vec<_> = names(directory)?.into_iter().filter(|name| name.starts_with(prefix)).collect();
    temporary.iter().try_for_each(|name| remove_temporary(directory, name))?;
    Ok(temporary.len())
}

/// Removes a temporary file or directory. The published files of an incomplete checkpoint are removed before its staging directory,
/// so that a process that is killed meanwhile leaves the staging directory as the sign that they are incomplete.
pub(crate) fn remove_temporary(directory: &Path, name: &str) -> Result<()> {
    if let Some(step) = staged_step(name) {
        // If the directory cannot be listed, nothing is deleted. A failed stat of DONE alone would look like a missing DONE.
        let names = names(directory)?;
        if !names.contains(&done_name(step)) {
            let mut published = names.iter().filter(|name| step_of(name) == Some((step, false)));
            published.try_for_each(|name| remove_file(&directory.join(name)))?;
        }
    }
    remove_entry(&directory.join(name))
}

/// Removes a file or directory.
pub(crate) fn remove_entry(path: &Path) -> Result<()> {
    let removed = if fs::is_dir(path) { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.with_context(|| format!("cannot delete {}", path.display()))
}

/// An exclusive lock on the directory of a run.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    /// The operating system releases the lock when this file is closed, at the latest when the process ends.
    directory: File,
    /// The error of a file system without locks. The user must then prevent a second run in the directory.
    unsupported: Option<io::Error>,
}

impl DirectoryLock {
    /// Creates the directory if necessary and locks it.
    pub fn acquire(path: &Path) -> Result<Self> {
        Self::acquire_within(path, Duration::ZERO, || ())
    }

    /// Creates the directory if necessary and locks it. Waits at most `timeout` for another process to release it, because a
    /// killed process keeps its locks while the operating system tears it down. Calls `waits` before it begins to wait.
    pub fn acquire_within(path: &Path, timeout: Duration, waits: impl FnOnce()) -> Result<Self> {
        Self::acquire_by(|file| file.try_lock(), path, timeout, waits)
    }

    /// Locks the directory like [`acquire_within`](Self::acquire_within), by `try_lock`.
    fn acquire_by(
        try_lock: impl Fn(&File) -> Result<(), TryLockError>,
        path: &Path,
        timeout: Duration,
        waits: impl FnOnce(),
    ) -> Result<Self> {
        const INTERVAL: Duration = Duration::from_millis(50);
        let name = path.display();
        let unusable = |action: &str, error: io::Error| {
            anyhow!(
                "{name}: expected a directory that can be created, opened and locked, found an error when it was {action}: {error}; \
                 change its permissions, or choose another --out"
            )
        };
        fs::create_dir_all(path).map_err(|error| unusable("created", error))?;
        let directory = File::open(path).map_err(|error| unusable("opened", error))?;
        let deadline = time::now() + timeout;
        let mut waits = Some(waits);
        let unsupported = loop {
            match try_lock(&directory) {
                Ok(()) => {
                    break fs::is_nfs(path).then(|| io::Error::other("NFS locks directories on one computer only"));
                }
                Err(TryLockError::WouldBlock) if time::now() < deadline => {
                    if let Some(waits) = waits.take() {
                        waits();
                    }
                    thread::sleep(INTERVAL);
                }
                Err(TryLockError::WouldBlock) => {
                    bail!("{name} is in use by another run; wait for it to end, or choose another --out")
                }
                // Some network file systems do not support locks.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    break Some(error);
                }
                Err(TryLockError::Error(error)) => return Err(unusable("locked", error)),
            }
        };
        Ok(Self { path: path.to_owned(), directory, unsupported })
    }

    /// Returns a warning if the file system has no locks.
    pub fn warning(&self) -> Option<String> {
        let error = self.unsupported.as_ref()?;
        Some(format!(
            "{}: expected a file system with locks, found an error: {error}; do not start another run in this directory, or put --out \
             on a file system with locks",
            self.path.display()
        ))
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the current path of the directory if it was moved, so that another directory, or none, has its path.
    pub fn moved(&self) -> Option<PathBuf> {
        self.directory.moved_from(&self.path)
    }

    /// Replaces the path of a directory that was moved.
    pub(crate) fn follow(&mut self, path: PathBuf) {
        self.path = path;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::thread;
    use std::time::Instant;

    fn directory(steps: &[usize], more: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for &step in steps {
            for name in
                [model_name(step), state_name(step, 0), state_name(step, 1), sidecar_name(step), done_name(step)]
            {
                fs::write(dir.path().join(name), "").unwrap();
            }
        }
        for name in more {
            fs::write(dir.path().join(name), "").unwrap();
        }
        dir
    }

    fn sorted_names(dir: &tempfile::TempDir) -> Vec<String> {
        let mut names = names(dir.path()).unwrap();
        names.sort();
        names
    }

    #[test]
    fn the_newest_and_the_major_checkpoints_are_kept() {
        for (keep, major_every, newest, expected) in [
            (0, 0, 50, &[10, 20, 30, 40, 50][..]),
            (0, 20, 50, &[10, 20, 30, 40, 50]),
            (1, 0, 50, &[50]),
            (2, 0, 50, &[40, 50]),
            (2, 20, 50, &[20, 40, 50]),
            (9, 0, 50, &[10, 20, 30, 40, 50]),
            // After resuming from an earlier checkpoint, later ones are kept.
            (1, 0, 30, &[30, 40, 50]),
        ] {
            let dir = directory(&[10, 20, 30, 40, 50], &["main.log"]);
            Retention { keep, major_every }.apply(dir.path(), newest, &[]).unwrap();
            assert_eq!(done_steps(dir.path()).unwrap(), expected, "{keep} {major_every}");
            let complete = directory(expected, &["main.log"]);
            assert_eq!(sorted_names(&dir), sorted_names(&complete));
        }
    }

    #[test]
    fn incomplete_checkpoints_are_deleted_and_other_files_kept() {
        let others =
            ["model_final.bin", "run_1.json", "DONE_x", "state_00000007.bin", "model_0000001.bin", "main.jsonl"];
        let dir = directory(&[30], &[&others[..], &["model_00000010.bin", "state_00000020_00001.bin"]].concat());
        Retention { keep: 1, major_every: 10 }.apply(dir.path(), 30, &[]).unwrap();
        assert_eq!(sorted_names(&dir), sorted_names(&directory(&[30], &others)));
    }

    #[test]
    fn replaced_checkpoints_are_deleted_and_others_kept() {
        let all = [5, 8, 10, 13, 20];
        for (keep, major_every, newest, replaced, expected) in [
            (0, 0, 20, &[5, 8][..], &[10, 13, 20][..]),
            (0, 0, 20, &[], &all),
            (0, 4, 20, &[5, 8], &[8, 10, 13, 20]),
            // A replaced checkpoint does not count as one of the newest.
            (2, 0, 20, &[13], &[10, 20]),
            // The newest checkpoint and later ones are never deleted.
            (0, 0, 10, &[8, 10], &[5, 10, 13, 20]),
        ] {
            let dir = directory(&all, &["main.log"]);
            Retention { keep, major_every }.apply(dir.path(), newest, replaced).unwrap();
            assert_eq!(done_steps(dir.path()).unwrap(), expected, "{keep} {major_every} {newest} {replaced:?}");
            assert_eq!(sorted_names(&dir), sorted_names(&directory(expected, &["main.log"])));
        }
    }

    #[test]
    fn a_lock_that_another_process_releases_late_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = DirectoryLock::acquire(dir.path()).unwrap();
        let release = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(first);
        });
        let mut waited = false;
        let second = DirectoryLock::acquire_within(dir.path(), Duration::from_secs(20), || waited = true);
        assert!(second.is_ok() && waited);
        release.join().unwrap();
        let began = Instant::now();
        let third = DirectoryLock::acquire_within(dir.path(), Duration::from_millis(200), || ());
        assert!(third.unwrap_err().to_string().contains("is in use by another run"));
        assert!((Duration::from_millis(200)..Duration::from_secs(10)).contains(&began.elapsed()));
    }

    #[test]
    fn a_directory_is_locked_by_one_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/run");
        let first = DirectoryLock::acquire(&path).unwrap();
        let message = DirectoryLock::acquire(&path).unwrap_err().to_string();
        assert!(message.contains("new/run is in use") && message.contains("--out"), "{message}");
        drop(first);
        DirectoryLock::acquire(&path).unwrap();
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        fs::write(&path, "").unwrap();
        let message = format!("{:#}", DirectoryLock::acquire(&path).unwrap_err());
        let expected = "/run: expected a directory that can be created, opened and locked, found an error when it was created: File \
                        exists (os error 17); change its permissions, or choose another --out";
        assert!(message.ends_with(expected), "{message}");
    }

    #[test]
    fn a_file_system_without_locks_is_a_warning_and_other_errors_of_locks_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let acquire = |kind: io::ErrorKind| {
            let try_lock = |_: &File| Err(TryLockError::Error(kind.into()));
            DirectoryLock::acquire_by(try_lock, dir.path(), Duration::ZERO, || panic!("it waits"))
        };
        let warning = acquire(io::ErrorKind::Unsupported).unwrap().warning().unwrap();
        let text = ": expected a file system with locks, found an error: unsupported; do not start another run in this directory, or";
        assert!(warning.starts_with(dir.path().to_str().unwrap()) && warning.contains(text), "{warning}");
        assert_eq!(DirectoryLock::acquire(dir.path()).unwrap().warning(), None);
        let message = format!("{:#}", acquire(io::ErrorKind::PermissionDenied).unwrap_err());
        assert!(
            message.contains(", found an error when it was locked: permission denied; change its permissions, or"),
            "{message}"
        );
    }

    #[test]
    fn temporary_files_are_removed() {
        let dir = directory(&[10], &[".unfinished-abc", ".hidden"]);
        // The last one is of a version whose names had no step.
        for name in [&*staging_name(20, 1), ".unfinished-checkpoint-1f"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("model_00000020.bin"), "half").unwrap();
        }
        assert_eq!(remove_temporary_files(dir.path()).unwrap(), 3);
        assert_eq!(sorted_names(&dir), sorted_names(&directory(&[10], &[".hidden"])));
    }

    #[test]
    fn published_files_of_an_incomplete_checkpoint_are_removed() {
        // The process was killed while it published step 20, before it replaced step 10, and after it completed step 5.
        let published = [model_name(20), state_name(20, 1)];
        let others = ["model_00000007.bin", "model_final.bin"];
        let dir = directory(&[5, 10], &[&others[..], &published.each_ref().map(|name| &**name)].concat());
        let staging = [5, 10, 20].map(|step| dir.path().join(staging_name(step, 0xabc)));
        for path in &staging {
            fs::create_dir(path).unwrap();
        }

        // The directories stay as the sign that the files are incomplete, but the writer no longer finds them.
        remove_unpublished_files(dir.path()).unwrap();
        assert!(staging.iter().all(|path| !path.exists()) && dir.path().join(&published[0]).exists());

        assert_eq!(remove_temporary_files(dir.path()).unwrap(), 3);
        assert_eq!(sorted_names(&dir), sorted_names(&directory(&[5, 10], &others)));
    }

    #[test]
    fn files_of_checkpoints_that_published_nothing_are_removed_at_once() {
        let dir = directory(&[10], &[".unfinished-abc"]);
        let staging = dir.path().join(staging_name(20, 2));
        fs::create_dir(&staging).unwrap();
        fs::write(staging.join("model_00000020.bin"), "half").unwrap();
        remove_unpublished_files(dir.path()).unwrap();
        assert_eq!(sorted_names(&dir), sorted_names(&directory(&[10], &[])));
    }
}
