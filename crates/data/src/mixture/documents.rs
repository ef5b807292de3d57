//! The documents of a shard.

use crate::Tokens;
use anyhow::{Context, Result};
use serde::{Deserialize, Deserializer, Serializer};

/// A document, or a part of a long one: the separator token, and the tokens that follow. A conversation has no separator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// The shard.
    pub shard: u32,
    /// The position of the first token in the shard, after the separator.
    pub start: u32,
    /// Number of tokens, including the separator.
    pub len: u32,
}

/// The documents of a shard that have text: the position of the first token after the separator, and the end.
///
/// A separator precedes each document. The tokens before the first separator continue a document of the shard before, and count as a
/// document of their own.
pub fn of_shard(tokens: &Tokens, separator: u32) -> Result<Vec<(u32, u32)>> {
    let separators = tokens.positions_of(separator)?;
    let starts = std::iter::once(0).chain(separators.iter().map(|&at| at + 1));
    let ends = separators.iter().copied().chain([tokens.len() as u32]);
    Ok(starts.zip(ends).filter(|(start, end)| start < end).collect())
}

/// Writes documents as one string, which takes a line of a checkpoint's sidecar.
pub fn serialize<S: Serializer>(documents: &[Document], serializer: S) -> Result<S::Ok, S::Error> {
    let text = |Document { shard, start, len }: &Document| format!("{shard}:{start}:{len}");
    serializer.serialize_str(&documents.iter().map(text).collect::<Vec<_>>().join(" "))
}

/// Reads what [`serialize`] writes.
pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Vec<Document>, D::Error> {
    let parse = |text: &str| -> Result<Document> {
        let mut numbers = text.split(':').map(str::parse);
        let mut next = || numbers.next().context("expected SHARD:START:LENGTH")?.context("expected a number");
        Ok(Document { shard: next()?, start: next()?, len: next()? })
    };
    let text = String::deserialize(deserializer)?;
    text.split_ascii_whitespace().map(parse).collect::<Result<_>>().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_begin_at_separators_and_at_the_start_of_the_shard() {
        let of = |tokens: &[u32]| of_shard(&Tokens::in_memory("shard", tokens.to_vec()), 9).unwrap();
        assert_eq!(of(&[9, 1, 2, 9, 3]), [(1, 3), (4, 5)]);
        assert_eq!(of(&[1, 9, 2]), [(0, 1), (2, 3)]);
        // Empty documents.
        assert_eq!(of(&[9, 9, 1, 9, 9]), [(2, 3)]);
        assert_eq!(of(&[9]), []);
        assert_eq!(of(&[1, 2]), [(0, 2)]);
    }
}
