//! The lock that rank 0 holds while a run is in progress, and the processes that wait for it.
//!
//! The lock is that of a file in the directory of the run. It decides which group of ranks continues a run: two groups cannot both hold
//! it. The operating system releases it when the process of rank 0 ends.

use super::members::{Members, numbers};
use crate::fault::Fault;
use crate::rendezvous::Host;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use system::fs::{File, TryLockError};
use system::{process, thread, time};

/// Name of the file in the directory of the run.
pub const FILE: &str = "run.lock";

/// Time that rank 0 waits for the lock, while other processes test whether it is free.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(15);

/// Time between two tests whether the run is in progress.
const TEST_INTERVAL: Duration = Duration::from_millis(500);

/// Time after which a process says that it waits. A run that has just failed ends sooner.
const QUIET_TIME: Duration = Duration::from_secs(5);

/// The contents of the file: the run in progress.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    members: Members,
    /// The host and the process of rank 0.
    host: String,
    process: u32,
}

/// The lock of a run, until dropped.
#[derive(Debug)]
pub struct RunLock(#[expect(dead_code, reason = "closing the file releases the lock")] File);

/// Opens a file and locks it. Returns `None` if another process has locked it.
pub(super) fn try_lock(path: &Path) -> Result<Option<File>> {
    try_lock_by(|file| file.try_lock(), path)
}

/// Opens a file and locks it by `try_lock`.
fn try_lock_by(try_lock: impl Fn(&File) -> Result<(), TryLockError>, path: &Path) -> Result<Option<File>> {
    let name = path.display();
    // Network file systems lock only files that are open for writing.
    let file = File::append(path).map_err(|error| {
        Fault::Startup(format!(
            "{name}: expected a file that can be written, found an error: {error}; make --out and the directory of --rendezvous \
             writable on all hosts, or choose others"
        ))
    })?;
    match try_lock(&file) {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => bail!(Fault::Startup(format!(
            "{name}: expected a file system with locks, found an error: {error}; put --out and the directory of --rendezvous on a file \
             system with locks, or omit --min-ranks"
        ))),
    }
}

impl RunLock {
    /// Takes the lock for a run of these ranks.
    pub fn acquire(directory: &Path, members: &Members) -> Result<Self> {
        let path = directory.join(FILE);
        let deadline = time::now() + ACQUIRE_TIMEOUT;
        loop {
            if let Some(mut file) = try_lock(&path)? {
                let contents =
                    Contents { members: members.clone(), host: Host::here().name, process: system::process::id() };
                // The contents only inform processes that wait.
                let _ = file.set_len(0).and_then(|()| file.write_all(&serde_json::to_vec(&contents)?));
                return Ok(Self(file));
            }
            if time::now() >= deadline {
                bail!(Fault::Absent(format!(
                    "{}: expected no other run in this directory, found one in progress; restart this process, so that it waits",
                    directory.display()
                )));
            }
            thread::sleep(TEST_INTERVAL / 10);
        }
    }
}

/// Whether a run is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Rank 0 of a run holds the lock.
    Running,
    /// No run is in progress, at least since this time.
    Free(Instant),
    /// The run has completed all steps.
    Finished,
}

/// The data about a run that a waiting process needs.
pub trait RunFiles {
    /// Returns whether the run has completed all its steps.
    fn is_finished(&self) -> Result<bool>;

    /// Describes how far the run is, for example `step 17`.
    fn progress(&self) -> String;
}

/// A process that waits for its part in the run.
pub(super) struct Watch<'a> {
    directory: &'a Path,
    files: &'a dyn RunFiles,
    /// The launcher's number of this process.
    rank: usize,
    timeout: Duration,
    tested: Option<Instant>,
    status: Status,
    /// Since when the run is in progress without this process.
    running_since: Option<Instant>,
    /// Whether this process has said that it waits for the run in progress.
    told: bool,
}

