//! The output directory of a run: refuses directories with files of others, finds the checkpoint to resume from, creates a directory
//! under `runs` without `--out`, and opens the log and the checkpoint writer.

use super::multi_rank::CONSOLE_FILE;
use super::{Config, TrainOptions};
use crate::log::{self, Log};
use crate::plots;
use crate::values::Resume;
use anyhow::{Context, Result, anyhow, ensure};
use checkpoint::Progress;
use checkpoint::config;
use checkpoint::directory::{
    DirectoryLock, MARKER, Retention, done_steps, is_checkpoint_file, is_run, remove_file, remove_temporary_files,
};
use checkpoint::resume::{self, FoundCheckpoint};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use interchange::companions;
use metrics::tensorboard;
use model::Descriptor;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::{fs, process};
use tokenizer::Tokenizer;
use tokenizer::stored::{self, Found};

/// Time that a run waits for another process to release its directory. A supervisor may restart a killed run while the operating
/// system still frees the memory of the previous process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15);

/// The directory in which runs without `--out` get a directory of their own.
const RUNS: &str = "runs";

/// Number of names in the error for a directory of other files.
const MAX_NAMES: usize = 5;

/// The output directory before the run starts to write.
pub struct OutDirectory {
    pub path: PathBuf,
    /// `None` while the directory does not exist.
    locked: Option<DirectoryLock>,
    pub found: FoundCheckpoint,
    /// Whether this process creates the directory.
    is_new: bool,
    /// Whether this process has marked the directory. If the run fails before it writes, the mark is removed again.
    marked: bool,
}

/// The files of a model that a run copies into its directory.
pub struct ModelFiles<'a> {
    pub tokenizer: &'a Found,
    /// The [companions](interchange::companions) of the model from which the run starts.
    pub companions: Option<PathBuf>,
    /// The chat template in the directory of the run from which the run starts.
    pub template: Option<PathBuf>,
    /// The directory of a data set of conversations, and the model.
    pub conversations: Option<(&'a Path, Descriptor)>,
}

