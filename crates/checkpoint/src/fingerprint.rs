//! Fingerprints that identify a data set.

use anyhow::Result;
use data::Tokens;
use serde::{Deserialize, Serialize};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Number of blocks per shard that are hashed, evenly spaced from the first to the last. Hashing all tokens would take
/// minutes.
const BLOCKS: usize = 16;
/// Tokens per block.
const BLOCK: usize = 2048;

/// The fingerprint of one shard of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFingerprint {
    /// File name without its directory.
    pub name: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Hash of some of its blocks, in hexadecimal.
    pub xxh3: String,
    /// Hash of some blocks of its mask, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
}

impl ShardFingerprint {
    fn new(tokens: &Tokens) -> Result<Self> {
        let path = Path::new(tokens.name());
        let name = path.file_name().map_or_else(|| tokens.name().into(), |name| name.to_string_lossy().into_owned());
        let mask = tokens.mask().map(hash_of_blocks).transpose()?;
        Ok(Self { name, tokens: tokens.len(), xxh3: hash_of_blocks(tokens)?, mask })
    }

    fn has_same_content(&self, other: &Self) -> bool {
        (self.tokens, &self.xxh3, &self.mask) == (other.tokens, &other.xxh3, &other.mask)
    }
}

/// Returns the hash of some blocks, in hexadecimal.
fn hash_of_blocks(tokens: &Tokens) -> Result<String> {
    let mut hash = Xxh3::new();
    let mut block = vec![0; BLOCK.min(tokens.len())];
    let last = tokens.len() - block.len();
    for i in 0..BLOCKS {
        tokens.read(last * i / (BLOCKS - 1), &mut block)?;
        hash.update(bytemuck::cast_slice(&block));
    }
    Ok(format!("{:016x}", hash.digest()))
}

/// Returns the fingerprints of shards.
pub fn of_shards<'a>(shards: impl IntoIterator<Item = &'a Tokens>) -> Result<Vec<ShardFingerprint>> {
    shards.into_iter().map(ShardFingerprint::new).collect()
}

/// Describes the first difference between two data sets: what `was` has, and what `now` has. File names are not compared.
pub fn difference(was: &[ShardFingerprint], now: &[ShardFingerprint]) -> Option<[String; 2]> {
    // A damaged checkpoint may contain any token counts, so their sum is computed in u128.
    let total = |shards: &[ShardFingerprint]| shards.iter().map(|shard| shard.tokens as u128).sum::<u128>();
    if was.len() != now.len() {
        let describe = |shards: &[ShardFingerprint]| format!("{} files with {} tokens", shards.len(), total(shards));
        return Some([describe(was), describe(now)]);
    }
    let (was, now) = was.iter().zip(now).find(|(was, now)| !was.has_same_content(now))?;
    let describe = |shard: &ShardFingerprint| {
        let mask = shard.mask.as_ref().map_or_else(String::new, |mask| format!(", mask {mask}"));
        format!("{} ({} tokens, hash {}{mask})", shard.name, shard.tokens, shard.xxh3)
    };
    Some([describe(was), describe(now)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_compared() {
        let of = |flags: Option<u32>| {
            let tokens = Tokens::in_memory("a", vec![1; 9]);
            of_shards([&flags.map_or(tokens.clone(), |flags| tokens.with_flags(vec![flags; 9]))]).unwrap()
        };
        assert_eq!(difference(&of(Some(1)), &of(Some(1))), None);
        assert!(difference(&of(Some(1)), &of(Some(0))).unwrap()[0].contains(", mask "));
        assert!(difference(&of(None), &of(Some(0))).is_some());
    }

    fn fingerprint(shards: &[(&str, Vec<u32>)]) -> Vec<ShardFingerprint> {
        let shards: Vec<Tokens> =
            shards.iter().map(|(name, tokens)| Tokens::in_memory(*name, tokens.clone())).collect();
        of_shards(&shards).unwrap()
    }

    #[test]
    fn content_and_order_are_compared_but_names_are_not() {
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..9000).collect(), (0..9000).rev().collect());
        let was = fingerprint(&[("dir/a", a.clone()), ("dir/b", b.clone())]);
        assert_eq!(was[0].name, "a");
        let difference = |now: &[(&str, Vec<u32>)]| difference(&was, &fingerprint(now));
        assert_eq!(difference(&[("x", a.clone()), ("y", b.clone())]), None);
        assert!(difference(&[("b", b.clone()), ("a", a.clone())]).unwrap()[0].starts_with("a (9000 tokens"));
        assert_eq!(difference(&[("a", a.clone())]).unwrap(), ["2 files with 18000 tokens", "1 files with 9000 tokens"]);
        let changed = |at: usize| {
            let mut b = b.clone();
            b[at] ^= 1;
            difference(&[("a", a.clone()), ("b", b)])
        };
        assert!([0, 4500, 8999].map(changed).iter().all(Option::is_some));
    }

    #[test]
    fn totals_do_not_overflow() {
        let shard = ShardFingerprint { name: "x".to_owned(), tokens: usize::MAX, xxh3: String::new(), mask: None };
        let found = difference(&[shard.clone(), shard], &[]).unwrap();
        assert_eq!(found, ["2 files with 36893488147419103230 tokens", "0 files with 0 tokens"]);
    }
}
