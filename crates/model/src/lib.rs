//! GPT-2: its shape, its parameters, and its forward and backward pass as a sequence of engine operations.

pub mod descriptor;
pub mod exchange;
pub mod fit;
mod gpt2;
pub mod guards;
pub mod init;
pub mod params;
pub mod schedule;
pub mod store;
mod tune;

pub use descriptor::Descriptor;
pub use exchange::{Exchange, Turns};
pub use gpt2::{CHUNK, Capacity, Gpt2, Recompute, Training};
pub use params::{Param, Params, Share, Unit};
pub use store::{Layers, Store, Undivided, Zero};
