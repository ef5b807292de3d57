//! Writes whole conversations to shards with masks.

use super::ChatOptions;
use super::encode::Encoded;
use crate::dataset::{ShardNames, Split};
use crate::mask;
use crate::tokens::{Width, Writer};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Writes both splits.
pub struct Shards {
    train: SplitWriter,
    val: SplitWriter,
    val_fraction: f64,
    conversations: usize,
}

impl Shards {
    pub fn new(directory: &Path, options: &ChatOptions) -> Self {
        let split = |name| SplitWriter {
            directory: directory.to_owned(),
            name,
            width: Width::of_vocab(options.tokenizer.vocab()),
            size: options.shard_tokens,
            current: None,
            written: Split::default(),
        };
        Self { train: split("train"), val: split("val"), val_fraction: options.val_fraction, conversations: 0 }
    }

    /// Adds a conversation to the split to which it belongs.
    pub fn push(&mut self, encoded: &Encoded) -> Result<()> {
        let before = |conversation: usize| (conversation as f64 * self.val_fraction).floor();
        let is_val = before(self.conversations) < before(self.conversations + 1);
        self.conversations += 1;
        if is_val { &mut self.val } else { &mut self.train }.push(encoded)
    }

    pub fn finish(self) -> Result<(Split, Split)> {
        Ok((self.train.finish()?, self.val.finish()?))
    }
}

/// Writes a split as shards of at most `size` tokens. No conversation continues in another shard.
struct SplitWriter {
    directory: PathBuf,
    name: &'static str,
    width: Width,
    size: usize,
    current: Option<(Writer, Writer)>,
    written: Split,
}

impl SplitWriter {
    fn push(&mut self, Encoded { ids, flags, .. }: &Encoded) -> Result<()> {
        if self.current.as_ref().is_some_and(|(tokens, _)| tokens.len() + ids.len() > self.size) {
            self.end_shard()?;
        }
        if self.current.is_none() {
            let path = self.directory.join(ShardNames::TEXT.file(self.name, self.written.shards));
            let mask = Writer::create(&mask::path(&path), Width::Flags)?;
            self.current = Some((Writer::create(&path, self.width)?, mask));
        }
        if let Some((tokens, mask)) = &mut self.current {
            tokens.push(ids)?;
            mask.push(&flags.iter().map(|&flags| flags.into()).collect::<Vec<_>>())?;
            self.written.tokens += ids.len();
        }
        Ok(())
    }

    fn end_shard(&mut self) -> Result<()> {
        if let Some((tokens, mask)) = self.current.take() {
            let name = ShardNames::TEXT.file(self.name, self.written.shards);
            let mask_name = mask::path(Path::new(&name)).to_string_lossy().into_owned();
            self.written.hashes.insert(name, format!("{:016x}", tokens.finish()?));
            self.written.masks.insert(mask_name, format!("{:016x}", mask.finish()?));
            self.written.shards += 1;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Split> {
        self.end_shard()?;
        Ok(self.written)
    }
}
