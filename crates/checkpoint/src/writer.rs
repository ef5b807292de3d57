//! Asynchronous checkpoint writer. Training waits only until the tensors are copied to host memory.

use super::RunState;
use super::directory::{
    DirectoryLock, Retention, done_name, done_steps, existing_model_name, remove_entry, remove_file,
    remove_incomplete_checkpoints, remove_temporary, sidecar_name, staging_name, state_name,
};
use super::model_file::{self, Format};
use super::recovery::RecoveryPoint;
use super::sidecar::{FileChecksum, Identity, Sidecar, format_checksum};
use super::state::{self, OptimizerState, Values};
use super::tensors::FileShape;
use anyhow::{Context, Error, Result, anyhow, ensure};
use distributed::Ranks;
use engine::ops::Master;
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Algorithms, Engine, HostBuffer};
use half::bf16;
use model::{Decoder, Descriptor, Params, Shard, Unit};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::fs::{self, File};
use system::progress::{self, Progress};
use system::sync::{Receiver, Sender, channel};
use system::thread::{self, JoinHandle};
use system::time;
use xxhash_rust::xxh3::Xxh3;

/// Upper bound of the bytes of a checkpoint besides its tensors: settings, checksums, and log lines written meanwhile.
const SPACE_MARGIN: u64 = 1 << 20;

/// Writes the checkpoints of a run. Rank 0 has one. If the optimizer state is sharded, every rank has one.
#[derive(Debug)]
pub struct CheckpointWriter {
    path: PathBuf,
    /// State of rank 0, which writes all files except the state files of the other ranks. `None` on other ranks.
    rank_0: Option<Rank0>,
    /// Whether this rank writes a state file: with several shard groups, only the ranks of the first do.
    writes: bool,
    identity: Identity,
    /// Host memory for the copy of the tensors, reused for each checkpoint. The writing thread owns it while it writes.
    copy: Option<HostCopy>,
    thread: Option<JoinHandle<ThreadOutput>>,
    /// The number of state files, until the results of their ranks are exchanged.
    exchange_pending: Option<usize>,
    /// Step of the newest complete checkpoint.
    newest: Option<usize>,
}

#[derive(Debug)]
struct Rank0 {
    directory: DirectoryLock,
    /// Whether the directory has moved since the start.
    has_moved: bool,
    retention: Retention,
    /// The last step before which the hardware was verified.
    verified: Option<usize>,
    /// Sends the results of the other ranks to the writing thread.
    results: Option<Sender<Vec<StateFileResult>>>,
}

/// The checksum of the state file of a rank, or the error message.
type StateFileResult = Result<FileChecksum, String>;

/// The outcome of writing a checkpoint.
#[derive(Debug)]
pub struct WriteOutcome {
    /// Step of the checkpoint.
    pub step: usize,
    /// A summary, or the error if there is no checkpoint of this step.
    pub result: Result<WriteSummary>,
}

/// A summary of a complete checkpoint.
#[derive(Debug)]
pub struct WriteSummary {
    /// Path of its model file.
    pub model_file: PathBuf,
    /// Size of all files.
    pub bytes: u64,
    /// Time of writing, during which training continued.
    pub time: Duration,
    /// Time that training waited for the copy to host memory.
    pub pause: Duration,
    /// The error if old checkpoints could not be deleted.
    pub warning: Option<String>,
}

struct HostCopy(HostBuffer);

impl std::fmt::Debug for HostCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", size_of_val(&**self.0))
    }
}

/// The output of the writing thread.
#[derive(Debug)]
struct ThreadOutput {
    copy: HostCopy,
    step: usize,
    result: Result<Written>,
}

#[derive(Debug)]
enum Written {
    /// The complete checkpoint, on rank 0.
    Checkpoint(WriteSummary),
    /// The state file of this rank, on other ranks.
    StateFile(FileChecksum),
}

impl CheckpointWriter {
    /// Creates the writer of rank 0. `newest` is the step of the checkpoint that the run resumes from.
    pub fn new(directory: DirectoryLock, retention: Retention, identity: Identity, newest: Option<usize>) -> Self {
        let mut writer = Self::for_other_rank(directory.path().to_owned(), identity, newest);
        writer.rank_0 = Some(Rank0 { directory, has_moved: false, retention, verified: None, results: None });
        writer
    }

