//! GPT-2: its shape, its parameters, and its forward and backward pass as a sequence of engine operations.

pub mod descriptor;
mod gpt2;
pub mod init;
pub mod params;
pub mod store;

pub use descriptor::Descriptor;
pub use gpt2::{CHUNK, Capacity, Gpt2, Recompute, Training};
pub use params::{Param, Params, Share, Unit};
pub use store::{Layers, Store, Undivided, Zero};
