//! Translation of plan offsets to addresses.

use super::StorageType;
use crate::Result;
use crate::plan::HOST_OFFSET;
use crate::tensor::Tensor;
use anyhow::{bail, ensure};

/// Maps plan offsets to addresses: one region on a GPU, one for each buffer of the plan in the emulator.
#[derive(Default)]
pub struct Arena {
    /// In ascending order.
    regions: Vec<Region>,
}

struct Region {
    offset: usize,
    bytes: usize,
    base: *mut u8,
}

impl Arena {
    /// Appends the region that begins at `offset`.
    pub fn add(&mut self, offset: usize, bytes: usize, base: *mut u8) {
        self.regions.push(Region { offset, bytes, base });
    }

    /// Returns the size of the regions in the GPU's memory.
    pub fn bytes(&self) -> usize {
        self.regions.iter().filter(|region| region.offset < HOST_OFFSET).map(|region| region.bytes).sum()
    }

    /// Returns the size of the regions in the host's memory.
    pub fn host_bytes(&self) -> usize {
        self.regions.iter().map(|region| region.bytes).sum::<usize>() - self.bytes()
    }

    /// Returns the address of `tensor`, which must be of type `E`, have at least `len` elements and lie in one region.
    pub fn address<E: StorageType>(&self, name: &str, tensor: Tensor, len: usize) -> Result<*mut E> {
        let dtype = tensor.dtype;
        ensure!(dtype == E::DTYPE, "{name}: expected {}, found {}", E::DTYPE.name(), dtype.name());
        ensure!(tensor.len >= len, "{name}: expected at least {len} elements, found {}", tensor.len);
        Ok(self.bytes_of(name, tensor)?.cast())
    }

    /// Returns the address of a tensor of any type, which must lie in one region.
    pub fn bytes_of(&self, name: &str, tensor: Tensor) -> Result<*mut u8> {
        let (offset, bytes) = (tensor.offset, tensor.bytes());
        let after = self.regions.partition_point(|region| region.offset <= offset);
        let region = after.checked_sub(1).map(|i| &self.regions[i]);
        let region = region.filter(|region| offset + bytes <= region.offset + region.bytes);
        match region {
            Some(region) if offset.is_multiple_of(tensor.dtype.bytes()) => {
                Ok(region.base.wrapping_add(offset - region.offset))
            }
            _ => bail!(
                "{name} at {offset} (+{bytes} bytes) does not lie in the engine's memory of {} bytes",
                self.bytes()
            ),
        }
    }
}