    /// Creates the writer of another rank, for a sharded optimizer state. It writes its state files into the directory of
    /// rank 0.
    pub fn for_other_rank(path: PathBuf, identity: Identity, newest: Option<usize>) -> Self {
        Self { path, rank_0: None, writes: true, identity, copy: None, thread: None, exchange_pending: None, newest }
    }

    /// Creates the writer of a rank outside of the first shard group. Another rank writes the same shard, so this one writes nothing,
    /// but it takes part in the collectives of the others.
    pub fn for_replica(path: PathBuf, identity: Identity, newest: Option<usize>) -> Self {
        let mut writer = Self::for_other_rank(path, identity, newest);
        writer.writes = false;
        writer
    }

    /// Keeps the newest checkpoint up to `step`, before which the hardware was verified, until a later verification.
    pub fn keep_verified(&mut self, step: usize) {
        if let Some(rank_0) = &mut self.rank_0 {
            rank_0.verified = Some(step);
        }
    }

    /// Returns the checkpoints before and after `step`, the first step with a bad update.
    pub fn recovery_point(&self, step: usize) -> Result<RecoveryPoint> {
        let path = &self.path;
        let last_good = done_steps(path)?.into_iter().rfind(|&done| done < step);
        let suspect = self.newest.filter(|&newest| newest >= step);
        Ok(RecoveryPoint {
            last_good: last_good
                .map(|step| Ok::<_, Error>((step, path.join(existing_model_name(path, step)?))))
                .transpose()?,
            suspect: suspect.map(|step| path.join(done_name(step))),
        })
    }

    /// Returns the directory of the run.
    pub fn directory(&self) -> &Path {
        &self.path
    }

    /// Returns the current path of the directory if it was moved. Only rank 0 knows.
    pub fn moved(&self) -> Option<PathBuf> {
        self.rank_0.as_ref()?.directory.moved()
    }

    /// Writes further checkpoints into `path`, the current path of the directory.
    pub fn follow(&mut self, path: PathBuf) {
        if let Some(rank_0) = &mut self.rank_0 {
            rank_0.directory.follow(path.clone());
            rank_0.has_moved = true;
        }
        self.path = path;
    }

    /// Returns the model file of the newest complete checkpoint.
    pub fn model_file(&self) -> Option<PathBuf> {
        self.newest.and_then(|step| Some(self.path.join(existing_model_name(&self.path, step).ok()?)))
    }

    /// Returns the step of the newest complete checkpoint.
    pub fn newest(&self) -> Option<usize> {
        self.newest
    }

    /// Checks that there is disk space for one checkpoint of `model`, allocates host memory for it, and starts the thread that writes it.
    pub fn prepare(&mut self, model: &Decoder, engine: &dyn Engine, state: &RunState) -> Result<()> {
        self.check_disk_space(model, engine, state)?;
        if self.writes {
            self.copy = Some(self.host_copy(&self.layout(model)?, engine)?);
        }
        // The writer uses this thread again, even if the process has reached a limit by then.
        drop(thread::spawn("checkpoint", None, || ()).context("cannot start the checkpoint thread")?.join());
        Ok(())
    }

    fn layout(&self, model: &Decoder) -> Result<HostLayout> {
        HostLayout::new(model, self.rank_0.is_some())
    }

