//! The communication interface of the training loop.

use super::communicator::{self, Communicator, Transfer};
use super::fault::{self, Fault};
use super::scope::Scope;
use super::tcp_group::{Reduction, TcpGroup};
use super::timing::{CommunicationTimings, TimedCommunicator};
use anyhow::bail;
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, Interval, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;
use xxhash_rust::xxh3::Xxh3;

/// The ranks of a run. In a run of one process every operation is a no-op.
#[derive(Default)]
pub enum Ranks {
    /// A run of one process.
    #[default]
    Single,
    /// The processes are connected. There are no tensors yet.
    Connected(TcpGroup),
    /// Ready for collectives on tensors.
    Ready(Box<dyn Communicator>),
}

/// Bytes of a tensor that are read to the host at a time to compute its checksum.
const CHUNK_BYTES: usize = 64 << 20;

impl Ranks {
    /// Returns the index of this rank. Rank 0 prints, logs and writes checkpoints.
    pub fn rank(&self) -> usize {
        match self {
            Self::Single => 0,
            Self::Connected(group) => group.rank,
            Self::Ready(communicator) => communicator.rank(),
        }
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        match self {
            Self::Single => 1,
            Self::Connected(group) => group.world_size,
            Self::Ready(communicator) => communicator.world_size(),
        }
    }

    /// Returns whether this is rank 0.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the TCP connections to the other processes, or `None` in a run of one process.
    pub fn tcp_group(&mut self) -> Option<&mut TcpGroup> {
        match self {
            Self::Single => None,
            Self::Connected(group) => Some(group),
            Self::Ready(communicator) => Some(communicator.tcp_group()),
        }
    }

    /// Creates the communicator for tensors of `engine`. `tensor` is any of them. Groups of `shard_size` ranks have all shards of
    /// the sharded ones.
    pub fn init_communicator(&mut self, engine: &dyn Engine, tensor: Tensor, shard_size: usize) -> Result<()> {
        match std::mem::take(self) {
            Self::Connected(mut group) => {
                group.set_shard_size(shard_size)?;
                *self = Self::Ready(communicator::for_engine(group, engine, tensor)?);
            }
            other => *self = other,
        }
        Ok(())
    }

    /// Starts to measure how long the engine waits for communication. `probe` is a small f32 tensor of the engine.
    pub fn time_communication(&mut self, probe: Tensor) -> CommunicationTimings {
        let timings = CommunicationTimings::default();
        match std::mem::take(self) {
            Self::Ready(inner) => *self = Self::Ready(Box::new(TimedCommunicator::new(inner, probe, timings.clone()))),
            other => *self = other,
        }
        timings
    }

    /// Begins to record the start and end of collectives on tensors.
    pub fn start_profile(&mut self) -> Result<()> {
        self.communicator().map_or(Ok(()), Communicator::start_profile)
    }

    /// Waits for all collectives, ends the profile and returns its intervals in order. Times are in seconds from its start.
    pub fn profile(&mut self) -> Result<Vec<Interval>> {
        self.communicator().map_or(Ok(Vec::new()), Communicator::profile)
    }

    fn communicator(&mut self) -> Option<&mut dyn Communicator> {
        match self {
            Self::Ready(communicator) => Some(&mut **communicator),
            _ => None,
        }
    }

    /// Returns the name of the transport between the ranks.
    pub fn describe(&self) -> Option<String> {
        match self {
            Self::Ready(communicator) => Some(communicator.describe()),
            _ => None,
        }
    }

    /// Sets the stage of the run that error messages name, for example `step 17 of 100`.
    pub fn set_stage(&mut self, stage: impl FnOnce() -> String) {
        if let Some(group) = self.tcp_group() {
            group.set_stage(stage());
        }
    }

    /// Sets the operation within the stage that error messages name.
    pub fn set_operation(&mut self, operation: &str) {
        if let Some(group) = self.tcp_group() {
            group.set_operation(operation);
        }
    }

    /// Sets the file to which the flight recorder of this rank is written when the run fails.
    pub fn set_flight_recorder_file(&mut self, file: PathBuf) {
        if let Some(group) = self.tcp_group() {
            group.recorder().set_file(file);
        }
    }

    /// Sets the part of the model that the next collective belongs to, for example `layer 3`, for error messages and the flight
    /// recorder.
    pub fn set_part(&mut self, part: impl FnOnce() -> String) {
        if let Some(group) = self.tcp_group() {
            group.recorder().set_part(part());
        }
    }

    /// Ends the startup phase. From now on the step timeout applies instead of the startup timeout.
    pub fn end_startup(&mut self) {
        if let Some(group) = self.tcp_group() {
            group.end_startup();
        }
    }

    /// Tells the watchdog that this rank waits for its checkpoint after a fault. It then does not end the process as if the training loop
    /// were blocked.
    pub fn set_saving(&mut self) {
        if let Some(group) = self.tcp_group() {
            group.set_saving();
        }
    }

