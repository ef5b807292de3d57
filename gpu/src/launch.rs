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
