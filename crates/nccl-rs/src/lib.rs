//! NCCL, opened at run time.
//!
//! The crate has three layers. [`sys`] declares the types and functions of NCCL, [`result`] converts its status codes to
//! errors and waits for calls in progress, and [`Communicator`] is the interface for programs.
//!
//! Communicators are non-blocking. If a rank never connects, or fails while others connect to it, the call returns an error
//! after a timeout instead of blocking. Collectives are queued on a stream like kernels. [`Communicator::check`] reports
//! errors that occur on the device later. A [`Monitor`] reports them to another thread, which can also abort collectives in
//! progress.

#![warn(missing_docs)]

mod buffer;
mod communicator;
mod group;
mod library;
pub mod result;
pub mod sys;

pub use buffer::{Buffer, Element};
pub use communicator::{Communicator, Monitor, Reduction, UniqueId};
pub use group::group;
pub use library::{Version, find, load_from};
pub use result::{Error, Result};
