//! TMA: copies between boxes of a tensor in global memory and tiles of 128-byte rows in shared memory, with the
//! 128-byte swizzle.

use super::access::check;
use super::block::{Block, fail, with};
use super::checker::{Kind, VectorClock};
use super::hopper::{shared_offset, swizzle};
use super::mbarrier::{complete_bytes, locate_fenced};
use super::report::{Fault, Line, Site};
use std::ops::Range;
use std::panic::Location;
use std::{mem, ptr};

/// Columns in a box: 128 bytes of bf16.
const COLUMNS: u32 = 64;
const ROW_BYTES: usize = 128;
/// First word of an encoded tensor map.
const MAGIC: u64 = u64::from_le_bytes(*b"tensor2d");

/// A decoded tensor map.
#[derive(Clone, Copy)]
struct Map {
    base: u64,
    rows: u64,
    columns: u64,
    row_bytes: u64,
    box_rows: u64,
    /// Number of consecutive matrices, for a map with three dimensions.
    matrices: Option<u64>,
}

/// Encodes a tensor map of two dimensions, or of three if `matrices` is given, as the 128 bytes that the emulator
/// reads.
pub fn tensor_map(
    base: *const u8,
    matrices: Option<u64>,
    rows: u64,
    columns: u64,
    row_bytes: u64,
    box_rows: u32,
    box_columns: u32,
) -> [u64; 16] {
    assert!(base.addr().is_multiple_of(16), "tensor map: the base must be aligned to 16 bytes");
    assert!(
        (1..1 << 32).contains(&rows) && (1..1 << 32).contains(&columns),
        "tensor map: expected 1 to 2^32-1 rows and columns, found {rows} x {columns}"
    );
    assert!(
        row_bytes.is_multiple_of(16) && (2 * columns..1 << 40).contains(&row_bytes),
        "tensor map: expected a row stride of a multiple of 16 bytes for {columns} bf16, found {row_bytes} bytes"
    );
    assert!((1..=256).contains(&box_rows), "tensor map: expected a box of 1 to 256 rows, found {box_rows}");
    assert!(box_columns == COLUMNS, "tensor map: expected a box of {COLUMNS} bf16 columns, found {box_columns}");
    assert!(
        matrices.is_none_or(|matrices| (1..1 << 32).contains(&matrices) && rows * row_bytes < 1 << 40),
        "tensor map: expected 1 to 2^32-1 matrices below 2^40 bytes, found {matrices:?} of {rows} x {row_bytes} bytes"
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
        // SAFETY: guaranteed by the caller.
        let words = unsafe { map.cast::<[u64; 16]>().read_unaligned() };
        let [magic, base, rows, columns, row_bytes, box_rows, matrices, ..] = words;
        if magic != MAGIC {
            let message = format!(
                "invalid operand: the tensor map was not encoded by TensorMap::emulated or emulated_3d ({})",
                Line(at)
            );
            fail(Fault::Operand, at, None, message);
        }
        let matrices = (matrices > 0).then_some(matrices);
        Self { base, rows, columns, row_bytes, box_rows, matrices }
    }

    /// Returns the 2-D map of matrix `z` if the map has three dimensions, or the map itself if it has two and `z` is
    /// `None`.
    fn matrix(self, z: Option<u32>, at: Site) -> Self {
        match (self.matrices, z) {
            (None, None) => self,
            (Some(matrices), Some(z)) if u64::from(z) < matrices => {
                Self { base: self.base + u64::from(z) * self.rows * self.row_bytes, ..self }
            }
            (Some(_), Some(_)) => Self { rows: 0, ..self },
            (matrices, _) => {
                let (found, expected) = if matrices.is_some() { (3, 2) } else { (2, 3) };
                let message = format!(
                    "invalid operand: tensor map: expected {expected} dimensions, found {found} ({})",
                    Line(at)
                );
                fail(Fault::Operand, at, None, message)
            }
        }
    }

    fn bytes(&self) -> usize {
        self.box_rows as usize * ROW_BYTES
    }

    /// Returns the part of the box at column `x` and row `y` that is inside the tensor: the row of the box, the columns
    /// of the box, and the address of the first of these columns.
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

/// A pending load.
pub struct Load {
    map: Map,
    x: i32,
    y: i32,
    to: usize,
    barrier: usize,
    /// Clock of the thread that issued the load.
    clock: VectorClock,
    at: Site,
}

impl Load {
    pub fn at(&self) -> Site {
        self.at
    }
}

/// A pending store.
pub struct Store {
    map: Map,
    x: i32,
    y: i32,
    from: usize,
    /// Contents of the tile when the store was issued. They must not change before the store executes.
    tile: Vec<u8>,
    /// Number of its group, once that is committed.
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
    // SAFETY: guaranteed by the caller.
    unsafe { Map::read(map, Location::caller()) };
}

/// # Safety
/// `map` must be a tensor map whose tensor is valid for reads, `to` a tile in shared memory of the size of the map's
/// box, and `barrier` an initialized mbarrier.
#[track_caller]
pub unsafe fn tma_load_2d(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { load(to, map, [x, y], None, barrier, Location::caller()) }
}

/// # Safety
/// Same as [`tma_load_2d`], with a map of three dimensions.
#[track_caller]
pub unsafe fn tma_load_3d(to: *mut u8, map: *const u8, x: u32, y: u32, z: u32, barrier: *mut u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { load(to, map, [x, y], Some(z), barrier, Location::caller()) }
}

/// # Safety
/// Same as [`tma_load_2d`].
unsafe fn load(to: *mut u8, map: *const u8, [x, y]: [u32; 2], z: Option<u32>, barrier: *mut u64, at: Site) {
    // SAFETY: guaranteed by the caller.
    let map = unsafe { Map::read(map, at) }.matrix(z, at);
    let address = to.addr();
    let to = shared_offset(to, map.bytes(), 1024, at, "TMA load");
    let (x, y) = (x as i32, y as i32);
    for (_, columns, from) in map.inside(x, y) {
        check(Kind::Read, from, columns.len() * 2, 2, at);
    }
    let barrier = locate_fenced(barrier, at);
    check(Kind::BulkWrite, address, map.bytes(), 16, at);
    with(|block| {
        let clock = block.release();
        block.shared()[to..to + map.bytes()].fill(0xff);
        block.hopper.loads.push_back(Load { map, x, y, to, barrier, clock, at });
    });
}

/// Completes one pending TMA load of `block`. Returns false if there is none.
///
/// Loads complete in any order on the device. Here the oldest completes first in one block and the newest in the next,
/// so that one of the blocks reveals a thread that waits for one load and reads another.
pub fn complete_one_load(block: &mut Block) -> bool {
    let loads = &mut block.hopper.loads;
    let load = if block.index.iter().sum::<u32>().is_multiple_of(2) { loads.pop_front() } else { loads.pop_back() };
    let Some(Load { map, x, y, to, barrier, clock, .. }) = load else { return false };
    let tile = &mut block.shared()[to..to + map.bytes()];
    tile.fill(0);
    for (row, columns, from) in map.inside(x, y) {
        let mut bytes = [0; ROW_BYTES];
        let part = &mut bytes[columns.start * 2..columns.end * 2];
        let from = ptr::with_exposed_provenance::<u8>(from);
        // SAFETY: the caller of the load guarantees that the tensor is valid for reads, and `inside` stays within it.
        unsafe { ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
        for (chunk, bytes) in bytes.chunks(16).enumerate() {
            tile[swizzle(row * ROW_BYTES + chunk * 16)..][..16].copy_from_slice(bytes);
        }
    }
    let bytes = map.bytes();
    let start = block.shared_base().addr() + to;
    block.bulk_copy_completed(start, bytes);
    complete_bytes(block, barrier, bytes, &clock);
    true
}

/// # Safety
/// `map` must be a tensor map whose tensor is valid for writes until the store is waited for, and `from` a tile in
/// shared memory of the size of the map's box.
#[track_caller]
pub unsafe fn tma_store_2d(map: *const u8, x: u32, y: u32, from: *const u8) {
    let at = Location::caller();
    // SAFETY: guaranteed by the caller.
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

/// Executes this thread's committed stores except those of the newest `PENDING` groups.
#[track_caller]
pub fn tma_wait_read<const PENDING: u32>() {
    let stores = with(|block| {
        let groups = block.hopper.store_groups.get(&block.current).copied().unwrap_or_default();
        let done = groups.saturating_sub(PENDING as usize);
        let mine = block.hopper.stores.entry(block.current).or_default();
        let count = mine.partition_point(|store| store.group.is_some_and(|group| group < done));
        mine.drain(..count).collect::<Vec<_>>()
    });
    for Store { map, x, y, from, tile, at, .. } in stores {
        if !with(|block| block.shared()[from..from + tile.len()] == tile) {
            let wait = Location::caller();
            let message = format!(
                "asynchronous copy in flight: the tile at shared memory + {from} was overwritten between its TMA store \
                 ({}) and the wait for the store ({})",
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
                // SAFETY: the caller of the store guarantees that the tensor is valid for writes, and `inside` stays
                // within it.
                unsafe { to.add(i).write_unaligned([tile[element], tile[element + 1]]) };
            }
        }
    }
}

/// Executes all committed stores of this thread. The emulator does not distinguish reading the tile from completing the
/// store.
#[track_caller]
pub fn tma_wait() {
    tma_wait_read::<0>();
}
