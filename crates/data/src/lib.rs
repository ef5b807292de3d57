//! Text to tokens, tokens to files, files to batches.

pub mod hellaswag;
pub mod loader;
pub mod multiple_choice;
pub mod prefetch;
pub mod text;
pub mod tinyshakespeare;
pub mod tokenizer;
pub mod tokens;

pub use loader::{Geometry, Loader};
pub use multiple_choice::MultipleChoice;
pub use prefetch::Prefetch;
pub use tokens::Tokens;
