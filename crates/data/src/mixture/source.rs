//! The rows of one source.

use super::documents::{self, Document};
use super::order::{Cursor, Order};
use super::packer::{BUFFER, Counts, Packer};
use super::{Packing, Settings, Source};
use crate::Tokens;
use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::Arc;

/// Tokens of an epoch from which the rows of the whole epoch are estimated.
const ESTIMATED_TOKENS: u64 = 1 << 25;

/// The state of a source of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceState {
    /// Name.
    pub name: String,
    /// Share of the rows, relative to the other sources.
    pub weight: f64,
    /// Number of epochs after which the source is exhausted.
    pub max_epochs: Option<u32>,
    /// Tokens in all shards.
    pub tokens: usize,
    /// Number of rows so far.
    pub rows: u64,
    /// Number of rows since the shares last changed.
    pub phase_rows: u64,
    /// Whether the last epoch has ended.
    pub exhausted: bool,
    /// The next window or document.
    pub cursor: Cursor,
    /// Documents that have been read and are in no row yet.
    #[serde(with = "documents")]
    pub buffer: Vec<Document>,
}

impl SourceState {
    /// Returns the state of the source before its first row.
    pub(super) fn begun(&self) -> Self {
        let Self { ref name, weight, max_epochs, tokens, .. } = *self;
        Self {
            name: name.clone(),
            weight,
            max_epochs,
            tokens,
            rows: 0,
            phase_rows: 0,
            exhausted: false,
            cursor: Cursor::default(),
            buffer: Vec::new(),
        }
    }

    /// Describes how the settings of the source have changed.
    pub(super) fn change(&self, now: &Self) -> Option<String> {
        let describe = |state: &Self| {
            let epochs = state.max_epochs.map_or_else(String::new, |epochs| format!(", max_epochs {epochs}"));
            format!("weight {}, {} tokens{epochs}", state.weight, state.tokens)
        };
        let (was, now) = (describe(self), describe(now));
        (was != now).then(|| format!("data source {} had {was}, has {now}", self.name))
    }
}

/// The amounts of data in an epoch of a source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Number of rows.
    pub rows: f64,
    /// Shares of the tokens of the source: in rows, and in no row.
    pub counts: Counts,
    /// Whether the whole epoch was counted.
    pub is_exact: bool,
}

/// Reads the rows of a source.
#[derive(Clone, Debug)]
pub struct Reader {
    pub shards: Vec<Tokens>,
    pub state: SourceState,
    order: Order,
    t: usize,
    /// `None` for windows.
    packer: Option<Packer>,
    /// The shard that was read last, and its open file: opening it takes longer than reading a short document.
    open: Option<(u32, Option<Arc<File>>)>,
}

impl Reader {
    /// Creates a reader at the first row. Fails if there is none.
    pub fn new(source: Source, settings: &Settings) -> Result<Self> {
        let Source { name, shards, weight, max_epochs } = source;
        let t = settings.geometry.t;
        let tokens: usize = shards.iter().map(Tokens::len).sum();
        ensure!(
            shards.iter().any(|shard| shard.len() > t),
            "data source {name}: expected a shard of at least {} tokens (--seq {t} + 1), found {tokens} tokens in {} files; use a \
             smaller --seq",
            t + 1,
            shards.len()
        );
        let order = Order::new(&name, settings.shuffle, shards.len(), max_epochs.unwrap_or(u32::MAX));
        let packer = settings.separator.filter(|_| settings.packing != Packing::Stream);
        let packer = packer.map(|separator| Packer::new(separator, settings.packing == Packing::Pad, t));
        if let Some(Packer { separator, .. }) = packer {
            check_separators(&name, &shards, separator)?;
        }
        let state = SourceState {
            name,
            weight,
            max_epochs,
            tokens,
            rows: 0,
            phase_rows: 0,
            exhausted: false,
            cursor: Cursor::default(),
            buffer: Vec::new(),
        };
        Ok(Self { shards, state, order, t, packer, open: None })
    }

    /// Chooses the next row. Returns false if the source is exhausted.
    pub fn next_row(&mut self, row: &mut Vec<Document>) -> Result<bool> {
        let Self { shards, state: SourceState { cursor, buffer, .. }, order, t, packer, .. } = self;
        if let Some(packer) = packer {
            return packer.next_row(shards, order, cursor, buffer, row);
        }
        row.clear();
        let windows = |shard: usize| Ok((shards[shard].len() - 1) / *t);
        let Some((shard, window)) = order.at(cursor, windows)? else { return Ok(false) };
        cursor.item += 1;
        row.push(Document { shard: shard as u32, start: (window * *t) as u32, len: *t as u32 + 1 });
        Ok(true)
    }

