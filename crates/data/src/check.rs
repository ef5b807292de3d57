//! Verification of token files: ids outside the vocabulary, and documents.

use crate::Tokens;
use crate::tokens::Width;
use anyhow::{Result, anyhow};
use rayon::prelude::*;
use std::ops::Range;
use system::progress::{self, Unit};

/// Tokens that a thread reads at a time. They fit into its cache.
const CHUNK: usize = 1 << 18;

/// The most tokens that [`vocabulary`] reads: 4 GiB of 16-bit ids.
pub const FULL_CHECK_TOKENS: usize = 1 << 31;

/// The contents of a token file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of document tokens.
    pub documents: usize,
    /// Whether the first token is a document token. Otherwise the file continues a document of the file before it.
    pub starts_with_document: bool,
    /// Tokens of the longest document in the file, with its document token.
    pub longest: usize,
    /// Largest id.
    pub largest: u32,
    /// Number of ids outside the vocabulary.
    pub invalid: usize,
    /// Position and id of the first ones, at most [`Report::MAX_POSITIONS`].
    pub first_invalid: Vec<(usize, u32)>,
}

impl Report {
    /// Maximum number of positions of invalid ids that are kept.
    pub const MAX_POSITIONS: usize = 5;
}

/// The contents of a range of a file.
#[derive(Default)]
struct Part {
    documents: usize,
    /// Position of the first and the last document token.
    marks: Option<(usize, usize)>,
    /// Maximum distance between document tokens.
    longest: usize,
    largest: u32,
    invalid: usize,
    first_invalid: Vec<(usize, u32)>,
}

/// Reads a token file completely. Ids must be below `vocab`, and `document` precedes each document.
pub fn shard(tokens: &Tokens, vocab: usize, document: u32) -> Result<Report> {
    let progress = progress::start("checking tokens", Unit::Count, tokens.len() as u64);
    let parts: Vec<Part> = chunks(tokens.len())
        .into_par_iter()
        .map_init(Vec::new, |ids, range| {
            ids.resize(range.len(), 0);
            tokens.read(range.start, ids)?;
            progress.add(ids.len() as u64);
            Ok(part(range.start, ids, vocab, document))
        })
        .collect::<Result<_>>()?;
    let mut report = Report {
        documents: 0,
        starts_with_document: parts.first().and_then(|part| part.marks).is_some_and(|(first, _)| first == 0),
        longest: 0,
        largest: 0,
        invalid: 0,
        first_invalid: Vec::new(),
    };
    let mut start = 0;
    for part in parts {
        report.documents += part.documents;
        report.largest = report.largest.max(part.largest);
        report.invalid += part.invalid;
        report.first_invalid.extend(part.first_invalid);
        if let Some((first, last)) = part.marks {
            report.longest = report.longest.max(first - start).max(part.longest);
            start = last;
        }
    }
    report.first_invalid.truncate(Report::MAX_POSITIONS);
    report.longest = report.longest.max(tokens.len() - start);
    Ok(report)
}

/// Describes the tokens `ids` at `start`.
fn part(start: usize, ids: &[u32], vocab: usize, document: u32) -> Part {
    let mut part = Part { largest: ids.iter().copied().max().unwrap_or(0), ..Part::default() };
    for (i, _) in ids.iter().enumerate().filter(|&(_, &id)| id == document) {
        let at = start + i;
        part.documents += 1;
        part.longest = part.longest.max(part.marks.map_or(0, |(_, last)| at - last));
        part.marks = Some((part.marks.map_or(at, |(first, _)| first), at));
    }
    if part.largest as usize >= vocab {
        for (i, &id) in ids.iter().enumerate().filter(|&(_, &id)| id as usize >= vocab) {
            part.invalid += 1;
            if part.first_invalid.len() < Report::MAX_POSITIONS {
                part.first_invalid.push((start + i, id));
            }
        }
    }
    part
}

fn chunks(len: usize) -> Vec<Range<usize>> {
    (0..len).step_by(CHUNK).map(|start| start..len.min(start + CHUNK)).collect()
}

/// Fails with file and position if an id is not below `vocab`.
///
/// Reads every token of up to [`FULL_CHECK_TOKENS`] tokens. Of larger data sets, it reads that many, in evenly spaced chunks
/// that include the beginning and the end of each shard.
pub fn vocabulary(shards: &[Tokens], vocab: usize) -> Result<()> {
    vocabulary_of_up_to(shards, vocab, FULL_CHECK_TOKENS)
}

fn vocabulary_of_up_to(shards: &[Tokens], vocab: usize, most: usize) -> Result<()> {
    // 16-bit ids are below 65,536.
    let needs_check = |shard: &&Tokens| vocab < 1 << 16 || shard.width() != Some(Width::U16);
    let shards: Vec<&Tokens> = shards.iter().filter(needs_check).collect();
    let total: usize = shards.iter().map(|shard| shard.len()).sum();
    let stride = total.div_ceil(most.max(1)).max(1);
    let parts: Vec<(&Tokens, Range<usize>)> = shards
        .iter()
        .flat_map(|&shard| {
            let chunks = chunks(shard.len());
            let last = chunks.len().saturating_sub(1);
            let selected = move |i: &usize| i.is_multiple_of(stride) || *i == last;
            chunks.into_iter().enumerate().filter(move |(i, _)| selected(i)).map(move |(_, range)| (shard, range))
        })
        .collect();
    let selected = parts.iter().map(|(_, range)| range.len() as u64);
    let progress = progress::start("checking tokens", Unit::Count, selected.sum());
    let check = |bytes: &mut Vec<u8>, (shard, range): &(&Tokens, Range<usize>)| {
        let largest = match shard.largest_in(range.clone(), bytes) {
            Ok(largest) => largest,
            Err(error) => return Some(error),
        };
        progress.add(range.len() as u64);
        (largest as usize >= vocab).then(|| invalid_in(shard, range.clone(), vocab))
    };
    // The first error in the order of the shards is reported, for any number of threads.
    let first = parts.par_iter().map_init(Vec::new, check).find_first(Option::is_some).flatten();
    first.map_or(Ok(()), Err)
}

/// Returns the error for the first invalid id in a range.
fn invalid_in(shard: &Tokens, range: Range<usize>, vocab: usize) -> anyhow::Error {
    let mut ids = vec![0; range.len()];
    if let Err(error) = shard.read(range.start, &mut ids) {
        return error;
    }
    match ids.iter().position(|&id| id as usize >= vocab) {
        Some(i) => anyhow!(
            "{shard}: token {} at position {}: expected ids below {vocab}, the vocabulary size; tokenize the text for this \
             model",
            ids[i],
            range.start + i
        ),
        None => anyhow!("{shard}: the file changed during its check; do not replace token files during a run"),
    }
}

#[cfg(test)]
mod tests;
