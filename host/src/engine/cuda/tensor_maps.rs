//! Tensor maps on the device, made once for each tensor and shape.

use crate::engine::Result;
use anyhow::ensure;
use cuda_driver::{DeviceMemory, ElementType, Gpu, L2Promotion, Stream, Swizzle};
use cuda_std::Global;
use cuda_std::hopper::TensorMap;
use std::collections::HashMap;

/// Maps at a time. A run has two for each layer and shape of a batch.
const CAPACITY: usize = 4096;

/// A map of (matrices, rows, columns) of bf16 at a device address, for boxes of `tile` rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub tensor: u64,
    pub extents: [usize; 3],
    pub tile: (u32, u32),
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
        let Key { tensor, extents: [matrices, rows, columns], tile: (tile_rows, tile_columns) } = key;
        ensure!(columns.is_multiple_of(8), "rows of {columns} bf16 are no multiple of 16 bytes, which TMA copies");
        let map = cuda_driver::TensorMap::tiled(
            ElementType::Bf16,
            tensor,
            [columns, rows, matrices].map(|extent| extent as u64),
            &[2 * columns as u64, 2 * (rows * columns) as u64],
            [tile_columns, tile_rows, 1],
            Swizzle::B128,
            L2Promotion::B256,
        )?;
        let place = self.places.len();
        let at = self.memory.address() + (place * size_of::<TensorMap>()) as u64;
        // SAFETY: place < CAPACITY, so the map's bytes lie in `memory`, which no kernel queued before reads there.
        unsafe { stream.upload(at, bytemuck::bytes_of(map.as_words())) }?;
        self.places.insert(key, place);
        Ok(place)
    }
}
