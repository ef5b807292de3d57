//! A group of processes connected by TCP, in a star: rank 0 is connected to all other ranks and relays their messages.
//!
//! All ranks make the same calls in the same order. A message has a header (u32 call number, u8 message kind, u64 payload
//! bytes, little endian) and a payload. The call number and the kind reveal ranks that make different calls. Rank 0 reduces
//! values in rank order, so a result does not depend on the order of arrival.
//!
//! An error on any rank ends the run on all: rank 0 announces it to the others and prints it. A thread per connection
//! receives messages, so a disconnection is detected while the training loop is busy; see [`watchdog`](super::watchdog).

use super::fault::{self, Fault};
use super::flight_recorder::{FlightRecorder, Operation};
use super::scope::{Scope, ShardGroups};
use super::watchdog::{DeviceMonitor, Note, Progress, Watchdog};
use anyhow::bail;
use cuda_std::{Element, bf16};
use engine::tensor::DType;
use engine::{HostProfile, Result};
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use system::net::{TcpListener, TcpStream};
use system::sync::{Mutex, Receiver, Sender, channel};
use system::{thread, time};

/// How the values of all ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum over the ranks.
    Sum,
    /// Sum over the ranks divided by their number.
    Mean,
    /// Maximum over the ranks. NaN are ignored unless all values are NaN.
    Max,
}

/// The kind of a message. The discriminant is the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    Gather,
    Broadcast,
    Reduce,
    /// The sender ended the run because of a permanent error. The payload is the error message.
    Failed,
    /// The sender ended the run because of a recoverable error. The payload is the error message.
    FailedRecoverably,
    /// The sender is alive. The payload is its [`Progress`]. Not part of any call.
    Heartbeat,
    /// The sender leaves because the run has ended for it.
    Goodbye,
}

impl MessageKind {
    const ALL: [Self; 7] = [
        Self::Gather,
        Self::Broadcast,
        Self::Reduce,
        Self::Failed,
        Self::FailedRecoverably,
        Self::Heartbeat,
        Self::Goodbye,
    ];

    fn from_u8(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    fn failure(recoverable: bool) -> Self {
        if recoverable { Self::FailedRecoverably } else { Self::Failed }
    }

    /// Returns whether the failure is recoverable, or `None` if the message announces no failure.
    fn as_failure(self) -> Option<bool> {
        match self {
            Self::Failed => Some(false),
            Self::FailedRecoverably => Some(true),
            _ => None,
        }
    }
}

const HEADER_BYTES: usize = 13;

/// Largest payload of a message.
const MAX_PAYLOAD_BYTES: usize = 64 << 20;

/// Bytes of a tensor per message. Rank 0 holds at most this much of the data of each rank.
const CHUNK_BYTES: usize = 4 << 20;

/// Bytes that are read ahead, and largest payload that is sent together with its header. A slow rank then reads all heartbeats that
/// have arrived at once. If it read each on its own, it could fall behind without end.
const BUFFER_BYTES: usize = 64 << 10;

/// Interval at which a waiting call checks whether the run has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time that a failed rank waits for the announcement of rank 0, and rank 0 for the others to read it.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(3);

/// The connections of one rank to the other ranks of a run.
#[derive(Debug)]
pub struct TcpGroup {
    /// Index of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    groups: ShardGroups,
    /// On rank 0: ranks 1, 2, … in order. On other ranks: rank 0.
    peers: Vec<Peer>,
    /// Number of calls so far, wrapping.
    calls: u32,
    /// Whether rank 0 has announced a failure.
    announced: bool,
    step_timeout: Duration,
    /// Stage of the run for messages, for example `step 17`.
    stage: String,
    watchdog: Arc<Watchdog>,
    /// A profile of the collectives on tensors in progress.
    pub(super) profile: Option<HostProfile>,
}

/// An established connection to another rank.
#[derive(Debug)]
pub struct Connection {
    /// Name of the other rank, for example `rank 2 (node7, process 4711)`.
    pub peer: String,
    /// The TCP stream.
    pub stream: TcpStream,
}

/// A connection with a thread that receives its messages.
#[derive(Debug)]
struct Peer {
    name: String,
    /// Shared by the training loop and the thread that sends for the watchdog. Its holder may wait for a peer that does not read.
    writer: Arc<Mutex<TcpStream>>,
    /// Another handle, which closes the connection without the lock. This ends the wait of its holder.
    closer: TcpStream,
    inbox: Receiver<io::Result<Message>>,
}

/// A received message.
#[derive(Debug)]
struct Message {
    /// Number of calls before it.
    call: u32,
    /// `None` if the kind is unknown to this program.
    kind: Option<MessageKind>,
    payload: Vec<u8>,
}

impl TcpGroup {
    /// Creates the group from established connections: those of rank 0 to ranks 1, 2, …, or that of another rank to rank 0.
    ///
    /// A rank that sends no message of a call for `step_timeout`, or makes no call for that long, has failed.
    pub fn new(rank: usize, world_size: usize, connections: Vec<Connection>, step_timeout: Duration) -> Result<Self> {
        assert_eq!(connections.len(), if rank == 0 { world_size - 1 } else { 1 }, "one connection per peer");
        let names = connections.iter().map(|connection| &*connection.peer);
        let watchdog = Arc::new(Watchdog::new(names, step_timeout));
        let open = |(i, connection)| Peer::new(connection, rank == 0, i + 1, &watchdog, step_timeout);
        let peers = connections.into_iter().enumerate().map(open).collect::<Result<_>>()?;
        let stage = watchdog.progress().activity;
        let groups = ShardGroups::new(world_size, world_size)?;
        Ok(Self {
            rank,
            world_size,
            groups,
            peers,
            calls: 0,
            announced: false,
            step_timeout,
            stage,
            watchdog,
            profile: None,
        })
    }

