//! The book of this repository: an mdBook in `chapters/`. This crate holds the program that writes the listings of the chapters from
//! compiled sources and builds the HTML files, its checks, and the serial Rust code that the chapters start from.

#![warn(missing_docs)]

mod build;
mod formula;
mod item;
mod kernel;
mod links;
mod listing;
mod measured;
pub mod reference;

pub use build::{build, repository_root};
pub use links::check_markdown;
pub use listing::{check_listings, update_listings};
