//! Pool of fiber stacks, which are reused across launches.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::io;
use std::sync::{Mutex, PoisonError};

/// Stack size in bytes: enough for a kernel compiled without optimization. Untouched pages use no physical memory.
pub const BYTES: usize = 256 << 10;

/// A stack whose base is a few cache lines below the end of its mapping. The distance differs between neighboring
/// fibers: with equal page offsets, the frames of a warp would compete for the same few sets of the L1 cache.
pub struct FiberStack {
    mapping: DefaultStack,
    base: StackPointer,
}

// SAFETY: `base` is in the mapping, at most 4 KiB below its end and a multiple of 128. The mapping has a guard page.
unsafe impl Stack for FiberStack {
    fn base(&self) -> StackPointer {
        self.base
    }

    fn limit(&self) -> StackPointer {
        self.mapping.limit()
    }
}

static POOL: Mutex<Vec<FiberStack>> = Mutex::new(Vec::new());

/// Takes `count` stacks from the pool and allocates those that are missing.
pub fn take(count: usize) -> io::Result<Vec<FiberStack>> {
    let mut stacks = {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = pool.len().saturating_sub(count);
        pool.split_off(kept)
    };
    while stacks.len() < count {
        let mapping = DefaultStack::new(BYTES)?;
        let base = mapping.base().get() - stacks.len() % 32 * 128;
        let base = StackPointer::new(base).unwrap_or(mapping.base());
        stacks.push(FiberStack { mapping, base });
    }
    Ok(stacks)
}

/// Returns stacks to the pool.
pub fn give_back(stacks: impl IntoIterator<Item = FiberStack>) {
    POOL.lock().unwrap_or_else(PoisonError::into_inner).extend(stacks);
}
