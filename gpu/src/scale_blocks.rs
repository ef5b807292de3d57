//! Scaling of a matrix, or of the blocks on its diagonal: low-rank adapters.

use cuda_std::{Element, GlobalMut, kernel, thread};

/// Threads of a block.
const THREADS: usize = 256;

/// Returns the number of blocks for n elements.
pub const fn grid(n: usize) -> u32 {
    n.div_ceil(THREADS) as u32
}

/// The blocks on the diagonal of a matrix. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Blocks {
    /// Columns of the matrix.
    pub columns: u32,
    /// The row after the first block, and the one after the second. The third block has the rows that follow.
    pub ends: [u32; 2],
    /// Columns of each block.
    pub block_columns: u32,
    /// Bit i is set if block i is kept.
    pub kept: u32,
}

/// Multiplies the kept blocks of values (rows, columns), n elements, by `factor`, and sets the other elements to 0. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn scale_blocks<T: Element>(values: GlobalMut<T>, blocks: Blocks, factor: f32, n: u64) {
    let i = thread::index_1d();
    if i >= n as usize {
        return;
    }
    let (row, column) = (i as u32 / blocks.columns, i as u32 % blocks.columns);
    let block = (row >= blocks.ends[0]) as u32 + (row >= blocks.ends[1]) as u32;
    let is_kept = column / blocks.block_columns == block && blocks.kept >> block & 1 == 1;
    let scaled = if is_kept { factor * values.at(i).to_f32() } else { 0.0 };
    values.set(i, T::from_f32(scaled));
}
