//! TMA: boxes of a tensor in global memory, tiles of 128-byte rows in shared memory, 128-byte swizzle.

use super::super::access::check;
use super::super::block::{Block, fail, with, with_peer};
use super::super::checker::{Clocks, Kind};
use super::super::report::{Fault, Line, Site};
use super::mbarrier::{complete_bytes, locate_fenced};
use super::{reach, shared_offset, swizzle};
use std::ops::Range;
use std::panic::Location;
use std::{mem, ptr};

/// Columns of a box: 128 bytes of bf16.
const COLUMNS: u32 = 64;
const ROW_BYTES: usize = 128;
const MAGIC: u64 = u64::from_le_bytes(*b"tensor2d");

/// What a tensor map says, in the emulator's own encoding.
#[derive(Clone, Copy)]
struct Map {
    base: u64,
    rows: u64,
    columns: u64,
    row_bytes: u64,
    box_rows: u64,
    /// Of a map of three dimensions: how many matrices follow each other.
    matrices: Option<u64>,
}

/// The 128 bytes that stand for the map in emulated memory, of one matrix or of `matrices`.
pub fn tensor_map(
    base: *const u8,
    matrices: Option<u64>,
    rows: u64,
    columns: u64,
    row_bytes: u64,
    box_rows: u32,
    box_columns: u32,
) -> [u64; 16] {
    assert!(base.addr().is_multiple_of(16), "a tensor map's base is aligned to 16 bytes");
    assert!(
        (1..1 << 32).contains(&rows) && (1..1 << 32).contains(&columns),
        "a tensor map is of 1 to 2^32-1 rows and columns, found {rows} x {columns}"
    );
    assert!(
        row_bytes.is_multiple_of(16) && (2 * columns..1 << 40).contains(&row_bytes),
        "rows of {columns} bf16 lie a multiple of 16 bytes apart, found {row_bytes}"
    );
    assert!((1..=256).contains(&box_rows), "a box has 1 to 256 rows, found {box_rows}");
    assert!(box_columns == COLUMNS, "a box of 128-byte swizzle has 64 columns of bf16, found {box_columns}");
    assert!(
        matrices.is_none_or(|matrices| (1..1 << 32).contains(&matrices) && rows * row_bytes < 1 << 40),
        "a tensor map is of 1 to 2^32-1 matrices less than 2^40 bytes apart, found {matrices:?}, {rows} x {row_bytes} bytes"
    );
    let mut words = [0; 16];
    words[..7].copy_from_slice(&[
        MAGIC,
        base.expose_provenance() as u64,
        rows,
        columns,
        row_bytes,
        u64::from(box_rows),
        matrices.unwrap_or(0),
    ]);
    words
}

impl Map {
    /// # Safety
    /// `map` must be valid for reads of 128 bytes.
    unsafe fn read(map: *const u8, at: Site) -> Self {
        check(Kind::Read, map.addr(), 128, 64, at);
        // SAFETY: the caller's.
        let words = unsafe { map.cast::<[u64; 16]>().read_unaligned() };
        let [magic, base, rows, columns, row_bytes, box_rows, matrices, ..] = words;
        if magic != MAGIC {
            let message = format!("no tensor map of the emulator's lies there, at {}", Line(at));
            fail(Fault::Operand, at, None, message);
        }
        let matrices = (matrices > 0).then_some(matrices);
        Self { base, rows, columns, row_bytes, box_rows, matrices }
    }

    /// Matrix `z` of a map of three dimensions, or the one of a map of two.
    fn matrix(self, z: Option<u32>, at: Site) -> Self {
        match (self.matrices, z) {
            (None, None) => self,
            (Some(matrices), Some(z)) if u64::from(z) < matrices => {
                Self { base: self.base + u64::from(z) * self.rows * self.row_bytes, ..self }
            }
            (Some(_), Some(_)) => Self { rows: 0, ..self },
            (matrices, _) => {
                let (has, takes) = if matrices.is_some() { (3, 2) } else { (2, 3) };
                let message =
                    format!("a tensor map of {has} dimensions for a copy that takes {takes}, at {}", Line(at));
                fail(Fault::Operand, at, None, message)
            }
        }
    }

