//! Python's `random.Random(seed).shuffle(list)`, which llm.c's scripts use.

use rng::Mt19937;

/// Shuffles as `random.Random(seed).shuffle(items)` does. There must be fewer than 2^32 items.
pub fn shuffle<T>(seed: u32, items: &mut [T]) {
    let mut rng = seeded(seed);
    for i in (1..items.len()).rev() {
        items.swap(i, below(&mut rng, i as u32 + 1) as usize);
    }
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
}
