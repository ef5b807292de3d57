//! A stable radix sort of keys in shared memory.
//!
//! Each of eight passes sorts by four bits. Each warp counts the digits of its part of the keys. A scan of the counts of all warps, ordered
//! by digit and then by warp, gives the places of each warp's keys. Votes give the rank of a key among the lanes with the same digit.

use super::{scan_with_free_scratch, warps};
use crate::shared::SharedArray;
use crate::{thread, warp};

/// Bits of a digit.
const BITS: u32 = 4;

/// Number of values of a digit.
const DIGITS: usize = 1 << BITS;

/// Returns the number of elements of `scratch` in which a block of `threads` threads [`sort`]s `len` keys.
pub const fn sort_scratch(len: usize, threads: usize) -> usize {
    // Each warp has a count of each digit, and a partial sum of the scan.
    len + (DIGITS + 1) * threads.div_ceil(warp::LANES as usize)
}

/// Returns the number of elements of `scratch` in which a block of `threads` threads sorts `len` pairs ([`sort_pairs`]).
pub const fn sort_pairs_scratch(len: usize, threads: usize) -> usize {
    len + sort_scratch(len, threads)
}

/// Sorts the first `len` elements of `keys` in ascending order.
///
/// `scratch` holds [`sort_scratch`] elements. `len` is the same in all threads, and may be any number. The function begins and ends with
/// a barrier: each thread may write its keys before the call, and read any key and reuse `scratch` after it. For a descending order, sort
/// the complements (`!key`). For f32 in the order of `f32::total_cmp`, sort `bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)`.
#[inline(always)]
#[track_caller]
pub fn sort(keys: SharedArray<u32>, len: usize, scratch: SharedArray<u32>) {
    let other = Elements::<false> { keys: scratch, values: scratch };
    sort_elements(Elements { keys, values: keys }, other, len, scratch.skip(len));
}

/// Sorts the first `len` elements of `keys` in ascending order, and `values` in the same way. Values of equal keys keep their order.
///
/// `scratch` holds [`sort_pairs_scratch`] elements. The barriers are those of [`sort`].
#[inline(always)]
#[track_caller]
pub fn sort_pairs(keys: SharedArray<u32>, values: SharedArray<u32>, len: usize, scratch: SharedArray<u32>) {
    let other = Elements::<true> { keys: scratch, values: scratch.skip(len) };
    sort_elements(Elements { keys, values }, other, len, scratch.skip(2 * len));
}

/// Keys in shared memory, with values if `PAIRS`.
#[derive(Clone, Copy)]
struct Elements<const PAIRS: bool> {
    keys: SharedArray<u32>,
    values: SharedArray<u32>,
}

#[inline(always)]
#[track_caller]
fn sort_elements<const PAIRS: bool>(
    elements: Elements<PAIRS>,
    other: Elements<PAIRS>,
    len: usize,
    scratch: SharedArray<u32>,
) {
    thread::sync_threads();
    let mut shift = 0;
    // The compiler would unroll a loop to a constant, to four times the code.
    let bits = thread::opaque(u32::BITS);
    while shift < bits {
        sort_by_digit(elements, other, len, shift, scratch);
        sort_by_digit(other, elements, len, shift + BITS, scratch);
        shift += 2 * BITS;
    }
}

/// Moves `len` elements from `from` to `to` in the order of the digit at bit `shift`. Ends with a barrier.
#[inline(always)]
#[track_caller]
fn sort_by_digit<const PAIRS: bool>(
    from: Elements<PAIRS>,
    to: Elements<PAIRS>,
    len: usize,
    shift: u32,
    scratch: SharedArray<u32>,
) {
    let (warps, warp, lane) = (warps() as usize, warp::linear_index() as usize, warp::lane_id());
    let (counts, scan_scratch) = (scratch, scratch.skip(DIGITS * warps));
    let part = len.div_ceil(warps).next_multiple_of(warp::LANES as usize);
    let first = len.min(warp * part);
    let end = len.min(first + part);

    // Lane d counts the keys with digit d. The lanes from 16 on have no digit.
    let mut count = 0;
    let mut i = first;
    while i < end {
        count += Digit::of(from, i + lane as usize, end, shift).lanes_with(lane).count_ones();
        i += warp::LANES as usize;
    }
    let own = lane as usize * warps + warp;
    if lane < DIGITS as u32 {
        counts.set(own, count);
    }
    thread::sync_threads();

    // A block has 32 threads for the 16 counts of each warp.
    let t = thread::linear_index() as usize;
    let count = if t < DIGITS * warps { counts.at(t) } else { 0 };
    let place = scan_with_free_scratch(count, 0, scan_scratch, |a, b| a + b).exclusive;
    if t < DIGITS * warps {
        counts.set(t, place);
    }
    thread::sync_threads();

    // The place of the next key with digit d is in lane d.
    let mut place = if lane < DIGITS as u32 { counts.at(own) } else { 0 };
    let before = (1 << lane) - 1;
    let mut i = first;
    while i < end {
        let at = i + lane as usize;
        let digit = Digit::of(from, at, end, shift);
        let rank = (digit.lanes_with(digit.value) & before).count_ones();
        let target = (warp::shuffle(place, digit.value) + rank) as usize;
        if at < end {
            to.keys.set(target, digit.key);
            if PAIRS {
                to.values.set(target, from.values.at(at));
            }
        }
        place += digit.lanes_with(lane).count_ones();
        i += warp::LANES as usize;
    }
    thread::sync_threads();
}

/// The digit of this lane's key, and the digits of all lanes.
struct Digit {
    key: u32,
    value: u32,
    /// The lanes that have a key.
    valid: u32,
    /// For each bit of the digit, the lanes that have it.
    lanes: [u32; BITS as usize],
}

impl Digit {
    /// Reads key `i` of the keys before `end`.
    #[inline(always)]
    #[track_caller]
    fn of<const PAIRS: bool>(from: Elements<PAIRS>, i: usize, end: usize, shift: u32) -> Self {
        let key = if i < end { from.keys.at(i) } else { 0 };
        let value = key >> shift & (DIGITS as u32 - 1);
        let valid = warp::ballot(i < end);
        let bit = |bit: u32| value >> bit & 1 != 0;
        let lanes = [warp::ballot(bit(0)), warp::ballot(bit(1)), warp::ballot(bit(2)), warp::ballot(bit(3))];
        Self { key, value, valid, lanes }
    }

    /// Returns the lanes whose key has the digit `value`.
    #[inline(always)]
    fn lanes_with(&self, value: u32) -> u32 {
        let mut lanes = self.valid;
        for bit in 0..BITS {
            let with = self.lanes[bit as usize];
            lanes &= if value >> bit & 1 != 0 { with } else { !with };
        }
        lanes
    }
}
