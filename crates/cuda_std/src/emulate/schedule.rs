//! The orders in which a checked launch runs its blocks.

/// Blocks of the default GPU (an H100) that are resident at a time, which its number of SMs and their limits give.
const SMS: u64 = 132;
const BLOCKS_PER_SM: u64 = 32;
const THREADS_PER_SM: u64 = 2048;
const SHARED_BYTES_PER_SM: usize = 228 << 10;
/// Bytes of shared memory that the driver reserves in each block.
const RESERVED_BYTES: usize = 1 << 10;

/// The order in which a checked launch runs its blocks and lets them read each other's writes. A seed determines it.
///
/// Threads switch at atomics, fences and waits. The first seeds are extreme: 0 runs the blocks in order, 1 the last resident block
/// first, 2 leaves the first block far behind, and 3 switches to the next block at each atomic. The others are random; from 4 on,
/// atomic reads also return older values, if the memory model allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub(super) seed: u64,
    pub(super) resident: Option<u64>,
    shows_races: bool,
}

impl Schedule {
    /// The seeds of the schedules of [`emulate_checked`](crate::launch::Launch::emulate_checked).
    pub const DEFAULT_SEEDS: std::ops::Range<u64> = 0..6;

    /// Creates the schedule of this seed.
    pub const fn new(seed: u64) -> Self {
        Self { seed, resident: None, shows_races: false }
    }

    /// Limits the number of blocks that run at a time. Another block starts when one of them has ended. The default is the number of
    /// blocks that an H100 holds.
    #[must_use]
    pub const fn with_resident_blocks(self, blocks: u64) -> Self {
        Self { resident: Some(blocks), ..self }
    }

    /// Shows the effect of data races between blocks instead of reporting them: an ordinary read that races with a write of another block
    /// returns the old or the new value, chosen by the seed.
    #[must_use]
    pub const fn showing_races(self) -> Self {
        Self { shows_races: true, ..self }
    }

    /// Returns the number of blocks of this size that run at a time.
    pub(super) fn resident_blocks(self, threads: u32, shared_bytes: usize) -> u64 {
        let by_threads = THREADS_PER_SM / u64::from(threads).next_multiple_of(32);
        let by_shared = (SHARED_BYTES_PER_SM / (shared_bytes + RESERVED_BYTES)) as u64;
        self.resident.unwrap_or(SMS * by_threads.min(by_shared).clamp(1, BLOCKS_PER_SM)).max(1)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Policy {
    InOrder,
    LastFirst,
    /// This block runs only if no other block can.
    Behind(u64),
    RoundRobin,
    Random,
}

/// The decisions of a schedule.
pub struct Choices {
    policy: Policy,
    state: u64,
    /// A random schedule switches at one of 2^n atomics.
    switch_shift: u32,
    stale: bool,
    /// Whether races between blocks have an effect instead of a report.
    pub shows_races: bool,
    last: u64,
    /// The last block that ran although all blocks polled.
    last_polling: u64,
}

impl Choices {
    /// Starts the schedule of a launch with this number of blocks.
    pub fn new(schedule: Schedule, blocks: u64) -> Self {
        let mut choices = Self {
            policy: Policy::InOrder,
            state: schedule.seed,
            switch_shift: 0,
            stale: schedule.seed > 3,
            shows_races: schedule.shows_races,
            last: 0,
            last_polling: 0,
        };
        choices.policy = match schedule.seed {
            0 => Policy::InOrder,
            1 => Policy::LastFirst,
            2 => Policy::Behind(0),
            3 => Policy::RoundRobin,
            seed if seed % 4 == 0 => Policy::Behind(choices.below(blocks)),
            _ => Policy::Random,
        };
        choices.switch_shift = choices.below(3) as u32;
        choices
    }

    /// Returns a random number. The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Returns whether the blocks run in order.
    pub fn is_in_order(&self) -> bool {
        self.policy == Policy::InOrder
    }

    /// Returns whether a thread lets others run at an atomic or a fence.
    pub fn switches(&mut self) -> bool {
        match self.policy {
            Policy::InOrder | Policy::LastFirst => false,
            Policy::RoundRobin => true,
            Policy::Behind(_) | Policy::Random => self.next() >> 32 & ((1 << self.switch_shift) - 1) == 0,
        }
    }

    /// Returns how many of `count` values, at least two, a read skips.
    pub fn skip(&mut self, count: usize) -> usize {
        if self.stale && self.next() >> 32 & 1 == 0 { 1 + self.below(count as u64 - 1) as usize } else { 0 }
    }

    /// Returns the warp that runs first when a block continues.
    pub fn first_warp(&mut self, warps: usize) -> usize {
        if self.stale { self.below(warps as u64) as usize } else { 0 }
    }

    /// Returns the index of the block to run, of the numbers of those that can, in ascending order.
    pub fn pick(&mut self, numbers: &[u64]) -> usize {
        let last = numbers.len() - 1;
        let index = match self.policy {
            Policy::InOrder => 0,
            Policy::LastFirst => last,
            Policy::Behind(behind) => match numbers.binary_search(&behind) {
                Ok(0) if last == 0 => 0,
                Ok(at) => {
                    let index = self.below(last as u64) as usize;
                    index + usize::from(index >= at)
                }
                Err(_) => self.below(numbers.len() as u64) as usize,
            },
            Policy::RoundRobin => numbers.iter().position(|number| *number > self.last).unwrap_or(0),
            Policy::Random => self.below(numbers.len() as u64) as usize,
        };
        self.last = numbers[index];
        index
    }

    /// Returns the index of the block to run, of the numbers of those that poll memory that has not changed. Each of them must run again: it
    /// may have read an older value, or it may need several runs to read all the values that it waits for.
    pub fn pick_polling(&mut self, numbers: &[u64]) -> usize {
        if self.stale {
            return self.below(numbers.len() as u64) as usize;
        }
        let index = numbers.iter().position(|number| *number > self.last_polling).unwrap_or(0);
        self.last_polling = numbers[index];
        index
    }
}
