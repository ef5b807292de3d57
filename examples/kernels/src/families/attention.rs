//! Causal self-attention.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, shared_bytes};
use crate::values::Values;
use anyhow::{Context, Result};
use cuda_std::hopper::Extents;
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::attention::launch::{AttentionSizes, Mask};
use gpu::attention_wgmma;
use gpu::launch::KernelLaunch;
use kernels_gpu::attention::{self, HS, Sizes};

pub const FAMILY: Family = Family {
    name: "attention",
    problem: "out (B, T, NH, HS) = softmax(Q Kᵀ / sqrt(HS) + causal mask) V, with Q, K and V in qkv.",
    kernels: &[
        Kernel::new(
            61,
            "attention_unfused",
            file!("attention/unfused.rs"),
            "Scores, softmax and output as three kernels, with a matrix of scores in memory.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                let scores = s.output::<f32>("scores", shape.b * shape.nh * shape.t * shape.t)?;
                s.launch_all(probabilities(scores, lse, qkv, shape));
                let launch = attention::unfused::attention_values(out, scores.reader(), qkv, sizes_of(shape));
                s.launch_all([tiles(launch, shape, 2, 0)]);
                Ok(())
            },
        ),
        Kernel::new(
            62,
            "attention_online",
            file!("attention/online.rs"),
            "One thread for each query, with an online softmax: no matrix of scores.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                s.launch_all([online(out, lse, qkv, shape)]);
                Ok(())
            },
        ),
        Kernel::new(
            63,
            "attention_shared",
            file!("attention/shared.rs"),
            "Keys and values in shared memory, for 128 queries at a time.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                let launch = attention::shared::attention_shared(out, lse, qkv, sizes_of(shape));
                s.launch_all([tiles(launch, shape, 128, shared_bytes(attention::shared::shared))]);
                Ok(())
            },
        ),
        Kernel::new(
            64,
            "attention_mma",
            file!("attention/mma.rs"),
            "Tensor cores for both matmuls; the probabilities stay in registers.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                let launch = attention::mma::attention_mma(out, lse, qkv, sizes_of(shape));
                s.launch_all([tiles(launch, shape, 64, shared_bytes(attention::mma::shared))]);
                Ok(())
            },
        ),
        Kernel::new(
            65,
            "attention_production",
            "gpu/src/attention/forward.rs",
            "A double buffer of keys and values with cp.async, and two strips of 16 queries for each warp.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                let launch = gpu::attention::launch::forward::<bf16>(out, lse, qkv, shape, Mask::default());
                s.launch_all([launch.context("no instance for this head size")?]);
                Ok(())
            },
        ),
        Kernel::new(
            66,
            "attention_wgmma_production",
            "gpu/src/attention_wgmma/forward.rs",
            "TMA, wgmma and warp specialization in a persistent kernel.",
            |s| {
                let Problem { out, lse, qkv, shape } = problem(s)?;
                let qkv = map(s, qkv, shape, 3)?;
                let launch =
                    attention_wgmma::launch::forward(out, None, lse, qkv, shape, Mask::default(), s.sm_count());
                s.launch_all([launch]);
                Ok(())
            },
        )
        .hopper(),
    ],
};

/// B, NH, T and HS of timed runs.
pub const TIMED_SHAPE: [usize; 4] = [8, 12, 1024, HS];

/// Returns the shape.
pub(super) fn shape(s: &Session) -> AttentionSizes {
    let [b, nh, t, hs] = s.pick([2, 2, 72, HS], TIMED_SHAPE);
    AttentionSizes { b, t, nh, kv: nh, hs }
}

pub(super) fn sizes_of(AttentionSizes { b, t, nh, .. }: AttentionSizes) -> Sizes {
    Sizes { batch: b as u32, sequence: t as u32, heads: nh as u32 }
}

/// Returns a launch with one block for each `rows` positions of each head.
pub(super) fn tiles(
    launch: Launch,
    AttentionSizes { b, t, nh, .. }: AttentionSizes,
    rows: usize,
    shared_bytes: usize,
) -> KernelLaunch {
    KernelLaunch { launch, grid: [t.div_ceil(rows) as u32, (b * nh) as u32, 1], shared_bytes }
}

