//! The tensor memory accelerator (TMA): asynchronous copies of boxes between a tensor in global memory and tiles in
//! shared memory, issued by one thread. Outside the tensor, loads read zeros and stores write nothing.

use super::{MBarrier, NarrowTile, SwizzledTile};
use crate::backend;
use crate::cache::CachePolicy;
use crate::element::{Element, bf16};
use crate::global::{Global, GlobalMut};
use crate::shared::SharedArray;

/// A TMA descriptor of a tensor in global memory (base, extents, strides, box, swizzle): 128 opaque bytes, aligned to
/// 64 bytes. The host encodes it with `cuTensorMapEncodeTiled` and stores it in global memory.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Zeroable, bytemuck::Pod))]
pub struct TensorMap(
    /// The opaque descriptor.
    pub [u64; 16],
);

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// Creates a map for emulated kernels: a tensor of `rows` x `columns` at `base` with a row stride of `row_bytes`,
    /// boxes of `box_rows` x `box_columns`, and the swizzle of a box row: 128 bytes ([`SwizzledTile`]) or 64 bytes
    /// ([`NarrowTile`]), which is 64 or 32 columns of bf16. Validates the parameters like the driver.
    ///
    /// # Panics
    /// If the base or `row_bytes` is not a multiple of 16 bytes, rows overlap, or the box does not have 1 to 256 rows
    /// of 64 or 128 bytes.
    pub fn emulated<T: Element>(
        base: Global<T>,
        rows: usize,
        columns: usize,
        row_bytes: usize,
        box_rows: u32,
        box_columns: u32,
    ) -> Self {
        let matrix = [rows, columns].map(|extent| extent as u64);
        Self(backend::hopper::tensor_map(base.0, matrix, row_bytes as u64, None, [box_rows, box_columns]))
    }

    /// Creates a map for emulated kernels of a tensor at `base`, with boxes of `box_rows` x `box_columns`.
    ///
    /// # Panics
    /// See [`emulated`](Self::emulated).
    pub fn emulated_tensor<T: Element>(base: Global<T>, extents: Extents, (box_rows, box_columns): (u32, u32)) -> Self {
        let (rows, columns, row, outer) = match extents {
            Extents::Matrix([rows, columns]) => (rows, columns, columns, None),
            Extents::Matrices([matrices, rows, columns]) => (rows, columns, columns, Some([matrices, rows * columns])),
            Extents::Batch([matrices, rows, columns], stride) => (rows, columns, columns, Some([matrices, stride])),
            Extents::Interleaved([rows, matrices, columns]) => {
                (rows, columns, matrices * columns, Some([matrices, columns]))
            }
        };
        let wide = |extent: usize| extent as u64;
        let bytes = |elements: usize| wide(elements * size_of::<T>());
        let outer = outer.map(|[matrices, stride]| [wide(matrices), bytes(stride)]);
        let matrix = [rows, columns].map(wide);
        Self(backend::hopper::tensor_map(base.0, matrix, bytes(row), outer, [box_rows, box_columns]))
    }
}

/// Extents of a tensor with a TMA tensor map. The last dimension is contiguous.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extents {
    /// A matrix: (rows, columns). Loads and stores are at (column, row).
    Matrix([usize; 2]),
    /// A batch of matrices: (matrices, rows, columns). Boxes have rows of one matrix. Loads and stores are at (column, row, matrix).
    Matrices([usize; 3]),
    /// A batch of contiguous matrices: (matrices, rows, columns), and the elements from the start of one to that of the
    /// next. Boxes have rows of one matrix. Loads and stores are at (column, row, matrix).
    Batch([usize; 3], usize),
    /// Interleaved matrices: (rows, matrices, columns). Row r of the tensor holds row r of each matrix. Boxes have rows of
    /// one matrix. Loads and stores are at (column, matrix, row).
    Interleaved([usize; 3]),
}

impl Global<TensorMap> {
    /// Prefetches the descriptor (`prefetch.tensormap`).
    #[inline(always)]
    #[track_caller]
    pub fn prefetch(self) {
        // SAFETY: the launch contract guarantees a tensor map at this address.
        unsafe { backend::hopper::tma_prefetch(self.0.cast()) }
    }
}

