//! The classifier: softmax, cross-entropy loss and its gradient.
//!
//! losses (rows) f32 += -log softmax(logits)\[target\], and the gradient of the logits, (softmax(logits) - onehot(target)) dloss,
//! replaces the logits (rows, Vp). The softmax is over columns 0..V; the gradient of the padding V..Vp is 0.

pub mod fused;
pub mod online;
pub mod staged;
pub mod unfused;
