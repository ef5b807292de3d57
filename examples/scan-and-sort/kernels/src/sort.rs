//! One pass of a radix sort that reads and writes each key once (Onesweep).
//!
//! **Problem.** out (n) u32: the keys of inp (n) in the order of one of their digits of 8 bits. Keys with the same digit keep their order.
//! Four passes, from the lowest digit to the highest, sort the keys.
//!
//! **Idea.** A block sorts a tile by the digit in shared memory:
//! 1. Each warp counts its digits. The prefix sums of the counts of all warps, ordered by digit and then by warp, are the places of the
//!    keys in the tile.
//! 2. The lanes of a warp that have the same digit find each other by votes: one of them takes places for all.
//! 3. Thread d looks back for digit d: how many keys of the tiles before have the digit? The first tile adds where the digit starts in the
//!    whole array. Status and count are one word, as in the scan.
//! 4. Threads write the sorted tile. Consecutive threads have mostly the same digit, so they write consecutive keys.
//!
//! **Limit.** Instructions and accesses to shared memory for each key. A pass reaches about half of the bandwidth of a copy.
//!
//! **Tried.** Speed of the whole sort for 2^28 random keys on an H200, in % of CUB's. This version has 142.
//! - 256 threads with 16 keys each: 116 with votes, 108 with a mask in shared memory for each warp and digit, 69 with `match_any`.
//! - Masks in larger tiles: 119 to 121 with 23 keys for each of 384 or 512 threads.
//! - Votes in other tiles: 132 with 256 threads and 20 keys (48 registers, one word spills), 135 with 256 or 512 threads and 23 keys.
//! - 131 with two instead of three of these blocks on an SM.

use crate::histogram::{BITS, DIGITS, digit};
use crate::tile_of_block;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, block, kernel, thread, warp};

const THREADS: usize = 384;
/// Keys of a thread.
const ITEMS: usize = 23;
/// Keys of a tile.
pub const TILE: usize = THREADS * ITEMS;

const LANES: usize = warp::LANES as usize;
const WARPS: usize = THREADS / LANES;

/// The count in a state is that of the tile. No status means that there is no count yet.
const AGGREGATE: u32 = 1 << 30;
/// The count in a state is that of the tile and all tiles before it, plus the start of the digit.
const PREFIX: u32 = 2 << 30;
/// The bits of the count.
const COUNT: u32 = AGGREGATE - 1;
/// Maximum number of keys. The last tile counts keys that do not exist, too.
pub const MAX_KEYS: usize = (1 << 30) - TILE;

/// States that a thread reads at once when it looks back.
const READ_AHEAD: usize = 4;

/// The shared memory of a block.
#[derive(Clone, Copy)]
pub struct Shared {
    /// The sorted tile.
    keys: SharedArray<u32>,
    /// For each warp and digit: the number of keys, then the place of the next one.
    places: SharedArray<u32>,
    /// For each digit: what to add to the place of a key in the tile for its place in the array.
    offsets: SharedArray<u32>,
    scratch: SharedArray<u32>,
    ticket: SharedArray<u32>,
}

/// Lays out the shared memory.
pub fn shared(layout: &mut Layout) -> Shared {
    Shared {
        keys: layout.array(TILE).named("keys"),
        places: layout.array(WARPS * DIGITS).named("places"),
        offsets: layout.array(DIGITS).named("offsets"),
        scratch: layout.array(block::SCRATCH).named("scratch"),
        ticket: layout.array(1).named("ticket"),
    }
}

/// Computes out (n), the keys of inp (n) in the order of digit `pass`.
///
/// `counts` (4, 256) are those of the digits of all keys. `states` has 256 zeros for each pass and tile, and `tickets` (4) is 0 for this
/// pass. Grid: one block for each tile.
#[kernel(threads = 384, blocks_per_sm = 3, shared = shared)]
pub fn sort(
    out: GlobalMut<u32>,
    inp: Global<u32>,
    states: GlobalMut<u32>,
    tickets: GlobalMut<u32>,
    counts: Global<u32>,
    pass: u32,
    n: u64,
) {
    Tile::new(tickets, pass, n as usize).sort(out, inp, states, counts);
}

/// The tile of a block.
#[derive(Clone, Copy)]
struct Tile {
    shared: Shared,
    index: usize,
    pass: u32,
    n: usize,
    thread: usize,
    lane: usize,
    warp: usize,
}

impl Tile {
    #[inline(always)]
    fn new(tickets: GlobalMut<u32>, pass: u32, n: usize) -> Self {
        const { assert!(THREADS >= DIGITS) };
        let shared = shared(&mut Layout::new());
        let index = tile_of_block(tickets.skip(pass as usize), shared.ticket) as usize;
        let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
        Self { shared, index, pass, n, thread: thread::thread_idx_x() as usize, lane, warp }
    }

    #[inline(always)]
    fn sort(self, out: GlobalMut<u32>, inp: Global<u32>, states: GlobalMut<u32>, counts: Global<u32>) {
        let has_digit = self.thread < DIGITS;
        let keys = self.load(inp);
        self.count(&keys);
        let count = if has_digit { self.count_of_digit() } else { 0 };
        // The first tile starts the chain of prefixes with the start of each digit in the whole array.
        let start = if self.index == 0 { self.start_in_array(counts) } else { 0 };
        let states = states.skip(self.pass as usize * self.n.div_ceil(TILE) * DIGITS);
        let own_state = self.index * DIGITS + self.thread;
        if has_digit {
            let status = if self.index == 0 { PREFIX } else { AGGREGATE };
            states.store_relaxed(own_state, status | (start + count));
        }
        let start_in_tile = block::exclusive_sum(count, self.shared.scratch);
        if has_digit {
            self.set_places(start_in_tile);
        }
        thread::sync_threads();
        // The compiler would keep the address of each count in a register until here.
        self.move_to_places(&keys.map(thread::opaque));
        if has_digit {
            let mut before = start;
            if self.index > 0 {
                before = look_back(states.skip(self.thread), self.index);
                states.store_relaxed(own_state, PREFIX | (before + count));
            }
            self.shared.offsets.set(self.thread, before.wrapping_sub(start_in_tile));
        }
        thread::sync_threads();
        self.store(out);
    }

