//! Pending asynchronous copies of a block: `cp.async`, TMA loads and TMA stores.

use super::order::Clock;
use super::report::Site;
use super::tensor_map::Map;

/// Pending `cp.async` operations of a thread. They execute when the thread waits for them, which is as late as
/// possible.
#[derive(Default)]
pub struct AsyncCopies {
    /// Oldest first.
    pub copies: Vec<AsyncCopy>,
    /// Number of committed groups.
    pub groups: u32,
}

#[derive(Clone, Copy)]
pub struct AsyncCopy {
    pub to: *mut u32,
    /// Source with its contents when the copy was issued, or `None` to write zeros. They must not change before the wait.
    pub from: Option<(*const u32, [u32; 4])>,
    pub group: u32,
    pub at: Site,
}

impl AsyncCopies {
    pub fn clear(&mut self) {
        self.copies.clear();
        self.groups = 0;
    }

    /// Returns the source line of the oldest pending copy.
    pub fn oldest(&self) -> Option<Site> {
        Some(self.copies.first()?.at)
    }
}

/// Source of a TMA load.
#[derive(Clone, Copy)]
pub enum Source {
    /// The box at column `x` and row `y` of a tensor.
    Box { map: Map, x: i32, y: i32 },
    /// Contiguous memory: address and bytes.
    Bulk { from: usize, bytes: usize },
}

impl Source {
    /// Returns the bytes that the load writes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Box { map, .. } => map.bytes(),
            Self::Bulk { bytes, .. } => *bytes,
        }
    }
}

/// A pending TMA load.
pub struct Load {
    pub source: Source,
    pub to: usize,
    pub barrier: usize,
    /// Clock of the thread that issued the load.
    pub clock: Clock,
    pub at: Site,
}

/// Destination of a TMA store.
#[derive(Clone, Copy)]
pub enum Target {
    /// The box at column `x` and row `y` of a tensor.
    Box { map: Map, x: i32, y: i32 },
    /// Contiguous memory, replaced or added to.
    Bulk { to: *mut u8, add: bool },
}

/// A pending TMA store.
pub struct Store {
    pub target: Target,
    pub from: usize,
    /// Contents of the tile when the store was issued. They must not change before the store executes.
    pub tile: Vec<u8>,
    /// Number of its group, once that is committed.
    pub group: Option<usize>,
    /// Whether the thread has waited until the tile was read.
    pub read: bool,
    pub at: Site,
}
