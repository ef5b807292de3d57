//! Tensor maps on the device, made once for each tensor and shape.

use crate::engine::Result;
use anyhow::ensure;
use cuda_driver::{DeviceMemory, ElementType, Gpu, L2Promotion, Stream, Swizzle};
use cuda_std::Global;
use cuda_std::hopper::TensorMap;
use std::collections::HashMap;

/// Maps at a time. A run has some fifty for each layer and shape of a batch.
const CAPACITY: usize = 16384;

/// A map of bf16 at a device address, for boxes of `tile` rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub tensor: u64,
    pub extents: Extents,
    pub tile: (u32, u32),
}

/// A matrix (rows, columns) is mapped in two dimensions, a row of them (matrices, rows, columns) in three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extents {
    Matrix([usize; 2]),
    Matrices([usize; 3]),
}

pub struct TensorMaps {
    memory: DeviceMemory,
    places: HashMap<Key, usize>,
}

impl TensorMaps {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self { memory: DeviceMemory::new(gpu, CAPACITY * size_of::<TensorMap>())?, places: HashMap::new() })
    }

    /// Forgets all maps; nothing queued may still use them.
    pub fn clear(&mut self) {
        self.places.clear();
    }

    pub fn of(&mut self, stream: &Stream, key: Key) -> Result<Global<TensorMap>> {
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None => self.add(stream, key)?,
        };
        Ok(Global::from_address(self.memory.address() + (place * size_of::<TensorMap>()) as u64))
    }

    fn add(&mut self, stream: &Stream, key: Key) -> Result<usize> {
        if self.places.len() == CAPACITY {
            stream.synchronize()?;
            self.clear();
        }
        let map = encode(key)?;
        let place = self.places.len();
        let at = self.memory.address() + (place * size_of::<TensorMap>()) as u64;
        // SAFETY: place < CAPACITY, so the map's bytes lie in `memory`, which no kernel queued before reads there.
        unsafe { stream.upload(at, bytemuck::bytes_of(map.as_words())) }?;
        self.places.insert(key, place);
        Ok(place)
    }
}

fn encode(Key { tensor, extents, tile: (tile_rows, tile_columns) }: Key) -> Result<cuda_driver::TensorMap> {
    let (Extents::Matrix([rows, columns]) | Extents::Matrices([_, rows, columns])) = extents;
    ensure!(columns.is_multiple_of(8), "rows of {columns} bf16 are no multiple of 16 bytes, which TMA copies");
    let (element, swizzle, l2) = (ElementType::Bf16, Swizzle::B128, L2Promotion::B256);
    let wide = |extent: usize| extent as u64;
    let (row, matrix) = (2 * wide(columns), 2 * wide(rows * columns));
    let map = match extents {
        Extents::Matrix(_) => {
            let (extents, tile) = ([columns, rows].map(wide), [tile_columns, tile_rows]);
            cuda_driver::TensorMap::tiled(element, tensor, extents, &[row], tile, swizzle, l2)
        }
        Extents::Matrices([matrices, ..]) => {
            let (extents, tile) = ([columns, rows, matrices].map(wide), [tile_columns, tile_rows, 1]);
            cuda_driver::TensorMap::tiled(element, tensor, extents, &[row, matrix], tile, swizzle, l2)
        }
    };
    Ok(map?)
}
