//! The output directory of a run: finds the checkpoint to resume from, and opens the log and the checkpoint writer.

use super::Options;
use crate::log::Log;
use crate::values::Resume;
use anyhow::{Context, Result, anyhow, ensure};
use checkpoint::Progress;
use checkpoint::config::Config;
use checkpoint::directory::{DirectoryLock, Retention, done_steps, remove_temporary_files};
use checkpoint::resume::{self, FoundCheckpoint};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use interchange::companions;
use metrics::tensorboard::MARKER;
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::process;
use tokenizer::stored::{self, Found};

/// Time that a run waits for another process to release its directory. A supervisor may restart a killed run while the operating
/// system still frees the memory of the previous process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15);

/// The output directory before the run starts to write.
pub struct OutDirectory {
    path: PathBuf,
    /// `None` while the directory does not exist.
    locked: Option<DirectoryLock>,
    pub found: FoundCheckpoint,
}

/// The files of a model that a run copies into its directory.
pub struct ModelFiles<'a> {
    pub tokenizer: &'a Found,
    /// The [companions](interchange::companions) of the model from which the run starts.
    pub companions: Option<PathBuf>,
}

impl OutDirectory {
    /// Locks an existing directory and, with `--resume`, finds the checkpoint to resume from. Changes nothing.
    pub fn inspect(path: &Path, options: &Options) -> Result<Self> {
        // The settings of the run contain the path as text.
        ensure!(
            path.to_str().is_some(),
            "--out {}: expected a path in UTF-8, found other bytes; rename the directory",
            path.display()
        );
        let exists = system::fs::exists(path).with_context(|| format!("cannot read {}", path.display()))?;
        let locked = exists.then(|| lock(path)).transpose()?;
        let resumes = options.resume != Resume::No;
        let found = if resumes { resume::find_newest(path)? } else { FoundCheckpoint::default() };
        ensure!(
            options.resume != Resume::Required || found.checkpoint.is_some(),
            "--resume: expected a checkpoint in {}, found {}; check --out, or start a new run if there is none with \
             --resume=auto",
            path.display(),
            if locked.is_some() { "none" } else { "no such directory" }
        );
        if !resumes {
            let newest = done_steps(path)?.pop();
            ensure!(
                newest.is_none(),
                "--out: {} has a checkpoint of step {}; add --resume to continue that run, or use another --out",
                path.display(),
                newest.unwrap_or_default()
            );
        }
        Ok(Self { path: path.to_owned(), locked, found })
    }

    /// Opens the directory for writing: creates it if necessary, removes unfinished files of killed runs, saves the settings, the
    /// tokenizer and, at the start of the run, the other files of the model in Hugging Face's format.
    ///
    /// The log continues after step `newest`, the step of the checkpoint that the run resumes from, with `progress`.
    pub fn open(
        self,
        config: &Config,
        files: &ModelFiles,
        identity: Identity,
        newest: Option<usize>,
        progress: &Progress,
        events: bool,
    ) -> Result<(Log, CheckpointWriter)> {
        let locked = self.locked.map_or_else(|| lock(&self.path), Ok)?;
        prepare(&self.path, config)?;
        let tokenizer = files.tokenizer.tokenizer.as_ref().filter(|_| files.tokenizer.is_stated);
        if let Some(tokenizer) = tokenizer {
            stored::write(tokenizer, &self.path)?;
        }
        if newest.is_none() {
            companions::keep(files.companions.as_deref(), tokenizer, &self.path)?;
        }
        let mut log = match newest {
            Some(step) => Log::resume(&self.path, step, progress.evaluated)?,
            None => Log::create(Some(&self.path))?,
        };
        let events = events || newest.is_some() && has_events(&self.path);
        if events {
            log.write_events(&self.path, newest.unwrap_or(0))?;
        }
        let retention = Retention { keep: config.keep, major_every: config.major_every };
        // A killed run may not have deleted its old checkpoints.
        newest.map(|step| retention.apply_except(&self.path, step, &[], progress.verified)).transpose()?;
        let mut writer = CheckpointWriter::new(locked, retention, identity, newest);
        progress.verified.into_iter().for_each(|step| writer.keep_verified(step));
        Ok((log, writer))
    }
}

/// Removes unfinished files of killed runs and saves the settings: the first changes of the directory.
fn prepare(path: &Path, config: &Config) -> Result<()> {
    let result = remove_temporary_files(path).and_then(|_| config.save(path));
    result.map_err(|error| {
        let (path, expected) = (path.display(), "expected a directory that this process can change");
        anyhow!(
            "{path}: {expected}, found an error: {error:#}; change its permissions or contents, or choose another --out"
        )
    })
}

/// Returns whether the run has written event files for TensorBoard.
fn has_events(directory: &Path) -> bool {
    system::fs::names(directory).is_ok_and(|names| names.iter().any(|name| name.contains(MARKER)))
}

/// Locks a directory, which is created if necessary. Waits for a process that is ending, and says so.
fn lock(path: &Path) -> Result<DirectoryLock> {
    let locked = DirectoryLock::acquire_within(path, LOCK_TIMEOUT, || {
        let seconds = LOCK_TIMEOUT.as_secs();
        process::print_error(&format!(
            "note: {} is in use by another process; waiting up to {seconds} s for it to end",
            path.display()
        ));
    })?;
    if let Some(warning) = locked.warning() {
        process::print_error(&format!("warning: {warning}"));
    }
    Ok(locked)
}
