//! Text generation with a KV cache: one new token for each of B sequences.
//!
//! * [`matvec`]: linear layers of up to 16 rows in f32 and 8 in bf16, with a norm before and an activation or a residual after.
//! * [`matvec_mma`]: the same on tensor cores, for more rows in bf16, and for weights in FP8.
//! * [`attention`]: rotary positions, the append to the cache, and attention over it; copies of a prompt's keys and values.
//! * [`embed`]: embeddings at any position.
//! * [`sample`]: the choice of the next token.
//! * [`step`]: all of these except the last in one launch.
//!
//! All kernels are memory-bound. What differs from token to token is in `slots` (B, 8) i32, so that a CUDA graph of the kernels
//! never changes. Its words are listed here; floats are stored as their bits.

pub mod attention;
pub mod embed;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod matvec;
pub mod matvec_mma;
pub mod sample;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub mod step;

/// Words of a slot.
pub const WORDS: usize = 8;
/// The newest token.
pub const TOKEN: usize = 0;
/// Position of the newest token.
pub const POSITION: usize = 1;
/// Seed of the random numbers.
pub const SEED: usize = 2;
/// Repetition penalty, f32.
pub const PENALTY: usize = 3;
/// Temperature, f32.
pub const TEMPERATURE: usize = 4;
/// Number of most likely tokens to keep.
pub const TOP_K: usize = 5;
/// Fraction of the probability to keep, f32.
pub const TOP_P: usize = 6;
/// Least probability relative to the most likely token's, f32.
pub const MIN_P: usize = 7;
