//! Writes checkpoints while the run goes on: it waits only until the tensors are copied to host memory.

use super::RunState;
use super::before::Before;
use super::directory::{Locked, Retention, done_name, done_steps, model_name, remove_file, sidecar_name, state_name};
use super::model;
use super::sidecar::{FileSum, Identity, Sidecar, hex};
use super::state::{self, Moments, Rank};
use crate::atomic;
use crate::engine::{Algorithms, Engine, HostBuffer};
use crate::model::{Descriptor, Gpt2, Params};
use crate::tensor::{DType, Tensor};
use anyhow::{Context, Result, anyhow, ensure};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of a checkpoint besides its tensors, at most: settings, checksums, the log that goes on meanwhile.
const SLACK: u64 = 1 << 20;

/// The checkpoints of a run.
#[derive(Debug)]
pub struct Checkpoints {
    directory: Locked,
    retention: Retention,
    identity: Identity,
    rank: Rank,
    /// Host memory for the copy, kept from one checkpoint to the next; with the writer while it writes.
    copy: Option<HostCopy>,
    writing: Option<JoinHandle<Done>>,
    newest: Option<usize>,
}

/// How writing a checkpoint went.
#[derive(Debug)]
pub struct Written {
    pub step: usize,
    pub result: Result<Report>,
}

/// A checkpoint that is whole.
#[derive(Debug)]
pub struct Report {
    pub model_file: PathBuf,
    pub bytes: u64,
    /// From the end of the pause on.
    pub time: Duration,
    /// How long the run waited.
    pub pause: Duration,
    /// What does no harm to this checkpoint but should be known: older ones could not be deleted.
    pub warning: Option<String>,
}

struct HostCopy(HostBuffer);

impl std::fmt::Debug for HostCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", size_of_val(&**self.0))
    }
}

#[derive(Debug)]
struct Done {
    copy: HostCopy,
    written: Written,
}

impl Checkpoints {
    /// `newest` is the step of the checkpoint that the run goes on from.
    pub fn new(directory: Locked, retention: Retention, identity: Identity, newest: Option<usize>) -> Self {
        Self { directory, retention, identity, rank: Rank::ONLY, copy: None, writing: None, newest }
    }

    /// What there is to go back to if all has gone wrong from `step`'s update on.
    pub fn before(&self, step: usize) -> Result<Before> {
        let path = self.directory.path();
        let good = done_steps(path)?.into_iter().rfind(|&done| done < step);
        let suspect = self.newest.filter(|&newest| newest >= step);
        Ok(Before {
            good: good.map(|good| (good, path.join(model_name(good)))),
            suspect: suspect.map(|suspect| path.join(done_name(suspect))),
        })
    }

    /// Model file of the newest checkpoint that is whole.
    pub fn model_file(&self) -> Option<PathBuf> {
        self.newest.map(|step| self.directory.path().join(model_name(step)))
    }

    /// Step of the newest checkpoint that is whole.
    pub fn newest(&self) -> Option<usize> {
        self.newest
    }

    /// Checks that there is room for one checkpoint of `model`, and takes the host memory for it.
    pub fn prepare(&mut self, model: &Gpt2, engine: &dyn Engine, state: &RunState) -> Result<()> {
        self.ensure_room(model, engine, state)?;
        self.host_copy(&Blocks::of(model)?, engine).map(|copy| self.copy = Some(copy))
    }

