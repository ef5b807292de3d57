//! What device code is written against.
//!
//! A kernel in `gpu/` is plain Rust over the primitives of this crate: [`thread`], [`warp`], [`block`], [`shared`],
//! [`global`], [`async_copy`], [`mma`], [`math`]; the Hopper-only ones are in [`hopper`]. The crate has two back ends
//! with the same surface: `ptx` (inline assembly and intrinsics, for `target_arch = "nvptx64"`) and `emulate` (every
//! GPU thread of a block is a fiber on the CPU). No other crate of the workspace contains device assembly.
//!
//! # Safety model
//!
//! Memory is reached only through the view types of [`global`] and [`shared`]. A [`global::Global`] is made from a raw
//! pointer when a kernel is launched; whoever launches (an `unsafe` call) promises that every index that kernel forms is
//! inside the allocation. Under that promise the accessors are safe to call, so kernel bodies need no `unsafe`. The
//! emulator checks the promise.
//!
//! # Testing a kernel without a GPU
//!
//! On the host a kernel is a function that returns a `Launch`, which runs emulated. `emulate_checked` runs it over named
//! buffers and stops it at the first fault: out of bounds, misaligned, uninitialised, a race, a deadlock. `docs/testing.md`
//! in the repository lists the faults and the limits, and `examples/vecadd` is a program with such tests.
//! ```
//! use cuda_std::emulate::Memory;
//! use cuda_std::{Global, GlobalMut, kernel, thread};
//!
//! #[kernel(threads = 64)]
//! fn double(out: GlobalMut<f32>, inp: Global<f32>, n: u64) {
//!     let i = thread::index_1d();
//!     if i < n as usize {
//!         out.set(i, 2.0 * inp.at(i));
//!     }
//! }
//!
//! let mut memory = Memory::new();
//! let inp = memory.input("inp", &[1.0; 100]);
//! let out = memory.output("out", 100);
//! double(out, inp, 100).emulate_checked(&mut memory, [2, 1, 1], 0)?;
//! assert_eq!(memory.read(out), [2.0; 100]);
//!
//! // One too many:
//! let report = double(out, inp, 101).emulate_checked(&mut memory, [2, 1, 1], 0).unwrap_err();
//! assert!(report.to_string().starts_with(
//!     "kernel double, block (1, 0, 0), thread 36: out of bounds: read of 4 bytes at inp + 400, which has 400 bytes"
//! ));
//! # Ok::<(), cuda_std::emulate::Report>(())
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, stdarch_nvptx, link_llvm_intrinsics, core_intrinsics, repr_simd)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features, improper_ctypes))]

#[cfg(not(target_arch = "nvptx64"))]
#[path = "emulate/mod.rs"]
mod backend;
#[cfg(target_arch = "nvptx64")]
#[path = "ptx/mod.rs"]
mod backend;

pub mod async_copy;
pub mod block;
pub mod cache;
pub mod element;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulate {
    //! Kernels on the CPU: what [`Launch::emulate`](crate::launch::Launch::emulate) and
    //! [`Launch::emulate_checked`](crate::launch::Launch::emulate_checked) take and report.
    //!
    //! A block's threads run as fibers of one OS thread, each until it must wait. Warp-wide operations need every lane of
    //! the warp at the same source line, and barriers whole warps: threads that finished do not count as having arrived. A
    //! kernel must not wait for another thread by polling memory, for nobody else runs meanwhile: a checked launch reports
    //! that, an unchecked one hangs. Unchecked, blocks run in parallel; checked, one after the other.
    //!
    //! Shared memory starts out as NaN. What is asynchronous happens as late as it may: copies by `cp.async`, stores by TMA
    //! and warpgroup products at their wait, loads by TMA when no thread can go on.
    //!
    //! Special functions are correctly rounded or nearly so, where the device's are approximate; tensor-core products
    //! accumulate in f32 in ascending k.

    pub use crate::backend::{Fault, HostAccess, Memory, Report};
}
pub mod fence;
pub mod global;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod hopper;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod math;
pub mod mma;
pub mod shared;
pub mod thread;
pub mod warp;

pub use cache::CachePolicy;
pub use cuda_std_macros::kernel;
pub use element::{Element, Packet, bf16};
pub use global::{Global, GlobalMut};
pub use shared::{SharedArray, SharedTile};

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    backend::trap()
}
