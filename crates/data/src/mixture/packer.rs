//! Rows of whole documents.

use super::documents::{self, Document};
use super::order::{Cursor, Order};
use crate::{Tokens, mask};
use anyhow::Result;
use std::ops::Range;

/// Number of documents among which the packer chooses, as in nanochat.
pub const BUFFER: usize = 1000;

/// Numbers of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens in rows.
    pub used: u64,
    /// Tokens that are in no row.
    pub cropped: u64,
    /// Tokens that were added to fill rows.
    pub padded: u64,
    /// Conversations that are longer than a row, and lose their end.
    pub shortened: u64,
}

/// Fills rows with the documents of a source.
#[derive(Clone, Debug)]
pub struct Packer {
    /// The token that is put before each document. Conversations have `None`.
    pub separator: Option<u32>,
    pub pads: bool,
    pub t: usize,
    /// A shard and the parts of its documents.
    index: Option<(usize, Vec<Part>)>,
    pub counts: Counts,
}

impl Packer {
    pub fn new(separator: Option<u32>, pads: bool, t: usize) -> Self {
        Self { separator, pads, t, index: None, counts: Counts::default() }
    }

    /// Chooses the documents of the next row as nanochat does: the largest of the buffer that fits, repeatedly. If none fits, crops the
    /// shortest, and discards the rest of it; a packer that pads leaves the rest of the row free. Returns false if the documents of the
    /// last epoch do not fill a row.
    pub fn next_row(
        &mut self,
        shards: &[Tokens],
        order: &Order,
        cursor: &mut Cursor,
        buffer: &mut Vec<Document>,
        row: &mut Vec<Document>,
    ) -> Result<bool> {
        row.clear();
        let mut left = self.t as u32 + 1;
        while left > 0 {
            self.refill(shards, order, cursor, buffer)?;
            // Of several documents of this length, the one that entered first is taken. No document has length 0.
            let fitting = buffer.iter().map(|document| if document.len <= left { document.len } else { 0 }).max();
            if let Some(i) = buffer.iter().position(|document| Some(document.len) == fitting) {
                let document = buffer.remove(i);
                left -= document.len;
                row.push(document);
                continue;
            }
            let shortest = buffer.iter().enumerate().min_by_key(|(_, document)| document.len).map(|(i, _)| i);
            let Some(i) = shortest.filter(|_| !self.pads) else { break };
            let document = buffer.remove(i);
            self.counts.cropped += u64::from(document.len - left);
            row.push(Document { len: left, ..document });
            left = 0;
        }
        let filled = u64::from(self.t as u32 + 1 - left);
        if row.is_empty() || (left > 0 && !self.pads) {
            self.counts.cropped += filled;
            return Ok(false);
        }
        self.counts.used += filled;
        self.counts.padded += u64::from(left);
        Ok(true)
    }

    /// Reads documents until the buffer is full. At the end of an epoch, it first becomes empty: otherwise it would hold several copies of
    /// each document of a small source. A document of more than T + 1 tokens becomes parts of at most that many, each with a separator.
    /// Parts are shuffled like documents: with the parts of a document in neighboring rows, a batch would have few documents.
    fn refill(
        &mut self,
        shards: &[Tokens],
        order: &Order,
        cursor: &mut Cursor,
        buffer: &mut Vec<Document>,
    ) -> Result<()> {
        while buffer.len() < BUFFER {
            let epoch = Cursor { epoch: cursor.epoch, ..Cursor::default() };
            if *cursor == epoch && !buffer.is_empty() {
                break;
            }
            let Self { separator, t, .. } = *self;
            let index = &mut self.index;
            let of_shard = |shard: usize| {
                if index.as_ref().is_none_or(|(indexed, _)| *indexed != shard) {
                    *index = Some((shard, parts_of(&shards[shard], separator, t)?));
                }
                Ok(index.as_ref().map_or(0, |(_, documents)| documents.len()))
            };
            let Some((shard, item)) = order.at(cursor, of_shard)? else { break };
            if cursor.epoch > epoch.epoch && !buffer.is_empty() {
                *cursor = Cursor { epoch: cursor.epoch, ..Cursor::default() };
                break;
            }
            let part = self.index.as_ref().map(|(_, parts)| parts[item]);
            if let Some(Part { start, end, cropped }) = part {
                self.counts.cropped += u64::from(cropped);
                self.counts.shortened += u64::from(cropped > 0);
                buffer.push(Document { shard: shard as u32, start, len: end - start + u32::from(separator.is_some()) });
            }
            cursor.item += 1;
        }
        Ok(())
    }
}

/// A document in a shard, or a part of it.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: u32,
    end: u32,
    /// Tokens after the end that belong to the document, but to no part.
    cropped: u32,
}

/// Returns the documents of a shard, in parts of at most `t` tokens. Of conversations, returns the first `t + 1` tokens.
fn parts_of(shard: &Tokens, separator: Option<u32>, t: usize) -> Result<Vec<Part>> {
    let Some(separator) = separator else {
        let conversations = shard.mask().map_or(Ok(Vec::new()), mask::conversations)?;
        let first = |Range { start, end }: Range<u32>| {
            let kept = end.min(start.saturating_add(t as u32 + 1));
            Part { start, end: kept, cropped: end - kept }
        };
        return Ok(conversations.into_iter().map(first).collect());
    };
    let parts = |(start, end): (u32, u32)| {
        let part = move |start: u32| Part { start, end: end.min(start.saturating_add(t as u32)), cropped: 0 };
        (start..end).step_by(t).map(part)
    };
    Ok(documents::of_shard(shard, separator)?.into_iter().flat_map(parts).collect())
}