    /// Sets the number of ranks in a shard group. It is the world size before.
    pub fn set_shard_size(&mut self, shard_size: usize) -> Result<()> {
        self.groups = ShardGroups::new(self.world_size, shard_size)?;
        Ok(())
    }

    /// Returns the shard groups of the run.
    pub fn shard_groups(&self) -> ShardGroups {
        self.groups
    }

    /// Sets the time that a rank may take between calls until [`end_startup`](Self::end_startup).
    pub fn set_startup_timeout(&self, timeout: Duration) {
        self.watchdog.set_stall_timeout(timeout);
    }

    /// Ends the startup phase. From now on the step timeout applies.
    pub fn end_startup(&self) {
        self.watchdog.set_stall_timeout(self.step_timeout);
    }

    /// Tells the watchdog that the training loop waits for its checkpoint after a fault.
    pub fn set_saving(&self) {
        self.watchdog.set_saving();
    }

    /// Makes the watchdog monitor the collectives of a device.
    pub fn monitor_device(&self, device: Arc<dyn DeviceMonitor>) {
        self.watchdog.set_device(device);
    }

    /// Starts the watchdog. After a fault it ends this process, even if the training loop is blocked.
    pub fn start_watchdog(self) -> Result<Self> {
        let outboxes = self.peers.iter().map(Peer::start_outbox).collect::<Result<Vec<_>>>()?;
        let is_rank_0 = self.rank == 0;
        // An outbox never blocks. Sending fails only after the connection has failed, which the receiving thread detects.
        let send = move |note: Note| match note {
            Note::Heartbeat(progress) => {
                for outbox in &outboxes {
                    let _ = outbox.send((MessageKind::Heartbeat, progress.to_bytes()));
                }
            }
            Note::Fault(fault) => {
                // Rank 0 announces every fault. Other ranks announce only faults of their own device.
                for outbox in outboxes.iter().filter(|_| is_rank_0 || matches!(fault, Fault::Device { .. })) {
                    let kind = MessageKind::failure(fault.is_recoverable());
                    let _ = outbox.send((kind, fault.to_string().into_bytes()));
                }
            }
        };
        self.watchdog.start(send)?;
        Ok(self)
    }

