//! Counts of distinct pieces, in a few bytes for each.

use std::sync::{Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// Number of tables that threads lock separately.
const SHARDS: usize = 64;

/// Slots of an empty table.
const MIN_SLOTS: usize = 16;

/// No entry.
const NO_ENTRY: u32 = u32::MAX;

/// A hash table of pieces. Each piece takes its bytes, 16 bytes, and four bytes for each of one to two slots.
#[derive(Debug, Default)]
pub struct Table {
    /// The bytes of all pieces.
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    /// Indices of entries, with linear probing. The number of slots is 0 or a power of two.
    slots: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    count: u64,
    /// The end of the piece in the bytes of the table. It begins at the end of the entry before.
    end: u32,
    /// The lower half of the hash.
    hash: u32,
}

impl Table {
    /// Adds `count` occurrences of a piece.
    pub fn add(&mut self, piece: &[u8], count: u64) {
        self.add_hashed(piece, count, xxh3_64(piece) as u32);
    }

    fn add_hashed(&mut self, piece: &[u8], count: u64, hash: u32) {
        if self.entries.len() * 4 >= self.slots.len() * 3 {
            self.grow();
        }
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let index = self.slots[slot];
            if index == NO_ENTRY {
                break;
            }
            let index = index as usize;
            if self.entries[index].hash == hash && self.piece(index) == piece {
                self.entries[index].count += count;
                return;
            }
            slot = (slot + 1) & mask;
        }
        self.slots[slot] = self.entries.len() as u32;
        self.bytes.extend_from_slice(piece);
        self.entries.push(Entry { count, end: self.bytes.len() as u32, hash });
    }

    fn grow(&mut self) {
        let slots = (self.slots.len() * 2).max(MIN_SLOTS);
        self.slots.clear();
        self.slots.resize(slots, NO_ENTRY);
        for (index, entry) in self.entries.iter().enumerate() {
            let mut slot = entry.hash as usize & (slots - 1);
            while self.slots[slot] != NO_ENTRY {
                slot = (slot + 1) & (slots - 1);
            }
            self.slots[slot] = index as u32;
        }
    }

    fn piece(&self, index: usize) -> &[u8] {
        let begin = if index == 0 { 0 } else { self.entries[index - 1].end };
        &self.bytes[begin as usize..self.entries[index].end as usize]
    }

    /// Returns the pieces with their counts, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.entries.iter().enumerate().map(|(index, entry)| (self.piece(index), entry.count))
    }

    /// Removes all pieces, but keeps the memory.
    fn clear(&mut self) {
        self.bytes.clear();
        self.entries.clear();
        self.slots.fill(NO_ENTRY);
    }

    /// Removes the pieces with at most `count` occurrences. Returns the number of their occurrences.
    fn remove_rare(&mut self, count: u64) -> u64 {
        let old = std::mem::take(self);
        let mut removed = 0;
        for (index, entry) in old.entries.iter().enumerate() {
            if entry.count > count {
                self.add_hashed(old.piece(index), entry.count, entry.hash);
            } else {
                removed += entry.count;
            }
        }
        removed
    }

    /// Returns the memory that training on these pieces takes, in bytes.
    fn training_bytes(&self) -> usize {
        self.bytes.len() * BYTES_FOR_EACH_BYTE + self.entries.len() * BYTES_FOR_EACH_PIECE
    }
}

/// Memory that training takes for each byte of a piece: a token and its position in the index of pairs, and the growth of that index.
const BYTES_FOR_EACH_BYTE: usize = 12;

/// Memory that training takes for each piece: its header, and its pairs in the map and the heap.
const BYTES_FOR_EACH_PIECE: usize = 24;

/// The distinct pieces of a text with their counts. Threads add to it at the same time.
#[derive(Debug)]
pub struct Pieces {
    shards: Vec<Mutex<Table>>,
    removed: u64,
}

impl Default for Pieces {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), removed: 0 }
    }
}

impl Pieces {
    /// Adds all pieces of a table, and empties it.
    pub fn add(&self, table: &mut Table) {
        for (index, entry) in table.entries.iter().enumerate() {
            // The lower bits of the hash select the slot within the shard.
            let shard = &self.shards[entry.hash as usize >> 26];
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.add_hashed(table.piece(index), entry.count, entry.hash);
        }
        table.clear();
    }

    /// Returns the number of distinct pieces.
    pub fn len(&mut self) -> usize {
        self.tables().map(|table| table.entries.len()).sum()
    }

    /// Returns whether there are no pieces.
    pub fn is_empty(&mut self) -> bool {
        self.len() == 0
    }

    /// Returns the number of occurrences of pieces that were removed to limit the memory.
    pub fn removed(&self) -> u64 {
        self.removed
    }

    /// Removes the rarest pieces if training would take more than `max` bytes, until it takes at most three quarters of that.
    pub fn limit(&mut self, max: usize) {
        let mut rare = 0;
        let mut limit = max;
        while self.tables().map(|table| table.training_bytes()).sum::<usize>() > limit {
            limit = max / 4 * 3;
            rare += 1;
            self.removed += self.tables().map(|table| table.remove_rare(rare)).sum::<u64>();
        }
    }

    fn tables(&mut self) -> impl Iterator<Item = &mut Table> {
        self.shards.iter_mut().map(|shard| shard.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the tables. A piece is in one of them.
    pub(super) fn into_tables(self) -> impl Iterator<Item = Table> {
        self.shards.into_iter().map(|shard| shard.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Several of the pieces have the same hash of 32 bits.
    #[test]
    fn pieces_with_the_same_hash_are_distinct() {
        let names: Vec<String> = (0..200_000).map(|i| format!(" {i}")).collect();
        let (mut pieces, mut table) = (Pieces::default(), Table::default());
        for (i, name) in (0..).zip(&names) {
            table.add(name.as_bytes(), i % 5 + 1);
            table.add(name.as_bytes(), 1);
            if i % 1000 == 0 {
                pieces.add(&mut table);
            }
        }
        pieces.add(&mut table);
        assert_eq!(pieces.len(), names.len());
        let tables: Vec<Table> = pieces.into_tables().collect();
        let found: BTreeMap<&[u8], u64> = tables.iter().flat_map(Table::iter).collect();
        assert!((0..).zip(&names).all(|(i, name)| found[name.as_bytes()] == i % 5 + 2));
    }
}
