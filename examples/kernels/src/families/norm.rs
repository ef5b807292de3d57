//! The norm of an array.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks, shared_bytes};
use anyhow::Result;
use cuda_std::{Global, GlobalMut, bf16};
use kernels_gpu::norm::{self, norm_root};

pub const FAMILY: Family = Family {
    name: "norm",
    problem: "norm (1) = the square root of the sum of the squares of n values.",
    kernels: &[
        Kernel::new(
            18,
            "norm_one_block",
            file!("norm/one_block.rs"),
            "One block: partial sums in registers, then a tree in shared memory.",
            |s| {
                let Problem { norm, values, n } = problem(s)?;
                let launch = norm::one_block::norm_one_block(norm, values, n as u64);
                s.launch(launch, [1, 1, 1], shared_bytes(norm::one_block::shared));
                Ok(())
            },
        ),
        Kernel::new(
            19,
            "norm_blocks",
            file!("norm/blocks.rs"),
            "Many blocks, each of which adds its sum atomically.",
            |s| {
                let (Problem { norm, values, n }, sum) = with_sum(s)?;
                let launch = norm::blocks::norm_blocks(sum, values, n as u64);
                s.launch(launch, blocks(n, 512), shared_bytes(norm::blocks::shared));
                s.launch(norm_root(norm, sum.reader()), [1, 1, 1], 0);
                Ok(())
            },
        ),
        Kernel::new(
            20,
            "norm_shuffles",
            file!("norm/shuffles.rs"),
            "Warp shuffles replace all but one barrier of the tree.",
            |s| {
                let (Problem { norm, values, n }, sum) = with_sum(s)?;
                let launch = norm::shuffles::norm_shuffles(sum, values, n as u64);
                s.launch(launch, blocks(n, 512), shared_bytes(norm::shuffles::shared));
                s.launch(norm_root(norm, sum.reader()), [1, 1, 1], 0);
                Ok(())
            },
        ),
        Kernel::new(
            21,
            "norm_stride",
            file!("norm/stride.rs"),
            "A grid-stride loop over packets: one reduction for each block of a grid that fills the GPU.",
            |s| {
                let (Problem { norm, values, n }, sum) = with_sum(s)?;
                let grid = [4 * s.sm_count() as u32, 1, 1];
                s.launch(norm::stride::norm_stride(sum, values, n as u64), grid, shared_bytes(norm::stride::shared));
                s.launch(norm_root(norm, sum.reader()), [1, 1, 1], 0);
                Ok(())
            },
        ),
        Kernel::new(
            22,
            "norm_production",
            "gpu/src/global_norm.rs",
            "A second kernel adds the sums of the blocks in a fixed order: the same bits in every run.",
            |s| {
                use gpu::global_norm::{norm, shared, squared_sum, squared_sum_grid};
                let Problem { norm: out, values, n } = problem(s)?;
                let grid = squared_sum_grid::<bf16>(n, s.sm_count());
                let partials = s.output("partials", grid as usize)?;
                let shared = shared_bytes(shared);
                s.launch(squared_sum::<bf16>(partials, values, n as u64), [grid, 1, 1], shared);
                s.launch(norm(out, partials.reader(), u64::from(grid)), [1, 1, 1], shared);
                Ok(())
            },
        ),
    ],
};

struct Problem {
    norm: GlobalMut<f32>,
    values: Global<bf16>,
    n: usize,
}

fn problem(s: &mut Session) -> Result<Problem> {
    let n = s.pick(20_000, 64 << 20);
    let (values, norm) = (s.noise::<bf16>("values", n, 1.0)?, s.output("norm", 1)?);
    let x = values.values;
    s.work.bytes = 2 * n;
    s.expect("norm", norm, 1, Tolerance::F32, move |_| (0..n).map(|i| x.at(i) * x.at(i)).sum::<f64>().sqrt());
    Ok(Problem { norm, values: values.view, n })
}

/// Returns the problem, and a sum of 0 for atomic additions.
fn with_sum(s: &mut Session) -> Result<(Problem, GlobalMut<f32>)> {
    Ok((problem(s)?, s.zeroed("sum", 1)?))
}