    /// Returns the groups of `world_size` ranks that are threads of this process.
    pub fn in_process(world_size: usize, step_timeout: Duration) -> Result<Vec<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (mut connections, mut groups) = (Vec::new(), Vec::new());
        for rank in 1..world_size {
            let stream = TcpStream::connect_timeout(&listener.local_addr()?, step_timeout)?;
            let to_rank_0 = vec![Connection { peer: "rank 0".to_owned(), stream }];
            groups.push(Self::new(rank, world_size, to_rank_0, step_timeout)?);
            connections.push(Connection { peer: format!("rank {rank}"), stream: listener.accept()? });
        }
        groups.insert(0, Self::new(0, world_size, connections, step_timeout)?);
        Ok(groups)
    }

    /// Sets the stage of the run for messages, for example `step 17`.
    pub fn set_stage(&mut self, stage: impl Into<String>) {
        self.stage = stage.into();
        self.watchdog.set_progress(Progress { calls: self.calls.into(), activity: self.stage.clone() });
    }

    /// Sets the operation within the stage.
    pub fn set_operation(&mut self, operation: &str) {
        let activity = format!("{}, {operation}", self.stage);
        self.watchdog.set_progress(Progress { calls: self.calls.into(), activity });
    }

    /// Returns the stage of the run.
    pub fn stage(&self) -> &str {
        &self.stage
    }

    /// Returns the stage and the operation, with the collective that this rank waits for.
    pub fn activity(&self) -> String {
        self.watchdog.activity()
    }

    /// Returns the recorder of this rank's collectives.
    pub fn recorder(&self) -> &FlightRecorder {
        self.watchdog.recorder()
    }

    /// Leaves the group after the run has ended in order. No calls may follow.
    pub fn leave(&self) {
        self.watchdog.stop();
        for Peer { writer, .. } in &self.peers {
            let _ = write_message(&mut writer.lock(), self.calls, MessageKind::Goodbye, &[]);
        }
    }

    /// Returns the name of a rank for messages.
    pub fn peer_name(&self, rank: usize) -> String {
        let peer = if self.rank == 0 { rank.checked_sub(1) } else { (rank == 0).then_some(0) };
        peer.and_then(|peer| self.peers.get(peer)).map_or_else(|| format!("rank {rank}"), |peer| peer.name.clone())
    }

