//! Mixtures of experts (Shazeer et al., 2017, arXiv:1701.06538): a router chooses k of E experts for each token, and the token's output is
//! the sum of theirs, weighted.
//!
//! Between [`Dispatch`] and [`Combine`], rows are in *expert order*: the rows of an expert are consecutive, in the order of their tokens.
//! Padding extends each expert's rows to a multiple of [`GROUP_ROWS`], so that each tile of a GEMM belongs to one expert. In training, an
//! expert without tokens has [`GROUP_ROWS`] rows of padding, because a GEMM sums over the rows of each expert. Tensors have room for P rows,
//! [`Router::rows`].
//!
//! If ranks share the experts of a layer, each has the rows of its own experts in expert order, and chooses experts as all others do.

use super::Quantize;
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// The factor of [`RouteBackward::dbias`]. The gradients are so small that they do not change the norm of all gradients.
pub use gpu::experts::BIAS_GRADIENT;
/// In expert order, the number of rows of each expert is padded to a multiple of this one.
pub use gpu::experts::GROUP_BLOCK as GROUP_ROWS;

/// How a router scores experts by its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterScores {
    /// The softmax over all experts
    Softmax,
    /// The sigmoid of each logit
    Sigmoid,
}

/// Consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertRange {
    /// Index of the first one.
    pub first: usize,
    /// Their number.
    pub count: usize,
}

/// How a router chooses experts.
///
/// The chosen experts are those with the k largest logits, the largest first. With a bias, they are those with the k largest sums of score
/// and bias. If these numbers are equal, the expert with the lower index comes first. A NaN is smaller than any number. The weights of the
/// chosen experts are their scores, without the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Router {
    /// Number of experts (E).
    pub count: usize,
    /// Number of experts of a token (k).
    pub active: usize,
    /// The scores of experts.
    pub scores: RouterScores,
    /// Whether the weights of a token are divided by their sum.
    pub normalized: bool,
    /// The experts that have rows in expert order.
    pub local: ExpertRange,
}

impl Router {
    /// Returns the largest number of rows in expert order, padding included, that `tokens` tokens can have (P).
    pub const fn rows(self, tokens: usize) -> usize {
        self.layout(tokens).rows
    }

    /// Returns the length of [`Groups::layout`] for `tokens` tokens.
    pub const fn layout_len(self, tokens: usize) -> usize {
        self.layout(tokens).words()
    }

    /// Returns the layout for `tokens` tokens, of which each may choose all local experts, and at most k.
    pub(crate) const fn layout(self, tokens: usize) -> gpu::experts::Groups {
        let ExpertRange { count, .. } = self.local;
        gpu::experts::Groups::new(count, tokens * if self.active < count { self.active } else { count })
    }

    /// Returns the groups of a layout.
    pub const fn groups(self, layout: Tensor) -> Groups {
        Groups { layout, count: self.local.count }
    }
}

/// The rows of each local expert, for linear layers with one matrix for each of them.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// (2 G + 1 + P / [`GROUP_ROWS`]) i32, see [`Route::groups`]
    pub layout: Tensor,
    /// Number of local experts (G).
    pub count: usize,
}

/// Chooses the experts of each token, and sorts the choices by expert.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// (rows, E) float
    pub logits: Tensor,
    /// (E) float: added to the scores for the choice
    pub bias: Option<Tensor>,
    /// (rows, k) i32: the chosen experts
    pub experts: Tensor,
    /// (rows, k) f32: their weights
    pub weights: Tensor,
    /// (rows, k) i32: the row of each choice in expert order, or -1 if its expert is not local
    pub positions: Tensor,
    /// (P) i32: token · k + choice of each row in expert order, or -1 in padding and after the last row
    pub sources: Tensor,
    /// (2 G + 1 + P / [`GROUP_ROWS`]) i32 of the G local experts: the first row of each and the end of the last one's rows, padding
    /// included; the number of rows of each, without padding; the expert of each block of [`GROUP_ROWS`] rows, counted from the first local
    /// one, and 0 after the last one
    pub groups: Tensor,
    /// (E) i32: the number of tokens that have chosen each expert
    pub loads: Tensor,
    /// How experts are chosen.
    pub router: Router,
    /// Whether gradients of weights follow: experts without a token have rows of padding.
    pub trains: bool,
}

