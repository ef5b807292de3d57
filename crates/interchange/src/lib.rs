//! Reads and writes the model formats of other programs: Hugging Face directories and GGUF. Reads checkpoints of nanochat.
//!
//! * [`ModelSource`] is a model that a user names by its path: a `.bin` file, the directory of a run, a Hugging Face directory, or a
//!   checkpoint of nanochat.
//! * [`export`] writes a source as a Hugging Face directory, a `.bin` file or a GGUF file.
//! * [`architecture`] holds one table per architecture: tensor names, and the keys of `config.json`.
//! * [`config`], [`keys`], [`safetensors_file`] and [`hugging_face`] read Hugging Face directories; [`tokenizer`] makes tokenizer files;
//!   [`gguf`] is the GGUF container.
//! * `torch_file` and `nanochat_checkpoint` read what nanochat saves with PyTorch.
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
mod nanochat_checkpoint;
pub mod peft;
pub mod safetensors_file;
pub mod source;
pub mod tensor_file;
pub mod tokenizer;
mod torch_file;

pub use source::{ModelSource, convert_pairs};
