//! The memory allocator of the program: an allocation that fails ends the process with an error instead of an abort.

use signal_hook::low_level;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Write, stderr};

/// The allocator of the system. Allocations of up to 64 MiB that fail end the process.
#[derive(Debug)]
pub struct Reporting;

impl Reporting {
    /// Larger allocations are those of tensors and of files. Their callers handle a failure, for example by saving the run.
    const LARGE: usize = 64 << 20;

    /// Ends the process if a small allocation has failed. Allocates nothing.
    fn check(pointer: *mut u8, bytes: usize) -> *mut u8 {
        if pointer.is_null() && bytes <= Self::LARGE {
            let _ = writeln!(
                stderr(),
                "error: memory: cannot allocate {bytes} bytes; use a smaller model or batch, or raise the limit of the process \
                 (ulimit -v)"
            );
            // Handlers of `exit` may allocate.
            low_level::exit(1);
        }
        pointer
    }
}

// SAFETY: all calls go to the allocator of the system with the arguments of the caller, who keeps its contract.
unsafe impl GlobalAlloc for Reporting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: see the implementation.
        Self::check(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: see the implementation.
        Self::check(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: see the implementation.
        Self::check(unsafe { System.realloc(pointer, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: see the implementation.
        unsafe { System.dealloc(pointer, layout) }
    }
}
