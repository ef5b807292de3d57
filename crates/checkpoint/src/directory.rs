//! A run's directory: what its files are called, who may write there, and which of them go.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

pub fn model_name(step: usize) -> String {
    format!("model_{step:08}.bin")
}

pub fn state_name(step: usize, rank: usize) -> String {
    format!("state_{step:08}_{rank:05}.bin")
}

pub fn sidecar_name(step: usize) -> String {
    format!("run_{step:08}.json")
}

pub fn done_name(step: usize) -> String {
    format!("DONE_{step:08}")
}

/// The step of a checkpoint's file, and whether it is the mark that the checkpoint is whole.
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
    let step = file("model_", ".bin").and_then(number);
    let step = step.or_else(|| file("run_", ".json").and_then(number));
    Some((step.or_else(|| file("state_", ".bin").and_then(of_rank))?, false))
}

fn names(directory: &Path) -> Result<Vec<String>> {
    let cannot = || format!("cannot list {}", directory.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).with_context(cannot)? {
        names.extend(entry.with_context(cannot)?.file_name().into_string().ok());
    }
    Ok(names)
}

/// Steps of checkpoints that are marked as whole, in ascending order; none if there is no such directory.
pub fn done_steps(directory: &Path) -> Result<Vec<usize>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let steps: BTreeSet<usize> = names(directory)?
        .iter()
        .filter_map(|name| step_of(name))
        .filter_map(|(step, done)| done.then_some(step))
        .collect();
    Ok(steps.into_iter().collect())
}

/// Which checkpoints stay. Zeros switch a rule off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// This many of the newest; without, all.
    pub keep: usize,
    /// Those of steps that are multiples of this, whatever `keep` says.
    pub major_every: usize,
}

impl Retention {
    /// Deletes what need not stay after the checkpoint of step `newest` has become whole.
    ///
    /// What is there decides, not what the settings were before. Of each the mark goes first, so that nothing is taken for a
    /// checkpoint that is not one; files without a mark are what a killed run left of that, or of writing them.
    pub fn apply(self, directory: &Path, newest: usize) -> Result<()> {
        let Self { keep, major_every } = self;
        if keep == 0 {
            return Ok(());
        }
        let done = done_steps(directory)?;
        let recent = done.iter().rev().filter(|&&step| step <= newest).take(keep);
        let mut stay: BTreeSet<usize> = recent.copied().collect();
        stay.extend(done.iter().filter(|&&step| step > newest || (major_every > 0 && step % major_every == 0)));
        let mut goes: Vec<(bool, String)> = names(directory)?
            .into_iter()
            .filter_map(|name| step_of(&name).filter(|(step, _)| !stay.contains(step)).map(|(_, done)| (!done, name)))
            .collect();
        goes.sort();
        let marks = goes.partition_point(|(file, _)| !file);
        for (i, (_, name)) in goes.iter().enumerate() {
            if i == marks {
                atomic_file::sync_directory(directory)?;
            }
            remove_file(&directory.join(name))?;
        }
        Ok(())
    }
}

/// Removes a file; that it is not there is no error.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot delete {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes what killed writers left behind under temporary names. Returns how much it was.
pub fn remove_unfinished(directory: &Path) -> Result<usize> {
    let unfinished: Vec<_> =
        names(directory)?.into_iter().filter(|name| name.starts_with(atomic_file::UNFINISHED)).collect();
    for name in &unfinished {
        let path = directory.join(name);
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot delete {}", path.display()))?;
    }
    Ok(unfinished.len())
}

/// A directory that no other run writes to.
#[derive(Debug)]
pub struct Locked {
    path: PathBuf,
    /// Locked until it is closed, at the latest when the process ends, however it ends.
    _directory: File,
}

impl Locked {
    /// Makes the directory if there is none.
    pub fn open(path: &Path) -> Result<Self> {
        atomic_file::create_directory(path)?;
        let name = path.display();
        let directory = File::open(path).with_context(|| format!("cannot open {name}"))?;
        match directory.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{name} is in use by a run that has not ended: wait for it, or take another --out")
            }
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| format!("cannot lock {name}")),
        }
        Ok(Self { path: path.to_owned(), _directory: directory })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn left(dir: &tempfile::TempDir) -> Vec<String> {
        let mut names = names(dir.path()).unwrap();
        names.sort();
        names
    }

    #[test]
    fn the_newest_and_the_major_stay() {
        for (keep, major_every, newest, expected) in [
            (0, 0, 50, &[10, 20, 30, 40, 50][..]),
            (0, 20, 50, &[10, 20, 30, 40, 50]),
            (1, 0, 50, &[50]),
            (2, 0, 50, &[40, 50]),
            (2, 20, 50, &[20, 40, 50]),
            (9, 0, 50, &[10, 20, 30, 40, 50]),
            // After a resume from before a damaged one, the later ones are not this run's to judge.
            (1, 0, 30, &[30, 40, 50]),
        ] {
            let dir = directory(&[10, 20, 30, 40, 50], &["main.log"]);
            Retention { keep, major_every }.apply(dir.path(), newest).unwrap();
            assert_eq!(done_steps(dir.path()).unwrap(), expected, "{keep} {major_every}");
            let whole = directory(expected, &["main.log"]);
            assert_eq!(left(&dir), left(&whole));
        }
    }

    #[test]
    fn what_an_interrupted_deletion_left_goes_too_and_other_files_stay() {
        let others =
            ["model_final.bin", "run_1.json", "DONE_x", "state_00000007.bin", "model_0000001.bin", "main.jsonl"];
        let dir = directory(&[30], &[&others[..], &["model_00000010.bin", "state_00000020_00001.bin"]].concat());
        Retention { keep: 1, major_every: 10 }.apply(dir.path(), 30).unwrap();
        assert_eq!(left(&dir), left(&directory(&[30], &others)));
    }

    #[test]
    fn a_directory_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/run");
        let first = Locked::open(&path).unwrap();
        let message = Locked::open(&path).unwrap_err().to_string();
        assert!(message.contains("new/run is in use") && message.contains("--out"), "{message}");
        drop(first);
        Locked::open(&path).unwrap();
    }

    #[test]
    fn the_unfinished_is_removed() {
        let dir = directory(&[10], &[".unfinished-abc", ".hidden"]);
        fs::create_dir(dir.path().join(".unfinished-checkpoint")).unwrap();
        fs::write(dir.path().join(".unfinished-checkpoint/model_00000020.bin"), "half").unwrap();
        assert_eq!(remove_unfinished(dir.path()).unwrap(), 2);
        assert_eq!(left(&dir), left(&directory(&[10], &[".hidden"])));
    }
}
