//! Fault reports of the emulator.

use std::fmt::{self, Write};
use std::panic::Location;

/// A source line of a kernel.
pub type Site = &'static Location<'static>;

/// The kind of a fault that the emulator found in a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Invalid launch: an empty grid, a block size out of range, no memory for the fibers, or a program built without the emulator.
    Launch,
    /// Deadlock: threads wait for arrivals that never happen, for example because of barrier divergence.
    Deadlock,
    /// Livelock: threads keep running without progress, for example by polling memory.
    Livelock,
    /// Warp divergence: lanes of one warp execute different warp-wide operations, or threads of one warpgroup issue
    /// different wgmma instructions.
    Divergence,
    /// Invalid operand: for example a barrier number or source lane that does not exist.
    Operand,
    /// A panic in the kernel.
    Panic,
    /// The kernel executed `thread::trap`.
    Trap,
    /// Stack overflow: a thread needs more stack than the emulator gives it.
    StackOverflow,
    /// Segmentation fault: an access, through a pointer that is not a view, to memory that the process does not have.
    Segmentation,
    /// Out-of-bounds access: an address outside every buffer and the block's shared memory.
    OutOfBounds,
    /// Misaligned access: an address that is not a multiple of the required alignment.
    Misaligned,
    /// A write to a read-only buffer.
    ReadOnly,
    /// Uninitialized read: a read of memory that was never written.
    Uninitialized,
    /// Data race: two unordered accesses to one location by different threads, at least one of them a write.
    DataRace,
    /// An access to the target of an asynchronous copy before its wait, or a copy that is never waited for.
    AsyncCopy,
    /// An access to wgmma accumulators before the wait, or a wgmma on registers without a preceding `wgmma::fence`.
    Accumulators,
}

/// A fault in a kernel, with the kernel's name, block, threads and source lines.
#[derive(Clone)]
pub struct Report {
    /// Name of the kernel's entry point.
    pub kernel: &'static str,
    /// Block index (x, y, z); (0, 0, 0) for an invalid launch.
    pub block: [u32; 3],
    /// Index of the thread that faulted, if the fault belongs to one thread.
    pub thread: Option<u32>,
    /// Kind of the fault.
    pub fault: Fault,
    /// Source line of the fault. In a deadlock, the line at which the first waiting thread waits. None for a panic,
    /// whose line is part of the text.
    pub at: Option<Site>,
    /// Source line of the conflicting operation.
    pub other: Option<Site>,
    /// Seed of the [schedule](super::Schedule) in which a checked launch has this fault.
    pub schedule: Option<u64>,
    pub(super) message: String,
}

impl Report {
    /// Returns the report for a launch without a body.
    pub(crate) fn without_emulator(kernel: &'static str) -> Self {
        let message =
            "this program was built without the emulator; enable the feature `emulator` of cuda_std".to_owned();
        Self {
            kernel,
            block: [0; 3],
            thread: None,
            fault: Fault::Launch,
            at: None,
            other: None,
            schedule: None,
            message,
        }
    }

    /// Returns the line numbers of [`at`](Self::at) and [`other`](Self::other).
    pub fn lines(&self) -> [Option<u32>; 2] {
        [self.at, self.other].map(|site| site.map(Location::line))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "kernel {}, block ({x}, {y}, {z})", self.kernel)?;
        if let Some(thread) = self.thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {}", self.message)?;
        // Seed 0 runs the blocks in order.
        match self.schedule {
            None | Some(0) => Ok(()),
            Some(seed) => write!(f, " [in the schedule of seed {seed}]"),
        }
    }
}

/// Same as `Display`, so that `unwrap` in a test prints the readable report.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Report {}

/// Displays a site as `file:line:column`.
pub(super) struct Line(pub Site);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.0.file(), self.0.line(), self.0.column())
    }
}

/// Formats ascending thread indices as ranges: `0-31, 64, 66-95`.
pub(super) fn ranges(threads: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = threads;
    while let [first, ..] = *rest {
        let length = rest.iter().enumerate().take_while(|&(i, &thread)| thread == first + i).count();
        if !text.is_empty() {
            text += ", ";
        }
        let _ = write!(text, "{first}");
        if length > 1 {
            let _ = write!(text, "-{}", first + length - 1);
        }
        rest = &rest[length..];
    }
    text
}