    /// Returns the bytes of every rank in rank order on rank 0, and nothing on the other ranks.
    pub fn gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective(Operation::Gather, Scope::World, bytes.len(), |group| {
            if group.rank > 0 {
                group.send(0, MessageKind::Gather, bytes)?;
                return Ok(Vec::new());
            }
            let mut all = vec![bytes.to_vec()];
            for peer in 0..group.peers.len() {
                all.push(group.receive(peer, MessageKind::Gather, None)?);
            }
            Ok(all)
        })
    }

    /// Returns the message of rank 0 on all ranks. Its length need not be known to the other ranks.
    pub fn broadcast_message(&mut self, message: Vec<u8>) -> Result<Vec<u8>> {
        self.collective(Operation::Broadcast, Scope::World, message.len(), |group| {
            if group.rank > 0 {
                return group.receive(0, MessageKind::Broadcast, None);
            }
            group.send_to_all(MessageKind::Broadcast, &message)?;
            Ok(message)
        })
    }

    /// Returns the logical or of `value` over all ranks.
    pub fn any_rank(&mut self, value: bool) -> Result<bool> {
        let mut values = [f64::from(u8::from(value))];
        self.all_reduce_sum_f64(&mut values)?;
        Ok(values[0] > 0.0)
    }

    /// Sums `values` over all ranks, in place.
    pub fn all_reduce_sum_f64(&mut self, values: &mut [f64]) -> Result<()> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let decode = |bytes: &[u8]| Ok(read_pods::<f64>(bytes));
        let encode = |sum: &mut [f64]| bytemuck::cast_slice(sum).to_vec();
        self.collective(Operation::AllReduce, Scope::World, bytes.len(), |group| {
            group.all_reduce_chunk(Scope::World, bytes, decode, |a, b| a + b, encode)
        })
    }

    /// Reduces values of type `dtype` over the ranks of a scope, in place. Accumulates in f32. These ranks receive the same bits.
    pub fn all_reduce_bytes(
        &mut self,
        scope: Scope,
        bytes: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        self.reduce_bytes((Operation::AllReduce, scope), bytes, dtype, reduction)
    }

    /// Performs [`all_reduce_bytes`](Self::all_reduce_bytes), which the flight recorder shows as `operation`.
    pub(crate) fn reduce_bytes(
        &mut self,
        (operation, scope): (Operation, Scope),
        bytes: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        let scale = match reduction {
            Reduction::Sum | Reduction::Max => 1.0,
            Reduction::Mean => 1.0 / self.groups.size(scope) as f32,
        };
        let encode = |sum: &mut [f32]| {
            for value in sum.iter_mut() {
                *value *= scale;
            }
            encode_f32(sum, dtype)
        };
        let combine = |a: f32, b: f32| if reduction == Reduction::Max { a.max(b) } else { a + b };
        self.collective(operation, scope, bytes.len(), |group| {
            let decode = |bytes: &[u8]| decode_f32(bytes, dtype);
            let mut chunks = bytes.chunks_mut(CHUNK_BYTES);
            chunks.try_for_each(|chunk| group.all_reduce_chunk(scope, chunk, decode, combine, encode))
        })
    }

    /// Combines values of type `T` on rank 0, in rank order for each part of the ranks, and sends the encoded results to all ranks.
    fn all_reduce_chunk<T: Copy>(
        &mut self,
        scope: Scope,
        bytes: &mut [u8],
        decode: impl Fn(&[u8]) -> Result<Vec<T>>,
        combine: impl Fn(T, T) -> T,
        encode: impl Fn(&mut [T]) -> Vec<u8>,
    ) -> Result<()> {
        if self.rank > 0 {
            self.send(0, MessageKind::Reduce, bytes)?;
            bytes.copy_from_slice(&self.receive(0, MessageKind::Reduce, Some(bytes.len()))?);
            return Ok(());
        }
        let groups = self.groups;
        let mut sums = vec![Vec::new(); groups.parts(scope)];
        sums[0] = decode(bytes)?;
        for peer in 0..self.peers.len() {
            let values = decode(&self.receive(peer, MessageKind::Reduce, Some(bytes.len()))?)?;
            let rank = peer + 1;
            let sum = &mut sums[groups.part(scope, rank)];
            if groups.index(scope, rank) == 0 {
                *sum = values;
            } else {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = combine(*sum, value));
            }
        }
        let results: Vec<Vec<u8>> = sums.iter_mut().map(|sum| encode(sum)).collect();
        bytes.copy_from_slice(&results[0]);
        self.send_to_parts(scope, MessageKind::Reduce, &results)
    }

    /// Copies `bytes` of the rank with index `root` in a scope to its other ranks. Those of another rank than 0 pass through rank 0.
    pub fn broadcast_bytes(&mut self, scope: Scope, bytes: &mut [u8], root: usize) -> Result<()> {
        self.collective(Operation::Broadcast, scope, bytes.len(), |group| {
            bytes.chunks_mut(CHUNK_BYTES).try_for_each(|chunk| group.broadcast_chunk(scope, chunk, root))
        })
    }

    fn broadcast_chunk(&mut self, scope: Scope, chunk: &mut [u8], root: usize) -> Result<()> {
        let groups = self.groups;
        if self.rank > 0 {
            if groups.index(scope, self.rank) == root {
                self.send(0, MessageKind::Broadcast, chunk)?;
            }
            chunk.copy_from_slice(&self.receive(0, MessageKind::Broadcast, Some(chunk.len()))?);
            return Ok(());
        }
        let mut results = Vec::new();
        for part in 0..groups.parts(scope) {
            results.push(match groups.rank(scope, part, root) {
                0 => chunk.to_vec(),
                rank => self.receive(rank - 1, MessageKind::Broadcast, Some(chunk.len()))?,
            });
        }
        chunk.copy_from_slice(&results[0]);
        self.send_to_parts(scope, MessageKind::Broadcast, &results)
    }

    /// Returns the concatenated bytes of the ranks of a shard group on these ranks. Every rank passes the same number of bytes.
    pub fn all_gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut all = vec![0; self.groups.shard_size() * bytes.len()];
        self.collective(Operation::AllGather, Scope::ShardGroup, bytes.len(), |group| {
            let chunk_bytes = (CHUNK_BYTES / group.world_size).max(1);
            for (i, chunk) in bytes.chunks(chunk_bytes).enumerate() {
                let chunks = group.all_gather_chunk(chunk)?;
                for (index, chunk) in chunks.chunks_exact(chunk.len()).enumerate() {
                    all[index * bytes.len() + i * chunk_bytes..][..chunk.len()].copy_from_slice(chunk);
                }
            }
            Ok(())
        })?;
        Ok(all)
    }

    fn all_gather_chunk(&mut self, chunk: &[u8]) -> Result<Vec<u8>> {
        if self.rank > 0 {
            self.send(0, MessageKind::Gather, chunk)?;
            return self.receive(0, MessageKind::Gather, Some(self.groups.shard_size() * chunk.len()));
        }
        let (scope, groups) = (Scope::ShardGroup, self.groups);
        let mut results = vec![Vec::new(); groups.parts(scope)];
        results[0].extend_from_slice(chunk);
        for peer in 0..self.peers.len() {
            let received = self.receive(peer, MessageKind::Gather, Some(chunk.len()))?;
            results[groups.part(scope, peer + 1)].extend(received);
        }
        self.send_to_parts(scope, MessageKind::Gather, &results)?;
        Ok(results.swap_remove(0))
    }

    /// Runs a call that all ranks make. If it fails on rank 0, rank 0 announces the failure.
    fn collective<R>(
        &mut self,
        operation: Operation,
        scope: Scope,
        bytes: usize,
        call: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        self.recorder().begin(operation, self.groups.simplified(scope), bytes);
        let outcome = self.check().and_then(|()| call(self));
        self.recorder().end(outcome.is_ok(), false);
        self.calls = self.calls.wrapping_add(1);
        self.watchdog.set_progress(Progress { calls: self.calls.into(), ..self.watchdog.progress() });
        if let Err(error) = &outcome {
            self.recorder().dump(&format!("{error:#}"));
        }
        if let Err(error) = &outcome
            && self.rank == 0
        {
            self.announce_failure(&format!("{error:#}"), fault::is_recoverable(error));
        }
        outcome
    }

    /// Returns the fault that the watchdog has detected, if any.
    pub fn check(&self) -> Result<()> {
        self.watchdog.fault().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Ends the run on all ranks because of an error on this rank. Returns the error that this rank has to report, which is
    /// [`Fault::ReportedByRank0`] if rank 0 reports it.
    pub fn abort_run(&mut self, error: anyhow::Error) -> anyhow::Error {
        let (text, recoverable) = (format!("{error:#}"), fault::is_recoverable(&error));
        if self.rank == 0 {
            self.announce_failure(&text, recoverable);
            return error;
        }
        let known = matches!(error.downcast_ref(), Some(Fault::ReportedByRank0 { .. } | Fault::Disconnected { .. }));
        if known || self.send(0, MessageKind::failure(recoverable), text.as_bytes()).is_err() {
            return error;
        }
        let Some(peer) = self.peers.first() else { return error };
        // Messages that rank 0 sent before it read the failure come first.
        while let Ok(Ok(Message { kind, payload, .. })) = peer.inbox.recv_timeout(ANNOUNCE_TIMEOUT) {
            if let Some(recoverable) = kind.and_then(MessageKind::as_failure) {
                return failure("", false, &payload, recoverable).into();
            }
        }
        error
    }

    /// Sends the failure from rank 0 to all ranks, once. Ranks that cannot be reached detect the disconnection.
    fn announce_failure(&mut self, text: &str, recoverable: bool) {
        if !std::mem::replace(&mut self.announced, true) {
            for peer in 0..self.peers.len() {
                let _ = self.send(peer, MessageKind::failure(recoverable), text.as_bytes());
            }
            // Closing a connection early may discard the message, so this waits until the peers have closed their ends.
            let deadline = time::now() + ANNOUNCE_TIMEOUT;
            for Peer { closer, inbox, .. } in &self.peers {
                let _ = closer.shutdown(Shutdown::Write);
                while let Ok(Ok(_)) = inbox.recv_timeout(deadline.saturating_duration_since(time::now())) {}
            }
        }
    }

    fn send_to_all(&mut self, kind: MessageKind, payload: &[u8]) -> Result<()> {
        (0..self.peers.len()).try_for_each(|peer| self.send(peer, kind, payload))
    }

    /// Sends the result of each part of the ranks to its ranks, except to rank 0.
    fn send_to_parts(&mut self, scope: Scope, kind: MessageKind, results: &[Vec<u8>]) -> Result<()> {
        let groups = self.groups;
        (0..self.peers.len()).try_for_each(|peer| self.send(peer, kind, &results[groups.part(scope, peer + 1)]))
    }

    fn send(&mut self, peer: usize, kind: MessageKind, payload: &[u8]) -> Result<()> {
        let Peer { name, writer, inbox, .. } = &self.peers[peer];
        let sent = write_message(&mut writer.lock(), self.calls, kind, payload);
        match sent {
            Ok(()) => Ok(()),
            // The peer may have sent the cause before it closed the connection.
            Err(error) => match inbox.recv_timeout(ANNOUNCE_TIMEOUT) {
                Ok(Ok(Message {
                    kind: Some(kind @ (MessageKind::Failed | MessageKind::FailedRecoverably)),
                    payload,
                    ..
                })) => {
                    let recoverable = kind == MessageKind::FailedRecoverably;
                    Err(failure(name, self.rank == 0, &payload, recoverable).into())
                }
                _ => Err(self.connection_fault(name.clone(), &error)),
            },
        }
    }

    /// Receives the payload of a message of `kind` from a peer. Its length must be `len` if that is known.
    fn receive(&mut self, peer: usize, kind: MessageKind, len: Option<usize>) -> Result<Vec<u8>> {
        let Peer { name, inbox, .. } = &self.peers[peer];
        let start = time::now();
        let message = loop {
            match inbox.recv_timeout(POLL_INTERVAL) {
                Ok(message) => break message,
                Err(RecvTimeoutError::Disconnected) => break Err(io::ErrorKind::ConnectionAborted.into()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(fault) = self.watchdog.fault() {
                return Err(fault.into());
            }
            if time::now() - start >= self.step_timeout {
                break Err(io::ErrorKind::TimedOut.into());
            }
        };
        let found = message.map_err(|error| self.connection_fault(name.clone(), &error))?;
        if let Some(recoverable) = found.kind.and_then(MessageKind::as_failure) {
            return Err(failure(name, self.rank == 0, &found.payload, recoverable).into());
        }
        let found_len = found.payload.len();
        if (found.call, found.kind) != (self.calls, Some(kind)) || len.is_some_and(|len| len != found_len) {
            let describe = |kind, call, len| format!("call {call}, {kind:?}, {len} bytes");
            let expected = describe(kind, self.calls, len.unwrap_or(found_len));
            let found = found.kind.map(|kind| describe(kind, found.call, found_len));
            let found = found.unwrap_or_else(|| "a message of another program".to_owned());
            bail!(Fault::CollectiveMismatch { peer: name.clone(), expected, found });
        }
        Ok(found.payload)
    }

    fn connection_fault(&self, peer: String, error: &io::Error) -> anyhow::Error {
        // A peer also closes its connection when it has learned of a fault. That fault is the cause.
        if let Some(fault) = self.watchdog.fault() {
            return fault.into();
        }
        let activity = self.activity();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Fault::TimedOut { peer, waited: self.step_timeout, activity }.into()
            }
            _ => Fault::Disconnected { peer, activity }.into(),
        }
    }
}

