//! Tensor maps on the device, made once for each tensor and shape.

use crate::Result;
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

    pub fn is_full(&self) -> bool {
        self.places.len() == CAPACITY
    }

    /// Forgets all maps; nothing queued or recorded may still use them.
    pub fn clear(&mut self) {
        self.places.clear();
    }

    fn address(&self, place: usize) -> u64 {
        self.memory.address() + (place * size_of::<TensorMap>()) as u64
    }

    pub fn get(&self, key: &Key) -> Option<Global<TensorMap>> {
        self.places.get(key).map(|&place| Global::from_address(self.address(place)))
    }

    /// Makes a map that is not there yet.
    pub fn add(&mut self, stream: &Stream, key: Key) -> Result<Global<TensorMap>> {
        ensure!(!self.is_full(), "there are {CAPACITY} tensor maps already");
        let map = encode(key)?;
        let at = self.address(self.places.len());
        // SAFETY: fewer than CAPACITY places are taken, so the map's bytes lie in `memory`, which no kernel queued before
        // reads there; the bytes are not page-locked, so read before the call returns.
        unsafe { stream.upload(at, bytemuck::bytes_of(map.as_words())) }?;
        self.places.insert(key, self.places.len());
        Ok(Global::from_address(at))
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
