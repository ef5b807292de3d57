//! Splits documents into training and validation data, and writes the shards of both.

use super::chunks::parts;
use super::encoder::Encoded;
use crate::dataset::{ShardNames, Split};
use crate::tokens::{self, Width};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Tokens that are moved at a time from the file of waiting documents.
const BLOCK: usize = 64 << 10;

/// Selects the validation split.
#[derive(Clone, Copy, Debug)]
pub enum Validation {
    /// A fraction of the documents, evenly spaced. With fewer than `1 / fraction` documents, the end of each document instead.
    /// The number of documents is unknown while they arrive, so the first ones wait in a file until there are `1 / fraction` of
    /// them or the input ends.
    Fraction(f64),
    /// The first documents.
    FirstDocuments(usize),
    /// The first tokens. Numbers of training shards follow that of the validation shard.
    FirstTokens(usize),
}

/// The files of a data set.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub names: ShardNames,
    /// Tokens per shard. The last shard of a split holds the remaining tokens. `usize::MAX` if a split is one file.
    pub shard_tokens: usize,
    pub validation: Validation,
}

/// Writes both splits.
pub struct Splits {
    layout: Layout,
    documents: usize,
    train: ShardWriter,
    val: ShardWriter,
    waiting: Option<Waiting>,
}

impl Splits {
    pub fn new(directory: &Path, width: Width, layout: Layout) -> Result<Self> {
        let Layout { names, shard_tokens: size, validation } = layout;
        let shards = |split, first| ShardWriter {
            directory: directory.to_owned(),
            names,
            split,
            first,
            width,
            size,
            current: None,
            written: Split::default(),
        };
        let waits = matches!(validation, Validation::Fraction(fraction) if fraction > 0.0);
        let waiting = waits.then(|| Waiting::create(directory.join("waiting"))).transpose()?;
        let first_train = usize::from(matches!(validation, Validation::FirstTokens(_)));
        Ok(Self { layout, documents: 0, train: shards("train", first_train), val: shards("val", 0), waiting })
    }

    /// Adds the tokens of a chunk.
    pub fn push(&mut self, encoded: &Encoded) -> Result<()> {
        for (begins, range) in parts(&encoded.starts, encoded.ids.len()) {
            let ids = &encoded.ids[range];
            if begins {
                self.documents += 1;
                if let Validation::Fraction(fraction) = self.layout.validation
                    && self.documents as f64 * fraction >= 1.0
                    && let Some(waiting) = self.waiting.take()
                {
                    self.split_by_document(waiting)?;
                }
            }
            match &mut self.waiting {
                Some(waiting) => waiting.push(begins, ids)?,
                None => self.write(self.documents - 1, ids)?,
            }
        }
        Ok(())
    }

    /// Writes the remaining tokens. Returns the amounts of the training and the validation split.
    pub fn finish(mut self) -> Result<(Split, Split)> {
        if let (Some(waiting), Validation::Fraction(fraction)) = (self.waiting.take(), self.layout.validation) {
            self.split_at_ends(waiting, fraction)?;
        }
        let (train, val) = (self.train.finish()?, self.val.finish()?);
        if let Validation::FirstTokens(first) = self.layout.validation {
            ensure!(
                train.tokens > 0,
                "expected more than {first} tokens, because the first {first} are the validation split, found {}; use more \
                 text{}",
                val.tokens,
                if self.layout.names.numbered { " or a smaller --shard-tokens" } else { "" }
            );
        }
        Ok((train, val))
    }

    /// Writes tokens of a document into the splits to which they belong.
    fn write(&mut self, document: usize, ids: &[u32]) -> Result<()> {
        let val = match self.layout.validation {
            Validation::Fraction(fraction) => {
                let before = |document: usize| (document as f64 * fraction).floor();
                if before(document) < before(document + 1) { ids.len() } else { 0 }
            }
            Validation::FirstDocuments(first) if document < first => ids.len(),
            Validation::FirstDocuments(_) => 0,
            Validation::FirstTokens(first) => ids.len().min(first - self.val.written.tokens),
        };
        let (val, train) = ids.split_at(val);
        self.val.extend(val)?;
        self.train.extend(train)
    }

    fn split_by_document(&mut self, waiting: Waiting) -> Result<()> {
        let (lengths, mut tokens) = waiting.read()?;
        for (document, len) in lengths.into_iter().enumerate() {
            tokens.take(len, |ids| self.write(document, ids))?;
        }
        tokens.remove()
    }

    fn split_at_ends(&mut self, waiting: Waiting, fraction: f64) -> Result<()> {
        let (lengths, mut tokens) = waiting.read()?;
        for len in lengths {
            let val = (len as f64 * fraction) as usize;
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
    names: ShardNames,
    split: &'static str,
    /// Number of the first shard.
    first: usize,
    width: Width,
    size: usize,
    current: Option<tokens::Writer>,
    written: Split,
}

impl ShardWriter {
    fn extend(&mut self, mut ids: &[u32]) -> Result<()> {
        while !ids.is_empty() {
            if self.current.is_none() {
                let path = self.directory.join(self.names.file(self.split, self.first + self.written.shards));
                self.current = Some(tokens::Writer::create(&path, self.width)?);
            }
            let Some(shard) = &mut self.current else { unreachable!("a shard was created") };
            let (head, tail) = ids.split_at(ids.len().min(self.size - shard.len()));
            shard.push(head)?;
            self.written.tokens += head.len();
            ids = tail;
            if shard.len() == self.size {
                self.end_shard()?;
            }
        }
        Ok(())
    }

    fn end_shard(&mut self) -> Result<()> {
        if let Some(shard) = self.current.take() {
            let name = self.names.file(self.split, self.first + self.written.shards);
            self.written.hashes.insert(name, format!("{:016x}", shard.finish()?));
            self.written.shards += 1;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Split> {
        self.end_shard()?;
        Ok(self.written)
    }
}
