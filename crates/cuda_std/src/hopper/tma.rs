//! The tensor memory accelerator: copies of boxes between a tensor in global memory and tiles in shared memory, issued by
//! one thread. Boxes that reach past the tensor's edge read zeros there and write nothing.

use super::{MBarrier, SwizzledTile};
use crate::backend;
use crate::element::bf16;
use crate::global::Global;

/// A tensor in global memory as TMA sees it (base, extents, strides, box, swizzle), made on the host with
/// `cuTensorMapEncodeTiled` and kept in global memory: 128 opaque bytes, 64-byte aligned.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Zeroable, bytemuck::Pod))]
pub struct TensorMap(pub [u64; 16]);

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// A map for emulated kernels: `rows` x `columns` of bf16 at `base`, rows `row_bytes` apart, boxes of `box_rows` x
    /// `box_columns`, 128-byte swizzle. What TMA cannot do is refused as the driver refuses it.
    ///
    /// # Panics
    /// If the base or `row_bytes` is no multiple of 16 bytes, rows overlap, or the box has more than 256 rows or other
    /// than 64 columns.
    pub fn emulated(
        base: Global<bf16>,
        rows: usize,
        columns: usize,
        row_bytes: usize,
        box_rows: u32,
        box_columns: u32,
    ) -> Self {
        Self(backend::hopper::tensor_map(
            base.0.cast(),
            None,
            rows as u64,
            columns as u64,
            row_bytes as u64,
            box_rows,
            box_columns,
        ))
    }

    /// As [`emulated`](Self::emulated), of a tensor (`matrices`, `rows`, `columns`) without gaps, for
    /// [`SwizzledTile::load_of`].
    ///
    /// # Panics
    /// As [`emulated`](Self::emulated).
    pub fn emulated_3d(
        base: Global<bf16>,
        [matrices, rows, columns]: [usize; 3],
        (box_rows, box_columns): (u32, u32),
    ) -> Self {
        Self(backend::hopper::tensor_map(
            base.0.cast(),
            Some(matrices as u64),
            rows as u64,
            columns as u64,
            (columns * size_of::<bf16>()) as u64,
            box_rows,
            box_columns,
        ))
    }
}

impl Global<TensorMap> {
    /// Fetches the descriptor ahead of its first use (`prefetch.tensormap`).
    #[inline(always)]
    #[track_caller]
    pub fn prefetch(self) {
        // SAFETY: the launch contract: a tensor map lies there.
        unsafe { backend::hopper::tma_prefetch(self.0.cast()) }
    }
}

impl<const R: usize> SwizzledTile<R> {
    /// Starts copying the box at (column `x`, row `y`), `R` rows by 64 columns, into this tile; its bytes count for
    /// `barrier` (`cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes`).
    #[inline(always)]
    #[track_caller]
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, barrier: MBarrier) {
        // SAFETY: the launch contract for the map, whose box is R x 64 of bf16 with 128-byte swizzle.
        unsafe { backend::hopper::tma_load_2d(self.pointer().cast(), map.0.cast(), x, y, barrier.pointer()) }
    }

    /// As [`load`](Self::load), of the box at (column `x`, row `y`) of matrix `z` of a map of three dimensions: rows past
    /// the end of that matrix are zeros (`cp.async.bulk.tensor.3d`).
    #[inline(always)]
    #[track_caller]
    pub fn load_of(self, map: Global<TensorMap>, x: u32, y: u32, z: u32, barrier: MBarrier) {
        // SAFETY: as in `load`.
        unsafe { backend::hopper::tma_load_3d(self.pointer().cast(), map.0.cast(), x, y, z, barrier.pointer()) }
    }

    /// As [`load`](Self::load), into the tile and barrier at the same place in every block of the cluster whose bit is set
    /// in `blocks` (`.multicast::cluster`).
    #[inline(always)]
    #[track_caller]
    pub fn load_multicast(self, map: Global<TensorMap>, x: u32, y: u32, barrier: MBarrier, blocks: u16) {
        // SAFETY: as in `load`; all blocks of a cluster have one layout.
        unsafe {
            backend::hopper::tma_load_2d_multicast(
                self.pointer().cast(),
                map.0.cast(),
                x,
                y,
                barrier.pointer(),
                blocks,
            );
        }
    }

    /// Starts copying this tile to the box at (column `x`, row `y`)
    /// (`cp.async.bulk.tensor.2d.global.shared::cta.bulk_group`).
    #[inline(always)]
    #[track_caller]
    pub fn store(self, map: Global<TensorMap>, x: u32, y: u32) {
        // SAFETY: as in `load`; nobody else writes that box.
        unsafe { backend::hopper::tma_store_2d(map.0.cast(), x, y, self.pointer().cast()) }
    }

    /// Bytes of the tile, which its load adds to the barrier.
    pub const BYTES: u32 = (R * 64 * size_of::<bf16>()) as u32;
}

/// Closes a group of this thread's stores (`cp.async.bulk.commit_group`).
#[inline(always)]
pub fn commit_stores() {
    backend::hopper::tma_commit();
}

/// Waits until all of this thread's stores have read their tiles, which may then be overwritten
/// (`cp.async.bulk.wait_group.read 0`).
#[inline(always)]
#[track_caller]
pub fn wait_stores_read() {
    backend::hopper::tma_wait_read::<0>();
}

/// As [`wait_stores_read`], of all but the `PENDING` newest groups (`cp.async.bulk.wait_group.read PENDING`).
#[inline(always)]
#[track_caller]
pub fn wait_stores_read_but<const PENDING: u32>() {
    backend::hopper::tma_wait_read::<PENDING>();
}

/// Waits until all of this thread's stores are complete (`cp.async.bulk.wait_group 0`).
#[inline(always)]
#[track_caller]
pub fn wait_stores() {
    backend::hopper::tma_wait();
}
