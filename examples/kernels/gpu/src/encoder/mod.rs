//! Token and position embedding: out (B, T, C) = wte (V, C) at the token + wpe (T, C) at the position; and its gradient.

pub mod backward_atomic;
pub mod backward_sorted;
pub mod naive;
pub mod packets;