    /// Copies the tensors to host memory and starts to write. The previous write must have been waited for. If the optimizer
    /// state is sharded, all ranks must call it, and it fails on all ranks if it fails on one.
    ///
    /// `logs` are synced to disk before the checkpoint is complete, so that they contain all lines before it. Afterwards the
    /// checkpoints of the steps `replaced` are deleted.
    pub fn begin(
        &mut self,
        model: &Decoder,
        engine: &mut dyn Engine,
        ranks: &mut Ranks,
        state: RunState,
        logs: Result<Vec<File>>,
        replaced: &[usize],
    ) -> Result<()> {
        assert!(self.thread.is_none(), "one checkpoint at a time");
        let start = time::now();
        let share = model.zero.shard();
        let prepared = logs.and_then(|logs| self.prepare_write(model, engine, &state, logs));
        let prepared = if share.ranks > 1 { agree(ranks, prepared)? } else { prepared? };
        let Prepared { host_layout, mut copy, staging, staging_name, logs } = prepared;
        let to = copy.as_mut().map(|copy| bytemuck::cast_slice_mut(&mut copy.0));
        host_layout.copy(model, engine, ranks, to)?;
        self.exchange_pending = (share.ranks > 1).then_some(share.ranks);
        let Some(copy) = copy else { return Ok(()) };
        let (sender, results) = channel();
        let job = WriteJob {
            staging_path: self.path.join(staging_name),
            share,
            layout: model.layout.clone(),
            float: engine.dtype(),
            host_layout,
            state,
            pause: time::now() - start,
        };
        let rank_0_job = self.rank_0.as_mut().zip(staging).map(|(rank_0, staging)| {
            rank_0.results = Some(sender);
            Rank0Job {
                directory: self.path.clone(),
                retention: rank_0.retention,
                verified: rank_0.verified,
                replaced: replaced.to_vec(),
                identity: self.identity.clone(),
                descriptor: model.descriptor,
                algorithms: engine.algorithms(),
                logs,
                staging,
                results,
            }
        });
        let write = move || {
            let bytes = bytemuck::cast_slice(&copy.0);
            let step = job.state.step;
            let result = match rank_0_job {
                Some(rank_0_job) => rank_0_job.write(&job, bytes).map(Written::Checkpoint),
                None => job.write_state(bytes).map(Written::StateFile),
            };
            ThreadOutput { copy, step, result }
        };
        let thread = thread::spawn("checkpoint", None, write);
        self.thread = Some(thread.context("cannot start the checkpoint thread")?);
        Ok(())
    }

    /// Performs the steps of [`begin`](Self::begin) that can fail on one rank alone.
    fn prepare_write(
        &mut self,
        model: &Decoder,
        engine: &dyn Engine,
        state: &RunState,
        logs: Vec<File>,
    ) -> Result<Prepared> {
        self.check_disk_space(model, engine, state)?;
        let host_layout = self.layout(model)?;
        let copy = if self.writes { Some(self.host_copy(&host_layout, engine)?) } else { None };
        let staging =
            self.rank_0.as_ref().map(|rank_0| StagingDirectory::create(&rank_0.directory, state.step)).transpose()?;
        // A name in the path of each rank, or a path after the directory has moved.
        let name = |staging: &StagingDirectory| match &self.rank_0 {
            Some(rank_0) if rank_0.has_moved => staging.path.to_string_lossy().into_owned(),
            _ => staging.name.clone(),
        };
        let staging_name = staging.as_ref().map_or_else(String::new, name);
        Ok(Prepared { host_layout, copy, staging, staging_name, logs })
    }

    /// Returns the outcome of the current write if it has ended. Always `None` on ranks other than 0.
    pub fn poll(&mut self, ranks: &mut Ranks) -> Result<Option<WriteOutcome>> {
        if let Some(files) = self.exchange_pending {
            let writing = self.rank_0.is_none() && self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
            if ranks.any_rank(writing)? {
                return Ok(None);
            }
            self.exchange_results(ranks, files)?;
        }
        let finished = self.thread.as_ref().is_some_and(|thread| thread.is_finished());
        Ok(if finished { self.finish() } else { None })
    }

    /// Waits for the current write, if any, and returns its outcome on rank 0.
    pub fn wait(&mut self, ranks: &mut Ranks) -> Result<Option<WriteOutcome>> {
        if let Some(files) = self.exchange_pending {
            self.exchange_results(ranks, files)?;
        }
        Ok(self.finish())
    }

