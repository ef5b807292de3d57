//! Masks of token files: which tokens a model learns, and where conversations begin.
//!
//! The mask of `train_000000.bin` is `train_000000.mask`: a [`header`](crate::header) with magic 20251128, version 1 and the number of
//! tokens, and a byte of flags for each token.

use crate::Tokens;
use anyhow::{Result, ensure};
use rayon::prelude::*;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Extension of the files.
pub const EXTENSION: &str = "mask";

/// The token has loss when it is a target.
pub const LOSS: u32 = 1;

/// The token is the first of a conversation. It has no loss: it is no target of its own conversation.
pub const START: u32 = 2;

/// Flags that are read at a time.
const BLOCK: usize = 1 << 18;

/// Returns the path of the mask of a token file.
pub fn path(shard: &Path) -> PathBuf {
    shard.with_extension(EXTENSION)
}

/// The contents of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of tokens with loss.
    pub targets: usize,
    /// Number of conversations.
    pub conversations: usize,
    /// Whether the first token is the first of a conversation.
    pub starts_with_conversation: bool,
    /// Tokens of the longest conversation.
    pub longest: usize,
    /// Number of bytes with unknown flags.
    pub unknown: usize,
    /// The position and the value of the first of these.
    pub first_unknown: Option<(usize, u32)>,
}

/// Reads a mask completely.
pub fn report(mask: &Tokens) -> Result<Report> {
    let mut report = Report::default();
    let mut start = 0;
    for_each(mask, |at, flags| {
        report.targets += usize::from(flags & LOSS != 0);
        if flags & START != 0 {
            report.conversations += 1;
            report.starts_with_conversation |= at == 0;
            report.longest = report.longest.max(at - start);
            start = at;
        }
        if flags & !(LOSS | START) != 0 {
            report.unknown += 1;
            report.first_unknown.get_or_insert((at, flags));
        }
    })?;
    report.longest = report.longest.max(mask.len() - start);
    Ok(report)
}

/// Returns the conversations of a shard with at least two tokens, one to read and one to predict. Tokens before the first flag count as
/// a conversation.
pub(crate) fn conversations(mask: &Tokens) -> Result<Vec<Range<u32>>> {
    let mut starts = vec![0];
    for_each(mask, |at, flags| {
        if flags & START != 0 && at > 0 {
            starts.push(at as u32);
        }
    })?;
    starts.push(mask.len() as u32);
    Ok(starts.windows(2).map(|pair| pair[0]..pair[1]).filter(|range| range.len() > 1).collect())
}

fn for_each(mask: &Tokens, mut call: impl FnMut(usize, u32)) -> Result<()> {
    let mut block = vec![0; BLOCK.min(mask.len())];
    for start in (0..mask.len()).step_by(BLOCK) {
        let flags = &mut block[..BLOCK.min(mask.len() - start)];
        mask.read(start, flags)?;
        flags.iter().enumerate().for_each(|(i, &flags)| call(start + i, flags));
    }
    Ok(())
}

/// Checks the masks of shards: the hash that the data set records, the flags, and that there is a token with loss.
pub fn check(shards: &[Tokens]) -> Result<()> {
    shards.par_iter().filter_map(Tokens::mask).map(check_one).collect()
}

fn check_one(mask: &Tokens) -> Result<()> {
    if let Some(problem) = different_hash(mask)? {
        anyhow::bail!(problem);
    }
    let report = report(mask)?;
    if let Some(problem) = report.problem(mask) {
        anyhow::bail!(problem);
    }
    ensure!(
        report.targets > 0,
        "{mask}: expected at least one token with loss, found none in {}; make the data set again",
        mask.len()
    );
    Ok(())
}

/// Describes a difference between a mask and the hash that the data set records.
pub fn different_hash(mask: &Tokens) -> Result<Option<String>> {
    let Some(recorded) = mask.recorded_hash() else { return Ok(None) };
    Ok(mask.hash()?.filter(|found| *found != recorded).map(|found| {
        format!(
            "{mask}: expected flags with hash {recorded:016x}, as recorded in {}, found {found:016x}; restore the file or make the \
             data set again",
            crate::dataset::FILE_NAME
        )
    }))
}

impl Report {
    /// Describes unknown flags.
    pub fn problem(&self, mask: &Tokens) -> Option<String> {
        let (at, flags) = self.first_unknown?;
        Some(format!(
            "{mask}: expected the flags 1 (loss) and 2 (start of a conversation), found {} bytes with others, the first at position {at}: \
             {flags}; restore the file or make the data set again",
            self.unknown
        ))
    }
}