impl<const R: usize> SwizzledTile<R> {
    /// Starts a copy of the box at column `x` and row `y`, `R` rows by 128 bytes, into this tile. Its bytes count
    /// toward the phase of `barrier` (`cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes`).
    #[inline(always)]
    #[track_caller]
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, barrier: MBarrier) {
        // SAFETY: the launch contract guarantees a map with a box of R rows of 128 bytes and the 128-byte swizzle.
        unsafe { backend::hopper::tma_load_2d(self.pointer().cast(), map.0.cast(), x, y, barrier.pointer()) }
    }

    /// Starts a copy of the box at column `x` and row `y` of matrix `z` of a three-dimensional map
    /// (`cp.async.bulk.tensor.3d`). Rows past the end of that matrix are zeros. See [`load`](Self::load).
    #[inline(always)]
    #[track_caller]
    pub fn load_3d(self, map: Global<TensorMap>, x: u32, y: u32, z: u32, barrier: MBarrier) {
        // SAFETY: see `load`.
        unsafe { backend::hopper::tma_load_3d(self.pointer().cast(), map.0.cast(), x, y, z, barrier.pointer()) }
    }

    /// Starts a copy of this tile to the box at column `x` and row `y`
    /// (`cp.async.bulk.tensor.2d.global.shared::cta.bulk_group`).
    #[inline(always)]
    #[track_caller]
    pub fn store(self, map: Global<TensorMap>, x: u32, y: u32) {
        // SAFETY: see `load`; no other thread writes this box.
        unsafe { backend::hopper::tma_store_2d(map.0.cast(), x, y, self.pointer().cast()) }
    }

    /// Starts a copy of this tile to the box at column `x` and row `y` of matrix `z` of a three-dimensional map
    /// (`cp.async.bulk.tensor.3d.global.shared::cta.bulk_group`). Rows past the end of that matrix are not written.
    #[inline(always)]
    #[track_caller]
    pub fn store_3d(self, map: Global<TensorMap>, x: u32, y: u32, z: u32) {
        // SAFETY: see `load_3d`; no other thread writes this box.
        unsafe { backend::hopper::tma_store_3d(map.0.cast(), x, y, z, self.pointer().cast()) }
    }

    /// Size of the tile in bytes, which its load adds to the mbarrier.
    pub const BYTES: u32 = (R * 64 * size_of::<bf16>()) as u32;
}

impl<const R: usize> NarrowTile<R> {
    /// Starts a copy of `R` rows by 32 columns from column `x`, matrix `y` and row `z` of an interleaved map into this
    /// tile (`cp.async.bulk.tensor.3d`). See [`SwizzledTile::load`].
    #[inline(always)]
    #[track_caller]
    pub fn load_interleaved(self, map: Global<TensorMap>, x: u32, y: u32, z: u32, barrier: MBarrier) {
        // SAFETY: the launch contract guarantees a map with a box of R x 1 x 32 bf16 and the 64-byte swizzle.
        unsafe { backend::hopper::tma_load_3d(self.pointer().cast(), map.0.cast(), x, y, z, barrier.pointer()) }
    }

    /// Starts a copy of this tile to the box at column `x` and row `y`. See [`SwizzledTile::store`].
    #[inline(always)]
    #[track_caller]
    pub fn store(self, map: Global<TensorMap>, x: u32, y: u32) {
        // SAFETY: as in `load_interleaved`, for a map of two dimensions; no other thread writes this box.
        unsafe { backend::hopper::tma_store_2d(map.0.cast(), x, y, self.pointer().cast()) }
    }

    /// Starts a copy of this tile to column `x`, matrix `y` and row `z` of an interleaved map
    /// (`cp.async.bulk.tensor.3d.global.shared::cta.bulk_group`).
    #[inline(always)]
    #[track_caller]
    pub fn store_interleaved(self, map: Global<TensorMap>, x: u32, y: u32, z: u32) {
        // SAFETY: see `load_interleaved`; no other thread writes this box.
        unsafe { backend::hopper::tma_store_3d(map.0.cast(), x, y, z, self.pointer().cast()) }
    }

