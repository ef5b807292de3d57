//! What tells one data set from another.

use anyhow::Result;
use data::{Loader, Tokens};
use serde::{Deserialize, Serialize};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Blocks of a shard that are hashed: the first, the last, and evenly between. ReadResult all of a data set would take minutes.
const BLOCKS: usize = 16;
/// Tokens of a block.
const BLOCK: usize = 2048;

/// A shard of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Of the file, without its directory.
    pub name: String,
    pub tokens: usize,
    /// Of blocks of it.
    pub xxh3: String,
}

impl Shard {
    fn of(tokens: &Tokens) -> Result<Self> {
        let path = Path::new(tokens.name());
        let name = path.file_name().map_or_else(|| tokens.name().into(), |name| name.to_string_lossy().into_owned());
        let mut hash = Xxh3::new();
        let mut block = vec![0; BLOCK.min(tokens.len())];
        let last = tokens.len() - block.len();
        for i in 0..BLOCKS {
            tokens.read(last * i / (BLOCKS - 1), &mut block)?;
            hash.update(bytemuck::cast_slice(&block));
        }
        Ok(Self { name, tokens: tokens.len(), xxh3: format!("{:016x}", hash.digest()) })
    }

    fn holds_the_same(&self, other: &Self) -> bool {
        (self.tokens, &self.xxh3) == (other.tokens, &other.xxh3)
    }
}

/// The shards that a loader reads, in its order.
pub fn of(loader: &Loader) -> Result<Vec<Shard>> {
    loader.shards().iter().map(Shard::of).collect()
}

/// How `now` differs from `was`, if it does. Names do not count.
pub fn difference(was: &[Shard], now: &[Shard]) -> Option<String> {
    // Wider than a count, which a checkpoint may state at will.
    let total = |shards: &[Shard]| shards.iter().map(|shard| shard.tokens as u128).sum::<u128>();
    if was.len() != now.len() {
        let tell = |shards: &[Shard]| format!("{} files with {} tokens", shards.len(), total(shards));
        return Some(format!("was {}, is {}", tell(was), tell(now)));
    }
    let (was, now) = was.iter().zip(now).find(|(was, now)| !was.holds_the_same(now))?;
    let tell = |shard: &Shard| format!("{} ({} tokens, hash {})", shard.name, shard.tokens, shard.xxh3);
    Some(format!("was {}, is {}", tell(was), tell(now)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::Geometry;

    fn print(shards: &[(&str, Vec<u16>)]) -> Vec<Shard> {
        let shards = shards.iter().map(|(name, tokens)| Tokens::in_memory(*name, tokens.clone())).collect();
        of(&Loader::new(shards, Geometry::single(1, 4), 1 << 16, None).unwrap()).unwrap()
    }

    #[test]
    fn content_and_order_count_but_names_do_not() {
        let (a, b): (Vec<u16>, Vec<u16>) = ((0..9000).collect(), (0..9000).rev().collect());
        let was = print(&[("dir/a", a.clone()), ("dir/b", b.clone())]);
        assert_eq!(was[0].name, "a");
        let difference = |now: &[(&str, Vec<u16>)]| difference(&was, &print(now));
        assert_eq!(difference(&[("x", a.clone()), ("y", b.clone())]), None);
        assert!(difference(&[("b", b.clone()), ("a", a.clone())]).unwrap().contains("was a (9000 tokens"));
        assert_eq!(
            difference(&[("a", a.clone())]).unwrap(),
            "was 2 files with 18000 tokens, is 1 files with 9000 tokens"
        );
        let changed = |at: usize| {
            let mut b = b.clone();
            b[at] ^= 1;
            difference(&[("a", a.clone()), ("b", b)])
        };
        assert!([0, 4500, 8999].map(changed).iter().all(Option::is_some));
    }
    #[test]
    fn totals_do_not_overflow() {
        let shard = Shard { name: "x".to_owned(), tokens: usize::MAX, xxh3: String::new() };
        let found = difference(&[shard.clone(), shard], &[]).unwrap();
        assert_eq!(found, "was 2 files with 36893488147419103230 tokens, is 0 files with 0 tokens");
    }
}
