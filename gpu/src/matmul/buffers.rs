//! The buffers in shared memory through which epilogues load aux and store their outputs by TMA.
//!
//! A consumer processes its rows of a tile in subtiles of 64 x 64. Several subtiles have buffers at a time, each in a slot.

use super::shared::SharedStorage;
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use core::marker::PhantomData;
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap, WARPGROUP, is_warpgroup_leader, tma};
use cuda_std::{Global, device, thread};

/// The contents of a subtile's buffers.
pub trait Buffering: 'static {
    /// True if aux is loaded.
    const AUX: bool;
    /// True if a subtile has two buffers instead of one.
    const TWO_BUFFERS: bool;
    /// True if the tensor map of aux has a third dimension for the matrices of a batch.
    const BATCHED: bool;

    /// Buffers of a subtile.
    const PER_SUBTILE: u32 = 1 + Self::TWO_BUFFERS as u32;
}

/// Subtiles of a consumer's rows of a tile.
const fn subtiles<T: Tile>() -> u32 {
    T::CONSUMER_M / EPILOGUE_TILE * (T::TILE_N / EPILOGUE_TILE)
}

/// Subtiles that have buffers at a time.
///
/// If possible, this number divides the number of subtiles of a tile: each subtile then has the same slot in every
/// tile.
const fn slots<B: Buffering, T: Tile>() -> u32 {
    let fit = T::EPILOGUE_BUFFERS / B::PER_SUBTILE;
    let most = if fit < subtiles::<T>() { fit } else { subtiles::<T>() };
    let whole = subtiles::<T>().is_multiple_of(most);
    // One slot would make each subtile wait for the stores of the one before.
    if most > 2 && !whole && subtiles::<T>().is_multiple_of(most - 1) { most - 1 } else { most }
}

/// Returns the slot of a subtile, and how many subtiles used that slot before. Each of the `tiles` tiles before had
/// `subtiles` subtiles, which use `slots` slots in turn.
#[inline(always)]
pub fn slot(subtile: u32, tiles: u32, subtiles: u32, slots: u32) -> (u32, u32) {
    if subtiles.is_multiple_of(slots) {
        (subtile % slots, tiles * (subtiles / slots) + subtile / slots)
    } else {
        let before = tiles * subtiles + subtile;
        (before % slots, before / slots)
    }
}

/// The buffers of a consumer.
pub struct SubtileBuffers<B, T> {
    shared: SharedStorage,
    aux: Global<TensorMap>,
    consumer: u32,
    /// Tiles stored so far.
    pub stored_tiles: u32,
    kind: PhantomData<(B, T)>,
}

#[device]
impl<B: Buffering, T: Tile> SubtileBuffers<B, T> {
    pub fn new(shared: SharedStorage, aux: Global<TensorMap>, consumer: u32) -> Self {
        Self { shared, aux, consumer, stored_tiles: 0, kind: PhantomData }
    }

    /// Starts the loads of aux for the first subtiles of `tile`.
    pub fn prefetch(&self, tile: WorkTile) {
        if B::AUX && is_warpgroup_leader() {
            tma::wait_stores_read();
            for subtile in 0..slots::<B, T>() {
                self.load_aux(subtile, tile);
            }
        }
    }

    /// Waits until all stores have completed.
    pub fn finish() {
        if is_warpgroup_leader() {
            tma::wait_stores();
        }
    }

    /// Synchronizes the warps of this consumer.
    pub fn sync(&self) {
        thread::sync_named(1 + self.consumer, WARPGROUP);
    }

    /// Returns the slot of a subtile of the current tile, and how many subtiles used that slot before.
    fn slot(&self, subtile: u32) -> (u32, u32) {
        slot(subtile, self.stored_tiles, subtiles::<T>(), slots::<B, T>())
    }

    /// Returns the first buffer of a slot.
    pub fn buffer(&self, slot: u32) -> SwizzledTile<64> {
        let buffer = self.consumer * T::EPILOGUE_BUFFERS + slot * B::PER_SUBTILE;
        self.shared.pool.rows::<64>(T::PIPELINE_ROWS + buffer * EPILOGUE_TILE)
    }

    /// Returns the barrier of the load of aux into a slot.
    fn aux_full(&self, slot: u32) -> MBarrier {
        self.shared.aux_full.at(self.consumer * T::EPILOGUE_BUFFERS + slot)
    }

    /// Waits until the buffers of a subtile may be used: until aux is in the first of them, or stores have read them.
    /// Returns the first.
    pub fn acquire(&self, subtile: u32) -> SwizzledTile<64> {
        let (slot, uses) = self.slot(subtile);
        let first = self.buffer(slot);
        if B::AUX {
            self.aux_full(slot).wait(uses % 2);
        } else {
            if is_warpgroup_leader() {
                Self::wait_for_free_slot();
            }
            self.sync();
        }
        first
    }

    fn load_aux(&self, subtile: u32, WorkTile { matrix, row, column, .. }: WorkTile) {
        let ((slot, _), halves) = (self.slot(subtile), T::CONSUMER_M / EPILOGUE_TILE);
        let full = self.aux_full(slot);
        full.arrive_expect_tx(SwizzledTile::<64>::BYTES);
        let (x, y) = (column + subtile / halves * EPILOGUE_TILE, row + subtile % halves * EPILOGUE_TILE);
        if B::BATCHED {
            self.buffer(slot).load_3d(self.aux, x, y, matrix, full);
        } else {
            self.buffer(slot).load(self.aux, x, y, full);
        }
    }

    /// Starts the next load of aux into the slot of the subtile before `subtile`. All stores but the `PENDING` newest
    /// must have read their buffers before.
    pub fn load_next_aux<const PENDING: u32>(&self, subtile: u32, tile: WorkTile) {
        if B::AUX && subtile > 0 && subtile - 1 + slots::<B, T>() < subtiles::<T>() && is_warpgroup_leader() {
            tma::wait_stores_read_all_but::<PENDING>();
            self.load_aux(subtile - 1 + slots::<B, T>(), tile);
        }
    }

    /// Waits until the TMA stores have read the buffers of the next slot.
    fn wait_for_free_slot() {
        match slots::<B, T>() {
            2 => tma::wait_stores_read_all_but::<1>(),
            3 => tma::wait_stores_read_all_but::<2>(),
            _ => tma::wait_stores_read_all_but::<3>(),
        }
    }
}
