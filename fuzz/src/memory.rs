//! An allocator that aborts the program if a reader allocates more memory than its input can justify.
//!
//! libFuzzer's own limit on single allocations needs a sanitizer; this allocator does not. It also counts memory that is
//! allocated but never touched, which a limit on resident memory misses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Memory limit, in bytes, for an input of a few kilobytes. A reader that trusts a count in a header exceeds it eventually.
pub const BUDGET: usize = 32 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static CEILING: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The system allocator with a limit on live bytes.
pub struct Limited;

/// Calls `f`, and aborts the program if more than `bytes` additional bytes are live at any time during the call.
pub fn within<T>(bytes: usize, f: impl FnOnce() -> T) -> T {
    CEILING.store(LIVE.load(Relaxed) + bytes, Relaxed);
    let result = f();
    CEILING.store(usize::MAX, Relaxed);
    result
}

fn take(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
    if live > CEILING.load(Relaxed) {
        CEILING.store(usize::MAX, Relaxed);
        // Formats the number without allocating.
        let mut digits = [b' '; 20];
        let mut remaining = bytes;
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (remaining % 10) as u8;
            remaining /= 10;
            if remaining == 0 {
                break;
            }
        }
        let mut stderr = std::io::stderr();
        let _ = stderr.write_all(b"\nmemory limit exceeded for this input; bytes of the last allocation: ");
        let _ = stderr.write_all(&digits);
        let _ = stderr.write_all(b"\n");
        std::process::abort();
    }
}

// SAFETY: every call is forwarded to the system allocator with the caller's arguments.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
