//! TMA: copies between boxes of a tensor in global memory and tiles in shared memory: rows of 128 bytes with the 128-byte
//! swizzle, or of 64 bytes with the 64-byte swizzle.

use super::access::check;
use super::block::{Block, fail, with};
use super::checker::{Kind, VectorClock};
use super::hopper::{shared_offset, swizzle};
use super::mbarrier::{complete_bytes, locate_fenced};
use super::report::{Fault, Line, Site};
use std::ops::Range;
use std::panic::Location;
use std::ptr;

/// Bytes of the longest row of a box.
const MAX_ROW_BYTES: usize = 128;
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
    box_columns: u64,
    element_bytes: u64,
    /// Number of matrices and the distance of one to the next in bytes, for a map with three dimensions.
    matrices: Option<[u64; 2]>,
}

/// Encodes a tensor map of two dimensions, or of three if `matrices` gives their number and distance in bytes, as the
/// 128 bytes that the emulator reads.
pub fn tensor_map<T>(
    base: *const T,
    [rows, columns]: [u64; 2],
    row_bytes: u64,
    matrices: Option<[u64; 2]>,
    [box_rows, box_columns]: [u32; 2],
) -> [u64; 16] {
    let element_bytes = size_of::<T>() as u64;
    assert!(base.addr().is_multiple_of(16), "tensor map: the base must be aligned to 16 bytes");
    assert!(
        (1..1 << 32).contains(&rows) && (1..1 << 32).contains(&columns),
        "tensor map: expected 1 to 2^32-1 rows and columns, found {rows} x {columns}"
    );
    assert!(
        row_bytes.is_multiple_of(16) && (element_bytes * columns..1 << 40).contains(&row_bytes),
        "tensor map: expected a row stride of a multiple of 16 bytes for {columns} elements of {element_bytes} bytes, \
         found {row_bytes} bytes"
    );
    assert!((1..=256).contains(&box_rows), "tensor map: expected a box of 1 to 256 rows, found {box_rows}");
    assert!(
        [64, 128].contains(&(u64::from(box_columns) * element_bytes)),
        "tensor map: expected a box with rows of 64 or 128 bytes, found {box_columns} elements of {element_bytes} bytes"
    );
    assert!(
        matrices.is_none_or(|[count, bytes]| (1..1 << 32).contains(&count)
            && bytes.is_multiple_of(16)
            && (1..1 << 40).contains(&bytes)),
        "tensor map: expected 1 to 2^32-1 matrices, a multiple of 16 bytes below 2^40 apart, found {matrices:?}"
    );
    let [matrices, matrix_bytes] = matrices.unwrap_or_default();
    let mut words = [0; 16];
    words[..10].copy_from_slice(&[
        MAGIC,
        base.expose_provenance() as u64,
        rows,
        columns,
        row_bytes,
        u64::from(box_rows),
        u64::from(box_columns),
        matrices,
        matrix_bytes,
        element_bytes,
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
        let [magic, base, rows, columns, row_bytes, box_rows, box_columns, matrices, matrix_bytes, element_bytes, ..] =
            words;
        if magic != MAGIC {
            let message =
                format!("invalid operand: the tensor map was not encoded by TensorMap::emulated… ({})", Line(at));
            fail(Fault::Operand, at, None, message);
        }
        let matrices = (matrices > 0).then_some([matrices, matrix_bytes]);
        Self { base, rows, columns, row_bytes, box_rows, box_columns, element_bytes, matrices }
    }

    /// Returns the map of the matrix at these coordinates, and the column and row in it.
    ///
    /// The map must have as many dimensions as there are coordinates. They are in order of increasing stride: column,
    /// row and matrix, or column, matrix and row if the rows of the matrices are interleaved.
    fn matrix(self, coordinates: &[u32], at: Site) -> (Self, [i32; 2]) {
        match (self.matrices, coordinates) {
            (None, &[x, y]) => (self, [x as i32, y as i32]),
            (Some([count, bytes]), &[x, y, z]) => {
                let (row, matrix) = if bytes < self.row_bytes { (z, y) } else { (y, z) };
                let inside = u64::from(matrix) < count;
                let rows = if inside { self.rows } else { 0 };
                let base = self.base + if inside { u64::from(matrix) * bytes } else { 0 };
                (Self { base, rows, ..self }, [x as i32, row as i32])
            }
            (matrices, _) => {
                let found = if matrices.is_some() { 3 } else { 2 };
                let message = format!(
                    "invalid operand: tensor map: expected {} dimensions, found {found} ({})",
                    coordinates.len(),
                    Line(at)
                );
                fail(Fault::Operand, at, None, message)
            }
        }
    }

    fn element_bytes(&self) -> usize {
        self.element_bytes as usize
    }

    /// Returns the bytes of a row of the box.
    fn box_row_bytes(&self) -> usize {
        self.element_bytes() * self.box_columns as usize
    }

    fn bytes(&self) -> usize {
        self.box_rows as usize * self.box_row_bytes()
    }

    /// Returns the alignment of a tile: the bytes after which the swizzle repeats.
    fn alignment(&self) -> usize {
        8 * self.box_row_bytes()
    }

    /// Returns the offset in the tile of byte `byte` of `row`.
    fn swizzled(&self, row: usize, byte: usize) -> usize {
        let at = row * self.box_row_bytes() + byte;
        if self.box_row_bytes() == 128 { swizzle(at) } else { at ^ (at >> 7 & 3) << 4 }
    }

    /// Returns the part of the box at column `x` and row `y` that is inside the tensor: the row of the box, the columns
    /// of the box, and the address of the first of these columns.
    fn inside(self, x: i32, y: i32) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let (x, y, box_columns) = (i64::from(x), i64::from(y), self.box_columns as i64);
        let first = (-x).clamp(0, box_columns);
        let last = (self.columns as i64 - x).clamp(first, box_columns);
        let rows = (-y).max(0)..(self.rows as i64 - y).min(self.box_rows as i64);
        rows.filter(move |_| first < last).map(move |row| {
            let at = self.base as i64 + (y + row) * self.row_bytes as i64 + self.element_bytes as i64 * (x + first);
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
    unsafe { load(to, map, &[x, y], barrier, Location::caller()) }
}

/// # Safety
/// Same as [`tma_load_2d`], with a map of three dimensions.
#[track_caller]
pub unsafe fn tma_load_3d(to: *mut u8, map: *const u8, x: u32, y: u32, z: u32, barrier: *mut u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { load(to, map, &[x, y, z], barrier, Location::caller()) }
}

/// # Safety
/// Same as [`tma_load_2d`].
unsafe fn load(to: *mut u8, map: *const u8, coordinates: &[u32], barrier: *mut u64, at: Site) {
    // SAFETY: guaranteed by the caller.
    let (map, [x, y]) = unsafe { Map::read(map, at) }.matrix(coordinates, at);
    let address = to.addr();
    let to = shared_offset(to, map.bytes(), map.alignment(), at, "TMA load");
    for (_, columns, from) in map.inside(x, y) {
        check(Kind::Read, from, columns.len() * map.element_bytes(), map.element_bytes(), at);
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
        let mut bytes = [0; MAX_ROW_BYTES];
        let part = &mut bytes[columns.start * map.element_bytes()..columns.end * map.element_bytes()];
        let from = ptr::with_exposed_provenance::<u8>(from);
        // SAFETY: the caller of the load guarantees that the tensor is valid for reads, and `inside` stays within it.
        unsafe { ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
        for (chunk, bytes) in bytes[..map.box_row_bytes()].chunks(16).enumerate() {
            tile[map.swizzled(row, chunk * 16)..][..16].copy_from_slice(bytes);
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
    // SAFETY: guaranteed by the caller.
    unsafe { store(map, &[x, y], from, Location::caller()) }
}

/// # Safety
/// Same as [`tma_store_2d`], with a map of three dimensions.
#[track_caller]
pub unsafe fn tma_store_3d(map: *const u8, x: u32, y: u32, z: u32, from: *const u8) {
    // SAFETY: guaranteed by the caller.
    unsafe { store(map, &[x, y, z], from, Location::caller()) }
}

/// # Safety
/// Same as [`tma_store_2d`].
unsafe fn store(map: *const u8, coordinates: &[u32], from: *const u8, at: Site) {
    // SAFETY: guaranteed by the caller.
    let (map, [x, y]) = unsafe { Map::read(map, at) }.matrix(coordinates, at);
    check(Kind::AsyncRead, from.addr(), map.bytes(), 16, at);
    let from = shared_offset(from, map.bytes(), map.alignment(), at, "TMA store");
    with(|block| {
        let tile = block.shared()[from..from + map.bytes()].to_vec();
        let store = Store { map, x, y, from, tile, group: None, at };
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
            let size = map.element_bytes();
            check(Kind::Write, to, columns.len() * size, size, at);
            let to = ptr::with_exposed_provenance_mut::<u8>(to);
            for (i, byte) in (columns.start * size..columns.end * size).enumerate() {
                // SAFETY: the caller of the store guarantees that the tensor is valid for writes, and `inside` stays
                // within it.
                unsafe { to.add(i).write(tile[map.swizzled(row, byte)]) };
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