impl Drop for TcpGroup {
    fn drop(&mut self) {
        self.watchdog.stop();
        for Peer { closer, .. } in &self.peers {
            // The other threads also own the stream, so dropping it would not close the connection.
            let _ = closer.shutdown(Shutdown::Both);
        }
    }
}

impl Peer {
    /// Starts a thread that receives messages. `index` identifies the peer to the watchdog.
    fn new(
        connection: Connection,
        on_rank_0: bool,
        index: usize,
        watchdog: &Arc<Watchdog>,
        step_timeout: Duration,
    ) -> Result<Self> {
        let Connection { peer: name, stream } = connection;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(step_timeout))?;
        let (sender, inbox) = channel();
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, stream.try_clone()?);
        let watchdog = Arc::downgrade(watchdog);
        let peer = name.clone();
        let run = move || {
            loop {
                let message = read_message(&mut reader);
                let Some(watchdog) = watchdog.upgrade() else { return };
                match &message {
                    Ok(Message { kind: Some(MessageKind::Heartbeat), payload, .. }) => {
                        watchdog.record_message(index, Progress::from_bytes(payload));
                        continue;
                    }
                    Ok(Message { kind: Some(MessageKind::Goodbye), .. }) => {
                        watchdog.mark_leaving(index);
                        continue;
                    }
                    Ok(Message { kind, payload, .. }) => match kind.and_then(MessageKind::as_failure) {
                        Some(recoverable) => watchdog.report_fault(failure(&peer, on_rank_0, payload, recoverable)),
                        None => watchdog.record_message(index, None),
                    },
                    Err(_) => watchdog.mark_disconnected(index),
                }
                let ended = message.is_err();
                if sender.send(message).is_err() || ended {
                    return;
                }
            }
        };
        thread::spawn(format!("from {name}"), None, run)?;
        let closer = stream.try_clone()?;
        Ok(Self { name, writer: Arc::new(Mutex::new(stream)), closer, inbox })
    }

    /// Starts a thread that sends messages to the peer, so that a peer that does not read blocks nothing else. It ends when the sender
    /// is dropped.
    fn start_outbox(&self) -> Result<Sender<(MessageKind, Vec<u8>)>> {
        let (sender, messages) = channel::<(MessageKind, Vec<u8>)>();
        let writer = Arc::clone(&self.writer);
        let run = move || {
            while let Ok((kind, payload)) = messages.recv() {
                let _ = write_message(&mut writer.lock(), 0, kind, &payload);
            }
        };
        thread::spawn(format!("to {}", self.name), Some(256 << 10), run)?;
        Ok(sender)
    }
}