    fn bytes(&self) -> usize {
        self.box_rows as usize * ROW_BYTES
    }

    /// The part of the box at (`x`, `y`) that is inside the tensor: for each such row of the box the columns of the box
    /// and where the first of them lies.
    fn inside(self, x: i32, y: i32) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let (x, y) = (i64::from(x), i64::from(y));
        let first = (-x).clamp(0, i64::from(COLUMNS));
        let last = (self.columns as i64 - x).clamp(first, i64::from(COLUMNS));
        let rows = (-y).max(0)..(self.rows as i64 - y).min(self.box_rows as i64);
        rows.filter(move |_| first < last).map(move |row| {
            let at = self.base as i64 + (y + row) * self.row_bytes as i64 + 2 * (x + first);
            (row as usize, first as usize..last as usize, at as usize)
        })
    }
}

/// A load under way.
pub struct Load {
    map: Map,
    x: i32,
    y: i32,
    to: usize,
    barrier: usize,
    /// What its issuer knew.
    known: Clocks,
    at: Site,
}

impl Load {
    pub fn at(&self) -> Site {
        self.at
    }
}

/// A store under way.
pub struct Store {
    map: Map,
    x: i32,
    y: i32,
    from: usize,
    /// The tile when the store was issued, which it must still be when the store is made.
    tile: Vec<u8>,
    /// Number of its group once that is closed.
    group: Option<usize>,
    at: Site,
}

impl Store {
    pub fn at(&self) -> Site {
        self.at
    }
}

/// # Safety
/// `map` must be valid for reads of 128 bytes.
#[track_caller]
pub unsafe fn tma_prefetch(map: *const u8) {
    // SAFETY: the caller's.
    unsafe { Map::read(map, Location::caller()) };
}

/// # Safety
/// As [`tma_load_2d_multicast`] with this block.
#[track_caller]
pub unsafe fn tma_load_2d(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64) {
    // SAFETY: the caller's.
    unsafe { load(to, map, [x, y], None, barrier, 1 << with(|block| block.rank), Location::caller()) }
}

/// # Safety
/// As [`tma_load_2d`], with a map of three dimensions.
#[track_caller]
pub unsafe fn tma_load_3d(to: *mut u8, map: *const u8, x: u32, y: u32, z: u32, barrier: *mut u64) {
    // SAFETY: the caller's.
    unsafe { load(to, map, [x, y], Some(z), barrier, 1 << with(|block| block.rank), Location::caller()) }
}

/// # Safety
/// `map` must be a tensor map whose tensor is valid for reads, `to` a tile the size of its box in shared memory, and
/// `barrier` an initialised barrier, in every block of the cluster whose bit is set in `blocks`.
#[track_caller]
pub unsafe fn tma_load_2d_multicast(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64, blocks: u16) {
    // SAFETY: the caller's.
    unsafe { load(to, map, [x, y], None, barrier, blocks, Location::caller()) }
}

unsafe fn load(
    to: *mut u8,
    map: *const u8,
    [x, y]: [u32; 2],
    z: Option<u32>,
    barrier: *mut u64,
    blocks: u16,
    at: Site,
) {
    // SAFETY: the caller's.
    let map = unsafe { Map::read(map, at) }.matrix(z, at);
    let to = shared_offset(to, map.bytes(), 1024, at, "TMA load");
    let (x, y) = (x as i32, y as i32);
    for (_, columns, from) in map.inside(x, y) {
        check(Kind::Read, from, columns.len() * 2, 2, at);
    }
    let ranks = (0..16).filter(|rank| blocks >> rank & 1 != 0).map(|rank| reach(rank, at));
    for rank in ranks {
        let barrier = locate_fenced(barrier, rank, at);
        let tile = with_peer(rank, |block| block.shared_base().addr() + to).unwrap_or_default();
        check(Kind::BulkWrite, tile, map.bytes(), 16, at);
        let known = with(Block::publish);
        with_peer(rank, |block| {
            block.shared()[to..to + map.bytes()].fill(0xff);
            block.hopper.loads.push_back(Load { map, x, y, to, barrier, known, at });
        });
    }
}

