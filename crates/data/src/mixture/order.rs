//! The order in which a source reads the items of its shards: rows, or documents and the parts of long ones.
//!
//! In each epoch, the shards are permuted, and the items of each shard. The permutations depend only on the seed, the name of the
//! source, the epoch and the shard.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The position of the next item of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of completed epochs.
    pub epoch: u32,
    /// Number of completed shards in this epoch.
    pub shard: u32,
    /// Number of completed items in this shard.
    pub item: u32,
}

/// The order of the items of a source.
#[derive(Clone, Debug)]
pub struct Order {
    /// Identifies the source and the seed; `None` reads shards and items in order.
    key: Option<u64>,
    shards: u32,
    /// Number of epochs after which the source is exhausted.
    epochs: u32,
}

impl Order {
    pub fn new(name: &str, shuffle: Option<u32>, shards: usize, epochs: u32) -> Self {
        let key = |seed: u32| xxh3_64(&[&seed.to_le_bytes(), name.as_bytes()].concat());
        Self { key: shuffle.map(key), shards: shards as u32, epochs }
    }

    /// Returns the same order without the epochs after the first.
    pub fn of_one_epoch(&self) -> Self {
        Self { epochs: 1, ..self.clone() }
    }

    /// Returns the shard and the item at the cursor, after moving it to the next shard if there are no more items in its shard.
    /// `items` returns the number of items of a shard. Returns `None` after the last epoch.
    pub fn at(
        &self,
        cursor: &mut Cursor,
        mut items: impl FnMut(usize) -> Result<usize>,
    ) -> Result<Option<(usize, usize)>> {
        while cursor.epoch < self.epochs {
            if cursor.shard >= self.shards {
                *cursor = Cursor { epoch: cursor.epoch + 1, ..Cursor::default() };
                continue;
            }
            let shard = self.permuted(cursor.shard, self.shards, [cursor.epoch, u32::MAX]);
            let items = items(shard as usize)? as u32;
            if cursor.item < items {
                let item = self.permuted(cursor.item, items, [cursor.epoch, shard]);
                return Ok(Some((shard as usize, item as usize)));
            }
            *cursor = Cursor { epoch: cursor.epoch, shard: cursor.shard + 1, ..Cursor::default() };
        }
        Ok(None)
    }

    fn permuted(&self, i: u32, n: u32, [epoch, shard]: [u32; 2]) -> u32 {
        let Some(key) = self.key else { return i };
        let mixed = mix(key ^ (u64::from(epoch) << 32 | u64::from(shard)));
        permute(i, n, mixed)
    }
}

/// Applies the `key`-th permutation of the numbers below `n` to `i`, which must be below `n`.
///
/// A Feistel network permutes the numbers of an even number of bits, and is applied until the result is below `n`. It needs no memory.
fn permute(i: u32, n: u32, key: u64) -> u32 {
    const MIN_HALF: u32 = 3;
    const ROUNDS: u64 = 6;
    let half = (u32::BITS - (n - 1).leading_zeros()).div_ceil(2).max(MIN_HALF);
    let mask = (1u64 << half) - 1;
    let mut x = u64::from(i);
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key ^ (round << 32 | right)) & mask));
        }
        x = left << half | right;
        if x < u64::from(n) {
            return x as u32;
        }
    }
}

/// The output function of SplitMix64.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_permutation_contains_each_number_once(n in 1u32..3000, key: u64) {
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let at = permute(i, n, key) as usize;
                prop_assert!(!seen[at]);
                seen[at] = true;
            }
        }
    }

    /// Each of 6 orders of 3 numbers has an expected frequency of 1000 in 6000 keys, with a standard deviation of 29.
    #[test]
    fn orders_are_equally_frequent() {
        let mut counts = std::collections::BTreeMap::new();
        for key in 0..6000 {
            *counts.entry([0, 1, 2].map(|i| permute(i, 3, mix(key)))).or_insert(0) += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
        // Neighbors are not neighbors afterwards.
        let kept = (1..10_000).filter(|&i| permute(i, 10_000, 1) == permute(i - 1, 10_000, 1) + 1).count();
        assert!(kept < 10, "{kept}");
    }

    #[test]
    fn an_epoch_contains_each_item_once_and_epochs_differ() {
        let items = [3, 0, 5, 1];
        let of_name = |name, shuffle| {
            let order = Order::new(name, shuffle, items.len(), 3);
            let mut cursor = Cursor::default();
            let mut read = Vec::new();
            while let Some(at) = order.at(&mut cursor, |shard| Ok(items[shard])).unwrap() {
                read.push(at);
                cursor.item += 1;
            }
            read
        };
        let in_order: Vec<_> = items.iter().enumerate().flat_map(|(s, &n)| (0..n).map(move |i| (s, i))).collect();
        assert_eq!(of_name("a", None), [&in_order[..]; 3].concat());
        let shuffled = of_name("a", Some(1));
        for epoch in shuffled.chunks(9) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, in_order);
        }
        assert!(shuffled[..9] != shuffled[9..18] && shuffled[9..18] != shuffled[18..]);
        assert_ne!(of_name("b", Some(1)), shuffled);
        assert_ne!(of_name("a", Some(2)), shuffled);
    }
}