    /// Returns the fault that the watchdog has detected, if any.
    pub fn check(&mut self) -> Result<()> {
        self.tcp_group().map_or(Ok(()), |group| group.check())
    }

    /// Returns the cause of a failed run: the watchdog's fault if there is one, otherwise `error`, which occurred in `stage`.
    pub fn failure_cause(&mut self, error: anyhow::Error, stage: &str) -> anyhow::Error {
        if let Err(fault) = self.check() {
            return fault;
        }
        let activity = self.tcp_group().map_or_else(|| stage.to_owned(), |group| group.activity());
        fault::from_device_error(error, &activity)
    }

    /// Returns the logical or of `value` over all ranks.
    pub fn any_rank(&mut self, value: bool) -> Result<bool> {
        self.any_ranks([value]).map(|[any]| any)
    }

    /// Returns the logical or of each value over all ranks.
    pub fn any_ranks<const N: usize>(&mut self, values: [bool; N]) -> Result<[bool; N]> {
        if let Self::Ready(communicator) = self {
            communicator.check()?;
        }
        let Some(group) = self.tcp_group() else { return Ok(values) };
        let mut sums = values.map(|value| f64::from(u8::from(value)));
        group.all_reduce_sum_f64(&mut sums)?;
        Ok(sums.map(|sum| sum > 0.0))
    }

    /// Returns whether collectives on tensors are complete when their call returns. Otherwise the failure of another rank may leave
    /// wrong values in tensors of operations that are queued already.
    pub fn collectives_are_synchronous(&self) -> bool {
        match self {
            Self::Ready(communicator) => communicator.is_synchronous(),
            Self::Single | Self::Connected(_) => true,
        }
    }

    /// Returns the largest value of a rank.
    pub fn largest(&mut self, value: usize) -> Result<usize> {
        let mut values = vec![0.0; self.world_size()];
        values[self.rank()] = value as f64;
        self.set_operation("comparing sizes");
        self.tcp_group().map_or(Ok(()), |group| group.all_reduce_sum_f64(&mut values))?;
        Ok(values.into_iter().fold(0.0, f64::max) as usize)
    }

    /// Sums host values over all ranks, in place.
    pub fn all_reduce_sum_f64(&mut self, values: &mut [f64]) -> Result<()> {
        self.set_operation("reducing losses");
        self.tcp_group().map_or(Ok(()), |group| group.all_reduce_sum_f64(values))
    }

    /// Returns the bytes of every rank in rank order on rank 0, and nothing on the other ranks.
    pub fn gather(&mut self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match self.tcp_group() {
            Some(group) => group.gather(&bytes),
            None => Ok(vec![bytes]),
        }
    }

