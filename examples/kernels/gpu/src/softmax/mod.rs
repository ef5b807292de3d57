//! Softmax of rows: out = e^(inp - max) / sum of e^(inp - max).

pub mod block;
pub mod naive;
pub mod online;
pub mod packets;
pub mod registers;
pub mod warp;
