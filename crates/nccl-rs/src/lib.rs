//! NCCL, opened at run time.
//!
//! Three layers: [`sys`] has the library's types and functions as they are, [`result`] turns its status codes into errors
//! and waits for calls that are under way, and [`Communicator`] is what a program uses.
//!
//! Communicators are non-blocking: a rank that never comes, or that dies while others connect to it, is an error after a
//! deadline, not a call that does not return. Collectives are queued on a stream like kernels; what fails on the device
//! later is told by [`Communicator::check`], and by a [`Monitor`] on any other thread, which can also abort what is under way.

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
