//! Python's `random.Random(seed)`: `shuffle`, which llm.c's scripts use, and `sample`, which nanochat uses.

use rng::Mt19937;

/// Shuffles as `random.Random(seed).shuffle(items)` does. There must be fewer than 2^32 items.
pub fn shuffle<T>(seed: u32, items: &mut [T]) {
    let mut rng = seeded(seed);
    for i in (1..items.len()).rev() {
        items.swap(i, below(&mut rng, i as u32 + 1) as usize);
    }
}

/// Returns the indices that `random.Random(seed).sample(range(n), k)` draws. `k` is at most `n`.
pub fn sample(seed: u32, n: u32, k: u32) -> Vec<u32> {
    let mut rng = seeded(seed);
    // Python draws from a list of the remaining indices if it is smaller than the set of those that were drawn, by its estimate.
    let set_size = 21 + if k > 5 { power_of_four(3 * u64::from(k)) } else { 0 };
    let mut remaining: Vec<u32> = if u64::from(n) <= set_size { (0..n).collect() } else { Vec::new() };
    let mut drawn = Vec::new();
    for i in 0..k {
        let index = if remaining.is_empty() {
            std::iter::repeat_with(|| below(&mut rng, n)).find(|index| !drawn.contains(index)).unwrap_or_default()
        } else {
            let at = below(&mut rng, n - i) as usize;
            let last = remaining[(n - i - 1) as usize];
            std::mem::replace(&mut remaining[at], last)
        };
        drawn.push(index);
    }
    drawn
}

/// Returns the smallest power of four that is at least `n`.
fn power_of_four(n: u64) -> u64 {
    let power = n.next_power_of_two();
    if power.trailing_zeros().is_multiple_of(2) { power } else { 2 * power }
}

/// Returns a value below `n`: draws of as many bits as `n` has, until one is below `n`.
fn below(rng: &mut Mt19937, n: u32) -> u32 {
    loop {
        let draw = rng.next_u32() >> n.leading_zeros();
        if draw < n {
            return draw;
        }
    }
}

/// Returns a generator in the state of `random.Random(seed)`: mt19937's `init_by_array` with one word.
fn seeded(seed: u32) -> Mt19937 {
    let mut rng = Mt19937::new(19650218);
    let state = &mut rng.state;
    let n = state.len();
    let mixed = |state: &[u32], i: usize, factor: u32| {
        let last = state[i - 1];
        state[i] ^ (last ^ (last >> 30)).wrapping_mul(factor)
    };
    let next = |state: &mut [u32], i: usize| {
        if i + 1 < n {
            return i + 1;
        }
        state[0] = state[n - 1];
        1
    };
    let mut at = 1;
    for _ in 0..n {
        state[at] = mixed(state, at, 1664525).wrapping_add(seed);
        at = next(state, at);
    }
    for _ in 1..n {
        state[at] = mixed(state, at, 1566083941).wrapping_sub(at as u32);
        at = next(state, at);
    }
    state[0] = 0x8000_0000;
    rng
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected orders are Python's.
    #[test]
    fn orders_equal_pythons() {
        let shuffled = |seed, n: u32| {
            let mut items: Vec<u32> = (0..n).collect();
            shuffle(seed, &mut items);
            items
        };
        assert_eq!(shuffled(1337, 10), [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]);
        assert_eq!(shuffled(1338, 10), [1, 0, 6, 2, 9, 8, 3, 7, 4, 5]);
        assert_eq!(shuffled(1337, 1000)[..8], [239, 310, 101, 624, 1, 628, 612, 482]);
        assert_eq!((shuffled(1337, 0).len(), shuffled(1337, 1)), (0, vec![0]));
    }

    /// The expected samples are Python's, from lists and from sets at the limits between them.
    #[test]
    fn samples_equal_pythons() {
        assert_eq!(sample(1234, 9, 3), [7, 1, 0]);
        assert_eq!(sample(1235, 20, 10), [13, 17, 15, 12, 4, 11, 5, 14, 10, 6]);
        assert_eq!(sample(1236, 100, 10), [68, 61, 94, 85, 98, 33, 66, 42, 13, 69]);
        assert_eq!(sample(1237, 21, 5), [4, 12, 9, 7, 17]);
        assert_eq!(sample(1238, 22, 5), [0, 15, 6, 11, 3]);
        assert_eq!(sample(1239, 86, 10), [9, 35, 58, 3, 6, 13, 61, 82, 20, 40]);
        assert_eq!(sample(1240, 85, 10), [82, 59, 45, 74, 66, 67, 5, 51, 52, 34]);
        assert_eq!(sample(5000, 10, 10), [3, 5, 6, 9, 0, 4, 7, 8, 1, 2]);
        assert_eq!((sample(7, 3, 0), sample(1300, 1000, 1)), (vec![], vec![369]));
    }
}