    /// Sends the results of the other ranks that write one of `files` state files to the writing thread of rank 0, which waits for them.
    fn exchange_results(&mut self, ranks: &mut Ranks, files: usize) -> Result<()> {
        self.exchange_pending = None;
        let own: Option<StateFileResult> = match &self.rank_0 {
            Some(_) => None,
            None => self.join().map(|ThreadOutput { copy, step, result }| {
                self.copy = Some(copy);
                match result {
                    Ok(Written::StateFile(sum)) => {
                        self.newest = Some(step);
                        Ok(sum)
                    }
                    Ok(Written::Checkpoint(_)) => Err("it wrote the files of rank 0".to_owned()),
                    Err(error) => Err(format!("{error:#}")),
                }
            }),
        };
        ranks.set_operation("writing a checkpoint");
        let all = ranks.gather(serde_json::to_vec(&own)?)?;
        if let Some(sender) = self.rank_0.as_mut().and_then(|rank_0| rank_0.results.take()) {
            let results = all.iter().take(files).skip(1).enumerate().map(|(i, bytes)| {
                let result: Option<StateFileResult> = serde_json::from_slice(bytes)?;
                let result = result.unwrap_or_else(|| Err("it wrote no state file".to_owned()));
                Ok(result.map_err(|error| format!("rank {}: {error}", i + 1)))
            });
            // Sending fails if the thread has ended with an error, which the thread reports itself.
            let _ = sender.send(results.collect::<Result<_>>()?);
        }
        Ok(())
    }