    /// Returns the value of rank 0 on all ranks.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&mut self, value: T) -> Result<T> {
        let Some(group) = self.tcp_group() else { return Ok(value) };
        let bytes = if group.rank == 0 { serde_json::to_vec(&value)? } else { Vec::new() };
        let bytes = group.broadcast_message(bytes)?;
        if group.rank == 0 { Ok(value) } else { Ok(serde_json::from_slice(&bytes)?) }
    }

    /// Returns the number of ranks in a scope.
    fn size(&mut self, scope: Scope) -> usize {
        self.tcp_group().map_or(1, |group| group.shard_groups().size(scope))
    }

    /// Returns the communicator for a collective of a scope, or `None` if the scope has one rank.
    fn communicator_of(&mut self, scope: Scope) -> Option<&mut dyn Communicator> {
        if self.size(scope) > 1 { self.communicator() } else { None }
    }

    /// Averages `tensor` over the ranks of a scope, in place. Asynchronous: see [`wait_on_stream`](Self::wait_on_stream).
    pub fn all_reduce_mean(&mut self, engine: &mut dyn Engine, scope: Scope, tensor: Tensor) -> Result<()> {
        self.set_operation("reducing gradients");
        self.communicator_of(scope).map_or(Ok(()), |ranks| ranks.all_reduce(engine, scope, tensor, Reduction::Mean))
    }

    /// Sums `tensor` over the ranks of a scope, in place. Asynchronous: see [`wait_on_stream`](Self::wait_on_stream).
    pub fn all_reduce_sum(&mut self, engine: &mut dyn Engine, scope: Scope, tensor: Tensor) -> Result<()> {
        self.set_operation("reducing losses");
        self.communicator_of(scope).map_or(Ok(()), |ranks| ranks.all_reduce(engine, scope, tensor, Reduction::Sum))
    }

    /// Replaces `tensor` by its maximum over the ranks of a scope. Asynchronous: see [`wait_on_stream`](Self::wait_on_stream).
    pub fn all_reduce_max(&mut self, engine: &mut dyn Engine, scope: Scope, tensor: Tensor) -> Result<()> {
        self.set_operation("reducing statistics");
        self.communicator_of(scope).map_or(Ok(()), |ranks| ranks.all_reduce(engine, scope, tensor, Reduction::Max))
    }

    /// Reduces the whole over the shard group and keeps this rank's part. Asynchronous: see
    /// [`wait_on_stream`](Self::wait_on_stream).
    pub fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        self.set_operation("reducing gradients");
        self.communicator_of(Scope::ShardGroup).map_or(Ok(()), |ranks| ranks.reduce_scatter(engine, of, reduction))
    }

    /// Concatenates the parts of the shard group into the whole. Asynchronous: see [`wait_on_stream`](Self::wait_on_stream).
    pub fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.set_operation("gathering shards");
        self.communicator_of(Scope::ShardGroup).map_or(Ok(()), |ranks| ranks.all_gather(engine, of))
    }

    /// Gathers values of tokens like [`all_gather`](Self::all_gather).
    pub fn gather_tokens(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.set_operation("exchanging tokens");
        self.communicator_of(Scope::ShardGroup).map_or(Ok(()), |ranks| ranks.all_gather(engine, of))
    }

    /// Sums values of tokens like [`reduce_scatter`](Self::reduce_scatter).
    pub fn reduce_tokens(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.set_operation("exchanging tokens");
        let ranks = self.communicator_of(Scope::ShardGroup);
        ranks.map_or(Ok(()), |ranks| ranks.reduce_scatter(engine, of, Reduction::Sum))
    }

    /// Copies the tensors of rank 0 to all ranks.
    pub fn broadcast_tensors(&mut self, engine: &mut dyn Engine, tensors: &[Tensor]) -> Result<()> {
        self.set_operation("broadcasting the model");
        let Some(ranks) = self.communicator() else { return Ok(()) };
        tensors.iter().try_for_each(|tensor| ranks.broadcast(engine, *tensor))?;
        ranks.wait_on_stream(engine)
    }

    /// Performs all `transfers` in the shard group. Asynchronous: see [`wait_on_stream`](Self::wait_on_stream).
    pub fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        self.set_operation("exchanging updates");
        self.communicator_of(Scope::ShardGroup).map_or(Ok(()), |ranks| ranks.exchange(engine, transfers))
    }

    /// Makes work that is queued on the engine from now on wait for all collectives so far.
    pub fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.communicator().map_or(Ok(()), |ranks| ranks.wait_on_stream(engine))
    }

    /// Checks that replicated tensors are bitwise identical: `tensors` on all ranks, and `shards` on the ranks that have the same
    /// shard.
    pub fn check_replicas(
        &mut self,
        engine: &mut dyn Engine,
        tensors: &[(&str, Tensor)],
        shards: &[(&str, Tensor)],
    ) -> Result<()> {
        let shards = if self.size(Scope::Replicas) > 1 { shards } else { &[] };
        self.set_operation("comparing replicas");
        let Some(group) = self.tcp_group() else { return Ok(()) };
        let (mut names, mut checksums) = (Vec::new(), Vec::new());
        for (name, tensor) in tensors.iter().chain(shards) {
            names.push(*name);
            checksums.push(checksum(engine, *tensor)?);
        }
        let all = group.gather(bytemuck::cast_slice(&checksums))?;
        let (shared, size) = (tensors.len() * size_of::<u64>(), size_of::<u64>());
        for (rank, found) in all.iter().enumerate() {
            // The rank of the first shard group that has the same shard.
            let first = group.shard_groups().index(Scope::ShardGroup, rank);
            let expected = |byte: usize| if byte < shared { 0 } else { first };
            if let Some(byte) = (0..found.len()).find(|&byte| found[byte] != all[expected(byte)][byte]) {
                let (peer, stage) = (group.peer_name(rank), group.stage());
                let tensor = format!("{} of {stage}", names[byte / size]);
                bail!(Fault::ReplicaMismatch { peer, expected: expected(byte), tensor });
            }
        }
        // No rank continues before rank 0 has compared all checksums.
        group.any_rank(false).map(|_| ())
    }

    /// Shuts down after all ranks have finished. All ranks must call it.
    pub fn close(&mut self) -> Result<()> {
        self.any_rank(false)?;
        if let Some(group) = self.tcp_group() {
            group.leave();
        }
        match std::mem::take(self) {
            Self::Ready(communicator) => communicator.close(),
            _ => Ok(()),
        }
    }

    /// Aborts pending collectives after a failure, because the engine may be waiting for them.
    pub fn abort_collectives(&mut self) {
        match std::mem::take(self) {
            Self::Ready(communicator) => *self = Self::Connected(communicator.abort()),
            other => *self = other,
        }
    }

    /// Ends the run on all ranks because of an error on this rank. Returns the error that this rank has to report.
    pub fn abort(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.tcp_group() {
            Some(group) => group.abort_run(error),
            None => error,
        }
    }
}

fn checksum(engine: &mut dyn Engine, tensor: Tensor) -> Result<u64> {
    let (mut hash, mut bytes) = (Xxh3::new(), Vec::new());
    let chunk = CHUNK_BYTES / tensor.dtype.bytes();
    for first in (0..tensor.len).step_by(chunk) {
        let part = tensor.slice(first, chunk.min(tensor.len - first));
        bytes.resize(part.bytes(), 0);
        engine.read_bytes(part, &mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hash.digest())
}
