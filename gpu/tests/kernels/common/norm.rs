//! Shapes of LayerNorm and RMSNorm.

use super::Tolerance;

/// (rows, C). Covers one row, the channels of GPT-2, Llama and Qwen models, multiples of 80 that leave lanes idle, every
/// `Shape` of both types, fewer rows than a block processes at a time, and several iterations per block.
const SHAPES: [(usize, usize); 15] = [
    (45, 1280),
    (1, 8),
    (37, 64),
    (63, 80),
    (13, 240),
    (9, 384),
    (17, 768),
    (17, 896),
    (10, 1024),
    (20, 1600),
    (9, 2048),
    (3, 3072),
    (2, 4096),
    (1, 4200),
    (2, 8192),
];

/// Returns `SHAPES`, and one row with the maximum number of channels.
pub fn shapes<T: Tolerance>() -> impl Iterator<Item = (usize, usize)> {
    SHAPES.into_iter().chain([(1, 64 * 32 * T::PACKET)])
}