    fn join(&mut self) -> Option<ThreadOutput> {
        match self.thread.take()?.join() {
            Ok(output) => Some(output),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Joins the writing thread and returns its outcome on rank 0.
    fn finish(&mut self) -> Option<WriteOutcome> {
        let ThreadOutput { copy, step, result } = self.join()?;
        self.copy = Some(copy);
        if result.is_ok() {
            self.newest = Some(step);
        }
        match result {
            Ok(Written::Checkpoint(summary)) => Some(WriteOutcome { step, result: Ok(summary) }),
            Ok(Written::StateFile(_)) => None,
            Err(error) => Some(WriteOutcome { step, result: Err(error) }),
        }
    }

    fn host_copy(&mut self, layout: &HostLayout, engine: &dyn Engine) -> Result<HostCopy> {
        if let Some(copy) = self.copy.take() {
            return Ok(copy);
        }
        let buffer = engine.host_buffer(layout.bytes.div_ceil(size_of::<i32>()));
        buffer.map(HostCopy).with_context(|| {
            format!("cannot allocate {} of host memory for a checkpoint", format_bytes(layout.bytes as u64))
        })
    }

    fn check_disk_space(&self, model: &Decoder, engine: &dyn Engine, state: &RunState) -> Result<()> {
        if self.rank_0.is_none() {
            return Ok(());
        }
        let path = &self.path;
        let Shard { ranks, .. } = model.zero.shard();
        // The share of rank 0 is the largest.
        let parameters = FileShape::new(model.descriptor).shard_elements(Shard { rank: 0, ranks }) as usize;
        let masters = self.layout(model)?.masters.is_some();
        let needed = model_file::file_bytes(model.descriptor, engine.dtype())?
            + ranks as u64 * state::file_bytes(parameters, masters, &state.data)
            + SPACE_MARGIN;
        let free =
            fs::free_space(path).with_context(|| format!("cannot determine the free space of {}", path.display()))?;
        ensure!(
            needed <= free,
            "{}: expected {} of free space for a checkpoint, found {}; free some space, or choose another --out",
            path.display(),
            format_bytes(needed),
            format_bytes(free)
        );
        Ok(())
    }
}

impl Drop for CheckpointWriter {
    /// Waits for the current write, so that an error does not lose its checkpoint. A sharded checkpoint whose results have not
    /// been exchanged is discarded.
    fn drop(&mut self) {
        if let Some(rank_0) = &mut self.rank_0 {
            rank_0.results = None;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Formats a number of bytes with a decimal unit.
pub fn format_bytes(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    }
}

/// The resources of a write.
struct Prepared {
    host_layout: HostLayout,
    /// `None` on ranks that write nothing.
    copy: Option<HostCopy>,
    /// On rank 0.
    staging: Option<StagingDirectory>,
    /// The name or path of rank 0's staging directory, on other ranks after [`agree`].
    staging_name: String,
    logs: Vec<File>,
}

/// Broadcasts the name of rank 0's staging directory. Fails on all ranks if there is an error on any rank.
fn agree(ranks: &mut Ranks, prepared: Result<Prepared>) -> Result<Prepared> {
    let own = prepared.as_ref().map(|own| own.staging_name.clone()).map_err(|error| format!("{error:#}"));
    let texts = ranks.gather(own.as_ref().err().cloned().unwrap_or_default().into_bytes())?;
    let failed = texts.iter().enumerate().find(|(_, text)| !text.is_empty());
    let failed = failed.map(|(rank, text)| match (rank, String::from_utf8_lossy(text)) {
        (0, text) => text.into_owned(),
        (rank, text) => format!("rank {rank}: {text}"),
    });
    let staging_name = ranks.broadcast(failed.map_or(own, Err))?.map_err(Error::msg)?;
    Ok(Prepared { staging_name, ..prepared? })
}

/// Byte ranges of the blocks of a checkpoint in the host copy.
struct HostLayout {
    /// All parameters in the layout of the model, on rank 0.
    params: Option<Range<usize>>,
    /// Moments in the layout of the model. If sharded, this rank's share of each tensor in file order.
    m: HostValues,
    v: HostValues,
    masters: Option<HostValues>,
    /// The tensors of the optimizer state, and of the parameters that are part of it, with their ranges.
    state: Vec<(Range<usize>, Tensor)>,
    bytes: usize,
}

/// Byte ranges of [`Values`] in the host copy.
enum HostValues {
    F32(Range<usize>),
    Bf16(Range<usize>),
    Remainder { params: Range<usize>, remainders: Range<usize> },
}

impl HostValues {
    fn in_copy<'a>(&self, copy: &'a [u8]) -> Values<'a> {
        let bytes = |range: &Range<usize>| &copy[range.clone()];
        match self {
            Self::F32(range) => Values::F32(bytes(range)),
            Self::Bf16(range) => Values::Bf16(bytes(range)),
            Self::Remainder { params, remainders } => {
                Values::Remainder { params: bytes(params), remainders: bytes(remainders) }
            }
        }
    }
}

impl HostLayout {
    fn new(model: &Decoder, with_params: bool) -> Result<Self> {
        let training = model.training.context("the model was planned for inference only")?;
        let (share, all) = (model.zero.shard(), model.layout.elements());
        let own = if share == Shard::UNSHARDED {
            all
        } else {
            FileShape::new(model.descriptor).shard_elements(share) as usize
        };
        let (mut bytes, mut state) = (0, Vec::new());
        let params = with_params.then(|| 0..all * model.params.dtype.bytes());
        bytes += params.as_ref().map_or(0, Range::len);
        let mut append = |tensor: Tensor| {
            let range = bytes..bytes + own * copied_bytes(tensor.dtype);
            bytes = range.end;
            state.push((range.clone(), tensor));
            range
        };
        let mut moments = |tensor: Tensor| {
            let range = append(tensor);
            if tensor.dtype == DType::F32 { HostValues::F32(range) } else { HostValues::Bf16(range) }
        };
        let (m, v) = (moments(training.m), moments(training.v));
        // If nothing is sharded, the master weights refer to the parameters of the model file.
        let whole_params = params.clone().filter(|_| share == Shard::UNSHARDED);
        let masters = match (training.master, model.params.dtype) {
            (Master::F32(masters), _) => Some(HostValues::F32(append(masters))),
            (Master::Remainder(remainders), _) => Some(HostValues::Remainder {
                params: whole_params.unwrap_or_else(|| append(model.params)),
                remainders: append(remainders),
            }),
            // f32 parameters are their own master weights.
            (Master::None, DType::F32) => Some(HostValues::F32(whole_params.unwrap_or_else(|| append(model.params)))),
            (Master::None, _) => None,
        };
        Ok(Self { params, m, v, masters, state, bytes })
    }

    /// Copies the tensors to host memory `to`, if this rank writes them. Sharded tensors are gathered first, one unit of the model at
    /// a time, by all ranks.
    fn copy(&self, model: &Decoder, engine: &mut dyn Engine, ranks: &mut Ranks, to: Option<&mut [u8]>) -> Result<()> {
        let mut read = Reader(to);
        let training = model.training.context("the model was planned for inference only")?;
        let Some(gathered) = training.gathered else {
            let params = self.params.iter().map(|range| (range.clone(), model.params));
            let state = self.state.iter().cloned();
            return state.chain(params).try_for_each(|(range, tensor)| read.read(engine, tensor, range));
        };
        let size = model.params.dtype.bytes();
        let params = model.param_store();
        for unit in model.layout.units() {
            let range = model.layout.unit(unit);
            let of_unit = if params.is_sharded(unit) {
                let whole = Tensor { len: range.len(), dtype: model.params.dtype, ..gathered };
                ranks.all_gather(engine, Sharded { whole, shard: params.own(unit) })?;
                ranks.wait_on_stream(engine)?;
                whole
            } else {
                params.unit(unit)
            };
            if let Some(block) = &self.params {
                let at = block.start + range.start * size;
                read.read(engine, of_unit, at..at + of_unit.bytes())?;
            }
            for (block, tensor) in &self.state {
                let store = if *tensor == model.params { params } else { model.state_store(*tensor) };
                let whole = Tensor { len: range.len(), dtype: tensor.dtype, ..gathered };
                ranks.all_gather(engine, Sharded { whole, shard: store.own(unit) })?;
                ranks.wait_on_stream(engine)?;
                read.read_shares(model, unit, whole, engine, block.start)?;
            }
        }
        Ok(())
    }
}

/// Reads tensors to the host copy, if there is one.
struct Reader<'a>(Option<&'a mut [u8]>);

/// Elements in blocks that are converted at a time.
const BLOCK_CHUNK: usize = 1 << 20;

/// Returns the bytes of an element in the host copy. Blocks are copied as bf16, which represents their values exactly.
fn copied_bytes(dtype: DType) -> usize {
    if matches!(dtype, DType::Block8 { .. }) { DType::Bf16.bytes() } else { dtype.bytes() }
}

impl Reader<'_> {
    fn read(&mut self, engine: &mut dyn Engine, tensor: Tensor, to: Range<usize>) -> Result<()> {
        let Some(copy) = &mut self.0 else { return Ok(()) };
        if !matches!(tensor.dtype, DType::Block8 { .. }) {
            return engine.read_bytes(tensor, &mut copy[to]);
        }
        for (i, to) in copy[to].chunks_mut(BLOCK_CHUNK * DType::Bf16.bytes()).enumerate() {
            let values = engine.read(tensor.slice(i * BLOCK_CHUNK, to.len() / DType::Bf16.bytes()))?;
            for (to, value) in to.as_chunks_mut().0.iter_mut().zip(values) {
                *to = bf16::from_f32(value).to_le_bytes();
            }
        }
        Ok(())
    }

