//! Writes checkpoints while the run goes on: it waits only until the tensors are copied to host memory.

use super::RunState;
use super::before::Before;
use super::directory::{Locked, Retention, done_name, done_steps, model_name, remove_file, sidecar_name, state_name};
use super::model_file;
use super::sidecar::{FileSum, Identity, Sidecar, hex};
use super::state::{self, Moments};
use super::tensors::Shape;
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use distributed::Ranks;
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Algorithms, Engine, HostBuffer};
use model::{Descriptor, Gpt2, Params, Shard, Unit};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of a checkpoint besides its tensors, at most: settings, checksums, the log that goes on meanwhile.
const SLACK: u64 = 1 << 20;

/// The checkpoints of a run, on a rank that writes something of them.
#[derive(Debug)]
pub struct Checkpoints {
    path: PathBuf,
    /// What the first rank alone does: all but its own state file.
    first: Option<First>,
    identity: Identity,
    /// Host memory for the copy, kept from one checkpoint to the next; with the writer while it writes.
    copy: Option<HostCopy>,
    writing: Option<JoinHandle<Done>>,
    /// Other ranks' files are not known yet to be whole.
    with_others: bool,
    newest: Option<usize>,
}

#[derive(Debug)]
struct First {
    _directory: Locked,
    retention: Retention,
    /// To the thread that writes: what the other ranks have written.
    others: Option<Sender<Vec<Told>>>,
}

/// What a rank's state file is, or why there is none.
type Told = Result<FileSum, String>;

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
    step: usize,
    result: Result<Finished>,
}

#[derive(Debug)]
enum Finished {
    /// All of it.
    Checkpoint(Report),
    /// This rank's file.
    State(FileSum),
}

impl Checkpoints {
    /// Those of the first rank. `newest` is the step of the checkpoint that the run goes on from.
    pub fn new(directory: Locked, retention: Retention, identity: Identity, newest: Option<usize>) -> Self {
        let mut checkpoints = Self::of_another_rank(directory.path().to_owned(), identity, newest);
        checkpoints.first = Some(First { _directory: directory, retention, others: None });
        checkpoints
    }

    /// Another rank's, where ranks divide the optimizer's state: its own state files, into the first rank's directory.
    pub fn of_another_rank(path: PathBuf, identity: Identity, newest: Option<usize>) -> Self {
        Self { path, first: None, identity, copy: None, writing: None, with_others: false, newest }
    }

    /// What there is to go back to if all has gone wrong from `step`'s update on.
    pub fn before(&self, step: usize) -> Result<Before> {
        let path = &self.path;
        let good = done_steps(path)?.into_iter().rfind(|&done| done < step);
        let suspect = self.newest.filter(|&newest| newest >= step);
        Ok(Before {
            good: good.map(|good| (good, path.join(model_name(good)))),
            suspect: suspect.map(|suspect| path.join(done_name(suspect))),
        })
    }

    /// Model file of the newest checkpoint that is whole.
    pub fn model_file(&self) -> Option<PathBuf> {
        self.newest.map(|step| self.path.join(model_name(step)))
    }

    /// Step of the newest checkpoint that is whole.
    pub fn newest(&self) -> Option<usize> {
        self.newest
    }

    /// Checks that there is room for one checkpoint of `model`, and takes the host memory for it.
    pub fn prepare(&mut self, model: &Gpt2, engine: &dyn Engine, state: &RunState) -> Result<()> {
        self.ensure_room(model, engine, state)?;
        self.host_copy(&self.blocks(model)?, engine).map(|copy| self.copy = Some(copy))
    }

    fn blocks(&self, model: &Gpt2) -> Result<Blocks> {
        Blocks::of(model, self.first.is_some())
    }

