//! The program's commands, one file each.

pub mod bench;
pub mod data;
pub mod doctor;
pub mod eval;
pub mod inspect;
mod report;
pub mod resources;
pub mod sample;
pub mod selftest;
pub mod train;
pub mod verify;

/// How this program is started from its sources, for commands that are suggested.
pub const PROGRAM: &str = "cargo run --release -p host --";
