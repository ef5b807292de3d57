//! A run's directory: whether there is something to go on from, and what is kept in it.

use super::Options;
use crate::log::Log;
use anyhow::{Result, ensure};
use checkpoint::config::Config;
use checkpoint::directory::{DirectoryLock, Retention, done_steps, remove_temporary_files};
use checkpoint::resume::{self, FoundCheckpoint};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use std::path::{Path, PathBuf};

pub struct OutDirectory {
    path: PathBuf,
    /// `None` as long as there is no such directory.
    locked: Option<DirectoryLock>,
    pub found: FoundCheckpoint,
}

impl OutDirectory {
    /// Finds the checkpoint to go on from, if `--resume` asks for it. Nothing is made or changed.
    pub fn look(path: &Path, options: &Options) -> Result<Self> {
        let locked = path.exists().then(|| DirectoryLock::acquire(path)).transpose()?;
        let found = if options.resume { resume::find_newest(path)? } else { FoundCheckpoint::default() };
        if !options.resume {
            let newest = done_steps(path)?.pop();
            ensure!(
                newest.is_none(),
                "{} has a checkpoint of step {}: go on from it with --resume, or take another --out",
                path.display(),
                newest.unwrap_or_default()
            );
        }
        Ok(Self { path: path.to_owned(), locked, found })
    }

    /// Makes the directory, if need be, removes what killed runs left half written, and opens it for a run that goes on from
    /// the checkpoint of step `newest`, or begins anew.
    pub fn open(
        self,
        config: &Config,
        identity: Identity,
        newest: Option<usize>,
        evaluated: bool,
    ) -> Result<(Log, CheckpointWriter)> {
        let locked = self.locked.map_or_else(|| DirectoryLock::acquire(&self.path), Ok)?;
        remove_temporary_files(&self.path)?;
        config.save(&self.path)?;
        let log = match newest {
            Some(step) => Log::resume(&self.path, step, evaluated)?,
            None => Log::create(Some(&self.path))?,
        };
        let retention = Retention { keep: config.keep, major_every: config.major_every };
        // What a killed run had no time to delete.
        newest.map(|step| retention.apply(&self.path, step)).transpose()?;
        Ok((log, CheckpointWriter::new(locked, retention, identity, newest)))
    }
}
