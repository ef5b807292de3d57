//! An allocator that ends the program when a reader takes more memory than its input can justify.
//!
//! libFuzzer's own limit on single allocations needs a sanitizer; this needs nothing. It sees memory that is asked for and
//! never touched, which a limit on resident memory does not.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What an input of a few kilobytes may take. A reader that trusts a count of its header asks for more sooner or later.
pub const BUDGET: usize = 32 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static CEILING: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The system's allocator, counting.
pub struct Limited;

/// Calls `f`, during which this many more bytes may be live at a time.
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
        // Nothing that allocates.
        let mut digits = [b' '; 20];
        let mut rest = bytes;
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        let mut to = std::io::stderr();
        let _ = to.write_all(b"\nmore memory than the input justifies; the last allocation has bytes: ");
        let _ = to.write_all(&digits);
        let _ = to.write_all(b"\n");
        std::process::abort();
    }
}

// SAFETY: every call is passed on to the system's allocator with what the caller promised.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
