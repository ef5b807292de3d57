//! Intermediate values: words of data and tag in scratch memory. See the invariants of the [module](super).

use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::{Element, GlobalMut, Packet, device};

/// Words before the values: the number of blocks that have ended, in all launches, and padding.
pub const HEADER: usize = 4;

/// Returns the number of values of a word.
#[inline(always)]
pub const fn per_word<T: Element>() -> usize {
    T::PACKET / 4
}

/// Returns the number of words of `values` values.
pub const fn count<T: Element>(values: usize) -> usize {
    values / per_word::<T>()
}

/// Scratch memory in a launch.
#[derive(Clone, Copy)]
pub struct Words {
    memory: GlobalMut<u64>,
    tag: u32,
}

/// Words as they are in memory, which may be those of an earlier launch.
pub type Pair = [u64; 2];

#[device]
impl Words {
    /// Returns the scratch memory of the launch that runs now, of `blocks` blocks. See invariant 3.
    pub fn new(memory: GlobalMut<u64>, blocks: u32) -> Self {
        let launches = memory.load_relaxed(0) / u64::from(blocks.max(1));
        Self { memory, tag: launches as u32 + 1 }
    }

    /// Records that the calling block has ended.
    pub fn end_block(self) {
        self.memory.fetch_add(0, 1);
    }

    /// Stores a word.
    pub fn store(self, i: usize, data: u32) {
        self.memory.store_relaxed(i, u64::from(data) | u64::from(self.tag) << 32);
    }

    /// Stores values `i` and `i` + 1 of the array of values that starts at word `first`, rounded to T. `i` is even.
    pub fn store_two<T: Element>(self, first: usize, i: usize, [a, b]: [f32; 2]) {
        if per_word::<T>() == 2 {
            self.store(first + i / 2, pack_pair(a, b));
        } else {
            self.store(first + i, a.to_bits());
            self.store(first + i + 1, b.to_bits());
        }
    }

    /// Reads words `i` and `i` + 1 as they are. `i` is even.
    pub fn pair(self, i: usize) -> Pair {
        self.memory.load_relaxed_two(i)
    }

    /// Reads the words of values `i` and `i` + 1 of the array that starts at word `first`, as they are. `i` is even.
    pub fn pair_of<T: Element>(self, first: usize, i: usize) -> Pair {
        if per_word::<T>() == 2 { [self.memory.load_relaxed(first + i / 2); 2] } else { self.pair(first + i) }
    }

    /// Waits for the words that [`pair_of`](Self::pair_of) has read, and returns their values.
    pub fn two<T: Element>(self, mut pair: Pair, first: usize, i: usize) -> [f32; 2] {
        while !self.is_current(pair) {
            pair = self.pair_of::<T>(first, i);
        }
        if per_word::<T>() == 2 { unpack_pair(pair[0] as u32) } else { floats(pair) }
    }

    /// Returns whether both words are of this launch.
    pub fn is_current(self, [a, b]: Pair) -> bool {
        (a >> 32) as u32 == self.tag && (b >> 32) as u32 == self.tag
    }

    /// Waits for the pairs of words that begin at these even places, and returns them.
    pub fn pairs<const N: usize>(self, at: [usize; N]) -> [Pair; N] {
        let mut pairs = [[0; 2]; N];
        loop {
            // All loads are issued before the first is used.
            for n in 0..N {
                pairs[n] = self.pair(at[n]);
            }
            let mut are_current = true;
            for n in 0..N {
                are_current &= self.is_current(pairs[n]);
            }
            if are_current {
                return pairs;
            }
        }
    }

    /// Waits for the packets whose first words these are, multiples of 4, and returns them.
    pub fn four_packets<T: Element>(self, [a, b, c, d]: [usize; 4]) -> [Packet<T>; 4] {
        let [a, e, b, f, c, g, d, h] = self.pairs([a, a + 2, b, b + 2, c, c + 2, d, d + 2]);
        [packet(a, e), packet(b, f), packet(c, g), packet(d, h)]
    }

    /// Waits for the packet whose first word this is, a multiple of 4, and returns it.
    pub fn packet<T: Element>(self, at: usize) -> Packet<T> {
        let [a, b] = self.pairs([at, at + 2]);
        packet(a, b)
    }
}

/// Returns the data of four words.
#[inline(always)]
fn packet<T: Element>([a, b]: Pair, [c, d]: Pair) -> Packet<T> {
    Packet::from_words([a as u32, b as u32, c as u32, d as u32])
}

/// Returns the data of two words as f32.
#[inline(always)]
pub const fn floats([a, b]: Pair) -> [f32; 2] {
    [f32::from_bits(a as u32), f32::from_bits(b as u32)]
}
