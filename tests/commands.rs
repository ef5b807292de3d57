//! The commands of the program, run as a user does. One test program for all: each would take seconds to compile and link.

mod browser;
mod common;
mod decoders;
mod endings;
mod evaluation;
mod faulty_hardware;
mod fp8;
mod generation_commands;
mod interchange;
mod limits;
mod mmlu;
mod muon;
mod named_data;
mod plan;
mod plots;
mod program;
mod readme;
mod recipes;
mod resume;
mod serve;
mod streams;
mod sweep;
mod terminal;
mod tokenizers;
mod unreliable_files;
mod verify;
