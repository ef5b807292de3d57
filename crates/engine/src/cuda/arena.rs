//! Where an engine's memory lies.

use super::Stored;
use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use cuda_std::bf16;

/// From offsets in the plan to addresses on the device or (emulated) on the host: one part on a GPU, one for each buffer of
/// the plan in the emulator.
#[derive(Default)]
pub struct Arena {
    /// In ascending order.
    parts: Vec<Part>,
}

struct Part {
    offset: usize,
    bytes: usize,
    base: *mut u8,
}

impl Arena {
    /// Adds the part that begins at `offset`, after all there are.
    pub fn add(&mut self, offset: usize, bytes: usize, base: *mut u8) {
        self.parts.push(Part { offset, bytes, base });
    }

    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Checks that `tensor` is of type `E`, has at least `len` elements and lies in one part.
    pub fn address<E: Stored>(&self, name: &str, tensor: Tensor, len: usize) -> Result<*mut E> {
        let Tensor { offset, dtype, .. } = tensor;
        ensure!(dtype == E::DTYPE, "{name} is {}, this operation takes {}", dtype.name(), E::DTYPE.name());
        ensure!(tensor.len >= len, "{name} has {} elements, this operation needs {len}", tensor.len);
        let after = self.parts.partition_point(|part| part.offset <= offset);
        let part = after.checked_sub(1).map(|i| &self.parts[i]);
        let part = part.filter(|part| offset + tensor.bytes() <= part.offset + part.bytes);
        match part {
            Some(part) if offset.is_multiple_of(E::DTYPE.bytes()) => {
                Ok(part.base.wrapping_add(offset - part.offset).cast())
            }
            _ => bail!(
                "{name} at {offset} (+{} bytes) does not lie in the engine's memory of {} bytes",
                tensor.bytes(),
                self.bytes()
            ),
        }
    }

    /// Where a tensor of whichever type begins; all of it lies in one part.
    pub fn bytes_of(&self, name: &str, tensor: Tensor) -> Result<*mut u8> {
        match tensor.dtype {
            DType::F32 => Ok(self.address::<f32>(name, tensor, tensor.len)?.cast()),
            DType::Bf16 => Ok(self.address::<bf16>(name, tensor, tensor.len)?.cast()),
            DType::I32 => Ok(self.address::<i32>(name, tensor, tensor.len)?.cast()),
        }
    }
}