impl OutDirectory {
    /// Locks an existing directory and, with `--resume`, finds the checkpoint to resume from. Fails if the directory has files that the
    /// run would overwrite, unless it is that of a run. Changes nothing.
    pub fn inspect(path: &Path, options: &TrainOptions) -> Result<Self> {
        // The settings of the run contain the path as text.
        ensure!(
            path.to_str().is_some(),
            "--out {}: expected a path in UTF-8, found other bytes; rename the directory",
            path.display()
        );
        let exists = fs::exists(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(
            !exists || fs::is_dir(path),
            "--out {}: expected a directory or a new name, found a file; choose another --out",
            path.display()
        );
        let locked = exists.then(|| lock(path)).transpose()?;
        let resumes = options.resume != Resume::No;
        let found = if resumes { resume::find_newest(path)? } else { FoundCheckpoint::default() };
        ensure!(
            options.resume != Resume::Required || found.checkpoint.is_some(),
            "--resume: expected a checkpoint in {}, found {}; check --out, or use --resume=auto, which starts a new run if there \
             is no checkpoint{}",
            path.display(),
            if locked.is_some() { "none" } else { "no such directory" },
            options.relative_paths()
        );
        if !resumes {
            check_checkpoints(path)?;
        }
        check_names(path, locked.is_some())?;
        Ok(Self { path: path.to_owned(), locked, found, is_new: !exists, marked: false })
    }

    /// Creates and locks a new directory `runs/NAME-N` for a run without `--out`.
    pub fn create(name: &str) -> Result<Self> {
        let cannot = |error: anyhow::Error| {
            anyhow!(
                "{RUNS}: expected a directory in which this process can create directories, found an error: {error:#}; start in \
                 another directory, give --out DIR, or save nothing with --out none"
            )
        };
        let path = create_numbered(name).map_err(cannot)?;
        let locked = Some(lock(&path)?);
        Ok(Self { path, locked, found: FoundCheckpoint::default(), is_new: true, marked: false })
    }

    /// Creates the directory if necessary, and marks it as that of a run. The other ranks write into it afterwards.
    pub fn mark(&mut self) -> Result<()> {
        if self.locked.is_none() {
            self.locked = Some(lock(&self.path)?);
            // Another run may have created the directory meanwhile, and ended.
            check_checkpoints(&self.path)?;
        }
        let marker = self.path.join(MARKER);
        let mut mark = || -> Result<()> {
            if !fs::exists(&marker)? {
                atomic_file::write(&marker, |file| Ok(writeln!(file, "llm-rs train writes into this directory.")?))?;
                self.marked = true;
            }
            Ok(())
        };
        mark().map_err(|error| unwritable(&self.path, &error))
    }

    /// Opens the directory for writing: creates it if necessary, removes unfinished files of killed runs, saves the settings, the
    /// tokenizer and, at the start of the run, the other files of the model in Hugging Face's format.
    ///
    /// The log continues after step `newest`, the step of the checkpoint that the run resumes from, with `progress`.
    pub fn open(
        mut self,
        config: &Config,
        files: &ModelFiles,
        identity: Identity,
        newest: Option<usize>,
        progress: &Progress,
        events: bool,
    ) -> Result<(Log, CheckpointWriter)> {
        self.mark()?;
        self.marked = false;
        let locked = self.locked.take().context("the directory is locked")?;
        prepare(&self.path, config)?;
        let tokenizer = files.tokenizer.tokenizer.as_ref().filter(|_| files.tokenizer.is_stated);
        if let Some(tokenizer) = tokenizer {
            stored::write(tokenizer, &self.path)?;
        }
        if newest.is_none() {
            let model = files.companions.as_deref();
            if let (Some((data, descriptor)), Some(tokenizer)) = (files.conversations, tokenizer) {
                companions::keep_of_conversations(model, data, tokenizer, &descriptor, &self.path)?;
            } else {
                companions::keep(model, tokenizer, &self.path)?;
                if let Some(template) = &files.template {
                    copy_template(template, tokenizer, &self.path)?;
                }
            }
        }
        let mut log = match newest {
            Some(step) => Log::resume(&self.path, step, progress.evaluated)?,
            None => Log::create(Some(&self.path))?,
        };
        let events = events || newest.is_some() && has_events(&self.path);
        if events {
            log.write_events(&self.path, newest.unwrap_or(0))?;
        }
        let retention = Retention { keep: config.flags.keep, major_every: config.flags.major_every };
        // A killed run may not have deleted its old checkpoints.
        newest.map(|step| retention.apply_except(&self.path, step, &[], progress.verified)).transpose()?;
        let mut writer = CheckpointWriter::new(locked, retention, identity, newest);
        progress.verified.into_iter().for_each(|step| writer.keep_verified(step));
        Ok((log, writer))
    }
}

/// Copies the chat template of a run to another run with the same tokenizer, unless this has one.
fn copy_template(template: &Path, tokenizer: Option<&Tokenizer>, run: &Path) -> Result<()> {
    let copy = run.join(companions::TEMPLATE);
    let is_same = match (tokenizer, stored::in_directory(atomic_file::parent(template))) {
        (Some(tokenizer), Ok(Some(own))) => own == *tokenizer,
        _ => true,
    };
    if !is_same || fs::exists(&copy).with_context(|| format!("cannot read {}", copy.display()))? {
        return Ok(());
    }
    let text = bounded_file::read(template, bounded_file::SETTINGS)
        .with_context(|| format!("cannot read {}", template.display()))?;
    atomic_file::write(&copy, |file| Ok(file.write_all(&text)?))
}

/// Removes unfinished files of killed runs and saves the settings: the first changes of the directory.
fn prepare(path: &Path, config: &Config) -> Result<()> {
    let result = remove_temporary_files(path).and_then(|_| config.save(path));
    result.map_err(|error| unwritable(path, &error))
}

/// Returns the error for a directory that cannot be changed.
fn unwritable(path: &Path, error: &anyhow::Error) -> anyhow::Error {
    let (path, expected) = (path.display(), "expected a directory that this process can change");
    anyhow!(
        "{path}: {expected}, found an error: {error:#}; change its permissions or contents, or choose another --out"
    )
}

impl Drop for OutDirectory {
    /// Removes the mark if the run has failed before it wrote anything, and a directory that was created for it.
    fn drop(&mut self) {
        let is_empty = || fs::names(&self.path).is_ok_and(|names| names.iter().all(|name| name == MARKER));
        if (self.marked || self.is_new && self.locked.is_some()) && is_empty() {
            // The error that ends the run is reported.
            let _ = remove_file(&self.path.join(MARKER));
            if self.is_new {
                let _ = fs::remove_dir(&self.path);
            }
        }
    }
}

/// Checks that a directory has no checkpoint, which a run that is not resumed would replace.
fn check_checkpoints(path: &Path) -> Result<()> {
    let newest = done_steps(path)?.pop();
    ensure!(
        newest.is_none(),
        "--out: {} has a checkpoint of step {}; add --resume to continue that run, or use another --out",
        path.display(),
        newest.unwrap_or_default()
    );
    Ok(())
}

/// Checks that a directory that is not that of a run has no files that a run overwrites. Others are left alone, such as the output of
/// a batch system.
fn check_names(path: &Path, exists: bool) -> Result<()> {
    let names =
        if exists { fs::names(path).with_context(|| format!("cannot list {}", path.display()))? } else { vec![] };
    if is_run(path, &names) {
        return Ok(());
    }
    let mut foreign: Vec<&str> = names.iter().map(String::as_str).filter(|name| is_written(name)).collect();
    foreign.sort_unstable();
    let more = foreign.len().saturating_sub(MAX_NAMES);
    foreign.truncate(MAX_NAMES);
    ensure!(
        foreign.is_empty(),
        "--out {}: expected an empty directory or the directory of a run, found {}{}, which would be overwritten; choose another \
         --out, such as {}",
        path.display(),
        foreign.join(", "),
        if more > 0 { format!(" and {more} more") } else { String::new() },
        path.join("run").display()
    );
    Ok(())
}

/// Returns whether a run writes or deletes files of this name in its directory.
fn is_written(name: &str) -> bool {
    let numbered = |start, end| {
        let number = name.strip_prefix(start).and_then(|rest: &str| rest.strip_suffix(end));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let fixed = [log::SAMPLES, config::FILE, CONSOLE_FILE, plots::FIGURE, plots::REPORT, MARKER, stored::IDENTITY];
    log::NAMES.contains(&name)
        || fixed.contains(&name)
        || ["tokenizer.json", "tokenizer.model"].contains(&name)
        || is_checkpoint_file(name)
        || numbered("rank-", ".log")
        || numbered("flight-recorder-", ".txt")
}

/// Creates a directory with the name of a model and the next number. Of several processes, each gets another number.
fn create_numbered(model: &str) -> Result<PathBuf> {
    fs::create_dir_all(Path::new(RUNS))?;
    let number = |name: &String| name.strip_prefix(model)?.strip_prefix('-')?.parse::<u32>().ok().map(u64::from);
    let mut next = fs::names(Path::new(RUNS))?.iter().filter_map(number).max().unwrap_or(0);
    loop {
        next += 1;
        let path = Path::new(RUNS).join(format!("{model}-{next}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => {
                created?;
                atomic_file::sync_directory(Path::new(RUNS))?;
                return Ok(path);
            }
        }
    }
}

/// Returns the name of a run's model for the name of its directory.
pub fn model_name(config: &Config) -> String {
    let name = match &config.flags.model {
        Some(model) => Path::new(model).file_name().unwrap_or_default().to_string_lossy(),
        None if !config.flags.reads_files() => "small".into(),
        None => "custom".into(),
    };
    let name = name.strip_suffix(".bin").unwrap_or(&name);
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' };
    let name: String = name.chars().map(plain).take(64).collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "model".to_owned() } else { name.to_owned() }
}

/// Returns whether the run has written event files for TensorBoard.
fn has_events(directory: &Path) -> bool {
    fs::names(directory).is_ok_and(|names| names.iter().any(|name| name.contains(tensorboard::MARKER)))
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
