//! The book of this repository: an mdBook in `chapters/`, with code, diffs, PTX and reports taken from compiled sources when it is
//! built. This crate holds the program that builds and checks it, and the serial Rust code that its chapters start from.

#![warn(missing_docs)]

mod build;
mod diff;
mod directive;
mod examples;
mod formula;
mod item;
mod links;
mod profile;
pub mod reference;

pub use build::build;
pub use links::check_markdown;