    #[inline(always)]
    fn digit(self, key: u32) -> usize {
        digit(key, self.pass)
    }

    /// Returns the number of keys of the tile that exist. The others are `u32::MAX`, and are last in every order.
    #[inline(always)]
    fn valid(self) -> usize {
        TILE.min(self.n - self.index * TILE)
    }

    /// Loads the keys of this thread. A warp has consecutive keys: lane l has keys l, l + 32, ….
    #[inline(always)]
    fn load(self, inp: Global<u32>) -> [u32; ITEMS] {
        let (inp, first) = (inp.skip(self.index * TILE), self.warp * ITEMS * LANES + self.lane);
        let mut keys = [u32::MAX; ITEMS];
        if self.valid() == TILE {
            for i in 0..ITEMS {
                keys[i] = inp.at(first + LANES * i);
            }
        } else {
            for i in 0..ITEMS {
                if first + LANES * i < self.valid() {
                    keys[i] = inp.at(first + LANES * i);
                }
            }
        }
        keys
    }

    /// Counts the digits of this warp's keys, and waits for the other warps.
    #[inline(always)]
    fn count(self, keys: &[u32; ITEMS]) {
        let places = self.shared.places.skip(self.warp * DIGITS);
        for i in 0..DIGITS / LANES {
            places.set(LANES * i + self.lane, 0);
        }
        warp::sync();
        for i in 0..ITEMS {
            places.fetch_add(self.digit(keys[i]), 1);
        }
        thread::sync_threads();
    }

    /// Returns the number of keys of the tile whose digit is the number of this thread.
    #[inline(always)]
    fn count_of_digit(self) -> u32 {
        (0..WARPS).fold(0, |sum, warp| sum + self.shared.places.at(warp * DIGITS + self.thread))
    }

    /// Returns the number of keys of the whole array with a smaller digit than the number of this thread. All threads call it.
    #[inline(always)]
    fn start_in_array(self, counts: Global<u32>) -> u32 {
        let count = if self.thread < DIGITS { counts.at(self.pass as usize * DIGITS + self.thread) } else { 0 };
        block::exclusive_sum(count, self.shared.scratch)
    }

    /// Replaces the counts of this thread's digit by the place of the first key of each warp.
    #[inline(always)]
    fn set_places(self, start_in_tile: u32) {
        let mut place = start_in_tile;
        for warp in 0..WARPS {
            let i = warp * DIGITS + self.thread;
            let count = self.shared.places.at(i);
            self.shared.places.set(i, place);
            place += count;
        }
    }

    /// Writes the keys of this thread to their places in the sorted tile.
    #[inline(always)]
    fn move_to_places(self, keys: &[u32; ITEMS]) {
        let places = self.shared.places.skip(self.warp * DIGITS);
        let (before, after) = ((1 << self.lane) - 1, u32::MAX << self.lane << 1);
        for i in 0..ITEMS {
            let digit = self.digit(keys[i]);
            let peers = warp::match_low_bits::<BITS>(digit as u32);
            let place = places.at(digit) + (peers & before).count_ones();
            warp::sync();
            // The last of the lanes with this digit has the highest place.
            if peers & after == 0 {
                places.set(digit, place + 1);
            }
            self.shared.keys.set(place as usize, keys[i]);
            warp::sync();
        }
    }

    /// Writes the sorted tile to the places of its keys in the array.
    #[inline(always)]
    fn store(self, out: GlobalMut<u32>) {
        let store = |i: usize| {
            let key = self.shared.keys.at(i);
            let target = self.shared.offsets.at(self.digit(key)).wrapping_add(i as u32);
            out.set(target as usize, key);
        };
        if self.valid() == TILE {
            for i in 0..ITEMS {
                store(THREADS * i + self.thread);
            }
        } else {
            for i in (self.thread..self.valid()).step_by(THREADS) {
                store(i);
            }
        }
    }
}

/// Returns the sum of the counts of all tiles before `tile`, and the start of the digit. `states` begins at the digit's state of tile 0.
#[inline(always)]
fn look_back(states: GlobalMut<u32>, tile: usize) -> u32 {
    let (mut sum, mut last) = (0, tile as u32 - 1);
    loop {
        // Tile 0 has no predecessor, but its state is a prefix: nothing after it is added.
        let mut read = [0; READ_AHEAD];
        for k in 0..READ_AHEAD {
            read[k] = states.load_relaxed(last.saturating_sub(k as u32) as usize * DIGITS);
        }
        let (mut is_open, mut is_complete) = (true, false);
        for k in 0..READ_AHEAD {
            is_open &= read[k] != 0;
            if is_open {
                sum += read[k] & COUNT;
                last = last.wrapping_sub(1);
                is_complete = read[k] & PREFIX != 0;
                is_open = !is_complete;
            }
        }
        if is_complete {
            return sum;
        }
    }
}
