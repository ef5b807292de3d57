//! The host-side description of a kernel launch, which every operation's `launch` module returns.

use cuda_std::launch::Launch;
use cuda_std::shared::Layout;

/// A kernel with its arguments and launch configuration.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The kernel and its arguments.
    pub launch: Launch,
    /// Thread blocks along x, y and z.
    pub grid: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
}

/// Returns the dynamic shared memory of a block in bytes, given the function that lays it out.
pub fn shared_bytes<S>(layout: impl FnOnce(&mut Layout) -> S) -> usize {
    let mut measure = Layout::new();
    layout(&mut measure);
    measure.bytes()
}

/// Extents of a tensor with a TMA tensor map. The last dimension is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extents {
    /// A matrix: (rows, columns).
    Matrix([usize; 2]),
    /// A batch of matrices: (matrices, rows, columns). Boxes have rows of one matrix.
    Matrices([usize; 3]),
    /// A batch of contiguous matrices: (matrices, rows, columns), and the elements from the start of one to that of the
    /// next. Boxes have rows of one matrix.
    Batch([usize; 3], usize),
    /// Interleaved matrices: (rows, matrices, columns). Row r of the tensor holds row r of each matrix. Boxes have rows of
    /// one matrix.
    Interleaved([usize; 3]),
}