impl<'a> Watch<'a> {
    pub fn new(directory: &'a Path, files: &'a dyn RunFiles, rank: usize, timeout: Duration) -> Self {
        let status = Status::Free(time::now());
        Self { directory, files, rank, timeout, tested: None, status, running_since: None, told: false }
    }

    /// Counts the time in which no run is in progress from now on.
    pub fn restart(&mut self) {
        (self.status, self.tested) = (Status::Free(time::now()), Some(time::now()));
    }

    /// Tests whether a run is in progress, if the last test is long ago.
    pub fn status(&mut self) -> Result<Status> {
        let now = time::now();
        if self.tested.is_some_and(|tested| now - tested < TEST_INTERVAL) {
            return Ok(self.status);
        }
        self.tested = Some(now);
        let mut running = try_lock(&self.path())?.is_none();
        if running {
            // Another process may be testing.
            thread::sleep(TEST_INTERVAL / 10);
            running = try_lock(&self.path())?.is_none();
        }
        let finished = !running && self.files.is_finished()?;
        self.heard(running, finished)
    }

    /// Takes note of whether a run is in progress. Tells the user if this process waits for its end.
    pub fn heard(&mut self, running: bool, finished: bool) -> Result<Status> {
        let now = time::now();
        if running {
            self.status = Status::Running;
            self.wait_for_run(now)?;
        } else {
            (self.running_since, self.told) = (None, false);
            if finished {
                self.status = Status::Finished;
            } else if self.status == Status::Running {
                self.status = Status::Free(now);
            }
        }
        Ok(self.status)
    }

    /// Returns the path of the lock.
    fn path(&self) -> PathBuf {
        self.directory.join(FILE)
    }

    /// Says that this process waits. Fails if the run in progress should have noticed the loss of this process and ended.
    fn wait_for_run(&mut self, now: Instant) -> Result<()> {
        let since = *self.running_since.get_or_insert(now);
        let waited = now - since;
        if waited < QUIET_TIME || self.told && waited < self.timeout {
            return Ok(());
        }
        let text = bounded_file::read(&self.path(), bounded_file::DESCRIPTION).unwrap_or_default();
        let contents: Option<Contents> = serde_json::from_slice(&text).ok();
        let (directory, rank) = (self.directory.display(), self.rank);
        let Some(Contents { members, host, process }) = contents else { return Ok(()) };
        if members.ranks.contains(&rank) && waited >= self.timeout {
            bail!(Fault::Startup(format!(
                "rank {rank}: expected the run in {directory} to end within {:.0} s, because this process replaces its rank {rank}, \
                 found it in progress; give each process its own rank, or end rank 0 of the run ({host}, process {process}) if it \
                 is stopped",
                waited.as_secs_f64()
            )));
        }
        if !std::mem::replace(&mut self.told, true) {
            process::print_error(&format!(
                "note: rank {rank} waits: the run in {directory} is at {} with {} of {} ranks ({}); this process joins at the next \
                 restart",
                self.files.progress(),
                members.ranks.len(),
                members.launched,
                numbers(&members.ranks)
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};

    #[test]
    fn a_lock_that_cannot_be_taken_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let by = |kind: Option<ErrorKind>| {
            let error = || kind.map_or(TryLockError::WouldBlock, |kind| TryLockError::Error(Error::from(kind)));
            try_lock_by(|_| Err(error()), &path)
        };
        assert!(by(None).unwrap().is_none());
        let message = by(Some(ErrorKind::Unsupported)).unwrap_err().to_string();
        let expected = "/run.lock: expected a file system with locks, found an error: unsupported; put --out and";
        assert!(message.contains(expected) && message.ends_with("or omit --min-ranks"), "{message}");
        // Root may write into a directory without permissions, but not into a file in its place.
        let message = try_lock(&path.join("run.lock")).unwrap_err().to_string();
        let expected = "/run.lock/run.lock: expected a file that can be written, found an error: Not a directory (os error 20); make --out";
        assert!(message.contains(expected), "{message}");
    }
}
