//! The operations of the optimizers.

use crate::Result;
use crate::tensor::Tensor;
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Hyperparameters of one AdamW update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay, applied to the ranges that decay.
    pub weight_decay: f32,
    /// 1 for the first update.
    pub step: u32,
    /// Gradients are scaled by `clip / norm` if their norm exceeds `clip`.
    pub clip: f32,
    /// Seed of the stochastic rounding to bf16; each range adds its own.
    pub seed: u32,
}

/// Elements of the parameters that AdamW treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRange {
    /// Indices into the tensors of [`AdamWUpdate`].
    pub elements: Range<usize>,
    /// Applies weight decay.
    pub decayed: bool,
    /// Added to [`AdamW::seed`]. Elements at equal distance from their ranges' starts draw equal random numbers if these agree.
    pub seed: u32,
}

/// The master weights of bf16 parameters. An update changes the master weights, and the parameters are copies of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Master {
    /// There are none: the parameters are the weights. If they are bf16, updates are rounded stochastically.
    None,
    /// (n) f32. Parameters are rounded from them stochastically.
    F32(Tensor),
    /// (n) u16: the lower halves of f32 master weights. The parameters are the upper halves ([`gpu::remainder`]).
    Remainder(Tensor),
}

impl Master {
    /// Returns the tensor besides the parameters.
    pub const fn tensor(self) -> Option<Tensor> {
        match self {
            Self::None => None,
            Self::F32(tensor) | Self::Remainder(tensor) => Some(tensor),
        }
    }

    /// Replaces the tensor by `f` of it.
    #[must_use]
    pub fn map(self, f: impl FnOnce(Tensor) -> Tensor) -> Self {
        match self {
            Self::None => Self::None,
            Self::F32(tensor) => Self::F32(f(tensor)),
            Self::Remainder(tensor) => Self::Remainder(f(tensor)),
        }
    }
}

/// Applies one AdamW update to ranges of the parameters. Nothing changes unless both values of `stats` are finite.
#[derive(Clone, Copy, Debug)]
pub struct AdamWUpdate<'a> {
    /// (n) float
    pub params: Tensor,
    /// (n) float
    pub grads: Tensor,
    /// (n) f32 or float, first moment. bf16 is rounded stochastically.
    pub m: Tensor,
    /// (n) second moment, of the type of `m`
    pub v: Tensor,
    /// Master weights; none if `params` are f32.
    pub master: Master,
    /// Ascending ranges that do not overlap and begin at multiples of 8 elements.
    pub ranges: &'a [UpdateRange],
    /// (2) f32: sum of the losses, and norm of all gradients.
    pub stats: Tensor,
    /// Factor of the gradients and of their norm, applied before clipping.
    pub grad_factor: f32,
    /// Hyperparameters.
    pub settings: AdamW,
}

impl AdamWUpdate<'_> {
    /// Checks that the ranges ascend, do not overlap, lie in the tensors and are aligned as AdamW's kernel requires.
    pub(crate) fn check_ranges(&self) -> Result<()> {
        let mut end = 0;
        for Range { start, end: next } in self.ranges.iter().map(|range| range.elements.clone()) {
            ensure!(
                end <= start && start <= next && next <= self.params.len,
                "adamw: range {start}..{next} after {end}, of {} parameters: ranges must ascend and lie in them",
                self.params.len
            );
            let alignment = gpu::adamw::Range::ALIGNMENT;
            ensure!(
                start.is_multiple_of(alignment),
                "adamw: range {start}..{next} does not begin at a multiple of {alignment} elements"
            );
            end = next;
        }
        Ok(())
    }
}

