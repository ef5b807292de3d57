//! The CUDA driver API through [`cust`], bound to libcuda at run time.
//!
//! # Late binding
//!
//! `cust` declares the driver's `cu…` functions and leaves them to the linker. This crate defines each of them as a jump
//! through a table that [`load`] fills from libcuda.so.1. A program therefore links without a CUDA toolkit and starts
//! without a driver. Before `load`, or without a driver, every call returns `CUDA_ERROR_NOT_INITIALIZED`. A function that
//! the driver is too old to have returns `CUDA_ERROR_NOT_FOUND`. A `cu…` function that is used but missing from the table
//! is a link error.
//!
//! # Use of cust
//!
//! `cust` 0.3.2 provides initialization, devices and their attributes, primary contexts, modules, functions and their
//! attributes, device memory, page-locked memory, streams, timed events, and kernel launches
//! (`cust::stream::Stream::launch`). The types here wrap those of `cust`. Each keeps its [`Gpu`] alive, makes that GPU's
//! context current before it is created or dropped, and reports errors with the failing call and its arguments.
//!
//! `beyond_cust` holds the raw driver calls that `cust` 0.3.2 has no public API for:
//! - stream capture and CUDA graphs ([`Graph`], [`GraphExec`]);
//! - tensor maps for TMA ([`TensorMap`]);
//! - the opt-in to more than 48 KiB of dynamic shared memory;
//! - events that streams wait for repeatedly ([`Event`]): `cust::stream::Stream::wait_event` destroys its event;
//! - asynchronous copies and fills of raw device addresses ([`Stream::upload`] and others);
//! - the JIT compiler's log of a module that fails to load;
//! - the UUID and the opt-in shared memory limit of a device;
//! - the exact error code where `cust` returns `UnknownError`, its value for every code newer than CUDA 11.4.
//!
//! # Checked launches
//!
//! A [`Buffer`] knows its element type, its length, and the stream that orders its work. [`CheckedModule::launch`] launches a
//! `#[kernel(checked)]` on buffers, with the block size and the shared memory of the kernel's declaration. Neither needs `unsafe`.
//! [`Function::launch`] launches any kernel on raw addresses, and is `unsafe`.
//!
//! # Exceptions
//!
//! Two driver functions are defined as more than a jump because `cust` needs it: `cuGetErrorString` never fails, and
//! `cuStreamCreateWithPriority` restores the non-blocking flag that `cust::stream::Stream::new` removes.

#![warn(missing_docs)]

mod beyond_cust;
mod buffer;
mod checked;
mod device_memory;
mod error;
mod event;
mod function;
mod gpu;
mod in_context;
mod late_binding;
pub mod library;
mod module;
mod pinned;
mod stream;

pub use beyond_cust::event::Event;
pub use beyond_cust::graph::{Graph, GraphExec};
pub use beyond_cust::sys;
pub use beyond_cust::tensor_map::{ElementType, L2Promotion, Swizzle, TensorMap};
pub use buffer::Buffer;
pub use bytemuck::Pod;
pub use checked::CheckedModule;
pub use cust;
pub use device_memory::DeviceMemory;
pub use error::{Error, Result};
pub use event::{Stopwatch, TimedEvent};
pub use function::{Function, LaunchConfig, Resources};
pub use gpu::{DeviceInfo, Gpu, MemoryInfo, device_count, device_info, device_uuid, driver_version};
pub use late_binding::{load, load_from, missing};
pub use module::Module;
pub use pinned::PinnedBuffer;
pub use stream::Stream;
