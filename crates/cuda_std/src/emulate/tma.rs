//! TMA: copies between boxes of a tensor in global memory and tiles in shared memory: rows of 128 bytes with the 128-byte
//! swizzle, or of 64 bytes with the 64-byte swizzle.

use super::access::{check, shared_offset};
use super::async_copy::{Load, Source, Store, Target};
use super::block::{Block, fail, with};
use super::checker::Kind;
use super::mbarrier::{complete_bytes, locate_fenced};
use super::report::{Fault, Line, Site};
use super::tensor_map::{MAGIC, Map};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{mem, ptr};

/// Bytes of the longest row of a box.
const MAX_ROW_BYTES: usize = 128;
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
            let message = format!(
                "invalid operand: the tensor map was not encoded by a TensorMap::emulated… function ({})",
                Line(at)
            );
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
    push_load(Source::Box { map, x, y }, to, barrier, at);
}

/// Starts a load. Until it completes, its target contains NaN.
fn push_load(source: Source, to: usize, barrier: usize, at: Site) {
    with(|block| {
        let clock = block.release_of_thread();
        block.shared()[to..to + source.bytes()].fill(0xff);
        block.hopper.loads.push_back(Load { source, to, barrier, clock, at });
    });
}

/// # Safety
/// `from` must be valid for reads of `bytes` bytes until the load has completed, `to` memory of that size in shared memory, and `barrier`
/// an initialized mbarrier.
#[track_caller]
pub unsafe fn bulk_load(to: *mut u8, from: *const u8, bytes: u32, barrier: *mut u64) {
    let (at, bytes) = (Location::caller(), bytes as usize);
    check_bulk_bytes(bytes, "load", at);
    let address = to.addr();
    let to = shared_offset(to, bytes, 16, at, "bulk load");
    check(Kind::Read, from.addr(), bytes, 16, at);
    let barrier = locate_fenced(barrier, at);
    check(Kind::BulkWrite, address, bytes, 16, at);
    push_load(Source::Bulk { from: from.expose_provenance(), bytes }, to, barrier, at);
}

/// # Safety
/// Same as [`bulk_load`].
#[track_caller]
pub unsafe fn bulk_load_with(to: *mut u8, from: *const u8, bytes: u32, barrier: *mut u64, _policy: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { bulk_load(to, from, bytes, barrier) }
}

/// Stops the kernel unless a bulk copy may have this size.
fn check_bulk_bytes(bytes: usize, what: &str, at: Site) {
    if bytes == 0 || !bytes.is_multiple_of(16) {
        let message =
            format!("invalid operand: bulk {what}: expected a multiple of 16 bytes, found {bytes} ({})", Line(at));
        fail(Fault::Operand, at, None, message);
    }
}

/// Completes one pending TMA load of `block`. Returns false if there is none.
///
/// Loads complete in any order on the device. Here the oldest completes first in one block and the newest in the next,
/// so that one of the blocks reveals a thread that waits for one load and reads another.
pub fn complete_one_load(block: &mut Block) -> bool {
    let loads = &mut block.hopper.loads;
    let load = if block.index.iter().sum::<u32>().is_multiple_of(2) { loads.pop_front() } else { loads.pop_back() };
    let Some(Load { source, to, barrier, clock, .. }) = load else { return false };
    let bytes = source.bytes();
    let tile = &mut block.shared()[to..to + bytes];
    match source {
        Source::Box { map, x, y } => load_box(map, x, y, tile),
        Source::Bulk { from, bytes } => {
            let from = ptr::with_exposed_provenance::<u8>(from);
            // SAFETY: the caller of the load guarantees that the source is valid for reads.
            unsafe { ptr::copy_nonoverlapping(from, tile.as_mut_ptr(), bytes) };
        }
    }
    let start = block.shared_base().addr() + to;
    block.bulk_copy_completed(start, bytes);
    complete_bytes(block, barrier, bytes, &clock);
    true
}

fn load_box(map: Map, x: i32, y: i32, tile: &mut [u8]) {
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
    push_store(Target::Box { map, x, y }, from, map.bytes(), at);
}

fn push_store(target: Target, from: usize, bytes: usize, at: Site) {
    with(|block| {
        let tile = block.shared()[from..from + bytes].to_vec();
        let store = Store { target, from, tile, group: None, read: false, at };
        block.hopper.stores.entry(block.current).or_default().push(store);
    });
}

/// # Safety
/// `to` must be valid for writes of `bytes` bytes until the store is waited for or, after a wait for its read, until the
/// block ends.
#[track_caller]
pub unsafe fn bulk_store(to: *mut u8, from: *const u8, bytes: u32) {
    bulk(to, from, bytes as usize, false, Location::caller());
}

