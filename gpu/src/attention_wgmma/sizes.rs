//! Sizes of the operation, which locate heads in global memory.
//!
//! A row of qkv (B, T, NH + 2 KV, HS) has NH query heads, KV key heads and KV value heads. Query head h reads key-value
//! head h / group, with group = NH / KV.

use super::epilogue::OutputRows;
use super::scheduler::WorkTile;
use super::{Head, ROWS, TILE};
use core::marker::PhantomData;
use cuda_std::device;

/// The sizes T, KV and group.
#[derive(Clone, Copy)]
pub struct Sizes<H> {
    /// Positions of a sequence.
    pub t: u32,
    /// Key-value heads.
    pub kv: u32,
    /// Query heads of a key-value head.
    pub group: u32,
    head: PhantomData<H>,
}

#[device]
impl<H: Head> Sizes<H> {
    /// Creates the sizes.
    pub fn new(t: u32, kv: u32, group: u32) -> Self {
        Self { t, kv, group, head: PhantomData }
    }

    /// Returns NH, the number of query heads.
    pub fn nh(self) -> u32 {
        self.kv * self.group
    }

    /// Returns the key-value head that query head `h` reads. Divides: callers compute it once per work tile.
    pub fn kv_head(self, h: u32) -> u32 {
        h / self.group
    }

    /// Returns the index of the keys of key-value head `kv_head` among the NH + 2 KV heads of qkv. Query heads come
    /// first: their index is that of the head.
    pub fn key(self, kv_head: u32) -> u32 {
        self.nh() + kv_head
    }

    /// Returns the index of the values of key-value head `kv_head` among the NH + 2 KV heads of qkv.
    pub fn value(self, kv_head: u32) -> u32 {
        self.nh() + self.kv + kv_head
    }

    /// Returns the elements of a row of (B, T, NH, HS).
    pub fn stride(self) -> usize {
        (self.nh() * H::HS) as usize
    }

    /// Returns the elements of a row of (B, T, NH + 2 KV, HS).
    pub fn packed_stride(self) -> usize {
        ((self.nh() + 2 * self.kv) * H::HS) as usize
    }

    /// Returns the first element of row `row` of sequence `b` for head `h` in (B, T, NH, HS).
    pub fn row(self, b: u32, h: u32, row: u32) -> usize {
        (b as usize * self.t as usize + row as usize) * self.stride() + (h * H::HS) as usize
    }

    /// Returns the first element of row `row` of sequence `b` for head `index` in (B, T, NH + 2 KV, HS).
    pub fn packed_row(self, b: u32, index: u32, row: u32) -> usize {
        (b as usize * self.t as usize + row as usize) * self.packed_stride() + (index * H::HS) as usize
    }

    /// Returns a consumer's rows of a work tile, of head `index` of `out` (B, T, NH + 2 KV, HS).
    pub fn packed_rows<O>(self, out: O, tile: WorkTile, index: u32, consumer: u32) -> OutputRows<O> {
        let row = tile.tile * TILE + consumer * ROWS;
        let (first, rows) = (self.packed_row(tile.b, index, row), self.t.saturating_sub(row));
        OutputRows { out, first, stride: self.packed_stride(), rows }
    }

    /// Returns the element of row 0 of sequence `b` for head `h` in (B, NH, T).
    pub fn statistics(self, b: u32, h: u32) -> usize {
        (b as usize * self.nh() as usize + h as usize) * self.t as usize
    }
}