    /// Copies the tensors and begins to write. The one before must have been waited for.
    ///
    /// `logs` are made durable before the checkpoint is whole, so that no line from before it can be missing.
    pub fn begin(&mut self, model: &Gpt2, engine: &mut dyn Engine, state: RunState, logs: Vec<File>) -> Result<()> {
        assert!(self.writing.is_none(), "one checkpoint at a time");
        let began = Instant::now();
        self.ensure_room(model, engine, &state)?;
        let blocks = Blocks::of(model)?;
        let mut copy = self.host_copy(&blocks, engine)?;
        blocks.copy(engine, bytemuck::cast_slice_mut(&mut copy.0))?;
        let job = Job {
            directory: self.directory.path().to_owned(),
            retention: self.retention,
            identity: self.identity.clone(),
            rank: self.rank,
            descriptor: model.descriptor,
            layout: model.layout.clone(),
            float: engine.float(),
            blocks,
            state,
            algorithms: engine.algorithms(),
            logs,
            pause: began.elapsed(),
        };
        let write = move || {
            let written = Written { step: job.state.step, result: job.write(bytemuck::cast_slice(&copy.0)) };
            Done { copy, written }
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.writing = Some(thread.context("cannot start the thread that writes checkpoints")?);
        Ok(())
    }

    /// What has become of the write under way, if it has ended.
    pub fn poll(&mut self) -> Option<Written> {
        if self.writing.as_ref().is_some_and(JoinHandle::is_finished) { self.wait() } else { None }
    }

    /// Waits for the write under way, if there is one.
    pub fn wait(&mut self) -> Option<Written> {
        let Done { copy, written } = match self.writing.take()?.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        self.copy = Some(copy);
        if written.result.is_ok() {
            self.newest = Some(written.step);
        }
        Some(written)
    }

    fn host_copy(&mut self, blocks: &Blocks, engine: &dyn Engine) -> Result<HostCopy> {
        if let Some(copy) = self.copy.take() {
            return Ok(copy);
        }
        let buffer = engine.host_buffer(blocks.bytes.div_ceil(size_of::<i32>()));
        buffer.map(HostCopy).with_context(|| format!("a checkpoint needs {} of host memory", size(blocks.bytes as u64)))
    }

    fn ensure_room(&self, model: &Gpt2, engine: &dyn Engine, state: &RunState) -> Result<()> {
        let path = self.directory.path();
        let blocks = Blocks::of(model)?;
        let parameters = model.descriptor.parameters();
        let needed = model::bytes(model.descriptor, engine.float())
            + state::bytes(parameters, blocks.masters().is_some(), &state.data)
            + SLACK;
        let room = rustix::fs::statvfs(path)
            .with_context(|| format!("cannot tell how much room there is in {}", path.display()))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        ensure!(
            needed <= free,
            "{} has {} free, a checkpoint takes {}: make room, or take another --out",
            path.display(),
            size(free),
            size(needed)
        );
        Ok(())
    }
}

impl Drop for Checkpoints {
    /// A checkpoint that was begun is finished, whatever ends the run.
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            let _ = writing.join();
        }
    }
}

pub fn size(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    }
}

/// The tensors of a checkpoint, and where their bytes lie in the host copy.
struct Blocks {
    /// Parameters, m, v, perhaps masters.
    tensors: Vec<(Tensor, Range<usize>)>,
    bytes: usize,
    /// Which of them the state file has as master weights: f32 parameters are their own.
    master: Option<usize>,
}

impl Blocks {
    fn of(model: &Gpt2) -> Result<Self> {
        let training = model.training.context("this model was planned for inference only")?;
        let tensors = [Some(model.params), Some(training.m), Some(training.v), training.master];
        let mut bytes = 0;
        let tensors: Vec<_> = tensors
            .into_iter()
            .flatten()
            .map(|tensor| {
                let start = bytes;
                bytes += tensor.bytes();
                (tensor, start..bytes)
            })
            .collect();
        let own = (model.params.dtype == DType::F32).then_some(0);
        let master = training.master.map(|_| tensors.len() - 1).or(own);
        Ok(Self { tensors, bytes, master })
    }

    fn masters(&self) -> Option<usize> {
        self.master
    }

    fn copy(&self, engine: &mut dyn Engine, to: &mut [u8]) -> Result<()> {
        for (tensor, range) in &self.tensors {
            engine.read_bytes(*tensor, &mut to[range.clone()])?;
        }
        Ok(())
    }

