//! The operations in which threads wait.

use super::report::Site;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// An operation in which a thread can wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Shuffle,
    Ballot,
    SyncWarp,
    /// One of these operations among the lanes of a mask.
    Masked {
        mask: u32,
    },
    ActiveMask,
    LdMatrix,
    StMatrix,
    Mma,
    SyncThreads,
    SyncNamed {
        id: u32,
        threads: u32,
    },
    ArriveNamed {
        id: u32,
        threads: u32,
    },
    MBarrier {
        offset: u32,
        parity: u32,
    },
    WgmmaWait,
    /// `acquire_wait`, for a value or a condition.
    Value {
        address: usize,
        awaited: Option<u32>,
    },
    /// A loop that reads the same value again and again.
    Poll {
        address: usize,
        bits: u64,
    },
    Match,
    WarpReduction,
    SyncThreadsOr,
    SyncThreadsAnd,
    SyncThreadsCount,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shuffle => f.write_str("a warp shuffle"),
            Self::Ballot => f.write_str("a warp vote"),
            Self::SyncWarp => f.write_str("warp::sync"),
            Self::Masked { mask } => write!(f, "an operation of the lanes in {mask:#010x}"),
            Self::ActiveMask => f.write_str("warp::active_mask"),
            Self::LdMatrix => f.write_str("a fragment load (ldmatrix)"),
            Self::StMatrix => f.write_str("a fragment store (stmatrix)"),
            Self::Mma => f.write_str("mma"),
            Self::SyncThreads => f.write_str("sync_threads"),
            Self::SyncNamed { id, threads } => write!(f, "sync_named({id}, {threads})"),
            Self::ArriveNamed { id, threads } => write!(f, "arrive_named({id}, {threads})"),
            Self::MBarrier { offset, parity } => {
                write!(f, "wait({parity}) on the mbarrier at shared memory + {offset}")
            }
            Self::WgmmaWait => f.write_str("wgmma::wait"),
            Self::Value { awaited: Some(value), .. } => write!(f, "acquire_wait for the value {value}"),
            Self::Value { .. } => f.write_str("acquire_wait for a condition"),
            Self::Poll { bits, .. } => write!(f, "a loop that reads the value {bits}"),
            Self::Match => f.write_str("a warp match"),
            Self::WarpReduction => f.write_str("a warp reduction"),
            Self::SyncThreadsOr => f.write_str("sync_threads_or"),
            Self::SyncThreadsAnd => f.write_str("sync_threads_and"),
            Self::SyncThreadsCount => f.write_str("sync_threads_count"),
        }
    }
}

/// The operation and source line at which a thread waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    pub operation: Operation,
    pub at: Site,
}

impl Wait {
    /// Equivalent to `==`, but compares the addresses of the sites first.
    #[inline]
    pub fn same(self, other: Self) -> bool {
        self.operation == other.operation && (std::ptr::eq(self.at, other.at) || self.at == other.at)
    }
}

/// A thread that waits until a condition holds for a word.
#[derive(Clone, Copy)]
pub struct ValueWait {
    pub thread: usize,
    pub word: *const u32,
    /// The condition is on the stack of the thread, which is suspended until the wait ends.
    pub condition: &'static dyn Fn(u32) -> bool,
}

impl ValueWait {
    pub fn found(self) -> u32 {
        // SAFETY: the caller of `acquire_wait_u32` guarantees a valid word, and all concurrent accesses are atomic.
        unsafe { AtomicU32::from_ptr(self.word.cast_mut()) }.load(Ordering::Acquire)
    }

    pub fn is_satisfied(self) -> bool {
        (self.condition)(self.found())
    }
}
