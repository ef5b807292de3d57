//! Communicators and their collectives.

use crate::buffer::{Buffer, Element};
use crate::group;
use crate::library::library;
use crate::result::{Error, Owned, POLL_INTERVAL, Result, check};
use crate::sys::{self, Status};
use cuda_driver::{Gpu, Stream};
use std::ffi::c_void;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The identifier of a new communicator. One rank creates it and sends its bytes to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(sys::UniqueId);

impl UniqueId {
    /// The size in bytes.
    pub const BYTES: usize = 128;

    /// Creates an identifier. From now on, this process listens for connections of the other ranks.
    pub fn new() -> Result<Self> {
        let nccl = &library()?.functions;
        let mut id = sys::UniqueId([0; Self::BYTES]);
        // SAFETY: the call writes one identifier.
        check(unsafe { (nccl.unique_id)(&raw mut id) }, "ncclGetUniqueId", "")?;
        Ok(Self(id))
    }

    /// Returns the identifier with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(sys::UniqueId(bytes))
    }

    /// Returns the bytes to send to the other ranks.
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.0
    }
}

/// The operation that combines the values of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Mean,
    /// The maximum.
    Max,
}

impl Reduction {
    const fn op(self) -> sys::RedOp {
        match self {
            Self::Sum => sys::SUM,
            Self::Mean => sys::AVG,
            Self::Max => sys::MAX,
        }
    }
}

/// The communicator of one rank. All ranks must make the same calls in the same order with the same number of elements.
///
/// A call returns when its kernel is queued on the stream. Its results are available when the stream has completed it. The
/// order of summation depends on the machine only: repeated runs give bitwise identical results, and so do all ranks.
pub struct Communicator {
    shared: Arc<Shared>,
    rank: usize,
    world_size: usize,
    /// The longest time to wait for a call in progress.
    timeout: Duration,
    gpu: Gpu,
}

/// The NCCL communicator, shared with its monitors. `None` after it is closed or aborted. The lock is held for single calls, none
/// of which waits for another rank.
struct Shared(Mutex<Option<Owned>>);

