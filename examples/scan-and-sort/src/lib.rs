//! The launches of a scan and of a sort, for a GPU and for the emulator.

use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut};
use scan_and_sort_kernels::histogram::{DIGITS, PASSES, grid, histogram};
use scan_and_sort_kernels::{scan, sort};

pub use scan::TILE as SCAN_TILE;
pub use sort::TILE as SORT_TILE;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// A launch and its grid.
pub struct Step {
    /// The kernel and its arguments.
    pub launch: Launch,
    /// The number of blocks.
    pub grid: [u32; 3],
}

/// The arrays of a scan.
#[derive(Clone, Copy)]
pub struct ScanArrays {
    /// The result.
    pub out: GlobalMut<u32>,
    /// The input.
    pub inp: Global<u32>,
    /// [`Self::states`] zeros.
    pub states: GlobalMut<u64>,
    /// One zero.
    pub tickets: GlobalMut<u32>,
}

impl ScanArrays {
    /// Returns the number of states for `n` elements.
    pub fn states(n: usize) -> usize {
        n.div_ceil(SCAN_TILE)
    }

    /// Returns the launches that scan `n` elements: one, or none for no elements.
    pub fn steps(self, n: usize) -> Vec<Step> {
        if n == 0 {
            return Vec::new();
        }
        let launch = scan::scan(self.out, self.inp, self.states, self.tickets, n as u64);
        vec![Step { launch, grid: [n.div_ceil(SCAN_TILE) as u32, 1, 1] }]
    }
}

/// The arrays of a sort.
#[derive(Clone, Copy)]
pub struct SortArrays {
    /// The sorted keys.
    pub out: GlobalMut<u32>,
    /// The keys, which are not changed.
    pub inp: Global<u32>,
    /// The results of the first and the third pass: as many keys.
    pub other: GlobalMut<u32>,
    /// [`Self::states`] zeros.
    pub states: GlobalMut<u32>,
    /// [`Self::COUNTS`] zeros.
    pub counts: GlobalMut<u32>,
    /// [`Self::TICKETS`] zeros.
    pub tickets: GlobalMut<u32>,
}

impl SortArrays {
    /// The number of counts of digits.
    pub const COUNTS: usize = PASSES * DIGITS;
    /// The number of tickets.
    pub const TICKETS: usize = PASSES;

    /// Returns the number of states for `n` keys.
    pub fn states(n: usize) -> usize {
        PASSES * n.div_ceil(SORT_TILE) * DIGITS
    }

    /// Returns the launches that sort `n` keys on a GPU with `sm_count` SMs: the histogram and four passes, or none for no keys.
    pub fn steps(self, n: usize, sm_count: usize) -> Vec<Step> {
        assert!(n <= sort::MAX_KEYS, "too many keys");
        if n == 0 {
            return Vec::new();
        }
        let Self { out, inp, other, states, counts, tickets } = self;
        let launch = histogram(counts, inp, n as u64);
        let mut steps = vec![Step { launch, grid: [grid(n, sm_count), 1, 1] }];
        let passes = [(other, inp), (out, other.reader()), (other, out.reader()), (out, other.reader())];
        for (pass, (to, from)) in passes.into_iter().enumerate() {
            let launch = sort::sort(to, from, states, tickets, counts.reader(), pass as u32, n as u64);
            steps.push(Step { launch, grid: [n.div_ceil(SORT_TILE) as u32, 1, 1] });
        }
        steps
    }
}

/// Returns key `i` of the random keys: SplitMix64, as in `cub.cu`.
pub fn random_key(i: u64) -> u32 {
    let mut x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) >> 32) as u32
}
