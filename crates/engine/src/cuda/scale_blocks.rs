use super::{Cuda, Float};
use crate::Result;
use crate::ops::ScaleBlocks;
use gpu::scale_blocks::{Blocks, grid, scale_blocks as kernel};

pub(super) fn scale_blocks<T: Float>(cuda: &mut Cuda<T>, op: ScaleBlocks) -> Result<()> {
    let ScaleBlocks { values, columns, factor, ends, block_columns, kept } = op;
    let n = ends[2] * columns;
    let values = cuda.output("values", values, n)?;
    let blocks = Blocks {
        columns: columns as u32,
        ends: [ends[0] as u32, ends[1] as u32],
        block_columns: block_columns as u32,
        kept: kept.iter().rev().fold(0, |bits, &kept| bits << 1 | u32::from(kept)),
    };
    cuda.launch(kernel::<T>(values, blocks, factor, n as u64), [grid(n), 1, 1], 0)
}
