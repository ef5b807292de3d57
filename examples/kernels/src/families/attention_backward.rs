//! The gradient of causal self-attention.

use super::attention::{Heads, map, online, probabilities, shape, sizes_of, tiles};
use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance};
use crate::values::Values;
use anyhow::{Context, Result};
use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::attention::launch::{AttentionSizes, Mask};
use gpu::attention_wgmma::launch::BackwardOperands;
use kernels_gpu::attention::HS;
use kernels_gpu::attention_backward;
use std::sync::OnceLock;

pub const FAMILY: Family = Family {
    name: "attention_backward",
    problem: "dqkv (B, T, 3, NH, HS) from dout (B, T, NH, HS), qkv, and out and lse of the forward pass.",
    kernels: &[
        Kernel::new(
            67,
            "attention_backward_unfused",
            file!("attention_backward/unfused.rs"),
            "Matrices of probabilities and of gradients of scores in memory.",
            unfused,
        ),
        Kernel::new(
            68,
            "attention_backward_atomic",
            file!("attention_backward/atomic.rs"),
            "Probabilities recomputed from lse; atomic additions to the gradients of keys and values.",
            |s| {
                let Problem { dqkv, dout, qkv, out, lse, shape } = problem::<f32>(s)?;
                let launch =
                    attention_backward::atomic::attention_backward_atomic(dqkv, dout, qkv, out, lse, sizes_of(shape));
                s.launch_all([tiles(launch, shape, 128, 0)]);
                Ok(())
            },
        ),
        Kernel::new(
            69,
            "attention_backward_two_kernels",
            file!("attention_backward/two_kernels.rs"),
            "One kernel for queries and one for keys: all sums in registers, no atomics.",
            |s| {
                let Problem { dqkv, dout, qkv, out, lse, shape } = problem::<bf16>(s)?;
                let (d, sizes) = (scratch(s, shape)?, sizes_of(shape));
                let of_queries =
                    attention_backward::two_kernels::attention_backward_queries(dqkv, d, dout, qkv, out, lse, sizes);
                let of_keys =
                    attention_backward::two_kernels::attention_backward_keys(dqkv, d.reader(), dout, qkv, lse, sizes);
                s.launch_all([of_queries, of_keys].map(|launch| tiles(launch, shape, 128, 0)));
                Ok(())
            },
        ),
        Kernel::new(
            70,
            "attention_backward_production",
            "gpu/src/attention/dkdv.rs",
            "Tiles in shared memory with cp.async, and tensor cores for all matmuls.",
            |s| {
                let Problem { dqkv, dout, qkv, out, lse, shape } = problem::<bf16>(s)?;
                let d = scratch(s, shape)?;
                let launches =
                    gpu::attention::launch::backward::<bf16>(dqkv, d, dout, qkv, out, lse, (shape, Mask::default()));
                s.launch_all(launches.context("no instance for this head size")?);
                Ok(())
            },
        ),
        Kernel::new(
            71,
            "attention_backward_wgmma_production",
            "gpu/src/attention_wgmma/dkdv.rs",
            "TMA, wgmma and warp specialization in persistent kernels.",
            |s| {
                let Problem { dqkv, dout, qkv, out, lse, shape } = problem::<bf16>(s)?;
                let (d, qkv_map, dout_map) = (scratch(s, shape)?, map(s, qkv, shape, 3)?, map(s, dout, shape, 1)?);
                let operands = BackwardOperands { dqkv, d, dout, out, lse, qkv_map, dout_map };
                s.launch_all(gpu::attention_wgmma::launch::backward(
                    operands,
                    None,
                    shape,
                    Mask::default(),
                    s.sm_count(),
                ));
                Ok(())
            },
        )
        .hopper(),
    ],
};

struct Problem<T> {
    dqkv: GlobalMut<T>,
    dout: Global<bf16>,
    qkv: Global<bf16>,
    out: Global<bf16>,
    lse: Global<f32>,
    shape: AttentionSizes,
}

/// Returns scratch memory for D (B, NH, T).
fn scratch(s: &mut Session, AttentionSizes { b, t, nh, .. }: AttentionSizes) -> Result<GlobalMut<f32>> {
    s.output("d", b * nh * t)
}

fn unfused(s: &mut Session) -> Result<()> {
    use attention_backward::unfused::{attention_backward_inputs, attention_backward_scores};
    let Problem { dqkv, dout, qkv, shape, .. } = problem::<bf16>(s)?;
    let AttentionSizes { b, t, nh, .. } = shape;
    let matrix = b * nh * t * t;
    let (p, ds) = (s.output::<f32>("probabilities", matrix)?, s.output::<f32>("dscores", matrix)?);
    let unused_lse = s.output("lse of probabilities", b * nh * t)?;
    for launch in probabilities(p, unused_lse, qkv, shape) {
        s.prepare(launch);
    }
    let (p, sizes) = (p.reader(), sizes_of(shape));
    let scores = attention_backward_scores(ds, p, dout, qkv, sizes);
    let inputs = attention_backward_inputs(dqkv, ds.reader(), p, dout, qkv, sizes);
    s.launch_all([tiles(scores, shape, 4, 0), tiles(inputs, shape, 2, 0)]);
    Ok(())
}