    /// Copies this rank's share of each tensor of a whole unit to its position in the block that begins at `at`.
    fn read_shares(
        &mut self,
        model: &Decoder,
        unit: Unit,
        whole: Tensor,
        engine: &mut dyn Engine,
        mut at: usize,
    ) -> Result<()> {
        let (layout, share) = (&model.layout, model.zero.shard());
        for (param, layer) in layout.file_order() {
            let range = layout.range(param, layer);
            let own = share.of(range.len());
            if layout.unit_of(param, layer) == unit && !own.is_empty() {
                let from = whole.slice(range.start - layout.unit(unit).start + own.start, own.len());
                self.read(engine, from, at..at + own.len() * copied_bytes(whole.dtype))?;
            }
            at += own.len() * copied_bytes(whole.dtype);
        }
        Ok(())
    }
}

/// The inputs of the writing thread on every rank.
struct WriteJob {
    staging_path: PathBuf,
    share: Shard,
    layout: Params,
    float: DType,
    host_layout: HostLayout,
    state: RunState,
    pause: Duration,
}

impl WriteJob {
    fn write_state(&self, copy: &[u8]) -> Result<FileChecksum> {
        let HostLayout { m, v, masters, .. } = &self.host_layout;
        let [m, v] = [m, v].map(|values| values.in_copy(copy));
        let progress = writing(state::file_bytes(m.len(), masters.is_some(), &self.state.data));
        write_file(&self.staging_path, &state_name(self.state.step, self.share.rank), progress, |out| {
            let optimizer = OptimizerState { m, v, master: masters.as_ref().map(|values| values.in_copy(copy)) };
            state::write(out, self.share, &self.state, &self.layout, optimizer)
        })
    }
}

