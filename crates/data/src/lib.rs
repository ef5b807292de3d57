//! Tokenization, token files, batches and evaluation sets.
//!
//! Files contain documents ([`documents`]), text becomes tokens ([`tokenizer`]), and tokens become shards on disk ([`text`],
//! [`tinyshakespeare`], [`tinystories`], [`fineweb`], [`climbmix`]) with a description ([`dataset`]). Conversations become shards with
//! masks ([`conversations`], [`mask`]). Shards become batches ([`Loader`], [`Mixture`], [`Prefetch`]). [`MultipleChoice`] holds
//! evaluation sets such as HellaSwag. Scoring a model on them does not belong here.

#![warn(missing_docs)]

mod archive;
pub mod batches;
pub mod check;
pub mod climbmix;
pub mod conversations;
pub mod core_tasks;
pub mod dataset;
pub mod documents;
pub mod download;
pub mod fineweb;
pub mod header;
pub mod hellaswag;
pub mod loader;
mod local_files;
pub mod mask;
pub mod mixture;
pub mod mmlu;
pub mod multiple_choice;
mod pattern;
pub mod prefetch;
mod python_random;
pub mod scored;
pub mod text;
pub mod tinyshakespeare;
pub mod tinystories;
pub mod tokens;
mod web_pages;

pub use batches::Batches;
pub use loader::{Geometry, Loader};
pub use mixture::Mixture;
pub use multiple_choice::MultipleChoice;
pub use prefetch::{DocumentStart, LoadedBatch, Prefetch};
pub use tokens::Tokens;
