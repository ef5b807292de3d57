//! Predicts memory, communication and speed of training on a cluster, without computing anything.
//!
//! * [`quantity`]: sizes and rates with units, such as `400Gb/s`.
//! * [`measured`]: files of `bench step --json` and `bench collectives --json`.
//! * [`cluster`]: nodes, and the ranks of a communicator on them.
//! * [`links`]: the time of a collective, and [`fit`], which fits it to a measured sweep.
//! * [`compute`]: the time of a micro-batch and of an update on one GPU.
//! * [`schedule`]: the order in which the trainer computes and communicates, and what overlaps.
//! * [`search`]: the memory and the predicted step of each setting, and the best one.
//!
//! Memory comes from the plan that `train` allocates. The command line and printed tables belong to `host`.

#![warn(missing_docs)]

pub mod cluster;
pub mod compute;
pub mod fit;
pub mod links;
pub mod measured;
pub mod quantity;
pub mod schedule;
pub mod search;

pub use cluster::Cluster;
pub use compute::Compute;
pub use links::Links;
pub use search::{Planned, Request};