/// Returns the fault for a failure message received from `peer`.
fn failure(peer: &str, on_rank_0: bool, text: &[u8], recoverable: bool) -> Fault {
    let text = String::from_utf8_lossy(text).into_owned();
    if on_rank_0 {
        Fault::RankFailed { peer: peer.to_owned(), text, recoverable }
    } else {
        Fault::ReportedByRank0 { text, recoverable }
    }
}

fn write_message(stream: &mut TcpStream, call: u32, kind: MessageKind, payload: &[u8]) -> io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&call.to_le_bytes());
    header[4] = kind as u8;
    header[5..].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    if payload.len() <= BUFFER_BYTES {
        return stream.write_all(&[&header, payload].concat());
    }
    stream.write_all(&header)?;
    stream.write_all(payload)
}

fn read_message(stream: &mut impl Read) -> io::Result<Message> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let [a, b, c, d, kind, len @ ..] = header;
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|&len| len <= MAX_PAYLOAD_BYTES);
    let len = len.ok_or_else(|| io::Error::other("the message is too long"))?;
    let mut payload = vec![0; len];
    stream.read_exact(&mut payload)?;
    Ok(Message { call: u32::from_le_bytes([a, b, c, d]), kind: MessageKind::from_u8(kind), payload })
}

/// Reads values from bytes of any alignment.
fn read_pods<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn decode_f32(bytes: &[u8], dtype: DType) -> Result<Vec<f32>> {
    match dtype {
        DType::F32 => Ok(read_pods(bytes)),
        DType::Bf16 => Ok(read_pods::<bf16>(bytes).into_iter().map(bf16::to_f32).collect()),
        DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
            bail!("reduction over ranks: expected a tensor of f32 or bf16, found {}", dtype.name())
        }
    }
}

fn encode_f32(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

#[cfg(test)]
mod tests;