/// Updates Muon's momentum and computes the update before its orthogonalization (Jordan et al., 2024,
/// <https://kellerjordan.github.io/posts/muon/>): `m = momentum · m + (1 - momentum) · grad`, then
/// `update = momentum · m + (1 - momentum) · grad` (Nesterov). Nothing changes unless both values of `stats` are finite.
#[derive(Clone, Copy, Debug)]
pub struct MuonMomentum {
    /// (n) float
    pub update: Tensor,
    /// (n) f32 or float, momentum. bf16 is rounded stochastically.
    pub m: Tensor,
    /// (n) float
    pub grads: Tensor,
    /// (2) f32: sum of the losses, and norm of all gradients.
    pub stats: Tensor,
    /// Decay of the momentum.
    pub momentum: f32,
    /// Factor of the gradients and of their norm, applied before clipping.
    pub grad_factor: f32,
    /// Gradients are scaled by `clip / norm` if their norm exceeds `clip`.
    pub clip: f32,
    /// Seed of the stochastic rounding to bf16.
    pub seed: u32,
}

/// The coefficients of the Newton-Schulz iterations in [`Orthogonalize`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MuonCoefficients {
    /// The optimal polynomial of each step (Amsel et al., 2025, arXiv:2505.16932)
    #[default]
    PolarExpress,
    /// The same polynomial in each step (Jordan et al., 2024)
    Classic,
}

impl MuonCoefficients {
    /// Number of steps. It is odd, see [`Orthogonalize`].
    pub const STEPS: usize = 5;

    /// Returns a, b and c of each step, which maps a singular value x to a x + b x³ + c x⁵.
    pub const fn steps(self) -> [[f32; 3]; Self::STEPS] {
        match self {
            Self::PolarExpress => [
                [8.156_554, -22.483_293, 15.878_77],
                [4.042_93, -2.808_917_5, 0.500_017_8],
                [3.891_667_8, -2.772_484, 0.506_064_82],
                [3.285_753_7, -2.368_129_5, 0.464_490_23],
                [2.346_541_3, -1.709_782_8, 0.423_235_5],
            ],
            Self::Classic => [[3.4445, -4.775, 2.0315]; Self::STEPS],
        }
    }

    /// Returns the factor of the Frobenius norm and the addend of the first scaling: x / (norm · factor + epsilon).
    pub const fn scaling(self) -> (f32, f32) {
        match self {
            Self::PolarExpress => (1.01, 1e-6),
            Self::Classic => (1.0, 1e-7),
        }
    }
}

/// Additions to Muon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub struct MuonAdditions {
    /// Scales each row to the root mean square of the rows' norms before the iterations (MuonEq, 2026, arXiv:2603.28254).
    pub equilibrate: bool,
    /// Scales the result to the Frobenius norm of a semi-orthogonal matrix, √min(rows, cols) (Muon+, 2026, arXiv:2602.21545).
    pub renormalize: bool,
    /// Scales rows or columns of the result by a running mean of their squares, see [`MuonVariance`].
    pub variance: bool,
    /// Decays a weight only if the update has its sign, so that both move it to 0 (Chen et al., 2025, arXiv:2510.12402).
    pub cautious_decay: bool,
}

/// Smallest norm by which a row or a result is divided.
pub const SMALLEST_NORM: f32 = 1e-6;

/// Computes an approximation of the nearest semi-orthogonal matrix to each of several matrices of one shape: scales it by its
/// Frobenius norm, then runs five Newton-Schulz steps, each `A = X·Xᵀ`, `B = b·A + c·A·A`, `X = a·X + B·X`. Matrices with more
/// rows than columns are multiplied from the right, so that A is square of the shorter side.
///
/// The matrices are processed as a batch. The bits of a result do not depend on the other matrices of the batch.
///
/// The scaling writes `next`. A step reads one of `next` and `out` and writes the other, so an odd number of steps ends in `out`.
/// With [`renormalize`](MuonAdditions::renormalize), the results are in `next`.
/// In these and in A and B, matrix i begins at element i · [`stride`](Self::stride).
#[derive(Clone, Copy, Debug)]
pub struct Orthogonalize<'a> {
    /// The matrices, each (rows, cols) float; only read
    pub matrices: &'a [Tensor],
    /// (matrices, rows, cols) float, the results
    pub out: Tensor,
    /// (matrices, rows, cols) float; overwritten
    pub next: Tensor,
    /// (matrices, s, s) float, A of a step, where s is the smaller of rows and cols; overwritten
    pub gram: Tensor,
    /// (matrices, s, s) float, B of a step; overwritten
    pub polynomial: Tensor,
    /// (matrices, [`partials`](Self::partials)) f32, sums of squares of parts of the matrices; overwritten
    pub partials: Tensor,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Coefficients of the steps.
    pub coefficients: MuonCoefficients,
    /// Additions before and after the steps.
    pub additions: MuonAdditions,
}