/// Loads land in any order: here the oldest first in one block, the newest first in the next, so that who waits for one load
/// only and reads another is found in one of them.
pub fn land_one(block: &mut Block) -> bool {
    let loads = &mut block.hopper.loads;
    let load = if block.index.iter().sum::<u32>().is_multiple_of(2) { loads.pop_front() } else { loads.pop_back() };
    let Some(Load { map, x, y, to, barrier, known, .. }) = load else { return false };
    let tile = &mut block.shared()[to..to + map.bytes()];
    tile.fill(0);
    for (row, columns, from) in map.inside(x, y) {
        let mut bytes = [0; ROW_BYTES];
        let part = &mut bytes[columns.start * 2..columns.end * 2];
        let from = ptr::with_exposed_provenance::<u8>(from);
        // SAFETY: the tensor is valid for reads, as the contract of the load says, and `inside` stays in it.
        unsafe { ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
        for (piece, bytes) in bytes.chunks(16).enumerate() {
            tile[swizzle(row * ROW_BYTES + piece * 16)..][..16].copy_from_slice(bytes);
        }
    }
    let bytes = map.bytes();
    let start = block.shared_base().addr() + to;
    block.landed(start, bytes);
    complete_bytes(block, barrier, bytes, &known);
    true
}

/// # Safety
/// `map` must be a tensor map whose tensor is valid for writes until the store is waited for, and `from` a tile the size
/// of its box in shared memory.
#[track_caller]
pub unsafe fn tma_store_2d(map: *const u8, x: u32, y: u32, from: *const u8) {
    let at = Location::caller();
    // SAFETY: the caller's.
    let map = unsafe { Map::read(map, at) }.matrix(None, at);
    check(Kind::AsyncRead, from.addr(), map.bytes(), 16, at);
    let from = shared_offset(from, map.bytes(), 1024, at, "TMA store");
    with(|block| {
        let tile = block.shared()[from..from + map.bytes()].to_vec();
        let store = Store { map, x: x as i32, y: y as i32, from, tile, group: None, at };
        block.hopper.stores.entry(block.current).or_default().push(store);
    });
}

pub fn tma_commit() {
    with(|block| {
        let groups = block.hopper.store_groups.entry(block.current).or_default();
        let stores = block.hopper.stores.entry(block.current).or_default();
        for store in stores {
            store.group.get_or_insert(*groups);
        }
        *groups += 1;
    });
}

/// Makes this thread's committed stores but those of the newest `PENDING` groups.
#[track_caller]
pub fn tma_wait_read<const PENDING: u32>() {
    let stores = with(|block| {
        let groups = block.hopper.store_groups.get(&block.current).copied().unwrap_or_default();
        let done = groups.saturating_sub(PENDING as usize);
        let mine = block.hopper.stores.entry(block.current).or_default();
        let made = mine.partition_point(|store| store.group.is_some_and(|group| group < done));
        mine.drain(..made).collect::<Vec<_>>()
    });
    for Store { map, x, y, from, tile, at, .. } in stores {
        if !with(|block| block.shared()[from..from + tile.len()] == tile) {
            let wait = Location::caller();
            let message = format!(
                "the tile at shared memory + {from} was overwritten while the TMA store of {} had yet to be waited for, at {}",
                Line(at),
                Line(wait)
            );
            fail(Fault::AsyncCopy, at, Some(wait), message);
        }
        for (row, columns, to) in map.inside(x, y) {
            check(Kind::Write, to, columns.len() * 2, 2, at);
            let to = ptr::with_exposed_provenance_mut::<[u8; 2]>(to);
            for (i, column) in columns.enumerate() {
                let element = swizzle(row * ROW_BYTES + column * mem::size_of::<u16>());
                // SAFETY: the tensor is valid for writes, as the contract of the store says, and `inside` stays in it.
                unsafe { to.add(i).write_unaligned([tile[element], tile[element + 1]]) };
            }
        }
    }
}

/// As [`tma_wait_read`] of all: a store is made all at once.
#[track_caller]
pub fn tma_wait() {
    tma_wait_read::<0>();
}
