//! Communication between the ranks of a run. A rank is one process, and each rank has its own GPU.
//!
//! * Startup: [`launcher`] finds the rank and the world size, [`rendezvous`] connects the processes.
//! * Host communication: [`tcp_group`] sends messages over TCP, relayed by rank 0. [`watchdog`] detects failed ranks.
//! * Tensor communication: [`communicator`] defines the collectives on tensors. They run through host memory
//!   ([`tcp_group`]) or between GPUs (NCCL). [`timing`] measures how long an engine waits for them.
//! * [`scope`] tells which ranks take part in a collective: all, a shard group, or replicas.
//! * [`flight_recorder`] keeps the last collectives of a rank, for the report of a failed run.
//! * [`ranks`] is the interface of the training loop. With one process all of its operations are no-ops.
//!
//! This crate knows nothing of models, data or checkpoints.

#![warn(missing_docs)]

pub mod communicator;
pub mod fault;
pub mod flight_recorder;
pub mod launcher;
mod nccl;
pub mod ranks;
pub mod rendezvous;
pub mod scope;
pub mod tcp_group;
pub mod timing;
pub mod watchdog;

pub use communicator::Transfer;
pub use ranks::Ranks;
pub use scope::{Scope, ShardGroups};
