//! Kernels with planted faults. The last argument of a kernel is the number of a fault, or of none.
//!
//! A fault changes a result, or ends a launch, in some execution that the PTX memory model allows. The tests of `cuda_std` run the
//! kernels in the emulator, and the program of `examples/planted-faults` runs them on a GPU.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]
#![cfg_attr(target_arch = "nvptx64", allow(dead_code, reason = "sizes and tables that only the host uses"))]

mod grid_barrier;
mod histogram;
mod lock;
mod look_back;
mod once;
mod reduction;
mod relay;
mod residency;
mod ring;
mod tasks;
mod within_async;
mod within_block;

#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::emulate::{Fault, Memory, Report};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::Launch;

/// The outcome of a checked launch of a faulty kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    Race,
    Uninitialized,
    Deadlock,
    Livelock,
    Divergence,
    AsyncCopy,
    OutOfBounds,
    Operand,
    /// The results of the default schedules are wrong.
    Wrong,
    /// The default schedules report nothing, and the results are right.
    Missed,
}

#[cfg(not(target_arch = "nvptx64"))]
impl From<Fault> for Found {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::DataRace => Self::Race,
            Fault::Uninitialized => Self::Uninitialized,
            Fault::Deadlock => Self::Deadlock,
            Fault::Livelock => Self::Livelock,
            Fault::Divergence => Self::Divergence,
            Fault::AsyncCopy => Self::AsyncCopy,
            Fault::OutOfBounds => Self::OutOfBounds,
            Fault::Operand => Self::Operand,
            other => panic!("unexpected fault {other:?}"),
        }
    }
}

/// A planted fault.
pub struct Planted {
    pub number: u32,
    pub name: &'static str,
    pub text: &'static str,
    /// The expected outcome in the default schedules.
    pub found: Found,
}

/// Launches a kernel over a number of blocks with bytes of shared memory.
#[cfg(not(target_arch = "nvptx64"))]
pub type Run<'a> = &'a dyn Fn(&Launch, &mut Memory, u32, usize) -> Result<(), Report>;

/// A kernel with planted faults.
#[cfg(not(target_arch = "nvptx64"))]
pub struct Kernel {
    /// The type of its faults.
    pub id: &'static str,
    pub name: &'static str,
    pub faults: &'static [Planted],
    /// Runs the kernel with a fault, and returns whether its results are right.
    pub run: fn(u32, Run<'_>) -> Result<bool, Report>,
}

/// Defines a kernel and its faults, with what the default schedules find.
macro_rules! faults {
    (const $kernel:ident = $text:literal, $run:ident; $name:ident { $($fault:ident = $found:ident $fault_text:literal,)* }) => {
        #[derive(Clone, Copy)]
        #[repr(u32)]
        #[allow(clippy::enum_variant_names, reason = "some faults contain the name of their kernel")]
        enum $name { $($fault),* }

        #[cfg(not(target_arch = "nvptx64"))]
        pub const $kernel: $crate::Kernel = $crate::Kernel {
            id: stringify!($name),
            name: $text,
            faults: &[$($crate::Planted {
                number: $name::$fault as u32,
                name: stringify!($fault),
                text: $fault_text,
                found: $crate::Found::$found,
            }),*],
            run: $run,
        };
    };
}
use faults;

/// The number of the correct version of a kernel.
pub const CORRECT: u32 = u32::MAX;

#[cfg(not(target_arch = "nvptx64"))]
pub const BETWEEN_BLOCKS: [&Kernel; 15] = [
    &reduction::LAST_BLOCK,
    &reduction::SPLIT_K,
    &grid_barrier::GENERATION,
    &grid_barrier::SENSE,
    &grid_barrier::MONOTONIC,
    &lock::LOCK,
    &ring::RING,
    &tasks::TASKS,
    &relay::RELAY,
    &relay::PEEK,
    &look_back::LOOK_BACK,
    &histogram::HISTOGRAM,
    &once::ONCE,
    &once::POOL,
    &residency::RESIDENCY,
];

#[cfg(not(target_arch = "nvptx64"))]
pub const WITHIN_A_BLOCK: [&Kernel; 8] = [
    &within_block::RADIX,
    &within_block::COMPACTION,
    &within_block::WARP_SCAN,
    &within_block::BYTES,
    &within_block::EXCHANGE,
    &within_block::FLAG,
    &within_async::PIPELINE,
    &within_async::MBARRIER,
];
