//! TMA tensor maps in device memory, created once for each tensor and shape.

use crate::Result;
use crate::tensor::DType;
use anyhow::ensure;
use cuda_driver::{DeviceMemory, ElementType, Gpu, L2Promotion, Stream, Swizzle};
use cuda_std::Global;
pub use cuda_std::hopper::Extents;
use cuda_std::hopper::TensorMap;
use std::collections::HashMap;

/// Maximum number of maps. A run needs about fifty for each layer and batch shape.
const CAPACITY: usize = 16384;

/// Identifies a map: a tensor in bf16 or FP8 at a device address, and the rows and columns of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub tensor: u64,
    pub dtype: DType,
    pub extents: Extents,
    pub tile: (u32, u32),
}

pub struct TensorMaps {
    memory: DeviceMemory,
    slots: HashMap<Key, usize>,
}

impl TensorMaps {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self { memory: DeviceMemory::new(gpu, CAPACITY * size_of::<TensorMap>())?, slots: HashMap::new() })
    }

    pub fn is_full(&self) -> bool {
        self.slots.len() == CAPACITY
    }

    /// Drops all maps. No pending launch or captured graph may still use them.
    pub fn clear(&mut self) {
        self.slots.clear();
    }

    fn address(&self, slot: usize) -> u64 {
        self.memory.address() + (slot * size_of::<TensorMap>()) as u64
    }

    pub fn get(&self, key: &Key) -> Option<Global<TensorMap>> {
        self.slots.get(key).map(|&slot| Global::from_address(self.address(slot)))
    }

    /// Creates a map that does not exist yet.
    pub fn add(&mut self, stream: &Stream, key: Key) -> Result<Global<TensorMap>> {
        ensure!(!self.is_full(), "all {CAPACITY} tensor maps are in use");
        let map = encode(key)?;
        let at = self.address(self.slots.len());
        // SAFETY: fewer than CAPACITY slots are in use, so the map's bytes lie in `memory`, where no earlier kernel reads them; the
        // driver reads pageable memory before the call returns.
        unsafe { stream.upload(at, bytemuck::bytes_of(map.as_words())) }?;
        self.slots.insert(key, self.slots.len());
        Ok(Global::from_address(at))
    }
}

fn encode(Key { tensor, dtype, extents, tile: (tile_rows, tile_columns) }: Key) -> Result<cuda_driver::TensorMap> {
    let (Extents::Matrix([rows, columns])
    | Extents::Matrices([_, rows, columns])
    | Extents::Batch([_, rows, columns], _)
    | Extents::Interleaved([rows, _, columns])) = extents;
    let bytes = dtype.bytes();
    ensure!(
        (bytes * columns).is_multiple_of(16),
        "TMA: expected rows of a multiple of 16 bytes, found {columns} {}",
        dtype.name()
    );
    // The swizzle spans a row of the box.
    let swizzle = if bytes * tile_columns as usize == 64 { Swizzle::B64 } else { Swizzle::B128 };
    let element = if dtype == DType::Fp8 { ElementType::U8 } else { ElementType::Bf16 };
    let l2 = L2Promotion::B256;
    let wide = |extent: usize| extent as u64;
    let (row, matrix) = (wide(bytes * columns), wide(bytes * rows * columns));
    let map = match extents {
        Extents::Matrix(_) => {
            let (extents, tile) = ([columns, rows].map(wide), [tile_columns, tile_rows]);
            cuda_driver::TensorMap::tiled(element, tensor, extents, &[row], tile, swizzle, l2)
        }
        Extents::Matrices([matrices, ..]) => {
            let (extents, tile) = ([columns, rows, matrices].map(wide), [tile_columns, tile_rows, 1]);
            cuda_driver::TensorMap::tiled(element, tensor, extents, &[row, matrix], tile, swizzle, l2)
        }
        Extents::Batch([matrices, ..], stride) => {
            let (extents, tile) = ([columns, rows, matrices].map(wide), [tile_columns, tile_rows, 1]);
            let strides = [row, wide(bytes * stride)];
            cuda_driver::TensorMap::tiled(element, tensor, extents, &strides, tile, swizzle, l2)
        }
        Extents::Interleaved([_, matrices, _]) => {
            let (extents, tile) = ([columns, matrices, rows].map(wide), [tile_columns, 1, tile_rows]);
            let strides = [row, row * wide(matrices)];
            cuda_driver::TensorMap::tiled(element, tensor, extents, &strides, tile, swizzle, l2)
        }
    };
    Ok(map?)
}