impl Orthogonalize<'_> {
    /// Returns the sums of squares of a matrix with `rows` rows that `partials` has room for.
    pub fn partials(rows: usize) -> usize {
        rows.max(gpu::muon::PARTIALS as usize)
    }

    /// Returns the shorter side of a matrix.
    pub fn side(self) -> usize {
        self.rows.min(self.cols)
    }

    /// Returns the elements from the start of a matrix of `elements` elements to that of the next in a batch. All matrices of
    /// a batch have the alignment of the first.
    pub const fn stride(elements: usize) -> usize {
        elements.next_multiple_of(cublaslt::BATCH_ALIGNMENT)
    }

    /// Returns the place of result `i`.
    pub fn result(self, i: usize) -> Tensor {
        let n = self.rows * self.cols;
        let results = if self.additions.renormalize { self.next } else { self.out };
        results.slice(i * Self::stride(n), n)
    }

    /// Returns the floating-point operations for a matrix of this shape if all elements of A and B are computed.
    pub const fn flops(rows: usize, cols: usize) -> usize {
        let (short, long) = if rows < cols { (rows, cols) } else { (cols, rows) };
        // Three GEMMs per step, for a matrix X with the sides s <= l: X Xᵀ takes 2 s² l FLOPs, its square 2 s³, B X again 2 s² l.
        MuonCoefficients::STEPS * 2 * short * short * (2 * long + short)
    }
}

/// Scales the rows of an orthogonalized matrix, or its columns if there are more of them, by the inverse root of a running mean of their
/// squares, and then the matrix to the Frobenius norm that it had (NorMuon, Li et al., 2025, arXiv:2510.05491): with the mean v of the
/// squares of a row or column, `second = beta2 · second + (1 - beta2) · v`, and the row or column is divided by
/// `√max(second, 1e-10)`. Nothing changes unless both values of `stats` are finite.
#[derive(Clone, Copy, Debug)]
pub struct MuonVariance {
    /// (rows, cols) float, an orthogonalized matrix; overwritten
    pub update: Tensor,
    /// (the larger of rows and cols) f32 or float, the running means. bf16 is rounded stochastically.
    pub second: Tensor,
    /// (the larger of rows and cols) f32, sums of squares; overwritten
    pub sums: Tensor,
    /// (2) f32: sum of the losses, and norm of all gradients.
    pub stats: Tensor,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Decay of the running means.
    pub beta2: f32,
    /// The factor of [`MuonMomentum`]: both skip the same updates.
    pub grad_factor: f32,
    /// Seed of the stochastic rounding to bf16.
    pub seed: u32,
}

/// Lower bound of the running means and of the norms by which [`MuonVariance`] divides.
pub const SMALLEST_VARIANCE: f32 = 1e-10;

/// Applies Muon's update: `param -= learning_rate · (scale · update + weight_decay · param)`. With `cautious_decay`, only weights with
/// `update · param >= 0` decay. Nothing changes unless both values of `stats` are finite.
#[derive(Clone, Copy, Debug)]
pub struct MuonApply {
    /// (n) float
    pub params: Tensor,
    /// Master weights; none if `params` are f32.
    pub master: Master,
    /// (n) float, orthogonalized
    pub update: Tensor,
    /// (2) f32: sum of the losses, and norm of all gradients.
    pub stats: Tensor,
    /// The factor of [`MuonMomentum`]: both skip the same updates.
    pub grad_factor: f32,
    /// Learning rate.
    pub learning_rate: f32,
    /// Factor of the update.
    pub scale: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Whether only weights with the sign of their update decay.
    pub cautious_decay: bool,
    /// Seed of the stochastic rounding to bf16.
    pub seed: u32,
}