    fn part<'a>(&self, i: usize, copy: &'a [u8]) -> &'a [u8] {
        &copy[self.tensors[i].1.clone()]
    }
}

/// What the writing thread needs to know.
struct Job {
    directory: PathBuf,
    retention: Retention,
    identity: Identity,
    rank: Rank,
    descriptor: Descriptor,
    layout: Params,
    float: DType,
    blocks: Blocks,
    state: RunState,
    algorithms: Option<Algorithms>,
    logs: Vec<File>,
    pause: Duration,
}

impl Job {
    fn write(&self, copy: &[u8]) -> Result<Report> {
        let began = Instant::now();
        let step = self.state.step;
        let part = |i| self.blocks.part(i, copy);
        // On one file system with where the files shall be, so that they can be renamed.
        let unfinished = Unfinished::create(&self.directory)?;
        let model = model_name(step);
        let state = state_name(step, self.rank.rank);
        let mut files = vec![
            unfinished.write(&model, |out| model::write(out, self.descriptor, &self.layout, part(0), self.float))?,
            unfinished.write(&state, |out| {
                let moments = Moments { m: part(1), v: part(2), master: self.blocks.masters().map(part) };
                state::write(out, self.rank, &self.state, &self.layout, moments)
            })?,
        ];
        let sidecar = Sidecar {
            step,
            identity: self.identity.clone(),
            progress: self.state.progress.clone(),
            algorithms: self.algorithms.clone(),
            files: files.clone(),
        };
        files.push(unfinished.write(&sidecar_name(step), |out| sidecar.write(out))?);
        for log in &self.logs {
            log.sync_data().context("cannot write the log")?;
        }
        // A checkpoint of this step may be there, damaged, or from a time before the run was taken back: no moment must
        // show it as whole with some of its files replaced.
        let done = self.directory.join(done_name(step));
        remove_file(&done)?;
        atomic::sync_directory(&self.directory)?;
        for file in &files {
            unfinished.finish(&file.name, &self.directory)?;
        }
        atomic::sync_directory(&self.directory)?;
        drop(unfinished);
        atomic::write(&done, |_| Ok(()))?;
        let warning = self.retention.apply(&self.directory, step).err();
        Ok(Report {
            model_file: self.directory.join(model),
            bytes: files.iter().map(|file| file.bytes).sum(),
            time: began.elapsed(),
            pause: self.pause,
            warning: warning.map(|error| format!("{error:#}")),
        })
    }
}

/// A directory that files are in until they are whole. Dropping it removes it.
struct Unfinished(PathBuf);

impl Unfinished {
    fn create(parent: &Path) -> Result<Self> {
        let path = parent.join(format!("{}checkpoint", atomic::UNFINISHED));
        let cannot = || format!("cannot make {}", path.display());
        if path.exists() {
            fs::remove_dir_all(&path).with_context(cannot)?;
        }
        fs::create_dir(&path).with_context(cannot)?;
        Ok(Self(path))
    }

    /// Writes a file and makes it durable.
    fn write(&self, name: &str, fill: impl FnOnce(&mut Summing) -> Result<()>) -> Result<FileSum> {
        let path = self.0.join(name);
        let write = || -> Result<FileSum> {
            let mut out =
                Summing { file: BufWriter::with_capacity(1 << 20, File::create(&path)?), hash: Xxh3::new(), bytes: 0 };
            fill(&mut out)?;
            let file = out.file.into_inner().map_err(|error| anyhow!(error.into_error()))?;
            file.sync_all()?;
            Ok(FileSum { name: name.to_owned(), bytes: out.bytes, xxh3: hex(out.hash.digest()) })
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    fn finish(&self, name: &str, directory: &Path) -> Result<()> {
        let (from, to) = (self.0.join(name), directory.join(name));
        fs::rename(&from, &to).with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // What stays is removed when a run begins here.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Counts and sums what is written.
struct Summing {
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
}

impl Write for Summing {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let n = self.file.write(buf)?;
        self.hash.update(&buf[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