/// # Safety
/// Same as [`bulk_store`], for f32. Concurrent accesses must be additions.
#[track_caller]
pub unsafe fn bulk_add_f32(to: *mut u8, from: *const u8, bytes: u32) {
    bulk(to, from, bytes as usize, true, Location::caller());
}

fn bulk(to: *mut u8, from: *const u8, bytes: usize, add: bool, at: Site) {
    check_bulk_bytes(bytes, "store", at);
    check(Kind::AsyncRead, from.addr(), bytes, 16, at);
    let from = shared_offset(from, bytes, 16, at, "bulk store");
    check(if add { Kind::BulkAdd } else { Kind::BulkStore }, to.addr(), bytes, 16, at);
    push_store(Target::Bulk { to, add }, from, bytes, at);
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

/// Waits until this thread's committed stores, except those of the newest `PENDING` groups, have read their tiles.
/// Executes stores of boxes. Bulk stores execute as late as possible: at the wait for their completion, or when the block
/// ends.
#[track_caller]
pub fn tma_wait_read<const PENDING: u32>() {
    wait_for_stores(PENDING as usize, false, Location::caller());
}

/// Executes all committed stores of this thread.
#[track_caller]
pub fn tma_wait() {
    wait_for_stores(0, true, Location::caller());
}

fn wait_for_stores(pending: usize, complete: bool, wait: Site) {
    let stores = with(|block| {
        let groups = block.hopper.store_groups.get(&block.current).copied().unwrap_or_default();
        let done = groups.saturating_sub(pending);
        let mine = block.hopper.stores.entry(block.current).or_default();
        let count = mine.partition_point(|store| store.group.is_some_and(|group| group < done));
        mine.drain(..count).collect::<Vec<_>>()
    });
    let mut kept = Vec::new();
    for mut store in stores {
        let Store { target, from, ref tile, at, .. } = store;
        if !store.read && !with(|block| block.shared()[from..from + tile.len()] == *tile) {
            let message = format!(
                "asynchronous copy in flight: the tile at shared memory + {from} was overwritten between its TMA store \
                 ({}) and the wait for the store ({})",
                Line(at),
                Line(wait)
            );
            fail(Fault::AsyncCopy, at, Some(wait), message);
        }
        if !store.read {
            // The store may have read the tile at any time until now.
            let tile_address = with(|block| block.shared()[from..].as_ptr().addr());
            check(Kind::AsyncRead, tile_address, tile.len(), 1, at);
        }
        match target {
            Target::Box { map, x, y } => store_box(map, x, y, tile, at),
            Target::Bulk { .. } if complete => with(|block| block.complete_bulk_store(block.current, &store)),
            Target::Bulk { .. } => {
                store.read = true;
                kept.push(store);
            }
        }
    }
    with(|block| {
        let mine = block.hopper.stores.entry(block.current).or_default();
        mine.splice(..0, kept);
    });
}

fn store_box(map: Map, x: i32, y: i32, tile: &[u8], at: Site) {
    let size = map.element_bytes();
    for (row, columns, to) in map.inside(x, y) {
        check(Kind::Write, to, columns.len() * size, size, at);
        let to = ptr::with_exposed_provenance_mut::<u8>(to);
        for (i, byte) in (columns.start * size..columns.end * size).enumerate() {
            // SAFETY: the caller of the store guarantees that the tensor is valid for writes, and `inside` stays within
            // it.
            unsafe { to.add(i).write(tile[map.swizzled(row, byte)]) };
        }
    }
}

/// Executes the bulk stores of `block`, which has ended, that have been waited for until they were read.
pub fn finish_read_stores(block: &mut Block) {
    for (thread, stores) in mem::take(&mut block.hopper.stores) {
        let (read, others): (Vec<_>, Vec<_>) = stores.into_iter().partition(|store: &Store| store.read);
        for store in read {
            block.complete_bulk_store(thread, &store);
        }
        block.hopper.stores.insert(thread, others);
    }
}

impl Block {
    /// Executes a bulk store of `thread`.
    fn complete_bulk_store(&mut self, thread: usize, store: &Store) {
        let Target::Bulk { to, add } = store.target else { return };
        for (i, word) in store.tile.chunks_exact(4).enumerate() {
            let value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            // SAFETY: the caller of the store guarantees that the memory is valid for writes, and accesses of other blocks
            // are atomic additions.
            let word = unsafe { AtomicU32::from_ptr(to.cast::<u32>().add(i)) };
            let old = f32::from_bits(word.load(Ordering::Relaxed));
            word.store(if add { (old + f32::from_bits(value)).to_bits() } else { value }, Ordering::Relaxed);
        }
        if let Some(checker) = &mut self.checker {
            checker.async_copy_completed(thread, to.addr(), store.tile.len());
        }
    }
}
