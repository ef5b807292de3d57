//! Launch parameters and their validation.

use super::report::{Fault, Report};
use super::stack::{self, FiberStack};

/// Maximum number of threads in a block.
const MAX_THREADS: u32 = 1024;
/// Maximum dynamic shared memory of a block in bytes, on compute capability 9.0.
const MAX_SHARED: usize = 227 << 10;

/// A launch with parameters that have not been validated yet.
pub struct Grid<'a> {
    pub kernel: &'static str,
    pub body: &'a (dyn Fn() + Sync),
    pub size: [u32; 3],
    pub threads: u32,
    /// Threads of a block in x, y and z. Their product is `threads`.
    pub block: [u32; 3],
    pub shared_bytes: usize,
}

impl Grid<'_> {
    pub fn invalid(&self, message: &str) -> Report {
        let (kernel, block, fault) = (self.kernel, [0; 3], Fault::Launch);
        let message = format!("invalid launch: {message}");
        Report { kernel, block, thread: None, fault, at: None, other: None, schedule: None, message }
    }

    /// Returns the number of blocks, or a report if a device would reject this launch.
    pub fn blocks(&self) -> Result<u64, Report> {
        let Self { size, threads, shared_bytes, .. } = *self;
        if size.iter().zip([i32::MAX as u32, 65535, 65535]).any(|(n, most)| !(1..=most).contains(n)) {
            let message = format!("grid: expected 1 to 2^31-1 x 1 to 65535 x 1 to 65535 blocks, found {size:?}");
            return Err(self.invalid(&message));
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(self.invalid(&format!("block size: expected 1 to {MAX_THREADS} threads, found {threads}")));
        }
        if shared_bytes > MAX_SHARED {
            let message = format!("shared memory: expected at most {MAX_SHARED} bytes per block, found {shared_bytes}");
            return Err(self.invalid(&message));
        }
        Ok(size.iter().map(|&n| u64::from(n)).product())
    }

    /// Returns the (x, y, z) index of block `number`.
    pub fn index(&self, number: u64) -> [u32; 3] {
        let [x, y] = [0, 1].map(|axis| u64::from(self.size[axis]));
        [number % x, number / x % y, number / (x * y)].map(|i| i as u32)
    }

    pub fn stacks(&self) -> Result<Vec<FiberStack>, Report> {
        stack::take(self.threads as usize).map_err(|error| {
            self.invalid(&format!("cannot allocate stacks for {} emulated threads: {error}", self.threads))
        })
    }
}