/// The additional inputs of the writing thread on rank 0.
struct Rank0Job {
    directory: PathBuf,
    retention: Retention,
    verified: Option<usize>,
    replaced: Vec<usize>,
    identity: Identity,
    descriptor: Descriptor,
    algorithms: Option<Algorithms>,
    logs: Vec<File>,
    staging: StagingDirectory,
    results: Receiver<Vec<StateFileResult>>,
}

impl Rank0Job {
    fn write(self, job: &WriteJob, copy: &[u8]) -> Result<WriteSummary> {
        let start = time::now();
        let own = self.write_files(job, copy);
        // The staging directory must exist until the other ranks have written their files into it.
        let results = match job.share.ranks {
            1 => Vec::new(),
            _ => self.results.recv().context("the run ended while other ranks were writing")?,
        };
        let mut files = own?;
        for result in results {
            files.push(result.map_err(Error::msg)?);
        }
        let step = job.state.step;
        let sidecar = Sidecar {
            step,
            identity: self.identity.clone(),
            progress: job.state.progress.clone(),
            mixture: job.state.data.mixture.as_deref().cloned(),
            algorithms: self.algorithms.clone(),
            files: files.clone(),
        };
        files.push(write_file(&self.staging.path, &sidecar_name(step), Progress::default(), |out| sidecar.write(out))?);
        for log in &self.logs {
            log.sync_data().context("cannot write the log")?;
        }
        // An older checkpoint of this step may exist. It must not be marked as complete while its files are replaced.
        let done = self.directory.join(done_name(step));
        remove_file(&done)?;
        atomic_file::sync_directory(&self.directory)?;
        for file in &files {
            self.staging.publish(&file.name)?;
        }
        atomic_file::sync_directory(&self.directory)?;
        atomic_file::write(&done, |_| Ok(()))?;
        self.staging.remove_after_completion();
        let warning = self.retention.apply_except(&self.directory, step, &self.replaced, self.verified).err();
        Ok(WriteSummary {
            model_file: self.directory.join(Format::of(&self.descriptor).name(step)),
            bytes: files.iter().map(|file| file.bytes).sum(),
            time: time::now() - start,
            pause: job.pause,
            warning: warning.map(|error| format!("{error:#}")),
        })
    }

    /// Writes the model file and the state file of rank 0.
    fn write_files(&self, job: &WriteJob, copy: &[u8]) -> Result<Vec<FileChecksum>> {
        let params = job.host_layout.params.clone().context("rank 0 copied no parameters")?;
        let progress = writing(model_file::file_bytes(self.descriptor, job.float)?);
        let name = Format::of(&self.descriptor).name(job.state.step);
        let model = write_file(&self.staging.path, &name, progress, |out| {
            model_file::write(out, self.descriptor, &job.layout, &copy[params], job.float)
        })?;
        Ok(vec![model, job.write_state(copy)?])
    }
}

/// A directory for incomplete files, in the directory of the run. It exists until the checkpoint is complete. Dropping it removes it,
/// and the published files of a checkpoint that is incomplete.
///
/// Its name is random. A rank of an earlier attempt that was frozen may write into its own directory, never into that of a later
/// attempt.
#[derive(Debug)]
struct StagingDirectory {
    run: PathBuf,
    path: PathBuf,
    name: String,
    is_complete: bool,
}

impl StagingDirectory {
    /// Creates the directory of the checkpoint of a step. The previous checkpoint of this attempt must have ended.
    fn create(run: &DirectoryLock, step: usize) -> Result<Self> {
        // An error leaves a directory that nothing reads. The next checkpoint tries again.
        let _ = remove_incomplete_checkpoints(run);
        let mut random = [0; 8];
        system::random::fill(&mut random).context("cannot draw a random number")?;
        let name = staging_name(step, u64::from_le_bytes(random));
        let path = run.path().join(&name);
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { run: run.path().to_owned(), path, name, is_complete: false })
    }

    /// Removes the directory of a checkpoint that is complete, and nothing else.
    fn remove_after_completion(mut self) {
        self.is_complete = true;
    }

    /// Moves a file to the directory of the run.
    fn publish(&self, name: &str) -> Result<()> {
        let (from, to) = (self.path.join(name), self.run.join(name));
        fs::rename(&from, &to).with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
    }
}