/// The reference: the gradients of qkv.
struct Reference {
    heads: Heads,
    dout: Values<bf16>,
    /// For each head, lse and D of each query, computed when the head is needed.
    statistics: Vec<OnceLock<Vec<[f64; 2]>>>,
}

impl Reference {
    /// Returns an element of dout.
    fn dout(&self, [b, h]: [usize; 2], t: usize, i: usize) -> f64 {
        let AttentionSizes { t: length, nh, .. } = self.heads.shape;
        self.dout.at(((b * length + t) * nh + h) * HS + i)
    }

    /// Returns dout of a query times the value of a key.
    fn dp(&self, head: [usize; 2], query: usize, key: usize) -> f64 {
        (0..HS).map(|i| self.dout(head, query, i) * self.heads.at(2, head, key, i)).sum()
    }

    /// Returns lse and D of each query of a head.
    fn statistics(&self, head @ [b, h]: [usize; 2]) -> &[[f64; 2]] {
        let AttentionSizes { t, nh, .. } = self.heads.shape;
        let of_query = |query| {
            let (scores, lse) = self.heads.scores(head, query);
            let d = scores.iter().enumerate().map(|(key, s)| (s - lse).exp() * self.dp(head, query, key)).sum();
            [lse, d]
        };
        self.statistics[b * nh + h].get_or_init(|| (0..t).map(of_query).collect())
    }

    /// Returns the probability of a pair, and the gradient of its score before the scale.
    fn pair(&self, head: [usize; 2], query: usize, key: usize) -> [f64; 2] {
        let [lse, d] = self.statistics(head)[query];
        let product: f64 = (0..HS).map(|i| self.heads.at(0, head, query, i) * self.heads.at(1, head, key, i)).sum();
        let p = (product / 8.0 - lse).exp();
        [p, p * (self.dp(head, query, key) - d) / 8.0]
    }

    /// Returns element `index` of dqkv.
    fn gradient(&self, index: usize) -> f64 {
        let AttentionSizes { t: length, nh, .. } = self.heads.shape;
        let (i, h, part, row) = (index % HS, index / HS % nh, index / (HS * nh) % 3, index / (3 * HS * nh));
        let (head, t) = ([row / length, h], row % length);
        match part {
            0 => (0..=t).map(|key| self.pair(head, t, key)[1] * self.heads.at(1, head, key, i)).sum(),
            1 => (t..length).map(|query| self.pair(head, query, t)[1] * self.heads.at(0, head, query, i)).sum(),
            _ => (t..length).map(|query| self.pair(head, query, t)[0] * self.dout(head, query, i)).sum(),
        }
    }
}

/// `T` is the type of the gradient. The forward pass runs as a preparation.
fn problem<T: Element + Pod>(s: &mut Session) -> Result<Problem<T>> {
    let shape = shape(s);
    let AttentionSizes { b, t, nh, .. } = shape;
    let (rows, n) = (b * nh * t, b * t * nh * HS);
    let (qkv, dout) = (s.noise::<bf16>("qkv", 3 * n, 2.0)?, s.noise::<bf16>("dout", n, 1.0)?);
    let (out, lse) = (s.output::<bf16>("out", n)?, s.output::<f32>("lse", rows)?);
    s.prepare(online(out, lse, qkv.view, shape));
    // Atomic additions need zeros. The other kernels overwrite them.
    let dqkv = s.zeroed::<T>("dqkv", 3 * n)?;
    s.work.bytes = 2 * (3 * n + 2 * n) + 4 * rows + size_of::<T>() * 3 * n;
    // Five products of T x T / 2 pairs: Q Kᵀ, dout Vᵀ, and those for dQ, dK and dV.
    s.work.flops = 10 * HS * b * nh * t * (t + 1) / 2;
    let statistics = (0..b * nh).map(|_| OnceLock::new()).collect();
    let reference = Reference { heads: Heads { qkv: qkv.values, shape }, dout: dout.values, statistics };
    s.expect_samples("dqkv", dqkv, 3 * n, Tolerance::ROUNDED_TWICE, 48, move |i| reference.gradient(i));
    Ok(Problem { dqkv, dout: dout.view, qkv: qkv.view, out: out.reader(), lse: lse.reader(), shape })
}
