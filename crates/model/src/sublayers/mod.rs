//! The sub-layers of a layer, one kind in each file: its activations, their memory, and its operations in the forward pass, in the
//! backward pass and in generation.
//!
//! A sub-layer is an implementation of [`SubLayer`](super::decoder::SubLayer). Its parameters are rows of the table in `params.rs`.
//! `memory_plan.rs` lists the sub-layers of each layer. What a sub-layer computes outside of the residual stream is its own business:
//! the passes know only its norm and its output.

pub(super) mod attention;
pub(super) mod experts;
pub(super) mod mlp;