    /// Size of the tile in bytes, which its load adds to the mbarrier.
    pub const BYTES: u32 = (R * 32 * size_of::<bf16>()) as u32;
}

/// Bulk loads of contiguous memory. `i`, `j` and `count` must be multiples of `T::PACKET` elements (16 bytes).
impl<T: Element> SharedArray<T> {
    /// Starts a copy of elements `j` .. `j` + `count` of `from` to element `i` and those after it. Its bytes count toward the phase of
    /// `barrier` (`cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`).
    #[inline(always)]
    #[track_caller]
    pub fn load_bulk(self, i: usize, count: u32, from: Global<T>, j: usize, barrier: MBarrier) {
        let (to, bytes) = (self.elements(i, count as usize), count * size_of::<T>() as u32);
        // SAFETY: the launch provides the bytes that `Layout` reserved, and the launch contract covers `from`.
        unsafe { backend::hopper::bulk_load(to.cast_mut().cast(), from.skip(j).0.cast(), bytes, barrier.pointer()) }
    }

    /// Does the same with an L2 cache policy.
    #[inline(always)]
    #[track_caller]
    pub fn load_bulk_with(
        self,
        i: usize,
        count: u32,
        from: Global<T>,
        j: usize,
        barrier: MBarrier,
        policy: CachePolicy,
    ) {
        let (to, bytes) = (self.elements(i, count as usize), count * size_of::<T>() as u32);
        let (to, from) = (to.cast_mut().cast(), from.skip(j).0.cast());
        // SAFETY: see `load_bulk`.
        unsafe { backend::hopper::bulk_load_with(to, from, bytes, barrier.pointer(), policy.0) }
    }
}

/// Bulk stores of contiguous memory. `i`, `j` and `count` must be multiples of 4 elements (16 bytes).
impl SharedArray<f32> {
    /// Starts a copy of elements `i` .. `i` + `count` to element `j` of `to` and those after it
    /// (`cp.async.bulk.global.shared::cta.bulk_group`).
    #[inline(always)]
    #[track_caller]
    pub fn store_bulk(self, i: usize, count: u32, to: GlobalMut<f32>, j: usize) {
        // SAFETY: the launch provides the bytes that `Layout` reserved, and the launch contract covers `to`.
        unsafe { backend::hopper::bulk_store(to.skip(j).0.cast(), self.elements(i, count as usize).cast(), 4 * count) }
    }

    /// Starts the addition of elements `i` .. `i` + `count` to element `j` of `to` and those after it
    /// (`cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32`).
    ///
    /// Each addition is atomic. The result is deterministic only if the additions to an element have a fixed order: each
    /// must [complete](wait_stores) before the next one starts.
    #[inline(always)]
    #[track_caller]
    pub fn add_bulk(self, i: usize, count: u32, to: GlobalMut<f32>, j: usize) {
        // SAFETY: see `store_bulk`.
        unsafe {
            backend::hopper::bulk_add_f32(to.skip(j).0.cast(), self.elements(i, count as usize).cast(), 4 * count);
        }
    }
}

/// Commits this thread's stores since the last commit as a group (`cp.async.bulk.commit_group`).
#[inline(always)]
pub fn commit_stores() {
    backend::hopper::tma_commit();
}

/// Waits until all of this thread's stores have read their tiles, so that the tiles can be overwritten
/// (`cp.async.bulk.wait_group.read 0`).
#[inline(always)]
#[track_caller]
pub fn wait_stores_read() {
    backend::hopper::tma_wait_read::<0>();
}

/// Waits until all but the `PENDING` newest groups of this thread's stores have read their tiles
/// (`cp.async.bulk.wait_group.read PENDING`).
#[inline(always)]
#[track_caller]
pub fn wait_stores_read_all_but<const PENDING: u32>() {
    backend::hopper::tma_wait_read::<PENDING>();
}

/// Waits until all of this thread's stores have completed (`cp.async.bulk.wait_group 0`).
#[inline(always)]
#[track_caller]
pub fn wait_stores() {
    backend::hopper::tma_wait();
}