/// Copies the rows of tokens to expert order: `out[row] = weight · inp[token]` for the choice of each row. Rows of padding become 0. Rows after
/// the last expert's are undefined.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch {
    /// (P, C) float
    pub out: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (P) i32, see [`Route`]
    pub sources: Tensor,
    /// The groups.
    pub groups: Groups,
    /// (rows, k) f32; all ones if absent
    pub weights: Option<Tensor>,
    /// Channels.
    pub c: usize,
    /// Number of experts of a token (k).
    pub active: usize,
    /// Set if linear layers read `out` in FP8: its quantization. Then nothing reads `out`, and an engine may leave it unwritten.
    pub fp8: Option<Quantize>,
}

/// Sums the rows of each token in expert order: `out[token] = residual[token] + Σ weight · inp[position]` over its choices that have a row,
/// in their order.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// (rows, C) float
    pub out: Tensor,
    /// (rows, C) float. May be `out`.
    pub residual: Option<Tensor>,
    /// (P, C) float
    pub inp: Tensor,
    /// (rows, k) f32; all ones if absent
    pub weights: Option<Tensor>,
    /// (rows, k) i32, see [`Route`]
    pub positions: Tensor,
    /// Channels.
    pub c: usize,
    /// Number of experts of a token (k).
    pub active: usize,
}

/// Computes the gradient of each choice's weight, times that weight.
///
/// An expert's activation is up · f(gate). It is linear in up, so this is Σ dup · up over the channels of the choice's row. It is 0 for a
/// choice without a row.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceGradients {
    /// (rows, k) f32
    pub out: Tensor,
    /// (rows, k) i32, see [`Route`]
    pub positions: Tensor,
    /// (P, 2 F) float: up, then gate, of each row in expert order
    pub preactivation: Tensor,
    /// (P, 2 F) float: the gradient of `preactivation`, which includes the weights
    pub dpreactivation: Tensor,
    /// Channels of an expert (F).
    pub channels: usize,
}

/// Computes the gradient of the logits of a [`Route`], through the weights of the chosen experts and from the auxiliary losses.
///
/// The load-balancing loss is E Σ f P over the experts (Fedus et al., 2021, arXiv:2101.03961), where f is the load of an expert per token,
/// without a gradient, and P its mean score. The z-loss is the mean of logsumexp(logits)² (Zoph et al., 2022, arXiv:2202.08906).
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward {
    /// (rows, E) float
    pub dlogits: Tensor,
    /// (E) float: to each element, [`BIAS_GRADIENT`] · (E · load - rows · k) is added, where the load of an expert is the number of its rows. The
    /// bias has no gradient; descent along the sign of this one evens out the loads (Wang et al., 2024, arXiv:2408.15664).
    pub dbias: Option<Tensor>,
    /// (rows, E) float
    pub logits: Tensor,
    /// (rows, k) i32, see [`Route`]
    pub experts: Tensor,
    /// (rows, k) f32
    pub weights: Tensor,
    /// (rows, k) f32, see [`ChoiceGradients`]
    pub gradients: Tensor,
    /// (E) i32, see [`Route`]
    pub loads: Tensor,
    /// Number of tokens that `loads` counts.
    pub tokens: usize,
    /// How experts are chosen.
    pub router: Router,
    /// Coefficient of the load-balancing loss, times the gradient of a token's loss.
    pub aux_loss: f32,
    /// Coefficient of the z-loss, times the gradient of a token's loss.
    pub z_loss: f32,
}