/// Begins to write `bytes` bytes.
fn writing(bytes: u64) -> Progress {
    progress::start("writing checkpoint", progress::Unit::Bytes, bytes)
}

/// Writes a file and syncs it to disk. `progress` counts its bytes.
fn write_file(
    directory: &Path,
    name: &str,
    progress: Progress,
    fill: impl FnOnce(&mut ChecksumWriter) -> Result<()>,
) -> Result<FileChecksum> {
    let path = directory.join(name);
    let write = || -> Result<FileChecksum> {
        let mut out = ChecksumWriter {
            file: BufWriter::with_capacity(1 << 20, File::create(&path)?),
            hash: Xxh3::new(),
            bytes: 0,
            progress,
        };
        fill(&mut out)?;
        let file = out.file.into_inner().map_err(|error| anyhow!(error.into_error()))?;
        file.sync_all()?;
        Ok(FileChecksum { name: name.to_owned(), bytes: out.bytes, xxh3: format_checksum(out.hash.digest()) })
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

impl Drop for StagingDirectory {
    fn drop(&mut self) {
        // Leftover files are removed when the next run starts in this directory.
        let _ = if self.is_complete { remove_entry(&self.path) } else { remove_temporary(&self.run, &self.name) };
    }
}

/// Counts and hashes the bytes that are written.
struct ChecksumWriter {
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
    progress: Progress,
}

impl Write for ChecksumWriter {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let n = self.file.write(buf)?;
        self.hash.update(&buf[..n]);
        self.bytes += n as u64;
        self.progress.add(n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, text: &str) -> Result<FileChecksum> {
        write_file(directory, "state", Progress::default(), |out| Ok(out.write_all(text.as_bytes())?))
    }

    #[test]
    fn the_files_of_a_complete_checkpoint_stay_whatever_can_be_seen_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        for (complete, left) in [(true, &["model_00000020.bin"][..]), (false, &[])] {
            let staging = StagingDirectory::create(&lock, 20).unwrap();
            write_file(&staging.path, "model_00000020.bin", Progress::default(), |_| Ok(())).unwrap();
            staging.publish("model_00000020.bin").unwrap();
            if complete {
                staging.remove_after_completion();
            } else {
                drop(staging);
            }
            assert_eq!(fs::names(dir.path()).unwrap(), left, "{complete}");
        }
    }

    /// A process that was frozen does not know that the run was restarted without it.
    #[test]
    fn a_rank_of_an_earlier_attempt_cannot_write_into_a_later_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let frozen = {
            let lock = DirectoryLock::acquire(dir.path()).unwrap();
            let staging = StagingDirectory::create(&lock, 20).unwrap();
            let path = staging.path.clone();
            // The process is killed.
            std::mem::forget(staging);
            path
        };
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        let staging = StagingDirectory::create(&lock, 20).unwrap();
        write(&staging.path, "new").unwrap();
        let message = format!("{:#}", write(&frozen, "old").unwrap_err());
        assert_eq!(message, format!("cannot write {}/state: No such file or directory (os error 2)", frozen.display()));
        staging.publish("state").unwrap();
        drop(staging);
        assert_eq!(fs::names(dir.path()).unwrap(), ["state"]);
        assert_eq!(std::fs::read(dir.path().join("state")).unwrap(), b"new");
    }

    #[test]
    fn only_incomplete_checkpoints_are_removed_before_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        // A thread of the run may be writing its log.
        std::fs::write(dir.path().join(".unfinished-5-0"), "").unwrap();
        std::fs::create_dir(dir.path().join(".unfinished-checkpoint-0")).unwrap();
        let staging = StagingDirectory::create(&lock, 20).unwrap();
        let mut names = fs::names(dir.path()).unwrap();
        names.sort();
        assert_eq!(names, [".unfinished-5-0", &*staging.name]);
    }
}
