//! Layer normalization over C: out = (inp - mean) rstd weight + bias, with rstd = 1 / sqrt(variance + 1e-5).

pub mod naive;
pub mod one_pass;
pub mod packets;
pub mod registers;
pub mod warp;

const EPSILON: f32 = 1e-5;
