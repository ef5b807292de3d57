//! The CUDA driver, bound at run time.
//!
//! `cust` declares the driver's `cu…` functions and leaves them to the linker. This crate defines every one of them as a
//! jump through a table that [`load`] fills from libcuda.so.1, so a program links without a CUDA toolkit and starts
//! without a driver. Before `load`, or without a driver, every call answers `CUDA_ERROR_NOT_INITIALIZED`; one that the
//! driver is too old to have answers `CUDA_ERROR_NOT_FOUND`. A `cu…` name that is used but not in the table is a link
//! error.
//!
//! Over that stand thin safe types for what `cust` 0.3.2 lacks or loses: [`Stream`] (non-blocking), [`Event`],
//! [`Graph`], [`Module`] with the JIT's log, [`Function`] with attributes, opt-in shared memory and clusters,
//! [`TensorMap`], [`DeviceMemory`], [`PinnedBuffer`]. Each keeps its [`Gpu`] alive, so nothing outlives its context.

mod device_memory;
mod error;
mod event;
mod function;
mod gpu;
mod graph;
mod late;
pub mod library;
mod module;
mod pinned;
mod stream;
pub mod sys;
mod tensor_map;

pub use cust;
pub use device_memory::DeviceMemory;
pub use error::{Error, Result};
pub use event::{Event, Stopwatch, TimedEvent};
pub use function::{Function, LaunchConfig, Resources};
pub use gpu::{DeviceInfo, Gpu, MemoryInfo, device_count, device_info, device_uuid, driver_version};
pub use graph::{Graph, GraphExec};
pub use late::{load, load_from, missing};
pub use module::Module;
pub use pinned::PinnedBuffer;
pub use stream::Stream;
pub use tensor_map::{ElementType, L2Promotion, Swizzle, TensorMap};
