//! Reads and writes the model formats of other programs: Hugging Face directories and GGUF.
//!
//! * [`ModelSource`] is a model that a user names by its path: a `.bin` file, the directory of a run, or a Hugging Face
//!   directory.
//! * [`export`] writes a source as a Hugging Face directory, a `.bin` file or a GGUF file.
//! * [`architecture`] holds one table per architecture: tensor names, and the keys of `config.json`.
//! * [`config`], [`keys`], [`safetensors_file`] and [`hugging_face`] read Hugging Face directories; [`tokenizer`] makes tokenizer files;
//!   [`gguf`] is the GGUF container.
//!
//! * [`peft`] are low-rank adapters in files.
//! * [`companions`] are the files of a Hugging Face directory besides the weights, which a run keeps.
//!
//! llm.c's own formats belong to `checkpoint`.

#![warn(missing_docs)]

pub mod architecture;
pub mod companions;
pub mod config;
pub mod element;
mod entries;
pub mod export;
pub mod gguf;
pub mod hugging_face;
pub mod keys;
pub mod peft;
pub mod safetensors_file;
pub mod source;
pub mod tokenizer;

pub use source::{ModelSource, convert_pairs};
