//! A run of several processes, one for each GPU.
//!
//! * [`launcher`]: which of them this one is; [`rendezvous`]: how they meet; [`preflight`]: whether they belong together.
//! * [`star`]: what they say to each other, over TCP with rank 0 in the middle; [`watchdog`]: what becomes of a run that has
//!   lost one of them.
//! * [`communicator`]: what they do together to tensors: over [`star`] in host memory, or by [`nccl`] between GPUs.
//! * [`timed`]: how long an engine waits for that.
//! * [`exchange`]: which tensors those are, and when, in a pass; [`model::sharding`] says what of them each rank keeps.
//! * [`ranks`]: all of that as the training loop has it, or nothing, in a run of one process.

pub mod communicator;
pub mod fault;
pub mod launcher;
mod nccl;
pub mod ranks;
pub mod rendezvous;
pub mod star;
pub mod timed;
pub mod watchdog;

pub use ranks::Ranks;
