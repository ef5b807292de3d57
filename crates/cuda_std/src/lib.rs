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
pub mod element;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulate {
    //! What [`crate::launch::Launch::emulate`] reports.

    pub use crate::backend::{Fault, Memory, Report};
}
pub mod fence;
pub mod global;
#[cfg(target_arch = "nvptx64")]
pub mod hopper;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod math;
pub mod mma;
pub mod shared;
pub mod thread;
pub mod warp;

pub use cuda_std_macros::kernel;
pub use element::{Element, Packet, bf16};
pub use global::{Global, GlobalMut};
pub use shared::{SharedArray, SharedTile};

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    backend::trap()
}
