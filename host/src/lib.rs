//! The library behind the `llm-rs` program: everything that connects the crates of this workspace to a user.
//!
//! These modules belong here: the command line, the training loop, evaluation and sampling, and what a run prints and logs.
//! Code that works without a command line belongs in a crate of its own: the model in `model`, its operations on the CPU
//! and on GPUs in `engine`, data files in `data`, checkpoints in `checkpoint`, communication between processes in
//! `distributed`, comparisons with references in `verify`.
//!
//! * [`cli`] parses the command line with [`values`] and [`config_file`]; `commands` implements each command.
//! * `chat_template` renders conversations.
//! * [`mod@train`], [`evaluate`] and [`sample`] use a model; [`corpus`] is the text that the program trains on by default;
//!   [`datasets`] reads the descriptions of others.
//! * [`console`], [`terminal`], [`log`], [`plots`], [`hints`], [`style`] and [`version`] produce what a user reads.
//! * [`output`] protects existing files from the commands that write to a path of the user.
//! * [`clock`], [`mfu`] and [`gpu_info`] measure; [`signals`] handles requests to stop; [`allocator`] reports memory that runs out,
//!   and [`panics`] reports defects.

#![warn(missing_docs)]

pub mod allocator;
mod chat_template;
pub mod cli;
pub mod clock;
mod commands;
pub mod config_file;
pub mod console;
pub mod corpus;
pub mod datasets;
pub mod evaluate;
pub mod generate;
pub mod gpu_info;
pub mod hints;
pub mod log;
pub mod mfu;
pub mod output;
pub mod panics;
pub mod plots;
pub mod sample;
pub mod signals;
pub mod style;
pub mod terminal;
pub mod train;
pub mod values;
pub mod version;
