//! A rank's end of a group of GPUs that compute together.

use crate::buffer::{Buffer, Element};
use crate::group;
use crate::library::library;
use crate::result::{Error, Owned, PAUSE, Result, check};
use crate::sys::{self, Status};
use cuda_driver::{Gpu, Stream};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How ranks that have never met find each other: one rank makes it and gives its bytes to all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(sys::UniqueId);

impl UniqueId {
    pub const BYTES: usize = 128;

    /// A new one. This process listens for the others from here on.
    pub fn new() -> Result<Self> {
        let nccl = &library()?.functions;
        let mut id = sys::UniqueId([0; Self::BYTES]);
        // SAFETY: writes one id.
        check(unsafe { (nccl.unique_id)(&raw mut id) }, "ncclGetUniqueId", "")?;
        Ok(Self(id))
    }

    pub const fn of_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(sys::UniqueId(bytes))
    }

    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.0
    }
}

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    /// Sum over ranks divided by their number.
    Mean,
}

impl Reduction {
    const fn op(self) -> sys::RedOp {
        match self {
            Self::Sum => sys::SUM,
            Self::Mean => sys::AVG,
        }
    }
}

/// One rank's end of a communicator. Every rank makes the same calls, in the same order, with as many elements.
///
/// A call returns once its kernel is queued on the stream; results are there once the stream has passed it. Values are added
/// in an order that depends on the machine only: the same run gives the same bits, and all ranks get the same.
pub struct Communicator {
    shared: Arc<Shared>,
    rank: usize,
    ranks: usize,
    /// Waited for at most where a call goes on after it has returned.
    patience: Duration,
    gpu: Gpu,
}

/// The library's communicator, and whoever looks after it; `None` once it is closed or aborted. It is locked for single calls,
/// none of which waits for another rank.
struct Shared(Mutex<Option<Owned>>);

impl Shared {
    /// A thread that panicked held it: what it guards is whole all the same.
    fn lock(&self) -> MutexGuard<'_, Option<Owned>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, call: &str, f: impl FnOnce(&Owned) -> Result<R>) -> Result<R> {
        self.lock().as_ref().map_or_else(|| Err(Error::Closed { call: call.into() }), f)
    }

    /// Waits until `call`, which may go on, has done its work on the host.
    fn wait(&self, call: &str, at_most: Duration) -> Result<()> {
        let begun = Instant::now();
        while !self.with(call, |comm| comm.is_settled(call))? {
            let waited = begun.elapsed();
            if waited >= at_most {
                return Err(Error::Timeout { call: call.into(), waited });
            }
            sleep(PAUSE);
        }
        Ok(())
    }
}

/// Looks after a communicator from another thread than the one that uses it.
#[derive(Clone)]
pub struct Monitor {
    shared: Arc<Shared>,
    gpu: Gpu,
}

