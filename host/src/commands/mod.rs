//! The commands of the program. Each module holds the flags of one command and its `run` function.
//!
//! Code that several commands share belongs in [`resources`]; code that is useful without a command line belongs outside.

pub mod bench;
pub mod chat;
pub mod data;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod generation;
pub mod inspect;
mod json;
pub mod log;
pub mod plan;
pub mod plot;
mod report;
pub mod resources;
pub mod sample;
pub mod selftest;
pub mod serve;
pub mod shell;
pub mod simulate;
pub mod sweep;
pub mod tokenizer;
pub mod train;
pub mod verify;
