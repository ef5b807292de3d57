//! Exercise: how many blocks an SM runs.
//!
//! Compute the number of blocks of a launch that an SM of compute capability 9.0 runs at the same time. The chapter "PTX and SASS" lists
//! the limits and works out three kernels by hand.

/// Warps that fit on an SM.
pub const WARPS: usize = 64;
/// Blocks that fit on an SM.
pub const BLOCKS: usize = 32;
/// Parts of an SM. A warp is in one of them, with all of its registers.
pub const PARTITIONS: usize = 4;
/// Registers of a partition.
pub const REGISTERS: usize = 16_384;
/// A warp's registers are allocated in units of this many.
pub const REGISTER_UNIT: usize = 256;
/// Shared memory of an SM in bytes.
pub const SHARED: usize = 228 << 10;
/// Bytes of shared memory that each block takes in addition.
pub const SHARED_RESERVED: usize = 1 << 10;
/// Most bytes of shared memory that a block may ask for.
pub const SHARED_MOST: usize = 227 << 10;
/// Shared memory is allocated in units of this many bytes.
pub const SHARED_UNIT: usize = 128;
/// Most registers of a thread.
pub const MAX_REGISTERS: usize = 255;

/// The resources that a block of a launch needs.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Threads of a block. The last warp may be partly empty.
    pub threads: usize,
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Returns the number of blocks that run on an SM at the same time. It is 0 if not even one fits: more than 1,024 threads, too many registers,
/// or too much shared memory.
pub fn blocks_per_sm(launch: Launch) -> usize {
    let Launch { threads, registers, shared } = launch;
    if threads > 1024 || registers > MAX_REGISTERS || shared > SHARED_MOST {
        return 0;
    }
    let warps = threads.div_ceil(32);
    let of_warp = (32 * registers).next_multiple_of(REGISTER_UNIT);
    let by_registers = REGISTERS / of_warp * PARTITIONS / warps;
    let by_shared = SHARED / (shared.next_multiple_of(SHARED_UNIT) + SHARED_RESERVED);
    BLOCKS.min(WARPS / warps).min(by_registers).min(by_shared)
}

/// Returns the occupancy between 0 and 1: the share of the SM's warps that run.
pub fn occupancy(launch: Launch) -> f64 {
    (blocks_per_sm(launch) * launch.threads.div_ceil(32)) as f64 / WARPS as f64
}

/// Returns the most registers per thread with which at least `blocks` blocks of the launch run on an SM, or `None` if even one register is
/// too many. The registers of `launch` do not count.
pub fn most_registers(launch: Launch, blocks: usize) -> Option<usize> {
    (1..=MAX_REGISTERS).rev().find(|&registers| blocks_per_sm(Launch { registers, ..launch }) >= blocks)
}