impl Monitor {
    /// As [`Communicator::check`]; `Ok` once the communicator is closed. Never waits.
    pub fn check(&self) -> Result<()> {
        let comm = match self.shared.0.try_lock() {
            Ok(comm) => comm,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // A call is being made: it will tell.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        comm.as_ref().map_or(Ok(()), |comm| comm.is_settled("NCCL").map(|_| ()))
    }

    /// Ends whatever is under way, also kernels on the device, and frees the communicator: whoever waits for these need wait no
    /// more, and later calls are [`Error::Closed`]. What collectives that were under way have written is not defined.
    pub fn abort(&self) {
        // Without the context there is no kernel to end either.
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
    /// Meets the other ranks; `rank` is below `ranks`, and no two ranks have one GPU. [`Error::Timeout`] if they do not all
    /// come within `patience`, which is also how long the host waits in any later call.
    pub fn new(gpu: &Gpu, id: UniqueId, rank: usize, ranks: usize, patience: Duration) -> Result<Self> {
        if rank >= ranks {
            let what = format!("rank {rank} of {ranks}: ranks count from 0");
            return Err(Error::Operand { call: "ncclCommInitRankConfig", what });
        }
        let library = library()?;
        gpu.make_current()?;
        let comm = Owned::begin(library, ranks as i32, id.0, rank as i32)?;
        let shared = Arc::new(Shared(Mutex::new(Some(comm))));
        shared.wait("ncclCommInitRankConfig", patience)?;
        Ok(Self { shared, rank, ranks, patience, gpu: gpu.clone() })
    }

    /// For another thread, to look after this.
    pub fn monitor(&self) -> Monitor {
        Monitor { shared: Arc::clone(&self.shared), gpu: self.gpu.clone() }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Queues `to` = reduction of every rank's `from`; both of one length, the same memory or apart.
    ///
    /// # Safety
    /// The buffers are memory of this communicator's GPU until `stream` has passed the call, and nothing else writes them, or
    /// reads `to`, meanwhile.
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

    /// Queues `to` = part `rank` of the reduction of every rank's `from`, which is `ranks` times as long. `to` may be that
    /// part of `from`.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter<T: Element>(
        &self,
        to: Buffer<T>,
        from: Buffer<T>,
        reduction: Reduction,
        stream: &Stream,
    ) -> Result<()> {
        self.same_length("ncclReduceScatter", to.len * self.ranks, from.len)?;
        self.queue("ncclReduceScatter", |comm| {
            let (f, op) = (comm.nccl().reduce_scatter, reduction.op());
            // SAFETY: the caller's promise; `from` has `to.len` elements for each rank.
            unsafe { f(at(from), at(to), to.len, T::DATA_TYPE, op, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues `to` = every rank's `from`, one after another; `to` is `ranks` times as long. `from` may be part `rank` of `to`.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather<T: Element>(&self, to: Buffer<T>, from: Buffer<T>, stream: &Stream) -> Result<()> {
        self.same_length("ncclAllGather", to.len, from.len * self.ranks)?;
        self.queue("ncclAllGather", |comm| {
            let f = comm.nccl().all_gather;
            // SAFETY: the caller's promise; `to` has `from.len` elements for each rank.
            unsafe { f(at(from), at(to), from.len, T::DATA_TYPE, comm.raw(), stream.as_raw()) }
        })
    }

    /// Queues `buffer` = rank `root`'s.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast<T: Element>(&self, buffer: Buffer<T>, root: usize, stream: &Stream) -> Result<()> {
        if root >= self.ranks {
            let what = format!("root {root} of {} ranks", self.ranks);
            return Err(Error::Operand { call: "ncclBroadcast", what });
        }
        self.queue("ncclBroadcast", |comm| {
            let f = comm.nccl().broadcast;
            let (len, root) = (buffer.len, root as i32);
            // SAFETY: the caller's promise.
            unsafe { f(at(buffer), at(buffer), len, T::DATA_TYPE, root, comm.raw(), stream.as_raw()) }
        })
    }

    /// What has failed since: on another rank, in the network, on the device. `Ok` says nothing about work that is queued.
    pub fn check(&self) -> Result<()> {
        self.shared.with("NCCL", |comm| comm.is_settled("NCCL")).map(|_| ())
    }

    /// Waits until the other ranks are done with this one, and frees the communicator. Whatever was queued has been passed by
    /// its stream. If others do not close theirs within the patience, it is aborted.
    pub fn close(self) -> Result<()> {
        self.gpu.make_current()?;
        let comm = self.shared.lock().take();
        comm.map_or(Ok(()), |comm| comm.close(self.patience))
    }

    /// Ends whatever is under way at once, also kernels on the device, and frees the communicator. Other ranks are not asked.
    pub fn abort(self) {
        drop(self);
    }

    fn same_length(&self, call: &'static str, to: usize, from: usize) -> Result<()> {
        if to == from {
            return Ok(());
        }
        let what = format!("{from} elements to {to}, over {} ranks", self.ranks);
        Err(Error::Operand { call, what })
    }

    /// In a group the call only takes note; else it is waited for until its kernel is in the stream.
    fn queue(&self, call: &str, make: impl FnOnce(&Owned) -> Status) -> Result<()> {
        let done = self.shared.with(call, |comm| comm.accepted(make(comm), call))?;
        if done || group::is_open() {
            return Ok(());
        }
        self.shared.wait(call, self.patience)
    }

    /// Waits until what a group noted is in its streams.
    pub(crate) fn settle(&self, call: &str) -> Result<()> {
        self.shared.wait(call, self.patience)
    }
}

fn at<T: Element>(buffer: Buffer<T>) -> *mut c_void {
    std::ptr::without_provenance_mut(buffer.address as usize)
}
