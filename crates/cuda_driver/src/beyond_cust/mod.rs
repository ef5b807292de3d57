//! Driver calls that `cust` 0.3.2 has no public API for. The crate documentation lists them.
//!
//! These calls return the driver's code as a number. `cust::sys::CUresult` is an enum of the codes of CUDA 11.4, and the
//! code of a newer driver would not be one of its values.

pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod jit;
pub(crate) mod kernel;
mod stream;
pub mod sys;
pub(crate) mod tensor_map;
