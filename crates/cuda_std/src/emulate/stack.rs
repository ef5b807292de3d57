//! Fiber stacks, kept between launches.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::io;
use std::sync::{Mutex, PoisonError};

/// Room for a kernel's frames also without optimisation; pages never touched cost nothing.
const BYTES: usize = 256 << 10;

/// A stack that begins a few cache lines below its mapping's end, a different number for neighbouring fibers: with all
/// of them at the same offset into a page the frames of a warp would compete for the same few sets of the L1 cache.
pub struct FiberStack {
    mapping: DefaultStack,
    base: StackPointer,
}

// SAFETY: `base` lies in the mapping, at most 4 KiB below its end, on a multiple of 128; the mapping has the guard page.
unsafe impl Stack for FiberStack {
    fn base(&self) -> StackPointer {
        self.base
    }

    fn limit(&self) -> StackPointer {
        self.mapping.limit()
    }
}

static POOL: Mutex<Vec<FiberStack>> = Mutex::new(Vec::new());

/// `count` stacks out of the pool.
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

/// Back into the pool.
pub fn give_back(stacks: impl IntoIterator<Item = FiberStack>) {
    POOL.lock().unwrap_or_else(PoisonError::into_inner).extend(stacks);
}