    /// Copies the tensors and begins to write. The one before must have been waited for. Where ranks divide the optimizer's
    /// state they all do this, and all fail if one does.
    ///
    /// `logs` are made durable before the checkpoint is whole, so that no line from before it can be missing.
    pub fn begin(
        &mut self,
        model: &Gpt2,
        engine: &mut dyn Engine,
        ranks: &mut Ranks,
        state: RunState,
        logs: Result<Vec<File>>,
    ) -> Result<()> {
        assert!(self.writing.is_none(), "one checkpoint at a time");
        let began = Instant::now();
        let share = model.zero.shard();
        let ready = logs.and_then(|logs| self.ready(model, engine, &state, logs));
        if share.ranks > 1 {
            nobody_failed(ranks, ready.as_ref().err())?;
        }
        let Ready { blocks, mut copy, unfinished, logs } = ready?;
        blocks.copy(model, engine, ranks, bytemuck::cast_slice_mut(&mut copy.0))?;
        let (tell, others) = channel();
        let shared = Job {
            unfinished: unfinished_in(&self.path),
            share,
            layout: model.layout.clone(),
            float: engine.dtype(),
            blocks,
            state,
            pause: began.elapsed(),
        };
        let of_first = self.first.as_mut().zip(unfinished).map(|(first, unfinished)| {
            first.others = Some(tell);
            OfFirst {
                directory: self.path.clone(),
                retention: first.retention,
                identity: self.identity.clone(),
                descriptor: model.descriptor,
                algorithms: engine.algorithms(),
                logs,
                unfinished,
                others,
            }
        });
        let write = move || {
            let bytes = bytemuck::cast_slice(&copy.0);
            let step = shared.state.step;
            let result = match of_first {
                Some(of_first) => of_first.write(&shared, bytes).map(Finished::Checkpoint),
                None => shared.write_state(bytes).map(Finished::State),
            };
            Done { copy, step, result }
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.writing = Some(thread.context("cannot start the thread that writes checkpoints")?);
        self.with_others = share.ranks > 1;
        Ok(())
    }

    /// What can fail on one rank alone.
    fn ready(&mut self, model: &Gpt2, engine: &dyn Engine, state: &RunState, logs: Vec<File>) -> Result<Ready> {
        self.ensure_room(model, engine, state)?;
        let blocks = self.blocks(model)?;
        let copy = self.host_copy(&blocks, engine)?;
        // On one file system with where the files shall be, so that they can be renamed.
        let unfinished = self.first.is_some().then(|| Unfinished::create(&self.path)).transpose()?;
        Ok(Ready { blocks, copy, unfinished, logs })
    }

    /// What has become of the write under way, if it has ended; on the first rank.
    pub fn poll(&mut self, ranks: &mut Ranks) -> Result<Option<Written>> {
        if self.with_others {
            let writes = self.first.is_none() && self.writing.as_ref().is_some_and(|writing| !writing.is_finished());
            if ranks.any(writes)? {
                return Ok(None);
            }
            self.hear_others(ranks)?;
        }
        let ended = self.writing.as_ref().is_some_and(JoinHandle::is_finished);
        Ok(if ended { self.ended() } else { None })
    }

    /// Waits for the write under way, if there is one.
    pub fn wait(&mut self, ranks: &mut Ranks) -> Result<Option<Written>> {
        if self.with_others {
            self.hear_others(ranks)?;
        }
        Ok(self.ended())
    }

    /// Hands what the other ranks have written to the first one's thread, which waits for it.
    fn hear_others(&mut self, ranks: &mut Ranks) -> Result<()> {
        self.with_others = false;
        let own: Option<Told> = match &self.first {
            Some(_) => None,
            None => self.join().map(|Done { copy, step, result }| {
                self.copy = Some(copy);
                match result {
                    Ok(Finished::State(sum)) => {
                        self.newest = Some(step);
                        Ok(sum)
                    }
                    Ok(Finished::Checkpoint(_)) => Err("it has written what is the first rank's".to_owned()),
                    Err(error) => Err(format!("{error:#}")),
                }
            }),
        };
        ranks.doing("writing a checkpoint");
        let all = ranks.gather(serde_json::to_vec(&own)?)?;
        if let Some(tell) = self.first.as_mut().and_then(|first| first.others.take()) {
            let told = all.iter().skip(1).enumerate().map(|(i, bytes)| {
                let told: Option<Told> = serde_json::from_slice(bytes)?;
                let told = told.unwrap_or_else(|| Err("it has written nothing".to_owned()));
                Ok(told.map_err(|why| format!("rank {}: {why}", i + 1)))
            });
            // A thread that has failed listens no more, and says why itself.
            let _ = tell.send(told.collect::<Result<_>>()?);
        }
        Ok(())
    }

    fn join(&mut self) -> Option<Done> {
        match self.writing.take()?.join() {
            Ok(done) => Some(done),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn ended(&mut self) -> Option<Written> {
        let Done { copy, step, result } = self.join()?;
        self.copy = Some(copy);
        if result.is_ok() {
            self.newest = Some(step);
        }
        match result {
            Ok(Finished::Checkpoint(report)) => Some(Written { step, result: Ok(report) }),
            Ok(Finished::State(_)) => None,
            Err(error) => Some(Written { step, result: Err(error) }),
        }
    }

    fn host_copy(&mut self, blocks: &Blocks, engine: &dyn Engine) -> Result<HostCopy> {
        if let Some(copy) = self.copy.take() {
            return Ok(copy);
        }
        let buffer = engine.host_buffer(blocks.bytes.div_ceil(size_of::<i32>()));
        buffer.map(HostCopy).with_context(|| format!("a checkpoint needs {} of host memory", size(blocks.bytes as u64)))
    }

    fn ensure_room(&self, model: &Gpt2, engine: &dyn Engine, state: &RunState) -> Result<()> {
        if self.first.is_none() {
            return Ok(());
        }
        let path = &self.path;
        let Shard { ranks, .. } = model.zero.shard();
        // The first share is the largest.
        let parameters = Shape::of(model.descriptor).elements_of(Shard { rank: 0, ranks }) as usize;
        let masters = self.blocks(model)?.masters.is_some();
        let needed = model_file::bytes(model.descriptor, engine.dtype())
            + ranks as u64 * state::bytes(parameters, masters, &state.data)
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
    /// A checkpoint that was begun is finished, whatever ends the run, unless other ranks write of it, too.
    fn drop(&mut self) {
        if let Some(first) = &mut self.first {
            first.others = None;
        }
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

struct Ready {
    blocks: Blocks,
    copy: HostCopy,
    unfinished: Option<Unfinished>,
    logs: Vec<File>,
}

/// An error on all ranks if there is one on any.
fn nobody_failed(ranks: &mut Ranks, error: Option<&anyhow::Error>) -> Result<()> {
    let texts = ranks.gather(error.map_or_else(Vec::new, |error| format!("{error:#}").into_bytes()))?;
    let failed = texts.iter().enumerate().find(|(_, text)| !text.is_empty());
    let text = failed.map(|(rank, text)| match (rank, String::from_utf8_lossy(text)) {
        (0, text) => text.into_owned(),
        (rank, text) => format!("rank {rank}: {text}"),
    });
    ranks.tell(text)?.map_or(Ok(()), |text| bail!(text))
}

/// Where the parts of a checkpoint's tensors lie in the host copy.
struct Blocks {
    /// All parameters, as laid out; on the first rank.
    params: Option<Range<usize>>,
    /// As laid out, or where ranks divide them, this rank's share of each tensor in the order of the file.
    m: Range<usize>,
    v: Range<usize>,
    masters: Option<Range<usize>>,
    bytes: usize,
}

impl Blocks {
    fn of(model: &Gpt2, with_params: bool) -> Result<Self> {
        let training = model.training.context("this model was planned for inference only")?;
        let share = model.zero.shard();
        let whole = |tensor: Tensor| model.layout.elements() * tensor.dtype.bytes();
        let of_file = || Shape::of(model.descriptor).elements_of(share) as usize * size_of::<f32>();
        let state = |tensor| if share == Shard::UNSHARDED { whole(tensor) } else { of_file() };
        let mut bytes = 0;
        let mut place = |n: usize| {
            bytes += n;
            bytes - n..bytes
        };
        let params = with_params.then(|| place(whole(model.params)));
        let (m, v) = (place(state(training.m)), place(state(training.v)));
        let masters = match (training.master, model.params.dtype) {
            (Some(master), _) => Some(place(state(master))),
            // f32 parameters are their own.
            (None, DType::F32) if share == Shard::UNSHARDED => params.clone(),
            (None, DType::F32) => Some(place(of_file())),
            _ => None,
        };
        Ok(Self { params, m, v, masters, bytes })
    }

    fn copy(&self, model: &Gpt2, engine: &mut dyn Engine, ranks: &mut Ranks, to: &mut [u8]) -> Result<()> {
        let training = model.training.context("this model was planned for inference only")?;
        let own_masters = training.master.or((model.params.dtype == DType::F32).then_some(model.params));
        let blocks = [
            (Some(&self.m), Some(training.m)),
            (Some(&self.v), Some(training.v)),
            (self.masters.as_ref().filter(|masters| self.params.as_ref() != Some(masters)), own_masters),
        ];
        let blocks: Vec<_> = blocks.into_iter().filter_map(|(range, tensor)| Some((range?.clone(), tensor?))).collect();
        let Some(gathered) = training.gathered else {
            let params = self.params.iter().map(|range| (range.clone(), model.params));
            return blocks
                .into_iter()
                .chain(params)
                .try_for_each(|(range, tensor)| engine.read_bytes(tensor, &mut to[range]));
        };
        let size = model.params.dtype.bytes();
        let params = model.param_store();
        for unit in model.layout.units() {
            let range = model.layout.unit(unit);
            if !model.zero.shards_parameters() || unit == Unit::Embeddings {
                if let Some(block) = &self.params {
                    let at = block.start + range.start * size;
                    engine.read_bytes(params.unit(unit), &mut to[at..at + range.len() * size])?;
                }
            } else {
                let whole = Tensor { len: range.len(), dtype: model.params.dtype, ..gathered };
                ranks.all_gather(engine, Sharded { whole, shard: params.own(unit) })?;
                ranks.settle(engine)?;
                if let Some(block) = &self.params {
                    let at = block.start + range.start * size;
                    engine.read_bytes(whole, &mut to[at..at + whole.bytes()])?;
                }
            }
            for (block, tensor) in &blocks {
                let store = if *tensor == model.params { params } else { model.state_store(*tensor) };
                let whole = gathered.slice(0, range.len());
                ranks.all_gather(engine, Sharded { whole, shard: store.own(unit) })?;
                ranks.settle(engine)?;
                read_shares(model, unit, whole, engine, &mut to[block.clone()])?;
            }
        }
        Ok(())
    }
}

/// Copies this rank's share of each tensor of a whole unit, f32, to where the file has it.
fn read_shares(model: &Gpt2, unit: Unit, whole: Tensor, engine: &mut dyn Engine, to: &mut [u8]) -> Result<()> {
    let (layout, share) = (&model.layout, model.zero.shard());
    let mut at = 0;
    for (param, layer) in layout.file_order() {
        let range = layout.range(param, layer);
        let own = share.of(range.len());
        if layout.unit_of(param, layer) == unit && !own.is_empty() {
            let from = whole.slice(range.start - layout.unit(unit).start + own.start, own.len());
            engine.read_bytes(from, &mut to[at..at + from.bytes()])?;
        }
        at += own.len() * size_of::<f32>();
    }
    Ok(())
}

/// What a rank's writing thread needs to know.
struct Job {
    unfinished: PathBuf,
    share: Shard,
    layout: Params,
    float: DType,
    blocks: Blocks,
    state: RunState,
    pause: Duration,
}

impl Job {
    fn write_state(&self, copy: &[u8]) -> Result<FileSum> {
        let part = |range: &Range<usize>| &copy[range.clone()];
        let Blocks { m, v, masters, .. } = &self.blocks;
        write_file(&self.unfinished, &state_name(self.state.step, self.share.rank), |out| {
            let moments = Moments { m: part(m), v: part(v), master: masters.as_ref().map(part) };
            state::write(out, self.share, &self.state, &self.layout, moments)
        })
    }
}

/// What the first rank's needs to know besides.
struct OfFirst {
    directory: PathBuf,
    retention: Retention,
    identity: Identity,
    descriptor: Descriptor,
    algorithms: Option<Algorithms>,
    logs: Vec<File>,
    unfinished: Unfinished,
    others: Receiver<Vec<Told>>,
}

impl OfFirst {
    fn write(self, job: &Job, copy: &[u8]) -> Result<Report> {
        let began = Instant::now();
        let own = self.write_files(job, copy);
        // What others still write into the directory must be done before that goes.
        let told = match job.share.ranks {
            1 => Vec::new(),
            _ => self.others.recv().context("the run has ended while other ranks were writing")?,
        };
        let mut files = own?;
        for told in told {
            files.push(told.map_err(Error::msg)?);
        }
        let step = job.state.step;
        let sidecar = Sidecar {
            step,
            identity: self.identity.clone(),
            progress: job.state.progress.clone(),
            algorithms: self.algorithms.clone(),
            files: files.clone(),
        };
        files.push(write_file(&self.unfinished.0, &sidecar_name(step), |out| sidecar.write(out))?);
        for log in &self.logs {
            log.sync_data().context("cannot write the log")?;
        }
        // A checkpoint of this step may be there, damaged, or from a time before the run was taken back: no moment must
        // show it as whole with some of its files replaced.
        let done = self.directory.join(done_name(step));
        remove_file(&done)?;
        atomic_file::sync_directory(&self.directory)?;
        for file in &files {
            self.unfinished.finish(&file.name, &self.directory)?;
        }
        atomic_file::sync_directory(&self.directory)?;
        drop(self.unfinished);
        atomic_file::write(&done, |_| Ok(()))?;
        let warning = self.retention.apply(&self.directory, step).err();
        Ok(Report {
            model_file: self.directory.join(model_name(step)),
            bytes: files.iter().map(|file| file.bytes).sum(),
            time: began.elapsed(),
            pause: job.pause,
            warning: warning.map(|error| format!("{error:#}")),
        })
    }

    fn write_files(&self, job: &Job, copy: &[u8]) -> Result<Vec<FileSum>> {
        let params = job.blocks.params.clone().context("the first rank has copied no parameters")?;
        let model = write_file(&self.unfinished.0, &model_name(job.state.step), |out| {
            model_file::write(out, self.descriptor, &job.layout, &copy[params], job.float)
        })?;
        Ok(vec![model, job.write_state(copy)?])
    }
}

/// A directory that files are in until they are whole. Dropping it removes it.
#[derive(Debug)]
struct Unfinished(PathBuf);

impl Unfinished {
    fn create(parent: &Path) -> Result<Self> {
        let path = unfinished_in(parent);
        let cannot = || format!("cannot make {}", path.display());
        if path.exists() {
            fs::remove_dir_all(&path).with_context(cannot)?;
        }
        fs::create_dir(&path).with_context(cannot)?;
        Ok(Self(path))
    }

    fn finish(&self, name: &str, directory: &Path) -> Result<()> {
        let (from, to) = (self.0.join(name), directory.join(name));
        fs::rename(&from, &to).with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
    }
}

fn unfinished_in(directory: &Path) -> PathBuf {
    directory.join(format!("{}checkpoint", atomic_file::UNFINISHED))
}

/// Writes a file and makes it durable.
fn write_file(directory: &Path, name: &str, fill: impl FnOnce(&mut Summing) -> Result<()>) -> Result<FileSum> {
    let path = directory.join(name);
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
