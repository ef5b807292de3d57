//! What the emulator says of a kernel that goes wrong.

use std::fmt::{self, Write};
use std::panic::Location;

/// Source line of a kernel.
pub type Site = &'static Location<'static>;

/// What went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The launch itself is impossible: an empty grid, a block size out of range, no memory for the fibers.
    Launch,
    /// Threads wait for others that never come.
    Deadlock,
    /// Threads go on and on without anything changing: polling memory that nobody will write.
    Livelock,
    /// Lanes of one warp are at different warp-wide operations.
    Divergence,
    /// An operation's operand is outside what it takes: a barrier number, a lane that is not there.
    Operand,
    /// The kernel panicked.
    Panic,
    /// An access outside every buffer and the block's shared memory.
    OutOfBounds,
    /// An access whose address is no multiple of its alignment.
    Misaligned,
    /// A write to an input.
    ReadOnly,
    /// A read of memory that was never written.
    Uninitialised,
    /// Two threads' accesses to one place, one of them a write, and nothing that orders them.
    Race,
    /// An access to the target of an asynchronous copy before its wait, or a copy that nobody waits for.
    AsyncCopy,
    /// Accumulators of a warpgroup product touched before its wait, or a product of registers with no fence after they were.
    Accumulators,
}

/// Why a kernel was stopped: kernel, block, threads and source lines.
#[derive(Clone)]
pub struct Report {
    /// Entry point's name.
    pub kernel: &'static str,
    /// Block index (x, y, z), (0, 0, 0) where the launch was refused.
    pub block: [u32; 3],
    /// Thread that was stopped, where it was one.
    pub thread: Option<u32>,
    pub fault: Fault,
    /// Line at which the kernel was stopped; in a deadlock the line where the first waiting thread waits; none in a panic,
    /// whose line is in the text.
    pub at: Option<Site>,
    /// The line it clashes with.
    pub other: Option<Site>,
    pub(super) message: String,
}

impl Report {
    /// The source lines of [`at`](Self::at) and [`other`](Self::other).
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
        write!(f, ": {}", self.message)
    }
}

/// As `Display`: it is what a test that unwraps shows.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Report {}

/// `file:line`.
pub(super) struct Line(pub Site);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.file(), self.0.line())
    }
}

/// Ascending thread indices as `0-31, 64, 66-95`.
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
