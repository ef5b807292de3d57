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
pub struct TensorMapKey {
    pub tensor: u64,
    pub dtype: DType,
    pub extents: Extents,
    pub tile: (u32, u32),
}

pub struct TensorMaps {
    memory: DeviceMemory,
    slots: HashMap<TensorMapKey, usize>,
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

    pub fn get(&self, key: &TensorMapKey) -> Option<Global<TensorMap>> {
        self.slots.get(key).map(|&slot| Global::from_address(self.address(slot)))
    }

    /// Creates a map that does not exist yet.
    pub fn add(&mut self, stream: &Stream, key: TensorMapKey) -> Result<Global<TensorMap>> {
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

fn encode(
    TensorMapKey { tensor, dtype, extents, tile: (tile_rows, tile_columns) }: TensorMapKey,
) -> Result<cuda_driver::TensorMap> {
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
    let (extents, tile, strides) = match extents {
        Extents::Matrix(_) => {
            let (extents, tile) = ([columns, rows].map(wide), [tile_columns, tile_rows]);
            return Ok(cuda_driver::TensorMap::tiled(element, tensor, extents, &[row], tile, swizzle, l2)?);
        }
        Extents::Matrices([matrices, ..]) => ([columns, rows, matrices], [tile_columns, tile_rows, 1], [row, matrix]),
        Extents::Batch([matrices, ..], stride) => {
            ([columns, rows, matrices], [tile_columns, tile_rows, 1], [row, wide(bytes * stride)])
        }
        Extents::Interleaved([_, matrices, _]) => {
            ([columns, matrices, rows], [tile_columns, 1, tile_rows], [row, row * wide(matrices)])
        }
    };
    Ok(cuda_driver::TensorMap::tiled(element, tensor, extents.map(wide), &strides, tile, swizzle, l2)?)
}
