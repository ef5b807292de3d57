//! A global allocator that aborts the process when live allocations exceed a limit.
//!
//! libFuzzer's limit on single allocations requires a sanitizer; this allocator does not. It also counts memory that is
//! allocated but never touched, which a limit on resident memory misses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Memory limit in bytes for an input of a few kilobytes. A reader that trusts a corrupt count in a header exceeds it.
pub const BUDGET: usize = 32 << 20;

/// Bytes allocated.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Bytes that may be allocated at most.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The system allocator with a limit on live bytes.
pub struct Limited;

/// Calls `f` with a limit of `bytes` on the additional live memory.
pub fn within<T>(bytes: usize, f: impl FnOnce() -> T) -> T {
    LIMIT.store(LIVE.load(Relaxed) + bytes, Relaxed);
    let result = f();
    LIMIT.store(usize::MAX, Relaxed);
    result
}

/// Counts an allocation, and aborts the process if it exceeds the limit.
fn count_allocation(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
    if live > LIMIT.load(Relaxed) {
        LIMIT.store(usize::MAX, Relaxed);
        // Formats the number without an allocation.
        let mut digits = [b' '; 20];
        let mut rest = bytes;
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        let mut stderr = std::io::stderr();
        let _ = stderr.write_all(b"\nerror: memory limit exceeded; size of the last allocation in bytes: ");
        let _ = stderr.write_all(&digits);
        let _ = stderr.write_all(b"\n");
        std::process::abort();
    }
}

// SAFETY: every call is forwarded to the system allocator with unchanged arguments.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