impl Shared {
    /// Locks the communicator. A panic of another thread that held the lock leaves it valid.
    fn lock(&self) -> MutexGuard<'_, Option<Owned>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, call: &str, f: impl FnOnce(&Owned) -> Result<R>) -> Result<R> {
        self.lock().as_ref().map_or_else(|| Err(Error::Closed { call: call.into() }), f)
    }

    /// Blocks until `call`, which may be in progress, is done on the host.
    fn wait(&self, call: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.with(call, |comm| comm.is_idle(call))? {
            let waited = start.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout { call: call.into(), waited });
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Checks and aborts a communicator from another thread.
#[derive(Clone)]
pub struct Monitor {
    shared: Arc<Shared>,
    gpu: Gpu,
}

impl Monitor {
    /// Does the same as [`Communicator::check`], but returns `Ok` if the communicator is closed. Never blocks.
    pub fn check(&self) -> Result<()> {
        let comm = match self.shared.0.try_lock() {
            Ok(comm) => comm,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The call that holds the lock will return the error.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        comm.as_ref().map_or(Ok(()), |comm| comm.is_idle("NCCL").map(|_| ()))
    }

    /// Aborts all calls in progress, including kernels on the device, and frees the communicator. Threads that wait for these
    /// calls are released, and later calls return [`Error::Closed`]. The results of aborted collectives are undefined.
    pub fn abort(&self) {
        // If the context is lost, so are its kernels.
        let _ = self.gpu.make_current();
        drop(self.shared.lock().take());
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        drop(self.shared.lock().take());
    }
}

impl Communicator {
    /// Connects to the other ranks. `rank` is less than `world_size`, and each rank uses another GPU. Returns
    /// [`Error::Timeout`] if not all ranks connect within `timeout`. The same timeout applies to later calls.
    pub fn new(gpu: &Gpu, id: UniqueId, rank: usize, world_size: usize, timeout: Duration) -> Result<Self> {
        if rank >= world_size {
            let what = format!("rank: expected less than the world size {world_size}, found {rank}");
            return Err(Error::Operand { call: "ncclCommInitRankConfig", what });
        }
        let library = library()?;
        gpu.make_current()?;
        let comm = Owned::begin(library, world_size as i32, id.0, rank as i32)?;
        let shared = Arc::new(Shared(Mutex::new(Some(comm))));
        shared.wait("ncclCommInitRankConfig", timeout)?;
        Ok(Self { shared, rank, world_size, timeout, gpu: gpu.clone() })
    }

    /// Creates a communicator of the ranks that pass the same `part`. `rank` is this rank's place among them, and `world_size` their
    /// number. All ranks must call it. Returns [`Error::Timeout`] if one does not within the timeout of this communicator.
    pub fn split(&self, part: usize, rank: usize, world_size: usize) -> Result<Self> {
        const CALL: &str = "ncclCommSplit";
        if rank >= world_size || world_size > self.world_size {
            let what = format!(
                "rank and size: expected a rank less than the size, and a size up to {}, found {rank} and {world_size}",
                self.world_size
            );
            return Err(Error::Operand { call: CALL, what });
        }
        self.gpu.make_current()?;
        // After a timeout NCCL could still write the handle, so its 8 bytes are never freed.
        let handle: &'static AtomicPtr<c_void> = Box::leak(Box::default());
        self.shared.with(CALL, |comm| comm.begin_split(part as i32, rank as i32, handle))?;
        self.shared.wait(CALL, self.timeout)?;
        let split = self.shared.with(CALL, |comm| Ok(comm.end_split(handle)))?;
        let split =
            split.ok_or_else(|| Error::Operand { call: CALL, what: "expected a communicator, found none".into() })?;
        let shared = Arc::new(Shared(Mutex::new(Some(split))));
        shared.wait(CALL, self.timeout)?;
        Ok(Self { shared, rank, world_size, timeout: self.timeout, gpu: self.gpu.clone() })
    }

    /// Returns a monitor for another thread.
    pub fn monitor(&self) -> Monitor {
        Monitor { shared: Arc::clone(&self.shared), gpu: self.gpu.clone() }
    }

    /// Returns the rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Queues an all-reduce: `to` becomes the reduction of `from` over all ranks. Both have the same length, and are the same
    /// memory or do not overlap.
    ///
    /// # Safety
    /// The buffers must be memory of this communicator's GPU until `stream` has completed the call. Until then, nothing else
    /// may write them or read `to`.
    pub unsafe fn all_reduce<T: Element>(
        &self,
        to: Buffer<T>,
        from: Buffer<T>,
        reduction: Reduction,
        stream: &Stream,
    ) -> Result<()> {
        self.same_length("ncclAllReduce", to.len, from.len)?;
        self.queue("ncclAllReduce", |comm| {
            let (f, op) = (comm.nccl().all_reduce, reduction.op());
            // SAFETY: the caller's promise; both buffers have `from.len` elements.
            unsafe { f(at(from), at(to), from.len, T::DATA_TYPE, op, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues a reduce-scatter: `to` becomes shard `rank` of the reduction of `from` over all ranks. `from` is longer by a
    /// factor of the world size. `to` may be that shard of `from`.
    ///
    /// # Safety
    /// See [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter<T: Element>(
        &self,
        to: Buffer<T>,
        from: Buffer<T>,
        reduction: Reduction,
        stream: &Stream,
    ) -> Result<()> {
        self.same_length("ncclReduceScatter", to.len * self.world_size, from.len)?;
        self.queue("ncclReduceScatter", |comm| {
            let (f, op) = (comm.nccl().reduce_scatter, reduction.op());
            // SAFETY: the caller's promise; `from` has `to.len` elements for each rank.
            unsafe { f(at(from), at(to), to.len, T::DATA_TYPE, op, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues an all-gather: `to` becomes the concatenation of `from` of all ranks. `to` is longer by a factor of the world
    /// size. `from` may be shard `rank` of `to`.
    ///
    /// # Safety
    /// See [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather<T: Element>(&self, to: Buffer<T>, from: Buffer<T>, stream: &Stream) -> Result<()> {
        self.same_length("ncclAllGather", to.len, from.len * self.world_size)?;
        self.queue("ncclAllGather", |comm| {
            let f = comm.nccl().all_gather;
            // SAFETY: the caller's promise; `to` has `from.len` elements for each rank.
            unsafe { f(at(from), at(to), from.len, T::DATA_TYPE, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues a broadcast: `buffer` becomes that of rank `root`.
    ///
    /// # Safety
    /// See [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast<T: Element>(&self, buffer: Buffer<T>, root: usize, stream: &Stream) -> Result<()> {
        let root = self.peer("ncclBroadcast", root)?;
        self.queue("ncclBroadcast", |comm| {
            let (f, len) = (comm.nccl().broadcast, buffer.len);
            // SAFETY: the caller's promise.
            unsafe { f(at(buffer), at(buffer), len, T::DATA_TYPE, root, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues that `buffer` is sent to rank `to`, which must [receive](Self::receive) as many elements. Only these two ranks make calls.
    /// Calls that wait for each other must be in one [`group`](crate::group).
    ///
    /// # Safety
    /// See [`all_reduce`](Self::all_reduce).
    pub unsafe fn send<T: Element>(&self, buffer: Buffer<T>, to: usize, stream: &Stream) -> Result<()> {
        let to = self.peer("ncclSend", to)?;
        self.queue("ncclSend", |comm| {
            let (f, len) = (comm.nccl().send, buffer.len);
            // SAFETY: the caller's promise.
            unsafe { f(at(buffer), len, T::DATA_TYPE, to, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues that `buffer` becomes what rank `from` [sends](Self::send).
    ///
    /// # Safety
    /// See [`all_reduce`](Self::all_reduce).
    pub unsafe fn receive<T: Element>(&self, buffer: Buffer<T>, from: usize, stream: &Stream) -> Result<()> {
        let from = self.peer("ncclRecv", from)?;
        self.queue("ncclRecv", |comm| {
            let (f, len) = (comm.nccl().receive, buffer.len);
            // SAFETY: the caller's promise.
            unsafe { f(at(buffer), len, T::DATA_TYPE, from, comm.raw(), stream.as_raw()) }
        })
    }

    /// Returns `rank` as NCCL takes it.
    fn peer(&self, call: &'static str, rank: usize) -> Result<i32> {
        if rank < self.world_size {
            return Ok(rank as i32);
        }
        let what = format!("rank: expected less than the world size {}, found {rank}", self.world_size);
        Err(Error::Operand { call, what })
    }

    /// Returns an error that occurred on another rank, in the network or on the device since the last call. `Ok` does not mean
    /// that queued work has completed.
    pub fn check(&self) -> Result<()> {
        self.shared.with("NCCL", |comm| comm.is_idle("NCCL")).map(|_| ())
    }

    /// Waits for the other ranks to close their communicators, and frees this one. Streams must have completed all queued
    /// calls. If the other ranks do not close theirs within the timeout, this communicator is aborted.
    pub fn close(self) -> Result<()> {
        self.gpu.make_current()?;
        let comm = self.shared.lock().take();
        comm.map_or(Ok(()), |comm| comm.close(self.timeout))
    }

    /// Aborts all calls in progress, including kernels on the device, and frees the communicator without waiting for other
    /// ranks.
    pub fn abort(self) {
        drop(self);
    }

    fn same_length(&self, call: &'static str, to: usize, from: usize) -> Result<()> {
        if to == from {
            return Ok(());
        }
        let what =
            format!("buffers on {} ranks: expected equal lengths, found {from} elements to {to}", self.world_size);
        Err(Error::Operand { call, what })
    }

    /// Makes a call and waits until its kernel is queued on the stream. In a group, the call is only recorded.
    fn queue(&self, call: &str, make: impl FnOnce(&Owned) -> Status) -> Result<()> {
        let done = self.shared.with(call, |comm| comm.is_complete(make(comm), call))?;
        if done || group::is_open() {
            return Ok(());
        }
        self.shared.wait(call, self.timeout)
    }

    /// Blocks until the calls of a group are queued on their streams.
    pub(crate) fn wait(&self, call: &str) -> Result<()> {
        self.shared.wait(call, self.timeout)
    }
}

fn at<T: Element>(buffer: Buffer<T>) -> *mut c_void {
    std::ptr::without_provenance_mut(buffer.address as usize)
}
