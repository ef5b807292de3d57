//! The rows of one source.

use super::documents::{self, Document};
use super::order::{Cursor, Order};
use super::packer::{BUFFER, Counts, Packer};
use super::{Packing, Settings, Source};
use crate::{Tokens, mask};
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

/// The tokens of a row: T inputs, and the same tokens shifted by one as targets.
#[derive(Clone, Debug)]
pub struct Row {
    pub tokens: Vec<u32>,
    /// Whether each token has loss as a target.
    pub has_loss: Vec<bool>,
    /// Whether each token begins a document. Each token of padding does.
    pub begins: Vec<bool>,
}

impl Row {
    pub fn new(t: usize) -> Self {
        Self { tokens: vec![0; t + 1], has_loss: vec![false; t + 1], begins: vec![false; t + 1] }
    }

    /// Fills the row with padding.
    pub fn pad(&mut self, token: u32) {
        self.tokens.fill(token);
        self.has_loss.fill(false);
        self.begins.fill(true);
    }
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
    /// The token that precedes each document, if it is known.
    separator: Option<u32>,
    /// Whether the shards have masks.
    pub is_masked: bool,
    /// The token of padding.
    fill: u32,
    /// The flags of a document.
    flags: Vec<u32>,
    /// The shard that was read last, and its open files: opening them takes longer than reading a short document.
    open: Option<OpenShard>,
}

/// The open files of a shard; none in memory.
#[derive(Clone, Debug)]
struct OpenShard {
    shard: u32,
    tokens: Option<Arc<File>>,
    mask: Option<Arc<File>>,
}

impl Reader {
    /// Creates a reader at the first row. Fails if there is none.
    pub fn new(source: Source, settings: &Settings) -> Result<Self> {
        let Source { name, shards, weight, max_epochs } = source;
        let t = settings.geometry.t;
        let tokens: usize = shards.iter().map(Tokens::len).sum();
        // Conversations are padded.
        let is_padded = settings.packing == Packing::Pad && shards.iter().all(|shard| shard.mask().is_some());
        ensure!(
            !shards.is_empty() && (is_padded || shards.iter().any(|shard| shard.len() > t)),
            "data source {name}: expected a shard of at least {} tokens (--seq {t} + 1), found {tokens} tokens in {} files; use a \
             smaller --seq",
            t + 1,
            shards.len()
        );
        let order = Order::new(&name, settings.shuffle, shards.len(), max_epochs.unwrap_or(u32::MAX));
        let masked = shards.iter().filter(|shard| shard.mask().is_some()).count();
        ensure!(
            masked == 0 || masked == shards.len(),
            "data source {name}: expected masks for all files or for none, found {masked} in {} files; make two sources of them",
            shards.len()
        );
        let is_masked = masked > 0;
        let pads = settings.packing == Packing::Pad;
        let packer = match (settings.packing, settings.separator) {
            (Packing::Stream, _) => None,
            (_, _) if is_masked => Some(Packer::new(None, pads, t)),
            (_, None) => bail!("--packing: expected data sets with a document token, found none; use --packing stream"),
            (_, Some(separator)) => {
                check_separators(&name, &shards, separator)?;
                Some(Packer::new(Some(separator), pads, t))
            }
        };
        if packer.is_some() && is_masked {
            let mut conversations = shards.iter().filter_map(Tokens::mask).map(mask::conversations);
            let found =
                conversations.find_map(|found| found.map(|found| (!found.is_empty()).then_some(())).transpose());
            ensure!(
                found.transpose()?.is_some(),
                "data source {name}: expected conversations of at least 2 tokens, found none; make the data set again"
            );
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
        let fill = settings.separator.unwrap_or(0);
        Ok(Self {
            shards,
            state,
            order,
            t,
            packer,
            separator: settings.separator,
            is_masked,
            fill,
            flags: Vec::new(),
            open: None,
        })
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

    /// Reads the tokens of a row, and fills its rest with padding.
    pub fn read(&mut self, documents: &[Document], row: &mut Row, vocab: usize) -> Result<()> {
        let mut filled = 0;
        row.pad(self.fill);
        for &Document { shard: number, start, len } in documents {
            let (shard, start, end) = (&self.shards[number as usize], start as usize, filled + len as usize);
            if self.open.as_ref().is_none_or(|open| open.shard != number) {
                let mask = shard.mask().map_or(Ok(None), Tokens::open_file)?;
                self.open = Some(OpenShard { shard: number, tokens: shard.open_file()?, mask });
            }
            let files = self.open.as_ref();
            let mut first = filled;
            if let Some(separator) = self.packer.as_ref().and_then(|packer| packer.separator) {
                row.tokens[first] = separator;
                first += 1;
            }
            let part = &mut row.tokens[first..end];
            shard.read_from(files.and_then(|open| open.tokens.as_deref()), start, part)?;
            if let Some(i) = part.iter().position(|&token| token as usize >= vocab) {
                bail!(
                    "{shard}: token {} at position {}: expected ids below {vocab}, the vocabulary size; tokenize the text for this \
                     model",
                    part[i],
                    start + i
                );
            }
            if let Some(mask) = shard.mask() {
                self.flags.resize(len as usize, 0);
                mask.read_from(files.and_then(|open| open.mask.as_deref()), start, &mut self.flags)?;
                for (i, &flags) in (filled..).zip(&self.flags) {
                    row.begins[i] = flags & mask::START != 0;
                    // The first token of a conversation is no target of the one before.
                    row.has_loss[i] = flags & mask::LOSS != 0 && !row.begins[i];
                }
            } else {
                row.has_loss[filled..end].fill(true);
                for (begins, token) in row.begins[filled..end].iter_mut().zip(&row.tokens[filled..end]) {
                    *begins = Some(*token) == self.separator;
                }
            }
            filled = end;
        }
        Ok(())
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
        let has_separator = usize::from(!self.is_masked);
        let is_valid = |document: &Document| {
            let shard = shards.get(document.shard as usize);
            let end = document.start as usize + document.len as usize - has_separator;
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
            let counts = Counts { used, cropped: self.state.tokens as u64 - used, ..Counts::default() };
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
