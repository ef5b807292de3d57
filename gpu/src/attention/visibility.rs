//! Document masks and sliding windows: the keys that a query attends to, besides those that the causal mask hides.
//!
//! Query q attends to keys first(q) ..= q, and key k is seen by queries k ..= last(k). Both bounds never decrease with the position, so
//! the keys of a tile of queries, and the queries of a tile of keys, are a range: kernels skip the tiles outside of it. Within it, only
//! the tiles that a bound cuts are masked.

use cuda_std::{Global, device};

/// The bounds of visible keys and queries.
#[derive(Clone, Copy)]
pub struct Visibility {
    first_keys: Global<u32>,
    last_queries: Global<u32>,
    window: u32,
    t: u32,
}

#[device]
impl Visibility {
    /// Creates the bounds of documents and of a window, for sequences of `t` positions.
    ///
    /// `first_keys` and `last_queries` (B, T) are the first and the last position of the document at each position. They are null if a
    /// sequence is one document. A query attends to at most `window` keys, including its own position.
    pub fn new(first_keys: Global<u32>, last_queries: Global<u32>, window: u32, t: u32) -> Self {
        Self { first_keys, last_queries, window, t }
    }

    /// Returns true if a sequence may have several documents.
    pub fn has_documents(self) -> bool {
        !self.first_keys.is_null()
    }

    /// Returns the first key that query `query` of sequence `b` attends to. Queries past the end of the sequence have the bound of the
    /// last one.
    pub fn first_key(self, b: u32, query: u32) -> u32 {
        let query = query.min(self.t - 1);
        let document = if self.first_keys.is_null() { 0 } else { self.first_keys.at(self.at(b, query)) };
        document.max((query + 1).saturating_sub(self.window))
    }

    /// Returns the last query that attends to key `key` of sequence `b`. Keys past the end of the sequence have the bound of the last
    /// one.
    pub fn last_query(self, b: u32, key: u32) -> u32 {
        let key = key.min(self.t - 1);
        let document = if self.last_queries.is_null() { self.t - 1 } else { self.last_queries.at(self.at(b, key)) };
        document.min(key.saturating_add(self.window - 1))
    }

    fn at(self, b: u32, position: u32) -> usize {
        b as usize * self.t as usize + position as usize
    }
}
