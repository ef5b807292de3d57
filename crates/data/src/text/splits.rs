//! Divides documents into a training and a validation split and writes the shards of both.
//!
//! The validation split consists of evenly spaced documents. With fewer than `1 / fraction` documents, it consists of the end of
//! each document instead. The number of documents is unknown while they arrive, so the first ones wait in a file until
//! there are `1 / fraction` of them or the input ends.

use super::chunks::parts;
use crate::dataset::Split;
use crate::tokens::{self, Width};
use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Tokens that are moved at a time from the file of waiting documents.
const BLOCK: usize = 64 << 10;

/// The encoding of a chunk.
#[derive(Debug, Default)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// The positions at which documents begin. The ids before the first continue a document.
    pub starts: Vec<usize>,
}

/// Writes both splits.
pub struct Splits {
    fraction: f64,
    documents: usize,
    train: ShardWriter,
    val: ShardWriter,
    waiting: Option<Waiting>,
}

impl Splits {
    pub fn new(directory: &Path, width: Width, fraction: f64, shard_tokens: usize) -> Result<Self> {
        let shards = |name| ShardWriter {
            directory: directory.to_owned(),
            name,
            width,
            size: shard_tokens,
            current: None,
            written: Split::default(),
        };
        let waiting = (fraction > 0.0).then(|| Waiting::create(directory.join("waiting"))).transpose()?;
        Ok(Self { fraction, documents: 0, train: shards("train"), val: shards("val"), waiting })
    }

    /// Adds the tokens of a chunk.
    pub fn push(&mut self, encoded: &Encoded) -> Result<()> {
        for (begins, range) in parts(&encoded.starts, encoded.ids.len()) {
            let ids = &encoded.ids[range];
            if begins {
                self.documents += 1;
                if self.documents as f64 * self.fraction >= 1.0
                    && let Some(waiting) = self.waiting.take()
                {
                    self.divide_by_document(waiting)?;
                }
            }
            match &mut self.waiting {
                Some(waiting) => waiting.push(begins, ids)?,
                None => self.split_of(self.documents - 1).extend(ids)?,
            }
        }
        Ok(())
    }

    /// Writes the remaining tokens. Returns the amounts of the training and the validation split.
    pub fn finish(mut self) -> Result<(Split, Split)> {
        if let Some(waiting) = self.waiting.take() {
            self.divide_at_ends(waiting)?;
        }
        Ok((self.train.finish()?, self.val.finish()?))
    }

    /// Returns the split of a document. The validation split takes `fraction` of the documents, evenly spaced.
    fn split_of(&mut self, document: usize) -> &mut ShardWriter {
        let before = |document: usize| (document as f64 * self.fraction).floor();
        if before(document) < before(document + 1) { &mut self.val } else { &mut self.train }
    }

    fn divide_by_document(&mut self, waiting: Waiting) -> Result<()> {
        let (lengths, mut tokens) = waiting.read()?;
        for (document, len) in lengths.into_iter().enumerate() {
            let split = self.split_of(document);
            tokens.take(len, |ids| split.extend(ids))?;
        }
        tokens.remove()
    }

    fn divide_at_ends(&mut self, waiting: Waiting) -> Result<()> {
        let (lengths, mut tokens) = waiting.read()?;
        for len in lengths {
            let val = (len as f64 * self.fraction) as usize;
            tokens.take(len - val, |ids| self.train.extend(ids))?;
            tokens.take(val, |ids| self.val.extend(ids))?;
        }
        tokens.remove()
    }
}

/// Documents in a file, because their split is not known yet.
struct Waiting {
    path: PathBuf,
    file: BufWriter<File>,
    lengths: Vec<usize>,
}

impl Waiting {
    fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file: BufWriter::with_capacity(1 << 20, file), lengths: Vec::new() })
    }

    fn push(&mut self, begins: bool, ids: &[u32]) -> Result<()> {
        match self.lengths.last_mut() {
            Some(last) if !begins => *last += ids.len(),
            _ => self.lengths.push(ids.len()),
        }
        self.file.write_all(bytemuck::cast_slice(ids)).with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Returns the lengths of the documents, and their tokens.
    fn read(mut self) -> Result<(Vec<usize>, WaitingTokens)> {
        let context = || format!("cannot write {}", self.path.display());
        self.file.flush().with_context(context)?;
        let file = File::open(&self.path).with_context(context)?;
        Ok((self.lengths, WaitingTokens { path: self.path, file: BufReader::with_capacity(1 << 20, file) }))
    }
}

/// The tokens of waiting documents, in order.
struct WaitingTokens {
    path: PathBuf,
    file: BufReader<File>,
}

impl WaitingTokens {
    /// Passes the next `count` tokens to `put`.
    fn take(&mut self, count: usize, mut put: impl FnMut(&[u32]) -> Result<()>) -> Result<()> {
        let mut block = vec![0; count.min(BLOCK)];
        let mut left = count;
        while left > 0 {
            let ids = &mut block[..left.min(BLOCK)];
            self.file
                .read_exact(bytemuck::cast_slice_mut(ids))
                .with_context(|| format!("cannot read {}", self.path.display()))?;
            put(ids)?;
            left -= ids.len();
        }
        Ok(())
    }

    fn remove(self) -> Result<()> {
        fs::remove_file(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }
}

/// Writes the tokens of a split as shards of `size` tokens.
struct ShardWriter {
    directory: PathBuf,
    name: &'static str,
    width: Width,
    size: usize,
    current: Option<tokens::Writer>,
    written: Split,
}

impl ShardWriter {
    fn extend(&mut self, mut ids: &[u32]) -> Result<()> {
        while !ids.is_empty() {
            if self.current.is_none() {
                let path = self.directory.join(format!("{}_{:06}.bin", self.name, self.written.shards));
                self.current = Some(tokens::Writer::create(&path, self.width)?);
            }
            let Some(shard) = &mut self.current else { unreachable!("a shard was created") };
            let (head, tail) = ids.split_at(ids.len().min(self.size - shard.len()));
            shard.push(head)?;
            ids = tail;
            if shard.len() == self.size {
                self.end_shard()?;
            }
        }
        Ok(())
    }

    fn end_shard(&mut self) -> Result<()> {
        if let Some(shard) = self.current.take() {
            self.written.shards += 1;
            self.written.tokens += shard.len();
            shard.finish()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Split> {
        self.end_shard()?;
        Ok(self.written)
    }
}