/// Returns the launches that compute the probabilities (B, NH, T, T) and lse.
pub(super) fn probabilities(
    scores: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    qkv: Global<bf16>,
    shape: AttentionSizes,
) -> [KernelLaunch; 2] {
    let AttentionSizes { b, t, nh, .. } = shape;
    let launch = attention::unfused::attention_scores(scores, qkv, sizes_of(shape));
    let grid = [t.div_ceil(128) as u32, t as u32, (b * nh) as u32];
    let softmax = attention::unfused::attention_softmax(scores, lse, sizes_of(shape));
    [KernelLaunch { launch, grid, shared_bytes: 0 }, tiles(softmax, shape, 4, 0)]
}

/// Returns the launch of version 2.
pub(super) fn online(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<bf16>,
    shape: AttentionSizes,
) -> KernelLaunch {
    tiles(attention::online::attention_online(out, lse, qkv, sizes_of(shape)), shape, 128, 0)
}

/// Creates a tensor map over (B, T, `parts` NH HS) for the kernels of Hopper.
pub(super) fn map(
    s: &mut Session,
    tensor: Global<bf16>,
    AttentionSizes { b, t, nh, hs, .. }: AttentionSizes,
    parts: usize,
) -> Result<Global<cuda_std::hopper::TensorMap>> {
    s.tensor_map(tensor, Extents::Matrices([b, t, parts * nh * hs]), attention_wgmma::BOX)
}

/// The values of qkv, for references.
#[derive(Clone)]
pub(super) struct Heads {
    pub qkv: Values<bf16>,
    pub shape: AttentionSizes,
}

impl Heads {
    /// Returns the index of element `i` of row `t` of Q (`part` 0), K (1) or V (2) of head `h` of sequence `b`.
    fn index(&self, part: usize, [b, h]: [usize; 2], t: usize, i: usize) -> usize {
        (((b * self.shape.t + t) * 3 + part) * self.shape.nh + h) * HS + i
    }

    /// Returns an element.
    pub fn at(&self, part: usize, head: [usize; 2], t: usize, i: usize) -> f64 {
        self.qkv.at(self.index(part, head, t, i))
    }

    /// Returns the scaled scores of a query and the keys up to it, and their log-sum-exp.
    pub fn scores(&self, head: [usize; 2], query: usize) -> (Vec<f64>, f64) {
        let score = |key| (0..HS).map(|i| self.at(0, head, query, i) * self.at(1, head, key, i)).sum::<f64>() / 8.0;
        let scores: Vec<f64> = (0..=query).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        (scores, lse)
    }
}

struct Problem {
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<bf16>,
    shape: AttentionSizes,
}

fn problem(s: &mut Session) -> Result<Problem> {
    let shape = shape(s);
    let AttentionSizes { b, t, nh, .. } = shape;
    let (rows, n) = (b * nh * t, b * t * nh * HS);
    let qkv = s.noise::<bf16>("qkv", 3 * n, 2.0)?;
    let (out, lse) = (s.output::<bf16>("out", n)?, s.output::<f32>("lse", rows)?);
    s.work.bytes = 2 * 4 * n + 4 * rows;
    // Half of the pairs are masked. Each other pair takes a multiplication and an addition for each channel, in both products.
    s.work.flops = 4 * HS * b * nh * t * (t + 1) / 2;
    let heads = Heads { qkv: qkv.values, shape };
    let for_lse = heads.clone();
    s.expect("out", out, n, Tolerance::ROUNDED_TWICE, move |index| {
        let (row, h, i) = (index / (nh * HS), index / HS % nh, index % HS);
        let (head, query) = ([row / t, h], row % t);
        let (scores, lse) = heads.scores(head, query);
        scores.iter().enumerate().map(|(key, score)| (score - lse).exp() * heads.at(2, head, key, i)).sum()
    });
    s.expect("lse", lse, rows, Tolerance::F32, move |row| for_lse.scores([row / t / nh, row / t % nh], row % t).1);
    Ok(Problem { out, lse, qkv: qkv.view, shape })
}
