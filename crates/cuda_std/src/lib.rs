//! The standard library of GPU kernels: threads, warps, shared memory, tensor cores.
//!
//! A kernel is plain Rust over the primitives of this crate: [`thread`], [`warp`], [`block`], [`shared`], [`global`],
//! [`async_copy`], [`mma`] and [`math`]. The Hopper-only primitives are in [`hopper`]. The crate has two back ends with
//! the same interface. `ptx` consists of inline assembly and intrinsics for `target_arch = "nvptx64"`. `emulate` runs
//! every GPU thread of a block as a fiber on the CPU. No other crate of the workspace contains device assembly.
//!
//! # Safety model
//!
//! Kernels access memory only through the view types of [`global`] and [`shared`]. A [`global::Global`] is created from
//! a raw pointer when a kernel is launched. The launch is an `unsafe` call: the caller promises that every index the
//! kernel computes is inside the allocation. Given this launch contract, the accessors are safe to call, and kernel
//! bodies need no `unsafe`. The emulator verifies the contract.
//!
//! A checked kernel, `#[kernel(checked)]`, needs no such promise. Its buffers are [`GlobalSlice`]s and [`GlobalSliceMut`]s, which know
//! their length. With the feature `checked` of this crate, arrays and tiles in shared memory check their bounds too, and device code
//! has no access without a check. An access beyond the end stops the kernel with an error. The launch is a safe call. The feature has no
//! effect on the host, where the emulator always checks.
//!
//! # Testing a kernel without a GPU
//!
//! On the host a kernel is a function that returns a `Launch`, which can be emulated. `emulate_checked` runs it over
//! named buffers and stops at the first fault: an out-of-bounds or misaligned access, an uninitialized read, a data
//! race, a deadlock. `docs/testing.md` in the repository lists the faults and the limits. `examples/vecadd` is a
//! complete program with such tests.
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
//! // One element too many:
//! let report = double(out, inp, 101).emulate_checked(&mut memory, [2, 1, 1], 0).unwrap_err();
//! let expected = "thread 36: out-of-bounds access: read of 4 bytes at inp + 400 (index 100), which has 400 bytes";
//! assert!(report.to_string().starts_with(&format!("kernel double, block (1, 0, 0), {expected}")));
//! # Ok::<(), cuda_std::emulate::Report>(())
//! ```
#![warn(missing_docs)]
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, stdarch_nvptx, link_llvm_intrinsics, core_intrinsics, repr_simd)
)]
#![cfg_attr(
    target_arch = "nvptx64",
    allow(
        internal_features,
        improper_ctypes,
        reason = "device code needs LLVM intrinsics, some of them with SIMD types"
    )
)]

#[cfg(not(target_arch = "nvptx64"))]
#[path = "emulate/mod.rs"]
mod backend;
#[cfg(target_arch = "nvptx64")]
#[path = "ptx/mod.rs"]
mod backend;

pub mod async_copy;
mod atomics;
pub mod block;
pub mod cache;
pub mod element;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulate {
    //! Types for running kernels on the CPU with [`Launch::emulate`](crate::launch::Launch::emulate) and
    //! [`Launch::emulate_checked`](crate::launch::Launch::emulate_checked).
    //!
    //! The threads of a block run as fibers of one OS thread. A fiber runs until it must wait. Unchecked launches run
    //! blocks in parallel; checked launches run them in a [`Schedule`], and in several if they exchange values through atomics.
    //!
    //! * All lanes of a warp must execute a warp-wide operation at the same source line.
    //! * Whole warps arrive at barriers. Threads that have finished do not count as arrived.
    //! * A loop that waits for another thread must read memory with atomics: `load_relaxed`, `load_acquire`, `fetch_add`, …. Ordinary reads
    //!   and atomics of `core` do not let other threads run.
    //! * Atomic reads of a checked launch may return older values, if the memory model allows it.
    //! * Shared memory initially contains NaN.
    //! * Asynchronous operations execute as late as possible: `cp.async`, TMA stores and wgmma at their wait, TMA loads
    //!   when no thread of the block can continue.
    //! * Special functions are correctly rounded or nearly so, while the device approximates them. Tensor-core
    //!   instructions accumulate in f32 in ascending k.

    pub use crate::backend::{Fault, HostAccess, Memory, Report, Schedule, printed_by};
    pub use bytemuck::Pod;
}
pub mod fence;
pub mod fp8;
pub mod global;
#[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
pub mod hopper;
#[cfg(all(target_arch = "nvptx64", feature = "checked"))]
#[allow(dead_code, unused_imports, reason = "TMA and wgmma do not check bounds, so checked kernels cannot name them")]
mod hopper;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod math;
pub mod mma;
pub mod print;
pub mod shared;
pub mod slice;
pub mod thread;
pub mod warp;

pub use cache::CachePolicy;
pub use cuda_std_macros::{device, kernel};
pub use element::{Element, Packet, bf16, f16};
pub use fp8::{E4m3, E5m2, Fp8};
pub use global::{Global, GlobalMut};
pub use shared::{SharedArray, SharedTile};
pub use slice::{CopySource, GlobalSlice, GlobalSliceMut};

/// Fails to compile in a crate without checked device code.
#[doc(hidden)]
#[cfg(target_arch = "nvptx64")]
pub const fn assert_checked() {
    assert!(
        cfg!(feature = "checked"),
        "#[kernel(checked)]: expected the feature `checked` of cuda_std, found it disabled; enable it in the device crate's Cargo.toml"
    );
}

/// Fails to compile unless the type of a parameter of a checked kernel is a scalar.
#[doc(hidden)]
#[cfg(target_arch = "nvptx64")]
pub const fn check_scalar<T: Scalar>(_: T) {}

/// A scalar parameter of a checked kernel.
#[diagnostic::on_unimplemented(
    message = "a checked kernel cannot have a parameter of type `{Self}`",
    label = "expected a GlobalSlice, a GlobalSliceMut or a number",
    note = "a buffer is a GlobalSlice<T> or a GlobalSliceMut<T>; numbers are integers of up to 64 bits, f32, f64, bf16 and f16; pass a bool \
            as u32, and a struct as its fields"
)]
pub trait Scalar: Copy + Send + Sync + 'static {}

macro_rules! scalars {
    ($($type:ty)*) => {$(impl Scalar for $type {})*};
}

scalars! { u8 u16 u32 u64 i8 i16 i32 i64 usize f32 f64 bf16 f16 }

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    backend::trap()
}