    /// Reads the tokens of a row. The rest of `tokens` is filled with separators. Returns the length of the row.
    pub fn read(&mut self, row: &[Document], tokens: &mut [u32], vocab: usize) -> Result<usize> {
        let mut filled = 0;
        for &Document { shard: number, start, len } in row {
            let (shard, start) = (&self.shards[number as usize], start as usize);
            if self.open.as_ref().is_none_or(|(open, _)| *open != number) {
                self.open = Some((number, shard.open_file()?));
            }
            let file = self.open.as_ref().and_then(|(_, file)| file.as_deref());
            let mut part = &mut tokens[filled..filled + len as usize];
            if let Some(Packer { separator, .. }) = self.packer {
                part[0] = separator;
                part = &mut part[1..];
            }
            shard.read_from(file, start, part)?;
            if let Some(i) = part.iter().position(|&token| token as usize >= vocab) {
                bail!(
                    "{shard}: token {} at position {}: expected ids below {vocab}, the vocabulary size; tokenize the text for this \
                     model",
                    part[i],
                    start + i
                );
            }
            filled += len as usize;
        }
        tokens[filled..].fill(self.packer.as_ref().map_or(0, |packer| packer.separator));
        Ok(filled)
    }

    /// Moves to a saved state, or to the next epoch if its rows have changed.
    pub fn seek(&mut self, saved: &SourceState, same_rows: bool) -> Result<()> {
        let Self { state, shards, t, .. } = self;
        let SourceState { rows, phase_rows, exhausted, cursor, ref buffer, .. } = *saved;
        (state.rows, state.phase_rows, state.exhausted) = (rows, phase_rows, exhausted);
        if !same_rows || saved.tokens != state.tokens {
            let begin = Cursor { epoch: cursor.epoch, ..Cursor::default() };
            state.cursor = Cursor { epoch: cursor.epoch.saturating_add((cursor != begin).into()), ..begin };
            return Ok(());
        }
        let is_valid = |document: &Document| {
            let shard = shards.get(document.shard as usize);
            let end = document.start as usize + document.len as usize - 1;
            (2..=*t + 1).contains(&(document.len as usize)) && shard.is_some_and(|shard| end <= shard.len())
        };
        ensure!(
            buffer.len() <= BUFFER && buffer.iter().all(is_valid),
            "data source {}: expected a buffer of at most {BUFFER} documents of its shards, found others; use the data set of the \
             checkpoint",
            state.name
        );
        (state.cursor, state.buffer) = (cursor, buffer.clone());
        Ok(())
    }

    /// Counts the rows of an epoch. Packs only the beginning of a large one, and extrapolates.
    pub fn estimate(&self) -> Result<Estimate> {
        let Some(packer) = &self.packer else {
            let rows: usize = self.shards.iter().map(|shard| (shard.len() - 1) / self.t).sum();
            let used = (rows * self.t) as u64;
            let counts = Counts { used, cropped: self.state.tokens as u64 - used, padded: 0 };
            return Ok(Estimate { rows: rows as f64, counts, is_exact: true });
        };
        let mut reader = self.clone();
        reader.state = self.state.begun();
        reader.order = reader.order.of_one_epoch();
        let Packer { separator, pads, .. } = *packer;
        let mut packer = Packer::new(separator, pads, self.t);
        let (mut rows, mut row) = (0, Vec::new());
        let SourceState { cursor, buffer, .. } = &mut reader.state;
        let is_exact = loop {
            if packer.counts.used + packer.counts.cropped >= ESTIMATED_TOKENS {
                break false;
            }
            if !packer.next_row(&self.shards, &reader.order, cursor, buffer, &mut row)? {
                break true;
            }
            rows += 1;
        };
        let counts = packer.counts;
        let part = (counts.used + counts.cropped) as f64 / self.state.tokens as f64;
        Ok(Estimate { rows: if is_exact { rows.into() } else { f64::from(rows) / part }, counts, is_exact })
    }
}

/// Fails unless the shards contain separators and text.
fn check_separators(name: &str, shards: &[Tokens], separator: u32) -> Result<()> {
    let (mut has_separator, mut has_text) = (false, false);
    for shard in shards {
        let documents = documents::of_shard(shard, separator)?;
        has_separator |= documents != [(0, shard.len() as u32)];
        has_text |= !documents.is_empty();
        if has_separator && has_text {
            return Ok(());
        }
    }
    bail!(
        "data source {name}: expected documents that begin with token {separator}, the document token of the tokenizer, found {}; use \
         --packing stream, or tokenize the text with `llm-rs data text`",
        if has_separator { "only empty ones" } else { "none" }
    )
}
